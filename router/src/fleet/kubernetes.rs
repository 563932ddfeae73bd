//! Workers and live settings as the Kubernetes API tells them.
//!
//! Two objects of interest are followed, each for itself: the pods of the pool
//! and the ConfigMap with live settings. Following is listing, then watching;
//! every so often, and after every failure, it begins again with a list, so a
//! watch that fell silent or lost something is put right by the next one. While
//! the API server does not answer, what was known last stays in force.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use futures::StreamExt;
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use kube::core::Status;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, Resource};
use kvrouter_crds::config::{KubernetesDiscovery, LIVE_SETTINGS_KEY};
use kvrouter_crds::health::Problem;
use serde::de::DeserializeOwned;
use tokio::time::{Instant, sleep, timeout_at};

use super::pods::{PodFacts, Rules, members};
use crate::live;
use crate::pool::Pool;
use crate::proxy::upstream::Upstream;

/// How long a list may take; a thousand pods take a second.
const LIST_LIMIT: Duration = Duration::from_secs(10);
/// How long a connection may take.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// After a failure the next attempt waits this long, twice as long each time,
const BACKOFF: Duration = Duration::from_millis(250);
/// but not longer than this: it is also how late a recovery is noticed.
const MAX_BACKOFF: Duration = Duration::from_secs(4);
/// A watch that lives this long works.
const SETTLED: Duration = Duration::from_secs(2);
/// Label of the problem that the API server does not answer.
pub const UNREACHABLE: &str = "api_unreachable";

/// One kind of object that is followed.
#[derive(Clone, Copy, Debug)]
struct Subject<'a> {
    /// Its plural, as rights name it.
    resource: &'static str,
    namespace: &'a str,
    /// What stays in force while nothing is heard of it.
    kept: &'static str,
}

/// What following tells.
#[derive(Debug)]
enum Told<K> {
    /// All objects there are.
    All(Vec<K>),
    /// One is new or changed.
    Changed(K),
    /// One is gone.
    Gone(K),
}

/// What went wrong last, which says what it takes to be well again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Failed {
    /// Nothing.
    #[default]
    No,
    /// A list: the next one that succeeds ends it.
    Listing,
    /// A watch: a list proves nothing, the next watch has to live for a while.
    Watching,
}

/// Why following has to begin again.
#[derive(Debug, thiserror::Error)]
enum FollowError {
    #[error("no list within {} s", LIST_LIMIT.as_secs())]
    ListTimeout,
    #[error("the watch ended")]
    Ended,
    #[error(transparent)]
    Watcher(#[from] watcher::Error),
}

/// The way to the API server: in a pod its service account's, else KUBECONFIG's.
pub async fn client() -> anyhow::Result<Client> {
    let mut config = kube::Config::infer().await.context(
        "failed to find the Kubernetes API server; run in a pod, or let KUBECONFIG name a kubeconfig file",
    )?;
    config.connect_timeout = Some(CONNECT_LIMIT);
    // Failures are repeated here, and reported meanwhile.
    config.default_retry = false;
    Client::try_from(config).context("failed to set up the connection to the Kubernetes API server")
}

/// Follows the pool's pods for ever and keeps the fleet what they say.
pub async fn follow_pods(
    pool: Arc<Pool>,
    upstream: Upstream,
    client: Client,
    discovery: KubernetesDiscovery,
) {
    let labels: Vec<String> =
        discovery.selector.iter().map(|(name, value)| format!("{name}={value}")).collect();
    let selection = watcher::Config::default().labels(&labels.join(","));
    let subject = Subject {
        resource: "pods",
        namespace: &discovery.namespace,
        kept: "the workers known last stay in use, and no other is found",
    };
    let api: Api<Pod> = Api::namespaced(client, &discovery.namespace);
    let mut pods: BTreeMap<String, PodFacts> = BTreeMap::new();
    let mut known = false;
    let mut settings = pool.live_changes();
    let (told, mut heard) = tokio::sync::mpsc::channel(1);
    let follow = follow(&pool, api, selection, subject, told);
    let update = async {
        loop {
            tokio::select! {
                told = heard.recv() => match told {
                    Some(told) => {
                        known |= matches!(told, Told::All(_));
                        note(&mut pods, told);
                    }
                    None => return,
                },
                changed = settings.changed() => if changed.is_err() { return },
            }
            if known {
                let foreign = Arc::clone(&pool.live.read().foreign_selectors);
                let Some(rules) = Rules::of(&pool.config.file, &foreign) else { return };
                super::take(&pool, &upstream, &members(pods.values(), &rules));
            }
        }
    };
    tokio::join!(follow, update);
}

/// Takes over what was told about pods.
fn note(pods: &mut BTreeMap<String, PodFacts>, told: Told<Pod>) {
    let named = |pod: &Pod| Some((pod.metadata.name.clone()?, PodFacts::of(pod)?));
    match told {
        Told::All(all) => *pods = all.iter().filter_map(named).collect(),
        Told::Changed(pod) => pods.extend(named(&pod)),
        Told::Gone(pod) => {
            if let Some(name) = &pod.metadata.name {
                pods.remove(name);
            }
        }
    }
}

/// Follows the ConfigMap with live settings for ever.
pub async fn follow_live_settings(pool: Arc<Pool>, client: Client, namespace: String, name: String) {
    let selection = watcher::Config::default().fields(&format!("metadata.name={name}"));
    let subject = Subject {
        resource: "configmaps",
        namespace: &namespace,
        kept: "the live settings read last stay in force",
    };
    let api: Api<ConfigMap> = Api::namespaced(client, &namespace);
    let (told, mut heard) = tokio::sync::mpsc::channel(1);
    let follow = follow(&pool, api, selection, subject, told);
    let origin = format!("configmap/{namespace}/{name}/{LIVE_SETTINGS_KEY}");
    let update = async {
        while let Some(told) = heard.recv().await {
            let map = match told {
                Told::All(maps) => maps.into_iter().find(|map| map.metadata.name.as_ref() == Some(&name)),
                Told::Changed(map) => Some(map),
                Told::Gone(_) => None,
            };
            let text = map.as_ref().map(|map| map.data.as_ref()?.get(LIVE_SETTINGS_KEY).cloned());
            match text {
                Some(Some(text)) => live::take(&pool, &text, Path::new(&origin)),
                Some(None) => live::refuse(&pool, format!("{origin}: the ConfigMap has no such key")),
                None => live::refuse(&pool, format!("{origin}: there is no such ConfigMap")),
            }
            pool.live_known.store(true, std::sync::atomic::Ordering::Relaxed);
        }
    };
    tokio::join!(follow, update);
}

/// Lists and watches for ever; problems are noted in the fleet.
async fn follow<K>(
    pool: &Pool,
    api: Api<K>,
    selection: watcher::Config,
    subject: Subject<'_>,
    told: tokio::sync::mpsc::Sender<Told<K>>,
) where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let relist = pool.config.relist;
    // A server that keeps to it ends the watch when the next list is due anyway.
    let selection = selection.timeout(u32::try_from(relist.as_secs()).unwrap_or(u32::MAX).clamp(1, 290));
    let (mut failures, mut failed) = (0u32, Failed::No);
    while !told.is_closed() {
        let is_well = || {
            failures = 0;
            if pool.fleet.set_trouble(subject.resource, None) {
                tracing::info!(target: "kv_router::fleet", resource = subject.resource, "the API server answers again");
            }
        };
        let (during, error) = match follow_once(&api, &selection, relist, &told, failed, is_well).await {
            Ok(()) => {
                failed = Failed::No;
                continue;
            }
            Err(failure) => failure,
        };
        failed = during;
        let pause = BACKOFF.saturating_mul(1 << failures.min(8)).min(MAX_BACKOFF);
        failures += 1;
        // Connections break; only if that goes on, or is meant, it is a problem.
        let passing = failures == 1 && during == Failed::Watching && status(&error).is_none();
        if passing || is_expired(&error) {
            sleep(pause).await;
            continue;
        }
        let problem = problem(&error, subject);
        pool.metrics.discovery_errors.with_label_values(&[subject.resource, &problem.reason]).inc();
        let message = problem.message.clone();
        if !pool.fleet.set_trouble(subject.resource, Some(problem)) {
            tracing::warn!(target: "kv_router::fleet", resource = subject.resource, message, "unable to follow the API");
        }
        sleep(pause).await;
    }
}

/// One list and the watch behind it, until the next list is due. `is_well` is
/// called once it is seen that what failed before works.
async fn follow_once<K>(
    api: &Api<K>,
    selection: &watcher::Config,
    relist: Duration,
    told: &tokio::sync::mpsc::Sender<Told<K>>,
    failed: Failed,
    mut is_well: impl FnMut(),
) -> Result<(), (Failed, FollowError)>
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let started = Instant::now();
    let mut events = std::pin::pin!(watcher(api.clone(), selection.clone()));
    let mut list = Some(Vec::new());
    let mut settles: Option<Instant> = None;
    loop {
        let ends = started + if list.is_some() { LIST_LIMIT } else { relist };
        let until = settles.map_or(ends, |settles| settles.min(ends));
        let during = if list.is_some() { Failed::Listing } else { Failed::Watching };
        let event = match timeout_at(until, events.next()).await {
            Ok(Some(event)) => event.map_err(|error| (during, error.into()))?,
            Ok(None) => return Err((during, FollowError::Ended)),
            Err(_) if list.is_some() => return Err((during, FollowError::ListTimeout)),
            Err(_) if settles.take().is_some() => {
                is_well();
                continue;
            }
            Err(_) => return Ok(()),
        };
        let told_now = match event {
            Event::Init => {
                list = Some(Vec::new());
                continue;
            }
            Event::InitApply(object) => {
                list.get_or_insert_default().push(object);
                continue;
            }
            Event::InitDone => {
                match failed {
                    Failed::No | Failed::Listing => is_well(),
                    Failed::Watching => settles = Some(Instant::now() + SETTLED),
                }
                Told::All(list.take().unwrap_or_default())
            }
            Event::Apply(object) => Told::Changed(object),
            Event::Delete(object) => Told::Gone(object),
        };
        if told.send(told_now).await.is_err() {
            return Ok(());
        }
    }
}

/// The server's answer to the request that failed, if it gave one.
fn status(error: &FollowError) -> Option<(&'static str, &Status)> {
    fn of<'a>(verb: &'static str, error: &'a kube::Error) -> Option<(&'static str, &'a Status)> {
        match error {
            kube::Error::Api(status) => Some((verb, status)),
            _ => None,
        }
    }
    match error {
        FollowError::Watcher(watcher::Error::InitialListFailed(error)) => of("list", error),
        FollowError::Watcher(
            watcher::Error::WatchStartFailed(error) | watcher::Error::WatchFailed(error),
        ) => of("watch", error),
        FollowError::Watcher(watcher::Error::WatchError(status)) => Some(("watch", status)),
        FollowError::Watcher(watcher::Error::NoResourceVersion)
        | FollowError::ListTimeout
        | FollowError::Ended => None,
    }
}

/// Whether the server only forgot the version that was watched from: a new list
/// is all it takes.
fn is_expired(error: &FollowError) -> bool {
    status(error).is_some_and(|(_, status)| status.code == 410)
}

/// What is wrong, and what to do.
fn problem(error: &FollowError, subject: Subject<'_>) -> Problem {
    let Subject { resource, namespace, kept } = subject;
    let (reason, message) = match status(error) {
        Some((verb, status)) if status.code == 403 => {
            let account = service_account(&status.message).unwrap_or("NAMESPACE:NAME".to_owned());
            let message = format!(
                "The router may not {verb} {resource} in namespace {namespace}; {kept}; its role needs get, list and watch on {resource}: kubectl create rolebinding kv-router --clusterrole=kvrouter-router --serviceaccount={account} -n {namespace} (the chart installs that ClusterRole)."
            );
            ("api_forbidden", message)
        }
        Some((_, status)) if status.code == 401 => {
            let message = format!(
                "The API server does not accept the router's credentials; {kept}; check that its service account's token is mounted, or the kubeconfig."
            );
            ("api_unauthorized", message)
        }
        _ => {
            let cause = crate::chain(error);
            let message = format!(
                "The Kubernetes API server does not answer ({cause}); the workers and live settings known last stay in use, and changes go unseen; check the API server and the network to it."
            );
            (UNREACHABLE, message)
        }
    };
    Problem { reason: reason.to_owned(), worker: None, message }
}

/// `namespace:name` of the account that the server's refusal names.
fn service_account(message: &str) -> Option<String> {
    let (_, rest) = message.split_once("system:serviceaccount:")?;
    let account: String =
        rest.chars().take_while(|c| c.is_ascii_alphanumeric() || "-.:".contains(*c)).collect();
    (account.split(':').count() == 2).then_some(account)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SUBJECT: Subject<'_> = Subject { resource: "pods", namespace: "ai", kept: "all stays" };

    fn refusal(code: u16, message: &str) -> FollowError {
        let status = serde_json::from_value(serde_json::json!({
            "status": "Failure", "code": code, "message": message, "reason": "x",
        }));
        let error = kube::Error::Api(Box::new(status.expect("a status")));
        FollowError::Watcher(watcher::Error::InitialListFailed(error))
    }

    /// A person reads the message and knows what to type.
    #[test]
    fn problems_name_what_is_missing_and_the_next_step() {
        let forbidden = refusal(
            403,
            r#"pods is forbidden: User "system:serviceaccount:ai:kv-router" cannot list resource "pods""#,
        );
        let found = problem(&forbidden, SUBJECT);
        assert_eq!(found.reason, "api_forbidden");
        for part in [
            "may not list pods in namespace ai",
            "get, list and watch on pods",
            "--clusterrole=kvrouter-router --serviceaccount=ai:kv-router -n ai",
        ] {
            assert!(found.message.contains(part), "{part}: {}", found.message);
        }
        let anonymous = problem(&refusal(403, "forbidden: User \"system:anonymous\""), SUBJECT);
        assert!(anonymous.message.contains("--serviceaccount=NAMESPACE:NAME"), "{}", anonymous.message);
        assert_eq!(problem(&refusal(401, "no"), SUBJECT).reason, "api_unauthorized");
        assert_eq!(problem(&refusal(500, "no"), SUBJECT).reason, UNREACHABLE);
        assert_eq!(problem(&FollowError::ListTimeout, SUBJECT).reason, UNREACHABLE);
        assert!(is_expired(&refusal(410, "too old")) && !is_expired(&refusal(500, "no")));
    }
}
