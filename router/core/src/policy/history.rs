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

/// Most (block, target) pairs that are remembered: 25 MB, and at one pair for
/// eight blocks about 30 million tokens.
pub const CAPACITY: usize = 1 << 18;
/// How long a route is worth remembering. Engines under load evict sooner; the
/// figure is Dynamo's for the same purpose, made longer because ours is only
/// asked when nothing better is known.
pub const TIME_TO_LIVE: Millis = Millis::from_secs(600);
/// A long prompt is remembered by every so many-th block and by its last one:
/// chained hashes make each of them vouch for all before it.
const STRIDE: usize = 8;

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
    /// O(`blocks.len()` / 8).
    pub fn record(&mut self, now: Tick, slot: Slot, namespace: NamespaceId, blocks: &[BlockHash]) {
        self.expire(now);
        let strides = blocks.chunks(STRIDE).skip(1).filter_map(|chunk| chunk.first());
        for block in blocks.iter().take(STRIDE).chain(strides).chain(blocks.last()) {
            let key = (namespace, *block, slot);
            if self.sent.insert(key, now) != Some(now) {
                self.order.push_back((now, key));
            }
            while self.order.len() > 2 * CAPACITY || self.sent.len() > CAPACITY {
                self.evicted += u64::from(self.forget_oldest());
            }
        }
    }

    /// Leading blocks of `blocks` that were sent to `slot` and are not expired:
    /// exact for a prompt that was sent itself and for up to eight blocks, else
    /// up to seven too few. O(log `blocks.len()`).
    pub fn hits(&self, now: Tick, slot: Slot, namespace: NamespaceId, blocks: &[BlockHash]) -> u64 {
        let fresh = |at: usize| {
            let sent = blocks.get(at).and_then(|block| self.sent.get(&(namespace, *block, slot)));
            sent.is_some_and(|sent| now.since(*sent) <= TIME_TO_LIVE)
        };
        if blocks.is_empty() || !fresh(0) {
            return 0;
        }
        if fresh(blocks.len() - 1) {
            return blocks.len() as u64;
        }
        // Where a block was sent, all marks before it were.
        let (mut sent, mut unsent) = (0, blocks.len().div_ceil(STRIDE));
        while sent + 1 < unsent {
            let middle = sent + (unsent - sent) / 2;
            if fresh(middle * STRIDE) { sent = middle } else { unsent = middle }
        }
        let known = if sent == 0 { (1..STRIDE).take_while(|at| fresh(*at)).count() } else { 0 };
        (sent * STRIDE + known + 1) as u64
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

    fn hits(history: &History, now: u64, slot: u32, space: NamespaceId, prompt: &[BlockHash]) -> u64 {
        history.hits(Tick(now), Slot(slot), space, prompt)
    }

    #[test]
    fn remembers_prefixes_per_target_and_namespace_until_they_expire() {
        let mut history = History::default();
        history.record(Tick(0), Slot(0), SPACE, &blocks(0..4));
        let query = blocks(0..9);
        assert_eq!(hits(&history, 1, 0, SPACE, &query), 4);
        assert_eq!(hits(&history, 1, 1, SPACE, &query), 0, "another target");
        assert_eq!(hits(&history, 1, 0, NamespaceId(2), &query), 0, "another namespace");
        assert_eq!(hits(&history, TIME_TO_LIVE.0, 0, SPACE, &query), 4, "at the edge");
        assert_eq!(hits(&history, TIME_TO_LIVE.0 + 1, 0, SPACE, &query), 0, "expired");
        history.record(Tick(TIME_TO_LIVE.0 + 1), Slot(1), SPACE, &blocks(0..1));
        assert_eq!(history.len(), 1, "what expired is gone");
        history.remove_target(Slot(1));
        assert!(history.is_empty());
    }

    /// The oracle compares block by block.
    #[test]
    fn never_claims_more_than_was_sent_and_misses_less_than_a_stride() {
        for sent in [1, 7, 8, 9, 16, 17, 63, 64, 100] {
            let mut history = History::default();
            history.record(Tick(0), Slot(0), SPACE, &blocks(0..sent));
            for asked in [1, 5, 8, 9, 16, 40, 64, 65, 100, 130] {
                for shared in [0, 1, 5, 8, 12, 33, 64, 99, 130] {
                    let branch = (1_000..1_000 + asked).skip(shared.min(asked) as usize);
                    let prompt: Vec<BlockHash> =
                        (0..shared.min(asked)).chain(branch).map(BlockHash).collect();
                    let truth = shared.min(asked).min(sent);
                    let found = hits(&history, 0, 0, SPACE, &prompt);
                    assert!(
                        found <= truth && truth - found < STRIDE as u64,
                        "{sent} {asked} {shared}: {found}"
                    );
                }
            }
        }
    }

    /// Case G32.
    #[test]
    fn a_full_record_forgets_the_oldest_and_counts_it() {
        let mut history = History::default();
        let all = CAPACITY as u64;
        for block in 0..all + 10 {
            history.record(Tick(block), Slot(0), SPACE, &blocks(block..block + 1));
            history.record(Tick(block), Slot(0), SPACE, &blocks(block..block + 1));
        }
        assert!(history.len() <= CAPACITY && history.order.len() <= 2 * CAPACITY);
        let now = all + 9;
        assert_eq!(hits(&history, now, 0, SPACE, &blocks(now..now + 1)), 1, "the young ones stay");
    }
}
