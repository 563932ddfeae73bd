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

use crate::blocks::{BlockHash, NamespaceId};

/// Where an engine keeps a block. Ordered from fast to slow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Tier {
    /// The accelerator's own memory.
    Device,
    /// The host's memory.
    Host,
    /// Anything slower: disk, object store, another node.
    Disk,
}

impl Tier {
    /// All tiers, fast to slow.
    pub const ALL: [Self; 3] = [Self::Device, Self::Host, Self::Disk];

    /// Position in [`Tier::ALL`].
    pub const fn index(self) -> usize {
        match self {
            Self::Device => 0,
            Self::Host => 1,
            Self::Disk => 2,
        }
    }

    /// The tier at `index` of [`Tier::ALL`].
    pub const fn from_index(index: u64) -> Option<Self> {
        match index {
            0 => Some(Self::Device),
            1 => Some(Self::Host),
            2 => Some(Self::Disk),
            _ => None,
        }
    }
}

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
