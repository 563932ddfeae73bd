//! Token ids and block hashes of texts seen before, and messages of bodies seen
//! before, by their prefixes.
//!
//! A text is cut at safe boundaries ([`super::tokenize`]) into pieces of some
//! size; where it is cut depends on nothing that follows. Each piece is kept under
//! a key that names the piece and everything before it, so the next turn of a
//! conversation finds the pieces of the last one, and only its new text is
//! tokenised and hashed. Pieces hold what they add, not what precedes them: a long
//! conversation takes as much room as its last turn. What is kept of bodies
//! ([`super::seen`]) is kept in the same way and in the same room.
//!
//! The key of the first piece covers the namespace's root and whether special
//! tokens are added. So no tenant's request is served from, or is faster for, what
//! another one sent. Keys are 128 bits of XXH3 under a seed that no client knows.
//!
//! Room is charged by the byte and never exceeded: a piece is kept after others
//! have made room for it. What was not used since the hand last passed goes first;
//! a piece is used whenever a later one of its text is, so beginnings outlive
//! their continuations.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvrouter_core::blocks::BlockHash;
use parking_lot::Mutex;
use xxhash_rust::xxh3::xxh3_128_with_seed;

use super::seen::Chunk;

/// Pieces are at least this long: shorter ones cost more in keeping than in
/// making.
pub const MIN_PIECE_BYTES: usize = 512;
/// Independent parts, each with its lock and its share of the room.
const SHARDS: usize = 16;
/// What an entry takes beside its contents: the piece's header, a slot in a map
/// that is half full, a place in the queue.
const ENTRY_BYTES: usize = 192;

/// What one piece of a text adds.
#[derive(Debug, PartialEq, Eq)]
pub struct Piece {
    /// Its token ids.
    pub ids: Box<[u32]>,
    /// Hashes of the blocks that end in it.
    pub blocks: Box<[BlockHash]>,
}

/// Names a piece and everything before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key(u128);

/// What is kept under a key. Keys of pieces and of chunks have other roots.
#[derive(Debug)]
pub enum Kept {
    /// A piece of a text.
    Piece(Arc<Piece>),
    /// A chunk of a body.
    Chunk(Arc<Chunk>),
}

/// The cache. Shared by all threads.
#[derive(Debug)]
pub struct Cache {
    shards: Vec<Mutex<Shard>>,
    seed: u64,
    evicted: AtomicU64,
}

#[derive(Debug, Default)]
struct Shard {
    entries: HashMap<u128, Entry>,
    /// Keys in the order in which the hand passes them.
    queue: VecDeque<u128>,
    room: usize,
    used: usize,
}

#[derive(Debug)]
struct Entry {
    kept: Kept,
    /// Used since the hand last passed.
    used: bool,
}

impl Piece {
    /// What it takes in the cache.
    fn bytes(&self) -> usize {
        size_of_val(&*self.ids) + size_of_val(&*self.blocks) + ENTRY_BYTES
    }
}

impl Kept {
    fn bytes(&self) -> usize {
        match self {
            Self::Piece(piece) => piece.bytes(),
            Self::Chunk(chunk) => chunk.bytes() + ENTRY_BYTES,
        }
    }
}

impl From<Piece> for Kept {
    fn from(piece: Piece) -> Self {
        Self::Piece(Arc::new(piece))
    }
}

impl From<Chunk> for Kept {
    fn from(chunk: Chunk) -> Self {
        Self::Chunk(Arc::new(chunk))
    }
}

impl Key {
    /// The key of the piece `bytes` that follows the one of this key.
    #[must_use]
    pub fn next(self, bytes: impl AsRef<[u8]>) -> Self {
        let (low, high) = (self.0 as u64, (self.0 >> 64) as u64);
        let hash = xxh3_128_with_seed(bytes.as_ref(), low);
        // The seed carries half of the parent's key; this carries the other half.
        let mixed = ((hash >> 64) as u64).rotate_left(23) ^ high.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Self(u128::from(mixed) << 64 | u128::from(hash as u64))
    }
}

impl Cache {
    /// A cache of at most `bytes`. `seed` must be unknown to clients.
    pub fn new(bytes: usize, seed: u64) -> Self {
        let shard = || Mutex::new(Shard { room: bytes / SHARDS, ..Shard::default() });
        Self { shards: (0..SHARDS).map(|_| shard()).collect(), seed, evicted: AtomicU64::new(0) }
    }

    /// The key from which a text's first piece follows. `variant` is all that
    /// decides about ids and hashes beside the text.
    pub fn root(&self, root: BlockHash, variant: u64) -> Key {
        let mut all = [0; 16];
        all[..8].copy_from_slice(&root.0.to_le_bytes());
        all[8..].copy_from_slice(&variant.to_le_bytes());
        Key(xxh3_128_with_seed(&all, self.seed))
    }

    /// The piece of a text under `key`.
    pub fn piece(&self, key: Key) -> Option<Arc<Piece>> {
        self.find(key, |kept| match kept {
            Kept::Piece(piece) => Some(Arc::clone(piece)),
            Kept::Chunk(_) => None,
        })
    }

    /// The chunk of a body under `key`.
    pub fn chunk(&self, key: Key) -> Option<Arc<Chunk>> {
        self.find(key, |kept| match kept {
            Kept::Chunk(chunk) => Some(Arc::clone(chunk)),
            Kept::Piece(_) => None,
        })
    }

    fn find<T>(&self, key: Key, as_kind: impl Fn(&Kept) -> Option<T>) -> Option<T> {
        let mut shard = self.shard(key).lock();
        let entry = shard.entries.get_mut(&key.0)?;
        entry.used = true;
        as_kind(&entry.kept)
    }

    /// Keeps a piece or a chunk, unless it is larger than all the room there is.
    pub fn insert(&self, key: Key, kept: impl Into<Kept>) {
        let kept = kept.into();
        let bytes = kept.bytes();
        let mut shard = self.shard(key).lock();
        if bytes > shard.room || shard.entries.contains_key(&key.0) {
            return;
        }
        let evicted = shard.make_room(bytes);
        shard.used += bytes;
        shard.queue.push_back(key.0);
        shard.entries.insert(key.0, Entry { kept, used: false });
        drop(shard);
        self.evicted.fetch_add(evicted, Ordering::Relaxed);
    }

    /// Bytes in use.
    pub fn bytes(&self) -> usize {
        self.shards.iter().map(|shard| shard.lock().used).sum()
    }

    /// Pieces that made room for others so far.
    pub fn evicted(&self) -> u64 {
        self.evicted.load(Ordering::Relaxed)
    }

    fn shard(&self, key: Key) -> &Mutex<Shard> {
        &self.shards[(key.0 >> 64) as usize % SHARDS]
    }
}

impl Shard {
    /// Evicts until `bytes` fit; how many pieces went. Each step of the hand
    /// clears a mark or frees something, so it ends.
    fn make_room(&mut self, bytes: usize) -> u64 {
        let mut evicted = 0;
        while self.used + bytes > self.room {
            let Some(key) = self.queue.pop_front() else { break };
            match self.entries.get_mut(&key) {
                Some(entry) if entry.used => {
                    entry.used = false;
                    self.queue.push_back(key);
                }
                Some(_) => {
                    let freed = self.entries.remove(&key).map_or(0, |entry| entry.kept.bytes());
                    self.used -= freed;
                    evicted += 1;
                }
                None => {}
            }
        }
        evicted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(tokens: usize) -> Piece {
        Piece { ids: vec![7; tokens].into(), blocks: vec![BlockHash(7); tokens / 16].into() }
    }

    /// The oracle adds up what is really there.
    fn total(cache: &Cache) -> usize {
        let of = |shard: &Mutex<Shard>| {
            let shard = shard.lock();
            assert_eq!(shard.queue.len(), shard.entries.len(), "each is queued once");
            shard.entries.values().map(|entry| entry.kept.bytes()).sum::<usize>()
        };
        cache.shards.iter().map(of).sum()
    }

    #[test]
    fn the_room_is_never_exceeded() {
        let room = 256 << 10;
        let cache = Cache::new(room, 1);
        let mut key = cache.root(BlockHash(0), 0);
        for number in 0..5_000_usize {
            key = key.next(number.to_string());
            cache.insert(key, piece(number * 37 % 900));
            cache.insert(key, piece(1));
            assert!(cache.bytes() <= room, "{number}");
            if number % 100 == 0 {
                assert_eq!(cache.bytes(), total(&cache), "{number}");
            }
        }
        assert!(cache.evicted() > 1_000, "it was full");
        assert!(cache.bytes() > room / 2, "it stays full");
        cache.insert(key.next("large"), piece(room));
        assert_eq!(cache.piece(key.next("large")), None, "larger than all the room");
        assert!(cache.bytes() <= room);
    }

    #[test]
    fn what_is_used_stays() {
        let cache = Cache::new(SHARDS * 4 * piece(16).bytes(), 1);
        let root = cache.root(BlockHash(0), 0);
        let kept = root.next("kept");
        cache.insert(kept, piece(16));
        for number in 0..1_000 {
            assert!(cache.piece(kept).is_some(), "{number}");
            cache.insert(root.next(number.to_string()), piece(16));
        }
    }

    #[test]
    fn a_key_names_everything_before_it() {
        let cache = Cache::new(1 << 20, 1);
        let (one, other) = (cache.root(BlockHash(0), 0), cache.root(BlockHash(1), 0));
        let keys = [
            one.next("a").next("b"),
            one.next("b").next("b"),
            one.next("ab"),
            one.next("b"),
            other.next("a").next("b"),
            cache.root(BlockHash(0), 1).next("a").next("b"),
            Cache::new(1 << 20, 2).root(BlockHash(0), 0).next("a").next("b"),
        ];
        let different: std::collections::HashSet<Key> = keys.into_iter().collect();
        assert_eq!(different.len(), keys.len());
    }
}
