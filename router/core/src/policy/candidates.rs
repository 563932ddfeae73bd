//! Candidates as policies see them: as rows or as columns.
//!
//! A row ([`Candidate`]) is easy to write down and to read: replays, tests and
//! receipts have them. A pick has columns ([`super::field::Field`]). Policies
//! know neither: they ask [`Candidates`] for one [`Affinity`] and [`Load`] after the
//! other. Many columns share an affinity, and what it costs is worked out once.

use super::decode_demand::Demand;
use super::{Evidence, Load};
use crate::ids::{Role, Target};
use crate::trust::Verdict;
use crate::units::{BlockSize, TierHits, Tokens};

/// What a policy may know about one target.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// The target.
    pub target: Target,
    /// Leading blocks that the view claims, before trust.
    pub claimed: TierHits,
    /// Leading blocks that count: what the engine will really skip.
    pub hits: TierHits,
    /// How many of `hits` are predicted from prompts in flight.
    pub predicted: u64,
    /// Where `hits` come from.
    pub evidence: Evidence,
    /// What the view is worth.
    pub trust: Verdict,
    /// Booked work.
    pub load: Load,
    /// Blocks of this request that are active on the target already.
    pub shared_active: u64,
    /// Pictures of the request that the target has seen.
    pub images_seen: u64,
    /// Input booked for decoding; nothing unless that is counted.
    pub demand: Demand,
}

/// What the price of a candidate depends on beside its load: what it has to do
/// with the prompt.
#[derive(Clone, Copy, Debug)]
pub struct Affinity {
    /// Leading blocks that count.
    pub hits: TierHits,
    /// Blocks of this request that are active on the target already.
    pub shared_active: u64,
    /// Pictures of the request that the target has seen.
    pub images_seen: u64,
}

/// What prices depend on of the request: lengths, and never what is in it.
#[derive(Clone, Copy, Debug)]
pub struct Task {
    /// What the target is to do.
    pub role: Role,
    /// Tokens of the prompt.
    pub prompt: Tokens,
    /// Its full blocks.
    pub blocks: u64,
    /// Tokens per block.
    pub size: BlockSize,
    /// Pictures, clips and recordings in it.
    pub images: u64,
}

/// Candidates, sorted by target and distinct.
pub trait Candidates {
    /// How many there are.
    fn count(&self) -> usize;
    /// The target of the one at `at`.
    fn target(&self, at: usize) -> &Target;
    /// How many affinities they have between them.
    fn kinds(&self) -> usize;
    /// The number of its affinity.
    fn kind(&self, at: usize) -> usize;
    /// The affinity of this number.
    fn affinity(&self, kind: usize) -> Affinity;
    /// What is booked on it.
    fn load(&self, at: usize) -> Load;
    /// Where its hits come from.
    fn evidence(&self, at: usize) -> Evidence;
    /// Input booked on it for decoding.
    fn demand(&self, at: usize) -> Demand;
    /// Whether its view claims a part of the prompt and may not be credited.
    fn is_discredited(&self, at: usize) -> bool;

    /// Leading blocks of the prompt that count on it.
    fn hits(&self, at: usize) -> u64 {
        self.affinity(self.kind(at)).hits.total()
    }
}

impl Candidates for [Candidate] {
    fn count(&self) -> usize {
        self.len()
    }

    fn target(&self, at: usize) -> &Target {
        &self[at].target
    }

    fn kinds(&self) -> usize {
        self.len()
    }

    fn kind(&self, at: usize) -> usize {
        at
    }

    fn affinity(&self, kind: usize) -> Affinity {
        let Candidate { hits, shared_active, images_seen, .. } = self[kind];
        Affinity { hits, shared_active, images_seen }
    }

    fn load(&self, at: usize) -> Load {
        self[at].load
    }

    fn evidence(&self, at: usize) -> Evidence {
        self[at].evidence
    }

    fn demand(&self, at: usize) -> Demand {
        self[at].demand
    }

    fn is_discredited(&self, at: usize) -> bool {
        self[at].claimed.total() > 0 && !self[at].trust.credited
    }
}
