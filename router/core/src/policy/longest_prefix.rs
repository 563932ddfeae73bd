//! `longest-prefix`: most leading blocks held, whatever the load.
//!
//! `cost = request_blocks − hits`. Load only breaks ties, so it is right for a
//! fleet that is never busy, and wrong for any other: a popular prefix draws all
//! its requests to one target. Here for comparison, and for fleets of few
//! sessions.

use super::{Candidate, PickRequest, Settings, Terms};

/// Terms of every candidate, in blocks.
pub fn terms(settings: &Settings, request: &PickRequest<'_>, candidates: &[Candidate]) -> Vec<Terms> {
    let blocks = request.blocks.len() as f64;
    candidates
        .iter()
        .map(|candidate| {
            let uncached = blocks - settings.tiers.of(candidate.hits);
            let images = settings.unseen_blocks(request, candidate);
            Terms { cost: uncached + images, uncached, images, ..Terms::default() }
        })
        .collect()
}
