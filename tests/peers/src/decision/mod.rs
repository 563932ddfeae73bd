//! The whole decision: from a prompt's token ids to a booked target.
//!
//! Ours hashes, looks up, gathers, selects, books and writes the receipt. Theirs
//! is `SelectionCore::select_and_reserve`, the entry that its service calls for
//! every request, with the policy that it calls its reference. Where hashes are
//! known beforehand, both get them ready-made.
//!
//! Sessions share a system prompt that every worker holds; a session's own
//! prefix is held by four of them, and its last 16 blocks by nobody.

mod ours;
mod theirs;
mod writer;

use std::collections::VecDeque;
use std::hint::black_box;
use std::time::Instant;

use self::ours::Ours;
use self::theirs::Theirs;
use self::writer::Writers;
use crate::shapes::{Contents, Held, TAIL, quantile};
use crate::table::Table;

const FLEETS: [u32; 3] = [8, 64, 512];
/// Blocks of a prompt: 1.6k, 16k and 128k tokens.
const PROMPTS: [usize; 3] = [100, 1000, 8000];
/// Blocks of the system prompt.
const SYSTEM: usize = 16;
/// Workers that hold a session's prefix.
const OWNERS: u32 = 4;
/// Most blocks that are in flight while something is measured.
const IN_FLIGHT_BLOCKS: usize = 400_000;
/// Callers at once where throughput is measured.
const CALLERS: usize = 64;
/// Decisions of each caller in one run.
const DECISIONS: usize = 24;

/// One fleet and one length of prompts, on both sides.
struct World {
    workers: u32,
    blocks: usize,
    ours: Ours,
    theirs: Theirs,
}

/// Measures latency alone, then throughput, without and with a writer.
pub(crate) fn measure(table: &mut Table, pairs: usize) -> anyhow::Result<()> {
    for workers in FLEETS {
        for (blocks, bar) in PROMPTS.into_iter().zip([5.0, 4.0, 2.0]) {
            let mut world = World::new(workers, blocks)?;
            let name = |what: &str| format!("decision, {workers} workers, {}, {what}", tokens(blocks));
            let (mut hashing, mut known) = (Vec::new(), Vec::new());
            for pair in 0..pairs {
                hashing.push(world.latency(pair % 2 == 0, false));
                known.push(world.latency(pair % 2 == 0, true));
            }
            table.ratio(name("token ids"), "us p50", &hashing, bar);
            table.ratio(name("known hashes"), "us p50", &known, 5.0);
            if blocks > 1000 {
                continue;
            }
            let (mut alone, mut written) = (Vec::new(), Vec::new());
            let writers = Writers::new(workers);
            for pair in 0..pairs {
                alone.push(world.throughput(pair % 2 == 0, None));
                written.push(world.throughput(pair % 2 == 0, Some(&writers)));
            }
            eprintln!("{}", name(&writers.report()));
            table.ratio(name("64 callers"), "us each", &alone, 5.0);
            table.ratio(name("64 callers, writer"), "us each", &written, 5.0);
        }
    }
    Ok(())
}

fn tokens(blocks: usize) -> String {
    format!("{:.1}k", blocks as f64 * f64::from(crate::ours::BLOCK) / 1000.0)
}

impl World {
    fn new(workers: u32, blocks: usize) -> anyhow::Result<Self> {
        let mut contents = Contents::default();
        let system = contents.fresh(SYSTEM);
        let mut held: Vec<Held> =
            (0..workers).map(|worker| Held { worker, blocks: system.clone(), known: 0 }).collect();
        let mut prompts = Vec::new();
        for session in 0..if blocks > 1000 { 8 } else { 64 } {
            let mut prompt = system.clone();
            prompt.extend(contents.fresh(blocks - SYSTEM - TAIL));
            let owner = |at: u32| (session * 7 + at * (workers / OWNERS)) % workers;
            held.extend((0..OWNERS).map(|at| Held {
                worker: owner(at),
                blocks: prompt.clone(),
                known: SYSTEM,
            }));
            prompt.extend(contents.fresh(TAIL));
            prompts.push(crate::ours::tokens(&prompt));
        }
        let ours = Ours::new(workers, &held, &prompts);
        let theirs = Theirs::new(workers, &held, &prompts)?;
        Ok(Self { workers, blocks, ours, theirs })
    }

    /// Requests that are in flight on both sides.
    fn in_flight(&self) -> usize {
        (2 * self.workers as usize).min(IN_FLIGHT_BLOCKS / self.blocks)
    }

    /// Median of one decision in microseconds, ours and theirs. Releases are
    /// not counted.
    fn latency(&mut self, ours_first: bool, known: bool) -> (f64, f64) {
        let (count, in_flight) = (if self.blocks > 1000 { 40 } else { 200 }, self.in_flight());
        let ours = |ours: &Ours| {
            let mut leases = VecDeque::new();
            let mut samples = Vec::new();
            for at in 0..count + in_flight {
                let start = Instant::now();
                let lease = black_box(ours.decide(black_box(at), known));
                let elapsed = start.elapsed();
                leases.push_back(lease);
                if leases.len() > in_flight {
                    samples.push(elapsed.as_nanos() as f64 / 1000.0);
                    leases.pop_front();
                }
            }
            quantile(&mut samples, 0.5)
        };
        pair(ours_first, || ours(&self.ours), || self.theirs.latency(count, in_flight, known))
    }

    /// Microseconds per decision, releases included, ours and theirs.
    fn throughput(&self, ours_first: bool, writers: Option<&Writers>) -> (f64, f64) {
        let each = |elapsed: f64| elapsed * 1e6 / (CALLERS * DECISIONS) as f64;
        let ours = || self.ours.throughput(CALLERS, DECISIONS);
        let theirs = || self.theirs.throughput(CALLERS, DECISIONS);
        let Some(writers) = writers else {
            return pair(ours_first, || each(ours()), || each(theirs()));
        };
        pair(
            ours_first,
            || each(writers.beside(&self.ours, ours)),
            || each(writers.beside(&self.theirs, theirs)),
        )
    }
}

fn pair(ours_first: bool, ours: impl FnOnce() -> f64, theirs: impl FnOnce() -> f64) -> (f64, f64) {
    if ours_first {
        let first = ours();
        return (first, theirs());
    }
    let first = theirs();
    (ours(), first)
}
