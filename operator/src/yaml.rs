//! YAML in and out. The only caller of `serde_yaml`.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The value as a YAML document: the same text for the same value.
pub fn text<T: Serialize>(value: &T) -> String {
    serde_yaml::to_string(value).expect("our types have string keys and finite numbers")
}

/// All documents of a text. The error tells the document, counted from 1.
pub fn documents(text: &str) -> Result<Vec<Value>, (usize, String)> {
    let mut found = Vec::new();
    for document in serde_yaml::Deserializer::from_str(text) {
        let at = found.len() + 1;
        found.push(Value::deserialize(document).map_err(|error| (at, error.to_string()))?);
    }
    Ok(found)
}
