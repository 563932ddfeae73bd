//! Who holds which block.
//!
//! The index maps (namespace, block) to the targets that hold it. Namespaces
//! are part of the key: a request never sees another namespace's blocks,
//! whatever their hashes. It is exact at all times: [`Index::hits`] is the
//! longest prefix whose every block a target holds, with holes, late stores and
//! removals in any order. One thing it takes for granted: a block hash names
//! all blocks before it, so within a namespace equal hashes have equal pasts.
//!
//! Targets are addressed by [`Slot`]s, small numbers. One that was retired is
//! emptied and ignored, and handed out again only once it is freed: whoever
//! still knows its number must have let go of it by then.
//!
//! Shape of the data, from the outside in: `state` owns all of it; `places`
//! leads from a block hash to a position in a run; `runs` are stretches of
//! chains, which branches never split; `owners` says which lanes (slot, side,
//! tier) hold which positions of a run; `view` has two sides for each slot, of
//! which requests see one; `lookup` walks a chain along runs.
//!
//! Concurrency: one lock, held for at most `SECTION` blocks at a time, which
//! takes some microseconds; then readers that wait go first (`gate`). What replaces
//! or empties a whole view works on the unseen side and turns the slot around
//! in one step, so nobody sees it half done.

mod gate;
mod lookup;
mod owners;
mod places;
mod runs;
mod spaces;
mod state;
mod view;

#[cfg(test)]
mod tests;

use self::gate::Gate;
use self::owners::Side;
use self::state::State;
use crate::blocks::{BlockHash, NamespaceId};
use crate::events::Delta;
use crate::ids::Slot;
use crate::units::TierHits;

/// Most blocks that are changed under one hold of the lock: about four
/// microseconds of new blocks, less of any others.
const SECTION: u16 = 32;

/// The index of all targets of one domain. All methods can be called from any
/// thread.
#[derive(Debug, Default)]
pub struct Index {
    state: Gate<State>,
}

/// What one target holds of a chain. 16 bytes, because there is one for every
/// holder in every answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hit {
    /// Whose.
    pub slot: Slot,
    /// Leading blocks held, by the tier that each is in; at least one.
    tiers: [u32; 3],
}

impl Hit {
    /// Leading blocks held, by their fastest tiers.
    pub fn tiers(self) -> TierHits {
        let [device, host, disk] = self.tiers.map(u64::from);
        TierHits { device, host, disk }
    }

    /// All leading blocks held.
    fn total(self) -> u32 {
        self.tiers.iter().sum()
    }
}

/// What every target holds of a chain, to ask by slot.
#[derive(Clone, Debug, Default)]
pub struct Holdings {
    hits: Vec<Hit>,
    /// The same by slot; zeros for nothing.
    tiers: Vec<[u32; 3]>,
}

impl Holdings {
    /// Whether nobody holds anything.
    pub const fn is_empty(&self) -> bool {
        self.hits.is_empty()
    }

    /// Leading blocks that `slot` holds.
    #[inline]
    pub fn of(&self, slot: Slot) -> TierHits {
        let [device, host, disk] = self.by_tier(slot).map(u64::from);
        TierHits { device, host, disk }
    }

    /// The same as numbers: device, host, disk.
    #[inline]
    pub(crate) fn by_tier(&self, slot: Slot) -> [u32; 3] {
        self.tiers.get(slot.0 as usize).copied().unwrap_or_default()
    }
}

impl Index {
    /// Makes room for a target that holds nothing.
    pub fn add_target(&self) -> Slot {
        self.state.write().views.add()
    }

    /// Forgets a target. From its beginning on, no request sees the target, and
    /// what is still applied to it is ignored. O(its blocks + runs).
    pub fn retire_target(&self, slot: Slot) {
        let turnover = self.state.read().views.turnover(slot);
        let Some(turnover) = turnover else { return };
        let _alone = turnover.lock();
        let turned = self.section(|state| {
            let seen = state.views.turn(slot)?;
            state.views.retire(slot);
            Some(seen)
        });
        if let Some(old) = turned {
            self.drain(old);
        }
    }

    /// Lets the slot of a retired target be handed out again, at the latest
    /// when it is empty. A slot that is in use, or free, stays so. O(1).
    pub fn free_slot(&self, slot: Slot) {
        let turnover = self.state.read().views.turnover(slot);
        let Some(turnover) = turnover else { return };
        // Whoever empties it holds this.
        let _alone = turnover.lock();
        self.section(|state| state.views.free(slot));
    }

    /// Forgets a target and frees its slot: for callers that are the only ones
    /// to know it. O(its blocks + runs).
    pub fn remove_target(&self, slot: Slot) {
        self.retire_target(slot);
        self.free_slot(slot);
    }

    /// Slots that are handed out, retired ones that are not free yet included.
    pub fn slots_in_use(&self) -> usize {
        self.state.read().views.in_use()
    }

    /// Applies one change to what `slot` holds. A slot that was retired is
    /// ignored: its events may still be on their way.
    ///
    /// Requests see the blocks of a store or removal appear or vanish in order,
    /// a section at a time, and those of a clear vanish at once. O(hashes); a
    /// clear is O(blocks held + runs).
    pub fn apply(&self, slot: Slot, delta: &Delta) {
        match delta {
            Delta::Cleared => self.replace(slot, &[]),
            other => self.apply_to(other, |state| state.views.seen(slot)),
        }
    }

    /// Replaces all that `slot` holds by `deltas`. Requests see what it held
    /// before until they see all of the new. Changes that are applied meanwhile
    /// are lost. O(blocks, old and new, + runs).
    pub fn replace(&self, slot: Slot, deltas: &[Delta]) {
        let turnover = self.state.read().views.turnover(slot);
        let Some(turnover) = turnover else { return };
        let _alone = turnover.lock();
        // Nobody but the holder of `turnover` turns or retires the slot.
        let seen = self.state.read().views.seen(slot);
        let Some(side) = seen.map(|seen| Side::new(slot, 1 - seen.number())) else { return };
        for delta in deltas {
            match delta {
                Delta::Cleared => self.drain(side),
                other => self.apply_to(other, |_| Some(side)),
            }
        }
        if let Some(old) = self.section(|state| state.views.turn(slot)) {
            self.drain(old);
        }
    }

    /// For every slot that holds the first block of `chain`: how many leading
    /// blocks it holds. Sorted by slot; slots without a hit are left out.
    ///
    /// O(runs × (log blocks + holders)) over the runs that the longest hit
    /// passes through; few, unless many branches were stored before the trunk.
    pub fn hits(&self, namespace: NamespaceId, chain: &[BlockHash]) -> Vec<Hit> {
        let mut hits = Vec::new();
        self.append_hits(namespace, chain, &mut hits);
        hits
    }

    /// [`Index::hits`] to ask by slot, in memory that is used again.
    /// O(highest slot) more: for those who ask about most of them.
    pub fn look_up(&self, namespace: NamespaceId, chain: &[BlockHash], into: &mut Holdings) {
        let Holdings { hits, tiers } = into;
        hits.drain(..).for_each(|hit| tiers[hit.slot.0 as usize] = [0; 3]);
        self.append_hits(namespace, chain, hits);
        let slots = hits.last().map_or(0, |hit| hit.slot.0 as usize + 1);
        tiers.resize(slots.max(tiers.len()), [0; 3]);
        for hit in hits {
            tiers[hit.slot.0 as usize] = hit.tiers;
        }
    }

    fn append_hits(&self, namespace: NamespaceId, chain: &[BlockHash], hits: &mut Vec<Hit>) {
        let state = self.state.read();
        if let Some(space) = state.spaces.find(namespace) {
            lookup::hits(&state, space, chain, hits);
        }
    }

    /// Distinct blocks that `slot` holds.
    pub fn block_count(&self, slot: Slot) -> usize {
        let state = self.state.read();
        state.views.seen(slot).map_or(0, |side| state.views.block_count(side))
    }

    /// Distinct blocks that `slot` holds in `namespace`. O(runs), during which
    /// nothing is applied: for tests and people.
    pub fn block_count_in(&self, slot: Slot, namespace: NamespaceId) -> usize {
        let state = self.state.read();
        state.views.seen(slot).map_or(0, |side| state.count_in(side, namespace))
    }

    /// Distinct blocks held by anyone, those of views being built or taken down
    /// included.
    pub fn unique_blocks(&self) -> usize {
        self.state.read().places.len()
    }

    /// Heap bytes of the blocks and who holds them. O(runs), a few at a time, so that
    /// nobody waits for all of it: what changes meanwhile may be counted or not.
    pub fn heap_bytes(&self) -> usize {
        let places = self.state.read().places.heap_bytes();
        let runs = (0..).map_while(|chunk| self.state.read().runs.heap_bytes(chunk));
        places + runs.sum::<usize>()
    }

    /// Applies a store or a removal to the side that `side` names, section by
    /// section, while it names one.
    fn apply_to(&self, delta: &Delta, side: impl Fn(&State) -> Option<Side>) {
        match delta {
            Delta::Stored { namespace, parent, hashes, tier } => {
                let mut before = *parent;
                for part in hashes.chunks(SECTION.into()) {
                    self.section(|state| {
                        if let Some(side) = side(state) {
                            state.store(side.lane(*tier), *namespace, before, part);
                        }
                    });
                    before = part.last().copied().unwrap_or(before);
                }
            }
            Delta::Removed { namespace, hashes, tier } => {
                for part in hashes.chunks(SECTION.into()) {
                    self.section(|state| {
                        if let Some(side) = side(state) {
                            state.remove(side.lane(*tier), *namespace, part);
                        }
                    });
                }
            }
            Delta::Cleared => {}
        }
    }

    /// Empties a side that nobody sees and nobody else uses.
    fn drain(&self, side: Side) {
        let mut from = Some(0);
        while let Some(number) = from {
            from = self.section(|state| state.drain(side, number, SECTION));
        }
    }

    /// One hold of the lock.
    fn section<R>(&self, change: impl FnOnce(&mut State) -> R) -> R {
        change(&mut self.state.write())
    }
}
