//! Loops of a template that look for something, left when they found it.
//!
//! Templates walk a conversation backwards for the last thing that a user asked:
//!
//! ```text
//! {% for message in messages[::-1] %}
//!     {% set index = (messages|length - 1) - loop.index0 %}
//!     {% if ns.searching and message.role == "user" %}…{% set ns.searching = false %}…{% endif %}
//! {% endfor %}
//! ```
//!
//! Once it is found the rest of the conversation is walked for nothing. Such a loop
//! is given an exit. What makes that sound:
//!
//! * Its body is variables, which end with a turn of the loop, and conditions that ask
//!   the same field first; nothing in it writes text by itself. While that field is
//!   false, no turn does anything, and so none can make it true again.
//! * The variables come first. They are sums and differences of what no turn changes and
//!   of the loop's own counters. The first turn is never skipped, and where they are no error in one
//!   turn, they are none in the next.
//! * Nothing else follows from how a loop ends: it has no `else`, and nobody keeps `loop`.
//!
//! That the changed template says the same but for its exits is checked on its syntax
//! tree; one of which that is not so stays as it was.

use minijinja::syntax::SyntaxConfig;
use serde_json::Value;

use super::inspect::{Tree, items, kind_of};
use super::sums::{bare, span};

/// Fields of `loop` that are numbers.
const COUNTERS: [&str; 5] = ["index", "index0", "revindex", "revindex0", "length"];

/// The field that a loop's conditions ask first: its variable and its name.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Guard<'a> {
    variable: &'a str,
    field: &'a str,
}

/// `source`, whose tree is `tree`, with exits; `None` if there is no such loop in it.
pub fn left_early(source: &str, tree: &Tree, syntax: &SyntaxConfig) -> Option<String> {
    // One that leaves loops by itself needs no help, and would hide our exits.
    if source.contains("break") {
        return None;
    }
    let mut exits = Vec::new();
    find(tree.root(), source, &mut exits);
    exits.sort();
    let (mut text, mut from) = (String::with_capacity(source.len() + 64 * exits.len()), 0);
    for (at, exit) in &exits {
        text.push_str(source.get(from..*at)?);
        text.push_str(exit);
        from = *at;
    }
    text.push_str(source.get(from..)?);
    let changed = Tree::parse(&text, syntax.clone()).ok()?;
    let expected = with_exits(&bare(tree.root()), syntax);
    (!exits.is_empty() && bare(changed.root()) == expected).then_some(text)
}

/// Exits, and where the bodies of their loops begin.
fn find(node: &Value, source: &str, exits: &mut Vec<(usize, String)>) {
    if let Some(guard) = guard_of(node)
        && let Some((first, _)) = items(&fields(node)["body"]).first().and_then(span)
        && let Some(at) = source.get(..first).and_then(|before| before.rfind("{%"))
    {
        exits.push((at, guard.exit()));
    }
    match node {
        Value::Object(fields) => fields.values().for_each(|value| find(value, source, exits)),
        Value::Array(list) => list.iter().for_each(|value| find(value, source, exits)),
        _ => {}
    }
}

/// A bare tree with exits in its loops.
fn with_exits(node: &Value, syntax: &SyntaxConfig) -> Value {
    let exit = guard_of(node).and_then(|guard| guard.exit_of_tree(syntax));
    let mut changed = match node {
        Value::Object(fields) => Value::Object(
            fields.iter().map(|(name, value)| (name.clone(), with_exits(value, syntax))).collect(),
        ),
        Value::Array(list) => list.iter().map(|value| with_exits(value, syntax)).collect(),
        value => value.clone(),
    };
    if let Some(exit) = exit
        && let Some(Value::Array(body)) = changed.pointer_mut("/inner/body")
    {
        body.insert(0, exit);
    }
    changed
}

impl Guard<'_> {
    fn exit(&self) -> String {
        let Self { variable, field } = self;
        format!("{{%- if not loop.first and not {variable}.{field} -%}}{{%- break -%}}{{%- endif -%}}")
    }

    /// The exit as a node without places.
    fn exit_of_tree(&self, syntax: &SyntaxConfig) -> Option<Value> {
        let alone = format!("{{% for x in x %}}{}{{% endfor %}}", self.exit());
        let tree = bare(Tree::parse(&alone, syntax.clone()).ok()?.root());
        tree.pointer("/inner/children/0/inner/body/0").cloned()
    }
}

/// The guard of a loop that may be left, by the rules above.
fn guard_of(node: &Value) -> Option<Guard<'_>> {
    let walk = fields(node);
    if kind_of(node) != Some("ForLoop")
        || walk["recursive"] != false
        || !walk["filter_expr"].is_null()
        || !items(&walk["else_body"]).is_empty()
        || keeps_loop(&walk["body"])
    {
        return None;
    }
    let mut changing = vec!["loop", name_of(&walk["target"])?];
    let mut guard = None;
    for statement in items(&walk["body"]) {
        let inner = fields(statement);
        match kind_of(statement) {
            Some("Set") if guard.is_none() && is_steady(&inner["expr"], &changing) => {
                changing.push(name_of(&inner["target"])?)
            }
            Some("IfCond") if items(&inner["false_body"]).is_empty() => {
                let asked = first_asked(&inner["expr"]);
                let of_guard = (kind_of(asked) == Some("GetAttr")).then(|| fields(asked))?;
                let found =
                    Guard { variable: name_of(&of_guard["expr"])?, field: of_guard["name"].as_str()? };
                if guard.replace(found).is_some_and(|other| other != found) {
                    return None;
                }
            }
            _ => return None,
        }
    }
    guard.filter(|guard| !changing.contains(&guard.variable))
}

/// Whether `loop` itself is used, and not only what it tells: who keeps it could see
/// later how far it went.
fn keeps_loop(node: &Value) -> bool {
    let of_loop = |inner: &Value| name_of(&fields(inner)["expr"]) == Some("loop");
    match kind_of(node) {
        Some("Var") if name_of(node) == Some("loop") => return true,
        Some("GetAttr") if of_loop(node) => return false,
        Some("GetItem") if of_loop(node) => return keeps_loop(&fields(node)["subscript_expr"]),
        _ => {}
    }
    match node {
        Value::Object(fields) => fields.values().any(keeps_loop),
        Value::Array(list) => list.iter().any(keeps_loop),
        _ => false,
    }
}

/// What a condition asks before anything else.
fn first_asked(condition: &Value) -> &Value {
    let inner = fields(condition);
    match kind_of(condition) == Some("BinOp") && inner["op"] == "ScAnd" {
        true => first_asked(&inner["left"]),
        false => condition,
    }
}

/// Whether an expression is of one kind in every turn: an error in all, or in none.
fn is_steady(expression: &Value, changing: &[&str]) -> bool {
    let inner = fields(expression);
    match kind_of(expression) {
        Some("Const") => true,
        Some("Var") => inner["id"].as_str().is_some_and(|name| !changing.contains(&name)),
        Some("GetAttr") => {
            name_of(&inner["expr"]) == Some("loop")
                && COUNTERS.iter().any(|counter| inner["name"] == *counter)
        }
        Some("BinOp") => {
            (inner["op"] == "Add" || inner["op"] == "Sub")
                && is_steady(&inner["left"], changing)
                && is_steady(&inner["right"], changing)
        }
        Some("Filter") => {
            inner["name"] == "length"
                && items(&inner["args"]).is_empty()
                && kind_of(&inner["expr"]) == Some("Var")
                && is_steady(&inner["expr"], changing)
        }
        _ => false,
    }
}

/// The fields of a node, in a tree with places or without.
fn fields(node: &Value) -> &Value {
    match node.get("inner") {
        Some(Value::Array(with_place)) => with_place.first().unwrap_or(node),
        Some(bare) => bare,
        None => node,
    }
}

/// The name of a variable.
fn name_of(node: &Value) -> Option<&str> {
    fields(node)["id"].as_str().filter(|_| kind_of(node) == Some("Var"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `source` has exits where `^` stands, and nowhere else.
    #[track_caller]
    fn check(why: &str, source: &str) {
        let plain = source.replace('^', "");
        let exit = "{%- if not loop.first and not ns.on -%}{%- break -%}{%- endif -%}";
        let tree = Tree::parse(&plain, SyntaxConfig::default()).expect("a template");
        let changed = left_early(&plain, &tree, &SyntaxConfig::default());
        let expected = source.contains('^').then(|| source.replace('^', exit));
        assert_eq!(changed, expected, "{why}");
    }

    #[test]
    fn a_search_is_left_when_it_has_found() {
        let walk = |inner: &str| format!("{{% for m in ms[::-1] %}}{inner}{{% endfor %}}");
        let ask = "{% if ns.on and m.role == 'user' %}x{% set ns.on = false %}{% endif %}";
        check("plain", &walk(&format!("^{ask}")));
        check("inside others", &format!("{{% if a %}}{}{{% endif %}}", walk(&format!("^{ask}"))));
        check("with a counter", &walk(&format!("^{{% set i = (ms|length - 1) - loop.index0 %}}{ask}")));
        check("asked twice", &walk(&format!("^{ask}{ask}")));
        check("the field alone", &walk("^{% if ns.on %}x{% endif %}"));

        let two = format!("{{% if a %}}{0}{{% else %}}{0}{{% endif %}}", walk(&format!("^{ask}")));
        check("two of them", &two);

        check("text beside it", &walk(&format!("{ask}x")));
        check("a value beside it", &walk(&format!("{{{{ m }}}}{ask}")));
        check("asked second", &walk("{% if m.a and ns.on %}x{% endif %}"));
        check("asked or something", &walk("{% if ns.on or m.a %}x{% endif %}"));
        check("not asked", &walk("{% if not ns.on %}x{% endif %}"));
        check("something else otherwise", &walk("{% if ns.on %}x{% else %}y{% endif %}"));
        check("the loop kept", &walk("{% if ns.on %}{% set ns.l = loop %}{% endif %}"));
        check("what it tells kept", &walk("^{% if ns.on %}{% set ns.l = loop.index %}{% endif %}"));
        check("two fields", &walk(&format!("{ask}{{% if ns.off %}}x{{% endif %}}")));
        check("a field of the message", &walk("{% if m.on and ns.on %}x{% endif %}"));
        check("a field of what the turn sets", &walk("{% set ns = a %}{% if ns.on %}x{% endif %}"));
        check("a variable of the message", &walk(&format!("{{% set i = m + 1 %}}{ask}")));
        check("a variable that may fail later", &walk(&format!("{{% set i = 1 / loop.index0 %}}{ask}")));
        check("a variable behind a condition", &walk(&format!("{ask}{{% set i = x + 1 %}}")));
        check("the length of a message", &walk(&format!("{{% set i = m|length %}}{ask}")));
        check("the length of a call", &walk(&format!("{{% set i = f(1)|length %}}{ask}")));
        check("a length of something", &walk(&format!("{{% set i = ms|length(m) %}}{ask}")));
        check("another filter", &walk(&format!("{{% set i = ms|first %}}{ask}")));
        check("a field of something else", &walk(&format!("{{% set i = m.index %}}{ask}")));
        check("no counter", &walk(&format!("{{% set i = loop.previtem %}}{ask}")));
        check("a field of the loop", &walk("{% if loop.last and m.a %}x{% endif %}"));
        check("a call", &walk(&format!("{{% set i = f(1) %}}{ask}")));
        check("a field set each time", &walk(&format!("{{% set ns.on = true %}}{ask}")));
        check("a loop with else", &format!("{{% for m in ms %}}{ask}{{% else %}}y{{% endfor %}}"));
        check("a loop with a filter", &format!("{{% for m in ms if m %}}{ask}{{% endfor %}}"));
        check("a loop that is called", &format!("{{% for m in ms recursive %}}{ask}{{% endfor %}}"));
        check("two targets", &format!("{{% for m, n in ms %}}{ask}{{% endfor %}}"));
        check("a template that leaves loops", &format!("{{# break #}}{}", walk(ask)));
        check("nothing to look for", &walk(""));
    }
}
