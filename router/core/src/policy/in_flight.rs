//! In-flight credit: what a target will hold once its prefills are done.
//!
//! A booked prompt's blocks count as predicted hits on its target until events
//! confirm them (then they are hits anyway), until the attempt fails, or until
//! shortly after its first byte. They stay in this side set and never enter the
//! index: only events make confirmed hits.

use std::collections::BTreeSet;

use super::prefixes::{End, Holder, Kind, Prefixes};
use crate::units::{Millis, Tick};

/// How long after a prefill its events may take. Engines publish with the step
/// that stored, so anything later means that nothing was stored.
const GRACE: Millis = Millis::from_secs(2);

/// A booking's place in the set, and which of those that had it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket {
    place: u32,
    generation: u64,
}

/// Which booked prompts still predict hits. The blocks are in the [`Prefixes`],
/// counted as [`Kind::Predicted`].
#[derive(Debug, Default)]
pub struct InFlight {
    bookings: Vec<Booking>,
    free: Vec<u32>,
    /// By holder: its latest booking, [`NOBODY`] for none. The others follow from it.
    latest: Vec<u32>,
    /// Prefills that are done, in the order in which their time runs out.
    done: BTreeSet<(Tick, Ticket)>,
    issued: u64,
}

/// The place of no booking.
const NOBODY: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Booking {
    /// The ticket's; 0 for a free place.
    generation: u64,
    holder: Holder,
    end: End,
    /// Since the prefill is done: how long its blocks count.
    until: Option<Tick>,
    /// Places of the same holder's bookings before and after it.
    earlier: u32,
    later: u32,
}

impl InFlight {
    /// Predicts the blocks of a booked prompt. O(1).
    pub fn book(&mut self, holder: Holder, end: End) -> Ticket {
        self.issued += 1;
        let (generation, at) = (self.issued, holder.0 as usize);
        if self.latest.len() <= at {
            self.latest.resize(at + 1, NOBODY);
        }
        let earlier = self.latest[at];
        let booking = Booking { generation, holder, end, until: None, earlier, later: NOBODY };
        let place = match self.free.pop() {
            Some(place) => {
                self.bookings[place as usize] = booking;
                place
            }
            None => {
                self.bookings.push(booking);
                self.bookings.len() as u32 - 1
            }
        };
        if let Some(earlier) = self.bookings.get_mut(earlier as usize) {
            earlier.later = place;
        }
        self.latest[at] = place;
        Ticket { place, generation }
    }

    /// The prefill is done: its blocks count a little longer, until events have
    /// had their time. Only the first call counts.
    pub fn prefilled(&mut self, now: Tick, ticket: Ticket) {
        if let Some(booking) = self.get(ticket)
            && booking.until.is_none()
        {
            let until = now.plus(GRACE);
            self.bookings[ticket.place as usize].until = Some(until);
            self.done.insert((until, ticket));
        }
    }

    /// The booking is over. One whose prefill was done counts until its time; one that
    /// never got there will not be cached: then true, and its blocks are the caller's
    /// to take out.
    #[must_use]
    pub fn release(&mut self, ticket: Ticket) -> bool {
        let waits = self.get(ticket).is_some_and(|booking| booking.until.is_none());
        waits && self.unlink(ticket).is_some()
    }

    /// The booking failed.
    pub fn cancel(&mut self, ticket: Ticket, prefixes: &mut Prefixes) {
        if let Some(booking) = self.unlink(ticket) {
            prefixes.remove(booking.end, booking.holder, Kind::Predicted);
        }
    }

    fn unlink(&mut self, ticket: Ticket) -> Option<Booking> {
        let booking = self.get(ticket)?;
        if let Some(until) = booking.until {
            self.done.remove(&(until, ticket));
        }
        match self.bookings.get_mut(booking.later as usize) {
            Some(later) => later.earlier = booking.earlier,
            None => self.latest[booking.holder.0 as usize] = booking.earlier,
        }
        if let Some(earlier) = self.bookings.get_mut(booking.earlier as usize) {
            earlier.later = booking.later;
        }
        self.bookings[ticket.place as usize].generation = 0;
        self.free.push(ticket.place);
        Some(booking)
    }

    /// Events of `holder` have spoken: its prefills that are done count by what
    /// events say. O(its bookings).
    pub fn confirmed(&mut self, holder: Holder, prefixes: &mut Prefixes) {
        self.cancel_of(holder, prefixes, |booking| booking.until.is_some());
    }

    /// The engine lives anew, or is gone: nothing that was sent to it will be
    /// cached. O(its bookings).
    pub fn forget(&mut self, holder: Holder, prefixes: &mut Prefixes) {
        self.cancel_of(holder, prefixes, |_| true);
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

    fn cancel_of(&mut self, holder: Holder, prefixes: &mut Prefixes, which: impl Fn(&Booking) -> bool) {
        let mut next = self.latest.get(holder.0 as usize).copied().unwrap_or(NOBODY);
        while let Some(booking) = self.bookings.get(next as usize).copied() {
            if which(&booking) {
                self.cancel(Ticket { place: next, generation: booking.generation }, prefixes);
            }
            next = booking.earlier;
        }
    }

    fn get(&self, ticket: Ticket) -> Option<Booking> {
        let booking = self.bookings.get(ticket.place as usize)?;
        (booking.generation == ticket.generation).then_some(*booking)
    }
}

#[cfg(test)]
mod tests {
    use super::super::prefixes::Depth;
    use super::*;
    use crate::blocks::{BlockHash, NamespaceId};
    use std::sync::Arc;

    const SPACE: NamespaceId = NamespaceId(1);
    const ONE: Holder = Holder(0);
    const OTHER: Holder = Holder(1);

    fn blocks(range: std::ops::Range<u64>) -> Arc<[BlockHash]> {
        range.map(BlockHash).collect()
    }

    #[test]
    fn blocks_are_predicted_until_they_fail_or_their_time_is_over() {
        let (mut set, mut prefixes) = (InFlight::default(), Prefixes::default());
        let predicted = |prefixes: &Prefixes| {
            let mut depths = [Depth::default(); 2];
            prefixes.depths(SPACE, &blocks(0..9), &mut depths);
            depths.map(|depth| depth.predicted)
        };
        let book = |set: &mut InFlight, prefixes: &mut Prefixes, holder, to| {
            let walk = prefixes.follow(SPACE, &blocks(0..to));
            let (end, _) = prefixes.insert(SPACE, &blocks(0..to), holder, walk);
            set.book(holder, end)
        };
        let one = book(&mut set, &mut prefixes, ONE, 4);
        let other = book(&mut set, &mut prefixes, ONE, 6);
        let elsewhere = book(&mut set, &mut prefixes, OTHER, 7);
        assert_eq!(predicted(&prefixes), [6, 7]);
        set.cancel(other, &mut prefixes);
        assert_eq!(predicted(&prefixes), [4, 7], "a failed one predicts nothing");
        set.prefilled(Tick(100), one);
        set.prefilled(Tick(5_000), one);
        assert!(!set.release(one), "it counts a little longer");
        set.expire(Tick(2_100), &mut prefixes);
        assert_eq!(predicted(&prefixes), [4, 7], "events have their time");
        set.expire(Tick(2_101), &mut prefixes);
        assert_eq!(predicted(&prefixes), [0, 7], "and no more");
        let confirmed = book(&mut set, &mut prefixes, ONE, 5);
        let waiting = book(&mut set, &mut prefixes, ONE, 2);
        set.prefilled(Tick(9_000), confirmed);
        set.prefilled(Tick(9_000), elsewhere);
        set.confirmed(ONE, &mut prefixes);
        assert_eq!(predicted(&prefixes), [2, 7], "its events decide about what it prefilled");
        set.forget(ONE, &mut prefixes);
        assert!(!set.release(waiting), "forgotten before");
        let released = book(&mut set, &mut prefixes, ONE, 2);
        let end = set.get(released).expect("it was booked").end;
        assert!(set.release(released) && !set.release(released), "its blocks are for the caller to take out");
        prefixes.remove(end, ONE, Kind::Both);
        set.forget(OTHER, &mut prefixes);
        let live = set.bookings.len() - set.free.len();
        assert_eq!((predicted(&prefixes), live, set.done.len()), ([0, 0], 0, 0));
        // What is still counted is active: that is its leases' to take back.
        assert!(set.latest.iter().all(|latest| *latest == NOBODY) && !prefixes.is_empty());
    }
}
