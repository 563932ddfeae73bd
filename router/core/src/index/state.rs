//! What the index knows, and how one section of a change alters it.
//!
//! Invariants:
//! * the table of places holds exactly the blocks that some lane holds, each at
//!   one position of one run, where the run has the block's hash;
//! * a position that nobody holds is buried: no chain matches it;
//! * a run that nobody holds anything of is free;
//! * the last position of a run is held.
//!
//! One call handles at most a section's worth of blocks (see `super`), so that
//! whoever holds the lock around it lets go after some microseconds.

use smallvec::SmallVec;

use super::owners::{Lane, Side, Span, word_of, words_of};
use super::places::{MAX_RUN, MAX_RUNS, Mixed, Place, Places};
use super::runs::{CHUNK, Run, Runs};
use super::spaces::{Space, Spaces};
use super::view::Views;
use crate::blocks::{BlockHash, NamespaceId};

/// Everything behind the index's lock.
#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) spaces: Spaces,
    pub(super) places: Places,
    pub(super) runs: Runs,
    pub(super) views: Views,
}

/// A run is broken up when fewer than one in so many of its positions are held.
/// A buried position costs 8 bytes and a run 64.
const SPARSE: u32 = 8;

impl State {
    /// Where `hash` is held by anyone.
    pub(super) fn find(&self, space: Space, hash: BlockHash) -> Option<Place> {
        let runs = &self.runs;
        self.places.find(Mixed::new(space.salt, hash.0), |place| runs.is_at(space.number, hash, place))
    }

    /// `lane` holds `hashes` from now on; they follow `before`, which may be
    /// unknown. O(hashes).
    pub(super) fn store(&mut self, lane: Lane, id: NamespaceId, before: BlockHash, hashes: &[BlockHash]) {
        let space = self.spaces.intern(id);
        // Keeps the number while nothing may be in it yet.
        self.spaces.retain(space.number);
        let mut last = self.find(space, before);
        let mut rest = hashes;
        while let [first, ..] = rest {
            let known = self.following(space, last, *first).or_else(|| self.find(space, *first));
            let held = match known {
                Some(place) => {
                    let run = self.runs.get(place.run);
                    Some((place, run.map_or(0, |run| run.equal(place.position, rest))))
                }
                None => self.add(space, last, rest),
            };
            // Out of runs: what cannot be placed is not held, which under-claims.
            let Some((place, count)) = held else { break };
            self.hold(place.run, lane, &(place.position..place.position + count));
            last = Some(Place { run: place.run, position: place.position + count - 1 });
            rest = &rest[usize::from(count)..];
        }
        self.spaces.release(space.number);
    }

    /// `lane` no longer holds `hashes`, in whatever order they come. O(hashes).
    pub(super) fn remove(&mut self, lane: Lane, id: NamespaceId, hashes: &[BlockHash]) {
        let Some(space) = self.spaces.find(id) else { return };
        let mut rest = hashes;
        while let [first, others @ ..] = rest {
            let Some(place) = self.find(space, *first) else {
                rest = others;
                continue;
            };
            let (span, count) = self.neighbours(place, others);
            rest = &others[count..];
            self.release(place.run, lane, &span);
        }
    }

    /// Takes the lanes of `side` out of at most `budget` positions, looking at
    /// as many runs at most, from run `from` on. Returns the run to go on with;
    /// `None` when nothing is left.
    pub(super) fn drain(&mut self, side: Side, from: u32, budget: u16) -> Option<u32> {
        let mut left = budget;
        let mut number = from;
        while left > 0 && self.views.block_count(side) > 0 {
            // Breaking up a run puts pieces of it behind us.
            if number as usize >= self.runs.bound() {
                number = 0;
            }
            let Some(run) = self.runs.get(number) else {
                // Freed, like all behind it in the same chunk.
                number = (number / CHUNK as u32 + 1) * CHUNK as u32;
                left -= 1;
                continue;
            };
            let Some(lane) = run.owners.lane_of(side) else {
                number += 1;
                left -= 1;
                continue;
            };
            let end = run.owners.end_of(lane);
            let span = end.saturating_sub(left)..end;
            self.release(number, lane, &span);
            left -= span.end - span.start;
        }
        (self.views.block_count(side) > 0).then_some(number)
    }

    /// Blocks that `side` holds in namespace `id`. O(runs).
    pub(super) fn count_in(&self, side: Side, id: NamespaceId) -> usize {
        let Some(space) = self.spaces.find(id) else { return 0 };
        let runs = (0..self.runs.bound() as u32).filter_map(|number| self.runs.get(number));
        let of_side = |run: &Run| {
            let lanes: Vec<Lane> = run.owners.lanes().filter(|lane| lane.side() == side).collect();
            let held = |word| lanes.iter().fold(0, |held, lane| held | run.owners.held_by(*lane, word));
            (0..run.len().div_ceil(64)).map(|word| held(word).count_ones() as usize).sum::<usize>()
        };
        runs.filter(|run| run.space == space.number).map(of_side).sum()
    }

    /// The place behind `last` if `hash` is held there.
    fn following(&self, space: Space, last: Option<Place>, hash: BlockHash) -> Option<Place> {
        let last = last?;
        let place = Place { run: last.run, position: last.position + 1 };
        self.runs.is_at(space.number, hash, place).then_some(place)
    }

    /// The span of positions around `place` that the beginning of `others`
    /// covers in one direction, and how many of `others` that are.
    fn neighbours(&self, place: Place, others: &[BlockHash]) -> (Span, usize) {
        let at = place.position;
        let Some(run) = self.runs.get(place.run) else { return (at..at, 0) };
        let down =
            (0..at).rev().zip(others).take_while(|(at, hash)| run.hash_at(*at) == Some(hash.0)).count();
        if down > 0 {
            return (at - down as u16..at + 1, down);
        }
        let up = if at + 1 < run.len() { run.equal(at + 1, others) } else { 0 };
        (at..at + 1 + up, up.into())
    }

    /// Places the beginning of `hashes`, the first of which is not in the
    /// table: at the end of the run that ends with `last`, over its own buried
    /// self, or in a new run. Returns where, and how many.
    fn add(&mut self, space: Space, last: Option<Place>, hashes: &[BlockHash]) -> Option<(Place, u16)> {
        let place = match last.and_then(|last| self.room_behind(last, hashes[0])) {
            Some(place) => place,
            None => {
                let run = self.runs.allocate(space.number)?;
                self.spaces.retain(space.number);
                Place { run, position: 0 }
            }
        };
        let mut count = 0;
        for (hash, left) in hashes.iter().zip((1..=hashes.len()).rev()) {
            let at = Place { run: place.run, position: place.position + count };
            let runs = &self.runs;
            let free = at.position < MAX_RUN
                && runs
                    .get(at.run)
                    .is_some_and(|run| at.position == run.len() || run.was_at(*hash, at.position));
            let is_it = |place| runs.is_at(space.number, *hash, place);
            if !free || !self.places.insert(Mixed::new(space.salt, hash.0), at, is_it) {
                break;
            }
            if let Some(run) = self.runs.get_mut(at.run) {
                run.put(at.position, *hash, left);
            }
            count += 1;
        }
        Some((place, count))
    }

    /// The place behind `last`, if `hash` may go there.
    fn room_behind(&self, last: Place, hash: BlockHash) -> Option<Place> {
        let run = self.runs.get(last.run)?;
        let position = last.position + 1;
        let free = position < MAX_RUN && (position == run.len() || run.was_at(hash, position));
        free.then_some(Place { run: last.run, position })
    }

    fn hold(&mut self, number: u32, lane: Lane, span: &Span) {
        let Some(run) = self.runs.get_mut(number) else { return };
        let mut fresh = 0;
        for word in words_of(span) {
            let held = run.owners.held_by(lane, word) | run.owners.held_by_siblings(lane, word);
            fresh += (word_of(span, word) & !held).count_ones();
        }
        run.owners.add(lane, span);
        self.views.add_blocks(lane.side(), fresh);
    }

    fn release(&mut self, number: u32, lane: Lane, span: &Span) {
        let Some(run) = self.runs.get_mut(number) else { return };
        let space = self.spaces.of(run.space);
        let mut gone = 0;
        let mut buried = false;
        for word in words_of(span) {
            let held = run.owners.held_by(lane, word) & word_of(span, word);
            gone += (held & !run.owners.held_by_siblings(lane, word)).count_ones();
            let mut dead = run.owners.held_by_nobody_else(lane, word, held);
            if dead == 0 {
                continue;
            }
            let mut blocks = SmallVec::<[_; 64]>::new();
            while dead != 0 {
                let position = word * 64 + dead.trailing_zeros() as u16;
                blocks.push((Mixed::new(space.salt, run.bury(position)), Place { run: number, position }));
                dead &= dead - 1;
            }
            self.places.remove(&blocks);
            buried = true;
        }
        run.owners.remove(lane, span);
        self.views.remove_blocks(lane.side(), gone);
        if buried {
            self.tidy(number);
        }
    }

    /// Frees, trims or breaks up a run in which positions were buried.
    fn tidy(&mut self, number: u32) {
        let Some(run) = self.runs.get_mut(number) else { return };
        if run.live == 0 {
            let run = self.runs.free(number);
            self.spaces.release(run.space);
            return;
        }
        run.trim();
        if run.len() >= 64 && run.live * SPARSE < u32::from(run.len()) {
            self.scatter(number);
        }
    }

    /// Makes a run of every held stretch of run `number`, which is sparse, and
    /// frees it. At most `MAX_RUN / SPARSE` blocks move.
    fn scatter(&mut self, number: u32) {
        if self.runs.bound() + usize::from(MAX_RUN) > MAX_RUNS as usize {
            return;
        }
        // Its number stays taken until all have moved.
        let Some(old) = self.runs.get_mut(number).map(std::mem::take) else { return };
        let mut at = 0;
        while at < old.len() {
            let held = |at: u16| old.owners.held(at / 64) >> (at % 64) & 1 == 1;
            let end = (at..old.len()).find(|at| !held(*at)).unwrap_or(old.len());
            if at < end {
                self.transplant(&old, number, at..end);
            }
            at = end + 1;
        }
        self.runs.free(number);
        self.spaces.release(old.space);
    }

    /// Moves the blocks and lanes of `span` of `old` into a new run.
    fn transplant(&mut self, old: &Run, number: u32, span: Span) {
        let space = self.spaces.of(old.space);
        let new = self.runs.allocate(space.number).expect("numbers were counted before");
        self.spaces.retain(space.number);
        let Some(run) = self.runs.get_mut(new) else { return };
        for position in span.clone() {
            let Some(hash) = old.hash_at(position) else { continue };
            run.put(position - span.start, BlockHash(hash), span.len());
            let to = Place { run: new, position: position - span.start };
            self.places.relocate(Mixed::new(space.salt, hash), Place { run: number, position }, to);
        }
        for lane in old.owners.lanes() {
            for word in words_of(&span) {
                let mut held = old.owners.held_by(lane, word) & word_of(&span, word);
                while held != 0 {
                    let start = word * 64 + held.trailing_zeros() as u16;
                    let count = (!(held >> (start % 64))).trailing_zeros() as u16;
                    let moved = start - span.start..start - span.start + count;
                    run.owners.add(lane, &moved);
                    held &= !word_of(&(start..start + count), word);
                }
            }
        }
    }

    /// Panics unless the invariants of this file hold.
    #[cfg(test)]
    pub(super) fn check(&self) {
        let mut held = 0;
        for number in 0..self.runs.bound() as u32 {
            let Some(run) = self.runs.get(number).filter(|run| run.owners.lane_count() > 0) else { continue };
            let space = self.spaces.of(run.space);
            let mut live = 0;
            for position in 0..run.len() {
                let hash = BlockHash(run.hash_at(position).expect("within the run"));
                let place = self.find(space, hash);
                let is_held = run.owners.held(position / 64) >> (position % 64) & 1 == 1;
                assert_eq!(
                    place == Some(Place { run: number, position }),
                    is_held,
                    "run {number} at {position}"
                );
                live += u32::from(is_held);
            }
            assert_eq!((run.live, run.owners.max_end()), (live, run.len()), "run {number}");
            held += live as usize;
        }
        assert_eq!(self.places.len(), held, "every entry is somewhere");
    }
}
