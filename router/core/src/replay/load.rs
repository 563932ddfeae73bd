//! What a router has booked on one target, for a trace's dense blocks.
//!
//! The same account as `policy::leases` keeps, over arrays: distinct prompt
//! blocks in flight, a private tail per request and one more per block of
//! generated tokens, uncached tokens until the first byte, contexts until the
//! end. The oracle recounts all of it.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::trace::TimedRequest;
use crate::policy::Load;
use crate::units::{BlockSize, Tokens};

/// The books of one target.
#[derive(Clone, Debug)]
pub struct Books {
    block: u64,
    /// Requests in flight per block.
    active: Vec<u16>,
    /// Of these, requests whose first byte has not come.
    pending: Vec<u16>,
    distinct: u64,
    private: u64,
    queued: u64,
    context: u64,
    requests: u64,
    decoding: u64,
    step: u64,
    /// Requests by the step in which they begin another private block.
    growing: BinaryHeap<Reverse<(u64, u32)>>,
}

impl Books {
    /// Empty books, for a trace of `blocks` distinct blocks.
    pub fn new(size: BlockSize, blocks: usize) -> Self {
        Self {
            block: u64::from(size.tokens()),
            active: vec![0; blocks],
            pending: vec![0; blocks],
            distinct: 0,
            private: 0,
            queued: 0,
            context: 0,
            requests: 0,
            decoding: 0,
            step: 0,
            growing: BinaryHeap::new(),
        }
    }

    /// Books a request that is predicted to prefill `uncached` tokens.
    pub fn book(&mut self, request: &TimedRequest, uncached: u64) {
        for block in &request.dense {
            let count = &mut self.active[*block as usize];
            self.distinct += u64::from(*count == 0);
            *count += 1;
            self.pending[*block as usize] += 1;
        }
        self.private += 1;
        self.queued += uncached;
        self.context += request.prompt.0;
        self.requests += 1;
    }

    /// Its first byte has come, which is its first token.
    pub fn first_byte(&mut self, place: u32, request: &TimedRequest, uncached: u64) {
        request.dense.iter().for_each(|block| self.pending[*block as usize] -= 1);
        self.queued -= uncached;
        self.context += 1;
        self.decoding += 1;
        if self.block == 1 {
            self.private += 1;
        }
        let grows = self.step + if self.block == 1 { 1 } else { self.block - 1 };
        self.growing.push(Reverse((grows, place)));
    }

    /// Every decoding request has got a token. `lives` says whether a request is
    /// still in flight here.
    pub fn decoded(&mut self, lives: impl Fn(u32) -> bool) {
        self.step += 1;
        self.context += self.decoding;
        while self.growing.peek().is_some_and(|Reverse((step, _))| *step == self.step) {
            if let Some(Reverse((step, place))) = self.growing.pop()
                && lives(place)
            {
                self.private += 1;
                self.growing.push(Reverse((step + self.block, place)));
            }
        }
    }

    /// It is done.
    pub fn release(&mut self, request: &TimedRequest) {
        for block in &request.dense {
            let count = &mut self.active[*block as usize];
            *count -= 1;
            self.distinct -= u64::from(*count == 0);
        }
        self.private -= 1 + request.output / self.block;
        self.context -= request.prompt.0 + request.output;
        self.requests -= 1;
        self.decoding -= 1;
    }

    /// What is booked now.
    pub fn load(&self) -> Load {
        Load {
            active_blocks: self.distinct + self.private,
            queued: Tokens(self.queued),
            context: Tokens(self.context),
            requests: self.requests,
        }
    }

    /// Leading blocks of `prompt` that are in flight here.
    pub fn shared(&self, prompt: &[u32]) -> u64 {
        prompt.iter().take_while(|block| self.active[**block as usize] > 0).count() as u64
    }

    /// Whether a request that waits for its first byte will bring `block`.
    pub fn awaits(&self, block: u32) -> bool {
        self.pending[block as usize] > 0
    }
}
