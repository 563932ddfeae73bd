//! Hand-made traces: small enough to follow by hand, strict enough to trust.
//!
//! One JSON object: `schema_version`, `block_size`, `workers` (snapshots),
//! `events` (what engines told) and `requests`. Times are ticks of a millisecond;
//! equal ticks go by `seq`. Blocks are names, equal where the blocks are equal and
//! everything before them is. Every object names its namespace by tenant, model
//! and adapter digest. Unknown fields are errors.

use std::collections::BTreeSet;

use serde_json::value::RawValue;
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

use crate::blocks::{BlockHash, NamespaceId};
use crate::ids::Epoch;
use crate::json::fields::{Fields, Problem, TraceError};
use crate::units::{BlockSize, Tick, Tokens};

/// Version of the fields.
pub const SCHEMA_VERSION: u64 = 1;
/// Most requests: what a person can follow.
pub const MAX_REQUESTS: usize = 64;
/// Most workers, likewise.
pub const MAX_WORKERS: usize = 8;
/// Most events, likewise.
pub const MAX_EVENTS: usize = 256;
/// Most tokens of one prompt or answer.
pub const MAX_TOKENS: u64 = 8192;
/// Most tokens that a snapshot says wait or decode: eight full prompts.
const MAX_BACKGROUND: u64 = 65_536;
/// Last tick: an hour.
const MAX_TICK: u64 = 3_600_000;

/// A whole trace, in one order whatever the order of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LabTrace {
    /// Tokens per block.
    pub size: BlockSize,
    /// Sorted by name.
    pub workers: Vec<LabWorker>,
    /// Sorted by tick and seq.
    pub events: Vec<LabEvent>,
    /// Sorted by tick and seq.
    pub requests: Vec<LabRequest>,
}

/// A worker as it was seen before the first request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LabWorker {
    /// Its name.
    pub name: String,
    /// Its engine's life.
    pub epoch: Epoch,
    /// When it was observed.
    pub observed: Tick,
    /// Tokens that waited for prefill.
    pub queued: Tokens,
    /// Tokens in the contexts of its decoding requests.
    pub context: Tokens,
    /// What its cache held.
    pub entries: Vec<LabEntry>,
}

/// Blocks of one namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LabEntry {
    /// The namespace.
    pub namespace: NamespaceId,
    /// The blocks.
    pub blocks: Vec<BlockHash>,
}

/// What an engine told about its cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LabEvent {
    /// When the router heard it.
    pub tick: Tick,
    /// Its number in the epoch; also its place among equal ticks.
    pub seq: u64,
    /// Place of the worker.
    pub worker: usize,
    /// The engine's life that it is of.
    pub epoch: Epoch,
    /// What changed.
    pub kind: LabEventKind,
    /// Which blocks; none when cleared.
    pub entry: LabEntry,
}

/// Kinds of events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LabEventKind {
    /// The blocks are held from now on.
    Stored,
    /// They are not held any more.
    Removed,
    /// Nothing is held any more, in any namespace.
    Cleared,
}

/// One arrival.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LabRequest {
    /// Its name.
    pub id: String,
    /// When it arrives.
    pub tick: Tick,
    /// Its place among equal ticks.
    pub seq: u64,
    /// Its namespace.
    pub namespace: NamespaceId,
    /// Its full blocks.
    pub blocks: Vec<BlockHash>,
    /// Tokens of its prompt.
    pub prompt: Tokens,
    /// Tokens that will be generated.
    pub decode: u64,
}

/// Reads a whole file.
pub fn parse(text: &str) -> Result<LabTrace, TraceError> {
    let root = Fields::root(text, 1)?;
    root.only(&["schema_version", "block_size", "workers", "events", "requests"])?;
    root.whole("schema_version", SCHEMA_VERSION)?;
    let size = root.whole("block_size", MAX_TOKENS)? as u32;
    let size = BlockSize::new(size)
        .ok_or_else(|| root.wrong("block_size", Problem::Expected("a whole number, 1 or more")))?;
    let mut workers = Vec::new();
    let mut names = BTreeSet::new();
    for fields in root.objects("workers", MAX_WORKERS)? {
        let worker = worker(&fields)?;
        if !names.insert(worker.name.clone()) {
            return Err(fields.wrong("worker", Problem::Duplicate(worker.name)));
        }
        workers.push(worker);
    }
    if workers.is_empty() {
        return Err(root.wrong("workers", Problem::Expected("a list of at least one worker")));
    }
    workers.sort_by(|a, b| a.name.cmp(&b.name));
    let mut events = Vec::new();
    let mut places = BTreeSet::new();
    for fields in root.objects("events", MAX_EVENTS)? {
        let event = event(&fields, &workers)?;
        // Two of one place would have no order but that of the file.
        if !places.insert((event.tick, event.seq, event.worker, event.epoch)) {
            return Err(fields.wrong("seq", Problem::Duplicate(event.seq.to_string())));
        }
        events.push(event);
    }
    events.sort_by_key(|event| (event.tick, event.seq, event.worker, event.epoch));
    let mut requests = Vec::new();
    let mut ids = BTreeSet::new();
    for fields in root.objects("requests", MAX_REQUESTS)? {
        let request = request(&fields, size)?;
        if !ids.insert(request.id.clone()) {
            return Err(fields.wrong("id", Problem::Duplicate(request.id)));
        }
        requests.push(request);
    }
    requests.sort_by(|a, b| (a.tick, a.seq, &a.id).cmp(&(b.tick, b.seq, &b.id)));
    Ok(LabTrace { size, workers, events, requests })
}

fn worker(fields: &Fields<'_>) -> Result<LabWorker, TraceError> {
    fields.only(&["worker", "epoch", "tick", "queued_prefill_tokens", "active_decode_tokens", "entries"])?;
    let mut entries = Vec::new();
    for entry in fields.objects("entries", MAX_REQUESTS)? {
        entry.only(&["tenant", "model", "adapter_digest", "blocks"])?;
        entries.push(LabEntry { namespace: namespace(&entry)?, blocks: blocks(&entry, "blocks")? });
    }
    entries.sort_by(|a, b| (a.namespace.0, &a.blocks).cmp(&(b.namespace.0, &b.blocks)));
    Ok(LabWorker {
        name: fields.text("worker")?,
        epoch: Epoch(fields.whole("epoch", u64::MAX)?),
        observed: Tick(fields.whole("tick", MAX_TICK)?),
        queued: Tokens(fields.whole("queued_prefill_tokens", MAX_BACKGROUND)?),
        context: Tokens(fields.whole("active_decode_tokens", MAX_BACKGROUND)?),
        entries,
    })
}

fn event(fields: &Fields<'_>, workers: &[LabWorker]) -> Result<LabEvent, TraceError> {
    fields.only(&[
        "tick",
        "seq",
        "worker",
        "epoch",
        "kind",
        "tenant",
        "model",
        "adapter_digest",
        "blocks",
    ])?;
    let name = fields.text("worker")?;
    let worker = workers.iter().position(|worker| worker.name == name);
    let kind = match fields.text("kind")?.as_str() {
        "stored" => LabEventKind::Stored,
        "removed" => LabEventKind::Removed,
        "cleared" => LabEventKind::Cleared,
        _ => return Err(fields.wrong("kind", Problem::Expected("stored, removed or cleared"))),
    };
    let blocks = match kind {
        LabEventKind::Cleared => Vec::new(),
        LabEventKind::Stored | LabEventKind::Removed => blocks(fields, "blocks")?,
    };
    Ok(LabEvent {
        tick: Tick(fields.whole("tick", MAX_TICK)?),
        seq: fields.whole("seq", u64::MAX)?,
        worker: worker.ok_or_else(|| fields.wrong("worker", Problem::UnknownName(name)))?,
        epoch: Epoch(fields.whole("epoch", u64::MAX)?),
        kind,
        entry: LabEntry { namespace: namespace(fields)?, blocks },
    })
}

fn request(fields: &Fields<'_>, size: BlockSize) -> Result<LabRequest, TraceError> {
    fields.only(&[
        "id",
        "tick",
        "seq",
        "tenant",
        "model",
        "adapter_digest",
        "template_digest",
        "prefix_blocks",
        "prompt_tokens",
        "expected_decode_tokens",
    ])?;
    fields.text("template_digest")?;
    let prompt = Tokens(fields.whole("prompt_tokens", MAX_TOKENS)?);
    let blocks = blocks(fields, "prefix_blocks")?;
    let (found, expected) = (blocks.len() as u64, size.full_blocks(prompt).0);
    if found != expected {
        return Err(fields.wrong("prefix_blocks", Problem::Count { found, expected }));
    }
    Ok(LabRequest {
        id: fields.text("id")?,
        tick: Tick(fields.whole("tick", MAX_TICK)?),
        seq: fields.whole("seq", u64::MAX)?,
        namespace: namespace(fields)?,
        blocks,
        prompt,
        decode: fields.whole("expected_decode_tokens", MAX_TOKENS)?,
    })
}

/// The template shapes a prompt, and so its blocks; it shares no cache by itself
/// and is no part of the namespace.
fn namespace(fields: &Fields<'_>) -> Result<NamespaceId, TraceError> {
    let mut framed = Vec::new();
    for name in ["tenant", "model", "adapter_digest"] {
        let part = fields.text(name)?;
        framed.extend_from_slice(&(part.len() as u64).to_le_bytes());
        framed.extend_from_slice(part.as_bytes());
    }
    Ok(NamespaceId(xxh3_128(&framed)))
}

/// Names of blocks, `a/1..4` short for `a/1`, `a/2`, `a/3`, `a/4`.
fn blocks(fields: &Fields<'_>, field: &str) -> Result<Vec<BlockHash>, TraceError> {
    let wrong = || fields.wrong(field, Problem::Expected("names, or ranges like `a/1..4`"));
    let raw: Vec<&RawValue> = fields.list(field, MAX_TOKENS as usize, "a list of strings")?;
    let mut hashes = Vec::new();
    for item in raw {
        // Ranges are short to write and long to hold.
        if hashes.len() > MAX_TOKENS as usize {
            break;
        }
        let name: String = serde_json::from_str(item.get()).map_err(|_| wrong())?;
        match name.split_once("..") {
            None if name.is_empty() => return Err(wrong()),
            None => hashes.push(BlockHash(xxh3_64(name.as_bytes()))),
            Some((start, end)) => {
                let (prefix, start) = start.rsplit_once('/').ok_or_else(wrong)?;
                let number = |text: &str| text.parse::<u64>().ok().filter(|number| *number <= MAX_TOKENS);
                let (start, end) = (number(start).ok_or_else(wrong)?, number(end).ok_or_else(wrong)?);
                hashes.extend((start..=end).map(|n| BlockHash(xxh3_64(format!("{prefix}/{n}").as_bytes()))));
            }
        }
    }
    if hashes.len() > MAX_TOKENS as usize {
        return Err(fields.wrong(field, Problem::Limit { found: hashes.len() as u64, limit: MAX_TOKENS }));
    }
    Ok(hashes)
}
