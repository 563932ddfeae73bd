//! Decode input-demand: decode picks by the input that targets already hold.
//!
//! `cost = input tokens in flight + this request's tokens × its choices +
//! request_weight × requests held`. Ties go to fewer active blocks, then to the
//! candidate that comes first. It needs no block metadata and no view, so it
//! sees nothing but what was booked for decoding.
//!
//! Enabled, it chooses; in shadow it books and says what it would have chosen;
//! disabled, it counts and reserves nothing. It sits on top of one of the two
//! cost policies, and touches neither prefill nor mixed picks.

use serde::Serialize;

use super::candidates::Candidates;
use super::price::Prices;
use super::{PickRequest, PolicyKind, Settings};
use crate::ids::Role;
use crate::units::Tokens;

/// Whether decode picks follow input demand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum DemandMode {
    /// Nothing is counted.
    #[default]
    Disabled,
    /// Counted and judged, not followed.
    Shadow,
    /// Followed.
    Enabled,
}

impl DemandMode {
    /// Lower-case name, for logs and labels.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Disabled => "disabled",
            Self::Shadow => "shadow",
            Self::Enabled => "enabled",
        }
    }
}

/// Settings of decode input-demand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct DecodeDemand {
    /// Whether it is in force.
    pub mode: DemandMode,
    /// Tokens that every request held counts beside its input. Finite and not
    /// negative.
    pub request_weight: f64,
}

/// Input that is booked for decoding on one target.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Demand {
    /// Prompt tokens, once for every choice that is generated.
    pub tokens: Tokens,
    /// Requests.
    pub requests: u64,
}

/// What it made of one pick.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Judgement {
    /// Position of the candidate that it prefers.
    pub suggested: usize,
    /// Position of the one that the policy prefers.
    pub original: usize,
    /// Input that the suggested one will hold with this request.
    pub projected: Tokens,
}

/// Tokens that `request` reserves where it is decoded.
pub fn input(request: &PickRequest<'_>) -> Tokens {
    Tokens(request.prompt.0.saturating_mul(u64::from(request.choices.max(1))))
}

/// Whether it can stand on top of `policy`: one that minimises a cost.
pub const fn suits(policy: PolicyKind) -> bool {
    matches!(policy, PolicyKind::CachePlusLoad | PolicyKind::KvAware)
}

/// Whether picks for `role` are counted at all under `settings`.
pub fn counts(settings: &Settings, role: Role) -> bool {
    settings.decode_demand.mode != DemandMode::Disabled && role == Role::Decode && suits(settings.policy)
}

/// What input demand prefers among the candidates that may be chosen, where the
/// policy prefers `original`; `None` where it is not asked.
pub(super) fn judge<C: Candidates + ?Sized>(
    settings: &Settings,
    request: &PickRequest<'_>,
    candidates: &C,
    prices: &Prices,
    original: usize,
) -> Option<Judgement> {
    if !counts(settings, request.role) {
        return None;
    }
    let input = input(request);
    let cost = |held: Demand| {
        (held.tokens + input).0 as f64 + settings.decode_demand.request_weight * held.requests as f64
    };
    let active = |at: usize| candidates.load(at).active_blocks;
    let keyed = prices.open().map(|(at, _)| (cost(candidates.demand(at)), active(at), at));
    // `min_by` keeps the first of equals.
    let best = keyed.min_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)))?;
    let projected = candidates.demand(best.2).tokens + input;
    Some(Judgement { suggested: best.2, original, projected })
}
