//! Facts to a decision.
//!
//! A policy sees a request and a list of candidates, sorted by target, and
//! nothing else: no index, no fleet, no clock. It answers with the chosen
//! candidate and with every term of every candidate, so that a receipt can
//! explain it and a replay can repeat it. Same inputs in any order give the
//! same pick.
//!
//! One file per policy: [`cache_plus_load`], [`kv_aware`], [`least_load`],
//! [`round_robin`]. What they share: [`hits`] (what an engine will really
//! skip), [`tie`] (the total order), [`leases`] (load, booked and released),
//! [`in_flight`] (what prefills under way will leave behind), [`history`] (where prefixes were sent, for targets without a sound view).

pub mod cache_plus_load;
pub mod history;
pub mod hits;
pub mod in_flight;
pub mod kv_aware;
pub mod leases;
pub mod least_load;
pub mod prefill_speed;
pub mod round_robin;
pub mod tie;

use serde::Serialize;

use crate::blocks::BlockHash;
use crate::ids::{Role, Target};
use crate::trust::Verdict;
use crate::units::{BlockSize, TierHits, Tokens};
use tie::TieBranch;

/// Which rule chooses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum PolicyKind {
    /// Uncached work, queued work and decode load, in tokens. The default.
    #[default]
    CachePlusLoad,
    /// The published formula, in blocks.
    KvAware,
    /// Fewest active blocks.
    LeastLoad,
    /// In turn.
    RoundRobin,
}

impl PolicyKind {
    /// Lower-case name, for flags, logs and labels.
    pub const fn label(self) -> &'static str {
        match self {
            Self::CachePlusLoad => "cache-plus-load",
            Self::KvAware => "kv-aware",
            Self::LeastLoad => "least-load",
            Self::RoundRobin => "round-robin",
        }
    }
}

/// Overlap weight per role. Finite and not negative.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct OverlapWeights {
    /// For roles without one of their own.
    pub default: f64,
    /// For prefill picks.
    pub prefill: Option<f64>,
    /// For decode picks.
    pub decode: Option<f64>,
}

impl Default for OverlapWeights {
    fn default() -> Self {
        Self { default: 1.0, prefill: None, decode: None }
    }
}

impl OverlapWeights {
    /// The weight for picks of `role`.
    pub fn of(&self, role: Role) -> f64 {
        match role {
            Role::Mixed => None,
            Role::Prefill => self.prefill,
            Role::Decode => self.decode,
        }
        .unwrap_or(self.default)
    }
}

/// Weights of `cache-plus-load`. Finite and not negative.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LoadWeights {
    /// Per uncached token that already waits on the target.
    pub queue: f64,
    /// Per token in the contexts of the target's requests in flight.
    pub decode: f64,
    /// Per request in flight, in tokens.
    pub request: f64,
    /// Per token of load above the fleet's mean.
    pub imbalance: f64,
}

impl Default for LoadWeights {
    fn default() -> Self {
        Self { queue: 1.0, decode: 0.05, request: 0.0, imbalance: 0.0 }
    }
}

/// What a held block is worth per tier, in blocks. Between 0 and 1.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct TierCredit {
    /// In the accelerator's memory.
    pub device: f64,
    /// In the host's memory: a copy over the bus is still owed.
    pub host: f64,
    /// In anything slower.
    pub disk: f64,
}

impl Default for TierCredit {
    fn default() -> Self {
        Self { device: 1.0, host: 0.75, disk: 0.25 }
    }
}

impl TierCredit {
    /// `hits` in blocks that need not be computed.
    pub fn of(&self, hits: TierHits) -> f64 {
        self.device * hits.device as f64 + self.host * hits.host as f64 + self.disk * hits.disk as f64
    }
}

/// All settings of a decision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Settings {
    /// Which rule chooses.
    pub policy: PolicyKind,
    /// Weight of what is not cached.
    pub overlap: OverlapWeights,
    /// Weights of load.
    pub load: LoadWeights,
    /// Worth of a block per tier.
    pub tiers: TierCredit,
    /// Whether blocks of prompts in flight count as hits to come.
    pub in_flight_credit: Switch,
}

/// Whether something is in force.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Switch {
    /// It is not.
    Disabled,
    /// It is.
    #[default]
    Enabled,
}

/// What a policy may know about one request.
#[derive(Clone, Debug)]
pub struct PickRequest<'a> {
    /// The request's id: the last tie break before the target's own.
    pub id: &'a str,
    /// What the target is to do.
    pub role: Role,
    /// Tokens of the prompt; an estimate where it could not be tokenised.
    pub prompt: Tokens,
    /// The prompt's full blocks; empty where it could not be tokenised.
    pub blocks: &'a [BlockHash],
    /// Tokens per block.
    pub size: BlockSize,
}

/// Where the hits of a candidate come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Evidence {
    /// There are none, or they may not be credited.
    #[default]
    Nothing,
    /// From the view: the engine's own events.
    View,
    /// Partly from prompts in flight on the target: not yet confirmed.
    InFlight,
    /// From routing history, because there is no sound view.
    History,
}

/// Work on a target, booked by leases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Load {
    /// Distinct prompt blocks in flight, plus one private tail block per lease
    /// and one per block's worth of generated tokens.
    pub active_blocks: u64,
    /// Uncached tokens of leases that wait for their first byte.
    pub queued: Tokens,
    /// Prompt and generated tokens of all leases, shared prefixes counted for
    /// each.
    pub context: Tokens,
    /// Leases.
    pub requests: u64,
}

/// What a policy may know about one target.
#[derive(Clone, Debug)]
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
}

/// A candidate's price, kept in parts. Absent parts are no part of the policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Terms {
    /// What the policy minimises; tokens or blocks, as the policy says.
    pub cost: f64,
    /// The part for what is not cached, weighted.
    pub uncached: f64,
    /// The part for load, weighted.
    pub load: f64,
}

/// How a route ended up where it did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The chosen target holds a part of the prompt.
    Hit,
    /// It holds none.
    Cold,
    /// Routing history says it may hold a part.
    Approximate,
    /// The request has no blocks: only load counted.
    NoAffinity,
    /// There was nothing to choose from.
    NoTarget,
}

impl Outcome {
    /// Stable label for logs and metrics.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Hit => "hit",
            Self::Cold => "cold",
            Self::Approximate => "approximate",
            Self::NoAffinity => "no_affinity",
            Self::NoTarget => "no_target",
        }
    }
}

/// A decision and its working.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    /// Position of the chosen candidate.
    pub chosen: usize,
    /// Terms of every candidate, in their order.
    pub terms: Vec<Terms>,
    /// What decided among equals.
    pub tie: TieBranch,
    /// In which way the route ended.
    pub outcome: Outcome,
}

/// Chooses among `candidates`, which are sorted by target and distinct; `None`
/// if there are none. `turn` is the last target that round-robin chose.
pub fn decide(
    settings: &Settings,
    request: &PickRequest<'_>,
    candidates: &[Candidate],
    turn: Option<&Target>,
) -> Option<Decision> {
    debug_assert!(candidates.is_sorted_by(|a, b| a.target < b.target), "sorted and distinct");
    let terms = match settings.policy {
        PolicyKind::CachePlusLoad => cache_plus_load::terms(settings, request, candidates),
        PolicyKind::KvAware => kv_aware::terms(settings, request, candidates),
        PolicyKind::LeastLoad => least_load::terms(candidates),
        PolicyKind::RoundRobin => round_robin::terms(candidates, turn),
    };
    let (chosen, tie) = tie::cheapest(request, candidates, &terms)?;
    let outcome = outcome(request, &candidates[chosen]);
    Some(Decision { chosen, terms, tie, outcome })
}

fn outcome(request: &PickRequest<'_>, chosen: &Candidate) -> Outcome {
    match chosen.evidence {
        _ if request.blocks.is_empty() => Outcome::NoAffinity,
        _ if chosen.hits.total() == 0 => Outcome::Cold,
        Evidence::Nothing => Outcome::Cold,
        Evidence::View | Evidence::InFlight => Outcome::Hit,
        Evidence::History => Outcome::Approximate,
    }
}

#[cfg(test)]
mod tests;
