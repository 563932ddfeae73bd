//! The operator against a real API server.
//!
//! One control plane for all tests, one namespace per test, and the operator as
//! its users run it: the program, under its service account, with no more rights
//! than `rights.json` grants. Tests play kubelet, controller manager, routers and
//! people.

#![allow(clippy::disallowed_methods, reason = "these tests wait in real time and read where tools are")]
#![allow(clippy::panic, reason = "a test states its expectation by failing, in its helpers too")]

mod children;
mod control_plane;
mod documented;
mod gateway;
mod leader;
mod observed;
mod schema;
mod workloads;
mod world;
