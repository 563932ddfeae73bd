//! `longest-prefix`: most leading blocks held, whatever the load.
//!
//! `cost = request_blocks − hits`. Load only breaks ties, so it is right for a
//! fleet that is never busy, and wrong for any other: a popular prefix draws all
//! its requests to one target. Here for comparison, and for fleets of few
//! sessions.

use super::candidates::{Affinity, Task};
use super::price::Reuse;
use super::{Settings, Terms};

/// What is not cached and what was not seen, in blocks.
pub(super) fn reuse(settings: &Settings, task: &Task, affinity: &Affinity) -> Reuse {
    Reuse {
        uncached: task.blocks as f64 - settings.tiers.of(affinity.hits),
        images: settings.unseen_blocks(task, affinity),
    }
}

/// Terms of one candidate, in blocks.
#[inline]
pub(super) fn terms(reuse: &Reuse) -> Terms {
    let Reuse { uncached, images } = *reuse;
    Terms { cost: uncached + images, uncached, images, ..Terms::default() }
}
