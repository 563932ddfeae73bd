//! Live bytes, at rest and under churn, and the longest single apply.

use std::time::{Duration, Instant};

use crate::allocator::live_bytes;
use crate::ours;
use crate::shapes::{BRANCH, Contents, EVENT, FORK, Held, WORKERS};
use crate::table::Table;
use crate::theirs::{self, Peer};

/// Generations of churn; each stores 6,400 blocks and removes as many.
const GENERATIONS: u64 = 400;
/// Times that our churn is repeated.
const PASSES: usize = 3;

/// Measures bytes per block and per extra owner, and churn.
pub(crate) fn measure(table: &mut Table) -> anyhow::Result<()> {
    let mut contents = Contents::default();
    at_rest(table, &contents.background(), &contents.shared(128))?;
    churn(table)
}

fn at_rest(table: &mut Table, background: &[Held], shared: &[Vec<Held>]) -> anyhow::Result<()> {
    // 64 workers × 16 chains × 968 blocks of their own, and 32 prompts of 32.
    let unique = (background.len() * 968 + 32 * 32) as f64;
    let pairs = (shared.len() * 7 * 1000) as f64;
    let (alone, together): (Vec<&Held>, Vec<&[Held]>) =
        shared.iter().map(|owners| (&owners[0], &owners[1..])).unzip();

    let index = ours::empty();
    let bytes = |apply: &mut dyn FnMut() -> anyhow::Result<()>| -> anyhow::Result<f64> {
        let before = live_bytes();
        apply()?;
        Ok((live_bytes() as f64) - before as f64)
    };
    let store = |held: &Held| ours::apply(&index, ours::stores(held, EVENT));
    let ours_block = bytes(&mut || Ok(background.iter().for_each(store)))? / unique;
    alone.iter().for_each(|held| store(held));
    let ours_owner = bytes(&mut || Ok(together.iter().flat_map(|all| all.iter()).for_each(store)))? / pairs;
    drop(index);

    let peer = Peer::new()?;
    let store = |held: &Held| peer.apply(theirs::stores(held, EVENT));
    let theirs_block = bytes(&mut || background.iter().try_for_each(store))? / unique;
    alone.iter().try_for_each(|held| store(held))?;
    let theirs_owner = bytes(&mut || together.iter().flat_map(|all| all.iter()).try_for_each(store))? / pairs;
    table.limit("memory per unique block", "bytes", ours_block, Some(theirs_block), 45.0);
    table.limit("memory per extra owner of a block", "bytes", ours_owner, Some(theirs_owner), 1.0);
    Ok(())
}

/// What comes and goes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    /// A chain of 100 blocks of a worker's own.
    Chains,
    /// A comb of 100 blocks of a worker's own, its teeth included.
    Combs,
}

/// Every worker keeps a shared prompt and replaces its own blocks behind it,
/// over and over.
struct Churn {
    form: Form,
    contents: Contents,
    prompts: Vec<Vec<u64>>,
}

impl Churn {
    fn new(form: Form) -> Self {
        let mut contents = Contents::default();
        let prompts = (0..8).map(|_| contents.fresh(100)).collect();
        Self { form, contents, prompts }
    }

    fn generation(&mut self) -> Vec<Held> {
        if self.form == Form::Combs {
            return (0..WORKERS).flat_map(|worker| self.one_comb(worker)).collect();
        }
        let one = |worker: u32| {
            let mut blocks = self.prompts[worker as usize % 8].clone();
            blocks.extend(self.contents.fresh(100));
            Held { worker, blocks, known: 100 }
        };
        (0..WORKERS).map(one).collect()
    }

    /// A prompt's own continuation of four stretches, each behind a tooth.
    fn one_comb(&mut self, worker: u32) -> Vec<Held> {
        let mut trunk = self.prompts[worker as usize % 8].clone();
        trunk.extend(self.contents.fresh(4 * FORK));
        let mut teeth = self.contents.comb(worker, &trunk);
        // The prompt is held already: what begins inside it begins behind it.
        teeth.retain(|tooth| tooth.blocks.len() > 100 + BRANCH);
        teeth.iter_mut().for_each(|tooth| tooth.known = tooth.known.max(100));
        teeth
    }

    /// The shared prompts, as every worker announces them first.
    fn prompts(&self) -> Vec<Held> {
        let one = |worker: u32| Held { worker, blocks: self.prompts[worker as usize % 8].clone(), known: 0 };
        (0..WORKERS).map(one).collect()
    }
}

fn churn(table: &mut Table) -> anyhow::Result<()> {
    churn_of(table, Form::Chains, "churn")?;
    churn_of(table, Form::Combs, "churn of combs")
}

fn churn_of(table: &mut Table, form: Form, name: &str) -> anyhow::Result<()> {
    // The same work takes the same time but for what else the machine does, so
    // the shortest of several passes is what an event costs.
    let mut costs: Vec<Duration> = Vec::new();
    let mut ratio = 0.0;
    for _ in 0..PASSES {
        let (pass, bytes) = churn_ours(form);
        costs =
            if costs.is_empty() { pass } else { costs.iter().zip(pass).map(|(a, b)| *a.min(&b)).collect() };
        ratio = bytes;
    }
    let worst = costs.into_iter().max().unwrap_or_default();
    let theirs = churn_theirs(form)?;
    eprintln!("theirs: {theirs:.1} times what it held at first, before its sweep every 5 minutes");
    table.limit(&format!("{name}: peak over steady"), "bytes over bytes", ratio, Some(theirs), 1.2);
    table.limit(&format!("{name}: longest apply"), "ms", worst.as_secs_f64() * 1000.0, None, 5.0);
    Ok(())
}

/// The time of every single apply, and the peak of live bytes over their
/// highest in the first generations.
fn churn_ours(form: Form) -> (Vec<Duration>, f64) {
    let mut churn = Churn::new(form);
    let (prompts, mut past) = (churn.prompts(), churn.generation());
    let before = live_bytes();
    let index = ours::empty();
    prompts.iter().chain(&past).for_each(|held| ours::apply(&index, ours::stores(held, EVENT)));
    let mut bytes = live_bytes() as isize - before as isize;
    let (mut steady, mut peak, mut costs) = (0, 0, Vec::new());
    for number in 0..GENERATIONS {
        let next = churn.generation();
        for (new, old) in next.iter().zip(&past) {
            for (slot, delta) in [ours::stores(new, EVENT), ours::removals(old, EVENT)].concat() {
                let before = live_bytes();
                let start = Instant::now();
                index.apply(slot, &delta);
                costs.push(start.elapsed());
                bytes += live_bytes() as isize - before as isize;
                costs.reserve(1);
            }
        }
        let highest = if number < 20 { &mut steady } else { &mut peak };
        *highest = bytes.max(*highest);
        past = next;
    }
    (costs, peak as f64 / steady as f64)
}

/// Live bytes after the churn over those before.
fn churn_theirs(form: Form) -> anyhow::Result<f64> {
    let mut churn = Churn::new(form);
    let (prompts, mut past) = (churn.prompts(), churn.generation());
    let before = live_bytes();
    let peer = Peer::new()?;
    prompts.iter().chain(&past).try_for_each(|held| peer.apply(theirs::stores(held, EVENT)))?;
    let first = live_bytes() as isize - before as isize;
    let mut bytes = first;
    for _ in 0..GENERATIONS {
        let next = churn.generation();
        for (new, old) in next.iter().zip(&past) {
            let before = live_bytes();
            peer.apply([theirs::stores(new, EVENT), theirs::removals(old, EVENT)].concat())?;
            bytes += live_bytes() as isize - before as isize;
        }
        past = next;
    }
    Ok(bytes as f64 / first as f64)
}
