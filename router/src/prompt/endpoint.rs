//! Where a request body keeps its prompt.
//!
//! Only real top-level fields count; text inside a prompt never does. Values are
//! moved out of the body: a body of many megabytes is not copied.

use http::Method;
use kvrouter_core::units::Tokens;
use kvrouter_crds::config::Engine;
use serde_json::Value;

use super::body::{Body, Message};
use super::chat::{self, Chat, is_given, is_true, take};
use super::template::Templates;
use super::tokenize::Specials;
use super::{Refusal, anthropic, responses};

/// What `POST` may ask for without a prompt being computed.
const WITHOUT_PROMPT: [&str; 5] =
    ["/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize", "/v1/messages/count_tokens"];

/// A path that the router understands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Endpoint {
    /// `POST /v1/chat/completions`.
    Chat,
    /// `POST /v1/completions`.
    Completions,
    /// `POST /v1/messages`.
    Messages,
    /// `POST /v1/responses`.
    Responses,
    /// `POST /generate`, SGLang's own.
    Generate,
    /// `POST /v1/embeddings`: forwarded as it is, routed by load.
    Embeddings,
    /// Anything else: forwarded as it is, routed by load.
    #[default]
    Other,
}

/// A prompt as a body holds it.
#[derive(Debug, PartialEq)]
pub enum Content {
    /// Ready-made token ids, one list per prompt.
    Ids(Vec<Vec<u32>>),
    /// Texts, one per prompt, and whether the tokenizer adds its special tokens.
    Texts(Vec<String>, Specials),
    /// Messages for the chat template.
    Chat(Box<Chat>),
}

impl Endpoint {
    /// The endpoint of a `POST` to `path`.
    pub fn of(path: &str) -> Self {
        match path {
            "/v1/chat/completions" => Self::Chat,
            "/v1/completions" => Self::Completions,
            "/v1/messages" => Self::Messages,
            "/v1/responses" => Self::Responses,
            "/generate" => Self::Generate,
            "/v1/embeddings" => Self::Embeddings,
            _ => Self::Other,
        }
    }

    /// Stable label for metrics.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Completions => "completions",
            Self::Messages => "messages",
            Self::Responses => "responses",
            Self::Generate => "generate",
            Self::Embeddings => "embeddings",
            Self::Other => "other",
        }
    }

    /// Whether the body must be a JSON object that names the pool's model.
    pub const fn names_a_model(self) -> bool {
        matches!(self, Self::Chat | Self::Completions | Self::Messages | Self::Responses)
    }

    /// Whether the body's prompt is read.
    pub const fn has_a_prompt(self) -> bool {
        self.names_a_model() || matches!(self, Self::Generate)
    }

    /// Whether a chat template makes the prompt.
    pub const fn is_a_chat(self) -> bool {
        matches!(self, Self::Chat | Self::Messages | Self::Responses)
    }
}

/// The prompts of `body`, moved out of it. `templates` are the model's, which
/// decide how some endpoints turn into chats.
pub fn content(
    endpoint: Endpoint,
    body: &mut Body,
    engine: Engine,
    templates: Option<&Templates>,
) -> Result<Content, Refusal> {
    let Body { fields: body, messages } = body;
    // What the engine cuts away, puts before it or keeps apart without telling is
    // not guessed.
    let unknown = ["truncate_prompt_tokens", "extra_key", "session_params", "prompt_embeds", "input_embeds"];
    if unknown.iter().any(|name| is_given(body, name)) || body.get("cache_salt").is_some_and(Value::is_array)
    {
        return Err(Refusal::Unrenderable);
    }
    // Engines take 0, 1 and texts for these, and a guess would be another prompt.
    let switches = ["add_generation_prompt", "continue_final_message", "add_special_tokens", "echo"];
    if switches.iter().any(|name| is_given(body, name) && !body[*name].is_boolean()) {
        return Err(Refusal::Malformed);
    }
    let is_sglang = engine == Engine::SGLang;
    let traits = || {
        let chosen = templates.ok_or(Refusal::NoTemplate)?.choose(false, !is_sglang);
        chosen.map(|(_, traits)| traits).ok_or(Refusal::NoTemplate)
    };
    let chat = match endpoint {
        Endpoint::Chat => return chat_content(body, messages.take(), engine),
        Endpoint::Completions => return completion(body, engine),
        Endpoint::Generate if is_sglang => return generate(body),
        Endpoint::Messages if is_sglang => anthropic::of_sglang(body, traits()?)?,
        Endpoint::Messages => anthropic::of_vllm(body, traits()?)?,
        Endpoint::Responses if is_sglang => responses::of_sglang(body, traits()?)?,
        Endpoint::Responses => responses::of_vllm(body)?,
        Endpoint::Generate | Endpoint::Embeddings | Endpoint::Other => return Err(Refusal::NoPrompt),
    };
    Ok(Content::Chat(Box::new(chat)))
}

/// How many prompts `body` has, where a body may have several: a list, unless it is
/// one of token ids.
pub fn prompts_in(endpoint: Endpoint, body: &Value) -> usize {
    let names: &[&str] = match endpoint {
        Endpoint::Completions => &["prompt"],
        Endpoint::Generate => &["input_ids", "text"],
        _ => &[],
    };
    let lists = names.iter().filter_map(|name| body.get(*name).and_then(Value::as_array));
    let several = lists.filter(|list| !list.first().is_some_and(Value::is_number));
    several.map(Vec::len).max().unwrap_or(1)
}

/// How many sequences `body` is to an engine: all answers of all its prompts. Rather
/// more than fewer where that is not certain; at least one.
pub fn sequences_in(endpoint: Endpoint, body: &Value) -> u64 {
    let prompts = match endpoint.has_a_prompt() {
        true => prompts_in(endpoint, body),
        // Engines take a list of texts, or of lists of ids, as so many prompts, by many names.
        false => {
            let lists =
                body.as_object().into_iter().flat_map(|body| body.values().filter_map(Value::as_array));
            let several = lists.filter(|list| !list.first().is_some_and(Value::is_number));
            several.map(Vec::len).max().unwrap_or(1)
        }
    };
    let sampling = &body["sampling_params"];
    let each = sampling.as_array().map_or(std::slice::from_ref(sampling), Vec::as_slice);
    let wanted = |of: &Value| ["n", "best_of"].iter().filter_map(|name| as_count(&of[*name])).max();
    let answers = each.iter().chain([body]).filter_map(wanted).max().unwrap_or(1);
    (prompts as u64).saturating_mul(answers).clamp(1, MAX_SEQUENCES)
}

/// A count as engines take it: a whole number, however it is written.
fn as_count(value: &Value) -> Option<u64> {
    let whole = |number: f64| (number.fract() == 0.0 && number >= 0.0).then_some(number as u64);
    let text = || value.as_str()?.trim().parse().ok();
    value.as_u64().or_else(|| value.as_f64().and_then(whole)).or_else(text)
}

/// Most sequences that one request counts as: an engine that was asked for more has
/// refused it.
pub const MAX_SEQUENCES: u64 = 1 << 16;

/// Whether the engine computes the whole prompt, whatever it holds: it wants
/// the log-probabilities of prompt tokens.
pub fn bypasses_cache(body: &Value) -> bool {
    is_given(body, "prompt_logprobs")
        || (is_true(body, "echo") && is_given(body, "logprobs"))
        || body.get("logprob_start_len").and_then(Value::as_i64).is_some_and(|start| start >= 0)
}

fn chat_content(
    body: &mut Value,
    messages: Option<Vec<Message>>,
    engine: Engine,
) -> Result<Content, Refusal> {
    let messages = messages.or_else(|| match take(body, "messages") {
        Some(Value::Array(messages)) => Some(messages.into_iter().map(Message::from).collect()),
        _ => None,
    });
    // Ids that the client made itself win over the messages.
    let given = match engine {
        Engine::SGLang => body.get("input_ids"),
        // vLLM drops them where they would not stand for the whole prompt.
        Engine::VLLM | Engine::ATOM if is_true(body, "echo") || has_media(messages.as_deref()) => None,
        Engine::VLLM | Engine::ATOM => body.pointer("/kv_transfer_params/prompt_token_ids"),
        Engine::Auto => None,
    };
    if let Some(ids) = given.filter(|ids| !ids.is_null()) {
        return ids_of(ids).map(|ids| Content::Ids(vec![ids])).ok_or(Refusal::Malformed);
    }
    // Their place in the prompt is not known, so no text may count.
    if body.get("images").and_then(Value::as_array).is_some_and(|images| !images.is_empty()) {
        return Err(Refusal::Media);
    }
    let messages = messages.ok_or(Refusal::Malformed)?;
    Ok(Content::Chat(Box::new(chat::of_completions(body, messages, engine)?)))
}

/// Whether a message has a part that is no text.
fn has_media(messages: Option<&[Message]>) -> bool {
    let messages = messages.into_iter().flatten();
    let parts = messages.filter_map(|message| message.get("content").and_then(Value::as_array)).flatten();
    let texts = ["text", "input_text", "output_text", "refusal", "thinking", "tool_reference"];
    let is_text =
        |part: &Value| part.get("type").and_then(Value::as_str).is_none_or(|kind| texts.contains(&kind));
    parts.filter(|part| part.is_object()).any(|part| !is_text(part))
}

fn completion(body: &mut Value, engine: Engine) -> Result<Content, Refusal> {
    // A template of the server's own puts both sides together.
    if is_given(body, "suffix") {
        return Err(Refusal::Unrenderable);
    }
    // Completions have their special tokens from the tokenizer, unless the request
    // says otherwise, which SGLang does not hear.
    let specials = match body.get("add_special_tokens").and_then(Value::as_bool) {
        Some(false) if engine != Engine::SGLang => Specials::AsWritten,
        _ => Specials::Add,
    };
    prompts(take(body, "prompt").ok_or(Refusal::Malformed)?, specials)
}

fn generate(body: &mut Value) -> Result<Content, Refusal> {
    let media = ["image_data", "video_data", "audio_data"];
    if media.iter().any(|name| is_given(body, name)) {
        return Err(Refusal::Media);
    }
    // Ids win over text.
    match take(body, "input_ids") {
        Some(ids) => prompts(ids, Specials::AsWritten),
        None => prompts(take(body, "text").ok_or(Refusal::Malformed)?, Specials::Add),
    }
}

/// One text, several texts, one list of ids or several; deeper lists are none.
fn prompts(given: Value, specials: Specials) -> Result<Content, Refusal> {
    let list = match given {
        Value::String(text) => return Ok(Content::Texts(vec![text], specials)),
        Value::Array(list) => list,
        _ => return Err(Refusal::Malformed),
    };
    match list.first() {
        Some(Value::Number(_)) => {
            let ids = ids_of_list(&list).ok_or(Refusal::Malformed)?;
            Ok(Content::Ids(vec![ids]))
        }
        Some(Value::Array(_)) => {
            let all: Option<Vec<Vec<u32>>> = list.iter().map(ids_of).collect();
            all.map(Content::Ids).ok_or(Refusal::Malformed)
        }
        Some(Value::String(_)) => {
            let text = |value: Value| match value {
                Value::String(text) => Ok(text),
                _ => Err(Refusal::Malformed),
            };
            let texts: Result<Vec<String>, Refusal> = list.into_iter().map(text).collect();
            Ok(Content::Texts(texts?, specials))
        }
        _ => Err(Refusal::Malformed),
    }
}

fn ids_of(value: &Value) -> Option<Vec<u32>> {
    ids_of_list(value.as_array()?)
}

fn ids_of_list(list: &[Value]) -> Option<Vec<u32>> {
    list.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok())).collect()
}

/// Tokens of a body that could not be tokenised: the bytes of its text by four,
/// without `data:` URLs and `data` fields, which hold media.
pub fn estimate(body: &Body) -> Tokens {
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
    let of_fields = fields.iter().filter_map(|name| body.fields.get(name)).map(bytes).sum::<u64>();
    let of_message = |message: &Message| match message {
        Message::Plain { content, .. } if content.starts_with("data:") => 0,
        Message::Plain { role, content } => (role.len() + content.len()) as u64,
        Message::Other(value) => bytes(value),
    };
    let of_messages = body.messages.iter().flatten().map(of_message).sum::<u64>();
    Tokens((of_fields + of_messages) / 4)
}

/// Whether such a request makes an engine compute no prompt, so that nothing is cached
/// that another one could find.
pub fn computes_no_prompt(method: &Method, path: &str) -> bool {
    let cancels = || path.starts_with("/v1/responses/") && path.ends_with("/cancel");
    match *method {
        Method::GET | Method::HEAD | Method::OPTIONS => true,
        Method::POST => WITHOUT_PROMPT.contains(&path) || cancels(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[track_caller]
    fn check(why: &str, endpoint: Endpoint, body: &Value, expected: Result<Content, Refusal>) {
        assert_eq!(
            content(endpoint, &mut Body::from_json(body.clone()), Engine::VLLM, None),
            expected,
            "{why}"
        );
    }

    #[track_caller]
    fn check_sglang(why: &str, endpoint: Endpoint, body: &Value, expected: Result<Content, Refusal>) {
        assert_eq!(
            content(endpoint, &mut Body::from_json(body.clone()), Engine::SGLang, None),
            expected,
            "{why}"
        );
    }

    fn texts(all: &[&str], specials: Specials) -> Result<Content, Refusal> {
        Ok(Content::Texts(all.iter().map(|text| (*text).to_owned()).collect(), specials))
    }

    fn ids() -> Result<Content, Refusal> {
        Ok(Content::Ids(vec![vec![1, 2]]))
    }

    #[test]
    fn completions_have_texts_or_ids_one_or_several() {
        use Specials::{Add, AsWritten};
        let of = |prompt: Value| json!({"prompt": prompt});
        let at = |why, prompt, expected| check(why, Endpoint::Completions, &of(prompt), expected);
        at("text", json!("a"), texts(&["a"], Add));
        at("texts", json!(["a", "b"]), texts(&["a", "b"], Add));
        at("ids", json!([1, 2]), ids());
        at("lists of ids", json!([[1, 2], [3]]), Ok(Content::Ids(vec![vec![1, 2], vec![3]])));
        for bad in [
            json!([[[1]]]),
            json!([-1]),
            json!([]),
            json!(["a", 1]),
            json!([1, "a"]),
            json!([[1], "a"]),
            json!(5),
        ] {
            check("malformed", Endpoint::Completions, &of(bad), Err(Refusal::Malformed));
        }
        check("none", Endpoint::Completions, &json!({}), Err(Refusal::Malformed));
        let bare = json!({"prompt": "a", "add_special_tokens": false});
        check("no special tokens", Endpoint::Completions, &bare, texts(&["a"], AsWritten));
        check_sglang("SGLang has no such field", Endpoint::Completions, &bare, texts(&["a"], Add));
    }

    #[test]
    fn what_does_not_touch_the_prompt_changes_nothing() {
        for (name, value) in [
            ("n", json!(4)),
            ("best_of", json!(2)),
            ("echo", json!(true)),
            ("prompt_logprobs", json!(0)),
            ("user", json!("u")),
            ("stream", json!(true)),
            ("logprobs", json!(3)),
        ] {
            let mut body = json!({"prompt": "a"});
            body[name] = value;
            check(name, Endpoint::Completions, &body, texts(&["a"], Specials::Add));
        }
    }

    #[test]
    fn ready_made_ids_win_where_the_engine_takes_them() {
        let both = json!({"messages": [], "kv_transfer_params": {"prompt_token_ids": [1, 2]}});
        check("over messages", Endpoint::Chat, &both, ids());
        let echoed =
            json!({"messages": [], "echo": true, "kv_transfer_params": {"prompt_token_ids": [1, 2]}});
        check("but not when echoed", Endpoint::Chat, &echoed, Err(Refusal::Malformed));
        let image = json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}],
            "kv_transfer_params": {"prompt_token_ids": [1, 2]}});
        assert!(matches!(
            content(Endpoint::Chat, &mut Body::from_json(image), Engine::VLLM, None),
            Ok(Content::Chat(_))
        ));
        let both = json!({"messages": [], "input_ids": [1, 2]});
        check_sglang("SGLang's place for ids", Endpoint::Chat, &both, ids());
        let both = json!({"text": "a", "input_ids": [1, 2]});
        check_sglang("over text", Endpoint::Generate, &both, ids());
    }

    #[test]
    fn generate_is_sglangs_own() {
        let text = json!({"text": ["a", "b"]});
        check_sglang("texts", Endpoint::Generate, &text, texts(&["a", "b"], Specials::Add));
        check("vLLM has no such path", Endpoint::Generate, &text, Err(Refusal::NoPrompt));
        let picture = json!({"text": "a", "image_data": "x"});
        check_sglang("a picture somewhere", Endpoint::Generate, &picture, Err(Refusal::Media));
    }

    #[test]
    fn what_changes_the_prompt_behind_the_router_is_refused() {
        let of = |name: &str, value: Value| {
            let mut body = json!({"prompt": "a"});
            body[name] = value;
            body
        };
        let at = |name: &str, value| {
            check(name, Endpoint::Completions, &of(name, value), Err(Refusal::Unrenderable))
        };
        at("truncate_prompt_tokens", json!(5));
        at("extra_key", json!("t"));
        at("suffix", json!("b"));
        at("session_params", json!({}));
        at("prompt_embeds", json!("x"));
        at("cache_salt", json!(["a", "b"]));
        check("other paths", Endpoint::Other, &json!({"prompt": "a"}), Err(Refusal::NoPrompt));
        check("embeddings", Endpoint::Embeddings, &json!({"input": "a"}), Err(Refusal::NoPrompt));
        let own = json!({"messages": [], "chat_template": "x"});
        check("a template of the request's own", Endpoint::Chat, &own, Err(Refusal::Unrenderable));
    }

    #[test]
    fn sequences_are_all_answers_of_all_prompts() {
        use Endpoint::{Chat, Completions, Embeddings, Generate, Other};
        for (endpoint, body, expected) in [
            (Chat, json!({"messages": [1, 2]}), 1),
            (Chat, json!({"messages": [], "n": 4}), 4),
            (Chat, json!({"n": 0}), 1),
            (Chat, json!({"n": "4"}), 4),
            (Chat, json!({"n": 4.0}), 4),
            (Chat, json!({"n": 4.5}), 1),
            (Chat, json!({"n": "many"}), 1),
            (Chat, json!({"n": u64::MAX}), MAX_SEQUENCES),
            (Embeddings, json!({"n": MAX_SEQUENCES, "input": ["a", "b"]}), MAX_SEQUENCES),
            (Completions, json!({"prompt": "a", "n": 2, "best_of": 5}), 5),
            (Completions, json!({"prompt": ["a", "b", "c"]}), 3),
            (Completions, json!({"prompt": [1, 2, 3]}), 1),
            (Completions, json!({"prompt": [[1], [2]], "n": 4}), 8),
            (Completions, json!({"prompt": []}), 1),
            (Generate, json!({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 3}]}), 6),
            (Generate, json!({"input_ids": [1, 2], "sampling_params": {"n": 3}}), 3),
            (Embeddings, json!({"input": ["a", "b"]}), 2),
            (Embeddings, json!({"input": [1, 2]}), 1),
            (Other, json!({"query": "a", "documents": ["b", "c", "d"]}), 3),
            (Other, Value::Null, 1),
        ] {
            assert_eq!(sequences_in(endpoint, &body), expected, "{body}");
        }
    }

    #[test]
    fn prompts_whose_log_probabilities_are_wanted_bypass_the_cache() {
        for (body, bypasses) in [
            (json!({"prompt_logprobs": 0}), true),
            (json!({"echo": true, "logprobs": 1}), true),
            (json!({"logprob_start_len": 0}), true),
            (json!({"logprob_start_len": -1}), false),
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
        assert_eq!(
            estimate(&Body::from_json(body)),
            Tokens((392 + 4 + 4 + 9) / 4),
            "text and the words of the shape"
        );
    }
}
