//! What the model says: pseudo-random words of the tokenizer's own vocabulary, chosen so that
//! the text, encoded again, gives the same tokens. The next turn of a conversation then
//! extends what the cache holds, as it mostly does with real models.

use sha2::{Digest as _, Sha256};
use tokenizers::pipeline::{EncodeOptions, PipelineTokenizer};

use super::{Answer, encode};

/// Words to choose from.
const MAX_WORDS: usize = 512;
/// Vocabulary entries that are looked at; the useful ones of a large vocabulary come early.
const MAX_SCANNED: u32 = 65_536;
/// First token id and number of ids of an engine without a tokenizer.
const BARE_TOKENS: (u32, u32) = (1000, 1000);

/// Tokens that survive decoding and encoding.
pub(super) struct Words {
    /// Words that may begin a text: templates often trim what they are given.
    first: Vec<(u32, String)>,
    /// Words with the space before them.
    later: Vec<(u32, String)>,
}

impl Words {
    pub(super) fn of(tokenizer: &PipelineTokenizer) -> Self {
        let mut words = Self { first: Vec::new(), later: Vec::new() };
        for id in 0..MAX_SCANNED {
            if words.first.len() >= MAX_WORDS && words.later.len() >= MAX_WORDS {
                break;
            }
            let Ok(text) = tokenizer.decode(&[id], true) else { continue };
            let word = text.strip_prefix(' ').unwrap_or(&text);
            let list = if word.len() == text.len() { &mut words.first } else { &mut words.later };
            let usable = !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_lowercase());
            if usable && list.len() < MAX_WORDS && survives(tokenizer, &text, id) {
                list.push((id, text));
            }
        }
        if words.first.is_empty() && words.later.is_empty() {
            return Self::without_tokenizer();
        }
        if words.first.is_empty() {
            words.first.clone_from(&words.later);
        }
        if words.later.is_empty() {
            words.later.clone_from(&words.first);
        }
        words
    }

    pub(super) fn without_tokenizer() -> Self {
        let (base, count) = BARE_TOKENS;
        let words: Vec<_> = (base..base + count).map(|id| (id, format!(" t{id}"))).collect();
        Self { first: words.clone(), later: words }
    }

    pub(super) fn answer(&self, prompt: &[u32], choice: usize, count: usize) -> Answer {
        let mut hasher = Sha256::new();
        hasher.update((choice as u64).to_le_bytes());
        for token in prompt {
            hasher.update(token.to_le_bytes());
        }
        let seed: [u8; 32] = hasher.finalize().into();
        let mut random = seed.iter().take(8).fold(1, |seed, byte| (seed << 8) | u64::from(*byte));
        let mut answer = Answer { tokens: Vec::with_capacity(count), pieces: Vec::with_capacity(count) };
        for at in 0..count {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let list = if at == 0 { &self.first } else { &self.later };
            let index = usize::try_from(random >> 33).unwrap_or(0) % list.len();
            answer.tokens.push(list[index].0);
            answer.pieces.push(list[index].1.clone());
        }
        answer
    }
}

/// Whether `text` is this token again, alone and behind another word.
fn survives(tokenizer: &PipelineTokenizer, text: &str, id: u32) -> bool {
    let options = EncodeOptions::no_specials();
    if !encode(tokenizer, text, &options).is_ok_and(|tokens| tokens == [id]) {
        return false;
    }
    if !text.starts_with(' ') {
        return true;
    }
    let both = encode(tokenizer, &format!("a{text}{text}"), &options);
    both.is_ok_and(|tokens| tokens.ends_with(&[id, id]))
}
