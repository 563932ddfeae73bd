//! What the index benchmarks store and ask, free of any index.
//!
//! Blocks are content numbers; each side turns them into its own hashes.
//! `tests/peers` includes this file, so that every index gets the same work.

/// Workers that hold anything.
pub(crate) const WORKERS: u32 = 64;
/// Blocks per store event, as a prefill chunk of 512 tokens gives.
pub(crate) const EVENT: usize = 32;
/// Blocks at a query's end that nobody holds.
pub(crate) const TAIL: usize = 16;
/// Every so many blocks a branch parts from a branched family's chain.
pub(crate) const FORK: usize = 64;
/// Blocks in such a branch.
pub(crate) const BRANCH: usize = 8;

/// Who shares how much of a family's chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    /// As tables name it.
    pub(crate) name: &'static str,
    owners: u32,
    staggered: bool,
    branched: bool,
    /// Every stretch of the trunk came after a branch had grown from its start.
    comb: bool,
}

/// All shapes.
pub(crate) const SHAPES: [Shape; 6] = [
    Shape { name: "few4", owners: 4, staggered: false, branched: false, comb: false },
    Shape { name: "all64", owners: 64, staggered: false, branched: false, comb: false },
    Shape { name: "stag64", owners: 64, staggered: true, branched: false, comb: false },
    Shape { name: "brnch64", owners: 64, staggered: false, branched: true, comb: false },
    Shape { name: "brstg64", owners: 64, staggered: true, branched: true, comb: false },
    Shape { name: "comb64", owners: 64, staggered: false, branched: false, comb: true },
];

/// Depths of queries, in blocks.
pub(crate) const DEPTHS: [usize; 3] = [100, 1000, 8000];

/// One worker holds one chain from its root on.
#[derive(Clone, Debug)]
pub(crate) struct Held {
    /// Who.
    pub(crate) worker: u32,
    /// Content of all its blocks.
    pub(crate) blocks: Vec<u64>,
    /// Leading blocks that it does not need to announce: it did so before.
    pub(crate) known: usize,
}

/// A source of content that never repeats.
#[derive(Debug, Default)]
pub(crate) struct Contents(u64);

impl Contents {
    /// `count` blocks that nobody has seen.
    pub(crate) fn fresh(&mut self, count: usize) -> Vec<u64> {
        let first = self.0;
        self.0 += count as u64;
        (first..self.0).collect()
    }

    /// What fills the index while something else is measured: 64 workers with
    /// 16 chains of 1,000 blocks, the first 32 of which are one of 32 shared
    /// system prompts.
    pub(crate) fn background(&mut self) -> Vec<Held> {
        let prompts: Vec<Vec<u64>> = (0..32).map(|_| self.fresh(32)).collect();
        let mut all = Vec::new();
        for worker in 0..WORKERS {
            for chain in 0..16 {
                let mut blocks = prompts[(worker as usize * 16 + chain) % 32].clone();
                blocks.extend(self.fresh(968));
                all.push(Held { worker, blocks, known: 0 });
            }
        }
        all
    }

    /// Chains of 1,000 blocks, each to be held by 8 workers.
    pub(crate) fn shared(&mut self, chains: usize) -> Vec<Vec<Held>> {
        let one = |at: usize, blocks: &Vec<u64>| {
            let held = |owner: u32| Held {
                worker: (at as u32 + owner * 8) % WORKERS,
                blocks: blocks.clone(),
                known: 0,
            };
            (0..8).map(held).collect()
        };
        (0..chains).map(|at| one(at, &self.fresh(1000))).collect()
    }

    /// How `worker` comes to hold `trunk` stretch by stretch, each after a branch
    /// that grew where it begins: as few neighbours as possible are stored together.
    pub(crate) fn comb(&mut self, worker: u32, trunk: &[u64]) -> Vec<Held> {
        let tooth = |end: usize| {
            let mut blocks = trunk[..end].to_vec();
            blocks.extend(self.fresh(BRANCH));
            Held { worker, blocks, known: end.saturating_sub(FORK) }
        };
        (FORK..trunk.len()).step_by(FORK).map(tooth).collect()
    }

    /// One family of `shape`, the longest holder first, and the query for it.
    pub(crate) fn family(&mut self, shape: Shape, depth: usize) -> (Vec<Held>, Vec<u64>) {
        let trunk = self.fresh(depth);
        let length =
            |at: u32| if shape.staggered { depth * at as usize / shape.owners as usize } else { depth };
        let owner = |at: u32| Held { worker: at - 1, blocks: trunk[..length(at)].to_vec(), known: 0 };
        let mut holders: Vec<Held> = (1..=shape.owners).rev().map(owner).collect();
        if shape.branched {
            for fork in (FORK..depth).step_by(FORK) {
                // Somebody who holds the trunk up to there.
                let worker = WORKERS
                    - 1
                    - (fork / FORK) as u32 % (1 + WORKERS * (depth - fork) as u32 / depth as u32 / 2);
                let mut blocks = trunk[..fork].to_vec();
                blocks.extend(self.fresh(BRANCH));
                holders.push(Held { worker, blocks, known: fork });
            }
        }
        if shape.comb {
            holders.splice(..0, self.comb(0, &trunk));
        }
        let mut query = trunk;
        query.extend(self.fresh(TAIL));
        (holders, query)
    }
}

/// Families per depth: enough to leave the first caches, few enough to build.
pub(crate) const fn families(depth: usize) -> usize {
    match depth {
        0..=100 => 32,
        101..=1000 => 8,
        _ => 4,
    }
}

/// The `q` quantile (0 to 1) of `samples`, which it sorts.
pub(crate) fn quantile(samples: &mut [f64], q: f64) -> f64 {
    samples.sort_unstable_by(f64::total_cmp);
    samples[((samples.len() - 1) as f64 * q).round() as usize]
}
