//! Engine bytes to deltas in our hashes.
//!
//! [`msgpack`] reads bounded MessagePack; [`wire`] knows every shape that
//! engines send; [`sequence`] decides whether a message continues the stream;
//! [`digest`] turns stores and removals into [`Delta`]s; [`envelope`] carries
//! deltas and snapshots between a bridge and its routers.

pub mod digest;
pub mod envelope;
pub mod msgpack;
pub mod sequence;
pub mod wire;

#[cfg(test)]
mod captures;
#[cfg(test)]
mod fuzz_tests;

use crate::blocks::{BlockHash, NamespaceId};
pub use crate::units::Tier;

/// One change of what a target holds, in our hashes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Delta {
    /// The target now holds `hashes` in `tier`; each follows the one before,
    /// the first follows `parent` (the namespace's root for a first block).
    Stored {
        /// What may share these blocks.
        namespace: NamespaceId,
        /// The chained hash before the first of `hashes`.
        parent: BlockHash,
        /// Consecutive blocks of one chain. Never empty.
        hashes: Vec<BlockHash>,
        /// Where they are.
        tier: Tier,
    },
    /// The target no longer holds `hashes` in `tier`.
    Removed {
        /// What shared these blocks.
        namespace: NamespaceId,
        /// Any blocks, in any order. Never empty.
        hashes: Vec<BlockHash>,
        /// Where they were.
        tier: Tier,
    },
    /// The target holds nothing any more.
    Cleared,
}
