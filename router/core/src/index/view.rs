//! Slots: which are handed out, which side of each is seen, how much it holds.

use std::sync::Arc;

use parking_lot::Mutex;

use super::owners::Side;
use crate::ids::Slot;

/// All slots.
#[derive(Debug, Default)]
pub(super) struct Views {
    views: Vec<View>,
    /// Number of the side that requests see, by slot. The other one is empty,
    /// or being built or taken down.
    seen: Vec<u8>,
    free: Vec<Slot>,
}

/// What a slot is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stage {
    /// To be handed out.
    #[default]
    Free,
    /// A target's.
    Live,
    /// Nobody's any more, and not yet to be handed out.
    Retired,
}

#[derive(Debug, Default)]
struct View {
    stage: Stage,
    /// Distinct blocks per side.
    blocks: [usize; 2],
    /// Held by whoever uses the unseen side.
    turnover: Arc<Mutex<()>>,
}

impl Views {
    /// A slot that holds nothing.
    pub(super) fn add(&mut self) -> Slot {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.views.push(View::default());
            self.seen.push(0);
            Slot(self.views.len() as u32 - 1)
        });
        self.views[slot.0 as usize].stage = Stage::Live;
        slot
    }

    /// The side that requests see; `None` for a slot that no target has.
    pub(super) fn seen(&self, slot: Slot) -> Option<Side> {
        let live = self.views.get(slot.0 as usize)?.stage == Stage::Live;
        live.then(|| Side::new(slot, self.seen[slot.0 as usize].into()))
    }

    /// Whether requests see `side`.
    pub(super) fn is_seen(&self, side: Side) -> bool {
        self.seen.get(side.slot().0 as usize).is_some_and(|seen| u32::from(*seen) == side.number())
    }

    /// What serialises the users of the slot's unseen side.
    pub(super) fn turnover(&self, slot: Slot) -> Option<Arc<Mutex<()>>> {
        self.views.get(slot.0 as usize).map(|view| Arc::clone(&view.turnover))
    }

    /// Shows the side that was not seen and returns the one that was; `None`
    /// for a slot that no target has.
    pub(super) fn turn(&mut self, slot: Slot) -> Option<Side> {
        let seen = self.seen(slot)?;
        self.seen[slot.0 as usize] ^= 1;
        Some(seen)
    }

    /// Ignores the live slot from now on.
    pub(super) fn retire(&mut self, slot: Slot) {
        if let Some(view) = self.views.get_mut(slot.0 as usize) {
            view.stage = Stage::Retired;
        }
    }

    /// Lets the slot, if it is retired and empty by now, be handed out again.
    pub(super) fn free(&mut self, slot: Slot) {
        if let Some(view) = self.views.get_mut(slot.0 as usize)
            && view.stage == Stage::Retired
        {
            view.stage = Stage::Free;
            self.free.push(slot);
        }
    }

    /// Slots that are not free.
    pub(super) const fn in_use(&self) -> usize {
        self.views.len() - self.free.len()
    }

    pub(super) fn block_count(&self, side: Side) -> usize {
        let view = self.views.get(side.slot().0 as usize);
        view.map_or(0, |view| view.blocks[side.number() as usize])
    }

    pub(super) fn add_blocks(&mut self, side: Side, count: u32) {
        self.views[side.slot().0 as usize].blocks[side.number() as usize] += count as usize;
    }

    pub(super) fn remove_blocks(&mut self, side: Side, count: u32) {
        self.views[side.slot().0 as usize].blocks[side.number() as usize] -= count as usize;
    }
}
