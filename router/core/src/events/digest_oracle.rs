//! The oracle of `digest`'s tests.
//!
//! It keeps what the digester avoids: for every page that the engine named, the whole prefix from the root and one
//! entry per copy. What is held follows from that list alone, by hashing whole prefixes with `blocks::chain`. A
//! hash stands for one content only; hashes that are reused are tested by name.

use super::View;
use crate::blocks::{BlockHash, Identity, Namespace, chain};
use crate::events::Tier;
use crate::events::wire::{EngineHash, Event, ExtraKey, GroupKind, Parent, Removed, Stored};
use crate::units::BlockSize;

/// What a digester should hold.
pub(super) struct Oracle {
    size: BlockSize,
    page: usize,
    pub(super) pages: Vec<OraclePage>,
    pub(super) orphans: u64,
}

/// One page that the engine named.
pub(super) struct OraclePage {
    pub(super) hash: EngineHash,
    namespace: Namespace,
    /// All tokens from the root, this page's included.
    prefix: Vec<u32>,
    /// Group and tier of every copy that was stored and not removed.
    pub(super) copies: Vec<(Option<u32>, Tier)>,
}

impl Oracle {
    pub(super) fn new(size: u32) -> Self {
        Self { size: BlockSize::new(size).expect("not zero"), page: 1, pages: Vec::new(), orphans: 0 }
    }

    pub(super) fn apply(&mut self, event: &Event) {
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
    pub(super) fn report(&mut self, stored: &Stored) {
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
        let size = self.size.as_usize();
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

    pub(super) fn held(&self) -> View {
        let mut view = View::new();
        let identity = Identity::default();
        for page in self.pages.iter().filter(|page| page.prefix.len().is_multiple_of(self.size.as_usize())) {
            let length = page.prefix.len();
            let ends = (length - self.size.as_usize() + self.page..=length).step_by(self.page);
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
pub(super) fn block_of(
    identity: &Identity,
    namespace: &Namespace,
    size: BlockSize,
    prefix: &[u32],
) -> (BlockHash, BlockHash) {
    let root = identity.root(namespace);
    let hashes = [vec![root], chain(root, size, prefix)].concat();
    (hashes[hashes.len() - 1], hashes[hashes.len() - 2])
}
