//! The peers: `tokenizers` 0.22 on a rendered text, and `llm-tokenizer` from bytes
//! with both caches.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, anyhow};
use llm_tokenizer::chat_template::ChatTemplateParams;
use llm_tokenizer::traits::{Encoder, Tokenizer as _};
use llm_tokenizer::{CacheConfig, CachedTokenizer, create_tokenizer};
use serde_json::Value;

/// What each of its caches may hold: as much as ours.
const ROOM: usize = 256 << 20;

/// `tokenizers` 0.22.
pub(crate) struct Plain(tokenizers::Tokenizer);

/// `llm-tokenizer`, with L0 and L1.
pub(crate) struct Cached(CachedTokenizer);

impl Plain {
    pub(crate) fn load(model: &Path) -> anyhow::Result<Self> {
        let file = model.join("tokenizer.json");
        let loaded = tokenizers::Tokenizer::from_file(&file);
        Ok(Self(loaded.map_err(|error| anyhow!("{}: {error}", file.display()))?))
    }

    /// Token ids of a whole text, without offsets, which costs it least.
    pub(crate) fn ids(&self, text: &str) -> anyhow::Result<Vec<u32>> {
        let encoding = self.0.encode_fast(text, false).map_err(|error| anyhow!(error))?;
        Ok(encoding.get_ids().to_vec())
    }
}

impl Cached {
    pub(crate) fn load(model: &Path) -> anyhow::Result<Self> {
        let inner: Arc<_> = create_tokenizer(model.to_str().context("a folder's name is no UTF-8")?)?;
        let config = CacheConfig {
            enable_l0: true,
            l0_max_memory: ROOM,
            enable_l1: true,
            l1_max_memory: ROOM,
            ..CacheConfig::default()
        };
        Ok(Self(CachedTokenizer::new(inner, config)))
    }

    /// Token ids of a request.
    pub(crate) fn ids(&self, body: &[u8]) -> anyhow::Result<Vec<u32>> {
        let mut body: Value = serde_json::from_slice(body)?;
        let messages = match body.get_mut("messages").map(Value::take) {
            Some(Value::Array(messages)) => messages,
            _ => anyhow::bail!("there are no messages"),
        };
        let params = ChatTemplateParams { add_generation_prompt: true, ..ChatTemplateParams::default() };
        let text = self.0.apply_chat_template(&messages, params)?;
        Ok(self.0.encode(&text, false)?.token_ids().to_vec())
    }
}
