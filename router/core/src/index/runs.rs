//! Runs: stretches of consecutive blocks of one chain, with their holders.
//!
//! A run is never split when a chain branches off it: the branch is a run of
//! its own, and nothing points from one to the other. The table of places leads
//! from a block hash to a position in a run and from the end of a run to the
//! next one, so a run can be freed whenever nobody holds anything of it.

use super::owners::Owners;
use super::places::{MAX_RUNS, Place};
use crate::blocks::BlockHash;

/// A stretch of consecutive blocks. One cache line.
#[derive(Debug, Default)]
pub(super) struct Run {
    /// The interned namespace.
    pub(super) space: u32,
    /// Positions that someone holds.
    pub(super) live: u32,
    hashes: Vec<u64>,
    /// Who holds what.
    pub(super) owners: Owners,
}

/// All runs, by number. Numbers of freed runs are handed out again.
#[derive(Debug, Default)]
pub(super) struct Runs {
    chunks: Vec<Chunk>,
    /// Chunks that may have room.
    roomy: Vec<u32>,
}

/// Runs that are allocated and, once all are free, deallocated together.
#[derive(Debug, Default)]
struct Chunk {
    runs: Vec<Run>,
    free: Vec<u8>,
    /// Whether it is in [`Runs::roomy`].
    listed: bool,
}

/// Runs per chunk: 16 KiB. More would make growth a pause.
pub(super) const CHUNK: usize = 256;

impl Run {
    /// Positions, those that nobody holds any more included.
    pub(super) fn len(&self) -> u16 {
        self.hashes.len() as u16
    }

    /// The hash at `position`, whether it is held or not.
    pub(super) fn hash_at(&self, position: u16) -> Option<u64> {
        self.hashes.get(usize::from(position)).copied()
    }

    /// Whether `hash` is held by someone at `position`.
    pub(super) fn is_at(&self, space: u32, hash: BlockHash, position: u16) -> bool {
        self.space == space && self.hash_at(position) == Some(hash.0)
    }

    /// Whether `hash` was at `position` before it was buried.
    pub(super) fn was_at(&self, hash: BlockHash, position: u16) -> bool {
        self.hash_at(position) == Some(!hash.0)
    }

    /// Marks the block at `position` as held by nobody, so that no chain
    /// matches it, and returns its hash.
    pub(super) fn bury(&mut self, position: u16) -> u64 {
        let hash = &mut self.hashes[usize::from(position)];
        let buried = *hash;
        *hash = !buried;
        self.live -= 1;
        buried
    }

    /// Puts `hash` at `position`: over its own buried self or behind the last.
    /// `more` blocks are likely to follow.
    pub(super) fn put(&mut self, position: u16, hash: BlockHash, more: usize) {
        match self.hashes.get_mut(usize::from(position)) {
            Some(buried) => *buried = hash.0,
            None => {
                if self.hashes.len() == self.hashes.capacity() {
                    // A quarter more: doubling would waste four bytes a block on average.
                    self.hashes.reserve_exact(more.max(1 + self.hashes.len() / 4));
                }
                self.hashes.push(hash.0);
            }
        }
        self.live += 1;
    }

    /// Drops what is buried at the end. O(owners).
    pub(super) fn trim(&mut self) {
        self.hashes.truncate(usize::from(self.owners.max_end()));
        if self.hashes.capacity() > 2 * self.hashes.len() + 8 {
            self.hashes.shrink_to(self.hashes.len() + self.hashes.len() / 4);
        }
    }

    /// Blocks from `position` on that equal the beginning of `chain`, one by one.
    pub(super) fn equal(&self, position: u16, chain: &[BlockHash]) -> u16 {
        let here = &self.hashes[usize::from(position)..];
        here.iter().zip(chain).take_while(|(here, there)| **here == there.0).count() as u16
    }

    /// Blocks from `position` on that equal the beginning of `chain`, given
    /// that the first does. A hash names all blocks before it, so a match
    /// anywhere is a match everywhere before: O(log n). Ends early, at worst,
    /// at a buried block.
    pub(super) fn matched(&self, position: u16, chain: &[BlockHash]) -> u16 {
        let here = &self.hashes[usize::from(position)..];
        let (mut matched, mut beyond) = (1, here.len().min(chain.len()) + 1);
        let mut probe = beyond - 1;
        while matched + 1 < beyond {
            if here[probe - 1] == chain[probe - 1].0 {
                matched = probe;
            } else {
                beyond = probe;
            }
            probe = usize::midpoint(matched, beyond);
        }
        matched as u16
    }

    fn heap_bytes(&self) -> usize {
        self.hashes.capacity() * 8 + self.owners.heap_bytes()
    }
}

impl Runs {
    /// Numbers in use lie below this.
    pub(super) fn bound(&self) -> usize {
        self.chunks.len() * CHUNK
    }

    /// Run `number`; `None` where there never was one. A freed run is empty.
    pub(super) fn get(&self, number: u32) -> Option<&Run> {
        self.chunks.get(number as usize / CHUNK)?.runs.get(number as usize % CHUNK)
    }

    /// Run `number`.
    pub(super) fn get_mut(&mut self, number: u32) -> Option<&mut Run> {
        self.chunks.get_mut(number as usize / CHUNK)?.runs.get_mut(number as usize % CHUNK)
    }

    /// Whether `place` is where `hash` is held.
    pub(super) fn is_at(&self, space: u32, hash: BlockHash, place: Place) -> bool {
        self.get(place.run).is_some_and(|run| run.is_at(space, hash, place.position))
    }

    /// A number for an empty run of `space`; `None` if there are [`MAX_RUNS`].
    pub(super) fn allocate(&mut self, space: u32) -> Option<u32> {
        if self.roomy.is_empty() {
            if self.bound() >= MAX_RUNS as usize {
                return None;
            }
            self.roomy.push(self.chunks.len() as u32);
            self.chunks.push(Chunk { listed: true, ..Chunk::default() });
        }
        let number = *self.roomy.last()?;
        let chunk = &mut self.chunks[number as usize];
        let at = match chunk.free.pop() {
            Some(at) => usize::from(at),
            None => {
                if chunk.runs.is_empty() {
                    chunk.runs.reserve_exact(CHUNK);
                }
                chunk.runs.push(Run::default());
                chunk.runs.len() - 1
            }
        };
        chunk.runs[at].space = space;
        if chunk.free.is_empty() && chunk.runs.len() == CHUNK {
            chunk.listed = false;
            self.roomy.pop();
        }
        Some(number * CHUNK as u32 + at as u32)
    }

    /// Frees run `number`, which is in use, and returns what it was.
    pub(super) fn free(&mut self, number: u32) -> Run {
        let at = number as usize / CHUNK;
        let chunk = &mut self.chunks[at];
        let run = std::mem::take(&mut chunk.runs[number as usize % CHUNK]);
        chunk.free.push((number as usize % CHUNK) as u8);
        if chunk.free.len() == chunk.runs.len() {
            (chunk.runs, chunk.free) = (Vec::new(), Vec::new());
        }
        if !chunk.listed {
            chunk.listed = true;
            self.roomy.push(at as u32);
        }
        run
    }

    /// Heap bytes of the runs with the numbers from `chunk` times [`CHUNK`] on, so many;
    /// `None` beyond the last ones.
    pub(super) fn heap_bytes(&self, chunk: usize) -> Option<usize> {
        let chunk = self.chunks.get(chunk)?;
        let runs: usize = chunk.runs.iter().map(Run::heap_bytes).sum();
        Some(size_of::<Chunk>() + chunk.runs.capacity() * size_of::<Run>() + chunk.free.capacity() + runs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(hashes: &[u64]) -> Run {
        Run { hashes: hashes.to_vec(), live: hashes.len() as u32, ..Run::default() }
    }

    #[test]
    fn a_run_is_a_cache_line() {
        assert_eq!(size_of::<Run>(), 64);
    }

    #[test]
    fn matches_end_where_the_chains_part() {
        for length in 1..40u64 {
            let ours: Vec<u64> = (0..length).collect();
            for equal in 1..=length {
                for tail in 0..3 {
                    let theirs: Vec<BlockHash> = (0..equal + tail)
                        .map(|at| BlockHash(if at < equal { at } else { 1000 + at }))
                        .collect();
                    let why = format!("{equal} of {length} equal, {tail} more asked");
                    assert_eq!(u64::from(run(&ours).matched(0, &theirs)), equal, "{why}");
                    assert_eq!(u64::from(run(&ours).equal(0, &theirs)), equal, "{why}");
                }
            }
        }
    }

    #[test]
    fn numbers_are_handed_out_again_and_chunks_come_back() {
        let mut runs = Runs::default();
        let numbers: Vec<u32> = (0..1000).filter_map(|_| runs.allocate(1)).collect();
        assert_eq!(numbers, (0..1000).collect::<Vec<u32>>());
        let heap_bytes = |runs: &Runs| (0..).map_while(|chunk| runs.heap_bytes(chunk)).sum::<usize>();
        let full = heap_bytes(&runs);
        for number in &numbers[100..] {
            runs.free(*number);
        }
        assert!(heap_bytes(&runs) < full / 3);
        let mut again: Vec<u32> = (100..1000).filter_map(|_| runs.allocate(1)).collect();
        again.sort_unstable();
        assert_eq!(again, (100..1000).collect::<Vec<u32>>(), "each once");
    }
}
