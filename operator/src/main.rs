//! The control plane of kvrouter.

fn main() {}
