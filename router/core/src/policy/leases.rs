//! Load: booked by a pick, released exactly once.
//!
//! An [`Account`] holds what is booked on one target; a [`Lease`] owns what it
//! charged and the account it charged, so that a lease which outlives its
//! worker can neither underflow nor touch the worker's successor. A lease has
//! two phases: prefill (its uncached tokens queue on the target) until the
//! first byte, then decode. [`Ledger::select_and_book`] decides and books in one
//! short critical section, so that two picks at once see each other.

use std::sync::Arc;

use parking_lot::Mutex;

use super::images::ImageMemory;
use super::in_flight::{InFlight, Ticket};
use super::prefill_speed::PrefillSpeed;
use super::prefixes::{End, Kind, Prefixes};
use super::sessions::{Hold, SessionUse, Sessions};
use super::{
    Candidate, Decision, Evidence, Load, NoChoice, PickRequest, Settings, Switch, decide, follow_session,
};
use crate::blocks::{BlockHash, NamespaceId};
use crate::ids::Target;
use crate::trust::Verdict;
use crate::units::{BlockSize, Blocks, Millis, Tick, TierHits, Tokens};

/// What is booked on one target. Shared by its leases; locked for a few
/// hundred nanoseconds at a time.
#[derive(Debug, Default)]
pub struct Account {
    books: Mutex<Books>,
}

#[derive(Debug, Default)]
struct Books {
    /// The prompts of all leases, and of what in-flight credit predicts.
    prompts: Prefixes,
    /// Tail blocks and blocks of generated tokens.
    private: u64,
    queued: Tokens,
    context: Tokens,
    requests: u64,
    booked: u64,
    released: u64,
    speed: PrefillSpeed,
    in_flight: InFlight,
    images: ImageMemory,
}

/// How many leases an account has seen. `booked − released` is what is in
/// flight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Turnover {
    /// Leases ever booked.
    pub booked: u64,
    /// Leases ever released.
    pub released: u64,
}

/// What a pick booked, until it is dropped.
#[must_use = "dropping a lease releases it at once"]
#[derive(Debug)]
pub struct Lease {
    account: Arc<Account>,
    /// Its prompt among the account's.
    end: End,
    size: BlockSize,
    prompt: Tokens,
    /// Zero once the first byte has come.
    queued: Tokens,
    generated: Tokens,
    private: u64,
    /// Its place in the account's in-flight set.
    ticket: Ticket,
    /// Its hold on a session's binding.
    session: Option<Held>,
}

#[derive(Debug)]
struct Held {
    sessions: Arc<Mutex<Sessions>>,
    hold: Hold,
    /// When the request was last heard of: from then on the session is idle.
    ended: Tick,
}

/// One target as it stands before selection: everything but its load.
#[derive(Clone, Debug)]
pub struct Prospect {
    /// The target.
    pub target: Target,
    /// What is booked on it.
    pub account: Arc<Account>,
    /// Leading blocks that the view claims, before trust.
    pub claimed: TierHits,
    /// Leading blocks that count.
    pub hits: TierHits,
    /// Most leading blocks that the engine can skip: see `hits::usable`.
    pub usable: u64,
    /// Where `hits` come from.
    pub evidence: Evidence,
    /// What the view is worth.
    pub trust: Verdict,
}

/// A decision, its candidates and what it booked.
#[derive(Debug)]
pub struct Pick {
    /// The decision.
    pub decision: Decision,
    /// The candidates it was made among, sorted by target.
    pub candidates: Vec<Candidate>,
    /// What was booked on the chosen one.
    pub lease: Lease,
    /// What the request's session had to say.
    pub session: SessionUse,
    /// The target that round-robin chose before this pick.
    pub turn: Option<Target>,
}

/// A pick that could not be made.
#[derive(Debug)]
pub struct NoPick {
    /// Why.
    pub reason: NoChoice,
    /// Who stood for choice, sorted by target.
    pub candidates: Vec<Candidate>,
    /// The target that was chosen before.
    pub turn: Option<Target>,
}

/// Decides and books, one pick at a time.
#[derive(Debug, Default)]
pub struct Ledger {
    /// The lock is the critical section.
    selecting: Mutex<Selecting>,
    sessions: Arc<Mutex<Sessions>>,
}

#[derive(Debug, Default)]
struct Selecting {
    /// The target that round-robin chose last.
    turn: Option<Target>,
}

/// Candidates in order, and their accounts.
struct Field {
    candidates: Vec<Candidate>,
    accounts: Vec<Arc<Account>>,
}

impl Ledger {
    /// Chooses among `prospects`, in any order, and books the request on the
    /// chosen one before anybody else can choose.
    pub fn select_and_book(
        &self,
        now: Tick,
        settings: &Settings,
        request: &PickRequest<'_>,
        namespace: NamespaceId,
        blocks: &Arc<[BlockHash]>,
        prospects: Vec<Prospect>,
    ) -> Result<Pick, NoPick> {
        let mut selecting = self.selecting.lock();
        let field = Field::new(now, settings, request, namespace, prospects);
        let turn = selecting.turn.clone();
        let (decision, session) = match self.choose(now, settings, request, &field, turn.as_ref()) {
            Ok(chosen) => chosen,
            Err(reason) => return Err(NoPick { reason, candidates: field.candidates, turn }),
        };
        let chosen = &field.candidates[decision.chosen];
        selecting.turn = Some(chosen.target.clone());
        let cached = request.size.tokens_in(Blocks(chosen.hits.total()));
        let uncached = request.prompt.uncached(cached);
        let account = &field.accounts[decision.chosen];
        let mut lease = account.book(namespace, blocks, request.size, request.prompt, uncached);
        account.books.lock().images.record(request.images);
        let session = self.hold_session(now, settings, request, &chosen.target, session, &mut lease);
        drop(selecting);
        Ok(Pick { decision, candidates: field.candidates, lease, session, turn })
    }

    /// What [`Ledger::select_and_book`] would choose now, without booking it.
    pub fn preview(
        &self,
        now: Tick,
        settings: &Settings,
        request: &PickRequest<'_>,
        namespace: NamespaceId,
        prospects: Vec<Prospect>,
    ) -> Result<(Decision, Vec<Candidate>), NoPick> {
        let selecting = self.selecting.lock();
        let field = Field::new(now, settings, request, namespace, prospects);
        match self.choose(now, settings, request, &field, selecting.turn.as_ref()) {
            Ok((decision, _)) => Ok((decision, field.candidates)),
            Err(reason) => Err(NoPick { reason, candidates: field.candidates, turn: selecting.turn.clone() }),
        }
    }

    /// The target that was chosen last.
    pub fn turn(&self) -> Option<Target> {
        self.selecting.lock().turn.clone()
    }

    /// Sessions that are bound.
    pub fn sessions(&self) -> usize {
        self.sessions.lock().len()
    }

    /// Follows the session where it is bound, else decides.
    fn choose(
        &self,
        now: Tick,
        settings: &Settings,
        request: &PickRequest<'_>,
        field: &Field,
        turn: Option<&Target>,
    ) -> Result<(Decision, SessionUse), NoChoice> {
        let key = request.session.filter(|_| settings.sessions.mode.binds(request.role));
        let bound = key.and_then(|key| self.sessions.lock().bound(now, settings.sessions.time_to_live, key));
        let mut session = if key.is_some() { SessionUse::New } else { SessionUse::None };
        if let Some(bound) = bound {
            session = SessionUse::Replaced;
            let found = field.candidates.binary_search_by(|candidate| candidate.target.cmp(&bound));
            if let Ok(at) = found {
                match follow_session(settings, request, &field.candidates, at) {
                    Ok(decision) => return Ok((decision, SessionUse::Followed)),
                    Err(_) => session = SessionUse::Overloaded,
                }
            }
        }
        decide(settings, request, &field.candidates, turn).map(|decision| (decision, session))
    }

    fn hold_session(
        &self,
        now: Tick,
        settings: &Settings,
        request: &PickRequest<'_>,
        target: &Target,
        session: SessionUse,
        lease: &mut Lease,
    ) -> SessionUse {
        let Some(key) = request.session.filter(|_| settings.sessions.mode.binds(request.role)) else {
            return SessionUse::None;
        };
        match self.sessions.lock().hold(key, target) {
            Some(hold) => {
                lease.session = Some(Held { sessions: Arc::clone(&self.sessions), hold, ended: now });
                session
            }
            None => SessionUse::Unbound,
        }
    }
}

impl Field {
    fn new(
        now: Tick,
        settings: &Settings,
        request: &PickRequest<'_>,
        namespace: NamespaceId,
        mut prospects: Vec<Prospect>,
    ) -> Self {
        prospects.sort_by(|a, b| a.target.cmp(&b.target));
        let candidates =
            prospects.iter().map(|prospect| prospect.candidate(now, settings, namespace, request)).collect();
        let accounts = prospects.into_iter().map(|prospect| prospect.account).collect();
        Self { candidates, accounts }
    }
}

impl Prospect {
    fn candidate(
        &self,
        now: Tick,
        settings: &Settings,
        namespace: NamespaceId,
        request: &PickRequest<'_>,
    ) -> Candidate {
        let books = &mut *self.account.books.lock();
        // Blocks that are held or will be; chained hashes make them a prefix.
        let mut expected = self.hits.total();
        books.in_flight.expire(now, &mut books.prompts);
        // A target whose view may not be credited is judged by routing history,
        // which knows the same prompts.
        if settings.in_flight_credit == Switch::Enabled && self.trust.credited {
            let in_flight = books.prompts.shared(namespace, request.blocks, Kind::Predicted);
            expected = expected.max(in_flight.min(self.usable));
        }
        let predicted = expected - self.hits.total();
        Candidate {
            target: self.target.clone(),
            claimed: self.claimed,
            hits: TierHits { device: self.hits.device + predicted, ..self.hits },
            predicted,
            evidence: if predicted > 0 { Evidence::InFlight } else { self.evidence },
            trust: self.trust,
            load: books.load(),
            shared_active: books.prompts.shared(namespace, request.blocks, Kind::Active),
            images_seen: books.images.seen(request.images),
        }
    }
}

impl Account {
    /// Charges one request: `blocks` shared with others, one private tail block,
    /// `uncached` tokens of prefill to come.
    pub fn book(
        self: &Arc<Self>,
        namespace: NamespaceId,
        blocks: &Arc<[BlockHash]>,
        size: BlockSize,
        prompt: Tokens,
        uncached: Tokens,
    ) -> Lease {
        let mut books = self.books.lock();
        let end = books.prompts.insert(namespace, blocks);
        books.private += 1;
        books.queued += uncached;
        books.context += prompt;
        books.requests += 1;
        books.booked += 1;
        let ticket = books.in_flight.book(end);
        drop(books);
        Lease {
            account: Arc::clone(self),
            end,
            size,
            prompt,
            queued: uncached,
            generated: Tokens(0),
            private: 1,
            ticket,
            session: None,
        }
    }

    /// Events of the target arrived: prefills that are done count by what the
    /// view says from now on.
    pub fn events_arrived(&self) {
        let books = &mut *self.books.lock();
        books.in_flight.confirmed(&mut books.prompts);
    }

    /// The engine lives anew: nothing is predicted, no picture was seen.
    pub fn engine_restarted(&self) {
        let books = &mut *self.books.lock();
        books.in_flight.forget(&mut books.prompts);
        books.images = ImageMemory::default();
    }

    /// What is booked now.
    pub fn load(&self) -> Load {
        self.books.lock().load()
    }

    /// How many leases there have been.
    pub fn turnover(&self) -> Turnover {
        let books = self.books.lock();
        Turnover { booked: books.booked, released: books.released }
    }

    /// When a prefill of `uncached` tokens that was just booked will have its
    /// first byte, behind what is queued already; `None` while nothing is
    /// learned about the target.
    pub fn prefill_estimate(&self) -> Option<Millis> {
        let books = self.books.lock();
        books.speed.time_for(books.queued)
    }
}

impl Books {
    fn load(&self) -> Load {
        Load {
            active_blocks: self.prompts.active_blocks() + self.private,
            queued: self.queued,
            context: self.context,
            requests: self.requests,
        }
    }
}

impl Lease {
    /// Prefill is over, at `now` and after `elapsed` where the first byte told:
    /// its blocks are cached, and events will soon say so. Later calls change
    /// nothing.
    pub fn first_byte(&mut self, now: Tick, elapsed: Option<Millis>) {
        let queued = std::mem::take(&mut self.queued);
        let mut books = self.account.books.lock();
        books.queued = books.queued - queued;
        books.in_flight.prefilled(now, self.ticket);
        if let Some(elapsed) = elapsed.filter(|_| queued.0 > 0) {
            books.speed.learn(queued, elapsed);
        }
    }

    /// The attempt failed: what it booked will not be cached.
    pub fn fail(&mut self) {
        let books = &mut *self.account.books.lock();
        books.in_flight.cancel(self.ticket, &mut books.prompts);
        if let Some(held) = self.session.take() {
            held.sessions.lock().fail(&held.hold);
        }
    }

    /// The answer ended at `now`: its session is idle from then on.
    pub fn end(&mut self, now: Tick) {
        if let Some(held) = &mut self.session {
            held.ended = now;
        }
    }

    /// `tokens` more have been generated.
    pub fn generated(&mut self, tokens: Tokens) {
        let before = self.size.full_blocks(self.generated);
        self.generated += tokens;
        let blocks = self.size.full_blocks(self.generated).0 - before.0;
        self.private += blocks;
        let mut books = self.account.books.lock();
        books.context += tokens;
        books.private += blocks;
    }

    /// When the first byte is to be expected, from now; `None` while nothing is
    /// learned about the target.
    pub fn prefill_estimate(&self) -> Option<Millis> {
        self.account.prefill_estimate()
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut guard = self.account.books.lock();
        let books = &mut *guard;
        books.prompts.remove(self.end, Kind::Active);
        books.in_flight.release(self.ticket, &mut books.prompts);
        books.private = books.private.saturating_sub(self.private);
        books.queued = books.queued - self.queued;
        books.context = books.context - (self.prompt + self.generated);
        books.requests = books.requests.saturating_sub(1);
        books.released += 1;
        drop(guard);
        if let Some(held) = self.session.take() {
            held.sessions.lock().release(held.ended, &held.hold);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPACE: NamespaceId = NamespaceId(1);

    fn size() -> BlockSize {
        BlockSize::new(16).expect("not zero")
    }

    fn blocks(range: std::ops::Range<u64>) -> Arc<[BlockHash]> {
        range.map(BlockHash).collect()
    }

    fn book(account: &Arc<Account>, range: std::ops::Range<u64>, uncached: u64) -> Lease {
        let prompt = Tokens((range.end - range.start) * 16 + 5);
        account.book(SPACE, &blocks(range), size(), prompt, Tokens(uncached))
    }

    #[test]
    fn shared_prefixes_count_once_and_tails_are_private() {
        let account = Arc::new(Account::default());
        let one = book(&account, 0..4, 69);
        let other = book(&account, 0..6, 37);
        let load = account.load();
        assert_eq!(load.active_blocks, 6 + 2, "six distinct blocks and two tails");
        assert_eq!((load.queued, load.context, load.requests), (Tokens(106), Tokens(69 + 101), 2));
        drop(one);
        assert_eq!(account.load().active_blocks, 6 + 1, "the other still holds all six");
        drop(other);
        assert_eq!(account.load(), Load::default());
        assert_eq!(account.turnover(), Turnover { booked: 2, released: 2 });
    }

    #[test]
    fn the_first_byte_ends_the_queue_once_and_tokens_grow_the_context() {
        let account = Arc::new(Account::default());
        let mut lease = book(&account, 0..8, 133);
        lease.first_byte(Tick(133), Some(Millis(133)));
        lease.first_byte(Tick(999_999), Some(Millis(999_999)));
        assert_eq!(account.load().queued, Tokens(0));
        for _ in 0..33 {
            lease.generated(Tokens(1));
        }
        let load = account.load();
        assert_eq!((load.active_blocks, load.context), (8 + 1 + 2, Tokens(133 + 33)));
        let waiting = book(&account, 0..1, 500);
        assert_eq!(waiting.prefill_estimate(), Some(Millis(500)), "one token a millisecond, learned once");
        drop((lease, waiting));
        assert_eq!(account.load(), Load::default());
    }

    #[test]
    fn late_release_spares_the_successor() {
        let gone = Arc::new(Account::default());
        let lease = book(&gone, 0..4, 9);
        let successor = Arc::new(Account::default());
        let _kept = book(&successor, 0..4, 9);
        drop(gone);
        drop(lease);
        assert_eq!(successor.load().requests, 1);
    }

    /// The oracle recounts everything from a plain list of live leases.
    #[test]
    fn books_agree_with_a_list_of_leases_in_every_order_of_release() {
        let shapes: [(u64, u64); 4] = [(0, 3), (0, 5), (0, 2), (70, 79)];
        for order in 0..24u64 {
            let account = Arc::new(Account::default());
            let mut live: Vec<(Lease, (u64, u64))> = shapes
                .iter()
                .map(|(from, to)| (book(&account, *from..*to, to - from), (*from, *to)))
                .collect();
            let mut order = order;
            while !live.is_empty() {
                let expected: std::collections::BTreeSet<u64> =
                    live.iter().flat_map(|(_, (f, t))| *f..*t).collect();
                let queued: u64 = live.iter().map(|(_, (f, t))| t - f).sum();
                let load = account.load();
                assert_eq!(load.active_blocks, (expected.len() + live.len()) as u64);
                assert_eq!((load.queued.0, load.requests), (queued, live.len() as u64));
                let count = live.len() as u64;
                drop(live.remove((order % count) as usize));
                order /= count;
            }
            assert_eq!(account.load(), Load::default());
        }
    }
}
