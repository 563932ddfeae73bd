//! In-flight credit: what a target will hold once its prefills are done.
//!
//! A booked prompt's blocks count as predicted hits on its target until events
//! confirm them (then they are hits anyway), until the attempt fails, or until
//! shortly after its first byte. They stay in this side set and never enter the
//! index: only events make confirmed hits.

use std::collections::BTreeSet;

use rustc_hash::FxHashMap;

use super::prefixes::{End, Kind, Prefixes};
use crate::units::{Millis, Tick};

/// How long after a prefill its events may take. Engines publish with the step
/// that stored, so anything later means that nothing was stored.
const GRACE: Millis = Millis::from_secs(2);

/// A booking's place in the set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(u64);

/// Which booked prompts of one target still predict hits. The blocks are in the
/// account's [`Prefixes`], counted as [`Kind::Predicted`].
#[derive(Debug, Default)]
pub struct InFlight {
    bookings: FxHashMap<Ticket, End>,
    /// Prefills that are done, in the order in which their time runs out.
    done: BTreeSet<(Tick, Ticket)>,
    until: FxHashMap<Ticket, Tick>,
    issued: u64,
}

impl InFlight {
    /// Predicts the blocks of a booked prompt.
    pub fn book(&mut self, end: End) -> Ticket {
        self.issued += 1;
        let ticket = Ticket(self.issued);
        self.bookings.insert(ticket, end);
        ticket
    }

    /// The prefill is done: its blocks count a little longer, until events have
    /// had their time. Only the first call counts.
    pub fn prefilled(&mut self, now: Tick, ticket: Ticket) {
        if self.bookings.contains_key(&ticket) && !self.until.contains_key(&ticket) {
            let until = now.plus(GRACE);
            self.until.insert(ticket, until);
            self.done.insert((until, ticket));
        }
    }

    /// The booking is over. One whose prefill was done counts until its time;
    /// one that never got there will not be cached.
    pub fn release(&mut self, ticket: Ticket, prefixes: &mut Prefixes) {
        if !self.until.contains_key(&ticket) {
            self.cancel(ticket, prefixes);
        }
    }

    /// The booking failed.
    pub fn cancel(&mut self, ticket: Ticket, prefixes: &mut Prefixes) {
        if let Some(until) = self.until.remove(&ticket) {
            self.done.remove(&(until, ticket));
        }
        if let Some(end) = self.bookings.remove(&ticket) {
            prefixes.remove(end, Kind::Predicted);
        }
    }

    /// Events have spoken: prefills that are done count by what events say.
    pub fn confirmed(&mut self, prefixes: &mut Prefixes) {
        for (_, ticket) in std::mem::take(&mut self.done) {
            self.cancel(ticket, prefixes);
        }
    }

    /// The engine lives anew: nothing that was sent to it will be cached.
    pub fn forget(&mut self, prefixes: &mut Prefixes) {
        self.done.clear();
        self.until.clear();
        for (_, end) in self.bookings.drain() {
            prefixes.remove(end, Kind::Predicted);
        }
    }

    /// Forgets what ran out before `now`.
    pub fn expire(&mut self, now: Tick, prefixes: &mut Prefixes) {
        while let Some((until, ticket)) = self.done.first().copied() {
            if until >= now {
                return;
            }
            self.cancel(ticket, prefixes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blocks::{BlockHash, NamespaceId};
    use std::sync::Arc;

    const SPACE: NamespaceId = NamespaceId(1);

    fn blocks(range: std::ops::Range<u64>) -> Arc<[BlockHash]> {
        range.map(BlockHash).collect()
    }

    #[test]
    fn blocks_are_predicted_until_they_fail_or_their_time_is_over() {
        let (mut set, mut prefixes) = (InFlight::default(), Prefixes::default());
        let predicted = |prefixes: &Prefixes| prefixes.shared(SPACE, &blocks(0..9), Kind::Predicted);
        let one = set.book(prefixes.insert(SPACE, &blocks(0..4)));
        let other = set.book(prefixes.insert(SPACE, &blocks(0..6)));
        assert_eq!(predicted(&prefixes), 6);
        set.cancel(other, &mut prefixes);
        assert_eq!(predicted(&prefixes), 4, "a failed one predicts nothing");
        set.prefilled(Tick(100), one);
        set.prefilled(Tick(5_000), one);
        set.release(one, &mut prefixes);
        set.expire(Tick(2_100), &mut prefixes);
        assert_eq!(predicted(&prefixes), 4, "events have their time");
        set.expire(Tick(2_101), &mut prefixes);
        assert_eq!(predicted(&prefixes), 0, "and no more");
        let confirmed = set.book(prefixes.insert(SPACE, &blocks(0..5)));
        let waiting = set.book(prefixes.insert(SPACE, &blocks(0..2)));
        set.prefilled(Tick(9_000), confirmed);
        set.confirmed(&mut prefixes);
        assert_eq!(predicted(&prefixes), 2, "events decide about what is prefilled, not about what waits");
        set.forget(&mut prefixes);
        set.release(waiting, &mut prefixes);
        let cancelled = set.book(prefixes.insert(SPACE, &blocks(0..2)));
        set.release(cancelled, &mut prefixes);
        assert_eq!(
            (predicted(&prefixes), set.bookings.len(), set.done.len()),
            (0, 0, 0),
            "nothing is left behind"
        );
    }
}
