//! Which other namespace was lately sent prompts that begin the same.
//!
//! Roots keep namespaces apart: the same prompt has other hashes under another
//! salt or adapter, so a request cannot even ask for blocks that are held for
//! somebody else. That is how a longer prefix of another tenant is rejected
//! before scoring, and it leaves no trace. For the trace in the receipt, this
//! table remembers by the first block (under one root for all, so that equal
//! beginnings meet) the last two namespaces that were sent it. With the other
//! one's root the first blocks can be hashed as its own would be, and the index
//! be asked what it holds of them.
//!
//! It decides nothing. It is bounded, lives in memory and holds no tokens.

use rustc_hash::FxHashMap;

use crate::blocks::{BlockHash, NamespaceId};

/// Leading blocks that are looked at: with blocks of 16 tokens, 2 µs of hashing.
pub const DEPTH: usize = 64;
/// Most beginnings that are remembered: 4 MB. When half as many are new, the
/// older half goes.
const CAPACITY: usize = 1 << 16;

/// A namespace and where its chains start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Other {
    /// The namespace.
    pub namespace: NamespaceId,
    /// Its root.
    pub root: BlockHash,
}

/// The beginnings of one pool's prompts.
#[derive(Debug, Default)]
pub struct Beginnings {
    young: FxHashMap<BlockHash, [Option<Other>; 2]>,
    old: FxHashMap<BlockHash, [Option<Other>; 2]>,
}

impl Beginnings {
    /// The last namespace other than `own` that was sent a prompt which begins
    /// with `first`.
    pub fn other(&self, first: BlockHash, own: NamespaceId) -> Option<Other> {
        let last = self.young.get(&first).or_else(|| self.old.get(&first))?;
        last.iter().flatten().copied().find(|other| other.namespace != own)
    }

    /// `own` was sent a prompt that begins with `first`.
    pub fn sent(&mut self, first: BlockHash, own: Other) {
        if self.young.len() >= CAPACITY / 2 && !self.young.contains_key(&first) {
            self.old = std::mem::take(&mut self.young);
        }
        let known = self.old.remove(&first);
        let [latest, before] = self.young.entry(first).or_insert_with(|| known.unwrap_or_default());
        if latest.is_some_and(|latest| latest.namespace != own.namespace) {
            *before = *latest;
        }
        *latest = Some(own);
    }

    /// Beginnings remembered.
    pub fn len(&self) -> usize {
        self.young.len() + self.old.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn other(number: u64) -> Other {
        Other { namespace: NamespaceId(number.into()), root: BlockHash(number) }
    }

    /// Who else was sent `first` before `own` is.
    fn send(all: &mut Beginnings, first: u64, own: u64) -> Option<Other> {
        let other = all.other(BlockHash(first), NamespaceId(own.into()));
        all.sent(BlockHash(first), self::other(own));
        other
    }

    #[test]
    fn the_last_other_namespace_is_remembered() {
        let mut all = Beginnings::default();
        for (own, expected) in [(1, None), (1, None), (2, Some(1)), (2, Some(1)), (1, Some(2)), (3, Some(1))]
        {
            assert_eq!(send(&mut all, 7, own), expected.map(other), "{own}");
        }
        assert_eq!(send(&mut all, 8, 1), None, "another beginning");
    }

    #[test]
    fn the_table_is_bounded_and_what_is_asked_for_stays() {
        let mut all = Beginnings::default();
        send(&mut all, 0, 1);
        for number in 1..3 * CAPACITY as u64 {
            send(&mut all, number, 1);
            assert!(all.len() <= CAPACITY);
            if number % 1000 == 0 {
                send(&mut all, 0, 1);
            }
        }
        assert_eq!(send(&mut all, 0, 2), Some(other(1)));
        assert_eq!(send(&mut all, 1, 2), None, "forgotten");
    }
}
