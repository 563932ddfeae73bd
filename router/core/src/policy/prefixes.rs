//! The prompts that are booked, as one tree of prefixes for all targets.
//!
//! Chained hashes make every prompt a path: two prompts share a block only
//! together with all blocks before it, and equal hashes at one place mean equal
//! paths up to there. So a node is a run of blocks between two branches, kept
//! as a slice of the prompt that brought it, and booking a prompt of 8,000
//! blocks that shares its prefix costs a few look-ups, not 8,000.
//!
//! A node counts its prompts for every [`Holder`] apart, so that one walk along
//! a prompt tells what each of a thousand targets shares with it. Each prompt is
//! counted twice, by [`Kind`]: as active while its lease lives, and as predicted
//! while its blocks are expected to become hits.

use std::sync::Arc;

use rustc_hash::FxHashMap;
use smallvec::{SmallVec, smallvec};

use crate::blocks::{BlockHash, NamespaceId};

/// As what a prompt counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A live lease.
    Active,
    /// Blocks that will soon be hits.
    Predicted,
    /// Both at once.
    Both,
}

impl Kind {
    const fn is_active(self) -> bool {
        matches!(self, Self::Active | Self::Both)
    }

    const fn is_predicted(self) -> bool {
        matches!(self, Self::Predicted | Self::Both)
    }
}

/// A target's number among those that prompts are booked on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Holder(pub u32);

/// How many leading blocks of a prompt stand in prompts of one holder.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Depth {
    /// In active ones.
    pub active: u32,
    /// In predicted ones.
    pub predicted: u32,
}

impl Depth {
    /// A few bits that differ where a depth or `more` does.
    #[inline]
    pub(super) const fn mixed(self, more: u32) -> u32 {
        let sum = self.active.wrapping_mul(0x9e37_79b1) ^ self.predicted.wrapping_mul(0x85eb_ca6b);
        (sum ^ more.wrapping_mul(0xc2b2_ae35)) >> 26
    }
}

/// The last node of a booked prompt; `None` for a prompt without full blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct End(Option<u32>);

/// How far a prompt goes along others, until nodes come or go.
#[derive(Clone, Copy, Debug, Default)]
pub struct Walk {
    /// Of the tree that it was made in.
    version: u64,
    /// The last node that it passes into.
    node: Option<u32>,
    /// How many blocks of that node it shares, where it leaves the node in the middle.
    leaves_at: Option<usize>,
    /// How many of its blocks it shares with others.
    depth: usize,
}

/// What became of a prompt's removal.
#[derive(Debug, Default)]
pub struct Gone {
    /// Blocks that stand in no active prompt of the holder any more.
    pub blocks: u64,
    /// The prompt, where nobody else has it: to be dropped outside of any lock.
    pub prompt: Option<Arc<[BlockHash]>>,
}

/// A multiset of prompts.
#[derive(Debug, Default)]
pub struct Prefixes {
    nodes: Vec<Node>,
    free: Vec<u32>,
    /// How often nodes have come or gone.
    version: u64,
    /// First nodes, by namespace and first block.
    roots: FxHashMap<(NamespaceId, BlockHash), u32>,
}

/// How often one holder's prompts pass through a node.
#[derive(Clone, Copy, Debug)]
struct Holding {
    holder: Holder,
    active: u32,
    predicted: u32,
}

/// Most have a holder and no child, and then this is all there is to one: memory that
/// goes from core to core with the ledger's lock.
#[derive(Debug, Default)]
struct Node {
    /// The prompt that brought these blocks, and where they stand in it.
    prompt: Arc<[BlockHash]>,
    from: usize,
    to: usize,
    namespace: NamespaceId,
    parent: Option<u32>,
    children: Children,
    /// Sorted by holder; none counts nothing.
    holdings: SmallVec<[Holding; 2]>,
}

/// The nodes behind one. Most have few, which are looked through; a system prompt of
/// ten thousand conversations has as many.
#[derive(Debug)]
enum Children {
    Few(SmallVec<[u32; 4]>),
    /// By their first block.
    Many(Box<FxHashMap<BlockHash, u32>>),
}

/// Most children that are looked through.
const FEW: usize = 16;

impl Default for Children {
    fn default() -> Self {
        Self::Few(SmallVec::new())
    }
}

impl Node {
    fn run(&self) -> &[BlockHash] {
        self.prompt.get(self.from..self.to).unwrap_or_default()
    }

    fn first(&self) -> Option<BlockHash> {
        self.run().first().copied()
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
    /// Books `prompt` for `holder`, once as each kind, where its `walk` says that it
    /// belongs, if that still holds. Returns also how many of its blocks no active prompt of the holder had.
    pub fn insert(
        &mut self,
        namespace: NamespaceId,
        prompt: &Arc<[BlockHash]>,
        holder: Holder,
        walk: Walk,
    ) -> (End, u64) {
        let current = walk.version == self.version;
        let Walk { node, leaves_at, depth, .. } = if current { walk } else { self.follow(namespace, prompt) };
        let parent = match (node, leaves_at) {
            (Some(node), Some(at)) => Some(self.split(node, at)),
            _ => node,
        };
        let whole = depth == prompt.len();
        let end = if whole { parent } else { Some(self.grow(namespace, parent, prompt, depth)) };
        (End(end), self.count(end, holder))
    }

    /// Takes back one count of a prompt that was booked for `holder`. Exactly
    /// once per kind.
    pub fn remove(&mut self, end: End, holder: Holder, kind: Kind) -> Gone {
        let (mut at, mut gone) = (end.0, Gone::default());
        while let Some(id) = at {
            let node = &mut self.nodes[id as usize];
            at = node.parent;
            let Ok(place) = node.holdings.binary_search_by_key(&holder, |holding| holding.holder) else {
                continue;
            };
            let holding = &mut node.holdings[place];
            if kind.is_active() {
                holding.active = holding.active.saturating_sub(1);
            }
            if kind.is_predicted() {
                holding.predicted = holding.predicted.saturating_sub(1);
            }
            let holding = *holding;
            if kind.is_active() && holding.active == 0 {
                gone.blocks += node.run().len() as u64;
            }
            if holding.active == 0 && holding.predicted == 0 {
                node.holdings.remove(place);
            }
            if node.holdings.is_empty() {
                let prompt = self.prune(id);
                gone.prompt.get_or_insert(prompt);
            }
        }
        gone
    }

    /// What prompts of every holder share with `prompt`, at the holder's number in
    /// `depths`, which starts out as zeros and is long enough; and how far it goes
    /// along all of them. O(holders of the first blocks + nodes passed).
    pub fn depths(&self, namespace: NamespaceId, prompt: &[BlockHash], depths: &mut [Depth]) -> Walk {
        self.walk(namespace, prompt, |node, depth| {
            for holding in &node.holdings {
                let Some(found) = depths.get_mut(holding.holder.0 as usize) else { continue };
                if holding.active > 0 {
                    found.active = depth as u32;
                }
                if holding.predicted > 0 {
                    found.predicted = depth as u32;
                }
            }
        })
    }

    /// How far `prompt` goes along others.
    pub fn follow(&self, namespace: NamespaceId, prompt: &[BlockHash]) -> Walk {
        self.walk(namespace, prompt, |_, _| {})
    }

    /// Shows every node that `prompt` passes into, and how deep it goes there.
    #[inline]
    fn walk(
        &self,
        namespace: NamespaceId,
        prompt: &[BlockHash],
        mut passes: impl FnMut(&Node, usize),
    ) -> Walk {
        let mut at = prompt.first().and_then(|first| self.roots.get(&(namespace, *first)).copied());
        let mut walk = Walk { version: self.version, ..Walk::default() };
        while let Some(id) = at {
            let node = &self.nodes[id as usize];
            let shared = node.shared(&prompt[walk.depth..]);
            walk.node = at;
            walk.depth += shared;
            passes(node, walk.depth);
            if shared < node.run().len() {
                walk.leaves_at = Some(shared);
                break;
            }
            at = prompt.get(walk.depth).and_then(|next| self.child(id, *next));
        }
        walk
    }

    fn child(&self, node: u32, first: BlockHash) -> Option<u32> {
        match &self.nodes[node as usize].children {
            Children::Few(few) => {
                few.iter().copied().find(|child| self.nodes[*child as usize].first() == Some(first))
            }
            Children::Many(many) => many.get(&first).copied(),
        }
    }

    /// Notes `child`, which begins with `first`, behind `node`.
    fn adopt(&mut self, node: u32, first: BlockHash, child: u32) {
        match &mut self.nodes[node as usize].children {
            Children::Few(few) if few.len() < FEW => return few.push(child),
            Children::Few(_) => {}
            Children::Many(many) => {
                many.insert(first, child);
                return;
            }
        }
        let few = std::mem::take(&mut self.nodes[node as usize].children);
        let Children::Few(few) = few else { return };
        let mut many: FxHashMap<_, _> =
            few.into_iter().filter_map(|child| Some((self.nodes[child as usize].first()?, child))).collect();
        many.insert(first, child);
        self.nodes[node as usize].children = Children::Many(Box::new(many));
    }

    /// Forgets `child`, which begins with `first`, behind `node`.
    fn disown(&mut self, node: u32, first: Option<BlockHash>, child: u32) {
        match &mut self.nodes[node as usize].children {
            Children::Few(few) => few.retain(|other| *other != child),
            Children::Many(many) => {
                first.and_then(|first| many.remove(&first));
                if many.is_empty() {
                    self.nodes[node as usize].children = Children::default();
                }
            }
        }
    }

    fn count(&mut self, end: Option<u32>, holder: Holder) -> u64 {
        let (mut at, mut new) = (end, 0);
        while let Some(id) = at {
            let node = &mut self.nodes[id as usize];
            let place = match node.holdings.binary_search_by_key(&holder, |holding| holding.holder) {
                Ok(place) => place,
                Err(place) => {
                    node.holdings.insert(place, Holding { holder, active: 0, predicted: 0 });
                    place
                }
            };
            let holding = &mut node.holdings[place];
            holding.active += 1;
            holding.predicted += 1;
            if holding.active == 1 {
                new += node.run().len() as u64;
            }
            at = node.parent;
        }
        new
    }

    /// Adds `prompt[from..]` below `parent`.
    fn grow(
        &mut self,
        namespace: NamespaceId,
        parent: Option<u32>,
        prompt: &Arc<[BlockHash]>,
        from: usize,
    ) -> u32 {
        self.version += 1;
        let (first, to) = (prompt[from], prompt.len());
        let id = self.free.pop().unwrap_or(self.nodes.len() as u32);
        if id as usize == self.nodes.len() {
            self.nodes.push(Node::default());
        }
        let node = &mut self.nodes[id as usize];
        node.prompt = Arc::clone(prompt);
        (node.from, node.to, node.namespace, node.parent) = (from, to, namespace, parent);
        match parent {
            Some(parent) => self.adopt(parent, first, id),
            None => drop(self.roots.insert((namespace, first), id)),
        }
        id
    }

    /// Cuts a node after `at` blocks and returns the new upper part. The lower
    /// part keeps its id: prompts that end there still do.
    fn split(&mut self, id: u32, at: usize) -> u32 {
        self.version += 1;
        let lower = &mut self.nodes[id as usize];
        let upper = Node {
            prompt: Arc::clone(&lower.prompt),
            from: lower.from,
            to: lower.from + at,
            namespace: lower.namespace,
            parent: lower.parent,
            children: Children::Few(smallvec![id]),
            holdings: lower.holdings.clone(),
        };
        lower.from += at;
        let (parent, first, namespace) = (upper.parent, upper.first(), upper.namespace);
        let above = self.store(upper);
        self.nodes[id as usize].parent = Some(above);
        match (parent, first) {
            (Some(parent), Some(first)) => {
                self.disown(parent, Some(first), id);
                self.adopt(parent, first, above);
            }
            (None, Some(first)) => drop(self.roots.insert((namespace, first), above)),
            (_, None) => {}
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

    /// Whether nothing is booked.
    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        self.roots.is_empty() && self.free.len() == self.nodes.len()
    }

    /// Frees a node that nobody counts; its children are gone already, because
    /// whoever counts a child counts its parents too. Returns its prompt.
    fn prune(&mut self, id: u32) -> Arc<[BlockHash]> {
        self.version += 1;
        let node = &mut self.nodes[id as usize];
        let (parent, namespace, first) = (node.parent, node.namespace, node.first());
        let prompt = std::mem::take(&mut node.prompt);
        (node.from, node.to) = (0, 0);
        (node.children, node.holdings) = Default::default();
        match (parent, first) {
            (Some(parent), first) => self.disown(parent, first, id),
            (None, Some(first)) => drop(self.roots.remove(&(namespace, first))),
            (None, None) => {}
        }
        self.free.push(id);
        prompt
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
        Book(u8, u32, Vec<u32>),
        Release(usize, bool),
    }

    /// Prompts that branch often, and some that all branch in one place.
    fn tokens() -> impl Strategy<Value = Vec<u32>> {
        let wide = (0u32..64, 0u32..2).prop_map(|(second, third)| vec![0, second, third]);
        prop_oneof![prop::collection::vec(0u32..2, 0..12), wide]
    }

    fn action() -> impl Strategy<Value = Action> {
        prop_oneof![
            3 => (0u8..2, 0u32..3, tokens())
                .prop_map(|(space, holder, tokens)| Action::Book(space, holder, tokens)),
            2 => (any::<usize>(), any::<bool>()).prop_map(|(which, active)| Action::Release(which, active)),
        ]
    }

    /// A booked prompt, its holder, and the kinds that it still counts as.
    type Booked = (NamespaceId, Holder, Arc<[BlockHash]>, End, [bool; 2]);

    /// The oracle: the union of a holder's prompts of one kind, as a set of blocks.
    fn union(live: &[Booked], holder: u32, kind: usize) -> BTreeSet<(u128, u64)> {
        let counted = live.iter().filter(|(_, of, .., kinds)| of.0 == holder && kinds[kind]);
        counted.flat_map(|(space, _, blocks, ..)| blocks.iter().map(|block| (space.0, block.0))).collect()
    }

    /// A walk may be older than the removal of what it went along.
    #[test]
    fn a_walk_that_is_out_of_date_misleads_nobody() {
        let space = NamespaceId(0);
        let (long, short) = (prompt(&[1, 0, 1, 1]), prompt(&[1, 0, 0]));
        let mut prefixes = Prefixes::default();
        let walk = prefixes.follow(space, &long);
        let (first, _) = prefixes.insert(space, &long, Holder(0), walk);
        let stale = prefixes.follow(space, &short);
        assert_eq!(prefixes.remove(first, Holder(0), Kind::Both).blocks, 4);
        let (end, new) = prefixes.insert(space, &short, Holder(1), stale);
        assert_eq!(new, 3);
        let mut depths = [Depth::default(); 2];
        prefixes.depths(space, &long, &mut depths);
        assert_eq!(depths.map(|depth| depth.active), [0, 2]);
        prefixes.remove(end, Holder(1), Kind::Both);
        assert!(prefixes.is_empty());
    }

    proptest! {
        #[test]
        fn agrees_with_sets_of_blocks(
            actions in prop::collection::vec(action(), 1..160), query in tokens()
        ) {
            let mut prefixes = Prefixes::default();
            let mut live: Vec<Booked> = Vec::new();
            let mut active = [0u64; 3];
            let query = prompt(&query);
            for action in actions {
                match action {
                    Action::Book(space, holder, tokens) => {
                        let (space, blocks) = (NamespaceId(space.into()), prompt(&tokens));
                        let walk = prefixes.follow(space, &blocks);
                        let (end, new) = prefixes.insert(space, &blocks, Holder(holder), walk);
                        active[holder as usize] += new;
                        live.push((space, Holder(holder), blocks, end, [true, true]));
                    }
                    Action::Release(which, of_lease) if !live.is_empty() => {
                        let which = which % live.len();
                        let (kind, at) = if of_lease { (Kind::Active, 0) } else { (Kind::Predicted, 1) };
                        if std::mem::take(&mut live[which].4[at]) {
                            let holder = live[which].1;
                            active[holder.0 as usize] -= prefixes.remove(live[which].3, holder, kind).blocks;
                        }
                        live.retain(|(.., kinds)| kinds[0] || kinds[1]);
                    }
                    Action::Release(..) => {}
                }
                for holder in 0..3 {
                    let sets = [union(&live, holder, 0), union(&live, holder, 1)];
                    prop_assert_eq!(active[holder as usize], sets[0].len() as u64);
                    for space in 0u128..2 {
                        let mut depths = [Depth::default(); 3];
                        prefixes.depths(NamespaceId(space), &query, &mut depths);
                        let expected = sets.each_ref().map(|set| {
                            query.iter().take_while(|block| set.contains(&(space, block.0))).count() as u32
                        });
                        let found = depths[holder as usize];
                        prop_assert_eq!([found.active, found.predicted], expected);
                    }
                }
            }
            for (_, holder, _, end, kinds) in &live {
                if kinds[0] { prefixes.remove(*end, *holder, Kind::Active); }
                if kinds[1] { prefixes.remove(*end, *holder, Kind::Predicted); }
            }
            prop_assert!(prefixes.is_empty(), "every node is free again");
        }
    }
}
