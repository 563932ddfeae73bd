//! The total order among equally cheap candidates.
//!
//! Fewer active blocks; then the rendezvous hash of the first block of the
//! request that no tied target holds (else of the request's id), which spreads
//! cold prompts evenly and sends equal ones to the same place; then the target's
//! name.

use serde::Serialize;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::{Candidate, PickRequest, Terms};

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

/// The cheapest of the `open` candidates and what decided; `None` if none is
/// open. Costs are finite.
pub fn cheapest(
    request: &PickRequest<'_>,
    candidates: &[Candidate],
    terms: &[Terms],
    open: Vec<usize>,
    ties: Ties,
) -> Option<(usize, TieBranch)> {
    let lowest = open.iter().map(|at| terms[*at].cost).min_by(f64::total_cmp)?;
    let mut tied = open;
    tied.retain(|at| terms[*at].cost <= lowest);
    if let [only] = tied[..] {
        return Some((only, TieBranch::None));
    }
    if ties == Ties::Target {
        return tied.first().map(|first| (*first, TieBranch::Target));
    }
    let fewest = tied.iter().map(|at| candidates[*at].load.active_blocks).min()?;
    tied.retain(|at| candidates[*at].load.active_blocks == fewest);
    if let [only] = tied[..] {
        return Some((only, TieBranch::ActiveBlocks));
    }
    let deepest = tied.iter().map(|at| candidates[*at].hits.total()).max()? as usize;
    let (key, branch) = match request.blocks.get(deepest) {
        Some(block) => (block.0, TieBranch::RendezvousBlock),
        None => (xxh3_64_with_seed(request.id.as_bytes(), 0), TieBranch::RendezvousRequest),
    };
    let chosen = tied.into_iter().max_by(|a, b| {
        let (a, b) = (&candidates[*a].target, &candidates[*b].target);
        // Equal hashes fall to the lower target, so `max_by` sees it as larger.
        weight(key, a).cmp(&weight(key, b)).then_with(|| b.cmp(a))
    })?;
    Some((chosen, branch))
}

fn weight(key: u64, target: &crate::ids::Target) -> u64 {
    let mut name = Vec::with_capacity(64);
    name.extend_from_slice(target.worker.as_str().as_bytes());
    name.push(0);
    name.extend_from_slice(&target.rank.0.to_le_bytes());
    xxh3_64_with_seed(&name, key)
}
