//! What an answer's usage is compared with, and the comparison.
//!
//! Only what a view alone claimed is compared: not routing history, not prompts
//! in flight, not several prompts in one request, whose usage is one sum.

use kvrouter_core::ids::{Epoch, Role};
use kvrouter_core::policy::{Candidate, hits};
use kvrouter_core::reconcile::Comparison;
use kvrouter_core::units::{Blocks, Tokens};

use crate::fleet::TargetState;
use crate::pool::Pool;
use crate::prompt::endpoint::Endpoint;
use crate::proxy::sse::Usage;
use crate::route::Ask;

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
        let usable = || hits::usable(chosen.claimed, ask.prompt_tokens, size, state.facts().paired).total();
        Self {
            prompt: ask.prompt_tokens,
            exact: ask.exact_tokens,
            salted: ask.salted,
            endpoint: ask.endpoint,
            epoch: chosen.trust.epoch,
            claimed: comparable.then(|| size.tokens_in(Blocks(usable()))),
        }
    }

    /// Compares it with what the engine reports, and counts how it came out.
    pub fn compare(&self, pool: &Pool, state: &TargetState, usage: Usage) {
        let cached = state.reported(self.endpoint, usage.cached.map(Tokens));
        let (Some(predicted), Some(cached), Some(counted)) = (self.claimed, cached, usage.prompt) else {
            return;
        };
        let (verdict, _) = state.trust.read(pool.clock.now(), pool.live.read().freshness);
        let comparison = Comparison {
            predicted,
            cached,
            other_length: self.exact && counted != self.prompt.0,
            salted: self.salted,
            restarted: verdict.epoch != self.epoch,
        };
        let outcome = state.compare(comparison, pool.config.size);
        pool.metrics.tokens.predictions.with_label_values(&[outcome.label()]).inc();
    }
}
