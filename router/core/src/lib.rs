//! Everything that decides, and nothing that moves bytes.
//!
//! This crate turns facts into decisions: token ids into block hashes, engine
//! event bytes into deltas, deltas into an index of who holds which block, and
//! all of that into the choice of a target. It has no async, no I/O, no clock,
//! no environment, no randomness and no logging: `now` and seeds come in as
//! arguments, results go out as values.
//!
//! Read the modules in the order in which a request passes through them:
//! [`blocks`], [`index`], [`gather`], [`policy`], [`receipts`]; and an engine's events:
//! [`events`], [`trust`], [`index`]; [`reconcile`] compares what was predicted with
//! what engines found. [`replicas`] is what routers tell each other. [`replay`]
//! repeats decisions offline, [`json`] writes and reads what both leave behind.

pub mod blocks;
pub mod brief;
pub mod events;
pub mod gather;
pub mod ids;
pub mod index;
pub mod json;
pub mod policy;
pub mod receipts;
pub mod reconcile;
pub mod replay;
pub mod replicas;
pub mod scratch;
pub mod trust;
pub mod units;
