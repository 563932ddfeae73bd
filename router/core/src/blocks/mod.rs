//! Token ids to block hashes, and what may share them.
//!
//! [`hash`] is the bit-exact chain; [`identity`] says from which root a chain
//! starts and which namespace and domain it belongs to.

pub mod hash;
pub mod identity;

pub use hash::{BlockHash, chain, next};
pub use identity::{Domain, Identity, IdentitySeed, Namespace, NamespaceId};
