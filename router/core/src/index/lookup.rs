//! The longest held prefix of a chain, for every target at once.
//!
//! The walk goes from the root along runs. Inside a run it compares a few
//! hashes and reads each lane's span; from one run to the next it asks the
//! table of places. It ends where nobody who held everything so far holds the
//! next block, so its cost is that of the longest hit, not of the prompt.

use super::Hit;
use super::owners::{Side, Span};
use super::places::Place;
use super::runs::Run;
use super::spaces::Space;
use super::state::State;
use super::view::Views;
use crate::blocks::BlockHash;

/// Appends the hits of all targets, sorted by slot.
/// O(runs × (log blocks + lanes)) over the runs that the chain passes through.
pub(super) fn hits(state: &State, space: Space, chain: &[BlockHash], out: &mut Vec<Hit>) {
    let Some(first) = chain.first() else { return };
    let mut place = state.find(space, *first);
    let mut at = 0;
    while let Some(Place { run: number, position }) = place {
        let Some(run) = state.runs.get(number) else { return };
        let window = position..position + run.matched(position, &chain[at..]);
        let more = if at == 0 {
            begin(run, &state.views, window, out)
        } else {
            extend(run, &state.views, window, at, out)
        };
        at += more;
        let Some(next) = chain.get(at).filter(|_| more > 0) else { return };
        place = state.find(space, *next);
        // Held by someone, but in this very run by nobody who held all before.
        if place == Some(Place { run: number, position: position + more as u16 }) {
            return;
        }
    }
}

/// The hits in the chain's first run, and the largest.
fn begin(run: &Run, views: &Views, window: Span, out: &mut Vec<Hit>) -> usize {
    let (mut most, mut nothing) = (0, false);
    let mut hit = |side: Side, tiers: [u32; 3]| {
        let tiers = if views.is_seen(side) { tiers } else { [0; 3] };
        let hit = Hit { slot: side.slot(), tiers };
        most = most.max(hit.total());
        nothing |= hit.total() == 0;
        hit
    };
    // Twice as fast as the general way, and nearly all runs are like that.
    if let Some(sides) = run.owners.leading_in_device(window.clone()) {
        out.extend(sides.map(|(side, held)| hit(side, [held, 0, 0])));
    } else {
        run.owners.leading(&window, |side, tiers| out.push(hit(side, tiers)));
    }
    if nothing {
        out.retain(|hit| hit.total() > 0);
    }
    most as usize
}

/// Adds what targets that hold all of the chain up to `at` hold in a further
/// run; returns the largest addition.
fn extend(run: &Run, views: &Views, window: Span, at: usize, out: &mut [Hit]) -> usize {
    let mut most = 0;
    let mut open = out.iter_mut().filter(|hit| hit.total() as usize == at).peekable();
    run.owners.leading(&window, |side, more| {
        while open.next_if(|hit| hit.slot < side.slot()).is_some() {}
        let of_side = |hit: &&mut Hit| hit.slot == side.slot() && views.is_seen(side);
        if let Some(hit) = open.next_if(of_side) {
            for (sum, more) in hit.tiers.iter_mut().zip(more) {
                *sum += more;
            }
            most = most.max(more.iter().sum());
        }
    });
    most as usize
}
