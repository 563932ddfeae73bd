//! Which workers exist, and whether they may be picked.
//!
//! The fleet is a list that is swapped whole: readers take a snapshot and keep
//! it as long as they like. A worker that is not ready gets no new picks; what
//! it has in flight and what the router knows of its cache stay. A worker that
//! left is gone from the next snapshot on; its tasks end and its view is
//! forgotten, and whoever has a request there keeps it alive until that ends.
//!
//! [`worker`] is one of them; [`kubernetes`] finds them as pods, by the rules
//! in [`pods`]; [`probe`] asks them, [`load`] what they have in hand; [`pages`] compares their pages, [`rendering`]
//! their tokens.

pub mod kubernetes;
pub mod load;
pub mod pages;
pub mod pods;
pub mod probe;
pub mod rendering;
pub mod worker;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvrouter_core::ids::WorkerId;
use kvrouter_core::index::Index;
use kvrouter_core::policy::lineup::Lineup;
use kvrouter_crds::config::{EventTransport, PageSizePolicy, RouterConfig};
use kvrouter_crds::health::Problem;
use parking_lot::{Mutex, RwLock};
use tokio::sync::{Semaphore, watch};

pub use worker::{
    EventFacts, EventSockets, Exclusion, Handover, Member, Needs, Place, PodName, ReadyReason, ServedModel,
    TargetState, Worker, WorkerStatus,
};

use crate::feed;
use crate::pool::Pool;
use crate::proxy::upstream::Upstream;

/// Excluded pods that are kept by name: enough to see what they have in common.
const MAX_EXCLUDED: usize = 64;

/// A list of workers that does not change, sorted by id.
pub type Workers = Arc<[Arc<Worker>]>;

/// The list, and its targets as picks see them.
#[derive(Debug)]
pub struct Listed {
    /// All workers, sorted by id.
    pub workers: Workers,
    /// Their targets.
    pub lineup: Arc<Lineup>,
    /// By place in the lineup: the place of the target's worker in `workers`.
    owners: Vec<u32>,
}

/// The workers of one pool.
#[derive(Debug)]
pub struct Fleet {
    listed: RwLock<Arc<Listed>>,
    excluded: RwLock<Excluded>,
    /// Counts the changes of the list.
    changes: watch::Sender<u64>,
    /// Whether discovery has told of the workers once.
    known: AtomicBool,
    /// What is wrong with discovery, by what it reads.
    troubles: Mutex<BTreeMap<&'static str, Problem>>,
    /// One permit for each worker whose tokens may be compared at the same time.
    comparing: Semaphore,
}

/// Pods of the pool that never became workers because of their labels or
/// addresses, or not yet.
#[derive(Clone, Debug, Default)]
pub struct Excluded {
    /// The first ones, sorted.
    pub listed: Vec<Member>,
    /// How many there are, listed or not.
    pub count: usize,
    /// How many more only are not ready yet.
    pub waiting: usize,
}

/// Who came and who left.
#[derive(Debug, Default)]
pub struct Change {
    /// Workers that are new.
    pub joined: Vec<Arc<Worker>>,
    /// Workers that are in the list no more.
    pub left: Vec<Arc<Worker>>,
}

impl Default for Fleet {
    fn default() -> Self {
        Self {
            listed: RwLock::new(Arc::new(Listed::of(Vec::new()))),
            excluded: RwLock::default(),
            changes: watch::Sender::new(0),
            known: AtomicBool::new(false),
            troubles: Mutex::default(),
            comparing: Semaphore::new(rendering::AT_ONCE),
        }
    }
}

/// The workers of a static list, which was checked before.
pub fn of_static(config: &RouterConfig) -> Vec<Member> {
    let with_sockets = config.kv_events.transport == EventTransport::ZMQ;
    let member = |worker: &kvrouter_crds::config::StaticWorker| {
        let id = WorkerId::new(crate::config::worker_id(&worker.url).ok()?);
        let own = worker.kv_events.as_ref();
        Some(Member {
            pod: None,
            place: Place {
                role: pods::role_of(worker.role),
                handover: Handover::of(worker.protocol, worker.bootstrap_port),
                exclusion: None,
            },
            engine: worker.engine.unwrap_or(config.engine),
            dp_size: worker.dp_size,
            events: with_sockets.then(|| EventSockets::of(&id, own, &config.kv_events)).flatten(),
            id,
        })
    };
    config.discovery.workers.iter().filter_map(member).collect()
}

/// Makes the pool's fleet what discovery found: newcomers are probed and
/// followed, leavers are forgotten.
pub fn take(pool: &Arc<Pool>, upstream: &Upstream, found: &[Member]) {
    let change = pool.fleet.update(found, &pool.index);
    for worker in &change.joined {
        tracing::info!(target: "kv_router::fleet", worker = %worker.id, pod = pod(worker), role = %worker.place().role.label(), "worker joined");
        pool.metrics.fleet_changes.with_label_values(&["joined"]).inc();
        start(pool, upstream, worker);
    }
    for worker in &change.left {
        tracing::info!(target: "kv_router::fleet", worker = %worker.id, pod = pod(worker), "worker left");
        pool.metrics.fleet_changes.with_label_values(&["left"]).inc();
        worker.gone.cancel();
    }
    if !change.left.is_empty() {
        pool.scratches.clear();
        // Emptying a large view takes longer than a task may keep its thread.
        let pool = Arc::clone(pool);
        tokio::task::spawn_blocking(move || change.left.iter().for_each(|worker| pool.forget(worker)));
    }
}

/// Starts the tasks of a worker; they end when it leaves.
pub fn start(pool: &Arc<Pool>, upstream: &Upstream, worker: &Arc<Worker>) {
    let probing = probe::watch(Arc::clone(pool), upstream.clone(), Arc::clone(worker));
    tokio::spawn(worker.gone.clone().run_until_cancelled_owned(probing));
    let comparing = rendering::watch(Arc::clone(pool), upstream.clone(), Arc::clone(worker));
    tokio::spawn(worker.gone.clone().run_until_cancelled_owned(comparing));
    let asking = load::watch(Arc::clone(pool), upstream.clone(), Arc::clone(worker));
    tokio::spawn(worker.gone.clone().run_until_cancelled_owned(asking));
    feed::zmq::follow(pool, worker);
}

fn pod(worker: &Worker) -> &str {
    worker.pod.as_ref().map_or("", |pod| &*pod.name)
}

impl Fleet {
    /// All workers, sorted by id, as of now.
    pub fn workers(&self) -> Workers {
        Arc::clone(&self.listed.read().workers)
    }

    /// The same with their targets.
    pub fn listed(&self) -> Arc<Listed> {
        Arc::clone(&self.listed.read())
    }

    /// The worker named `id`.
    pub fn worker(&self, id: &str) -> Option<Arc<Worker>> {
        find(&self.listed.read().workers, id).cloned()
    }

    /// Whether this very target, not one of the same name, is in the fleet.
    pub fn has(&self, target: &Arc<TargetState>) -> bool {
        let worker = self.worker(target.target.worker.as_str());
        worker.is_some_and(|worker| worker.targets.iter().any(|own| Arc::ptr_eq(own, target)))
    }

    /// Pods of the pool that are no workers.
    pub fn excluded(&self) -> Excluded {
        self.excluded.read().clone()
    }

    /// Hears of changes of the list from now on.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Whether discovery has told of the workers once.
    pub fn is_known(&self) -> bool {
        self.known.load(Ordering::Relaxed)
    }

    /// Takes over what discovery found, in any order; ids are distinct, apart
    /// from those of pods that are excluded for their address. A
    /// worker stays itself as long as its address and its pod's UID do, also
    /// while it is excluded; an excluded pod does not become a worker.
    pub fn update(&self, found: &[Member], index: &Arc<Index>) -> Change {
        let mut listed = self.listed.write();
        let workers = &listed.workers;
        let (mut change, mut excluded) = (Change::default(), Excluded::default());
        let mut next: Vec<Arc<Worker>> = Vec::with_capacity(found.len());
        for member in found {
            // An address can be another pod's by now.
            let own = member.place.exclusion != Some(Exclusion::SameAddress);
            let known = find(workers, member.id.as_str()).filter(|worker| own && worker.pod == member.pod);
            if let Some(worker) = known {
                worker.put(member.place);
                next.push(Arc::clone(worker));
            } else if let Some(exclusion) = member.place.exclusion {
                excluded.add(exclusion, member);
            } else {
                let worker = Arc::new(Worker::new(member, index));
                change.joined.push(Arc::clone(&worker));
                next.push(worker);
            }
        }
        next.sort_by(|a, b| a.id.cmp(&b.id));
        let stays = |worker: &&Arc<Worker>| {
            find(&next, worker.id.as_str()).is_some_and(|next| Arc::ptr_eq(next, worker))
        };
        change.left = workers.iter().filter(|worker| !stays(worker)).cloned().collect();
        excluded.listed.sort_by(|a, b| a.id.cmp(&b.id));
        *self.excluded.write() = excluded;
        self.known.store(true, Ordering::Relaxed);
        if !change.joined.is_empty() || !change.left.is_empty() {
            *listed = Arc::new(Listed::of(next));
            drop(listed);
            self.changes.send_modify(|count| *count += 1);
        }
        change
    }

    /// Names that requests may use, sorted: the pool's and what workers serve.
    pub fn models(&self, base: &str) -> Vec<ServedModel> {
        let mut models = vec![ServedModel { name: base.to_owned(), adapter: false }];
        for worker in self.workers().iter() {
            models.extend(worker.status().models);
        }
        models.sort();
        models.dedup_by(|a, b| a.name == b.name);
        models
    }

    /// How many workers do not say what they serve: any of them may serve more
    /// than [`Fleet::models`] knows.
    pub fn silent(&self) -> usize {
        self.workers().iter().filter(|worker| worker.status().is_silent()).count()
    }

    /// Lets workers in or keeps them out by their pages, as `policy` has it.
    pub fn review_pages(&self, block: u32, policy: PageSizePolicy) {
        let workers = self.workers();
        let odd = match policy {
            PageSizePolicy::Report => pages::Verdict::default(),
            PageSizePolicy::RequireParity => pages::judge(block, &pages::facts(&workers)),
        };
        for worker in workers.iter() {
            worker.set_odd_page(odd.is_kept_out(&worker.id));
        }
    }

    /// Notes what is wrong with reading `what`, or that nothing is; whether
    /// anything was before.
    pub fn set_trouble(&self, what: &'static str, trouble: Option<Problem>) -> bool {
        let mut troubles = self.troubles.lock();
        let before = match trouble {
            Some(problem) => troubles.insert(what, problem),
            None => troubles.remove(what),
        };
        before.is_some()
    }

    /// Whether the router lately had nothing to ask some worker with.
    fn is_unable_to_ask(&self) -> bool {
        self.workers().iter().any(|worker| worker.is_unasked.load(Ordering::Relaxed))
    }

    /// What is wrong with discovery and probes; one problem of a kind.
    pub fn troubles(&self) -> Vec<Problem> {
        let mut problems: Vec<Problem> = self.troubles.lock().values().cloned().collect();
        problems.dedup_by(|a, b| a.reason == b.reason && a.reason == kubernetes::UNREACHABLE);
        problems.extend(self.is_unable_to_ask().then(probe::exhausted));
        problems
    }
}

impl Listed {
    /// Of workers that are sorted by id.
    fn of(workers: Vec<Arc<Worker>>) -> Self {
        let ranks = workers.iter().map(|worker| worker.targets.len());
        Self {
            owners: (0..).zip(ranks).flat_map(|(place, ranks)| std::iter::repeat_n(place, ranks)).collect(),
            lineup: Arc::new(Lineup::new(workers.iter().flat_map(|worker| worker.entrants()))),
            workers: workers.into(),
        }
    }

    /// The worker of the target at `place` of the lineup.
    pub fn owner(&self, place: usize) -> &Arc<Worker> {
        &self.workers[self.owners[place] as usize]
    }
}

impl Excluded {
    fn add(&mut self, exclusion: Exclusion, member: &Member) {
        match exclusion {
            Exclusion::PodNotReady => self.waiting += 1,
            Exclusion::NoRole | Exclusion::TwoRoles | Exclusion::TwoPools | Exclusion::SameAddress => {
                self.count += 1;
                if self.listed.len() < MAX_EXCLUDED {
                    self.listed.push(member.clone());
                }
            }
        }
    }
}

/// The worker named `id` in a sorted list.
pub fn find<'a>(workers: &'a [Arc<Worker>], id: &str) -> Option<&'a Arc<Worker>> {
    let at = workers.binary_search_by(|worker| worker.id.as_str().cmp(id)).ok()?;
    workers.get(at)
}

#[cfg(test)]
#[path = "tests.rs"]
pub(crate) mod tests;
