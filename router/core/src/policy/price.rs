//! Prices: one loop over all candidates, whatever the policy.
//!
//! A pick keeps of each price its cost alone. The terms behind it follow from
//! facts that the receipt holds, so they are worked out when somebody reads it.

use super::candidates::{Affinity, Candidates, Task};
use super::{
    Load, PolicyKind, Rejection, Settings, Terms, cache_plus_load, kv_aware, least_load, lmetric,
    longest_prefix, round_robin,
};
use crate::ids::Target;
use crate::units::{Blocks, Tokens};

/// The part of a price that an affinity decides, before any load.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Reuse {
    /// For what is not cached.
    pub(super) uncached: f64,
    /// For pictures that were not seen.
    pub(super) images: f64,
}

/// What candidates cost, in their order.
#[derive(Clone, Debug, Default)]
pub struct Prices {
    costs: Vec<f64>,
    /// Why some may not be chosen; empty where there is no hard cap.
    rejections: Vec<Option<Rejection>>,
    /// By affinity; memory to use again.
    kinds: Vec<(Affinity, Reuse)>,
}

/// The lowest price, and who has it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lowest {
    pub(super) cost: f64,
    /// The first one.
    pub(super) first: usize,
    /// Whether there are more.
    pub(super) tied: bool,
}

impl Prices {
    /// Prices all of `candidates`, and forgets what was priced before.
    pub(super) fn set<C: Candidates + ?Sized>(
        &mut self,
        settings: &Settings,
        task: &Task,
        candidates: &C,
        turn: Option<&Target>,
    ) {
        let Self { costs, rejections, kinds } = self;
        costs.clear();
        rejections.clear();
        costs.reserve(candidates.count());
        let capped = settings.overload.max_queued.is_some();
        each(settings, task, candidates, turn, kinds, |terms| {
            costs.push(terms.cost);
            if capped {
                rejections.push(terms.rejection);
            }
        });
    }

    /// How many candidates have a price.
    pub(super) const fn count(&self) -> usize {
        self.costs.len()
    }

    pub(super) fn cost(&self, at: usize) -> f64 {
        self.costs[at]
    }

    /// Why it may not be chosen.
    pub(super) fn rejection(&self, at: usize) -> Option<Rejection> {
        self.rejections.get(at).copied().flatten()
    }

    /// Those that may be chosen, and what they cost.
    pub(super) fn open(&self) -> impl Iterator<Item = (usize, f64)> {
        let costs = self.costs.iter().copied().enumerate();
        costs.filter(|(at, _)| self.rejection(*at).is_none())
    }

    /// The lowest of those that may be chosen.
    pub(super) fn lowest(&self) -> Option<Lowest> {
        match self.rejections.is_empty() {
            true => lowest(self.costs.iter().copied().enumerate()),
            false => lowest(self.open()),
        }
    }

    /// Whether one that was rejected is cheaper than the one at `chosen`.
    pub(super) fn escaped(&self, chosen: usize) -> bool {
        let rejected = self.rejections.iter().zip(&self.costs).filter(|(rejection, _)| rejection.is_some());
        rejected.into_iter().any(|(_, cost)| *cost < self.costs[chosen])
    }
}

/// The terms of all `candidates`, with what rejects them.
pub(crate) fn terms<C: Candidates + ?Sized>(
    settings: &Settings,
    task: &Task,
    candidates: &C,
    turn: Option<&Target>,
) -> Vec<Terms> {
    let mut all = Vec::with_capacity(candidates.count());
    each(settings, task, candidates, turn, &mut Vec::new(), |terms| all.push(terms));
    all
}

#[inline]
fn lowest(mut all: impl Iterator<Item = (usize, f64)>) -> Option<Lowest> {
    let (first, cost) = all.next()?;
    let mut found = Lowest { cost, first, tied: false };
    for (at, cost) in all {
        if cost < found.cost {
            found = Lowest { cost, first: at, tied: false };
        } else if cost <= found.cost {
            found.tied = true;
        }
    }
    Some(found)
}

/// Hands the terms of every candidate to `take`, in their order.
#[inline]
fn each<C: Candidates + ?Sized>(
    settings: &Settings,
    task: &Task,
    candidates: &C,
    turn: Option<&Target>,
    kinds: &mut Vec<(Affinity, Reuse)>,
    mut take: impl FnMut(Terms),
) {
    kinds.clear();
    kinds.extend((0..candidates.kinds()).map(|kind| {
        let affinity = candidates.affinity(kind);
        (affinity, reuse(settings, task, &affinity))
    }));
    match settings.overload.max_queued {
        None => {
            Run { candidates, kinds, take: |_: &Affinity, _: &Load, terms| take(terms) }.of(settings, turn)
        }
        Some(cap) => {
            let take = |affinity: &Affinity, load: &Load, terms: Terms| {
                let rejection = rejection(cap, settings.overload.cold_reserve, task, affinity, load);
                take(Terms { rejection, ..terms });
            };
            Run { candidates, kinds, take }.of(settings, turn);
        }
    }
}

/// What an affinity saves and what it leaves to do, as the policy counts it.
#[inline]
fn reuse(settings: &Settings, task: &Task, affinity: &Affinity) -> Reuse {
    match settings.policy {
        PolicyKind::CachePlusLoad => cache_plus_load::reuse(settings, task, affinity),
        PolicyKind::KvAware => kv_aware::reuse(settings, task, affinity),
        PolicyKind::LongestPrefix => longest_prefix::reuse(settings, task, affinity),
        PolicyKind::LMetric => lmetric::reuse(settings, task, affinity),
        PolicyKind::LeastLoad | PolicyKind::RoundRobin => Reuse::default(),
    }
}

/// One loop over all candidates.
struct Run<'a, C: ?Sized, T> {
    candidates: &'a C,
    kinds: &'a [(Affinity, Reuse)],
    take: T,
}

impl<C: Candidates + ?Sized, T: FnMut(&Affinity, &Load, Terms)> Run<'_, C, T> {
    /// By the settings' policy.
    #[inline]
    fn of(self, settings: &Settings, turn: Option<&Target>) {
        match settings.policy {
            PolicyKind::CachePlusLoad => {
                let rule = cache_plus_load::Rule::new(settings, self.candidates);
                self.by(|_, _, reuse, load| rule.terms(reuse, load));
            }
            PolicyKind::KvAware => self.by(|_, affinity, reuse, load| kv_aware::terms(affinity, reuse, load)),
            PolicyKind::LongestPrefix => self.by(|_, _, reuse, _| longest_prefix::terms(reuse)),
            PolicyKind::LeastLoad => self.by(|_, _, _, load| least_load::terms(load)),
            PolicyKind::RoundRobin => {
                let rule = round_robin::Rule::new(self.candidates, turn);
                self.by(|at, _, _, _| rule.terms(at));
            }
            PolicyKind::LMetric => self.by(|_, _, reuse, load| lmetric::terms(reuse, load)),
        }
    }

    #[inline]
    fn by(mut self, rule: impl Fn(usize, &Affinity, &Reuse, &Load) -> Terms) {
        for at in 0..self.candidates.count() {
            let (affinity, reuse) = &self.kinds[self.candidates.kind(at)];
            let load = self.candidates.load(at);
            (self.take)(affinity, &load, rule(at, affinity, reuse, &load));
        }
    }
}

/// The hard cap. A target where nothing waits takes any request: otherwise a
/// prompt longer than the cap could go nowhere.
#[inline]
fn rejection(
    cap: Tokens,
    cold_reserve: f64,
    task: &Task,
    affinity: &Affinity,
    load: &Load,
) -> Option<Rejection> {
    if load.queued == Tokens(0) {
        return None;
    }
    let hits = affinity.hits.total();
    let after = load.queued + task.prompt.uncached(task.size.tokens_in(Blocks(hits)));
    let open_to_hits = Tokens((cap.0 as f64 * (1.0 - cold_reserve)) as u64);
    if after > cap {
        Some(Rejection::Overloaded)
    } else if hits > 0 && after > open_to_hits {
        Some(Rejection::ColdReserve)
    } else {
        None
    }
}
