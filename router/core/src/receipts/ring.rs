//! The latest records: filed when decided, completed when answered.

use std::collections::VecDeque;
use std::sync::Arc;

use super::{Receipt, Record, ResultRecord};

/// Most memory that a ring of receipts takes: with 2,000 candidates each, the
/// latest 1,500 receipts.
const MAX_RING_BYTES: usize = 64 << 20;

/// The latest records, and what became of them. The oldest goes first.
#[derive(Debug)]
pub struct Ring {
    /// Each with the memory that it takes.
    entries: VecDeque<(Entry, usize)>,
    capacity: usize,
    bytes: usize,
    /// Number of the oldest entry held.
    first: u64,
}

/// One record and what became of it, as it was when it was asked for.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// The decision.
    pub record: Record,
    /// The result; `None` until it is known.
    pub result: Option<ResultRecord>,
}

/// A receipt's number in its ring: how many were filed before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReceiptNumber(pub u64);

/// That a record was filed.
#[derive(Debug)]
pub struct Filed {
    /// Its number.
    pub number: ReceiptNumber,
    /// A record that made room for it, to write the next one over.
    pub spare: Option<Record>,
}

impl Entry {
    /// The receipt. Records are of our own making; one that cannot be read is
    /// an error of ours, and there is no receipt of it.
    pub fn receipt(&self) -> Option<Receipt> {
        let receipt = self.record.decode().ok()?;
        Some(Receipt { result: self.result.clone(), ..receipt })
    }

    /// Memory that it takes, roughly.
    pub fn bytes(&self) -> usize {
        size_of::<Self>() + self.record.memory()
    }
}

impl Ring {
    /// A ring of `capacity` receipts, at least one; fewer where they are large.
    pub fn new(capacity: usize) -> Self {
        Self { entries: VecDeque::new(), capacity: capacity.max(1), bytes: 0, first: 0 }
    }

    /// Files a record; the oldest makes room.
    pub fn file(&mut self, record: Record, result: Option<ResultRecord>) -> Filed {
        // Names are shared by all records between two changes of the fleet.
        let shared =
            self.entries.back().is_some_and(|(last, _)| Arc::ptr_eq(last.record.names(), record.names()));
        let names = if shared { 0 } else { size_of_val(&**record.names()) };
        let entry = Entry { record, result };
        let bytes = entry.bytes() + names;
        self.bytes += bytes;
        self.entries.push_back((entry, bytes));
        let mut spare = None;
        while self.entries.len() > self.capacity || (self.bytes > MAX_RING_BYTES && self.entries.len() > 1) {
            if let Some((oldest, bytes)) = self.entries.pop_front() {
                self.bytes -= bytes;
                spare = Some(oldest.record);
            }
            self.first += 1;
        }
        Filed { number: ReceiptNumber(self.first + self.entries.len() as u64 - 1), spare }
    }

    /// Joins what became of it. A receipt that left the ring is not missed.
    pub fn join(&mut self, number: ReceiptNumber, result: ResultRecord) {
        let position = number.0.checked_sub(self.first).and_then(|at| usize::try_from(at).ok());
        if let Some((entry, _)) = position.and_then(|at| self.entries.get_mut(at)) {
            entry.result = Some(result);
        }
    }

    /// The newest `limit` entries that `wanted` accepts, newest first, as they
    /// are now: a result that is joined later does not show in them.
    pub fn latest(&self, limit: usize, wanted: impl Fn(&Entry) -> bool) -> Vec<Entry> {
        let newest = self.entries.iter().rev().map(|(entry, _)| entry);
        newest.filter(|entry| wanted(entry)).take(limit).cloned().collect()
    }

    /// Receipts ever filed.
    pub fn filed(&self) -> u64 {
        self.first + self.entries.len() as u64
    }
}
