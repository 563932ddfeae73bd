//! The index against an index of sets, alone and under readers.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

use super::*;
use crate::units::Tier;

const SPACE: NamespaceId = NamespaceId(1);

fn blocks(hashes: &[u64]) -> Vec<BlockHash> {
    hashes.iter().copied().map(BlockHash).collect()
}

fn stored(namespace: NamespaceId, parent: u64, hashes: &[u64], tier: Tier) -> Delta {
    Delta::Stored { namespace, parent: BlockHash(parent), hashes: blocks(hashes), tier }
}

fn removed(namespace: NamespaceId, hashes: &[u64], tier: Tier) -> Delta {
    Delta::Removed { namespace, hashes: blocks(hashes), tier }
}

/// As tuples, which read better than what the index returns.
fn hits(index: &Index, namespace: NamespaceId, chain: &[BlockHash]) -> Vec<(Slot, TierHits)> {
    index.hits(namespace, chain).iter().map(|hit| (hit.slot, hit.tiers())).collect()
}

fn device(blocks: u64) -> TierHits {
    TierHits { device: blocks, ..TierHits::default() }
}

/// A tree of blocks, in which a hash names everything before it. Block `n` has
/// hash `n`; 0 is the root and no block.
#[derive(Clone, Debug)]
struct Tree {
    parents: Vec<u64>,
}

impl Tree {
    /// A trunk of `trunk` blocks, then branches: each of `stems` is (where it
    /// parts from what is there, how long it is).
    fn new(trunk: u64, stems: &[(u64, u64)]) -> Self {
        let mut parents = vec![0];
        let mut grow = |from: Option<u64>, length: u64| {
            let mut parent = from.map_or(0, |from| from % parents.len() as u64);
            for _ in 0..length {
                parents.push(parent);
                parent = parents.len() as u64 - 1;
            }
        };
        grow(None, trunk);
        stems.iter().for_each(|(from, length)| grow(Some(*from), *length));
        Self { parents }
    }

    /// The chain that ends with block `end`.
    fn chain(&self, end: u64) -> Vec<u64> {
        let mut chain = Vec::new();
        let mut at = end % self.parents.len() as u64;
        while at != 0 {
            chain.push(at);
            at = self.parents[at as usize];
        }
        chain.reverse();
        chain
    }
}

#[derive(Clone, Debug)]
enum Action {
    /// Part of a chain: target, namespace, its end, how many of it are skipped
    /// and taken, tier, whether the parent is told.
    Store(u8, u8, u64, u64, u64, Tier, bool),
    /// Part of a chain, from its end or from its beginning, every so many.
    Remove(u8, u8, u64, u64, u64, Tier, bool, u8),
    Clear(u8),
    Reuse(u8),
    /// Everything that another target holds.
    Replace(u8, u8),
}

const TARGETS: u8 = 4;
const SPACES: u8 = 2;

fn action() -> impl Strategy<Value = Action> {
    let tier = prop::sample::select(vec![Tier::Device, Tier::Device, Tier::Host, Tier::Disk]);
    let part = || (0..TARGETS, 0..SPACES, any::<u64>(), any::<u64>(), any::<u64>());
    prop_oneof![
        8 => (part(), tier.clone(), any::<bool>())
            .prop_map(|((t, n, end, skip, take), tier, told)| Action::Store(t, n, end, skip, take, tier, told)),
        6 => (part(), tier, any::<bool>(), 1u8..4)
            .prop_map(|((t, n, end, skip, take), tier, back, step)| {
                Action::Remove(t, n, end, skip, take, tier, back, step)
            }),
        1 => (0..TARGETS).prop_map(Action::Clear),
        1 => (0..TARGETS).prop_map(Action::Reuse),
        1 => (0..TARGETS, 0..TARGETS).prop_map(|(to, from)| Action::Replace(to, from)),
    ]
}

/// The oracle: per target and tier a set of (namespace, block).
type Sets = BTreeMap<(u8, Tier), BTreeSet<(u8, u64)>>;

/// The index, the oracle, and the tree they are about.
struct World {
    tree: Tree,
    index: Arc<Index>,
    slots: Vec<Slot>,
    sets: Sets,
}

fn space(namespace: u8) -> NamespaceId {
    NamespaceId(u128::from(namespace) << 64 | 5)
}

fn part(chain: &[u64], skip: u64, take: u64) -> &[u64] {
    if chain.is_empty() {
        return chain;
    }
    let skip = (skip % chain.len() as u64) as usize;
    let take = 1 + (take % (chain.len() - skip) as u64) as usize;
    &chain[skip..skip + take]
}

impl World {
    fn new(tree: Tree) -> Self {
        let index = Arc::new(Index::default());
        let slots = (0..TARGETS).map(|_| index.add_target()).collect();
        Self { tree, index, slots, sets: Sets::new() }
    }

    fn apply(&mut self, action: &Action) {
        match action {
            Action::Store(target, namespace, end, skip, take, tier, told) => {
                let chain = self.tree.chain(*end);
                let hashes = part(&chain, *skip, *take);
                let Some(first) = hashes.first() else { return };
                let parent = if *told { self.tree.parents[*first as usize] } else { u64::MAX };
                let delta = stored(space(*namespace), parent, hashes, *tier);
                self.index.apply(self.slots[usize::from(*target)], &delta);
                let set = self.sets.entry((*target, *tier)).or_default();
                set.extend(hashes.iter().map(|hash| (*namespace, *hash)));
            }
            Action::Remove(target, namespace, end, skip, take, tier, back, step) => {
                let chain = self.tree.chain(*end);
                let every = part(&chain, *skip, *take).iter().copied().step_by(usize::from(*step));
                let mut hashes: Vec<u64> = every.collect();
                if *back {
                    hashes.reverse();
                }
                self.index
                    .apply(self.slots[usize::from(*target)], &removed(space(*namespace), &hashes, *tier));
                let set = self.sets.entry((*target, *tier)).or_default();
                set.retain(|(of, hash)| of != namespace || !hashes.contains(hash));
            }
            Action::Clear(target) => {
                self.index.apply(self.slots[usize::from(*target)], &Delta::Cleared);
                self.sets.retain(|(owner, _), _| owner != target);
            }
            Action::Reuse(target) => {
                let old = self.slots[usize::from(*target)];
                self.index.retire_target(old);
                // The successor comes while the old slot is still known to someone.
                let new = self.index.add_target();
                assert_ne!(old, new, "a retired slot is not handed out");
                self.index.free_slot(old);
                self.slots[usize::from(*target)] = new;
                self.sets.retain(|(owner, _), _| owner != target);
            }
            Action::Replace(to, from) => {
                let held: Vec<_> = Tier::ALL.iter().map(|tier| self.set(*from, *tier)).collect();
                let store = |tier: &Tier| {
                    let one = |(namespace, hash): &(u8, u64)| {
                        stored(space(*namespace), self.tree.parents[*hash as usize], &[*hash], *tier)
                    };
                    held[tier.index()].iter().map(one).collect::<Vec<_>>()
                };
                let deltas: Vec<Delta> = Tier::ALL.iter().flat_map(store).collect();
                self.index.replace(self.slots[usize::from(*to)], &deltas);
                for (tier, set) in Tier::ALL.iter().zip(held) {
                    self.sets.insert((*to, *tier), set);
                }
            }
        }
    }

    fn set(&self, target: u8, tier: Tier) -> BTreeSet<(u8, u64)> {
        self.sets.get(&(target, tier)).cloned().unwrap_or_default()
    }

    fn expected(&self, target: u8, namespace: u8, chain: &[u64]) -> TierHits {
        let mut hits = TierHits::default();
        for hash in chain {
            let key = (namespace, *hash);
            let holds = |tier: &&Tier| self.sets.get(&(target, **tier)).is_some_and(|set| set.contains(&key));
            match Tier::ALL.iter().find(holds) {
                Some(tier) => hits.add(*tier),
                None => break,
            }
        }
        hits
    }

    /// Compares hits along the chains to `ends`, and all counts.
    fn check(&self, ends: &[u64]) {
        for end in ends {
            let chain = self.tree.chain(*end);
            for namespace in 0..SPACES {
                let found = hits(&self.index, space(namespace), &blocks(&chain));
                let all = self
                    .slots
                    .iter()
                    .zip(0..)
                    .map(|(slot, target)| (*slot, self.expected(target, namespace, &chain)));
                let mut expected: Vec<_> = all.filter(|(_, hits)| hits.total() > 0).collect();
                expected.sort_unstable_by_key(|(slot, _)| *slot);
                assert_eq!(found, expected, "chain {chain:?} in {namespace}");
            }
        }
        let mut everything = BTreeSet::new();
        for target in 0..TARGETS {
            let held: BTreeSet<_> = Tier::ALL.iter().flat_map(|tier| self.set(target, *tier)).collect();
            let slot = self.slots[usize::from(target)];
            assert_eq!(self.index.block_count(slot), held.len());
            for namespace in 0..SPACES {
                let count = held.iter().filter(|(of, _)| *of == namespace).count();
                assert_eq!(self.index.block_count_in(slot, space(namespace)), count);
            }
            everything.extend(held);
        }
        assert_eq!(self.index.unique_blocks(), everything.len());
        self.index.state.read().check();
    }
}

fn run_world(tree: Tree, actions: &[Action], ends: &[u64]) {
    let mut world = World::new(tree);
    for action in actions {
        world.apply(action);
        world.check(ends);
    }
    for target in 0..TARGETS {
        world.apply(&Action::Clear(target));
    }
    world.check(ends);
    assert_eq!(world.index.state.read().spaces.len(), 0, "namespaces are forgotten with their blocks");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn agrees_with_an_index_of_sets(
        trunk in 1u64..12, stems in prop::collection::vec((any::<u64>(), 1u64..6), 0..4),
        actions in prop::collection::vec(action(), 1..60), ends in prop::collection::vec(any::<u64>(), 3),
    ) {
        let mut ends = ends;
        ends.push(trunk);
        run_world(Tree::new(trunk, &stems), &actions, &ends);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    #[test]
    fn agrees_with_an_index_of_sets_on_long_chains(
        trunk in 60u64..400, stems in prop::collection::vec((any::<u64>(), 1u64..200), 0..4),
        actions in prop::collection::vec(action(), 1..50), ends in prop::collection::vec(any::<u64>(), 2),
    ) {
        let mut ends = ends;
        ends.push(trunk);
        run_world(Tree::new(trunk, &stems), &actions, &ends);
    }
}

/// Case K23: what counts is the longest prefix without a hole, not any match.
#[test]
fn a_hole_ends_the_prefix_and_filling_it_restores_the_rest() {
    let index = Index::default();
    let slot = index.add_target();
    index.apply(slot, &stored(SPACE, 0, &[1, 2, 3, 4], Tier::Device));
    index.apply(slot, &removed(SPACE, &[2], Tier::Device));
    assert_eq!(hits(&index, SPACE, &blocks(&[1, 2, 3, 4])), [(slot, device(1))]);
    index.apply(slot, &stored(SPACE, 1, &[2], Tier::Host));
    assert_eq!(
        hits(&index, SPACE, &blocks(&[1, 2, 3, 4])),
        [(slot, TierHits { device: 3, host: 1, disk: 0 })]
    );
}

#[test]
fn a_hole_of_one_target_is_not_filled_by_another() {
    let index = Index::default();
    let (a, b) = (index.add_target(), index.add_target());
    let chain: Vec<u64> = (1..=64).collect();
    index.apply(a, &stored(SPACE, 0, &chain[..32], Tier::Device));
    index.apply(a, &stored(SPACE, 32, &[1032, 1033], Tier::Device));
    index.apply(b, &stored(SPACE, 0, &chain, Tier::Device));
    index.apply(b, &removed(SPACE, &chain[..32], Tier::Device));
    assert_eq!(hits(&index, SPACE, &blocks(&chain)), [(a, device(32))]);
}

#[test]
fn a_late_parent_joins_what_came_before_it() {
    let index = Index::default();
    let slot = index.add_target();
    let chain: Vec<u64> = (1..=96).collect();
    for (range, expected) in [(0..32, 32), (64..96, 32), (32..64, 96)] {
        index.apply(slot, &stored(SPACE, range.start as u64, &chain[range], Tier::Device));
        assert_eq!(hits(&index, SPACE, &blocks(&chain)), [(slot, device(expected))]);
    }
}

#[test]
fn a_longer_prefix_in_another_namespace_is_invisible() {
    let index = Index::default();
    let (mine, theirs) = (index.add_target(), index.add_target());
    index.apply(mine, &stored(SPACE, 0, &[1], Tier::Device));
    index.apply(theirs, &stored(NamespaceId(2), 0, &[1, 2, 3], Tier::Device));
    assert_eq!(hits(&index, SPACE, &blocks(&[1, 2, 3])), [(mine, device(1))]);
}

#[test]
fn a_slot_is_handed_out_again_empty_and_deaf_to_late_events() {
    let index = Index::default();
    let slot = index.add_target();
    index.apply(slot, &stored(SPACE, 0, &[1], Tier::Device));
    index.remove_target(slot);
    index.remove_target(slot);
    index.apply(slot, &stored(SPACE, 0, &[1], Tier::Device));
    index.replace(slot, &[stored(SPACE, 0, &[1], Tier::Device)]);
    assert_eq!((index.unique_blocks(), index.block_count(slot)), (0, 0));
    assert_eq!(index.add_target(), slot);
    assert!(hits(&index, SPACE, &blocks(&[1])).is_empty());
    assert_ne!(index.add_target(), slot, "a slot is freed once");
}

#[test]
fn a_retired_slot_waits_until_it_is_freed() {
    let index = Index::default();
    let slot = index.add_target();
    index.free_slot(slot);
    assert_ne!(index.add_target(), slot, "a live slot cannot be freed");
    index.apply(slot, &stored(SPACE, 0, &[1], Tier::Device));
    index.retire_target(slot);
    index.apply(slot, &stored(SPACE, 0, &[1], Tier::Device));
    assert_eq!((index.unique_blocks(), index.slots_in_use()), (0, 2), "empty, deaf, and not free");
    assert_ne!(index.add_target(), slot);
    index.free_slot(slot);
    index.free_slot(slot);
    assert_eq!((index.add_target(), index.slots_in_use()), (slot, 3));
    assert_ne!(index.add_target(), slot, "a slot is freed once");
}

/// However many targets come and go, no more slots exist than were in use at once.
#[test]
fn slots_do_not_grow_with_churn() {
    let index = Index::default();
    let mut used = BTreeSet::new();
    for life in 0..1000u64 {
        let (slot, other) = (index.add_target(), index.add_target());
        used.extend([slot, other]);
        index.apply(slot, &stored(SPACE, life, &[life * 2 + 1, life * 2 + 2], Tier::Device));
        index.remove_target(slot);
        index.remove_target(other);
    }
    assert_eq!((used.len(), index.slots_in_use(), index.unique_blocks()), (2, 0, 0));
}

#[test]
fn eight_thousand_ranks_are_told_apart() {
    let index = Index::default();
    let slots: Vec<Slot> = (0..1024 * 8).map(|_| index.add_target()).collect();
    let chain: Vec<u64> = (1..=100).collect();
    for (slot, at) in slots.iter().zip(0..) {
        index.apply(*slot, &stored(SPACE, 0, &chain[..1 + at % 100], Tier::Device));
    }
    let hits = hits(&index, SPACE, &blocks(&chain));
    assert_eq!(hits.len(), slots.len());
    assert!(
        hits.iter()
            .zip(0..)
            .all(|((slot, hits), at)| (slot.0, *hits) == (at, device(1 + u64::from(at) % 100)))
    );
}

/// Chains of `length` blocks whose hashes differ between chains.
fn long_chain(number: u64, length: u64) -> Vec<u64> {
    (1..=length).map(|at| (number << 20 | at).wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect()
}

#[test]
fn a_block_costs_45_bytes_at_most_and_an_extra_owner_one() {
    let index = Index::default();
    let slots: Vec<Slot> = (0..8).map(|_| index.add_target()).collect();
    let empty = index.heap_bytes();
    let mut most = 0;
    for number in 0..200 {
        let chain = long_chain(number, 1000);
        for part in chain.chunks(32) {
            let parent = if part[0] == chain[0] { 0 } else { part[0].wrapping_sub(0x9e37_79b9_7f4a_7c15) };
            index.apply(slots[0], &stored(SPACE, parent, part, Tier::Device));
        }
        // Below that, what is allocated at once shows.
        if number >= 50 {
            most = most.max((index.heap_bytes() - empty) / index.unique_blocks());
        }
    }
    assert!(most <= 45, "{most} bytes a block");
    let alone = index.heap_bytes();
    for slot in &slots[1..] {
        (0..200).for_each(|number| {
            index.apply(*slot, &stored(SPACE, 0, &long_chain(number, 1000), Tier::Device))
        });
    }
    let extra = index.heap_bytes() - alone;
    assert!(extra <= 7 * index.unique_blocks(), "{extra} bytes for seven more owners");
}

/// Case G02.
#[test]
fn memory_stays_flat_under_churn_and_comes_back() {
    let index = Index::default();
    let slots: Vec<Slot> = (0..8).map(|_| index.add_target()).collect();
    let empty = index.heap_bytes();
    let trunk = long_chain(0, 100);
    let mut steady = 0;
    for generation in 0..40u64 {
        for (slot, at) in slots.iter().zip(1..) {
            let suffix = |generation: u64| long_chain(generation * 8 + at, 400);
            index.apply(*slot, &stored(SPACE, 0, &trunk, Tier::Device));
            index.apply(*slot, &stored(SPACE, trunk[99], &suffix(generation), Tier::Device));
            if let Some(past) = generation.checked_sub(4) {
                let mut past = suffix(past);
                // Head first, tail first and in no order.
                match at % 3 {
                    0 => {}
                    1 => past.reverse(),
                    _ => past.sort_unstable(),
                }
                index.apply(*slot, &removed(SPACE, &past, Tier::Device));
            }
        }
        index.state.read().check();
        if generation == 10 {
            steady = index.heap_bytes();
        }
        assert!(generation < 10 || index.heap_bytes() * 5 <= steady * 6, "generation {generation}");
    }
    slots.iter().for_each(|slot| index.apply(*slot, &Delta::Cleared));
    assert_eq!(index.unique_blocks(), 0);
    assert!(index.heap_bytes() < empty + (steady - empty) / 5, "{} of {steady}", index.heap_bytes());
}

/// One writer, readers beside it. Every change fits one section, so that each
/// is one step; a reader must see a state after some step, and never an older
/// one than it saw before.
#[test]
fn readers_see_a_state_that_a_prefix_of_the_writes_explains() {
    let tree = Tree::new(24, &[(12, 8), (20, 8)]);
    let chain = blocks(&tree.chain(24));
    let mut runner = TestRunner::deterministic();
    for _ in 0..8 {
        let steps = prop::collection::vec(action(), 3000).new_tree(&mut runner).expect("a list").current();
        // A slot that is handed out again belongs to somebody else: two steps.
        let steps: Vec<Action> = steps.into_iter().filter(|step| !matches!(step, Action::Reuse(_))).collect();
        let mut rehearsal = World::new(tree.clone());
        let mut states = vec![Vec::new()];
        for step in &steps {
            rehearsal.apply(step);
            states.push(hits(&rehearsal.index, space(0), &chain));
        }
        rehearsal.check(&[24]);
        let mut world = World::new(tree.clone());
        let index = Arc::clone(&world.index);
        let (start, done) = (Barrier::new(3), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let readers =
                [(); 2].map(|()| scope.spawn(|| read_along(&index, &chain, &states, &start, &done)));
            start.wait();
            steps.iter().for_each(|step| world.apply(step));
            done.store(true, Ordering::Release);
            readers.into_iter().for_each(|reader| reader.join().expect("a state nobody wrote was seen"));
        });
        assert_eq!(hits(&index, space(0), &chain), states[steps.len()]);
    }
}

fn read_along(
    index: &Index,
    chain: &[BlockHash],
    states: &[Vec<(Slot, TierHits)>],
    start: &Barrier,
    done: &AtomicBool,
) {
    let mut at = 0;
    start.wait();
    while !done.load(Ordering::Acquire) {
        let hits = hits(index, space(0), chain);
        let found = states[at..].iter().position(|state| *state == hits);
        at += found.unwrap_or_else(|| panic!("after step {at}: no later step explains {hits:?}"));
    }
}

/// Case C13: hits are counted in whole tokens, whatever the text is made of.
mod any_text {
    use super::*;
    use crate::blocks::chain;
    use crate::units::BlockSize;

    /// A token per character of the text, so that the oracle can read it.
    fn prompt(text: &str) -> Vec<BlockHash> {
        let tokens: Vec<u32> = text.chars().map(u32::from).collect();
        chain(BlockHash(0), BlockSize::new(1).expect("not zero"), &tokens)
    }

    fn shared(one: &str, other: &str) -> usize {
        one.chars().zip(other.chars()).take_while(|(one, other)| one == other).count()
    }

    proptest! {
        #[test]
        fn hits_are_the_longest_text_that_a_tenant_stored(
            stores in prop::collection::vec((0u128..100, "(a|b|\u{e4}|\u{20ac}|\u{1f980}){0,6}"), 0..40),
            tenant in 0u128..100,
            asked in "(a|b|\u{e4}|\u{20ac}|\u{1f980}){0,8}",
        ) {
            let index = Index::default();
            let slot = index.add_target();
            for (tenant, text) in stores.iter().filter(|(_, text)| !text.is_empty()) {
                let hashes = prompt(text);
                let (namespace, tier) = (NamespaceId(*tenant), Tier::Device);
                index.apply(slot, &Delta::Stored { namespace, parent: BlockHash(0), hashes, tier });
            }
            // The asker is one of those who stored, as often as not.
            let tenant = stores.first().map_or(tenant, |(first, _)| if tenant < 50 { *first } else { tenant });
            let expected = stores.iter().filter(|(of, _)| *of == tenant).map(|(_, text)| shared(text, &asked)).max();
            let found = index.hits(NamespaceId(tenant), &prompt(&asked));
            let found = found.first().map_or(0, |hit| hit.tiers().total());
            prop_assert_eq!(found, expected.unwrap_or(0) as u64);
        }
    }
}

/// Cases C12, G31: 64 threads store, branch, repeat, clear and ask at once; each
/// target ends up with what its own thread did last, and never gains what
/// another one stored or what a clear has taken.
#[test]
fn many_threads_at_once_leave_every_target_with_its_own() {
    const THREADS: u64 = 64;
    let index = Index::default();
    let slots: Vec<Slot> = (0..THREADS).map(|_| index.add_target()).collect();
    let trunk = long_chain(0, 40);
    let whole = blocks(&trunk);
    std::thread::scope(|scope| {
        for (thread, slot) in (0..THREADS).zip(&slots) {
            let (index, trunk, whole) = (&index, &trunk, &whole);
            scope.spawn(move || {
                for round in 0..60u64 {
                    let depth = 1 + ((thread * 7 + round * 13) % 40) as usize;
                    index.apply(*slot, &stored(SPACE, 0, &trunk[..depth], Tier::Device));
                    let branch = long_chain(1 + thread * 100 + round, 9);
                    index.apply(*slot, &stored(SPACE, trunk[depth - 1], &branch, Tier::Device));
                    index.apply(*slot, &stored(SPACE, 0, &trunk[..depth / 2 + 1], Tier::Device));
                    let own = hits(index, SPACE, whole).into_iter().find(|(holder, _)| holder == slot);
                    assert_eq!(own, Some((*slot, device(depth as u64))), "thread {thread}, round {round}");
                    index.apply(*slot, &Delta::Cleared);
                    let own = hits(index, SPACE, whole).into_iter().find(|(holder, _)| holder == slot);
                    assert_eq!(own, None, "a clear of thread {thread} was undone in round {round}");
                }
                index.apply(*slot, &stored(SPACE, 0, &trunk[..1 + thread as usize % 40], Tier::Device));
            });
        }
    });
    index.state.read().check();
    let expected: Vec<_> = slots.iter().zip(0..).map(|(slot, at)| (*slot, device(1 + at % 40))).collect();
    assert_eq!(hits(&index, SPACE, &whole), expected);
}
