//! What an engine has in hand and no router of the pool sent it.
//!
//! An engine counts sequences: a request for four answers, or of four prompts, is four.
//! It counts at a moment that nobody knows, between the question and the answer, and it
//! may count what is over for a router: a request whose answer has ended for an instant
//! more, one that was given up for some seconds. So its count is held against all that
//! it can have counted: what was begun when the answer was there, except what had ended
//! at a mark well before the question, and what had been given up two marks before
//! that. Only what goes beyond came by another way. What begins and ends in between may
//! hide strangers for as long as it does; no race makes strangers of it.

use super::Load;
use crate::units::{BlockSize, Millis, Tokens};

/// Where counts of sequences go round, so that they fit what routers tell each other.
pub const ROUND: u64 = 1 << 40;
/// A difference from here on is one below zero.
const ROUND_HALF: u64 = ROUND / 2;

/// What an engine says of itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineLoad {
    /// Sequences that wait for their prefill.
    pub waiting: u64,
    /// Sequences that are being worked on.
    pub running: u64,
    /// Tokens of its cache that those which run use; `None` where it does not say.
    pub used: Option<Tokens>,
}

/// An engine's word, and what has to be known to judge it.
#[derive(Clone, Copy, Debug)]
pub struct EngineReport {
    /// What it says.
    pub load: EngineLoad,
    /// What this router had sent there when the answer had come.
    pub sent: Sent,
    /// How long a stranger is taken to be where the engine does not tell.
    pub typical: Tokens,
    /// Tokens per block.
    pub size: BlockSize,
    /// How long it counts.
    pub lifetime: Millis,
}

/// Sequences that one router sent to one target, since it started: counts that only grow,
/// and that go round at [`ROUND`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// All of them, from before they were sent.
    pub begun: u64,
    /// Those that the engine has answered in full.
    pub ended: u64,
    /// Those that were given up: the engine may go on with them for a while.
    pub left: u64,
}

impl Sent {
    /// Whether it can come after `before` of the same router.
    pub const fn follows(self, before: Self) -> bool {
        self.begun.wrapping_sub(before.begun) % ROUND < ROUND_HALF
    }
}

/// What was over of one router's sequences at the latest marks.
#[derive(Clone, Copy, Debug, Default)]
pub struct Marks {
    ended: u64,
    /// At the latest mark, the one before, and the one before that.
    left: [u64; 3],
}

impl Marks {
    /// Sets a mark.
    pub fn set(&mut self, sent: Sent) {
        let [latest, before, _] = self.left;
        *self = Self { ended: sent.ended, left: [sent.left, latest, before] };
    }

    /// The most of `sent` that the engine can have in hand.
    pub fn at_most(&self, sent: Sent) -> u64 {
        match sent.begun.wrapping_sub(self.ended).wrapping_sub(self.left[2]) % ROUND {
            // Less than nothing: nonsense of another router.
            ROUND_HALF.. => 0,
            in_hand => in_hand,
        }
    }
}

impl EngineReport {
    /// The load of what is beyond `sent` sequences, beside a `booked` load that is.
    pub(super) fn strangers(&self, sent: u64, booked: Load) -> Load {
        let EngineLoad { waiting, running, used } = self.load;
        let all = waiting.saturating_add(running);
        let requests = all.saturating_sub(sent);
        if requests == 0 {
            return Load::default();
        }
        // As many of them wait as of all.
        let queued = u128::from(requests) * u128::from(waiting) / u128::from(all);
        let queued = u64::try_from(queued).unwrap_or(requests);
        // As long as all that run, on average; but they use no more than is left.
        let mean = used.and_then(|used| used.0.checked_div(running)).unwrap_or(self.typical.0);
        let mean = mean.max(u64::from(self.size.tokens()));
        let rest = used.map_or(u64::MAX, |used| (used - (booked.context - booked.queued)).0);
        let queued = queued.saturating_mul(mean);
        let running = requests.saturating_mul(mean).saturating_sub(queued).min(rest);
        let context = Tokens(running.saturating_add(queued));
        let active_blocks = self.size.full_blocks(context).0.saturating_add(requests);
        Load { active_blocks, queued: Tokens(queued), context, requests }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_over_in_time_is_left_out() {
        let sent = |begun, ended, left| Sent { begun, ended, left };
        let mut marks = Marks::default();
        assert_eq!(marks.at_most(sent(9, 4, 3)), 9, "before the first mark nothing is known to be over");
        marks.set(sent(9, 4, 3));
        assert_eq!(marks.at_most(sent(9, 9, 3)), 5, "what ended since the mark may be counted still");
        marks.set(sent(12, 9, 3));
        assert_eq!(marks.at_most(sent(12, 9, 3)), 3, "given up one mark ago");
        marks.set(sent(12, 9, 3));
        assert_eq!(marks.at_most(sent(12, 9, 3)), 0, "given up two marks ago");
        marks.set(sent(20, 10, 8));
        assert_eq!(marks.at_most(sent(21, 10, 8)), 8, "given up since that one");
        marks.set(sent(20, 10, 8));
        assert_eq!(marks.at_most(sent(21, 10, 8)), 8, "two marks before the latest is not long enough");
        marks.set(sent(20, 10, 8));
        assert_eq!(marks.at_most(sent(21, 10, 8)), 3);
        assert_eq!(marks.at_most(sent(0, 0, 0)), 0, "nonsense of another router");
        marks.set(sent(ROUND - 1, ROUND - 3, 0));
        (0..3).for_each(|_| marks.set(sent(ROUND - 1, ROUND - 3, 0)));
        assert_eq!(marks.at_most(sent(1, ROUND - 3, 0)), 4, "once around");
    }

    #[test]
    fn strangers_weigh_what_the_engine_tells_of_them() {
        #[track_caller]
        fn check(
            why: &str,
            (waiting, running, used): (u64, u64, Option<u64>),
            sent: u64,
            expected: [u64; 4],
        ) {
            let size = BlockSize::new(16).expect("not zero");
            let load = EngineLoad { waiting, running, used: used.map(Tokens) };
            let (typical, lifetime) = (Tokens(320), Millis(1));
            let report = EngineReport { load, sent: Sent::default(), typical, size, lifetime };
            let booked = Load { context: Tokens(500), queued: Tokens(100), ..Load::default() };
            let [active_blocks, queued, context, requests] = expected;
            let expected = Load { active_blocks, queued: Tokens(queued), context: Tokens(context), requests };
            assert_eq!(report.strangers(sent, booked), expected, "{why}");
        }
        check("idle", (0, 0, None), 0, [0; 4]);
        check("all of it is known", (1, 1, None), 2, [0; 4]);
        check("more is known", (1, 1, None), 9, [0; 4]);
        check("three of six, and three of the six wait", (3, 3, None), 3, [63, 320, 960, 3]);
        check("they wait, as all do", (4, 0, None), 0, [84, 1280, 1280, 4]);
        check("as long as the mean of those that run", (0, 4, Some(4_000)), 2, [127, 0, 2_000, 2]);
        check("no longer than what ours leave", (0, 4, Some(1_000)), 3, [16, 0, 250, 1]);
        check("ours are long", (0, 3, Some(420)), 1, [3, 0, 20, 2]);
        check("one block at least", (2, 0, Some(0)), 1, [21, 320, 320, 1]);
        check("nobody is known, nor how long they are", (0, 2, Some(2)), 0, [2, 0, 0, 2]);
        check("absurd", (u64::MAX, u64::MAX, Some(u64::MAX)), 0, {
            let size = u64::MAX;
            [size, size, size, size]
        });
    }
}
