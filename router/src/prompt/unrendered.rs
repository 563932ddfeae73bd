//! Which prompts were lately not rendered, and why: what the health report tells.
//!
//! The counters in metrics are for ever; these forget. What was refused counts for
//! [`WINDOW`] at least and for twice as long at most.

use kvrouter_core::units::{Millis, Tick};

use super::Refusal;

/// How long a refusal is recent. Long enough for who looks after an alert, short
/// enough that what was mended does not stay in the report.
pub const WINDOW: Millis = Millis(5 * 60 * 1000);

/// Counts of refusals in this window and in the one before.
#[derive(Debug, Default)]
pub struct Unrendered {
    began: Tick,
    now: Counts,
    before: Counts,
}

/// One entry for each reason: there are a handful.
type Counts = Vec<(Refusal, u64)>;

impl Unrendered {
    /// A prompt was refused.
    pub fn note(&mut self, now: Tick, refusal: Refusal) {
        self.turn(now);
        add(&mut self.now, refusal, 1);
    }

    /// How often each reason was met lately.
    pub fn recent(&mut self, now: Tick) -> Vec<(Refusal, u64)> {
        self.turn(now);
        let mut all = self.before.clone();
        self.now.iter().for_each(|(refusal, count)| add(&mut all, *refusal, *count));
        all
    }

    /// Begins windows that are due.
    fn turn(&mut self, now: Tick) {
        let over = now.since(self.began).0 / WINDOW.0;
        match over {
            0 => return,
            1 => self.before = std::mem::take(&mut self.now),
            _ => {
                self.before.clear();
                self.now.clear();
            }
        }
        self.began = Tick(self.began.0 + over * WINDOW.0);
    }
}

fn add(counts: &mut Counts, refusal: Refusal, more: u64) {
    match counts.iter_mut().find(|(known, _)| *known == refusal) {
        Some((_, count)) => *count += more,
        None => counts.push((refusal, more)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_refused_is_told_for_a_while() {
        let check = |why: &str, noted: &[u64], asked: u64, expected: u64| {
            let mut unrendered = Unrendered::default();
            noted.iter().for_each(|at| unrendered.note(Tick(*at), Refusal::Media));
            let found: u64 = unrendered.recent(Tick(asked)).iter().map(|(_, count)| count).sum();
            assert_eq!(found, expected, "{why}");
        };
        let window = WINDOW.0;
        check("nothing", &[], 0, 0);
        check("at once", &[5, 5], 5, 2);
        check("a window later", &[window - 1], 2 * window - 2, 1);
        check("at the end of the next window", &[window - 1], 2 * window, 0);
        check("both windows", &[window - 1, window], window + 1, 2);
        check("the first of two windows", &[window - 1, window], 2 * window, 1);
        check("windows do not wait for who asks", &[1, 2 * window - 1], 2 * window + 1, 1);
        check("long after", &[1], 100 * window, 0);
        check("after a pause", &[1, 7 * window + 3], 8 * window, 1);
    }

    #[test]
    fn reasons_are_counted_apart() {
        let mut unrendered = Unrendered::default();
        for refusal in [Refusal::Media, Refusal::NoTemplate, Refusal::Media] {
            unrendered.note(Tick(1), refusal);
        }
        assert_eq!(unrendered.recent(Tick(2)), [(Refusal::Media, 2), (Refusal::NoTemplate, 1)]);
    }
}
