//! Does this message continue the stream?
//!
//! Engines number their batches from 0 in every life of their process and say
//! nothing else about restarts. So continuity is proven, not assumed: the
//! digest of the last payload is remembered, and a replay must return the same
//! payload under the same number. This file holds no socket; it is told what
//! arrived and answers what to do.

use std::collections::VecDeque;

use xxhash_rust::xxh3::xxh3_64;

/// Payload digests that are remembered, newest last: enough to recognise a
/// message that arrives both live and by replay while a feed joins.
const REMEMBERED: usize = 4096;

/// How a message reached us.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// From the engine's publisher.
    Live,
    /// From its replay socket.
    Replay,
}

/// What to do with a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// It continues the stream: apply it.
    Apply,
    /// It was applied before: drop it.
    Duplicate,
    /// Messages are missing before it: ask for a replay from `from`, which
    /// includes the last message applied, so that the answer proves continuity.
    Repair {
        /// First sequence number to ask for.
        from: u64,
    },
    /// It belongs to another life of the engine: forget the view, start anew.
    Restarted,
}

/// Where a stream stands.
#[derive(Clone, Debug, Default)]
pub struct Sequence {
    /// Number and payload digest of applied messages, newest last.
    recent: VecDeque<(u64, u64)>,
}

/// The digest under which a payload is remembered.
pub fn payload_digest(payload: &[u8]) -> u64 {
    xxh3_64(payload)
}

impl Sequence {
    /// Number and digest of the last message applied; `None` before the first.
    pub fn last(&self) -> Option<(u64, u64)> {
        self.recent.back().copied()
    }

    /// The number of the next message; 0 before the first.
    pub fn expects(&self) -> u64 {
        self.last().map_or(0, |(seq, _)| seq.saturating_add(1))
    }

    /// Whether message `seq` was applied with this digest, as far as memory
    /// reaches: what proves that a stream is the one remembered.
    pub fn has(&self, seq: u64, digest: u64) -> bool {
        self.recent.contains(&(seq, digest))
    }

    /// Judges message `seq`; [`Step::Apply`] also records it.
    pub fn observe(&mut self, source: Source, seq: u64, digest: u64) -> Step {
        let expected = self.expects();
        if seq == expected {
            self.record(seq, digest);
            return Step::Apply;
        }
        if seq > expected {
            return Step::Repair { from: expected.saturating_sub(1) };
        }
        match (self.recent.iter().rev().find(|(known, _)| *known == seq), source) {
            (Some((_, known)), _) if *known == digest => Step::Duplicate,
            (Some(_), _) => Step::Restarted,
            // Too old to remember. A publisher never repeats itself, a replay
            // may reach back as far as it was asked to.
            (None, Source::Live) => Step::Restarted,
            (None, Source::Replay) => Step::Duplicate,
        }
    }

    /// Accepts a message behind a gap that cannot be closed.
    pub fn skip_to(&mut self, seq: u64, digest: u64) {
        self.record(seq, digest);
    }

    fn record(&mut self, seq: u64, digest: u64) {
        if self.recent.len() == REMEMBERED {
            self.recent.pop_front();
        }
        self.recent.push_back((seq, digest));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Source::{Live, Replay};

    #[track_caller]
    fn check(why: &str, applied: &[(u64, u64)], message: (Source, u64, u64), expected: Step) {
        let mut sequence = Sequence::default();
        for (seq, digest) in applied {
            sequence.skip_to(*seq, *digest);
        }
        assert_eq!(sequence.observe(message.0, message.1, message.2), expected, "{why}");
    }

    #[test]
    fn judges_every_kind_of_message() {
        let ten: Vec<_> = (0..10).map(|seq| (seq, seq + 100)).collect();
        check("the first of a life", &[], (Live, 0, 1), Step::Apply);
        check("a late joiner asks for all", &[], (Live, 7, 1), Step::Repair { from: 0 });
        check("the next", &ten, (Live, 10, 1), Step::Apply);
        check("a gap asks from the last one on", &ten, (Live, 12, 1), Step::Repair { from: 9 });
        check("seen live and by replay", &ten, (Live, 4, 104), Step::Duplicate);
        check("same number, other payload", &ten, (Live, 4, 5), Step::Restarted);
        check("same number, other payload, by replay", &ten, (Replay, 9, 5), Step::Restarted);
        check("sequence back to 0", &ten, (Live, 0, 9), Step::Restarted);
        check("900 then 3 is a new life", &[(900, 1)], (Live, 3, 1), Step::Restarted);
        check("a replay may reach back", &[(900, 1)], (Replay, 3, 1), Step::Duplicate);
    }

    #[test]
    fn memory_is_bounded() {
        let mut sequence = Sequence::default();
        for seq in 0..3 * REMEMBERED as u64 {
            assert_eq!(sequence.observe(Live, seq, seq), Step::Apply);
        }
        assert_eq!(sequence.recent.len(), REMEMBERED);
    }
}
