//! The encoder against recorded and released bytes: decoded values of every fixture of the
//! imitated releases go in, the same bytes must come out.

#![allow(clippy::unwrap_used)] // A test states its expectation by failing.

use std::path::PathBuf;

use engine_sim::Wire;
use engine_sim::events::{Event, EventHash, ExtraKey, Removed, Stored, TokenIds, encode_batch};
use serde_json::Value;

/// Field names of positional stores, in order, behind the tag.
const STORED: [&str; 11] = [
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
];
const REMOVED: [&str; 3] = ["block_hashes", "medium", "group_idx"];

fn root() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../fixtures/engine-events"))
}

/// Entries of `dir`'s manifest whose file name starts with `prefix`.
fn entries(dir: &str, prefix: &str) -> Vec<(PathBuf, Value)> {
    let dir = root().join(dir);
    let manifest: Vec<Value> =
        serde_json::from_slice(&std::fs::read(dir.join("manifest.json")).unwrap()).unwrap();
    let file = |entry: &Value| entry["file"].as_str().unwrap().to_owned();
    let wanted = manifest.into_iter().filter(|entry| file(entry).starts_with(prefix));
    wanted.map(|entry| (dir.join(file(&entry).replace("multipart", "payload")), entry)).collect()
}

fn hash(value: &Value) -> EventHash {
    if let Some(hex) = value.get("__bytes_hex__").and_then(Value::as_str) {
        let byte = |at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
        return EventHash::Bytes((0..hex.len()).step_by(2).map(byte).collect());
    }
    value.as_u64().map_or_else(|| EventHash::I64(value.as_i64().unwrap()), EventHash::U64)
}

fn hashes(value: &Value) -> Vec<EventHash> {
    value.as_array().unwrap().iter().map(hash).collect()
}

fn token(value: &Value) -> u32 {
    u32::try_from(value.as_u64().unwrap()).unwrap()
}

fn tokens(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(token).collect()
}

fn token_ids(value: &Value) -> TokenIds {
    let list = value.as_array().unwrap();
    if list.iter().any(Value::is_array) {
        TokenIds::Pairs(list.iter().map(|pair| [token(&pair[0]), token(&pair[1])]).collect())
    } else {
        TokenIds::Plain(tokens(value))
    }
}

fn extra_keys(value: &Value) -> Option<Vec<Option<Vec<ExtraKey>>>> {
    let key = |key: &Value| match key.as_str() {
        Some(text) => ExtraKey::Text(text.to_owned()),
        None => ExtraKey::Media(key[0].as_str().unwrap().to_owned(), key[1].as_i64().unwrap()),
    };
    let block = |block: &Value| block.as_array().map(|keys| keys.iter().map(key).collect());
    value.as_array().map(|blocks| blocks.iter().map(block).collect())
}

/// Makes a positional event a map, so that one reader serves both.
fn named(event: &Value) -> Value {
    let Some(elements) = event.as_array() else { return event.clone() };
    let tag = elements[0].as_str().unwrap();
    let names: &[&str] = if tag == "BlockStored" { &STORED } else { &REMOVED };
    let mut map = serde_json::Map::new();
    map.insert("type".to_owned(), elements[0].clone());
    for (at, element) in elements[1..].iter().enumerate() {
        if let Some(trailing) = element.as_object().filter(|map| !map.contains_key("__bytes_hex__")) {
            map.extend(trailing.clone());
        } else {
            map.insert(names[at].to_owned(), element.clone());
        }
    }
    Value::Object(map)
}

fn event(event: &Value) -> Event {
    let event = named(event);
    let text = |name: &str| event.get(name).and_then(Value::as_str).map(str::to_owned);
    let int = |name: &str| event.get(name).and_then(Value::as_u64);
    match event["type"].as_str().unwrap() {
        "BlockStored" => Event::Stored(Box::new(Stored {
            block_hashes: hashes(&event["block_hashes"]),
            parent_block_hash: Some(&event["parent_block_hash"]).filter(|v| !v.is_null()).map(hash),
            token_ids: token_ids(&event["token_ids"]),
            block_size: int("block_size").unwrap(),
            lora_id: int("lora_id"),
            medium: text("medium"),
            lora_name: text("lora_name"),
            extra_keys: extra_keys(&event["extra_keys"]),
            group_idx: int("group_idx"),
            kv_cache_spec_kind: text("kv_cache_spec_kind"),
            kv_cache_spec_sliding_window: int("kv_cache_spec_sliding_window"),
            locality: text("locality"),
            ownership: text("ownership"),
            session_id: text("session_id"),
            lookahead_token_ids: event
                .get("lookahead_token_ids")
                .and_then(Value::as_array)
                .map(|lists| lists.iter().map(tokens).collect()),
            cache_salt: text("cache_salt"),
        })),
        "BlockRemoved" => Event::Removed(Removed {
            block_hashes: hashes(&event["block_hashes"]),
            medium: text("medium"),
            group_idx: int("group_idx"),
        }),
        _ => Event::Cleared,
    }
}

/// Re-encodes every entry and returns how many there were.
fn check(wire: Wire, dir: &str, prefix: &str) -> usize {
    let entries = entries(dir, prefix);
    for (file, entry) in &entries {
        let batch = &entry["decoded"];
        let events: Vec<Event> = batch[1].as_array().unwrap().iter().map(event).collect();
        let rank = batch[2].as_u64().map(|rank| u32::try_from(rank).unwrap());
        let expected = std::fs::read(file).unwrap();
        // The JSON reader rounds some floats; the recorded bytes do not.
        let timestamp = f64::from_be_bytes(expected[2..10].try_into().unwrap());
        let found = encode_batch(wire, timestamp, &events, rank);
        assert_eq!(found.as_ref(), expected, "{}", file.display());
    }
    entries.len()
}

#[test]
fn events_are_byte_for_byte_those_of_the_engines() {
    //     wire              directory              files                     how many
    let rows = [
        (Wire::Vllm022, "synthetic", "vllm_0_22_0_", 4),
        (Wire::Vllm033, "synthetic", "vllm_0_33_0_", 4),
        (Wire::Sglang0518, "synthetic", "sglang_0_5_18_", 3),
        (Wire::Sglang0523, "synthetic", "sglang_0_5_23_", 3),
        (Wire::Vllm032, "synthetic", "vllm_0_30_0_", 4),
        (Wire::Vllm032, "vllm-0.32.0-live", "run1/", 17),
        (Wire::Vllm032, "vllm-0.32.0-live", "dp", 3),
        (Wire::Vllm032, "vllm-0.32.0-live", "swa/", 11),
        (Wire::Vllm032, "vllm-0.32.0-live", "nixl_pd/", 6),
        (Wire::Sglang0523, "sglang-0.5.23-live", "sg/", 18),
    ];
    for (wire, dir, prefix, count) in rows {
        assert_eq!(check(wire, dir, prefix), count, "{dir}/{prefix}");
    }
}
