//! Our decision, put together as the router's `route` does.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use kvrouter_core::blocks::BlockHash;
use kvrouter_core::events::envelope::Status;
use kvrouter_core::ids::{Epoch, Role, Slot, Target, WorkerId};
use kvrouter_core::index::{Holdings, Index};
use kvrouter_core::policy::leases::{Account, Lease, Ledger, Prospect};
use kvrouter_core::policy::{Evidence, PickRequest, Settings, hits};
use kvrouter_core::receipts::{Receipt, Ring};
use kvrouter_core::trust::{Freshness, SharedTrust};
use kvrouter_core::units::{BlockSize, Tick, Tokens};
use tokio::runtime::Runtime;

use super::writer::{Takes, Writers};
use crate::ours::{BLOCK, SPACE, chain};
use crate::shapes::{EVENT, Held};

/// Receipts that are kept, as the router's default.
const RECEIPTS: usize = 1000;

pub(super) struct Ours {
    world: Arc<World>,
    runtime: Runtime,
}

struct World {
    index: Index,
    seats: Vec<Seat>,
    ledger: Ledger,
    receipts: Mutex<Ring>,
    prompts: Vec<Vec<u32>>,
    known: Vec<Arc<[BlockHash]>>,
    issued: AtomicUsize,
}

struct Seat {
    target: Target,
    slot: Slot,
    account: Arc<Account>,
    trust: SharedTrust,
}

impl Ours {
    pub(super) fn new(workers: u32, held: &[Held], prompts: &[Vec<u32>]) -> Self {
        let index = Index::default();
        let seat = |worker: u32| {
            let trust = SharedTrust::default();
            trust.lock().synced(Tick(0), Epoch(1), 1, Status::default());
            let name = format!("10.0.{}.{}:8000", worker / 256, worker % 256);
            Seat {
                target: Target::new(WorkerId::new(name), 0),
                slot: index.add_target(),
                account: Arc::default(),
                trust,
            }
        };
        let mut seats: Vec<Seat> = (0..workers).map(seat).collect();
        seats.sort_by(|a, b| a.target.cmp(&b.target));
        for held in held {
            crate::ours::apply(&index, crate::ours::stores(held, EVENT));
        }
        let known = prompts.iter().map(|prompt| chain(prompt).into()).collect();
        let world = World {
            index,
            seats,
            ledger: Ledger::default(),
            receipts: Mutex::new(Ring::new(RECEIPTS)),
            prompts: prompts.to_vec(),
            known,
            issued: AtomicUsize::new(0),
        };
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build();
        Self { world: Arc::new(world), runtime: runtime.expect("a runtime") }
    }

    pub(super) fn decide(&self, at: usize, known: bool) -> Lease {
        self.world.decide(at, known)
    }

    /// Seconds that `callers` take for `each` decisions and releases.
    pub(super) fn throughput(&self, callers: usize, each: usize) -> f64 {
        let start = Instant::now();
        let tasks: Vec<_> = (0..callers)
            .map(|caller| {
                let world = Arc::clone(&self.world);
                self.runtime.spawn(async move {
                    for at in 0..each {
                        drop(world.decide(caller + at, false));
                        tokio::task::yield_now().await;
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
    fn decide(&self, at: usize, known: bool) -> Lease {
        let at = at % self.prompts.len();
        let (prompt, now) = (Tokens(self.prompts[at].len() as u64), Tick(0));
        let blocks = if known { Arc::clone(&self.known[at]) } else { chain(&self.prompts[at]).into() };
        let id: Arc<str> = format!("request-{}", self.issued.fetch_add(1, Ordering::Relaxed)).into();
        let settings = Settings::default();
        let size = BlockSize::new(BLOCK).expect("not zero");
        let request = PickRequest {
            id: &id,
            role: Role::Mixed,
            prompt,
            blocks: &blocks,
            size,
            images: &[],
            session: None,
            choices: 1,
        };
        let held = Holdings::from(self.index.hits(SPACE, &blocks));
        let prospects = self.seats.iter().map(|seat| {
            let claimed = held.of(seat.slot);
            let (trust, paired) = seat.trust.read(now, Freshness::default());
            let usable = hits::limit(prompt, size, paired);
            let hits = hits::usable(claimed, prompt, size, paired);
            let evidence = if hits.total() > 0 { Evidence::View } else { Evidence::Nothing };
            Prospect {
                target: seat.target.clone(),
                account: &seat.account,
                claimed,
                hits,
                usable,
                evidence,
                trust,
            }
        });
        let pick = self.ledger.select_and_book(now, &settings, &request, SPACE, &blocks, prospects);
        let pick = pick.expect("there are targets");
        let mut receipt = Receipt {
            namespace: SPACE,
            prompt_tokens: prompt,
            exact_tokens: true,
            prompt_blocks: blocks.len() as u64,
            ..Receipt::undecided(Arc::clone(&id), settings, BLOCK)
        };
        receipt.fill(&pick.candidates, &pick.decision);
        self.receipts.lock().expect("not poisoned").file(receipt);
        pick.lease
    }
}

impl Takes for Ours {
    const SIDE: usize = 0;

    fn take(&self, writers: &Writers, at: usize) {
        let (slot, delta) = writers.ours(at);
        self.world.index.apply(slot, &delta);
    }

    fn drain(&self) {}
}
