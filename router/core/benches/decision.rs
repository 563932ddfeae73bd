//! What a decision costs, step by step: `cargo bench -p kvrouter-core --bench decision`.
//!
//! A system prompt of 16 blocks is on every worker, a session's prefix on four,
//! and two requests per worker are in flight, as in the comparison with peers.
//! `--bench decision WORKERS` makes decisions on so many workers for some seconds, for a
//! profiler; `WORKERS x2` makes them on two threads at once. With `heard` among the
//! arguments, 15 other routers have booked something on every worker. Medians of one process on
//! whatever else runs here.
#![allow(clippy::disallowed_methods, reason = "a benchmark measures time")]

use std::collections::VecDeque;
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use kvrouter_core::blocks::{BlockHash, NamespaceId, chain};
use kvrouter_core::brief::Brief;
use kvrouter_core::events::Delta;
use kvrouter_core::events::envelope::Status;
use kvrouter_core::gather::{Lookup, Question, gather};
use kvrouter_core::ids::{Epoch, Role, Target, WorkerId};
use kvrouter_core::index::{Holdings, Index};
use kvrouter_core::policy::leases::{Lease, Ledger};
use kvrouter_core::policy::lineup::{Entrant, Lineup, Standing};
use kvrouter_core::policy::outside::{Booking, ReplicaId};
use kvrouter_core::policy::strangers::Sent;
use kvrouter_core::policy::{Load, PickRequest, Settings};
use kvrouter_core::receipts::{Draft, Ring};
use kvrouter_core::scratch::{Scratch, Scratches};
use kvrouter_core::trust::{Freshness, SharedTrust};
use kvrouter_core::units::{BlockSize, Tick, Tier, Tokens};

const SPACE: NamespaceId = NamespaceId(1);
const SYSTEM: usize = 16;
const BLOCKS: usize = 100;
const TAIL: usize = 16;
const SESSIONS: usize = 64;
const STEPS: [&str; 7] = ["hash", "look up", "gather", "select, book", "record", "file", "release"];

struct World {
    index: Index,
    lineup: Arc<Lineup>,
    ledger: Ledger,
    scratches: Scratches,
    receipts: Brief<Ring>,
    prompts: Vec<Vec<u32>>,
    made: AtomicUsize,
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let others = if arguments.iter().any(|argument| argument == "heard") { 15 } else { 0 };
    let workers = arguments.iter().find_map(|argument| argument.parse().ok());
    if let Some(workers) = workers {
        let world = World::new(workers).heard(others);
        match arguments.iter().any(|argument| argument == "x2") {
            true => println!("{:.0} ns a decision", world.two_threads(Duration::from_secs(1))),
            false => world.decide_for(Duration::from_secs(5)),
        }
        return;
    }
    println!("decision, {BLOCKS} blocks, ns: {}; each of two threads", STEPS.join(", "));
    for workers in [8, 64, 512] {
        let world = World::new(workers).heard(others);
        let mut leases = VecDeque::new();
        let mut decide = || world.decide(0, &mut leases, 2 * workers);
        (0..4 * workers).for_each(|_| _ = decide());
        let mut steps: [Vec<u128>; STEPS.len()] = Default::default();
        for _ in 0..2000 {
            decide().into_iter().zip(&mut steps).for_each(|(time, all)| all.push(time));
        }
        let medians = steps.map(|mut all| {
            all.sort_unstable();
            all[all.len() / 2]
        });
        let text: Vec<String> = medians.iter().map(|median| format!("{median:8}")).collect();
        let sum: u128 = medians.iter().sum();
        leases.clear();
        let both = world.two_threads(Duration::from_millis(300));
        println!("  {workers:4} workers {} = {sum}; {both:.0}", text.join(""));
    }
}

impl World {
    fn new(workers: usize) -> Self {
        let index = Index::default();
        let entrant = |worker: usize| {
            let trust = SharedTrust::default();
            trust.lock().synced(Tick(0), Epoch(1_795_970_300_559), 1, Status::default());
            let entrant = Entrant {
                slot: index.add_target(),
                account: Arc::default(),
                trust: Arc::new(trust),
                standing: Arc::new(Standing::open(Role::Mixed)),
            };
            (Target::new(WorkerId::new(format!("10.0.{}.{}:8000", worker / 256, worker % 256)), 0), entrant)
        };
        let lineup = Arc::new(Lineup::new((0..workers).map(entrant)));
        let block = |content: usize| (0..16).map(move |at| (content * 16 + at) as u32);
        let prompt = |session: usize| {
            let own = (session + 1) * BLOCKS;
            (0..SYSTEM).chain(own..own + BLOCKS - SYSTEM).flat_map(block).collect::<Vec<u32>>()
        };
        let prompts: Vec<Vec<u32>> = (0..SESSIONS).map(prompt).collect();
        let hashes = |prompt: &Vec<u32>| chain(BlockHash(0), size(), prompt);
        let store = |worker: usize, hashes: &[BlockHash]| {
            let entrant = &lineup.entrants()[worker % workers];
            let (parent, hashes, tier) = (BlockHash(0), hashes.to_vec(), Tier::Device);
            index.apply(entrant.slot, &Delta::Stored { namespace: SPACE, parent, hashes, tier });
        };
        (0..workers).for_each(|worker| store(worker, &hashes(&prompts[0])[..SYSTEM]));
        for (session, prompt) in prompts.iter().enumerate() {
            let hashes = hashes(prompt);
            (0..4).for_each(|at| store(session * 7 + at * (workers / 4), &hashes[..BLOCKS - TAIL]));
        }
        Self {
            index,
            lineup,
            ledger: Ledger::default(),
            scratches: Scratches::default(),
            receipts: Brief::new(Ring::new(1000)),
            prompts,
            made: AtomicUsize::new(0),
        }
    }

    /// So many other routers have the same booked on every worker.
    fn heard(self, others: u64) -> Self {
        let load = Load { active_blocks: 10, queued: Tokens(0), context: Tokens(160), requests: 1 };
        for entrant in self.lineup.entrants() {
            let told = Booking { load, sent: Some(Sent::default()) };
            (0..others).for_each(|id| entrant.account.replica_booked(Tick(0), ReplicaId(id), told));
        }
        self
    }

    fn decide_for(&self, time: Duration) {
        let (start, mut leases) = (Instant::now(), VecDeque::new());
        while start.elapsed() < time {
            black_box(self.decide(0, &mut leases, 2 * self.lineup.names().len()));
        }
        let made = self.made.load(Ordering::Relaxed);
        println!("{:.0} ns a decision", start.elapsed().as_nanos() as f64 / made as f64);
    }

    /// Nanoseconds that each of two threads takes for a decision and its release.
    fn two_threads(&self, time: Duration) -> f64 {
        let (start, before) = (Instant::now(), self.made.load(Ordering::Relaxed));
        std::thread::scope(|scope| {
            let decide = |thread| {
                let mut leases = VecDeque::new();
                while start.elapsed() < time {
                    (0..32).for_each(|_| _ = black_box(self.decide(thread, &mut leases, 0)));
                }
            };
            scope.spawn(move || decide(0));
            scope.spawn(move || decide(1));
        });
        let made = self.made.load(Ordering::Relaxed) - before;
        2.0 * start.elapsed().as_nanos() as f64 / made as f64
    }

    /// One decision, and nanoseconds of each step. Keeps at most `in_flight` leases.
    fn decide(&self, thread: usize, leases: &mut VecDeque<Lease>, in_flight: usize) -> [u128; STEPS.len()] {
        let made = self.made.fetch_add(1, Ordering::Relaxed);
        let (at, now, settings) = (made % SESSIONS, Tick(0), Settings::default());
        let (id, prompt) = (format!("request-{made}"), Tokens(self.prompts[at].len() as u64));
        let mut times = [Instant::now(); STEPS.len() + 1];
        let blocks: Arc<[BlockHash]> = chain(BlockHash(0), size(), &self.prompts[at]).into();
        times[1] = Instant::now();
        let request = PickRequest {
            id: &id,
            role: Role::Mixed,
            prompt,
            blocks: &blocks,
            size: size(),
            images: &[],
            session: None,
            choices: 1,
        };
        let mut scratch = self.scratches.take(thread);
        self.index.look_up(SPACE, &blocks, &mut scratch.held(1)[0]);
        times[2] = Instant::now();
        let Scratch { held, field, spare } = &mut *scratch;
        let prompts = vec![Lookup { tokens: prompt, blocks: &blocks, held: &held[0] }];
        let question = Question {
            now,
            role: Role::Mixed,
            freshness: Freshness::default(),
            size: size(),
            namespace: SPACE,
            prompts: &prompts,
            others: &Holdings::default(),
            bypasses_cache: false,
            history: None,
        };
        gather(&question, &self.lineup, |_| true, field);
        times[3] = Instant::now();
        let pick = self.ledger.select_and_book(now, &settings, &request, SPACE, &blocks, field);
        let pick = pick.expect("there are targets");
        times[4] = Instant::now();
        let draft = Draft {
            time_unix_ms: 1_795_970_308_644,
            attempt: 1,
            prompt_tokens: prompt,
            exact_tokens: true,
            blocks: &blocks,
            turn: pick.turn.as_ref().map(|turn| turn.target(field.names())),
            field: Some(field),
            priced: pick.choice.priced,
            choice: Some(&pick.choice),
            ..Draft::undecided(&id, &settings, size().tokens())
        };
        let record = draft.encode_over(spare.take());
        times[5] = Instant::now();
        scratch.spare = self.receipts.lock().file(record, None).spare;
        self.scratches.give_back(thread, scratch);
        times[6] = Instant::now();
        leases.push_back(pick.lease);
        if leases.len() > in_flight {
            drop(leases.pop_front());
        }
        times[7] = Instant::now();
        std::array::from_fn(|step| (times[step + 1] - times[step]).as_nanos())
    }
}

fn size() -> BlockSize {
    BlockSize::new(16).expect("not zero")
}
