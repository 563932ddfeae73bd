//! Damaged and made-up payloads through decoder and digester.
//!
//! Seeds are the recorded payloads. Each case damages one (flips bytes, cuts it,
//! repeats or drops a stretch, splices in another one's) or makes up noise, feeds
//! it between sound ones, and checks what must hold of any input. It runs
//! [`CASES`] cases; `KVROUTER_FUZZ_CASES` at build time (`make fuzz`) sets another
//! number.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::captures;
use super::digest::Digester;
use super::wire::{Event, GroupKind, WireError, decode};
use super::{Delta, Tier};
use crate::blocks::{BlockHash, Identity, IdentitySeed, NamespaceId};
use crate::units::BlockSize;

/// Cases of an ordinary run: some seconds.
const CASES: u32 = 20_000;

fn cases() -> u32 {
    option_env!("KVROUTER_FUZZ_CASES").and_then(|cases| cases.parse().ok()).unwrap_or(CASES)
}

/// One thing done to a payload.
#[derive(Clone, Debug)]
enum Damage {
    Set(usize, u8),
    Flip(usize, u8),
    Cut(usize),
    Repeat(usize, usize),
    Drop(usize, usize),
    /// A stretch of another recorded payload.
    Splice(usize, usize, usize, usize),
    Noise(Vec<u8>),
}

fn damage() -> impl Strategy<Value = Damage> {
    let place = any::<usize>;
    // Bytes at which MessagePack changes its mind about lengths and types.
    let byte =
        prop_oneof![any::<u8>(), prop::sample::select(vec![0x80, 0x90, 0xc0, 0xc4, 0xdb, 0xdd, 0xdf, 0xff])];
    prop_oneof![
        4 => (place(), byte).prop_map(|(at, byte)| Damage::Set(at, byte)),
        4 => (place(), 0u8..8).prop_map(|(at, bit)| Damage::Flip(at, bit)),
        1 => place().prop_map(Damage::Cut),
        1 => (place(), 1usize..64).prop_map(|(at, count)| Damage::Repeat(at, count)),
        1 => (place(), 1usize..64).prop_map(|(at, count)| Damage::Drop(at, count)),
        1 => (place(), place(), place(), 1usize..64).prop_map(|(at, other, from, count)| {
            Damage::Splice(at, other, from, count)
        }),
        1 => prop::collection::vec(any::<u8>(), 0..64).prop_map(Damage::Noise),
    ]
}

fn damaged(seeds: &[(&str, &[u8])], seed: usize, damages: &[Damage]) -> Vec<u8> {
    let mut bytes = seeds[seed % seeds.len()].1.to_vec();
    for damage in damages {
        let place = |at: usize, length: usize| at % (length + 1);
        match damage {
            Damage::Noise(noise) => bytes.clone_from(noise),
            Damage::Cut(at) => bytes.truncate(place(*at, bytes.len())),
            Damage::Set(at, byte) if !bytes.is_empty() => {
                let at = at % bytes.len();
                bytes[at] = *byte;
            }
            Damage::Flip(at, bit) if !bytes.is_empty() => {
                let at = at % bytes.len();
                bytes[at] ^= 1 << bit;
            }
            Damage::Repeat(at, count) => {
                let from = place(*at, bytes.len());
                let part = bytes[from..bytes.len().min(from + count)].to_vec();
                bytes.splice(from..from, part);
            }
            Damage::Drop(at, count) => {
                let from = place(*at, bytes.len());
                bytes.drain(from..bytes.len().min(from + count));
            }
            Damage::Splice(at, other, from, count) => {
                let other = seeds[other % seeds.len()].1;
                let from = place(*from, other.len());
                let at = place(*at, bytes.len());
                bytes.splice(at..at, other[from..other.len().min(from + count)].iter().copied());
            }
            Damage::Set(..) | Damage::Flip(..) => {}
        }
    }
    bytes
}

/// An error says which field, or which count against which limit.
fn names_its_subject(error: &WireError) -> bool {
    match error {
        WireError::Field { field, .. } | WireError::Missing { field } => !field.is_empty(),
        WireError::Limit { what, found, limit } => !what.is_empty() && found > limit,
        WireError::Sparse { hashes, tokens, page } => hashes * (*page as usize) != *tokens,
    }
}

/// What holds of every event that was read, and how many items it keeps.
fn items(event: &Event) -> usize {
    match event {
        Event::Stored(stored) => {
            let pages = stored.hashes.len() * stored.page as usize;
            let fits =
                stored.tokens.is_empty() || stored.kind == GroupKind::Other || stored.tokens.len() == pages;
            assert!(fits, "{} tokens for {pages}", stored.tokens.len());
            let keys: usize = stored.extra_keys.iter().map(|keys| 1 + keys.len()).sum();
            stored.hashes.len() + stored.tokens.len() + keys
        }
        Event::Removed(removed) => removed.hashes.len(),
        Event::Cleared | Event::Unknown => 1,
        Event::Rejected { error, .. } => {
            assert!(names_its_subject(error), "{error}");
            1
        }
    }
}

/// What a reader of the deltas believes: a set of blocks.
fn follow(held: &mut BTreeSet<(NamespaceId, Tier, BlockHash)>, deltas: &[Delta]) {
    for delta in deltas {
        match delta {
            Delta::Stored { namespace, hashes, tier, .. } => {
                assert!(!hashes.is_empty());
                hashes
                    .iter()
                    .for_each(|hash| assert!(held.insert((*namespace, *tier, *hash)), "stored twice"));
            }
            Delta::Removed { namespace, hashes, tier } => {
                assert!(!hashes.is_empty());
                hashes
                    .iter()
                    .for_each(|hash| assert!(held.remove(&(*namespace, *tier, *hash)), "never stored"));
            }
            Delta::Cleared => held.clear(),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(cases()) })]

    #[test]
    fn damaged_payloads_are_read_or_refused_by_name(
        seed in any::<usize>(), damages in prop::collection::vec(damage(), 1..5), sound in any::<usize>()
    ) {
        let seeds = captures::recorded();
        let bytes = damaged(&seeds, seed, &damages);
        let mut digester = Digester::new(Identity::new(IdentitySeed::new(b"")), BlockSize::new(64).expect("not zero"));
        let mut held = BTreeSet::new();
        let before = decode(seeds[sound % seeds.len()].1).expect("a recorded payload is sound");
        follow(&mut held, &digester.apply(&before));
        match decode(&bytes) {
            Err(error) => prop_assert!(names_its_subject(&error), "{error}"),
            Ok(batch) => {
                // An item takes a byte at least: what is kept is bounded by what came.
                let kept: usize = batch.events.iter().map(items).sum();
                prop_assert!(kept <= bytes.len(), "{kept} items of {} bytes", bytes.len());
                let again = decode(&bytes).expect("as before");
                // Not the time stamp, which may be no number.
                prop_assert_eq!(&again.events, &batch.events, "reading twice gives the same");
                follow(&mut held, &digester.apply(&batch));
            }
        }
        // The original still means what it meant, on top of whatever that was.
        let after = decode(seeds[seed % seeds.len()].1).expect("a recorded payload is sound");
        follow(&mut held, &digester.apply(&after));
        let mut rebuilt = BTreeSet::new();
        follow(&mut rebuilt, &digester.snapshot());
        prop_assert_eq!(rebuilt, held, "the snapshot is what the deltas said");
    }
}
