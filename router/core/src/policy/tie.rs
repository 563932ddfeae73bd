//! The total order among equally cheap candidates.
//!
//! Fewer active blocks; then the rendezvous hash of the first block of the
//! request that no tied target holds (else of the request's id), which spreads
//! cold prompts evenly and sends equal ones to the same place; then the target's
//! name.

use serde::Serialize;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::PickRequest;
use super::candidates::Candidates;
use super::price::{Lowest, Prices};

/// What decided among the cheapest candidates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TieBranch {
    /// There was only one.
    None,
    /// It had fewer active blocks.
    ActiveBlocks,
    /// Its rendezvous hash of the first block that no tied target holds.
    RendezvousBlock,
    /// Its rendezvous hash of the request's id.
    RendezvousRequest,
    /// The request's session is bound to it.
    Session,
    /// Its name alone, where [`Ties::Target`] was asked for.
    Target,
}

/// How equals are told apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Ties {
    /// As served: by load, then spread by hash, then by name.
    #[default]
    Rendezvous,
    /// By name alone, so that a hand-made trace can be followed by hand.
    Target,
}

impl TieBranch {
    /// Stable label for logs.
    pub const fn label(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::ActiveBlocks => "active_blocks",
            Self::RendezvousBlock => "rendezvous_block",
            Self::RendezvousRequest => "rendezvous_request",
            Self::Session => "session",
            Self::Target => "target",
        }
    }
}

/// The cheapest of the candidates that nothing rejects and what decided; `None`
/// if all are rejected. Costs are finite.
pub(super) fn cheapest<C: Candidates + ?Sized>(
    request: &PickRequest<'_>,
    candidates: &C,
    prices: &Prices,
    ties: Ties,
) -> Option<(usize, TieBranch)> {
    let Lowest { cost: lowest, first, tied } = prices.lowest()?;
    if !tied {
        return Some((first, TieBranch::None));
    }
    if ties == Ties::Target {
        return Some((first, TieBranch::Target));
    }
    let tied = || prices.open().filter(|(_, cost)| *cost <= lowest).map(|(at, _)| at);
    let active = |at: usize| candidates.load(at).active_blocks;
    let fewest = tied().map(active).min()?;
    let tied = || tied().filter(|at| active(*at) == fewest);
    let (first, more) = (tied().next()?, tied().nth(1).is_some());
    if !more {
        return Some((first, TieBranch::ActiveBlocks));
    }
    let deepest = tied().map(|at| candidates.hits(at)).max()? as usize;
    let (key, branch) = match request.blocks.get(deepest) {
        Some(block) => (block.0, TieBranch::RendezvousBlock),
        None => (xxh3_64_with_seed(request.id.as_bytes(), 0), TieBranch::RendezvousRequest),
    };
    let weighed = tied().map(|at| (weight(key, candidates.target(at)), at));
    // Equal hashes fall to the lower target, which comes first.
    let (_, chosen) = weighed.reduce(|best, next| if next.0 > best.0 { next } else { best })?;
    Some((chosen, branch))
}

/// Rendezvous hash of a target: its name, a zero byte and its rank, seeded.
fn weight(key: u64, target: &crate::ids::Target) -> u64 {
    let (name, rank) = (target.worker.as_bytes(), target.rank.0.to_le_bytes());
    let mut short = [0; 64];
    let length = name.len() + 5;
    let Some(room) = short.get_mut(..length) else {
        return xxh3_64_with_seed(&[name, &[0], &rank].concat(), key);
    };
    room[..name.len()].copy_from_slice(name);
    room[name.len() + 1..].copy_from_slice(&rank);
    xxh3_64_with_seed(room, key)
}
