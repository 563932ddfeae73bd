//! What a ledger knows of all its accounts together, behind one lock.
//!
//! The lock is the critical section of every decision. Who only has to tell what
//! became of a booking does not wait for it: it is done at once where the lock is
//! free, else left as a [`Note`]. Whoever gets the lock reads the notes first, and
//! looks again after letting go, so a note is read before the next decision and
//! never stays.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering, fence};
use std::sync::{Arc, Weak};

use parking_lot::MutexGuard;

use super::decode_demand;
use super::field::{Field, Loading, Shape, Sight};
use super::in_flight::{InFlight, Ticket};
use super::leases::{Account, Turn};
use super::lineup::Names;
use super::prefixes::{Depth, End, Gone, Holder, Kind, Prefixes, Walk};
use super::{PickRequest, Settings, Switch};
use crate::blocks::NamespaceId;
use crate::brief::Brief;
use crate::ids::{Role, Target};
use crate::units::Tick;

/// Candidates that a pick remembers to find others like them.
const ALIKE: usize = 16;

/// The desk, and the notes for whoever comes to it next.
#[derive(Debug, Default)]
pub(super) struct SharedDesk {
    desk: Brief<Desk>,
    notes: Brief<Vec<Note>>,
    /// How many notes there are.
    left: AtomicUsize,
}

/// What became of a booking.
#[derive(Debug)]
pub(super) enum Note {
    /// Its prefill is done.
    Prefilled { now: Tick, ticket: Ticket },
    /// It will not be cached.
    Failed { ticket: Ticket },
    /// It is over.
    Released { account: Arc<Account>, booked: Booked },
}

/// Where a booked prompt is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Booked {
    pub(super) holder: Holder,
    pub(super) end: End,
    pub(super) ticket: Ticket,
}

/// Exclusive access to the desk, with all notes read.
pub(super) struct DeskGuard<'a> {
    shared: &'a SharedDesk,
    /// Gone only when it is dropped.
    desk: Option<MutexGuard<'a, Desk>>,
}

impl SharedDesk {
    /// Exclusive access. Waits for whoever has it.
    pub(super) fn lock(&self) -> DeskGuard<'_> {
        self.guard(self.desk.lock())
    }

    /// Exclusive access, if nobody has it.
    pub(super) fn try_lock(&self) -> Option<DeskGuard<'_>> {
        self.desk.try_lock().map(|desk| self.guard(desk))
    }

    /// Tells what became of a booking, and does not wait.
    pub(super) fn tell(&self, note: Note) {
        match self.try_lock() {
            Some(mut desk) => desk.read(note),
            None => self.leave(note),
        }
    }

    /// Leaves a note for whoever has the desk now.
    pub(super) fn leave(&self, note: Note) {
        let mut notes = self.notes.lock();
        notes.push(note);
        self.left.store(notes.len(), Ordering::Relaxed);
        drop(notes);
        self.look_again();
    }

    fn guard<'a>(&'a self, mut desk: MutexGuard<'a, Desk>) -> DeskGuard<'a> {
        if self.left.load(Ordering::Relaxed) > 0 {
            self.read_notes(&mut desk);
        }
        DeskGuard { shared: self, desk: Some(desk) }
    }

    fn read_notes(&self, desk: &mut Desk) {
        let mut notes = self.notes.lock();
        let mut unread = std::mem::replace(&mut *notes, std::mem::take(&mut desk.notes));
        self.left.store(0, Ordering::Relaxed);
        drop(notes);
        unread.drain(..).for_each(|note| desk.read(note));
        desk.notes = unread;
    }

    /// Reads notes that came while the desk was in use, unless it is again: then its
    /// user will. No note stays unread, because each side writes first and looks then,
    /// with a full fence between the two:
    ///
    /// ```text
    /// who leaves a note        who frees the desk
    /// writes `left`            unlocks `desk`
    /// fence                    fence
    /// tries to lock `desk`     reads `left`
    /// ```
    ///
    /// Of two fences one comes first. If it is the left one, the right side reads the
    /// note's `left`; else the left side finds the desk free, or somebody else at it,
    /// who will free it and look in turn.
    fn look_again(&self) {
        loop {
            fence(Ordering::SeqCst);
            if self.left.load(Ordering::Relaxed) == 0 {
                return;
            }
            let Some(mut desk) = self.desk.try_lock() else { return };
            self.read_notes(&mut desk);
        }
    }
}

impl Deref for DeskGuard<'_> {
    type Target = Desk;

    fn deref(&self) -> &Desk {
        self.desk.as_ref().expect("until it is dropped")
    }
}

impl DerefMut for DeskGuard<'_> {
    fn deref_mut(&mut self) -> &mut Desk {
        self.desk.as_mut().expect("until it is dropped")
    }
}

impl Drop for DeskGuard<'_> {
    fn drop(&mut self) {
        drop(self.desk.take());
        self.shared.look_again();
    }
}

#[derive(Debug, Default)]
pub(super) struct Desk {
    /// The targets that were chosen last, by role: each has its own round. As places
    /// among names: to share a target is to write to a count that all cores use.
    turns: [Option<(Names, u32)>; 3],
    /// The prompts of all leases, and of what in-flight credit predicts.
    pub(super) prompts: Prefixes,
    pub(super) in_flight: InFlight,
    /// The accounts that have a seat, by holder.
    accounts: Vec<Weak<Account>>,
    /// Where the next look for a seat that is free again begins.
    looked: usize,
    /// No notes: memory to use again.
    notes: Vec<Note>,
}

impl Desk {
    /// The target that was chosen last for `role`.
    pub(super) fn last(&self, role: Role) -> Option<&Target> {
        self.turns[role as usize].as_ref().map(|(names, place)| &names[*place as usize])
    }

    /// The same, for those who know the `names` of the lineup.
    pub(super) fn turn(&self, role: Role, names: &Names) -> Option<Turn> {
        let (of, place) = self.turns[role as usize].as_ref()?;
        Some(match Arc::ptr_eq(of, names) {
            true => Turn::Place(*place),
            false => Turn::Former(of[*place as usize].clone()),
        })
    }

    pub(super) fn took_turn(&mut self, role: Role, names: &Names, place: u32) {
        match &mut self.turns[role as usize] {
            Some((of, last)) if Arc::ptr_eq(of, names) => *last = place,
            other => *other = Some((Arc::clone(names), place)),
        }
    }

    /// Reads into `field` what is booked on each candidate, and what prompts in
    /// flight predict.
    pub(super) fn load(
        &mut self,
        now: Tick,
        settings: &Settings,
        request: &PickRequest<'_>,
        namespace: NamespaceId,
        field: &mut Field,
    ) -> Walk {
        self.in_flight.expire(now, &mut self.prompts);
        let Loading { entrants, sights, claims, shapes, shape_of, loads, demands, depths } =
            field.begin_loads();
        depths.resize(self.accounts.len(), Depth::default());
        let walk = self.prompts.depths(namespace, request.blocks, depths);
        let counts_demand = decode_demand::counts(settings, request.role);
        let credit = settings.in_flight_credit == Switch::Enabled;
        // Most candidates are like some other: their shape is made once.
        let mut made = [(u32::MAX, Depth::default(), 0); ALIKE];
        let mut last = made[0];
        for sight in sights {
            let Sight { place, claim, .. } = sight;
            let account = &*entrants[*place as usize].account;
            let depth = depths.get(account.holder().0 as usize);
            let depth = depth.copied().unwrap_or_default();
            if (last.0, last.1) != (*claim, depth) || !request.images.is_empty() {
                let like = &mut made[depth.mixed(*claim) as usize % ALIKE];
                if (like.0, like.1) != (*claim, depth) || !request.images.is_empty() {
                    let claim = &claims[*claim as usize];
                    // A target whose view may not be credited is judged by routing history,
                    // which knows the same prompts.
                    let expected = if credit && claim.credited { depth.predicted } else { 0 };
                    let mut shape = Shape::of(claim, expected.into());
                    shape.shared_active = depth.active.into();
                    if !request.images.is_empty() {
                        shape.images_seen = account.images_seen(request.images);
                    }
                    shapes.push(shape);
                    *like = (sight.claim, depth, shapes.len() as u32 - 1);
                }
                last = *like;
            }
            shape_of.push(last.2);
            let hits = || shapes[last.2 as usize].hits.total();
            loads.push(account.load_for(now, hits));
            if counts_demand {
                demands.push(account.demand());
            }
        }
        walk
    }

    /// A place for `account`: one whose account is gone, else a new one.
    pub(super) fn seat(&mut self, account: &Arc<Account>) -> Holder {
        /// Places looked at for each new account: more than one, so that they
        /// run out of those whose accounts are gone.
        const LOOKS: usize = 4;
        for _ in 0..LOOKS.min(self.accounts.len()) {
            let place = self.looked % self.accounts.len();
            self.looked = place + 1;
            if self.accounts[place].strong_count() == 0 {
                let holder = Holder(place as u32);
                self.in_flight.forget(holder, &mut self.prompts);
                self.accounts[place] = Arc::downgrade(account);
                return holder;
            }
        }
        self.accounts.push(Arc::downgrade(account));
        Holder(self.accounts.len() as u32 - 1)
    }

    /// A booking is over. Blocks that are active no more are the caller's to take off
    /// its account.
    pub(super) fn release(&mut self, booked: Booked) -> Gone {
        let Booked { holder, end, ticket } = booked;
        let kind = if self.in_flight.release(ticket) { Kind::Both } else { Kind::Active };
        self.prompts.remove(end, holder, kind)
    }

    fn read(&mut self, note: Note) {
        match note {
            Note::Prefilled { now, ticket } => self.in_flight.prefilled(now, ticket),
            Note::Failed { ticket } => self.in_flight.cancel(ticket, &mut self.prompts),
            Note::Released { account, booked } => account.deactivate(self.release(booked).blocks),
        }
    }

    /// Places that accounts have, those of accounts that are gone included.
    #[cfg(test)]
    pub(super) fn seats(&self) -> usize {
        self.accounts.len()
    }
}

#[cfg(test)]
mod tests {
    use super::super::leases::{Charge, Lease, Ledger};
    use super::*;
    use crate::blocks::BlockHash;
    use crate::units::{BlockSize, Tokens};

    fn book(ledger: &Ledger, account: &Arc<Account>, blocks: std::ops::Range<u64>) -> Lease {
        let (blocks, size) = (blocks.map(BlockHash).collect(), BlockSize::new(16).expect("not zero"));
        let (prompt, uncached) = (Tokens(100), Tokens(50));
        ledger.charge(account, &Charge { namespace: NamespaceId(1), blocks: &blocks, size, prompt, uncached })
    }

    #[test]
    fn who_tells_does_not_wait_and_is_heard() {
        let (ledger, account) = (Ledger::default(), Arc::new(Account::default()));
        let (mut kept, gone) = (book(&ledger, &account, 0..4), book(&ledger, &account, 0..6));
        let desk = ledger.desk();
        let taken = desk.lock();
        kept.first_byte(Tick(5), None);
        drop(gone);
        assert_eq!(desk.left.load(Ordering::Relaxed), 2, "both are notes");
        let load = account.load();
        assert_eq!((load.requests, load.queued), (1, Tokens(0)), "what needs no desk is done");
        assert_eq!(load.active_blocks, 6 + 1, "its blocks wait, its tail does not");
        drop(taken);
        assert_eq!(desk.left.load(Ordering::Relaxed), 0, "read by whoever let go");
        assert_eq!(account.load().active_blocks, 4 + 1);
        let taken = desk.lock();
        drop(kept);
        drop(taken);
        assert_eq!(account.load().active_blocks, 0, "a prefill that was done is counted once");
        let mut taken = desk.lock();
        assert!(!taken.prompts.is_empty(), "what it predicts is still there");
        let Desk { in_flight, prompts, .. } = &mut *taken;
        in_flight.expire(Tick(1 << 40), prompts);
        assert!(taken.prompts.is_empty());
    }

    #[test]
    fn what_failed_is_predicted_no_more() {
        let (ledger, account) = (Ledger::default(), Arc::new(Account::default()));
        let (_kept, mut failed) = (book(&ledger, &account, 0..4), book(&ledger, &account, 0..6));
        let desk = ledger.desk();
        let taken = desk.lock();
        failed.fail();
        drop(taken);
        let (prompt, mut depths) = ((0..6).map(BlockHash).collect::<Vec<_>>(), [Depth::default()]);
        desk.lock().prompts.depths(NamespaceId(1), &prompt, &mut depths);
        assert_eq!((depths[0].active, depths[0].predicted), (6, 4));
    }

    /// Bookings and releases of many threads at once, none of which may be lost.
    #[test]
    fn nothing_is_left_when_everybody_is_done() {
        let ledger = Ledger::default();
        let accounts: Vec<Arc<Account>> = (0..3).map(|_| Arc::default()).collect();
        std::thread::scope(|scope| {
            for thread in 0..4u64 {
                let (ledger, accounts) = (&ledger, &accounts);
                scope.spawn(move || {
                    let mut kept = std::collections::VecDeque::new();
                    for turn in 0..3_000u64 {
                        let account = &accounts[((thread + turn) % 3) as usize];
                        let mut lease = book(ledger, account, 0..2 + (turn * 7 + thread) % 5);
                        match turn % 3 {
                            0 => lease.first_byte(Tick(turn), None),
                            1 => lease.fail(),
                            _ => {}
                        }
                        kept.push_back(lease);
                        if kept.len() > 3 {
                            kept.pop_front();
                        }
                    }
                });
            }
        });
        for account in &accounts {
            assert_eq!(account.load(), super::super::Load::default());
        }
        let mut desk = ledger.desk().lock();
        let Desk { in_flight, prompts, .. } = &mut *desk;
        in_flight.expire(Tick(1 << 40), prompts);
        assert!(desk.prompts.is_empty());
        assert_eq!(ledger.desk().left.load(Ordering::Relaxed), 0);
    }
}
