//! Is what we believe about a target's cache believable?
//!
//! A pure state machine per target. Facts come in (synced, proven, status,
//! mismatch), each with its time; [`Trust::verdict`] says at any later time in
//! which state the view is, why, and whether hits in it may be credited.
//!
//! `Cold -> Syncing -> Exact`, and away from it: *incomplete* (claims too
//! little: credit stays), *unsound* (may claim what is gone: credit stays until
//! the budget after the last proof is used up), *mismatched* (another language:
//! no credit at once), *unsequenced* (no proof exists: credit only while events
//! are fresh), *no cache* (healthy, and there is nothing to hit).
//!
//! [`SharedTrust`] is the same for many threads: facts come in under a lock, and
//! a verdict is read without one, because every decision reads all of them.

mod shared;

use serde::Serialize;

use self::shared::Published;
pub use self::shared::{Reading, SharedTrust, Worth};
use crate::events::envelope::Status;
use crate::ids::Epoch;
use crate::units::{Millis, Tick};

/// Which state a view is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// Nothing was ever heard.
    Cold,
    /// Being fetched.
    Syncing,
    /// Equal to the engine's cache, up to the delay of its events.
    Exact,
    /// Claims too little.
    Incomplete,
    /// May claim what is gone.
    Unsound,
    /// Speaks of something else.
    Mismatched,
    /// The engine numbers nothing, so nothing can be proven.
    Unsequenced,
    /// The engine keeps no prefixes: healthy, and never a hit.
    NoCache,
}

/// Whether a worker renders and tokenises prompts as the router does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Parity {
    /// Nobody has compared them.
    #[default]
    Unknown,
    /// They gave the same token ids.
    Confirmed,
    /// They gave different ones: our blocks are not the engine's.
    Diverged,
}

/// Whether an engine keeps prefixes, as it reports itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PrefixCaching {
    /// It does not say.
    #[default]
    Unknown,
    /// It does.
    On,
    /// It does not.
    Off,
}

/// Why the view is in its state. Stable labels: see docs/metrics.md.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// Nothing is wrong.
    Ok,
    /// No event and no heartbeat has ever arrived.
    NothingHeard,
    /// A snapshot or replay is on its way.
    SnapshotPending,
    /// Stores were lost, unreadable or without a known parent.
    StoresMissing,
    /// A gap or a lost removal that nothing has repaired.
    Gap,
    /// The bridge cannot reach the engine's event sockets.
    EngineUnreachable,
    /// No proof of continuity has arrived for too long.
    Silence,
    /// The other side speaks of another model, revision, block size or seed.
    DomainMismatch,
    /// The engine's page does not divide the block.
    PageSizeMismatch,
    /// The engine's page size, read from its live endpoint, does not divide the
    /// block; no event has said so yet.
    ReportedPageSizeMismatch,
    /// The engine sends no sequence numbers.
    NoSequence,
    /// The worker tokenises a probe differently from the router.
    RenderDiverged,
    /// The engine reports that prefix caching is off.
    PrefixCachingOff,
    /// The engine finished many prompts and has never stored a block.
    NothingStored,
    /// It finished many prompts whose blocks it did not hold before, and told of
    /// nothing meanwhile.
    Stalled,
    /// The engine serves adapters, and its events do not tell whose blocks are whose.
    AdaptersUntold,
    /// Its events name another data-parallel rank than the one they are read for.
    RankMismatch,
}

impl State {
    /// Stable label for logs and metrics.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Cold => "cold",
            Self::Syncing => "syncing",
            Self::Exact => "exact",
            Self::Incomplete => "incomplete",
            Self::Unsound => "unsound",
            Self::Mismatched => "mismatched",
            Self::Unsequenced => "unsequenced",
            Self::NoCache => "no_cache",
        }
    }
}

impl Reason {
    /// Stable label for logs and metrics.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::NothingHeard => "nothing_heard",
            Self::SnapshotPending => "snapshot_pending",
            Self::StoresMissing => "stores_missing",
            Self::Gap => "gap",
            Self::EngineUnreachable => "engine_unreachable",
            Self::Silence => "silence",
            Self::DomainMismatch => "domain_mismatch",
            Self::PageSizeMismatch => "page_size_mismatch",
            Self::ReportedPageSizeMismatch => "reported_page_size_mismatch",
            Self::NoSequence => "no_sequence",
            Self::RenderDiverged => "render_diverged",
            Self::PrefixCachingOff => "prefix_caching_off",
            Self::NothingStored => "nothing_stored",
            Self::Stalled => "stalled",
            Self::AdaptersUntold => "adapters_untold",
            Self::RankMismatch => "rank_mismatch",
        }
    }
}

/// What the view is worth at one point in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Verdict {
    /// The state.
    pub state: State,
    /// Why.
    pub reason: Reason,
    /// Whether hits in the view count.
    pub credited: bool,
    /// The engine's life that the view is of.
    pub epoch: Epoch,
    /// Number of the last message in it.
    pub seq: u64,
    /// Time since the last proof; `None` before the first.
    pub age: Option<Millis>,
}

impl Verdict {
    /// Whether routing history may stand in for the view. Not where the engine
    /// keeps no prefixes: where prompts were sent says nothing there.
    pub fn leaves_room_for_history(&self) -> bool {
        !self.credited && self.state != State::NoCache
    }
}

/// How long trust lasts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Freshness {
    /// Without a proof for this long a view is unsound: three missed heartbeats.
    pub silence: Millis,
    /// Credit ends this long after the last proof.
    pub budget: Millis,
}

impl Default for Freshness {
    fn default() -> Self {
        Self { silence: Millis::from_secs(3), budget: Millis::from_secs(10) }
    }
}

/// Prompts that an engine must have finished, each of a block or more, before
/// its silence about blocks means that it keeps none. One prompt can end before
/// its block is stored; sixteen in a row do not.
const STORELESS_PROMPTS: u64 = 16;
/// And for how long such prompts must have ended without a message before an engine
/// that stored blocks counts as stalled: events may come late by seconds, all of
/// them at once.
const STALLED_AFTER: Millis = Millis::from_secs(10);

/// The trust in one target's view.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trust {
    phase: Phase,
    epoch: Epoch,
    seq: u64,
    last_proof: Option<Tick>,
    last_event: Option<Tick>,
    status: Status,
    gap: bool,
    domain_mismatch: bool,
    reported_page_misfit: bool,
    adapters_untold: bool,
    parity: Parity,
    caching: PrefixCaching,
    /// Whether this life of the engine has ever stored a block.
    stored: bool,
    /// Prompts finished since the sync without any block stored.
    storeless: u64,
    /// Prompts since the last message that must have stored blocks, and when the first
    /// ended.
    unstored: u64,
    unstored_since: Option<Tick>,
    /// They are so many, over so long, that its publishing must have stopped.
    stalled: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Phase {
    #[default]
    Cold,
    Syncing,
    Synced,
}

impl Trust {
    /// A snapshot or replay was asked for. What was known stays until it comes.
    pub fn syncing(&mut self) {
        if self.phase == Phase::Cold {
            self.phase = Phase::Syncing;
        }
    }

    /// The view now equals the engine's cache as of message `seq` of `epoch`.
    pub fn synced(&mut self, now: Tick, epoch: Epoch, seq: u64, status: Status) {
        self.phase = Phase::Synced;
        self.gap = false;
        self.heard(now, epoch, seq, status);
        self.last_event = Some(now);
    }

    /// A message or heartbeat arrived that continues the stream.
    pub fn heard(&mut self, now: Tick, epoch: Epoch, seq: u64, status: Status) {
        if self.phase == Phase::Synced && seq != self.seq {
            self.last_event = Some(now);
            // Whatever the message told of, also of blocks that no view holds: its
            // publisher lives.
            (self.unstored, self.unstored_since, self.stalled) = (0, None, false);
        }
        (self.epoch, self.seq, self.status) = (epoch, seq, status);
        // A bridge that lost its engine goes on talking; that proves nothing.
        if !status.disconnected && !status.unsound && !self.gap && !self.stalled {
            self.last_proof = Some(now);
        }
    }

    /// Messages are missing and not yet replaced.
    pub fn gap(&mut self) {
        self.gap = true;
    }

    /// The engine lives anew: nothing is known until the next sync.
    pub fn reset(&mut self) {
        *self = Self {
            phase: Phase::Syncing,
            domain_mismatch: self.domain_mismatch,
            reported_page_misfit: self.reported_page_misfit,
            parity: self.parity,
            caching: self.caching,
            ..Self::default()
        };
    }

    /// Whether the other side speaks of another domain.
    pub fn set_domain_mismatch(&mut self, mismatch: bool) {
        self.domain_mismatch = mismatch;
    }

    /// Whether the engine's live endpoint names a page that does not divide the
    /// block.
    pub fn set_reported_page_misfit(&mut self, misfit: bool) {
        self.reported_page_misfit = misfit;
    }

    /// The engine serves adapters, and its events do not tell which blocks are theirs:
    /// they pass for the base model's. They stay in the view until its next life, also
    /// where the adapters go.
    pub fn adapters_untold(&mut self) {
        self.adapters_untold = true;
    }

    /// Whether the worker renders prompts as the router does. Stays over a new
    /// life of the engine, until it is compared again.
    pub fn set_parity(&mut self, parity: Parity) {
        self.parity = parity;
    }

    /// Whether the worker renders prompts as the router does.
    pub fn parity(&self) -> Parity {
        self.parity
    }

    /// Whether the engine reports that it keeps prefixes.
    pub fn set_prefix_caching(&mut self, caching: PrefixCaching) {
        self.caching = caching;
    }

    /// The engine told of blocks that it holds.
    pub fn stores_seen(&mut self) {
        (self.stored, self.storeless) = (true, 0);
    }

    /// The engine finished a prompt of which the view lacked blocks, as of message
    /// `seq` of `epoch`, and which it must have computed and stored.
    pub fn prompt_unstored(&mut self, now: Tick, epoch: Epoch, seq: u64) {
        // Only an exact view knows what the engine lacked. What was told after the pick
        // may be this very prompt, of a sibling.
        if (epoch, self.settled().0) != (self.epoch, State::Exact) || self.seq > seq {
            return;
        }
        let since = *self.unstored_since.get_or_insert(now);
        self.unstored = self.unstored.saturating_add(1);
        self.stalled = self.unstored >= STORELESS_PROMPTS && now.since(since) >= STALLED_AFTER;
    }

    /// The engine finished a prompt of at least one block.
    pub fn prompt_finished(&mut self) {
        if self.phase == Phase::Synced && !self.stored {
            self.storeless = self.storeless.saturating_add(1);
        }
    }

    /// Whether a view is there at all: synced once in this life.
    pub fn has_view(&self) -> bool {
        self.phase == Phase::Synced
    }

    /// Whether waiting for a view makes sense no more: it is there, or it speaks
    /// of something else.
    pub fn is_settled(&self) -> bool {
        self.has_view()
            || self.domain_mismatch
            || self.reported_page_misfit
            || self.caching == PrefixCaching::Off
    }

    /// The state of the view at `now`.
    pub fn verdict(&self, now: Tick, freshness: Freshness) -> Verdict {
        self.published().verdict(now, freshness)
    }

    /// The state and its reason as long as the view is not silent.
    fn settled(&self) -> (State, Reason) {
        if self.domain_mismatch {
            return (State::Mismatched, Reason::DomainMismatch);
        }
        if self.status.rank_mismatch {
            return (State::Mismatched, Reason::RankMismatch);
        }
        if self.status.page_misfit {
            return (State::Mismatched, Reason::PageSizeMismatch);
        }
        if self.reported_page_misfit {
            return (State::Mismatched, Reason::ReportedPageSizeMismatch);
        }
        if self.adapters_untold {
            return (State::Mismatched, Reason::AdaptersUntold);
        }
        if self.parity == Parity::Diverged {
            return (State::Mismatched, Reason::RenderDiverged);
        }
        if self.caching == PrefixCaching::Off && !self.stored {
            return (State::NoCache, Reason::PrefixCachingOff);
        }
        match self.phase {
            Phase::Cold => return (State::Cold, Reason::NothingHeard),
            Phase::Syncing if self.status.disconnected => return (State::Syncing, Reason::EngineUnreachable),
            Phase::Syncing => return (State::Syncing, Reason::SnapshotPending),
            Phase::Synced => {}
        }
        if self.gap || self.status.unsound {
            return (State::Unsound, Reason::Gap);
        }
        if self.status.disconnected {
            return (State::Unsound, Reason::EngineUnreachable);
        }
        if self.stalled {
            return (State::Unsound, Reason::Stalled);
        }
        if self.storeless >= STORELESS_PROMPTS && self.caching != PrefixCaching::On {
            return (State::NoCache, Reason::NothingStored);
        }
        if self.status.unsequenced {
            return (State::Unsequenced, Reason::NoSequence);
        }
        if self.status.incomplete {
            return (State::Incomplete, Reason::StoresMissing);
        }
        (State::Exact, Reason::Ok)
    }

    /// What a verdict at any time follows from.
    fn published(&self) -> Published {
        let (state, reason) = self.settled();
        // All that is worse than silence.
        let outranks = match state {
            State::Cold | State::Syncing | State::Unsound | State::Mismatched => true,
            State::NoCache => reason == Reason::PrefixCachingOff,
            State::Exact | State::Incomplete | State::Unsequenced => false,
        };
        Published {
            state,
            reason,
            outranks_silence: outranks,
            paired: self.status.paired,
            epoch: self.epoch,
            seq: self.seq,
            last_proof: self.last_proof,
            last_event: self.last_event,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FRESH: Freshness = Freshness { silence: Millis(3_000), budget: Millis(10_000) };
    const EPOCH: Epoch = Epoch(5);

    fn synced(status: Status) -> Trust {
        let mut trust = Trust::default();
        trust.syncing();
        trust.synced(Tick(1_000), EPOCH, 4, status);
        trust
    }

    #[track_caller]
    fn check(why: &str, trust: &Trust, now: u64, expected: (State, Reason, bool)) {
        let verdict = trust.verdict(Tick(now), FRESH);
        assert_eq!((verdict.state, verdict.reason, verdict.credited), expected, "{why}");
    }

    #[test]
    fn a_view_earns_trust_and_loses_it_by_name() {
        let mut trust = Trust::default();
        check("nothing heard", &trust, 0, (State::Cold, Reason::NothingHeard, false));
        trust.syncing();
        check("asked", &trust, 0, (State::Syncing, Reason::SnapshotPending, false));
        trust.synced(Tick(1_000), EPOCH, 4, Status::default());
        check("synced", &trust, 4_000, (State::Exact, Reason::Ok, true));
        check("silent", &trust, 4_001, (State::Unsound, Reason::Silence, true));
        check("silent at the budget's edge", &trust, 11_000, (State::Unsound, Reason::Silence, true));
        check("silent beyond the budget", &trust, 11_001, (State::Unsound, Reason::Silence, false));
        trust.heard(Tick(20_000), EPOCH, 4, Status::default());
        check("a heartbeat proves continuity", &trust, 20_000, (State::Exact, Reason::Ok, true));
        trust.set_domain_mismatch(true);
        check("another model", &trust, 20_000, (State::Mismatched, Reason::DomainMismatch, false));
    }

    #[test]
    fn a_gap_spends_the_budget_even_while_messages_arrive() {
        let mut trust = synced(Status::default());
        trust.gap();
        trust.heard(Tick(2_000), EPOCH, 9, Status::default());
        check("within the budget", &trust, 11_000, (State::Unsound, Reason::Gap, true));
        check("beyond it", &trust, 11_001, (State::Unsound, Reason::Gap, false));
        trust.synced(Tick(12_000), EPOCH, 9, Status::default());
        check("repaired", &trust, 12_000, (State::Exact, Reason::Ok, true));
    }

    #[test]
    fn what_the_bridge_says_counts() {
        let with = |set: fn(&mut Status)| {
            let mut status = Status::default();
            set(&mut status);
            synced(status)
        };
        check(
            "orphans",
            &with(|s| s.incomplete = true),
            1_000,
            (State::Incomplete, Reason::StoresMissing, true),
        );
        let misfit = with(|s| s.page_misfit = true);
        check("page", &misfit, 1_000, (State::Mismatched, Reason::PageSizeMismatch, false));
        let strange = with(|s| s.rank_mismatch = true);
        check("another rank", &strange, 1_000, (State::Mismatched, Reason::RankMismatch, false));
        let lost = with(|s| s.disconnected = true);
        check("engine gone: no proof", &lost, 1_000, (State::Unsound, Reason::EngineUnreachable, false));
        let atom = with(|s| s.unsequenced = true);
        check("fresh events", &atom, 2_000, (State::Unsequenced, Reason::NoSequence, true));
    }

    #[test]
    fn unsequenced_credit_needs_fresh_events_not_heartbeats() {
        let mut trust = synced(Status { unsequenced: true, ..Status::default() });
        trust.heard(Tick(12_000), EPOCH, 4, Status { unsequenced: true, ..Status::default() });
        check("a heartbeat is no event", &trust, 12_000, (State::Unsequenced, Reason::NoSequence, false));
        trust.heard(Tick(12_000), EPOCH, 5, Status { unsequenced: true, ..Status::default() });
        check("an event is", &trust, 12_000, (State::Unsequenced, Reason::NoSequence, true));
    }

    #[test]
    fn a_new_life_forgets_the_view_but_not_the_mismatch() {
        let mut trust = synced(Status { incomplete: true, ..Status::default() });
        trust.set_reported_page_misfit(true);
        trust.reset();
        check("mismatch stays", &trust, 1_000, (State::Mismatched, Reason::ReportedPageSizeMismatch, false));
        trust.set_reported_page_misfit(false);
        trust.adapters_untold();
        check("mixed blocks", &trust, 1_000, (State::Mismatched, Reason::AdaptersUntold, false));
        trust.reset();
        check("the view is gone", &trust, 1_000, (State::Syncing, Reason::SnapshotPending, false));
    }

    #[test]
    fn an_engine_that_was_never_reached_is_named() {
        let mut trust = Trust::default();
        trust.reset();
        check("it is being asked", &trust, 0, (State::Syncing, Reason::SnapshotPending, false));
        trust.heard(Tick(1_000), EPOCH, 0, Status { disconnected: true, ..Status::default() });
        check("nobody answers", &trust, 1_000, (State::Syncing, Reason::EngineUnreachable, false));
        trust.synced(Tick(2_000), EPOCH, 1, Status::default());
        check("it answers", &trust, 2_000, (State::Exact, Reason::Ok, true));
    }

    #[test]
    fn an_engine_without_prefixes_is_healthy_and_never_hits() {
        let mut trust = Trust::default();
        trust.set_prefix_caching(PrefixCaching::Off);
        check("it says so", &trust, 0, (State::NoCache, Reason::PrefixCachingOff, false));
        assert!(trust.is_settled(), "nobody waits for its view");
        assert!(!trust.verdict(Tick(0), FRESH).leaves_room_for_history());
        trust.reset();
        check("also in its next life", &trust, 0, (State::NoCache, Reason::PrefixCachingOff, false));
        trust.synced(Tick(0), EPOCH, 1, Status::default());
        trust.stores_seen();
        check("its events know better", &trust, 0, (State::Exact, Reason::Ok, true));
    }

    #[test]
    fn an_engine_that_stores_nothing_of_many_prompts_has_no_cache() {
        let mut trust = synced(Status::default());
        let finish = |trust: &mut Trust, count| (0..count).for_each(|_| trust.prompt_finished());
        finish(&mut trust, STORELESS_PROMPTS - 1);
        check("not enough to tell", &trust, 1_000, (State::Exact, Reason::Ok, true));
        finish(&mut trust, 1);
        check("enough", &trust, 1_000, (State::NoCache, Reason::NothingStored, false));
        check("silence is still worse", &trust, 9_000, (State::Unsound, Reason::Silence, true));
        trust.stores_seen();
        check("it stores after all", &trust, 1_000, (State::Exact, Reason::Ok, true));
        finish(&mut trust, 99);
        check("and needs not store every prompt", &trust, 1_000, (State::Exact, Reason::Ok, true));
        let mut says_on = synced(Status::default());
        says_on.set_prefix_caching(PrefixCaching::On);
        finish(&mut says_on, 99);
        check("it says that it keeps them", &says_on, 1_000, (State::Exact, Reason::Ok, true));
    }

    /// So many prompts that must have stored blocks, a second apart.
    fn leave_unstored(trust: &mut Trust, from: u64, count: u64) {
        (0..count).for_each(|at| trust.prompt_unstored(Tick(from + at * 1_000), EPOCH, 4));
    }

    #[test]
    fn an_engine_that_stops_telling_is_named_and_spends_its_budget() {
        let mut trust = synced(Status::default());
        trust.stores_seen();
        leave_unstored(&mut trust, 1_000, STORELESS_PROMPTS - 1);
        trust.heard(Tick(16_000), EPOCH, 4, Status::default());
        check("not enough to tell", &trust, 16_000, (State::Exact, Reason::Ok, true));
        leave_unstored(&mut trust, 16_000, 1);
        trust.heard(Tick(17_000), EPOCH, 4, Status::default());
        check("enough", &trust, 17_000, (State::Unsound, Reason::Stalled, true));
        check("heartbeats prove nothing now", &trust, 26_001, (State::Unsound, Reason::Stalled, false));
        trust.heard(Tick(27_000), EPOCH, 5, Status::default());
        check(
            "it tells again, be it of blocks that no view holds",
            &trust,
            28_000,
            (State::Exact, Reason::Ok, true),
        );
    }

    #[test]
    fn a_prompt_is_no_sign_of_a_stall_if_its_store_may_have_come_or_the_view_lacks_something() {
        let counted = |trust: &Trust| trust.unstored > 0;
        let mut trust = synced(Status::default());
        trust.heard(Tick(1_000), EPOCH, 5, Status::default());
        trust.stores_seen();
        trust.prompt_unstored(Tick(2_000), EPOCH, 4);
        assert!(!counted(&trust), "a store came after the pick");
        trust.prompt_unstored(Tick(2_000), Epoch(4), 5);
        assert!(!counted(&trust), "picked in another life");
        trust.prompt_unstored(Tick(2_000), EPOCH, 5);
        assert!(counted(&trust));
        let mut incomplete = synced(Status { incomplete: true, ..Status::default() });
        incomplete.prompt_unstored(Tick(2_000), EPOCH, 4);
        assert!(!counted(&incomplete), "the engine may hold what the view lacks");
        let mut burst = synced(Status::default());
        (0..99).for_each(|_| burst.prompt_unstored(Tick(2_000), EPOCH, 4));
        check("events may be late", &burst, 2_000, (State::Exact, Reason::Ok, true));
    }

    #[test]
    fn a_diverged_render_ends_credit_at_once_and_an_unchecked_one_does_not() {
        let mut trust = synced(Status::default());
        check("nobody compared", &trust, 1_000, (State::Exact, Reason::Ok, true));
        trust.set_parity(Parity::Diverged);
        check("diverged", &trust, 1_000, (State::Mismatched, Reason::RenderDiverged, false));
        trust.reset();
        trust.synced(Tick(1_000), EPOCH, 1, Status::default());
        check("until compared again", &trust, 1_000, (State::Mismatched, Reason::RenderDiverged, false));
        trust.set_parity(Parity::Confirmed);
        check("confirmed", &trust, 1_000, (State::Exact, Reason::Ok, true));
    }
}
