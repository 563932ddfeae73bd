//! What engines send, read once, into types.
//!
//! A payload is `[ts, events, rank?]`; an event is a tagged array (vLLM up to
//! 0.23, SGLang up to 0.5.19) or a map with the key `type` (vLLM from 0.24,
//! SGLang from 0.5.20). Both shapes are accepted at both levels, by shape and
//! not by engine name; unknown keys and extra elements are ignored, short
//! arrays are fine. One bad event does not cost its siblings: it is skipped,
//! and says why. Authority: the engines' recorded bytes in
//! `tests/fixtures/engine-events`.

use std::sync::Arc;

use super::Tier;
use super::msgpack::{Kind, ReadError, Reader};

/// Largest payload that is looked at. vLLM batches one scheduler step; a whole
/// 1M-token prompt is about 5 MB.
pub const MAX_PAYLOAD_BYTES: usize = 64 << 20;
/// Most events in one batch: vLLM sends one removal per evicted block, and a
/// step can evict every block of a very large cache.
pub const MAX_EVENTS: usize = 1 << 20;
/// Most block hashes in one event: a million-token prompt in pages of one.
pub const MAX_HASHES: usize = 1 << 21;
/// Most token ids in one event.
pub const MAX_TOKENS: usize = 1 << 22;
/// Longest string that is kept: adapter names and salts.
pub const MAX_STRING_BYTES: usize = 4096;
/// Most extra keys of one page: a page of 16 tokens has no more images.
pub const MAX_EXTRA_KEYS: usize = 256;
/// Longest engine hash: SHA-256.
pub const MAX_HASH_BYTES: usize = 32;

/// A page's name as the engine gives it: an opaque key, never recomputed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum EngineHash {
    /// vLLM's u64, or the bit pattern of SGLang's i64.
    Int(u64),
    /// A digest of up to 32 bytes, padded with zeros, and its length.
    Bytes([u8; MAX_HASH_BYTES], u8),
}

impl std::fmt::Debug for EngineHash {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Int(hash) => write!(formatter, "{hash:#018x}"),
            Self::Bytes(bytes, length) => {
                bytes.iter().take(usize::from(*length)).try_for_each(|byte| write!(formatter, "{byte:02x}"))
            }
        }
    }
}

/// What stands before the first page of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parent {
    /// Nothing: the store begins a prompt.
    Root,
    /// This page.
    Page(EngineHash),
}

/// What besides tokens enters one page's hash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExtraKey {
    /// An adapter name or a cache salt.
    Text(Arc<str>),
    /// An image, audio clip or video inside the page.
    Media,
    /// Something that makes the page no text page: a digest of embeddings.
    Opaque,
}

/// Which attention group a page belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupKind {
    /// Full attention, or no kind given: its pages are what prefixes are made of.
    Main,
    /// Sliding window, Mamba and the like.
    Other,
}

/// Pages that the engine now holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    /// One hash per page. Empty in an event about nothing, which changes nothing.
    pub hashes: Vec<EngineHash>,
    /// What stands before the first page.
    pub parent: Parent,
    /// Tokens of all pages; empty for a tier update.
    pub tokens: Vec<u32>,
    /// Tokens per page; 0 in tier updates.
    pub page: u32,
    /// Name of the adapter; from `lora_name`, else `#ID` from a bare `lora_id`.
    pub adapter: Option<Arc<str>>,
    /// Cache salt where the event carries it as a field (SGLang).
    pub salt: Option<Arc<str>>,
    /// Per page, or empty.
    pub extra_keys: Vec<Vec<ExtraKey>>,
    /// Where the pages are.
    pub tier: Tier,
    /// KV-cache group; `None` where the engine has only one.
    pub group: Option<u32>,
    /// Whether the group is one that prefixes are made of.
    pub kind: GroupKind,
    /// Whether tokens came as pairs (EAGLE).
    pub paired: bool,
    /// Whether a session is named: then the store may repeat pages that the
    /// session hit (vLLM's full report) rather than tell of a second copy.
    pub of_session: bool,
}

/// Pages that the engine no longer holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Removed {
    /// One hash per page. Empty in an event about nothing, which changes nothing.
    pub hashes: Vec<EngineHash>,
    /// Where they were.
    pub tier: Tier,
    /// KV-cache group; `None` where the engine has only one.
    pub group: Option<u32>,
}

/// One event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// `BlockStored`.
    Stored(Stored),
    /// `BlockRemoved`.
    Removed(Removed),
    /// `AllBlocksCleared`.
    Cleared,
    /// A tag of a later engine. Harmless, but counted.
    Unknown,
    /// An event of a known tag that could not be read.
    Rejected {
        /// Whether a removal was lost: then the view may claim what is gone.
        removal: bool,
        /// Why.
        error: WireError,
    },
}

/// One payload.
#[derive(Clone, Debug, PartialEq)]
pub struct Batch {
    /// Seconds since 1970 on the engine's clock; 0 where absent.
    pub timestamp: f64,
    /// In the order in which they happened.
    pub events: Vec<Event>,
    /// The data-parallel rank that the payload names, if any: see [`Batch::is_of`].
    pub rank: Option<u32>,
}

impl Batch {
    /// Whether the payload can be of rank `rank` of a worker that has `ranks` of them.
    ///
    /// vLLM, SGLang and ATOM name the rank of their publisher. In a deployment over
    /// several pods that is the rank among all, and ports and headers count from 0
    /// in each pod: of workers with 8 ranks, 0, 8 and 16 are each the first. What
    /// names no rank can be of any.
    pub fn is_of(&self, rank: u32, ranks: u32) -> bool {
        self.rank.is_none_or(|named| named.checked_rem(ranks) == Some(rank))
    }
}

/// Why a payload or an event was not read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// A field is not what it must be.
    #[error("field {field} is unreadable")]
    Field {
        /// Name of the field.
        field: &'static str,
        /// What was wrong.
        #[source]
        source: ReadError,
    },
    /// A field that must be there is missing.
    #[error("field {field} is missing")]
    Missing {
        /// Name of the field.
        field: &'static str,
    },
    /// A limit is exceeded.
    #[error("{what} of {found} exceeds the limit of {limit}")]
    Limit {
        /// What was counted.
        what: &'static str,
        /// How many there were.
        found: usize,
        /// How many may be.
        limit: usize,
    },
    /// Hashes and tokens disagree, so tokens cannot be told apart by page.
    #[error("{hashes} hashes for {tokens} tokens in pages of {page}")]
    Sparse {
        /// Hashes in the event.
        hashes: usize,
        /// Tokens in the event.
        tokens: usize,
        /// Tokens per page.
        page: u32,
    },
}

impl WireError {
    /// Stable label for metrics and logs.
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::Field { .. } => "unreadable_field",
            Self::Missing { .. } => "missing_field",
            Self::Limit { .. } => "limit_exceeded",
            Self::Sparse { .. } => "sparse_hashes",
        }
    }
}

/// Adds the name of the field to a reader's error.
trait InField<T> {
    fn field(self, field: &'static str) -> Result<T, WireError>;
}

impl<T> InField<T> for Result<T, ReadError> {
    fn field(self, field: &'static str) -> Result<T, WireError> {
        self.map_err(|source| WireError::Field { field, source })
    }
}

/// Reads one payload.
///
/// An error means that nothing of the payload is known; a bad event inside a
/// readable payload is an [`Event::Rejected`] among its siblings.
pub fn decode(payload: &[u8]) -> Result<Batch, WireError> {
    within("payload bytes", payload.len(), MAX_PAYLOAD_BYTES)?;
    let mut reader = Reader::new(payload);
    let mut batch = Batch { timestamp: 0.0, events: Vec::new(), rank: None };
    if reader.peek().field("batch")? == Kind::Map {
        let mut seen_events = false;
        for _ in 0..reader.map_len().field("batch")? {
            match reader.str().field("batch key")? {
                "ts" => batch.timestamp = reader.float().field("ts")?,
                "events" => {
                    batch.events = events(&mut reader)?;
                    seen_events = true;
                }
                "data_parallel_rank" | "attn_dp_rank" | "rank" => batch.rank = rank(&mut reader)?,
                _ => reader.skip().field("batch")?,
            }
        }
        return if seen_events { Ok(batch) } else { Err(WireError::Missing { field: "events" }) };
    }
    let length = reader.array_len().field("batch")?;
    if length < 2 {
        return Err(WireError::Missing { field: "events" });
    }
    batch.timestamp = reader.float().field("ts")?;
    batch.events = events(&mut reader)?;
    if length > 2 {
        batch.rank = rank(&mut reader)?;
    }
    Ok(batch)
}

/// The rank only confirms from which socket the payload came: one that cannot be
/// read is no reason to lose the events.
fn rank(reader: &mut Reader<'_>) -> Result<Option<u32>, WireError> {
    let mut copy = reader.clone();
    reader.skip().field("rank")?;
    Ok(copy.u32().ok())
}

fn events(reader: &mut Reader<'_>) -> Result<Vec<Event>, WireError> {
    let length = reader.array_len().field("events")?;
    within("events", length, MAX_EVENTS)?;
    let mut events = Vec::with_capacity(length.min(1024));
    for _ in 0..length {
        // The event is read from a copy of the cursor, and the cursor itself
        // steps over it: a bad event cannot derail its siblings.
        let copy = reader.clone();
        reader.skip().field("events")?;
        events.push(event(copy));
    }
    Ok(events)
}

fn event(mut reader: Reader<'_>) -> Event {
    let tag = match tag(&reader) {
        Ok(tag) => tag,
        Err(error) => return Event::Rejected { removal: true, error },
    };
    let outcome = match tag {
        "BlockStored" => fields(&mut reader, STORED_ORDER).and_then(|raw| raw.stored()).map(Event::Stored),
        "BlockRemoved" => {
            fields(&mut reader, REMOVED_ORDER).and_then(|raw| raw.removed()).map(Event::Removed)
        }
        "AllBlocksCleared" => Ok(Event::Cleared),
        _ => Ok(Event::Unknown),
    };
    outcome.unwrap_or_else(|error| Event::Rejected { removal: tag == "BlockRemoved", error })
}

/// Element 0 of an array, or the value of the key `type`, wherever it stands.
fn tag<'a>(reader: &Reader<'a>) -> Result<&'a str, WireError> {
    let mut reader = reader.clone();
    if reader.peek().field("event")? == Kind::Array {
        if reader.array_len().field("event")? == 0 {
            return Err(WireError::Missing { field: "type" });
        }
        return reader.str().field("type");
    }
    for _ in 0..reader.map_len().field("event")? {
        if reader.str().field("event key")? == "type" {
            return reader.str().field("type");
        }
        reader.skip().field("event")?;
    }
    Err(WireError::Missing { field: "type" })
}

/// Order of fields in the tagged arrays, after the tag.
const STORED_ORDER: &[&str] = &[
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
const REMOVED_ORDER: &[&str] = &["block_hashes", "medium", "group_idx"];

/// The fields of an event as they were found.
#[derive(Default)]
struct Raw {
    hashes: Option<Vec<EngineHash>>,
    parent: Option<Parent>,
    tokens: Option<Vec<u32>>,
    paired: bool,
    page: Option<u32>,
    lora_id: Option<i128>,
    lora_name: Option<Arc<str>>,
    salt: Option<Arc<str>>,
    extra_keys: Vec<Vec<ExtraKey>>,
    tier: Option<Tier>,
    group: Option<u32>,
    other_kind: bool,
    of_session: bool,
}

fn fields(reader: &mut Reader<'_>, order: &[&'static str]) -> Result<Raw, WireError> {
    let mut raw = Raw::default();
    if reader.peek().field("event")? == Kind::Map {
        for _ in 0..reader.map_len().field("event")? {
            let key = reader.str().field("event key")?;
            raw.read(key, reader)?;
        }
        return Ok(raw);
    }
    let length = reader.array_len().field("event")?;
    reader.skip().field("type")?;
    for position in 0..length - 1 {
        if reader.peek().field("event")? == Kind::Map {
            // SGLang 0.5.18 and 0.5.19 append what they added as a map.
            for _ in 0..reader.map_len().field("event")? {
                let key = reader.str().field("event key")?;
                raw.read(key, reader)?;
            }
            continue;
        }
        match order.get(position) {
            Some(key) => raw.read(key, reader)?,
            None => reader.skip().field("event")?,
        }
    }
    Ok(raw)
}

impl Raw {
    fn read(&mut self, key: &str, reader: &mut Reader<'_>) -> Result<(), WireError> {
        match key {
            "block_hashes" => self.hashes = Some(hashes(reader)?),
            "parent_block_hash" => self.parent = Some(parent(reader)?),
            "token_ids" => {
                let (tokens, paired) = tokens(reader)?;
                self.tokens = Some(tokens);
                self.paired = paired;
            }
            "block_size" if !reader.take_nil().field("block_size")? => {
                self.page = Some(reader.u32().field("block_size")?);
            }
            "lora_id" if !reader.take_nil().field("lora_id")? => {
                self.lora_id = Some(reader.int().field("lora_id")?);
            }
            "lora_name" => self.lora_name = text(reader, "lora_name")?,
            "cache_salt" => self.salt = text(reader, "cache_salt")?,
            "medium" => self.tier = text(reader, "medium")?.as_deref().map(tier),
            "group_idx" if !reader.take_nil().field("group_idx")? => {
                self.group = Some(reader.u32().field("group_idx")?);
            }
            "kv_cache_spec_kind" => {
                self.other_kind = text(reader, "kv_cache_spec_kind")?.is_some_and(|kind| !is_main(&kind));
            }
            "session_id" => self.of_session = text(reader, "session_id")?.is_some(),
            "extra_keys" => self.extra_keys = extra_keys(reader)?,
            "block_size" | "lora_id" | "group_idx" => {}
            _ => reader.skip().field("event")?,
        }
        Ok(())
    }

    fn stored(self) -> Result<Stored, WireError> {
        let hashes = self.hashes.ok_or(WireError::Missing { field: "block_hashes" })?;
        let parent = self.parent.ok_or(WireError::Missing { field: "parent_block_hash" })?;
        let tokens = self.tokens.ok_or(WireError::Missing { field: "token_ids" })?;
        if !tokens.is_empty() && self.page.is_none() {
            return Err(WireError::Missing { field: "block_size" });
        }
        let kind = if self.other_kind { GroupKind::Other } else { GroupKind::Main };
        let page = self.page.unwrap_or(0);
        let expected = hashes.len().saturating_mul(page as usize);
        if kind == GroupKind::Main && !tokens.is_empty() && expected != tokens.len() {
            return Err(WireError::Sparse { hashes: hashes.len(), tokens: tokens.len(), page });
        }
        // An adapter whose name is not told cannot be matched with a request,
        // but it must not be taken for the base model either.
        let adapter = self.lora_name.or_else(|| self.lora_id.map(|id| format!("#{id}").into()));
        Ok(Stored {
            hashes,
            parent,
            tokens,
            page,
            adapter,
            salt: self.salt,
            extra_keys: self.extra_keys,
            tier: self.tier.unwrap_or(Tier::Device),
            group: self.group,
            kind,
            paired: self.paired,
            of_session: self.of_session,
        })
    }

    fn removed(self) -> Result<Removed, WireError> {
        let hashes = self.hashes.ok_or(WireError::Missing { field: "block_hashes" })?;
        Ok(Removed { hashes, tier: self.tier.unwrap_or(Tier::Device), group: self.group })
    }
}

fn within(what: &'static str, found: usize, limit: usize) -> Result<(), WireError> {
    if found > limit { Err(WireError::Limit { what, found, limit }) } else { Ok(()) }
}

fn hashes(reader: &mut Reader<'_>) -> Result<Vec<EngineHash>, WireError> {
    let length = reader.array_len().field("block_hashes")?;
    within("block_hashes", length, MAX_HASHES)?;
    (0..length).map(|_| hash(reader, "block_hashes")).collect()
}

fn hash(reader: &mut Reader<'_>, field: &'static str) -> Result<EngineHash, WireError> {
    let bytes = match reader.peek().field(field)? {
        Kind::Int => return int_hash(reader.int().field(field)?, field),
        Kind::Str => reader.str().field(field)?.as_bytes(),
        _ => reader.bin().field(field)?,
    };
    within("hash bytes", bytes.len(), MAX_HASH_BYTES)?;
    let mut padded = [0; MAX_HASH_BYTES];
    padded[..bytes.len()].copy_from_slice(bytes);
    Ok(EngineHash::Bytes(padded, bytes.len() as u8))
}

/// vLLM's hashes are u64, SGLang's i64: the same 64 bits.
fn int_hash(value: i128, field: &'static str) -> Result<EngineHash, WireError> {
    let bits = u64::try_from(value).or_else(|_| i64::try_from(value).map(i64::cast_unsigned));
    bits.map(EngineHash::Int).map_err(|_| ReadError::Range { value, expected: "64 bits" }).field(field)
}

/// Only nil means the root. Taking an unreadable parent for the root would
/// index the child as the start of a prompt: a false hit, not a missing one.
fn parent(reader: &mut Reader<'_>) -> Result<Parent, WireError> {
    if reader.take_nil().field("parent_block_hash")? {
        return Ok(Parent::Root);
    }
    hash(reader, "parent_block_hash").map(Parent::Page)
}

/// Token ids; of EAGLE's pairs `(t, t+1)` the first of each.
fn tokens(reader: &mut Reader<'_>) -> Result<(Vec<u32>, bool), WireError> {
    if reader.take_nil().field("token_ids")? {
        return Ok((Vec::new(), false));
    }
    let length = reader.array_len().field("token_ids")?;
    within("token_ids", length, MAX_TOKENS)?;
    let mut paired = false;
    let mut tokens = Vec::with_capacity(length);
    for _ in 0..length {
        if reader.peek().field("token_ids")? == Kind::Array {
            paired = true;
            let elements = reader.array_len().field("token_ids")?;
            if elements == 0 {
                return Err(WireError::Missing { field: "token_ids" });
            }
            tokens.push(reader.u32().field("token_ids")?);
            for _ in 1..elements {
                reader.skip().field("token_ids")?;
            }
        } else {
            tokens.push(reader.u32().field("token_ids")?);
        }
    }
    Ok((tokens, paired))
}

fn text(reader: &mut Reader<'_>, field: &'static str) -> Result<Option<Arc<str>>, WireError> {
    if reader.take_nil().field(field)? {
        return Ok(None);
    }
    let text = reader.str().field(field)?;
    within(field, text.len(), MAX_STRING_BYTES)?;
    Ok(Some(text.into()))
}

fn extra_keys(reader: &mut Reader<'_>) -> Result<Vec<Vec<ExtraKey>>, WireError> {
    if reader.take_nil().field("extra_keys")? {
        return Ok(Vec::new());
    }
    let pages = reader.array_len().field("extra_keys")?;
    within("extra_keys", pages, MAX_HASHES)?;
    let mut all = Vec::with_capacity(pages);
    for _ in 0..pages {
        let mut keys = Vec::new();
        if !reader.take_nil().field("extra_keys")? {
            let length = reader.array_len().field("extra_keys")?;
            within("extra_keys of a page", length, MAX_EXTRA_KEYS)?;
            for _ in 0..length {
                keys.push(extra_key(reader)?);
            }
        }
        all.push(keys);
    }
    Ok(all)
}

fn extra_key(reader: &mut Reader<'_>) -> Result<ExtraKey, WireError> {
    let kind = reader.peek().field("extra_keys")?;
    if kind == Kind::Str {
        return Ok(text(reader, "extra_keys")?.map_or(ExtraKey::Opaque, ExtraKey::Text));
    }
    reader.skip().field("extra_keys")?;
    Ok(if kind == Kind::Array { ExtraKey::Media } else { ExtraKey::Opaque })
}

fn tier(medium: &str) -> Tier {
    match medium {
        "GPU" => Tier::Device,
        "CPU" | "CPU_PINNED" | "CPU_TIER1" => Tier::Host,
        _ => Tier::Disk,
    }
}

fn is_main(kind: &str) -> bool {
    matches!(kind, "full_attention" | "mla_attention" | "sink_full_attention")
}

#[cfg(test)]
#[path = "wire_tests.rs"]
mod tests;
