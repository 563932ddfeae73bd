//! Shadow policies: what others would have chosen on the same facts.
//!
//! They book nothing and change nothing; their picks stand in the receipt, with
//! the regret in blocks, so that a setting can be judged before it is made.

use serde::Serialize;

use super::candidates::Candidates;
use super::price::Prices;
use super::tie::Ties;
use super::{PickRequest, PolicyKind, Settings, choose};
use crate::ids::Target;

/// A set of policies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct PolicySet(u16);

impl PolicySet {
    /// The set with `policy` in it too.
    #[must_use]
    pub const fn with(self, policy: PolicyKind) -> Self {
        Self(self.0 | 1 << policy as u16)
    }

    /// Whether `policy` is in it.
    pub const fn contains(self, policy: PolicyKind) -> bool {
        self.0 & 1 << policy as u16 != 0
    }

    /// Its policies, in the order of their declaration.
    #[inline]
    pub fn iter(self) -> impl Iterator<Item = PolicyKind> {
        let all: &[PolicyKind] = if self.0 == 0 { &[] } else { &PolicyKind::ALL };
        all.iter().copied().filter(move |policy| self.contains(*policy))
    }
}

/// What one shadow policy would have done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Shadow {
    /// The policy.
    pub policy: PolicyKind,
    /// Its choice.
    pub target: Target,
    /// Hits of its choice less hits of the real one, in blocks: above zero, it
    /// would have reused more.
    pub regret_blocks: i64,
}

/// Evaluates the shadow policies of `settings` on the facts of a decision for
/// the candidate at `real`. `turn` is the target that round-robin chose before
/// it.
pub fn evaluate<C: Candidates + ?Sized>(
    settings: &Settings,
    request: &PickRequest<'_>,
    candidates: &C,
    real: usize,
    turn: Option<&Target>,
) -> Vec<Shadow> {
    let hits = |at: usize| i64::try_from(candidates.hits(at)).unwrap_or(i64::MAX);
    let mut prices = Prices::default();
    let shadow = |policy| {
        let settings = Settings { policy, ..*settings };
        let choice = choose(&settings, request, candidates, turn, Ties::default(), &mut prices)?;
        let target = candidates.target(choice.chosen).clone();
        Some(Shadow { policy, target, regret_blocks: hits(choice.chosen) - hits(real) })
    };
    settings.shadows.iter().filter_map(shadow).collect()
}
