//! InferencePool, in five stages.

pub mod arguments;
pub mod build;
pub mod members;
pub mod observe;
pub mod pages;
pub mod pairs;
pub mod rules;
pub mod seed;
pub mod status;
pub mod validate;

use jiff::Timestamp;
use kube::ResourceExt;
use kube::runtime::controller::Action;
use kvrouter_crds::InferencePool;
use kvrouter_crds::pool::WorkloadStatus;

use self::observe::Observed;
use self::status::Input;
use self::validate::{Invalid, ValidPool};
use crate::apply::key;
use crate::controller::{Context, Latest, ReconcileError};
use crate::facts::is_paused;
use crate::gateway;
use crate::workload::{self, Outcome, Permission};

/// Brings one pool to where its spec says, and says where it is.
pub async fn reconcile(pool: &InferencePool, context: &Context) -> Result<Action, ReconcileError> {
    if pool.metadata.deletion_timestamp.is_some() {
        return Ok(Action::await_change());
    }
    let mut latest = Latest::of(pool, &context.pools)?;
    let look_up = |namespace: &str, name: &str| context.stores.gateway_pool(namespace, name);
    let unresolved = gateway::resolve(&mut latest.object, look_up);
    let pool = &latest.object;
    let observed = observe::observe(pool, unresolved, &context.stores, &context.reports, Timestamp::now());
    let verdict = validate::validate(pool, &observed, &context.config.children);
    let workloads = change_workloads(&latest, &observed, &verdict, context).await;
    let told = status::status(
        &Input {
            pool,
            verdict: &verdict,
            observed: &observed,
            workloads: &workloads.records,
            window: context.config.window(),
        },
        &latest.entry.memory,
    );
    context.publish(&context.pools, &latest, told, workloads.retry_after).await
}

/// The writing stage of a pool: at most one workload is changed.
async fn change_workloads(
    latest: &Latest<InferencePool>,
    observed: &Observed,
    verdict: &Result<ValidPool, Invalid>,
    context: &Context,
) -> Outcome {
    let pool = &latest.object;
    let published: &[WorkloadStatus] = pool.status.as_ref().map_or(&[], |status| &status.workloads);
    let Ok(valid) = verdict else {
        return Outcome { records: workload::keep(pool, published), ..Outcome::default() };
    };
    let permission = match (context.config.children.workload_patching, is_paused(pool)) {
        (false, _) => Permission::Disabled,
        (true, true) => Permission::Paused,
        (true, false) => Permission::Granted,
    };
    let wanted = build::build(valid, &context.config.children);
    let plan = workload::decide(valid, observed, &wanted, published, &latest.entry.patched, permission);
    let outcome = context.patcher.carry_out(&valid.namespace, plan).await;
    if let Some((uid, patched)) = outcome.patched.clone() {
        context.pools.update(&key(pool), &pool.uid().unwrap_or_default(), |entry| {
            entry.patched.insert(uid, patched);
        });
    }
    outcome
}
