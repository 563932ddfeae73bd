//! The operator against a real API server.
//!
//! One control plane for all tests, one namespace per test, and the operator as
//! its users run it: the program, under its service account, with no more rights
//! than `rights.json` grants. Tests play kubelet, controller manager, routers and
//! people.

mod children;
mod control_plane;
mod leader;
mod observed;
mod schema;
mod workloads;
mod world;
