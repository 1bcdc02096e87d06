//! Compiles the protos with protox, in pure Rust, so that the build needs no protoc.

use std::error::Error;
use std::path::PathBuf;

use prost::Message as _;

const PROTOS: [&str; 2] = ["expertd/v1/moe.proto", "expertd/v1/admin.proto"];

fn main() -> Result<(), Box<dyn Error>> {
    for proto in PROTOS {
        println!("cargo:rerun-if-changed={proto}");
    }
    let descriptors = protox::compile(PROTOS, ["."])?;
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("expertd_descriptor.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure().bytes(".expertd").compile_fds(descriptors)?;
    Ok(())
}
