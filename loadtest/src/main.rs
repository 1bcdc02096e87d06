//! Load generator for expertd.
fn main() {}
