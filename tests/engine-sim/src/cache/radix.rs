//! SGLang's radix tree: nodes of whole pages, locked by the requests that use them, evicted
//! leaf by leaf in order of last use. Pages outside the tree are private to a request.
//!
//! Pages enter the tree after each prefill step and when a request ends. A page is told when
//! it enters and when it leaves; `extra_key` separates trees but shows nowhere.

use std::collections::HashMap;

use super::{CacheKey, PrefixCache, RequestId, Started, Usage};
use crate::config::Wire;
use crate::events::{Event, EventHash, Removed, Stored, TokenIds};
use crate::hash::{ChainRule, Digest, Namespace, sglang_event_hash};

type NodeId = u64;

pub(super) struct RadixTree {
    wire: Wire,
    page_size: usize,
    rule: ChainRule,
    pages: usize,
    free_pages: usize,
    /// Pages in nodes, and those of them in locked nodes.
    tree_pages: usize,
    locked_pages: usize,
    nodes: HashMap<NodeId, Node>,
    roots: HashMap<Namespace, NodeId>,
    next_node: NodeId,
    /// Moments of use, for the order of eviction.
    clock: u64,
    holders: HashMap<RequestId, Holder>,
    events: Vec<Pending>,
}

struct Node {
    /// None at a root.
    parent: Option<NodeId>,
    children: HashMap<Digest, NodeId>,
    digests: Vec<Digest>,
    locks: u32,
    used: u64,
    namespace: Namespace,
}

/// What a request holds.
struct Holder {
    key: CacheKey,
    chain: Vec<Digest>,
    /// The locked node; none until the request has started.
    node: Option<NodeId>,
    /// Leading pages that are in the tree.
    in_tree: usize,
    /// All pages, in the tree or private.
    reserved: usize,
}

/// An event with what decides whether the next one may be merged into it.
struct Pending {
    extra_key: Option<String>,
    event: Event,
}

impl RadixTree {
    pub(super) fn new(wire: Wire, page_size: usize, pages: usize, rule: ChainRule) -> Self {
        Self {
            wire,
            page_size,
            rule,
            pages,
            free_pages: pages,
            tree_pages: 0,
            locked_pages: 0,
            nodes: HashMap::new(),
            roots: HashMap::new(),
            next_node: 0,
            clock: 0,
            holders: HashMap::new(),
            events: Vec::new(),
        }
    }

    fn root(&mut self, namespace: &Namespace) -> NodeId {
        if let Some(root) = self.roots.get(namespace) {
            return *root;
        }
        let root = self.add(None, Vec::new(), namespace.clone());
        self.roots.insert(namespace.clone(), root);
        root
    }

    fn add(&mut self, parent: Option<NodeId>, digests: Vec<Digest>, namespace: Namespace) -> NodeId {
        let id = self.next_node;
        self.next_node += 1;
        let (first, used) = (digests.first().copied(), self.clock);
        let node = Node { parent, children: HashMap::new(), digests, locks: 0, used, namespace };
        self.nodes.insert(id, node);
        if let (Some(parent), Some(first)) = (parent, first) {
            self.node_mut(parent).children.insert(first, id);
        }
        id
    }

    fn node(&self, id: NodeId) -> &Node {
        self.nodes.get(&id).expect("links point to nodes that exist")
    }

    fn node_mut(&mut self, id: NodeId) -> &mut Node {
        self.nodes.get_mut(&id).expect("links point to nodes that exist")
    }

    /// The node that ends the longest prefix of `chain`, and its pages. Splits a node whose
    /// pages agree only in part, and marks the path as used.
    fn walk(&mut self, root: NodeId, chain: &[Digest]) -> (NodeId, usize) {
        self.clock += 1;
        let (mut at, mut pages) = (root, 0);
        while let Some(child) = chain.get(pages).and_then(|digest| self.node(at).children.get(digest)) {
            let child = *child;
            let digests = &self.node(child).digests;
            let agreeing = digests.iter().zip(&chain[pages..]).take_while(|(a, b)| a == b).count();
            at = if agreeing < digests.len() { self.split(child, agreeing) } else { child };
            self.node_mut(at).used = self.clock;
            pages += agreeing;
        }
        (at, pages)
    }

    /// Puts the first `pages` pages of a node into a new parent of it.
    fn split(&mut self, id: NodeId, pages: usize) -> NodeId {
        let node = self.node_mut(id);
        let tail = node.digests.split_off(pages);
        let head = std::mem::replace(&mut node.digests, tail);
        let (parent, locks) = (node.parent, node.locks);
        let (first, namespace) = (node.digests[0], node.namespace.clone());
        let upper = self.add(parent, head, namespace);
        let upper_node = self.node_mut(upper);
        upper_node.locks = locks;
        upper_node.children.insert(first, id);
        self.node_mut(id).parent = Some(upper);
        upper
    }

    fn lock(&mut self, id: NodeId) {
        let mut next = Some(id);
        while let Some(id) = next {
            let node = self.node_mut(id);
            node.locks += 1;
            next = node.parent;
            if node.locks == 1 {
                self.locked_pages += self.node(id).digests.len();
            }
        }
    }

    fn unlock(&mut self, id: NodeId) {
        let mut next = Some(id);
        while let Some(id) = next {
            let node = self.node_mut(id);
            node.locks -= 1;
            next = node.parent;
            if node.locks == 0 {
                self.locked_pages -= self.node(id).digests.len();
            }
        }
    }

    /// Puts the first `pages` pages of a request into the tree and locks them.
    fn insert(&mut self, holder: &mut Holder, tokens: &[u32], pages: usize) {
        self.rule.extend(&mut holder.chain, &tokens[..pages * self.page_size], &holder.key.namespace);
        let root = self.root(&holder.key.namespace);
        let (mut node, present) = self.walk(root, &holder.chain[..pages]);
        if present < pages {
            let digests = holder.chain[present..pages].to_vec();
            node = self.add(Some(node), digests, holder.key.namespace.clone());
            self.tree_pages += pages - present;
            self.tell_stored(holder, tokens, present, pages);
        }
        // Pages that another request had stored meanwhile are duplicates of the tree's.
        self.free_pages += present.saturating_sub(holder.in_tree);
        holder.in_tree = pages;
        self.lock(node);
        if let Some(before) = holder.node.replace(node) {
            self.unlock(before);
        }
    }

    /// Evicts leaves in order of last use until `tokens` tokens are free, or nothing is left.
    fn evict(&mut self, tokens: usize) {
        let mut evicted = 0;
        while evicted * self.page_size < tokens {
            let leaves = self
                .nodes
                .iter()
                .filter(|(_, node)| node.locks == 0 && node.children.is_empty() && node.parent.is_some());
            let Some(leaf) = leaves.min_by_key(|(id, node)| (node.used, **id)).map(|(id, _)| *id) else {
                return;
            };
            let Some(node) = self.nodes.remove(&leaf) else { return };
            evicted += node.digests.len();
            self.free_pages += node.digests.len();
            self.tree_pages -= node.digests.len();
            if let (Some(parent), Some(first)) = (node.parent, node.digests.first()) {
                self.node_mut(parent).children.remove(first);
                self.drop_empty_root(parent);
            }
            self.tell_removed(&node);
        }
    }

    fn drop_empty_root(&mut self, id: NodeId) {
        let node = self.node(id);
        let empty = node.parent.is_none() && node.children.is_empty() && node.locks == 0;
        if empty && let Some(node) = self.nodes.remove(&id) {
            self.roots.remove(&node.namespace);
        }
    }

    /// Makes room for pages up to `upto` tokens; `tokens` is what the engine asks eviction for.
    fn reserve(&mut self, holder: &mut Holder, upto: usize, tokens: usize) -> bool {
        let needed = upto.div_ceil(self.page_size).saturating_sub(holder.reserved);
        if needed > self.free_pages + self.tree_pages - self.locked_pages {
            return false;
        }
        let free_tokens = self.free_pages * self.page_size;
        if free_tokens < tokens {
            self.evict(tokens - free_tokens);
        }
        self.free_pages -= needed;
        holder.reserved += needed;
        true
    }

    fn start_holder(&mut self, holder: &mut Holder, tokens: &[u32], most: usize) -> Option<Started> {
        self.rule.extend(&mut holder.chain, tokens, &holder.key.namespace);
        let reusable = tokens.len().saturating_sub(1) / self.page_size;
        let root = self.root(&holder.key.namespace);
        let (node, pages) = self.walk(root, &holder.chain[..reusable]);
        self.lock(node);
        (holder.in_tree, holder.reserved) = (pages, pages);
        let hit = pages * self.page_size;
        let scheduled = most.min(tokens.len() - hit);
        // The engine asks for one page more than the tokens, since they may start inside one.
        if !self.reserve(holder, hit + scheduled, scheduled + self.page_size) {
            self.unlock(node);
            self.drop_empty_root(root);
            (holder.in_tree, holder.reserved) = (0, 0);
            return None;
        }
        holder.node = Some(node);
        Some(Started { hit, scheduled })
    }

    fn tell_stored(&mut self, holder: &Holder, tokens: &[u32], from: usize, to: usize) {
        let namespace = &holder.key.namespace;
        let step = if self.wire == Wire::Sglang0518 { 1 } else { to - from };
        for start in (from..to).step_by(step) {
            let end = start + step;
            let hash = |digest| EventHash::I64(sglang_event_hash(digest, namespace, self.wire));
            let event = Event::Stored(Box::new(Stored {
                block_hashes: holder.chain[start..end].iter().map(hash).collect(),
                parent_block_hash: start.checked_sub(1).map(|parent| hash(&holder.chain[parent])),
                token_ids: TokenIds::Plain(tokens[start * self.page_size..end * self.page_size].to_vec()),
                block_size: self.page_size as u64,
                medium: Some("GPU".to_owned()),
                lora_name: namespace.lora_name.clone(),
                session_id: holder.key.session_id.clone(),
                cache_salt: namespace.cache_salt.clone(),
                ..Stored::default()
            }));
            self.events.push(Pending { extra_key: namespace.extra_key.clone(), event });
        }
    }

    fn tell_removed(&mut self, node: &Node) {
        let extra_key = &node.namespace.extra_key;
        for digest in &node.digests {
            let hash = EventHash::I64(sglang_event_hash(digest, &node.namespace, self.wire));
            if self.wire == Wire::Sglang0523
                && let Some(Pending { extra_key: last, event: Event::Removed(removed) }) =
                    self.events.last_mut()
                && last == extra_key
            {
                removed.block_hashes.push(hash);
                continue;
            }
            let medium = Some("GPU".to_owned());
            let event = Event::Removed(Removed { block_hashes: vec![hash], medium, group_idx: None });
            self.events.push(Pending { extra_key: extra_key.clone(), event });
        }
    }
}

impl PrefixCache for RadixTree {
    fn start(&mut self, id: RequestId, key: &CacheKey, tokens: &[u32], most: usize) -> Option<Started> {
        let mut holder = self.holders.remove(&id).unwrap_or_else(|| Holder {
            key: key.clone(),
            chain: Vec::new(),
            node: None,
            in_tree: 0,
            reserved: 0,
        });
        let started = self.start_holder(&mut holder, tokens, most);
        // A request that has to wait keeps its chain, so that trying again is cheap.
        self.holders.insert(id, holder);
        started
    }

    fn grow(&mut self, id: RequestId, _tokens: &[u32], upto: usize) -> bool {
        let Some(mut holder) = self.holders.remove(&id) else { return false };
        let missing = upto.saturating_sub(holder.reserved * self.page_size);
        let tokens = missing.div_ceil(self.page_size) * self.page_size;
        let fits = self.reserve(&mut holder, upto, tokens);
        self.holders.insert(id, holder);
        fits
    }

    fn prefilled(&mut self, id: RequestId, tokens: &[u32], upto: usize) {
        let Some(mut holder) = self.holders.remove(&id) else { return };
        if holder.node.is_some() {
            self.insert(&mut holder, tokens, upto / self.page_size);
        }
        self.holders.insert(id, holder);
    }

    fn release(&mut self, id: RequestId, tokens: &[u32], computed: usize) {
        let Some(mut holder) = self.holders.remove(&id) else { return };
        if holder.node.is_none() {
            return;
        }
        let pages = (computed / self.page_size).max(holder.in_tree);
        self.insert(&mut holder, tokens, pages);
        self.free_pages += holder.reserved - holder.in_tree;
        if let Some(node) = holder.node {
            self.unlock(node);
        }
    }

    fn clear(&mut self) -> bool {
        if self.holders.values().any(|holder| holder.node.is_some()) {
            return false;
        }
        self.nodes.clear();
        self.roots.clear();
        self.free_pages = self.pages;
        (self.tree_pages, self.locked_pages) = (0, 0);
        self.events.push(Pending { extra_key: None, event: Event::Cleared });
        true
    }

    fn take_events(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events).into_iter().map(|pending| pending.event).collect()
    }

    fn usage(&self) -> Usage {
        let pinned = self.pages - self.free_pages - (self.tree_pages - self.locked_pages);
        Usage { capacity: self.pages, pinned, cached: self.tree_pages }
    }
}
