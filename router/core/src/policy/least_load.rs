//! `least-load`: fewest active blocks, whatever is cached.

use super::{Load, Terms};

/// Terms of one candidate, in blocks.
#[inline]
pub(super) fn terms(load: &Load) -> Terms {
    let load = load.active_blocks as f64;
    Terms { cost: load, load, ..Terms::default() }
}
