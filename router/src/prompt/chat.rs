//! A conversation for a chat template, whatever endpoint it came by.
//!
//! `/v1/chat/completions` is taken apart here; [`super::anthropic`] and
//! [`super::responses`] make the same of theirs, as the engines do before they
//! render. Values are moved out of the body, never copied.

use kvrouter_crds::config::Engine;
use serde_json::{Map, Value};

use super::Refusal;
use super::body::Message;
use super::tokenize::Specials;

/// What a chat template is given, before the engine's own rewriting.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Chat {
    /// The messages, in the shape of chat completions.
    pub messages: Vec<Message>,
    /// Tools, in the shape of chat completions; never an empty list.
    pub tools: Option<Value>,
    /// Which of them may be called.
    pub tool_choice: Option<Value>,
    /// Documents, if there are any.
    pub documents: Option<Value>,
    /// How the text ends.
    pub ending: Ending,
    /// Further variables for the template.
    pub variables: Map<String, Value>,
    /// Whether the tokenizer adds special tokens to what the template wrote.
    pub specials: Specials,
    /// How many values there are in it, messages and what is in them.
    pub values: usize,
}

/// How the rendered text ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ending {
    /// The assistant's turn is opened.
    #[default]
    GenerationPrompt,
    /// After the last message.
    LastMessage,
    /// In the middle of the last message, which the model goes on with.
    Continued,
}

/// Names that a request must not give to the template: they would replace what
/// the engine itself passes, or are refused by it.
const RESERVED: [&str; 16] = [
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "documents",
    "max_length",
    "messages",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "tokenize",
    "tokenizer_kwargs",
    "tools",
    "truncation",
    "kwargs",
];

/// The chat of a body of `/v1/chat/completions`.
pub fn of_completions(body: &mut Value, messages: Vec<Message>, engine: Engine) -> Result<Chat, Refusal> {
    if is_given(body, "chat_template") {
        return Err(Refusal::Unrenderable);
    }
    let mut chat = Chat { messages, tool_choice: take(body, "tool_choice"), ..Chat::default() };
    let tools = take(body, "tools");
    let continued = is_true(body, "continue_final_message");
    if engine == Engine::SGLang {
        sglang_variables(body, &mut chat.variables)?;
        chat.tools = tools.filter(|tools| !is_empty(tools));
        // It has no such fields as documents or add_generation_prompt.
        chat.ending = if continued { Ending::Continued } else { Ending::GenerationPrompt };
        return checked(chat);
    }
    if tools.as_ref().is_some_and(is_empty) || (tools.is_none() && asks_for_tools(chat.tool_choice.as_ref()))
    {
        return Err(Refusal::Malformed);
    }
    chat.tools = tools;
    chat.documents = take(body, "documents");
    let opens = body.get("add_generation_prompt").and_then(Value::as_bool);
    chat.ending = match (continued, opens) {
        (true, Some(true)) => return Err(Refusal::Malformed),
        // It says so neither way, and the default is to open a turn, which
        // transformers refuses beside a continued message.
        (true, None) => return Err(Refusal::Malformed),
        (true, Some(false)) => Ending::Continued,
        (false, Some(false)) => Ending::LastMessage,
        (false, _) => Ending::GenerationPrompt,
    };
    let variables = variables_of(body)?;
    let effort = take(body, "reasoning_effort");
    chat.variables = vllm_variables(variables, effort);
    chat.specials = match body.get("add_special_tokens").and_then(Value::as_bool) {
        Some(true) => Specials::Add,
        _ => Specials::AsWritten,
    };
    checked(chat)
}

/// What no engine accepts; counts values.
pub fn checked(mut chat: Chat) -> Result<Chat, Refusal> {
    let in_message = |message: &Message| match message {
        Message::Plain { .. } => 3,
        Message::Other(value) => values_in(value),
    };
    chat.values = chat.messages.iter().map(in_message).sum::<usize>()
        + chat.tools.iter().chain(&chat.documents).map(values_in).sum::<usize>();
    if chat.messages.is_empty() {
        return Err(Refusal::Malformed);
    }
    if chat.variables.keys().any(|name| RESERVED.contains(&name.as_str())) {
        return Err(Refusal::Unrenderable);
    }
    Ok(chat)
}

/// `chat_template_kwargs`.
pub fn variables_of(body: &mut Value) -> Result<Map<String, Value>, Refusal> {
    match take(body, "chat_template_kwargs") {
        None => Ok(Map::new()),
        Some(Value::Object(variables)) => Ok(variables),
        Some(_) => Err(Refusal::Malformed),
    }
}

/// vLLM's way with the effort: it wins over a variable of its name, and says
/// whether to think where the request does not.
pub fn vllm_variables(mut variables: Map<String, Value>, effort: Option<Value>) -> Map<String, Value> {
    let Some(effort) = effort else { return variables };
    if !variables.contains_key("enable_thinking") {
        variables.insert("enable_thinking".to_owned(), Value::Bool(effort != "none"));
    }
    if effort != "auto" {
        variables.insert("reasoning_effort".to_owned(), effort);
    }
    variables
}

/// SGLang's way: an effort sets two variables that models call the same thing by,
/// and a variable of its name wins over it.
fn sglang_variables(body: &mut Value, variables: &mut Map<String, Value>) -> Result<(), Refusal> {
    // Several spellings, one of them by words like "yes": not worth guessing.
    if is_given(body, "reasoning") {
        return Err(Refusal::Unrenderable);
    }
    let mut given = variables_of(body)?;
    if let Some(effort) = take(body, "reasoning_effort") {
        // A number is checked against a range; and one effort of one model family
        // has a variable of its own.
        if !effort.is_string() || effort == "low" {
            return Err(Refusal::Unrenderable);
        }
        let thinks = Value::Bool(effort != "none");
        given.entry("thinking").or_insert_with(|| thinks.clone());
        given.entry("enable_thinking").or_insert(thinks);
        variables.insert("reasoning_effort".to_owned(), effort);
    }
    variables.extend(given);
    Ok(())
}

fn values_in(value: &Value) -> usize {
    match value {
        Value::Array(items) => items.iter().map(values_in).sum::<usize>() + 1,
        Value::Object(fields) => fields.values().map(values_in).sum::<usize>() + 1,
        _ => 1,
    }
}

fn asks_for_tools(choice: Option<&Value>) -> bool {
    choice.is_some_and(|choice| choice != "none")
}

fn is_empty(list: &Value) -> bool {
    list.as_array().is_some_and(Vec::is_empty)
}

/// An object of these fields. Values move in; `json!` would copy them.
pub fn object<const N: usize>(fields: [(&str, Value); N]) -> Value {
    Value::Object(fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect())
}

/// A part of text.
pub fn text_part(text: impl Into<Value>) -> Value {
    object([("type", Value::from("text")), ("text", text.into())])
}

/// A message.
pub fn message_of(role: impl Into<Value>, content: impl Into<Value>) -> Value {
    object([("role", role.into()), ("content", content.into())])
}

/// What a tool answered to the call `id`.
pub fn tool_message(id: &Value, content: impl Into<Value>) -> Value {
    object([("role", Value::from("tool")), ("tool_call_id", id.clone()), ("content", content.into())])
}

/// Moves a field out of a body; `None` for null.
pub fn take(body: &mut Value, name: &str) -> Option<Value> {
    body.get_mut(name).map(Value::take).filter(|value| !value.is_null())
}

/// Whether a field is there and not null.
pub fn is_given(body: &Value, name: &str) -> bool {
    body.get(name).is_some_and(|value| !value.is_null())
}

/// Whether a field is `true`.
pub fn is_true(body: &Value, name: &str) -> bool {
    body.get(name).and_then(Value::as_bool).unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn of(mut body: Value, engine: Engine) -> Result<Chat, Refusal> {
        let message = Message::from(json!({"role": "user", "content": "a"}));
        of_completions(&mut body, vec![message], engine)
    }

    #[test]
    fn an_effort_becomes_the_variables_that_engines_make_of_it() {
        let check = |why: &str, engine, body: Value, expected: Value| {
            let chat = of(body, engine).expect("accepted");
            assert_eq!(Value::Object(chat.variables), expected, "{why}");
        };
        let high = json!({"reasoning_effort": "high"});
        let thinking = json!({"enable_thinking": true, "reasoning_effort": "high"});
        check("vLLM", Engine::VLLM, high.clone(), thinking);
        let off = json!({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": true}});
        check(
            "what the request says wins",
            Engine::VLLM,
            off,
            json!({"enable_thinking": true, "reasoning_effort": "none"}),
        );
        check(
            "SGLang",
            Engine::SGLang,
            high,
            json!({"reasoning_effort": "high", "thinking": true, "enable_thinking": true}),
        );
    }

    #[test]
    fn the_ending_follows_the_engine() {
        let check = |why: &str, engine, body: Value, expected: Result<Ending, Refusal>| {
            assert_eq!(of(body, engine).map(|chat| chat.ending), expected, "{why}");
        };
        let open = json!({"add_generation_prompt": false});
        check("vLLM has the field", Engine::VLLM, open.clone(), Ok(Ending::LastMessage));
        check("SGLang has not", Engine::SGLang, open, Ok(Ending::GenerationPrompt));
        let continued = json!({"continue_final_message": true});
        check("both at once", Engine::VLLM, continued.clone(), Err(Refusal::Malformed));
        check("SGLang goes on", Engine::SGLang, continued, Ok(Ending::Continued));
        let plain = json!({"continue_final_message": true, "add_generation_prompt": false});
        check("vLLM goes on", Engine::VLLM, plain, Ok(Ending::Continued));
    }

    #[test]
    fn what_would_replace_the_engines_own_variables_is_refused() {
        for name in RESERVED {
            let body = json!({"chat_template_kwargs": {name: 1}});
            assert_eq!(of(body, Engine::VLLM), Err(Refusal::Unrenderable), "{name}");
        }
        assert_eq!(of(json!({"tools": []}), Engine::VLLM), Err(Refusal::Malformed));
        assert_eq!(of(json!({"tool_choice": "auto"}), Engine::VLLM), Err(Refusal::Malformed));
        assert!(of(json!({"tools": []}), Engine::SGLang).is_ok_and(|chat| chat.tools.is_none()));
    }
}
