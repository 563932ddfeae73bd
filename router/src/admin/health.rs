//! The health report: what is wrong, where, and what to do next.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use kvrouter_core::trust::{Reason, State, Verdict};
use kvrouter_crds::config::{EventTransport, RoleName};
use kvrouter_crds::health::{
    ConfigHealth, EventsHealth, HealthReport, LiveSettingsHealth, Problem, SCHEMA_VERSION, TargetHealth,
    TokenizerHealth, WorkerHealth,
};

use crate::fleet::{ReadyReason, TargetState, Worker};
use crate::pool::Pool;

/// The report as of now.
pub fn report(pool: &Pool) -> HealthReport {
    let file = &pool.config.file;
    let transport = file.kv_events.transport;
    let workers: Vec<WorkerHealth> =
        pool.fleet.workers().iter().map(|worker| worker_health(pool, worker)).collect();
    HealthReport {
        schema_version: SCHEMA_VERSION,
        router_version: env!("CARGO_PKG_VERSION").to_owned(),
        pool: format!("{}/{}", file.pool.namespace, file.pool.name),
        config: ConfigHealth {
            start: pool.config.digest.clone(),
            live: pool.live.read().digest.as_deref().map(str::to_owned),
        },
        ready: pool.is_ready(),
        ready_reason: pool.ready_reason().to_owned(),
        draining: pool.draining.load(Ordering::Relaxed),
        policy: pool.live.read().settings.policy.label().to_owned(),
        block_size: pool.config.size.tokens(),
        events: EventsHealth {
            transport: transport.label().to_owned(),
            connected: pool.broker_connected.load(Ordering::Relaxed),
        },
        tokenizer: TokenizerHealth {
            ready: pool.tokenizer_failure.is_none(),
            message: pool.tokenizer_failure.clone(),
        },
        live_settings: LiveSettingsHealth {
            watched: pool.config.live_path.is_some(),
            refused: pool.live_refused.read().clone(),
        },
        problems: problems(pool, &workers),
        workers,
    }
}

fn worker_health(pool: &Pool, worker: &Worker) -> WorkerHealth {
    let status = worker.status();
    WorkerHealth {
        worker: worker.id.to_string(),
        pod: None,
        role: RoleName::Mixed.label().to_owned(),
        engine: status.engine.label().to_owned(),
        engine_version: status.engine_version.as_deref().map(str::to_owned),
        ready: status.ready,
        reason: status.reason.label().to_owned(),
        reported_page_size: status.reported_page,
        targets: worker.targets.iter().map(|target| target_health(pool, target)).collect(),
    }
}

fn verdict(pool: &Pool, target: &TargetState) -> Verdict {
    target.trust.lock().verdict(pool.clock.now(), pool.live.read().freshness)
}

fn target_health(pool: &Pool, target: &TargetState) -> TargetHealth {
    let verdict = verdict(pool, target);
    let facts = target.facts();
    TargetHealth {
        rank: target.target.rank.0,
        trust: verdict.state.label().to_owned(),
        reason: verdict.reason.label().to_owned(),
        credited: verdict.credited,
        event_page_size: facts.page,
        hybrid: facts.hybrid,
        epoch: verdict.epoch.0,
        seq: verdict.seq,
    }
}

/// How bad a problem is, worst first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Severity {
    /// Nothing can be served.
    Pool,
    /// No view can be trusted any more.
    Broker,
    /// No prompt can be looked up in any view.
    Tokenizer,
    /// A worker gets no requests.
    NotReady,
    /// A cache will never count as it is.
    Mismatched,
    /// A view is wrong, or is not there yet.
    Unsound,
    /// A view claims too little, or less is known of it than of others.
    Incomplete,
    /// Requests are served as before.
    LiveSettings,
}

impl Severity {
    const fn of(state: State) -> Self {
        match state {
            State::Mismatched => Self::Mismatched,
            State::Cold | State::Syncing | State::Unsound => Self::Unsound,
            State::Incomplete | State::Unsequenced | State::Exact => Self::Incomplete,
        }
    }
}

/// Everything that is wrong now, worst first; equally bad ones by worker.
fn problems(pool: &Pool, workers: &[WorkerHealth]) -> Vec<Problem> {
    let mut problems = of_the_pool(pool, workers);
    for worker in pool.fleet.workers() {
        problems.extend(of_a_worker(pool, worker));
    }
    problems.sort_by_key(|(severity, _)| *severity);
    problems.into_iter().map(|(_, problem)| problem).collect()
}

fn problem(reason: &str, worker: Option<&str>, message: String) -> Problem {
    Problem { reason: reason.to_owned(), worker: worker.map(str::to_owned), message }
}

fn of_the_pool(pool: &Pool, workers: &[WorkerHealth]) -> Vec<(Severity, Problem)> {
    let mut problems = Vec::new();
    let mut say = |severity: Severity, reason: &str, message: String| {
        problems.push((severity, problem(reason, None, message)));
    };
    if workers.is_empty() {
        let message = "The pool has no workers; list some under discovery.workers.";
        say(Severity::Pool, "no_workers", message.to_owned());
    }
    if !pool.broker_connected.load(Ordering::Relaxed) {
        let url = pool.config.file.kv_events.nats.as_ref().map_or("", |nats| &nats.url);
        say(
            Severity::Broker,
            "broker_disconnected",
            format!(
                "NATS at {url} does not answer; requests are routed by history and load; check the broker and the network to it."
            ),
        );
    }
    if let Some(failure) = &pool.tokenizer_failure {
        say(
            Severity::Tokenizer,
            "no_tokenizer",
            format!(
                "Prompts cannot be tokenised ({failure}), so they are routed by load; set model.tokenizer.path."
            ),
        );
    }
    if let Some(reason) = pool.prompter.uncached() {
        say(
            Severity::LiveSettings,
            "prompt_cache_off",
            format!(
                "Prefixes of prompts are not kept ({reason}), so every prompt is tokenised from its beginning; give limits.promptCacheBytes room, or another release of the tokenizer."
            ),
        );
    }
    if let Some(refused) = pool.live_refused.read().as_deref() {
        say(
            Severity::LiveSettings,
            "live_settings_refused",
            format!(
                "The live settings were refused ({refused}), and the last good ones stay in force; correct the file that --live-config names."
            ),
        );
    }
    problems
}

/// A worker that is not ready has one problem, whatever its views are.
fn of_a_worker(pool: &Pool, worker: &Worker) -> Vec<(Severity, Problem)> {
    let id = worker.id.as_str();
    let status = worker.status();
    if let Some(message) = not_ready(status.reason) {
        let message = format!("Worker {id} gets no requests: {message}");
        return vec![(Severity::NotReady, problem(status.reason.label(), Some(id), message))];
    }
    if pool.config.file.kv_events.transport == EventTransport::None {
        return Vec::new();
    }
    let of_a_target = |target: &Arc<TargetState>| {
        let verdict = verdict(pool, target);
        let message = not_exact(pool, worker, target, verdict)?;
        let message = format!("{}: {message}", target.target);
        Some((Severity::of(verdict.state), problem(verdict.reason.label(), Some(id), message)))
    };
    worker.targets.iter().filter_map(of_a_target).collect()
}

const fn not_ready(reason: ReadyReason) -> Option<&'static str> {
    match reason {
        ReadyReason::Ok => None,
        ReadyReason::NotProbed => Some("it was not asked yet; wait a second."),
        ReadyReason::Unreachable => Some("it does not answer; check that it runs and that the URL is right."),
        ReadyReason::Unhealthy => Some("its health endpoint says no; look at its log."),
        ReadyReason::NoModel => Some("it serves no model yet; wait until its weights are loaded."),
        ReadyReason::OtherModel => {
            Some("it serves other models than this pool's; compare model.name with its /v1/models.")
        }
    }
}

fn not_exact(pool: &Pool, worker: &Worker, target: &TargetState, verdict: Verdict) -> Option<String> {
    let block = pool.config.size.tokens();
    let pages = |page: Option<u32>| {
        let page = page.map_or_else(|| "unknown".to_owned(), |page| page.to_string());
        format!(
            "its page of {page} tokens does not divide the block of {block}, so its cache earns no credit; start it with a page that does, or set blockSize to a multiple of it."
        )
    };
    let message = match verdict.reason {
        Reason::Ok => return None,
        Reason::PageSizeMismatch => pages(target.facts().page),
        Reason::ReportedPageSizeMismatch => pages(worker.status().reported_page),
        Reason::NothingHeard => "no cache event has arrived; check that the engine publishes KV events and, with NATS, that its bridge runs.".to_owned(),
        Reason::SnapshotPending => "its view is being fetched; if this stays, check its event endpoint and replay socket.".to_owned(),
        Reason::StoresMissing => "the beginning of its events was missed, so hits are under-counted until the engine clears its cache or restarts; give it a replay socket.".to_owned(),
        Reason::Gap => "events were lost and could not be replayed; its view is rebuilt; give it a replay socket or a larger buffer.".to_owned(),
        Reason::EngineUnreachable => "its event sockets cannot be reached; check the engine and its KV event endpoints.".to_owned(),
        Reason::Silence => "no proof of its view has arrived lately; check its bridge and the broker.".to_owned(),
        Reason::DomainMismatch => "its bridge speaks of another model, revision, block size or identity seed; give both the same settings.".to_owned(),
        Reason::NoSequence => "it numbers no events, so losses cannot be seen; its hits count only while events are fresh; use an engine release that numbers them.".to_owned(),
    };
    let credit = if verdict.credited { "" } else { " No hits are credited now." };
    let credit = if verdict.state == State::Mismatched { "" } else { credit };
    Some(message + credit)
}
