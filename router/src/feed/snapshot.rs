//! Follows one target's envelopes: buffer, fetch, apply, continue.
//!
//! A router that joins, misses a number or sees another life of the engine
//! fetches a snapshot: it buffers what arrives meanwhile, applies the snapshot,
//! then what the buffer has above its number. This file decides; sockets are in
//! `nats`.

use std::collections::VecDeque;

use kvrouter_core::blocks::Domain;
use kvrouter_core::events::envelope::{Envelope, SnapshotPage};
use kvrouter_core::ids::Epoch;

use crate::pool::Change;

/// Messages kept while a snapshot is on its way; a fuller buffer is given up,
/// and the gap behind the snapshot asks for another one.
const BUFFER: usize = 4096;
/// Messages of older lives only, in a row, after which they are believed: a
/// bridge that lost its folder on a node whose clock went back.
const BELIEVE_OLDER_AFTER: u32 = 15;
/// Most pages of one snapshot: 256 M blocks.
const MAX_PAGES: u32 = 4096;

/// Where the router stands with one target.
#[derive(Debug)]
pub struct Follower {
    domain: Domain,
    state: State,
    epoch: Epoch,
    seq: u64,
    older_in_a_row: u32,
}

#[derive(Debug)]
enum State {
    /// Nothing is known.
    Unknown,
    /// A snapshot is on its way.
    Fetching(VecDeque<Envelope>),
    /// The view is current up to the last message.
    Following,
}

/// What a message asks for.
#[derive(Debug, Default)]
pub struct Outcome {
    /// To be applied, in order.
    pub changes: Vec<Change>,
    /// Why a snapshot is to be fetched, if one is.
    pub fetch: Option<&'static str>,
    /// What became of the message: a stable label.
    pub label: &'static str,
}

impl Outcome {
    fn labelled(label: &'static str) -> Self {
        Self { label, ..Self::default() }
    }

    fn fetching(label: &'static str) -> Self {
        Self { fetch: Some(label), ..Self::labelled(label) }
    }
}

impl Follower {
    /// A follower that knows nothing yet and speaks of `domain`.
    pub const fn new(domain: Domain) -> Self {
        Self { domain, state: State::Unknown, epoch: Epoch(0), seq: 0, older_in_a_row: 0 }
    }

    /// Handles a message from the bridge.
    pub fn message(&mut self, envelope: Envelope) -> Outcome {
        if envelope.domain != self.domain {
            self.state = State::Unknown;
            return Outcome { changes: vec![Change::ForeignDomain], ..Outcome::labelled("foreign_domain") };
        }
        match &mut self.state {
            State::Unknown => {
                self.state = State::Fetching(VecDeque::from([envelope]));
                Outcome::fetching("joined")
            }
            State::Fetching(buffer) => {
                if buffer.len() == BUFFER {
                    buffer.pop_front();
                }
                buffer.push_back(envelope);
                Outcome::labelled("buffered")
            }
            State::Following => self.follow(envelope),
        }
    }

    fn follow(&mut self, envelope: Envelope) -> Outcome {
        if envelope.epoch < self.epoch {
            self.older_in_a_row += 1;
            if self.older_in_a_row < BELIEVE_OLDER_AFTER {
                return Outcome::labelled("stale_epoch");
            }
            self.older_in_a_row = 0;
            self.state = State::Fetching(VecDeque::from([envelope]));
            return Outcome { changes: vec![Change::Reset], ..Outcome::fetching("older_epoch") };
        }
        self.older_in_a_row = 0;
        if envelope.epoch > self.epoch {
            self.state = State::Fetching(VecDeque::from([envelope]));
            return Outcome { changes: vec![Change::Reset], ..Outcome::fetching("new_epoch") };
        }
        let heartbeat = envelope.deltas.is_none();
        let expected = if heartbeat { self.seq } else { self.seq + 1 };
        if envelope.seq < expected {
            return Outcome::labelled("stale_seq");
        }
        if envelope.seq > expected {
            self.state = State::Fetching(VecDeque::from([envelope]));
            return Outcome { changes: vec![Change::Gap], ..Outcome::fetching("gap") };
        }
        self.seq = envelope.seq;
        let label = if heartbeat { "heartbeat" } else { "applied" };
        Outcome { changes: vec![continued(envelope)], ..Outcome::labelled(label) }
    }

    /// Handles a whole snapshot, pages in any order. One that is not wanted any
    /// more is ignored.
    pub fn snapshot(&mut self, mut pages: Vec<SnapshotPage>) -> Outcome {
        let State::Fetching(buffer) = &mut self.state else { return Outcome::labelled("snapshot_unwanted") };
        let buffer = std::mem::take(buffer);
        pages.sort_by_key(|page| page.index);
        let newest = buffer.back().map_or(Epoch(0), |latest| latest.epoch);
        let Some(first) = pages.first().map(|page| page.envelope.clone()) else {
            self.state = State::Unknown;
            return Outcome::labelled("snapshot_empty");
        };
        if first.epoch < newest {
            // Of a life that is over: the next message asks again.
            self.state = State::Unknown;
            return Outcome::labelled("snapshot_stale");
        }
        if first.domain != self.domain {
            self.state = State::Unknown;
            return Outcome { changes: vec![Change::ForeignDomain], ..Outcome::labelled("foreign_domain") };
        }
        (self.epoch, self.seq, self.state) = (first.epoch, first.seq, State::Following);
        self.older_in_a_row = 0;
        let deltas = pages.into_iter().flat_map(|page| page.envelope.deltas.into_iter().flatten()).collect();
        let mut outcome = Outcome::labelled("snapshot");
        outcome.changes.push(Change::Replaced {
            epoch: first.epoch,
            seq: first.seq,
            deltas,
            status: first.status,
            page: first.page,
        });
        // Messages of a life before the snapshot's say nothing, however many they are:
        // they came before it did.
        for envelope in buffer.into_iter().filter(|envelope| envelope.epoch >= first.epoch) {
            let next = self.message(envelope);
            outcome.changes.extend(next.changes);
            outcome.fetch = outcome.fetch.or(next.fetch);
        }
        outcome
    }

    /// The snapshot did not come: the next message asks again.
    pub fn snapshot_failed(&mut self) {
        if matches!(self.state, State::Fetching(_)) {
            self.state = State::Unknown;
        }
    }
}

fn continued(envelope: Envelope) -> Change {
    Change::Continued {
        epoch: envelope.epoch,
        seq: envelope.seq,
        deltas: envelope.deltas.unwrap_or_default(),
        status: envelope.status,
        page: envelope.page,
    }
}

/// Collects the pages of one snapshot.
#[derive(Debug, Default)]
pub struct Collector {
    pages: Vec<SnapshotPage>,
}

impl Collector {
    /// Takes a page; returns all of them once they are complete. Pages of
    /// another answer than the first one's are ignored.
    pub fn add(&mut self, page: SnapshotPage) -> Option<Vec<SnapshotPage>> {
        let same = |other: &SnapshotPage| {
            (other.envelope.epoch, other.envelope.seq, other.pages)
                == (page.envelope.epoch, page.envelope.seq, page.pages)
        };
        let fits = page.pages <= MAX_PAGES
            && self.pages.first().is_none_or(same)
            && self.pages.iter().all(|other| other.index != page.index);
        if fits {
            let pages = page.pages as usize;
            self.pages.push(page);
            if self.pages.len() == pages {
                return Some(std::mem::take(&mut self.pages));
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvrouter_core::blocks::{BlockHash, NamespaceId};
    use kvrouter_core::events::envelope::Status;
    use kvrouter_core::events::{Delta, Tier};

    const DOMAIN: Domain = Domain(1);

    fn stored(hash: u64) -> Delta {
        let hashes = vec![BlockHash(hash)];
        Delta::Stored { namespace: NamespaceId(0), parent: BlockHash(0), hashes, tier: Tier::Device }
    }

    /// A message that stores block `seq`, or a heartbeat.
    fn message(epoch: u64, seq: u64, heartbeat: bool) -> Envelope {
        let deltas = (!heartbeat).then(|| vec![stored(seq)]);
        let status = Status::default();
        Envelope { domain: DOMAIN, epoch: Epoch(epoch), seq, page: 16, block: 16, deltas, status }
    }

    fn snapshot(epoch: u64, seq: u64) -> Vec<SnapshotPage> {
        vec![SnapshotPage { envelope: message(epoch, seq, false), index: 0, pages: 1 }]
    }

    fn following(epoch: u64, seq: u64) -> Follower {
        let mut follower = Follower::new(DOMAIN);
        assert_eq!(follower.message(message(epoch, seq, true)).fetch, Some("joined"));
        assert_eq!(follower.snapshot(snapshot(epoch, seq)).label, "snapshot");
        follower
    }

    fn numbers(outcome: &Outcome) -> Vec<u64> {
        let number = |change: &Change| match change {
            Change::Replaced { seq, .. } | Change::Continued { seq, .. } => Some(*seq),
            Change::Reset | Change::Gap | Change::ForeignDomain => None,
        };
        outcome.changes.iter().filter_map(number).collect()
    }

    #[track_caller]
    fn check(why: &str, envelope: Envelope, label: &str, fetch: bool) {
        let mut follower = following(5, 9);
        let outcome = follower.message(envelope);
        assert_eq!((outcome.label, outcome.fetch.is_some()), (label, fetch), "{why}");
    }

    #[test]
    fn judges_every_kind_of_message() {
        check("the next", message(5, 10, false), "applied", false);
        check("a heartbeat", message(5, 9, true), "heartbeat", false);
        check("a heartbeat behind a lost message", message(5, 10, true), "gap", true);
        check("a gap", message(5, 11, false), "gap", true);
        check("an older number", message(5, 9, false), "stale_seq", false);
        check("an older life, however far", message(4, 99, false), "stale_epoch", false);
        check("a younger life", message(6, 0, true), "new_epoch", true);
        check(
            "another domain",
            Envelope { domain: Domain(2), ..message(5, 10, false) },
            "foreign_domain",
            false,
        );
    }

    #[test]
    fn what_came_during_the_fetch_is_applied_above_the_snapshot() {
        let mut follower = Follower::new(DOMAIN);
        for seq in 3..=6 {
            follower.message(message(5, seq, false));
        }
        let outcome = follower.snapshot(snapshot(5, 4));
        assert_eq!((numbers(&outcome), outcome.fetch), (vec![4, 5, 6], None));
    }

    #[test]
    fn a_buffer_that_overflowed_asks_again() {
        let mut follower = Follower::new(DOMAIN);
        for seq in 1..=BUFFER as u64 + 10 {
            follower.message(message(5, seq, false));
        }
        let outcome = follower.snapshot(snapshot(5, 2));
        assert_eq!(outcome.fetch, Some("gap"), "3 to 10 were given up");
    }

    #[test]
    fn a_snapshot_of_a_younger_life_replaces_the_older_buffer() {
        let mut follower = Follower::new(DOMAIN);
        follower.message(message(5, 3, false));
        follower.message(message(6, 1, false));
        let outcome = follower.snapshot(snapshot(6, 1));
        assert_eq!((numbers(&outcome), outcome.fetch), (vec![1], None));
        assert!(follower.snapshot(snapshot(6, 1)).changes.is_empty(), "a second answer is not wanted");
    }

    #[test]
    fn however_much_of_an_older_life_was_buffered_the_snapshot_stays() {
        let mut follower = Follower::new(DOMAIN);
        for seq in 1..=20 {
            follower.message(message(5, seq, false));
        }
        follower.message(message(6, 2, false));
        let outcome = follower.snapshot(snapshot(6, 1));
        assert_eq!((numbers(&outcome), outcome.changes.len(), outcome.fetch), (vec![1, 2], 2, None));
        assert_eq!(follower.message(message(5, 21, false)).label, "stale_epoch", "the first one that counts");
        assert_eq!(follower.message(message(6, 3, false)).label, "applied");
    }

    #[test]
    fn a_snapshot_that_comes_after_a_buffer_of_older_messages_alone_stays_too() {
        let mut follower = Follower::new(DOMAIN);
        for seq in 1..=20 {
            follower.message(message(5, seq, false));
        }
        let outcome = follower.snapshot(snapshot(6, 1));
        assert_eq!((numbers(&outcome), outcome.changes.len(), outcome.fetch), (vec![1], 1, None));
    }

    #[test]
    fn a_snapshot_of_an_older_life_is_not_taken_and_not_asked_for_at_once() {
        let mut follower = Follower::new(DOMAIN);
        follower.message(message(6, 1, false));
        let outcome = follower.snapshot(snapshot(5, 9));
        assert_eq!((outcome.label, outcome.fetch), ("snapshot_stale", None));
        assert_eq!(follower.message(message(6, 2, false)).fetch, Some("joined"));
    }

    #[test]
    fn a_bridge_whose_clock_went_back_is_believed_in_the_end() {
        let mut follower = following(5, 9);
        for _ in 1..BELIEVE_OLDER_AFTER {
            assert_eq!(follower.message(message(4, 1, true)).label, "stale_epoch");
        }
        assert_eq!(follower.message(message(4, 1, true)).fetch, Some("older_epoch"));
        assert_eq!(follower.snapshot(snapshot(4, 1)).label, "snapshot");
    }

    #[test]
    fn pages_are_whole_or_nothing() {
        let page = |seq, index| SnapshotPage { envelope: message(5, seq, false), index, pages: 2 };
        let mut collector = Collector::default();
        assert!(collector.add(page(1, 1)).is_none());
        assert!(collector.add(page(1, 1)).is_none(), "the same page twice");
        assert!(collector.add(page(2, 0)).is_none(), "a page of another answer");
        assert_eq!(collector.add(page(1, 0)).map(|pages| pages.len()), Some(2));
    }
}
