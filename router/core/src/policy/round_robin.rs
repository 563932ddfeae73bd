//! `round-robin`: targets in their order, one after the other.

use super::{Candidate, Terms};
use crate::ids::Target;

/// Terms of every candidate: its distance behind `turn`, the target chosen
/// last. A fleet that changed in between is entered at the next target in
/// order.
pub fn terms(candidates: &[Candidate], turn: Option<&Target>) -> Vec<Terms> {
    let count = candidates.len();
    let start = turn.map_or(0, |turn| candidates.partition_point(|candidate| candidate.target <= *turn));
    (0..count)
        .map(|position| {
            let distance = (position + count - start) % count;
            Terms { cost: distance as f64, ..Terms::default() }
        })
        .collect()
}
