//! `lmetric`: tokens to prefill times requests in the batch.
//!
//! `cost = (uncached + queued_uncached) × (requests + 1)`. A product needs no
//! weight to bring tokens and requests to one unit: a target twice as full must
//! owe half the prefill to be as cheap. Overlap and load weights do not count.

use super::candidates::{Affinity, Task};
use super::price::Reuse;
use super::{Load, Settings, Terms};

/// What is not cached and what was not seen, in tokens.
pub(super) fn reuse(settings: &Settings, task: &Task, affinity: &Affinity) -> Reuse {
    let block = f64::from(task.size.tokens());
    let cached = settings.tiers.of(affinity.hits) * block;
    Reuse {
        uncached: (task.prompt.0 as f64 - cached).max(0.0),
        images: settings.unseen_blocks(task, affinity) * block,
    }
}

/// Terms of one candidate, in tokens × requests.
#[inline]
pub(super) fn terms(reuse: &Reuse, load: &Load) -> Terms {
    // This request is in the batch too, so an idle target costs its prefill.
    let batch = load.requests as f64 + 1.0;
    let (uncached, images) = (reuse.uncached * batch, reuse.images * batch);
    let load = load.queued.0 as f64 * batch;
    Terms { cost: uncached + load + images, uncached, load, images, rejection: None }
}
