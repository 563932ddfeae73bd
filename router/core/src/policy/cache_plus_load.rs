//! `cache-plus-load`: the default, in tokens.
//!
//! `cost = overlap_weight × uncached + queue_weight × queued_uncached +
//! decode_weight × context + request_weight × requests + imbalance_weight ×
//! excess`. It adds what `kv-aware` lacks: the uncached tokens that already wait
//! on the target, and the decode load, without which affinity piles sessions
//! onto few workers.

use super::candidates::{Affinity, Candidates, Task};
use super::price::Reuse;
use super::{Load, LoadWeights, Settings, Terms};

/// What is not cached and what was not seen, in tokens.
#[inline]
pub(super) fn reuse(settings: &Settings, task: &Task, affinity: &Affinity) -> Reuse {
    let block = f64::from(task.size.tokens());
    let cached = settings.tiers.of(affinity.hits) * block;
    Reuse {
        uncached: settings.overlap.of(task.role) * (task.prompt.0 as f64 - cached).max(0.0),
        images: settings.unseen_blocks(task, affinity) * block,
    }
}

/// The formula for one request.
pub(super) struct Rule {
    weights: LoadWeights,
    /// All tokens that a target has in hand, on average.
    mean: f64,
}

impl Rule {
    pub(super) fn new<C: Candidates + ?Sized>(settings: &Settings, candidates: &C) -> Self {
        let count = candidates.count();
        let mean = match settings.load.imbalance {
            // Nobody asks.
            0.0 => 0.0,
            _ => {
                let works = (0..count).map(|at| work(&candidates.load(at)));
                works.sum::<f64>() / count.max(1) as f64
            }
        };
        Self { weights: settings.load, mean }
    }

    /// Terms of one candidate, in tokens.
    #[inline]
    pub(super) fn terms(&self, reuse: &Reuse, load: &Load) -> Terms {
        let (Self { weights, mean }, Reuse { uncached, images }) = (self, *reuse);
        let load = weights.queue * load.queued.0 as f64
            + weights.decode * load.context.0 as f64
            + weights.request * load.requests as f64
            + weights.imbalance * (work(load) - mean).max(0.0);
        Terms { cost: uncached + load + images, uncached, load, images, rejection: None }
    }
}

/// All tokens that a target has in hand: what `excess` compares with the mean.
fn work(load: &Load) -> f64 {
    load.queued.0 as f64 + load.context.0 as f64
}
