//! Who holds which block.
//!
//! The index maps (namespace, block) to the targets that hold it, and every
//! target to the blocks it holds. Namespaces are part of the key: a request
//! never sees another namespace's blocks, whatever their hashes. It is exact at
//! all times: [`Index::hits`] is the longest prefix whose every block a target
//! holds, with holes, late stores and removals in any order.
//!
//! Targets are addressed by [`Slot`]s, small numbers that are handed out again
//! after [`Index::remove_target`] has emptied them.

use rustc_hash::FxHashMap;

use crate::blocks::{BlockHash, NamespaceId};
use crate::events::{Delta, Tier};
use crate::ids::Slot;
use crate::units::TierHits;

type Key = (NamespaceId, BlockHash);

/// Bit `Tier::index()` is set where the block is held in that tier.
type TierMask = u8;

/// The index of all targets of one domain.
#[derive(Debug, Default)]
pub struct Index {
    holders: FxHashMap<Key, Vec<(Slot, TierMask)>>,
    views: Vec<View>,
    free: Vec<Slot>,
}

#[derive(Debug, Default)]
struct View {
    live: bool,
    /// Blocks held; the masks live with the holders.
    blocks: rustc_hash::FxHashSet<Key>,
}

impl Index {
    /// Makes room for a target that holds nothing.
    pub fn add_target(&mut self) -> Slot {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.views.push(View::default());
            Slot(self.views.len() as u32 - 1)
        });
        self.views[slot.0 as usize] = View { live: true, ..View::default() };
        slot
    }

    /// Forgets a target and frees its slot. O(its blocks).
    pub fn remove_target(&mut self, slot: Slot) {
        if self.view_mut(slot).is_some() {
            self.clear(slot);
            self.views[slot.0 as usize].live = false;
            self.free.push(slot);
        }
    }

    /// Applies one change to what `slot` holds. A slot that was removed is
    /// ignored: its events may still be on their way.
    pub fn apply(&mut self, slot: Slot, delta: &Delta) {
        match delta {
            Delta::Stored { namespace, hashes, tier, .. } => {
                hashes.iter().for_each(|hash| self.store(slot, (*namespace, *hash), *tier));
            }
            Delta::Removed { namespace, hashes, tier } => {
                hashes.iter().for_each(|hash| self.remove(slot, (*namespace, *hash), *tier));
            }
            Delta::Cleared => self.clear(slot),
        }
    }

    /// Replaces all that `slot` holds by `deltas`, as one change.
    pub fn replace(&mut self, slot: Slot, deltas: &[Delta]) {
        self.clear(slot);
        deltas.iter().for_each(|delta| self.apply(slot, delta));
    }

    /// For every slot that holds the first block of `chain`: how many leading
    /// blocks it holds. Sorted by slot; slots without a hit are left out.
    /// O(blocks × holders) at worst, and it stops where no one holds the next.
    pub fn hits(&self, namespace: NamespaceId, chain: &[BlockHash]) -> Vec<(Slot, TierHits)> {
        let mut done: Vec<(Slot, TierHits)> = Vec::new();
        let mut open: Vec<(Slot, TierHits)> = Vec::new();
        for (position, hash) in chain.iter().enumerate() {
            let holders = self.holders.get(&(namespace, *hash)).map_or(&[][..], Vec::as_slice);
            if position == 0 {
                open = holders.iter().map(|(slot, _)| (*slot, TierHits::default())).collect();
            }
            open.retain_mut(|(slot, hits)| {
                let found = holders.iter().find(|(holder, _)| holder == slot);
                match found.and_then(|(_, mask)| fastest(*mask)) {
                    Some(tier) => {
                        hits.add(tier);
                        true
                    }
                    None => {
                        done.push((*slot, *hits));
                        false
                    }
                }
            });
            if open.is_empty() {
                break;
            }
        }
        done.extend(open);
        done.retain(|(_, hits)| hits.total() > 0);
        done.sort_unstable_by_key(|(slot, _)| *slot);
        done
    }

    /// Distinct blocks that `slot` holds.
    pub fn block_count(&self, slot: Slot) -> usize {
        self.views.get(slot.0 as usize).map_or(0, |view| view.blocks.len())
    }

    /// Distinct blocks that `slot` holds in `namespace`. O(its blocks).
    pub fn block_count_in(&self, slot: Slot, namespace: NamespaceId) -> usize {
        let view = self.views.get(slot.0 as usize);
        view.map_or(0, |view| view.blocks.iter().filter(|(found, _)| *found == namespace).count())
    }

    /// Distinct blocks held by anyone.
    pub fn unique_blocks(&self) -> usize {
        self.holders.len()
    }

    fn view_mut(&mut self, slot: Slot) -> Option<&mut View> {
        self.views.get_mut(slot.0 as usize).filter(|view| view.live)
    }

    fn store(&mut self, slot: Slot, key: Key, tier: Tier) {
        let Some(view) = self.view_mut(slot) else { return };
        view.blocks.insert(key);
        let holders = self.holders.entry(key).or_default();
        match holders.iter_mut().find(|(holder, _)| *holder == slot) {
            Some((_, mask)) => *mask |= bit(tier),
            None => holders.push((slot, bit(tier))),
        }
    }

    fn remove(&mut self, slot: Slot, key: Key, tier: Tier) {
        let Some(holders) = self.holders.get_mut(&key) else { return };
        let Some(position) = holders.iter().position(|(holder, _)| *holder == slot) else { return };
        holders[position].1 &= !bit(tier);
        if holders[position].1 == 0 {
            self.forget(slot, key);
            if let Some(view) = self.view_mut(slot) {
                view.blocks.remove(&key);
            }
        }
    }

    fn clear(&mut self, slot: Slot) {
        let Some(view) = self.view_mut(slot) else { return };
        for key in std::mem::take(&mut view.blocks) {
            self.forget(slot, key);
        }
    }

    fn forget(&mut self, slot: Slot, key: Key) {
        if let Some(holders) = self.holders.get_mut(&key) {
            holders.retain(|(holder, _)| *holder != slot);
            if holders.is_empty() {
                self.holders.remove(&key);
            }
        }
        // A table that shrank a lot gives its memory back.
        if self.holders.capacity() > 1024 && self.holders.len() < self.holders.capacity() / 8 {
            self.holders.shrink_to(self.holders.len() * 2);
        }
    }
}

const fn bit(tier: Tier) -> TierMask {
    1 << tier.index()
}

fn fastest(mask: TierMask) -> Option<Tier> {
    Tier::ALL.into_iter().find(|tier| mask & bit(*tier) != 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::{BTreeMap, BTreeSet};

    const SPACE: NamespaceId = NamespaceId(1);

    fn stored(namespace: NamespaceId, hashes: &[u64], tier: Tier) -> Delta {
        let hashes = hashes.iter().copied().map(BlockHash).collect();
        Delta::Stored { namespace, parent: BlockHash(0), hashes, tier }
    }

    fn removed(namespace: NamespaceId, hashes: &[u64], tier: Tier) -> Delta {
        Delta::Removed { namespace, hashes: hashes.iter().copied().map(BlockHash).collect(), tier }
    }

    fn chain(hashes: &[u64]) -> Vec<BlockHash> {
        hashes.iter().copied().map(BlockHash).collect()
    }

    #[test]
    fn a_hole_ends_the_prefix_and_filling_it_restores_the_rest() {
        let mut index = Index::default();
        let slot = index.add_target();
        index.apply(slot, &stored(SPACE, &[1, 2, 3, 4], Tier::Device));
        index.apply(slot, &removed(SPACE, &[2], Tier::Device));
        assert_eq!(index.hits(SPACE, &chain(&[1, 2, 3, 4]))[0].1.total(), 1);
        index.apply(slot, &stored(SPACE, &[2], Tier::Host));
        let hits = index.hits(SPACE, &chain(&[1, 2, 3, 4]))[0].1;
        assert_eq!(hits, TierHits { device: 3, host: 1, disk: 0 });
    }

    #[test]
    fn a_longer_prefix_in_another_namespace_is_invisible() {
        let mut index = Index::default();
        let (mine, theirs) = (index.add_target(), index.add_target());
        index.apply(mine, &stored(SPACE, &[1], Tier::Device));
        index.apply(theirs, &stored(NamespaceId(2), &[1, 2, 3], Tier::Device));
        assert_eq!(index.hits(SPACE, &chain(&[1, 2, 3])), [(mine, TierHits { device: 1, host: 0, disk: 0 })]);
    }

    #[test]
    fn a_slot_is_handed_out_again_empty_and_deaf_to_late_events() {
        let mut index = Index::default();
        let slot = index.add_target();
        index.apply(slot, &stored(SPACE, &[1], Tier::Device));
        index.remove_target(slot);
        index.apply(slot, &stored(SPACE, &[1], Tier::Device));
        assert_eq!((index.unique_blocks(), index.block_count(slot)), (0, 0));
        assert_eq!(index.add_target(), slot);
        assert!(index.hits(SPACE, &chain(&[1])).is_empty());
    }

    #[derive(Clone, Debug)]
    enum Action {
        Store(u8, u64, Vec<u64>, Tier),
        Remove(u8, u64, Vec<u64>, Tier),
        Clear(u8),
        Reuse(u8),
    }

    fn action() -> impl Strategy<Value = Action> {
        let tier = prop::sample::select(Tier::ALL.to_vec());
        let hashes = prop::collection::vec(0u64..12, 1..6);
        let args = (0u8..4, 1u64..3, hashes, tier);
        prop_oneof![
            5 => args.clone().prop_map(|(s, n, h, t)| Action::Store(s, n, h, t)),
            4 => args.prop_map(|(s, n, h, t)| Action::Remove(s, n, h, t)),
            1 => (0u8..4).prop_map(Action::Clear),
            1 => (0u8..4).prop_map(Action::Reuse),
        ]
    }

    /// The oracle: per target and tier a set of blocks; hits by walking it.
    type Sets = BTreeMap<(u8, Tier), BTreeSet<(u64, u64)>>;

    fn oracle(sets: &Sets, target: u8, namespace: u64, chain: &[u64]) -> TierHits {
        let mut hits = TierHits::default();
        for hash in chain {
            let holds =
                |tier: &Tier| sets.get(&(target, *tier)).is_some_and(|set| set.contains(&(namespace, *hash)));
            match Tier::ALL.iter().find(|tier| holds(tier)) {
                Some(Tier::Device) => hits.device += 1,
                Some(Tier::Host) => hits.host += 1,
                Some(Tier::Disk) => hits.disk += 1,
                None => break,
            }
        }
        hits
    }

    fn apply(index: &mut Index, slots: &mut [Slot], sets: &mut Sets, action: &Action) {
        match action {
            Action::Store(target, namespace, hashes, tier) => {
                index.apply(
                    slots[usize::from(*target)],
                    &stored(NamespaceId((*namespace).into()), hashes, *tier),
                );
                let set = sets.entry((*target, *tier)).or_default();
                set.extend(hashes.iter().map(|hash| (*namespace, *hash)));
            }
            Action::Remove(target, namespace, hashes, tier) => {
                index.apply(
                    slots[usize::from(*target)],
                    &removed(NamespaceId((*namespace).into()), hashes, *tier),
                );
                if let Some(set) = sets.get_mut(&(*target, *tier)) {
                    hashes.iter().for_each(|hash| {
                        set.remove(&(*namespace, *hash));
                    });
                }
            }
            Action::Clear(target) => {
                index.apply(slots[usize::from(*target)], &Delta::Cleared);
                sets.retain(|(owner, _), _| owner != target);
            }
            Action::Reuse(target) => {
                index.remove_target(slots[usize::from(*target)]);
                slots[usize::from(*target)] = index.add_target();
                sets.retain(|(owner, _), _| owner != target);
            }
        }
    }

    proptest! {
        #[test]
        fn agrees_with_an_index_of_sets(actions in prop::collection::vec(action(), 1..60)) {
            let mut index = Index::default();
            let mut slots: Vec<Slot> = (0..4).map(|_| index.add_target()).collect();
            let mut sets = Sets::new();
            let query: Vec<u64> = (0..12).collect();
            for action in &actions {
                apply(&mut index, &mut slots, &mut sets, action);
                for namespace in 1u64..3 {
                    let found: BTreeMap<Slot, TierHits> =
                        index.hits(NamespaceId(namespace.into()), &chain(&query)).into_iter().collect();
                    for (target, slot) in slots.iter().enumerate() {
                        let expected = oracle(&sets, target as u8, namespace, &query);
                        prop_assert_eq!(found.get(slot).copied().unwrap_or_default(), expected);
                    }
                }
            }
        }
    }
}
