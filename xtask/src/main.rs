//! Automation longer than a line.
fn main() {}
