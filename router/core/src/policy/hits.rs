//! What an engine will really skip of the blocks it holds.
//!
//! Engines always recompute the last prompt token, so a hit never reaches it;
//! under EAGLE or MTP they recompute one unit more.

use crate::units::{BlockSize, TierHits, Tokens};

/// Most leading blocks that an engine can skip of a prompt of `prompt` tokens.
pub fn limit(prompt: Tokens, size: BlockSize, paired: bool) -> u64 {
    size.full_blocks(prompt - Tokens(1)).0.saturating_sub(u64::from(paired))
}

/// `held` cut to what a prompt of `prompt` tokens can use: whole blocks before
/// its last token, one fewer when tokens are paired (EAGLE). What is cut is the
/// deepest blocks; of mixed tiers the slower ones go first, which is where the
/// deep blocks of an offloaded prefix are.
pub fn usable(held: TierHits, prompt: Tokens, size: BlockSize, paired: bool) -> TierHits {
    held.at_most(limit(prompt, size, paired))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(why: &str, held: u64, prompt: u64, paired: bool, expected: u64) {
        let size = BlockSize::new(16).expect("not zero");
        let held = TierHits { device: held, ..TierHits::default() };
        assert_eq!(usable(held, Tokens(prompt), size, paired).device, expected, "{why}");
    }

    /// The engines' own numbers: vLLM and SGLang, live, pages of 16.
    #[test]
    fn the_last_token_is_always_recomputed() {
        check("64 tokens, all held: 48 cached", 4, 64, false, 3);
        check("65 tokens: 64 cached", 4, 65, false, 4);
        check("a prompt below one block", 0, 9, false, 0);
        check("an empty prompt", 3, 0, false, 0);
        check("EAGLE gives up one more", 4, 65, true, 3);
        check("less held than usable", 2, 65, true, 2);
    }

    #[test]
    fn the_slowest_tier_is_cut_first() {
        let size = BlockSize::new(16).expect("not zero");
        let held = TierHits { device: 2, host: 1, disk: 1 };
        let cut = usable(held, Tokens(48), size, false);
        assert_eq!(cut, TierHits { device: 2, host: 0, disk: 0 });
    }
}
