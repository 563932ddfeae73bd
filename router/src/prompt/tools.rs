//! Tools as engines hand them to a chat template.
//!
//! Engines parse a request's tools into classes of their own and dump those:
//! unknown keys go, absent ones come as null, and the order changes or not.
//! Templates print the dump, so it must be the same to the letter. Authority:
//! the dumps of vLLM 0.32's `ChatCompletionToolsParam` and SGLang 0.5.23's
//! `Tool`.

use serde_json::{Map, Value};

/// Whose dump.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// `name, description, parameters`, then what else is set.
    Vllm,
    /// The client's order, then what is missing; `defer_loading` always.
    Sglang,
}

/// The tools that the template sees; `None` where it sees none. `Err` says what
/// the engine would refuse.
pub fn dump(tools: &Value, choice: Option<&Value>, dialect: Dialect) -> Result<Option<Value>, &'static str> {
    let tools = tools.as_array().ok_or("tools are no list")?;
    let named = choice.and_then(|choice| choice.pointer("/function/name")).and_then(Value::as_str);
    if dialect == Dialect::Sglang && choice.and_then(Value::as_str) == Some("none") {
        return Ok(None);
    }
    let mut dumped = Vec::with_capacity(tools.len());
    for tool in tools {
        let function = tool.get("function").and_then(Value::as_object).ok_or("a tool has no function")?;
        let name = function.get("name").and_then(Value::as_str).ok_or("a tool's function has no name")?;
        // SGLang shows a chosen tool alone.
        if dialect == Dialect::Sglang && named.is_some_and(|named| named != name) {
            continue;
        }
        dumped.push(match dialect {
            Dialect::Vllm => vllm(tool, function),
            Dialect::Sglang => sglang(tool, function),
        });
    }
    Ok((!dumped.is_empty()).then_some(Value::Array(dumped)))
}

/// Both engines hand a tool's own flag down to its function.
fn defer_loading<'a>(tool: &'a Value, function: &'a Map<String, Value>) -> Option<&'a Value> {
    let set = |value: Option<&'a Value>| value.filter(|value| !value.is_null());
    set(function.get("defer_loading")).or_else(|| set(tool.get("defer_loading")))
}

fn vllm(tool: &Value, function: &Map<String, Value>) -> Value {
    let mut dump = Map::new();
    for key in ["name", "description", "parameters"] {
        dump.insert(key.to_owned(), function.get(key).cloned().unwrap_or(Value::Null));
    }
    if let Some(strict) = function.get("strict").filter(|strict| !strict.is_null()) {
        dump.insert("strict".to_owned(), strict.clone());
    }
    if let Some(defer) = defer_loading(tool, function) {
        dump.insert("defer_loading".to_owned(), defer.clone());
    }
    let mut outer = outer(dump);
    if let Some(defer) = tool.get("defer_loading").filter(|defer| !defer.is_null()) {
        outer.insert("defer_loading".to_owned(), defer.clone());
    }
    Value::Object(outer)
}

fn sglang(tool: &Value, function: &Map<String, Value>) -> Value {
    let mut dump = Map::new();
    for (key, value) in function {
        let kept = match key.as_str() {
            "name" | "description" | "parameters" => true,
            "strict" => !value.is_null(),
            "defer_loading" => defer_loading(tool, function).is_some(),
            _ => false,
        };
        if kept {
            dump.insert(key.clone(), value.clone());
        }
    }
    for key in ["description", "parameters"] {
        dump.entry(key).or_insert(Value::Null);
    }
    if let Some(defer) = defer_loading(tool, function) {
        dump.insert("defer_loading".to_owned(), defer.clone());
    }
    let mut outer = outer(dump);
    outer.insert("defer_loading".to_owned(), tool.get("defer_loading").cloned().unwrap_or(Value::Null));
    Value::Object(outer)
}

fn outer(function: Map<String, Value>) -> Map<String, Value> {
    let mut outer = Map::new();
    outer.insert("type".to_owned(), Value::from("function"));
    outer.insert("function".to_owned(), Value::Object(function));
    outer
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[track_caller]
    fn check(tools: &str, choice: Option<Value>, vllm: &str, sglang: &str) {
        let tools: Value = serde_json::from_str(tools).expect("valid");
        for (dialect, expected) in [(Dialect::Vllm, vllm), (Dialect::Sglang, sglang)] {
            let dumped = dump(&tools, choice.as_ref(), dialect).expect("accepted");
            let text = dumped.map_or("none".to_owned(), |dumped| dumped.to_string());
            assert_eq!(text, expected, "{dialect:?} of {tools}");
        }
    }

    /// Expected values were printed by the engines' own classes.
    #[test]
    fn dumps_what_the_engines_dump() {
        check(
            r#"[{"type":"function","function":{"parameters":{"type":"object"},"strict":false,"name":"weather"}}]"#,
            None,
            r#"[{"type":"function","function":{"name":"weather","description":null,"parameters":{"type":"object"},"strict":false}}]"#,
            r#"[{"type":"function","function":{"parameters":{"type":"object"},"strict":false,"name":"weather","description":null},"defer_loading":null}]"#,
        );
        check(
            r#"[{"function":{"name":"a","description":"d","parameters":{},"strict":null,"own":1}}]"#,
            None,
            r#"[{"type":"function","function":{"name":"a","description":"d","parameters":{}}}]"#,
            r#"[{"type":"function","function":{"name":"a","description":"d","parameters":{}},"defer_loading":null}]"#,
        );
        let two = r#"[{"function":{"name":"a"}},{"function":{"name":"b"}}]"#;
        let null = r#""description":null,"parameters":null"#;
        let all = format!(
            r#"[{{"type":"function","function":{{"name":"a",{null}}}}},{{"type":"function","function":{{"name":"b",{null}}}}}]"#
        );
        check(two, Some(json!("none")), &all, "none");
        let one = format!(r#"[{{"type":"function","function":{{"name":"b",{null}}},"defer_loading":null}}]"#);
        check(two, Some(json!({"type": "function", "function": {"name": "b"}})), &all, &one);
    }

    #[test]
    fn what_engines_refuse_is_refused() {
        for tools in [json!({}), json!([1]), json!([{"function": {}}]), json!([{"type": "function"}])] {
            assert!(dump(&tools, None, Dialect::Vllm).is_err(), "{tools}");
        }
    }
}
