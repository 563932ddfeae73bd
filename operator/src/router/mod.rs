//! KvRouter, in five stages.

pub mod applied;
pub mod build;
pub mod config;
pub mod hearing;
pub mod index;
pub mod observe;
pub mod pairs;
pub mod pod;
pub mod prompts;
pub mod reports;
pub mod status;
pub mod trouble;
pub mod validate;

use std::time::Duration;

use jiff::Timestamp;
use kube::ResourceExt;
use kube::runtime::controller::Action;
use kvrouter_crds::KvRouter;

use self::build::Desired;
use self::status::Input;
use crate::apply::{ApplyError, key};
use crate::controller::{Context, Latest, ReconcileError};
use crate::facts::is_paused;

/// How often it is tried whether a name is free by now: objects that are not
/// ours are not watched.
const TAKEN_RETRY: Duration = Duration::from_secs(30);

/// Brings one router to where its spec says, and says where it is.
pub async fn reconcile(router: &KvRouter, context: &Context) -> Result<Action, ReconcileError> {
    if router.metadata.deletion_timestamp.is_some() {
        return Ok(Action::await_change());
    }
    let latest = Latest::of(router, &context.routers)?;
    let router = &latest.object;
    let flags = &context.config.children;
    let taken =
        context.writer.still_taken(router, &latest.entry.taken).await.map_err(ReconcileError::Apply)?;
    let mut observed = observe::observe(router, &context.stores, &context.reports, taken, Timestamp::now());
    let mut desired = validate::validate(router, &observed, flags).map(|valid| build::build(&valid, flags));
    let mut failure = apply(router, desired.as_ref().ok(), context).await;
    if let Some(ApplyError::NameTaken { names }) = &failure {
        observed.taken.clone_from(names);
        desired = validate::validate(router, &observed, flags).map(|valid| build::build(&valid, flags));
        failure = None;
    }
    if failure.as_ref().is_some_and(ApplyError::is_namespace_ending) {
        tracing::debug!(namespace = router.namespace(), name = router.name_any(), "the namespace is ending");
        return Ok(Action::await_change());
    }
    let refusal = failure.as_ref().and_then(ApplyError::refusal);
    let told = status::status(
        &Input {
            router,
            verdict: desired.as_ref(),
            observed: &observed,
            apply_failure: refusal.as_deref(),
            window: context.config.window(),
        },
        &latest.entry.memory,
    );
    let retry = (!observed.taken.is_empty()).then_some(TAKEN_RETRY);
    context.routers.update(&key(router), &router.uid().unwrap_or_default(), |entry| {
        entry.taken = observed.taken;
    });
    let action = context.publish(&context.routers, &latest, told, retry).await?;
    failure.map_or(Ok(action), |error| Err(ReconcileError::Apply(error)))
}

/// The writing stage of a router. A failure is told in the status first.
async fn apply(router: &KvRouter, desired: Option<&Desired>, context: &Context) -> Option<ApplyError> {
    let desired = desired.filter(|_| !is_paused(router))?;
    context.writer.apply(router, desired, &context.stores, &context.routers).await.err()
}
