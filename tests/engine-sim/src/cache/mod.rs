//! Paged prefix caches. vLLM's block pool and SGLang's radix tree differ in what they evict,
//! when they store and how they tell; the scheduler sees only [`PrefixCache`].
//!
//! Both hand out whole pages, never reuse the page with a prompt's last token, and never
//! evict a page that a started request holds.

mod blocks;
mod radix;

use crate::clock;
use crate::config::{Config, Wire};
use crate::events::Event;
use crate::hash::{ChainRule, Namespace};

/// Names a request inside one rank.
pub(crate) type RequestId = u64;

/// What a cache needs to know of a request besides its tokens.
#[derive(Clone, Debug, Default)]
pub(crate) struct CacheKey {
    pub(crate) namespace: Namespace,
    /// Shows in stores; separates nothing.
    pub(crate) session_id: Option<String>,
    /// vLLM's `kv_cache_report_mode: full`: tell again what was hit.
    pub(crate) report_hits: bool,
}

/// Outcome of a successful start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Started {
    /// Tokens that need no prefill.
    pub(crate) hit: usize,
    /// Tokens for which room was made in this step.
    pub(crate) scheduled: usize,
}

/// How full a cache is, in pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) capacity: usize,
    /// Held by started requests.
    pub(crate) pinned: usize,
    /// Distinct hashes that a new request could hit.
    pub(crate) cached: usize,
}

/// One rank's cache. `tokens` is always the whole sequence as far as it is known.
pub(crate) trait PrefixCache: Send {
    /// Takes the longest cached prefix of `tokens` and room for at most `most` tokens behind
    /// it. None when there is no room; then nothing is held.
    fn start(&mut self, id: RequestId, key: &CacheKey, tokens: &[u32], most: usize) -> Option<Started>;
    /// Makes room for the first `upto` tokens. False when there is none.
    fn grow(&mut self, id: RequestId, tokens: &[u32], upto: usize) -> bool;
    /// A prefill step for the first `upto` tokens is done.
    fn prefilled(&mut self, id: RequestId, tokens: &[u32], upto: usize);
    /// The request leaves, after `computed` tokens. Unknown requests are ignored.
    fn release(&mut self, id: RequestId, tokens: &[u32], computed: usize);
    /// Empties the cache, unless a request holds a page.
    fn clear(&mut self) -> bool;
    /// Events since the last call.
    fn take_events(&mut self) -> Vec<Event>;
    fn usage(&self) -> Usage;
}

/// The cache of one engine process.
pub(crate) fn new(config: &Config) -> Box<dyn PrefixCache> {
    let page_size = config.page_size as usize;
    let now = clock::since_epoch();
    let process = now.as_secs() ^ (u64::from(now.subsec_nanos()) << 32);
    let rule = ChainRule::new(config.wire, page_size, config.hash_seed.as_deref(), process);
    let pages = config.num_pages as usize;
    let cache: Box<dyn PrefixCache> = match config.wire {
        Wire::Vllm022 | Wire::Vllm032 | Wire::Vllm033 => {
            Box::new(blocks::BlockPool::new(config.wire, page_size, pages, rule))
        }
        Wire::Sglang0518 | Wire::Sglang0523 => {
            Box::new(radix::RadixTree::new(config.wire, page_size, pages, rule))
        }
    };
    if config.keeps_prefixes() { cache } else { Box::new(Forgetful(cache)) }
}

/// A cache without prefixes: no request finds what another one left, and nobody hears of it.
struct Forgetful(Box<dyn PrefixCache>);

impl PrefixCache for Forgetful {
    fn start(&mut self, id: RequestId, key: &CacheKey, tokens: &[u32], most: usize) -> Option<Started> {
        // A salt that no other request has.
        let namespace = Namespace { cache_salt: Some(format!("request {id}")), ..key.namespace.clone() };
        self.0.start(id, &CacheKey { namespace, ..key.clone() }, tokens, most)
    }

    fn grow(&mut self, id: RequestId, tokens: &[u32], upto: usize) -> bool {
        self.0.grow(id, tokens, upto)
    }

    fn prefilled(&mut self, id: RequestId, tokens: &[u32], upto: usize) {
        self.0.prefilled(id, tokens, upto);
    }

    fn release(&mut self, id: RequestId, tokens: &[u32], computed: usize) {
        self.0.release(id, tokens, computed);
    }

    fn clear(&mut self) -> bool {
        self.0.clear()
    }

    fn take_events(&mut self) -> Vec<Event> {
        drop(self.0.take_events());
        Vec::new()
    }

    fn usage(&self) -> Usage {
        Usage { cached: 0, ..self.0.usage() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache(wire: Wire, page_size: u32, num_pages: u32) -> Box<dyn PrefixCache> {
        new(&Config { wire, page_size, num_pages, ..Config::default() })
    }

    /// Runs a whole request and returns its hit.
    fn run(cache: &mut dyn PrefixCache, id: RequestId, key: &CacheKey, tokens: &[u32]) -> usize {
        let started = cache.start(id, key, tokens, usize::MAX).expect("there is room");
        cache.prefilled(id, tokens, tokens.len());
        cache.release(id, tokens, tokens.len());
        started.hit
    }

    const WIRES: [Wire; 5] =
        [Wire::Vllm022, Wire::Vllm032, Wire::Vllm033, Wire::Sglang0518, Wire::Sglang0523];

    #[test]
    fn hits_are_whole_pages_and_leave_the_last_token() {
        for wire in WIRES {
            let check = |why: &str, page, length: u32, expected| {
                let mut cache = cache(wire, page, 64);
                let tokens: Vec<u32> = (0..length).collect();
                assert_eq!(run(&mut *cache, 1, &CacheKey::default(), &tokens), 0, "{why}");
                assert_eq!(run(&mut *cache, 2, &CacheKey::default(), &tokens), expected, "{wire:?}: {why}");
            };
            check("the page of the last token is computed again", 32, 64, 32);
            check("one token behind the last page", 32, 65, 64);
            check("smaller pages, the same rule", 16, 64, 48);
            check("pages of one token", 1, 7, 6);
            check("shorter than a page", 16, 15, 0);
        }
    }

    #[test]
    fn without_prefix_caching_nothing_is_found_and_nothing_is_told() {
        for wire in WIRES {
            let config = Config { wire, page_size: 4, num_pages: 64, ..Config::default() };
            let mut cache = new(&Config { no_prefix_caching: true, ..config });
            let tokens: Vec<u32> = (0..32).collect();
            for id in 0..3 {
                assert_eq!(run(&mut *cache, id, &CacheKey::default(), &tokens), 0, "{wire:?}");
                assert!(cache.take_events().is_empty(), "{wire:?}");
            }
            assert_eq!(cache.usage().cached, 0, "{wire:?}");
        }
    }

    #[test]
    fn namespaces_share_nothing() {
        let lora = crate::config::Lora { name: "a".to_owned(), path: "/a".to_owned() };
        let salted = Namespace { cache_salt: Some("s".to_owned()), ..Namespace::default() };
        for wire in WIRES {
            for namespace in [Namespace::of_lora(&lora, 1), salted.clone()] {
                let mut cache = cache(wire, 4, 64);
                let tokens: Vec<u32> = (0..32).collect();
                let key = CacheKey { namespace, ..CacheKey::default() };
                run(&mut *cache, 1, &CacheKey::default(), &tokens);
                assert_eq!(run(&mut *cache, 2, &key, &tokens), 0, "{wire:?}");
                assert_eq!(run(&mut *cache, 3, &key, &tokens), 28, "{wire:?}");
            }
        }
    }

    #[test]
    fn pinned_pages_are_not_evicted_and_a_full_cache_refuses() {
        for wire in WIRES {
            let mut cache = cache(wire, 4, 9);
            let (first, second): (Vec<u32>, Vec<u32>) = ((0..16).collect(), (100..132).collect());
            let key = CacheKey::default();
            assert!(cache.start(1, &key, &first, usize::MAX).is_some());
            cache.prefilled(1, &first, 16);
            assert_eq!(cache.start(2, &key, &second, usize::MAX), None, "{wire:?}");
            assert!(!cache.clear(), "{wire:?}: a running request holds pages");
            assert_eq!(cache.usage().pinned, 4, "{wire:?}");
            cache.release(1, &first, 16);
            assert_eq!(cache.usage().pinned, 0, "{wire:?}");
            assert!(cache.start(2, &key, &second, usize::MAX).is_some(), "{wire:?}");
        }
    }

    /// The oracle keeps the set of hashes that events describe; a cache of the same size whose
    /// requests never overlap may claim nothing else. Seeds are printed on failure.
    #[test]
    fn events_describe_the_cache_at_every_moment() {
        for wire in WIRES {
            for seed in 1..40_u64 {
                let mut cache = cache(wire, 2, 12);
                let mut held: std::collections::HashMap<String, i32> = std::collections::HashMap::new();
                let mut random = seed;
                for id in 0..60 {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let (length, family) = (1 + (random >> 33) % 16, (random >> 50) % 3);
                    let tokens: Vec<u32> =
                        (0..length).map(|at| u32::try_from(family * 7 + at).unwrap()).collect();
                    run(&mut *cache, id, &CacheKey::default(), &tokens);
                    for event in cache.take_events() {
                        apply(&mut held, &event);
                    }
                    assert!(held.values().all(|count| *count > 0), "seed {seed}: removed what was not there");
                    assert_eq!(held.len(), cache.usage().cached, "{wire:?} seed {seed} request {id}");
                }
            }
        }
    }

    fn apply(held: &mut std::collections::HashMap<String, i32>, event: &Event) {
        match event {
            Event::Stored(stored) => {
                for hash in &stored.block_hashes {
                    *held.entry(format!("{hash:?}")).or_default() += 1;
                }
            }
            Event::Removed(removed) => {
                for hash in &removed.block_hashes {
                    let count = held.entry(format!("{hash:?}")).or_default();
                    *count -= 1;
                    if *count == 0 {
                        held.remove(&format!("{hash:?}"));
                    }
                }
            }
            Event::Cleared => held.clear(),
        }
    }
}
