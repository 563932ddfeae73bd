//! Who holds which positions of one run.
//!
//! A *lane* is one tier of one side of a slot: a set of positions without
//! further structure. Nearly all lanes hold one span, since engines fill and
//! evict chains at their ends; such a lane costs eight bytes. A lane with holes
//! has a bit per position instead, kept aside, until its holes are filled.
//!
//! Set algebra goes by *words*: 64 positions as the bits of a `u64`.

use std::ops::Range;

use smallvec::SmallVec;

use crate::ids::Slot;
use crate::units::Tier;

/// Positions of a run.
pub(super) type Span = Range<u16>;

/// One tier of one side of a slot. Ordered by slot, side, tier (fast to slow).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Lane(u32);

/// One side of a slot: what requests see, or what is being built or taken down
/// unseen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Side(u32);

/// All lanes of one run that hold anything of it.
#[derive(Debug, Default)]
pub(super) struct Owners {
    /// Sorted by lane; none is empty.
    entries: SmallVec<[Owner; 2]>,
    /// Of the lanes with holes; a box, because hardly any run has such a lane.
    holey: Option<Box<Holey>>,
}

/// What one lane holds: a span, or see `Owners::holey`.
#[derive(Clone, Copy, Debug)]
struct Owner {
    lane: Lane,
    start: u16,
    /// Behind the last position; [`HOLEY`] for a lane with holes.
    end: u16,
}

/// No run is that long.
const HOLEY: u16 = u16::MAX;

#[derive(Debug, Default)]
struct Holey(Vec<(Lane, Vec<u64>)>);

impl Side {
    /// Side `number` (0 or 1) of `slot`.
    pub(super) const fn new(slot: Slot, number: u32) -> Self {
        Self(slot.0 << 1 | number)
    }

    pub(super) const fn slot(self) -> Slot {
        Slot(self.0 >> 1)
    }

    /// 0 or 1.
    pub(super) const fn number(self) -> u32 {
        self.0 & 1
    }

    pub(super) const fn lane(self, tier: Tier) -> Lane {
        Lane(self.0 << 2 | tier.index() as u32)
    }
}

impl Lane {
    pub(super) const fn side(self) -> Side {
        Side(self.0 >> 2)
    }

    /// Position of its tier in [`Tier::ALL`].
    const fn tier(self) -> usize {
        // Three is not given out; this way the optimiser knows.
        match self.0 & 3 {
            3 => 2,
            tier => tier as usize,
        }
    }
}

/// The bits of `span` in word `word`.
pub(super) fn word_of(span: &Span, word: u16) -> u64 {
    let below = |position: u16| match position.saturating_sub(word * 64) {
        count @ 0..64 => (1 << count) - 1,
        _ => u64::MAX,
    };
    below(span.end) & !below(span.start)
}

/// The words that `span` touches.
pub(super) fn words_of(span: &Span) -> Range<u16> {
    span.start / 64..span.end.div_ceil(64)
}

impl Owners {
    /// Lanes, at least as many as sides.
    #[cfg(test)]
    pub(super) fn lane_count(&self) -> usize {
        self.entries.len()
    }

    /// The first lane of `side`, if it holds anything.
    pub(super) fn lane_of(&self, side: Side) -> Option<Lane> {
        let first = self.entries.partition_point(|entry| entry.lane.side() < side);
        self.entries.get(first).map(|entry| entry.lane).filter(|lane| lane.side() == side)
    }

    /// Lanes, in order.
    pub(super) fn lanes(&self) -> impl Iterator<Item = Lane> {
        self.entries.iter().map(|entry| entry.lane)
    }

    /// [`Owners::leading`] where it is simple: nobody has holes, and everything
    /// is in the fastest tier, so that each lane is a side. `None` elsewhere.
    pub(super) fn leading_in_device(
        &self,
        window: Span,
    ) -> Option<impl ExactSizeIterator<Item = (Side, u32)>> {
        let tiers = self.entries.iter().fold(0, |tiers, owner| tiers | owner.lane.0 & 3);
        let simple = self.holey.is_none() && tiers == 0;
        let held = move |owner: &Owner| (owner.lane.side(), owner.leading(&window));
        simple.then(|| self.entries.iter().map(held))
    }

    /// Calls `each` for every side, in order, with the number of leading
    /// positions of `window` that it holds without a gap, by their fastest tier;
    /// all zero for a side that does not hold the first.
    pub(super) fn leading(&self, window: &Span, mut each: impl FnMut(Side, [u32; 3])) {
        for lanes in self.entries.chunk_by(|a, b| a.lane.side() == b.lane.side()) {
            let tiers = match lanes {
                [owner] if owner.end != HOLEY => {
                    let mut tiers = [0; 3];
                    tiers[owner.lane.tier()] = owner.leading(window);
                    tiers
                }
                _ => self.tally(lanes, window),
            };
            each(lanes[0].lane.side(), tiers);
        }
    }

    /// The positions in `word` that `lane` holds.
    pub(super) fn held_by(&self, lane: Lane, word: u16) -> u64 {
        self.position(lane).map_or(0, |at| self.word(&self.entries[at], word))
    }

    /// The positions in `word` that the other lanes of `lane`'s side hold.
    pub(super) fn held_by_siblings(&self, lane: Lane, word: u16) -> u64 {
        let first = self.entries.partition_point(|entry| entry.lane.side() < lane.side());
        let of_side = self.entries[first..].iter().take_while(|entry| entry.lane.side() == lane.side());
        of_side.filter(|entry| entry.lane != lane).fold(0, |held, entry| held | self.word(entry, word))
    }

    /// Those of `wanted` in `word` that no lane but `lane` holds.
    pub(super) fn held_by_nobody_else(&self, lane: Lane, word: u16, wanted: u64) -> u64 {
        let mut left = wanted;
        for entry in &self.entries {
            if entry.lane != lane {
                left &= !self.word(entry, word);
                if left == 0 {
                    break;
                }
            }
        }
        left
    }

    /// The positions in `word` that anyone holds.
    pub(super) fn held(&self, word: u16) -> u64 {
        self.entries.iter().fold(0, |held, entry| held | self.word(entry, word))
    }

    /// Behind the last position that `lane` holds; 0 if none.
    pub(super) fn end_of(&self, lane: Lane) -> u16 {
        self.position(lane).map_or(0, |at| self.end(&self.entries[at]))
    }

    /// Behind the last position that anyone holds; 0 if none.
    pub(super) fn max_end(&self) -> u16 {
        self.entries.iter().map(|entry| self.end(entry)).max().unwrap_or(0)
    }

    /// `lane` holds `span` from now on, whatever it held of it before.
    pub(super) fn add(&mut self, lane: Lane, span: &Span) {
        if span.is_empty() {
            return;
        }
        let at = match self.position(lane) {
            Ok(at) => at,
            Err(at) => {
                self.entries.insert(at, Owner { lane, start: span.start, end: span.end });
                return;
            }
        };
        let entry = &mut self.entries[at];
        if entry.end != HOLEY && span.start <= entry.end && entry.start <= span.end {
            entry.start = entry.start.min(span.start);
            entry.end = entry.end.max(span.end);
            return;
        }
        self.edit_bits(at, span, |bits, wanted| bits | wanted);
    }

    /// `lane` holds nothing of `span` from now on.
    pub(super) fn remove(&mut self, lane: Lane, span: &Span) {
        let Ok(at) = self.position(lane) else { return };
        let entry = &mut self.entries[at];
        if entry.end == HOLEY {
            return self.edit_bits(at, span, |bits, unwanted| bits & !unwanted);
        }
        let (start, end) = (span.start.max(entry.start), span.end.min(entry.end));
        if start >= end {
            return;
        }
        match (start == entry.start, end == entry.end) {
            (true, true) => drop(self.entries.remove(at)),
            (true, false) => entry.start = end,
            (false, true) => entry.end = start,
            (false, false) => self.edit_bits(at, span, |bits, unwanted| bits & !unwanted),
        }
        self.shrink();
    }

    /// [`Owners::leading`] of one side, given its lanes.
    fn tally(&self, lanes: &[Owner], window: &Span) -> [u32; 3] {
        let mut tiers = [0; 3];
        let mut at = window.start;
        while at < window.end {
            // The fastest lane that holds `at` counts until it ends or a faster
            // one begins.
            let mut limit = window.end;
            let mut tier = None;
            for owner in lanes {
                let next = self.next_change(owner, at);
                limit = limit.min(next.at);
                if next.held {
                    tier = Some(owner.lane.tier());
                    break;
                }
            }
            let Some(tier) = tier else { break };
            tiers[tier] += u32::from(limit - at);
            at = limit;
        }
        tiers
    }

    /// Heap bytes beside the struct itself.
    pub(super) fn heap_bytes(&self) -> usize {
        let entries = if self.entries.spilled() { self.entries.capacity() * size_of::<Owner>() } else { 0 };
        let holey = self.holey.as_ref().map_or(0, |holey| {
            let bits: usize = holey.0.iter().map(|(_, words)| words.capacity() * 8).sum();
            size_of::<Holey>() + holey.0.capacity() * size_of::<(Lane, Vec<u64>)>() + bits
        });
        entries + holey
    }

    fn position(&self, lane: Lane) -> Result<usize, usize> {
        self.entries.binary_search_by_key(&lane, |entry| entry.lane)
    }

    fn bits(&self, lane: Lane) -> &[u64] {
        let holey = self.holey.as_ref().and_then(|holey| holey.0.iter().find(|(of, _)| *of == lane));
        holey.map_or(&[], |(_, words)| words)
    }

    fn word(&self, entry: &Owner, word: u16) -> u64 {
        if entry.end == HOLEY {
            return self.bits(entry.lane).get(usize::from(word)).copied().unwrap_or(0);
        }
        word_of(&(entry.start..entry.end), word)
    }

    fn end(&self, entry: &Owner) -> u16 {
        if entry.end == HOLEY { end_of_bits(self.bits(entry.lane)) } else { entry.end }
    }

    /// Whether `owner` holds `at`, and the next position where that changes
    /// ([`HOLEY`], larger than any, if it stays so).
    fn next_change(&self, owner: &Owner, at: u16) -> Change {
        if owner.end != HOLEY {
            return match (at < owner.start, at < owner.end) {
                (true, _) => Change { held: false, at: owner.start },
                (false, true) => Change { held: true, at: owner.end },
                (false, false) => Change { held: false, at: HOLEY },
            };
        }
        let bits = self.bits(owner.lane);
        let read = |word: u16| bits.get(usize::from(word)).copied().unwrap_or(0);
        let held = read(at / 64) >> (at % 64) & 1 == 1;
        let changed = |word: u16| if held { !read(word) } else { read(word) };
        let mut word = at / 64;
        let mut left = changed(word) & (u64::MAX << (at % 64));
        while left == 0 && usize::from(word) <= bits.len() {
            word += 1;
            left = changed(word);
        }
        let next = if left == 0 { HOLEY } else { word * 64 + left.trailing_zeros() as u16 };
        Change { held, at: next }
    }

    /// Rewrites the bits of entry `at` within `span`, giving it bits if it had a
    /// span, and a span, or nothing at all, if the bits say so afterwards.
    fn edit_bits(&mut self, at: usize, span: &Span, edit: impl Fn(u64, u64) -> u64) {
        let Owner { lane, start, end } = self.entries[at];
        let holey = self.holey.get_or_insert_default();
        let found = holey.0.iter().position(|(of, _)| *of == lane).unwrap_or_else(|| {
            let words = (0..end.div_ceil(64)).map(|word| word_of(&(start..end), word)).collect();
            holey.0.push((lane, words));
            holey.0.len() - 1
        });
        let words = &mut holey.0[found].1;
        let touched = words_of(span);
        if words.len() < usize::from(touched.end) {
            words.resize(usize::from(touched.end), 0);
        }
        for word in touched {
            let bits = &mut words[usize::from(word)];
            *bits = edit(*bits, word_of(span, word));
        }
        let count: u32 = words.iter().map(|word| word.count_ones()).sum();
        let (start, end) = (start_of_bits(words), end_of_bits(words));
        if count == u32::from(end.saturating_sub(start)) {
            holey.0.swap_remove(found);
            if count == 0 {
                self.entries.remove(at);
            } else {
                self.entries[at] = Owner { lane, start, end };
            }
        } else {
            self.entries[at].end = HOLEY;
        }
        if self.holey.as_ref().is_some_and(|holey| holey.0.is_empty()) {
            self.holey = None;
        }
    }

    fn shrink(&mut self) {
        if self.entries.spilled() && self.entries.len() < self.entries.capacity() / 4 {
            self.entries.shrink_to_fit();
        }
    }
}

struct Change {
    held: bool,
    at: u16,
}

impl Owner {
    /// Leading positions of `window` in its span.
    fn leading(&self, window: &Span) -> u32 {
        let end = if self.start <= window.start { self.end.min(window.end) } else { 0 };
        end.saturating_sub(window.start).into()
    }
}

fn start_of_bits(words: &[u64]) -> u16 {
    let first = words.iter().position(|word| *word != 0);
    first.map_or(0, |at| at as u16 * 64 + words[at].trailing_zeros() as u16)
}

fn end_of_bits(words: &[u64]) -> u16 {
    let last = words.iter().rposition(|word| *word != 0);
    last.map_or(0, |at| (at as u16 + 1) * 64 - words[at].leading_zeros() as u16)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    /// Positions at both sides of word borders, and far ones.
    fn span() -> impl Strategy<Value = Span> {
        let edge =
            prop::sample::select(vec![0u16, 1, 2, 3, 62, 63, 64, 65, 66, 127, 128, 129, 200, 8191, 8192]);
        (edge.clone(), edge).prop_map(|(a, b)| a.min(b)..a.max(b))
    }

    type Sets = [BTreeSet<u16>; 3];

    fn lead(sets: &Sets, window: &Span) -> [u32; 3] {
        let mut tiers = [0; 3];
        for at in window.clone() {
            match sets.iter().position(|set| set.contains(&at)) {
                Some(tier) => tiers[tier] += 1,
                None => break,
            }
        }
        tiers
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]
        #[test]
        fn lanes_agree_with_sets(
            steps in prop::collection::vec((any::<bool>(), 0usize..3, span()), 1..30), window in span(),
        ) {
            let side = Side::new(Slot(7), 1);
            let mut owners = Owners::default();
            let mut sets = Sets::default();
            for (add, tier, span) in steps {
                let lane = side.lane(Tier::ALL[tier]);
                if add {
                    owners.add(lane, &span);
                    sets[tier].extend(span);
                } else {
                    owners.remove(lane, &span);
                    sets[tier].retain(|at| !span.contains(at));
                }
                let mut found = [0; 3];
                owners.leading(&window, |_, tiers| found = tiers);
                prop_assert_eq!(found, lead(&sets, &window));
                let all: BTreeSet<u16> = sets.iter().flatten().copied().collect();
                prop_assert_eq!(owners.max_end(), all.last().map_or(0, |last| last + 1));
                prop_assert_eq!(owners.lane_count() == 0, all.is_empty());
                let held = (0..129u16).map(|word| owners.held(word).count_ones() as usize).sum::<usize>();
                prop_assert_eq!(held, all.len());
                let whole = sets.iter().all(|set| set.last().is_none_or(|last| {
                    usize::from(last - set.first().unwrap_or(&0)) + 1 == set.len()
                }));
                prop_assert_eq!(owners.holey.is_none(), whole, "bits are kept only for holes");
            }
        }
    }
}
