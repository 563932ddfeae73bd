//! The NATS feed: follows all bridges of a pool. Loads of its routers share the
//! connection, in a task of their own: a snapshot must not hold them up.

use std::collections::{BTreeSet, HashMap};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use anyhow::Context;
use async_nats::{Client, ConnectOptions, Event};
use futures::StreamExt;
use kvrouter_core::events::envelope::{Envelope, SnapshotPage};
use kvrouter_core::ids::Target;
use kvrouter_core::policy::outside::ReplicaId;
use tokio::sync::{Semaphore, mpsc};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::replicas;
use super::snapshot::{Collector, Follower, Outcome};
use super::subjects::{Subjects, target_of};
use crate::fleet::TargetState;
use crate::pool::Pool;

/// How long a snapshot may take: 2 M blocks are 16 MB.
const SNAPSHOT_TIMEOUT: Duration = Duration::from_secs(10);
/// Snapshots on their way at once. More would only compete for the same link.
const SNAPSHOTS: usize = 64;
/// Between two attempts to reach a broker.
const RECONNECT: Duration = Duration::from_secs(1);
/// Between two snapshots of one target: a view that cannot be followed must not
/// become a flood of requests.
const REFETCH: Duration = Duration::from_secs(1);

/// Most refusals of a broker that are logged, each once: they name a subject.
const REFUSALS: usize = 16;

/// A client that keeps trying, also when the broker is down at first.
/// `on_connected` hears of every change.
pub async fn connect(
    url: &str,
    credentials: Option<&Path>,
    on_connected: impl Fn(bool) + Send + Sync + 'static,
) -> anyhow::Result<Client> {
    let on_connected = Arc::new(on_connected);
    let refused = Arc::new(parking_lot::Mutex::new(BTreeSet::new()));
    let mut options = ConnectOptions::new()
        .name("kvrouter")
        .retry_on_initial_connect()
        .reconnect_delay_callback(|_| RECONNECT)
        .event_callback(move |event| {
            let (on_connected, refused) = (Arc::clone(&on_connected), Arc::clone(&refused));
            async move {
                match event {
                    Event::Connected => {
                        tracing::info!(target: "kv_router::feed", "broker connected");
                        on_connected(true);
                    }
                    Event::Disconnected | Event::Closed => {
                        tracing::warn!(target: "kv_router::feed", "broker disconnected");
                        on_connected(false);
                    }
                    // Such as a permission that is missing; again with every message.
                    Event::ServerError(error) => {
                        let error = error.to_string();
                        let mut refused = refused.lock();
                        if refused.len() < REFUSALS && refused.insert(error.clone()) {
                            tracing::warn!(target: "kv_router::feed", error, "broker refuses; see the permissions that routers and bridges need");
                        }
                    }
                    other => tracing::debug!(target: "kv_router::feed", event = %other, "broker event"),
                }
            }
        });
    if let Some(path) = credentials {
        let text = tokio::fs::read_to_string(path)
            .await
            .with_context(|| format!("failed to read credentials {}", path.display()))?;
        options = options.credentials(&text).with_context(|| {
            format!(
                "credentials {} are unreadable (write them anew, as `nsc generate creds` prints them)",
                path.display()
            )
        })?;
    }
    options.connect(url).await.with_context(|| format!("failed to set up the connection to {url}"))
}

/// Follows the pool's bridges, and shares load with its other routers, until
/// `leaving`.
pub async fn follow(pool: Arc<Pool>, leaving: CancellationToken) {
    let Some(nats) = pool.config.file.kv_events.nats.clone() else { return };
    pool.broker_connected.store(false, Ordering::Relaxed);
    let watched = Arc::clone(&pool);
    let connected = move |connected| watched.broker_connected.store(connected, Ordering::Relaxed);
    let name = &pool.config.file.pool;
    let subjects = Subjects::new(&nats.subject_prefix, &name.namespace, &name.name);
    let credentials = nats.credentials_file.as_deref();
    // The same over all connections: what it told over the last one is replaced.
    let replica = ReplicaId(pool.clock.unique());
    loop {
        let ended = match connect(&nats.url, credentials, connected.clone()).await {
            Ok(client) => {
                let feed = Feed::new(Arc::clone(&pool), client.clone(), subjects.clone());
                let (subject, leaving) = (subjects.load(), leaving.clone());
                let sharing = replicas::share(Arc::clone(&pool), client, subject, replica, leaving);
                let sharing = AbortOnDropHandle::new(tokio::spawn(sharing));
                tokio::select! {
                    ended = feed.run() => ended,
                    ended = sharing => ended.context("sharing load failed").flatten(),
                }
            }
            Err(error) => Err(error),
        };
        if leaving.is_cancelled() {
            return;
        }
        if let Err(error) = ended {
            tracing::error!(target: "kv_router::feed", error = format!("{error:#}"), "unable to follow bridges");
        }
        sleep(RECONNECT).await;
    }
}

/// One subscription to all bridges.
struct Feed {
    pool: Arc<Pool>,
    client: Client,
    subjects: Subjects,
    followers: HashMap<Target, Followed>,
    /// Permits for snapshots on their way.
    permits: Arc<Semaphore>,
    fetched: mpsc::Sender<Fetched>,
    answers: mpsc::Receiver<Fetched>,
}

/// What is known of one target's stream.
struct Followed {
    /// The target itself: one of the same name may come after it.
    target: Weak<TargetState>,
    follower: Follower,
    /// When its last snapshot was asked for.
    asked: Option<Instant>,
}

/// How a fetch ended.
struct Fetched {
    target: Arc<TargetState>,
    name: String,
    pages: Option<Vec<SnapshotPage>>,
}

impl Feed {
    fn new(pool: Arc<Pool>, client: Client, subjects: Subjects) -> Self {
        let (fetched, answers) = mpsc::channel(SNAPSHOTS);
        let permits = Arc::new(Semaphore::new(SNAPSHOTS));
        Self { pool, client, subjects, followers: HashMap::new(), permits, fetched, answers }
    }

    async fn run(mut self) -> anyhow::Result<()> {
        let mut events =
            self.client.subscribe(self.subjects.all_events()).await.context("failed to subscribe")?;
        let mut fleet = self.pool.fleet.changes();
        loop {
            tokio::select! {
                message = events.next() => match message {
                    Some(message) => self.message(&message),
                    None => anyhow::bail!("subscription ended"),
                },
                Some(fetched) = self.answers.recv() => self.answer(fetched),
                Ok(()) = fleet.changed() => self.forget_leavers(),
            }
        }
    }

    fn message(&mut self, message: &async_nats::Message) {
        let Some((name, target)) = self.source(&message.subject) else {
            return self.count("unknown_source");
        };
        let envelope = match Envelope::decode(&message.payload) {
            Ok(envelope) => envelope,
            Err(error) => {
                tracing::debug!(target: "kv_router::feed", subject = %message.subject, error = %crate::chain(&error), "message not understood");
                return self.count(error.reason());
            }
        };
        let outcome = self.followed(&target).follower.message(envelope);
        self.carry_out(outcome, &target, name);
    }

    /// What is known of the target, which begins with nothing.
    fn followed(&mut self, target: &Arc<TargetState>) -> &mut Followed {
        let domain = self.pool.domain;
        let new =
            || Followed { target: Arc::downgrade(target), follower: Follower::new(domain), asked: None };
        let followed = self.followers.entry(target.target.clone()).or_insert_with(new);
        if !std::ptr::eq(followed.target.as_ptr(), Arc::as_ptr(target)) {
            *followed = new();
        }
        followed
    }

    /// Lets go of the targets that are not in the fleet any more.
    fn forget_leavers(&mut self) {
        self.followers.retain(|_, followed| {
            followed.target.upgrade().is_some_and(|target| self.pool.fleet.has(&target))
        });
    }

    fn answer(&mut self, fetched: Fetched) {
        if !self.pool.fleet.has(&fetched.target) {
            return;
        }
        let follower = &mut self.followed(&fetched.target).follower;
        match fetched.pages {
            Some(pages) => {
                let outcome = follower.snapshot(pages);
                self.carry_out(outcome, &fetched.target, fetched.name);
            }
            None => {
                follower.snapshot_failed();
                self.count("snapshot_failed");
            }
        }
    }

    fn carry_out(&mut self, outcome: Outcome, target: &Arc<TargetState>, name: String) {
        self.count(outcome.label);
        for change in outcome.changes {
            self.pool.apply(target, change);
        }
        let Some(reason) = outcome.fetch else { return };
        self.pool.metrics.resyncs.with_label_values(&[reason]).inc();
        target.trust.lock().syncing();
        let subject = self.subjects.snapshot(&name, target.target.rank.0);
        let now = Instant::now();
        let last = self.followed(target).asked.replace(now);
        let (client, fetched, target) = (self.client.clone(), self.fetched.clone(), Arc::clone(target));
        let permits = Arc::clone(&self.permits);
        let wait = last.map_or(Duration::ZERO, |last| (last + REFETCH).saturating_duration_since(now));
        tokio::spawn(async move {
            sleep(wait).await;
            let Ok(_permit) = permits.acquire().await else { return };
            let pages = timeout(SNAPSHOT_TIMEOUT, fetch(&client, subject)).await.ok().flatten();
            // A feed that is gone wants no answer.
            let _ = fetched.send(Fetched { target, name, pages }).await;
        });
    }

    /// The known target that a subject speaks of.
    fn source(&self, subject: &str) -> Option<(String, Arc<TargetState>)> {
        let (name, rank) = self.subjects.source(subject)?;
        let named = target_of(&name, rank)?;
        let worker = self.pool.fleet.worker(named.worker.as_str())?;
        let target = worker.targets.get(named.rank.0 as usize)?;
        Some((name, Arc::clone(target)))
    }

    fn count(&self, label: &'static str) {
        self.pool.metrics.events.with_label_values(&[label]).inc();
    }
}

/// All pages of one snapshot; `None` if nobody answers or the answer is not
/// understood.
async fn fetch(client: &Client, subject: String) -> Option<Vec<SnapshotPage>> {
    let inbox = client.new_inbox();
    let mut answers = client.subscribe(inbox.clone()).await.ok()?;
    client.publish_with_reply(subject, inbox, bytes::Bytes::new()).await.ok()?;
    let mut collector = Collector::default();
    while let Some(message) = answers.next().await {
        // The server says at once when nobody serves the subject.
        if message.status.is_some() {
            return None;
        }
        if let Some(pages) = collector.add(SnapshotPage::decode(&message.payload).ok()?) {
            return Some(pages);
        }
    }
    None
}
