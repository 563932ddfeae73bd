//! The health report: what is wrong, where, and what to do next.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use kvrouter_core::ids::{Role, WorkerId};
use kvrouter_core::reconcile::{Cause, Direction, Drift, Share};
use kvrouter_core::trust::{Reason, State, Verdict};
use kvrouter_crds::config::{EventTransport, PageSizePolicy, Protocol};
use kvrouter_crds::health::{
    ConfigHealth, DriftCause, EventsHealth, HealthReport, LiveSettingsHealth, PairsHealth, Problem,
    ReconciledHealth, RenderingHealth, SCHEMA_VERSION, TargetHealth, TokenizerHealth, ViewReason,
    WorkerHealth,
};

use crate::fleet::{Excluded, Exclusion, Member, Needs, ReadyReason, TargetState, Worker, pages, rendering};
use crate::pool::Pool;
use crate::prompt::Refusal;
use crate::proxy::{errors, pd};

/// The report as of now.
pub fn report(pool: &Pool) -> HealthReport {
    let file = &pool.config.file;
    let transport = file.kv_events.transport;
    let fleet = pool.fleet.workers();
    let excluded = pool.fleet.excluded();
    let mut workers: Vec<WorkerHealth> = fleet.iter().map(|worker| worker_health(pool, worker)).collect();
    workers.extend(excluded.listed.iter().map(excluded_health));
    workers.sort_by(|a, b| (&a.worker, &a.pod).cmp(&(&b.worker, &b.pod)));
    HealthReport {
        schema_version: SCHEMA_VERSION,
        router_version: env!("CARGO_PKG_VERSION").to_owned(),
        pool: format!("{}/{}", file.pool.namespace, file.pool.name),
        config: ConfigHealth {
            start: pool.config.digest.clone(),
            live: pool.live.read().digest.as_deref().map(str::to_owned),
        },
        ready: pool.is_ready(),
        ready_reason: pool.awaited().label.to_owned(),
        draining: pool.draining.load(Ordering::Relaxed),
        policy: pool.live.read().settings.policy.label().to_owned(),
        block_size: pool.config.size.tokens(),
        events: EventsHealth {
            transport: transport.label().to_owned(),
            connected: pool.broker_connected.load(Ordering::Relaxed),
            replicas_heard: pool.replicas_heard(),
        },
        tokenizer: TokenizerHealth {
            ready: pool.tokenizer_failure.is_none(),
            message: pool.tokenizer_failure.clone(),
        },
        live_settings: LiveSettingsHealth {
            watched: pool.config.live_path.is_some() || pool.config.live_map().is_some(),
            refused: pool.live_refused.read().clone(),
        },
        disaggregation: pool.config.protocols().into_iter().map(|it| pairs_health(pool, it)).collect(),
        problems: problems(pool, &fleet, &excluded),
        workers,
    }
}

fn pairs_health(pool: &Pool, protocol: Protocol) -> PairsHealth {
    let [prefill, decode] = pd::ready(pool, protocol, Needs::default(), &[]).map(|count| count as u64);
    PairsHealth { protocol: protocol.label().to_owned(), prefill, decode, pairs: prefill * decode }
}

fn worker_health(pool: &Pool, worker: &Worker) -> WorkerHealth {
    let status = worker.status();
    WorkerHealth {
        worker: worker.id.to_string(),
        pod: worker.pod.as_ref().map(|pod| pod.name.to_string()),
        role: worker.place().role.label().to_owned(),
        engine: status.engine.label().to_owned(),
        engine_version: status.engine_version.as_deref().map(str::to_owned),
        ready: worker.is_ready(),
        reason: worker.reason().label().to_owned(),
        reported_page_size: status.reported_page,
        rendering: Some(rendering_health(worker)),
        targets: worker.targets.iter().map(|target| target_health(pool, target)).collect(),
    }
}

/// A pod that never became a worker. What its role would be is not known where
/// that is the very reason.
fn excluded_health(member: &Member) -> WorkerHealth {
    let exclusion = member.place.exclusion;
    let role = match exclusion {
        Some(Exclusion::NoRole | Exclusion::TwoRoles | Exclusion::SameAddress) => "unknown",
        Some(Exclusion::TwoPools | Exclusion::PodNotReady) | None => member.place.role.label(),
    };
    WorkerHealth {
        worker: member.id.to_string(),
        pod: member.pod.as_ref().map(|pod| pod.name.to_string()),
        role: role.to_owned(),
        engine: member.engine.label().to_owned(),
        engine_version: None,
        ready: false,
        reason: exclusion.map_or("ok", Exclusion::label).to_owned(),
        reported_page_size: None,
        rendering: None,
        targets: Vec::new(),
    }
}

fn rendering_health(worker: &Worker) -> RenderingHealth {
    let known = worker.rendering.known();
    RenderingHealth {
        parity: rendering::label(known.parity).to_owned(),
        reason: known.reason.label().to_owned(),
        variant: known.variant.label().to_owned(),
        compared: u32::try_from(known.compared).unwrap_or(u32::MAX),
        probe: known.difference.map(|it| it.probe.to_owned()),
        position: known.difference.map(|it| it.position as u64),
        tokenize_microseconds_per_token: known.micros_per_token.map(thousandths),
        tokenize_share_of_first_byte: worker.rendering.share_of_first_byte().map(thousandths),
    }
}

/// Nobody reads more digits.
fn thousandths(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

fn reconciled_health(pool: &Pool, target: &TargetState) -> ReconciledHealth {
    let (share, drift) = target.reconciled(pool.clock.now());
    let part = |share: Share| f64::from(share.thousandths()) / 1000.0;
    ReconciledHealth {
        share: share.map(part),
        credit: part(target.trust.credit()),
        drift: drift.map(|drift| drift.direction.label().to_owned()),
        cause: drift.map(|drift| drift_cause(drift.cause)),
    }
}

fn verdict(pool: &Pool, target: &TargetState) -> Verdict {
    target.trust.lock().verdict(pool.clock.now(), pool.live.read().freshness)
}

fn target_health(pool: &Pool, target: &TargetState) -> TargetHealth {
    let before = verdict(pool, target);
    let blocks = pool.index.block_count(target.slot) as u64;
    let verdict = verdict(pool, target);
    let is_unmoved = (before.epoch, before.seq) == (verdict.epoch, verdict.seq);
    let facts = target.facts();
    TargetHealth {
        rank: target.target.rank.0,
        trust: verdict.state.label().to_owned(),
        reason: view_reason(verdict.reason),
        credited: verdict.credited,
        event_page_size: facts.page,
        hybrid: facts.hybrid,
        reconciled: Some(reconciled_health(pool, target)),
        epoch: verdict.epoch.0,
        seq: verdict.seq,
        blocks: is_unmoved.then_some(blocks),
    }
}

/// The word for it in the report.
const fn view_reason(reason: Reason) -> ViewReason {
    match reason {
        Reason::Ok => ViewReason::Ok,
        Reason::NothingHeard => ViewReason::NothingHeard,
        Reason::SnapshotPending => ViewReason::SnapshotPending,
        Reason::StoresMissing => ViewReason::StoresMissing,
        Reason::Gap => ViewReason::Gap,
        Reason::EngineUnreachable => ViewReason::EngineUnreachable,
        Reason::Silence => ViewReason::Silence,
        Reason::DomainMismatch => ViewReason::DomainMismatch,
        Reason::PageSizeMismatch => ViewReason::PageSizeMismatch,
        Reason::ReportedPageSizeMismatch => ViewReason::ReportedPageSizeMismatch,
        Reason::NoSequence => ViewReason::NoSequence,
        Reason::RenderDiverged => ViewReason::RenderDiverged,
        Reason::PrefixCachingOff => ViewReason::PrefixCachingOff,
        Reason::NothingStored => ViewReason::NothingStored,
        Reason::Stalled => ViewReason::Stalled,
        Reason::AdaptersUntold => ViewReason::AdaptersUntold,
        Reason::RankMismatch => ViewReason::RankMismatch,
    }
}

/// The word for it in the report.
const fn drift_cause(cause: Cause) -> DriftCause {
    match cause {
        Cause::Template => DriftCause::Template,
        Cause::Salt => DriftCause::Salt,
        Cause::PageSize => DriftCause::PageSize,
        Cause::Restart => DriftCause::Restart,
        Cause::Lag => DriftCause::Lag,
        Cause::HybridAttention => DriftCause::HybridAttention,
    }
}

/// How bad a problem is, worst first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Severity {
    /// Nothing can be served.
    Pool,
    /// Requests that should be shared are not.
    Pairs,
    /// Workers may come and go unseen.
    Discovery,
    /// No view can be trusted any more.
    Broker,
    /// No prompt can be looked up in any view.
    Tokenizer,
    /// A worker gets no requests.
    NotReady,
    /// Pages differ, and parity does not help.
    Parity,
    /// A cache will never count as it is.
    Mismatched,
    /// A view is wrong, or is not there yet.
    Unsound,
    /// A view claims too little, or less is known of it than of others.
    Incomplete,
    /// Some prompts are routed by load.
    Prompts,
    /// Requests are served as before.
    LiveSettings,
}

impl Severity {
    const fn of(state: State) -> Self {
        match state {
            State::Mismatched => Self::Mismatched,
            State::Cold | State::Syncing | State::Unsound => Self::Unsound,
            State::Incomplete | State::Unsequenced | State::Exact | State::NoCache => Self::Incomplete,
        }
    }
}

/// Everything that is wrong now, worst first; equally bad ones by worker.
fn problems(pool: &Pool, fleet: &[Arc<Worker>], excluded: &Excluded) -> Vec<Problem> {
    let mut problems = of_the_pool(pool, fleet, excluded);
    for worker in fleet {
        problems.extend(of_a_worker(pool, worker));
    }
    problems.extend(of_pages(pool, fleet));
    problems.extend(of_excluded(pool, excluded));
    problems.sort_by_key(|(severity, _)| *severity);
    problems.into_iter().map(|(_, problem)| problem).collect()
}

fn problem(reason: &str, worker: Option<&str>, message: String) -> Problem {
    Problem { reason: reason.to_owned(), worker: worker.map(str::to_owned), message }
}

fn of_the_pool(pool: &Pool, fleet: &[Arc<Worker>], excluded: &Excluded) -> Vec<(Severity, Problem)> {
    let discovery = pool.fleet.troubles().into_iter().map(|problem| (Severity::Discovery, problem));
    let mut problems: Vec<_> = discovery.collect();
    let mut say = |severity: Severity, reason: &str, message: String| {
        problems.push((severity, problem(reason, None, message)));
    };
    if fleet.is_empty() {
        say(Severity::Pool, "no_workers", no_workers(pool, excluded));
    }
    for protocol in pool.config.protocols().into_iter().filter(|_| !fleet.is_empty()) {
        if let Some(message) = no_pair(pool, fleet, protocol) {
            say(Severity::Pairs, "no_pair", message);
        }
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
    for (refusal, count) in pool.unrendered.lock().recent(pool.clock.now()) {
        if let Some(message) = not_rendered(pool, refusal, count) {
            say(Severity::Prompts, "prompts_not_rendered", message);
        }
    }
    if let Some(reason) = pool.prompter.uncached() {
        say(
            Severity::LiveSettings,
            "prompt_cache_off",
            format!(
                "Prefixes of prompts are not kept ({reason}), so every prompt is tokenised from its beginning; give limits.promptCacheBytes room ({}), or take another release of the tokenizer.",
                errors::IN_FILE
            ),
        );
    }
    if let Some(refused) = pool.live_refused.read().as_deref() {
        say(
            Severity::LiveSettings,
            "live_settings_refused",
            format!(
                "The live settings were refused ({refused}), and the last good ones stay in force; correct {}.",
                match pool.config.live_map() {
                    Some((namespace, name)) => format!("the ConfigMap {name} in namespace {namespace}"),
                    None => "the file that --live-config names".to_owned(),
                }
            ),
        );
    }
    problems
}

/// Prompts that the router could not read as the engine does, and what to do.
fn not_rendered(pool: &Pool, refusal: Refusal, count: u64) -> Option<String> {
    // Without a tokenizer nothing is rendered, and `no_tokenizer` says so.
    let advice = refusal.advice().filter(|_| pool.tokenizer_failure.is_none())?;
    Some(format!(
        "Of the prompts of the last minutes {count} were not turned into tokens ({}), so they were routed by load: {advice}.",
        refusal.label()
    ))
}

/// Why no pair of `protocol` stands, and what serves instead.
fn no_pair(pool: &Pool, fleet: &[Arc<Worker>], protocol: Protocol) -> Option<String> {
    let ready = pd::ready(pool, protocol, Needs::default(), &[]);
    let parts = [Role::Prefill, Role::Decode].into_iter().zip(ready);
    let missing: Vec<_> = parts.filter(|(_, ready)| *ready == 0).map(|(role, _)| role).collect();
    if missing.is_empty() {
        return None;
    }
    let of = |role: &Role| {
        let is = |worker: &&Arc<Worker>| {
            let place = worker.place();
            place.role == *role && place.handover.is_some_and(|handover| handover.protocol == protocol)
        };
        let workers = || fleet.iter().filter(is);
        let is_odd = |worker: &&Arc<Worker>| worker.reason() == ReadyReason::PageSize;
        let why = match workers().filter(is_odd).count() {
            0 => String::new(),
            odd => format!(" ({odd} for their pages, as pageSizePolicy RequireParity has it)"),
        };
        format!("none of {} {} workers is ready{why}", workers().count(), role.label())
    };
    let missing: Vec<String> = missing.iter().map(of).collect();
    let instead = match fleet.iter().any(|worker| worker.takes(Role::Mixed)) {
        true => "mixed workers serve all requests",
        false => "requests are refused after limits.noWorkerWaitSeconds",
    };
    Some(format!(
        "No pair of {} workers stands: {}; {instead}; look at these workers, and give both roles workers of one protocol.",
        protocol.label(),
        missing.join(", and ")
    ))
}

/// Why there are none, and what to do.
fn no_workers(pool: &Pool, excluded: &Excluded) -> String {
    let Some(kubernetes) = &pool.config.file.discovery.kubernetes else {
        return "The pool has no workers; list some under discovery.workers.".to_owned();
    };
    let labels: Vec<String> =
        kubernetes.selector.iter().map(|(name, value)| format!("{name}={value}")).collect();
    let (labels, namespace) = (labels.join(","), &kubernetes.namespace);
    let pods = format!("kubectl get pods -n {namespace} -l {labels}");
    match (pool.fleet.is_known(), excluded.waiting, excluded.count) {
        (false, _, _) => "The pool has no workers: its pods were not read yet; wait a second.".to_owned(),
        (true, 0, 0) => format!(
            "The pool has no workers: no pod in namespace {namespace} that runs has the labels {labels}; look at {pods}."
        ),
        (true, waiting, others) => format!(
            "The pool has no workers: {waiting} of its pods are not ready yet, {others} are excluded; look at {pods}."
        ),
    }
}

/// Pods that are kept out for their labels or addresses; those that are not
/// listed are counted.
fn of_excluded(pool: &Pool, excluded: &Excluded) -> Vec<(Severity, Problem)> {
    let of_one = |member: &Member| {
        let exclusion = member.place.exclusion?;
        let pod = member.pod.as_ref().map_or("", |pod| &*pod.name);
        let message = format!("Pod {pod} gets no requests: {}", kept_out(pool, exclusion));
        Some((Severity::NotReady, problem(exclusion.label(), Some(member.id.as_str()), message)))
    };
    let mut problems: Vec<_> = excluded.listed.iter().filter_map(of_one).collect();
    let more = excluded.count - excluded.listed.len();
    if more > 0 {
        let message = format!("{more} more pods are excluded; mend those that are listed first.");
        problems.push((Severity::NotReady, problem("more_excluded", None, message)));
    }
    problems
}

fn kept_out(pool: &Pool, exclusion: Exclusion) -> String {
    match exclusion {
        Exclusion::PodNotReady => {
            "its pod is not ready; look at its conditions and its readiness probe.".to_owned()
        }
        Exclusion::NoRole => {
            let discovery = pool.config.file.discovery.kubernetes.as_ref();
            let roles: Vec<&str> = discovery
                .map(|found| found.roles.iter().map(|role| role.name.label()).collect())
                .unwrap_or_default();
            format!(
                "its labels match none of the pool's roles ({}); give it the labels of one of them.",
                roles.join(", ")
            )
        }
        Exclusion::TwoRoles => {
            "its labels match more than one of the pool's roles; take away those of all but one.".to_owned()
        }
        Exclusion::TwoPools => {
            "its labels match the selector of another pool too; make one of the selectors narrower.".to_owned()
        }
        Exclusion::SameAddress => {
            "another pod has its address; delete the one that is no longer there, or do not run both on the host's network.".to_owned()
        }
    }
}

/// Pages that differ from the pool's.
fn of_pages(pool: &Pool, fleet: &[Arc<Worker>]) -> Vec<(Severity, Problem)> {
    let verdict = pages::judge(pool.config.size.tokens(), &pages::facts(fleet));
    if pool.live.read().page_sizes == PageSizePolicy::Report {
        // A page that does not divide the block is named by its targets.
        let differs = verdict.odd.iter().filter(|(_, page)| pool.config.size.holds_pages_of(*page));
        let of_one = |(id, page): &(WorkerId, u32)| {
            let message = format!(
                "Worker {id} has a page of {page} tokens and most others one of {}; its hits count in its own pages; start it with the page of the others.",
                verdict.page.unwrap_or_default()
            );
            (Severity::Incomplete, problem("page_size_differs", Some(id.as_str()), message))
        };
        return differs.map(of_one).collect();
    }
    let spared = |role: &Role| {
        let message = format!(
            "The pages of all {} workers are odd, so pageSizePolicy RequireParity keeps none of them out; start engines with one page that divides the block of {} tokens.",
            role.label(),
            pool.config.size.tokens()
        );
        (Severity::Parity, problem("page_size_everywhere", None, message))
    };
    verdict.spared.iter().map(spared).collect()
}

/// What to do about a page that parity keeps out.
fn odd_page(pool: &Pool, worker: &Worker) -> String {
    let (own, block) = (worker.page().unwrap_or_default(), pool.config.size.tokens());
    match pool.config.size.holds_pages_of(own) {
        true => format!(
            "its page of {own} tokens is not that of most others; start it with theirs, or set pageSizePolicy to Report."
        ),
        false => format!(
            "its page of {own} tokens does not divide the block of {block}; start it with one that does, or set pageSizePolicy to Report."
        ),
    }
}

/// A worker that is not ready has one problem, whatever its views are.
fn of_a_worker(pool: &Pool, worker: &Worker) -> Vec<(Severity, Problem)> {
    let id = worker.id.as_str();
    let reason = worker.reason();
    if let Some(message) = not_ready(pool, worker, reason) {
        let message = format!("Worker {id} gets no requests: {message}");
        return vec![(Severity::NotReady, problem(reason.label(), Some(id), message))];
    }
    if pool.config.file.kv_events.transport == EventTransport::None {
        return Vec::new();
    }
    let of_a_target = |target: &Arc<TargetState>| {
        let verdict = verdict(pool, target);
        let message = not_exact(pool, worker, target, verdict);
        let message = message.map(|message| format!("{}: {message}", target.target));
        let named = |message| problem(verdict.reason.label(), Some(id), message);
        let view = message.map(|message| (Severity::of(verdict.state), named(message)));
        view.into_iter().chain(of_predictions(pool, id, target))
    };
    worker.targets.iter().flat_map(of_a_target).collect()
}

/// Predictions that do not come true. A hybrid view's are expected not to, and
/// its credit is scaled: the report's fields say by how much.
fn of_predictions(pool: &Pool, worker: &str, target: &TargetState) -> Option<(Severity, Problem)> {
    let (share, drift) = target.reconciled(pool.clock.now());
    let Drift { direction, cause } = drift?;
    let next = match cause {
        Cause::HybridAttention => return None,
        Cause::Template => {
            "it tokenises requests differently from the router; compare its chat template, tokenizer and default template arguments with those of model.tokenizer."
        }
        Cause::Salt => {
            "only requests with a cache_salt are affected; see whether a proxy between router and engine changes or drops it."
        }
        Cause::PageSize => {
            "it skips prefixes in larger units than its pages; set blockSize to that unit, a multiple of its page."
        }
        Cause::Restart => {
            "it began anew or its view was rebuilt; this passes with its next hits; if it does not, look for restarts in its log."
        }
        Cause::Lag => {
            "its events come late, or its cache turns over within seconds; look at the load of its API server and at the size of its cache."
        }
    };
    let found = match (direction, share) {
        (Direction::More, _) => "it finds more cached than its view holds".to_owned(),
        (Direction::Less, share) => {
            let percent = share.map_or(0, |share| share.thousandths() / 10);
            format!("it finds {percent} % of the hits that its view predicts")
        }
    };
    let message = format!("{}: {found}: {next}", target.target);
    Some((Severity::Incomplete, problem(&format!("drift_{}", cause.label()), Some(worker), message)))
}

/// Which request is tokenised differently, and where.
fn diverged(worker: &Worker) -> String {
    let known = worker.rendering.known();
    let place = known.difference.map_or_else(String::new, |it| {
        format!(
            " (the request \"{}\": token {} is the first to differ, {} tokens here and {} there)",
            it.probe, it.position, it.ours, it.theirs
        )
    });
    format!(
        "it tokenises a request differently from the router{place}, so its cache earns no credit; give both the same tokenizer and chat template."
    )
}

fn not_ready(pool: &Pool, worker: &Worker, reason: ReadyReason) -> Option<String> {
    let message = match reason {
        ReadyReason::Ok => None,
        ReadyReason::Excluded(exclusion) => return Some(kept_out(pool, exclusion)),
        ReadyReason::PageSize => return Some(odd_page(pool, worker)),
        ReadyReason::NotProbed => Some("it was not asked yet; wait a second."),
        ReadyReason::Unreachable => Some("it does not answer; check that it runs and that the URL is right."),
        ReadyReason::Unhealthy => Some("its health endpoint says no; look at its log."),
        ReadyReason::NoModel => Some("it serves no model yet; wait until its weights are loaded."),
        ReadyReason::OtherModel => {
            Some("it serves other models than this pool's; compare model.name with its /v1/models.")
        }
    };
    message.map(str::to_owned)
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
        Reason::RenderDiverged => diverged(worker),
        // A way to run an engine: its state says it, and nothing is wrong.
        Reason::PrefixCachingOff => return None,
        Reason::Stalled => "it finished many new prompts and told of nothing meanwhile; look at its log for its event publisher, and restart it if that has ended.".to_owned(),
        Reason::AdaptersUntold => "it serves adapters, and the events of its release do not tell which blocks are theirs, so its cache earns no credit; use SGLang 0.5.22 or later, or serve adapters from other engines.".to_owned(),
        Reason::RankMismatch => "its events name another data-parallel rank, so its cache earns no credit; see that the port of its events is that of this rank, that dpSize is the number of ranks behind each port, and that a pod's first rank is a multiple of it; the log of whoever reads them (router or bridge) has the rank named.".to_owned(),
        Reason::NothingStored => return Some("it has finished many prompts and never told of a stored block, so it is picked by load; turn prefix caching and KV events on, unless that is intended.".to_owned()),
    };
    let credit = if verdict.credited { "" } else { " No hits are credited now." };
    let credit = if verdict.state == State::Mismatched { "" } else { credit };
    Some(message + credit)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The label that logs and metrics have is the one in the report, and the
    /// reader knows it.
    #[test]
    fn the_report_spells_reasons_as_the_metrics_do() {
        let reasons = [
            Reason::Ok,
            Reason::NothingHeard,
            Reason::SnapshotPending,
            Reason::StoresMissing,
            Reason::Gap,
            Reason::EngineUnreachable,
            Reason::Silence,
            Reason::DomainMismatch,
            Reason::PageSizeMismatch,
            Reason::ReportedPageSizeMismatch,
            Reason::NoSequence,
            Reason::RenderDiverged,
            Reason::PrefixCachingOff,
            Reason::NothingStored,
            Reason::Stalled,
            Reason::AdaptersUntold,
            Reason::RankMismatch,
        ];
        for reason in reasons {
            assert_eq!(serde_json::json!(view_reason(reason)), reason.label());
            let read: ViewReason = serde_json::from_value(reason.label().into()).expect("a reason");
            assert_eq!(read, view_reason(reason));
        }
        let causes = [
            Cause::Template,
            Cause::Salt,
            Cause::PageSize,
            Cause::Restart,
            Cause::Lag,
            Cause::HybridAttention,
        ];
        for cause in causes {
            assert_eq!(serde_json::json!(drift_cause(cause)), cause.label());
        }
        let later: ViewReason = serde_json::from_value("of_the_future".into()).expect("read all the same");
        assert_eq!(later, ViewReason::Unrecognised);
    }
}
