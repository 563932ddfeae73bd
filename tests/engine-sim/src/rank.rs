//! One data-parallel rank: its queue, its cache, its clock. Continuous batching with chunked
//! prefill, first come first served, one token a step for each decoding request.
//!
//! State changes only at the edges of a step, under one lock; the task sleeps in between.
//! What a step costs is a formula over its content, in [`step_time`].

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{Notify, mpsc};
use tokio::time::Instant;

use crate::cache::{self, CacheKey, PrefixCache, RequestId, Usage};
use crate::clock;
use crate::config::Config;
use crate::events::{Event, Removed, Stored, encode_batch};
use crate::publisher::Publisher;

/// How far the step clock may lag before it gives up catching up with the wall clock.
const MAX_LAG: Duration = Duration::from_millis(50);

/// A request as the scheduler sees it.
pub(crate) struct Job {
    pub(crate) key: CacheKey,
    pub(crate) prompt: Vec<u32>,
    pub(crate) prefill: Prefill,
    /// What the model will say; at least one token.
    pub(crate) output: Arc<[u32]>,
    /// Which answer of the HTTP request this is.
    pub(crate) choice: usize,
    /// Room for every token of `output`, so that a step never waits for a client.
    pub(crate) progress: mpsc::Sender<Progress>,
}

/// Who computes a prompt's keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Prefill {
    /// This rank.
    Here,
    /// Another engine did, and they have arrived.
    Elsewhere {
        /// What that engine told of its own hit; none where it tells nothing, then the hit here counts.
        cached_tokens: Option<usize>,
    },
}

/// One more output token. The channel closes early when the engine dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Progress {
    /// Which answer of the HTTP request grew.
    pub(crate) choice: usize,
    /// Prompt tokens that came from the cache when the request first started.
    pub(crate) cached_tokens: usize,
}

/// Totals since the engine process started.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counters {
    pub(crate) requests: u64,
    pub(crate) aborted: u64,
    pub(crate) finished: u64,
    pub(crate) preemptions: u64,
    pub(crate) queried_tokens: u64,
    pub(crate) hit_tokens: u64,
    pub(crate) generated_tokens: u64,
}

/// What can be observed from outside.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Snapshot {
    pub(crate) next_seq: u64,
    pub(crate) epoch: u64,
    pub(crate) running: usize,
    pub(crate) waiting: usize,
    pub(crate) waiting_uncached_tokens: usize,
    pub(crate) usage: Usage,
    pub(crate) counters: Counters,
    /// Batches that replays returned.
    pub(crate) replayed: u64,
}

/// A rank, shared by its task and the HTTP handlers.
pub(crate) struct Rank {
    state: Mutex<State>,
    wake: Notify,
}

struct State {
    config: Arc<Config>,
    rank: u32,
    cache: Box<dyn PrefixCache>,
    waiting: VecDeque<Sequence>,
    running: Vec<Sequence>,
    next_id: RequestId,
    /// Lives of the engine process so far.
    epoch: u64,
    counters: Counters,
    publisher: Option<Publisher>,
    next_seq: u64,
    stall_until: Option<Instant>,
    drop_batches: u32,
    /// Events wait for their end.
    held: bool,
    page_size_lie: Option<u64>,
    /// What of a hit the engine reports to have used, in percent.
    hit_percent: usize,
}

struct Sequence {
    id: RequestId,
    job: Job,
    /// Prompt and what was generated so far.
    tokens: Vec<u32>,
    /// Leading tokens whose keys and values exist.
    computed: usize,
    generated: usize,
    /// None until the first start.
    cached_tokens: Option<usize>,
}

/// Work of one step.
#[derive(Default)]
struct Plan {
    epoch: u64,
    /// Request and how many of its tokens are computed.
    work: Vec<(RequestId, usize)>,
    prefill_tokens: usize,
    decoding: usize,
    context_tokens: usize,
}

impl Rank {
    pub(crate) fn new(config: Arc<Config>, rank: u32, publisher: Option<Publisher>) -> Arc<Self> {
        let state = State {
            cache: cache::new(&config),
            config,
            rank,
            waiting: VecDeque::new(),
            running: Vec::new(),
            next_id: 0,
            epoch: 0,
            counters: Counters::default(),
            publisher,
            next_seq: 0,
            stall_until: None,
            drop_batches: 0,
            held: false,
            page_size_lie: None,
            hit_percent: 100,
        };
        Arc::new(Self { state: Mutex::new(state), wake: Notify::new() })
    }

    /// Queues a request. The name is good for [`Self::abort`].
    pub(crate) fn submit(&self, job: Job) -> RequestId {
        let mut state = self.state.lock();
        let id = state.next_id;
        state.next_id += 1;
        state.counters.requests += 1;
        let tokens = job.prompt.clone();
        state.waiting.push_back(Sequence { id, job, tokens, computed: 0, generated: 0, cached_tokens: None });
        drop(state);
        self.wake.notify_one();
        id
    }

    /// The client went away. Finished requests are ignored.
    pub(crate) fn abort(&self, id: RequestId) {
        let mut state = self.state.lock();
        if let Some(sequence) = state.take(id) {
            state.cache.release(sequence.id, &sequence.tokens, sequence.computed);
            state.counters.aborted += 1;
        }
        drop(state);
        self.wake.notify_one();
    }

    /// Empties the cache as the engine's own endpoint does: not while requests need it.
    pub(crate) fn clear_cache(&self) -> bool {
        let mut state = self.state.lock();
        let vllm = state.config.wire.is_vllm();
        let busy = !state.running.is_empty() || !state.waiting.is_empty();
        if busy && !vllm {
            return false;
        }
        let cleared = state.cache.clear();
        if cleared && !vllm {
            // SGLang tells at once, vLLM with its next batch.
            state.publish_events();
        }
        cleared
    }

    pub(crate) fn reset_counters(&self) {
        self.state.lock().counters = Counters::default();
    }

    /// Requests here, for the choice of a rank.
    pub(crate) fn load(&self) -> usize {
        let state = self.state.lock();
        state.running.len() + state.waiting.len()
    }

    pub(crate) fn snapshot(&self) -> Snapshot {
        let state = self.state.lock();
        let uncached = |sequence: &Sequence| sequence.tokens.len() - sequence.computed;
        Snapshot {
            next_seq: state.next_seq,
            epoch: state.epoch,
            running: state.running.len(),
            waiting: state.waiting.len(),
            waiting_uncached_tokens: state.waiting.iter().map(uncached).sum(),
            usage: state.cache.usage(),
            counters: state.counters,
            replayed: state.publisher.as_ref().map_or(0, Publisher::replayed),
        }
    }

    /// A new life of the process: everything is lost and nobody is told.
    pub(crate) fn restart(&self) {
        let mut state = self.state.lock();
        state.epoch += 1;
        state.cache = cache::new(&state.config);
        state.waiting.clear();
        state.running.clear();
        state.counters = Counters::default();
        state.next_seq = 0;
        state.stall_until = None;
        state.drop_batches = 0;
        state.held = false;
        if let Some(publisher) = &state.publisher {
            publisher.restart();
        }
    }

    pub(crate) fn stall(&self, time: Duration) {
        self.state.lock().stall_until = Some(Instant::now() + time);
        self.wake.notify_one();
    }

    pub(crate) fn drop_batches(&self, count: u32) {
        self.state.lock().drop_batches = count;
    }

    /// Tells nothing from now on, or all that waited and everything that comes.
    pub(crate) fn hold_events(&self, held: bool) {
        let mut state = self.state.lock();
        state.held = held;
        state.publish_events();
    }

    /// Events report this block size; none tells the truth.
    pub(crate) fn lie_about_page_size(&self, page_size: Option<u64>) {
        self.state.lock().page_size_lie = page_size;
    }

    /// Reports to have used only this share of every hit, in whole pages: what a model with
    /// several kinds of attention does when one group has dropped what another holds.
    pub(crate) fn use_of_hits(&self, percent: u8) {
        self.state.lock().hit_percent = usize::from(percent);
    }

    pub(crate) fn publish_garbage(&self, count: u32) {
        let mut state = self.state.lock();
        for at in 0..count {
            // An array of three whose second element is cut off.
            let payload = vec![0x93, 0xcb, at.to_be_bytes()[3], 0xdd, 0xff];
            state.publish(payload.into());
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

/// Runs a rank until the task is cancelled.
pub(crate) async fn run(rank: Arc<Rank>) {
    let mut deadline = Instant::now();
    loop {
        let stall = rank.lock().stall_until;
        if let Some(until) = stall.filter(|until| *until > Instant::now()) {
            tokio::time::sleep_until(until).await;
            continue;
        }
        let step = {
            let mut state = rank.lock();
            let plan = state.begin_step();
            (!plan.work.is_empty()).then(|| (step_time(&state.config, &plan), plan))
        };
        let Some((time, plan)) = step else {
            rank.wake.notified().await;
            deadline = Instant::now();
            continue;
        };
        // Timers tick once a millisecond. Counting from the last deadline keeps short steps
        // right on average.
        let now = Instant::now();
        if now.saturating_duration_since(deadline) > MAX_LAG {
            deadline = now;
        }
        deadline += time;
        if time.is_zero() {
            tokio::task::yield_now().await;
        } else {
            tokio::time::sleep_until(deadline).await;
        }
        rank.lock().end_step(&plan);
    }
}

/// `step + prefill tokens / speed + per decoding request + per context token`, scaled.
fn step_time(config: &Config, plan: &Plan) -> Duration {
    let count = |value: usize| u32::try_from(value).map_or(f64::from(u32::MAX), f64::from);
    let seconds = config.step_ms / 1e3
        + count(plan.prefill_tokens) / config.prefill_tokens_per_second
        + count(plan.decoding) * config.decode_request_ms / 1e3
        + count(plan.context_tokens) * config.context_token_ns / 1e9;
    Duration::try_from_secs_f64(seconds * config.time_scale).unwrap_or(Duration::MAX / 4)
}

impl State {
    fn begin_step(&mut self) -> Plan {
        let mut plan = Plan { epoch: self.epoch, ..Plan::default() };
        let preempted = self.plan_running(&mut plan);
        if !preempted {
            self.plan_waiting(&mut plan);
        }
        plan
    }

    /// Running requests come first; one without room pushes the youngest out. Whether any was.
    fn plan_running(&mut self, plan: &mut Plan) -> bool {
        let mut preempted = false;
        let mut at = 0;
        while at < self.running.len() {
            let sequence = &self.running[at];
            let missing = sequence.tokens.len() - sequence.computed;
            let decoding = sequence.generated > 0 && missing == 1;
            let budget = self.config.chunk_tokens - plan.prefill_tokens;
            let count = if decoding { 1 } else { missing.min(budget) };
            if count == 0 {
                at += 1;
                continue;
            }
            let upto = sequence.computed + count;
            if !self.cache.grow(sequence.id, &sequence.tokens, upto) {
                self.preempt_last();
                preempted = true;
                continue;
            }
            plan.work.push((sequence.id, count));
            if decoding {
                plan.decoding += 1;
                plan.context_tokens += sequence.tokens.len();
            } else {
                plan.prefill_tokens += count;
            }
            at += 1;
        }
        preempted
    }

    fn plan_waiting(&mut self, plan: &mut Plan) {
        while self.running.len() < self.config.max_running && plan.prefill_tokens < self.config.chunk_tokens {
            let Some(mut sequence) = self.waiting.pop_front() else { return };
            let budget = self.config.chunk_tokens - plan.prefill_tokens;
            let is_first_start = sequence.cached_tokens.is_none();
            // What was pushed out has lost what had arrived.
            let arrived = is_first_start && sequence.job.prefill != Prefill::Here;
            let most = if arrived { usize::MAX } else { budget };
            let started = self.cache.start(sequence.id, &sequence.job.key, &sequence.tokens, most);
            let Some(started) = started else {
                self.waiting.push_front(sequence);
                return;
            };
            if is_first_start {
                sequence.cached_tokens = Some(self.used_of_hit(&sequence.job, started.hit));
            }
            // Of a prompt that arrived only the last token runs here: it gives the first of the answer.
            let last = sequence.tokens.len() - 1;
            let (computed, scheduled) = if arrived { (last, 1) } else { (started.hit, started.scheduled) };
            sequence.computed = computed;
            plan.work.push((sequence.id, scheduled));
            plan.prefill_tokens += scheduled;
            self.running.push(sequence);
        }
    }

    /// What usage reports of a hit, which is counted here if it saved work here.
    fn used_of_hit(&mut self, job: &Job, hit: usize) -> usize {
        let page = self.config.page_size as usize;
        let used = hit * self.hit_percent / 100 / page * page;
        match job.prefill {
            Prefill::Elsewhere { cached_tokens } => cached_tokens.unwrap_or(used),
            Prefill::Here => {
                self.counters.queried_tokens += job.prompt.len() as u64;
                self.counters.hit_tokens += used as u64;
                used
            }
        }
    }

    fn preempt_last(&mut self) {
        let Some(mut sequence) = self.running.pop() else { return };
        self.cache.release(sequence.id, &sequence.tokens, sequence.computed);
        sequence.computed = 0;
        self.counters.preemptions += 1;
        self.waiting.push_front(sequence);
    }

    fn end_step(&mut self, plan: &Plan) {
        if plan.epoch != self.epoch {
            return;
        }
        for (id, count) in &plan.work {
            // Aborted while the step ran: nothing left to do for it.
            let Some(at) = self.running.iter().position(|sequence| sequence.id == *id) else { continue };
            if self.advance(at, *count) {
                let sequence = self.running.remove(at);
                self.cache.release(sequence.id, &sequence.tokens, sequence.computed);
                self.counters.finished += 1;
            }
        }
        self.publish_events();
    }

    /// Books `count` computed tokens of a running request. Whether it is finished.
    fn advance(&mut self, at: usize, count: usize) -> bool {
        let sequence = &mut self.running[at];
        sequence.computed += count;
        let prefill = sequence.generated == 0 || count > 1;
        if prefill {
            self.cache.prefilled(sequence.id, &sequence.tokens, sequence.computed);
        }
        if sequence.computed < sequence.tokens.len() {
            return false;
        }
        sequence.tokens.push(sequence.job.output[sequence.generated]);
        sequence.generated += 1;
        self.counters.generated_tokens += 1;
        let cached_tokens = sequence.cached_tokens.unwrap_or(0);
        // A client that is gone aborts on its own.
        let _ = sequence.job.progress.try_send(Progress { choice: sequence.job.choice, cached_tokens });
        sequence.generated == sequence.job.output.len()
    }

    fn take(&mut self, id: RequestId) -> Option<Sequence> {
        if let Some(at) = self.running.iter().position(|sequence| sequence.id == id) {
            return Some(self.running.remove(at));
        }
        let at = self.waiting.iter().position(|sequence| sequence.id == id)?;
        self.waiting.remove(at)
    }

    fn publish_events(&mut self) {
        if self.held {
            return;
        }
        let mut events = self.cache.take_events();
        if events.is_empty() || self.publisher.is_none() {
            return;
        }
        events.iter_mut().for_each(|event| event.is_at(&self.config.medium));
        if self.config.hybrid {
            events = with_windows(events);
        }
        if let Some(lie) = self.page_size_lie {
            for event in &mut events {
                if let Event::Stored(stored) = event {
                    stored.block_size = lie;
                }
            }
        }
        let timestamp = clock::since_epoch().as_secs_f64();
        let rank = self.config.first_rank + self.rank;
        let payload = encode_batch(self.config.wire, timestamp, &events, Some(rank));
        self.publish(payload);
    }

    fn publish(&mut self, payload: bytes::Bytes) {
        let Some(publisher) = &self.publisher else { return };
        let lost = self.drop_batches > 0;
        self.drop_batches = self.drop_batches.saturating_sub(1);
        publisher.publish(self.next_seq, payload, lost);
        self.next_seq += 1;
    }
}

/// Every store once more for the group with a sliding window, which keeps the same pages here.
fn with_windows(events: Vec<Event>) -> Vec<Event> {
    let of_window = |event: &Event| match event {
        Event::Stored(stored) => Some(Event::Stored(Box::new(Stored {
            group_idx: Some(1),
            kv_cache_spec_kind: Some("sliding_window".to_owned()),
            kv_cache_spec_sliding_window: Some(4096),
            ..(**stored).clone()
        }))),
        Event::Removed(removed) => Some(Event::Removed(Removed { group_idx: Some(1), ..removed.clone() })),
        Event::Cleared => None,
    };
    let pair = |event: Event| {
        let second = of_window(&event);
        std::iter::once(event).chain(second)
    };
    events.into_iter().flat_map(pair).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Wire;

    struct Bench {
        rank: Arc<Rank>,
        _task: tokio::task::JoinHandle<()>,
    }

    /// A rank whose times are easy to add up: 10 ms a step, 1000 tokens a second, 1 ms for each
    /// decoding request.
    fn bench(change: impl FnOnce(&mut Config)) -> Bench {
        let mut config = Config {
            page_size: 4,
            num_pages: 65,
            step_ms: 10.0,
            prefill_tokens_per_second: 1000.0,
            decode_request_ms: 1.0,
            ..Config::default()
        };
        change(&mut config);
        let rank = Rank::new(Arc::new(config), 0, None);
        let _task = tokio::spawn(run(Arc::clone(&rank)));
        Bench { rank, _task }
    }

    impl Bench {
        /// Queues a prompt of `length` tokens that no other family shares.
        fn submit(&self, family: u32, length: u32, output: usize) -> (RequestId, mpsc::Receiver<Progress>) {
            let (progress, receiver) = mpsc::channel(output);
            let prompt = (0..length).map(|at| family * 1000 + at).collect();
            let output = vec![7; output].into();
            let key = CacheKey::default();
            let job = Job { key, prompt, prefill: Prefill::Here, output, choice: 0, progress };
            (self.rank.submit(job), receiver)
        }
    }

    /// Milliseconds until the next token, and its cached tokens.
    async fn next(began: Instant, receiver: &mut mpsc::Receiver<Progress>) -> (u128, usize) {
        let progress = receiver.recv().await.unwrap();
        (began.elapsed().as_millis(), progress.cached_tokens)
    }

    #[tokio::test(start_paused = true)]
    async fn steps_take_the_time_of_their_content() {
        let bench = bench(|_| {});
        let began = Instant::now();
        let (_, mut first) = bench.submit(1, 41, 3);
        assert_eq!(next(began, &mut first).await, (51, 0), "10 + 41 uncached");
        assert_eq!(next(began, &mut first).await, (62, 0), "10 + 1 decoding");
        assert_eq!(next(began, &mut first).await, (73, 0));
        let began = Instant::now();
        let (_, mut second) = bench.submit(1, 41, 1);
        assert_eq!(next(began, &mut second).await, (11, 40), "10 + the one token that is never cached");
    }

    #[tokio::test(start_paused = true)]
    async fn prefill_comes_in_chunks_while_others_decode() {
        let bench = bench(|config| config.chunk_tokens = 20);
        let began = Instant::now();
        let (_, mut long) = bench.submit(1, 50, 1);
        let (_, mut short) = bench.submit(2, 5, 4);
        // Chunks of 20, 20 and 10 tokens; the third leaves room for the short prompt.
        assert_eq!(next(began, &mut long).await.0, 30 + 30 + 25);
        assert_eq!(next(began, &mut short).await.0, 85);
        // It arrives while a step runs, and joins the one after.
        let (_, mut third) = bench.submit(3, 20, 1);
        assert_eq!(next(began, &mut short).await.0, 85 + 11);
        assert_eq!(next(began, &mut third).await.0, 96 + 31, "20 tokens of prefill and one decoding");
        assert_eq!(next(began, &mut short).await.0, 96 + 31, "which went on meanwhile");
    }

    #[tokio::test(start_paused = true)]
    async fn context_and_scale_enter_the_time() {
        let bench = bench(|config| {
            (config.context_token_ns, config.time_scale) = (1e6, 2.0);
        });
        let began = Instant::now();
        let (_, mut only) = bench.submit(1, 10, 2);
        assert_eq!(next(began, &mut only).await.0, 40);
        assert_eq!(next(began, &mut only).await.0, 40 + 2 * (10 + 1 + 11));
    }

    #[tokio::test(start_paused = true)]
    async fn a_prompt_that_arrived_costs_one_token_and_is_kept() {
        for (told, expected) in [(Some(12), 12), (None, 0)] {
            let bench = bench(|_| {});
            let began = Instant::now();
            let (progress, mut receiver) = mpsc::channel(2);
            let prompt: Vec<u32> = (1000..1041).collect();
            let (key, output) = (CacheKey::default(), vec![7; 2].into());
            let prefill = Prefill::Elsewhere { cached_tokens: told };
            bench.rank.submit(Job { key, prompt, prefill, output, choice: 0, progress });
            assert_eq!(next(began, &mut receiver).await, (11, expected), "10 + 1 token");
            assert_eq!(next(began, &mut receiver).await, (22, expected), "10 + 1 decoding");
            let snapshot = bench.rank.snapshot();
            assert_eq!((snapshot.counters.queried_tokens, snapshot.usage.cached), (0, 10));
            let (_, mut again) = bench.submit(1, 41, 1);
            assert_eq!(next(Instant::now(), &mut again).await.1, 40);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn requests_beyond_the_limit_wait_in_order() {
        let bench = bench(|config| config.max_running = 1);
        let began = Instant::now();
        let (_, mut first) = bench.submit(1, 10, 2);
        let (_, mut second) = bench.submit(2, 10, 1);
        let (third, _third) = bench.submit(3, 10, 1);
        next(began, &mut first).await;
        assert_eq!((bench.rank.snapshot().running, bench.rank.snapshot().waiting), (1, 2));
        bench.rank.abort(third);
        assert_eq!(bench.rank.snapshot().waiting, 1);
        assert_eq!(next(began, &mut second).await.0, 20 + 11 + 20);
        assert_eq!(bench.rank.snapshot().counters.aborted, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_without_room_waits_or_gives_way_and_still_ends() {
        for wire in [Wire::Vllm033, Wire::Sglang0523] {
            let bench = bench(|config| (config.wire, config.num_pages) = (wire, 9));
            let (_, mut first) = bench.submit(1, 8, 20);
            let (_, mut second) = bench.submit(2, 8, 20);
            for receiver in [&mut first, &mut second] {
                let mut tokens = 0;
                while receiver.recv().await.is_some() {
                    tokens += 1;
                }
                assert_eq!(tokens, 20, "{wire:?}");
            }
            // Seven pages each; eight or nine are not enough for both at once.
            let snapshot = bench.rank.snapshot();
            assert!(snapshot.counters.preemptions > 0, "{wire:?}");
            assert_eq!((snapshot.usage.pinned, snapshot.counters.finished), (0, 2), "{wire:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_restart_closes_every_channel() {
        let bench = bench(|_| {});
        let (_, mut running) = bench.submit(1, 10, 5);
        running.recv().await.unwrap();
        let (_, mut waiting) = bench.submit(2, 10, 5);
        bench.rank.restart();
        assert_eq!((running.recv().await, waiting.recv().await), (None, None));
        let (_, mut next) = bench.submit(1, 10, 1);
        assert_eq!(next.recv().await.unwrap().cached_tokens, 0);
    }
}
