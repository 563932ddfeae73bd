//! The only patcher of engine workloads.
//!
//! A workload is changed only if its pool names it, one at a time, and each
//! change is awaited before the next begins: a mistake then costs one workload
//! and not the fleet. The patch is a strategic merge guarded by the version that
//! was looked at. What was once applied is recorded in the pool's status; when
//! it is missing later, somebody undid it on purpose, and it is not repeated
//! until the spec asks for something else. What to do follows from records and
//! stores alone ([`decide`]), so an operator that starts anew, of whatever
//! release, comes to the same as before and restarts no engine.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::apps::v1::{Deployment, StatefulSet};
use kube::Client;
use kube::api::{Api, Patch, PatchParams};
use kvrouter_crds::InferencePool;
use kvrouter_crds::conditions::WorkloadState;
use kvrouter_crds::pool::{WorkloadKind, WorkloadRef, WorkloadStatus};

use crate::apply::is_transient;
use crate::ledger::Patched;
use crate::metrics::Metrics;
use crate::pool::build::WantedPatch;
use crate::pool::observe::{Observed, Rollout, WorkloadFacts};
use crate::pool::validate::{ValidPool, title};

/// When to try again what the API server refused for want of a right.
pub const RETRY_REFUSED: Duration = Duration::from_mins(5);

/// How long the rollout of a StatefulSet may take that was patched: unlike a
/// Deployment it has no deadline of its own. Pods are replaced one by one, and
/// each loads its model.
const STATEFUL_SET_DEADLINE: SignedDuration = SignedDuration::from_mins(60);

/// The hand that patches.
#[derive(Clone)]
pub struct Patcher {
    client: Client,
    metrics: Arc<Metrics>,
}

/// Whether workloads may be changed now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Permission {
    /// They may.
    Granted,
    /// The operator runs with `--workload-patching=false`.
    Disabled,
    /// The pool is paused.
    Paused,
}

/// What is to be done about the named workloads.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// Where each stands, in the order of the spec.
    pub records: Vec<WorkloadStatus>,
    /// Position in `records` and patch of the one to be changed now.
    pub next: Option<(usize, WantedPatch)>,
    /// When to look again; none if a change will tell.
    pub retry_after: Option<Duration>,
}

/// What became of a plan.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Where each stands, in the order of the spec.
    pub records: Vec<WorkloadStatus>,
    /// Uid of the one that was changed, and what is remembered of it.
    pub patched: Option<(String, Patched)>,
    /// When to look again; none if a change will tell.
    pub retry_after: Option<Duration>,
}

impl Patcher {
    /// A hand that counts what it writes.
    pub fn new(client: Client, metrics: Arc<Metrics>) -> Self {
        Self { client, metrics }
    }

    /// Carries out the plan: at most one patch.
    pub async fn carry_out(&self, namespace: &str, plan: Plan) -> Outcome {
        let Plan { mut records, next, retry_after } = plan;
        let Some((position, patch)) = next else {
            return Outcome { records, retry_after, ..Outcome::default() };
        };
        let what = title(&patch.reference);
        let result = self.patch(namespace, &patch).await;
        let mut outcome = Outcome::default();
        match (result, records.get_mut(position)) {
            (Ok(()), Some(record)) => {
                tracing::info!(namespace, workload = what, "patched");
                record.applied.clone_from(&patch.digest);
                set(record, WorkloadState::RollingOut, &rolling(namespace, &patch, " was changed and"));
                let at = Timestamp::now();
                let patched = Patched { before: patch.resource_version, at, digest: patch.digest };
                outcome.patched = Some((patch.uid, patched));
            }
            (Err(error), Some(record)) if is_transient(&error) => {
                // Usually somebody was faster: the next look is at what they made of it.
                tracing::info!(namespace, workload = what, error = %crate::chain(&error), "not patched yet");
                set(
                    record,
                    WorkloadState::Waiting,
                    &format!("{what} is about to be changed; wait a few seconds."),
                );
                outcome.retry_after = Some(Duration::from_secs(1));
            }
            (Err(error), Some(record)) => {
                tracing::warn!(namespace, workload = what, error = %crate::chain(&error), "patch refused");
                let message = format!(
                    "{what} cannot be changed: {error}; grant the operator's role `patch` on it, or set the values by \
                     hand."
                );
                set(record, WorkloadState::PatchFailed, &message);
                outcome.retry_after = Some(RETRY_REFUSED);
            }
            (_, None) => {}
        }
        Outcome { records, ..outcome }
    }

    async fn patch(&self, namespace: &str, patch: &WantedPatch) -> Result<(), kube::Error> {
        let body = Patch::Strategic(patch.strategic_merge());
        let params =
            PatchParams { field_manager: Some(crate::FIELD_MANAGER.to_owned()), ..Default::default() };
        let name = &patch.reference.name;
        self.metrics.wrote("patch", patch.reference.kind.as_str());
        match patch.reference.kind {
            WorkloadKind::Deployment => {
                let api: Api<Deployment> = Api::namespaced(self.client.clone(), namespace);
                api.patch(name, &params, &body).await.map(|_| ())
            }
            WorkloadKind::StatefulSet => {
                let api: Api<StatefulSet> = Api::namespaced(self.client.clone(), namespace);
                api.patch(name, &params, &body).await.map(|_| ())
            }
        }
    }
}

/// The records of a pool that cannot be acted upon: what was applied is not
/// forgotten.
pub fn keep(pool: &InferencePool, published: &[WorkloadStatus]) -> Vec<WorkloadStatus> {
    let record = |reference: &WorkloadRef| {
        let mut record = record_of(published, reference);
        let message = format!(
            "{} is not looked after, because the pool is not in order; see its conditions Accepted and ResolvedRefs.",
            title(reference)
        );
        set(&mut record, WorkloadState::PatchingDisabled, &message);
        record
    };
    pool.spec.workloads.iter().map(record).collect()
}

/// What to do about the named workloads. Pure.
///
/// `published` are the records of the pool's status, `patched` what this process
/// has patched, by uid.
pub fn decide(
    valid: &ValidPool,
    observed: &Observed,
    wanted: &[WantedPatch],
    published: &[WorkloadStatus],
    patched: &HashMap<String, Patched>,
    permission: Permission,
) -> Plan {
    let mut plan = Plan::default();
    // Why no further workload may be changed now.
    let mut blocked = blocker(wanted, observed, published, patched);
    for seen in &observed.workloads {
        let mut record = record_of(published, &seen.reference);
        let refused = valid.refused.iter().find(|refused| refused.reference == seen.reference);
        let patch = wanted.iter().find(|patch| patch.reference == seen.reference);
        match (refused, patch, &seen.found) {
            (Some(refused), _, _) => set(&mut record, refused.why.state(), &refused.message),
            (None, Some(patch), Some(facts)) => {
                let ours = patched.get(&facts.uid);
                record.applied = record.applied.or_else(|| ours?.digest.clone());
                let is_stale = ours.is_some_and(|ours| ours.before == facts.resource_version);
                let left = time_left(facts, patch, ours, observed.now);
                plan.retry_after =
                    plan.retry_after.into_iter().chain(left.filter(|left| !left.is_zero())).min();
                let rollout =
                    if left == Some(Duration::ZERO) { Rollout::DeadlineExceeded } else { facts.rollout };
                let facts = &WorkloadFacts { rollout, ..facts.clone() };
                let namespace = &valid.namespace;
                let verdict =
                    judge(namespace, patch, facts, &record, is_stale, permission, blocked.as_deref());
                match verdict {
                    Verdict::Is(state, message) => set(&mut record, state, &message),
                    Verdict::Patch => {
                        let message = format!(
                            "{} is about to be changed; wait a few seconds.",
                            title(&patch.reference)
                        );
                        set(&mut record, WorkloadState::Waiting, &message);
                        blocked = Some(title(&patch.reference));
                        plan.next = Some((plan.records.len(), patch.clone()));
                    }
                }
                // The spec asks for nothing else than what is there, so that is what we stand for.
                if patch.is_empty() && record.applied.is_some() {
                    record.applied.clone_from(&patch.digest);
                }
            }
            (None, _, _) => {}
        }
        plan.records.push(record);
    }
    plan
}

/// How long the rollout of a StatefulSet that we patched may still take; none for
/// others, and for one that is complete.
fn time_left(
    facts: &WorkloadFacts,
    patch: &WantedPatch,
    ours: Option<&Patched>,
    now: Timestamp,
) -> Option<Duration> {
    let is_awaited =
        patch.reference.kind == WorkloadKind::StatefulSet && facts.rollout == Rollout::InProgress;
    let since = ours.filter(|_| is_awaited)?.at;
    // Nothing is left where the difference is below zero.
    Some(Duration::try_from(STATEFUL_SET_DEADLINE - now.duration_since(since)).unwrap_or_default())
}

/// What is to be done about one workload.
enum Verdict {
    Is(WorkloadState, String),
    Patch,
}

/// The workload on which all others wait: one whose change rolls out, or has
/// failed to.
fn blocker(
    wanted: &[WantedPatch],
    observed: &Observed,
    published: &[WorkloadStatus],
    patched: &HashMap<String, Patched>,
) -> Option<String> {
    let is_busy = |patch: &&WantedPatch| {
        let seen = observed.workloads.iter().find(|seen| seen.reference == patch.reference);
        let Some(facts) = seen.and_then(|seen| seen.found.as_ref()) else { return false };
        let ours = record_of(published, &patch.reference).applied.is_some();
        match facts.rollout {
            // The store may not have heard of our last patch yet.
            Rollout::Complete => {
                patched.get(&facts.uid).is_some_and(|ours| ours.before == facts.resource_version)
            }
            // A paused one goes on when somebody wants it to, which may be never.
            Rollout::InProgress => !facts.paused,
            Rollout::DeadlineExceeded => ours,
        }
    };
    wanted.iter().find(is_busy).map(|patch| title(&patch.reference))
}

fn judge(
    namespace: &str,
    patch: &WantedPatch,
    facts: &WorkloadFacts,
    record: &WorkloadStatus,
    is_stale: bool,
    permission: Permission,
    blocked: Option<&str>,
) -> Verdict {
    use Verdict::{Is, Patch};
    use WorkloadState as State;
    let what = title(&patch.reference);
    let was_applied = record.applied.is_some() && record.applied == patch.digest;
    if patch.is_empty() {
        return settled(namespace, patch, facts, record);
    }
    if is_stale {
        return Is(State::RollingOut, rolling(namespace, patch, " was changed and"));
    }
    if was_applied {
        let message = format!(
            "Somebody undid the change of {what}, and it is not repeated; set {} there, or change spec.hashSeed or \
             spec.kvEvents of the pool, or remove it from spec.workloads.",
            missing(patch)
        );
        return Is(State::PatchReverted, message);
    }
    match permission {
        Permission::Disabled => {
            let message = format!(
                "{what} lacks {}, and this operator changes no workloads; set it there, or install the operator with \
                 workloadPatching.enabled.",
                missing(patch)
            );
            return Is(State::PatchingDisabled, message);
        }
        Permission::Paused => {
            let message =
                format!("{what} lacks {}; remove kvrouter.dev/paused from the pool.", missing(patch));
            return Is(State::Paused, message);
        }
        Permission::Granted => {}
    }
    if facts.paused {
        let message = format!(
            "{what} lacks {} and is paused, or replaces its pods only on delete; resume it or set it there.",
            missing(patch)
        );
        return Is(State::Paused, message);
    }
    match (facts.rollout, blocked) {
        (Rollout::Complete, None) => Patch,
        (Rollout::Complete, Some(other)) => {
            Is(State::Waiting, format!("{what} lacks {} and waits for {other}.", missing(patch)))
        }
        (Rollout::InProgress, _) => {
            let message = format!("{what} rolls out for another reason; wait, it is changed after that.");
            Is(State::RollingOut, message)
        }
        (Rollout::DeadlineExceeded, _) => {
            let message = format!(
                "{what} does not roll out; mend it, it lacks {} and is changed after that.",
                missing(patch)
            );
            Is(State::RollingOut, message)
        }
    }
}

/// What is said of a workload that lacks nothing.
fn settled(namespace: &str, patch: &WantedPatch, facts: &WorkloadFacts, record: &WorkloadStatus) -> Verdict {
    use WorkloadState as State;
    let what = title(&patch.reference);
    let (state, message) = match (facts.rollout, record.applied.is_some(), &patch.outdated_bridge) {
        (Rollout::InProgress, _, _) if facts.paused => {
            (State::RollingOut, format!("{what} is paused in the middle of a rollout; resume it."))
        }
        (Rollout::InProgress, _, _) => (State::RollingOut, rolling(namespace, patch, "")),
        (Rollout::DeadlineExceeded, true, _) => {
            let (status, undo) = (rollout("status", namespace, patch), rollout("undo", namespace, patch));
            let message = format!(
                "{what} was changed and did not roll out in time; look at `{status}`, then mend it or run `{undo}`."
            );
            (State::PatchFailed, message)
        }
        (_, _, Some(outdated)) => (State::BridgeOutdated, outdated.message.clone()),
        (_, true, None) => (State::Patched, String::new()),
        (_, false, None) => (State::AlreadyRight, String::new()),
    };
    Verdict::Is(state, message)
}

/// What is said of a workload whose pods are being replaced; `why` stands behind
/// its name.
fn rolling(namespace: &str, patch: &WantedPatch, why: &str) -> String {
    let (what, status) = (title(&patch.reference), rollout("status", namespace, patch));
    format!("{what}{why} rolls out; wait until it is complete: {status}")
}

/// The command `kubectl rollout …` for a workload.
fn rollout(verb: &str, namespace: &str, patch: &WantedPatch) -> String {
    let WorkloadRef { kind, name, .. } = &patch.reference;
    format!("kubectl rollout {verb} -n {namespace} {}/{name}", kind.as_str().to_lowercase())
}

/// What a workload lacks, in words.
fn missing(patch: &WantedPatch) -> &'static str {
    match (&patch.seed, &patch.bridge) {
        (Some(_), None) => "PYTHONHASHSEED",
        (None, Some(_)) => "the bridge",
        (Some(_), Some(_)) => "PYTHONHASHSEED and the bridge",
        (None, None) => "nothing",
    }
}

fn record_of(published: &[WorkloadStatus], reference: &WorkloadRef) -> WorkloadStatus {
    let found = published.iter().find(|it| it.kind == reference.kind && it.name == reference.name);
    found.cloned().unwrap_or_else(|| WorkloadStatus {
        kind: reference.kind,
        name: reference.name.clone(),
        applied: None,
        state: String::new(),
        message: String::new(),
    })
}

fn set(record: &mut WorkloadStatus, state: WorkloadState, message: &str) {
    record.state = state.as_str().to_owned();
    record.message = message.to_owned();
}

#[cfg(test)]
mod tests {
    use kvrouter_crds::pool::InferencePoolSpec;
    use serde_json::json;

    use super::*;
    use crate::pool::observe::WorkloadSeen;

    /// One workload of the world: what it lacks, its rollout, what the status says.
    #[derive(Clone, Copy)]
    struct Row {
        lacks: bool,
        rollout: Rollout,
        applied: Option<&'static str>,
        paused: bool,
        stale: bool,
    }

    const FINE: Row =
        Row { lacks: false, rollout: Rollout::Complete, applied: None, paused: false, stale: false };
    const BARE: Row = Row { lacks: true, ..FINE };

    fn reference(name: &str) -> WorkloadRef {
        WorkloadRef { kind: WorkloadKind::Deployment, name: name.to_owned(), container: None }
    }

    fn plan(rows: &[Row], permission: Permission) -> Plan {
        let names = ["a", "b", "c"];
        let spec: InferencePoolSpec = serde_json::from_value(json!({
            "model": {"name": "m"}, "selector": {"matchLabels": {"app": "m"}}, "targetPorts": [{"number": 8000}],
        }))
        .expect("a spec");
        let valid = ValidPool {
            namespace: "ns".into(),
            name: "pool".into(),
            spec,
            broker: None,
            targets: Vec::new(),
            refused: Vec::new(),
            complaints: Vec::new(),
        };
        let mut observed = Observed {
            unresolved: None,
            now: jiff::Timestamp::UNIX_EPOCH,
            pods: Vec::new(),
            workloads: Vec::new(),
            other_pools: Vec::new(),
            routers: Vec::new(),
        };
        let (mut wanted, mut published, mut patched) = (Vec::new(), Vec::new(), HashMap::new());
        for (row, name) in rows.iter().zip(names) {
            let facts = WorkloadFacts {
                uid: name.into(),
                resource_version: "7".into(),
                rollout: row.rollout,
                paused: row.paused,
                ..WorkloadFacts::default()
            };
            observed.workloads.push(WorkloadSeen { reference: reference(name), found: Some(facts) });
            wanted.push(WantedPatch {
                reference: reference(name),
                uid: name.into(),
                resource_version: "7".into(),
                container: "engine".into(),
                seed: row.lacks.then(|| "0".to_owned()),
                bridge: None,
                digest: Some("new".into()),
                outdated_bridge: None,
            });
            let mut record = record_of(&[], &reference(name));
            record.applied = row.applied.map(str::to_owned);
            published.push(record);
            if row.stale {
                let at = jiff::Timestamp::UNIX_EPOCH;
                let ours = Patched { before: "7".into(), at, digest: Some("new".into()) };
                patched.insert(name.to_owned(), ours);
            }
        }
        decide(&valid, &observed, &wanted, &published, &patched, permission)
    }

    #[track_caller]
    fn check(why: &str, rows: &[Row], patched: Option<&str>, states: &[&str]) {
        check_with(why, Permission::Granted, rows, patched, states);
    }

    #[track_caller]
    fn check_with(why: &str, permission: Permission, rows: &[Row], patched: Option<&str>, states: &[&str]) {
        let plan = plan(rows, permission);
        let found: Vec<&str> = plan.records.iter().map(|record| record.state.as_str()).collect();
        assert_eq!(found, states, "{why}: states");
        let next = plan.next.as_ref().map(|(_, patch)| patch.reference.name.as_str());
        assert_eq!(next, patched, "{why}: patched");
    }

    #[test]
    fn one_workload_at_a_time_and_never_twice() {
        use Rollout::{DeadlineExceeded, InProgress};
        check("nothing lacks", &[FINE], None, &["AlreadyRight"]);
        check("one lacks", &[BARE], Some("a"), &["Waiting"]);
        check("the first of two", &[BARE, BARE], Some("a"), &["Waiting", "Waiting"]);
        check("the second of two", &[FINE, BARE], Some("b"), &["AlreadyRight", "Waiting"]);
        let rolling = Row { applied: Some("new"), rollout: InProgress, ..FINE };
        check("the first rolls", &[rolling, BARE], None, &["RollingOut", "Waiting"]);
        check("a later one rolls", &[BARE, rolling], None, &["Waiting", "RollingOut"]);
        let done = Row { applied: Some("new"), ..FINE };
        check("the first is done", &[done, BARE], Some("b"), &["Patched", "Waiting"]);
        let failed = Row { applied: Some("new"), rollout: DeadlineExceeded, ..FINE };
        check("a failure stops the rest", &[failed, BARE], None, &["PatchFailed", "Waiting"]);
        let broken = Row { rollout: DeadlineExceeded, ..BARE };
        check("broken before us stops only itself", &[broken, BARE], Some("b"), &["RollingOut", "Waiting"]);
        let stale = Row { stale: true, ..BARE };
        check("the store has not heard yet", &[stale, BARE], None, &["RollingOut", "Waiting"]);
        let halted = Row { paused: true, rollout: InProgress, ..BARE };
        check("halted half-way, the others go on", &[halted, BARE], Some("b"), &["Paused", "Waiting"]);
        let reverted = Row { applied: Some("new"), ..BARE };
        check("undone by somebody", &[reverted], None, &["PatchReverted"]);
        check("undone, the others go on", &[reverted, BARE], Some("b"), &["PatchReverted", "Waiting"]);
        check("undone, and another spec", &[Row { applied: Some("old"), ..BARE }], Some("a"), &["Waiting"]);
        check("paused", &[Row { paused: true, ..BARE }], None, &["Paused"]);
        check(
            "paused, the others go on",
            &[Row { paused: true, ..BARE }, BARE],
            Some("b"),
            &["Paused", "Waiting"],
        );
        check("its own rollout first", &[Row { rollout: InProgress, ..BARE }], None, &["RollingOut"]);
    }

    #[test]
    fn what_is_said_of_a_rollout_has_the_command_that_follows_it() {
        let said = |row: Row| plan(&[row], Permission::Granted).records[0].message.clone();
        let rolling = said(Row { applied: Some("new"), rollout: Rollout::InProgress, ..FINE });
        assert!(rolling.ends_with("kubectl rollout status -n ns deployment/a"), "{rolling}");
        let failed = said(Row { applied: Some("new"), rollout: Rollout::DeadlineExceeded, ..FINE });
        assert!(failed.ends_with("run `kubectl rollout undo -n ns deployment/a`."), "{failed}");
    }

    #[test]
    fn nothing_is_patched_without_permission() {
        check_with("disabled", Permission::Disabled, &[BARE], None, &["PatchingDisabled"]);
        check_with("disabled and right", Permission::Disabled, &[FINE], None, &["AlreadyRight"]);
        check_with("a paused pool", Permission::Paused, &[BARE], None, &["Paused"]);
    }

    #[test]
    fn a_stateful_set_has_a_deadline_too() {
        let at = |seconds: i64| jiff::Timestamp::UNIX_EPOCH + SignedDuration::from_secs(seconds);
        let facts = |rollout| WorkloadFacts { rollout, ..WorkloadFacts::default() };
        let ours = Patched { before: "7".into(), at: at(0), digest: None };
        let mut patch = WantedPatch {
            reference: reference("a"),
            uid: "a".into(),
            resource_version: "8".into(),
            container: "engine".into(),
            seed: None,
            bridge: None,
            digest: None,
            outdated_bridge: None,
        };
        let rolling = facts(Rollout::InProgress);
        assert_eq!(time_left(&rolling, &patch, Some(&ours), at(9)), None, "a Deployment has its own");
        patch.reference.kind = WorkloadKind::StatefulSet;
        assert_eq!(time_left(&rolling, &patch, Some(&ours), at(3_599)), Some(Duration::from_secs(1)));
        assert_eq!(time_left(&rolling, &patch, Some(&ours), at(9_999)), Some(Duration::ZERO), "passed");
        assert_eq!(time_left(&rolling, &patch, None, at(9_999)), None, "not ours");
        assert_eq!(time_left(&facts(Rollout::Complete), &patch, Some(&ours), at(9_999)), None, "complete");
    }

    #[test]
    fn what_was_applied_is_remembered() {
        let applied = |row: Row| plan(&[row], Permission::Granted).records[0].applied.clone();
        assert_eq!(applied(FINE), None, "we did nothing");
        assert_eq!(applied(Row { applied: Some("new"), ..FINE }).as_deref(), Some("new"), "kept");
        assert_eq!(
            applied(Row { applied: Some("old"), ..FINE }).as_deref(),
            Some("new"),
            "the spec moved on"
        );
        assert_eq!(applied(Row { applied: Some("new"), ..BARE }).as_deref(), Some("new"), "undone");
        assert_eq!(
            applied(Row { stale: true, ..FINE }).as_deref(),
            Some("new"),
            "the status was not written"
        );
    }
}
