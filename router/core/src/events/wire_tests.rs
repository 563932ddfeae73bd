//! Tests of `wire`: recorded bytes against their manifests, every field by hand, limits, damage.
//!
//! Events of the tables are written as JSON and packed by the few lines below; `{"__bytes_hex__": ".."}` stands for
//! bytes, as in the manifests. What a recorded event means is worked out from its manifest by another reader.

use std::error::Error;

use proptest::prelude::*;
use proptest::sample::Index;
use rmp::encode;
use serde_json::{Number, Value, json};

use super::*;
use crate::events::captures;

/// The key under which manifests and tables write bytes.
const BYTES: &str = "__bytes_hex__";
static NULL: Value = Value::Null;

// Packing.

fn pack(value: &Value) -> Vec<u8> {
    let mut bytes = Vec::new();
    pack_into(value, &mut bytes);
    bytes
}

fn pack_into(value: &Value, out: &mut Vec<u8>) {
    const WHY: &str = "a vector takes all";
    match value {
        Value::Null => encode::write_nil(out).expect(WHY),
        Value::Bool(flag) => encode::write_bool(out, *flag).expect(WHY),
        Value::Number(number) => pack_number(number, out).expect(WHY),
        Value::String(text) => encode::write_str(out, text).expect(WHY),
        Value::Array(elements) => {
            encode::write_array_len(out, elements.len() as u32).expect(WHY);
            elements.iter().for_each(|element| pack_into(element, out));
        }
        Value::Object(pairs) => match pairs.get(BYTES) {
            Some(hex) => encode::write_bin(out, &unhex(hex)).expect(WHY),
            None => {
                encode::write_map_len(out, pairs.len() as u32).expect(WHY);
                for (key, value) in pairs {
                    encode::write_str(out, key).expect(WHY);
                    pack_into(value, out);
                }
            }
        },
    }
}

fn pack_number(number: &Number, out: &mut Vec<u8>) -> Result<(), Box<dyn Error>> {
    if let Some(number) = number.as_u64() {
        encode::write_uint(out, number)?;
    } else if let Some(number) = number.as_i64() {
        encode::write_sint(out, number)?;
    } else {
        encode::write_f64(out, number.as_f64().expect("a float"))?;
    }
    Ok(())
}

fn unhex(text: &Value) -> Vec<u8> {
    let digits: Vec<u32> =
        text.as_str().expect("hex is text").chars().map(|char| char.to_digit(16).expect("hex")).collect();
    digits.chunks_exact(2).map(|pair| (pair[0] * 16 + pair[1]) as u8).collect()
}

/// An array of elements that are packed already.
fn array(elements: &[&[u8]]) -> Vec<u8> {
    let mut out = Vec::new();
    encode::write_array_len(&mut out, elements.len() as u32).expect("a vector takes all");
    out.extend(elements.concat());
    out
}

/// An array of `count` ones, one byte each.
fn ones(count: usize) -> Vec<u8> {
    let mut out = Vec::new();
    encode::write_array_len(&mut out, count as u32).expect("a vector takes all");
    out.resize(out.len() + count, 1);
    out
}

/// A batch of `events` that are packed already.
fn batch_of(events: &[&[u8]]) -> Vec<u8> {
    array(&[&pack(&json!(0.0)), &array(events), &pack(&NULL)])
}

// Expected values.

/// What `["BlockStored", [7, 8], null, [1, 2, 3, 4], 2]` means; rows change what they are about.
fn plain() -> Stored {
    Stored {
        hashes: vec![EngineHash::Int(7), EngineHash::Int(8)],
        parent: Parent::Root,
        tokens: vec![1, 2, 3, 4],
        page: 2,
        adapter: None,
        salt: None,
        extra_keys: Vec::new(),
        tier: Tier::Device,
        group: None,
        kind: GroupKind::Main,
        paired: false,
        of_session: false,
    }
}

fn removed(hash: u64) -> Removed {
    Removed { hashes: vec![EngineHash::Int(hash)], tier: Tier::Device, group: None }
}

/// A digest as an engine sends it.
fn digest(bytes: &[u8]) -> EngineHash {
    let mut padded = [0; 32];
    padded[..bytes.len()].copy_from_slice(bytes);
    EngineHash::Bytes(padded, bytes.len() as u8)
}

fn lost_store(error: WireError) -> Event {
    Event::Rejected { removal: false, error }
}

fn lost_removal(error: WireError) -> Event {
    Event::Rejected { removal: true, error }
}

fn missing(field: &'static str) -> WireError {
    WireError::Missing { field }
}

fn unreadable(field: &'static str, expected: &'static str, found: &'static str) -> WireError {
    WireError::Field { field, source: ReadError::Type { expected, found } }
}

fn range(field: &'static str, value: i128, expected: &'static str) -> WireError {
    WireError::Field { field, source: ReadError::Range { value, expected } }
}

fn limit(what: &'static str, limit: usize) -> WireError {
    WireError::Limit { what, found: limit + 1, limit }
}

/// `event` stands between two removals, which must be read whatever it is.
#[track_caller]
fn check_packed(why: &str, event: &[u8], expected: Event) {
    let (before, after) = (pack(&json!(["BlockRemoved", [1]])), pack(&json!(["BlockRemoved", [2]])));
    let batch = decode(&batch_of(&[&before, event, &after])).expect("the batch is readable");
    assert_eq!(batch.events, [Event::Removed(removed(1)), expected, Event::Removed(removed(2))], "{why}");
}

#[track_caller]
fn check(why: &str, event: Value, expected: Event) {
    check_packed(why, &pack(&event), expected);
}

#[track_caller]
fn check_rank(why: &str, rank: u32, ranks: u32, named: Option<u32>, expected: bool) {
    let batch = Batch { timestamp: 0.0, events: Vec::new(), rank: named };
    assert_eq!(batch.is_of(rank, ranks), expected, "{why}");
}

#[track_caller]
fn check_batch(why: &str, payload: Value, expected: Result<(Vec<Event>, Option<u32>), WireError>) {
    let found = decode(&pack(&payload)).map(|batch| (batch.events, batch.rank));
    assert_eq!(found, expected, "{why}");
}

// Recorded payloads.

#[test]
fn recorded_payloads_mean_what_their_manifests_say() {
    for capture in captures::all() {
        let batch = decode(capture.payload).expect(capture.name);
        let meanings: Vec<Event> = capture.events().iter().map(meaning).collect();
        assert_eq!(batch.events, meanings, "{}", capture.name);
        let at = |position: usize, key: &str| {
            capture.decoded.get(position).or_else(|| capture.decoded.get(key)).unwrap_or(&NULL)
        };
        let rank = at(2, "data_parallel_rank").as_u64();
        assert_eq!(batch.rank.map(u64::from), rank, "rank of {}", capture.name);
        // Two readers of decimal fractions may differ in the last bit.
        let apart = batch.timestamp - at(0, "ts").as_f64().expect("a timestamp");
        assert!(apart.abs() < 1e-6, "timestamp of {}", capture.name);
    }
}

/// What the manifest's description of an event means, by names in a map or by position behind the tag.
fn meaning(event: &Value) -> Event {
    let tag = event.get("type").or_else(|| event.get(0)).and_then(Value::as_str);
    match tag.expect("an event has a tag") {
        "AllBlocksCleared" => Event::Cleared,
        "BlockRemoved" => {
            let field = |name| described(event, &["block_hashes", "medium", "group_idx"], name);
            Event::Removed(Removed {
                hashes: list(field("block_hashes")).map(engine_hash).collect(),
                tier: engine_tier(field("medium")),
                group: field("group_idx").as_u64().map(|group| group as u32),
            })
        }
        "BlockStored" => Event::Stored(stored_meaning(event)),
        other => panic!("no meaning is written for {other}"),
    }
}

fn stored_meaning(event: &Value) -> Stored {
    let order = [
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
    ];
    let field = |name| described(event, &order, name);
    let text = |name| field(name).as_str().map(Arc::<str>::from);
    let parent = field("parent_block_hash");
    let nameless = field("lora_id").as_i64().map(|id| Arc::<str>::from(format!("#{id}")));
    let main = [None, Some("full_attention"), Some("mla_attention"), Some("sink_full_attention")];
    let is_main = main.contains(&field("kv_cache_spec_kind").as_str());
    Stored {
        hashes: list(field("block_hashes")).map(engine_hash).collect(),
        parent: if parent.is_null() { Parent::Root } else { Parent::Page(engine_hash(parent)) },
        tokens: list(field("token_ids")).map(token).collect(),
        page: field("block_size").as_u64().expect("a page size") as u32,
        adapter: text("lora_name").or(nameless),
        salt: text("cache_salt"),
        extra_keys: list(field("extra_keys"))
            .map(|keys| list(keys).map(extra_key_meaning).collect())
            .collect(),
        tier: engine_tier(field("medium")),
        group: field("group_idx").as_u64().map(|group| group as u32),
        kind: if is_main { GroupKind::Main } else { GroupKind::Other },
        paired: list(field("token_ids")).any(Value::is_array),
        of_session: field("session_id").is_string(),
    }
}

/// The field `name` of a map; of an array, the element at its place in `order`, or its entry in an appended map.
fn described<'a>(event: &'a Value, order: &[&str], name: &str) -> &'a Value {
    let Value::Array(elements) = event else { return event.get(name).unwrap_or(&NULL) };
    let is_appended = |element: &Value| element.is_object() && element.get(BYTES).is_none();
    let appended = elements.iter().filter(|element| is_appended(element)).find_map(|map| map.get(name));
    let position = order.iter().position(|known| *known == name);
    let positional = position.and_then(|at| elements.get(at + 1)).filter(|element| !is_appended(element));
    appended.or(positional).unwrap_or(&NULL)
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn engine_hash(value: &Value) -> EngineHash {
    match value.get(BYTES) {
        Some(hex) => digest(&unhex(hex)),
        None => EngineHash::Int(value.as_u64().unwrap_or_else(|| {
            u64::from_be_bytes(value.as_i64().expect("a hash is an integer or bytes").to_be_bytes())
        })),
    }
}

fn token(value: &Value) -> u32 {
    value.get(0).unwrap_or(value).as_u64().expect("a token is a number") as u32
}

fn engine_tier(value: &Value) -> Tier {
    match value.as_str() {
        None | Some("GPU") => Tier::Device,
        Some("CPU" | "CPU_PINNED") => Tier::Host,
        Some("DISK" | "EXTERNAL" | "STORAGE" | "FS" | "OBJ") => Tier::Disk,
        Some(other) => panic!("no tier is written for {other}"),
    }
}

fn extra_key_meaning(value: &Value) -> ExtraKey {
    match value {
        Value::String(text) => ExtraKey::Text(text.as_str().into()),
        Value::Array(_) => ExtraKey::Media,
        _ => ExtraKey::Opaque,
    }
}

// Batches.

#[test]
fn a_batch_is_an_array_or_a_map() {
    let (event, read) = (json!(["BlockRemoved", [7]]), Event::Removed(removed(7)));
    let ok = |rank| Ok((vec![read.clone()], rank));
    check_batch("with a rank", json!([1.5, [event], 3]), ok(Some(3)));
    check_batch("rank is nil", json!([1.5, [event], null]), ok(None));
    check_batch("rank is missing", json!([1.5, [event]]), ok(None));
    check_batch("more elements than we know", json!([1.5, [event], 0, "new", [1]]), ok(Some(0)));
    check_batch("an integer for a time", json!([2, [event], 0]), ok(Some(0)));
    check_batch("a map", json!({"ts": 1.5, "events": [event], "data_parallel_rank": 2}), ok(Some(2)));
    check_batch(
        "a map in another order",
        json!({"attn_dp_rank": 2, "events": [event], "ts": 1.5}),
        ok(Some(2)),
    );
    check_batch("unknown keys", json!({"a": {"b": [1]}, "events": [event], "c": null}), ok(None));
    check_batch(
        "maps at both levels",
        json!({"events": [{"block_hashes": [7], "type": "BlockRemoved"}]}),
        ok(None),
    );
    check_batch("no events happened", json!([1.5, [], 0]), Ok((Vec::new(), Some(0))));
    check_batch("no list of events", json!([1.5]), Err(missing("events")));
    check_batch("a map without events", json!({"ts": 1.5}), Err(missing("events")));
    check_batch("not a batch", json!("hello"), Err(unreadable("batch", "array", "string")));
    check_batch("events are no list", json!([1.5, 7, 0]), Err(unreadable("events", "array", "integer")));
    check_batch("an unreadable rank costs no events", json!([1.5, [event], -1]), ok(None));
    check_rank("the socket's", 3, 8, Some(3), true);
    check_rank("none named", 3, 8, None, true);
    check_rank("of the second pod of a deployment", 3, 8, Some(11), true);
    check_rank("a worker of one rank", 0, 1, Some(5), true);
    check_rank("another", 0, 2, Some(1), false);
    check_rank("another of the second pod", 3, 8, Some(12), false);
    check_rank("all say that they are the first", 3, 8, Some(0), false);
}

#[test]
fn the_timestamp_is_read() {
    for (payload, expected) in [(json!([1.5, []]), 1.5), (json!({"events": []}), 0.0), (json!([7, []]), 7.0)]
    {
        let batch = decode(&pack(&payload)).expect("a batch");
        assert!((batch.timestamp - expected).abs() < f64::EPSILON, "{payload}");
    }
}

// Stores.

#[test]
fn every_layout_of_a_store_means_the_same() {
    let rows = [
        ("the shortest array", json!(["BlockStored", [7, 8], null, [1, 2, 3, 4], 2])),
        (
            "trailing nils",
            json!(["BlockStored", [7, 8], null, [1, 2, 3, 4], 2, null, null, null, null, null, null]),
        ),
        (
            "elements of a later engine",
            json!([
                "BlockStored",
                [7, 8],
                null,
                [1, 2, 3, 4],
                2,
                null,
                "GPU",
                null,
                null,
                null,
                "full_attention",
                64,
                "new",
                [[1]]
            ]),
        ),
        (
            "an appended map",
            json!(["BlockStored", [7, 8], null, [1, 2, 3, 4], 2, null, "GPU", {"later": "s"}]),
        ),
        (
            "a map",
            json!({
                "type": "BlockStored", "block_hashes": [7, 8], "parent_block_hash": null, "token_ids": [1, 2, 3, 4],
                "block_size": 2, "lora_id": null, "medium": null, "lora_name": null, "extra_keys": null,
                "group_idx": null, "kv_cache_spec_kind": null, "cache_salt": null
            }),
        ),
        (
            "a map with its tag last",
            json!({
                "block_size": 2, "token_ids": [1, 2, 3, 4], "parent_block_hash": null, "block_hashes": [7, 8],
                "type": "BlockStored"
            }),
        ),
        (
            "unknown keys",
            json!({
                "type": "BlockStored", "new": {"a": [{"b": 1}]}, "block_hashes": [7, 8], "parent_block_hash": null,
                "token_ids": [1, 2, 3, 4], "block_size": 2, "lookahead_token_ids": [[9], [9]], "ownership": "tier0"
            }),
        ),
    ];
    for (why, event) in rows {
        check(why, event, Event::Stored(plain()));
    }
}

/// A store like [`plain`] with more fields in map form.
fn with(fields: &Value) -> Value {
    let mut event = json!({
        "type": "BlockStored", "block_hashes": [7, 8], "parent_block_hash": null, "token_ids": [1, 2, 3, 4],
        "block_size": 2
    });
    for (key, value) in fields.as_object().expect("fields are a map") {
        event[key.as_str()] = value.clone();
    }
    event
}

#[test]
fn adapter_salt_and_tier_are_read() {
    let adapter = |name: &str| Stored { adapter: Some(name.into()), ..plain() };
    let tier = |tier| Stored { tier, ..plain() };
    let salted = Stored { salt: Some("s".into()), ..plain() };
    let of_session = Stored { of_session: true, ..plain() };
    check("a session", with(&json!({"session_id": "s"})), Event::Stored(of_session));
    let rows = [
        ("a named adapter", with(&json!({"lora_name": "a"})), adapter("a")),
        ("a name beats a number", with(&json!({"lora_id": 3, "lora_name": "a"})), adapter("a")),
        ("a number without a name", with(&json!({"lora_id": 3})), adapter("#3")),
        (
            "the same by position",
            json!(["BlockStored", [7, 8], null, [1, 2, 3, 4], 2, 3, "GPU"]),
            adapter("#3"),
        ),
        ("a salt", with(&json!({"cache_salt": "s"})), salted.clone()),
        (
            "a salt in the map that SGLang 0.5.18 appends",
            json!(["BlockStored", [7, 8], null, [1, 2, 3, 4], 2, null, "GPU", {"cache_salt": "s"}]),
            salted,
        ),
        (
            "an empty salt is a salt",
            with(&json!({"cache_salt": ""})),
            Stored { salt: Some("".into()), ..plain() },
        ),
        ("device", with(&json!({"medium": "GPU"})), tier(Tier::Device)),
        ("host of vLLM", with(&json!({"medium": "CPU"})), tier(Tier::Host)),
        ("host of SGLang", with(&json!({"medium": "CPU_PINNED"})), tier(Tier::Host)),
        ("disk", with(&json!({"medium": "DISK"})), tier(Tier::Disk)),
        ("an unknown medium is slow", with(&json!({"medium": "TAPE"})), tier(Tier::Disk)),
    ];
    for (why, event, expected) in rows {
        check(why, event, Event::Stored(expected));
    }
}

#[test]
fn hashes_are_64_bits_or_up_to_32_bytes() {
    let rows = [
        ("above i64::MAX", json!(u64::MAX - 1), EngineHash::Int(u64::MAX - 1)),
        ("i64::MIN", json!(i64::MIN), EngineHash::Int(1 << 63)),
        ("minus one", json!(-1), EngineHash::Int(u64::MAX)),
        ("zero", json!(0), EngineHash::Int(0)),
        ("16 bytes", json!({BYTES: "ab".repeat(16)}), digest(&[0xab; 16])),
        ("32 bytes", json!({BYTES: "cd".repeat(32)}), digest(&[0xcd; 32])),
        ("text", json!("xyz"), digest(b"xyz")),
    ];
    for (why, hash, expected) in rows {
        let event = with(&json!({"block_hashes": [hash, 8], "parent_block_hash": hash}));
        let hashes = vec![expected, EngineHash::Int(8)];
        check(why, event, Event::Stored(Stored { hashes, parent: Parent::Page(expected), ..plain() }));
        let removal = Removed { hashes: vec![expected], ..removed(0) };
        check(why, json!(["BlockRemoved", [hash], "GPU"]), Event::Removed(removal));
    }
    assert_ne!(digest(&[0; 16]), digest(&[0; 32]), "padding is no part of a hash");
    let long = json!({BYTES: "ee".repeat(33)});
    check("33 bytes", json!(["BlockRemoved", [long]]), lost_removal(limit("hash bytes", MAX_HASH_BYTES)));
    check(
        "a flag",
        json!(["BlockRemoved", [true]]),
        lost_removal(unreadable("block_hashes", "bytes", "bool")),
    );
}

#[test]
fn an_unreadable_parent_is_never_the_root() {
    let parent = |value: Value| with(&json!({"parent_block_hash": value}));
    let field = "parent_block_hash";
    check("a flag", parent(json!(false)), lost_store(unreadable(field, "bytes", "bool")));
    check("a fraction", parent(json!(1.5)), lost_store(unreadable(field, "bytes", "float")));
    check("a list", parent(json!([7])), lost_store(unreadable(field, "bytes", "array")));
    let long = json!({BYTES: "ee".repeat(33)});
    check("too long", parent(long), lost_store(limit("hash bytes", MAX_HASH_BYTES)));
    let absent = json!({"type": "BlockStored", "block_hashes": [7], "token_ids": [1, 2], "block_size": 2});
    check("absent", absent, lost_store(missing(field)));
    check("an array that ends before it", json!(["BlockStored", [7]]), lost_store(missing(field)));
    let zero = Stored { parent: Parent::Page(EngineHash::Int(0)), ..plain() };
    check("zero is a hash like any other", parent(json!(0)), Event::Stored(zero));
    let page = Stored { parent: Parent::Page(EngineHash::Int(9)), ..plain() };
    check("a page", parent(json!(9)), Event::Stored(page));
    check("nil is the root", parent(json!(null)), Event::Stored(plain()));
}

#[test]
fn tokens_are_u32_or_pairs() {
    let tokens = |value: Value| with(&json!({"token_ids": value}));
    let read = |tokens: &[u32], paired| Event::Stored(Stored { tokens: tokens.to_vec(), paired, ..plain() });
    let largest = u32::MAX;
    check("the largest", tokens(json!([1, 2, 3, largest])), read(&[1, 2, 3, largest], false));
    check(
        "the first of each pair",
        tokens(json!([[1, 2], [2, 3], [3, 4], [4, 5]])),
        read(&[1, 2, 3, 4], true),
    );
    check("longer tuples", tokens(json!([[1, 2, 3], [2], [3, "x"], [4, null]])), read(&[1, 2, 3, 4], true));
    let field = "token_ids";
    check("an empty pair", tokens(json!([[], [2, 3]])), lost_store(missing(field)));
    check("negative", tokens(json!([-1, 2, 3, 4])), lost_store(range(field, -1, "u32")));
    check("33 bits", tokens(json!([1_u64 << 32, 2, 3, 4])), lost_store(range(field, 1 << 32, "u32")));
    check("text", tokens(json!("1234")), lost_store(unreadable(field, "array", "string")));
    check("a fraction", tokens(json!([1.5, 2, 3, 4])), lost_store(unreadable(field, "integer", "float")));
    let absent = json!(["BlockStored", [7, 8], null]);
    check("absent", absent, lost_store(missing(field)));
    let pageless = json!(["BlockStored", [7, 8], null, [1, 2, 3, 4], null]);
    check("a page size is never guessed", pageless, lost_store(missing("block_size")));
}

#[test]
fn extra_keys_tell_text_from_media() {
    let keys = |value: Value| with(&json!({"extra_keys": value}));
    let read = |extra_keys| Event::Stored(Stored { extra_keys, ..plain() });
    let text = |text: &str| ExtraKey::Text(text.into());
    check("none", keys(json!([null, null])), read(vec![vec![], vec![]]));
    check("a salt", keys(json!([["s"], null])), read(vec![vec![text("s")], vec![]]));
    check("an empty list", keys(json!([[], ["s"]])), read(vec![vec![], vec![text("s")]]));
    let image = json!([["a", ["image", -2]], [["image", 3], ["audio", 0]]]);
    check("media", keys(image), read(vec![vec![text("a"), ExtraKey::Media], vec![ExtraKey::Media; 2]]));
    check(
        "a digest of embeddings",
        keys(json!([[{BYTES: "00ff"}], null])),
        read(vec![vec![ExtraKey::Opaque], vec![]]),
    );
    check("a number", keys(json!([[5], null])), read(vec![vec![ExtraKey::Opaque], vec![]]));
    check("shorter than the pages", keys(json!([["s"]])), read(vec![vec![text("s")]]));
    check("not lists", keys(json!(["s"])), lost_store(unreadable("extra_keys", "array", "string")));
}

#[test]
fn only_main_groups_need_a_hash_for_every_page() {
    let event = |kind: Value, hashes: Value| {
        with(&json!({"kv_cache_spec_kind": kind, "group_idx": 1, "block_hashes": hashes}))
    };
    let read = |kind, hashes: &[u64]| {
        let hashes = hashes.iter().copied().map(EngineHash::Int).collect();
        Event::Stored(Stored { kind, hashes, group: Some(1), ..plain() })
    };
    for kind in [json!(null), json!("full_attention"), json!("mla_attention"), json!("sink_full_attention")] {
        check("a main group", event(kind.clone(), json!([7, 8])), read(GroupKind::Main, &[7, 8]));
        let sparse = |hashes| lost_store(WireError::Sparse { hashes, tokens: 4, page: 2 });
        check("too few hashes", event(kind.clone(), json!([7])), sparse(1));
        check("too many hashes", event(kind, json!([7, 8, 9])), sparse(3));
    }
    let others =
        ["sliding_window", "sliding_window_mla", "mamba", "chunked_local_attention", "unknown", "later"];
    for kind in others {
        check(kind, event(json!(kind), json!([7, 8])), read(GroupKind::Other, &[7, 8]));
        check(kind, event(json!(kind), json!([7])), read(GroupKind::Other, &[7]));
    }
}

#[test]
fn a_store_without_tokens_is_a_tier_update() {
    let update = Stored { tokens: Vec::new(), page: 0, tier: Tier::Host, ..plain() };
    let by_map = json!({
        "type": "BlockStored", "block_hashes": [7, 8], "parent_block_hash": null, "token_ids": [], "block_size": 0,
        "lora_id": null, "medium": "CPU", "lora_name": null
    });
    check("as a map", by_map, Event::Stored(update.clone()));
    check(
        "as an array",
        json!(["BlockStored", [7, 8], null, [], 0, null, "CPU"]),
        Event::Stored(update.clone()),
    );
    check(
        "tokens nil",
        json!(["BlockStored", [7, 8], null, null, 0, null, "CPU"]),
        Event::Stored(update.clone()),
    );
    check("page nil", json!(["BlockStored", [7, 8], null, [], null, null, "CPU"]), Event::Stored(update));
}

// Other events, and what one event may cost the others.

#[test]
fn removals_clears_and_events_of_later_engines_are_read() {
    let removal = |tier, group| Event::Removed(Removed { tier, group, ..removed(7) });
    check("only hashes", json!(["BlockRemoved", [7]]), removal(Tier::Device, None));
    check("nil medium", json!(["BlockRemoved", [7], null]), removal(Tier::Device, None));
    check("with its group", json!(["BlockRemoved", [7], "CPU", 2]), removal(Tier::Host, Some(2)));
    check(
        "more elements",
        json!(["BlockRemoved", [7], "GPU", 2, "LOCAL", "t"]),
        removal(Tier::Device, Some(2)),
    );
    let map = json!({"group_idx": 0, "locality": "LOCAL", "block_hashes": [7], "medium": "FS", "type": "BlockRemoved"});
    check("as a map", map, removal(Tier::Disk, Some(0)));
    check("a clear", json!(["AllBlocksCleared"]), Event::Cleared);
    check("a clear as a map", json!({"type": "AllBlocksCleared"}), Event::Cleared);
    check("a clear with more", json!(["AllBlocksCleared", "GPU"]), Event::Cleared);
    check("an unknown tag", json!(["BlockMoved", [7], {"a": 1}]), Event::Unknown);
    check("an unknown tag in a map", json!({"block_hashes": true, "type": "BlockMoved"}), Event::Unknown);
}

#[test]
fn a_bad_event_says_whether_a_removal_was_lost() {
    check("no hashes", json!({"type": "BlockRemoved"}), lost_removal(missing("block_hashes")));
    check(
        "nil hashes",
        json!(["BlockRemoved", null]),
        lost_removal(unreadable("block_hashes", "array", "nil")),
    );
    check(
        "a bad group",
        json!(["BlockRemoved", [7], "GPU", -1]),
        lost_removal(range("group_idx", -1, "u32")),
    );
    check("a store", json!(["BlockStored", null]), lost_store(unreadable("block_hashes", "array", "nil")));
    check(
        "a store's medium",
        with(&json!({"medium": 1})),
        lost_store(unreadable("medium", "string", "integer")),
    );
    check("nobody knows what it was", json!([]), lost_removal(missing("type")));
    check("a map without a tag", json!({"block_hashes": [7]}), lost_removal(missing("type")));
    check("a tag of another type", json!([5, [7]]), lost_removal(unreadable("type", "string", "integer")));
    check("not an event", json!(null), lost_removal(unreadable("event", "map", "nil")));
    check("not an event either", json!("BlockRemoved"), lost_removal(unreadable("event", "map", "string")));
    let bad_key = [0x81, 0x05, 0x05];
    check_packed(
        "a key that is no string",
        &bad_key,
        lost_removal(unreadable("event key", "string", "integer")),
    );
    let bad_tag = [0x91, 0xa1, 0xff];
    let utf8 = WireError::Field { field: "type", source: ReadError::Utf8 };
    check_packed("a tag that is not UTF-8", &bad_tag, lost_removal(utf8));
}

/// Case B09.
#[test]
fn a_very_long_store_is_read_and_so_are_its_siblings() {
    let tokens: Vec<u32> = (100_000..1_600_000).collect();
    let mut packed_tokens = Vec::new();
    encode::write_array_len(&mut packed_tokens, tokens.len() as u32).expect("a vector takes all");
    for token in &tokens {
        encode::write_u32(&mut packed_tokens, *token).expect("a vector takes all");
    }
    let hashes = ones(tokens.len() / 16);
    let event =
        array(&[&pack(&json!("BlockStored")), &hashes, &pack(&NULL), &packed_tokens, &pack(&json!(16))]);
    let hashes = vec![EngineHash::Int(1); tokens.len() / 16];
    let expected = Stored { hashes, tokens, page: 16, ..plain() };
    let batch = decode(&batch_of(&[&event, &pack(&json!(["BlockRemoved", [7]]))])).expect("a batch");
    // Not by assert_eq: a failure would print a million tokens.
    assert!(
        batch.events == [Event::Stored(expected), Event::Removed(removed(7))],
        "1.5 M tokens and a removal"
    );
}

#[test]
fn an_event_over_a_limit_costs_only_itself() {
    let tag = |tag: &str| pack(&json!(tag));
    let nil = pack(&NULL);
    let removal = array(&[&tag("BlockRemoved"), &ones(MAX_HASHES + 1)]);
    check_packed("hashes of a removal", &removal, lost_removal(limit("block_hashes", MAX_HASHES)));
    let store = array(&[&tag("BlockStored"), &ones(MAX_HASHES + 1)]);
    check_packed("hashes of a store", &store, lost_store(limit("block_hashes", MAX_HASHES)));
    let store = array(&[&tag("BlockStored"), &ones(1), &nil, &ones(MAX_TOKENS + 1)]);
    check_packed("tokens", &store, lost_store(limit("token_ids", MAX_TOKENS)));
    let keys = ones(MAX_HASHES + 1);
    let store = array(&[&tag("BlockStored"), &ones(1), &nil, &ones(1), &ones(0), &nil, &nil, &nil, &keys]);
    let page = lost_store(unreadable("block_size", "integer", "array"));
    check_packed("the first bad field names itself", &store, page);
    let store = array(&[&tag("BlockStored"), &ones(1), &nil, &ones(1), &[1], &nil, &nil, &nil, &keys]);
    check_packed("extra keys", &store, lost_store(limit("extra_keys", MAX_HASHES)));
    let long = "x".repeat(MAX_STRING_BYTES + 1);
    check("a salt", with(&json!({"cache_salt": long})), lost_store(limit("cache_salt", MAX_STRING_BYTES)));
    check("an adapter", with(&json!({"lora_name": long})), lost_store(limit("lora_name", MAX_STRING_BYTES)));
    let longest = &long[1..];
    let salted = Stored { salt: Some(longest.into()), ..plain() };
    check("the longest salt", with(&json!({"cache_salt": longest})), Event::Stored(salted));
}

#[test]
fn a_batch_over_a_limit_is_refused() {
    let events = array(&[&pack(&json!(0.0)), &ones(MAX_EVENTS + 1), &pack(&NULL)]);
    assert_eq!(decode(&events), Err(limit("events", MAX_EVENTS)));
    assert_eq!(decode(&vec![0; MAX_PAYLOAD_BYTES + 1]), Err(limit("payload bytes", MAX_PAYLOAD_BYTES)));
    // `[0.0, [["BlockRemoved", [4 billion of ..` in a few bytes.
    let mut lie = vec![0x92, 0xca, 0, 0, 0, 0, 0x91, 0x92];
    lie.extend(pack(&json!("BlockRemoved")));
    lie.extend([0xdd, 0xff, 0xff, 0xff, 0xff, 1]);
    let source = ReadError::Length { claimed: u64::from(u32::MAX), left: 1 };
    assert_eq!(decode(&lie), Err(WireError::Field { field: "events", source }), "no memory for a lie");
}

#[test]
fn errors_have_stable_labels() {
    let rows = [
        (unreadable("medium", "string", "integer"), "unreadable_field"),
        (missing("type"), "missing_field"),
        (limit("events", MAX_EVENTS), "limit_exceeded"),
        (WireError::Sparse { hashes: 1, tokens: 4, page: 2 }, "sparse_hashes"),
    ];
    for (error, label) in rows {
        assert_eq!(error.reason(), label);
    }
}

// Damage.

#[test]
fn no_beginning_of_a_recorded_payload_is_a_payload() {
    for (name, payload) in captures::recorded() {
        for length in 0..payload.len() {
            assert!(decode(&payload[..length]).is_err(), "{length} bytes of {name}");
        }
    }
}

/// What later stages rely on, whatever was received.
fn assert_sound(batch: &Batch) {
    for event in &batch.events {
        if let Event::Stored(stored) = event
            && stored.kind == GroupKind::Main
            && !stored.tokens.is_empty()
        {
            assert_eq!(stored.hashes.len() * stored.page as usize, stored.tokens.len(), "{stored:?}");
        }
    }
}

proptest! {
    #[test]
    fn noise_is_read_or_refused(noise in prop::collection::vec(any::<u8>(), 0..300)) {
        if let Ok(batch) = decode(&noise) {
            assert_sound(&batch);
        }
    }

    #[test]
    fn noise_inside_an_event_is_read_or_refused(
        tag in prop::sample::select(vec!["BlockStored", "BlockRemoved", "AllBlocksCleared"]),
        length in 0x90..0x9f_u8,
        noise in prop::collection::vec(any::<u8>(), 0..100),
    ) {
        let event = [vec![length], pack(&json!(tag)), noise].concat();
        if let Ok(batch) = decode(&batch_of(&[&event])) {
            assert_sound(&batch);
        }
    }

    #[test]
    fn damaged_payloads_are_read_or_refused(
        which in any::<Index>(),
        damage in prop::collection::vec((any::<Index>(), any::<u8>()), 1..8),
    ) {
        let recorded = captures::recorded();
        let mut payload = which.get(&recorded).1.to_vec();
        for (position, byte) in &damage {
            let position = position.index(payload.len());
            payload[position] = *byte;
        }
        if let Ok(batch) = decode(&payload) {
            assert_sound(&batch);
        }
    }

    #[test]
    fn arrays_and_maps_carry_the_same_fields(
        hashes in prop::collection::vec(any::<u64>(), 1..5),
        parent in prop::option::of(any::<i64>()),
        page in 1..5_u32,
        (lora_id, lora_name) in (prop::option::of(1..9_u32), prop::option::of("[a-z]{0,4}")),
        medium in prop::sample::select(vec![json!(null), json!("GPU"), json!("CPU"), json!("STORAGE")]),
        group in prop::option::of(0..4_u32),
        kind in prop::sample::select(vec![json!(null), json!("full_attention"), json!("mamba")]),
    ) {
        let tokens: Vec<u32> = (0..page * hashes.len() as u32).collect();
        let array = json!([
            "BlockStored", hashes, parent, tokens, page, lora_id, medium, lora_name, null, group, kind
        ]);
        let map = json!({
            "kv_cache_spec_kind": kind, "group_idx": group, "lora_name": lora_name, "medium": medium,
            "lora_id": lora_id, "block_size": page, "token_ids": tokens, "parent_block_hash": parent,
            "block_hashes": hashes, "type": "BlockStored"
        });
        prop_assert_eq!(meaning(&array), meaning(&map), "the reader of manifests itself");
        let batch = decode(&pack(&json!([0.0, [array, map], null]))).expect("a batch");
        prop_assert_eq!(batch.events, vec![meaning(&array); 2]);
    }
}
