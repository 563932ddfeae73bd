//! Do prefill and decode workers of a router have each other? Pure.

use std::collections::BTreeSet;

use k8s_openapi::jiff::Timestamp;
use kvrouter_crds::conditions::{ConditionType, Finding, Status, names};
use kvrouter_crds::config::RoleName;
use kvrouter_crds::health::{HealthReport, ODD_PAGE, WorkerHealth};

use super::reports::{reports, subject};
use crate::facts::RouterPod;
use crate::hysteresis::{Pace, Seen};
use crate::pool::pairs::reason_without;

/// What `Degraded` should say because prefill or decode workers have nobody to
/// serve requests with; none where they have, and where no worker is ready, which
/// the other conditions tell.
pub fn pairs(router: &str, pods: &[RouterPod], now: Timestamp) -> Option<Seen> {
    let reports = reports(router, pods, now).ok()?.fresh;
    let (pod, report, role) = reports.into_iter().find_map(|(pod, report)| {
        let half = missing(report)?;
        report.workers.iter().any(|worker| worker.ready).then_some((pod, report, half))
    })?;
    let of_role = || report.workers.iter().filter(|worker| worker.role == role.label());
    let is_odd = |worker: &&WorkerHealth| worker.reason == ODD_PAGE;
    let odd = names(of_role().filter(is_odd).map(subject));
    let why = match of_role().next() {
        None => "; it knows none".to_owned(),
        Some(_) if !odd.is_empty() => format!(" ({odd}: {ODD_PAGE})"),
        Some(worker) => format!(" ({}: {})", subject(worker), worker.reason),
    };
    let has_mixed =
        report.workers.iter().any(|worker| worker.ready && worker.role == RoleName::Mixed.label());
    let effect = if has_mixed { "mixed workers serve all requests" } else { "nothing is served" };
    let next = match odd.is_empty() {
        true => "look at the pool's pods of that role",
        false => {
            "start the engines of both roles with one page, or set spec.pageSizePolicy of the pool to Report"
        }
    };
    let message = format!(
        "Pod {pod} of router {router} has no {} worker that is ready{why}, and prefill and decode serve requests \
         together, so {effect}; {next}.",
        role.label()
    );
    let finding = Finding { status: Status::True, ..Finding::fails(reason_without(role)?, message) };
    let blamed: BTreeSet<String> = of_role().map(|worker| subject(worker).to_owned()).collect();
    Some(Seen { type_: ConditionType::Degraded, finding, pace: Pace::AfterWindow, blamed })
}

/// The half without which no pair stands, of both prefill; none where one
/// stands, and where the router's settings want none.
fn missing(report: &HealthReport) -> Option<RoleName> {
    let protocols = &report.disaggregation;
    if protocols.is_empty() || protocols.iter().any(|protocol| protocol.pairs > 0) {
        return None;
    }
    let has_prefill = protocols.iter().any(|protocol| protocol.prefill > 0);
    Some(if has_prefill { RoleName::Decode } else { RoleName::Prefill })
}
