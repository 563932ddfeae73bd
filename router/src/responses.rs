//! Which worker made which response.
//!
//! `/v1/responses` keeps conversations in the engine that answered: a request
//! with `previous_response_id` finds its beginning there and nowhere else. The
//! table is bounded and forgets; what it does not know is routed like any other
//! request, and the receipt says so.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Weak};

use kvrouter_core::units::{Millis, Tick};

use crate::fleet::Worker;

/// Most responses that are remembered: with ids of 40 bytes about 10 MB.
const CAPACITY: usize = 65_536;
/// Longest id that is remembered. Engines make ids of 40 bytes.
const MAX_ID: usize = 256;
/// How long a response is remembered. A conversation that rested for a day has
/// no cache left that would be worth a detour.
const TIME_TO_LIVE: Millis = Millis::from_secs(24 * 3600);

/// Responses and their workers, the oldest first.
#[derive(Debug, Default)]
pub struct Responses {
    made: HashMap<Arc<str>, Made>,
    order: VecDeque<(Tick, Arc<str>)>,
}

#[derive(Debug)]
struct Made {
    at: Tick,
    worker: Weak<Worker>,
}

/// What is known of a response.
#[derive(Debug)]
pub enum Maker {
    /// This worker made it, and is in the fleet.
    Here(Arc<Worker>),
    /// The worker that made it left.
    Gone,
    /// Nothing: it is too old, another router's, or nobody's.
    Unknown,
}

impl Responses {
    /// `worker` made the response `id`.
    pub fn made(&mut self, now: Tick, id: &str, worker: &Arc<Worker>) {
        if id.len() > MAX_ID {
            return;
        }
        self.expire(now);
        while self.order.len() >= CAPACITY {
            self.forget_oldest();
        }
        let id: Arc<str> = id.into();
        self.made.insert(Arc::clone(&id), Made { at: now, worker: Arc::downgrade(worker) });
        self.order.push_back((now, id));
    }

    /// Who made the response `id`.
    pub fn maker(&mut self, now: Tick, id: &str) -> Maker {
        self.expire(now);
        let Some(made) = self.made.get(id) else { return Maker::Unknown };
        match made.worker.upgrade().filter(|worker| !worker.gone.is_cancelled()) {
            Some(worker) => Maker::Here(worker),
            None => Maker::Gone,
        }
    }

    /// Responses that are remembered.
    pub fn len(&self) -> usize {
        self.made.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.made.is_empty()
    }

    fn expire(&mut self, now: Tick) {
        while self.order.front().is_some_and(|(at, _)| now.since(*at) >= TIME_TO_LIVE) {
            self.forget_oldest();
        }
    }

    fn forget_oldest(&mut self) {
        let Some((at, id)) = self.order.pop_front() else { return };
        // It may have been made again since.
        if self.made.get(&id).is_some_and(|made| made.at == at) {
            self.made.remove(&id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::tests::worker_named;

    fn name(maker: &Maker) -> &str {
        match maker {
            Maker::Here(worker) => worker.id.as_str(),
            Maker::Gone => "gone",
            Maker::Unknown => "unknown",
        }
    }

    #[test]
    fn a_response_is_found_where_it_was_made_until_its_worker_leaves() {
        let (a, b) = (worker_named("a:1"), worker_named("b:1"));
        let mut responses = Responses::default();
        responses.made(Tick(1), "one", &a);
        responses.made(Tick(2), "two", &b);
        assert_eq!(name(&responses.maker(Tick(3), "one")), "a:1");
        assert_eq!(name(&responses.maker(Tick(3), "three")), "unknown");
        b.gone.cancel();
        assert_eq!(name(&responses.maker(Tick(3), "two")), "gone", "somebody still has a request there");
        drop(a);
        assert_eq!(name(&responses.maker(Tick(3), "one")), "gone");
    }

    #[test]
    fn the_table_forgets_by_age_and_by_number() {
        let a = worker_named("a:1");
        let mut responses = Responses::default();
        responses.made(Tick(0), "old", &a);
        responses.made(Tick(5), "again", &a);
        responses.made(Tick(9), "again", &a);
        let end = Tick(TIME_TO_LIVE.0);
        assert_eq!(name(&responses.maker(end, "old")), "unknown");
        assert_eq!(name(&responses.maker(Tick(end.0 + 5), "again")), "a:1", "it was made again");
        for number in 0..CAPACITY {
            responses.made(end, &number.to_string(), &a);
        }
        assert_eq!((name(&responses.maker(end, "again")), responses.len()), ("unknown", CAPACITY));
        responses.made(end, &"x".repeat(MAX_ID + 1), &a);
        assert_eq!(responses.len(), CAPACITY);
    }
}
