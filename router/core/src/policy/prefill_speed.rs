//! How fast a target prefills, learned from streamed answers.
//!
//! Where an answer is not streamed nobody sees its first token, so the change
//! of a lease from prefill to decode is estimated from this.

use std::collections::VecDeque;

use crate::units::{Millis, Tokens};

/// Samples kept per target: enough for a stable middle, few enough to follow a
/// change within a minute of traffic.
const SAMPLES: usize = 64;
/// Prefills shorter than this are dominated by everything but prefill.
const SHORTEST: Tokens = Tokens(128);

/// Recent prefill speeds of one target.
#[derive(Clone, Debug, Default)]
pub struct PrefillSpeed {
    /// Uncached tokens per second.
    samples: VecDeque<f64>,
}

impl PrefillSpeed {
    /// Learns that a prefill of `uncached` tokens had its first byte after
    /// `elapsed`. Too short ones say nothing and are ignored.
    pub fn learn(&mut self, uncached: Tokens, elapsed: Millis) {
        if uncached < SHORTEST || elapsed.0 == 0 {
            return;
        }
        if self.samples.len() == SAMPLES {
            self.samples.pop_front();
        }
        self.samples.push_back(uncached.0 as f64 * 1000.0 / elapsed.0 as f64);
    }

    /// Robust mean in tokens per second: the mean of the middle half. `None`
    /// before the first sample.
    pub fn tokens_per_second(&self) -> Option<f64> {
        let mut sorted: Vec<f64> = self.samples.iter().copied().collect();
        sorted.sort_by(f64::total_cmp);
        let cut = sorted.len() / 4;
        let middle = sorted.get(cut..sorted.len() - cut).filter(|middle| !middle.is_empty())?;
        Some(middle.iter().sum::<f64>() / middle.len() as f64)
    }

    /// How long `work` tokens will take; `None` before the first sample.
    pub fn time_for(&self, work: Tokens) -> Option<Millis> {
        let speed = self.tokens_per_second()?;
        Some(Millis((work.0 as f64 * 1000.0 / speed).min(1e9) as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outliers_do_not_move_it() {
        let mut speed = PrefillSpeed::default();
        assert_eq!(speed.time_for(Tokens(1000)), None, "nothing learned yet");
        for _ in 0..9 {
            speed.learn(Tokens(1000), Millis(100));
        }
        speed.learn(Tokens(1000), Millis(1));
        speed.learn(Tokens(1000), Millis(60_000));
        speed.learn(Tokens(10), Millis(60_000));
        assert_eq!(speed.time_for(Tokens(5000)), Some(Millis(500)));
    }
}
