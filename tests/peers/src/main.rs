//! kvrouter's index beside `dynamo-kv-router`'s default one: the same work, in
//! one process, in alternating runs.
//!
//! `make peers` runs it. It prints one table of ratios (theirs over ours, so
//! more is better for us) with 95 % intervals, writes `out/peers/index.json`
//! and fails where the lower end of an interval misses a gated bar. Bars below
//! 1.5 are reported and not gated: a shared machine moves that much by itself.

#[cfg(not(feature = "decision"))]
mod allocator;
#[cfg(feature = "decision")]
mod decision;
#[cfg(not(feature = "decision"))]
mod events;
#[cfg(not(feature = "decision"))]
mod exact;
#[cfg(not(feature = "decision"))]
mod lookup;
#[cfg(not(feature = "decision"))]
mod memory;
mod ours;
#[path = "../../../router/core/benches/shapes/mod.rs"]
mod shapes;
mod table;
mod theirs;
#[cfg(not(feature = "decision"))]
mod wire;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, bail};

use crate::table::Table;

/// Pairs of runs behind each ratio.
const PAIRS: usize = 20;

// Its counters would make the threads of the decision wait for each other.
#[cfg(not(feature = "decision"))]
#[global_allocator]
static ALLOCATOR: allocator::Counting = allocator::Counting;

fn main() -> anyhow::Result<ExitCode> {
    let (pairs, out) = arguments()?;
    let mut table = Table::beside("dynamo-kv-router 1.6.1");
    let name = measure(&mut table, pairs)?;
    print!("{}", table.text());
    std::fs::create_dir_all(&out).with_context(|| format!("failed to create {}", out.display()))?;
    let file = out.join(name);
    std::fs::write(&file, table.json(pairs))
        .with_context(|| format!("failed to write {}", file.display()))?;
    Ok(if table.passes() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Measures the index; returns the name of the file of results.
#[cfg(not(feature = "decision"))]
fn measure(table: &mut Table, pairs: usize) -> anyhow::Result<&'static str> {
    memory::measure(table)?;
    events::measure(table, pairs)?;
    lookup::measure(table, pairs)?;
    Ok("index.json")
}

/// Measures the whole decision; returns the name of the file of results.
#[cfg(feature = "decision")]
fn measure(table: &mut Table, pairs: usize) -> anyhow::Result<&'static str> {
    decision::measure(table, pairs)?;
    Ok("decision.json")
}

/// `[--pairs N] [--out FOLDER]`.
fn arguments() -> anyhow::Result<(usize, PathBuf)> {
    let (mut pairs, mut out) = (PAIRS, PathBuf::from("out/peers"));
    let mut arguments = std::env::args().skip(1);
    while let Some(name) = arguments.next() {
        let value = arguments.next().with_context(|| format!("{name} needs a value"))?;
        match name.as_str() {
            "--pairs" => pairs = value.parse().with_context(|| format!("--pairs {value} is not a number"))?,
            "--out" => out = value.into(),
            _ => bail!("unknown argument {name}; there are --pairs N and --out FOLDER"),
        }
    }
    if pairs < 2 {
        bail!("an interval needs two pairs at least");
    }
    Ok((pairs, out))
}
