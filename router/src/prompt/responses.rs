//! `/v1/responses` as the engines turn it into a chat.
//!
//! Taken: a text, or a list of messages, function calls and their outputs. What
//! hangs on state of the server (`previous_response_id`), on its parsers
//! (reasoning items) or on tools that run in it is refused. Authority:
//! vllm/entrypoints/openai/responses/utils.py (0.32) and
//! sglang/srt/entrypoints/openai/serving_responses.py (0.5.23).

use serde_json::{Map, Value, json};

use super::Refusal;
use super::body::Message;
use super::chat::{self, Chat, message_of, object, take, text_part, tool_message};
use super::template::Traits;

/// What SGLang writes above what a developer says, having made it the system's.
const DEVELOPER: &str = "Developer instructions:\n";

/// The id of the response that a body goes on from: its worker keeps that one.
pub fn previous(body: &Value) -> Option<&str> {
    body.get("previous_response_id").and_then(Value::as_str)
}

/// The chat that vLLM makes of a body.
pub fn of_vllm(body: &mut Value) -> Result<Chat, Refusal> {
    let mut messages = opening(body)?;
    for item in input(body)? {
        match item_kind(&item)? {
            Kind::Message => vllm_message(item, &mut messages)?,
            Kind::Call => {
                let call = call(item)?;
                match messages.last_mut().filter(|last| is_assistant(last)).and_then(Value::as_object_mut) {
                    Some(last) => push_call(last, call),
                    None => messages.push(json!({"role": "assistant", "tool_calls": [call]})),
                }
            }
            Kind::Output => messages.push(output(item)?),
        }
    }
    let variables = chat::variables_of(body)?;
    let effort = effort(body)?;
    let tools = tools(body, false)?;
    let variables = chat::vllm_variables(variables, effort);
    let messages = messages.into_iter().map(Message::from).collect();
    chat::checked(Chat { messages, tools, variables, ..Chat::default() })
}

/// The chat that SGLang makes of a body.
pub fn of_sglang(body: &mut Value, traits: &Traits) -> Result<Chat, Refusal> {
    let mut messages = opening(body)?;
    for item in input(body)? {
        let message = match item_kind(&item)? {
            Kind::Message => sglang_message(item)?,
            Kind::Call => {
                let call = call(item)?;
                // An object, or else an empty one.
                let object = call.pointer("/function/arguments").and_then(Value::as_str);
                let is_object = object.is_some_and(|text| {
                    serde_json::from_str::<Value>(text).is_ok_and(|value| value.is_object())
                });
                let mut call = call;
                if !is_object && let Some(arguments) = call.pointer_mut("/function/arguments") {
                    *arguments = Value::from("{}");
                }
                json!({"role": "assistant", "tool_calls": [call]})
            }
            Kind::Output => output(item)?,
        };
        merge(message, &mut messages)?;
    }
    if !traits.sglang_inline_system {
        messages = system_first(messages)?;
    }
    if let Some(effort) = effort(body)? {
        body["reasoning_effort"] = effort;
    }
    let tools = tools(body, true)?;
    let choice = match take(body, "tool_choice") {
        Some(Value::String(word)) if ["auto", "required", "none"].contains(&word.as_str()) => {
            Some(Value::from(word))
        }
        None => None,
        Some(_) => return Err(Refusal::Unrenderable),
    };
    // The rest is read as a chat of its own.
    let mut as_chat = object([]);
    for name in ["chat_template_kwargs", "reasoning_effort"] {
        if let Some(value) = take(body, name) {
            as_chat[name] = value;
        }
    }
    let messages = messages.into_iter().map(Message::from).collect();
    let chat = chat::of_completions(&mut as_chat, messages, kvrouter_crds::config::Engine::SGLang)?;
    Ok(Chat { tools, tool_choice: choice, ..chat })
}

/// The instructions, as the system's message.
fn opening(body: &mut Value) -> Result<Vec<Value>, Refusal> {
    if previous(body).is_some() {
        return Err(Refusal::History);
    }
    if chat::is_given(body, "prompt") {
        return Err(Refusal::Malformed);
    }
    match take(body, "instructions") {
        None => Ok(Vec::new()),
        Some(Value::String(text)) if text.is_empty() => Ok(Vec::new()),
        Some(text @ Value::String(_)) => Ok(vec![message_of("system", text)]),
        Some(_) => Err(Refusal::Malformed),
    }
}

fn input(body: &mut Value) -> Result<Vec<Value>, Refusal> {
    match take(body, "input") {
        Some(text @ Value::String(_)) => Ok(vec![message_of("user", text)]),
        Some(Value::Array(items)) => Ok(items),
        _ => Err(Refusal::Malformed),
    }
}

enum Kind {
    Message,
    Call,
    Output,
}

fn item_kind(item: &Value) -> Result<Kind, Refusal> {
    if !item.is_object() {
        return Err(Refusal::Malformed);
    }
    // A part of a message that is still being written, a namespace, a phase.
    let odd = ["namespace", "phase"].iter().any(|name| chat::is_given(item, name));
    let unfinished = item.get("status").is_some_and(|status| status != "completed" && !status.is_null());
    if odd || unfinished {
        return Err(Refusal::Unrenderable);
    }
    match item.get("type").and_then(Value::as_str) {
        None | Some("message") => Ok(Kind::Message),
        Some("function_call") => Ok(Kind::Call),
        Some("function_call_output") => Ok(Kind::Output),
        Some(_) => Err(Refusal::Unrenderable),
    }
}

fn is_assistant(message: &Value) -> bool {
    message.get("role").is_some_and(|role| role == "assistant")
}

fn call(mut item: Value) -> Result<Value, Refusal> {
    match (take(&mut item, "call_id"), take(&mut item, "name"), take(&mut item, "arguments")) {
        (Some(Value::String(id)), Some(Value::String(name)), Some(Value::String(arguments))) => {
            Ok(json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}))
        }
        _ => Err(Refusal::Malformed),
    }
}

fn push_call(message: &mut Map<String, Value>, call: Value) {
    match message.get_mut("tool_calls") {
        Some(Value::Array(calls)) => calls.push(call),
        _ => drop(message.insert("tool_calls".to_owned(), Value::Array(vec![call]))),
    }
}

fn output(mut item: Value) -> Result<Value, Refusal> {
    match (take(&mut item, "call_id"), take(&mut item, "output")) {
        (Some(Value::String(id)), Some(Value::String(text))) => Ok(tool_message(&Value::from(id), text)),
        (Some(_), Some(Value::Array(_))) => Err(Refusal::Unrenderable),
        _ => Err(Refusal::Malformed),
    }
}

fn vllm_message(mut item: Value, messages: &mut Vec<Value>) -> Result<(), Refusal> {
    let role = item.get("role").and_then(Value::as_str).ok_or(Refusal::Malformed)?.to_owned();
    let content = take(&mut item, "content").ok_or(Refusal::Malformed)?;
    if role != "assistant" {
        messages.push(message_of(role, content));
        return Ok(());
    }
    // Of several texts the first one counts.
    let text = match content {
        Value::Array(parts) => {
            parts.first().and_then(|part| part.get("text")).cloned().ok_or(Refusal::Unrenderable)?
        }
        text => text,
    };
    if !text.is_string() {
        return Err(Refusal::Malformed);
    }
    match messages.last_mut().filter(|last| is_assistant(last)).and_then(Value::as_object_mut) {
        Some(last) if !last.contains_key("content") => drop(last.insert("content".to_owned(), text)),
        _ => messages.push(message_of("assistant", text)),
    }
    Ok(())
}

fn sglang_message(mut item: Value) -> Result<Value, Refusal> {
    let role = item.get("role").and_then(Value::as_str).ok_or(Refusal::Malformed)?.to_owned();
    let content = match take(&mut item, "content").ok_or(Refusal::Malformed)? {
        Value::Array(parts) => {
            let convert = |mut part: Value| match part.get("type").and_then(Value::as_str) {
                Some("input_text" | "output_text" | "text") => {
                    let text = take(&mut part, "text").unwrap_or_else(|| Value::from(""));
                    Ok(text_part(text))
                }
                Some("input_image" | "image_url") => {
                    Ok(json!({"type": "image_url", "image_url": {"url": ""}}))
                }
                _ => Err(Refusal::Unrenderable),
            };
            Value::Array(parts.into_iter().map(convert).collect::<Result<_, _>>()?)
        }
        text => text,
    };
    if role != "developer" {
        return Ok(message_of(role, content));
    }
    match content {
        Value::String(text) => Ok(message_of("system", DEVELOPER.to_owned() + &text)),
        // It labels the first text among the parts.
        _ => Err(Refusal::Unrenderable),
    }
}

/// SGLang makes one message of what the assistant said and called in a row.
fn merge(message: Value, messages: &mut Vec<Value>) -> Result<(), Refusal> {
    let Some(last) = messages.last_mut().filter(|last| is_assistant(last) && is_assistant(&message)) else {
        messages.push(message);
        return Ok(());
    };
    let (Some(last), Value::Object(mut fields)) = (last.as_object_mut(), message) else { return Ok(()) };
    match (last.get_mut("content"), fields.remove("content")) {
        (_, None) => {}
        (None, Some(content)) => drop(last.insert("content".to_owned(), content)),
        (Some(Value::String(old)), Some(Value::String(new))) => {
            if !old.is_empty() && !new.is_empty() {
                old.push_str("\n\n");
            }
            old.push_str(&new);
        }
        _ => return Err(Refusal::Unrenderable),
    }
    if let Some(Value::Array(calls)) = fields.remove("tool_calls") {
        calls.into_iter().for_each(|call| push_call(last, call));
    }
    Ok(())
}

/// For templates that take a system message at the beginning only.
fn system_first(messages: Vec<Value>) -> Result<Vec<Value>, Refusal> {
    let (system, mut others): (Vec<Value>, Vec<Value>) =
        messages.into_iter().partition(|message| message.get("role").is_some_and(|role| role == "system"));
    let mut texts = Vec::new();
    for message in &system {
        match message.get("content") {
            Some(Value::String(text)) => texts.push(text.as_str()),
            Some(Value::Array(parts)) => {
                texts.extend(parts.iter().filter_map(|part| part.get("text").and_then(Value::as_str)));
            }
            _ => return Err(Refusal::Malformed),
        }
    }
    if !texts.is_empty() {
        others.insert(0, message_of("system", texts.join("\n\n")));
    }
    Ok(others)
}

fn effort(body: &mut Value) -> Result<Option<Value>, Refusal> {
    match take(body, "reasoning") {
        None => Ok(None),
        Some(mut reasoning @ Value::Object(_)) => Ok(take(&mut reasoning, "effort")),
        Some(_) => Err(Refusal::Malformed),
    }
}

/// Functions only: other tools are the server's own.
fn tools(body: &mut Value, strict_by_default: bool) -> Result<Option<Value>, Refusal> {
    let list = match take(body, "tools") {
        None => return Ok(None),
        Some(Value::Array(list)) => list,
        Some(_) => return Err(Refusal::Malformed),
    };
    let mut converted = Vec::with_capacity(list.len());
    for mut tool in list {
        if tool.get("type").is_none_or(|kind| kind != "function") || chat::is_given(&tool, "defer_loading") {
            return Err(Refusal::Unrenderable);
        }
        let mut function = Map::new();
        for name in ["name", "description", "parameters", "strict"] {
            function.insert(name.to_owned(), take(&mut tool, name).unwrap_or(Value::Null));
        }
        if strict_by_default && function["strict"].is_null() {
            function.insert("strict".to_owned(), Value::Bool(false));
        }
        converted.push(json!({"type": "function", "function": function}));
    }
    Ok((!converted.is_empty()).then_some(Value::Array(converted)))
}
