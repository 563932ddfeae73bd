//! Where a request body keeps its prompt.
//!
//! Only real top-level fields count; text inside a prompt never does.

use kvrouter_core::units::Tokens;
use kvrouter_crds::config::Engine;
use serde_json::{Map, Value};

use super::Refusal;
use super::tokenize::Specials;

/// A path that the router understands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Endpoint {
    /// `POST /v1/chat/completions`.
    Chat,
    /// `POST /v1/completions`.
    Completions,
    /// Anything else: forwarded as it is, routed by load.
    Other,
}

/// A prompt as a body holds it.
#[derive(Debug, PartialEq)]
pub enum Content<'a> {
    /// Ready-made token ids.
    Ids(Vec<u32>),
    /// Text, and whether the tokenizer adds its special tokens.
    Text(&'a str, Specials),
    /// Messages for the chat template.
    Chat(Chat<'a>),
}

/// What a chat template is given.
#[derive(Debug, PartialEq)]
pub struct Chat<'a> {
    /// The messages.
    pub messages: &'a [Value],
    /// Tools, if there are any.
    pub tools: Option<&'a Value>,
    /// Which of them may be called.
    pub tool_choice: Option<&'a Value>,
    /// Documents, if there are any.
    pub documents: Option<&'a Value>,
    /// Whether the template opens the assistant's turn.
    pub add_generation_prompt: bool,
    /// `chat_template_kwargs`.
    pub kwargs: Option<&'a Map<String, Value>>,
    /// `reasoning_effort`, which templates may read.
    pub reasoning_effort: Option<&'a Value>,
    /// Whether the tokenizer adds special tokens to what the template wrote.
    pub specials: Specials,
}

impl Endpoint {
    /// The endpoint of a `POST` to `path`.
    pub fn of(path: &str) -> Self {
        match path {
            "/v1/chat/completions" => Self::Chat,
            "/v1/completions" => Self::Completions,
            _ => Self::Other,
        }
    }

    /// Stable label for metrics.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Completions => "completions",
            Self::Other => "other",
        }
    }

    /// Whether the body must be a JSON object that names the pool's model.
    pub const fn names_a_model(self) -> bool {
        matches!(self, Self::Chat | Self::Completions)
    }
}

/// The prompt of `body`. Of several prompts the first one counts: engines cache
/// them one by one, and one worker serves them all.
pub fn content(endpoint: Endpoint, body: &Value, engine: Engine) -> Result<Content<'_>, Refusal> {
    let given = |name: &str| body.get(name).is_some_and(|value| !value.is_null());
    // What the engine cuts away, or keeps apart without telling, is not guessed.
    if given("truncate_prompt_tokens") || given("extra_key") {
        return Err(Refusal::Unrenderable);
    }
    match endpoint {
        Endpoint::Chat => chat(body, engine),
        Endpoint::Completions => {
            completion(body.get("prompt").ok_or(Refusal::Malformed)?, specials(body, Specials::Add))
        }
        Endpoint::Other => Err(Refusal::NoPrompt),
    }
}

/// Whether the engine computes the whole prompt, whatever it holds: it wants
/// the log-probabilities of prompt tokens.
pub fn bypasses_cache(body: &Value) -> bool {
    let given = |name: &str| body.get(name).is_some_and(|value| !value.is_null());
    given("prompt_logprobs") || (is_true(body, "echo") && given("logprobs"))
}

/// Chats have their special tokens from the template, completions from the
/// tokenizer, unless the request says otherwise.
fn specials(body: &Value, usual: Specials) -> Specials {
    match body.get("add_special_tokens").and_then(Value::as_bool) {
        Some(true) => Specials::Add,
        Some(false) => Specials::AsWritten,
        None => usual,
    }
}

fn chat(body: &Value, engine: Engine) -> Result<Content<'_>, Refusal> {
    // Ids that the client made itself win over the messages.
    let given = match engine {
        Engine::SGLang => body.get("input_ids"),
        Engine::VLLM | Engine::ATOM => body.pointer("/kv_transfer_params/prompt_token_ids"),
        Engine::Auto => None,
    };
    if let Some(ids) = given.filter(|ids| !ids.is_null()) {
        return ids_of(ids).map(Content::Ids).ok_or(Refusal::Malformed);
    }
    let messages = body.get("messages").and_then(Value::as_array).ok_or(Refusal::Malformed)?;
    if is_true(body, "continue_final_message") || body.get("chat_template").is_some_and(|own| !own.is_null())
    {
        return Err(Refusal::Unrenderable);
    }
    // Their place in the prompt is not known, so no text after them may count.
    if body.get("images").and_then(Value::as_array).is_some_and(|images| !images.is_empty()) {
        return Err(Refusal::Media);
    }
    let present = |name: &str| {
        let value = body.get(name).filter(|value| !value.is_null());
        value.filter(|value| value.as_array().is_none_or(|list| !list.is_empty()))
    };
    Ok(Content::Chat(Chat {
        messages,
        tools: present("tools"),
        tool_choice: present("tool_choice"),
        documents: present("documents"),
        add_generation_prompt: body.get("add_generation_prompt").and_then(Value::as_bool).unwrap_or(true),
        kwargs: body.get("chat_template_kwargs").and_then(Value::as_object),
        reasoning_effort: present("reasoning_effort"),
        specials: specials(body, Specials::AsWritten),
    }))
}

fn completion(prompt: &Value, specials: Specials) -> Result<Content<'_>, Refusal> {
    match prompt {
        Value::String(text) => Ok(Content::Text(text, specials)),
        Value::Array(list) => match list.first() {
            Some(Value::Number(_)) => ids_of(prompt).map(Content::Ids).ok_or(Refusal::Malformed),
            Some(first) => completion_of_list(first, specials),
            None => Err(Refusal::Malformed),
        },
        _ => Err(Refusal::Malformed),
    }
}

/// The first prompt of a list; deeper lists are no prompts.
fn completion_of_list(first: &Value, specials: Specials) -> Result<Content<'_>, Refusal> {
    match first {
        Value::String(text) => Ok(Content::Text(text, specials)),
        Value::Array(_) => ids_of(first).map(Content::Ids).ok_or(Refusal::Malformed),
        _ => Err(Refusal::Malformed),
    }
}

fn ids_of(value: &Value) -> Option<Vec<u32>> {
    let id = |id: &Value| id.as_u64().and_then(|id| u32::try_from(id).ok());
    value.as_array()?.iter().map(id).collect()
}

fn is_true(body: &Value, name: &str) -> bool {
    body.get(name).and_then(Value::as_bool).unwrap_or(false)
}

/// Tokens of a body that could not be tokenised: the bytes of its text by four,
/// without `data:` URLs and `data` fields, which hold media.
pub fn estimate(body: &Value) -> Tokens {
    fn bytes(value: &Value) -> u64 {
        match value {
            Value::String(text) if text.starts_with("data:") => 0,
            Value::String(text) => text.len() as u64,
            Value::Array(items) => items.iter().map(bytes).sum(),
            Value::Object(fields) => {
                fields.iter().filter(|(name, _)| *name != "data").map(|(_, value)| bytes(value)).sum()
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => 0,
        }
    }
    let fields = ["messages", "prompt", "input", "text", "system"];
    Tokens(fields.iter().filter_map(|name| body.get(name)).map(bytes).sum::<u64>() / 4)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[track_caller]
    fn check(why: &str, endpoint: Endpoint, body: &Value, expected: Result<Content<'_>, Refusal>) {
        assert_eq!(content(endpoint, body, Engine::VLLM), expected, "{why}");
    }

    #[test]
    fn finds_the_prompt_of_every_shape() {
        let ids = || Ok(Content::Ids(vec![1, 2]));
        let of = |prompt: Value| json!({"prompt": prompt});
        check("text", Endpoint::Completions, &of(json!("a")), Ok(Content::Text("a", Specials::Add)));
        check(
            "the first text",
            Endpoint::Completions,
            &of(json!(["a", "b"])),
            Ok(Content::Text("a", Specials::Add)),
        );
        check("ids", Endpoint::Completions, &of(json!([1, 2])), ids());
        check("the first ids", Endpoint::Completions, &of(json!([[1, 2], [3]])), ids());
        check(
            "no list of lists of lists",
            Endpoint::Completions,
            &of(json!([[[1]]])),
            Err(Refusal::Malformed),
        );
        check("negative ids", Endpoint::Completions, &of(json!([-1])), Err(Refusal::Malformed));
        check("empty", Endpoint::Completions, &of(json!([])), Err(Refusal::Malformed));
        check("none", Endpoint::Completions, &json!({}), Err(Refusal::Malformed));
        let both = json!({"messages": [], "kv_transfer_params": {"prompt_token_ids": [1, 2]}});
        check("ids win over messages", Endpoint::Chat, &both, ids());
        let both = json!({"messages": [], "input_ids": [1, 2]});
        assert_eq!(content(Endpoint::Chat, &both, Engine::SGLang), ids(), "SGLang's place for ids");
        let bare = json!({"prompt": "a", "add_special_tokens": false});
        check("no special tokens", Endpoint::Completions, &bare, Ok(Content::Text("a", Specials::AsWritten)));
        let cut = json!({"prompt": "a", "truncate_prompt_tokens": 5});
        check("a prompt that is cut", Endpoint::Completions, &cut, Err(Refusal::Unrenderable));
        let apart = json!({"prompt": "a", "extra_key": "t"});
        check("kept apart without telling", Endpoint::Completions, &apart, Err(Refusal::Unrenderable));
        check("other paths", Endpoint::Other, &json!({"prompt": "a"}), Err(Refusal::NoPrompt));
        let own = json!({"messages": [], "chat_template": "x"});
        check("a template of the request's own", Endpoint::Chat, &own, Err(Refusal::Unrenderable));
    }

    #[test]
    fn prompts_whose_log_probabilities_are_wanted_bypass_the_cache() {
        for (body, bypasses) in [
            (json!({"prompt_logprobs": 0}), true),
            (json!({"echo": true, "logprobs": 1}), true),
            (json!({"echo": true}), false),
            (json!({"logprobs": 1, "prompt_logprobs": null}), false),
        ] {
            assert_eq!(bypasses_cache(&body), bypasses, "{body}");
        }
    }

    #[test]
    fn estimates_leave_media_out() {
        let image = format!("data:image/png;base64,{}", "A".repeat(10_000));
        let body = json!({"messages": [{"role": "user", "content": [
            {"type": "text", "text": "x".repeat(392)},
            {"type": "image_url", "image_url": {"url": image}},
            {"source": {"data": "B".repeat(10_000)}}
        ]}]});
        assert_eq!(estimate(&body), Tokens((392 + 4 + 4 + 9) / 4), "text and the words of the shape");
    }
}
