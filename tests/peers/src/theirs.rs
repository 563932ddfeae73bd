//! `dynamo-kv-router`'s default index, fed with the shapes' content.
//!
//! The default is a `ThreadPoolIndexer` over `ConcurrentRadixTreeCompressed`;
//! here with one event thread, so that events cost one core on both sides.
//! Lookups run on the caller's thread.

use dynamo_kv_router::indexer::ThreadPoolIndexer;
use dynamo_kv_router::protocols::{
    BlockHashOptions, ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData,
    KvCacheStoreData, KvCacheStoredBlockData, LocalBlockHash, RouterEvent, compute_block_hash_for_seq,
    compute_seq_hash_for_block,
};
use dynamo_kv_router::{ConcurrentRadixTreeCompressed, SyncIndexer};
use tokio::runtime::Runtime;

use crate::ours::{BLOCK, tokens};
use crate::shapes::Held;

/// The index and the runtime that waits for it.
pub(crate) struct Peer {
    pool: ThreadPoolIndexer<ConcurrentRadixTreeCompressed>,
    runtime: Runtime,
}

impl Peer {
    /// An empty index.
    pub(crate) fn new() -> anyhow::Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build()?;
        let pool = {
            let _context = runtime.enter();
            ThreadPoolIndexer::new(ConcurrentRadixTreeCompressed::new(), 1, BLOCK)
        };
        Ok(Self { pool, runtime })
    }

    /// Applies `events` and waits until all are.
    pub(crate) fn apply(&self, events: Vec<RouterEvent>) -> anyhow::Result<()> {
        for event in events {
            self.pool.enqueue_event(event)?;
        }
        self.runtime.block_on(self.pool.flush_and_wait())?;
        Ok(())
    }

    /// Blocks that each worker is said to hold of a prompt.
    pub(crate) fn hits(&self, blocks: &[LocalBlockHash]) -> dynamo_kv_router::protocols::OverlapScores {
        self.pool.backend().find_matches(blocks, false)
    }
}

/// The hashes that lookups take.
pub(crate) fn local(tokens: &[u32]) -> Vec<LocalBlockHash> {
    compute_block_hash_for_seq(tokens, BLOCK, BlockHashOptions::default())
}

/// The hashes that events and its load tracking use.
pub(crate) fn chain(local: &[LocalBlockHash]) -> Vec<u64> {
    compute_seq_hash_for_block(local)
}

fn event(worker: u32, data: KvCacheEventData) -> RouterEvent {
    RouterEvent::new(worker.into(), KvCacheEvent { event_id: 0, dp_rank: 0, data })
}

/// As `ours::stores`.
pub(crate) fn stores(held: &Held, count: usize) -> Vec<RouterEvent> {
    let local = local(&tokens(&held.blocks));
    let chain = chain(&local);
    let mut parent = held.known.checked_sub(1).map(|last| ExternalSequenceBlockHash(chain[last]));
    let mut all = Vec::new();
    for start in (held.known..local.len()).step_by(count) {
        let range = start..(start + count).min(local.len());
        let block = |at: usize| KvCacheStoredBlockData {
            block_hash: ExternalSequenceBlockHash(chain[at]),
            tokens_hash: local[at],
            mm_extra_info: None,
        };
        let blocks = range.clone().map(block).collect();
        let data = KvCacheStoreData { parent_hash: parent, start_position: None, blocks };
        all.push(event(held.worker, KvCacheEventData::Stored(data)));
        parent = Some(ExternalSequenceBlockHash(chain[range.end - 1]));
    }
    all
}

/// As `ours::removals`.
pub(crate) fn removals(held: &Held, count: usize) -> Vec<RouterEvent> {
    let mut chain = chain(&local(&tokens(&held.blocks))).split_off(held.known);
    chain.reverse();
    let one = |part: &[u64]| {
        let block_hashes = part.iter().copied().map(ExternalSequenceBlockHash).collect();
        event(held.worker, KvCacheEventData::Removed(KvCacheRemoveData { block_hashes }))
    };
    chain.chunks(count).map(one).collect()
}
