//! Tests of `digest`: recorded engines, every rule by name, random trees of pages.
//!
//! The oracle keeps what the digester avoids: for every page the engine named, the whole prefix from the root and
//! one entry per stored copy. What is held follows from that list alone, by hashing whole prefixes with
//! `blocks::chain`. Every batch is checked twice: deltas applied to a set, and the snapshot applied to nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc;
use std::time::Duration;

use proptest::prelude::*;
use proptest::sample::{Index, select};

use super::*;
use crate::blocks::{IdentitySeed, chain};
use crate::events::captures;
use crate::events::wire::{WireError, decode};

/// Held blocks, and the hash that each follows.
type View = BTreeMap<(NamespaceId, BlockHash, Tier), BlockHash>;

/// Tokens per block in the tables of rules.
const BLOCK: u32 = 4;
/// Three blocks of text.
const TEXT: &[u32] = &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12];

fn apply_to(view: &mut View, deltas: &[Delta]) {
    for delta in deltas {
        match delta {
            Delta::Cleared => view.clear(),
            Delta::Stored { namespace, parent, hashes, tier } => {
                assert!(!hashes.is_empty(), "a store names blocks");
                let mut before = *parent;
                for hash in hashes {
                    let known = view.insert((*namespace, *hash, *tier), before);
                    assert_eq!(known, None, "what is held is not stored again: {hash:?}");
                    before = *hash;
                }
            }
            Delta::Removed { namespace, hashes, tier } => {
                assert!(!hashes.is_empty(), "a removal names blocks");
                for hash in hashes {
                    let known = view.remove(&(*namespace, *hash, *tier));
                    assert!(known.is_some(), "only what is held is removed: {hash:?}");
                }
            }
        }
    }
}

/// A digester, and the view of somebody who reads its deltas.
struct Followed {
    digester: Digester,
    view: View,
}

impl Followed {
    fn new(size: u32) -> Self {
        let digester = Digester::new(Identity::default(), BlockSize::new(size).expect("not zero"));
        Self { digester, view: View::new() }
    }

    fn feed(&mut self, events: &[Event]) -> Vec<Delta> {
        let batch = Batch { timestamp: 0.0, events: events.to_vec(), rank: None };
        let deltas = self.digester.apply(&batch);
        apply_to(&mut self.view, &deltas);
        self.assert_snapshot_is_the_view();
        deltas
    }

    #[track_caller]
    fn assert_snapshot_is_the_view(&self) {
        let mut rebuilt = View::new();
        for delta in self.digester.snapshot() {
            if let Delta::Stored { namespace, parent, tier, .. } = &delta {
                let parent = (*namespace, *parent, *tier);
                let is_held = self.view.contains_key(&parent);
                assert!(!is_held || rebuilt.contains_key(&parent), "a child before its parent: {delta:?}");
            }
            apply_to(&mut rebuilt, &[delta]);
        }
        assert_eq!(rebuilt, self.view, "the snapshot differs from the deltas");
        let blocks: BTreeSet<_> = self.view.keys().map(|(namespace, hash, _)| (*namespace, *hash)).collect();
        assert_eq!(self.digester.block_count(), blocks.len(), "the count of blocks");
    }
}

// The oracle.

struct Oracle {
    size: BlockSize,
    page: usize,
    pages: Vec<OraclePage>,
    orphans: u64,
}

struct OraclePage {
    hash: EngineHash,
    namespace: Namespace,
    /// All tokens from the root, this page's included.
    prefix: Vec<u32>,
    /// Group and tier of every copy that was stored and not removed.
    copies: Vec<(Option<u32>, Tier)>,
}

impl Oracle {
    fn new(size: u32) -> Self {
        Self { size: BlockSize::new(size).expect("not zero"), page: 1, pages: Vec::new(), orphans: 0 }
    }

    fn apply(&mut self, event: &Event) {
        match event {
            Event::Stored(stored) => {
                for at in self.place(stored) {
                    self.pages[at].copies.push((stored.group, stored.tier));
                }
            }
            Event::Removed(removed) => removed.hashes.iter().for_each(|hash| self.remove(*hash, removed)),
            Event::Cleared => self.pages.clear(),
            Event::Unknown | Event::Rejected { .. } => {}
        }
    }

    /// vLLM names the pages that a request hit, on request of a client: no new copies, unless we never saw them.
    fn report(&mut self, stored: &Stored) {
        let copy = (stored.group, stored.tier);
        for at in self.place(stored) {
            if !self.pages[at].copies.contains(&copy) {
                self.pages[at].copies.push(copy);
            }
        }
    }

    /// Positions of the event's pages in the list; new ones are added to it.
    fn place(&mut self, event: &Stored) -> Vec<usize> {
        if event.kind == GroupKind::Other {
            return Vec::new();
        }
        if event.tokens.is_empty() {
            return event.hashes.iter().filter_map(|hash| self.find(*hash)).collect();
        }
        self.page = event.page as usize;
        let (namespace, mut prefix) = match event.parent {
            Parent::Root => (salted_by(event), Vec::new()),
            Parent::Page(parent) => match self.find(parent).map(|at| &self.pages[at]) {
                Some(page) => (page.namespace.clone(), page.prefix.clone()),
                None => {
                    self.orphans += event.hashes.len() as u64;
                    return Vec::new();
                }
            },
        };
        let mut placed = Vec::new();
        for (hash, tokens) in event.hashes.iter().zip(event.tokens.chunks(self.page)) {
            prefix.extend_from_slice(tokens);
            placed.push(self.find(*hash).unwrap_or(self.pages.len()));
            if self.find(*hash).is_none() {
                let (namespace, prefix) = (namespace.clone(), prefix.clone());
                self.pages.push(OraclePage { hash: *hash, namespace, prefix, copies: Vec::new() });
            }
        }
        placed
    }

    fn find(&self, hash: EngineHash) -> Option<usize> {
        self.pages.iter().position(|page| page.hash == hash)
    }

    fn remove(&mut self, hash: EngineHash, event: &Removed) {
        let Some(at) = self.find(hash) else { return };
        let copies = &mut self.pages[at].copies;
        let gone = copies.iter().position(|(group, tier)| {
            *tier == event.tier && (event.group.is_none() || event.group == *group)
        });
        if let Some(gone) = gone {
            copies.remove(gone);
        }
        // A page without a copy is still a parent while a held page needs it to fill the same block.
        let size = self.size.len();
        let block = |page: &OraclePage| (page.prefix.len() - 1) / size;
        let explains = |page: &OraclePage, other: &OraclePage| {
            !other.copies.is_empty()
                && block(page) == block(other)
                && page.namespace == other.namespace
                && other.prefix.starts_with(&page.prefix)
        };
        let known: Vec<bool> =
            self.pages.iter().map(|page| self.pages.iter().any(|other| explains(page, other))).collect();
        let mut known = known.into_iter();
        self.pages.retain(|_| known.next() == Some(true));
    }

    fn held(&self) -> View {
        let mut view = View::new();
        let identity = Identity::default();
        for page in self.pages.iter().filter(|page| page.prefix.len().is_multiple_of(self.size.len())) {
            let length = page.prefix.len();
            let ends = (length - self.size.len() + self.page..=length).step_by(self.page);
            let tiers: Option<Vec<Tier>> =
                ends.map(|end| self.fastest(&page.namespace, &page.prefix[..end])).collect();
            let Some(slowest) = tiers.and_then(|tiers| tiers.into_iter().max()) else { continue };
            let (block, base) = block_of(&identity, &page.namespace, self.size, &page.prefix);
            view.insert((identity.id(&page.namespace), block, slowest), base);
        }
        view
    }

    fn fastest(&self, namespace: &Namespace, prefix: &[u32]) -> Option<Tier> {
        let same = self.pages.iter().filter(|page| page.prefix == prefix && page.namespace == *namespace);
        same.flat_map(|page| &page.copies).map(|(_, tier)| *tier).min()
    }
}

fn salted_by(event: &Stored) -> Namespace {
    let first_key = event.extra_keys.first().and_then(|keys| keys.first());
    let from_key = first_key.map(|key| match key {
        ExtraKey::Text(text) => text.clone(),
        other => panic!("the oracle knows no {other:?}"),
    });
    Namespace { adapter: event.adapter.clone(), salt: event.salt.clone().or(from_key) }
}

/// The last block of `prefix`, and the hash before it.
fn block_of(
    identity: &Identity,
    namespace: &Namespace,
    size: BlockSize,
    prefix: &[u32],
) -> (BlockHash, BlockHash) {
    let root = identity.root(namespace);
    let hashes = [vec![root], chain(root, size, prefix)].concat();
    (hashes[hashes.len() - 1], hashes[hashes.len() - 2])
}

// Recorded engines.

/// Replays a recorded engine and compares with the oracle after every batch.
fn check_capture(folder: &str, size: u32) {
    let (mut followed, mut oracle) = (Followed::new(size), Oracle::new(size));
    let mut most = 0;
    for capture in captures::live(folder) {
        let batch = decode(capture.payload).expect(capture.name);
        for (event, described) in batch.events.iter().zip(capture.events()) {
            match event {
                Event::Stored(stored) if described.get("session_id").is_some() => oracle.report(stored),
                event => oracle.apply(event),
            }
        }
        followed.feed(&batch.events);
        assert_eq!(followed.view, oracle.held(), "{} in blocks of {size}", capture.name);
        most = most.max(followed.view.len());
    }
    assert!(most > 0, "{folder} in blocks of {size} shows nothing");
    assert_eq!(followed.digester.counts().orphans, 0, "{folder}");
}

#[test]
fn recorded_engines_are_followed_exactly() {
    for folder in ["dp0", "dp1", "swa", "nixl_pd/nixl_p", "nixl_pd/nixl_d"] {
        for size in [32, 64] {
            check_capture(&format!("vllm-0.32.0-live/{folder}"), size);
        }
    }
    for size in [16, 48, 64] {
        check_capture("sglang-0.5.23-live/sg", size);
    }
}

#[test]
fn a_report_of_hits_is_no_second_copy() {
    for size in [32, 64] {
        check_capture("vllm-0.32.0-live/run1", size);
    }
}

#[test]
fn no_view_exceeds_the_cache_it_describes() {
    let mut followed = Followed::new(32);
    for capture in captures::live("vllm-0.32.0-live/run1") {
        followed.feed(&decode(capture.payload).expect(capture.name).events);
        // The engine ran with 24 blocks, of which vLLM keeps one as the null block.
        assert!(followed.view.len() <= 23, "{} blocks after {}", followed.view.len(), capture.name);
    }
}

#[test]
fn pages_stored_twice_by_extra_keys_leave_with_the_second_removal() {
    let size = BlockSize::new(16).expect("not zero");
    let tokens: Vec<u32> = (1000..1096).collect();
    let shared = chain(BlockHash(0), size, &tokens);
    let default = Identity::default().id(&Namespace::default());
    let mut followed = Followed::new(16);
    let mut held = Vec::new();
    for capture in captures::live("sglang-0.5.23-live/sg") {
        followed.feed(&decode(capture.payload).expect(capture.name).events);
        let is_held = |block: &&BlockHash| followed.view.contains_key(&(default, **block, Tier::Device));
        held.push(shared.iter().filter(is_held).count());
    }
    // Batch 2 stores the first two again, 9 removes all six once, 10 the two, 17 begins anew.
    assert_eq!(held, [6, 6, 6, 6, 6, 6, 6, 6, 6, 2, 0, 0, 0, 0, 0, 0, 0, 2]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn damaged_streams_never_panic(
        folder in select(vec!["vllm-0.32.0-live/run1", "vllm-0.32.0-live/swa", "sglang-0.5.23-live/sg"]),
        damage in prop::collection::vec((any::<Index>(), any::<Index>(), any::<u8>()), 1..40),
    ) {
        let recorded = captures::recorded().into_iter().filter(|(name, _)| name.starts_with(folder));
        let mut payloads: Vec<Vec<u8>> = recorded.map(|(_, payload)| payload.to_vec()).collect();
        for (which, position, byte) in &damage {
            let which = which.index(payloads.len());
            let position = position.index(payloads[which].len());
            payloads[which][position] = *byte;
        }
        // `feed` compares deltas with the snapshot, whatever they say.
        let mut followed = Followed::new(32);
        for batch in payloads.iter().filter_map(|payload| decode(payload).ok()) {
            followed.feed(&batch.events);
        }
    }
}

// Random trees of pages.

#[derive(Clone, Debug)]
enum Step {
    /// Stores a path of `tokens` that leaves the trunk at `branch`, from the root or from a page on the way.
    Store {
        salt: Option<&'static str>,
        tokens: usize,
        branch: usize,
        from: Option<Index>,
        tier: Tier,
    },
    /// Removes some neighbours of the oracle's list.
    Remove {
        page: Index,
        count: usize,
        copy: Index,
        groupless: bool,
    },
    /// Says that a page is in another tier too.
    Update {
        page: Index,
        tier: Tier,
    },
    /// A sliding-window group stores, or removes, a page of the same name.
    Slide {
        page: Index,
        stores: bool,
    },
    Clear,
}

fn step() -> impl Strategy<Value = Step> {
    let tier = || select(Tier::ALL.to_vec());
    let from = prop::option::of(any::<Index>());
    let salt = select(vec![None, Some("salty")]);
    prop_oneof![
        12 => (salt, 1..=48_usize, 0..48_usize, from, tier())
            .prop_map(|(salt, tokens, branch, from, tier)| Step::Store { salt, tokens, branch, from, tier }),
        14 => (any::<Index>(), 1..8_usize, any::<Index>(), any::<bool>())
            .prop_map(|(page, count, copy, groupless)| Step::Remove { page, count, copy, groupless }),
        4 => (any::<Index>(), tier()).prop_map(|(page, tier)| Step::Update { page, tier }),
        2 => (any::<Index>(), any::<bool>()).prop_map(|(page, stores)| Step::Slide { page, stores }),
        1 => Just(Step::Clear),
    ]
}

/// Devices name their group, connectors do not.
fn group_of(tier: Tier) -> Option<u32> {
    (tier == Tier::Device).then_some(0)
}

/// A path's pages: every page of the trunk has the same tokens, the page at `branch` others. So equal pages stand
/// under many prefixes, and only the prefix tells them apart.
fn path(salt: Option<&str>, pages: usize, branch: usize, page: u32) -> (Vec<EngineHash>, Vec<u32>) {
    let namespace = u64::from(salt.is_some()) << 32;
    let hash = |at: usize| {
        let branch = if at >= branch { branch as u64 + 1 } else { 0 };
        EngineHash::Int(namespace | (at as u64) << 16 | branch)
    };
    let tokens = |at: usize| (0..page).map(move |token| if at == branch { 1000 + token } else { token });
    ((0..pages).map(hash).collect(), (0..pages).flat_map(tokens).collect())
}

/// The event that `step` means where the oracle's pages are known.
fn event(step: &Step, page: u32, oracle: &Oracle) -> Event {
    let known = |index: &Index| match oracle.pages.len() {
        0 => 0,
        length => index.index(length),
    };
    let hash = |at: usize| oracle.pages.get(at).map_or(EngineHash::Int(u64::MAX), |page| page.hash);
    match step {
        Step::Store { salt, tokens, branch, from, tier } => {
            let (mut hashes, mut tokens) =
                path(*salt, tokens.div_ceil(page as usize), branch / page as usize, page);
            let skipped = from.map_or(0, |from| from.index(hashes.len()));
            let parent = skipped.checked_sub(1).map_or(Parent::Root, |last| Parent::Page(hashes[last]));
            hashes.drain(..skipped);
            tokens.drain(..skipped * page as usize);
            let salt = salt.map(Into::into);
            let event = Stored { hashes, parent, tokens, page, salt, ..stored(None, &[], &[]) };
            Event::Stored(Stored { tier: *tier, group: group_of(*tier), ..event })
        }
        Step::Remove { page, count, copy, groupless } => {
            let first = known(page);
            let copies = oracle.pages.get(first).map_or(&[][..], |page| &page.copies);
            let tier = if copies.is_empty() { Tier::Device } else { copy.get(copies).1 };
            let group = if *groupless { None } else { group_of(tier) };
            Event::Removed(Removed { hashes: (first..first + count).map(hash).collect(), tier, group })
        }
        Step::Update { page, tier } => {
            let update = Stored { hashes: vec![hash(known(page))], ..stored(None, &[], &[]) };
            Event::Stored(Stored { tier: *tier, group: group_of(*tier), ..update })
        }
        Step::Slide { page: at, stores: true } => {
            let event = Stored {
                hashes: vec![hash(known(at))],
                page,
                kind: GroupKind::Other,
                ..stored(None, &[], TEXT)
            };
            Event::Stored(Stored { group: Some(7), ..event })
        }
        Step::Slide { page: at, stores: false } => {
            Event::Removed(Removed { hashes: vec![hash(known(at))], tier: Tier::Device, group: Some(7) })
        }
        Step::Clear => Event::Cleared,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn a_block_is_held_while_all_its_pages_are(steps in prop::collection::vec(step(), 1..40)) {
        for page in [1, 2, 4, 8, 16] {
            let (mut followed, mut oracle) = (Followed::new(16), Oracle::new(16));
            for (number, step) in steps.iter().enumerate() {
                let event = event(step, page, &oracle);
                oracle.apply(&event);
                followed.feed(&[event]);
                prop_assert_eq!(&followed.view, &oracle.held(), "pages of {}, step {}", page, number);
                prop_assert_eq!(followed.digester.counts().orphans, oracle.orphans, "pages of {}", page);
            }
        }
    }
}
