//! `dynamo-kv-router`'s selection service, without its HTTP.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use anyhow::Context;
use dynamo_kv_router::identity::RoutingPartitionId;
use dynamo_kv_router::protocols::RoutingConstraints;
use dynamo_kv_router::services::indexer::backend::Indexer;
use dynamo_kv_router::services::indexer::registry::WorkerRegistry;
use dynamo_kv_router::services::selection::{
    KvEventIngress, KvIndexSource, PromptRequest, RouterPluginRegistry, SelectAndReserveRequest,
    SelectionCore, SelectionService, SelectionServiceBuilder, WorkerRequest,
};
use dynamo_kv_router::{KvRouterConfig, WorkerSelectionPolicy, WorkerType};
use tokio::runtime::Runtime;

use super::writer::{Takes, Writers};
use crate::ours::BLOCK;
use crate::shapes::{EVENT, Held, quantile};

/// Threads that apply events; lookups run on the caller's.
const EVENT_THREADS: usize = 2;

pub(super) struct Theirs {
    core: Arc<SelectionCore>,
    /// Ends the core when it is dropped.
    _service: SelectionService,
    runtime: Runtime,
    prompts: Arc<Vec<PromptRequest>>,
    known: Arc<Vec<PromptRequest>>,
    /// How often throughput was measured: no request's id comes twice.
    runs: AtomicUsize,
}

/// Events come from this process, as the frontend that embeds the service feeds
/// them, and not from one socket per worker.
struct InProcess;

impl KvEventIngress for InProcess {
    fn open(&self, registry: &WorkerRegistry, key: &RoutingPartitionId, block_size: u32) -> Indexer {
        registry.get_or_create_indexer(key.clone(), block_size)
    }
}

impl Theirs {
    pub(super) fn new(workers: u32, held: &[Held], prompts: &[Vec<u32>]) -> anyhow::Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let config =
            KvRouterConfig { use_kv_events: true, router_queue_threshold: None, ..Default::default() };
        let service =
            SelectionServiceBuilder::new(config, WorkerType::Aggregated, RouterPluginRegistry::default())
                .worker_selection_policy_factory(Arc::new(|config, role, _| {
                    WorkerSelectionPolicy::reference(config.clone(), role.default_selector_label())
                }))
                .kv_index(KvIndexSource::Owned(Arc::new(InProcess)))
                .indexer_threads(EVENT_THREADS);
        let service = runtime.block_on(service.build())?;
        let core = Arc::clone(service.core());
        runtime.block_on(async {
            for worker in 0..workers {
                core.upsert_worker(WorkerRequest {
                    worker_id: worker.into(),
                    endpoint: Some(format!("http://10.0.{}.{}:8000", worker / 256, worker % 256)),
                    block_size: Some(BLOCK),
                    max_num_batched_tokens: Some(8192),
                    ..WorkerRequest::default()
                })
                .await
                .map_err(|error| anyhow::anyhow!("failed to add a worker: {error}"))?;
            }
            anyhow::Ok(())
        })?;
        let of_tokens =
            |tokens: &Vec<u32>| PromptRequest { token_ids: Some(tokens.clone()), ..Default::default() };
        let of_hashes = |tokens: &Vec<u32>| {
            let local = crate::theirs::local(tokens);
            PromptRequest {
                sequence_hashes: Some(
                    crate::theirs::chain(&local).into_iter().map(|hash| hash as i64).collect(),
                ),
                block_hashes: Some(local.into_iter().map(|hash| hash.0 as i64).collect()),
                isl_tokens: Some(tokens.len()),
                ..Default::default()
            }
        };
        let theirs = Self {
            core,
            _service: service,
            runtime,
            prompts: Arc::new(prompts.iter().map(of_tokens).collect()),
            known: Arc::new(prompts.iter().map(of_hashes).collect()),
            runs: AtomicUsize::new(0),
        };
        let indexer = theirs.indexer()?;
        theirs.runtime.block_on(async {
            for event in held.iter().flat_map(|held| crate::theirs::stores(held, EVENT)) {
                indexer.apply_event_routed(event).await?;
            }
            anyhow::Ok(())
        })?;
        theirs.drain();
        Ok(theirs)
    }

    fn indexer(&self) -> anyhow::Result<Indexer> {
        let partition = self.core.partition(&RoutingPartitionId::new("default", "default"));
        Ok(partition.context("there are workers, so there is a partition")?.indexer().clone())
    }

    /// Median of one decision in microseconds, as a task of its runtime sees it.
    pub(super) fn latency(&self, count: usize, in_flight: usize, known: bool) -> f64 {
        let core = Arc::clone(&self.core);
        let prompts = Arc::clone(if known { &self.known } else { &self.prompts });
        let task = async move {
            let mut leases = VecDeque::new();
            let mut samples = Vec::new();
            for at in 0..count + in_flight {
                let prompt = prompts[at % prompts.len()].clone();
                let start = Instant::now();
                let (id, request) = request(format!("request-{at}"), prompt);
                core.select_and_reserve(request).await.expect("reserved");
                let elapsed = start.elapsed();
                leases.push_back(id);
                if leases.len() > in_flight {
                    samples.push(elapsed.as_nanos() as f64 / 1000.0);
                    let oldest = leases.pop_front().expect("there is one");
                    core.free_reservation(&oldest).await.expect("freed");
                }
            }
            for id in leases {
                core.free_reservation(&id).await.expect("freed");
            }
            quantile(&mut samples, 0.5)
        };
        self.runtime.block_on(self.runtime.spawn(task)).expect("the task ended")
    }

    /// Seconds that `callers` take for `each` decisions and releases.
    pub(super) fn throughput(&self, callers: usize, each: usize) -> f64 {
        let start = Instant::now();
        let run = self.runs.fetch_add(1, Ordering::Relaxed);
        let tasks: Vec<_> = (0..callers)
            .map(|caller| {
                let (core, prompts) = (Arc::clone(&self.core), Arc::clone(&self.prompts));
                self.runtime.spawn(async move {
                    for at in 0..each {
                        let prompt = prompts[(caller + at) % prompts.len()].clone();
                        let (id, request) = request(format!("request-{run}-{caller}-{at}"), prompt);
                        core.select_and_reserve(request).await.expect("reserved");
                        core.free_reservation(&id).await.expect("freed");
                    }
                })
            })
            .collect();
        self.runtime.block_on(async {
            for task in tasks {
                task.await.expect("the task ended");
            }
        });
        start.elapsed().as_secs_f64()
    }
}

impl Takes for Theirs {
    const SIDE: usize = 1;

    fn take(&self, writers: &Writers, at: usize) {
        if let Ok(Indexer::Concurrent { primary, .. }) = self.indexer() {
            primary.enqueue_event(writers.theirs(at)).expect("its queue is unbounded");
        }
    }

    fn drain(&self) {
        let Ok(Indexer::Concurrent { primary, .. }) = self.indexer() else {
            panic!("two event threads make it the concurrent index")
        };
        self.runtime.block_on(primary.flush_and_wait()).expect("flushed");
    }
}

fn request(id: String, prompt: PromptRequest) -> (String, SelectAndReserveRequest) {
    let request = SelectAndReserveRequest {
        model_name: "default".to_owned(),
        routing_group: "default".to_owned(),
        selection_id: Some(id.clone()),
        prompt,
        router_config_override: None,
        expected_output_tokens: None,
        priority_jump: None,
        strict_priority: None,
        session_id: None,
        session_context: None,
        affinity_target: None,
        pinned_worker: None,
        allowed_worker_ids: None,
        routing_constraints: RoutingConstraints::default(),
    };
    (id, request)
}
