//! A model's chat templates: where they are found, and the environment in which
//! they render.
//!
//! Engines render with transformers' Jinja2 environment: trimmed blocks, `tojson`
//! as Python's `json.dumps`, loop controls, Python's string methods. minijinja is
//! made to do the same; what it cannot do exactly fails, and the chat is refused.
//!
//! Sources, as transformers takes them: `chat_template.jinja`, with
//! `additional_chat_templates/NAME.jinja` beside it; else `chat_template` of
//! `tokenizer_config.json`, one text or a list of named ones. A processor's
//! `chat_template.json` is what vLLM uses for requests without tools.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value as Jinja};
use minijinja::{Environment, ErrorKind, State};
use serde_json::{Value, json};

use super::inspect::{ContentFormat, Tree};
use super::python::{self, Day};
use super::python_json::{Style, dumps};
use super::{searches, sums};

/// Instructions that one rendering may execute, by how many values a chat has at
/// most: a template takes some 100 for each, and one that loops for ever is stopped
/// within milliseconds.
const FUEL: [(usize, u64); 3] = [(500, 1_000_000), (10_000, 20_000_000), (usize::MAX, 200_000_000)];
/// Calls of macros within each other, and blocks: no template of a model comes
/// near, and a thread of the CPU pool has room for them.
const RECURSION: usize = 200;
/// Name of the template that is used when there is no other or no tool.
const DEFAULT: &str = "default";
/// Name of the template that some models keep for requests with tools.
const TOOL_USE: &str = "tool_use";
/// Name of the processor's template.
const PROCESSOR: &str = "processor";
/// The variable that holds the time, in milliseconds since 1970. No template can
/// spell it.
pub const NOW: &str = "now, in ms";

/// A model's chat templates, compiled.
pub struct Templates {
    /// One for each step of [`FUEL`], otherwise the same.
    environments: Vec<Environment<'static>>,
    traits: BTreeMap<String, Traits>,
    /// `bos_token` and its kin.
    special_tokens: BTreeMap<String, String>,
}

/// What engines read off a template.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Traits {
    /// How vLLM hands content to it.
    pub vllm_format: ContentFormat,
    /// How SGLang hands content to it.
    pub sglang_format: ContentFormat,
    /// It mentions the role `developer`.
    pub knows_developer: bool,
    /// It mentions content at all, so that the last message can be continued.
    pub knows_content: bool,
    /// System messages after the first go to the front, in vLLM's `/v1/messages`.
    pub vllm_merges_system: bool,
    /// System messages may stand anywhere, for SGLang.
    pub sglang_inline_system: bool,
    /// The effort that vLLM makes of `thinking: disabled`.
    pub vllm_effort_without_thinking: &'static str,
}

impl std::fmt::Debug for Templates {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Templates({:?})", self.traits)
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
    /// A file is not JSON.
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

impl Templates {
    /// Loads the chat templates of `folder`; `None` if it has none.
    pub fn load(folder: &Path) -> Result<Option<Self>, TemplateError> {
        let config = read_json(&folder.join("tokenizer_config.json"))?;
        let mut templates = match read(&folder.join("chat_template.jinja"))? {
            Some(text) => vec![(DEFAULT.to_owned(), text)],
            None => named_templates(&config),
        };
        templates.extend(additional(&folder.join("additional_chat_templates"))?);
        let processor = read_json(&folder.join("chat_template.json"))?;
        if let Some(text) = processor.get("chat_template").and_then(Value::as_str) {
            templates.push((PROCESSOR.to_owned(), text.to_owned()));
            if !templates.iter().any(|(name, _)| name == DEFAULT) {
                templates.push((DEFAULT.to_owned(), text.to_owned()));
            }
        }
        if templates.is_empty() {
            return Ok(None);
        }
        Self::compile(templates, special_tokens(&config)).map(Some)
    }

    /// Compiles `templates`, pairs of a name and a text.
    pub fn compile(
        templates: Vec<(String, String)>,
        special_tokens: BTreeMap<String, String>,
    ) -> Result<Self, TemplateError> {
        let mut environment = environment();
        let mut all = BTreeMap::new();
        for (name, source) in templates {
            let text = without_generation(&source);
            let compile = |source| TemplateError::Compile { name: name.clone(), source: Box::new(source) };
            environment.add_template_owned(name.clone(), text.clone()).map_err(compile)?;
            let tree = Tree::parse(&text, syntax()).map_err(compile)?;
            let traits = Traits::of(&source, &tree);
            if let Some(faster) = faster(&text, &tree) {
                environment.add_template_owned(name.clone(), faster).map_err(compile)?;
            }
            all.insert(name, traits);
        }
        let with_fuel = |(_, fuel): &(usize, u64)| {
            let mut fuelled = environment.clone();
            fuelled.set_fuel(Some(*fuel));
            fuelled
        };
        let environments = FUEL.iter().map(with_fuel).collect();
        let mut loaded = Self { environments, traits: all, special_tokens };
        for name in loaded.traits.keys().cloned().collect::<Vec<_>>() {
            let effort = loaded.effort_without_thinking(&name);
            if let Some(traits) = loaded.traits.get_mut(&name) {
                traits.vllm_effort_without_thinking = effort;
            }
        }
        // Claude's system messages are merged if any template needs it.
        let merges = loaded.traits.values().any(|traits| traits.vllm_merges_system);
        loaded.traits.values_mut().for_each(|traits| traits.vllm_merges_system = merges);
        Ok(loaded)
    }

    /// The template that an engine takes for a request with or without tools.
    pub fn choose(&self, has_tools: bool, is_vllm: bool) -> Option<(&str, &Traits)> {
        let wanted: &[&str] = match (has_tools, is_vllm) {
            (true, _) => &[TOOL_USE, DEFAULT],
            (false, true) => &[PROCESSOR, DEFAULT],
            (false, false) => &[DEFAULT],
        };
        let find = |name: &&str| self.traits.get_key_value(*name);
        wanted.iter().find_map(find).map(|(name, traits)| (name.as_str(), traits))
    }

    /// The two templates of a model are not the same, and it is not known which
    /// of them an engine takes.
    pub fn is_ambiguous_for_sglang(&self) -> bool {
        let source =
            |name| self.environments[0].get_template(name).ok().map(|found| found.source().to_owned());
        source(PROCESSOR).is_some_and(|of_processor| source(DEFAULT) != Some(of_processor))
    }

    /// What template `name` makes of `variables`, with the special tokens. There are
    /// about `values` in them, which decides when rendering is given up.
    pub fn render(
        &self,
        name: &str,
        variables: BTreeMap<&str, Jinja>,
        values: usize,
    ) -> Result<String, Box<minijinja::Error>> {
        let mut all = variables;
        for (name, token) in &self.special_tokens {
            // A variable of the request wins.
            all.entry(name).or_insert_with(|| Jinja::from(token.as_str()));
        }
        let step = FUEL.iter().position(|(most, _)| values <= *most).unwrap_or(0);
        let template = self.environments[step].get_template(name).map_err(Box::new)?;
        template.render(all).map_err(Box::new)
    }

    /// vLLM asks a template what it does with efforts: where `none` fails or looks
    /// like another one, `low` stands for no thoughts.
    fn effort_without_thinking(&self, name: &str) -> &'static str {
        let probe = |effort: &str| {
            let format = self.traits.get(name).map(|traits| traits.vllm_format);
            let hi = match format {
                Some(ContentFormat::Parts) => json!([{"type": "text", "text": "Hi"}]),
                _ => json!("Hi"),
            };
            let mut variables = BTreeMap::new();
            let messages = json!([{"role": "user", "content": hi}]);
            variables.insert("messages", Jinja::from(Serde(messages)));
            variables.insert("tools", Jinja::from(()));
            variables.insert("documents", Jinja::from(()));
            variables.insert("add_generation_prompt", Jinja::from(true));
            variables.insert("reasoning_effort", Jinja::from(effort));
            variables.insert("enable_thinking", Jinja::from(effort != "none"));
            variables.insert(NOW, Jinja::from(0_u64));
            self.render(name, variables, 0).ok()
        };
        let none = probe("none");
        let same = |effort: &&str| probe(effort) == none;
        match none.is_none() || ["low", "medium", "high", "xhigh", "max"].iter().any(same) {
            true => "low",
            false => "none",
        }
    }
}

impl Traits {
    fn of(source: &str, tree: &Tree) -> Self {
        let quoted =
            |word: &str| source.contains(&format!("\"{word}\"")) || source.contains(&format!("'{word}'"));
        let inline = inline_system(source);
        Self {
            vllm_format: tree.vllm_format(),
            sglang_format: tree.sglang_format(source),
            knows_developer: quoted("developer"),
            knows_content: source.contains("content"),
            vllm_merges_system: inline.is_none(),
            sglang_inline_system: inline == Some(true),
            vllm_effort_without_thinking: "none",
        }
    }
}

/// A template that says what `text` says, in fewer steps; `None` if there is none.
fn faster(text: &str, tree: &Tree) -> Option<String> {
    let summed = sums::at_once(text, tree, &syntax());
    let summed = summed.and_then(|text| Tree::parse(&text, syntax()).ok().map(|tree| (text, tree)));
    let (text, tree) = summed.as_ref().map_or((text, tree), |(text, tree)| (text.as_str(), tree));
    let left = searches::left_early(text, tree, &syntax());
    left.or_else(|| summed.map(|(text, _)| text))
}

/// Whether a second system message shows in what the template writes; `None` if
/// it fails. Engines ask with Jinja2's own environment, without transformers'
/// functions.
fn inline_system(source: &str) -> Option<bool> {
    const SENTINEL: &str = "__inline_system_sentinel__";
    let mut plain = Environment::new();
    plain.set_syntax(syntax());
    plain.set_fuel(Some(FUEL[0].1));
    plain.set_unknown_method_callback(python::method);
    plain.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    plain.add_filter("tojson", to_json);
    let message = |role: &str, content: &str| json!({"role": role, "content": content});
    let messages =
        [message("system", "t"), message("user", "t"), message("system", SENTINEL), message("user", "t")];
    let variables = json!({"messages": messages, "add_generation_prompt": false});
    let rendered = plain.render_str(source, Jinja::from(Serde(variables))).ok()?;
    Some(rendered.contains(SENTINEL))
}

fn syntax() -> SyntaxConfig {
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    syntax.expect("the default delimiters are valid")
}

/// `{% generation %}` marks what the assistant said, for training. It opens a
/// scope and writes what is in it, as `with` does.
fn without_generation(source: &str) -> String {
    let mut text = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        text.push_str(before);
        let Some(end) = tag.find("%}") else { break };
        let inner = &tag[2..end];
        let word =
            inner.trim_matches(|character: char| character.is_whitespace() || "+-".contains(character));
        match word {
            "generation" => text.push_str(&format!("{{%{}%}}", inner.replace("generation", "with"))),
            "endgeneration" => text.push_str(&format!("{{%{}%}}", inner.replace("endgeneration", "endwith"))),
            _ => text.push_str(&tag[..end + 2]),
        }
        rest = &tag[end + 2..];
    }
    text.push_str(rest);
    text
}

/// transformers' environment, as far as it can be had exactly.
fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_syntax(syntax());
    environment.set_recursion_limit(RECURSION);
    environment.set_unknown_method_callback(python::method);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_formatter(|out, _, value| {
        let written = match (value.as_str(), value.downcast_object_ref::<sums::Texts>()) {
            (Some(text), _) => out.write_str(text),
            (None, Some(texts)) => texts.iter().try_for_each(|text| out.write_str(text)),
            (None, None) => out.write_str(&python::str_of(value)?),
        };
        written.map_err(|_| minijinja::Error::new(ErrorKind::WriteFailure, "out of room"))
    });
    environment.add_filter("tojson", to_json);
    environment.add_filter("trim", |value: &Jinja, set: Option<String>| python::trim(value, set));
    environment.add_filter("join", |value: &Jinja, separator: Option<String>, attribute: Option<String>| {
        python::join(value, separator, attribute)
    });
    environment.add_filter("string", |value: &Jinja| python::str_of(value));
    environment.add_test("sequence", |value: &Jinja| python::is_sequence(value));
    environment.add_function("raise_exception", |message: String| -> Result<String, minijinja::Error> {
        Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_function("strftime_now", strftime_now);
    environment.add_function(sums::NAME, sums::sum_of_texts);
    environment.add_function(sums::WRITTEN, sums::written_sum_of_texts);
    environment
}

/// The day by the router's clock, in UTC, as containers have it: an engine in
/// another zone shows in the probe of its rendering. What changes within a day
/// cannot be known.
fn strftime_now(state: &mut State<'_, '_>, format: String) -> Result<String, minijinja::Error> {
    let now = state.lookup(NOW).and_then(|now| u64::try_from(now).ok()).unwrap_or(0);
    Day::of_unix_ms(now).format(&format).ok_or_else(|| {
        minijinja::Error::new(
            ErrorKind::InvalidOperation,
            "strftime_now with a time of day depends on the engine's clock",
        )
    })
}

fn to_json(value: &Jinja, options: Kwargs) -> Result<Jinja, minijinja::Error> {
    if value.is_undefined() {
        return Err(minijinja::Error::new(ErrorKind::BadSerialization, "undefined is not JSON serializable"));
    }
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
    Ok(Jinja::from(dumps(&json, &style)))
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
        Some(Value::Object(named)) => {
            let text = |(name, text): (&String, &Value)| Some((name.clone(), text.as_str()?.to_owned()));
            named.iter().filter_map(text).collect()
        }
        _ => Vec::new(),
    }
}

/// Templates in a folder of their own, named by their files.
fn additional(folder: &Path) -> Result<Vec<(String, String)>, TemplateError> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Ok(Vec::new()) };
    let mut found = Vec::new();
    for entry in entries.flatten() {
        let path = entry.path();
        let is_template = path.extension().is_some_and(|extension| extension == "jinja");
        if let (true, Some(name)) = (is_template, path.file_stem().and_then(|name| name.to_str()))
            && let Some(text) = read(&path)?
        {
            found.push((name.to_owned(), text));
        }
    }
    Ok(found)
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

/// The JSON of a file; null if there is no such file.
pub fn read_json(path: &Path) -> Result<Value, TemplateError> {
    match read(path)? {
        None => Ok(Value::Null),
        Some(text) => serde_json::from_str(&text)
            .map_err(|source| TemplateError::Parse { path: path.to_owned(), source }),
    }
}

/// The text of a file; `None` if there is no such file.
fn read(path: &Path) -> Result<Option<String>, TemplateError> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(TemplateError::Read { path: path.to_owned(), source }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().expect("a folder");
        for (name, text) in files {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().expect("in the folder")).expect("made");
            std::fs::write(path, text).expect("written");
        }
        folder
    }

    #[track_caller]
    fn check(why: &str, files: &[(&str, &str)], has_tools: bool, is_vllm: bool, expected: &str) {
        let folder = write(files);
        let templates = Templates::load(folder.path()).expect("valid").expect("there");
        let (name, _) = templates.choose(has_tools, is_vllm).expect("one fits");
        assert_eq!(templates.render(name, BTreeMap::new(), 0).expect("it renders"), expected, "{why}");
    }

    #[test]
    fn templates_are_found_where_transformers_finds_them() {
        let config = r#"{"bos_token": {"content": "<s>"}, "chat_template": "config {{ bos_token }}"}"#;
        let named = r#"{"chat_template": [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]}"#;
        check("in the configuration", &[("tokenizer_config.json", config)], false, true, "config <s>");
        let both = [("tokenizer_config.json", config), ("chat_template.jinja", "file {{ bos_token }}")];
        check("a file wins", &both, true, true, "file <s>");
        check("named, without tools", &[("tokenizer_config.json", named)], false, true, "d");
        check("named, with tools", &[("tokenizer_config.json", named)], true, true, "t");
        let additional = [("chat_template.jinja", "d"), ("additional_chat_templates/tool_use.jinja", "t")];
        check("in a folder", &additional, true, false, "t");
        let processor = [("chat_template.jinja", "d"), ("chat_template.json", r#"{"chat_template": "p"}"#)];
        check("vLLM asks the processor first", &processor, false, true, "p");
        check("but not with tools", &processor, true, true, "d");
        assert!(
            Templates::load(write(&processor).path())
                .expect("valid")
                .expect("there")
                .is_ambiguous_for_sglang()
        );
        assert!(Templates::load(write(&[]).path()).expect("valid").is_none());
    }

    #[track_caller]
    fn renders(why: &str, source: &str, variables: Value, expected: Option<&str>) {
        let templates = Templates::compile(vec![(DEFAULT.to_owned(), source.to_owned())], BTreeMap::new())
            .expect("valid");
        let fields = variables.as_object().expect("an object").clone();
        let mut all: BTreeMap<&str, Jinja> =
            fields.iter().map(|(name, value)| (name.as_str(), Jinja::from(Serde(value)))).collect();
        all.insert(NOW, Jinja::from(1_735_603_200_000_u64));
        assert_eq!(templates.render(DEFAULT, all, 0).ok().as_deref(), expected, "{why}");
    }

    /// Expected texts are Jinja2's, in transformers' environment.
    #[test]
    fn what_minijinja_does_differently_is_done_as_jinja2_does_it() {
        renders(
            "none, true, a float",
            "{{ a }} {{ b }} {{ c }}",
            json!({"a": null, "b": true, "c": 1.0}),
            Some("None True 1.0"),
        );
        renders("a list", "{{ a }}", json!({"a": ["x", 1, {"k": false}]}), Some("['x', 1, {'k': False}]"));
        renders("undefined", "[{{ a }}]{{ a.b is defined }}", json!({"a": {}}), Some("[{}]False"));
        renders(
            "text is a sequence",
            "{{ a is sequence }}{{ b is sequence }}",
            json!({"a": "x", "b": {}}),
            Some("TrueTrue"),
        );
        renders("joining", "{{ a | join('-') }}", json!({"a": ["x", 1, null]}), Some("x-1-None"));
        renders(
            "blanks",
            "[{{ a.strip() }}][{{ a | trim }}]",
            json!({"a": "\u{1c} x\u{a0}"}),
            Some("[x][x]"),
        );
        renders("tojson of undefined", "{{ a | tojson }}", json!({}), None);
        renders("slices", "{{ a[::-1] }}{{ a[1:] }}", json!({"a": [1, 2]}), Some("[2, 1][2]"));
        renders("the day", "{{ strftime_now('%d %b %Y') }}", json!({}), Some("31 Dec 2024"));
        renders("the hour", "{{ strftime_now('%H') }}", json!({}), None);
        renders("an exception", "{{ raise_exception('no') }}", json!({}), None);
        renders(
            "generation",
            "a\n  {% generation %}\nb{% set x = 1 %}{%- endgeneration -%}\n {{ x }}",
            json!({}),
            Some("a\nb"),
        );
        renders(
            "a loop left",
            "{% for x in a %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}",
            json!({"a": [1, 2, 3]}),
            Some("1"),
        );
        renders("an unknown filter", "{{ a | nosuch }}", json!({}), None);
    }

    /// A template that looks for the user's last question, and one in which it is
    /// decided late what the search is for.
    const SEARCHES: [&str; 2] = [
        "{%- set ns = namespace(on=true, last=messages|length - 1) %}
{%- for m in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.on and m.role == 'user' and not m.content.startswith('<tool_response>') %}
        {%- set ns.on = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {{- '<|' + m.role + '|>' + m.content + '<|end|>' }}
    {%- set note = 'of ' + m.role + ' ' %}
    {%- if loop.index0 > ns.last %}{{ note + m.content + '!' }}{% endif %}
{%- endfor %}{{ ns.last }}",
        "{%- set ns = namespace(on=messages|length > 3, count=0) %}
{%- for m in messages %}
    {%- if ns.on %}{% set ns.count = ns.count + 1 %}{{ m.role + ',' + '' }}{% if m.role == 'tool' %}{% set ns.on = 0 %}{% endif %}{% endif %}
    {%- if ns.on and m.role == 'system' %}{% set ns.on = false %}{% endif %}
{%- endfor %}{{ ns.count }}",
    ];

    /// The oracle is the template as it was written.
    #[test]
    fn faster_templates_say_the_same() {
        let mut lot = crate::prompt::tests::Lot(5);
        for source in SEARCHES {
            let tree = Tree::parse(source, syntax()).expect("valid");
            let changed = faster(source, &tree).expect("there are sums and searches");
            assert!(changed.contains("break") && changed.contains(sums::WRITTEN), "{changed}");
            let mut plain = environment();
            plain.add_template(DEFAULT, source).expect("valid");
            let templates =
                Templates::compile(vec![(DEFAULT.to_owned(), source.to_owned())], BTreeMap::new())
                    .expect("valid");
            let (mut written, mut failed) = (0, 0);
            for step in 0..400 {
                let mut messages: Vec<Value> = (0..lot.below(9)).map(|_| lot.message()).collect();
                if lot.below(4) > 0 {
                    // What sums and searches take is text.
                    messages.iter_mut().for_each(|message| message["content"] = Value::from(lot.text()));
                }
                if !messages.is_empty() && lot.below(4) == 0 {
                    let at = lot.below(messages.len());
                    messages[at]["role"] = Value::Null;
                }
                let variables = BTreeMap::from([("messages", Jinja::from(Serde(&messages)))]);
                let expected = plain.get_template(DEFAULT).expect("there").render(variables.clone()).ok();
                match &expected {
                    Some(_) => written += 1,
                    None => failed += 1,
                }
                assert_eq!(
                    templates.render(DEFAULT, variables, 0).ok(),
                    expected,
                    "step {step}: {messages:?}"
                );
            }
            assert!(written > 100 && failed > 10, "{written} and {failed}");
        }
    }

    #[test]
    fn templates_that_loop_or_recurse_are_stopped() {
        let turns = "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}";
        renders("for ever", turns, json!({}), None);
        let deep = "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}";
        renders("into itself", deep, json!({}), None);
    }
}
