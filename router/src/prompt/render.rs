//! A chat to text, as an engine family renders it.
//!
//! What differs between families is decided here: how messages and tools are
//! handed over ([`super::conversation`], [`super::tools`]), which template is
//! taken, what becomes of a conversation that ends with the assistant. ATOM
//! renders through vLLM's front end.
//!
//! Media leave placeholders whose text depends on the model. The template is
//! rendered a second time with marks in place of all of them: up to where the two
//! texts part, the first one is exact and has no placeholder in it.

use std::collections::BTreeMap;

use kvrouter_crds::config::Engine;
use minijinja::value::Value as Jinja;
use serde_json::Value;

use super::Refusal;
use super::body::Message;
use super::chat::{Chat, Ending, message_of, take, text_part};
use super::conversation::{self, Conversation, MARK};
use super::python::is_space;
use super::template::{NOW, Templates};
use super::tools::{self, Dialect};
use super::values;

/// What transformers appends to a message that is to be continued, and cuts the
/// text at.
const CONTINUE: &str = "CONTINUE_FINAL_MESSAGE_TAG ";
/// Stands for media in the second rendering; begins with a character
/// that neither the first one's mark nor a placeholder begins with.
const OTHER_MARK: &str = "\u{e002}media\u{e003}";

/// What a template wrote.
#[derive(Debug, PartialEq, Eq)]
pub struct Rendered {
    /// The text that the engine's tokenizer is given.
    pub text: String,
    /// How many bytes of it are known: all, or those before the first media.
    pub exact: usize,
    /// Text whose tokens are appended to those of `text`, tokenised by itself.
    pub appended: Option<String>,
}

/// Why a chat was not rendered.
#[derive(Debug, thiserror::Error)]
pub enum RenderError {
    /// A message is not what engines accept.
    #[error("message {position} is malformed: {why}")]
    Message {
        /// Its position, from 0.
        position: usize,
        /// What is wrong with it.
        why: &'static str,
    },
    /// A message has media where they may move text.
    #[error("message {position} has media where they change the order of messages")]
    Media {
        /// Its position, from 0.
        position: usize,
    },
    /// Engines do something with it that is not done here.
    #[error("message {position} is not supported: {why}")]
    Unsupported {
        /// Its position, from 0.
        position: usize,
        /// What about it.
        why: &'static str,
    },
    /// The tools are not what engines accept.
    #[error("tools are malformed: {0}")]
    Tools(&'static str),
    /// There is no template for such a request.
    #[error("no chat template is for such a request")]
    NoTemplate,
    /// The tokenizer's template and the processor's differ.
    #[error("the model has two chat templates, and it is not known which one the engine takes")]
    TwoTemplates,
    /// The last message cannot be continued.
    #[error("the last message cannot be continued: {0}")]
    Continue(&'static str),
    /// The template failed.
    #[error("chat template failed")]
    Template(#[source] Box<minijinja::Error>),
}

impl RenderError {
    /// What the request is refused for.
    pub const fn refusal(&self) -> Refusal {
        match self {
            Self::Message { .. } | Self::Tools(_) | Self::Continue(_) => Refusal::Malformed,
            Self::Media { .. } => Refusal::Media,
            Self::NoTemplate => Refusal::NoTemplate,
            Self::Unsupported { .. } | Self::TwoTemplates | Self::Template(_) => Refusal::Unrenderable,
        }
    }
}

/// The text that `engine` makes of `chat`. `now` is in milliseconds since 1970.
pub fn render(templates: &Templates, chat: Chat, engine: Engine, now: u64) -> Result<Rendered, RenderError> {
    match engine {
        Engine::SGLang => of_sglang(templates, chat, now),
        Engine::VLLM | Engine::ATOM | Engine::Auto => of_vllm(templates, chat, now),
    }
}

fn of_vllm(templates: &Templates, mut chat: Chat, now: u64) -> Result<Rendered, RenderError> {
    let tools = match chat.tools.take() {
        Some(tools) => {
            tools::dump(&tools, chat.tool_choice.as_ref(), Dialect::Vllm).map_err(RenderError::Tools)?
        }
        None => None,
    };
    let (name, traits) = templates.choose(tools.is_some(), true).ok_or(RenderError::NoTemplate)?;
    let messages = std::mem::take(&mut chat.messages);
    let mut conversation = conversation::of_vllm(messages, traits.vllm_format, traits.knows_developer)?;
    let continued = match chat.ending {
        Ending::Continued if !traits.knows_content => {
            return Err(RenderError::Continue("the template does not mention content"));
        }
        Ending::Continued => Some(mark_the_end(&mut conversation)?),
        Ending::GenerationPrompt | Ending::LastMessage => None,
    };
    let values = chat.values + conversation.messages.len();
    let write = |conversation: &Conversation| {
        let variables = variables(conversation, &chat, tools.as_ref(), now);
        templates.render(name, variables, values).map_err(RenderError::Template)
    };
    let text = write(&conversation)?;
    let exact = match conversation.has_media {
        false => text.len(),
        true => common_prefix(&text, &write(&with_other_marks(conversation))?),
    };
    let text = match continued {
        Some(last) => cut_at_the_end(text, &last)?,
        None => text,
    };
    Ok(Rendered { exact: exact.min(text.len()), text, appended: None })
}

fn of_sglang(templates: &Templates, mut chat: Chat, now: u64) -> Result<Rendered, RenderError> {
    if templates.is_ambiguous_for_sglang() {
        return Err(RenderError::TwoTemplates);
    }
    let mut tools = match chat.tools.take() {
        Some(tools) => {
            tools::dump(&tools, chat.tool_choice.as_ref(), Dialect::Sglang).map_err(RenderError::Tools)?
        }
        None => None,
    };
    let (name, traits) = templates.choose(tools.is_some(), false).ok_or(RenderError::NoTemplate)?;
    let messages = std::mem::take(&mut chat.messages);
    let mut conversation = conversation::of_sglang(messages, traits.sglang_format)?;
    let appended = split_the_last(&mut conversation, chat.ending);
    // It opens a turn in any case.
    chat.ending = Ending::GenerationPrompt;
    let values = chat.values + conversation.messages.len();
    let write = |conversation: &Conversation, tools: Option<&Value>| {
        let variables = variables(conversation, &chat, tools, now);
        templates.render(name, variables, values).map_err(RenderError::Template)
    };
    let text = match write(&conversation, tools.as_ref()) {
        Err(_) if tools.is_some() => {
            // Some templates want functions without the object around them.
            tools = tools.map(without_wrapper);
            write(&conversation, tools.as_ref())?
        }
        written => written?,
    };
    let exact = match conversation.has_media {
        false => text.len(),
        true => common_prefix(&text, &write(&with_other_marks(conversation), tools.as_ref())?),
    };
    Ok(Rendered { exact: exact.min(text.len()), text, appended })
}

/// SGLang makes the user say what the assistant said last, unless that is to be
/// continued: then it is left out, and its tokens are appended. The text to append.
fn split_the_last(conversation: &mut Conversation, ending: Ending) -> Option<String> {
    let mut last = conversation.messages.pop()?.into_json();
    let is_assistant = last["role"] == "assistant";
    match take(&mut last, "content") {
        Some(Value::String(text)) if is_assistant && ending == Ending::Continued => {
            return Some(text).filter(|text| !text.is_empty());
        }
        Some(text @ Value::String(_)) if is_assistant => last = message_of("user", text),
        content => last["content"] = content.unwrap_or_default(),
    }
    conversation.messages.push(last.into());
    None
}

fn without_wrapper(tools: Value) -> Value {
    let Value::Array(tools) = tools else { return tools };
    let bare = |mut tool: Value| take(&mut tool, "function").unwrap_or(tool);
    tools.into_iter().map(bare).collect()
}

fn variables<'a>(
    conversation: &Conversation,
    chat: &'a Chat,
    tools: Option<&Value>,
    now: u64,
) -> BTreeMap<&'a str, Jinja> {
    // `None` for what the request does not have, as transformers passes it.
    let optional = |value: Option<&Value>| value.map_or(Jinja::from(()), values::of);
    let mut variables = BTreeMap::new();
    for (name, value) in &chat.variables {
        variables.insert(name.as_str(), values::of(value));
    }
    variables.insert("messages", values::messages(&conversation.messages));
    variables.insert("tools", optional(tools));
    variables.insert("documents", optional(chat.documents.as_ref()));
    variables.insert("add_generation_prompt", Jinja::from(chat.ending == Ending::GenerationPrompt));
    variables.insert(NOW, Jinja::from(now));
    variables
}

/// The same conversation with other marks in place of its media.
fn with_other_marks(mut conversation: Conversation) -> Conversation {
    for message in &mut conversation.messages {
        let Message::Other(message) = message else { continue };
        match message.get_mut("content") {
            Some(Value::Array(parts)) => {
                let is_media =
                    |part: &Value| ["image", "audio", "video"].iter().any(|kind| part["type"] == *kind);
                parts.iter_mut().filter(|part| is_media(part)).for_each(|part| *part = text_part(OTHER_MARK));
            }
            Some(content) if content == MARK => *content = Value::from(OTHER_MARK),
            _ => {}
        }
    }
    conversation
}

/// Bytes of the longest prefix that two texts have in common.
fn common_prefix(one: &str, other: &str) -> usize {
    let same = one.bytes().zip(other.bytes()).take_while(|(a, b)| a == b).count();
    (0..=same).rev().find(|at| one.is_char_boundary(*at)).unwrap_or(0)
}

/// Appends transformers' mark to the last message; the text before it.
fn mark_the_end(conversation: &mut Conversation) -> Result<String, RenderError> {
    let last = conversation.messages.pop().ok_or(RenderError::Continue("there is none"))?;
    let mut last = last.into_json();
    let text = match last.get_mut("content") {
        Some(Value::String(text)) => text,
        Some(Value::Array(parts)) => {
            let text = parts.iter_mut().rev().find_map(|part| part.get_mut("text"));
            match text {
                Some(Value::String(text)) => text,
                _ => return Err(RenderError::Continue("it has no text")),
            }
        }
        _ => return Err(RenderError::Continue("it has no content")),
    };
    let before = text.clone();
    text.push_str(CONTINUE);
    conversation.messages.push(last.into());
    Ok(before)
}

/// Cuts the text where the last message, `last`, ends.
fn cut_at_the_end(mut text: String, last: &str) -> Result<String, RenderError> {
    let at = text.rfind(CONTINUE.trim_end()).filter(|_| text.contains(last.trim_matches(is_space)));
    let at = at.ok_or(RenderError::Continue("the template leaves it out"))?;
    let keeps_blanks = text[at..].starts_with(CONTINUE);
    text.truncate(at);
    if !keeps_blanks {
        text.truncate(text.trim_end_matches(is_space).len());
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const CHATML: &str = "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}{% else %}<pad>{% endif %}{% endfor %}{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}";
    const PLAIN: &str = "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}";

    fn of(source: &str, messages: Value, ending: Ending, engine: Engine) -> Result<Rendered, RenderError> {
        let templates = Templates::compile(vec![("default".to_owned(), source.to_owned())], BTreeMap::new())
            .expect("valid");
        let messages = messages.as_array().expect("a list").iter().cloned().map(Message::from).collect();
        render(&templates, Chat { messages, ending, ..Chat::default() }, engine, 0)
    }

    #[track_caller]
    fn check(why: &str, source: &str, messages: Value, ending: Ending, engine: Engine, expected: &str) {
        let rendered = of(source, messages, ending, engine).expect("it renders");
        let appended = rendered.appended.map_or(String::new(), |text| format!(" + {text}"));
        assert_eq!(rendered.text + &appended, expected, "{why}");
    }

    #[test]
    fn a_conversation_that_ends_with_the_assistant_is_rendered_as_each_engine_does() {
        let messages = || json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b "}]);
        use Ending::{Continued, GenerationPrompt};
        check(
            "vLLM leaves it",
            PLAIN,
            messages(),
            GenerationPrompt,
            Engine::VLLM,
            "<|user|>a<|end|><|assistant|>b<|end|><|assistant|>",
        );
        check(
            "SGLang makes it the user's",
            PLAIN,
            messages(),
            GenerationPrompt,
            Engine::SGLang,
            "<|user|>a<|end|><|user|>b<|end|><|assistant|>",
        );
        check(
            "SGLang continues it",
            PLAIN,
            messages(),
            Continued,
            Engine::SGLang,
            "<|user|>a<|end|><|assistant|> + b ",
        );
        check(
            "vLLM continues it, trimmed as the template trims",
            PLAIN,
            messages(),
            Continued,
            Engine::VLLM,
            "<|user|>a<|end|><|assistant|>b",
        );
        check(
            "vLLM continues it, blanks kept",
            CHATML,
            messages(),
            Continued,
            Engine::VLLM,
            "<|user|>a<|end|><|assistant|>b ",
        );
    }

    #[test]
    fn text_is_exact_up_to_the_first_media() {
        let parts = json!([
            {"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "http://x"}},
            {"type": "text", "text": "and"}, {"type": "image_url", "image_url": {"url": "http://y"}}
        ]);
        let messages = || json!([{"role": "user", "content": "a"}, {"role": "user", "content": parts}]);
        let exact = |source: &str, engine| {
            let rendered = of(source, messages(), Ending::GenerationPrompt, engine).expect("it renders");
            rendered.text[..rendered.exact].to_owned()
        };
        assert_eq!(exact(CHATML, Engine::VLLM), "<|user|>a<|end|><|user|>see");
        assert_eq!(exact(CHATML, Engine::SGLang), "<|user|>a<|end|><|user|>see");
        assert_eq!(exact(PLAIN, Engine::VLLM), "<|user|>a<|end|><|user|>", "placeholders go to the front");
        let ahead = format!(
            "{{{{ messages | length }}}}{{% for m in messages %}}{{% for c in m.content %}}{{% if c.type == 'image' %}}<pad>{{% endif %}}{{% endfor %}}{{% endfor %}}{CHATML}"
        );
        assert_eq!(exact(&ahead, Engine::VLLM), "2<", "where the template puts all of them first");
    }

    #[test]
    fn developers_become_the_system_where_the_template_does_not_know_them() {
        let messages = json!([
            {"role": "system", "content": "s"}, {"role": "user", "content": "u"}, {"role": "developer", "content": "d"}
        ]);
        check(
            "unknown",
            PLAIN,
            messages.clone(),
            Ending::LastMessage,
            Engine::VLLM,
            "<|system|>s\n\nd<|end|><|user|>u<|end|>",
        );
        let knows = format!("{{# 'developer' #}}{PLAIN}");
        check(
            "known",
            &knows,
            messages.clone(),
            Ending::LastMessage,
            Engine::VLLM,
            "<|system|>s<|end|><|user|>u<|end|><|developer|>d<|end|>",
        );
        check(
            "SGLang",
            PLAIN,
            messages,
            Ending::GenerationPrompt,
            Engine::SGLang,
            "<|system|>s<|end|><|user|>u<|end|><|developer|>d<|end|><|assistant|>",
        );
    }
}
