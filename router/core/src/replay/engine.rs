//! A model of one engine, step by step. Everything it yields is modelled.
//!
//! A step prefills at most a chunk of waiting prompts, first come first served,
//! and gives every decoding request one token. It lasts a fixed time, plus a time
//! per prefilled token, per decoding request and per token of their contexts. A
//! prompt's hits are looked up when its prefill starts; its blocks are cached
//! when its prefill ends, and its first token comes with that step. Times are
//! whole nanoseconds, so sums are the same on every machine.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use serde::Serialize;

use super::cache::Cache;
use super::trace::TimedRequest;
use crate::policy::hits::usable;
use crate::units::{BlockSize, TierHits};

/// The model's constants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Model {
    /// Nanoseconds of every step.
    pub step_ns: u64,
    /// Nanoseconds per prefilled token.
    pub prefill_token_ns: u64,
    /// Nanoseconds per decoding request.
    pub decode_request_ns: u64,
    /// Nanoseconds per token in the contexts of decoding requests.
    pub context_token_ns: u64,
    /// Most tokens prefilled in one step.
    pub chunk_tokens: u64,
    /// Most requests decoding at once.
    pub max_decoding: u64,
    /// Blocks that the prefix cache holds.
    pub capacity_blocks: u64,
}

impl Default for Model {
    fn default() -> Self {
        Self {
            step_ns: 6_000_000,
            prefill_token_ns: 100_000,
            decode_request_ns: 100_000,
            context_token_ns: 60,
            chunk_tokens: 2048,
            max_decoding: 256,
            capacity_blocks: 6000,
        }
    }
}

/// What a step brought about, in the order in which it is to be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Happened {
    /// Every request that was decoding got a token.
    Decoded,
    /// The request's prefill is over and its first token is there.
    FirstToken(u32),
    /// The request is done.
    Finished(u32),
}

/// One engine. Requests are known by their place in the trace.
#[derive(Clone, Debug)]
pub struct Engine {
    model: Model,
    size: BlockSize,
    /// Its cache.
    pub cache: Cache,
    waiting: VecDeque<u32>,
    /// Tokens that the first waiting request still has to prefill; `None`
    /// before its prefill starts.
    remaining: Option<u64>,
    /// By the step in which they finish.
    decoding: BinaryHeap<Reverse<(u64, u32)>>,
    context: u64,
    step: u64,
    prefilled: Vec<u32>,
    /// Nanoseconds spent in steps.
    pub busy_ns: u64,
}

impl Engine {
    /// An idle engine with an empty cache.
    pub fn new(model: Model, size: BlockSize, blocks: usize) -> Self {
        Self {
            model,
            size,
            cache: Cache::new(blocks, model.capacity_blocks),
            waiting: VecDeque::new(),
            remaining: None,
            decoding: BinaryHeap::new(),
            context: 0,
            step: 0,
            prefilled: Vec::new(),
            busy_ns: 0,
        }
    }

    /// Queues a request.
    pub fn push(&mut self, request: u32) {
        self.waiting.push_back(request);
    }

    /// Requests whose prefill has not begun.
    pub fn waiting(&self) -> u64 {
        self.waiting.len() as u64 - u64::from(self.remaining.is_some())
    }

    /// Requests that decode.
    pub fn decoding(&self) -> u64 {
        self.decoding.len() as u64
    }

    /// Begins a step and says how long it lasts; `None` when there is nothing to
    /// do. `hit` is told the hit blocks of every request whose prefill starts.
    pub fn begin(&mut self, requests: &[TimedRequest], mut hit: impl FnMut(u32, u64)) -> Option<u64> {
        let mut budget = self.model.chunk_tokens;
        while let Some(&head) = self.waiting.front() {
            if budget == 0 {
                break;
            }
            let remaining = match self.remaining {
                Some(remaining) => remaining,
                None if self.is_full() => break,
                None => {
                    let (blocks, tokens) = self.start(&requests[head as usize]);
                    hit(head, blocks);
                    tokens
                }
            };
            let taken = remaining.min(budget);
            budget -= taken;
            self.remaining = Some(remaining - taken);
            if remaining == taken {
                self.waiting.pop_front();
                self.remaining = None;
                self.prefilled.push(head);
            }
        }
        let prefilling = self.model.chunk_tokens - budget;
        if prefilling == 0 && self.prefilled.is_empty() && self.decoding.is_empty() {
            return None;
        }
        let lasts = self.model.step_ns
            + self.model.prefill_token_ns * prefilling
            + self.model.decode_request_ns * self.decoding.len() as u64
            + self.model.context_token_ns * self.context;
        self.busy_ns += lasts;
        Some(lasts)
    }

    /// Ends the step that was begun.
    pub fn end(&mut self, requests: &[TimedRequest], mut tell: impl FnMut(Happened)) {
        self.step += 1;
        self.context += self.decoding.len() as u64;
        tell(Happened::Decoded);
        while self.decoding.peek().is_some_and(|Reverse((step, _))| *step == self.step) {
            if let Some(Reverse((_, done))) = self.decoding.pop() {
                let request = &requests[done as usize];
                self.context -= request.prompt.0 + request.output;
                tell(Happened::Finished(done));
            }
        }
        for ready in std::mem::take(&mut self.prefilled) {
            let request = &requests[ready as usize];
            self.cache.store(&request.dense);
            tell(Happened::FirstToken(ready));
            if request.output == 1 {
                tell(Happened::Finished(ready));
            } else {
                self.context += request.prompt.0 + 1;
                self.decoding.push(Reverse((self.step + request.output - 1, ready)));
            }
        }
    }

    /// Looks up a prompt: its hit blocks and the tokens that are left to do.
    fn start(&mut self, request: &TimedRequest) -> (u64, u64) {
        let held = TierHits { device: self.cache.leading(&request.dense), ..TierHits::default() };
        let hits = usable(held, request.prompt, self.size, false).total();
        self.cache.touch(&request.dense[..hits as usize]);
        (hits, request.prompt.0 - hits * u64::from(self.size.tokens()))
    }

    fn is_full(&self) -> bool {
        (self.decoding.len() + self.prefilled.len()) as u64 >= self.model.max_decoding
    }
}
