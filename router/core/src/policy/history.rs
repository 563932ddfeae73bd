//! Where prefixes were sent: the fallback for targets without a sound view.
//!
//! Falling back to plain load at once would turn a broker failure into a
//! stampede of recomputation. So the router remembers, bounded and expiring,
//! which target was sent which block. What comes from here is labelled
//! approximate and never mixes with what events confirm.

use std::collections::VecDeque;

use rustc_hash::FxHashMap;

use crate::blocks::{BlockHash, NamespaceId};
use crate::ids::Slot;
use crate::units::{Millis, Tick};

/// Most (block, target) pairs that are remembered: about 100 MB, and a day of
/// one request a second with 10,000 new tokens each.
pub const CAPACITY: usize = 1 << 20;
/// How long a route is worth remembering. Engines under load evict sooner; the
/// figure is Dynamo's for the same purpose, made longer because ours is only
/// asked when nothing better is known.
pub const TIME_TO_LIVE: Millis = Millis::from_secs(600);

type Key = (NamespaceId, BlockHash, Slot);

/// The record of one pool.
#[derive(Debug, Default)]
pub struct History {
    /// When the block was last sent there.
    sent: FxHashMap<Key, Tick>,
    /// In the order of sending; a pair that was sent again stands here twice,
    /// and only its last entry counts.
    order: VecDeque<(Tick, Key)>,
    evicted: u64,
}

impl History {
    /// Remembers that `blocks` of `namespace` were sent to `slot`.
    pub fn record(&mut self, now: Tick, slot: Slot, namespace: NamespaceId, blocks: &[BlockHash]) {
        self.expire(now);
        for block in blocks {
            let key = (namespace, *block, slot);
            self.sent.insert(key, now);
            self.order.push_back((now, key));
            if self.order.len() > 2 * CAPACITY || self.sent.len() > CAPACITY {
                self.evicted += u64::from(self.forget_oldest());
            }
        }
    }

    /// Leading blocks of `blocks` that were sent to `slot` and are not expired.
    pub fn hits(&self, now: Tick, slot: Slot, namespace: NamespaceId, blocks: &[BlockHash]) -> u64 {
        let fresh = |block: &&BlockHash| {
            let sent = self.sent.get(&(namespace, **block, slot));
            sent.is_some_and(|sent| now.since(*sent) <= TIME_TO_LIVE)
        };
        blocks.iter().take_while(fresh).count() as u64
    }

    /// Forgets a target. O(size of the record); a target leaves seldom.
    pub fn remove_target(&mut self, slot: Slot) {
        self.sent.retain(|(_, _, owner), _| *owner != slot);
        self.order.retain(|(_, (_, _, owner))| *owner != slot);
    }

    /// Pairs remembered.
    pub fn len(&self) -> usize {
        self.sent.len()
    }

    /// Whether nothing is remembered.
    pub fn is_empty(&self) -> bool {
        self.sent.is_empty()
    }

    /// Pairs forgotten before their time because the record was full.
    pub const fn evicted(&self) -> u64 {
        self.evicted
    }

    fn expire(&mut self, now: Tick) {
        while self.order.front().is_some_and(|(sent, _)| now.since(*sent) > TIME_TO_LIVE) {
            self.forget_oldest();
        }
    }

    /// Whether a pair that still counted was forgotten.
    fn forget_oldest(&mut self) -> bool {
        let Some((sent, key)) = self.order.pop_front() else { return false };
        let current = self.sent.get(&key) == Some(&sent);
        if current {
            self.sent.remove(&key);
        }
        current
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPACE: NamespaceId = NamespaceId(1);

    fn blocks(range: std::ops::Range<u64>) -> Vec<BlockHash> {
        range.map(BlockHash).collect()
    }

    #[test]
    fn remembers_prefixes_per_target_and_namespace_until_they_expire() {
        let mut history = History::default();
        history.record(Tick(0), Slot(0), SPACE, &blocks(0..4));
        let hits = |history: &History, now, slot, space, range| {
            history.hits(Tick(now), Slot(slot), space, &blocks(range))
        };
        assert_eq!(hits(&history, 1, 0, SPACE, 0..9), 4);
        assert_eq!(hits(&history, 1, 1, SPACE, 0..9), 0, "another target");
        assert_eq!(hits(&history, 1, 0, NamespaceId(2), 0..9), 0, "another namespace");
        assert_eq!(hits(&history, 1, 0, SPACE, 1..9), 3, "any start that was sent");
        assert_eq!(hits(&history, TIME_TO_LIVE.0, 0, SPACE, 0..9), 4, "at the edge");
        assert_eq!(hits(&history, TIME_TO_LIVE.0 + 1, 0, SPACE, 0..9), 0, "expired");
        history.record(Tick(TIME_TO_LIVE.0 + 1), Slot(1), SPACE, &blocks(0..1));
        assert_eq!(history.len(), 1, "what expired is gone");
        history.remove_target(Slot(1));
        assert!(history.is_empty());
    }

    #[test]
    fn a_full_record_forgets_the_oldest_and_counts_it() {
        let mut history = History::default();
        let all = CAPACITY as u64;
        history.record(Tick(0), Slot(0), SPACE, &blocks(0..all + 10));
        assert_eq!((history.len(), history.evicted()), (CAPACITY, 10));
        assert_eq!(history.hits(Tick(0), Slot(0), SPACE, &blocks(10..20)), 10, "the young ones stay");
        for _ in 0..3 {
            history.record(Tick(0), Slot(0), SPACE, &blocks(10..all));
        }
        assert!(history.order.len() <= 2 * CAPACITY, "repeats do not grow it");
    }
}
