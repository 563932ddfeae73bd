//! `kv-aware`: the published formula, in blocks.
//!
//! `cost = overlap_weight × (request_blocks − hits) + active_blocks −
//! shared_active`. Without the last term a sibling of a prompt in flight would
//! be repelled by the very blocks it shares; for prompts that share nothing it
//! is 0 and the formula is the published one.

use super::candidates::{Affinity, Task};
use super::price::Reuse;
use super::{Load, Settings, Terms};

/// What is not cached and what was not seen, in blocks.
pub(super) fn reuse(settings: &Settings, task: &Task, affinity: &Affinity) -> Reuse {
    let weight = settings.overlap.of(task.role);
    Reuse {
        uncached: weight * (task.blocks as f64 - settings.tiers.of(affinity.hits)),
        images: settings.unseen_blocks(task, affinity),
    }
}

/// Terms of one candidate, in blocks.
#[inline]
pub(super) fn terms(affinity: &Affinity, reuse: &Reuse, load: &Load) -> Terms {
    let Reuse { uncached, images } = *reuse;
    let load = load.active_blocks.saturating_sub(affinity.shared_active) as f64;
    Terms { cost: uncached + load + images, uncached, load, images, rejection: None }
}
