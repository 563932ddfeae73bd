//! The only file that asks for the time or a random seed.
//!
//! Everything else gets `now` and seeds as arguments or asks this clock.

#![allow(clippy::disallowed_methods, reason = "this is the file that asks")]

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use kvrouter_core::units::Tick;

/// The process's clock: monotonic ticks from its making, and wall time.
#[derive(Debug)]
pub struct Clock {
    started: Instant,
    seed: RandomState,
    issued: AtomicU64,
}

impl Clock {
    /// A clock whose tick 0 is now.
    pub fn start() -> Self {
        Self { started: Instant::now(), seed: RandomState::new(), issued: AtomicU64::new(0) }
    }

    /// Milliseconds since the start; never goes back.
    pub fn now(&self) -> Tick {
        Tick(self.started.elapsed().as_millis() as u64)
    }

    /// Microseconds since the start, for durations below a tick.
    pub fn micros(&self) -> u64 {
        self.started.elapsed().as_micros() as u64
    }

    /// Milliseconds since 1970. May jump; 0 before 1970.
    pub fn unix_ms(&self) -> u64 {
        SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_millis() as u64)
    }

    /// A number that differs on every call and in every process.
    pub fn unique(&self) -> u64 {
        self.seed.hash_one((self.issued.fetch_add(1, Ordering::Relaxed), self.unix_ms()))
    }
}
