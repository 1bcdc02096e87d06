//! The expertd binary.
fn main() {}
