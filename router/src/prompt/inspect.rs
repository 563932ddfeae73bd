//! What a chat template expects, read off its syntax tree as engines read it.
//!
//! Engines look at the tree of a template to decide whether it wants a message's
//! content as text or as a list of parts, and whether it pairs tool results with
//! calls by their id. A wrong guess changes every prompt, so the same questions
//! are asked of the same tree. Authority: `_detect_content_format` of vLLM 0.32
//! (renderers/hf.py) and `detect_jinja_template_content_format` of SGLang 0.5.23
//! (parser/jinja_template_utils.py).
//!
//! The tree is taken as JSON, in which a node is an object with the name of its
//! kind under `stmt` or `expr`: searching it for a kind at any depth, as Jinja2's
//! `find_all` does, needs no visitor for each of forty kinds.

use minijinja::machinery;
use minijinja::syntax::SyntaxConfig;
use serde_json::Value;

/// How a template wants the content of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContentFormat {
    /// As one text.
    Text,
    /// As a list of parts.
    Parts,
}

/// The syntax tree of one template.
#[derive(Debug)]
pub struct Tree {
    root: Value,
}

impl Tree {
    /// Parses `source`, which must already have been accepted as a template.
    pub fn parse(source: &str, syntax: SyntaxConfig) -> Result<Self, minijinja::Error> {
        let tree = machinery::parse(source, "chat template", syntax)?;
        let root = serde_json::to_value(&tree).map_err(|error| {
            minijinja::Error::new(minijinja::ErrorKind::BadSerialization, error.to_string())
        })?;
        Ok(Self { root })
    }

    /// The tree itself.
    pub const fn root(&self) -> &Value {
        &self.root
    }

    /// How vLLM hands content to it.
    pub fn vllm_format(&self) -> ContentFormat {
        let messages = self.names_of_messages();
        let is_content = |node: &Value| messages.iter().any(|name| reaches(node, name, Some("content")));
        let macros = self.find("Macro");
        let parameters: Vec<(&Value, Vec<&str>)> =
            macros.iter().map(|node| (*node, self.content_parameters(node, &is_content))).collect();
        for walk in self.find("ForLoop") {
            let inside: Vec<&Vec<&str>> = parameters
                .iter()
                .filter(|(node, _)| contains(node, walk))
                .map(|(_, parameters)| parameters)
                .collect();
            let name = name_of(&walk["iter"]);
            let of_macro = name.is_some_and(|name| inside.iter().any(|names| names.contains(&name)));
            let of_content = inside.is_empty() && name == Some("content");
            if is_content(&walk["iter"]) || of_macro || of_content {
                return ContentFormat::Parts;
            }
        }
        ContentFormat::Text
    }

    /// How SGLang hands content to it.
    pub fn sglang_format(&self, source: &str) -> ContentFormat {
        let speaks_of_media = ["image", "audio", "video", "vision"].iter().any(|word| source.contains(word));
        let walks = |walk: &&Value| {
            ["message", "msg", "m"].iter().any(|name| reaches(&walk["iter"], name, Some("content")))
        };
        match speaks_of_media || self.find("ForLoop").iter().any(walks) {
            true => ContentFormat::Parts,
            false => ContentFormat::Text,
        }
    }

    /// Names that stand for one message: targets of loops over `messages`, or
    /// over a variable that was set to it or to a part of it.
    fn names_of_messages(&self) -> Vec<String> {
        let sets = self.find("Set");
        let mut lists = vec!["messages"];
        let mut at = 0;
        while let Some(list) = lists.get(at).copied() {
            at += 1;
            for set in sets.iter().filter(|set| reaches(&set["expr"], list, None)) {
                if let Some(name) = name_of(&set["target"]).filter(|name| !lists.contains(name)) {
                    lists.push(name);
                }
            }
        }
        let walks = self.find("ForLoop").into_iter();
        let of_messages = walks.filter(|walk| lists.iter().any(|list| reaches(&walk["iter"], list, None)));
        of_messages.filter_map(|walk| name_of(&walk["target"])).map(str::to_owned).collect()
    }

    /// Parameters of a macro that some call fills with a message's content.
    fn content_parameters<'a>(&self, node: &'a Value, is_content: &dyn Fn(&Value) -> bool) -> Vec<&'a str> {
        let names: Vec<&str> = items(&node["args"]).iter().filter_map(name_of).collect();
        let mut filled = Vec::new();
        for call in self.find("Call") {
            if name_of(&call["expr"]) != node["name"].as_str() {
                continue;
            }
            let mut position = 0;
            for argument in items(&call["args"]) {
                if let Some(value) = argument.get("Pos") {
                    filled.extend(names.get(position).filter(|_| is_content(value)));
                    position += 1;
                } else if let Some([name, value]) = argument.get("Kwarg").map(items) {
                    let named = names.iter().find(|known| Some(**known) == name.as_str());
                    filled.extend(named.filter(|_| is_content(value)));
                }
            }
        }
        filled
    }

    /// All nodes of a kind, in document order, at any depth.
    fn find(&self, kind: &str) -> Vec<&Value> {
        fn walk<'a>(node: &'a Value, kind: &str, found: &mut Vec<&'a Value>) {
            match node {
                Value::Object(fields) => {
                    if kind_of(node) == Some(kind) {
                        found.push(body(node));
                    }
                    fields.values().for_each(|value| walk(value, kind, found));
                }
                Value::Array(list) => list.iter().for_each(|value| walk(value, kind, found)),
                _ => {}
            }
        }
        let mut found = Vec::new();
        walk(&self.root, kind, &mut found);
        found
    }
}

/// The name of a node's kind.
pub fn kind_of(node: &Value) -> Option<&str> {
    node.get("stmt").or_else(|| node.get("expr").filter(|kind| kind.is_string())).and_then(Value::as_str)
}

/// The fields of a node, without the span around them.
pub fn body(node: &Value) -> &Value {
    node.get("inner").and_then(|inner| inner.get(0)).unwrap_or(node)
}

/// The items of a list; none of anything else.
pub fn items(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// Whether `outer` contains this very node.
fn contains(outer: &Value, inner: &Value) -> bool {
    if std::ptr::eq(outer, inner) {
        return true;
    }
    match outer {
        Value::Object(fields) => fields.values().any(|value| contains(value, inner)),
        Value::Array(list) => list.iter().any(|value| contains(value, inner)),
        _ => false,
    }
}

/// The name of a variable.
pub fn name_of(node: &Value) -> Option<&str> {
    body(node)["id"].as_str().filter(|_| kind_of(node) == Some("Var"))
}

/// Whether `node` is the variable, or its field `key`, maybe under filters,
/// tests and slices.
fn reaches(node: &Value, variable: &str, key: Option<&str>) -> bool {
    let fields = body(node);
    match (kind_of(node), key) {
        (Some("Filter" | "Test" | "Slice"), _) => reaches(&fields["expr"], variable, key),
        (Some("Var"), None) => fields["id"] == variable,
        (Some("GetAttr"), Some(key)) => fields["name"] == key && name_of(&fields["expr"]) == Some(variable),
        (Some("GetItem"), Some(key)) => {
            let index = &fields["subscript_expr"];
            kind_of(index) == Some("Const")
                && body(index)["value"] == key
                && name_of(&fields["expr"]) == Some(variable)
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(why: &str, source: &str, vllm: ContentFormat, sglang: ContentFormat) {
        let tree = Tree::parse(source, SyntaxConfig::default()).expect("a template");
        assert_eq!((tree.vllm_format(), tree.sglang_format(source)), (vllm, sglang), "{why}");
    }

    #[test]
    fn content_formats_are_those_of_the_engines() {
        use ContentFormat::{Parts, Text};
        let each = |inner: &str| format!("{{% for message in messages %}}{inner}{{% endfor %}}");
        let walk = |what: &str| format!("{{% for c in {what} %}}{{{{ c }}}}{{% endfor %}}");
        check("plain", &each("{{ message.content }}"), Text, Text);
        check("a loop over parts", &each(&walk("message['content']")), Parts, Parts);
        check("under a filter", &each(&walk("message.content | list")), Parts, Parts);
        check("sliced", &each(&walk("message.content[1:]")), Parts, Parts);
        let renamed = "{% set chat = messages[1:] %}{% for turn in chat %}{% for c in turn.content %}{% endfor %}{% endfor %}";
        check("other names", renamed, Parts, Text);
        let set = each("{% set content = message.content %}{% for c in content %}{% endfor %}");
        check("a variable called content", &set, Parts, Text);
        let through = format!(
            "{{% macro show(body) %}}{}{{% endmacro %}}{}",
            walk("body"),
            each("{{ show(message.content) }}")
        );
        check("through a macro", &through, Parts, Text);
        let named = through.replace("show(message.content)", "show(body=message.content)");
        check("through a macro, by name", &named, Parts, Text);
        let unused = through.replace("show(message.content)", "message.content");
        check("a macro that nobody calls", &unused, Text, Text);
        check("a template that speaks of media", "{# no image #}{{ messages }}", Text, Parts);
    }
}
