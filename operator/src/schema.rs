//! Does an object fit the schema of its kind? Pure.
//!
//! What an API server checks before it stores anything, for `render`, which has
//! none: types, bounds, words and unknown fields. The schema's own rules (CEL)
//! are said again in `pool::rules` and `router::validate`.

use kube::CustomResourceExt;
use kvrouter_crds::{InferencePool, KvRouter};
use serde_json::Value;

/// A field that does not fit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Misfit {
    /// The field: `spec.targetPorts[0].number`.
    pub field: String,
    /// What is wrong with it and what would do.
    pub message: String,
}

/// Schema of a pool.
pub fn of_pool() -> Value {
    schema(InferencePool::crd())
}

/// Schema of a router.
pub fn of_router() -> Value {
    schema(KvRouter::crd())
}

fn schema(
    definition: k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
) -> Value {
    let schemas = definition.spec.versions.into_iter().filter_map(|version| version.schema);
    let schema = schemas.filter_map(|schema| schema.open_api_v3_schema).next();
    serde_json::to_value(schema).unwrap_or_default()
}

/// Everything in `spec` that does not fit, in the order of the fields. Also
/// removes null from optional fields, as the API server's clients do.
pub fn misfits(schema: &Value, object: &mut Value) -> Vec<Misfit> {
    let mut found = Vec::new();
    match object.get_mut("spec") {
        Some(spec) => check(&schema["properties"]["spec"], spec, "spec", &mut found),
        None => found.push(Misfit { field: "spec".to_owned(), message: "is missing".to_owned() }),
    }
    let known = ["apiVersion", "kind", "metadata", "spec", "status"];
    let unknown = object.as_object().into_iter().flatten().map(|(key, _)| key.as_str());
    for key in unknown.filter(|key| !known.contains(key)) {
        let message = format!("is no field of this kind; it has {}", known.join(", "));
        found.push(Misfit { field: key.to_owned(), message });
    }
    found
}

fn check(schema: &Value, value: &mut Value, field: &str, found: &mut Vec<Misfit>) {
    let mut misfit = |message: String| found.push(Misfit { field: field.to_owned(), message });
    let kind = schema["type"].as_str().unwrap_or_default();
    if !is_of_type(kind, value) {
        return misfit(wrong_type(schema, kind, value));
    }
    if let Some(words) = schema["enum"].as_array()
        && !words.contains(value)
    {
        return misfit(format!("{} is none of {}", shown(value), spelt(words)));
    }
    if let Some(message) = out_of_bounds(schema, value) {
        misfit(message);
    }
    match value {
        Value::Object(_) => check_fields(schema, value, field, found),
        Value::Array(items) => {
            for (at, item) in items.iter_mut().enumerate() {
                check(&schema["items"], item, &format!("{field}[{at}]"), found);
            }
        }
        _ => {}
    }
}

fn check_fields(schema: &Value, value: &mut Value, field: &str, found: &mut Vec<Misfit>) {
    let Some(fields) = value.as_object_mut() else { return };
    let properties = schema["properties"].as_object();
    // Null is the same as absent where the schema says so.
    fields.retain(|key, value| !(value.is_null() && schema["properties"][key]["nullable"] == true));
    for required in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        if !fields.contains_key(required) {
            let message = "is missing".to_owned();
            found.push(Misfit { field: format!("{field}.{required}"), message });
        }
    }
    for (key, value) in fields.iter_mut() {
        let path = format!("{field}.{key}");
        let additional = &schema["additionalProperties"];
        match properties.and_then(|properties| properties.get(key)) {
            Some(known) => check(known, value, &path, found),
            None if additional.is_object() => check(additional, value, &path, found),
            None if schema["x-kubernetes-preserve-unknown-fields"] == true || properties.is_none() => {}
            None => {
                let known: Vec<&str> =
                    properties.into_iter().flatten().map(|(key, _)| key.as_str()).collect();
                let message = format!("is no field; {field} has {}", known.join(", "));
                found.push(Misfit { field: path, message });
            }
        }
    }
}

fn is_of_type(kind: &str, value: &Value) -> bool {
    match kind {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "number" => value.is_number(),
        "integer" => {
            value.is_i64() || value.is_u64() || value.as_f64().is_some_and(|number| number.fract() == 0.0)
        }
        _ => true,
    }
}

/// Words that YAML takes for booleans arrive as such: it helps to say so.
fn wrong_type(schema: &Value, kind: &str, value: &Value) -> String {
    let what = shown(value);
    match (schema["enum"].as_array(), kind) {
        (Some(words), _) => format!("{what} is none of {}", spelt(words)),
        (None, "string") if !value.is_object() && !value.is_array() => {
            format!("{what} is no text; write it in quotes")
        }
        (None, "integer") => format!("{what} is no whole number; write digits without quotes"),
        (None, "number") => format!("{what} is no number; write digits without quotes"),
        (None, kind) => format!("{what} is no {kind}"),
    }
}

fn out_of_bounds(schema: &Value, value: &Value) -> Option<String> {
    let below = |bound: &str, size: f64| schema[bound].as_f64().filter(|bound| size < *bound);
    let above = |bound: &str, size: f64| schema[bound].as_f64().filter(|bound| *bound < size);
    let (least, most, size, what) = match value {
        Value::Number(number) => ("minimum", "maximum", number.as_f64()?, ""),
        Value::String(text) => ("minLength", "maxLength", count(text.chars().count()), " characters"),
        Value::Array(items) => ("minItems", "maxItems", count(items.len()), " entries"),
        Value::Object(fields) => ("minProperties", "maxProperties", count(fields.len()), " entries"),
        Value::Null | Value::Bool(_) => return None,
    };
    let too_little = below(least, size).map(|bound| format!("has {size}{what}, at least {bound} are needed"));
    let too_much =
        || above(most, size).map(|bound| format!("has {size}{what}, at most {bound} are possible"));
    let message = too_little.or_else(too_much)?;
    Some(if what.is_empty() { message.replacen("has", "is", 1).replace(" are ", " is ") } else { message })
}

/// Sizes of what was read from a file are far below 2^52.
fn count(size: usize) -> f64 {
    u32::try_from(size).map_or(f64::MAX, f64::from)
}

fn spelt(words: &[Value]) -> String {
    let words: Vec<&str> = words.iter().filter_map(Value::as_str).collect();
    words.join(", ")
}

/// A value as a message shows it, cut short.
fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(40) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}
