//! Load: booked by a pick, released exactly once.
//!
//! An [`Account`] holds what is booked on one target; a [`Lease`] owns what it
//! charged and the account it charged, so that a lease which outlives its
//! worker can neither underflow nor touch the worker's successor. A lease has
//! two phases: prefill (its uncached tokens queue on the target) until the
//! first byte, then decode. [`Ledger::select_and_book`] decides and books in one
//! short critical section, so that two picks at once see each other.
//!
//! An account's sums are atomics, written by whoever books or releases and read
//! without a lock: a pick reads them for every target there is. The prompts
//! behind them are in one tree for all accounts ([`super::prefixes`]), so that a
//! pick walks along its prompt once, and not once for every target.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use super::candidates::Candidates;
use super::decode_demand::{self, Demand};
use super::desk::{Booked, Desk, Note, SharedDesk};
use super::field::Field;
use super::images::{ImageKey, ImageMemory};
use super::lineup::Names;
use super::outside::{Booking, Outside, ReplicaId};
use super::prefill_speed::PrefillSpeed;
use super::prefixes::{Gone, Holder, Walk};
use super::sessions::{Hold, SessionUse, Sessions};
use super::strangers::{EngineReport, Sent};
use super::sums::{Others, Sum, Tally};
use super::tie::Ties;
use super::{Choice, Load, PickRequest, Settings, choose, follow};
use crate::blocks::{BlockHash, NamespaceId};
use crate::ids::{Role, Target, WorkerId};
use crate::units::{BlockSize, Blocks, Millis, Tick, Tokens};

/// What is booked on one target. Shared by its leases.
///
/// What a pick reads comes first and fits one cache line: with hundreds of
/// targets, lines are what a pick waits for. The second line is read where other
/// routers have something booked.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Account {
    /// Distinct prompt blocks, tail blocks and blocks of generated tokens.
    active_blocks: Sum,
    queued: Sum,
    context: Sum,
    booked: Sum,
    released: Sum,
    /// The holder of `seat`, [`NOBODY`] before there is one.
    holder: AtomicU32,
    /// Somebody else spoke of load on this target.
    outside_spoke: AtomicBool,
    /// Prefills are done that events have not confirmed yet.
    unconfirmed: AtomicBool,
    sent: Tally,
    demand_tokens: Sum,
    demand_requests: Sum,
    /// What others have there, where somebody spoke.
    others: Others,
    /// Where its prompts are; empty before the first booking.
    seat: OnceLock<Seat>,
    memory: Mutex<Memory>,
}

/// The number of no holder.
const NOBODY: u32 = u32::MAX;

impl Default for Account {
    fn default() -> Self {
        Self {
            active_blocks: Sum::default(),
            queued: Sum::default(),
            context: Sum::default(),
            booked: Sum::default(),
            released: Sum::default(),
            holder: AtomicU32::new(NOBODY),
            outside_spoke: AtomicBool::new(false),
            unconfirmed: AtomicBool::new(false),
            sent: Tally::default(),
            demand_tokens: Sum::default(),
            demand_requests: Sum::default(),
            others: Others::default(),
            seat: OnceLock::new(),
            memory: Mutex::default(),
        }
    }
}

/// What an account knows besides its sums.
#[derive(Debug, Default)]
struct Memory {
    speed: PrefillSpeed,
    images: ImageMemory,
    outside: Outside,
}

/// An account's place in the ledger that books on it.
#[derive(Clone, Debug)]
struct Seat {
    desk: Arc<SharedDesk>,
    holder: Holder,
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

impl Turnover {
    /// Leases that live.
    pub const fn in_flight(self) -> u64 {
        self.booked.saturating_sub(self.released)
    }
}

/// What a pick booked, until it is dropped.
#[must_use = "dropping a lease releases it at once"]
#[derive(Debug)]
pub struct Lease {
    account: Arc<Account>,
    /// Its prompt, at the desk of its account's ledger.
    booked: Option<Booked>,
    size: BlockSize,
    prompt: Tokens,
    /// Zero once the first byte has come.
    queued: Tokens,
    /// Whether the first byte has not come yet.
    waits: bool,
    /// What it is to its engine, which counts by answers and prompts.
    sequences: u64,
    /// The engine is done with it.
    ended: bool,
    generated: Tokens,
    private: u64,
    /// Input that it holds for decoding, where that is counted.
    demand: Option<Tokens>,
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

/// What one request is charged with.
#[derive(Clone, Copy, Debug)]
pub struct Charge<'a> {
    /// What may share its blocks.
    pub namespace: NamespaceId,
    /// Its full blocks, shared with others where they have the same.
    pub blocks: &'a Arc<[BlockHash]>,
    /// Tokens per block.
    pub size: BlockSize,
    /// Its tokens.
    pub prompt: Tokens,
    /// What of them is to be prefilled.
    pub uncached: Tokens,
}

/// A decision and what it booked.
#[derive(Debug)]
pub struct Pick {
    /// The decision. Its positions are in the field that it was made on.
    pub choice: Choice,
    /// What was booked on the chosen one.
    pub lease: Lease,
    /// What the request's session had to say.
    pub session: SessionUse,
    /// The target that was chosen before this pick, for the same role.
    pub turn: Option<Turn>,
}

/// A pick that could not be made.
#[derive(Debug)]
pub struct NoPick {
    /// Whether there were candidates, all over their hard cap.
    pub overloaded: bool,
    /// The target that was chosen before, for the same role.
    pub turn: Option<Turn>,
}

/// A target that was chosen before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Turn {
    /// The one at this place of the lineup.
    Place(u32),
    /// One of a former lineup.
    Former(Target),
}

impl Turn {
    /// The target, where `names` are those of the lineup.
    pub fn target<'a>(&'a self, names: &'a Names) -> &'a Target {
        match self {
            Self::Place(place) => &names[*place as usize],
            Self::Former(target) => target,
        }
    }
}

/// Decides and books, one pick at a time.
#[derive(Debug, Default)]
pub struct Ledger {
    desk: Arc<SharedDesk>,
    sessions: Arc<Mutex<Sessions>>,
    /// The running mean of prompts' lengths.
    typical: AtomicU64,
}

impl Ledger {
    /// Chooses in `field` and books the request on the chosen candidate before
    /// anybody else can choose. Leaves in `field` what it was chosen by.
    pub fn select_and_book(
        &self,
        now: Tick,
        settings: &Settings,
        request: &PickRequest<'_>,
        namespace: NamespaceId,
        blocks: &Arc<[BlockHash]>,
        field: &mut Field,
    ) -> Result<Pick, NoPick> {
        let mut desk = self.desk.lock();
        let walk = desk.load(now, settings, request, namespace, field);
        let last = desk.last(request.role);
        let chosen = self.choose(now, settings, request, field, last);
        let turn = desk.turn(request.role, field.names());
        let Some((choice, session)) = chosen else {
            return Err(NoPick { overloaded: !field.is_empty(), turn });
        };
        let target = field.target(choice.chosen);
        desk.took_turn(request.role, field.names(), field.place(choice.chosen) as u32);
        let cached = request.size.tokens_in(Blocks(field.hits(choice.chosen)));
        let uncached = match request.role {
            // It fetches what another one prefills.
            Role::Decode => Tokens(0),
            Role::Prefill | Role::Mixed => request.prompt.uncached(cached),
        };
        let account = field.account(choice.chosen);
        let (size, prompt) = (request.size, request.prompt);
        let charge = Charge { namespace, blocks, size, prompt, uncached };
        let mut lease = self.book(&mut desk, account, &charge, walk);
        self.note_length(prompt);
        if decode_demand::counts(settings, request.role) {
            lease.hold_demand(decode_demand::input(request));
        }
        if !request.images.is_empty() {
            account.memory.lock().images.record(request.images);
        }
        let session = self.hold_session(now, settings, request, target, session, &mut lease);
        drop(desk);
        Ok(Pick { choice, lease, session, turn })
    }

    /// What [`Ledger::select_and_book`] would choose now, without booking it.
    pub fn preview(
        &self,
        now: Tick,
        settings: &Settings,
        request: &PickRequest<'_>,
        namespace: NamespaceId,
        field: &mut Field,
    ) -> Result<(Choice, Option<Target>), NoPick> {
        let mut desk = self.desk.lock();
        desk.load(now, settings, request, namespace, field);
        let last = desk.last(request.role);
        match self.choose(now, settings, request, field, last) {
            Some((choice, _)) => Ok((choice, last.cloned())),
            None => {
                let turn = desk.turn(request.role, field.names());
                Err(NoPick { overloaded: !field.is_empty(), turn })
            }
        }
    }

    fn book(&self, desk: &mut Desk, account: &Arc<Account>, charge: &Charge<'_>, walk: Walk) -> Lease {
        let Charge { namespace, blocks, size, prompt, uncached } = *charge;
        let seat =
            account.seat.get_or_init(|| Seat { desk: Arc::clone(&self.desk), holder: desk.seat(account) });
        // An account belongs to one ledger. In another one's books its prompts
        // are not remembered: too little is shared, nothing is miscounted.
        let here = Arc::ptr_eq(&seat.desk, &self.desk);
        debug_assert!(here, "an account is booked through one ledger");
        account.holder.store(if here { seat.holder.0 } else { NOBODY }, Ordering::Relaxed);
        let mut new = 0;
        let booked = (here && !blocks.is_empty()).then(|| {
            let (end, added) = desk.prompts.insert(namespace, blocks, seat.holder, walk);
            new = added;
            Booked { holder: seat.holder, end, ticket: desk.in_flight.book(seat.holder, end) }
        });
        account.active_blocks.add(new + 1);
        account.queued.add(uncached.0);
        account.context.add(prompt.0);
        account.sent.begun.add(1);
        account.booked.add(1);
        Lease {
            account: Arc::clone(account),
            booked,
            size,
            prompt,
            queued: uncached,
            waits: true,
            sequences: 1,
            ended: false,
            generated: Tokens(0),
            private: 1,
            demand: None,
            session: None,
        }
    }

    /// Charges `account` with what was chosen elsewhere.
    pub fn charge(&self, account: &Arc<Account>, charge: &Charge<'_>) -> Lease {
        let mut desk = self.desk.lock();
        let walk = desk.prompts.follow(charge.namespace, charge.blocks);
        self.book(&mut desk, account, charge, walk)
    }

    /// What it knows of all accounts together.
    #[cfg(test)]
    pub(super) fn desk(&self) -> &SharedDesk {
        &self.desk
    }

    /// How long its late prompts are on average; zero before the first.
    pub fn typical_prompt(&self) -> Tokens {
        Tokens(self.typical.load(Ordering::Relaxed))
    }

    /// Under the desk's lock: nobody else writes.
    fn note_length(&self, prompt: Tokens) {
        const LATE: u64 = 16;
        let mean = match self.typical.load(Ordering::Relaxed) {
            0 => prompt.0,
            mean => mean - mean / LATE + prompt.0 / LATE,
        };
        self.typical.store(mean, Ordering::Relaxed);
    }

    /// Ends the sessions that are bound to `worker`, which left.
    pub fn forget_worker(&self, worker: &WorkerId) {
        self.sessions.lock().remove_worker(worker);
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
        field: &mut Field,
        turn: Option<&Target>,
    ) -> Option<(Choice, SessionUse)> {
        let key = request.session.filter(|_| settings.sessions.mode.binds(request.role));
        let bound = key.and_then(|key| self.sessions.lock().bound(now, settings.sessions.time_to_live, key));
        let mut session = if key.is_some() { SessionUse::New } else { SessionUse::None };
        let mut prices = std::mem::take(&mut field.prices);
        let mut choice = None;
        if let Some(bound) = bound {
            session = SessionUse::Replaced;
            if let Some(at) = field.find(&bound) {
                choice = follow(settings, request, field, at, &mut prices).ok();
                session = if choice.is_some() { SessionUse::Followed } else { SessionUse::Overloaded };
            }
        }
        let decide = || choose(settings, request, field, turn, Ties::default(), &mut prices);
        let choice = choice.or_else(decide);
        field.prices = prices;
        choice.map(|choice| (choice, session))
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

impl Account {
    /// Events of the target arrived: prefills that are done count by what the
    /// view says from now on.
    pub fn events_arrived(&self) {
        if self.unconfirmed.swap(false, Ordering::Relaxed)
            && let Some(seat) = self.seat.get()
        {
            let desk = &mut *seat.desk.lock();
            desk.in_flight.confirmed(seat.holder, &mut desk.prompts);
        }
    }

    /// The engine lives anew: nothing is predicted, no picture was seen.
    pub fn engine_restarted(&self) {
        if let Some(seat) = self.seat.get() {
            let desk = &mut *seat.desk.lock();
            desk.in_flight.forget(seat.holder, &mut desk.prompts);
        }
        let memory = &mut *self.memory.lock();
        memory.images = ImageMemory::default();
        memory.outside.engine_restarted();
        // The next pick works out what is left of it.
        self.others.set(Load::default(), Tick(0));
    }

    /// Another router of the pool has this booked on the target. To be renewed.
    pub fn replica_booked(&self, now: Tick, replica: ReplicaId, told: Booking) {
        let outside = &mut self.memory.lock().outside;
        outside.replica(now, replica, told);
        self.work_out_others(now, outside);
    }

    /// The target's engine will be asked for its load a while from now.
    pub fn about_to_ask(&self, now: Tick) {
        self.memory.lock().outside.mark(now, self.sent.read());
    }

    /// The target's engine said what it has in hand. To be renewed.
    pub fn engine_reported(&self, now: Tick, report: &EngineReport) {
        let outside = &mut self.memory.lock().outside;
        outside.engine(now, report, self.load());
        self.work_out_others(now, outside);
    }

    /// What this router sent there so far.
    pub fn sent(&self) -> Sent {
        self.sent.read()
    }

    /// What it tells others.
    pub fn booking(&self) -> Booking {
        Booking { load: self.load(), sent: Some(self.sent()) }
    }

    /// What this router has booked now.
    #[inline]
    pub fn load(&self) -> Load {
        Load {
            active_blocks: self.active_blocks.get(),
            queued: Tokens(self.queued.get()),
            context: Tokens(self.context.get()),
            requests: self.turnover().in_flight(),
        }
    }

    /// What other routers of the pool have booked, as far as they said so lately.
    pub fn booked_elsewhere(&self, now: Tick) -> Load {
        self.memory.lock().outside.replicas(now)
    }

    /// What its engine has beyond what the pool's routers sent; `None` where it did not
    /// say so lately.
    pub fn strangers(&self, now: Tick) -> Option<Load> {
        self.memory.lock().outside.strangers(now)
    }

    /// How many leases there have been.
    pub fn turnover(&self) -> Turnover {
        // In this order: what was released was booked before.
        let released = self.released.get();
        Turnover { booked: self.booked.get(), released }
    }

    /// The input that is booked for decoding, where that is counted.
    pub fn demand(&self) -> Demand {
        Demand { tokens: Tokens(self.demand_tokens.get()), requests: self.demand_requests.get() }
    }

    /// When a prefill of `uncached` tokens that was just booked will have its
    /// first byte, behind what is queued already; `None` while nothing is
    /// learned about the target.
    pub fn prefill_estimate(&self) -> Option<Millis> {
        self.memory.lock().speed.time_for(Tokens(self.queued.get()))
    }

    /// `blocks` of its prompts are active no more.
    pub(super) fn deactivate(&self, blocks: u64) {
        self.active_blocks.sub(blocks);
    }

    /// Where its prompts are; a number that no holder has before the first.
    #[inline]
    pub(super) fn holder(&self) -> Holder {
        Holder(self.holder.load(Ordering::Relaxed))
    }

    /// How many of `images` were sent there lately.
    pub(super) fn images_seen(&self, images: &[ImageKey]) -> u64 {
        self.memory.lock().images.seen(images)
    }

    /// All that is known of its load, beside a request that hits `hits` blocks there; they
    /// are asked for only where others have something.
    #[inline]
    pub(super) fn load_for(&self, now: Tick, hits: impl Fn() -> u64) -> Load {
        if !self.outside_spoke.load(Ordering::Relaxed) {
            return self.load();
        }
        let others = self.others.get(now).unwrap_or_else(|| {
            let outside = &self.memory.lock().outside;
            self.work_out_others(now, outside)
        });
        self.load().plus(others.beside_hits(hits()))
    }

    /// Under the lock of `outside`, so that nothing older comes after.
    fn work_out_others(&self, now: Tick, outside: &Outside) -> Load {
        let load = outside.load(now);
        self.outside_spoke.store(load.is_some(), Ordering::Relaxed);
        let (load, anew) = load.unwrap_or_default();
        self.others.set(load, anew);
        load
    }
}

impl Lease {
    /// Prefill is over, at `now` and after `elapsed` where the first byte told:
    /// its blocks are cached, and events will soon say so. Later calls change
    /// nothing.
    pub fn first_byte(&mut self, now: Tick, elapsed: Option<Millis>) {
        if !std::mem::take(&mut self.waits) {
            return;
        }
        let queued = std::mem::take(&mut self.queued);
        self.account.queued.sub(queued.0);
        if let Some((seat, Booked { ticket, .. })) = self.seated() {
            seat.desk.tell(Note::Prefilled { now, ticket });
            self.account.unconfirmed.store(true, Ordering::Relaxed);
        }
        if let Some(elapsed) = elapsed.filter(|_| queued.0 > 0) {
            self.account.memory.lock().speed.learn(queued, elapsed);
        }
    }

    /// The attempt failed: what it booked will not be cached.
    pub fn fail(&mut self) {
        if let Some((seat, Booked { ticket, .. })) = self.seated() {
            seat.desk.tell(Note::Failed { ticket });
        }
        if let Some(held) = self.session.take() {
            held.sessions.lock().fail(&held.hold);
        }
    }

    /// Its engine counts it as so many sequences. To be said before it is sent.
    pub fn runs(&mut self, sequences: u64) {
        let more = sequences.saturating_sub(self.sequences);
        self.account.sent.begun.add(more);
        self.sequences += more;
    }

    /// The engine has answered in full. Where nobody says so, the request was given up,
    /// and the engine may go on with it for a while.
    pub fn answered(&mut self) {
        self.ended = true;
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
        self.account.context.add(tokens.0);
        self.account.active_blocks.add(blocks);
    }

    /// When the first byte is to be expected, from now; `None` while nothing is
    /// learned about the target.
    pub fn prefill_estimate(&self) -> Option<Millis> {
        self.account.prefill_estimate()
    }

    /// Where its prompt is booked.
    fn seated(&self) -> Option<(&Seat, Booked)> {
        self.account.seat.get().zip(self.booked)
    }

    /// Counts `tokens` of input for decoding until the lease ends.
    fn hold_demand(&mut self, tokens: Tokens) {
        self.account.demand_tokens.add(tokens.0);
        self.account.demand_requests.add(1);
        self.demand = Some(tokens);
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let account = &self.account;
        let mut gone = Gone::default();
        if let Some((seat, booked)) = self.seated() {
            match seat.desk.try_lock() {
                Some(mut desk) => gone = desk.release(booked),
                None => seat.desk.leave(Note::Released { account: Arc::clone(account), booked }),
            }
        }
        account.active_blocks.sub(gone.blocks + self.private);
        account.queued.sub(self.queued.0);
        account.context.sub((self.prompt + self.generated).0);
        let over = if self.ended { &account.sent.ended } else { &account.sent.left };
        over.add(self.sequences);
        if let Some(demand) = self.demand {
            account.demand_tokens.sub(demand.0);
            account.demand_requests.sub(1);
        }
        account.released.add(1);
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

    fn book(ledger: &Ledger, account: &Arc<Account>, range: std::ops::Range<u64>, uncached: u64) -> Lease {
        let prompt = Tokens((range.end - range.start) * 16 + 5);
        let (blocks, uncached) = (blocks(range), Tokens(uncached));
        ledger.charge(account, &Charge { namespace: SPACE, blocks: &blocks, size: size(), prompt, uncached })
    }

    #[test]
    fn shared_prefixes_count_once_and_tails_are_private() {
        let (ledger, account) = (Ledger::default(), Arc::new(Account::default()));
        let one = book(&ledger, &account, 0..4, 69);
        let other = book(&ledger, &account, 0..6, 37);
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
        let (ledger, account) = (Ledger::default(), Arc::new(Account::default()));
        let mut lease = book(&ledger, &account, 0..8, 133);
        lease.first_byte(Tick(133), Some(Millis(133)));
        lease.first_byte(Tick(999_999), Some(Millis(999_999)));
        assert_eq!(account.load().queued, Tokens(0));
        for _ in 0..33 {
            lease.generated(Tokens(1));
        }
        let load = account.load();
        assert_eq!((load.active_blocks, load.context), (8 + 1 + 2, Tokens(133 + 33)));
        let waiting = book(&ledger, &account, 0..1, 500);
        assert_eq!(waiting.prefill_estimate(), Some(Millis(500)), "one token a millisecond, learned once");
        drop((lease, waiting));
        assert_eq!(account.load(), Load::default());
    }

    #[test]
    fn late_release_spares_the_successor() {
        let (ledger, gone) = (Ledger::default(), Arc::new(Account::default()));
        let lease = book(&ledger, &gone, 0..4, 9);
        let successor = Arc::new(Account::default());
        let _kept = book(&ledger, &successor, 0..4, 9);
        drop(gone);
        drop(lease);
        assert_eq!(successor.load().requests, 1);
    }

    #[test]
    fn sequences_are_counted_from_their_booking_until_they_are_over() {
        let (ledger, account) = (Ledger::default(), Arc::new(Account::default()));
        let [mut four, one, mut none] = [0, 1, 2].map(|_| book(&ledger, &account, 0..4, 9));
        four.runs(4);
        four.runs(4);
        none.runs(0);
        assert_eq!(account.sent(), Sent { begun: 6, ended: 0, left: 0 });
        four.answered();
        drop((four, one));
        assert_eq!(account.sent(), Sent { begun: 6, ended: 4, left: 1 });
        none.answered();
        drop(none);
        assert_eq!(account.sent(), Sent { begun: 6, ended: 5, left: 1 });
    }

    /// The oracle keeps the last word of every router, and adds up those that are fresh.
    #[test]
    fn picks_see_the_last_fresh_word_of_every_router() {
        let (ledger, account) = (Ledger::default(), Arc::new(Account::default()));
        let _own = book(&ledger, &account, 0..4, 9);
        let own = account.load();
        let (mut said, mut now, mut state) = (std::collections::BTreeMap::new(), 0, 7u64);
        let mut roll = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % below
        };
        for _ in 0..5_000 {
            now += roll(900);
            if roll(3) == 0 {
                let (id, requests) = (roll(5), roll(3));
                let (active_blocks, context) = (requests * 9, Tokens(requests * 7));
                let load = Load { active_blocks, context, requests, ..Load::default() };
                account.replica_booked(Tick(now), ReplicaId(id), Booking { load, sent: None });
                said.insert(id, (now, load));
            }
            let fresh = said.values().filter(|(at, _)| now - at <= 3_000);
            let others = fresh.fold(Load::default(), |sum, (_, load)| sum.plus(*load));
            assert_eq!(account.load_for(Tick(now), || 0), own.plus(others), "at {now}");
            let beside = Load { active_blocks: others.requests * 5, ..others };
            assert_eq!(account.load_for(Tick(now), || 4), own.plus(beside), "at {now}");
            assert_eq!((account.booked_elsewhere(Tick(now)), account.load()), (others, own));
        }
    }

    /// The oracle recounts everything from a plain list of live leases.
    #[test]
    fn books_agree_with_a_list_of_leases_in_every_order_of_release() {
        let shapes: [(u64, u64); 4] = [(0, 3), (0, 5), (0, 2), (70, 79)];
        for order in 0..24u64 {
            let (ledger, account) = (Ledger::default(), Arc::new(Account::default()));
            let mut live: Vec<(Lease, (u64, u64))> = shapes
                .iter()
                .map(|(from, to)| (book(&ledger, &account, *from..*to, to - from), (*from, *to)))
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
