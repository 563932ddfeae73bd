//! `kv-router serve`: builds the pool, starts its tasks, serves, drains.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::Context;
use kvrouter_crds::config::EventTransport;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::config::ServeConfig;
use crate::fleet::Workers;
use crate::pool::{Awaited, Pool};
use crate::proxy::App;
use crate::proxy::upstream::Upstream;
use crate::receipts::files::Writer;
use crate::{admin, feed, fleet, listen, live, proxy};

/// How long the first views may take before the router is ready without them.
const WARM_LIMIT: Duration = Duration::from_secs(60);
/// The same while the broker does not answer: no view can come, and every
/// replica would wait alike.
const BROKER_LIMIT: Duration = Duration::from_secs(10);
/// How long the last receipts may take to their file after the last answer.
const LAST_RECEIPTS: Duration = Duration::from_secs(5);
/// How long the last words to other routers may take: they forget in a few seconds anyway.
const LAST_LOADS: Duration = Duration::from_secs(1);
/// How often readiness looks at views, and parity at pages.
const LOOK: Duration = Duration::from_millis(200);

/// Serves until SIGTERM or SIGINT, then drains.
pub async fn run(config: ServeConfig) -> anyhow::Result<()> {
    let limits = config.file.limits.clone();
    let ports = config.file.listen.clone();
    let receipts = config.file.receipt_files.as_ref().map(Writer::start).transpose()?;
    let mut pool = Pool::new(config)?;
    receipts.iter().for_each(|writer| pool.receipts.write_to(writer.queue()));
    let pool = Arc::new(pool);
    let upstream = Upstream::new(Duration::from_secs(limits.connect_timeout_seconds));
    let http = bind(ports.http, "listen.http").await?;
    let metrics = bind(ports.metrics, "listen.metrics").await?;
    let admin = bind(ports.admin, "listen.admin").await?;
    announce(&pool, &http, &metrics, &admin)?;
    let leaving = CancellationToken::new();
    let nats = start_tasks(&pool, &upstream, &leaving).await?;

    let stop = CancellationToken::new();
    let app = App::new(Arc::clone(&pool), upstream);
    let serving = tokio::spawn(listen::serve(http, proxy::router(app), stop.clone()));
    let side = CancellationToken::new();
    tokio::spawn(listen::serve(metrics, admin::metrics_router(Arc::clone(&pool)), side.clone()));
    tokio::spawn(listen::serve(admin, admin::admin_router(Arc::clone(&pool)), side.clone()));

    wait_for_signal().await?;
    pool.draining.store(true, Ordering::Relaxed);
    tracing::info!(
        target: "kv_router", delay_seconds = limits.drain_delay_seconds,
        seconds = limits.drain_timeout_seconds, "draining"
    );
    // Load balancers send requests here until they have seen `/readyz` fail;
    // a listener that closed at once would refuse them.
    tokio::time::sleep(Duration::from_secs(limits.drain_delay_seconds)).await;
    stop.cancel();
    let drained = tokio::time::timeout(Duration::from_secs(limits.drain_timeout_seconds), serving).await;
    side.cancel();
    match drained {
        Ok(_) => tracing::info!(target: "kv_router", "drained"),
        Err(_) => tracing::warn!(target: "kv_router", "stopped with answers still open"),
    }
    leaving.cancel();
    if let Some(nats) = nats {
        // Without these words others wait until they forget.
        let _ = tokio::time::timeout(LAST_LOADS, nats).await;
    }
    if let Some(receipts) = receipts {
        let last = tokio::task::spawn_blocking(move || receipts.finish());
        if tokio::time::timeout(LAST_RECEIPTS, last).await.is_err() {
            tracing::error!(target: "kv_router", "the last receipts were not written in time");
        }
    }
    Ok(())
}

async fn bind(address: SocketAddr, field: &str) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address).await.with_context(|| {
        format!("failed to listen on {address} (end what has this port, or give another one in {field})")
    })
}

fn announce(
    pool: &Pool,
    http: &TcpListener,
    metrics: &TcpListener,
    admin: &TcpListener,
) -> anyhow::Result<()> {
    let live = pool.live.read();
    tracing::info!(
        target: "kv_router",
        http = %http.local_addr()?, metrics = %metrics.local_addr()?, admin = %admin.local_addr()?,
        pool = %pool.config.file.pool.name, policy = %live.settings.policy.label(),
        events = %pool.config.file.kv_events.transport.label(), block_size = pool.config.size.tokens(),
        workers = pool.fleet.workers().len(), "serving"
    );
    Ok(())
}

/// The task that talks to the broker, where there is one, ends with `leaving`; the
/// others with the process.
async fn start_tasks(
    pool: &Arc<Pool>,
    upstream: &Upstream,
    leaving: &CancellationToken,
) -> anyhow::Result<Option<JoinHandle<()>>> {
    for worker in pool.fleet.workers().iter() {
        fleet::start(pool, upstream, worker);
    }
    if let Some(discovery) = pool.config.file.discovery.kubernetes.clone() {
        let client = fleet::kubernetes::client().await?;
        if let Some((namespace, name)) = pool.config.live_map() {
            let (namespace, name) = (namespace.to_owned(), name.to_owned());
            let follow = fleet::kubernetes::follow_live_settings;
            tokio::spawn(follow(Arc::clone(pool), client.clone(), namespace, name));
        }
        let follow = fleet::kubernetes::follow_pods;
        tokio::spawn(follow(Arc::clone(pool), upstream.clone(), client, discovery));
    }
    let uses_broker = pool.config.file.kv_events.transport == EventTransport::NATS;
    let nats = uses_broker.then(|| tokio::spawn(feed::nats::follow(Arc::clone(pool), leaving.clone())));
    tokio::spawn(become_ready(Arc::clone(pool)));
    tokio::spawn(review_pages(Arc::clone(pool)));
    tokio::spawn(live::watch_file(Arc::clone(pool)));
    Ok(nats)
}

/// Latches readiness: the settings and the workers are known, and every worker
/// that was ready then has a view, or there are none, or the limit passed.
async fn become_ready(pool: Arc<Pool>) {
    let started = pool.clock.now();
    let mut first: Option<Workers> = None;
    loop {
        let waits_for = waits_for(&pool, &mut first);
        let awaited = waits_for.unwrap_or(Awaited::of("ok"));
        *pool.awaited.lock() = awaited;
        let limit = if pool.broker_connected.load(Ordering::Relaxed) { WARM_LIMIT } else { BROKER_LIMIT };
        let waited = pool.clock.now().since(started).0;
        if waits_for.is_none() || u128::from(waited) >= limit.as_millis() {
            pool.ready.store(true, Ordering::Relaxed);
            tracing::info!(target: "kv_router", waited_ms = waited, reason = %awaited, "ready");
            return;
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// What readiness waits for. `first` are the workers that were
/// there when they were first known; those that join later are not waited for.
fn waits_for(pool: &Pool, first: &mut Option<Workers>) -> Option<Awaited> {
    if !pool.live_known.load(Ordering::Relaxed) {
        return Some(Awaited::of("live_settings_pending"));
    }
    if !pool.fleet.is_known() {
        return Some(Awaited::of("workers_pending"));
    }
    let first = first.get_or_insert_with(|| pool.fleet.workers());
    let staying = || first.iter().filter(|worker| !worker.gone.is_cancelled());
    if staying().any(|worker| worker.reason() == fleet::ReadyReason::NotProbed) {
        return Some(Awaited::of("workers_not_probed"));
    }
    if pool.config.file.kv_events.transport == EventTransport::None {
        return None;
    }
    let targets = || staying().filter(|worker| worker.is_ready()).flat_map(|worker| &worker.targets);
    let views = (targets().filter(|target| target.trust.lock().is_settled()).count(), targets().count());
    (views.0 < views.1).then_some(Awaited { label: "views_pending", views: Some(views) })
}

/// Compares pages for ever: they become known, and change, at any time.
async fn review_pages(pool: Arc<Pool>) {
    loop {
        pool.review_pages();
        tokio::time::sleep(LOOK).await;
    }
}

/// Waits for SIGTERM or SIGINT.
pub async fn wait_for_signal() -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("failed to listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("failed to listen for SIGINT")?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::tests::{member, pool};
    use crate::fleet::{Fleet, ReadyReason};
    use kvrouter_core::ids::Epoch;

    /// The latch waits for settings, workers and the views of those workers that
    /// were there at first.
    #[test]
    fn readiness_waits_for_what_was_there_at_first() {
        let pool = pool();
        let mut first = None;
        let mut waits = || waits_for(&pool, &mut first).map(|awaited| awaited.to_string());
        let some = |text: &str| Some(text.to_owned());
        pool.live_known.store(false, Ordering::Relaxed);
        assert_eq!(waits(), some("live_settings_pending"));
        pool.live_known.store(true, Ordering::Relaxed);
        let change = pool
            .fleet
            .update(&[member(1, "a", None), member(2, "a", None), member(4, "a", None)], &pool.index);
        let [stays, leaves, known] = &change.joined[..] else { unreachable!("three joined") };
        assert_eq!(waits(), some("workers_not_probed"));
        known.set_reason(ReadyReason::Ok);
        pool.mark_synced(&known.targets[0], Epoch(1), 1, Default::default());
        stays.set_reason(ReadyReason::Ok);
        leaves.set_reason(ReadyReason::Unreachable);
        assert_eq!(waits(), some("views_pending 1/2"), "one has no view, another needs none");
        leaves.set_reason(ReadyReason::NotProbed);
        leaves.gone.cancel();
        let now = [member(1, "a", None), member(3, "joined", None), member(4, "a", None)];
        pool.fleet.update(&now, &pool.index);
        assert_eq!(waits(), some("views_pending 1/2"), "who left is not waited for");
        pool.mark_synced(&stays.targets[0], Epoch(1), 1, Default::default());
        assert_eq!(waits(), None, "nor who joined later");
    }

    #[test]
    fn readiness_waits_until_workers_are_known() {
        let pool = Pool { fleet: Fleet::default(), ..Arc::into_inner(pool()).expect("the only one") };
        assert_eq!(waits_for(&pool, &mut None), Some(Awaited::of("workers_pending")));
        pool.fleet.update(&[], &pool.index);
        assert_eq!(waits_for(&pool, &mut None), None, "there are none");
    }
}
