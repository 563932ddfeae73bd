//! `round-robin`: targets in their order, one after the other.

use super::Terms;
use super::candidates::Candidates;
use crate::ids::Target;

/// Where the round stands.
pub(super) struct Rule {
    count: usize,
    start: usize,
}

impl Rule {
    /// After `turn`, the target chosen last. A fleet that changed in between is
    /// entered at the next target in order.
    pub(super) fn new<C: Candidates + ?Sized>(candidates: &C, turn: Option<&Target>) -> Self {
        let count = candidates.count();
        let (mut start, mut end) = (0, if turn.is_some() { count } else { 0 });
        while let Some(turn) = turn.filter(|_| start < end) {
            let middle = start + (end - start) / 2;
            if candidates.target(middle) <= turn { start = middle + 1 } else { end = middle }
        }
        Self { count, start }
    }

    /// Terms of one candidate: its distance behind the last one.
    pub(super) fn terms(&self, at: usize) -> Terms {
        let distance = (at + self.count - self.start) % self.count;
        Terms { cost: distance as f64, ..Terms::default() }
    }
}
