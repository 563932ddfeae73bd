//! The `engine-sim` program.
fn main() {}
