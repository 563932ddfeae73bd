//! How cache events reach the router.
//!
//! [`zmtp`] talks to an engine's sockets; [`engine`] turns what they send into
//! a sound stream of changes, and runs in two places: in the router ([`zmq`])
//! and beside the engine ([`bridge`]), which publishes it over NATS to routers
//! that follow it ([`nats`], [`snapshot`]). [`replicas`] shares load with other
//! routers over the same broker. [`subjects`] names what all of them use.

pub mod bridge;
pub mod engine;
pub mod nats;
pub mod replicas;
pub mod snapshot;
pub mod subjects;
pub mod zmq;
pub mod zmtp;
