//! Load that this router did not book.
//!
//! Other routers of the same pool say what they booked, and renew it; what is
//! not renewed is forgotten. The engine says how much it has in hand; what goes
//! beyond all that they sent it came by another way and counts too, by the rule in
//! [`super::strangers`]. Carrying these words between processes is the shell's.

use super::Load;
use super::strangers::{EngineReport, Marks, Sent};
use crate::units::{Millis, Tick};

/// How long another router's word counts: three renewals, one a second.
pub const LIFETIME: Millis = Millis::from_secs(3);
/// Most other routers of one pool that are remembered; the one that was heard of
/// longest ago makes room.
pub const MAX_REPLICAS: usize = 64;

/// One router among those of a pool: a number that it drew at its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReplicaId(pub u64);

/// What a router says of one target.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Booking {
    /// What it has booked there.
    pub load: Load,
    /// What it sent there; `None` from a router of an earlier release.
    pub sent: Option<Sent>,
}

/// What was said about one target.
#[derive(Debug, Default)]
pub struct Outside {
    /// The one that spoke last is the last one.
    replicas: Vec<Replica>,
    /// What was over of this router's own sequences.
    own: Marks,
    /// When the latest mark was set.
    marked: Option<Tick>,
    engine: Option<Strangers>,
}

#[derive(Debug)]
struct Replica {
    id: ReplicaId,
    at: Tick,
    told: Booking,
    marks: Marks,
}

/// What came by another way, as of the engine's latest word.
#[derive(Debug)]
struct Strangers {
    at: Tick,
    lifetime: Millis,
    load: Load,
}

impl Replica {
    fn is_fresh(&self, now: Tick) -> bool {
        now.since(self.at) <= LIFETIME
    }
}

impl Strangers {
    fn is_fresh(&self, now: Tick) -> bool {
        now.since(self.at) <= self.lifetime
    }
}

impl Outside {
    /// Another router has this booked on the target; replaces what it said before.
    pub fn replica(&mut self, now: Tick, id: ReplicaId, told: Booking) {
        let known = self.replicas.iter().position(|replica| replica.id == id);
        let known = known.map(|at| self.replicas.remove(at));
        // Counts that begin anew are of a target that it has lost and found again.
        let goes_on = |known: &Replica| match (known.told.sent, told.sent) {
            (Some(before), Some(sent)) => sent.follows(before),
            _ => true,
        };
        let marks = known.filter(goes_on).map_or_else(Marks::default, |known| known.marks);
        if self.replicas.len() == MAX_REPLICAS {
            self.replicas.remove(0);
        }
        self.replicas.push(Replica { id, at: now, told, marks });
    }

    /// The engine is to be asked a while from now; so far, this router sent `own`.
    pub fn mark(&mut self, now: Tick, own: Sent) {
        self.own.set(own);
        for Replica { told, marks, .. } in &mut self.replicas {
            marks.set(told.sent.unwrap_or_default());
        }
        self.marked = Some(now);
    }

    /// The target's engine says what it has in hand, beside what this router has
    /// `booked`. Says nothing before the first mark, nor while a router of an earlier
    /// release is heard, which does not tell what it sent.
    pub fn engine(&mut self, now: Tick, report: &EngineReport, booked: Load) {
        let Some(marked) = self.marked else { return };
        let heard = || self.replicas.iter().filter(|replica| replica.is_fresh(marked));
        let sent = heard().map(|replica| Some(replica.marks.at_most(replica.told.sent?)));
        let sent: Option<u64> = sent.sum();
        self.engine = sent.map(|sent| {
            let sent = self.own.at_most(report.sent).saturating_add(sent);
            let load = report.strangers(sent, booked.plus(self.replicas(now)));
            Strangers { at: now, lifetime: report.lifetime, load }
        });
    }

    /// The engine lives anew: what it said is of its former life, and so is an answer
    /// that is on its way.
    pub fn engine_restarted(&mut self) {
        self.engine = None;
        self.marked = None;
    }

    /// What other routers have booked, all together.
    pub fn replicas(&self, now: Tick) -> Load {
        let fresh = self.replicas.iter().filter(|replica| replica.is_fresh(now));
        fresh.map(|replica| replica.told.load).fold(Load::default(), Load::plus)
    }

    /// What came by another way; `None` where no engine's word counts.
    pub fn strangers(&self, now: Tick) -> Option<Load> {
        self.engine.as_ref().filter(|engine| engine.is_fresh(now)).map(|engine| engine.load)
    }

    /// All of it, and the first tick at which it is to be worked out anew; `None` where
    /// there is nothing.
    pub fn load(&self, now: Tick) -> Option<(Load, Tick)> {
        let replicas = self.replicas.iter().filter(|replica| replica.is_fresh(now));
        let replicas = replicas.map(|replica| (replica.told.load, replica.at.plus(LIFETIME)));
        let engine = self.engine.as_ref().filter(|engine| engine.is_fresh(now));
        let engine = engine.map(|engine| (engine.load, engine.at.plus(engine.lifetime)));
        let words = replicas.chain(engine).filter(|(load, _)| *load != Load::default());
        let sum = words.reduce(|(sum, first), (load, last)| (sum.plus(load), first.min(last)));
        sum.map(|(sum, first)| (sum, first.plus(Millis(1))))
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
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::super::strangers::EngineLoad;
    use super::*;
    use crate::units::{BlockSize, Tokens};

    fn load(active_blocks: u64, queued: u64, context: u64, requests: u64) -> Load {
        Load { active_blocks, queued: Tokens(queued), context: Tokens(context), requests }
    }

    fn told(load: Load) -> Booking {
        Booking { load, sent: Some(Sent::default()) }
    }

    fn report(waiting: u64, running: u64, sent: Sent) -> EngineReport {
        let size = BlockSize::new(16).expect("not zero");
        let load = EngineLoad { waiting, running, used: None };
        EngineReport { load, sent, typical: Tokens(320), size, lifetime: Millis(6_000) }
    }

    #[track_caller]
    fn check(why: &str, outside: &Outside, now: u64, expected: Load) {
        let found = outside.load(Tick(now)).map_or_else(Load::default, |(load, _)| load);
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
        check("nobody spoke", &outside, 0, nothing);
        outside.replica(Tick(0), ReplicaId(1), told(load(9, 90, 900, 1)));
        outside.replica(Tick(500), ReplicaId(2), told(load(1, 10, 100, 1)));
        outside.replica(Tick(1_000), ReplicaId(1), told(load(4, 40, 400, 2)));
        check("the latest of each", &outside, 1_000, load(5, 50, 500, 3));
        assert_eq!(outside.load(Tick(1_000)).map(|(_, anew)| anew), Some(Tick(3_501)), "one ends first");
        check("one is silent", &outside, 3_501, load(4, 40, 400, 2));
        outside.replica(Tick(3_600), ReplicaId(1), told(nothing));
        check("one has nothing any more", &outside, 3_600, nothing);
        assert_eq!(outside.load(Tick(3_600)), None);
        (0..200).for_each(|id| outside.replica(Tick(4_000), ReplicaId(id), told(load(1, 0, 0, 1))));
        check("remembered ones are bounded", &outside, 4_000, load(64, 0, 0, 64));
    }

    #[test]
    fn what_the_engine_has_beyond_all_that_was_sent_counts() {
        let mut outside = Outside::default();
        let sent = |begun, ended| Sent { begun, ended, left: 0 };
        outside.engine(Tick(0), &report(0, 9, sent(0, 0)), Load::default());
        assert_eq!(outside.strangers(Tick(0)), None, "there is no mark yet");
        outside.mark(Tick(0), sent(4, 2));
        outside.engine(Tick(1_000), &report(2, 3, sent(4, 2)), Load::default());
        check("three strangers, of which one waits", &outside, 1_000, load(63, 320, 960, 3));
        check("until its word is old", &outside, 7_000, load(63, 320, 960, 3));
        check("it is old", &outside, 7_001, Load::default());
        outside.replica(
            Tick(7_500),
            ReplicaId(7),
            Booking { load: load(3, 0, 60, 1), sent: Some(sent(2, 0)) },
        );
        outside.mark(Tick(8_000), sent(4, 2));
        outside.engine(Tick(9_000), &report(0, 5, sent(4, 2)), Load::default());
        check("another router sent two of them", &outside, 9_000, load(24, 0, 380, 2));
        outside.engine(Tick(9_000), &report(0, 4, sent(4, 2)), Load::default());
        check("it sent all of them", &outside, 9_000, load(3, 0, 60, 1));
        assert_eq!(outside.strangers(Tick(9_000)), Some(Load::default()), "which is known");
        outside.mark(Tick(10_501), sent(4, 2));
        outside.engine(Tick(11_000), &report(0, 4, sent(4, 2)), Load::default());
        check("it fell silent: nobody answers for them", &outside, 11_000, load(42, 0, 640, 2));
        outside.engine_restarted();
        check("the engine lives anew", &outside, 11_000, Load::default());
    }

    #[test]
    fn beside_a_router_that_does_not_tell_what_it_sent_nothing_is_judged() {
        let mut outside = Outside::default();
        outside.replica(Tick(0), ReplicaId(7), Booking { load: load(3, 0, 60, 1), sent: None });
        outside.mark(Tick(10), Sent::default());
        outside.engine(Tick(20), &report(0, 9, Sent::default()), Load::default());
        assert_eq!(outside.strangers(Tick(20)), None);
        outside.mark(Tick(4_000), Sent::default());
        outside.engine(Tick(4_010), &report(0, 9, Sent::default()), Load::default());
        assert_eq!(outside.strangers(Tick(4_010)).map(|load| load.requests), Some(9), "it is gone");
    }

    /// Ticks between two marks, from a mark to the question, from that to the latest answer,
    /// and from the answer to its judgement.
    const PERIOD: u64 = 200;
    const BEFORE: u64 = 100;
    const ANSWER: u64 = 40;
    const SETTLING: u64 = 50;

    /// A router and what became of its sequences; when the engine drops those that are over.
    #[derive(Default)]
    struct Sender {
        sent: Sent,
        in_hand: Vec<u64>,
        lingering: Vec<(u64, u64)>,
        /// Its words on their way.
        words: VecDeque<(u64, Sent)>,
    }

    impl Sender {
        fn act(&mut self, now: u64, act: u8, size: u64, delay: u64) {
            match act {
                0 | 1 => {
                    self.sent.begun += size;
                    self.in_hand.push(size);
                }
                2 | 3 => {
                    if let Some(size) = self.in_hand.pop() {
                        self.sent.ended += size;
                        self.lingering.push((now + delay % BEFORE, size));
                    }
                }
                4 if !self.in_hand.is_empty() => {
                    let size = self.in_hand.remove(0);
                    self.sent.left += size;
                    self.lingering.push((now + delay % (2 * PERIOD + BEFORE), size));
                }
                _ => {}
            }
        }

        fn at_engine(&self, now: u64) -> u64 {
            let lingering = self.lingering.iter().filter(|(until, _)| now < *until);
            self.in_hand.iter().sum::<u64>() + lingering.map(|(_, size)| size).sum::<u64>()
        }
    }

    proptest! {
        /// The engine is a list of what it runs. Two routers begin, end and give up sequences in
        /// every order; the engine drops them late, and the other router's words are late too.
        #[test]
        fn no_race_makes_strangers_and_none_stays_hidden(
            acts in prop::collection::vec((any::<bool>(), 0u8..12, 1u64..6, any::<u64>()), 0..1500),
            strangers in 0u64..5, counted in 0..ANSWER, lag in 0..SETTLING,
        ) {
            let (mut own, mut other, mut outside) = (Sender::default(), Sender::default(), Outside::default());
            let (mut count, mut answered) = (0, Sent::default());
            // Quiet at the end, for four questions.
            for now in 0..1500 + 4 * PERIOD + PERIOD {
                if let Some((is_own, act, size, delay)) = acts.get(now as usize) {
                    let sender = if *is_own { &mut own } else { &mut other };
                    sender.act(now, *act, *size, *delay);
                }
                other.words.push_back((now + lag, other.sent));
                while let Some((_, sent)) = other.words.pop_front_if(|(due, _)| *due <= now) {
                    let booking = Booking { load: Load::default(), sent: Some(sent) };
                    outside.replica(Tick(now), ReplicaId(1), booking);
                }
                match now % PERIOD {
                    0 => outside.mark(Tick(now), own.sent),
                    at if at == BEFORE + counted => {
                        count = own.at_engine(now) + other.at_engine(now) + strangers;
                    }
                    at if at == BEFORE + ANSWER => answered = own.sent,
                    at if at == BEFORE + ANSWER + SETTLING => {
                        outside.engine(Tick(now), &report(0, count, answered), Load::default());
                        let found = outside.strangers(Tick(now)).expect("it spoke").requests;
                        prop_assert!(found <= strangers, "{found} at {now}");
                        if now > 1500 + 3 * PERIOD {
                            prop_assert_eq!(found, strangers);
                        }
                    }
                    _ => {}
                }
            }
        }
    }
}
