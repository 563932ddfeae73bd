//! Quick local numbers of the index: `cargo bench -p kvrouter-core`.
//!
//! Medians of one process on whatever else runs here; comparisons with peers,
//! with intervals, are `make peers`.
#![allow(clippy::disallowed_methods, reason = "a benchmark measures time")]

mod shapes;

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvrouter_core::blocks::{BlockHash, NamespaceId};
use kvrouter_core::events::Delta;
use kvrouter_core::ids::Slot;
use kvrouter_core::index::Index;
use kvrouter_core::units::Tier;
use shapes::{Contents, DEPTHS, EVENT, Held, SHAPES, WORKERS, families, quantile};

const SPACE: NamespaceId = NamespaceId(1);

fn main() {
    let mut contents = Contents::default();
    println!("apply, ns a block");
    apply(&mut contents);
    println!("lookup, ns: p50 p99");
    let index = filled(&contents.background());
    for depth in DEPTHS {
        for shape in SHAPES {
            let queries: Vec<Vec<BlockHash>> = (0..families(depth))
                .map(|_| {
                    let (holders, query) = contents.family(shape, depth);
                    holders.iter().for_each(|held| store(&index, held));
                    chain(&query)
                })
                .collect();
            let mut samples = lookups(&index, &queries, 4000);
            let (p50, p99) = (quantile(&mut samples, 0.5), quantile(&mut samples, 0.99));
            println!("  {:8} {depth:5} {p50:8.0} {p99:8.0}", shape.name);
        }
    }
    println!("lookup of all64 at 1000 while one writer churns, ns: p50 p99 p99.9");
    let (holders, query) = contents.family(SHAPES[1], 1000);
    holders.iter().for_each(|held| store(&index, held));
    under_writes(&index, &chain(&query), &mut contents);
}

/// A stand-in for the engine's chain: like it, a hash names all blocks before.
fn chain(blocks: &[u64]) -> Vec<BlockHash> {
    let mut last = 0u64;
    let next = |content: &u64| {
        last = (last.rotate_left(23) ^ content).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        last ^= last >> 29;
        BlockHash(last)
    };
    blocks.iter().map(next).collect()
}

fn stores(held: &Held, event: usize) -> Vec<(Slot, Delta)> {
    let hashes = chain(&held.blocks);
    let mut parent = held.known.checked_sub(1).map_or(BlockHash(0), |last| hashes[last]);
    let one = |part: &[BlockHash]| {
        let delta = Delta::Stored { namespace: SPACE, parent, hashes: part.to_vec(), tier: Tier::Device };
        parent = part[part.len() - 1];
        (Slot(held.worker), delta)
    };
    hashes[held.known..].chunks(event).map(one).collect()
}

/// Tail first, as engines evict.
fn removals(held: &Held, event: usize) -> Vec<(Slot, Delta)> {
    let mut hashes = chain(&held.blocks);
    hashes.reverse();
    let one = |part: &[BlockHash]| {
        let hashes = part.to_vec();
        (Slot(held.worker), Delta::Removed { namespace: SPACE, hashes, tier: Tier::Device })
    };
    hashes.chunks(event).map(one).collect()
}

fn store(index: &Index, held: &Held) {
    stores(held, EVENT).iter().for_each(|(slot, delta)| index.apply(*slot, delta));
}

fn empty() -> Index {
    let index = Index::default();
    (0..WORKERS).for_each(|worker| assert_eq!(index.add_target(), Slot(worker)));
    index
}

fn filled(background: &[Held]) -> Index {
    let index = empty();
    background.iter().for_each(|held| store(&index, held));
    index
}

fn timed(index: &Index, name: &str, events: &[(Slot, Delta)]) {
    let blocks: usize = events
        .iter()
        .map(|(_, delta)| match delta {
            Delta::Stored { hashes, .. } | Delta::Removed { hashes, .. } => hashes.len(),
            Delta::Cleared => 0,
        })
        .sum();
    let mut worst = Duration::ZERO;
    let start = Instant::now();
    for (slot, delta) in events {
        let begin = Instant::now();
        index.apply(*slot, delta);
        worst = worst.max(begin.elapsed());
    }
    let each = start.elapsed().as_nanos() as f64 / blocks as f64;
    println!("  {name:24} {each:7.1}   worst call {:.0} µs", worst.as_nanos() as f64 / 1000.0);
}

fn apply(contents: &mut Contents) {
    // Interleaved as workers send: one event of each chain in turn.
    let interleave = |mut chains: Vec<std::vec::IntoIter<(Slot, Delta)>>| {
        let mut all = Vec::new();
        while !chains.is_empty() {
            chains.retain_mut(|chain| chain.next().map(|event| all.push(event)).is_some());
        }
        all
    };
    let all = |held: &[Held], make: fn(&Held, usize) -> Vec<(Slot, Delta)>, event: usize| {
        interleave(held.iter().map(|held| make(held, event).into_iter()).collect())
    };
    let background = contents.background();
    let index = empty();
    timed(&index, "new, 32 a store", &all(&background, stores, EVENT));
    timed(&index, "removal, 32 each", &all(&background, removals, EVENT));
    let index = empty();
    timed(&index, "new, one a store", &all(&background, stores, 1));
    timed(&index, "removal, one each", &all(&background, removals, 1));
    let mut first = Vec::new();
    let mut others = Vec::new();
    for mut owners in contents.shared(128) {
        first.push(owners.remove(0));
        others.extend(owners);
    }
    let index = filled(&background);
    timed(&index, "new, into a full index", &all(&first, stores, EVENT));
    timed(&index, "shared, 32 a store", &all(&others, stores, EVENT));
    timed(&index, "shared removal, 32 each", &all(&others, removals, EVENT));
    let snapshot: Vec<Delta> = contents
        .fresh(1 << 20)
        .chunks(1000)
        .flat_map(|blocks| stores(&Held { worker: 0, blocks: blocks.to_vec(), known: 0 }, 1000))
        .map(|(_, delta)| delta)
        .collect();
    let start = Instant::now();
    index.replace(Slot(0), &snapshot);
    println!("  {:24} {:7.1}", "replace by 1 Mi", start.elapsed().as_nanos() as f64 / (1 << 20) as f64);
}

fn lookups(index: &Index, queries: &[Vec<BlockHash>], count: usize) -> Vec<f64> {
    let mut samples = Vec::with_capacity(count);
    for query in queries.iter().cycle().take(count) {
        let start = Instant::now();
        black_box(index.hits(SPACE, black_box(query)));
        samples.push(start.elapsed().as_nanos() as f64);
    }
    samples
}

/// The writer stores and removes prompts, 32 blocks at a time, as fast as it
/// can and then at 300,000 blocks a second.
fn under_writes(index: &Index, query: &[BlockHash], contents: &mut Contents) {
    let background: Vec<Held> =
        (0..WORKERS).map(|worker| Held { worker, blocks: contents.fresh(320), known: 0 }).collect();
    let events: Vec<_> =
        background.iter().flat_map(|held| [stores(held, EVENT), removals(held, EVENT)].concat()).collect();
    for (name, pause) in [("flat out", Duration::ZERO), ("300,000 blocks/s", Duration::from_nanos(106_667))] {
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                let (start, mut sent) = (Instant::now(), 0u32);
                for (slot, delta) in events.iter().cycle() {
                    if done.load(Ordering::Relaxed) {
                        break;
                    }
                    while start.elapsed() < pause * sent {
                        std::hint::spin_loop();
                    }
                    index.apply(*slot, delta);
                    sent += 1;
                }
                f64::from(sent) * EVENT as f64 / start.elapsed().as_secs_f64()
            });
            let mut samples = lookups(index, std::slice::from_ref(&query.to_vec()), 300_000);
            done.store(true, Ordering::Relaxed);
            let rate = writer.join().expect("the writer does not fail");
            let at: Vec<f64> = [0.5, 0.99, 0.999].iter().map(|q| quantile(&mut samples, *q)).collect();
            println!(
                "  {name:18} {:8.0} {:8.0} {:8.0}   {:.1} M blocks/s written",
                at[0],
                at[1],
                at[2],
                rate / 1e6
            );
        });
    }
}
