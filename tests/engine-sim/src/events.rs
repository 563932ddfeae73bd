//! KV cache events and their msgpack encoding, byte for byte that of each release.
//!
//! A batch is `[timestamp, [event...], rank]`. An event is a tagged array in older releases
//! and a map with a `type` key in newer ones; the order of fields is the order of declaration
//! in the engines. The authority is `tests/fixtures/engine-events`.

use bytes::Bytes;
use rmp::encode as msgpack;

use crate::config::Wire;

/// What happened in a cache.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// Pages became available for reuse.
    Stored(Box<Stored>),
    /// Pages are gone.
    Removed(Removed),
    /// All pages are gone.
    Cleared,
}

impl Event {
    /// Names the tier of its pages.
    pub(crate) fn is_at(&mut self, medium: &str) {
        match self {
            Self::Stored(stored) => stored.medium = Some(medium.to_owned()),
            Self::Removed(removed) => removed.medium = Some(medium.to_owned()),
            Self::Cleared => {}
        }
    }
}

/// Pages that became available for reuse, each the child of the one before.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stored {
    /// One hash per page.
    pub block_hashes: Vec<EventHash>,
    /// The page before the first; none at the start of a prompt.
    pub parent_block_hash: Option<EventHash>,
    /// Tokens of all pages.
    pub token_ids: TokenIds,
    /// Tokens per page.
    pub block_size: u64,
    /// vLLM's number of the adapter.
    pub lora_id: Option<u64>,
    /// Tier; `GPU` for the device.
    pub medium: Option<String>,
    /// Adapter.
    pub lora_name: Option<String>,
    /// vLLM: one entry per page.
    pub extra_keys: Option<Vec<Option<Vec<ExtraKey>>>>,
    /// vLLM: cache group.
    pub group_idx: Option<u64>,
    /// vLLM: kind of attention in that group.
    pub kv_cache_spec_kind: Option<String>,
    /// vLLM: window of that group, in tokens.
    pub kv_cache_spec_sliding_window: Option<u64>,
    /// vLLM: `LOCAL` or `REMOTE`.
    pub locality: Option<String>,
    /// vLLM: id of an offload tier.
    pub ownership: Option<String>,
    /// The request's session.
    pub session_id: Option<String>,
    /// vLLM 0.33 with speculative decoding: one list per page.
    pub lookahead_token_ids: Option<Vec<Vec<u32>>>,
    /// SGLang: the request's salt.
    pub cache_salt: Option<String>,
}

/// Pages that are gone.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Removed {
    /// One hash per page.
    pub block_hashes: Vec<EventHash>,
    /// Tier.
    pub medium: Option<String>,
    /// vLLM: cache group.
    pub group_idx: Option<u64>,
}

/// An engine's hash as it travels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EventHash {
    /// vLLM: low 8 bytes of the digest.
    U64(u64),
    /// SGLang: first 8 bytes of the digest.
    I64(i64),
    /// vLLM with `VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0`: the whole digest.
    Bytes(Vec<u8>),
}

/// Tokens of stored pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenIds {
    /// The usual form.
    Plain(Vec<u32>),
    /// SGLang under EAGLE: each token with its successor.
    Pairs(Vec<[u32; 2]>),
}

/// One extra key of a vLLM block, untagged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExtraKey {
    /// Adapter name or cache salt.
    Text(String),
    /// Media item and where in the block it starts.
    Media(String, i64),
}

/// One field of an event, ready to be written in either layout.
struct Field<'a> {
    name: &'static str,
    value: Value<'a>,
    presence: Presence,
}

enum Value<'a> {
    Nil,
    Int(u64),
    Text(&'a str),
    Hash(&'a EventHash),
    Hashes(&'a [EventHash]),
    Tokens(&'a TokenIds),
    ExtraKeys(&'a [Option<Vec<ExtraKey>>]),
    Lists(&'a [Vec<u32>]),
}

/// What a map does with a field that is nil. Arrays always keep the place.
#[derive(Clone, Copy, PartialEq)]
enum Presence {
    Required,
    Optional,
}

impl Default for TokenIds {
    fn default() -> Self {
        Self::Plain(Vec::new())
    }
}

/// Encodes one batch, stamped `timestamp` (seconds since 1970).
pub fn encode_batch(wire: Wire, timestamp: f64, events: &[Event], rank: Option<u32>) -> Bytes {
    let mut out = Writer(Vec::with_capacity(256));
    out.array(3);
    out.float(timestamp);
    out.array(events.len());
    for event in events {
        out.event(wire, event);
    }
    out.value(&rank.map_or(Value::Nil, |rank| Value::Int(u64::from(rank))));
    Bytes::from(out.0)
}

/// A buffer in memory, to which writing cannot fail.
struct Writer(Vec<u8>);

impl Writer {
    fn event(&mut self, wire: Wire, event: &Event) {
        match event {
            Event::Stored(stored) => {
                let fields = stored_fields(wire, stored);
                self.fields(wire, "BlockStored", &fields, trailing_salt(wire, stored));
            }
            Event::Removed(removed) => {
                self.fields(wire, "BlockRemoved", &removed_fields(wire, removed), None);
            }
            Event::Cleared => self.fields(wire, "AllBlocksCleared", &[], None),
        }
    }

    fn fields(&mut self, wire: Wire, tag: &str, fields: &[Field<'_>], trailing_salt: Option<&str>) {
        if wire.has_map_events() {
            let present = |field: &&Field<'_>| {
                field.presence == Presence::Required || !matches!(field.value, Value::Nil)
            };
            let length = 1 + fields.iter().filter(present).count();
            // msgspec reserves the header for all declared fields before it skips nils, and
            // vLLM 0.33 declares sixteen for a store: too many for the one-byte header.
            self.map(length, if fields.len() + 1 > 15 { 16 } else { 4 });
            self.text("type");
            self.text(tag);
            for field in fields.iter().filter(present) {
                self.text(field.name);
                self.value(&field.value);
            }
            return;
        }
        self.array(1 + fields.len() + usize::from(trailing_salt.is_some()));
        self.text(tag);
        for field in fields {
            self.value(&field.value);
        }
        if let Some(salt) = trailing_salt {
            self.map(1, 4);
            self.text("cache_salt");
            self.text(salt);
        }
    }

    fn value(&mut self, value: &Value<'_>) {
        match value {
            Value::Nil => self.nil(),
            Value::Int(int) => self.int(*int),
            Value::Text(text) => self.text(text),
            Value::Hash(hash) => self.hash(hash),
            Value::Hashes(hashes) => {
                self.array(hashes.len());
                hashes.iter().for_each(|hash| self.hash(hash));
            }
            Value::Tokens(TokenIds::Plain(tokens)) => self.tokens(tokens),
            Value::Tokens(TokenIds::Pairs(pairs)) => {
                self.array(pairs.len());
                pairs.iter().for_each(|pair| self.tokens(pair));
            }
            Value::ExtraKeys(blocks) => {
                self.array(blocks.len());
                blocks.iter().for_each(|keys| self.extra_keys(keys.as_deref()));
            }
            Value::Lists(lists) => {
                self.array(lists.len());
                lists.iter().for_each(|list| self.tokens(list));
            }
        }
    }

    fn hash(&mut self, hash: &EventHash) {
        match hash {
            EventHash::U64(hash) => self.int(*hash),
            EventHash::I64(hash) => self.signed(*hash),
            EventHash::Bytes(hash) => {
                let length = u32::try_from(hash.len()).expect("a digest is short");
                msgpack::write_bin_len(&mut self.0, length).expect("memory does not fail");
                self.0.extend_from_slice(hash);
            }
        }
    }

    fn tokens(&mut self, tokens: &[u32]) {
        self.array(tokens.len());
        tokens.iter().for_each(|token| self.int(u64::from(*token)));
    }

    fn extra_keys(&mut self, keys: Option<&[ExtraKey]>) {
        let Some(keys) = keys else { return self.nil() };
        self.array(keys.len());
        for key in keys {
            match key {
                ExtraKey::Text(text) => self.text(text),
                ExtraKey::Media(identifier, offset) => {
                    self.array(2);
                    self.text(identifier);
                    self.signed(*offset);
                }
            }
        }
    }

    fn nil(&mut self) {
        msgpack::write_nil(&mut self.0).expect("memory does not fail");
    }

    fn float(&mut self, value: f64) {
        msgpack::write_f64(&mut self.0, value).expect("memory does not fail");
    }

    fn int(&mut self, value: u64) {
        msgpack::write_uint(&mut self.0, value).expect("memory does not fail");
    }

    fn signed(&mut self, value: i64) {
        msgpack::write_sint(&mut self.0, value).expect("memory does not fail");
    }

    fn text(&mut self, text: &str) {
        msgpack::write_str(&mut self.0, text).expect("memory does not fail");
    }

    fn array(&mut self, length: usize) {
        let length = u32::try_from(length).expect("a batch is bounded by the cache");
        msgpack::write_array_len(&mut self.0, length).expect("memory does not fail");
    }

    /// A map header of at least `bits` for the length.
    fn map(&mut self, length: usize, bits: u8) {
        let length = u16::try_from(length).expect("an event has few fields");
        if bits > 4 {
            self.0.push(0xde);
            self.0.extend_from_slice(&length.to_be_bytes());
        } else {
            msgpack::write_map_len(&mut self.0, u32::from(length)).expect("memory does not fail");
        }
    }
}

fn stored_fields(wire: Wire, stored: &Stored) -> Vec<Field<'_>> {
    let mut fields = vec![
        required("block_hashes", Value::Hashes(&stored.block_hashes)),
        required("parent_block_hash", stored.parent_block_hash.as_ref().map_or(Value::Nil, Value::Hash)),
        required("token_ids", Value::Tokens(&stored.token_ids)),
        required("block_size", Value::Int(stored.block_size)),
        required("lora_id", int(stored.lora_id)),
        required("medium", text(stored.medium.as_ref())),
    ];
    match wire {
        Wire::Sglang0518 => {}
        Wire::Sglang0523 => fields.extend([
            optional("cache_salt", text(stored.cache_salt.as_ref())),
            optional("session_id", text(stored.session_id.as_ref())),
            optional("lora_name", text(stored.lora_name.as_ref())),
        ]),
        Wire::Vllm022 | Wire::Vllm032 | Wire::Vllm033 => fields.extend(vllm_fields(wire, stored)),
    }
    fields
}

/// What vLLM's stores have beyond SGLang's.
fn vllm_fields(wire: Wire, stored: &Stored) -> Vec<Field<'_>> {
    let extra_keys = stored.extra_keys.as_deref().map_or(Value::Nil, Value::ExtraKeys);
    let mut fields = vec![
        required("lora_name", text(stored.lora_name.as_ref())),
        optional("extra_keys", extra_keys),
        optional("group_idx", int(stored.group_idx)),
        optional("kv_cache_spec_kind", text(stored.kv_cache_spec_kind.as_ref())),
        optional("kv_cache_spec_sliding_window", int(stored.kv_cache_spec_sliding_window)),
    ];
    if wire != Wire::Vllm022 {
        fields.extend([
            optional("locality", text(stored.locality.as_ref())),
            optional("ownership", text(stored.ownership.as_ref())),
            optional("session_id", text(stored.session_id.as_ref())),
        ]);
    }
    if wire == Wire::Vllm033 {
        let lists = stored.lookahead_token_ids.as_deref().map_or(Value::Nil, Value::Lists);
        fields.push(optional("lookahead_token_ids", lists));
    }
    fields
}

fn removed_fields(wire: Wire, removed: &Removed) -> Vec<Field<'_>> {
    let mut fields = vec![
        required("block_hashes", Value::Hashes(&removed.block_hashes)),
        required("medium", text(removed.medium.as_ref())),
    ];
    if wire.is_vllm() {
        fields.push(optional("group_idx", int(removed.group_idx)));
    }
    fields
}

/// SGLang 0.5.18 appends a salt as a map behind the positional fields.
fn trailing_salt(wire: Wire, stored: &Stored) -> Option<&str> {
    stored.cache_salt.as_deref().filter(|_| wire == Wire::Sglang0518)
}

fn required<'a>(name: &'static str, value: Value<'a>) -> Field<'a> {
    Field { name, value, presence: Presence::Required }
}

fn optional<'a>(name: &'static str, value: Value<'a>) -> Field<'a> {
    Field { name, value, presence: Presence::Optional }
}

fn int<'a>(value: Option<u64>) -> Value<'a> {
    value.map_or(Value::Nil, Value::Int)
}

fn text(value: Option<&String>) -> Value<'_> {
    value.map_or(Value::Nil, |text| Value::Text(text))
}
