//! A request body to token ids.
//!
//! [`endpoint`] knows where a body keeps its prompt; [`render`] (with [`tools`]
//! and [`python_json`]) turns chat messages into text as the engine would; [`tokenize`] turns text into ids.
//! What cannot be rendered exactly is refused with a reason, never guessed: a
//! near miss would silently never hit. Nothing here blocks an async thread:
//! callers run [`Prompter::prepare`] on the CPU pool.

pub mod endpoint;
pub mod media;
pub mod python_json;
pub mod render;
pub mod tokenize;
pub mod tools;

use std::path::Path;
use std::sync::Arc;

use kvrouter_core::blocks::Namespace;
use kvrouter_core::policy::images::ImageKey;
use kvrouter_core::units::Tokens;
use kvrouter_crds::config::Engine;
use serde_json::Value;

use endpoint::{Content, Endpoint};
use render::{Profile, Template};
use tokenize::Tokenizer;

/// What routing needs to know of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// Token ids, in prompt order; empty where they are not known.
    pub tokens: Arc<[u32]>,
    /// How many tokens the engine will see: exact if `tokens` is not empty.
    pub count: Tokens,
    /// Adapter and salt of the request.
    pub namespace: Namespace,
    /// Why there are no token ids; `None` when there are.
    pub refused: Option<Refusal>,
    /// Pictures, clips and recordings in it.
    pub images: Vec<ImageKey>,
    /// The engine will not read its cache for it, whatever it holds.
    pub bypasses_cache: bool,
}

/// Why a body was not turned into token ids. Such a request is routed by load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Refusal {
    /// The path has no prompt.
    NoPrompt,
    /// The router has no tokenizer.
    NoTokenizer,
    /// The model has no chat template.
    NoTemplate,
    /// The template failed or uses what is not supported.
    Unrenderable,
    /// Images, audio or video.
    Media,
    /// A field is not what the engine expects: the engine will say so.
    Malformed,
    /// The tokenizer failed.
    Untokenizable,
}

impl Refusal {
    /// Stable label for metrics and logs.
    pub const fn label(self) -> &'static str {
        match self {
            Self::NoPrompt => "no_prompt",
            Self::NoTokenizer => "no_tokenizer",
            Self::NoTemplate => "no_template",
            Self::Unrenderable => "unrenderable",
            Self::Media => "media",
            Self::Malformed => "malformed",
            Self::Untokenizable => "untokenizable",
        }
    }
}

/// Renders and tokenises for one model.
#[derive(Debug)]
pub struct Prompter {
    tokenizer: Option<Tokenizer>,
    template: Option<Template>,
}

/// Why a tokenizer folder could not be used.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The tokenizer.
    #[error(transparent)]
    Tokenizer(#[from] tokenize::LoadError),
    /// The chat template.
    #[error(transparent)]
    Template(#[from] render::TemplateError),
}

impl Prompter {
    /// A prompter that refuses everything but ready-made token ids.
    pub const fn without_tokenizer() -> Self {
        Self { tokenizer: None, template: None }
    }

    /// Loads tokenizer and chat template from a folder. A folder without a
    /// template is fine: completions work, chat is refused.
    pub fn load(folder: &Path) -> Result<Self, LoadError> {
        let tokenizer = Tokenizer::load(folder)?;
        let template = Template::load(folder)?;
        Ok(Self { tokenizer: Some(tokenizer), template })
    }

    /// Token ids of `body`, a request to `endpoint`, as an engine of `engine`'s
    /// family would make them. `adapter` is the LoRA adapter that the request's
    /// model names. CPU-bound: about 30 ns a byte.
    pub fn prepare(
        &self,
        endpoint: Endpoint,
        body: &Value,
        engine: Engine,
        adapter: Option<Arc<str>>,
    ) -> Prompt {
        let text = |name: &str| body.get(name).and_then(Value::as_str).map(Arc::from);
        // SGLang may name the adapter beside the model.
        let adapter = adapter.or_else(|| text("lora_path").filter(|_| engine == Engine::SGLang));
        let namespace = Namespace { adapter, salt: text("cache_salt") };
        let (tokens, refused) = match self.tokens(endpoint, body, engine) {
            Ok(tokens) => (tokens, None),
            Err(refusal) => (Vec::new(), Some(refusal)),
        };
        let count = match refused {
            None => Tokens(tokens.len() as u64),
            Some(_) => endpoint::estimate(body),
        };
        let images = media::keys(body);
        let bypasses_cache = endpoint::bypasses_cache(body);
        Prompt { tokens: tokens.into(), count, namespace, refused, images, bypasses_cache }
    }

    fn tokens(&self, endpoint: Endpoint, body: &Value, engine: Engine) -> Result<Vec<u32>, Refusal> {
        match endpoint::content(endpoint, body, engine)? {
            Content::Ids(ids) => Ok(ids),
            Content::Text(text, specials) => self.encode(text, specials),
            Content::Chat(chat) => {
                let template = self.template.as_ref().ok_or(Refusal::NoTemplate)?;
                let profile = Profile::of(engine);
                let text = template.render(&chat, profile).map_err(|error| {
                    tracing::debug!(target: "kv_router::prompt", error = %crate::chain(&error), "chat was not rendered");
                    error.refusal()
                })?;
                self.encode(&text, chat.specials)
            }
        }
    }

    fn encode(&self, text: &str, specials: tokenize::Specials) -> Result<Vec<u32>, Refusal> {
        let tokenizer = self.tokenizer.as_ref().ok_or(Refusal::NoTokenizer)?;
        tokenizer.encode(text, specials).map_err(|error| {
            tracing::warn!(target: "kv_router::prompt", error = %error, "prompt was not tokenised");
            Refusal::Untokenizable
        })
    }
}

#[cfg(test)]
mod tests;
