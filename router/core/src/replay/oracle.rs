//! Every assignment again, slowly and in another way.
//!
//! Nothing here uses the policies, the books, the engines or the caches of the
//! replay. Jobs stand in plain lists; every decision recounts every list; a cache
//! is a table of the time of last use; every policy's rule is written out once
//! more, as the order in which the candidates would be preferred. The oracle
//! follows the recorded choices, so that one difference does not hide the next.
//! It checks shipped policies; peers' models are comparisons, not promises.

use std::collections::{BTreeMap, BTreeSet};

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::run::{InFlightCredit, Plan, Run, worker_names};
use super::trace::{TimedRequest, Trace};
use crate::blocks::BlockHash;
use crate::policy::{PolicyKind, Settings};

/// Where the replay and the oracle differ.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("request {request}: {what} is {replay} in the replay and {oracle} by the oracle")]
pub struct Difference {
    /// The request's id.
    pub request: String,
    /// What differs.
    pub what: &'static str,
    /// The replay's.
    pub replay: u64,
    /// The oracle's.
    pub oracle: u64,
}

/// Costs this close, relatively, may fall either way: the two sum in another
/// order.
const ROUNDING: f64 = 1e-12;

/// Recomputes every assignment of `run` and what came of it.
pub fn check(
    trace: &Trace,
    plan: &Plan,
    settings: &Settings,
    run: &Run,
    mut progress: impl FnMut(usize),
) -> Result<(), Difference> {
    let mut workers: Vec<Worker> = (0..plan.workers).map(|_| Worker::default()).collect();
    let mut order: Vec<(u64, usize)> = trace
        .requests
        .iter()
        .enumerate()
        .map(|(place, request)| (run.served[place].arrived.max(request.pace), place))
        .collect();
    order.sort_unstable();
    let mut previous = None;
    for (done, (now, place)) in order.into_iter().enumerate() {
        workers.iter_mut().for_each(|worker| worker.catch_up(trace, plan, now));
        let request = &trace.requests[place];
        let facts: Vec<Facts> = workers.iter().map(|worker| worker.facts(trace, plan, request)).collect();
        let recorded = run.served[place].worker as usize;
        let preferred = prefer(settings, trace, request, &facts, previous);
        if !preferred.contains(&recorded) {
            return Err(differ(request, "worker", recorded as u64, preferred[0] as u64));
        }
        previous = Some(recorded);
        let predicted = facts[recorded].hits;
        if predicted != run.served[place].predicted {
            return Err(differ(request, "predicted hits", run.served[place].predicted, predicted));
        }
        workers[recorded].jobs.push(Job::new(trace, place, predicted));
        workers[recorded].wake(trace, plan, now);
        progress(done + 1);
    }
    workers.iter_mut().for_each(|worker| worker.catch_up(trace, plan, u64::MAX));
    for (place, done) in workers.iter().flat_map(|worker| &worker.done) {
        let (request, served) = (&trace.requests[*place], &run.served[*place]);
        for (what, replay, oracle) in [
            ("hit blocks", served.hits, done.hits),
            ("time of the first token", served.first_token, done.first_token),
            ("time of the last token", served.finished, done.finished),
        ] {
            if replay != oracle {
                return Err(differ(request, what, replay, oracle));
            }
        }
    }
    Ok(())
}

fn differ(request: &TimedRequest, what: &'static str, replay: u64, oracle: u64) -> Difference {
    Difference { request: request.id.to_string(), what, replay, oracle }
}

/// One request in an engine.
#[derive(Clone, Debug)]
struct Job {
    place: usize,
    booked: u64,
    started: bool,
    hits: u64,
    left: u64,
    generated: u64,
    first_token: u64,
    finished: u64,
}

impl Job {
    fn new(trace: &Trace, place: usize, predicted: u64) -> Self {
        let request = &trace.requests[place];
        let booked = request.prompt.0 - predicted * u64::from(trace.size.tokens());
        Self { place, booked, started: false, hits: 0, left: 0, generated: 0, first_token: 0, finished: 0 }
    }
}

/// One engine: its jobs in the order of arrival, and when it used each block.
#[derive(Debug, Default)]
struct Worker {
    jobs: Vec<Job>,
    used: BTreeMap<BlockHash, u64>,
    by_use: BTreeMap<u64, BlockHash>,
    uses: u64,
    ends: Option<u64>,
    done: Vec<(usize, Job)>,
}

/// What a decision knows of one worker.
#[derive(Debug)]
struct Facts {
    hits: u64,
    active: u64,
    shared: u64,
    queued: u64,
    context: u64,
    requests: u64,
}

impl Worker {
    fn catch_up(&mut self, trace: &Trace, plan: &Plan, now: u64) {
        while let Some(end) = self.ends.filter(|end| *end <= now) {
            self.finish_step(trace, plan, end);
            self.ends = None;
            self.wake(trace, plan, end);
        }
    }

    /// Begins a step if none is under way and there is something to do.
    fn wake(&mut self, trace: &Trace, plan: &Plan, now: u64) {
        if self.ends.is_some() || self.jobs.is_empty() {
            return;
        }
        let model = plan.model;
        let decoding: Vec<usize> = (0..self.jobs.len()).filter(|at| self.jobs[*at].generated > 0).collect();
        let context: u64 = decoding
            .iter()
            .map(|at| &self.jobs[*at])
            .map(|job| trace.requests[job.place].prompt.0 + job.generated)
            .sum();
        let mut room = model.chunk_tokens;
        let mut running = decoding.len() as u64;
        for at in 0..self.jobs.len() {
            if self.jobs[at].generated > 0 {
                continue;
            }
            if room == 0 || (!self.jobs[at].started && running >= model.max_decoding) {
                break;
            }
            if !self.jobs[at].started {
                self.look_up(trace, at);
            }
            let taken = room.min(self.jobs[at].left);
            self.jobs[at].left -= taken;
            room -= taken;
            running += 1;
            if self.jobs[at].left > 0 {
                break;
            }
        }
        let lasts = model.step_ns
            + (model.chunk_tokens - room) * model.prefill_token_ns
            + decoding.len() as u64 * model.decode_request_ns
            + context * model.context_token_ns;
        self.ends = Some(now + lasts);
    }

    fn look_up(&mut self, trace: &Trace, at: usize) {
        let request = &trace.requests[self.jobs[at].place];
        let block = u64::from(trace.size.tokens());
        let held = request.blocks.iter().take_while(|hash| self.used.contains_key(hash)).count() as u64;
        let hits = held.min(request.prompt.0.saturating_sub(1) / block);
        for hash in request.blocks[..hits as usize].iter().rev() {
            self.use_now(*hash);
        }
        let job = &mut self.jobs[at];
        (job.started, job.hits, job.left) = (true, hits, request.prompt.0 - hits * block);
    }

    fn finish_step(&mut self, trace: &Trace, plan: &Plan, now: u64) {
        let mut stored = Vec::new();
        for job in &mut self.jobs {
            let output = trace.requests[job.place].output;
            if job.generated > 0 {
                job.generated += 1;
            } else if job.started && job.left == 0 {
                (job.generated, job.first_token) = (1, now);
                stored.push(job.place);
            }
            if job.generated == output {
                job.finished = now;
            }
        }
        for place in stored {
            let blocks = &trace.requests[place].blocks;
            let fits = blocks.len().min(usize::try_from(plan.model.capacity_blocks).unwrap_or(usize::MAX));
            for hash in blocks[..fits].iter().rev() {
                let is_full = self.used.len() as u64 == plan.model.capacity_blocks;
                if is_full
                    && !self.used.contains_key(hash)
                    && let Some((_, oldest)) = self.by_use.pop_first()
                {
                    self.used.remove(&oldest);
                }
                self.use_now(*hash);
            }
        }
        let (done, left) = std::mem::take(&mut self.jobs).into_iter().partition(|job| job.finished > 0);
        self.jobs = left;
        let done: Vec<Job> = done;
        self.done.extend(done.into_iter().map(|job| (job.place, job)));
    }

    fn use_now(&mut self, hash: BlockHash) {
        self.uses += 1;
        if let Some(before) = self.used.insert(hash, self.uses) {
            self.by_use.remove(&before);
        }
        self.by_use.insert(self.uses, hash);
    }

    fn facts(&self, trace: &Trace, plan: &Plan, request: &TimedRequest) -> Facts {
        let block = u64::from(trace.size.tokens());
        let blocks_of = |jobs: Vec<&Job>| -> BTreeSet<BlockHash> {
            jobs.into_iter().flat_map(|job| trace.requests[job.place].blocks.iter().copied()).collect()
        };
        let active = blocks_of(self.jobs.iter().collect());
        let coming = match plan.in_flight_credit {
            InFlightCredit::Enabled => blocks_of(self.jobs.iter().filter(|job| job.generated == 0).collect()),
            InFlightCredit::Disabled => BTreeSet::new(),
        };
        let leading = |counts: &dyn Fn(&BlockHash) -> bool| {
            request.blocks.iter().position(|hash| !counts(hash)).unwrap_or(request.blocks.len()) as u64
        };
        let most = request.prompt.0.saturating_sub(1) / block;
        Facts {
            hits: most.min(leading(&|hash| self.used.contains_key(hash) || coming.contains(hash))),
            active: active.len() as u64 + self.jobs.iter().map(|job| 1 + job.generated / block).sum::<u64>(),
            shared: leading(&|hash| active.contains(hash)),
            queued: self.jobs.iter().filter(|job| job.generated == 0).map(|job| job.booked).sum(),
            context: self.jobs.iter().map(|job| trace.requests[job.place].prompt.0 + job.generated).sum(),
            requests: self.jobs.len() as u64,
        }
    }
}

/// The workers that may be chosen: one, unless costs differ by rounding alone.
fn prefer(
    settings: &Settings,
    trace: &Trace,
    request: &TimedRequest,
    facts: &[Facts],
    previous: Option<usize>,
) -> Vec<usize> {
    if settings.policy == PolicyKind::RoundRobin {
        return vec![previous.map_or(0, |previous| (previous + 1) % facts.len())];
    }
    let costs: Vec<f64> = facts.iter().map(|one| cost(settings, trace, request, one, facts)).collect();
    let least = costs.iter().copied().fold(f64::INFINITY, f64::min);
    let margin = ROUNDING * costs.iter().fold(1.0, |most, cost| cost.abs().max(most));
    let near: Vec<usize> = (0..facts.len()).filter(|at| costs[*at] - least <= margin).collect();
    if near.iter().any(|at| costs[*at] != least) {
        return near;
    }
    let fewest = near.iter().map(|at| facts[*at].active).min().unwrap_or(0);
    let mut tied: Vec<usize> = near.into_iter().filter(|at| facts[*at].active == fewest).collect();
    let unheld = tied.iter().map(|at| facts[*at].hits).max().unwrap_or(0) as usize;
    let key = request.blocks.get(unheld).map_or_else(|| xxh3_64_with_seed(request.id.as_bytes(), 0), |b| b.0);
    let names = worker_names(facts.len());
    let lot = |at: usize| xxh3_64_with_seed(&[names[at].as_bytes(), &[0; 5]].concat(), key);
    tied.sort_by(|a, b| lot(*b).cmp(&lot(*a)).then(a.cmp(b)));
    tied.truncate(1);
    tied
}

fn cost(settings: &Settings, trace: &Trace, request: &TimedRequest, one: &Facts, all: &[Facts]) -> f64 {
    let block = u64::from(trace.size.tokens());
    let weight = settings.overlap.default;
    let uncached = request.prompt.0.saturating_sub(one.hits * block);
    let missing = request.blocks.len() as u64 - one.hits;
    match settings.policy {
        PolicyKind::CachePlusLoad => {
            let work = |one: &Facts| (one.queued + one.context) as f64;
            let excess = work(one) - all.iter().map(work).sum::<f64>() / all.len() as f64;
            let load = settings.load;
            let terms = [
                load.imbalance * excess.max(0.0),
                load.request * one.requests as f64,
                load.decode * one.context as f64,
                load.queue * one.queued as f64,
                weight * uncached as f64,
            ];
            terms.iter().sum()
        }
        PolicyKind::KvAware => weight * missing as f64 + (one.active - one.shared.min(one.active)) as f64,
        PolicyKind::LongestPrefix => missing as f64,
        PolicyKind::LeastLoad => one.active as f64,
        PolicyKind::LMetric => ((one.queued + uncached) * (one.requests + 1)) as f64,
        PolicyKind::RoundRobin => 0.0,
    }
}
