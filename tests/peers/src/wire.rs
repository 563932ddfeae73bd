//! The peer's reading of recorded engine payloads beside ours, as a test.
//!
//! Both read every payload of `tests/fixtures/engine-events`. Where they mean
//! something else it is on purpose, and stands in [`DIFFERENCES`].

#![cfg(test)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use dynamo_kv_router::zmq_wire::{self, BlockHashValue, RawKvEvent};
use kvrouter_core::events::wire::{self, EngineHash, Event, GroupKind, Parent, Removed, Stored};
use kvrouter_core::units::Tier;

/// What differs, and in how many payloads.
///
/// * Hashes of 16 or 32 bytes are vLLM's default today; the peer's type for a
///   hash is a number, and one event of them costs it the batch.
/// * A batch that is a map, as vLLM's main branch may send it, is no sequence.
/// * EAGLE stores come as pairs of neighbouring tokens. We keep the first of each,
///   a whole number of pages; the peer appends the second one of the last pair.
const DIFFERENCES: &[(&str, usize)] =
    &[("a batch that is a map: they refuse it", 1), (BYTES, 12), ("pairs: they keep one token more", 7)];
const BYTES: &str = "a batch with hashes of bytes: they refuse it";

/// What one event says, in words that both sides have.
#[derive(Debug, PartialEq)]
enum Meaning {
    Stored { hashes: Vec<u64>, parent: Option<u64>, tokens: Vec<u32>, page: u32, tier: Tier, main: bool },
    Removed { hashes: Vec<u64>, tier: Tier },
    Cleared,
    Nothing,
}

fn payloads() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/engine-events");
    let (mut folders, mut files) = (vec![root], Vec::new());
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).expect("a folder of the repository") {
            let path = entry.expect("readable").path();
            let name = path.to_string_lossy().into_owned();
            // The load feed is no event stream.
            if path.is_dir() && !name.ends_with("sgload") {
                folders.push(path);
            } else if name.ends_with(".payload.bin") {
                files.push(path);
            }
        }
    }
    files.sort();
    files
}

fn number(hash: &EngineHash) -> Option<u64> {
    match hash {
        EngineHash::Int(hash) => Some(*hash),
        EngineHash::Bytes(..) => None,
    }
}

/// Ours; `None` where a hash is no number, which the peer has no word for.
fn ours(event: &Event) -> Option<Meaning> {
    match event {
        Event::Stored(Stored { hashes, parent, tokens, page, tier, kind, .. }) => Some(Meaning::Stored {
            hashes: hashes.iter().map(number).collect::<Option<_>>()?,
            parent: match parent {
                Parent::Root => None,
                Parent::Page(hash) => Some(number(hash)?),
            },
            tokens: tokens.clone(),
            page: *page,
            tier: *tier,
            main: *kind == GroupKind::Main,
        }),
        Event::Removed(Removed { hashes, tier, .. }) => {
            Some(Meaning::Removed { hashes: hashes.iter().map(number).collect::<Option<_>>()?, tier: *tier })
        }
        Event::Cleared => Some(Meaning::Cleared),
        Event::Unknown | Event::Rejected { .. } => Some(Meaning::Nothing),
    }
}

fn theirs(event: &RawKvEvent) -> Meaning {
    let numbers = |hashes: &[BlockHashValue]| hashes.iter().map(|hash| hash.into_u64()).collect();
    let tier = match event.medium() {
        None | Some("GPU") => Tier::Device,
        Some("CPU" | "CPU_PINNED" | "CPU_TIER1") => Tier::Host,
        Some(_) => Tier::Disk,
    };
    match event {
        RawKvEvent::BlockStored {
            block_hashes,
            parent_block_hash,
            token_ids,
            block_size,
            kv_cache_spec_kind,
            ..
        } => Meaning::Stored {
            hashes: numbers(block_hashes),
            parent: parent_block_hash.map(BlockHashValue::into_u64),
            tokens: token_ids.clone(),
            page: *block_size as u32,
            tier,
            main: kv_cache_spec_kind.is_none_or(|kind| {
                ["FullAttention", "MlaAttention", "SinkFullAttention"].contains(&format!("{kind:?}").as_str())
            }),
        },
        RawKvEvent::BlockRemoved { block_hashes, .. } => {
            Meaning::Removed { hashes: numbers(block_hashes), tier }
        }
        RawKvEvent::AllBlocksCleared { .. } => Meaning::Cleared,
        RawKvEvent::Ignored => Meaning::Nothing,
    }
}

/// Why the two sides differ about one payload; empty where they agree.
fn differences(payload: &[u8]) -> Vec<&'static str> {
    let mine = wire::decode(payload).expect("a recorded payload is sound").events;
    let bytes = mine.iter().any(|event| ours(event).is_none());
    let Ok(batch) = zmq_wire::decode_event_batch(payload) else {
        return vec![if bytes { BYTES } else { "a batch that is a map: they refuse it" }];
    };
    if batch.events.len() != mine.len() {
        return vec!["another number of events"];
    }
    let pairs = mine.iter().zip(&batch.events);
    pairs
        .filter_map(|(mine, other)| {
            let (Some(mine), other) = (ours(mine), theirs(other)) else { return Some(BYTES) };
            match (&mine, &other) {
                _ if mine == other => None,
                (Meaning::Nothing, _) => Some("we refuse the event"),
                (_, Meaning::Nothing) => Some("they ignore the event"),
                (Meaning::Stored { tokens: a, .. }, Meaning::Stored { tokens: b, .. })
                    if b.len() == a.len() + 1 && b.starts_with(a) =>
                {
                    Some("pairs: they keep one token more")
                }
                (Meaning::Stored { tokens: a, .. }, Meaning::Stored { tokens: b, .. }) if a != b => {
                    Some("tokens")
                }
                (Meaning::Stored { tier: a, .. }, Meaning::Stored { tier: b, .. }) if a != b => Some("tier"),
                (Meaning::Removed { tier: a, .. }, Meaning::Removed { tier: b, .. }) if a != b => {
                    Some("tier")
                }
                (Meaning::Stored { main: a, .. }, Meaning::Stored { main: b, .. }) if a != b => {
                    Some("attention")
                }
                _ => Some("something else"),
            }
        })
        .collect()
}

#[test]
fn both_read_the_recorded_payloads_alike_but_for_what_is_listed() {
    let payloads = payloads();
    assert!(payloads.len() > 90, "{} payloads", payloads.len());
    let mut found: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for path in &payloads {
        let payload = std::fs::read(path).expect("readable");
        let mut all = differences(&payload);
        all.sort_unstable();
        all.dedup();
        all.into_iter().for_each(|what| found.entry(what).or_default().push(path.display().to_string()));
    }
    let counts: Vec<(&str, usize)> = found.iter().map(|(what, paths)| (*what, paths.len())).collect();
    assert_eq!(counts, DIFFERENCES, "{found:#?}");
}
