//! The lock around the index's state: readers first.
//!
//! A system lock would park whoever finds it taken, and waking up costs ten
//! times what any holder does under it. So both sides spin for a while, and
//! only park when the holder seems to have lost its core. Readers do not queue
//! behind a writer that waits; a writer lets readers that wait go first.

use std::hint::spin_loop;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Turns of waiting before a thread parks: some tens of microseconds, several
/// times the longest hold.
const SPINS: u32 = 2000;

/// A lock that is held for microseconds.
#[derive(Debug, Default)]
pub(super) struct Gate<T> {
    lock: RwLock<T>,
    /// Readers that found the lock taken.
    waiting: AtomicUsize,
}

impl<T> Gate<T> {
    /// Shared access. Waits for the writer that is inside, not for those outside.
    pub(super) fn read(&self) -> RwLockReadGuard<'_, T> {
        self.lock.try_read().unwrap_or_else(|| self.wait_to_read())
    }

    /// Exclusive access.
    pub(super) fn write(&self) -> RwLockWriteGuard<'_, T> {
        for _ in 0..SPINS {
            if self.waiting.load(Ordering::Relaxed) == 0
                && let Some(guard) = self.lock.try_write()
            {
                return guard;
            }
            spin_loop();
        }
        // So many readers that there always is one inside, or one that is not running.
        self.lock.write()
    }

    #[cold]
    fn wait_to_read(&self) -> RwLockReadGuard<'_, T> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let spun = (0..SPINS).find_map(|_| {
            spin_loop();
            self.lock.try_read()
        });
        let guard = spun.unwrap_or_else(|| self.lock.read());
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        guard
    }
}
