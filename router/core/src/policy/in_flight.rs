//! In-flight credit: what a target will hold once its prefills are done.
//!
//! A booked prompt's blocks count as predicted hits on its target until events
//! confirm them (then they are hits anyway), until the attempt fails, or until
//! shortly after its first byte. They stay in this side set and never enter the
//! index: only events make confirmed hits.

use std::sync::Arc;

use rustc_hash::FxHashMap;

use crate::blocks::{BlockHash, NamespaceId};
use crate::units::{Millis, Tick};

/// How long after a prefill its events may take. Engines publish with the step
/// that stored, so anything later means that nothing was stored.
const GRACE: Millis = Millis::from_secs(2);

/// A booking's place in the set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Ticket(u64);

/// The predicted blocks of one target.
#[derive(Debug, Default)]
pub struct InFlight {
    /// How many bookings predict each block.
    blocks: FxHashMap<(NamespaceId, BlockHash), u32>,
    bookings: FxHashMap<Ticket, Booking>,
    issued: u64,
}

#[derive(Debug)]
struct Booking {
    namespace: NamespaceId,
    blocks: Arc<[BlockHash]>,
    /// When it stops counting; `None` while its prefill is to come.
    until: Option<Tick>,
}

impl InFlight {
    /// Predicts `blocks`.
    pub fn book(&mut self, namespace: NamespaceId, blocks: &Arc<[BlockHash]>) -> Ticket {
        self.issued += 1;
        let ticket = Ticket(self.issued);
        for block in blocks.iter() {
            *self.blocks.entry((namespace, *block)).or_default() += 1;
        }
        self.bookings.insert(ticket, Booking { namespace, blocks: Arc::clone(blocks), until: None });
        ticket
    }

    /// The prefill is done: its blocks count a little longer, until events have
    /// had their time. Only the first call counts.
    pub fn prefilled(&mut self, now: Tick, ticket: Ticket) {
        if let Some(booking) = self.bookings.get_mut(&ticket) {
            booking.until.get_or_insert(now.plus(GRACE));
        }
    }

    /// The booking is over. One whose prefill was done counts until its time;
    /// one that never got there will not be cached.
    pub fn release(&mut self, ticket: Ticket) {
        if self.bookings.get(&ticket).is_some_and(|booking| booking.until.is_none()) {
            self.cancel(ticket);
        }
    }

    /// The booking failed.
    pub fn cancel(&mut self, ticket: Ticket) {
        let Some(booking) = self.bookings.remove(&ticket) else { return };
        for block in booking.blocks.iter() {
            let key = (booking.namespace, *block);
            if let Some(count) = self.blocks.get_mut(&key) {
                *count -= 1;
                if *count == 0 {
                    self.blocks.remove(&key);
                }
            }
        }
    }

    /// How many leading blocks of `blocks` are held or predicted, where the
    /// first `held` are held. Forgets what ran out.
    pub fn extend(&mut self, now: Tick, namespace: NamespaceId, blocks: &[BlockHash], held: u64) -> u64 {
        let over = |booking: &Booking| booking.until.is_some_and(|until| until < now);
        let expired: Vec<Ticket> =
            self.bookings.iter().filter(|(_, booking)| over(booking)).map(|(ticket, _)| *ticket).collect();
        expired.into_iter().for_each(|ticket| self.cancel(ticket));
        let rest = blocks.get(usize::try_from(held).unwrap_or(usize::MAX)..).unwrap_or_default();
        let predicted = rest.iter().take_while(|block| self.blocks.contains_key(&(namespace, **block)));
        held + predicted.count() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPACE: NamespaceId = NamespaceId(1);

    fn blocks(range: std::ops::Range<u64>) -> Arc<[BlockHash]> {
        range.map(BlockHash).collect()
    }

    #[test]
    fn blocks_are_predicted_until_they_fail_or_their_time_is_over() {
        let mut set = InFlight::default();
        let query = blocks(0..9);
        let one = set.book(SPACE, &blocks(0..4));
        let other = set.book(SPACE, &blocks(0..6));
        assert_eq!(set.extend(Tick(0), SPACE, &query, 0), 6);
        assert_eq!(set.extend(Tick(0), SPACE, &query, 7), 7, "held blocks need no prediction");
        assert_eq!(set.extend(Tick(0), NamespaceId(2), &query, 0), 0, "another namespace");
        set.cancel(other);
        assert_eq!(set.extend(Tick(0), SPACE, &query, 0), 4, "a failed one predicts nothing");
        set.prefilled(Tick(100), one);
        set.prefilled(Tick(5_000), one);
        set.release(one);
        assert_eq!(set.extend(Tick(2_100), SPACE, &query, 0), 4, "events have their time");
        assert_eq!(set.extend(Tick(2_101), SPACE, &query, 0), 0, "and no more");
        let cancelled = set.book(SPACE, &blocks(0..2));
        set.release(cancelled);
        assert_eq!((set.blocks.len(), set.bookings.len()), (0, 0), "nothing is left behind");
    }

    #[test]
    fn a_hole_between_held_and_predicted_ends_the_prefix() {
        let mut set = InFlight::default();
        set.book(SPACE, &blocks(5..9));
        assert_eq!(set.extend(Tick(0), SPACE, &blocks(0..9), 3), 3);
        assert_eq!(set.extend(Tick(0), SPACE, &blocks(0..9), 5), 9);
    }
}
