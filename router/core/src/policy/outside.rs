//! Load that this router did not book.
//!
//! Other routers of the same pool say what they booked, and renew it; what is
//! not renewed is forgotten. The engine says how much it has in hand; what goes
//! beyond all bookings came by another way and counts too. Carrying these words
//! between processes is the shell's.

use super::Load;
use crate::units::{BlockSize, Millis, Tick, Tokens};

/// How long what was said counts: three renewals, one a second.
pub const LIFETIME: Millis = Millis::from_secs(3);
/// Most other routers of one pool that are remembered; the one that was heard of
/// longest ago makes room.
pub const MAX_REPLICAS: usize = 64;

/// One router among those of a pool: a number that it drew at its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReplicaId(pub u64);

/// What an engine says of itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineLoad {
    /// Requests that wait for their prefill.
    pub waiting: u64,
    /// Requests that are being worked on.
    pub running: u64,
    /// Tokens of its cache that requests in hand use; `None` where it does not say.
    pub used: Option<Tokens>,
}

/// What was said about one target.
#[derive(Debug, Default)]
pub struct Outside {
    replicas: Vec<Said<(ReplicaId, Load)>>,
    engine: Option<Said<EngineLoad>>,
}

#[derive(Debug)]
struct Said<T> {
    at: Tick,
    what: T,
}

impl<T> Said<T> {
    fn is_fresh(&self, now: Tick) -> bool {
        now.since(self.at) <= LIFETIME
    }
}

impl Outside {
    /// Another router has `load` booked on the target; replaces what it said
    /// before.
    pub fn replica(&mut self, now: Tick, id: ReplicaId, load: Load) {
        self.replicas.retain(|said| said.what.0 != id && said.is_fresh(now));
        if self.replicas.len() == MAX_REPLICAS {
            self.replicas.remove(0);
        }
        if load != Load::default() {
            self.replicas.push(Said { at: now, what: (id, load) });
        }
    }

    /// The target's engine says what it has in hand.
    pub fn engine(&mut self, now: Tick, load: EngineLoad) {
        self.engine = Some(Said { at: now, what: load });
    }

    /// What other routers have booked, all together, and the first tick at which that
    /// is to be worked out anew: at once where an engine's word counts, which depends
    /// on what is booked.
    pub fn replicas(&self, now: Tick) -> (Load, Tick) {
        let fresh = || self.replicas.iter().filter(|said| said.is_fresh(now));
        let sum = fresh().map(|said| said.what.1).fold(Load::default(), Load::plus);
        let first = fresh().map(|said| said.at.plus(LIFETIME).plus(Millis(1))).min();
        match self.engine.as_ref().is_some_and(|said| said.is_fresh(now)) {
            true => (sum, Tick(0)),
            false => (sum, first.unwrap_or(Tick(0))),
        }
    }

    /// Whether nothing said so far can count at `now` or later.
    pub fn is_silent(&self, now: Tick) -> bool {
        !self.replicas.iter().any(|said| said.is_fresh(now))
            && !self.engine.as_ref().is_some_and(|said| said.is_fresh(now))
    }

    /// Load beyond `booked`, of which `waiting` requests wait for their first
    /// byte. A request that nobody booked is taken for as long as the mean of
    /// those that somebody did, else as `prompt`.
    pub fn beyond(&self, now: Tick, booked: Load, waiting: u64, prompt: Tokens, size: BlockSize) -> Load {
        let (replicas, _) = self.replicas(now);
        let known = booked.plus(replicas);
        let Some(engine) = self.engine.as_ref().filter(|said| said.is_fresh(now)) else { return replicas };
        let engine = engine.what;
        let requests = engine.waiting.saturating_add(engine.running).saturating_sub(known.requests);
        let typical = known.context.0.checked_div(known.requests).unwrap_or(prompt.0);
        let queued = requests.min(engine.waiting.saturating_sub(waiting)).saturating_mul(typical);
        let context = match engine.used {
            Some(used) => used - known.context,
            None => Tokens(requests.saturating_mul(typical)),
        };
        let active_blocks = size.full_blocks(context).0.saturating_add(requests);
        replicas.plus(Load { active_blocks, queued: Tokens(queued), context, requests })
    }
}

impl Load {
    /// Load of requests that others booked, beside a request that hits `hits` blocks on
    /// the target. What they booked is known by number alone; but where this request
    /// hits, theirs most likely do too, and blocks that both share are no load to it. So
    /// each of theirs may share as many, and keeps one block at least.
    #[must_use]
    pub fn beside_hits(self, hits: u64) -> Self {
        let shared = self.requests.saturating_mul(hits);
        let least = self.active_blocks.min(self.requests);
        Self { active_blocks: self.active_blocks.saturating_sub(shared).max(least), ..self }
    }

    /// Both together.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            active_blocks: self.active_blocks.saturating_add(other.active_blocks),
            queued: self.queued + other.queued,
            context: self.context + other.context,
            requests: self.requests.saturating_add(other.requests),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(active_blocks: u64, queued: u64, context: u64, requests: u64) -> Load {
        Load { active_blocks, queued: Tokens(queued), context: Tokens(context), requests }
    }

    #[track_caller]
    fn check(why: &str, outside: &Outside, now: u64, booked: Load, expected: Load) {
        let size = BlockSize::new(16).expect("not zero");
        let found = outside.beyond(Tick(now), booked, 1, Tokens(320), size);
        assert_eq!(found, expected, "{why}");
    }

    #[test]
    fn blocks_that_a_request_hits_are_no_load_of_others_to_it() {
        let two = load(2_002, 32, 32_032, 2);
        for (hits, active_blocks) in [(0, 2_002), (100, 1_802), (1_000, 2), (u64::MAX, 2)] {
            assert_eq!(two.beside_hits(hits), Load { active_blocks, ..two }, "{hits}");
        }
        assert_eq!(load(1, 0, 9, 3).beside_hits(5).active_blocks, 1, "no more than there are");
    }

    #[test]
    fn replicas_add_up_until_they_fall_silent() {
        let mut outside = Outside::default();
        let nothing = Load::default();
        check("nobody spoke", &outside, 0, nothing, nothing);
        outside.replica(Tick(0), ReplicaId(1), load(9, 90, 900, 1));
        outside.replica(Tick(500), ReplicaId(2), load(1, 10, 100, 1));
        outside.replica(Tick(1_000), ReplicaId(1), load(4, 40, 400, 2));
        check("the latest of each", &outside, 1_000, nothing, load(5, 50, 500, 3));
        check("one is silent", &outside, 3_501, nothing, load(4, 40, 400, 2));
        outside.replica(Tick(3_600), ReplicaId(1), nothing);
        check("one has nothing any more", &outside, 3_600, nothing, nothing);
        assert!(outside.is_silent(Tick(3_600)));
        (0..200).for_each(|id| outside.replica(Tick(4_000), ReplicaId(id), load(1, 0, 0, 1)));
        check("remembered ones are bounded", &outside, 4_000, nothing, load(64, 0, 0, 64));
    }

    #[test]
    fn what_the_engine_has_beyond_all_bookings_counts() {
        let mut outside = Outside::default();
        let report =
            |waiting, running, used: Option<u64>| EngineLoad { waiting, running, used: used.map(Tokens) };
        let booked = load(20, 100, 400, 2);
        outside.engine(Tick(0), report(1, 1, None));
        check("all of it is booked", &outside, 0, booked, load(0, 0, 0, 0));
        outside.engine(Tick(0), report(3, 2, None));
        check("three strangers, two of them wait", &outside, 0, booked, load(40, 400, 600, 3));
        check(
            "nobody booked: as long as this prompt",
            &outside,
            0,
            load(0, 0, 0, 0),
            load(105, 640, 1600, 5),
        );
        outside.engine(Tick(0), report(0, 5, Some(1000)));
        check("it says what its requests use", &outside, 0, booked, load(40, 0, 600, 3));
        outside.replica(Tick(0), ReplicaId(7), load(30, 0, 600, 3));
        check("another router booked them", &outside, 0, booked, load(30, 0, 600, 3));
        check("too old to count", &outside, 3_001, booked, load(0, 0, 0, 0));
    }
}
