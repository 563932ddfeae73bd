//! The receipts of one router: the ring in memory, and files where wanted.
//!
//! Filing and joining cost a lock and, with files, a place in a queue; neither
//! waits. Everything else happens in [`files`], in a task of its own: joining
//! results, JSON, digests, writing.

pub mod command;
pub mod files;

use kvrouter_core::brief::Brief;
use kvrouter_core::receipts::ring::{Entry, Filed};
use kvrouter_core::receipts::{ReceiptNumber, Record, ResultRecord, Ring};

use self::files::Queue;

/// Where receipts go.
#[derive(Debug)]
pub struct Receipts {
    ring: Brief<Ring>,
    /// To the task that writes files.
    queue: Option<Queue>,
}

impl Receipts {
    /// Room for `capacity` receipts in memory, and no files.
    pub fn new(capacity: usize) -> Self {
        Self { ring: Brief::new(Ring::new(capacity)), queue: None }
    }

    /// From now on receipts go to the files behind `queue` too.
    pub fn write_to(&mut self, queue: Queue) {
        self.queue = Some(queue);
    }

    /// Files the record of a decision, with its result where it is known already.
    pub fn file(&self, record: Record, result: Option<ResultRecord>) -> Filed {
        let copy = self.queue.as_ref().map(|_| (record.clone(), result.clone()));
        // Sent under the lock, so that the queue has the order of the numbers.
        let mut ring = self.ring.lock();
        let filed = ring.file(record, result);
        if let (Some(queue), Some((record, result))) = (&self.queue, copy) {
            queue.filed(filed.number, record, result);
        }
        drop(ring);
        filed
    }

    /// Joins what became of it.
    pub fn join(&self, number: ReceiptNumber, result: ResultRecord) {
        if let Some(queue) = &self.queue {
            queue.joined(number, result.clone());
        }
        self.ring.lock().join(number, result);
    }

    /// The newest `limit` that `wanted` accepts, newest first.
    pub fn latest(&self, limit: usize, wanted: impl Fn(&Entry) -> bool) -> Vec<Entry> {
        self.ring.lock().latest(limit, wanted)
    }

    /// Receipts ever filed.
    pub fn filed(&self) -> u64 {
        self.ring.lock().filed()
    }

    /// The way to the files, where there are any.
    pub const fn queue(&self) -> Option<&Queue> {
        self.queue.as_ref()
    }
}
