//! What a request's body asks for, read leniently as the engines do: unknown fields are
//! ignored, known ones of a wrong type are refused.

use axum::http::HeaderMap;
use serde_json::Value;

use super::{Engine, Refusal};
use crate::cache::CacheKey;
use crate::hash::Namespace;

/// Output tokens of a request that does not say how many it wants.
const DEFAULT_MAX_TOKENS: usize = 16;
/// Prompts in one completion request, and answers to each.
const MAX_CHOICES: usize = 128;

/// Chat or completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Chat,
    Completion,
}

/// Everything but the prompt.
pub(super) struct Wanted {
    pub(super) kind: Kind,
    /// As the client spelled it.
    pub(super) model: String,
    pub(super) max_tokens: usize,
    /// `length` when the client set the limit; else the model is taken to have ended by itself.
    pub(super) finish_reason: &'static str,
    pub(super) answers: usize,
    pub(super) stream: bool,
    pub(super) include_usage: bool,
    pub(super) return_token_ids: bool,
    pub(super) key: CacheKey,
}

impl Wanted {
    pub(super) fn read(
        engine: &Engine,
        kind: Kind,
        headers: &HeaderMap,
        body: &Value,
    ) -> Result<Self, Refusal> {
        let model = body["model"].as_str().unwrap_or(&engine.config.model).to_owned();
        let limit = match count(body, "max_completion_tokens")? {
            Some(limit) => Some(limit),
            None => count(body, "max_tokens")?,
        };
        let answers = count(body, "n")?.unwrap_or(1);
        if answers == 0 || answers > MAX_CHOICES {
            return Err(Refusal::bad_request(format!("n must be between 1 and {MAX_CHOICES}")));
        }
        if limit == Some(0) {
            return Err(Refusal::bad_request("max_tokens must be at least 1"));
        }
        if engine.config.wire.is_vllm() {
            check_as_vllm(body, limit)?;
        }
        Ok(Self {
            kind,
            key: cache_key(engine, &model, headers, body)?,
            model,
            max_tokens: limit.unwrap_or(DEFAULT_MAX_TOKENS),
            finish_reason: if limit.is_some() { "length" } else { "stop" },
            answers,
            stream: body["stream"] == true,
            include_usage: body["stream_options"]["include_usage"] == true,
            return_token_ids: body["return_token_ids"] == true,
        })
    }
}

/// Fields that contradict each other, which vLLM refuses and SGLang does not mind. Whoever makes a prefill
/// request of a client's meets them.
fn check_as_vllm(body: &Value, limit: Option<usize>) -> Result<(), Refusal> {
    if !body["stream_options"].is_null() && body["stream"] != true {
        return Err(Refusal::bad_request("Stream options can only be defined when `stream=True`."));
    }
    let least = count(body, "min_tokens")?.unwrap_or(0);
    match limit.filter(|limit| least > *limit) {
        None => Ok(()),
        Some(limit) => Err(Refusal::bad_request(format!(
            "min_tokens must be less than or equal to max_tokens={limit}, got {least}."
        ))),
    }
}

/// The prompts of a body. Tokenising is slow: not for an async thread.
pub(super) fn prompts(engine: &Engine, kind: Kind, body: &Value) -> Result<Vec<Vec<u32>>, Refusal> {
    let prompts = match kind {
        Kind::Chat => vec![chat_prompt(engine, body)?],
        Kind::Completion => completion_prompts(engine, &body["prompt"])?,
    };
    if prompts.is_empty() || prompts.len() > MAX_CHOICES || prompts.iter().any(Vec::is_empty) {
        return Err(Refusal::bad_request("the prompt must not be empty"));
    }
    Ok(prompts)
}

/// Token ids that a chat brings along; null where it has none or the engine takes none.
fn ids_of_chat<'a>(engine: &Engine, body: &'a Value) -> &'a Value {
    match (engine.config.wire.takes_token_ids(), engine.config.wire.is_vllm()) {
        (false, _) => &Value::Null,
        // Both need the messages rendered.
        (true, true) if body["echo"] == true || has_media(body) => &Value::Null,
        (true, true) => &body["kv_transfer_params"]["prompt_token_ids"],
        (true, false) => &body["input_ids"],
    }
}

fn has_media(body: &Value) -> bool {
    let parts = |message: &Value| message["content"].as_array().cloned().unwrap_or_default();
    let messages = body["messages"].as_array().into_iter().flatten();
    messages.flat_map(parts).any(|part| part["type"] != "text")
}

/// Whether all prompts of a body are token ids already.
pub(super) fn brings_ids(engine: &Engine, kind: Kind, body: &Value) -> bool {
    let is_text = |item: &Value| item.is_string();
    match kind {
        Kind::Chat => !ids_of_chat(engine, body).is_null(),
        Kind::Completion => body["prompt"].as_array().is_some_and(|list| !list.iter().any(is_text)),
    }
}

/// A chat's tokens: handed over by the client where the engine takes them, else rendered.
fn chat_prompt(engine: &Engine, body: &Value) -> Result<Vec<u32>, Refusal> {
    let given = ids_of_chat(engine, body);
    if given.is_null() {
        return Ok(engine.prompter.encode_chat(body)?);
    }
    if !body["messages"].is_array() {
        return Err(Refusal::bad_request("messages must be a list"));
    }
    token_ids(given).ok_or_else(|| Refusal::bad_request("token ids must be a list of integers"))
}

/// A string, strings, token ids, or lists of token ids.
pub(super) fn completion_prompts(engine: &Engine, prompt: &Value) -> Result<Vec<Vec<u32>>, Refusal> {
    if let Some(text) = prompt.as_str() {
        return Ok(vec![engine.prompter.encode_completion(text)?]);
    }
    let wrong = || Refusal::bad_request("prompt must be a string, strings, token ids or lists of token ids");
    let list = prompt.as_array().ok_or_else(wrong)?;
    if list.first().is_some_and(Value::is_number) {
        return Ok(vec![token_ids(prompt).ok_or_else(wrong)?]);
    }
    let one = |item: &Value| match item.as_str() {
        Some(text) => Ok(engine.prompter.encode_completion(text)?),
        None => token_ids(item).ok_or_else(wrong),
    };
    list.iter().take(MAX_CHOICES + 1).map(one).collect()
}

/// A list of token ids, or none if it is anything else.
pub(super) fn token_ids(value: &Value) -> Option<Vec<u32>> {
    let token = |value: &Value| value.as_u64().and_then(|token| u32::try_from(token).ok());
    value.as_array()?.iter().map(token).collect()
}

/// The rank that a request names; none when it leaves the choice to the engine.
pub(super) fn named_rank(
    engine: &Engine,
    headers: &HeaderMap,
    body: &Value,
) -> Result<Option<usize>, Refusal> {
    let vllm = engine.config.wire.is_vllm();
    let header = headers.get("x-data-parallel-rank").map(|value| value.to_str().unwrap_or(""));
    let rank = match header.map(str::parse::<i64>) {
        Some(Ok(rank)) => Some(rank),
        Some(Err(_)) if vllm => None,
        Some(Err(_)) => return Err(Refusal::bad_request("X-Data-Parallel-Rank must be an integer")),
        None if vllm => None,
        None => body["routed_dp_rank"].as_i64().or_else(|| body["data_parallel_rank"].as_i64()),
    };
    let Some(rank) = rank else { return Ok(None) };
    let size = engine.ranks.len();
    match usize::try_from(rank).ok().filter(|rank| *rank < size) {
        Some(rank) => Ok(Some(rank)),
        None if vllm => {
            let message = format!("data_parallel_rank {rank} is out of range [0, {size}).");
            Err(Refusal::bad_request(message))
        }
        None => Err(Refusal::bad_request(format!("routed_dp_rank={rank} out of range [0, {size})"))),
    }
}

fn count(body: &Value, field: &str) -> Result<Option<usize>, Refusal> {
    match &body[field] {
        Value::Null => Ok(None),
        value => match value.as_u64().and_then(|value| usize::try_from(value).ok()) {
            Some(value) => Ok(Some(value)),
            None => Err(Refusal::bad_request(format!("{field} must be a non-negative integer"))),
        },
    }
}

fn cache_key(engine: &Engine, model: &str, headers: &HeaderMap, body: &Value) -> Result<CacheKey, Refusal> {
    let vllm = engine.config.wire.is_vllm();
    let text = |field: &str| match &body[field] {
        Value::Null => Ok(None),
        Value::String(text) => Ok(Some(text.clone())),
        _ => Err(Refusal::bad_request(format!("{field} must be a string"))),
    };
    let adapter = if vllm { model } else { body["lora_path"].as_str().unwrap_or(model) };
    let adapters = engine.config.lora.iter().zip(1..);
    let found = adapters.clone().find(|(lora, _)| lora.name == adapter);
    let namespace = found.map_or_else(Namespace::default, |(lora, id)| Namespace::of_lora(lora, id));
    let session_id = if vllm {
        headers.get("x-session-id").and_then(|value| value.to_str().ok()).map(str::to_owned)
    } else {
        body["session_params"]["id"].as_str().map(str::to_owned)
    };
    Ok(CacheKey {
        namespace: Namespace {
            cache_salt: text("cache_salt")?.filter(|salt| !salt.is_empty()),
            extra_key: if vllm { None } else { text("extra_key")? },
            ..namespace
        },
        session_id,
        report_hits: vllm && body["vllm_xargs"]["kv_cache_report_mode"] == "full",
    })
}
