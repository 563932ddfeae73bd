//! Trust that many threads share: told under a lock, read without one.
//!
//! What a verdict follows from is published as a few words whenever it changes. A
//! decision reads those of all targets, so what it reads is small, and the common
//! case, a view that speaks and is as it should be, is decided by one flag.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use parking_lot::{Mutex, MutexGuard};

use super::{Freshness, Reason, State, Trust, Verdict};
use crate::ids::Epoch;
use crate::reconcile::Share;
use crate::units::{Millis, Tick};

/// What a verdict follows from, whenever it is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Published {
    pub(super) state: State,
    pub(super) reason: Reason,
    /// Whether the state stands however long nothing was heard.
    pub(super) outranks_silence: bool,
    pub(super) paired: bool,
    pub(super) epoch: Epoch,
    pub(super) seq: u64,
    pub(super) last_proof: Option<Tick>,
    pub(super) last_event: Option<Tick>,
}

impl Published {
    #[inline]
    pub(super) fn verdict(self, now: Tick, freshness: Freshness) -> Verdict {
        let Self { mut state, mut reason, epoch, seq, .. } = self;
        let age = self.last_proof.map(|proof| now.since(proof));
        if !self.outranks_silence && age.is_none_or(|age| age > freshness.silence) {
            (state, reason) = (State::Unsound, Reason::Silence);
        }
        let fresh = age.is_some_and(|age| age <= freshness.budget);
        // No `match`: a jump that every decision takes a thousand times.
        let credited = matches!(state, State::Exact | State::Incomplete)
            || fresh && state == State::Unsound
            || fresh
                && state == State::Unsequenced
                && self.last_event.is_some_and(|event| now.since(event) <= freshness.budget);
        Verdict { state, reason, credited, epoch, seq, age }
    }

    /// The same in words.
    fn words(self) -> [u64; WORDS] {
        let tick = |tick: Option<Tick>| tick.map_or(0, |tick| tick.0.min(NEVER - 1) + 1);
        let sound = matches!(self.state, State::Exact | State::Incomplete);
        let flags = [(OUTRANKS_SILENCE, self.outranks_silence), (PAIRED, self.paired), (SOUND, sound)];
        let flags = flags.into_iter().filter(|(_, set)| *set).fold(0, |all, (flag, _)| all | flag);
        let small = flags | code(self.state, self.reason);
        [small.into(), self.epoch.0, self.seq, tick(self.last_proof), tick(self.last_event)]
    }

    #[inline]
    fn from_words([small, epoch, seq, proof, event]: [u64; WORDS]) -> Self {
        let tick = |word: u64| word.checked_sub(1).map(Tick);
        Self {
            state: state(small as u32),
            reason: reason(small as u32),
            outranks_silence: small as u32 & OUTRANKS_SILENCE != 0,
            paired: small as u32 & PAIRED != 0,
            epoch: Epoch(epoch),
            seq,
            last_proof: tick(proof),
            last_event: tick(event),
        }
    }
}

/// Where the reason's number begins in a code of eight bits; the state's is below.
const REASON: u32 = 3;

/// State and reason in eight bits.
const fn code(state: State, reason: Reason) -> u32 {
    state as u32 | (reason as u32) << REASON
}

const fn state(code: u32) -> State {
    STATES[code as usize & 7]
}

const fn reason(code: u32) -> Reason {
    let number = (code as u8 >> REASON) as usize;
    // Codes of no reason are never made.
    if number < REASONS.len() { REASONS[number] } else { Reason::Ok }
}

/// The bits above the code. Published: the state stands however long nothing was heard.
const OUTRANKS_SILENCE: u32 = 1 << 8;
/// Published: the engine's tokens come as pairs.
const PAIRED: u32 = 1 << 9;
/// Published: hits count as long as the view speaks.
const SOUND: u32 = 1 << 10;
/// Read: hits in the view count.
const CREDITED: u32 = 1 << 11;
/// Read: routing history may stand in for the view.
const OPEN_TO_HISTORY: u32 = 1 << 12;

/// A view as it was read, in words that copy and compare well: a decision keeps one of
/// every target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reading {
    flags: u32,
    /// Thousandths of its hits that count.
    credit: u32,
    epoch: u64,
    seq: u64,
    /// Milliseconds since the last proof, plus one; 0 before the first.
    age: u64,
}

impl Reading {
    #[inline]
    fn of(words: [u64; WORDS], credit: u32, now: Tick, freshness: Freshness) -> Self {
        let [small, epoch, seq, proof, event] = words;
        let age = match proof {
            0 => 0,
            proof => now.0.saturating_sub(proof - 1).saturating_add(1),
        };
        let mut flags = small as u32;
        if flags & SOUND != 0 && age.wrapping_sub(1) <= freshness.silence.0 {
            flags |= CREDITED;
        } else {
            flags = Self::in_doubt(small, proof, event, now, freshness);
        }
        Self { flags, credit, epoch, seq, age }
    }

    /// The flags of what may be worth nothing. Takes its words one by one: an array
    /// would have to be in memory for every view.
    #[inline(never)]
    fn in_doubt(small: u64, proof: u64, event: u64, now: Tick, freshness: Freshness) -> u32 {
        let published = Published::from_words([small, 0, 0, proof, event]);
        let verdict = published.verdict(now, freshness);
        let flags = [
            (PAIRED, published.paired),
            (CREDITED, verdict.credited),
            (OPEN_TO_HISTORY, verdict.leaves_room_for_history()),
        ];
        let flags = flags.into_iter().filter(|(_, set)| *set).fold(0, |all, (flag, _)| all | flag);
        flags | code(verdict.state, verdict.reason)
    }

    /// What it comes to.
    pub fn verdict(&self) -> Verdict {
        let (state, reason) = (state(self.flags), reason(self.flags));
        let (epoch, seq, age) = (Epoch(self.epoch), self.seq, self.age.checked_sub(1).map(Millis));
        Verdict { state, reason, credited: self.worth().is_credited(), epoch, seq, age }
    }

    /// State and reason in eight bits: their numbers, the state's lower.
    #[inline]
    pub const fn code(&self) -> u8 {
        self.flags as u8
    }

    /// What hits in the view are worth.
    #[inline]
    pub const fn worth(&self) -> Worth {
        let flags = self.flags & (CREDITED | PAIRED | OPEN_TO_HISTORY);
        Worth { flags, credit: self.credit }
    }

    /// Its columns in a record.
    #[inline]
    pub(crate) const fn columns(&self) -> [u64; 4] {
        [self.code() as u64, self.epoch, self.seq, self.age]
    }
}

/// What hits in a view are worth. Views of the same worth and with the same hits make
/// the same claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Worth {
    flags: u32,
    credit: u32,
}

impl Worth {
    /// None, and nothing may stand in for them.
    pub const NOTHING: Self = Self { flags: 0, credit: 0 };

    /// Whether they count.
    #[inline]
    pub const fn is_credited(self) -> bool {
        self.flags & CREDITED != 0
    }

    /// The share of them that counts.
    pub fn share(self) -> Share {
        Share::of_thousandths(self.credit)
    }

    /// Whether the engine's tokens come as pairs.
    pub const fn is_paired(self) -> bool {
        self.flags & PAIRED != 0
    }

    /// Whether routing history may stand in for them.
    pub const fn is_open_to_history(self) -> bool {
        self.flags & OPEN_TO_HISTORY != 0
    }
}

impl From<Verdict> for Reading {
    /// One that comes to `verdict`, of an engine whose tokens come one by one.
    fn from(verdict: Verdict) -> Self {
        let Verdict { state, reason, credited, epoch, seq, age } = verdict;
        let credited = if credited { CREDITED } else { 0 };
        let open = if verdict.leaves_room_for_history() { OPEN_TO_HISTORY } else { 0 };
        let age = age.map_or(0, |age| age.0.saturating_add(1));
        let flags = code(state, reason) | credited | open;
        Self { flags, credit: Share::ALL.thousandths(), epoch: epoch.0, seq, age }
    }
}

/// By their numbers.
const STATES: [State; 8] = [
    State::Cold,
    State::Syncing,
    State::Exact,
    State::Incomplete,
    State::Unsound,
    State::Mismatched,
    State::Unsequenced,
    State::NoCache,
];
/// By their numbers, of which five bits have 32.
const REASONS: [Reason; 17] = [
    Reason::Ok,
    Reason::NothingHeard,
    Reason::SnapshotPending,
    Reason::StoresMissing,
    Reason::Gap,
    Reason::EngineUnreachable,
    Reason::Silence,
    Reason::DomainMismatch,
    Reason::PageSizeMismatch,
    Reason::ReportedPageSizeMismatch,
    Reason::NoSequence,
    Reason::RenderDiverged,
    Reason::PrefixCachingOff,
    Reason::NothingStored,
    Reason::Stalled,
    Reason::AdaptersUntold,
    Reason::RankMismatch,
];

/// [`Trust`] that many threads share.
///
/// Whoever holds the lock publishes what it changed when it lets go. A reader
/// copies the words and looks whether they were replaced meanwhile.
///
/// What a reader needs comes first and fits one cache line.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct SharedTrust {
    /// Odd while words are being replaced.
    version: AtomicU64,
    words: [AtomicU64; WORDS],
    /// Thousandths of its hits that count.
    credit: AtomicU32,
    trust: Mutex<Trust>,
}

const WORDS: usize = 5;
/// No tick.
const NEVER: u64 = u64::MAX;

impl Default for SharedTrust {
    fn default() -> Self {
        let trust = Trust::default();
        let words = trust.published().words().map(AtomicU64::new);
        let credit = AtomicU32::new(Share::ALL.thousandths());
        Self { version: AtomicU64::new(0), words, credit, trust: Mutex::new(trust) }
    }
}

/// Exclusive access to a [`SharedTrust`].
#[derive(Debug)]
pub struct TrustGuard<'a> {
    shared: &'a SharedTrust,
    trust: MutexGuard<'a, Trust>,
}

impl SharedTrust {
    /// Exclusive access, to tell facts.
    pub fn lock(&self) -> TrustGuard<'_> {
        TrustGuard { shared: self, trust: self.trust.lock() }
    }

    /// The view at `now`. Takes no lock.
    #[inline]
    pub fn read(&self, now: Tick, freshness: Freshness) -> Reading {
        loop {
            let before = self.version.load(Ordering::Acquire);
            let [small, epoch, seq, proof, event] = &self.words;
            let of = |word: &AtomicU64| word.load(Ordering::Relaxed);
            let words = [of(small), of(epoch), of(seq), of(proof), of(event)];
            // Words are read before the version is looked at again.
            fence(Ordering::Acquire);
            if before.is_multiple_of(2) && self.version.load(Ordering::Relaxed) == before {
                return Reading::of(words, self.credit.load(Ordering::Relaxed), now, freshness);
            }
            std::hint::spin_loop();
        }
    }

    /// The share of its hits that counts: what comparisons with engines' own reports
    /// say of a hybrid view, else all.
    pub fn credit(&self) -> Share {
        Share::of_thousandths(self.credit.load(Ordering::Relaxed))
    }

    /// Lets that share of its hits count.
    pub fn set_credit(&self, share: Share) {
        self.credit.store(share.thousandths(), Ordering::Relaxed);
    }

    fn publish(&self, trust: &Trust) {
        let words = trust.published().words();
        if self.words.iter().zip(words).all(|(published, word)| published.load(Ordering::Relaxed) == word) {
            return;
        }
        // One writer at a time: the lock is held.
        let version = self.version.load(Ordering::Relaxed);
        self.version.store(version + 1, Ordering::Relaxed);
        // Words are replaced after the version says so.
        fence(Ordering::Release);
        for (published, word) in self.words.iter().zip(words) {
            published.store(word, Ordering::Relaxed);
        }
        self.version.store(version + 2, Ordering::Release);
    }
}

impl Deref for TrustGuard<'_> {
    type Target = Trust;

    fn deref(&self) -> &Trust {
        &self.trust
    }
}

impl DerefMut for TrustGuard<'_> {
    fn deref_mut(&mut self) -> &mut Trust {
        &mut self.trust
    }
}

impl Drop for TrustGuard<'_> {
    fn drop(&mut self) {
        self.shared.publish(&self.trust);
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Parity, PrefixCaching};
    use super::*;
    use crate::events::envelope::Status;

    const FRESH: Freshness = Freshness { silence: Millis(3_000), budget: Millis(10_000) };

    proptest::proptest! {
        #[test]
        fn what_is_published_is_what_was_told(
            facts in proptest::collection::vec((0u8..14, 0u64..99_999), 0..30), now in 0u64..200_000
        ) {
            let shared = SharedTrust::default();
            let mut plain = Trust::default();
            for (fact, value) in facts {
                let tell = |trust: &mut Trust| match fact {
                    0 => trust.syncing(),
                    1 => trust.synced(Tick(value), Epoch(value), value, Status::from_bits(value)),
                    2 => trust.heard(Tick(value), Epoch(value), value, Status::from_bits(value)),
                    3 => trust.gap(),
                    4 => trust.reset(),
                    5 => trust.set_domain_mismatch(value.is_multiple_of(2)),
                    6 => trust.set_reported_page_misfit(value.is_multiple_of(2)),
                    7 => trust.set_parity([Parity::Unknown, Parity::Confirmed, Parity::Diverged][(value % 3) as usize]),
                    8 => trust.set_prefix_caching(
                        [PrefixCaching::Unknown, PrefixCaching::On, PrefixCaching::Off][(value % 3) as usize],
                    ),
                    9 => trust.stores_seen(),
                    10 => (0..20).for_each(|_| trust.prompt_unstored(Tick(value), trust.epoch, trust.seq)),
                    _ => (0..value % 9).for_each(|_| trust.prompt_finished()),
                };
                tell(&mut plain);
                tell(&mut shared.lock());
                let published = plain.published();
                proptest::prop_assert_eq!(Published::from_words(published.words()), published);
            }
            let (read, verdict) = (shared.read(Tick(now), FRESH), plain.verdict(Tick(now), FRESH));
            proptest::prop_assert_eq!((read.verdict(), read.worth().is_paired()), (verdict, plain.status.paired));
            proptest::prop_assert_eq!(read.worth().is_open_to_history(), verdict.leaves_room_for_history());
            proptest::prop_assert_eq!(Reading::from(verdict).verdict(), verdict);
        }
    }

    #[test]
    fn numbers_of_states_and_reasons_are_those_of_their_declaration() {
        assert!(STATES.iter().enumerate().all(|(number, state)| *state as usize == number));
        assert!(REASONS.iter().enumerate().all(|(number, reason)| *reason as usize == number));
    }

    /// Readers never see one half of a change and one of another.
    #[test]
    fn a_verdict_is_of_one_moment() {
        let shared = SharedTrust::default();
        shared.lock().synced(Tick(1), Epoch(1), 1, Status::default());
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                for at in 2..200_000 {
                    shared.lock().synced(Tick(at), Epoch(at), at, Status::default());
                }
            });
            while !writer.is_finished() {
                let verdict = shared.read(Tick(1 << 40), FRESH).verdict();
                let proof = (1 << 40) - verdict.age.map_or(0, |age| age.0);
                assert_eq!((verdict.epoch.0, verdict.seq), (proof, proof));
            }
        });
    }
}
