//! `cache-plus-load`: the default, in tokens.
//!
//! `cost = overlap_weight × uncached + queue_weight × queued_uncached +
//! decode_weight × context + request_weight × requests + imbalance_weight ×
//! excess`. It adds what `kv-aware` lacks: the uncached tokens that already wait
//! on the target, and the decode load, without which affinity piles sessions
//! onto few workers.

use super::{Candidate, PickRequest, Settings, Terms};

/// Terms of every candidate, in tokens.
pub fn terms(settings: &Settings, request: &PickRequest<'_>, candidates: &[Candidate]) -> Vec<Terms> {
    let weight = settings.overlap.of(request.role);
    let block = f64::from(request.size.tokens());
    let weights = settings.load;
    let mean = match weights.imbalance {
        // Nobody asks.
        0.0 => 0.0,
        _ => candidates.iter().map(work).sum::<f64>() / candidates.len().max(1) as f64,
    };
    candidates
        .iter()
        .map(|candidate| {
            let cached = settings.tiers.of(candidate.hits) * block;
            let uncached = weight * (request.prompt.0 as f64 - cached).max(0.0);
            let load = weights.queue * candidate.load.queued.0 as f64
                + weights.decode * candidate.load.context.0 as f64
                + weights.request * candidate.load.requests as f64
                + weights.imbalance * (work(candidate) - mean).max(0.0);
            let images = settings.unseen_blocks(request, candidate) * block;
            Terms { cost: uncached + load + images, uncached, load, images, rejection: None }
        })
        .collect()
}

/// All tokens that a target has in hand: what `excess` compares with the mean.
fn work(candidate: &Candidate) -> f64 {
    candidate.load.queued.0 as f64 + candidate.load.context.0 as f64
}
