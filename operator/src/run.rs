//! `run`: waits for what it needs, leads, reconciles, and stops in order.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures::channel::mpsc::UnboundedReceiver;
use futures::future::{join_all, select_all};
use k8s_openapi::api::core::v1::Pod;
use kube::runtime::reflector::ObjectRef;
use kube::{Client, ResourceExt};
use kvrouter_crds::{InferencePool, KvRouter};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use crate::apply::Writer;
use crate::config::Config;
use crate::controller::Context;
use crate::definitions;
use crate::events::Announcer;
use crate::lease::{Elector, Ended};
use crate::ledger::Ledger;
use crate::metrics::Metrics;
use crate::poller::{self, PodKey, Reports};
use crate::probes::{self, Readiness};
use crate::stores::{MANAGED_BY, ROUTER_LABEL, Stores};
use crate::watch::{Queue, Queues, Watches};
use crate::workload::Patcher;

/// Time between two looks for the definitions while they are missing.
const RETRY: Duration = Duration::from_secs(2);

/// A namespace, or all of them, with everything that is watched there. Pools and
/// routers never name anything outside their namespace, so scopes are independent.
struct Scope {
    watches: Watches,
    queues: Arc<Queues>,
    pools: UnboundedReceiver<ObjectRef<InferencePool>>,
    routers: UnboundedReceiver<ObjectRef<KvRouter>>,
}

/// Why the process ends before it is told to.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// Signals cannot be waited for.
    #[error("failed to wait for signals")]
    Signals(#[source] io::Error),
    /// Two metrics have one name, which is a defect of ours.
    #[error("failed to register metrics")]
    Metrics(#[source] prometheus::Error),
    /// The port is taken, or may not be.
    #[error("failed to listen on {address} (give another address and port with --listen)")]
    Listen {
        /// Where.
        address: SocketAddr,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// There is neither a kubeconfig nor a service account.
    #[error(
        "failed to find a Kubernetes API server (set KUBECONFIG, or run in a pod with a service account)"
    )]
    Client(#[source] kube::Error),
    /// Probes and metrics are not served any more.
    #[error("failed to serve probes")]
    Probes(#[source] io::Error),
    /// Another operator may write now.
    #[error("the Lease is lost and another operator may write: this process ends, to start anew")]
    LeaseLost,
    /// A task ended that runs for ever.
    #[error("{0} ended, which it never should")]
    Ended(&'static str),
}

/// Runs until SIGTERM or SIGINT. An error ends the process.
pub async fn run(config: Config) -> Result<(), RunError> {
    let stop = stop_on_signal().map_err(RunError::Signals)?;
    let metrics = Arc::new(Metrics::new().map_err(RunError::Metrics)?);
    let readiness = Readiness::starting(Arc::clone(&metrics));
    let address = config.listen;
    let listener = TcpListener::bind(address).await.map_err(|source| RunError::Listen { address, source })?;
    let probes = tokio::spawn(probes::serve(listener, Arc::clone(&readiness), stop.clone()));
    let client = Client::try_default().await.map_err(RunError::Client)?;
    let config = Arc::new(config);
    let prepared = tokio::select! {
        prepared = prepare(&client, &config, &metrics, &readiness) => Some(prepared),
        () = stop.cancelled() => None,
    };
    if let Some((scopes, elector)) = prepared {
        lead(client, config, metrics, scopes, elector, &stop).await?;
    }
    probes.await.map_err(|_| RunError::Ended("the server of the probes"))?.map_err(RunError::Probes)
}

/// Returns once everything is in place and the Lease is held, if there is one.
/// Nothing is written before, so it may be dropped at any time.
async fn prepare(
    client: &Client,
    config: &Config,
    metrics: &Arc<Metrics>,
    readiness: &Readiness,
) -> (Vec<Scope>, Option<Elector>) {
    await_definitions(client, config, readiness).await;
    readiness.lacks("stores_empty", "the first listing of all kinds is under way".to_owned());
    let scopes = scopes(client, config, metrics);
    join_all(scopes.iter().map(|scope| scope.watches.ready())).await;
    readiness.complete();
    tracing::info!(namespaces = ?config.watch_namespaces, "ready");
    let mut elector = config.lease.as_ref().map(|lease| Elector::new(client.clone(), lease));
    if let Some(elector) = &mut elector {
        elector.acquire().await;
    }
    // Another release may have changed them while this one waited.
    await_definitions(client, config, readiness).await;
    readiness.complete();
    (scopes, elector)
}

/// Reconciles until `stop`, finishes what is under way, and gives the Lease back.
/// Ends at once, with an error, when the Lease is lost: then another may write.
async fn lead(
    client: Client,
    config: Arc<Config>,
    metrics: Arc<Metrics>,
    scopes: Vec<Scope>,
    elector: Option<Elector>,
    stop: &CancellationToken,
) -> Result<(), RunError> {
    metrics.leader.set(1);
    tracing::info!(holder = config.lease.as_ref().map(|lease| &lease.holder), "leading");
    let reports = Arc::new(Reports::default());
    let poll = poll(&scopes, &reports, &metrics, &config);
    let mut watches = Vec::new();
    let mut controllers = Vec::new();
    for Scope { watches: mut scope, queues, pools, routers } in scopes {
        let context = context(&client, &config, &metrics, &reports, &scope.stores, &queues);
        controllers.push(Arc::new(context).run(pools, routers, stop.clone()));
        watches.push(Box::pin(async move { scope.ended().await }));
    }
    let finished = CancellationToken::new();
    let work = async {
        join_all(controllers).await;
        finished.cancel();
        std::future::pending::<()>().await;
    };
    let hold = async {
        match elector {
            Some(mut elector) => elector.hold(&finished).await,
            None => {
                finished.cancelled().await;
                Ended::Released
            }
        }
    };
    tokio::select! {
        biased;
        ended = hold => match ended {
            Ended::Released => Ok(()),
            Ended::Lost => Err(RunError::LeaseLost),
        },
        () = work => Ok(()),
        _ = select_all(watches) => Err(RunError::Ended("a watch")),
        () = poll => Err(RunError::Ended("the poller")),
    }
}

/// Returns once the definitions are there and new enough.
async fn await_definitions(client: &Client, config: &Config, readiness: &Readiness) {
    let namespace = config.watch_namespaces.first().map(String::as_str);
    while let Err(error) = definitions::check(client, namespace).await {
        let message = crate::chain(&error);
        if readiness.lacks(error.reason(), message.clone()) {
            tracing::warn!(reason = error.reason(), "waiting: {message}");
        }
        sleep(RETRY).await;
    }
}

fn scopes(client: &Client, config: &Config, metrics: &Arc<Metrics>) -> Vec<Scope> {
    let all = [None];
    let named = config.watch_namespaces.iter().map(|name| Some(name.as_str()));
    let names: Vec<Option<&str>> =
        if config.watch_namespaces.is_empty() { all.to_vec() } else { named.collect() };
    names
        .into_iter()
        .map(|namespace| {
            let (pool_queue, pools) = Queue::new(metrics.queue.with_label_values(&["InferencePool"]));
            let (router_queue, routers) = Queue::new(metrics.queue.with_label_values(&["KvRouter"]));
            let queues = Arc::new(Queues { pools: pool_queue, routers: router_queue });
            let watches = Watches::start(client, namespace, &queues, metrics);
            Scope { watches, queues, pools, routers }
        })
        .collect()
}

fn context(
    client: &Client,
    config: &Arc<Config>,
    metrics: &Arc<Metrics>,
    reports: &Arc<Reports>,
    stores: &Stores,
    queues: &Arc<Queues>,
) -> Context {
    Context {
        config: Arc::clone(config),
        metrics: Arc::clone(metrics),
        stores: stores.clone(),
        queues: Arc::clone(queues),
        reports: Arc::clone(reports),
        writer: Writer::new(client.clone(), Arc::clone(metrics)),
        patcher: Patcher::new(client.clone(), Arc::clone(metrics)),
        announcer: Announcer::new(client.clone(), config.instance.clone()),
        pools: Ledger::default(),
        routers: Ledger::default(),
    }
}

/// Polls the routers of all scopes.
fn poll(
    scopes: &[Scope],
    reports: &Arc<Reports>,
    metrics: &Arc<Metrics>,
    config: &Config,
) -> impl Future<Output = ()> + use<> {
    let stores: Vec<Stores> = scopes.iter().map(|scope| scope.watches.stores.clone()).collect();
    let heard: Vec<_> = scopes.iter().map(|scope| scope.watches.on_report()).collect();
    let is_router = |pod: &Pod| {
        pod.labels().contains_key(ROUTER_LABEL)
            && pod.labels().get(MANAGED_BY.0).is_some_and(|by| by == MANAGED_BY.1)
    };
    let pods = move || stores.iter().flat_map(|stores| stores.pods.state_filter(is_router)).collect();
    let changed = move |pod: &PodKey| heard.iter().for_each(|heard| heard(pod));
    poller::run(
        Arc::clone(reports),
        Arc::clone(metrics),
        config.poll_interval,
        config.report_port,
        pods,
        changed,
    )
}

fn stop_on_signal() -> io::Result<CancellationToken> {
    let stop = CancellationToken::new();
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let stopped = stop.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        tracing::info!("stopping");
        stopped.cancel();
    });
    Ok(stop)
}
