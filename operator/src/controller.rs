//! Runs both reconcilers: queues in, reconciles out, failures retried.
//!
//! What is common to both kinds is here, so that `pool` and `router` are their
//! five stages and nothing else.

use std::convert::Infallible;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use futures::channel::mpsc::UnboundedReceiver;
use futures::future::BoxFuture;
use jiff::Timestamp;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::core::object::HasStatus;
use kube::runtime::applier;
use kube::runtime::controller::{self, Action, Config as Limits};
use kube::runtime::reflector::{ObjectRef, Store};
use kube::{Resource, ResourceExt};
use kvrouter_crds::conditions::{ConditionType, POOL_TYPES, ROUTER_TYPES};
use kvrouter_crds::{InferencePool, KvRouter};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

use crate::apply::{ApplyError, Published, Writer, key};
use crate::config::Config;
use crate::events::Announcer;
use crate::hysteresis::Outcome;
use crate::ledger::{Entry, Key, Ledger};
use crate::metrics::Metrics;
use crate::poller::Reports;
use crate::stores::Stores;
use crate::watch::{Queue, Queues};
use crate::workload::Patcher;
use crate::{pool, router};

/// Reconciles of one kind under way at once. They wait for the API server most
/// of their time; more would only be more load on it after a restart.
const CONCURRENCY: u16 = 8;
/// How long a change waits for others of the same object: the pods of a rollout
/// come in bursts.
const DEBOUNCE: Duration = Duration::from_millis(100);
/// Longest reconcile: an API server that takes a connection and says nothing
/// would otherwise hold an object up for ever.
const TIMEOUT: Duration = Duration::from_mins(1);
/// First and longest pause after a failure that may heal.
const TRANSIENT: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(30));
/// The same after a refusal: only people can do something about it.
const REFUSED: (Duration, Duration) = (Duration::from_secs(15), Duration::from_mins(5));

/// What a reconcile works with.
pub struct Context {
    /// Settings.
    pub config: Arc<Config>,
    /// Metrics.
    pub metrics: Arc<Metrics>,
    /// What the API server has told.
    pub stores: Stores,
    /// What waits.
    pub queues: Arc<Queues>,
    /// What routers have told.
    pub reports: Arc<Reports>,
    /// Writes children and statuses.
    pub writer: Writer,
    /// Patches engine workloads.
    pub patcher: Patcher,
    /// Writes events.
    pub announcer: Announcer,
    /// What is remembered of pools.
    pub pools: Ledger,
    /// What is remembered of routers.
    pub routers: Ledger,
}

/// Why a reconcile did not come to its end.
#[derive(Debug, thiserror::Error)]
pub enum ReconcileError {
    /// Something was not written.
    #[error("failed to reconcile")]
    Apply(#[source] ApplyError),
    /// What is published is not a status, which only a newer release can have written.
    #[error("failed to read the published status")]
    Status(#[source] serde_json::Error),
    /// The API server took too long.
    #[error("unable to reconcile within {TIMEOUT:?}")]
    Timeout,
}

impl ReconcileError {
    /// The `result` label.
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::Apply(error) => error.reason(),
            Self::Status(_) => "published_status",
            Self::Timeout => "timeout",
        }
    }

    /// Whether the same call can succeed later without anyone changing anything.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Apply(error) => error.is_transient(),
            Self::Status(_) => false,
            Self::Timeout => true,
        }
    }
}

/// An object with the status that was published last, which its store may not
/// show yet, and what else is remembered of it.
pub struct Latest<K> {
    /// The object.
    pub object: K,
    /// Its entry.
    pub entry: Entry,
    published: Option<(Value, Option<Instant>)>,
}

impl<K> Latest<K>
where
    K: HasStatus<Status: Serialize + DeserializeOwned> + Resource + Clone,
{
    /// `object` as `ledger` knows it.
    pub fn of(object: &K, ledger: &Ledger) -> Result<Self, ReconcileError> {
        let mut object = object.clone();
        let entry = ledger.entry(&key(&object), &object.uid().unwrap_or_default());
        let published = match &entry.published {
            Some((status, at)) => {
                let status = status.clone();
                *object.status_mut() =
                    Some(serde_json::from_value(status.clone()).map_err(ReconcileError::Status)?);
                Some((status, Some(*at)))
            }
            None => match object.status() {
                Some(status) => Some((serde_json::to_value(status).map_err(ReconcileError::Status)?, None)),
                None => None,
            },
        };
        Ok(Self { object, entry, published })
    }
}

impl Context {
    /// The last stage of both kinds: publishes a status, announces what flipped,
    /// and says when to look again: after `retry_after` at the latest.
    pub async fn publish<K, S>(
        &self,
        ledger: &Ledger,
        latest: &Latest<K>,
        told: Outcome<S>,
        retry_after: Option<Duration>,
    ) -> Result<Action, ReconcileError>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned + Debug,
        S: Serialize,
    {
        let Latest { object, published, .. } = latest;
        let became = self.writer.publish(object, &told.status, published.as_ref()).await;
        let became = became.map_err(ReconcileError::Apply)?;
        let (namespace, name) = key(object);
        let recheck = told.recheck_after.and_then(|after| Duration::try_from(after).ok());
        let mut again = recheck.into_iter().chain(retry_after).min();
        ledger.update(&(namespace.clone(), name.clone()), &object.uid().unwrap_or_default(), |entry| {
            entry.memory = told.memory;
            if let Published::Written(status) = &became {
                entry.published = Some((status.clone(), Instant::now()));
            }
        });
        match &became {
            Published::Written(status) => {
                let before = published.as_ref().map_or(&Value::Null, |(status, _)| status);
                let now = conditions(status);
                self.metrics.set_conditions(&K::kind(&()), &namespace, &name, &now);
                self.announcer.announce(&object.object_ref(&()), before, status).await;
            }
            Published::TooEarly(left) => again = Some(again.map_or(*left, |after| after.min(*left))),
            Published::Unchanged => {
                let published = published.as_ref().map_or(&Value::Null, |(status, _)| status);
                self.metrics.set_conditions(&K::kind(&()), &namespace, &name, &conditions(published));
            }
        }
        Ok(again.map_or_else(Action::await_change, Action::requeue))
    }

    /// Runs both reconcilers until `stop`; what is under way then is finished.
    pub async fn run(
        self: Arc<Self>,
        pools: UnboundedReceiver<ObjectRef<InferencePool>>,
        routers: UnboundedReceiver<ObjectRef<KvRouter>>,
        stop: CancellationToken,
    ) {
        let pool_kind = Kind {
            store: self.stores.pools.clone(),
            queue: |context| &context.queues.pools,
            ledger: |context| &context.pools,
            types: POOL_TYPES,
            reconcile: |pool, context| Box::pin(async move { pool::reconcile(&pool, &context).await }),
        };
        let router_kind = Kind {
            store: self.stores.routers.clone(),
            queue: |context| &context.queues.routers,
            ledger: |context| &context.routers,
            types: ROUTER_TYPES,
            reconcile: |router, context| Box::pin(async move { router::reconcile(&router, &context).await }),
        };
        tokio::join!(
            drive(Arc::clone(&self), pool_kind, pools, stop.clone()),
            drive(self, router_kind, routers, stop),
        );
    }
}

/// Conditions of a status.
pub fn conditions(status: &Value) -> Vec<Condition> {
    let list = status.get("conditions").cloned().unwrap_or_default();
    serde_json::from_value(list).unwrap_or_default()
}

type Reconcile<K> = fn(Arc<K>, Arc<Context>) -> BoxFuture<'static, Result<Action, ReconcileError>>;

/// What differs between the two kinds.
struct Kind<K: Resource<DynamicType = ()> + 'static> {
    store: Store<K>,
    queue: fn(&Context) -> &Queue<K>,
    ledger: fn(&Context) -> &Ledger,
    types: &'static [ConditionType],
    reconcile: Reconcile<K>,
}

async fn drive<K>(
    context: Arc<Context>,
    kind: Kind<K>,
    queue: UnboundedReceiver<ObjectRef<K>>,
    stop: CancellationToken,
) where
    K: Resource<DynamicType = ()> + Clone + Debug + Send + Sync + 'static,
{
    let Kind { store, queue: queue_of, ledger, types, reconcile } = kind;
    let name = K::kind(&());
    let begin = {
        let name = name.clone();
        move |object: Arc<K>, context: Arc<Context>| -> BoxFuture<'static, Result<Action, ReconcileError>> {
            queue_of(&context).begin(&ObjectRef::from_obj(&*object));
            let name = name.clone();
            Box::pin(async move {
                let began = Instant::now();
                let work = reconcile(Arc::clone(&object), Arc::clone(&context));
                let result = timeout(TIMEOUT, work).await.unwrap_or(Err(ReconcileError::Timeout));
                let label = result.as_ref().map_or_else(ReconcileError::reason, |_| "ok");
                context.metrics.reconciled(&name, label, began.elapsed());
                if result.is_ok() {
                    let uid = object.uid().unwrap_or_default();
                    ledger(&context).update(&key(&*object), &uid, |entry| entry.failures = 0);
                }
                result
            })
        }
    };
    let policy = move |object: Arc<K>, error: &ReconcileError, context: Arc<Context>| {
        let key = key(&*object);
        let mut failures = 0;
        ledger(&context).update(&key, &object.uid().unwrap_or_default(), |entry| {
            failures = entry.failures;
            entry.failures = entry.failures.saturating_add(1);
        });
        let pause = backoff(failures, error.is_transient(), &key);
        let (error, seconds) = (crate::chain(error), pause.as_secs_f32());
        tracing::warn!(kind = %K::kind(&()), namespace = key.0, name = key.1, error, seconds, "reconcile failed");
        Action::requeue(pause)
    };
    let requests = queue.map(Ok::<_, Infallible>).take_until(async move { stop.cancelled().await });
    let limits = Limits::default().debounce(DEBOUNCE).concurrency(CONCURRENCY);
    let results = applier(begin, policy, Arc::clone(&context), store, Box::pin(requests), limits);
    let mut results = std::pin::pin!(results);
    while let Some(result) = results.next().await {
        if let Err(controller::Error::ObjectNotFound(gone)) = result {
            let namespace = gone.namespace.clone().unwrap_or_default();
            queue_of(&context).begin(&ObjectRef::new(&gone.name).within(&namespace));
            let types: Vec<&str> = types.iter().map(|type_| type_.as_str()).collect();
            context.metrics.forget(&name, &namespace, &gone.name, &types);
            ledger(&context).forget(&(namespace, gone.name));
        }
    }
}

/// How long to wait after that many failures before: doubled each time, with up
/// to a fifth more so that objects which failed together do not retry together.
fn backoff(failures: u32, is_transient: bool, key: &Key) -> Duration {
    let (first, longest) = if is_transient { TRANSIENT } else { REFUSED };
    let pause = first.saturating_mul(1 << failures.min(10)).min(longest);
    let salt = key.1.bytes().fold(0_u32, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte.into()));
    let noise = Timestamp::now().subsec_nanosecond().unsigned_abs().wrapping_add(salt) % 1000;
    pause + pause * noise / 5000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_wait_longer_and_refusals_longest() {
        let key = ("ns".to_owned(), "chat".to_owned());
        let at_least = |failures, transient, seconds: f32| {
            let pause = backoff(failures, transient, &key).as_secs_f32();
            assert!(seconds <= pause && pause <= seconds * 1.2, "{failures} {transient}: {pause}");
        };
        at_least(0, true, 0.5);
        at_least(1, true, 1.0);
        at_least(30, true, 30.0);
        at_least(0, false, 15.0);
        at_least(30, false, 300.0);
    }
}
