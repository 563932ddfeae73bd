//! Timed traces: what arrived when, as prompts' block hashes and token counts.
//!
//! Requests stand in one order whatever the order of the file: by time, then by
//! content. Blocks have a second, dense name, so that a simulated cache is an
//! array and not a map.

use std::sync::Arc;

use rustc_hash::FxHashMap;
use xxhash_rust::xxh3::Xxh3;

use crate::blocks::BlockHash;
use crate::units::{BlockSize, Tokens};

pub use crate::json::fields::{Problem, TraceError};

/// Most requests in one trace: ten days of a request a second.
pub const MAX_REQUESTS: usize = 1 << 20;
/// Most tokens of one prompt or answer; ten times the longest context served.
pub const MAX_TOKENS: u64 = 10_000_000;

/// One arrival.
#[derive(Clone, Debug)]
pub struct TimedRequest {
    /// Its name: unique in the trace and the same for any order of its lines.
    pub id: Arc<str>,
    /// Nanoseconds from the start of the trace to the arrival, or to the start
    /// of its session: what a higher rate shortens.
    pub at: u64,
    /// Nanoseconds from its session's start: what tools and people take, at any
    /// rate.
    pub pace: u64,
    /// Tokens of the prompt.
    pub prompt: Tokens,
    /// Tokens that were generated, at least 1.
    pub output: u64,
    /// Hashes of the prompt's full blocks.
    pub blocks: Box<[BlockHash]>,
    /// The same blocks, numbered from 0 within the trace.
    pub dense: Box<[u32]>,
}

/// All arrivals, in the order of time.
#[derive(Clone, Debug)]
pub struct Trace {
    /// Which format it was read from.
    pub format: &'static str,
    /// Tokens per block.
    pub size: BlockSize,
    /// The arrivals.
    pub requests: Vec<TimedRequest>,
    /// Distinct full blocks.
    pub unique_blocks: usize,
}

impl Trace {
    /// Sorts and numbers what a parser found. Requests with an empty `id` are
    /// named by their place.
    pub(super) fn new(format: &'static str, size: BlockSize, mut requests: Vec<TimedRequest>) -> Self {
        requests.sort_by(|a, b| {
            // By hash before by length: shortest first would be a favour.
            let key = |r: &TimedRequest| (r.prompt, r.output);
            let earlier = (a.at + a.pace, &a.id, &a.blocks).cmp(&(b.at + b.pace, &b.id, &b.blocks));
            earlier.then_with(|| key(a).cmp(&key(b)))
        });
        let mut numbers: FxHashMap<BlockHash, u32> = FxHashMap::default();
        for (place, request) in requests.iter_mut().enumerate() {
            if request.id.is_empty() {
                request.id = format!("{place:06}").into();
            }
            let number = |block: &BlockHash| {
                let next = numbers.len() as u32;
                *numbers.entry(*block).or_insert(next)
            };
            request.dense = request.blocks.iter().map(number).collect();
        }
        Self { format, size, requests, unique_blocks: numbers.len() }
    }

    /// Digest of all that a replay can see.
    pub fn digest(&self) -> u128 {
        let mut hasher = Xxh3::new();
        hasher.update(&self.size.tokens().to_le_bytes());
        for request in &self.requests {
            hasher.update(&(request.id.len() as u64).to_le_bytes());
            hasher.update(request.id.as_bytes());
            for number in
                [request.at, request.pace, request.prompt.0, request.output, request.blocks.len() as u64]
            {
                hasher.update(&number.to_le_bytes());
            }
            request.blocks.iter().for_each(|block| hasher.update(&block.0.to_le_bytes()));
        }
        hasher.digest128()
    }

    /// Tokens of all prompts.
    pub fn prompt_tokens(&self) -> u64 {
        self.requests.iter().map(|request| request.prompt.0).sum()
    }
}

/// Folds foreign block names into a chain of ours: `h = XXH3_64(parent ‖ names)`.
#[derive(Debug)]
pub(super) struct Chain {
    parent: BlockHash,
    scratch: Vec<u8>,
    /// Foreign blocks per block.
    group: usize,
    pending: usize,
    blocks: Vec<BlockHash>,
}

impl Chain {
    /// A chain from `root` that makes one block of every `group` names.
    pub(super) fn new(root: u64, group: usize) -> Self {
        let mut chain = Self {
            parent: BlockHash(root),
            scratch: Vec::new(),
            group: group.max(1),
            pending: 0,
            blocks: Vec::new(),
        };
        chain.restart();
        chain
    }

    /// The next foreign block.
    pub(super) fn push(&mut self, name: u64) {
        self.scratch.extend_from_slice(&name.to_le_bytes());
        self.pending += 1;
        if self.pending == self.group {
            self.parent = BlockHash(xxhash_rust::xxh3::xxh3_64(&self.scratch));
            self.blocks.push(self.parent);
            self.restart();
        }
    }

    /// The full blocks; names that fill none are dropped.
    pub(super) fn finish(self) -> Box<[BlockHash]> {
        self.blocks.into_boxed_slice()
    }

    fn restart(&mut self) {
        self.scratch.clear();
        self.scratch.extend_from_slice(&self.parent.0.to_le_bytes());
        self.pending = 0;
    }
}
