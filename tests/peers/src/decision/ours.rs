//! Our decision, put together as the router's `route` does.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

use kvrouter_core::blocks::BlockHash;
use kvrouter_core::brief::Brief;
use kvrouter_core::events::envelope::Status;
use kvrouter_core::gather::{Lookup, Question, gather};
use kvrouter_core::ids::{Epoch, Role, Slot, Target, WorkerId};
use kvrouter_core::index::{Holdings, Index};
use kvrouter_core::policy::leases::{Lease, Ledger};
use kvrouter_core::policy::lineup::{Entrant, Lineup, Standing};
use kvrouter_core::policy::{PickRequest, Settings, shadow};
use kvrouter_core::receipts::{Draft, Ring};
use kvrouter_core::scratch::{Scratch, Scratches};
use kvrouter_core::trust::{Freshness, SharedTrust};
use kvrouter_core::units::{BlockSize, Tick, Tokens};
use tokio::runtime::Runtime;

use super::writer::{Takes, Writers};
use crate::ours::{BLOCK, SPACE, chain};
use crate::shapes::{EVENT, Held};

/// Receipts that are kept, as the router's default.
const RECEIPTS: usize = 1000;

/// When the engines were started, in milliseconds since 1970.
const EPOCH: u64 = 1_795_970_300_559;

pub(super) struct Ours {
    world: Arc<World>,
    runtime: Runtime,
}

struct World {
    index: Index,
    lineup: Arc<Lineup>,
    /// By slot.
    trusts: Vec<Arc<SharedTrust>>,
    /// Events taken.
    heard: AtomicU64,
    ledger: Ledger,
    scratches: Scratches,
    receipts: Brief<Ring>,
    prompts: Vec<Vec<u32>>,
    known: Vec<Arc<[BlockHash]>>,
}

impl Ours {
    pub(super) fn new(workers: u32, held: &[Held], prompts: &[Vec<u32>]) -> Self {
        let index = Index::default();
        let entrant = |worker: u32| {
            let trust = SharedTrust::default();
            trust.lock().synced(Tick(0), Epoch(EPOCH), 1, Status::default());
            let name = format!("10.0.{}.{}:8000", worker / 256, worker % 256);
            let entrant = Entrant {
                slot: index.add_target(),
                account: Arc::default(),
                trust: Arc::new(trust),
                standing: Arc::new(Standing::open(Role::Mixed)),
            };
            (Target::new(WorkerId::new(name), 0), entrant)
        };
        let lineup = Arc::new(Lineup::new((0..workers).map(entrant)));
        let trusts = (0..workers).map(|worker| {
            let entrant = lineup.entrants().iter().find(|entrant| entrant.slot == Slot(worker));
            Arc::clone(&entrant.expect("slots are handed out in order").trust)
        });
        let trusts = trusts.collect();
        for held in held {
            crate::ours::apply(&index, crate::ours::stores(held, EVENT));
        }
        let known = prompts.iter().map(|prompt| chain(prompt).into()).collect();
        let world = World {
            index,
            lineup,
            trusts,
            heard: AtomicU64::new(1),
            ledger: Ledger::default(),
            scratches: Scratches::default(),
            receipts: Brief::new(Ring::new(RECEIPTS)),
            prompts: prompts.to_vec(),
            known,
        };
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build();
        Self { world: Arc::new(world), runtime: runtime.expect("a runtime") }
    }

    pub(super) fn decide(&self, at: usize, known: bool) -> Lease {
        let at = at % self.world.prompts.len();
        let known = known.then(|| &self.world.known[at]);
        self.world.decide(&self.world.prompts[at], &format!("request-{at}"), known)
    }

    /// Seconds that `callers` take for `each` decisions and releases.
    pub(super) fn throughput(&self, callers: usize, each: usize) -> f64 {
        let start = Instant::now();
        let tasks: Vec<_> = (0..callers)
            .map(|caller| {
                let world = Arc::clone(&self.world);
                self.runtime.spawn(async move {
                    for at in 0..each {
                        // Theirs wants a prompt of its own for every request.
                        let prompt = world.prompts[(caller + at) % world.prompts.len()].clone();
                        drop(world.decide(&prompt, &format!("request-{caller}-{at}"), None));
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

impl World {
    fn decide(&self, tokens: &[u32], id: &str, known: Option<&Arc<[BlockHash]>>) -> Lease {
        let size = BlockSize::new(BLOCK).expect("not zero");
        let (prompt, now) = (Tokens(tokens.len() as u64), Tick(0));
        let blocks = known.map_or_else(|| chain(tokens).into(), Arc::clone);
        let settings = Settings::default();
        let request = PickRequest {
            id,
            role: Role::Mixed,
            prompt,
            blocks: &blocks,
            size,
            images: &[],
            session: None,
            choices: 1,
        };
        let thread = thread_number();
        let mut scratch = self.scratches.take(thread);
        self.index.look_up(SPACE, &blocks, &mut scratch.held(1)[0]);
        let Scratch { held, field, spare } = &mut *scratch;
        let prompts = vec![Lookup { tokens: prompt, blocks: &blocks, held: &held[0] }];
        let question = Question {
            now,
            role: Role::Mixed,
            freshness: Freshness::default(),
            size,
            namespace: SPACE,
            prompts: &prompts,
            others: &Holdings::default(),
            bypasses_cache: false,
            history: None,
        };
        gather(&question, &self.lineup, |_| true, field);
        let pick = self.ledger.select_and_book(now, &settings, &request, SPACE, &blocks, field);
        let pick = pick.expect("there are targets");
        let turn = pick.turn.as_ref().map(|turn| turn.target(field.names()));
        let shadows = shadow::evaluate(&settings, &request, field, pick.choice.chosen, turn);
        let draft = Draft {
            time_unix_ms: EPOCH,
            attempt: 1,
            namespace: SPACE,
            prompt_tokens: prompt,
            exact_tokens: true,
            blocks: &blocks,
            turn,
            field: Some(field),
            priced: pick.choice.priced,
            choice: Some(&pick.choice),
            session: pick.session,
            shadows: &shadows,
            ..Draft::undecided(id, &settings, BLOCK)
        };
        let record = draft.encode_over(spare.take());
        scratch.spare = self.receipts.lock().file(record, None).spare;
        self.scratches.give_back(thread, scratch);
        pick.lease
    }
}

/// The calling thread's.
fn thread_number() -> usize {
    static THREADS: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static THREAD: usize = THREADS.fetch_add(1, Ordering::Relaxed);
    }
    THREAD.with(|thread| *thread)
}

impl Takes for Ours {
    const SIDE: usize = 0;

    fn take(&self, writers: &Writers, at: usize) {
        let (slot, delta) = writers.ours(at);
        self.world.index.apply(slot, &delta);
        let seq = self.world.heard.fetch_add(1, Ordering::Relaxed);
        let mut trust = self.world.trusts[slot.0 as usize].lock();
        trust.heard(Tick(0), Epoch(EPOCH), seq, Status::default());
    }

    fn drain(&self) {}
}
