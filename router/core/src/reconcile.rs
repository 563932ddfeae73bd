//! Did the engine find what we predicted?
//!
//! Engines that report `cached_tokens` can be checked: a view that says "so many
//! blocks are held" is compared with what was really skipped. Per target the
//! latest comparisons are kept; their mean is the [`Share`] of a prediction that
//! comes true, and where most of them disagree the view [`Drift`]s, with the
//! likeliest [`Cause`]. One comparison moves the mean by a 64th at most, however
//! long its prompt: a single outlier says nothing.
//!
//! A hit in a hybrid view (several kinds of attention) is usable only where all
//! groups still hold it, which events do not tell: its credit is the share.

use std::collections::VecDeque;

use serde::Serialize;

use crate::units::{BlockSize, Millis, Tick, TierHits, Tokens};

/// Comparisons that are kept.
const WINDOW: usize = 64;
/// Fewer say nothing.
const ENOUGH: usize = 8;
/// A view drifts when less of its predictions comes true, in thousandths.
const DRIFTS_BELOW: u32 = 900;
/// It has stopped drifting when at least so much does.
const SOUND_FROM: u32 = 950;
/// A drift is forgotten this long after the last comparison: what an idle engine
/// would find is not known, and people shall not look for a fault of last night.
const FORGOTTEN_AFTER: Millis = Millis::from_secs(600);
/// Credit of a hybrid view of which not enough is known, in thousandths: enough
/// to be chosen, and so to become known, too little to outweigh a plain view.
const UNPROVEN: u32 = 500;

/// One answer beside what was predicted for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Comparison {
    /// Tokens that the view said would be skipped.
    pub predicted: Tokens,
    /// Tokens that the engine says it skipped.
    pub cached: Tokens,
    /// Whether the engine counted another number of prompt tokens than we did.
    pub other_length: bool,
    /// Whether the request had a cache salt.
    pub salted: bool,
    /// Whether the engine began a new life meanwhile, or soon after.
    pub restarted: bool,
}

/// The share of a prediction that counts, in thousandths. At most all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Share(u32);

/// What of a view's predictions does not come true.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    /// The engine finds less than predicted: requests are sent where they gain little.
    Less,
    /// The engine finds more than predicted: hits are missed.
    More,
}

/// The likeliest reason of a drift. Stable labels: see docs/metrics.md.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// The engine makes other tokens of the same requests.
    Template,
    /// Only requests with a cache salt are affected.
    Salt,
    /// The engine skips in larger units than its pages.
    PageSize,
    /// The engine began anew.
    Restart,
    /// What events tell comes too late: the cache turned over meanwhile.
    Lag,
    /// One kind of attention has dropped what another one still holds.
    HybridAttention,
}

/// A view whose predictions do not come true.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Drift {
    /// In which way.
    pub direction: Direction,
    /// Why, most likely.
    pub cause: Cause,
}

/// The comparisons of one target.
#[derive(Clone, Debug, Default)]
pub struct Reconciliation {
    window: VecDeque<Comparison>,
    /// When the last one was made.
    compared: Tick,
    drift: Option<Drift>,
    /// Comparisons until its cause is looked for again.
    until_cause: usize,
    /// The kinds of answers in which the engine has reported cached tokens, a bit
    /// each.
    reports: u32,
}

/// How one comparison came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// As predicted, but for part of a block.
    Agrees,
    /// The engine found less.
    Less,
    /// The engine found a block or more beyond.
    More,
}

impl Share {
    /// All of it.
    pub const ALL: Self = Self(1000);

    /// So many thousandths; all of it at most.
    pub const fn of_thousandths(thousandths: u32) -> Self {
        Self(if thousandths > 1000 { 1000 } else { thousandths })
    }

    /// In thousandths.
    pub const fn thousandths(self) -> u32 {
        self.0
    }

    /// This share of `hits`, rounded down. What is cut is the deepest blocks, of
    /// mixed tiers those of the slower ones.
    pub fn of(self, hits: TierHits) -> TierHits {
        if self == Self::ALL {
            return hits;
        }
        hits.at_most(hits.total().saturating_mul(u64::from(self.0)) / 1000)
    }
}

impl Direction {
    const fn outcome(self) -> Outcome {
        match self {
            Self::Less => Outcome::Less,
            Self::More => Outcome::More,
        }
    }

    /// Stable label for metrics and reports.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Less => "less",
            Self::More => "more",
        }
    }
}

impl Cause {
    /// Stable label for metrics and reports.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Template => "template",
            Self::Salt => "salt",
            Self::PageSize => "page_size",
            Self::Restart => "restart",
            Self::Lag => "lag",
            Self::HybridAttention => "hybrid_attention",
        }
    }
}

impl Outcome {
    /// Stable label for metrics.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Agrees => "agrees",
            Self::Less => "less",
            Self::More => "more",
        }
    }
}

impl Comparison {
    /// How it came out. Engines with pages below a block may skip part of one
    /// more block than can be predicted.
    pub fn outcome(&self, size: BlockSize) -> Outcome {
        if self.cached < self.predicted {
            Outcome::Less
        } else if self.cached.0 - self.predicted.0 < u64::from(size.tokens()) {
            Outcome::Agrees
        } else {
            Outcome::More
        }
    }

    /// Thousandths of the prediction that came true; `None` where nothing was
    /// predicted.
    fn share(&self) -> Option<u64> {
        (self.predicted.0 > 0)
            .then(|| self.cached.0.min(self.predicted.0).saturating_mul(1000) / self.predicted.0)
    }
}

impl Reconciliation {
    /// What an engine means that reports no cached tokens in an answer of `kind`
    /// (below 32): nothing, or, where it has reported some in such answers before,
    /// zero. Engines have a switch for some kinds and always report in others.
    pub fn reported(&mut self, kind: u8, cached: Option<Tokens>) -> Option<Tokens> {
        let bit = 1u32.checked_shl(u32::from(kind)).unwrap_or(0);
        self.reports |= if cached.is_some() { bit } else { 0 };
        cached.or((self.reports & bit != 0).then_some(Tokens(0)))
    }

    /// Takes in one comparison. One that predicted nothing and found nothing
    /// says nothing.
    pub fn compare(&mut self, now: Tick, comparison: Comparison, size: BlockSize, hybrid: bool) -> Outcome {
        let outcome = comparison.outcome(size);
        if comparison.predicted.0 > 0 || outcome == Outcome::More {
            if now.since(self.compared) > FORGOTTEN_AFTER {
                (self.drift, self.until_cause) = (None, 0);
                // The credit of a hybrid view lives on what it has shown.
                if !hybrid {
                    self.window.clear();
                }
            }
            if self.window.len() == WINDOW {
                self.window.pop_front();
            }
            self.window.push_back(comparison);
            self.compared = now;
            self.drift = self.judge(size, hybrid);
        }
        outcome
    }

    /// The engine began a new life: what did not come true before is explained.
    pub fn restarted(&mut self) {
        let disagree = self.window.iter_mut().filter(|it| it.cached < it.predicted);
        disagree.for_each(|it| it.restarted = true);
        if let Some(drift) = self.drift.as_mut().filter(|drift| drift.direction == Direction::Less) {
            drift.cause = Cause::Restart;
        }
    }

    /// The mean share of predictions that came true; `None` before enough are
    /// known.
    pub fn share(&self) -> Option<Share> {
        let shares: Vec<u64> = self.window.iter().filter_map(Comparison::share).collect();
        let mean = shares.iter().sum::<u64>().checked_div(shares.len() as u64)?;
        (shares.len() >= ENOUGH).then(|| Share(u32::try_from(mean).unwrap_or(1000)))
    }

    /// What hits in the view are worth: all of them, unless it is hybrid.
    pub fn credit(&self, hybrid: bool) -> Share {
        if !hybrid {
            return Share::ALL;
        }
        self.share().unwrap_or(Share(UNPROVEN))
    }

    /// How its predictions fail, if most did lately.
    pub fn drift(&self, now: Tick) -> Option<Drift> {
        self.drift.filter(|_| now.since(self.compared) <= FORGOTTEN_AFTER)
    }

    fn judge(&mut self, size: BlockSize, hybrid: bool) -> Option<Drift> {
        let before = self.drift.map(|drift| drift.direction);
        let limit = if before == Some(Direction::Less) { SOUND_FROM } else { DRIFTS_BELOW };
        let direction = if self.share().is_some_and(|share| share.0 < limit) {
            Direction::Less
        } else {
            let more = self.window.iter().filter(|it| it.outcome(size) == Outcome::More).count();
            // Half of them begin it, a quarter keeps it up.
            let part = if before == Some(Direction::More) { 4 } else { 2 };
            if self.window.len() < ENOUGH || more * part <= self.window.len() {
                return None;
            }
            Direction::More
        };
        // A likeliest cause that changed with every answer would say nothing: it stays
        // until there are as many more comparisons as came out wrong when it was found.
        self.until_cause = self.until_cause.saturating_sub(1);
        match self.drift.filter(|drift| drift.direction == direction && self.until_cause > 0) {
            Some(drift) => Some(drift),
            None => {
                self.until_cause =
                    self.window.iter().filter(|it| it.outcome(size) == direction.outcome()).count();
                Some(Drift { direction, cause: self.cause(direction, size, hybrid) })
            }
        }
    }

    fn cause(&self, direction: Direction, size: BlockSize, hybrid: bool) -> Cause {
        let wrong = direction.outcome();
        let (odd, fine): (Vec<Comparison>, Vec<Comparison>) =
            self.window.iter().partition(|it| it.outcome(size) == wrong);
        let most = |is: &dyn Fn(&Comparison) -> bool| odd.iter().filter(|it| is(it)).count() * 2 > odd.len();
        if most(&|it| it.other_length) {
            Cause::Template
        } else if most(&|it| it.restarted) {
            Cause::Restart
        } else if odd.iter().all(|it| it.salted) && !fine.iter().any(|it| it.salted) {
            Cause::Salt
        } else if direction == Direction::More {
            Cause::Lag
        } else if hybrid {
            Cause::HybridAttention
        } else if has_larger_unit(&self.window, size) {
            Cause::PageSize
        } else if most(&|it| it.cached.0 == 0) {
            Cause::Template
        } else {
            Cause::Lag
        }
    }
}

/// Whether all cached lengths are what a unit larger than a block leaves of the
/// predictions.
fn has_larger_unit(window: &VecDeque<Comparison>, size: BlockSize) -> bool {
    let unit = window.iter().fold(0, |unit, it| greatest_common_divisor(unit, it.cached.0));
    let fits = |it: &Comparison| it.predicted.0 / unit * unit == it.cached.0;
    unit > u64::from(size.tokens()) && window.iter().all(fits)
}

fn greatest_common_divisor(one: u64, other: u64) -> u64 {
    let (mut one, mut other) = (one, other);
    while other != 0 {
        (one, other) = (other, one % other);
    }
    one
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size() -> BlockSize {
        BlockSize::new(16).expect("not zero")
    }

    fn of(predicted: u64, cached: u64) -> Comparison {
        Comparison { predicted: Tokens(predicted), cached: Tokens(cached), ..Comparison::default() }
    }

    fn after(hybrid: bool, all: impl IntoIterator<Item = Comparison>) -> Reconciliation {
        let mut known = Reconciliation::default();
        all.into_iter().for_each(|it| {
            known.compare(Tick(0), it, size(), hybrid);
        });
        known
    }

    #[test]
    fn part_of_a_block_more_agrees() {
        for (predicted, cached, outcome) in [
            (64, 64, Outcome::Agrees),
            (64, 79, Outcome::Agrees),
            (64, 80, Outcome::More),
            (64, 63, Outcome::Less),
            (0, 15, Outcome::Agrees),
            (0, 16, Outcome::More),
        ] {
            assert_eq!(of(predicted, cached).outcome(size()), outcome, "{predicted} {cached}");
        }
    }

    /// One rule per row: what is compared, what is said of it.
    #[test]
    fn the_likeliest_cause_is_named() {
        #[track_caller]
        fn check(why: &str, hybrid: bool, all: Vec<Comparison>, expected: Option<(Direction, Cause)>) {
            let found = after(hybrid, all).drift(Tick(0)).map(|drift| (drift.direction, drift.cause));
            assert_eq!(found, expected, "{why}");
        }
        let many = |it: Comparison| vec![it; 10];
        let less = |cause| Some((Direction::Less, cause));
        let more = |cause| Some((Direction::More, cause));
        check("as predicted", false, many(of(64, 64)), None);
        check("too few to tell", false, vec![of(64, 0); 7], None);
        check("nothing at all", false, many(of(64, 0)), less(Cause::Template));
        let other_length = Comparison { other_length: true, ..of(64, 32) };
        check("another number of tokens", true, many(other_length), less(Cause::Template));
        let restarted = Comparison { restarted: true, ..of(64, 0) };
        check("a new life", false, many(restarted), less(Cause::Restart));
        let salted = Comparison { salted: true, ..of(64, 0) };
        let mixed = [vec![of(64, 64); 8], vec![salted; 8]].concat();
        check("only with a salt", false, mixed, less(Cause::Salt));
        let both = [vec![of(64, 0); 8], vec![salted; 8]].concat();
        check("with a salt and without", false, both, less(Cause::Template));
        check("several kinds of attention", true, many(of(64, 16)), less(Cause::HybridAttention));
        let units = [vec![of(144, 128); 4], vec![of(112, 64); 4]].concat();
        check("units of 64", false, units, less(Cause::PageSize));
        let turned = [vec![of(144, 48); 4], vec![of(112, 80); 4]].concat();
        check("part of it is gone", false, turned, less(Cause::Lag));
        check("more than predicted", false, many(of(0, 64)), more(Cause::Lag));
        let longer = Comparison { other_length: true, ..of(16, 64) };
        check("more, and another number of tokens", false, many(longer), more(Cause::Template));
    }

    #[test]
    fn an_outlier_moves_nothing_and_a_drift_ends_later_than_it_begins() {
        let mut known = after(false, vec![of(64, 64); 40]);
        known.compare(Tick(0), of(1 << 40, 0), size(), false);
        assert_eq!(known.share().map(Share::thousandths), Some(975), "one of 41");
        assert_eq!(known.drift(Tick(0)), None);
        let mut known = after(false, vec![of(64, 0); 10]);
        let mut good = 0;
        while known.drift(Tick(0)).is_some() {
            known.compare(Tick(0), of(64, 64), size(), false);
            good += 1;
        }
        assert!((WINDOW - 10..=WINDOW).contains(&good), "{good}: the window must be sound again");
        assert_eq!(known.window.len(), WINDOW, "nothing more is kept");
    }

    #[test]
    fn a_drift_is_forgotten_without_comparisons() {
        let known = after(false, vec![of(64, 0); 10]);
        assert!(known.drift(Tick(FORGOTTEN_AFTER.0)).is_some());
        let later = Tick(FORGOTTEN_AFTER.0 + 1);
        assert_eq!(known.drift(later), None);
        let mut known = known;
        known.compare(later, of(64, 64), size(), false);
        assert_eq!(known.drift(later), None, "what was before it is forgotten for good");
    }

    #[test]
    fn a_cause_stays_until_as_much_speaks_for_another() {
        let mut known = after(false, vec![of(64, 0); WINDOW]);
        let cause = |known: &Reconciliation| known.drift(Tick(0)).map(|drift| drift.cause);
        // It was looked for with the 8th, 16th, 32nd and 64th.
        for at in 0..WINDOW * 2 {
            let expected = if at < WINDOW { Cause::Template } else { Cause::Lag };
            assert_eq!(cause(&known), Some(expected), "after {at}");
            let other = if at % 2 == 0 { of(144, 48) } else { of(112, 80) };
            known.compare(Tick(0), other, size(), false);
        }
    }

    #[test]
    fn a_restart_explains_what_came_before_it() {
        let mut known = after(false, vec![of(64, 0); 10]);
        assert_eq!(known.drift(Tick(0)).map(|drift| drift.cause), Some(Cause::Template));
        known.restarted();
        assert_eq!(known.drift(Tick(0)).map(|drift| drift.cause), Some(Cause::Restart));
        known.compare(Tick(0), of(64, 64), size(), false);
        assert_eq!(known.drift(Tick(0)).map(|drift| drift.cause), Some(Cause::Restart), "also later");
    }

    #[test]
    fn credit_is_scaled_in_hybrid_views_only() {
        let known = after(true, vec![of(160, 40); 10]);
        assert_eq!(known.credit(true).thousandths(), 250);
        assert_eq!(known.credit(false), Share::ALL);
        assert_eq!(Reconciliation::default().credit(true).thousandths(), UNPROVEN);
        let hits = TierHits { device: 6, host: 2, disk: 1 };
        assert_eq!(Share::of_thousandths(250).of(hits), TierHits { device: 2, host: 0, disk: 0 });
        assert_eq!(Share::of_thousandths(900).of(hits), TierHits { device: 6, host: 2, disk: 0 });
        assert_eq!(Share::ALL.of(hits), hits);
        assert_eq!(Share::of_thousandths(5000), Share::ALL);
    }

    #[test]
    fn an_engine_that_reports_nothing_is_not_taken_for_one_that_found_nothing() {
        let mut known = Reconciliation::default();
        assert_eq!(known.reported(0, None), None);
        assert_eq!(known.reported(0, Some(Tokens(16))), Some(Tokens(16)));
        assert_eq!(known.reported(0, None), Some(Tokens(0)), "it leaves zero out");
        assert_eq!(known.reported(3, None), None, "in such answers it never did");
    }
}
