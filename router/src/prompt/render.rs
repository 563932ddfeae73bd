//! Chat messages to text, as the engine's own template renders them.
//!
//! Engines render with transformers' Jinja2 environment: trimmed blocks,
//! `tojson` as Python's `json.dumps`, loop controls, Python's string methods.
//! What differs between engines is how the text parts of one message are joined
//! and stands in [`Profile`]. `strftime_now` is refused: it makes a prompt that
//! changes daily by the engine's clock, which the router does not know.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use kvrouter_crds::config::Engine;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value as Jinja};
use minijinja::{Environment, ErrorKind};
use serde_json::{Map, Value};

use super::Refusal;
use super::endpoint::Chat;
use super::python_json::{Style, dumps};
use super::tools::{self, Dialect};

/// Instructions that one rendering may execute: a 100,000-message chat takes
/// about 10 million, a template that loops for ever is stopped.
const FUEL: u64 = 200_000_000;
/// Name of the template that is used when there is no other or no tool.
const DEFAULT: &str = "default";
/// Name of the template that some models keep for requests with tools.
const TOOL_USE: &str = "tool_use";

/// What differs between engine families.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Profile {
    /// What stands between the text parts of a message.
    pub part_separator: &'static str,
    /// How tools are dumped.
    pub tools: Dialect,
    /// vLLM renders a conversation that ends with the assistant as it stands,
    /// hands plain text as one part to templates that loop over parts, copies
    /// `reasoning`, and derives `enable_thinking` from the effort. SGLang does
    /// none of it; where it does something else the chat is refused.
    pub is_vllm: bool,
}

/// A model's chat templates, compiled.
pub struct Template {
    environment: Environment<'static>,
    /// `bos_token` and its kin.
    special_tokens: BTreeMap<String, String>,
    /// The template loops over the parts of a message's content itself.
    takes_parts: bool,
}

impl std::fmt::Debug for Template {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Template(takes_parts: {})", self.takes_parts)
    }
}

/// Why a folder's template could not be used.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// A file cannot be read.
    #[error("failed to read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What was wrong.
        #[source]
        source: std::io::Error,
    },
    /// `tokenizer_config.json` is not JSON.
    #[error("failed to parse {}", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// What was wrong.
        #[source]
        source: serde_json::Error,
    },
    /// The template is not valid.
    #[error("failed to compile chat template {name}")]
    Compile {
        /// Its name.
        name: String,
        /// What was wrong.
        #[source]
        source: Box<minijinja::Error>,
    },
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
    /// A message has a part that is not text.
    #[error("message {position} has a part that is not text")]
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
    /// The engine would rewrite the last message.
    #[error("the last message is the assistant's")]
    EndsWithAssistant,
    /// The template failed.
    #[error("chat template failed")]
    Template(#[source] Box<minijinja::Error>),
}

impl RenderError {
    /// What the request is refused for.
    pub const fn refusal(&self) -> Refusal {
        match self {
            Self::Message { .. } | Self::Tools(_) => Refusal::Malformed,
            Self::Media { .. } => Refusal::Media,
            Self::Unsupported { .. } | Self::EndsWithAssistant | Self::Template(_) => Refusal::Unrenderable,
        }
    }
}

impl Profile {
    /// The profile of an engine family. ATOM renders through vLLM's front end.
    pub const fn of(engine: Engine) -> Self {
        match engine {
            Engine::SGLang => Self { part_separator: " ", tools: Dialect::Sglang, is_vllm: false },
            Engine::VLLM | Engine::ATOM | Engine::Auto => {
                Self { part_separator: "\n", tools: Dialect::Vllm, is_vllm: true }
            }
        }
    }
}

impl Template {
    /// Loads the chat template of `folder`; `None` if it has none.
    /// `chat_template.jinja` wins over `tokenizer_config.json`, as in
    /// transformers.
    pub fn load(folder: &Path) -> Result<Option<Self>, TemplateError> {
        let path = folder.join("tokenizer_config.json");
        let config: Value = match read(&path)? {
            Some(text) => {
                serde_json::from_str(&text).map_err(|source| TemplateError::Parse { path, source })?
            }
            None => Value::Null,
        };
        let templates = match read(&folder.join("chat_template.jinja"))? {
            Some(text) => vec![(DEFAULT.to_owned(), text)],
            None => named_templates(&config),
        };
        if templates.is_empty() {
            return Ok(None);
        }
        Self::compile(templates, special_tokens(&config)).map(Some)
    }

    fn compile(
        templates: Vec<(String, String)>,
        special_tokens: BTreeMap<String, String>,
    ) -> Result<Self, TemplateError> {
        let mut environment = environment();
        let takes_parts = templates.iter().any(|(_, text)| loops_over_parts(text));
        for (name, text) in templates {
            // Marks what the assistant said, for training; transparent here.
            let text = text.replace("{% generation %}", "").replace("{% endgeneration %}", "");
            let text = text.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "");
            environment
                .add_template_owned(name.clone(), text)
                .map_err(|source| TemplateError::Compile { name, source: Box::new(source) })?;
        }
        Ok(Self { environment, special_tokens, takes_parts })
    }

    /// The text that the engine's tokenizer will be given.
    pub fn render(&self, chat: &Chat<'_>, profile: Profile) -> Result<String, RenderError> {
        let messages = chat
            .messages
            .iter()
            .enumerate()
            .map(|(position, message)| self.message(position, message, profile))
            .collect::<Result<Vec<Value>, RenderError>>()?;
        if !profile.is_vllm && chat.messages.last().is_some_and(is_assistant) {
            return Err(RenderError::EndsWithAssistant);
        }
        let tools = match chat.tools {
            Some(tools) => tools::dump(tools, chat.tool_choice, profile.tools).map_err(RenderError::Tools)?,
            None => None,
        };
        let mut variables: BTreeMap<&str, Jinja> = BTreeMap::new();
        for (name, token) in &self.special_tokens {
            variables.insert(name, Jinja::from(token.as_str()));
        }
        variables.insert("messages", Jinja::from(Serde(&messages)));
        variables.insert("tools", optional(tools.as_ref()));
        variables.insert("documents", optional(chat.documents));
        variables.insert("add_generation_prompt", Jinja::from(chat.add_generation_prompt));
        if let Some(effort) = chat.reasoning_effort {
            variables.insert("reasoning_effort", Jinja::from(Serde(effort)));
            if profile.is_vllm {
                variables.insert("enable_thinking", Jinja::from(effort != "none"));
            }
        }
        for (name, value) in chat.kwargs.into_iter().flatten() {
            variables.insert(name, Jinja::from(Serde(value)));
        }
        let with_tools = tools.is_some().then(|| self.environment.get_template(TOOL_USE).ok()).flatten();
        with_tools
            .map_or_else(|| self.environment.get_template(DEFAULT), Ok)
            .and_then(|template| template.render(variables))
            .map_err(|error| RenderError::Template(Box::new(error)))
    }

    /// A message as engines hand it to the template: content as text or as
    /// parts, arguments of tool calls as objects.
    fn message(&self, position: usize, message: &Value, profile: Profile) -> Result<Value, RenderError> {
        let fields = message.as_object().ok_or(RenderError::Message { position, why: "it is no object" })?;
        if !fields.get("role").is_some_and(Value::is_string) {
            return Err(RenderError::Message { position, why: "it has no role" });
        }
        let mut fields = fields.clone();
        let role = fields.get("role").and_then(Value::as_str).unwrap_or_default();
        if role == "developer" {
            // Engines rename it where the template does not know it.
            return Err(RenderError::Unsupported { position, why: "its role is developer" });
        }
        let content = self.content(position, role, fields.get("content"), profile)?;
        fields.insert("content".to_owned(), content);
        if let Some(calls) = fields.get_mut("tool_calls").and_then(Value::as_array_mut) {
            calls.iter_mut().try_for_each(|call| parse_arguments(position, call))?;
        }
        let none = |calls: &Value| calls.is_null() || calls.as_array().is_some_and(Vec::is_empty);
        if fields.get("tool_calls").is_some_and(none) {
            fields.remove("tool_calls");
        }
        if profile.is_vllm
            && !fields.contains_key("reasoning_content")
            && let Some(reasoning) = fields.get("reasoning").cloned()
        {
            fields.insert("reasoning_content".to_owned(), reasoning);
        }
        Ok(Value::Object(fields))
    }

    fn content(
        &self,
        position: usize,
        role: &str,
        content: Option<&Value>,
        profile: Profile,
    ) -> Result<Value, RenderError> {
        // What tools say is always one text.
        let as_parts = self.takes_parts && role != "tool";
        let part = |text: &str| serde_json::json!({"type": "text", "text": text});
        match content {
            None | Some(Value::Null) if as_parts && profile.is_vllm => Ok(Value::Array(Vec::new())),
            None | Some(Value::Null) => Ok(Value::from("")),
            Some(Value::String(text)) if as_parts && profile.is_vllm => Ok(Value::Array(vec![part(text)])),
            Some(Value::String(text)) => Ok(Value::from(text.as_str())),
            Some(Value::Array(parts)) => {
                let texts = text_parts(position, parts)?;
                if role == "tool" && texts.len() > 1 && !profile.is_vllm {
                    return Err(RenderError::Unsupported { position, why: "a tool answers in parts" });
                }
                Ok(if as_parts {
                    Value::Array(texts.into_iter().map(part).collect())
                } else {
                    Value::from(texts.join(profile.part_separator))
                })
            }
            Some(_) => Err(RenderError::Message { position, why: "its content is no text" }),
        }
    }
}

fn is_assistant(message: &Value) -> bool {
    message.get("role").is_some_and(|role| role == "assistant")
}

/// The texts of a content list; anything else in it is media.
fn text_parts(position: usize, parts: &[Value]) -> Result<Vec<&str>, RenderError> {
    parts
        .iter()
        .map(|part| match (part, part.get("type").and_then(Value::as_str)) {
            (Value::String(text), _) => Ok(text.as_str()),
            (_, Some("text" | "input_text" | "output_text" | "refusal")) => {
                let text = part.get("text").or_else(|| part.get("refusal"));
                text.and_then(Value::as_str)
                    .ok_or(RenderError::Message { position, why: "a text part has no text" })
            }
            _ => Err(RenderError::Media { position }),
        })
        .collect()
}

/// Clients send arguments as JSON in a string; templates are given the object.
fn parse_arguments(position: usize, call: &mut Value) -> Result<(), RenderError> {
    let Some(arguments) = call.pointer_mut("/function/arguments") else { return Ok(()) };
    let Value::String(text) = arguments else { return Ok(()) };
    *arguments = if text.is_empty() {
        Value::Object(Map::new())
    } else {
        serde_json::from_str(text)
            .map_err(|_| RenderError::Message { position, why: "arguments of a tool call are no JSON" })?
    };
    Ok(())
}

/// transformers' environment, as far as it can be had exactly.
fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    environment.set_syntax(syntax.expect("the default delimiters are valid"));
    environment.set_fuel(Some(FUEL));
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.add_filter("tojson", to_json);
    environment.add_function("raise_exception", |message: String| -> Result<String, minijinja::Error> {
        Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_function("strftime_now", |_: String| -> Result<String, minijinja::Error> {
        Err(minijinja::Error::new(ErrorKind::InvalidOperation, "strftime_now depends on the engine's clock"))
    });
    environment
}

/// `None` for what the request does not have, as transformers passes it.
fn optional(value: Option<&Value>) -> Jinja {
    value.map_or(Jinja::from(()), |value| Jinja::from(Serde(value)))
}

fn to_json(value: &Jinja, options: Kwargs) -> Result<Jinja, minijinja::Error> {
    let pair: Option<Vec<String>> = options.get("separators")?;
    let style = Style {
        indent: options.get("indent")?,
        ensure_ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        separators: match pair.as_deref() {
            Some([item, key]) => Some((item.clone(), key.clone())),
            _ => None,
        },
    };
    options.assert_all_used()?;
    let json = serde_json::to_value(value)
        .map_err(|error| minijinja::Error::new(ErrorKind::BadSerialization, error.to_string()))?;
    Ok(Jinja::from_safe_string(dumps(&json, &style)))
}

/// Whether a template walks through the parts of a content by itself, as
/// vLLM's "openai" content format expects.
fn loops_over_parts(text: &str) -> bool {
    let squeezed: String = text.chars().filter(|character| !character.is_whitespace()).collect();
    [
        "inmessage.content",
        "inmessage['content']",
        "inmessage[\"content\"]",
        "inmsg.content",
        "inmsg['content']",
    ]
    .iter()
    .any(|walk| {
        squeezed.match_indices(walk).any(|(at, _)| {
            squeezed[..at].rfind("{%").is_some_and(|tag| {
                let head = &squeezed[tag..at];
                head.contains("for") && !head.contains("%}")
            })
        })
    })
}

fn named_templates(config: &Value) -> Vec<(String, String)> {
    match config.get("chat_template") {
        Some(Value::String(text)) => vec![(DEFAULT.to_owned(), text.clone())],
        Some(Value::Array(list)) => list
            .iter()
            .filter_map(|entry| {
                let text = |name| entry.get(name).and_then(Value::as_str).map(str::to_owned);
                text("name").zip(text("template"))
            })
            .collect(),
        _ => Vec::new(),
    }
}

fn special_tokens(config: &Value) -> BTreeMap<String, String> {
    let fields = config.as_object().into_iter().flatten();
    fields
        .filter(|(name, _)| name.ends_with("_token"))
        .filter_map(|(name, value)| {
            let content = value.as_str().or_else(|| value.get("content").and_then(Value::as_str))?;
            Some((name.clone(), content.to_owned()))
        })
        .collect()
}

/// The text of a file; `None` if there is no such file.
fn read(path: &Path) -> Result<Option<String>, TemplateError> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(TemplateError::Read { path: path.to_owned(), source }),
    }
}
