//! Chat templates in the environment that transformers gives them: trimmed blocks, Python's
//! methods and JSON, `raise_exception`, `strftime_now`, a transparent `generation` tag.

use std::path::Path;
use std::time::Duration;

use minijinja::value::Kwargs;
use minijinja::{Environment, Error, ErrorKind, syntax::SyntaxConfig};
use serde_json::{Map, Value, json};

use super::{PromptError, tools};
use crate::clock;
use crate::config::Wire;

/// Steps after which a template is taken for endless.
const FUEL: u64 = 50_000_000;

/// A compiled template and the variables that the tokenizer's configuration gives it.
pub(super) struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    special_tokens: Map<String, Value>,
}

impl ChatTemplate {
    /// Reads `chat_template.jinja`, else `tokenizer_config.json`; none when neither has one.
    pub(super) fn load(directory: &Path) -> Result<Option<Self>, PromptError> {
        let config = match std::fs::read(directory.join("tokenizer_config.json")) {
            Ok(bytes) => serde_json::from_slice(&bytes).map_err(|source| PromptError::Load {
                file: "tokenizer_config.json".to_owned(),
                source: source.into(),
            })?,
            Err(_) => Value::Null,
        };
        let file = std::fs::read_to_string(directory.join("chat_template.jinja")).ok();
        let Some(source) = file.or_else(|| template_of(&config)) else { return Ok(None) };
        Ok(Some(Self::new(&source, special_tokens(&config))?))
    }

    pub(super) fn new(source: &str, special_tokens: Map<String, Value>) -> Result<Self, Error> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?;
        environment.set_syntax(syntax);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_filter("tojson", to_json);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", |format: String| strftime(&format, clock::since_epoch()));
        let source = without_generation_tags(source);
        environment.add_template_owned("chat", source.clone())?;
        Ok(Self { environment, source, special_tokens })
    }

    /// The prompt's text for a chat body.
    pub(super) fn render(&self, wire: Wire, body: &Value) -> Result<String, PromptError> {
        let mut messages = body.get("messages").and_then(Value::as_array).cloned().unwrap_or_default();
        if messages.is_empty() || messages.iter().any(|message| message["role"].as_str().is_none()) {
            return Err(PromptError::Messages);
        }
        let content_is_list = self.loops_over_content(wire);
        for message in &mut messages {
            normalise(message, wire, content_is_list, &self.source);
        }
        let continued = body["continue_final_message"] == true;
        let mut tail = String::new();
        if continued && wire.is_vllm() {
            return self.render_continued(wire, body, messages);
        }
        if let Some(last) = messages.last_mut().filter(|last| !wire.is_vllm() && last["role"] == "assistant")
        {
            if continued {
                tail = last["content"].as_str().unwrap_or("").to_owned();
                messages.pop();
            } else {
                last["role"] = json!("user");
            }
        }
        let context = self.context(wire, body, messages);
        Ok(self.environment.get_template("chat")?.render(minijinja::value::Serde(context))? + &tail)
    }

    /// vLLM: the text up to the end of the last message's content.
    fn render_continued(
        &self,
        wire: Wire,
        body: &Value,
        messages: Vec<Value>,
    ) -> Result<String, PromptError> {
        let last = messages.last().and_then(|message| message["content"].as_str()).unwrap_or("");
        let last = last.to_owned();
        let mut context = self.context(wire, body, messages);
        context.insert("add_generation_prompt".to_owned(), Value::Bool(false));
        let mut text = self.environment.get_template("chat")?.render(minijinja::value::Serde(context))?;
        for content in [last.as_str(), last.trim()] {
            if let Some(at) = text.rfind(content) {
                text.truncate(at + content.len());
                break;
            }
        }
        Ok(text)
    }

    fn context(&self, wire: Wire, body: &Value, messages: Vec<Value>) -> Map<String, Value> {
        let mut context = self.special_tokens.clone();
        let generation = body.get("add_generation_prompt").cloned().unwrap_or(Value::Bool(true));
        context.insert("add_generation_prompt".to_owned(), generation);
        context.insert("messages".to_owned(), Value::Array(messages));
        // Absent and null are none to a template, as transformers passes them.
        context.insert("tools".to_owned(), tools::shown(wire, &body["tools"]));
        context.insert("documents".to_owned(), body.get("documents").cloned().unwrap_or(Value::Null));
        if let Some(effort) = body["reasoning_effort"].as_str() {
            context.insert("reasoning_effort".to_owned(), json!(effort));
            if wire.is_vllm() {
                context.insert("enable_thinking".to_owned(), json!(effort != "none"));
            }
        }
        if let Some(kwargs) = body["chat_template_kwargs"].as_object() {
            context.extend(kwargs.clone());
        }
        context
    }

    /// Whether the template takes a message's content as a list of parts. The engines look at
    /// the syntax tree; here a `for` over something named content is enough.
    fn loops_over_content(&self, wire: Wire) -> bool {
        let media = ["image", "audio", "video", "vision"];
        if !wire.is_vllm() && media.iter().any(|word| self.source.contains(word)) {
            return true;
        }
        self.source.split("{%").skip(1).any(|tag| {
            let tag = tag.split("%}").next().unwrap_or("").trim_matches(['-', '+', ' ']);
            let iterated = tag.strip_prefix("for ").and_then(|rest| rest.split_once(" in "));
            iterated.is_some_and(|(_, list)| list.contains("content"))
        })
    }
}

fn template_of(config: &Value) -> Option<String> {
    let templates = config.get("chat_template")?;
    if let Some(source) = templates.as_str() {
        return Some(source.to_owned());
    }
    let named = templates.as_array()?.iter().find(|entry| entry["name"] == "default")?;
    named["template"].as_str().map(str::to_owned)
}

/// `bos_token` and the like: strings, or objects with `content`.
fn special_tokens(config: &Value) -> Map<String, Value> {
    let entries = config.as_object().into_iter().flatten();
    let tokens = entries.filter(|(name, _)| name.ends_with("_token"));
    let text = |value: &Value| value.as_str().or_else(|| value["content"].as_str()).map(|text| json!(text));
    tokens.filter_map(|(name, value)| Some((name.clone(), text(value)?))).collect()
}

/// What both engines do to a message before the template sees it.
fn normalise(message: &mut Value, wire: Wire, content_is_list: bool, template: &str) {
    let separator = if wire.is_vllm() { "\n" } else { " " };
    match &message["content"] {
        Value::Null if content_is_list && wire.is_vllm() => message["content"] = json!([]),
        Value::Null => message["content"] = json!(""),
        Value::Array(parts) if !content_is_list => {
            let texts: Vec<&str> = parts.iter().filter_map(|part| part["text"].as_str()).collect();
            message["content"] = json!(texts.join(separator));
        }
        Value::String(text) if content_is_list && wire.is_vllm() => {
            message["content"] = json!([{"type": "text", "text": text}]);
        }
        _ => {}
    }
    if message["role"] == "developer" && wire.is_vllm() && !template.contains("developer") {
        message["role"] = json!("system");
    }
    for call in message.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten() {
        let arguments = &mut call["function"]["arguments"];
        if let Some(text) = arguments.as_str() {
            let text = if text.is_empty() { "{}" } else { text };
            if let Ok(parsed) = serde_json::from_str(text) {
                *arguments = parsed;
            }
        }
    }
}

/// `{% generation %}` and its end mark the assistant's words in training and render nothing.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut pieces = source.split("{%");
    out.push_str(pieces.next().unwrap_or(""));
    for piece in pieces {
        out.push_str("{%");
        let tag = piece.split("%}").next().unwrap_or("");
        match tag.trim_matches(['-', '+', ' ']) {
            "generation" => out.push_str(&piece.replacen("generation", "if true", 1)),
            "endgeneration" => out.push_str(&piece.replacen("endgeneration", "endif", 1)),
            _ => out.push_str(piece),
        }
    }
    out
}

fn raise_exception(message: String) -> Result<String, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

/// Python's `json.dumps(value, ensure_ascii=False, indent=…, sort_keys=…)`.
fn to_json(value: &minijinja::Value, kwargs: Kwargs) -> Result<minijinja::Value, Error> {
    let indent: Option<usize> = kwargs.get("indent")?;
    let sort_keys: Option<bool> = kwargs.get("sort_keys")?;
    let ensure_ascii: Option<bool> = kwargs.get("ensure_ascii")?;
    kwargs.assert_all_used()?;
    if ensure_ascii == Some(true) {
        return Err(Error::new(ErrorKind::InvalidOperation, "tojson with ensure_ascii is not modelled"));
    }
    let value = serde_json::to_value(value)
        .map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))?;
    let mut out = String::new();
    write_json(&mut out, &value, indent, sort_keys == Some(true), 0);
    Ok(minijinja::Value::from_safe_string(out))
}

fn write_json(out: &mut String, value: &Value, indent: Option<usize>, sort_keys: bool, depth: usize) {
    let (open, close, items): (char, char, Vec<(Option<&String>, &Value)>) = match value {
        Value::Array(list) => ('[', ']', list.iter().map(|item| (None, item)).collect()),
        Value::Object(map) => {
            let mut items: Vec<_> = map.iter().map(|(key, item)| (Some(key), item)).collect();
            if sort_keys {
                items.sort_by_key(|(key, _)| *key);
            }
            ('{', '}', items)
        }
        Value::Number(number) => return out.push_str(&python_number(number)),
        other => return out.push_str(&other.to_string()),
    };
    let newline = |out: &mut String, depth: usize| {
        if let Some(indent) = indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', indent * depth));
        }
    };
    out.push(open);
    for (at, (key, item)) in items.iter().enumerate() {
        if at > 0 {
            out.push_str(if indent.is_some() { "," } else { ", " });
        }
        newline(out, depth + 1);
        if let Some(key) = key {
            out.push_str(&Value::String((*key).clone()).to_string());
            out.push_str(": ");
        }
        write_json(out, item, indent, sort_keys, depth + 1);
    }
    if !items.is_empty() {
        newline(out, depth);
    }
    out.push(close);
}

/// Python's form of a number: floats far from one have an exponent, with a sign and two digits.
fn python_number(number: &serde_json::Number) -> String {
    let Some(float) = number.as_f64().filter(|_| number.is_f64()) else { return number.to_string() };
    let scientific = format!("{float:e}");
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        return format!("{float:?}");
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{mantissa}e{sign}{:02}", exponent.unsigned_abs())
}

/// The directives that templates use, in UTC, for a time since 1970.
fn strftime(format: &str, now: Duration) -> String {
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
    let seconds = now.as_secs();
    let days = seconds / 86_400;
    let (year, month, day) = civil(days);
    let weekday = DAYS[usize::try_from(days % 7).unwrap_or(0)];
    let name = MONTHS[month - 1];
    let mut out = String::new();
    let mut characters = format.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            out.push(character);
            continue;
        }
        match characters.next() {
            Some('Y') => out.push_str(&year.to_string()),
            Some('y') => out.push_str(&format!("{:02}", year % 100)),
            Some('m') => out.push_str(&format!("{month:02}")),
            Some('d') => out.push_str(&format!("{day:02}")),
            Some('B') => out.push_str(name),
            Some('b') => out.push_str(&name[..3]),
            Some('A') => out.push_str(weekday),
            Some('a') => out.push_str(&weekday[..3]),
            Some('H') => out.push_str(&format!("{:02}", seconds / 3600 % 24)),
            Some('M') => out.push_str(&format!("{:02}", seconds / 60 % 60)),
            Some('S') => out.push_str(&format!("{:02}", seconds % 60)),
            Some(other) => out.extend(['%', other]),
            None => out.push('%'),
        }
    }
    out
}

/// Year, month and day of a day since 1970.
fn civil(mut days: u64) -> (u64, usize, u64) {
    let leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let mut year = 1970;
    while days >= 365 + u64::from(leap(year)) {
        days -= 365 + u64::from(leap(year));
        year += 1;
    }
    let lengths = [31, 28 + u64::from(leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 1;
    for length in lengths {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    (year, month, days + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn render(wire: Wire, source: &str, body: &Value) -> String {
        ChatTemplate::new(source, Map::new()).unwrap().render(wire, body).unwrap()
    }

    #[test]
    fn templates_see_what_the_engines_show_them() {
        let check = |why: &str, wire, source: &str, body: Value, expected: &str| {
            assert_eq!(render(wire, source, &body), expected, "{why}");
        };
        let parts = json!({"messages": [{"role": "user", "content": [
            {"type": "text", "text": "A"}, {"type": "text", "text": "B"}]}]});
        let plain = "{{ messages[0].content }}";
        check("vLLM joins with a newline", Wire::Vllm033, plain, parts.clone(), "A\nB");
        check("SGLang joins with a space", Wire::Sglang0523, plain, parts.clone(), "A B");
        let looping = "{% for part in messages[0].content %}{{ part.text }};{% endfor %}";
        check("a template that loops gets the parts", Wire::Vllm033, looping, parts, "A;B;");
        let text = json!({"messages": [{"role": "user", "content": "A"}]});
        check("and a string as one part", Wire::Vllm033, looping, text.clone(), "A;");
        let blocks = "  {% if true %}\nx\n  {% endif %}\n{{ messages|length }}";
        check("blocks are trimmed", Wire::Vllm033, blocks, text.clone(), "x\n1");
        let tag = "{%- generation %}{{ messages[0].content.upper() }}{% endgeneration %}";
        check("a generation tag is transparent", Wire::Vllm033, tag, text, "A");
        let tools = json!({"messages": [{"role": "user", "content": ""}],
            "tools": [{"b": "<é\n", "a": [1, 2.5, null, true, 1e20, 1e-5, 0.0001, 1e15, -0.0]}]});
        let expected =
            r#"{"b": "<é\n", "a": [1, 2.5, null, true, 1e+20, 1e-05, 0.0001, 1000000000000000.0, -0.0]}"#;
        check("JSON is Python's", Wire::Vllm033, "{{ tools[0]|tojson }}", tools, expected);
    }

    #[test]
    fn a_final_answer_is_continued_or_taken_as_each_engine_does() {
        let source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}\
                      {% if add_generation_prompt %}<assistant>{% endif %}";
        let chat = |continued| {
            json!({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "so"}],
                   "continue_final_message": continued})
        };
        let rows = [
            (Wire::Vllm033, false, "<user>q</><assistant>so</><assistant>"),
            (Wire::Vllm033, true, "<user>q</><assistant>so"),
            (Wire::Sglang0523, false, "<user>q</><user>so</><assistant>"),
            (Wire::Sglang0523, true, "<user>q</><assistant>so"),
        ];
        for (wire, continued, expected) in rows {
            assert_eq!(render(wire, source, &chat(continued)), expected, "{wire:?} {continued}");
        }
    }

    #[test]
    fn a_template_can_refuse() {
        let template = ChatTemplate::new("{{ raise_exception('no tools') }}", Map::new()).unwrap();
        let body = json!({"messages": [{"role": "user", "content": ""}]});
        let error = template.render(Wire::Vllm033, &body).unwrap_err();
        assert!(error.to_string().contains("no tools"), "{error}");
    }

    #[test]
    fn dates_are_those_of_the_calendar() {
        let check = |seconds, expected: &str| {
            let format = "%a %d %b %Y %H:%M:%S";
            assert_eq!(strftime(format, Duration::from_secs(seconds)), expected);
        };
        check(0, "Thu 01 Jan 1970 00:00:00");
        check(951_782_400, "Tue 29 Feb 2000 00:00:00");
        check(1_795_956_083, "Sun 29 Nov 2026 12:41:23");
    }
}
