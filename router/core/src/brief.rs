//! A lock that is held for less than a microsecond.
//!
//! A system lock soon parks whoever finds it taken, and waking up costs ten
//! times what the holder does under it. So whoever waits spins for a while first,
//! and parks only when the holder seems to have lost its core.

use std::hint::spin_loop;

use parking_lot::{Mutex, MutexGuard};

/// Turns of waiting before a thread parks: some tens of microseconds.
const SPINS: u32 = 2000;

/// A mutex for critical sections of a microsecond or less.
#[derive(Debug, Default)]
pub struct Brief<T>(Mutex<T>);

impl<T> Brief<T> {
    /// A lock around `inner`.
    pub const fn new(inner: T) -> Self {
        Self(Mutex::new(inner))
    }

    /// Exclusive access.
    #[inline]
    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.0.try_lock().unwrap_or_else(|| self.wait())
    }

    /// Exclusive access, if nobody has it.
    #[inline]
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        self.0.try_lock()
    }

    #[cold]
    fn wait(&self) -> MutexGuard<'_, T> {
        for _ in 0..SPINS {
            // Looking does not take the line away from the holder.
            if !self.0.is_locked()
                && let Some(guard) = self.0.try_lock()
            {
                return guard;
            }
            spin_loop();
        }
        self.0.lock()
    }
}
