//! Which candidates are dominated: another one keeps at least as much of the
//! prompt while it has no more work, one of them strictly.
//!
//! What rejects a candidate does not count here: dominance speaks of facts, not
//! of rules.

use super::CandidateRecord;

/// Names for every dominated candidate the first one that dominates it.
/// O(n log n) where nobody is dominated, and one walk more for each who is.
pub(super) fn mark(candidates: &mut [CandidateRecord]) {
    let facts: Vec<(u64, u64)> = candidates
        .iter()
        .map(|one| (one.hits.total(), one.load.queued.0.saturating_add(one.load.context.0)))
        .collect();
    // The least work among those with so many hits or more: a stair, from many hits
    // to few.
    let mut stair: Vec<(u64, u64)> = Vec::new();
    let mut sorted = facts.clone();
    sorted.sort_unstable_by_key(|(hits, work)| (std::cmp::Reverse(*hits), *work));
    for (hits, work) in sorted {
        if stair.last().is_none_or(|(_, least)| work < *least) {
            stair.push((hits, work));
        }
    }
    for place in 0..candidates.len() {
        let (hits, work) = facts[place];
        let beats =
            |(reuse, load): (u64, u64)| reuse >= hits && load <= work && (reuse > hits || load < work);
        if stair.iter().any(|step| beats(*step)) {
            let better = facts.iter().position(|other| beats(*other));
            candidates[place].dominated_by = better.map(|better| candidates[better].target.clone());
        }
    }
}
