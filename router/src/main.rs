//! The `kv-router` program.
fn main() {}
