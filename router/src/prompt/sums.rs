//! Sums of texts in a template, put together in one step.
//!
//! Templates write `'<|im_start|>' + role + '\n' + content + '<|im_end|>'`, and
//! every `+` copies all that stands before it. A sum with a text among its operands
//! is a text or an error, whatever the others are: so it is made the call of a
//! function that takes all of them at once. A sum that is only written is not even
//! put together: its operands are written one after the other. That the changed template says the same
//! is checked on its syntax tree; a sum of which that is not so stays as it was.

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Object, Rest, Value as Jinja};
use minijinja::{Error, ErrorKind};
use serde_json::{Value, json};

use super::inspect::{Tree, body, items, kind_of, name_of};

/// The function. No template calls it by itself.
pub const NAME: &str = "sum_of_texts";
/// The function for sums that are only written.
pub const WRITTEN: &str = "written_sum_of_texts";
/// Operands below which a sum stays: two are added in one step anyway.
const LEAST: usize = 3;

/// A sum: what stands for it, where it stands and where its operands do.
struct Sum {
    function: &'static str,
    at: (usize, usize),
    operands: Vec<(usize, usize)>,
}

/// `source`, whose tree is `tree`, with calls in place of sums; `None` if
/// there are none that can be made so.
pub fn at_once(source: &str, tree: &Tree, syntax: &SyntaxConfig) -> Option<String> {
    if source.contains(NAME) {
        return None;
    }
    let mut sums = Vec::new();
    find(tree.root(), NAME, &mut sums);
    sums.sort_by_key(|sum| sum.at);
    let whole = bare(tree.root());
    let says_the_same =
        |text: &String| Tree::parse(text, syntax.clone()).is_ok_and(|changed| bare(changed.root()) == whole);
    // Where the tree does not tell exactly where something stands, it stays.
    sums.retain(|sum| changed(source, std::slice::from_ref(sum)).as_ref().is_some_and(says_the_same));
    changed(source, &sums).filter(|text| !sums.is_empty() && says_the_same(text))
}

fn changed(source: &str, sums: &[Sum]) -> Option<String> {
    let (mut text, mut from) = (String::with_capacity(source.len() + 16 * sums.len()), 0);
    for sum in sums {
        let operands: Option<Vec<&str>> =
            sum.operands.iter().map(|(at, end)| source.get(*at..*end)).collect();
        text.push_str(source.get(from..sum.at.0)?);
        text.push_str(&format!("{}({})", sum.function, operands?.join(", ")));
        from = sum.at.1;
    }
    text.push_str(source.get(from..)?);
    Some(text)
}

/// Texts that are written one after the other.
#[derive(Debug)]
pub struct Texts(Vec<Jinja>);

impl Object for Texts {}

impl Texts {
    /// The texts.
    pub fn iter(&self) -> impl Iterator<Item = &str> {
        self.0.iter().filter_map(Jinja::as_str)
    }
}

/// The function [`NAME`]: all operands must be texts, as in a sum with a text.
pub fn sum_of_texts(operands: Rest<Jinja>) -> Result<String, Error> {
    let mut sum = String::with_capacity(length(&operands)?);
    operands.iter().filter_map(Jinja::as_str).for_each(|text| sum.push_str(text));
    Ok(sum)
}

/// The function [`WRITTEN`]. What writes values knows what it returns.
pub fn written_sum_of_texts(operands: Rest<Jinja>) -> Result<Jinja, Error> {
    length(&operands)?;
    Ok(Jinja::from_object(Texts(operands.0)))
}

/// How many bytes they are together, if all of them are texts.
fn length(operands: &[Jinja]) -> Result<usize, Error> {
    let length: Option<usize> = operands.iter().map(|operand| operand.as_str().map(str::len)).sum();
    length.ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "only texts add up to a text"))
}

/// Sums with a text in them, the outermost of each. `function` stands for `node`
/// itself, if it is one.
fn find(node: &Value, function: &'static str, sums: &mut Vec<Sum>) {
    if is_sum(node) {
        let mut operands = Vec::new();
        flatten(node, &mut operands);
        let has_text = operands
            .iter()
            .any(|operand| kind_of(operand) == Some("Const") && body(operand)["value"].is_string());
        let spans: Option<Vec<(usize, usize)>> = operands.into_iter().map(span).collect();
        if let (true, Some(at), Some(operands)) = (has_text, span(node), spans)
            && operands.len() >= LEAST
        {
            sums.push(Sum { function, at, operands });
            return;
        }
    }
    if kind_of(node) == Some("EmitExpr") {
        return find(&body(node)["expr"], WRITTEN, sums);
    }
    match node {
        Value::Object(fields) => fields.values().for_each(|value| find(value, NAME, sums)),
        Value::Array(list) => list.iter().for_each(|value| find(value, NAME, sums)),
        _ => {}
    }
}

fn is_sum(node: &Value) -> bool {
    kind_of(node) == Some("BinOp") && body(node)["op"] == "Add"
}

/// Operands of a sum in their order. `a + (b + c)` has two.
fn flatten<'a>(node: &'a Value, operands: &mut Vec<&'a Value>) {
    match is_sum(node) {
        true => {
            flatten(&body(node)["left"], operands);
            operands.push(&body(node)["right"]);
        }
        false => operands.push(node),
    }
}

/// Where a node and all in it stands in the source: a filter's own place begins at
/// its name.
pub fn span(node: &Value) -> Option<(usize, usize)> {
    let of_parts = match node {
        Value::Object(fields) => fields.values().filter_map(span).reduce(both),
        Value::Array(list) => list.iter().filter_map(span).reduce(both),
        _ => None,
    };
    let offset = |name: &str| usize::try_from(node.get(name)?.as_u64()?).ok();
    let own = offset("start_offset").zip(offset("end_offset"));
    own.into_iter().chain(of_parts).reduce(both)
}

fn both(one: (usize, usize), other: (usize, usize)) -> (usize, usize) {
    (one.0.min(other.0), one.1.max(other.1))
}

/// The tree without places, and with sums for calls of the functions.
pub fn bare(node: &Value) -> Value {
    match node {
        Value::Object(_)
            if kind_of(node) == Some("Call")
                && [Some(NAME), Some(WRITTEN)].contains(&name_of(&body(node)["expr"])) =>
        {
            let operands = items(&body(node)["args"]).iter().map(|argument| bare(&argument["Pos"]));
            let sum = |left: Value, right: Value| json!({"expr": "BinOp", "inner": {"op": "Add", "left": left, "right": right}});
            operands.reduce(sum).unwrap_or_default()
        }
        Value::Object(fields) => {
            let field = |(name, value): (&String, &Value)| match name.as_str() {
                "inner" => (name.clone(), bare(body(node))),
                _ => (name.clone(), bare(value)),
            };
            Value::Object(fields.iter().map(field).collect())
        }
        Value::Array(list) => list.iter().map(bare).collect(),
        value => value.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(why: &str, source: &str, expected: Option<&str>) {
        let tree = Tree::parse(source, SyntaxConfig::default()).expect("a template");
        let changed = at_once(source, &tree, &SyntaxConfig::default());
        assert_eq!(
            changed.map(|text| text.replace(WRITTEN, "W").replace(NAME, "S")).as_deref(),
            expected,
            "{why}"
        );
    }

    #[test]
    fn sums_with_a_text_are_made_at_once() {
        check("three", "x{{- 'a' + b + c -}}", Some("x{{- W('a', b, c) -}}"));
        check("a text anywhere", "{{ b.c + d[0] + 'a' }}", Some("{{ W(b.c, d[0], 'a') }}"));
        check("filters bind closer", "{{ 'a' + b|trim + c }}", Some("{{ W('a', b|trim, c) }}"));
        check(
            "calls and sums in them",
            "{{ 'a' + f(1 + 2, 'x' + y + z) + c }}",
            Some("{{ W('a', f(1 + 2, 'x' + y + z), c) }}"),
        );
        check("brackets", "{{ ('a' + b) + (c + d) + e }}", Some("{{ W('a', b, c + d, e) }}"));
        check(
            "in a condition and a variable",
            "{% if a + 'b' + c == d %}{% set x = 'é' + y + '\\n' %}{% endif %}",
            Some("{% if S(a, 'b', c) == d %}{% set x = S('é', y, '\\n') %}{% endif %}"),
        );
        check(
            "written before what is asked first",
            "{{ 'a' + b + c if 'd' + e + f == g else h }}",
            Some("{{ S('a', b, c) if S('d', e, f) == g else h }}"),
        );
        check("over lines", "{{ 'a'\n  + b\n  + c }}", Some("{{ W('a', b, c) }}"));
        check(
            "one that cannot be taken apart stays",
            "{{ 'a' + (b or c)|trim + d }}{{ 'a' + b + c }}",
            Some("{{ 'a' + (b or c)|trim + d }}{{ W('a', b, c) }}"),
        );
        check("two operands", "{{ 'a' + b }}", None);
        check("no text", "{{ a + b + c }}", None);
        check("other signs", "{{ 'a' ~ b ~ c }}{{ 'a' * 3 - b }}", None);
        check("a template that has the name", "{{ sum_of_texts }}{{ 'a' + b + c }}", None);
    }
}
