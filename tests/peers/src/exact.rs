//! Two places where ours is exact and theirs is not, as tests.

#![cfg(test)]

use crate::ours::{self, SPACE};
use crate::shapes::{EVENT, Held};
use crate::theirs::{self, Peer};

/// Blocks of a prompt that each of the first two workers is said to hold.
fn hits(index: &kvrouter_core::index::Index, peer: &Peer, blocks: &[u64]) -> ([u64; 2], [u64; 2]) {
    let tokens = ours::tokens(blocks);
    let mut found = ([0; 2], [0; 2]);
    for hit in index.hits(SPACE, &ours::chain(&tokens)) {
        found.0[hit.slot.0 as usize] = hit.tiers().total();
    }
    for (worker, count) in peer.hits(&theirs::local(&tokens)).scores {
        found.1[worker.worker_id as usize] = count.into();
    }
    found
}

#[test]
fn a_hole_of_one_worker_is_not_credited_to_another() {
    let (index, peer) = (ours::empty(), Peer::new().expect("a runtime"));
    let blocks: Vec<u64> = (0..64).collect();
    let own: Vec<u64> = (0..32).chain(1000..1032).collect();
    let both =
        [Held { worker: 0, blocks: own, known: 0 }, Held { worker: 1, blocks: blocks.clone(), known: 0 }];
    for held in &both {
        ours::apply(&index, ours::stores(held, EVENT));
        peer.apply(theirs::stores(held, EVENT)).expect("applied");
    }
    let hole = Held { worker: 1, blocks: blocks[..32].to_vec(), known: 0 };
    ours::apply(&index, ours::removals(&hole, EVENT));
    peer.apply(theirs::removals(&hole, EVENT)).expect("applied");
    let (ours, theirs) = hits(&index, &peer, &blocks);
    assert_eq!(ours, [32, 0], "the truth");
    assert_eq!(theirs[0], 64, "the peer's claim for the worker that holds 32");
}

#[test]
fn a_parent_that_comes_late_joins_its_children() {
    let (index, peer) = (ours::empty(), Peer::new().expect("a runtime"));
    let blocks: Vec<u64> = (0..96).collect();
    for range in [0..32, 64..96, 32..64] {
        let held = Held { worker: 0, blocks: blocks[..range.end].to_vec(), known: range.start };
        ours::apply(&index, ours::stores(&held, EVENT));
        peer.apply(theirs::stores(&held, EVENT)).expect("applied");
    }
    let (ours, theirs) = hits(&index, &peer, &blocks);
    assert_eq!(ours[0], 96, "the truth");
    assert_eq!(theirs[0], 64, "the peer's claim");
}
