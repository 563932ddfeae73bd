//! A request body to token ids and block hashes.
//!
//! [`body`] parses it, without what [`seen`] knows of it; [`endpoint`] knows where it keeps its prompt; [`chat`], [`anthropic`] and
//! [`responses`] make one kind of chat of three kinds of bodies; [`render`] turns
//! it into text as the engine would, with the model's [`template`], the messages
//! of [`conversation`] and the [`tools`]; [`tokenize`] turns text into ids, with
//! the help of [`cache`]. [`family`] knows the models for which this is not how
//! engines do it.
//!
//! What cannot be rendered exactly is refused with a reason, never guessed: a
//! near miss would silently never hit. Nothing here blocks an async thread:
//! callers run [`Prompter::prepare`] on the CPU pool.

pub mod anthropic;
pub mod body;
pub mod cache;
pub mod chat;
pub mod conversation;
pub mod endpoint;
pub mod family;
pub mod inspect;
pub mod media;
pub mod python;
pub mod python_json;
mod reading;
pub mod render;
pub mod responses;
pub mod searches;
pub mod seen;
pub mod sums;
pub mod template;
pub mod tokenize;
pub mod tools;
pub mod trace;
pub mod unrendered;
pub mod values;

use std::path::Path;
use std::sync::Arc;

use kvrouter_core::blocks::{BlockHash, Identity, Namespace, chain};
use kvrouter_core::policy::images::ImageKey;
use kvrouter_core::units::{BlockSize, Tokens};
use kvrouter_crds::config::Engine;
use serde_json::Value;

use body::Body;
use cache::{Cache, Key, MIN_PIECE_BYTES, Piece};
use endpoint::{Content, Endpoint};
use family::Family;
use render::Rendered;
use template::Templates;
use tokenize::{Specials, Tokenizer};

/// What routing needs to know of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prompt {
    /// Where the body was sent.
    pub endpoint: Endpoint,
    /// One per prompt of the body; none where no ids are known.
    pub parts: Vec<Part>,
    /// How many tokens the engine will see, in all prompts.
    pub count: Tokens,
    /// Whether `count` was counted, not estimated.
    pub is_exact: bool,
    /// Adapter and salt of the request.
    pub namespace: Namespace,
    /// Why there are no token ids; `None` when there are.
    pub refused: Option<Refusal>,
    /// Pictures, clips and recordings in it.
    pub images: Vec<ImageKey>,
    /// The engine will not read its cache for it, whatever it holds.
    pub bypasses_cache: bool,
    /// The response that it goes on from: the worker that made it has the rest.
    pub previous_response: Option<Arc<str>>,
    /// What it cost.
    pub work: Work,
}

/// One prompt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Part {
    /// Token ids, in order; of a prompt with media, those before the first.
    pub tokens: Vec<u32>,
    /// The hashes of its full blocks.
    pub blocks: Vec<BlockHash>,
}

/// What preparing one prompt took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Times that the tokenizer was given a text of the request: at most one per
    /// prompt.
    pub tokenisations: u64,
    /// Tokens that the cache had.
    pub reused: Tokens,
    /// Tokens that were made anew.
    pub encoded: Tokens,
}

/// A request, beside its body.
#[derive(Clone, Debug)]
pub struct Asked<'a> {
    /// Where it went.
    pub endpoint: Endpoint,
    /// Whose rendering counts.
    pub engine: Engine,
    /// The LoRA adapter that the request's model names.
    pub adapter: Option<Arc<str>>,
    /// The roots of chains.
    pub identity: &'a Identity,
    /// Tokens per block.
    pub size: BlockSize,
    /// Milliseconds since 1970: templates may print the day.
    pub now_unix_ms: u64,
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
    /// The model's family encodes chats by code of the engine.
    Family(Family),
    /// Images, audio or video whose place in the prompt is not known.
    Media,
    /// The rest of the conversation is with the worker that had it.
    History,
    /// A field is not what the engine expects: the engine will say so.
    Malformed,
    /// The tokenizer failed.
    Untokenizable,
    /// Preparing the prompt hit a fault of ours.
    Panicked,
}

impl Refusal {
    /// Stable label for metrics and logs.
    pub const fn label(self) -> &'static str {
        match self {
            Self::NoPrompt => "no_prompt",
            Self::NoTokenizer => "no_tokenizer",
            Self::NoTemplate => "no_template",
            Self::Unrenderable | Self::Family(_) => "unrenderable",
            Self::Media => "media",
            Self::History => "history",
            Self::Malformed => "malformed",
            Self::Untokenizable => "untokenizable",
            Self::Panicked => "panicked",
        }
    }

    /// What whoever runs the router can do about it; `None` where that is nothing, or
    /// another problem says it.
    pub const fn advice(self) -> Option<&'static str> {
        match self {
            Self::NoPrompt | Self::NoTokenizer | Self::History | Self::Malformed => None,
            Self::NoTemplate => Some(
                "the model has no chat template; put chat_template.jinja into the folder of model.tokenizer.path",
            ),
            Self::Unrenderable => Some(
                "the chat template failed on them, or they ask for what only the engine can do; try one with `kv-router tokenize`, or run with RUST_LOG=info,kv_router::prompt=debug to see why (of a KvRouter: kubectl set env deployment/NAME-router RUST_LOG=…)",
            ),
            Self::Family(_) => Some(
                "engines encode chats of this model by code of their own, which the router does not have; their hits are not seen, and nothing needs to be mended",
            ),
            Self::Media => Some(
                "where their pictures stand in the prompt is not known; send pictures as parts of messages",
            ),
            Self::Untokenizable => Some(
                "the tokenizer failed; look for warnings of kv_router::prompt in the log, and compare tokenizer.json with the engine's",
            ),
            Self::Panicked => Some(
                "the router has a fault; the log has an error with the id of each request; please report it",
            ),
        }
    }
}

/// Renders and tokenises for one model.
#[derive(Debug)]
pub struct Prompter {
    tokenizer: Option<Tokenizer>,
    templates: Option<Templates>,
    family: Option<Family>,
    cache: Option<Cache>,
    /// Why there is no cache.
    uncached: Option<String>,
}

/// Why a tokenizer folder could not be used.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The tokenizer.
    #[error(transparent)]
    Tokenizer(#[from] tokenize::LoadError),
    /// The chat template.
    #[error(transparent)]
    Template(#[from] template::TemplateError),
}

/// Texts that one call tokenised, and where the ids came from.
struct Encoder<'a> {
    tokenizer: &'a Tokenizer,
    size: BlockSize,
    /// The hash that the next block follows.
    last: BlockHash,
    tokens: Vec<u32>,
    blocks: Vec<BlockHash>,
}

impl Prompter {
    /// A prompter that refuses everything but ready-made token ids.
    pub const fn without_tokenizer() -> Self {
        Self { tokenizer: None, templates: None, family: None, cache: None, uncached: None }
    }

    /// Loads tokenizer and chat templates from a folder. A folder without a
    /// template is fine: completions work, chat is refused. At most
    /// `cache_bytes` are used for prefixes; `seed` must be unknown to clients.
    pub fn load(folder: &Path, cache_bytes: usize, seed: u64) -> Result<Self, LoadError> {
        let tokenizer = Tokenizer::load(folder)?;
        let templates = Templates::load(folder)?;
        let family = Family::of(folder)?;
        let uncached = match (cache_bytes, tokenizer.splits()) {
            (0, _) => Some("it has no room".to_owned()),
            (_, Err(reason)) => Some(reason.to_owned()),
            (_, Ok(())) => None,
        };
        let cache = uncached.is_none().then(|| Cache::new(cache_bytes, seed));
        Ok(Self { tokenizer: Some(tokenizer), templates, family, cache, uncached })
    }

    /// Why prefixes are not kept; `None` if they are, or there is no tokenizer.
    pub fn uncached(&self) -> Option<&str> {
        self.uncached.as_deref()
    }

    /// The prefix cache.
    pub const fn cache(&self) -> Option<&Cache> {
        self.cache.as_ref()
    }

    /// The family of the model, if it encodes chats by itself.
    pub const fn family(&self) -> Option<Family> {
        self.family
    }

    /// The body of a request to `endpoint`, parsed; faster where its beginning was
    /// read before, from those who are `whose`: a tenant, or 0 for all without one.
    pub fn read(&self, endpoint: Endpoint, whose: u64, bytes: &[u8]) -> Result<Body, serde_json::Error> {
        match &self.cache {
            Some(cache) if endpoint == Endpoint::Chat => seen::read(cache, whose, bytes),
            _ => Body::parse(endpoint, bytes),
        }
    }

    /// Token ids and block hashes of `body`. CPU-bound: about 30 ns a byte that
    /// was not seen before, one for others.
    pub fn prepare(&self, asked: &Asked<'_>, mut body: Body) -> Prompt {
        let body = &mut body;
        let namespace = namespace(asked, &body.fields);
        let is_response = asked.endpoint == Endpoint::Responses;
        let mut prompt = Prompt {
            endpoint: asked.endpoint,
            count: endpoint::estimate(body),
            images: media::keys(body),
            bypasses_cache: endpoint::bypasses_cache(&body.fields),
            previous_response: responses::previous(&body.fields).filter(|_| is_response).map(Arc::from),
            namespace,
            ..Prompt::default()
        };
        if let Err(refusal) = self.fill(&mut prompt, asked, body) {
            prompt.refused = Some(refusal);
            prompt.parts.clear();
        }
        prompt
    }

    fn fill(&self, prompt: &mut Prompt, asked: &Asked<'_>, body: &mut Body) -> Result<(), Refusal> {
        let root = asked.identity.root(&prompt.namespace);
        match self.content(asked.endpoint, body, asked.engine)? {
            Content::Ids(lists) => {
                let part = |tokens: Vec<u32>| Part { blocks: chain(root, asked.size, &tokens), tokens };
                prompt.parts = lists.into_iter().map(part).collect();
            }
            Content::Texts(texts, specials) => {
                for text in texts {
                    let (part, work) = self.encode(&text, specials, root, asked.size)?;
                    prompt.add(part, work);
                }
            }
            Content::Chat(chat) => {
                let specials = chat.specials;
                let rendered = self.render(*chat, asked.engine, asked.now_unix_ms)?;
                let known = self.known(&rendered)?;
                let (mut part, work) = self.encode(known, specials, root, asked.size)?;
                if let Some(text) = &rendered.appended {
                    self.append(&mut part, text, root, asked.size)?;
                }
                prompt.add(part, work);
                prompt.count_all();
                let rest = rendered.text.len() - known.len();
                prompt.is_exact = rest == 0;
                prompt.count.0 += rest as u64 / 4;
                return Ok(());
            }
        }
        prompt.count_all();
        prompt.is_exact = true;
        Ok(())
    }

    /// The prompts of `body`, moved out of it.
    pub fn content(&self, endpoint: Endpoint, body: &mut Body, engine: Engine) -> Result<Content, Refusal> {
        let content = endpoint::content(endpoint, body, engine, self.templates.as_ref())?;
        match (&content, self.family) {
            (Content::Chat(_), Some(family)) if family.bypasses(engine, endpoint) => {
                Err(Refusal::Family(family))
            }
            _ => Ok(content),
        }
    }

    /// The text of a chat.
    pub fn render(&self, chat: chat::Chat, engine: Engine, now_unix_ms: u64) -> Result<Rendered, Refusal> {
        let templates = self.templates.as_ref().ok_or(Refusal::NoTemplate)?;
        render::render(templates, chat, engine, now_unix_ms).map_err(|error| {
            tracing::debug!(target: "kv_router::prompt", error = %crate::chain(&error), "chat was not rendered");
            error.refusal()
        })
    }

    /// The beginning of a text whose tokens are known: all of it, or up to the last
    /// boundary before the first media.
    pub fn known<'a>(&self, rendered: &'a Rendered) -> Result<&'a str, Refusal> {
        if rendered.exact == rendered.text.len() {
            return Ok(&rendered.text);
        }
        let tokenizer = self.tokenizer.as_ref().ok_or(Refusal::NoTokenizer)?;
        if tokenizer.splits().is_err() {
            return Err(Refusal::Media);
        }
        let before = tokenizer.boundaries(&rendered.text).take_while(|at| *at <= rendered.exact);
        Ok(&rendered.text[..before.last().unwrap_or(0)])
    }

    /// Ids and block hashes of one text.
    pub fn encode(
        &self,
        text: &str,
        specials: Specials,
        root: BlockHash,
        size: BlockSize,
    ) -> Result<(Part, Work), Refusal> {
        let tokenizer = self.tokenizer.as_ref().ok_or(Refusal::NoTokenizer)?;
        let mut encoder = Encoder { tokenizer, size, last: root, tokens: Vec::new(), blocks: Vec::new() };
        let reused = match (&self.cache, tokenizer.affixes(specials)) {
            (Some(cache), Some((before, after))) => {
                let variant = u64::from(size.tokens()) << 1 | u64::from(specials == Specials::Add);
                encoder.cached(cache, cache.root(root, variant), text, before, after)
            }
            _ => tokenizer.encode(text, specials).map(|tokens| {
                encoder.push(tokens);
                0
            }),
        };
        let reused = reused.map_err(|error| {
            tracing::warn!(target: "kv_router::prompt", error = %error, "prompt was not tokenised");
            Refusal::Untokenizable
        })?;
        let encoded = Tokens((encoder.tokens.len() - reused) as u64);
        let work = Work { tokenisations: 1, reused: Tokens(reused as u64), encoded };
        Ok((Part { tokens: encoder.tokens, blocks: encoder.blocks }, work))
    }

    /// Tokens of a text of its own behind a prompt, as SGLang appends them: with
    /// special tokens, but for the one that begins a text.
    fn append(&self, part: &mut Part, text: &str, root: BlockHash, size: BlockSize) -> Result<(), Refusal> {
        let tokenizer = self.tokenizer.as_ref().ok_or(Refusal::NoTokenizer)?;
        let (before, after) = tokenizer.affixes(Specials::Add).ok_or(Refusal::Unrenderable)?;
        if before.len() > 1 || !after.is_empty() {
            return Err(Refusal::Unrenderable);
        }
        let more = tokenizer.encode(text, Specials::AsWritten).map_err(|_| Refusal::Untokenizable)?;
        part.tokens.extend(more);
        part.blocks = chain(root, size, &part.tokens);
        Ok(())
    }
}

impl Prompt {
    fn add(&mut self, part: Part, work: Work) {
        self.parts.push(part);
        self.work.tokenisations += work.tokenisations;
        self.work.reused.0 += work.reused.0;
        self.work.encoded.0 += work.encoded.0;
    }

    fn count_all(&mut self) {
        self.count = Tokens(self.parts.iter().map(|part| part.tokens.len() as u64).sum());
    }
}

impl Encoder<'_> {
    /// Takes what the cache has of `text`, makes the rest and keeps it. How many
    /// tokens the cache had.
    fn cached(
        &mut self,
        cache: &Cache,
        root: Key,
        text: &str,
        before: &[u32],
        after: &[u32],
    ) -> Result<usize, tokenize::EncodeError> {
        let (mut key, mut from, mut reused, mut hits) = (root, 0, 0, true);
        self.tokens.reserve(text.len() / 3);
        let tokenizer = self.tokenizer;
        for to in tokenizer.boundaries(text) {
            if to - from < MIN_PIECE_BYTES {
                continue;
            }
            let piece = &text[from..to];
            key = key.next(piece);
            let found = if hits { cache.piece(key) } else { None };
            match found {
                Some(known) => {
                    self.tokens.extend_from_slice(&known.ids);
                    self.blocks.extend_from_slice(&known.blocks);
                    self.last = known.blocks.last().copied().unwrap_or(self.last);
                    reused = self.tokens.len();
                }
                None => {
                    // Behind a gap nothing is looked up: it would not be there.
                    hits = false;
                    let (ids, blocks) = (self.tokens.len(), self.blocks.len());
                    if from == 0 {
                        self.tokens.extend_from_slice(before);
                    }
                    let made = tokenizer.encode(piece, Specials::AsWritten)?;
                    self.push(made);
                    let made = Piece { ids: self.tokens[ids..].into(), blocks: self.blocks[blocks..].into() };
                    cache.insert(key, made);
                }
            }
            from = to;
        }
        if from == 0 {
            self.tokens.extend_from_slice(before);
        }
        let made = tokenizer.encode(&text[from..], Specials::AsWritten)?;
        self.push(made);
        self.push(after.to_vec());
        Ok(reused)
    }

    /// Appends ids, and the hashes of the blocks that they fill.
    fn push(&mut self, ids: Vec<u32>) {
        if self.tokens.is_empty() {
            self.tokens = ids;
        } else {
            self.tokens.extend_from_slice(&ids);
        }
        let hashed = self.blocks.len() * self.size.as_usize();
        let more = chain(self.last, self.size, &self.tokens[hashed..]);
        self.last = more.last().copied().unwrap_or(self.last);
        self.blocks.extend(more);
    }
}

/// What may share blocks with a request.
fn namespace(asked: &Asked<'_>, body: &Value) -> Namespace {
    let text = |name: &str| body.get(name).and_then(Value::as_str).map(Arc::from);
    let is_sglang = asked.engine == Engine::SGLang;
    // SGLang may name the adapter beside the model.
    let adapter = asked.adapter.clone().or_else(|| text("lora_path").filter(|_| is_sglang));
    // Its /v1/messages has no such field.
    let has_salt = !(is_sglang && asked.endpoint == Endpoint::Messages);
    Namespace { adapter, salt: text("cache_salt").filter(|_| has_salt) }
}

#[cfg(test)]
mod tests;
