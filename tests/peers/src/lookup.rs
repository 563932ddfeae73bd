//! Lookup latency: from ready hashes, and from token ids.

use std::hint::black_box;
use std::time::Instant;

use kvrouter_core::blocks::BlockHash;
use kvrouter_core::index::Index;

use dynamo_kv_router::protocols::LocalBlockHash;

use crate::ours::{self, SPACE};
use crate::shapes::{Contents, DEPTHS, EVENT, Held, SHAPES, families, quantile};
use crate::table::Table;
use crate::theirs::{self, Peer};

/// One prompt, as each side wants it.
struct Query {
    tokens: Vec<u32>,
    ours: Vec<BlockHash>,
    theirs: Vec<LocalBlockHash>,
}

/// One row of each accounting.
struct Cell {
    name: String,
    depth: usize,
    branched: bool,
    /// A shape without a bar: it is reported.
    reported: bool,
    queries: Vec<Query>,
    hashed: Vec<(f64, f64)>,
    tokens: Vec<(f64, f64)>,
}

/// Measures every shape at every depth beside a million background blocks.
pub(crate) fn measure(table: &mut Table, pairs: usize) -> anyhow::Result<()> {
    let mut contents = Contents::default();
    let (index, peer) = (ours::empty(), Peer::new()?);
    hold(&index, &peer, &contents.background())?;
    let mut cells = Vec::new();
    for depth in DEPTHS {
        for shape in SHAPES {
            let mut queries = Vec::new();
            for _ in 0..families(depth) {
                let (holders, query) = contents.family(shape, depth);
                hold(&index, &peer, &holders)?;
                let tokens = ours::tokens(&query);
                queries.push(Query { ours: ours::chain(&tokens), theirs: theirs::local(&tokens), tokens });
            }
            queries.iter().for_each(|query| same_answer(&index, &peer, query));
            let name = format!("lookup {} {depth}", shape.name);
            let branched = shape.name.starts_with("br");
            let (reported, hashed, tokens) = (shape.name.starts_with("comb"), Vec::new(), Vec::new());
            cells.push(Cell { name, depth, branched, reported, queries, hashed, tokens });
        }
    }
    for pair in 0..pairs {
        for cell in &mut cells {
            run(&index, &peer, cell, pair % 2 == 0);
        }
    }
    for cell in &cells {
        let bar = [1.0, 3.0, 10.0][DEPTHS.iter().position(|depth| *depth == cell.depth).unwrap_or(0)];
        let bar = if cell.reported { 1.0 } else { bar };
        table.ratio(format!("{}, ready hashes", cell.name), "ns p50", &cell.hashed, bar);
    }
    for cell in &cells {
        let bar = if cell.branched {
            2.0
        } else if cell.reported {
            1.0
        } else {
            1.3
        };
        table.ratio(format!("{}, token ids", cell.name), "ns p50", &cell.tokens, bar);
    }
    Ok(())
}

fn hold(index: &Index, peer: &Peer, all: &[Held]) -> anyhow::Result<()> {
    for held in all {
        ours::apply(index, ours::stores(held, EVENT));
        peer.apply(theirs::stores(held, EVENT))?;
    }
    Ok(())
}

/// No holes and no late parents here, so both must say the same.
fn same_answer(index: &Index, peer: &Peer, query: &Query) {
    let ours = index.hits(SPACE, &query.ours);
    let theirs = peer.hits(&query.theirs).scores;
    let mut theirs: Vec<(u64, u64)> =
        theirs.iter().map(|(worker, blocks)| (worker.worker_id, u64::from(*blocks))).collect();
    theirs.sort_unstable();
    let ours: Vec<(u64, u64)> = ours.iter().map(|hit| (hit.slot.0.into(), hit.tiers().total())).collect();
    assert_eq!(ours, theirs);
}

/// One pair of runs of both accountings.
fn run(index: &Index, peer: &Peer, cell: &mut Cell, ours_first: bool) {
    let queries = &cell.queries;
    let count = 200;
    let pair = |ours: &dyn Fn() -> f64, theirs: &dyn Fn() -> f64| {
        if ours_first {
            let first = ours();
            (first, theirs())
        } else {
            let first = theirs();
            (ours(), first)
        }
    };
    cell.hashed.push(pair(
        &|| p50(queries, count, |query| drop(black_box(index.hits(SPACE, black_box(&query.ours))))),
        &|| p50(queries, count, |query| drop(black_box(peer.hits(black_box(&query.theirs))))),
    ));
    let count = if cell.depth > 1000 { 32 } else { 100 };
    cell.tokens.push(pair(
        &|| {
            p50(queries, count, |query| {
                let chain = ours::chain(black_box(&query.tokens));
                drop(black_box(index.hits(SPACE, &chain)));
            })
        },
        &|| {
            p50(queries, count, |query| {
                let local = theirs::local(black_box(&query.tokens));
                black_box(theirs::chain(&local));
                drop(black_box(peer.hits(&local)));
            })
        },
    ));
}

fn p50(queries: &[Query], count: usize, lookup: impl Fn(&Query)) -> f64 {
    let time = |query: &Query| {
        let start = Instant::now();
        lookup(query);
        start.elapsed().as_nanos() as f64
    };
    let mut samples: Vec<f64> = queries.iter().cycle().take(count).map(time).collect();
    quantile(&mut samples, 0.5)
}
