//! Workspace tests: the real `kv-router` program against engine-sims in this process.
//!
//! One test program, so that linking is paid for once. Every test starts its own engines and its
//! own router on free ports, waits by asking until a deadline, and may run beside all others.
#![allow(clippy::unwrap_used, clippy::panic)] // A test reports by failing.

mod api_server;
mod balance;
mod contract;
mod disaggregation;
mod events;
mod explorer;
mod failures;
mod harness;
mod kubernetes;
mod lifecycle;
mod load;
mod nats;
mod policies;
mod prompts;
mod raw_worker;
mod replicas;
mod requests;
mod rolling;
mod routing;
mod streams;
mod tenancy;
mod tokens;
