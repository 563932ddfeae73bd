//! One trace under one rule: decisions by the policy code, on a virtual clock.
//!
//! Every run starts from empty engines, empty books and no turn, so that no rule
//! sees what another did. At equal times engines end their steps first, in their
//! order, then requests arrive in theirs.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use serde::Serialize;

use super::contender::Contender;
use super::engine::{Engine, Happened, Model};
use super::load::Books;
use super::peers::{self, Sight};
use super::trace::{TimedRequest, Trace};
use crate::ids::{Epoch, Role, Target, WorkerId};
use crate::policy::hits::usable;
use crate::policy::{Candidate, Evidence, Load, PickRequest, decide};
use crate::trust::{Reason, State, Verdict};
use crate::units::TierHits;

/// Most workers of a replay.
pub const MAX_WORKERS: usize = 1024;

/// Whether booked prompts count as predicted hits until their first byte.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum InFlightCredit {
    /// They count.
    #[default]
    Enabled,
    /// Only what the view holds counts.
    Disabled,
}

/// Everything that shapes a run beside the trace and the rule.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Plan {
    /// Engines, at least one.
    pub workers: usize,
    /// How much faster than recorded requests arrive, or sessions start, in
    /// thousandths.
    pub rate_milli: u64,
    /// What engines are.
    pub model: Model,
    /// Whether booked prompts count as hits.
    pub in_flight_credit: InFlightCredit,
}

/// What became of one request. Times are nanoseconds of the virtual clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Served {
    /// When it arrived.
    pub arrived: u64,
    /// Place of the worker that served it.
    pub worker: u32,
    /// Blocks that the router predicted to hit.
    pub predicted: u64,
    /// Blocks that hit.
    pub hits: u64,
    /// When its first token came.
    pub first_token: u64,
    /// When its last token came.
    pub finished: u64,
}

/// A run's outcome.
#[derive(Clone, Debug)]
pub struct Run {
    /// One per request, in the trace's order.
    pub served: Vec<Served>,
    /// Nanoseconds that each worker spent in steps.
    pub busy_ns: Vec<u64>,
    /// Blocks that each worker evicted.
    pub evicted: Vec<u64>,
}

/// Replays `trace` under `contender`. `progress` is told the arrivals decided so
/// far, after each.
pub fn run(trace: &Trace, plan: &Plan, contender: &Contender, mut progress: impl FnMut(usize)) -> Run {
    let mut fleet = Fleet::new(trace, plan);
    let mut order: Vec<usize> = (0..trace.requests.len()).collect();
    order.sort_by_key(|place| (fleet.served[*place].arrived, *place));
    for (done, place) in order.into_iter().enumerate() {
        let now = fleet.served[place].arrived;
        fleet.advance(now);
        let chosen = fleet.decide(contender, place);
        fleet.route(place, chosen, now);
        progress(done + 1);
    }
    fleet.advance(u64::MAX);
    Run {
        busy_ns: fleet.engines.iter().map(|engine| engine.busy_ns).collect(),
        evicted: fleet.engines.iter().map(|engine| engine.cache.evicted()).collect(),
        served: fleet.served,
    }
}

/// The worker names of a fleet of `workers`, in the order of targets.
pub fn worker_names(workers: usize) -> Vec<String> {
    (0..workers).map(|place| format!("worker-{place:04}")).collect()
}

/// Engines, what the router has booked on them, and what it has sent.
struct Fleet<'a> {
    trace: &'a Trace,
    plan: &'a Plan,
    engines: Vec<Engine>,
    books: Vec<Books>,
    candidates: Vec<Candidate>,
    turn: Option<Target>,
    /// Step ends to come.
    ends: BinaryHeap<Reverse<(u64, usize)>>,
    served: Vec<Served>,
    /// Per block: where it was sent last.
    last_sent: Vec<Option<u32>>,
    /// Per worker and block: whether it was ever sent there.
    ever_sent: Vec<Vec<bool>>,
    /// Per worker: blocks ever sent there.
    sent: Vec<u64>,
}

impl<'a> Fleet<'a> {
    fn new(trace: &'a Trace, plan: &'a Plan) -> Self {
        let blocks = trace.unique_blocks;
        let arrival = |request: &TimedRequest| Served {
            arrived: (u128::from(request.at) * 1000 / u128::from(plan.rate_milli.max(1))) as u64
                + request.pace,
            ..Served::default()
        };
        Self {
            trace,
            plan,
            engines: (0..plan.workers).map(|_| Engine::new(plan.model, trace.size, blocks)).collect(),
            books: (0..plan.workers).map(|_| Books::new(trace.size, blocks)).collect(),
            candidates: worker_names(plan.workers).into_iter().map(candidate).collect(),
            turn: None,
            ends: BinaryHeap::new(),
            served: trace.requests.iter().map(arrival).collect(),
            last_sent: vec![None; blocks],
            ever_sent: vec![vec![false; blocks]; plan.workers],
            sent: vec![0; plan.workers],
        }
    }

    /// Lets all steps end that end at `now` or before.
    fn advance(&mut self, now: u64) {
        while let Some(Reverse((at, worker))) =
            self.ends.peek().copied().filter(|Reverse((at, _))| *at <= now)
        {
            self.ends.pop();
            self.end_step(worker, at);
            self.begin_step(worker, at);
        }
    }

    fn begin_step(&mut self, worker: usize, now: u64) {
        let served = &mut self.served;
        let lasts = self.engines[worker]
            .begin(&self.trace.requests, |request, hits| served[request as usize].hits = hits);
        if let Some(lasts) = lasts {
            self.ends.push(Reverse((now + lasts, worker)));
        }
    }

    fn end_step(&mut self, worker: usize, now: u64) {
        let Self { engines, books, served, trace, .. } = self;
        let books = &mut books[worker];
        engines[worker].end(&trace.requests, |happened| match happened {
            Happened::Decoded => books.decoded(|place| served[place as usize].finished == 0),
            Happened::FirstToken(place) => {
                let request = &trace.requests[place as usize];
                let entry = &mut served[place as usize];
                entry.first_token = now;
                books.first_byte(place, request, uncached(trace, request, entry.predicted));
            }
            Happened::Finished(place) => {
                served[place as usize].finished = now;
                books.release(&trace.requests[place as usize]);
            }
        });
    }

    fn decide(&mut self, contender: &Contender, place: usize) -> usize {
        let request = &self.trace.requests[place];
        for worker in 0..self.engines.len() {
            self.look(worker, request);
        }
        let pick = PickRequest {
            id: &request.id,
            role: Role::Mixed,
            prompt: request.prompt,
            blocks: &request.blocks,
            size: self.trace.size,
            images: &[],
            session: None,
            choices: 1,
        };
        match contender {
            Contender::Shipped(settings) => {
                let decision = decide(settings, &pick, &self.candidates, self.turn.as_ref());
                let chosen = decision.expect("a worker, and no cap").chosen;
                self.turn = Some(self.candidates[chosen].target.clone());
                chosen
            }
            Contender::Peer(peer) => {
                let waiting: Vec<u64> = self.engines.iter().map(Engine::waiting).collect();
                let sight = Sight {
                    waiting: &waiting,
                    capacity: self.plan.model.capacity_blocks,
                    sent: &self.sent,
                    matched: self.matched(request),
                };
                peers::choose(peer, &pick, &self.candidates, &sight).expect("a fleet has at least one worker")
            }
        }
    }

    /// Brings a candidate's facts up to date.
    fn look(&mut self, worker: usize, request: &TimedRequest) {
        let (engine, books) = (&self.engines[worker], &self.books[worker]);
        let held = match self.plan.in_flight_credit {
            InFlightCredit::Disabled => engine.cache.leading(&request.dense),
            InFlightCredit::Enabled => {
                let counts = |block: &&u32| engine.cache.holds(**block) || books.awaits(**block);
                request.dense.iter().take_while(counts).count() as u64
            }
        };
        let claimed = TierHits { device: held, ..TierHits::default() };
        let candidate = &mut self.candidates[worker];
        candidate.claimed = claimed;
        candidate.hits = usable(claimed, request.prompt, self.trace.size, false);
        let confirmed = engine.cache.leading(&request.dense).min(candidate.hits.total());
        candidate.predicted = candidate.hits.total() - confirmed;
        candidate.evidence = match (candidate.hits.total(), candidate.predicted) {
            (0, _) => Evidence::Nothing,
            (_, 0) => Evidence::View,
            _ => Evidence::InFlight,
        };
        candidate.load = books.load();
        candidate.shared_active = books.shared(&request.dense);
    }

    fn route(&mut self, place: usize, chosen: usize, now: u64) {
        let request = &self.trace.requests[place];
        let predicted = self.candidates[chosen].hits.total();
        self.served[place].worker = chosen as u32;
        self.served[place].predicted = predicted;
        self.books[chosen].book(request, uncached(self.trace, request, predicted));
        for block in &request.dense {
            self.last_sent[*block as usize] = Some(chosen as u32);
            let known = &mut self.ever_sent[chosen][*block as usize];
            self.sent[chosen] += u64::from(!*known);
            *known = true;
        }
        let idle = !self.ends.iter().any(|Reverse((_, worker))| *worker == chosen);
        self.engines[chosen].push(place as u32);
        if idle {
            self.begin_step(chosen, now);
        }
    }

    /// The deepest block that was sent somewhere, and where it went last.
    fn matched(&self, request: &TimedRequest) -> Option<(u64, usize)> {
        let known = request.dense.iter().map_while(|block| self.last_sent[*block as usize]);
        let (depth, worker) = known.enumerate().last()?;
        Some((depth as u64 + 1, worker as usize))
    }
}

fn uncached(trace: &Trace, request: &TimedRequest, hits: u64) -> u64 {
    request.prompt.0.saturating_sub(hits * u64::from(trace.size.tokens()))
}

/// A target of which nothing is known yet but that its view is exact.
fn candidate(name: String) -> Candidate {
    Candidate {
        target: Target::new(WorkerId::new(name), 0),
        claimed: TierHits::default(),
        hits: TierHits::default(),
        predicted: 0,
        evidence: Evidence::Nothing,
        trust: Verdict {
            state: State::Exact,
            reason: Reason::Ok,
            credited: true,
            epoch: Epoch(1),
            seq: 0,
            age: None,
        },
        load: Load::default(),
        shared_active: 0,
        images_seen: 0,
        demand: Default::default(),
    }
}
