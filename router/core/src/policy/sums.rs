//! What is counted on one target, and read without a lock: a pick reads it of every
//! target there is.

use std::sync::atomic::{AtomicU64, Ordering};

use super::Load;
use super::strangers::Sent;
use crate::units::{Tick, Tokens};

/// A count that leases raise and lower. Readers need no order among several of
/// them: what a pick booked, the next one sees because of the ledger's lock.
#[derive(Debug, Default)]
pub(super) struct Sum(AtomicU64);

impl Sum {
    pub(super) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    pub(super) fn add(&self, more: u64) {
        if more > 0 {
            self.0.fetch_add(more, Ordering::Relaxed);
        }
    }

    /// Never below zero: whoever lowers it raised it before by as much.
    pub(super) fn sub(&self, less: u64) {
        if less > 0 {
            self.0.fetch_sub(less, Ordering::Relaxed);
        }
    }
}

/// Sequences that were sent there.
#[derive(Debug, Default)]
pub(super) struct Tally {
    pub(super) begun: Sum,
    pub(super) ended: Sum,
    pub(super) left: Sum,
}

impl Tally {
    pub(super) fn read(&self) -> Sent {
        // In this order: what is over was begun before.
        let (ended, left) = (self.ended.get(), self.left.get());
        Sent { begun: self.begun.get(), ended, left }
    }
}

/// What other routers and strangers have there, worked out when somebody spoke, so that
/// picks need not ask for each.
#[derive(Debug, Default)]
pub(super) struct Others {
    /// From this tick on it is to be worked out anew.
    anew: AtomicU64,
    active_blocks: AtomicU64,
    queued: AtomicU64,
    context: AtomicU64,
    requests: AtomicU64,
}

impl Others {
    /// The sum, where it holds at `now`.
    #[inline]
    pub(super) fn get(&self, now: Tick) -> Option<Load> {
        let read = |number: &AtomicU64| number.load(Ordering::Relaxed);
        (now.0 < read(&self.anew)).then(|| Load {
            active_blocks: read(&self.active_blocks),
            queued: Tokens(read(&self.queued)),
            context: Tokens(read(&self.context)),
            requests: read(&self.requests),
        })
    }

    pub(super) fn set(&self, load: Load, anew: Tick) {
        let write = |number: &AtomicU64, value: u64| number.store(value, Ordering::Relaxed);
        write(&self.active_blocks, load.active_blocks);
        write(&self.queued, load.queued.0);
        write(&self.context, load.context.0);
        write(&self.requests, load.requests);
        write(&self.anew, anew.0);
    }
}
