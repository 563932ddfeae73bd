//! `least-load`: fewest active blocks, whatever is cached.

use super::{Candidate, Terms};

/// Terms of every candidate, in blocks.
pub fn terms(candidates: &[Candidate]) -> Vec<Terms> {
    candidates
        .iter()
        .map(|candidate| {
            let load = candidate.load.active_blocks as f64;
            Terms { cost: load, load, ..Terms::default() }
        })
        .collect()
}
