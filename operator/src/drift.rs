//! Whether a live object still says what we applied. Pure.
//!
//! The API server answers with more than it was given: defaults, allocated
//! addresses, items that others added. So the question is not whether the two
//! are equal but whether the live object contains what we want. Items of lists
//! are matched by the key that Kubernetes merges them by, quantities are
//! compared as numbers, and what is empty is the same as absent.

use serde_json::{Map, Value};

/// Keys by which Kubernetes tells items of a list apart, in the order in which
/// they are tried.
const MERGE_KEYS: &[&[&str]] = &[
    &["name"],
    &["containerPort"],
    &["mountPath"],
    &["port"],
    &["uid"],
    &["topologyKey", "whenUnsatisfiable"],
    &["type"],
];
/// Fields of an object that others write, so that they are no drift.
const NOT_OURS: &[&str] = &["status", "creationTimestamp", "managedFields"];

/// The first field of `wanted` that `live` does not have so, as a path; none if
/// it contains everything.
pub fn difference(wanted: &Value, live: &Value) -> Option<String> {
    let mut path = String::new();
    (!contains(wanted, live, &mut path)).then_some(path)
}

fn contains(wanted: &Value, live: &Value, path: &mut String) -> bool {
    match (wanted, live) {
        (wanted, Value::Null) => is_empty(wanted),
        (Value::Object(wanted), Value::Object(live)) => fields_contain(wanted, live, path),
        (Value::Array(wanted), Value::Array(live)) => items_contain(wanted, live, path),
        (Value::Number(wanted), Value::Number(live)) => wanted == live || wanted.as_f64() == live.as_f64(),
        (Value::String(wanted), Value::String(live)) => wanted == live || same_quantity(wanted, live),
        (wanted, live) => wanted == live || (is_empty(wanted) && is_empty(live)),
    }
}

fn fields_contain(wanted: &Map<String, Value>, live: &Map<String, Value>, path: &mut String) -> bool {
    let length = path.len();
    for (name, value) in wanted.iter().filter(|(name, _)| !NOT_OURS.contains(&name.as_str())) {
        path.push('.');
        path.push_str(name);
        if !contains(value, live.get(name).unwrap_or(&Value::Null), path) {
            return false;
        }
        path.truncate(length);
    }
    true
}

fn items_contain(wanted: &[Value], live: &[Value], path: &mut String) -> bool {
    let length = path.len();
    let keys = MERGE_KEYS.iter().find(|keys| wanted.iter().all(|item| has_keys(item, keys)));
    for (position, item) in wanted.iter().enumerate() {
        let found = match keys {
            Some(keys) => live.iter().find(|other| keys.iter().all(|key| other.get(key) == item.get(key))),
            None => live.get(position),
        };
        path.push_str(&format!("[{position}]"));
        if !contains(item, found.unwrap_or(&Value::Null), path) {
            return false;
        }
        path.truncate(length);
    }
    // A list without keys is one value: more items are another value.
    keys.is_some() || wanted.len() == live.len()
}

fn has_keys(item: &Value, keys: &[&str]) -> bool {
    keys.iter().all(|key| item.get(key).is_some())
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(value) => !value,
        Value::Number(value) => value.as_f64() == Some(0.0),
        Value::String(value) => value.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.values().all(is_empty),
    }
}

fn same_quantity(a: &str, b: &str) -> bool {
    matches!((quantity(a), quantity(b)), (Some(a), Some(b)) if (a - b).abs() <= a.abs() * 1e-9)
}

/// `500m`, `1.5Gi`, `2e3` as a number.
fn quantity(text: &str) -> Option<f64> {
    const SUFFIXES: &[(&str, f64)] = &[
        ("Ki", 1024.0),
        ("Mi", 1_048_576.0),
        ("Gi", 1_073_741_824.0),
        ("Ti", 1_099_511_627_776.0),
        ("Pi", 1_125_899_906_842_624.0),
        ("n", 1e-9),
        ("u", 1e-6),
        ("m", 1e-3),
        ("k", 1e3),
        ("M", 1e6),
        ("G", 1e9),
        ("T", 1e12),
        ("P", 1e15),
    ];
    let (digits, factor) = SUFFIXES
        .iter()
        .find_map(|(suffix, factor)| Some((text.strip_suffix(suffix)?, *factor)))
        .unwrap_or((text, 1.0));
    let starts_as_number = digits.starts_with(|c: char| c.is_ascii_digit() || matches!(c, '.' | '+' | '-'));
    starts_as_number.then(|| digits.parse::<f64>().ok()).flatten().map(|number| number * factor)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[track_caller]
    #[allow(clippy::needless_pass_by_value, reason = "the rows read better")]
    fn check(why: &str, wanted: Value, live: Value, expected: Option<&str>) {
        assert_eq!(difference(&wanted, &live).as_deref(), expected, "{why}");
    }

    #[test]
    fn only_what_we_want_can_drift() {
        check("equal", json!({"a": 1}), json!({"a": 1}), None);
        check("defaults are added", json!({"a": 1}), json!({"a": 1, "b": 2}), None);
        check("edited", json!({"a": {"b": 1}}), json!({"a": {"b": 2}}), Some(".a.b"));
        check("removed", json!({"a": {"b": 1}}), json!({"a": {}}), Some(".a.b"));
        check("empty is absent", json!({"a": {}, "b": [], "c": ""}), json!({}), None);
        check("a whole float", json!({"a": 1}), json!({"a": 1.0}), None);
        check("a quantity", json!({"cpu": "0.5"}), json!({"cpu": "500m"}), None);
        check("binary", json!({"m": "1.5Gi"}), json!({"m": "1536Mi"}), None);
        check("another quantity", json!({"cpu": "0.5"}), json!({"cpu": "501m"}), Some(".cpu"));
        check("words are no quantities", json!({"a": "m"}), json!({"a": "k"}), Some(".a"));
        check("status is not ours", json!({"status": {"a": 1}}), json!({}), None);
    }

    #[test]
    fn items_are_found_by_their_key() {
        let env = |items: &[(&str, &str)]| -> Value {
            items.iter().map(|(name, value)| json!({"name": name, "value": value})).collect()
        };
        check("reordered", env(&[("a", "1"), ("b", "2")]), env(&[("b", "2"), ("a", "1")]), None);
        check("others' items", env(&[("a", "1")]), env(&[("x", "0"), ("a", "1")]), None);
        check("edited", env(&[("a", "1")]), env(&[("a", "2")]), Some("[0].value"));
        check("removed", env(&[("a", "1")]), env(&[("x", "1")]), Some("[0]"));
        check("arguments in order", json!(["a", "b"]), json!(["b", "a"]), Some("[0]"));
        check("arguments added", json!(["a"]), json!(["a", "b"]), Some(""));
        check("nothing wanted", json!([]), json!(["a"]), None);
    }
}
