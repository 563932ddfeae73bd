//! Messages as an engine hands them to the template.
//!
//! Engines validate messages, keep the fields they know, turn content into one
//! text or a list of parts as the template wants it, and arguments of tool calls
//! into objects. Templates print what is left, so each step must be the engine's.
//! Authority: vllm/renderers/chat_utils.py (0.32) and
//! sglang/srt/entrypoints/openai/serving_chat.py with its protocol.py (0.5.23).

use serde_json::{Map, Value, json};

use super::body::Message;
use super::chat::{message_of, take, text_part};
use super::inspect::ContentFormat;
use super::render::RenderError;

/// Claude Code's line of a system prompt that differs in every request: vLLM
/// leaves it out.
const BILLING: &str = "x-anthropic-billing-header";
/// Stands in content for media whose text is not known, and ends what is.
pub const MARK: &str = "\u{e000}media\u{e001}";

/// Messages for a template.
#[derive(Debug, Default)]
pub struct Conversation {
    /// The messages. Media in them are parts of type `image`, `audio` or `video`;
    /// a content that is one text and had some is [`MARK`].
    pub messages: Vec<Message>,
    /// There are pictures, clips or recordings in them.
    pub has_media: bool,
}

/// A message or its content, and whether there are media in it.
type Seen = (Value, bool);

/// What vLLM hands over. `knows_developer` says that the template does.
pub fn of_vllm(
    messages: Vec<Message>,
    format: ContentFormat,
    knows_developer: bool,
) -> Result<Conversation, RenderError> {
    let mut conversation = Conversation::default();
    conversation.messages.reserve_exact(messages.len());
    for (position, message) in messages.into_iter().enumerate() {
        if format == ContentFormat::Text && matches!(message, Message::Plain { .. }) {
            conversation.messages.push(message);
            continue;
        }
        let (message, has_media) = vllm_message(position, message.into_json(), format)?;
        conversation.has_media |= has_media;
        conversation.messages.push(message.into());
    }
    let developer = |message: &Message| message.get("role").is_some_and(|role| role == "developer");
    if !knows_developer && conversation.messages.iter().any(developer) {
        if conversation.has_media {
            return Err(RenderError::Unsupported { position: 0, why: "a developer's message and media" });
        }
        let messages = conversation.messages.into_iter().map(Message::into_json).collect();
        conversation.messages = developers_to_system(messages).into_iter().map(Message::from).collect();
    }
    Ok(conversation)
}

/// What SGLang hands over.
pub fn of_sglang(messages: Vec<Message>, format: ContentFormat) -> Result<Conversation, RenderError> {
    let mut conversation = Conversation::default();
    conversation.messages.reserve_exact(messages.len());
    for (position, message) in messages.into_iter().enumerate() {
        if matches!(message, Message::Plain { .. }) {
            conversation.messages.push(message);
            continue;
        }
        let (message, has_media) = sglang_message(position, message.into_json(), format)?;
        conversation.has_media |= has_media;
        conversation.messages.push(message.into());
    }
    Ok(conversation)
}

fn fields_of(position: usize, message: Value) -> Result<(Map<String, Value>, String), RenderError> {
    let Value::Object(fields) = message else {
        return Err(RenderError::Message { position, why: "it is no object" });
    };
    match fields.get("role").and_then(Value::as_str).map(str::to_owned) {
        Some(role) => Ok((fields, role)),
        None => Err(RenderError::Message { position, why: "it has no role" }),
    }
}

fn vllm_message(position: usize, message: Value, format: ContentFormat) -> Result<Seen, RenderError> {
    let (mut fields, role) = fields_of(position, message)?;
    let mut take = |name: &str| fields.get_mut(name).map(Value::take).filter(|value| !value.is_null());
    let (content, media) = vllm_content(position, &role, take("content"), format)?;
    let mut seen = Map::new();
    seen.insert("role".to_owned(), Value::from(role.as_str()));
    seen.insert("content".to_owned(), content);
    if role == "assistant" {
        let calls = take("tool_calls");
        // An older name of the field; the new one wins.
        let older = take("reasoning_content");
        let reasoning = take("reasoning").or(older);
        match calls {
            None => {}
            Some(Value::Array(calls)) if calls.is_empty() => {}
            Some(Value::Array(mut calls)) => {
                calls.iter_mut().try_for_each(|call| vllm_call(position, call))?;
                seen.insert("tool_calls".to_owned(), Value::Array(calls));
            }
            Some(_) => return Err(RenderError::Message { position, why: "its tool calls are no list" }),
        }
        if let Some(reasoning) = reasoning {
            seen.insert("reasoning".to_owned(), reasoning.clone());
            seen.insert("reasoning_content".to_owned(), reasoning);
        }
    } else if role == "tool"
        && let Some(id) = take("tool_call_id")
    {
        seen.insert("tool_call_id".to_owned(), id);
    }
    for name in ["name", "task"] {
        if let Some(text @ Value::String(_)) = take(name) {
            seen.insert(name.to_owned(), text);
        }
    }
    if role == "developer" {
        if take("tools").is_some() {
            return Err(RenderError::Unsupported { position, why: "it brings tools" });
        }
        seen.insert("tools".to_owned(), Value::Null);
    }
    Ok((Value::Object(seen), media))
}

fn vllm_content(
    position: usize,
    role: &str,
    content: Option<Value>,
    format: ContentFormat,
) -> Result<Seen, RenderError> {
    let parts = match content {
        None => Vec::new(),
        Some(text @ Value::String(_)) => vec![text],
        Some(Value::Array(parts)) => parts,
        Some(_) => return Err(RenderError::Message { position, why: "its content is no text" }),
    };
    let mut media = false;
    let mut seen = Vec::with_capacity(parts.len());
    for part in parts {
        match vllm_part(position, part)? {
            Part::Text(text) => {
                let kept = if role == "system" { without_billing(text) } else { Some(text) };
                seen.extend(kept.map(text_part));
            }
            Part::Media(kind) => {
                media = true;
                seen.push(json!({"type": kind}));
            }
            Part::Reference(part) => seen.push(part),
            Part::Nothing => {}
        }
    }
    let is_text = |part: &Value| part["type"] == "text";
    // What tools say is one text, unless there is something else in it.
    if format == ContentFormat::Parts && !(role == "tool" && seen.iter().all(is_text)) {
        return Ok((Value::Array(seen), media));
    }
    if media {
        // A model's own placeholders stand in front of the text, wherever the
        // media were.
        return Ok((Value::from(MARK), true));
    }
    let only = |part: &mut Value| take(part, "text").or_else(|| take(part, "name"));
    if let [part] = seen.as_mut_slice() {
        return Ok((only(part).unwrap_or_else(|| Value::from("")), false));
    }
    // Joined, an empty part is none.
    let text = |part: &'_ Value| part["text"].as_str().or(part["name"].as_str()).map(str::to_owned);
    let texts: Vec<String> = seen.iter().filter_map(text).filter(|text| !text.is_empty()).collect();
    Ok((Value::from(texts.join("\n")), false))
}

enum Part {
    Text(String),
    Media(&'static str),
    Reference(Value),
    /// A part that the engine leaves out.
    Nothing,
}

fn vllm_part(position: usize, part: Value) -> Result<Part, RenderError> {
    let mut part = match part {
        Value::String(text) => return Ok(Part::Text(text)),
        part => part,
    };
    let kind = part.get("type").and_then(Value::as_str).map(str::to_owned);
    let unknown = RenderError::Unsupported { position, why: "it has a part of a kind that is not known" };
    let field = match kind.as_deref() {
        Some("text" | "input_text" | "output_text") => "text",
        Some("refusal") => "refusal",
        Some("thinking") => "thinking",
        Some("image_url" | "input_image" | "image_embeds" | "image_pil") => return Ok(Part::Media("image")),
        Some("audio_url" | "input_audio" | "audio_embeds") => return Ok(Part::Media("audio")),
        Some("video_url" | "video_embeds") => return Ok(Part::Media("video")),
        Some("tool_reference") => {
            let name = take(&mut part, "name").ok_or(unknown)?;
            return Ok(Part::Reference(json!({"type": "tool_reference", "name": name})));
        }
        _ => return Err(unknown),
    };
    match take(&mut part, field) {
        Some(Value::String(text)) => Ok(Part::Text(text)),
        None if matches!(kind.as_deref(), Some("text" | "refusal")) => Ok(Part::Nothing),
        _ => Err(RenderError::Message { position, why: "a text part has no text" }),
    }
}

/// A system prompt's text without a first line that changes; `None` if nothing
/// is left.
fn without_billing(text: String) -> Option<String> {
    if !text.starts_with(BILLING) {
        return Some(text);
    }
    text.split_once('\n').map(|(_, rest)| rest.to_owned()).filter(|rest| !rest.is_empty())
}

/// A call as vLLM's classes hold it: known fields first and in their order, then
/// what else the client sent. Arguments become an object; what is no object becomes
/// an empty one.
fn vllm_call(position: usize, call: &mut Value) -> Result<(), RenderError> {
    let malformed = |why| RenderError::Message { position, why };
    let Value::Object(mut given) = call.take() else { return Err(malformed("a tool call is no object")) };
    let Some(Value::Object(mut function)) = given.shift_remove("function") else {
        return Err(malformed("a tool call has no function"));
    };
    let kind = given.shift_remove("type").filter(|kind| kind == "function");
    let (Some(id @ Value::String(_)), Some(kind)) = (given.shift_remove("id"), kind) else {
        return Err(malformed("a tool call has no id or is of no function"));
    };
    let arguments = match function.shift_remove("arguments") {
        Some(object @ Value::Object(_)) => object,
        Some(Value::String(text)) if !text.is_empty() => parse(position, &text)?,
        Some(Value::String(_)) => Value::Null,
        _ => return Err(malformed("a tool call has no arguments")),
    };
    let object = if arguments.is_object() { arguments } else { Value::Object(Map::new()) };
    let name = function.shift_remove("name").ok_or(malformed("a tool call has no name"))?;
    let mut held = Map::new();
    held.insert("arguments".to_owned(), object);
    held.insert("name".to_owned(), name);
    held.extend(function);
    let mut all = Map::new();
    all.insert("id".to_owned(), id);
    all.insert("function".to_owned(), Value::Object(held));
    all.insert("type".to_owned(), kind);
    all.extend(given);
    *call = Value::Object(all);
    Ok(())
}

/// What Python's `json.loads` reads; null for what it cannot read.
fn parse(position: usize, text: &str) -> Result<Value, RenderError> {
    // Python reads these words, integers of any length and lone surrogates.
    let odd = ["NaN", "Infinity", "\\ud", "\\uD"].iter().any(|word| text.contains(word));
    let mut digits = 0;
    let long = text.bytes().any(|byte| {
        digits = if byte.is_ascii_digit() { digits + 1 } else { 0 };
        digits > 18
    });
    match serde_json::from_str(text) {
        Ok(value) if !long => Ok(value),
        Err(_) if !odd => Ok(Value::Null),
        _ => Err(RenderError::Unsupported { position, why: "arguments that Python reads differently" }),
    }
}

/// For templates that do not know developers: they become the system, and all
/// the system says goes to the front.
fn developers_to_system(messages: Vec<Value>) -> Vec<Value> {
    let is_system = |message: &Value| message["role"] == "system" || message["role"] == "developer";
    let first_only = messages.iter().skip(1).all(|message| !is_system(message));
    let as_system = |mut message: Value| {
        if message["role"] == "developer"
            && let Some(fields) = message.as_object_mut()
        {
            fields.insert("role".to_owned(), Value::from("system"));
            fields.shift_remove("tools");
        }
        message
    };
    let messages: Vec<Value> = messages.into_iter().map(as_system).collect();
    if first_only {
        return messages;
    }
    let (system, others): (Vec<Value>, Vec<Value>) = messages.into_iter().partition(is_system);
    let text = |message: &Value| match &message["content"] {
        Value::Array(parts) => {
            let texts: Vec<&str> = parts.iter().filter_map(|part| part["text"].as_str()).collect();
            texts.join("\n")
        }
        content => content.as_str().unwrap_or_default().to_owned(),
    };
    let texts: Vec<String> = system.iter().map(text).filter(|text| !text.is_empty()).collect();
    let merged = message_of("system", texts.join("\n\n"));
    std::iter::once(merged).chain(others).collect()
}

/// Roles that SGLang knows beside the user's, in lower case.
const SGLANG_ROLES: [&str; 7] =
    ["system", "assistant", "tool", "function", "developer", "latest_reminder", "root"];

fn sglang_message(position: usize, message: Value, format: ContentFormat) -> Result<Seen, RenderError> {
    let (mut fields, role) = fields_of(position, message)?;
    let lower = role.to_lowercase();
    if role != "user" && !SGLANG_ROLES.contains(&lower.as_str()) {
        return Err(RenderError::Message { position, why: "its role is not known" });
    }
    let role = if role == "user" { role } else { lower };
    let mut take = |name: &str| fields.get_mut(name).map(Value::take).filter(|value| !value.is_null());
    let (content, media) = sglang_content(position, &role, take("content"), format)?;
    let mut seen = Map::new();
    seen.insert("role".to_owned(), Value::from(role.as_str()));
    seen.insert("content".to_owned(), content);
    if role != "user" {
        if ["tools", "prefix"].iter().any(|name| take(name).is_some()) {
            return Err(RenderError::Unsupported { position, why: "it brings tools or is a prefix" });
        }
        for name in ["tool_call_id", "name", "phase", "reasoning_content"] {
            match take(name) {
                None => {}
                Some(text @ Value::String(_)) => drop(seen.insert(name.to_owned(), text)),
                Some(_) => return Err(RenderError::Message { position, why: "a field is no text" }),
            }
        }
        match take("tool_calls") {
            None => {}
            Some(Value::Array(calls)) => {
                let is_assistant = role == "assistant";
                let calls: Result<Vec<Value>, RenderError> =
                    calls.into_iter().map(|call| sglang_call(position, call, is_assistant)).collect();
                seen.insert("tool_calls".to_owned(), Value::Array(calls?));
            }
            Some(_) => return Err(RenderError::Message { position, why: "its tool calls are no list" }),
        }
    }
    Ok((Value::Object(seen), media))
}

fn sglang_content(
    position: usize,
    role: &str,
    content: Option<Value>,
    format: ContentFormat,
) -> Result<Seen, RenderError> {
    let parts = match content {
        None if role == "user" => {
            return Err(RenderError::Message { position, why: "the user says nothing" });
        }
        None => return Ok((Value::from(""), false)),
        Some(text @ Value::String(_)) => return Ok((text, false)),
        Some(Value::Array(parts)) => parts,
        Some(_) => return Err(RenderError::Message { position, why: "its content is no text" }),
    };
    let mut media = false;
    let mut seen = Vec::with_capacity(parts.len());
    let mut only_text = true;
    for mut part in parts {
        let kind = match part.get("type").and_then(Value::as_str) {
            Some("text") => {
                let Some(text @ Value::String(_)) = take(&mut part, "text") else {
                    return Err(RenderError::Message { position, why: "a text part has no text" });
                };
                seen.push(text_part(text));
                continue;
            }
            Some("image_url") => "image",
            Some("video_url") => "video",
            Some("audio_url" | "input_audio") => "audio",
            Some("tool_reference") => {
                only_text = false;
                let name = take(&mut part, "name").unwrap_or_default();
                seen.push(json!({"type": "tool_reference", "name": name}));
                continue;
            }
            // It is left out, and so might be what stands around it.
            Some("thinking" | "reasoning") => {
                return Err(RenderError::Unsupported { position, why: "it has thoughts among its parts" });
            }
            _ => return Err(RenderError::Message { position, why: "it has a part that is not known" }),
        };
        only_text = false;
        media = true;
        seen.push(json!({"type": kind}));
    }
    if media && role == "tool" {
        // Results may change their order then.
        return Err(RenderError::Media { position });
    }
    if format == ContentFormat::Parts && !(role == "tool" && only_text) {
        return Ok((Value::Array(seen), media));
    }
    if media {
        return Ok((Value::from(MARK), true));
    }
    let texts: Vec<&str> = seen.iter().filter_map(|part| part["text"].as_str()).collect();
    Ok((Value::from(texts.join(" ")), false))
}

/// A call as SGLang's classes dump it: with an index, and with arguments as an
/// object, which they must be.
fn sglang_call(position: usize, mut call: Value, parses: bool) -> Result<Value, RenderError> {
    let malformed = |why| RenderError::Message { position, why };
    if !call.get("type").is_none_or(|kind| kind == "function") {
        return Err(malformed("a tool call is of no function"));
    }
    let mut function = take(&mut call, "function").ok_or(malformed("a tool call has no function"))?;
    let mut arguments = take(&mut function, "arguments").unwrap_or_default();
    if let (Value::String(text), true) = (&arguments, parses) {
        arguments = parse(position, text)?;
        if !arguments.is_object() {
            return Err(malformed("arguments of a tool call are no JSON object"));
        }
    }
    let name = take(&mut function, "name").unwrap_or_default();
    let (id, index) =
        (take(&mut call, "id").unwrap_or_default(), take(&mut call, "index").unwrap_or_default());
    Ok(json!({
        "id": id, "index": index, "type": "function",
        "function": {"name": name, "arguments": arguments},
    }))
}
