//! Types shared by the operator and the router.
//!
//! The two do not know each other: they meet in the router's configuration
//! file ([`config`]) and in its health report ([`health`]). This crate holds
//! types and their defaults; it reads no file and talks to nobody.

pub mod config;
pub mod health;
