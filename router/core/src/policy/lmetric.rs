//! `lmetric`: tokens to prefill times requests in the batch.
//!
//! `cost = (uncached + queued_uncached) × (requests + 1)`. A product needs no
//! weight to bring tokens and requests to one unit: a target twice as full must
//! owe half the prefill to be as cheap. Overlap and load weights do not count.

use super::{Candidate, PickRequest, Settings, Terms};

/// Terms of every candidate, in tokens × requests.
pub fn terms(settings: &Settings, request: &PickRequest<'_>, candidates: &[Candidate]) -> Vec<Terms> {
    let block = f64::from(request.size.tokens());
    candidates
        .iter()
        .map(|candidate| {
            // This request is in the batch too, so an idle target costs its prefill.
            let batch = candidate.load.requests as f64 + 1.0;
            let cached = settings.tiers.of(candidate.hits) * block;
            let uncached = (request.prompt.0 as f64 - cached).max(0.0) * batch;
            let load = candidate.load.queued.0 as f64 * batch;
            let images = settings.unseen_blocks(request, candidate) * block * batch;
            Terms { cost: uncached + load + images, uncached, load, images, rejection: None }
        })
        .collect()
}
