//! `kv-router study`: the comparison behind the default weights, done again.
//!
//! Reads two traces, replays them under a grid of settings on all cores, prints
//! the table of docs/policies.md and fails if the defaults miss a bar.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;

use clap::{Args, ValueEnum};
use kvrouter_core::replay::report::{self, Objective};
use kvrouter_core::replay::study::{Figures, Grid, PAIRS, Pair, Source};
use kvrouter_core::replay::trace::{Trace, TraceError};
use kvrouter_core::replay::{mooncake, run, runs};
use kvrouter_core::units::BlockSize;

use crate::replay::{ReplayError, progress};

/// Flags of `study`.
#[derive(Clone, Debug, Args)]
pub struct StudyFlags {
    /// Mooncake's conversation trace; without it, its pairs are left out.
    #[arg(long, required_unless_present = "agentic")]
    pub conversation: Option<PathBuf>,
    /// Sessions of agents, in runs; without it, its pairs are left out.
    #[arg(long)]
    pub agentic: Option<PathBuf>,
    /// Settings to compare: minutes, an hour, or several hours.
    #[arg(long, value_enum, default_value_t = GridFlag::Coarse)]
    pub grid: GridFlag,
    /// Leaves out fleets of more workers.
    #[arg(long, default_value_t = 64)]
    pub max_workers: usize,
    /// Replays at the same time; all cores when absent.
    #[arg(long)]
    pub threads: Option<usize>,
}

/// A grid as flags spell it.
#[derive(Clone, Copy, Debug, ValueEnum)]
#[allow(missing_docs, reason = "the names are the grids'")]
pub enum GridFlag {
    Defaults,
    Coarse,
    Fine,
}

/// Tokens per block and milliseconds between sessions, as in the documentation.
const LAYOUT: runs::Layout =
    runs::Layout { size: BlockSize::new(512).expect("512 is not zero"), spacing_ms: 36_000 };

/// Compares; the table, and what bars are missed.
pub fn run(flags: &StudyFlags) -> Result<(String, Vec<String>), ReplayError> {
    let conversation = read(flags.conversation.as_deref(), mooncake::parse)?;
    let agentic = read(flags.agentic.as_deref(), |text| runs::parse(text, LAYOUT))?;
    let trace_of = |pair: &Pair| match pair.source {
        Source::Conversation => conversation.as_ref(),
        Source::Agentic => agentic.as_ref(),
    };
    let wanted = |pair: &&Pair| pair.workers <= flags.max_workers && trace_of(pair).is_some();
    let pairs: Vec<Pair> = PAIRS.iter().filter(wanted).copied().collect();
    let contenders = match flags.grid {
        GridFlag::Defaults => Grid::Defaults,
        GridFlag::Coarse => Grid::Coarse,
        GridFlag::Fine => Grid::Fine,
    }
    .contenders();
    let cells: Vec<(usize, usize)> =
        (0..contenders.len()).flat_map(|row| (0..pairs.len()).map(move |at| (row, at))).collect();
    let bar = progress(cells.len());
    let cell = |(row, at): (usize, usize)| {
        let (pair, contender) = (&pairs[at], &contenders[row]);
        let trace = trace_of(pair)?;
        let (plan, objective) = (pair.plan(), Objective::default());
        let done = run::run(trace, &plan, contender, |_| ());
        bar.inc(1);
        Some((row, at, report::summarise(trace, &plan, contender, objective, &done).goodput))
    };
    let mut goodput = vec![vec![0.0; pairs.len()]; contenders.len()];
    for (row, at, good) in share_out(&cells, flags.threads, cell).into_iter().flatten() {
        goodput[row][at] = good;
    }
    bar.finish_and_clear();
    let figures = Figures { contenders, pairs, goodput };
    Ok((figures.table(), figures.missed()))
}

fn read(
    path: Option<&Path>,
    parse: impl FnOnce(&str) -> Result<Trace, TraceError>,
) -> Result<Option<Trace>, ReplayError> {
    let Some(path) = path else { return Ok(None) };
    let failed = |source| ReplayError::Read { path: path.to_owned(), source };
    let text = std::fs::read_to_string(path).map_err(failed)?;
    let bad = |problem| ReplayError::Trace { path: path.to_owned(), problem: Box::new(problem) };
    parse(&text).map(Some).map_err(bad)
}

/// What `work` makes of each item, on so many threads, in any order.
fn share_out<T: Copy + Sync, R: Send>(
    items: &[T],
    threads: Option<usize>,
    work: impl Fn(T) -> R + Sync,
) -> Vec<R> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let next = AtomicUsize::new(0);
    let (results, all) = mpsc::channel();
    std::thread::scope(|scope| {
        for _ in 0..threads.unwrap_or(cores).max(1) {
            let (results, next, work) = (results.clone(), &next, &work);
            scope.spawn(move || {
                while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
                    // The receiver outlives the threads.
                    let _ = results.send(work(*item));
                }
            });
        }
        drop(results);
        all.iter().collect()
    })
}
