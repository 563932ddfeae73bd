//! Our index, fed with the shapes' content.

use kvrouter_core::blocks::{self, BlockHash, NamespaceId};
use kvrouter_core::events::Delta;
use kvrouter_core::ids::Slot;
use kvrouter_core::index::Index;
use kvrouter_core::units::{BlockSize, Tier};

use crate::shapes::{Held, WORKERS};

/// Tokens per block, on both sides.
pub(crate) const BLOCK: u32 = 16;
/// The namespace of everything here.
pub(crate) const SPACE: NamespaceId = NamespaceId(1);

/// One event of one target.
pub(crate) type Event = (Slot, Delta);

/// An index of empty targets.
pub(crate) fn empty() -> Index {
    let index = Index::default();
    (0..WORKERS).for_each(|worker| assert_eq!(index.add_target(), Slot(worker)));
    index
}

/// The token ids of blocks with these contents.
pub(crate) fn tokens(contents: &[u64]) -> Vec<u32> {
    let block = |content: &u64| {
        let first = content * u64::from(BLOCK);
        (first..first + u64::from(BLOCK))
            .map(|token| (token.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u32)
    };
    contents.iter().flat_map(block).collect()
}

/// Our hashes of a prompt.
pub(crate) fn chain(tokens: &[u32]) -> Vec<BlockHash> {
    let size = BlockSize::new(BLOCK).expect("not zero");
    blocks::chain(BlockHash(0), size, tokens)
}

/// The stores of what `held` announces, `event` blocks each.
pub(crate) fn stores(held: &Held, event: usize) -> Vec<Event> {
    let hashes = chain(&tokens(&held.blocks));
    let mut parent = held.known.checked_sub(1).map_or(BlockHash(0), |last| hashes[last]);
    let one = |part: &[BlockHash]| {
        let delta = Delta::Stored { namespace: SPACE, parent, hashes: part.to_vec(), tier: Tier::Device };
        parent = part[part.len() - 1];
        (Slot(held.worker), delta)
    };
    hashes[held.known..].chunks(event).map(one).collect()
}

/// The removals of all that `held` announced, tail first.
pub(crate) fn removals(held: &Held, event: usize) -> Vec<Event> {
    let mut hashes = chain(&tokens(&held.blocks)).split_off(held.known);
    hashes.reverse();
    let one = |part: &[BlockHash]| {
        (Slot(held.worker), Delta::Removed { namespace: SPACE, hashes: part.to_vec(), tier: Tier::Device })
    };
    hashes.chunks(event).map(one).collect()
}

/// Applies `events` and drops them, as the peer does.
pub(crate) fn apply(index: &Index, events: Vec<Event>) {
    events.into_iter().for_each(|(slot, delta)| index.apply(slot, &delta));
}
