//! What an answer's usage is compared with, and the comparison.
//!
//! Only what a view alone claimed is compared: not routing history, not prompts
//! in flight, not several prompts in one request, whose usage is one sum.

use kvrouter_core::ids::{Epoch, Role};
use kvrouter_core::policy::{Candidate, hits};
use kvrouter_core::reconcile::Comparison;
use kvrouter_core::trust::{Parity, State};
use kvrouter_core::units::{BlockSize, Blocks, Tokens};

use crate::fleet::TargetState;
use crate::pool::Pool;
use crate::prompt::endpoint::Endpoint;
use crate::proxy::sse::Usage;
use crate::route::Ask;

/// Blocks of a prompt that its engine cannot have held before, from which on it
/// must have stored some: a last block is now and then stored later or not at all.
const MUST_STORE: u64 = 2;

/// What a pick promised.
#[derive(Clone, Copy, Debug)]
pub struct Expected {
    /// Tokens of the prompt.
    pub prompt: Tokens,
    exact: bool,
    salted: bool,
    endpoint: Endpoint,
    epoch: Epoch,
    /// Tokens that the view claims the engine will skip, before anything scales
    /// them; `None` where they cannot be compared.
    claimed: Option<Tokens>,
    /// Full blocks of the prompt, and how many of them the view held; both zero where
    /// the two cannot be compared, or the view was not exact.
    blocks: u64,
    held: u64,
    /// Number of the last message in the view.
    seq: u64,
}

impl Expected {
    /// What `chosen` promises for `ask`.
    pub fn of(pool: &Pool, ask: &Ask, chosen: &Candidate, state: &TargetState) -> Self {
        let size = pool.config.size;
        let comparable = chosen.trust.credited
            && chosen.predicted == 0
            // Its usage is of what it fetched, or of what prefill had.
            && ask.role != Role::Decode
            && ask.exact_tokens
            && ask.several.is_empty()
            && !ask.bypasses_cache
            && !ask.blocks.is_empty();
        // Events of a silent view may be late.
        let exact = comparable && chosen.trust.state == State::Exact;
        let usable = || hits::usable(chosen.claimed, ask.prompt_tokens, size, state.facts().paired).total();
        Self {
            prompt: ask.prompt_tokens,
            exact: ask.exact_tokens,
            salted: ask.salted,
            endpoint: ask.endpoint,
            epoch: chosen.trust.epoch,
            claimed: comparable.then(|| size.tokens_in(Blocks(usable()))),
            blocks: if exact { ask.blocks.len() as u64 } else { 0 },
            held: if exact { chosen.claimed.total() } else { 0 },
            seq: chosen.trust.seq,
        }
    }

    /// Tells the trust in the view of a finished prompt that the engine must have
    /// stored blocks of: neither did the view hold them, nor did the engine, as it
    /// reports itself or, where it reports nothing, as an exact view of the same
    /// tokens has it.
    pub fn note_unstored(&self, pool: &Pool, state: &TargetState, usage: Usage) {
        let cached = state.reported(self.endpoint, usage.cached.map(Tokens));
        if self.must_store(cached, pool.config.size) {
            let mut trust = state.trust.lock();
            if cached.is_some() || trust.parity() == Parity::Confirmed {
                trust.prompt_unstored(pool.clock.now(), self.epoch, self.seq);
            }
        }
    }

    fn must_store(&self, cached: Option<Tokens>, size: BlockSize) -> bool {
        let known = self.held.max(cached.map_or(0, |cached| size.full_blocks(cached).0));
        self.blocks.saturating_sub(known) >= MUST_STORE
    }

    /// Compares it with what the engine reports, and counts how it came out.
    pub fn compare(&self, pool: &Pool, state: &TargetState, usage: Usage) {
        let cached = state.reported(self.endpoint, usage.cached.map(Tokens));
        let (Some(predicted), Some(cached), Some(counted)) = (self.claimed, cached, usage.prompt) else {
            return;
        };
        let verdict = state.trust.read(pool.clock.now(), pool.live.read().freshness).verdict();
        let comparison = Comparison {
            predicted,
            cached,
            other_length: self.exact && counted != self.prompt.0,
            salted: self.salted,
            restarted: verdict.epoch != self.epoch,
        };
        let outcome = state.compare(pool.clock.now(), comparison, pool.config.size);
        pool.metrics.tokens.predictions.with_label_values(&[outcome.label()]).inc();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(why: &str, blocks: u64, held: u64, cached: Option<u64>, expected: bool) {
        let promise = Expected {
            prompt: Tokens(blocks * 16),
            exact: true,
            salted: false,
            endpoint: Endpoint::Chat,
            epoch: Epoch(1),
            claimed: None,
            blocks,
            held,
            seq: 0,
        };
        let size = BlockSize::new(16).expect("not zero");
        assert_eq!(promise.must_store(cached.map(Tokens), size), expected, "{why}");
    }

    #[test]
    fn only_what_neither_view_nor_engine_held_must_be_stored() {
        check("all new", 4, 0, Some(0), true);
        check("all new, and it reports nothing", 4, 0, None, true);
        check("below a block, or not comparable", 0, 0, Some(0), false);
        check("its last block may come later", 4, 3, Some(48), false);
        check("two are new", 4, 2, Some(32), true);
        check("the view held it", 4, 4, Some(0), false);
        check("the engine had it without telling us", 4, 0, Some(63), false);
        check("all but two of it", 4, 0, Some(47), true);
    }
}
