//! Cost of applying events, per block, drained.

use std::time::Instant;

use dynamo_kv_router::protocols::RouterEvent;
use kvrouter_core::index::Index;

use crate::ours::{self, Event};
use crate::shapes::{Contents, EVENT, Held};
use crate::table::Table;
use crate::theirs::{self, Peer};

/// Blocks of each chain that arrive one by one.
const DECODED: usize = 200;

/// One kind of work: events for both sides, and how many blocks they are about.
struct Work {
    ours: Vec<Event>,
    theirs: Vec<RouterEvent>,
    blocks: usize,
}

/// Measures stores of new and of shared blocks, decode events and removals.
pub(crate) fn measure(table: &mut Table, pairs: usize) -> anyhow::Result<()> {
    let mut contents = Contents::default();
    let background = contents.background();
    let (mut first, mut others) = (Vec::new(), Vec::new());
    for mut owners in contents.shared(128) {
        first.push(owners.remove(0));
        others.extend(owners);
    }
    let new = Work::stores(&background, EVENT);
    let shared_first = Work::stores(&first, EVENT);
    let shared = Work::stores(&others, EVENT);
    let removal = Work::removals(&background, EVENT);
    let short = |held: &Held| Held { blocks: held.blocks[..DECODED].to_vec(), ..held.clone() };
    let decode = Work::stores(&background.iter().map(short).collect::<Vec<_>>(), 1);

    let mut times: [Vec<(f64, f64)>; 4] = Default::default();
    for pair in 0..pairs {
        let ours_first = pair % 2 == 0;
        let (index, peer) = (ours::empty(), Peer::new()?);
        times[0].push(new.run(&index, &peer, ours_first)?);
        shared_first.run(&index, &peer, ours_first)?;
        times[1].push(shared.run(&index, &peer, ours_first)?);
        times[3].push(removal.run(&index, &peer, ours_first)?);
        let (index, peer) = (ours::empty(), Peer::new()?);
        times[2].push(decode.run(&index, &peer, ours_first)?);
    }
    let rows = [
        ("store, new blocks", 1.2),
        ("store, shared blocks", 5.0),
        ("store, one block (decode)", 3.0),
        ("removal", 1.2),
    ];
    for ((name, bar), times) in rows.into_iter().zip(&times) {
        table.ratio(format!("event {name}"), "ns a block", times, bar);
    }
    Ok(())
}

impl Work {
    fn stores(all: &[Held], event: usize) -> Self {
        Self {
            ours: interleave(all, |held| ours::stores(held, event)),
            theirs: interleave(all, |held| theirs::stores(held, event)),
            blocks: all.iter().map(|held| held.blocks.len() - held.known).sum(),
        }
    }

    fn removals(all: &[Held], event: usize) -> Self {
        Self {
            ours: interleave(all, |held| ours::removals(held, event)),
            theirs: interleave(all, |held| theirs::removals(held, event)),
            blocks: all.iter().map(|held| held.blocks.len() - held.known).sum(),
        }
    }

    /// Nanoseconds a block, ours and theirs.
    fn run(&self, index: &Index, peer: &Peer, ours_first: bool) -> anyhow::Result<(f64, f64)> {
        let each = |start: Instant| start.elapsed().as_nanos() as f64 / self.blocks as f64;
        let ours = || {
            let events = self.ours.clone();
            let start = Instant::now();
            ours::apply(index, events);
            each(start)
        };
        let theirs = || {
            let events = self.theirs.clone();
            let start = Instant::now();
            peer.apply(events).map(|()| each(start))
        };
        if ours_first {
            let first = ours();
            return Ok((first, theirs()?));
        }
        let first = theirs()?;
        Ok((ours(), first))
    }
}

/// One event of every chain in turn, as a fleet sends them.
fn interleave<T>(all: &[Held], make: impl Fn(&Held) -> Vec<T>) -> Vec<T> {
    let mut chains: Vec<_> = all.iter().map(|held| make(held).into_iter()).collect();
    let mut events = Vec::new();
    while !chains.is_empty() {
        chains.retain_mut(|chain| chain.next().map(|event| events.push(event)).is_some());
    }
    events
}
