//! One writer that applies stores and removals at a steady rate while decisions
//! are made.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use dynamo_kv_router::protocols::RouterEvent;

use crate::ours::Event;
use crate::shapes::{EVENT, Held};

/// Blocks that are stored or removed in a second.
const RATE: f64 = 300_000.0;
/// Blocks in each worker's chain that comes and goes.
const CHAIN: u64 = 256;

/// Endless changes for both sides, and how fast they were applied.
pub(super) struct Writers {
    ours: Vec<Event>,
    theirs: Vec<RouterEvent>,
    rates: [Mutex<Vec<f64>>; 2],
}

/// A side that takes changes.
pub(super) trait Takes: Sync {
    /// Takes change number `at` of a cycle.
    fn take(&self, writers: &Writers, at: usize);
    /// Waits until all are applied.
    fn drain(&self);
    /// Which of the two it is.
    const SIDE: usize;
}

impl Writers {
    pub(super) fn new(workers: u32) -> Self {
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for worker in 0..workers {
            let first = (1 << 40) + u64::from(worker) * CHAIN;
            let held = Held { worker, blocks: (first..first + CHAIN).collect(), known: 0 };
            ours.extend([crate::ours::stores(&held, EVENT), crate::ours::removals(&held, EVENT)].concat());
            theirs.extend(
                [crate::theirs::stores(&held, EVENT), crate::theirs::removals(&held, EVENT)].concat(),
            );
        }
        Self { ours, theirs, rates: Default::default() }
    }

    pub(super) fn ours(&self, at: usize) -> Event {
        self.ours[at % self.ours.len()].clone()
    }

    pub(super) fn theirs(&self, at: usize) -> RouterEvent {
        self.theirs[at % self.theirs.len()].clone()
    }

    /// Runs `work` while a thread applies changes to `side`.
    pub(super) fn beside<S: Takes, R>(&self, side: &S, work: impl FnOnce() -> R) -> R {
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                let start = Instant::now();
                let mut applied = 0;
                while !done.load(Ordering::Relaxed) {
                    let due = (start.elapsed().as_secs_f64() * RATE / EVENT as f64) as usize;
                    (applied..due).for_each(|at| side.take(self, at));
                    applied = applied.max(due);
                    std::thread::sleep(Duration::from_micros(500));
                }
                side.drain();
                let rate = (applied * EVENT) as f64 / start.elapsed().as_secs_f64();
                self.rates[S::SIDE].lock().expect("not poisoned").push(rate);
            });
            let result = work();
            done.store(true, Ordering::Relaxed);
            writer.join().expect("a writer does not panic");
            result
        })
    }

    /// How fast changes were applied.
    pub(super) fn report(&self) -> String {
        let median = |side: usize| {
            let mut rates = self.rates[side].lock().expect("not poisoned").clone();
            crate::shapes::quantile(&mut rates, 0.5) / 1000.0
        };
        format!("writer: {:.0}k blocks/s into ours, {:.0}k into theirs", median(0), median(1))
    }
}
