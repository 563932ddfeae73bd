//! `kv-aware`: the published formula, in blocks.
//!
//! `cost = overlap_weight × (request_blocks − hits) + active_blocks −
//! shared_active`. Without the last term a sibling of a prompt in flight would
//! be repelled by the very blocks it shares; for prompts that share nothing it
//! is 0 and the formula is the published one.

use super::{Candidate, PickRequest, Settings, Terms};

/// Terms of every candidate, in blocks.
pub fn terms(settings: &Settings, request: &PickRequest<'_>, candidates: &[Candidate]) -> Vec<Terms> {
    let weight = settings.overlap.of(request.role);
    let blocks = request.blocks.len() as f64;
    candidates
        .iter()
        .map(|candidate| {
            let uncached = weight * (blocks - settings.tiers.of(candidate.hits));
            let load = candidate.load.active_blocks.saturating_sub(candidate.shared_active) as f64;
            let images = settings.unseen_blocks(request, candidate);
            Terms { cost: uncached + load + images, uncached, load, images, rejection: None }
        })
        .collect()
}
