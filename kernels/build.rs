//! Build script of the CUDA kernels.
fn main() {
    println!("cargo:rerun-if-changed=build.rs");
}
