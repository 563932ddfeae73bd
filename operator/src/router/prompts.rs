//! Can routers turn prompts into tokens, and into those of the engines? Pure.

use std::collections::BTreeSet;

use k8s_openapi::jiff::Timestamp;
use kvrouter_crds::conditions::{ConditionType, Finding, Reason, names};
use kvrouter_crds::config::Policy;
use kvrouter_crds::health::{HealthReport, RenderingHealth, WorkerHealth};
use kvrouter_crds::pool::InferencePoolSpec;
use kvrouter_crds::router::KvRouterSpec;

use super::reports::{Told, no_workers, over_reports, reports, subject};
use crate::facts::RouterPod;
use crate::hysteresis::{Pace, Seen};

/// What `TokenizerReady` should say.
pub fn tokenizer(
    pool: &InferencePoolSpec,
    spec: &KvRouterSpec,
    router: &str,
    pods: &[RouterPod],
    now: Timestamp,
) -> Seen {
    let type_ = ConditionType::TokenizerReady;
    if pool.model.tokenizer.is_none() {
        let looks_up = |policy: &Policy| !matches!(policy, Policy::RoundRobin | Policy::LeastLoad);
        let finding = if looks_up(&spec.policy) {
            let message = "The pool names no tokenizer, so prompts are routed by load; set spec.model.tokenizer of the pool.";
            Finding::fails(Reason::TokenizerNotConfigured, message)
        } else {
            Finding::holds(Reason::NotRequired, "The policy looks at no prompt.")
        };
        return Seen::certain(type_, finding);
    }
    let failure = |report: &HealthReport| {
        (!report.tokenizer.ready).then(|| report.tokenizer.message.clone().unwrap_or_default())
    };
    over_reports(type_, router, pods, now, |pod, report| {
        failure(report).map(|failure| {
            let message = format!(
                "Pod {pod} of router {router} cannot load the tokenizer, so prompts are routed by load ({failure}); \
                 correct spec.model.tokenizer of the pool."
            );
            (Finding::fails(Reason::TokenizerFailed, message), BTreeSet::from([pod.to_owned()]))
        })
    })
    .unwrap_or_else(|| Seen::afar(type_, Finding::holds(Reason::Loaded, "Every router has loaded the tokenizer.")))
}

/// What `RenderParity` should say.
pub fn rendering(pool: &InferencePoolSpec, router: &str, pods: &[RouterPod], now: Timestamp) -> Seen {
    let type_ = ConditionType::RenderParity;
    if pool.model.tokenizer.is_none() {
        let message = "The pool names no tokenizer, so there is nothing to compare.";
        return Seen::certain(type_, Finding::holds(Reason::NotRequired, message));
    }
    // What one router has found counts more than what another one does not know yet.
    let all = reports(router, pods, now).map(|reports| reports.fresh).unwrap_or_default();
    let found = all.iter().find_map(|(pod, report)| diverged(router, pod, report));
    if let Some((finding, blamed)) = found {
        return Seen { type_, finding, pace: Pace::AfterWindow, blamed };
    }
    let failure = |pod: &str, report: &HealthReport| not_compared(pool, router, pod, report);
    over_reports(type_, router, pods, now, failure).unwrap_or_else(|| {
        let message = "Every engine makes the tokens that every router makes.";
        Seen::afar(type_, Finding::holds(Reason::RenderConfirmed, message))
    })
}

/// Ready workers and what a router knows of their tokens, where it is `parity`.
fn rendering_as<'a>(
    report: &'a HealthReport,
    parity: &'a str,
) -> impl Iterator<Item = (&'a str, &'a RenderingHealth)> {
    let told = |worker: &'a WorkerHealth| Some((subject(worker), worker.rendering.as_ref()?));
    let ready = report.workers.iter().filter(|worker| worker.ready);
    ready.filter_map(told).filter(move |(_, rendering)| rendering.parity == parity)
}

/// Workers that make other tokens than the router.
fn diverged(router: &str, pod: &str, report: &HealthReport) -> Option<Told> {
    let (_, first) = rendering_as(report, "diverged").next()?;
    let place = first.probe.as_ref().zip(first.position);
    let place = place.map_or_else(String::new, |(probe, position)| {
        format!(" (token {position} of the request \"{probe}\" is the first)")
    });
    let message = format!(
        "Pod {pod} of router {router} makes other tokens than {}{place}, so what they hold earns no credit; give \
         engines and spec.model.tokenizer of the pool the same tokenizer and chat template.",
        names(rendering_as(report, "diverged").map(|(worker, _)| worker))
    );
    let blamed = rendering_as(report, "diverged").map(|(worker, _)| worker.to_owned()).collect();
    Some((Finding::fails(Reason::RenderDiverged, message), blamed))
}

/// Workers of which the router does not know whether they make its tokens.
fn not_compared(pool: &InferencePoolSpec, router: &str, pod: &str, report: &HealthReport) -> Option<Told> {
    let mut ready = report.workers.iter().filter(|worker| worker.ready).peekable();
    if ready.peek().is_none() {
        return Some(no_workers(pool, router, report));
    }
    if ready.any(|worker| worker.rendering.is_none()) {
        let message = format!(
            "Pod {pod} of router {router} is of a release that does not compare tokens; use an image of the operator's \
             release."
        );
        return Some((Finding::unknown(Reason::NotObservable, message), BTreeSet::new()));
    }
    let (_, first) = rendering_as(report, "unknown").next()?;
    let is_pending = |rendering: &RenderingHealth| rendering.reason == "not_compared";
    let some_pending = rendering_as(report, "unknown").any(|(_, rendering)| is_pending(rendering));
    let meant = |rendering: &RenderingHealth| is_pending(rendering) == some_pending;
    let workers: BTreeSet<&str> =
        rendering_as(report, "unknown").filter(|(_, it)| meant(it)).map(|(worker, _)| worker).collect();
    let blamed = workers.iter().map(|worker| (*worker).to_owned()).collect();
    let listed = names(workers.iter().copied());
    let finding = if some_pending {
        let message = format!(
            "Pod {pod} of router {router} has not compared its tokens with those of {listed} yet; wait."
        );
        Finding::unknown(Reason::RenderPending, message)
    } else {
        let next = match first.reason.as_str() {
            "nothing_to_compare" => "its TokenizerReady says what it lacks",
            "engine_unknown" => "let it reach their /v1/models, which tells vLLM from SGLang",
            "texts_only" | "refused" => {
                "this release of the engine refuses such requests; compare by hand: kv-router tokenize"
            }
            _ => "let it reach their tokenize endpoint, or compare by hand: kv-router tokenize",
        };
        let message = format!(
            "Pod {pod} of router {router} cannot compare its tokens with those of {listed} ({}); {next}.",
            first.reason
        );
        Finding::unknown(Reason::NotObservable, message)
    };
    Some((finding, blamed))
}
