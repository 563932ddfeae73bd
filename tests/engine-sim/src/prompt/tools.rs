//! A request's tools as a template sees them: not as the client wrote them, but as the engine's
//! own classes print what they read.
//!
//! vLLM prints `name`, `description` and `parameters`, absent ones as null, then `strict` where
//! it is set. SGLang keeps the client's order, adds what is missing, and says `defer_loading`
//! of every tool. Seen in vLLM 0.32 and SGLang 0.5.23.

use serde_json::{Map, Value, json};

use crate::config::Wire;

/// The list that the template gets; what is no tool stays as it is.
pub(super) fn shown(wire: Wire, tools: &Value) -> Value {
    let Some(tools) = tools.as_array() else { return Value::Null };
    let one = |tool: &Value| match tool["function"].as_object() {
        Some(function) if wire.is_vllm() => json!({"type": "function", "function": of_vllm(function)}),
        Some(function) => {
            let defer = tool["defer_loading"].clone();
            json!({"type": "function", "function": of_sglang(function), "defer_loading": defer})
        }
        None => tool.clone(),
    };
    Value::Array(tools.iter().map(one).collect())
}

const DECLARED: [&str; 3] = ["name", "description", "parameters"];

fn of_vllm(function: &Map<String, Value>) -> Map<String, Value> {
    let declared = DECLARED.iter().map(|key| (*key, function.get(*key).cloned().unwrap_or(Value::Null)));
    let strict = function.get("strict").filter(|strict| !strict.is_null());
    let strict = strict.map(|strict| ("strict", strict.clone()));
    declared.chain(strict).map(|(key, value)| (key.to_owned(), value)).collect()
}

fn of_sglang(function: &Map<String, Value>) -> Map<String, Value> {
    let is_known =
        |key: &str, value: &Value| DECLARED.contains(&key) || (key == "strict" && !value.is_null());
    let mut shown: Map<String, Value> = function
        .iter()
        .filter(|(key, value)| is_known(key, value))
        .map(|(key, value)| (key.clone(), value.clone()))
        .collect();
    for key in DECLARED {
        shown.entry(key).or_insert(Value::Null);
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tools_are_printed_by_each_engines_classes() {
        let tools: Value = serde_json::from_str(
            r#"[{"function": {"strict": true, "parameters": {}, "name": "f", "own": 1}}]"#,
        )
        .unwrap();
        let check = |wire, expected: &str| assert_eq!(shown(wire, &tools).to_string(), expected, "{wire:?}");
        check(
            Wire::Vllm033,
            r#"[{"type":"function","function":{"name":"f","description":null,"parameters":{},"strict":true}}]"#,
        );
        check(
            Wire::Sglang0523,
            r#"[{"type":"function","function":{"strict":true,"parameters":{},"name":"f","description":null},"defer_loading":null}]"#,
        );
        assert_eq!(shown(Wire::Vllm033, &Value::Null), Value::Null);
    }
}
