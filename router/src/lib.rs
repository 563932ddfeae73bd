//! The shell around the deciding core: one request in, one target out.
//!
//! A request passes through [`prompt`] (body to token ids), [`route`] (ids to a
//! pick, by `kvrouter_core`) and [`proxy`] (bytes to the worker and back).
//! [`fleet`] knows the workers, [`feed`] brings their cache events, [`admin`]
//! answers people and probes. [`clock`] is the only file that asks for the time.

pub mod clock;
pub mod config;
pub mod feed;
pub mod prompt;
