//! The demo, its load generator, and what they share with the workspace tests: an HTTP client
//! that takes times, and child processes that die with their parent.

pub mod beside;
pub mod client;
pub mod demo;
pub mod process;
pub mod sse;
