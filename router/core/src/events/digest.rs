//! One target's engine events to deltas in our hashes.
//!
//! Engine hashes are opaque keys: the digester keeps, for every page the
//! engine holds, where that page stands in our hash chain, and counts stores
//! and removals by (hash, group, tier), because engines store and remove one
//! hash several times. Pages smaller than a block are grouped: a block is held
//! while all its pages are.
//!
//! It runs beside the engine (in the bridge) or in the router (ZMQ feed); token
//! ids never leave it. It holds no sequence numbers: see `sequence`.

use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHashSet};

use super::wire::{Batch, EngineHash, Event, ExtraKey, GroupKind, Parent, Removed, Stored};
use super::{Delta, Tier};
use crate::blocks::{BlockHash, Identity, Namespace, NamespaceId, next};
use crate::units::BlockSize;

/// Most pages that one target's view may hold: 8 M pages of one token are more
/// than any engine caches today. Stores beyond it are dropped and counted.
pub const MAX_PAGES: usize = 8 << 20;
/// Most namespaces in one view. Stores of further ones are dropped and counted.
pub const MAX_NAMESPACES: usize = 1 << 16;
/// Most KV-cache groups that are told apart; models have fewer than ten.
const MAX_GROUPS: usize = 256;

/// What happened to the events of a view since its digester was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Pages stored, repeats included.
    pub stored: u64,
    /// Pages removed, repeats included.
    pub removed: u64,
    /// Pages whose parent was not known, so that they could not be placed.
    pub orphans: u64,
    /// Removals and tier updates of pages that were not known.
    pub unknown: u64,
    /// Events that could not be read.
    pub rejected: u64,
    /// Pages dropped because a limit was reached or pages do not align.
    pub dropped: u64,
    /// Times everything was cleared.
    pub cleared: u64,
}

/// What the view can be trusted for, as far as its content tells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Quality {
    /// Tokens per page in the latest store; `None` before the first.
    pub page: Option<u32>,
    /// A page does not divide the block: nothing can be placed.
    pub page_misfit: bool,
    /// Groups other than main attention exist: a held block may not be usable.
    pub hybrid: bool,
    /// Tokens come as pairs (EAGLE): the engine recomputes one unit more.
    pub paired: bool,
    /// Stores were lost or could not be placed: the view claims too little.
    pub incomplete: bool,
    /// A removal was lost: the view may claim what is gone.
    pub lost_removal: bool,
}

/// The state of one target's cache, kept from its events.
#[derive(Debug)]
pub struct Digester {
    identity: Identity,
    size: BlockSize,
    pages: FxHashMap<EngineHash, Page>,
    /// Interned: pages hold the position in this list.
    namespaces: Vec<(NamespaceId, BlockHash)>,
    namespace_ids: FxHashMap<Namespace, u32>,
    /// Positions that no page uses any more.
    free_namespaces: Vec<u32>,
    /// How many complete chains of pages stand for a block, per tier.
    blocks: FxHashMap<(u32, BlockHash), [u32; 3]>,
    other_groups: FxHashSet<Option<u32>>,
    /// Groups taken for main attention; vLLM 0.20 and 0.21 do not name kinds.
    main_groups: FxHashSet<Option<u32>>,
    quality: Quality,
    counts: Counts,
}

/// Where one engine page stands in our chain, and who still refers to it.
#[derive(Debug)]
struct Page {
    place: Place,
    /// The page before it in the same block.
    before: Option<EngineHash>,
    /// Pages after it in the same block.
    after: Vec<EngineHash>,
    /// Empty for a page that is gone but still explains the ones after it.
    references: Vec<Reference>,
    /// The tier under which its block is counted because of this page.
    counted: Option<Tier>,
}

/// What a page's content is.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Place {
    namespace: u32,
    /// The block hash before the block that this page is in.
    base: BlockHash,
    /// What the page completes or leaves open.
    content: Content,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Content {
    /// The page ends a block.
    Completes(BlockHash),
    /// The block's tokens so far, this page included.
    Open(Box<[u32]>),
    /// Media or embeddings: no text block, nor is any block after it.
    Opaque,
}

#[derive(Debug)]
struct Reference {
    group: Option<u32>,
    tier: Tier,
    count: u32,
}

/// A page that cannot be placed: it would cross the end of its block, its
/// predecessor is gone, or the view is full.
struct Misplaced;

/// Builds deltas, joining neighbours of one chain.
#[derive(Default)]
struct Deltas(Vec<Delta>);

impl Digester {
    /// An empty view: blocks of `size` tokens, roots by `identity`.
    pub fn new(identity: Identity, size: BlockSize) -> Self {
        Self {
            identity,
            size,
            pages: FxHashMap::default(),
            namespaces: Vec::new(),
            namespace_ids: FxHashMap::default(),
            blocks: FxHashMap::default(),
            other_groups: FxHashSet::default(),
            main_groups: FxHashSet::default(),
            free_namespaces: Vec::new(),
            quality: Quality::default(),
            counts: Counts::default(),
        }
    }

    /// Applies one batch and returns what changed, in order.
    pub fn apply(&mut self, batch: &Batch) -> Vec<Delta> {
        let mut deltas = Deltas::default();
        for event in &batch.events {
            match event {
                Event::Stored(stored) => self.store(stored, &mut deltas),
                Event::Removed(removed) => self.remove(removed, &mut deltas),
                Event::Cleared => self.clear(&mut deltas),
                Event::Unknown => self.counts.unknown += 1,
                Event::Rejected { removal, .. } => {
                    self.counts.rejected += 1;
                    self.quality.incomplete = true;
                    self.quality.lost_removal |= removal;
                }
            }
        }
        deltas.0
    }

    /// Forgets everything, for a new life of the engine or a rebuild. Counts
    /// stay: they belong to the target, not to the life.
    pub fn reset(&mut self) {
        self.forget();
        self.quality = Quality { page: self.quality.page, ..Quality::default() };
        self.other_groups.clear();
        self.main_groups.clear();
    }

    /// Says that the stream's beginning was not seen.
    pub fn mark_incomplete(&mut self) {
        self.quality.incomplete = true;
    }

    /// What the view can be trusted for.
    pub const fn quality(&self) -> Quality {
        self.quality
    }

    /// What happened to events so far.
    pub const fn counts(&self) -> Counts {
        self.counts
    }

    /// Distinct blocks held, over all tiers and namespaces.
    pub fn block_count(&self) -> usize {
        self.blocks.len()
    }

    /// The whole current set as stores, parents before children where the
    /// parent is held; applying them to nothing gives this view. Sorted, so
    /// that equal views give equal snapshots. O(n log n).
    pub fn snapshot(&self) -> Vec<Delta> {
        let mut held: Vec<_> = self
            .pages
            .values()
            .filter_map(|page| match (&page.place.content, page.counted) {
                (Content::Completes(hash), Some(tier)) => {
                    let (namespace, _) = self.namespaces[page.place.namespace as usize];
                    Some((namespace, tier, page.place.base, *hash))
                }
                _ => None,
            })
            .collect();
        held.sort_unstable();
        held.dedup();
        chains(&held)
    }

    fn store(&mut self, event: &Stored, deltas: &mut Deltas) {
        self.counts.stored += event.hashes.len() as u64;
        self.quality.paired |= event.paired;
        if event.kind == GroupKind::Other {
            self.quality.hybrid = true;
            if self.other_groups.len() < MAX_GROUPS {
                self.other_groups.insert(event.group);
            }
            return;
        }
        if event.tokens.is_empty() {
            return self.update_tier(event, deltas);
        }
        if self.main_groups.len() < MAX_GROUPS {
            self.main_groups.insert(event.group);
        }
        self.quality.hybrid |= self.main_groups.len() > 1;
        self.quality.page = Some(event.page);
        if !self.size.holds_pages_of(event.page) {
            self.quality.page_misfit = true;
            return;
        }
        let Some((mut place, mut before)) = self.start(event) else { return };
        let chunks = event.tokens.chunks_exact(event.page as usize);
        for (index, (hash, tokens)) in event.hashes.iter().zip(chunks).enumerate() {
            let first_of_prompt = index == 0 && event.parent == Parent::Root;
            let opaque = event.extra_keys.get(index).is_some_and(|keys| {
                keys.iter().any(|key| !is_text_key(key, event.adapter.as_ref(), first_of_prompt))
            });
            let inner = matches!(place.content, Content::Open(_)).then_some(before).flatten();
            let next = self.place_after(&place, tokens, opaque);
            let added = next.and_then(|next| {
                self.add(*hash, next.clone(), inner, event, deltas)?;
                Ok(next)
            });
            let Ok(next) = added else {
                self.counts.dropped += (event.hashes.len() - index) as u64;
                self.quality.incomplete = true;
                return;
            };
            (place, before) = (next, Some(*hash));
        }
    }

    /// Where the first page of `event` is to be placed after; `None` if its
    /// parent is not known.
    fn start(&mut self, event: &Stored) -> Option<(Place, Option<EngineHash>)> {
        match event.parent {
            Parent::Root => {
                let Some(namespace) = self.intern(namespace_of(event)) else {
                    self.counts.dropped += event.hashes.len() as u64;
                    self.quality.incomplete = true;
                    return None;
                };
                let root = self.namespaces[namespace as usize].1;
                Some((Place { namespace, base: root, content: Content::Completes(root) }, None))
            }
            Parent::Page(parent) => match self.pages.get(&parent) {
                Some(page) => Some((page.place.clone(), Some(parent))),
                None => {
                    self.counts.orphans += event.hashes.len() as u64;
                    self.quality.incomplete = true;
                    None
                }
            },
        }
    }

    fn intern(&mut self, namespace: Namespace) -> Option<u32> {
        if let Some(known) = self.namespace_ids.get(&namespace) {
            return Some(*known);
        }
        if self.namespaces.len() >= MAX_NAMESPACES && self.free_namespaces.is_empty() {
            self.sweep_namespaces();
        }
        let entry = (self.identity.id(&namespace), self.identity.root(&namespace));
        let position = match self.free_namespaces.pop() {
            Some(position) => position,
            None if self.namespaces.len() >= MAX_NAMESPACES => return None,
            None => {
                self.namespaces.push(entry);
                self.namespaces.len() as u32 - 1
            }
        };
        self.namespaces[position as usize] = entry;
        self.namespace_ids.insert(namespace, position);
        Some(position)
    }

    /// Finds the namespaces that no page is in any more. O(pages), once per
    /// [`MAX_NAMESPACES`] new ones at most while there are unused ones.
    fn sweep_namespaces(&mut self) {
        let used: FxHashSet<u32> = self.pages.values().map(|page| page.place.namespace).collect();
        let free = &mut self.free_namespaces;
        self.namespace_ids.retain(|_, position| {
            let keep = used.contains(position);
            if !keep {
                free.push(*position);
            }
            keep
        });
    }

    /// The place of a page with `tokens` behind `place`, unless the page would
    /// cross the end of its block.
    fn place_after(&self, place: &Place, tokens: &[u32], opaque: bool) -> Result<Place, Misplaced> {
        let (base, open): (BlockHash, &[u32]) = match &place.content {
            Content::Completes(hash) => (*hash, &[]),
            Content::Open(tokens) => (place.base, tokens),
            Content::Opaque => return Ok(place.clone()),
        };
        let content = if opaque {
            Content::Opaque
        } else {
            let block = [open, tokens].concat();
            match block.len().cmp(&self.size.as_usize()) {
                std::cmp::Ordering::Less => Content::Open(block.into()),
                std::cmp::Ordering::Equal => Content::Completes(next(base, &block, &mut Vec::new())),
                std::cmp::Ordering::Greater => return Err(Misplaced),
            }
        };
        Ok(Place { namespace: place.namespace, base, content })
    }

    fn add(
        &mut self,
        hash: EngineHash,
        place: Place,
        before: Option<EngineHash>,
        event: &Stored,
        deltas: &mut Deltas,
    ) -> Result<(), Misplaced> {
        // An engine that reuses a hash for other content means the new content.
        if self.pages.get(&hash).is_some_and(|known| known.place != place) {
            self.evict_tree(hash, deltas);
        }
        // That can have taken the page before this one along, or be this one.
        if before.is_some_and(|before| !self.pages.contains_key(&before)) {
            return Err(Misplaced);
        }
        if !self.pages.contains_key(&hash) {
            if self.pages.len() >= MAX_PAGES {
                return Err(Misplaced);
            }
            if let Some(parent) = before.and_then(|before| self.pages.get_mut(&before)) {
                parent.after.push(hash);
            }
            let page = Page { place, before, after: Vec::new(), references: Vec::new(), counted: None };
            self.pages.insert(hash, page);
        }
        self.refer(hash, event, deltas);
        Ok(())
    }

    /// Forgets a page and the pages after it in the same block, which mean
    /// nothing without it.
    fn evict_tree(&mut self, root: EngineHash, deltas: &mut Deltas) {
        let mut tree = vec![root];
        let mut at = 0;
        while let Some(page) = tree.get(at).and_then(|hash| self.pages.get_mut(hash)) {
            page.references.clear();
            tree.extend_from_slice(&page.after);
            at += 1;
        }
        self.settle(root, deltas);
        let before = self.pages.get(&root).and_then(|page| page.before);
        tree.iter().for_each(|hash| drop(self.pages.remove(hash)));
        if let Some(before) = before {
            if let Some(page) = self.pages.get_mut(&before) {
                page.after.retain(|child| *child != root);
            }
            self.drop_unneeded(before);
        }
    }

    fn update_tier(&mut self, event: &Stored, deltas: &mut Deltas) {
        for hash in &event.hashes {
            if self.pages.contains_key(hash) {
                self.refer(*hash, event, deltas);
            } else {
                self.counts.unknown += 1;
                self.quality.incomplete = true;
            }
        }
    }

    fn refer(&mut self, hash: EngineHash, event: &Stored, deltas: &mut Deltas) {
        let (group, tier) = (event.group, event.tier);
        let Some(page) = self.pages.get_mut(&hash) else { return };
        match page.references.iter_mut().find(|known| known.group == group && known.tier == tier) {
            // vLLM repeats the stores of a session's hits on demand, without a
            // second copy behind them. Counting one too few claims too little.
            Some(_) if event.of_session => {}
            Some(known) => known.count = known.count.saturating_add(1),
            None => {
                page.references.push(Reference { group, tier, count: 1 });
                self.settle(hash, deltas);
            }
        }
    }

    fn remove(&mut self, event: &Removed, deltas: &mut Deltas) {
        self.counts.removed += event.hashes.len() as u64;
        if self.other_groups.contains(&event.group) && event.group.is_some() {
            return;
        }
        for hash in &event.hashes {
            let Some(page) = self.pages.get_mut(hash) else {
                self.counts.unknown += 1;
                continue;
            };
            // Connectors remove without naming the group that they stored.
            let found = page.references.iter().position(|known| {
                known.tier == event.tier && (known.group == event.group || event.group.is_none())
            });
            let Some(found) = found else {
                self.counts.unknown += 1;
                continue;
            };
            page.references[found].count -= 1;
            if page.references[found].count == 0 {
                page.references.swap_remove(found);
                self.settle(*hash, deltas);
                self.drop_unneeded(*hash);
            }
        }
    }

    fn clear(&mut self, deltas: &mut Deltas) {
        self.counts.cleared += 1;
        self.forget();
        // Nothing is held, and that is known: whatever was lost before is moot.
        self.quality.incomplete = false;
        self.quality.lost_removal = false;
        deltas.0.clear();
        deltas.0.push(Delta::Cleared);
    }

    fn forget(&mut self) {
        self.pages = FxHashMap::default();
        self.blocks = FxHashMap::default();
        self.namespaces.clear();
        self.namespace_ids.clear();
        self.free_namespaces.clear();
    }

    /// Recounts the blocks that `hash` is a page of.
    fn settle(&mut self, hash: EngineHash, deltas: &mut Deltas) {
        let mut open = vec![hash];
        while let Some(hash) = open.pop() {
            let Some(page) = self.pages.get(&hash) else { continue };
            match page.place.content {
                Content::Completes(_) => self.recount(hash, deltas),
                Content::Open(_) => open.extend_from_slice(&page.after),
                Content::Opaque => {}
            }
        }
    }

    /// Brings the count of the block that `last` completes up to date.
    fn recount(&mut self, last: EngineHash, deltas: &mut Deltas) {
        let tier = self.block_tier(last);
        let Some(page) = self.pages.get_mut(&last) else { return };
        let Content::Completes(block) = page.place.content else { return };
        let before = std::mem::replace(&mut page.counted, tier);
        if before == tier {
            return;
        }
        let (key, base) = ((page.place.namespace, block), page.place.base);
        let namespace = self.namespaces[key.0 as usize].0;
        let counts = self.blocks.entry(key).or_default();
        if let Some(tier) = tier {
            counts[tier.index()] += 1;
            if counts[tier.index()] == 1 {
                deltas.stored(namespace, base, block, tier);
            }
        }
        if let Some(tier) = before {
            counts[tier.index()] -= 1;
            if counts[tier.index()] == 0 {
                deltas.removed(namespace, block, tier);
            }
        }
        if *counts == [0; 3] {
            self.blocks.remove(&key);
        }
    }

    /// The slowest among the fastest tiers of the block's pages; `None` when a
    /// page is missing.
    fn block_tier(&self, last: EngineHash) -> Option<Tier> {
        let mut slowest = Tier::Device;
        let mut at = Some(last);
        while let Some(hash) = at {
            let page = self.pages.get(&hash)?;
            slowest = slowest.max(page.references.iter().map(|known| known.tier).min()?);
            at = page.before;
        }
        Some(slowest)
    }

    /// Frees a page without references, and pages before it that only stayed
    /// to explain it.
    fn drop_unneeded(&mut self, hash: EngineHash) {
        let mut at = Some(hash);
        while let Some(hash) = at {
            let gone =
                self.pages.get(&hash).is_some_and(|page| page.references.is_empty() && page.after.is_empty());
            if !gone {
                return;
            }
            at = self.pages.remove(&hash).and_then(|page| page.before);
            if let Some(before) = at.and_then(|before| self.pages.get_mut(&before)) {
                before.after.retain(|child| *child != hash);
            }
        }
    }
}

/// Whether `key` leaves its page a text page: the adapter's name anywhere, a
/// salt on the first page of a prompt. Other plain strings are what vLLM before
/// 0.20 sent for media.
fn is_text_key(key: &ExtraKey, adapter: Option<&Arc<str>>, first_of_prompt: bool) -> bool {
    matches!(key, ExtraKey::Text(text) if first_of_prompt || adapter == Some(text))
}

/// The namespace of a store that begins a prompt: its adapter, and the salt
/// from its own field or from the first page's extra keys.
fn namespace_of(event: &Stored) -> Namespace {
    let adapter = event.adapter.clone();
    let mut texts = event.extra_keys.first().into_iter().flatten().filter_map(|key| match key {
        ExtraKey::Text(text) => Some(text),
        ExtraKey::Media | ExtraKey::Opaque => None,
    });
    let mut adapter_seen = adapter.is_none();
    let from_keys = texts.find(|text| {
        // The adapter's name comes once; a salt may be spelt like it.
        let is_adapter = !adapter_seen && adapter.as_ref() == Some(*text);
        adapter_seen |= is_adapter;
        !is_adapter
    });
    Namespace { salt: event.salt.clone().or_else(|| from_keys.cloned()), adapter }
}

/// Joins `held`, sorted blocks of (namespace, tier, base, hash), into stores
/// that follow chains.
fn chains(held: &[(NamespaceId, Tier, BlockHash, BlockHash)]) -> Vec<Delta> {
    let mut deltas = Deltas::default();
    let mut children: FxHashMap<(NamespaceId, Tier, BlockHash), Vec<BlockHash>> = FxHashMap::default();
    let mut present = FxHashSet::default();
    for (namespace, tier, base, hash) in held {
        children.entry((*namespace, *tier, *base)).or_default().push(*hash);
        present.insert((*namespace, *tier, *hash));
    }
    for (namespace, tier, base, hash) in held {
        // Only heads begin a walk; everything else hangs below one.
        if present.contains(&(*namespace, *tier, *base)) {
            continue;
        }
        let mut open = vec![(*base, *hash)];
        while let Some((base, hash)) = open.pop() {
            deltas.stored(*namespace, base, hash, *tier);
            let below = children.get(&(*namespace, *tier, hash)).into_iter().flatten();
            open.extend(below.map(|child| (hash, *child)));
        }
    }
    deltas.0
}

impl Deltas {
    fn stored(&mut self, namespace: NamespaceId, base: BlockHash, block: BlockHash, tier: Tier) {
        if let Some(Delta::Stored { namespace: n, hashes, tier: t, .. }) = self.0.last_mut()
            && (*n, *t) == (namespace, tier)
            && hashes.last() == Some(&base)
        {
            hashes.push(block);
            return;
        }
        self.0.push(Delta::Stored { namespace, parent: base, hashes: vec![block], tier });
    }

    fn removed(&mut self, namespace: NamespaceId, block: BlockHash, tier: Tier) {
        if let Some(Delta::Removed { namespace: n, hashes, tier: t }) = self.0.last_mut()
            && (*n, *t) == (namespace, tier)
        {
            hashes.push(block);
            return;
        }
        self.0.push(Delta::Removed { namespace, hashes: vec![block], tier });
    }
}

#[cfg(test)]
#[path = "digest_tests.rs"]
mod tests;
