//! `/v1/messages` as the engines turn it into a chat.
//!
//! Both engines convert an Anthropic request into one of chat completions and
//! render that. They do it differently: what joins the parts of a system prompt,
//! where a tool's results go, what becomes of former thoughts. Authority:
//! vllm/entrypoints/anthropic/serving.py (0.32) and
//! sglang/srt/entrypoints/anthropic/serving.py (0.5.23). `cache_control` is read
//! by neither.

use serde_json::{Map, Value, json};

use super::Refusal;
use super::body::Message;
use super::chat::{self, Chat, message_of, take, text_part, tool_message};
use super::template::Traits;

/// Claude Code's first system block, whose content changes with every request:
/// vLLM leaves it out.
const BILLING: &str = "x-anthropic-billing-header";

/// The chat that vLLM makes of a body. `traits` are those of the template.
pub fn of_vllm(body: &mut Value, traits: &Traits) -> Result<Chat, Refusal> {
    let Some(Value::Array(messages)) = take(body, "messages") else { return Err(Refusal::Malformed) };
    let merges = traits.vllm_merges_system;
    let mut system = match take(body, "system") {
        None => String::new(),
        Some(Value::String(text)) => text,
        Some(Value::Array(blocks)) => system_text(&blocks)?,
        Some(_) => return Err(Refusal::Malformed),
    };
    if merges {
        for message in messages.iter().filter(|message| is_system(message)) {
            system.push_str(&inline_system(message)?);
        }
    }
    let mut converted = Vec::with_capacity(messages.len() + 1);
    if !system.is_empty() {
        converted.push(message_of("system", system));
    }
    for message in messages {
        if is_system(&message) {
            let text = inline_system(&message)?;
            if !merges && !text.is_empty() {
                converted.push(message_of("system", text));
            }
        } else {
            vllm_message(message, &mut converted)?;
        }
    }
    let variables = chat::variables_of(body)?;
    let effort = vllm_effort(body, traits)?;
    let choice = tool_choice(body)?;
    chat::checked(Chat {
        messages: converted.into_iter().map(Message::from).collect(),
        tools: tools(body, Absent::Null)?,
        tool_choice: choice,
        variables: chat::vllm_variables(variables, effort),
        ..Chat::default()
    })
}

/// The chat that SGLang makes of a body.
pub fn of_sglang(body: &mut Value, traits: &Traits) -> Result<Chat, Refusal> {
    let Some(Value::Array(messages)) = take(body, "messages") else { return Err(Refusal::Malformed) };
    // Whether and how a model thinks is set by flags of the server.
    if chat::is_given(body, "thinking") {
        return Err(Refusal::Unrenderable);
    }
    let merges = !traits.sglang_inline_system;
    let mut system: Vec<String> = match take(body, "system") {
        None => Vec::new(),
        Some(Value::String(text)) if text.trim_matches(super::python::is_space).is_empty() => Vec::new(),
        Some(Value::String(text)) => vec![text],
        Some(Value::Array(blocks)) => texts(&blocks)?.into_iter().filter(|text| !text.is_empty()).collect(),
        Some(_) => return Err(Refusal::Malformed),
    };
    if merges {
        for message in messages.iter().filter(|message| is_system(message)) {
            let found = match message.get("content") {
                Some(Value::String(text)) => vec![text.clone()],
                Some(Value::Array(blocks)) => texts(blocks)?,
                _ => return Err(Refusal::Malformed),
            };
            let trimmed = found.iter().map(|text| text.trim_matches(super::python::is_space));
            let parts: Vec<&str> = trimmed.filter(|text| !text.is_empty()).collect();
            if !parts.is_empty() {
                system.push(parts.join("\n"));
            }
        }
    }
    let mut converted = Vec::with_capacity(messages.len() + 1);
    if !system.is_empty() {
        converted.push(message_of("system", system.join("\n")));
    }
    for message in messages {
        if !(merges && is_system(&message)) {
            sglang_message(message, &mut converted)?;
        }
    }
    let mut variables = Map::new();
    if let Some(effort) = body.pointer("/output_config/effort").filter(|effort| !effort.is_null()) {
        // Set past the code that would derive variables from it.
        let effort = if effort == "xhigh" { Value::from("max") } else { effort.clone() };
        if effort == "low" {
            return Err(Refusal::Unrenderable);
        }
        variables.insert("reasoning_effort".to_owned(), effort);
    }
    let choice = tool_choice(body)?;
    let tools = tools(body, Absent::Default)?;
    let messages = converted.into_iter().map(Message::from).collect();
    chat::checked(Chat { messages, tools, tool_choice: choice, variables, ..Chat::default() })
}

fn is_system(message: &Value) -> bool {
    message.get("role").is_some_and(|role| role == "system")
}

/// The texts of a system prompt's blocks, without the one that changes.
fn system_text(blocks: &[Value]) -> Result<String, Refusal> {
    Ok(texts(blocks)?.into_iter().filter(|text| !text.starts_with(BILLING)).collect())
}

fn texts(blocks: &[Value]) -> Result<Vec<String>, Refusal> {
    let of_text = blocks.iter().filter(|block| block.get("type").is_some_and(|kind| kind == "text"));
    of_text
        .map(|block| match block.get("text") {
            Some(Value::String(text)) => Ok(text.clone()),
            _ => Err(Refusal::Malformed),
        })
        .collect()
}

fn inline_system(message: &Value) -> Result<String, Refusal> {
    match message.get("content") {
        Some(Value::String(text)) if text.starts_with(BILLING) => Ok(String::new()),
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Array(blocks)) => {
            let changes = |block: &Value| {
                block.get("type").is_some_and(|kind| kind == "tool_addition" || kind == "tool_removal")
            };
            // They change the list of tools from within the conversation.
            if blocks.iter().any(changes) {
                return Err(Refusal::Unrenderable);
            }
            system_text(blocks)
        }
        _ => Err(Refusal::Malformed),
    }
}

/// What a message becomes while its blocks are gone through.
#[derive(Default)]
struct Turn {
    content: Vec<Value>,
    calls: Vec<Value>,
    thoughts: Vec<String>,
}

fn vllm_message(mut message: Value, converted: &mut Vec<Value>) -> Result<(), Refusal> {
    let role = role(&message)?;
    let blocks = match take(&mut message, "content") {
        Some(Value::String(text)) => {
            converted.push(message_of(role, text));
            return Ok(());
        }
        Some(Value::Array(blocks)) => blocks,
        _ => return Err(Refusal::Malformed),
    };
    let mut turn = Turn::default();
    for mut block in blocks {
        match kind(&block)?.as_str() {
            "text" => match take(&mut block, "text") {
                Some(Value::String(text)) if text.is_empty() => {}
                Some(Value::String(text)) => turn.content.push(text_part(text)),
                None => {}
                Some(_) => return Err(Refusal::Malformed),
            },
            "image" if chat::is_given(&block, "source") => turn.content.push(media()),
            "image" | "redacted_thinking" | "tool_reference" => {}
            "thinking" => match take(&mut block, "thinking") {
                Some(Value::String(text)) => turn.thoughts.push(text),
                None => {}
                Some(_) => return Err(Refusal::Malformed),
            },
            "tool_use" => turn.calls.push(call(&mut block)?),
            "tool_result" if role == "user" => vllm_result(block, converted)?,
            // A result that the assistant gives is printed as Python prints it.
            "tool_result" => return Err(Refusal::Unrenderable),
            _ => return Err(Refusal::Malformed),
        }
    }
    let mut fields = Map::new();
    fields.insert("role".to_owned(), Value::from(role.as_str()));
    if !turn.thoughts.is_empty() {
        fields.insert("reasoning".to_owned(), Value::from(turn.thoughts.concat()));
    }
    if !turn.calls.is_empty() {
        fields.insert("tool_calls".to_owned(), Value::Array(turn.calls));
    }
    if !turn.content.is_empty() {
        fields.insert("content".to_owned(), only_text_or_parts(turn.content));
    }
    if role != "user" || fields.contains_key("content") {
        converted.push(Value::Object(fields));
    }
    Ok(())
}

/// One text stands for itself.
fn only_text_or_parts(mut parts: Vec<Value>) -> Value {
    if let [only] = parts.as_mut_slice()
        && let Some(text @ Value::String(_)) = take(only, "text")
    {
        return text;
    }
    Value::Array(parts)
}

fn vllm_result(mut block: Value, converted: &mut Vec<Value>) -> Result<(), Refusal> {
    let (mut text, mut pictures, mut references) = (String::new(), Vec::new(), Vec::new());
    match take(&mut block, "content") {
        None => {}
        Some(Value::String(content)) => text = content,
        Some(Value::Array(items)) => {
            let mut texts: Vec<String> = Vec::new();
            for mut item in items.into_iter().filter(Value::is_object) {
                match item.get("type").and_then(Value::as_str) {
                    Some("text") => match take(&mut item, "text") {
                        Some(Value::String(text)) => texts.push(text),
                        None => texts.push(String::new()),
                        Some(_) => return Err(Refusal::Malformed),
                    },
                    Some("image") => pictures.push(media()),
                    Some("tool_reference") => references.extend(reference(&item)),
                    _ => {}
                }
            }
            text = texts.join("\n");
        }
        Some(_) => return Err(Refusal::Malformed),
    }
    let id = take(&mut block, "tool_use_id").unwrap_or_else(|| Value::from(""));
    converted.push(tool_message(&id, text));
    if !pictures.is_empty() {
        converted.push(message_of("user", pictures));
    }
    if !references.is_empty() {
        converted.push(tool_message(&id, references));
    }
    Ok(())
}

fn sglang_message(mut message: Value, converted: &mut Vec<Value>) -> Result<(), Refusal> {
    let role = match message.get("role") {
        Some(role) if role == "system" => "system".to_owned(),
        _ => role(&message)?,
    };
    let blocks = match take(&mut message, "content") {
        Some(Value::String(text)) => {
            converted.push(message_of(role, text));
            return Ok(());
        }
        Some(Value::Array(blocks)) => blocks,
        _ => return Err(Refusal::Malformed),
    };
    let mut turn = Turn::default();
    for mut block in blocks {
        match kind(&block)?.as_str() {
            "text" => match take(&mut block, "text") {
                Some(text @ Value::String(_)) => turn.content.push(text_part(text)),
                _ => return Err(Refusal::Malformed),
            },
            "image" if chat::is_given(&block, "source") => turn.content.push(media()),
            "image" | "tool_reference" => {}
            // Framed by the server's reasoning parser, if it has one.
            "thinking" | "redacted_thinking" | "search_result" => return Err(Refusal::Unrenderable),
            "tool_use" => turn.calls.push(call(&mut block)?),
            "tool_result" if role == "user" => {
                flush(&mut turn.content, converted);
                sglang_result(block, converted)?;
            }
            "tool_result" => return Err(Refusal::Unrenderable),
            _ => return Err(Refusal::Malformed),
        }
    }
    let mut fields = Map::new();
    fields.insert("role".to_owned(), Value::from(role.as_str()));
    let has_calls = !turn.calls.is_empty();
    if has_calls {
        fields.insert("tool_calls".to_owned(), Value::Array(turn.calls));
    }
    if !turn.content.is_empty() {
        fields.insert("content".to_owned(), only_text_or_parts(turn.content));
    } else if !has_calls {
        if role == "user" {
            return Ok(());
        }
        fields.insert("content".to_owned(), Value::from(""));
    }
    converted.push(Value::Object(fields));
    Ok(())
}

/// What a user says before a tool's result stays before it.
fn flush(parts: &mut Vec<Value>, converted: &mut Vec<Value>) {
    if !parts.is_empty() {
        let content = only_text_or_parts(std::mem::take(parts));
        converted.push(message_of("user", content));
    }
}

fn sglang_result(mut block: Value, converted: &mut Vec<Value>) -> Result<(), Refusal> {
    let mut groups: Vec<Vec<Value>> = Vec::new();
    let is_reference = |part: &Value| part.get("type").is_some_and(|kind| kind == "tool_reference");
    let mut add = |part: Value| match groups.last_mut() {
        Some(group) if is_reference(&group[0]) == is_reference(&part) => group.push(part),
        _ => groups.push(vec![part]),
    };
    let mut contents = Vec::new();
    match take(&mut block, "content") {
        None => contents.push(Value::from("")),
        Some(text @ Value::String(_)) => contents.push(text),
        Some(Value::Array(items)) => {
            for mut item in items {
                match kind(&item)?.as_str() {
                    "text" => match take(&mut item, "text") {
                        Some(Value::String(text)) if text.is_empty() => {}
                        Some(text @ Value::String(_)) => add(text_part(text)),
                        _ => return Err(Refusal::Malformed),
                    },
                    "image" => add(media()),
                    "tool_reference" => {
                        if let Some(part) = reference(&item) {
                            add(part);
                        }
                    }
                    _ => return Err(Refusal::Unrenderable),
                }
            }
            contents.extend(groups.into_iter().map(only_text_or_parts));
            if contents.is_empty() {
                contents.push(Value::from(""));
            }
        }
        Some(_) => return Err(Refusal::Malformed),
    }
    let given = |name: &str| block.get(name).filter(|id| id.as_str().is_some_and(|id| !id.is_empty()));
    let id = given("tool_use_id").or_else(|| given("id")).cloned().unwrap_or_else(|| Value::from(""));
    for content in contents {
        converted.push(tool_message(&id, content));
    }
    Ok(())
}

fn role(message: &Value) -> Result<String, Refusal> {
    match message.get("role").and_then(Value::as_str) {
        Some(role @ ("user" | "assistant")) => Ok(role.to_owned()),
        _ => Err(Refusal::Malformed),
    }
}

fn kind(block: &Value) -> Result<String, Refusal> {
    block.get("type").and_then(Value::as_str).map(str::to_owned).ok_or(Refusal::Malformed)
}

/// Stands for a picture; its content plays no part in the text.
fn media() -> Value {
    json!({"type": "image_url", "image_url": {"url": ""}})
}

fn reference(item: &Value) -> Option<Value> {
    let name = |name: &str| item.get(name).and_then(Value::as_str).filter(|name| !name.is_empty());
    let name = name("tool_name").or_else(|| name("name"))?;
    Some(json!({"type": "tool_reference", "name": name}))
}

fn call(block: &mut Value) -> Result<Value, Refusal> {
    let input = match take(block, "input") {
        None => Value::Object(Map::new()),
        Some(input @ Value::Object(_)) => input,
        Some(_) => return Err(Refusal::Malformed),
    };
    // An id made up by the engine would be in no other prompt.
    let Some(Value::String(id)) = take(block, "id").filter(|id| id != "") else {
        return Err(Refusal::Unrenderable);
    };
    let name = match take(block, "name") {
        Some(Value::String(name)) => name,
        None => String::new(),
        Some(_) => return Err(Refusal::Malformed),
    };
    Ok(json!({"id": id, "type": "function", "function": {"name": name, "arguments": input}}))
}

/// What an engine puts where a tool has no description and no `strict`.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Absent {
    /// Null, which its dump of tools leaves out or prints.
    Null,
    /// An empty text and `false`.
    Default,
}

fn tools(body: &mut Value, absent: Absent) -> Result<Option<Value>, Refusal> {
    let list = match take(body, "tools") {
        None => return Ok(None),
        Some(Value::Array(list)) => list,
        Some(_) => return Err(Refusal::Malformed),
    };
    let mut converted = Vec::with_capacity(list.len());
    for mut tool in list {
        let own = tool.get("type").is_none_or(|kind| kind.is_null() || kind == "custom");
        if !own && absent == Absent::Default {
            // Anthropic's own tools, which SGLang skips by families of names.
            return Err(Refusal::Unrenderable);
        }
        let Some(Value::Object(mut schema)) = take(&mut tool, "input_schema") else {
            return Err(Refusal::Malformed);
        };
        if !schema.contains_key("type") {
            schema.insert("type".to_owned(), Value::from("object"));
        }
        let default = |value: Option<Value>, default: Value| match absent {
            Absent::Null => value.unwrap_or(Value::Null),
            Absent::Default => value.unwrap_or(default),
        };
        let description = default(take(&mut tool, "description"), Value::from(""));
        let strict = default(take(&mut tool, "strict"), Value::Bool(false));
        let mut function = json!({
            "name": take(&mut tool, "name").ok_or(Refusal::Malformed)?,
            "description": description, "parameters": schema, "strict": strict,
        });
        let defer = take(&mut tool, "defer_loading");
        let mut outer = json!({"type": "function"});
        if let (Some(defer), Some(fields)) = (defer, outer.as_object_mut()) {
            match absent {
                Absent::Null => {
                    drop(function.as_object_mut().map(|map| map.insert("defer_loading".into(), defer)))
                }
                Absent::Default => drop(fields.insert("defer_loading".into(), defer)),
            }
        }
        outer["function"] = function;
        converted.push(outer);
    }
    match (converted.is_empty(), absent) {
        (false, _) => Ok(Some(Value::Array(converted))),
        (true, Absent::Default) => Ok(None),
        (true, Absent::Null) => Err(Refusal::Unrenderable),
    }
}

fn tool_choice(body: &mut Value) -> Result<Option<Value>, Refusal> {
    let Some(choice) = take(body, "tool_choice") else { return Ok(None) };
    Ok(Some(match choice.get("type").and_then(Value::as_str) {
        Some("auto") => Value::from("auto"),
        Some("any") => Value::from("required"),
        Some("none") => Value::from("none"),
        Some("tool") => {
            json!({"type": "function", "function": {"name": choice.get("name").ok_or(Refusal::Malformed)?}})
        }
        _ => return Err(Refusal::Malformed),
    }))
}

fn vllm_effort(body: &mut Value, traits: &Traits) -> Result<Option<Value>, Refusal> {
    let thinking = take(body, "thinking");
    let disabled = match thinking.as_ref().map(|thinking| thinking.get("type").and_then(Value::as_str)) {
        None => false,
        Some(Some("enabled" | "adaptive")) => false,
        Some(Some("disabled")) => true,
        Some(_) => return Err(Refusal::Malformed),
    };
    if disabled {
        return Ok(Some(Value::from(traits.vllm_effort_without_thinking)));
    }
    Ok(body.pointer("/output_config/effort").filter(|effort| !effort.is_null()).cloned())
}
