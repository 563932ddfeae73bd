//! vLLM's block pool: physical blocks, a free queue in order of eviction, and a map from hash
//! to blocks. Several blocks may hold one hash; each is stored and removed on its own.
//!
//! Blocks are hashed, and told, when the step that fills them is scheduled. Freed blocks join
//! the queue's end last one first, so that tails go before heads; blocks without a hash join
//! the front, as in the release that was recorded.

use std::collections::{BTreeMap, HashMap};

use super::{CacheKey, PrefixCache, RequestId, Started, Usage};
use crate::config::Wire;
use crate::events::{Event, EventHash, ExtraKey, Removed, Stored, TokenIds};
use crate::hash::{ChainRule, Digest, vllm_event_hash};

pub(super) struct BlockPool {
    wire: Wire,
    page_size: usize,
    rule: ChainRule,
    blocks: Vec<Block>,
    free: FreeQueue,
    cached: HashMap<Digest, Vec<usize>>,
    tables: HashMap<RequestId, Table>,
    events: Vec<Event>,
}

#[derive(Default)]
struct Block {
    references: u32,
    digest: Option<Digest>,
    /// Place in the free queue.
    place: Option<i64>,
}

/// Free blocks in the order in which they are handed out.
#[derive(Default)]
struct FreeQueue {
    order: BTreeMap<i64, usize>,
    front: i64,
    back: i64,
}

/// What a request holds.
struct Table {
    key: CacheKey,
    chain: Vec<Digest>,
    blocks: Vec<usize>,
    /// Leading blocks that have their hash.
    hashed: usize,
}

impl BlockPool {
    pub(super) fn new(wire: Wire, page_size: usize, pages: usize, rule: ChainRule) -> Self {
        let mut pool = Self {
            wire,
            page_size,
            rule,
            blocks: (0..pages).map(|_| Block::default()).collect(),
            free: FreeQueue::default(),
            cached: HashMap::new(),
            tables: HashMap::new(),
            events: Vec::new(),
        };
        // Block 0 is the null block: counted, never used.
        for block in 1..pages {
            pool.blocks[block].place = Some(pool.free.push_back(block));
        }
        pool
    }

    /// Takes `count` blocks for a request, evicting what they held.
    fn allocate(&mut self, table: &mut Table, count: usize) {
        for _ in 0..count {
            let Some(block) = self.free.pop() else { return };
            self.blocks[block].place = None;
            self.blocks[block].references = 1;
            if let Some(digest) = self.blocks[block].digest.take() {
                self.forget(&digest, block);
                self.events.push(Event::Removed(Removed {
                    block_hashes: vec![EventHash::U64(vllm_event_hash(&digest))],
                    medium: Some("GPU".to_owned()),
                    group_idx: Some(0),
                }));
            }
            table.blocks.push(block);
        }
    }

    fn forget(&mut self, digest: &Digest, block: usize) {
        if let Some(blocks) = self.cached.get_mut(digest) {
            blocks.retain(|held| *held != block);
            if blocks.is_empty() {
                self.cached.remove(digest);
            }
        }
    }

    /// Gives full blocks among the first `upto` tokens their hash.
    fn hash_full_blocks(&mut self, table: &mut Table, tokens: &[u32], upto: usize) {
        let full = upto / self.page_size;
        if full <= table.hashed {
            return;
        }
        self.rule.extend(&mut table.chain, &tokens[..full * self.page_size], &table.key.namespace);
        for at in table.hashed..full {
            let (block, digest) = (table.blocks[at], table.chain[at]);
            self.blocks[block].digest = Some(digest);
            self.cached.entry(digest).or_default().push(block);
        }
        let event = self.stored(table, tokens, table.hashed, full);
        self.events.push(event);
        table.hashed = full;
    }

    fn stored(&self, table: &Table, tokens: &[u32], from: usize, to: usize) -> Event {
        let namespace = &table.key.namespace;
        let hash = |digest: &Digest| EventHash::U64(vllm_event_hash(digest));
        let keys = |at: usize| {
            let salt = namespace.cache_salt.as_ref().filter(|_| at == 0);
            let keys: Vec<ExtraKey> =
                namespace.lora_name.iter().chain(salt).cloned().map(ExtraKey::Text).collect();
            (!keys.is_empty()).then_some(keys)
        };
        Event::Stored(Box::new(Stored {
            block_hashes: table.chain[from..to].iter().map(hash).collect(),
            parent_block_hash: from.checked_sub(1).map(|parent| hash(&table.chain[parent])),
            token_ids: TokenIds::Plain(tokens[from * self.page_size..to * self.page_size].to_vec()),
            block_size: self.page_size as u64,
            lora_id: namespace.lora_id,
            medium: Some("GPU".to_owned()),
            lora_name: namespace.lora_name.clone(),
            extra_keys: Some((from..to).map(keys).collect()),
            group_idx: Some(0),
            kv_cache_spec_kind: Some("full_attention".to_owned()),
            session_id: table.key.session_id.clone(),
            ..Stored::default()
        }))
    }

    /// Blocks that hold the longest cached prefix.
    fn hits(&self, table: &Table, tokens: &[u32]) -> Vec<usize> {
        let most = tokens.len().saturating_sub(1) / self.page_size;
        let held = |digest| self.cached.get(digest).and_then(|blocks| blocks.first().copied());
        table.chain.iter().take(most).map_while(held).collect()
    }

    fn start_table(&mut self, table: &mut Table, tokens: &[u32], most: usize) -> Option<Started> {
        self.rule.extend(&mut table.chain, tokens, &table.key.namespace);
        let hits = self.hits(table, tokens);
        let hit = hits.len() * self.page_size;
        let scheduled = most.min(tokens.len() - hit);
        let needed = (hit + scheduled).div_ceil(self.page_size) - hits.len();
        let idle = hits.iter().filter(|block| self.blocks[**block].references == 0).count();
        if needed > self.free.order.len() - idle {
            return None;
        }
        for block in &hits {
            self.blocks[*block].references += 1;
            if let Some(place) = self.blocks[*block].place.take() {
                self.free.order.remove(&place);
            }
        }
        table.hashed = hits.len();
        table.blocks = hits;
        if table.key.report_hits && table.hashed > 0 {
            let event = self.stored(table, tokens, 0, table.hashed);
            self.events.push(event);
        }
        self.allocate(table, needed);
        self.hash_full_blocks(table, tokens, hit + scheduled);
        Some(Started { hit, scheduled })
    }
}

impl PrefixCache for BlockPool {
    fn start(&mut self, id: RequestId, key: &CacheKey, tokens: &[u32], most: usize) -> Option<Started> {
        let mut table = self.tables.remove(&id).unwrap_or_else(|| Table {
            key: key.clone(),
            chain: Vec::new(),
            blocks: Vec::new(),
            hashed: 0,
        });
        let started = self.start_table(&mut table, tokens, most);
        // A request that has to wait keeps its chain, so that trying again is cheap.
        self.tables.insert(id, table);
        started
    }

    fn grow(&mut self, id: RequestId, tokens: &[u32], upto: usize) -> bool {
        let Some(mut table) = self.tables.remove(&id) else { return false };
        let needed = upto.div_ceil(self.page_size).saturating_sub(table.blocks.len());
        let fits = needed <= self.free.order.len();
        if fits {
            self.allocate(&mut table, needed);
            self.hash_full_blocks(&mut table, tokens, upto);
        }
        self.tables.insert(id, table);
        fits
    }

    fn prefilled(&mut self, _id: RequestId, _tokens: &[u32], _upto: usize) {}

    fn release(&mut self, id: RequestId, _tokens: &[u32], _computed: usize) {
        let Some(table) = self.tables.remove(&id) else { return };
        for block in table.blocks.into_iter().rev() {
            self.blocks[block].references -= 1;
            if self.blocks[block].references == 0 {
                let place = match self.blocks[block].digest {
                    Some(_) => self.free.push_back(block),
                    None => self.free.push_front(block),
                };
                self.blocks[block].place = Some(place);
            }
        }
    }

    fn clear(&mut self) -> bool {
        if self.usage().pinned > 0 {
            return false;
        }
        self.cached.clear();
        for block in &mut self.blocks {
            block.digest = None;
        }
        self.events.push(Event::Cleared);
        true
    }

    fn take_events(&mut self) -> Vec<Event> {
        debug_assert!(self.wire.is_vllm(), "only vLLM has a block pool");
        std::mem::take(&mut self.events)
    }

    fn usage(&self) -> Usage {
        let capacity = self.blocks.len() - 1;
        Usage { capacity, pinned: capacity - self.free.order.len(), cached: self.cached.len() }
    }
}

impl FreeQueue {
    fn push_back(&mut self, block: usize) -> i64 {
        self.back += 1;
        self.order.insert(self.back, block);
        self.back
    }

    fn push_front(&mut self, block: usize) -> i64 {
        // `front` is the next unused place before the first.
        let place = self.front;
        self.front -= 1;
        self.order.insert(place, block);
        place
    }

    fn pop(&mut self) -> Option<usize> {
        self.order.pop_first().map(|(_, block)| block)
    }
}
