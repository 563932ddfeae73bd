//! The prompts that are booked on one target, as one tree of prefixes.
//!
//! Chained hashes make every prompt a path: two prompts share a block only
//! together with all blocks before it, and equal hashes at one place mean equal
//! paths up to there. So a node is a run of blocks between two branches, kept
//! as a slice of the prompt that brought it, and booking a prompt of 8,000
//! blocks that shares its prefix costs a few look-ups, not 8,000.
//!
//! Each prompt is counted twice, by [`Kind`]: as active while its lease lives,
//! and as predicted while its blocks are expected to become hits.

use std::sync::Arc;

use rustc_hash::FxHashMap;

use crate::blocks::{BlockHash, NamespaceId};

/// As what a prompt counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A live lease.
    Active,
    /// Blocks that will soon be hits.
    Predicted,
}

/// The last node of a booked prompt; `None` for a prompt without full blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct End(Option<u32>);

/// A multiset of prompts.
#[derive(Debug, Default)]
pub struct Prefixes {
    nodes: Vec<Node>,
    free: Vec<u32>,
    /// First nodes, by namespace and first block.
    roots: FxHashMap<(NamespaceId, BlockHash), u32>,
    /// Distinct active blocks.
    active_blocks: u64,
}

#[derive(Debug)]
struct Node {
    /// The prompt that brought these blocks, and where they stand in it.
    prompt: Arc<[BlockHash]>,
    from: usize,
    to: usize,
    namespace: NamespaceId,
    parent: Option<u32>,
    /// By their first block.
    children: Vec<u32>,
    active: u32,
    predicted: u32,
}

impl Node {
    fn run(&self) -> &[BlockHash] {
        self.prompt.get(self.from..self.to).unwrap_or_default()
    }

    fn first(&self) -> Option<BlockHash> {
        self.run().first().copied()
    }

    const fn count(&self, kind: Kind) -> u32 {
        match kind {
            Kind::Active => self.active,
            Kind::Predicted => self.predicted,
        }
    }

    fn count_mut(&mut self, kind: Kind) -> &mut u32 {
        match kind {
            Kind::Active => &mut self.active,
            Kind::Predicted => &mut self.predicted,
        }
    }

    /// How many leading blocks of the run equal `rest`. A block names all before
    /// it, so one equal block vouches for the run up to it.
    fn shared(&self, rest: &[BlockHash]) -> usize {
        let run = self.run();
        let both = run.len().min(rest.len());
        if both > 0 && run[both - 1] == rest[both - 1] {
            return both;
        }
        let (mut equal, mut differs) = (0, both);
        while equal < differs {
            let middle = equal + (differs - equal) / 2;
            if run[middle] == rest[middle] { equal = middle + 1 } else { differs = middle }
        }
        equal
    }
}

impl Prefixes {
    /// Books `prompt` once as each kind.
    pub fn insert(&mut self, namespace: NamespaceId, prompt: &Arc<[BlockHash]>) -> End {
        let Some(first) = prompt.first() else { return End(None) };
        let mut at = self.roots.get(&(namespace, *first)).copied();
        let (mut parent, mut depth) = (None, 0);
        while let Some(node) = at {
            let shared = self.nodes[node as usize].shared(&prompt[depth..]);
            depth += shared;
            let node =
                if shared < self.nodes[node as usize].run().len() { self.split(node, shared) } else { node };
            parent = Some(node);
            at = prompt.get(depth).and_then(|next| self.child(node, *next));
            if depth == prompt.len() {
                break;
            }
        }
        let end =
            if depth == prompt.len() { parent } else { Some(self.grow(namespace, parent, prompt, depth)) };
        self.count(end, Kind::Active);
        self.count(end, Kind::Predicted);
        End(end)
    }

    /// Takes back one count of a booked prompt. Exactly once per kind.
    pub fn remove(&mut self, end: End, kind: Kind) {
        let mut at = end.0;
        while let Some(id) = at {
            let node = &mut self.nodes[id as usize];
            let blocks = node.run().len() as u64;
            let parent = node.parent;
            let count = node.count_mut(kind);
            *count = count.saturating_sub(1);
            if *count == 0 && kind == Kind::Active {
                self.active_blocks -= blocks;
            }
            let node = &self.nodes[id as usize];
            if node.active == 0 && node.predicted == 0 {
                self.prune(id);
            }
            at = parent;
        }
    }

    /// How many leading blocks of `prompt` stand in some prompt of `kind`.
    pub fn shared(&self, namespace: NamespaceId, prompt: &[BlockHash], kind: Kind) -> u64 {
        let mut at = prompt.first().and_then(|first| self.roots.get(&(namespace, *first)).copied());
        let mut depth = 0;
        while let Some(id) = at {
            let node = &self.nodes[id as usize];
            if node.count(kind) == 0 {
                break;
            }
            let shared = node.shared(&prompt[depth..]);
            depth += shared;
            if shared < node.run().len() {
                break;
            }
            at = prompt.get(depth).and_then(|next| self.child(id, *next));
        }
        depth as u64
    }

    /// Distinct blocks of active prompts.
    pub const fn active_blocks(&self) -> u64 {
        self.active_blocks
    }

    fn child(&self, node: u32, first: BlockHash) -> Option<u32> {
        let children = &self.nodes[node as usize].children;
        children.iter().copied().find(|child| self.nodes[*child as usize].first() == Some(first))
    }

    fn count(&mut self, end: Option<u32>, kind: Kind) {
        let mut at = end;
        while let Some(id) = at {
            let node = &mut self.nodes[id as usize];
            *node.count_mut(kind) += 1;
            if node.active == 1 && kind == Kind::Active {
                self.active_blocks += node.run().len() as u64;
            }
            at = node.parent;
        }
    }

    /// Adds `prompt[from..]` below `parent`.
    fn grow(
        &mut self,
        namespace: NamespaceId,
        parent: Option<u32>,
        prompt: &Arc<[BlockHash]>,
        from: usize,
    ) -> u32 {
        let prompt = Arc::clone(prompt);
        let (first, to) = (prompt[from], prompt.len());
        let node =
            Node { prompt, from, to, namespace, parent, children: Vec::new(), active: 0, predicted: 0 };
        let id = self.store(node);
        match parent {
            Some(parent) => self.nodes[parent as usize].children.push(id),
            None => drop(self.roots.insert((namespace, first), id)),
        }
        id
    }

    /// Cuts a node after `at` blocks and returns the new upper part. The lower
    /// part keeps its id: prompts that end there still do.
    fn split(&mut self, id: u32, at: usize) -> u32 {
        let lower = &mut self.nodes[id as usize];
        let upper = Node {
            prompt: Arc::clone(&lower.prompt),
            from: lower.from,
            to: lower.from + at,
            namespace: lower.namespace,
            parent: lower.parent,
            children: vec![id],
            active: lower.active,
            predicted: lower.predicted,
        };
        lower.from += at;
        let (parent, first, namespace) = (upper.parent, upper.first(), upper.namespace);
        let above = self.store(upper);
        self.nodes[id as usize].parent = Some(above);
        match (parent, first) {
            (Some(parent), _) => {
                let children = &mut self.nodes[parent as usize].children;
                children.iter_mut().filter(|child| **child == id).for_each(|child| *child = above);
            }
            (None, Some(first)) => drop(self.roots.insert((namespace, first), above)),
            (None, None) => {}
        }
        above
    }

    fn store(&mut self, node: Node) -> u32 {
        match self.free.pop() {
            Some(id) => {
                self.nodes[id as usize] = node;
                id
            }
            None => {
                self.nodes.push(node);
                self.nodes.len() as u32 - 1
            }
        }
    }

    /// Frees a node that nobody counts; its children are gone already, because
    /// whoever counts a child counts its parents too.
    fn prune(&mut self, id: u32) {
        let node = &mut self.nodes[id as usize];
        let (parent, namespace, first) = (node.parent, node.namespace, node.first());
        // Lets go of the prompt's memory.
        node.prompt = Arc::from([]);
        node.children = Vec::new();
        (node.from, node.to) = (0, 0);
        match (parent, first) {
            (Some(parent), _) => self.nodes[parent as usize].children.retain(|child| *child != id),
            (None, Some(first)) => drop(self.roots.remove(&(namespace, first))),
            (None, None) => {}
        }
        self.free.push(id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blocks::chain;
    use crate::units::BlockSize;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    /// A real chain over small tokens, so that prompts share prefixes often.
    fn prompt(tokens: &[u32]) -> Arc<[BlockHash]> {
        chain(BlockHash(0), BlockSize::new(1).expect("not zero"), tokens).into()
    }

    #[derive(Clone, Debug)]
    enum Action {
        Book(u8, Vec<u32>),
        Release(usize, bool),
    }

    fn action() -> impl Strategy<Value = Action> {
        prop_oneof![
            3 => (0u8..2, prop::collection::vec(0u32..2, 0..10)).prop_map(|(space, tokens)| Action::Book(space, tokens)),
            2 => (any::<usize>(), any::<bool>()).prop_map(|(which, active)| Action::Release(which, active)),
        ]
    }

    /// A booked prompt and the kinds that it still counts as.
    type Booked = (NamespaceId, Arc<[BlockHash]>, End, [bool; 2]);

    /// The oracle: the union of the prompts of one kind, as a set of blocks.
    fn union(live: &[Booked], kind: usize) -> BTreeSet<(u128, u64)> {
        let counted = live.iter().filter(|(.., kinds)| kinds[kind]);
        counted.flat_map(|(space, blocks, ..)| blocks.iter().map(|block| (space.0, block.0))).collect()
    }

    proptest! {
        #[test]
        fn agrees_with_sets_of_blocks(
            actions in prop::collection::vec(action(), 1..60), query in prop::collection::vec(0u32..2, 0..12)
        ) {
            let mut prefixes = Prefixes::default();
            let mut live: Vec<Booked> = Vec::new();
            let query = prompt(&query);
            for action in actions {
                match action {
                    Action::Book(space, tokens) => {
                        let (space, blocks) = (NamespaceId(space.into()), prompt(&tokens));
                        let end = prefixes.insert(space, &blocks);
                        live.push((space, blocks, end, [true, true]));
                    }
                    Action::Release(which, active) if !live.is_empty() => {
                        let which = which % live.len();
                        let (kind, at) = if active { (Kind::Active, 0) } else { (Kind::Predicted, 1) };
                        if std::mem::take(&mut live[which].3[at]) {
                            prefixes.remove(live[which].2, kind);
                        }
                        live.retain(|(.., kinds)| kinds[0] || kinds[1]);
                    }
                    Action::Release(..) => {}
                }
                let sets = [union(&live, 0), union(&live, 1)];
                prop_assert_eq!(prefixes.active_blocks(), sets[0].len() as u64);
                for (at, kind) in [Kind::Active, Kind::Predicted].into_iter().enumerate() {
                    for space in 0u128..2 {
                        let expected = query.iter().take_while(|block| sets[at].contains(&(space, block.0))).count();
                        prop_assert_eq!(prefixes.shared(NamespaceId(space), &query, kind), expected as u64);
                    }
                }
            }
            for (.., end, kinds) in &live {
                if kinds[0] { prefixes.remove(*end, Kind::Active); }
                if kinds[1] { prefixes.remove(*end, Kind::Predicted); }
            }
            prop_assert!(prefixes.roots.is_empty() && prefixes.active_blocks() == 0);
            prop_assert_eq!(prefixes.free.len(), prefixes.nodes.len(), "every node is free again");
        }
    }
}
