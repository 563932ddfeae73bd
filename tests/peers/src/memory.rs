//! Live bytes, at rest and under churn, and the longest single apply.

use std::time::{Duration, Instant};

use crate::allocator::live_bytes;
use crate::ours;
use crate::shapes::{Contents, EVENT, Held, WORKERS};
use crate::table::Table;
use crate::theirs::{self, Peer};

/// Generations of churn; each stores 6,400 blocks and removes as many.
const GENERATIONS: u64 = 2000;

/// Measures bytes per block and per extra owner, and churn.
pub(crate) fn measure(table: &mut Table) -> anyhow::Result<()> {
    let mut contents = Contents::default();
    at_rest(table, &contents.background(), &contents.shared(128))?;
    churn(table, &mut contents)
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

/// Every worker keeps a shared prompt and replaces its own 100 blocks behind
/// it, over and over.
fn churn(table: &mut Table, contents: &mut Contents) -> anyhow::Result<()> {
    let prompts: Vec<Vec<u64>> = (0..8).map(|_| contents.fresh(100)).collect();
    let mut generation = || -> Vec<Held> {
        let one = |worker: u32| {
            let mut blocks = prompts[worker as usize % 8].clone();
            blocks.extend(contents.fresh(100));
            Held { worker, blocks, known: 100 }
        };
        (0..WORKERS).map(one).collect()
    };
    let peer = Peer::new()?;
    let mut past = generation();
    past.iter_mut().for_each(|held| held.known = 0);
    let before = live_bytes();
    let index = ours::empty();
    past.iter().for_each(|held| ours::apply(&index, ours::stores(held, EVENT)));
    let mut ours_bytes = live_bytes() as isize - before as isize;
    past.iter().try_for_each(|held| peer.apply(theirs::stores(held, EVENT)))?;
    past.iter_mut().for_each(|held| held.known = 100);
    let (mut steady, mut peak, mut worst) = (0, 0, Duration::ZERO);
    let mut theirs_bytes = 0isize;
    for number in 0..GENERATIONS {
        let next = generation();
        for (new, old) in next.iter().zip(&past) {
            for event in [ours::stores(new, EVENT), ours::removals(old, EVENT)].concat() {
                let before = live_bytes();
                let start = Instant::now();
                index.apply(event.0, &event.1);
                worst = worst.max(start.elapsed());
                ours_bytes += live_bytes() as isize - before as isize;
            }
            if number < 200 {
                let before = live_bytes();
                peer.apply([theirs::stores(new, EVENT), theirs::removals(old, EVENT)].concat())?;
                theirs_bytes += live_bytes() as isize - before as isize;
            }
        }
        match number {
            0..20 => steady = steady.max(ours_bytes),
            _ => peak = peak.max(ours_bytes),
        }
        past = next;
    }
    let megabytes = theirs_bytes as f64 / 1e6;
    eprintln!("theirs holds {megabytes:.1} MB more after 200 generations of churn (swept every 5 minutes)");
    table.limit("churn: peak over steady", "bytes over bytes", peak as f64 / steady as f64, None, 1.2);
    table.limit("churn: longest apply", "ms", worst.as_secs_f64() * 1000.0, None, 5.0);
    Ok(())
}
