//! Facts to a decision.
//!
//! A policy sees a request and a list of candidates, sorted by target, and
//! nothing else: no index, no fleet, no clock. It answers with the chosen
//! candidate and with every term of every candidate, so that a receipt can
//! explain it and a replay can repeat it. Same inputs in any order give the
//! same pick.
//!
//! One file per policy: [`cache_plus_load`], [`kv_aware`], [`longest_prefix`],
//! [`least_load`], [`round_robin`], [`lmetric`]. What they share: [`hits`] (what an
//! engine will really skip), [`tie`] (the total order), [`leases`] (load, booked and released),
//! [`outside`] (load that others booked), [`strangers`] (load that nobody booked), [`in_flight`] (what prefills under way will leave behind),
//! [`decode_demand`] (decode picks by the input held), [`sessions`] and [`images`] (affinity), [`shadow`] (what others would do), [`history`] (where
//! prefixes were sent, for targets without a sound view).

pub mod cache_plus_load;
pub mod candidates;
pub mod decode_demand;
mod desk;
pub mod field;
pub mod history;
pub mod hits;
pub mod images;
pub mod in_flight;
pub mod kv_aware;
pub mod leases;
pub mod least_load;
pub mod lineup;
pub mod lmetric;
pub mod longest_prefix;
pub mod outside;
pub mod prefill_speed;
pub mod prefixes;
pub mod price;
pub mod round_robin;
pub mod sessions;
pub mod shadow;
pub mod strangers;
mod sums;
pub mod tie;

use serde::Serialize;

use crate::blocks::BlockHash;
use crate::ids::{Role, Target};
use crate::units::{BlockSize, Millis, TierHits, Tokens};
use candidates::{Affinity, Candidates, Task};
use decode_demand::{DecodeDemand, DemandMode, Judgement};
use images::ImageKey;
use price::Prices;
use sessions::{SessionKey, SessionMode};
use shadow::PolicySet;
use tie::{TieBranch, Ties};

pub use candidates::Candidate;

/// Which rule chooses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum PolicyKind {
    /// Uncached work, queued work and decode load, in tokens. The default.
    #[default]
    CachePlusLoad,
    /// The published formula, in blocks.
    KvAware,
    /// Most leading blocks held, whatever the load.
    LongestPrefix,
    /// Fewest active blocks.
    LeastLoad,
    /// In turn.
    RoundRobin,
    /// Tokens to prefill times requests in the batch.
    #[serde(rename = "lmetric")]
    LMetric,
}

impl PolicyKind {
    /// All of them, the default first.
    pub const ALL: [Self; 6] = [
        Self::CachePlusLoad,
        Self::KvAware,
        Self::LongestPrefix,
        Self::LeastLoad,
        Self::RoundRobin,
        Self::LMetric,
    ];

    /// Lower-case name, for flags, logs and labels.
    pub const fn label(self) -> &'static str {
        match self {
            Self::CachePlusLoad => "cache-plus-load",
            Self::KvAware => "kv-aware",
            Self::LongestPrefix => "longest-prefix",
            Self::LeastLoad => "least-load",
            Self::RoundRobin => "round-robin",
            Self::LMetric => "lmetric",
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
    /// Per uncached token that already waits on the target. A lease counts in full
    /// until its first byte, so on average half of it is done: 0.5.
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
        Self { queue: 0.5, decode: 0.02, request: 0.0, imbalance: 0.0 }
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
    /// What a target may be given at most.
    pub overload: Overload,
    /// What a picture costs that the target has not seen, in blocks.
    pub image_weight: ImageWeight,
    /// Which picks follow their session, and for how long.
    pub sessions: SessionSettings,
    /// Policies that are evaluated beside the real one.
    pub shadows: PolicySet,
    /// Whether decode picks follow the input that targets hold.
    pub decode_demand: DecodeDemand,
}

/// What a target may be given at most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Overload {
    /// Most uncached tokens that may wait on one target; `None` for no limit. A
    /// target that has nothing waiting takes any request.
    pub max_queued: Option<Tokens>,
    /// Share of that which only requests without hits on the target may use, so
    /// that a hot prefix cannot shut out everybody else. Between 0 and 1.
    pub cold_reserve: f64,
}

/// What a picture costs that the target has not seen, in blocks of prefill.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(transparent)]
pub struct ImageWeight(pub f64);

impl Default for ImageWeight {
    /// A picture of about 768 tokens in blocks of 16.
    fn default() -> Self {
        Self(48.0)
    }
}

/// Which picks follow their session, and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct SessionSettings {
    /// Which picks.
    pub mode: SessionMode,
    /// How long an idle session stays bound.
    pub time_to_live: Millis,
}

impl Default for SessionSettings {
    fn default() -> Self {
        Self { mode: SessionMode::Disabled, time_to_live: Millis::from_secs(3600) }
    }
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

impl Settings {
    /// What the pictures cost that a candidate has not seen, in blocks. Decode
    /// encodes no pictures.
    fn unseen_blocks(&self, task: &Task, affinity: &Affinity) -> f64 {
        if task.role == Role::Decode {
            return 0.0;
        }
        self.image_weight.0 * task.images.saturating_sub(affinity.images_seen) as f64
    }
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
    /// Pictures, clips and recordings in it, in order.
    pub images: &'a [ImageKey],
    /// The session it belongs to.
    pub session: Option<&'a SessionKey>,
    /// Answers that it wants of the one prompt; 0 counts as 1.
    pub choices: u32,
}

impl PickRequest<'_> {
    /// What prices depend on of it.
    pub fn task(&self) -> Task {
        Task {
            role: self.role,
            prompt: self.prompt,
            blocks: self.blocks.len() as u64,
            size: self.size,
            images: self.images.len() as u64,
        }
    }
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

/// A candidate's price, kept in parts. Absent parts are no part of the policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Terms {
    /// What the policy minimises; tokens or blocks, as the policy says.
    pub cost: f64,
    /// The part for what is not cached, weighted.
    pub uncached: f64,
    /// The part for load, weighted.
    pub load: f64,
    /// The part for pictures that the target has not seen, weighted.
    pub images: f64,
    /// Why it could not be chosen, whatever its price.
    pub rejection: Option<Rejection>,
}

/// Why a candidate could not be chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Rejection {
    /// Too much waits on it.
    Overloaded,
    /// What is left of its queue is kept for requests without hits.
    ColdReserve,
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
    /// A cheaper target was over its hard cap.
    OverloadEscape,
    /// Views claim a part of the prompt, but none of them may be credited.
    MetadataRejection,
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
            Self::OverloadEscape => "overload_escape",
            Self::MetadataRejection => "metadata_rejection",
            Self::NoAffinity => "no_affinity",
            Self::NoTarget => "no_target",
        }
    }
}

/// What was chosen and why.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// Position of the chosen candidate.
    pub chosen: usize,
    /// How many candidates were priced.
    pub priced: usize,
    /// What the chosen one costs.
    pub cost: f64,
    /// What decided among equals.
    pub tie: TieBranch,
    /// In which way the route ended.
    pub outcome: Outcome,
    /// What decode input-demand made of it, where that was asked.
    pub demand: Option<Judgement>,
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
    /// What decode input-demand made of it, where that was asked.
    pub demand: Option<Judgement>,
}

/// Why nothing was chosen.
#[derive(Clone, Debug, PartialEq)]
pub enum NoChoice {
    /// There are no candidates.
    Empty,
    /// All are over their hard cap; their terms say how.
    Overloaded(Vec<Terms>),
}

/// Chooses among `candidates`, which are sorted by target and distinct. `turn`
/// is the last target that round-robin chose.
pub fn decide(
    settings: &Settings,
    request: &PickRequest<'_>,
    candidates: &[Candidate],
    turn: Option<&Target>,
) -> Result<Decision, NoChoice> {
    decide_with(settings, request, candidates, turn, Ties::default())
}

/// [`decide`], with equals told apart by `ties`.
pub fn decide_with(
    settings: &Settings,
    request: &PickRequest<'_>,
    candidates: &[Candidate],
    turn: Option<&Target>,
    ties: Ties,
) -> Result<Decision, NoChoice> {
    debug_assert!(candidates.is_sorted_by(|a, b| a.target < b.target), "sorted and distinct");
    let choice = choose(settings, request, candidates, turn, ties, &mut Prices::default());
    let terms = price::terms(settings, &request.task(), candidates, turn);
    match choice {
        Some(choice) => Ok(choice.with(terms)),
        None if candidates.is_empty() => Err(NoChoice::Empty),
        None => Err(NoChoice::Overloaded(terms)),
    }
}

/// The same for a request whose session is bound to `candidates[bound]`; `Err`
/// is why that one may not be chosen.
pub fn follow_session(
    settings: &Settings,
    request: &PickRequest<'_>,
    candidates: &[Candidate],
    bound: usize,
) -> Result<Decision, Rejection> {
    let choice = follow(settings, request, candidates, bound, &mut Prices::default())?;
    Ok(choice.with(price::terms(settings, &request.task(), candidates, None)))
}

impl Choice {
    fn with(self, terms: Vec<Terms>) -> Decision {
        let Self { chosen, tie, outcome, demand, .. } = self;
        Decision { chosen, terms, tie, outcome, demand }
    }
}

/// What both kinds of candidates are chosen by; `None` where nobody can be.
/// Leaves the prices behind in `prices`.
pub fn choose<C: Candidates + ?Sized>(
    settings: &Settings,
    request: &PickRequest<'_>,
    candidates: &C,
    turn: Option<&Target>,
    ties: Ties,
    prices: &mut Prices,
) -> Option<Choice> {
    prices.set(settings, &request.task(), candidates, turn);
    let (chosen, tie) = tie::cheapest(request, candidates, prices, ties)?;
    let demand = decode_demand::judge(settings, request, candidates, prices, chosen);
    let (chosen, tie) = match demand {
        Some(demand) if settings.decode_demand.mode == DemandMode::Enabled => {
            (demand.suggested, TieBranch::None)
        }
        _ => (chosen, tie),
    };
    let outcome = match prices.escaped(chosen) {
        true => Outcome::OverloadEscape,
        false => outcome(request, candidates, chosen),
    };
    Some(Choice { chosen, priced: prices.count(), cost: prices.cost(chosen), tie, outcome, demand })
}

/// What both kinds of candidates are followed by.
pub fn follow<C: Candidates + ?Sized>(
    settings: &Settings,
    request: &PickRequest<'_>,
    candidates: &C,
    bound: usize,
    prices: &mut Prices,
) -> Result<Choice, Rejection> {
    prices.set(settings, &request.task(), candidates, None);
    match prices.rejection(bound) {
        Some(rejection) => Err(rejection),
        None => Ok(Choice {
            chosen: bound,
            priced: prices.count(),
            cost: prices.cost(bound),
            tie: TieBranch::Session,
            outcome: outcome(request, candidates, bound),
            demand: None,
        }),
    }
}

fn outcome<C: Candidates + ?Sized>(request: &PickRequest<'_>, candidates: &C, chosen: usize) -> Outcome {
    if request.blocks.is_empty() {
        return Outcome::NoAffinity;
    }
    let hits = candidates.hits(chosen) > 0;
    match candidates.evidence(chosen) {
        Evidence::View | Evidence::InFlight if hits => Outcome::Hit,
        Evidence::History if hits => Outcome::Approximate,
        _ if (0..candidates.count()).any(|at| candidates.is_discredited(at)) => Outcome::MetadataRejection,
        _ => Outcome::Cold,
    }
}

#[cfg(test)]
mod tests;
