//! Other routers' rules, as models for comparison only. Nothing here is shipped.
//!
//! Each is written from its published source or documentation, with its default
//! settings, over the same facts that our policies see. What they lack in
//! practice is given to them: exact cache views and engine metrics without
//! delay. Random ties are replaced by a hash, so that a replay repeats.

use serde::Serialize;
use xxhash_rust::xxh3::xxh3_64;

use crate::policy::{Candidate, PickRequest};

/// A rule of another router.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Peer {
    /// NVIDIA Dynamo 1.6: `scale × max(queued + prompt − hits, 0) + decode
    /// blocks`, in blocks.
    Dynamo {
        /// `prefill_load_scale`; before 1.6 the overlap weight.
        scale: f64,
    },
    /// The published formula as published: `overlap × (blocks − hits) + active
    /// blocks`. Our `kv-aware` also forgives blocks that are shared.
    Published {
        /// Weight of blocks that are not cached.
        overlap: f64,
    },
    /// llm-d's scheduler: a weighted sum of scores between 0 and 1.
    LlmD {
        /// Of the prompt's share that is cached.
        prefix: f64,
        /// Of the shortest queue of waiting requests.
        queue: f64,
        /// Of free cache memory.
        utilisation: f64,
    },
    /// SGLang's gateway, `cache_aware`.
    Sglang(CacheAware),
    /// vllm-router, `cache_aware`: the same with other defaults, and below the
    /// threshold the smallest tree instead of the lightest load.
    VllmRouter(CacheAware),
}

/// Thresholds of the cache-aware rules.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct CacheAware {
    /// Least share of the prompt that must match.
    pub threshold: f64,
    /// The fleet is imbalanced above this difference in requests ...
    pub balance_abs: f64,
    /// ... and this ratio.
    pub balance_rel: f64,
}

impl Peer {
    /// All, with their defaults.
    pub const DEFAULTS: [Self; 5] = [
        Self::Dynamo { scale: 1.0 },
        Self::Published { overlap: 1.0 },
        Self::LlmD { prefix: 3.0, queue: 2.0, utilisation: 2.0 },
        Self::Sglang(CacheAware { threshold: 0.3, balance_abs: 64.0, balance_rel: 1.5 }),
        Self::VllmRouter(CacheAware { threshold: 0.5, balance_abs: 32.0, balance_rel: 1.1 }),
    ];

    /// Its name in flags and tables.
    pub const fn label(&self) -> &'static str {
        match self {
            Self::Dynamo { .. } => "dynamo",
            Self::Published { .. } => "published",
            Self::LlmD { .. } => "llm-d",
            Self::Sglang(_) => "sglang",
            Self::VllmRouter(_) => "vllm-router",
        }
    }
}

/// What peers see beside the candidates, each in their order.
#[derive(Clone, Copy, Debug)]
pub struct Sight<'a> {
    /// Requests that wait in each engine.
    pub waiting: &'a [u64],
    /// Blocks that each engine's cache can hold.
    pub capacity: u64,
    /// Blocks ever sent to each target: the size of its tree.
    pub sent: &'a [u64],
    /// Leading blocks of the request that were sent somewhere before, and where
    /// the last of them went.
    pub matched: Option<(u64, usize)>,
}

/// Position of the chosen candidate; `None` if there are none.
pub fn choose(
    peer: &Peer,
    request: &PickRequest<'_>,
    candidates: &[Candidate],
    sight: &Sight<'_>,
) -> Option<usize> {
    match peer {
        Peer::Dynamo { scale } => lowest(request, candidates, |at| dynamo(*scale, request, &candidates[at])),
        Peer::Published { overlap } => lowest(request, candidates, |at| {
            let candidate = &candidates[at];
            let missing = request.blocks.len() as u64 - candidate.hits.total();
            overlap * missing as f64 + candidate.load.active_blocks as f64
        }),
        Peer::LlmD { prefix, queue, utilisation } => {
            let most = sight.waiting.iter().max().copied().unwrap_or(0) as f64;
            let least = sight.waiting.iter().min().copied().unwrap_or(0) as f64;
            let blocks = request.blocks.len().max(1) as f64;
            lowest(request, candidates, |at| {
                let candidate = &candidates[at];
                let waits = sight.waiting[at] as f64;
                let short = if most > least { (most - waits) / (most - least) } else { 1.0 };
                let used = candidate.load.active_blocks as f64 / sight.capacity.max(1) as f64;
                let cached = candidate.hits.total() as f64 / blocks;
                -(prefix * cached + queue * short + utilisation * (1.0 - used.min(1.0)))
            })
        }
        Peer::Sglang(settings) => {
            cache_aware(settings, request, candidates, sight, |at| candidates[at].load.requests)
        }
        Peer::VllmRouter(settings) => cache_aware(settings, request, candidates, sight, |at| sight.sent[at]),
    }
}

fn dynamo(scale: f64, request: &PickRequest<'_>, candidate: &Candidate) -> f64 {
    let block = f64::from(request.size.tokens());
    let tokens = (candidate.load.queued.0 + request.prompt.0) as f64;
    let prefill = (tokens / block - candidate.hits.total() as f64).max(0.0);
    let blocks = request.prompt.0.div_ceil(u64::from(request.size.tokens()));
    let decode = candidate.load.active_blocks + blocks.saturating_sub(candidate.shared_active);
    scale * prefill + decode as f64
}

/// When imbalanced the fewest requests; else where the prefix was sent, if
/// enough of it matches; else the least by `cold`.
fn cache_aware(
    settings: &CacheAware,
    request: &PickRequest<'_>,
    candidates: &[Candidate],
    sight: &Sight<'_>,
    cold: impl Fn(usize) -> u64,
) -> Option<usize> {
    let load = |at: &usize| candidates[*at].load.requests;
    let places = || 0..candidates.len();
    let (most, least) = (places().map(|at| load(&at)).max()?, places().map(|at| load(&at)).min()?);
    let imbalanced =
        (most - least) as f64 > settings.balance_abs && most as f64 > least as f64 * settings.balance_rel;
    if imbalanced {
        return places().min_by_key(load);
    }
    let share = |blocks: u64| blocks as f64 / request.blocks.len().max(1) as f64;
    match sight.matched {
        Some((blocks, at)) if share(blocks) > settings.threshold => Some(at),
        _ => places().min_by_key(|at| cold(*at)),
    }
}

/// The cheapest; equals by a hash of request and position.
fn lowest(request: &PickRequest<'_>, candidates: &[Candidate], cost: impl Fn(usize) -> f64) -> Option<usize> {
    let costs: Vec<f64> = (0..candidates.len()).map(cost).collect();
    let least = costs.iter().copied().min_by(f64::total_cmp)?;
    let lot = |at: &usize| {
        let mut name = request.id.as_bytes().to_vec();
        name.extend_from_slice(&(*at as u64).to_le_bytes());
        xxh3_64(&name)
    };
    (0..candidates.len()).filter(|at| costs[*at] <= least).min_by_key(lot)
}
