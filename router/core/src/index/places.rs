//! Where a block is: block hash to a position in a run.
//!
//! A table of eight bytes and a tag per block. It is cut into shards that grow
//! one by one, so that no single insertion moves more than a sliver of it. An
//! entry does not repeat the hash, which stands in the run; it has some of its
//! bits, enough to grow without a look at the runs.

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;

/// Longest run, in blocks: a prompt of 128k tokens at 16 a block is one run.
pub(super) const MAX_RUN: u16 = 1 << POSITION_BITS;
const POSITION_BITS: u32 = 13;
/// Most runs at once; each is a stretch of blocks, and 64 bytes.
pub(super) const MAX_RUNS: u32 = 1 << RUN_BITS;
const RUN_BITS: u32 = 28;
const MARK_BITS: u32 = 64 - POSITION_BITS - RUN_BITS;
const SHARD_BITS: u32 = 12;

/// A position in a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// Which run.
    pub(super) run: u32,
    /// Where in it.
    pub(super) position: u16,
}

/// A block hash, mixed with its namespace so that every bit depends on all of
/// both.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mixed(u64);

/// Mark, run and position of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Packed(u64);

/// The table. It holds exactly the blocks that anyone holds.
#[derive(Debug)]
pub(super) struct Places {
    shards: Vec<HashTable<Packed>>,
    count: usize,
}

impl Mixed {
    /// Folded multiplication: block hashes may be anything, small numbers in
    /// tests and chosen ones in an attack.
    pub(super) fn new(salt: u64, hash: u64) -> Self {
        let product = u128::from(hash ^ salt) * 0x9e37_79b9_7f4a_7c15_u128;
        let folded = (product as u64) ^ (product >> 64) as u64;
        Self(folded.wrapping_mul(0xd6e8_feb8_6659_fd93))
    }

    const fn shard(self) -> usize {
        (self.0 >> (64 - SHARD_BITS)) as usize
    }

    const fn mark(self) -> u64 {
        self.0 << SHARD_BITS >> (64 - MARK_BITS)
    }
}

impl Packed {
    fn new(mark: u64, place: Place) -> Self {
        Self(mark << (64 - MARK_BITS) | u64::from(place.run) << POSITION_BITS | u64::from(place.position))
    }

    const fn mark(self) -> u64 {
        self.0 >> (64 - MARK_BITS)
    }

    const fn place(self) -> Place {
        let run = (self.0 >> POSITION_BITS) as u32 & (MAX_RUNS - 1);
        Place { run, position: self.0 as u16 & (MAX_RUN - 1) }
    }
}

/// The shard's own hash: it buckets by the lower bits and tags by the upper
/// seven. 16 + 7 bits are the mark.
const fn spread(mark: u64) -> u64 {
    mark & 0xffff | mark >> 16 << 57
}

impl Default for Places {
    fn default() -> Self {
        Self { shards: (0..1 << SHARD_BITS).map(|_| HashTable::new()).collect(), count: 0 }
    }
}

impl Places {
    /// Blocks in the table.
    pub(super) const fn len(&self) -> usize {
        self.count
    }

    /// The place of a block for which `is_it` is true.
    pub(super) fn find(&self, mixed: Mixed, is_it: impl Fn(Place) -> bool) -> Option<Place> {
        let mark = mixed.mark();
        let found = self.shards[mixed.shard()]
            .find(spread(mark), |packed| packed.mark() == mark && is_it(packed.place()));
        found.map(|packed| packed.place())
    }

    /// Puts a block at `place`, unless it is in the table already.
    pub(super) fn insert(&mut self, mixed: Mixed, place: Place, is_it: impl Fn(Place) -> bool) -> bool {
        let mark = mixed.mark();
        let same = |packed: &Packed| packed.mark() == mark && is_it(packed.place());
        let entry = self.shards[mixed.shard()].entry(spread(mark), same, |packed| spread(packed.mark()));
        let Entry::Vacant(vacant) = entry else { return false };
        vacant.insert(Packed::new(mark, place));
        self.count += 1;
        true
    }

    /// Moves a block within or between runs.
    pub(super) fn relocate(&mut self, mixed: Mixed, from: Place, to: Place) {
        let old = Packed::new(mixed.mark(), from);
        let shard = &mut self.shards[mixed.shard()];
        if let Some(packed) = shard.find_mut(spread(mixed.mark()), |packed| *packed == old) {
            *packed = Packed::new(mixed.mark(), to);
        }
    }

    /// Takes out blocks, 64 at most, that are in the table. Finding them all
    /// first lets their cache misses overlap. Shards that shrank a lot give
    /// memory back.
    pub(super) fn remove(&mut self, gone: &[(Mixed, Place)]) {
        let mut buckets = [None; 64];
        for (bucket, (mixed, place)) in buckets.iter_mut().zip(gone) {
            let packed = Packed::new(mixed.mark(), *place);
            let shard = &self.shards[mixed.shard()];
            *bucket = shard.find_bucket_index(spread(mixed.mark()), |found| *found == packed);
        }
        // Removing leaves the other buckets where they are; shrinking would not.
        for (bucket, (mixed, _)) in buckets.iter().zip(gone) {
            let shard = &mut self.shards[mixed.shard()];
            if let Some(Ok(entry)) = bucket.map(|bucket| shard.get_bucket_entry(bucket)) {
                entry.remove();
                self.count -= 1;
            }
        }
        for (mixed, _) in gone {
            let shard = &mut self.shards[mixed.shard()];
            if shard.len() < shard.capacity() / 4 {
                shard.shrink_to(shard.len() * 3 / 2, |packed| spread(packed.mark()));
            }
        }
    }

    /// Heap bytes. O(shards).
    pub(super) fn heap_bytes(&self) -> usize {
        let header = size_of::<HashTable<Packed>>();
        self.shards.iter().map(|shard| header + shard.allocation_size()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packing_keeps_every_bit() {
        for (mark, run, position) in [(0, 0, 0), ((1 << MARK_BITS) - 1, MAX_RUNS - 1, MAX_RUN - 1), (5, 6, 7)]
        {
            let place = Place { run, position };
            let packed = Packed::new(mark, place);
            assert_eq!((packed.mark(), packed.place()), (mark, place));
        }
        assert_eq!(MARK_BITS, 23, "what `spread` takes apart");
    }

    #[test]
    fn small_hashes_spread_over_all_shards() {
        let mut counts = vec![0u32; 1 << SHARD_BITS];
        (0..1u64 << 18).for_each(|hash| counts[Mixed::new(0, hash).shard()] += 1);
        let (least, most) = (counts.iter().min(), counts.iter().max());
        assert!(least >= Some(&24) && most <= Some(&128), "64 each on average, got {least:?} to {most:?}");
    }

    #[test]
    fn memory_comes_back() {
        let mut places = Places::default();
        let empty = places.heap_bytes();
        let mixed = |hash: u64| Mixed::new(1, hash);
        let place = |hash: u64| Place { run: (hash >> 13) as u32, position: hash as u16 & (MAX_RUN - 1) };
        for hash in 0..200_000u64 {
            assert!(places.insert(mixed(hash), place(hash), |other| other == place(hash)));
            assert!(!places.insert(mixed(hash), place(hash), |other| other == place(hash)));
        }
        let full = places.heap_bytes() - empty;
        assert!(full <= 200_000 * 21, "{} bytes a block", full / 200_000);
        (0..200_000).for_each(|hash| places.remove(&[(mixed(hash), place(hash))]));
        assert_eq!((places.len(), places.heap_bytes() < empty + 4096 * 64), (0, true));
    }
}
