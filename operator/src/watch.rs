//! Watches: from the API server into stores, and from changes to reconciles.
//!
//! Every kind is watched once per scope, whoever reads it. A change names the
//! pools and routers that it concerns; each of them waits at most once in its
//! queue, so a queue is never longer than its store. Nothing is asked of the API
//! server at intervals, but whether it has a kind by now that it may lack: a watch
//! that broke begins again, and everything is reconciled once after it has been
//! listed anew.

use std::collections::HashSet;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use futures::channel::mpsc;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{Event, Pod};
use kube::api::Api;
use kube::runtime::reflector::{self, ObjectRef, store::Writer};
use kube::runtime::watcher::{self, watcher};
use kube::{Client, Resource, ResourceExt};
use kvrouter_crds::pool::WorkloadKind;
use kvrouter_crds::{InferencePool, KvRouter};
use parking_lot::Mutex;
use prometheus::IntGauge;
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::gateway::{GatewayPool, Presence, is_forbidden, is_not_installed};
use crate::metrics::Metrics;
use crate::poller::PodKey;
use crate::stores::{
    MANAGED_BY, ROUTER_LABEL, Stores, list, owning_router, thin, thin_deployment, thin_pod, thin_stateful_set,
};

/// First pause after a broken watch, doubled up to [`MAX_PAUSE`].
const MIN_PAUSE: Duration = Duration::from_millis(500);
/// Longest pause: an API server that is back is heard again soon after.
const MAX_PAUSE: Duration = Duration::from_secs(8);
/// Pause between two looks for a kind that the cluster does not have.
const ABSENT_PAUSE: Duration = Duration::from_secs(10);
/// Pause after it was answered that we have no right to read an optional kind: a
/// role that is older than we are may stay so for good.
const BARRED_PAUSE: Duration = Duration::from_secs(60);

/// The queue of one kind: what shall be reconciled.
pub struct Queue<K: Resource<DynamicType = ()>> {
    waiting: Mutex<HashSet<ObjectRef<K>>>,
    sender: mpsc::UnboundedSender<ObjectRef<K>>,
    depth: IntGauge,
}

impl<K: Resource<DynamicType = ()>> Queue<K> {
    /// A queue and its end.
    pub fn new(depth: IntGauge) -> (Self, mpsc::UnboundedReceiver<ObjectRef<K>>) {
        let (sender, receiver) = mpsc::unbounded();
        (Self { waiting: Mutex::default(), sender, depth }, receiver)
    }

    /// Has it reconciled, unless it waits already.
    pub fn push(&self, object: ObjectRef<K>) {
        if self.waiting.lock().insert(object.clone()) {
            self.depth.inc();
            // The receiver is gone at shutdown only.
            let _ = self.sender.unbounded_send(object);
        }
    }

    /// Its reconcile begins, or it is gone: the next change queues it again.
    pub fn begin(&self, object: &ObjectRef<K>) {
        if self.waiting.lock().remove(object) {
            self.depth.dec();
        }
    }
}

/// Both queues.
pub struct Queues {
    /// Pools to reconcile.
    pub pools: Queue<InferencePool>,
    /// Routers to reconcile.
    pub routers: Queue<KvRouter>,
}

/// Which objects a change concerns. Knows stores and queues, writes nothing.
struct Reach {
    stores: Stores,
    queues: Arc<Queues>,
}

impl Reach {
    fn pool(&self, namespace: &str, name: &str) {
        self.queues.pools.push(ObjectRef::new(name).within(namespace));
    }

    fn router(&self, namespace: &str, name: &str) {
        self.queues.routers.push(ObjectRef::new(name).within(namespace));
    }

    /// All pools of the namespace look anew whether pods are claimed twice, and
    /// all routers of it whether their pool is accepted.
    fn pool_changed(&self, pool: &InferencePool) {
        self.stores.remember();
        let namespace = pool.namespace().unwrap_or_default();
        self.pool(&namespace, &pool.name_any());
        list(&self.stores.pools, &namespace, |_| true)
            .iter()
            .for_each(|other| self.pool(&namespace, &other.name_any()));
        list(&self.stores.routers, &namespace, |_| true)
            .iter()
            .for_each(|router| self.router(&namespace, &router.name_any()));
    }

    /// What it says is part of the pools that refer to it.
    fn gateway_pool_changed(&self, gateway_pool: &GatewayPool) {
        let (namespace, name) = (gateway_pool.namespace().unwrap_or_default(), gateway_pool.name_any());
        let referring = list(&self.stores.pools, &namespace, |pool| {
            pool.spec.gateway_pool_ref.as_ref().is_some_and(|reference| reference.name == name)
        });
        referring.iter().for_each(|pool| self.pool_changed(pool));
    }

    fn router_changed(&self, router: &KvRouter) {
        let namespace = router.namespace().unwrap_or_default();
        self.router(&namespace, &router.name_any());
        self.pool(&namespace, &router.spec.pool_ref.name);
    }

    fn pod_changed(&self, pod: &Pod) {
        let namespace = pod.namespace().unwrap_or_default();
        if let Some(router) = pod.labels().get(ROUTER_LABEL) {
            self.router_and_pool(&namespace, router);
        }
        for pool in self.stores.pools_of(&namespace, pod.labels()) {
            self.pool(&namespace, &pool.name_any());
            self.routers_of(&namespace, &pool.name_any());
        }
    }

    fn router_and_pool(&self, namespace: &str, name: &str) {
        self.router(namespace, name);
        if let Some(router) = crate::stores::get(&self.stores.routers, namespace, name) {
            self.pool(namespace, &router.spec.pool_ref.name);
        }
    }

    fn routers_of(&self, namespace: &str, pool: &str) {
        for router in self.stores.routers_of(namespace, pool) {
            self.router(namespace, &router.name_any());
        }
    }

    fn workload_changed<K: Resource>(&self, workload: &K, kind: WorkloadKind) {
        let meta = workload.meta();
        let namespace = meta.namespace.clone().unwrap_or_default();
        let name = meta.name.clone().unwrap_or_default();
        self.child_changed(workload);
        let naming = list(&self.stores.pools, &namespace, |pool| {
            pool.spec.workloads.iter().any(|named| named.kind == kind && named.name == name)
        });
        naming.iter().for_each(|pool| self.pool(&namespace, &pool.name_any()));
    }

    fn child_changed<K: Resource>(&self, child: &K) {
        let meta = child.meta();
        if let Some(router) = owning_router(meta) {
            self.router(meta.namespace.as_deref().unwrap_or_default(), router);
        }
    }

    fn event_changed(&self, event: &Event) {
        let namespace = event.metadata.namespace.clone().unwrap_or_default();
        let pod = event.involved_object.name.as_deref().unwrap_or_default();
        if let Some(pod) = crate::stores::get(&self.stores.pods, &namespace, pod)
            && let Some(router) = pod.labels().get(ROUTER_LABEL)
        {
            self.router(&namespace, router);
        }
    }

    fn everything(&self) {
        self.stores.remember();
        for pool in self.stores.pools.state() {
            self.pool(&pool.namespace().unwrap_or_default(), &pool.name_any());
        }
        for router in self.stores.routers.state() {
            self.router(&router.namespace().unwrap_or_default(), &router.name_any());
        }
    }
}

/// The watches of one scope; they end when this is dropped.
pub struct Watches {
    /// What they keep up to date.
    pub stores: Stores,
    reach: Arc<Reach>,
    tasks: JoinSet<()>,
}

/// What one kind's watch is made of.
struct Kind<K> {
    name: &'static str,
    config: watcher::Config,
    thin: fn(&mut K),
    /// Whether the second differs from the first in anything that matters.
    matters: fn(&K, &K) -> bool,
    /// Whether we work without the right to read it.
    optional: bool,
    /// Whom to tell whether the cluster has the kind; none of those that it must have.
    presence: Option<watch::Sender<Presence>>,
}

impl Watches {
    /// Watches `namespace`, or all of them.
    pub fn start(
        client: &Client,
        namespace: Option<&str>,
        queues: &Arc<Queues>,
        metrics: &Arc<Metrics>,
    ) -> Self {
        let (pools, pools_writer) = reflector::store();
        let (routers, routers_writer) = reflector::store();
        let (pods, pods_writer) = reflector::store();
        let (deployments, deployments_writer) = reflector::store();
        let (stateful_sets, sets_writer) = reflector::store();
        let (services, services_writer) = reflector::store();
        let (config_maps, maps_writer) = reflector::store();
        let (service_accounts, accounts_writer) = reflector::store();
        let (role_bindings, bindings_writer) = reflector::store();
        let (budgets, budgets_writer) = reflector::store();
        let (mount_failures, failures_writer) = reflector::store();
        let (gateway_pools, gateway_writer) = reflector::store();
        let (presence, gateway) = watch::channel(Presence::default());
        let stores = Stores {
            pools,
            routers,
            pods,
            deployments,
            stateful_sets,
            services,
            config_maps,
            service_accounts,
            role_bindings,
            budgets,
            mount_failures,
            gateway_pools,
            gateway,
            remembered: Arc::default(),
        };
        let reach = Arc::new(Reach { stores: stores.clone(), queues: Arc::clone(queues) });
        let mut start = Starter {
            client,
            namespace,
            reach: Arc::clone(&reach),
            metrics: Arc::clone(metrics),
            tasks: JoinSet::new(),
        };
        start.watch(pools_writer, root("InferencePool"), Reach::pool_changed);
        start.watch(routers_writer, root("KvRouter"), Reach::router_changed);
        start.watch(pods_writer, all("Pod", thin_pod), Reach::pod_changed);
        start.watch(deployments_writer, all("Deployment", thin_deployment), |reach, it| {
            reach.workload_changed(it, WorkloadKind::Deployment);
        });
        start.watch(sets_writer, all("StatefulSet", thin_stateful_set), |reach, it| {
            reach.workload_changed(it, WorkloadKind::StatefulSet);
        });
        start.watch(services_writer, owned("Service"), Reach::child_changed);
        start.watch(maps_writer, owned("ConfigMap"), Reach::child_changed);
        start.watch(accounts_writer, owned("ServiceAccount"), Reach::child_changed);
        start.watch(bindings_writer, owned("RoleBinding"), Reach::child_changed);
        start.watch(budgets_writer, owned("PodDisruptionBudget"), Reach::child_changed);
        start.watch(failures_writer, mount_failures_of_pods(), Reach::event_changed);
        start.watch(gateway_writer, gateway_pools_if_any(presence), Reach::gateway_pool_changed);
        Self { stores, reach, tasks: start.tasks }
    }

    /// What to do when something new was heard of a router pod.
    pub fn on_report(&self) -> impl Fn(&PodKey) + Send + use<> {
        let reach = Arc::clone(&self.reach);
        move |key| {
            if let Some(pod) = crate::stores::get(&reach.stores.pods, &key.namespace, &key.name) {
                reach.pod_changed(&pod);
            }
        }
    }

    /// Returns once every store has been filled. Not the events: they are an
    /// extra, which namespaced installations may lack the right for. Of the pools
    /// of the Gateway API it is enough to know that there are none.
    pub async fn ready(&self) {
        let Stores { pools, routers, pods, deployments, stateful_sets, .. } = &self.stores;
        let Stores { services, config_maps, service_accounts, role_bindings, budgets, .. } = &self.stores;
        let mut gateway = self.stores.gateway.clone();
        // A writer is dropped at shutdown only.
        let _ = tokio::join!(
            gateway.wait_for(|presence| *presence != Presence::Unknown),
            pools.wait_until_ready(),
            routers.wait_until_ready(),
            pods.wait_until_ready(),
            deployments.wait_until_ready(),
            stateful_sets.wait_until_ready(),
            services.wait_until_ready(),
            config_maps.wait_until_ready(),
            service_accounts.wait_until_ready(),
            role_bindings.wait_until_ready(),
            budgets.wait_until_ready(),
        );
    }

    /// Returns if a watch ended, which none does by itself.
    pub async fn ended(&mut self) {
        self.tasks.join_next().await;
    }
}

struct Starter<'a> {
    client: &'a Client,
    namespace: Option<&'a str>,
    reach: Arc<Reach>,
    metrics: Arc<Metrics>,
    tasks: JoinSet<()>,
}

impl Starter<'_> {
    fn watch<K>(&mut self, writer: Writer<K>, kind: Kind<K>, changed: fn(&Reach, &K))
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
            + Clone
            + Debug
            + DeserializeOwned
            + Send
            + Sync
            + 'static,
    {
        let api = match self.namespace {
            Some(namespace) => Api::namespaced(self.client.clone(), namespace),
            None => Api::all(self.client.clone()),
        };
        let (reach, metrics) = (Arc::clone(&self.reach), Arc::clone(&self.metrics));
        self.tasks.spawn(run(api, writer, kind, metrics, move |change| match change {
            Change::Of(object) => changed(&reach, object),
            Change::Listed => reach.everything(),
        }));
    }
}

/// What a watch tells.
enum Change<'a, K> {
    /// This object is new, different, or gone; the older form comes first.
    Of(&'a K),
    /// All objects were listed anew.
    Listed,
}

/// How a watch has fared since it worked last.
struct Trouble {
    /// How long to wait before it begins anew.
    pause: Duration,
    /// Whether the log has it.
    told: bool,
}

impl Default for Trouble {
    fn default() -> Self {
        Self { pause: MIN_PAUSE, told: false }
    }
}

/// Watches for ever.
async fn run<K>(
    api: Api<K>,
    mut writer: Writer<K>,
    kind: Kind<K>,
    metrics: Arc<Metrics>,
    tell: impl Fn(Change<'_, K>),
) where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + 'static,
{
    let store = writer.as_reader();
    let mut events = watcher(api.clone(), kind.config.clone()).boxed();
    let mut trouble = Trouble::default();
    while let Some(event) = events.next().await {
        let event = match event {
            Ok(event) => event.modify(kind.thin),
            Err(error) if kind.presence.is_some() && is_not_installed(&error) => {
                if kind.found(Presence::NotInstalled) {
                    writer.apply_watcher_event(&watcher::Event::Init);
                    writer.apply_watcher_event(&watcher::Event::InitDone);
                    tell(Change::Listed);
                }
                // What an installation of later has is another list, with versions of its own.
                events = watcher(api.clone(), kind.config.clone()).boxed();
                trouble = Trouble::default();
                tokio::time::sleep(ABSENT_PAUSE).await;
                continue;
            }
            Err(error) => {
                tokio::time::sleep(kind.broke(&error, &mut trouble, &metrics)).await;
                continue;
            }
        };
        // The first is there before anything was asked, the second before all is.
        if !matches!(event, watcher::Event::Init | watcher::Event::InitApply(_)) {
            kind.works(&mut trouble);
        }
        match &event {
            watcher::Event::Apply(new) => {
                let old = store.get(&ObjectRef::from_obj(new));
                writer.apply_watcher_event(&event);
                match old {
                    Some(old) if !(kind.matters)(&old, new) => {}
                    Some(old) => {
                        tell(Change::Of(&old));
                        tell(Change::Of(new));
                    }
                    None => tell(Change::Of(new)),
                }
            }
            watcher::Event::Delete(gone) => {
                writer.apply_watcher_event(&event);
                tell(Change::Of(gone));
            }
            watcher::Event::Init | watcher::Event::InitApply(_) => writer.apply_watcher_event(&event),
            watcher::Event::InitDone => {
                writer.apply_watcher_event(&event);
                kind.found(Presence::Listed);
                tell(Change::Listed);
            }
        }
    }
}

impl<K> Kind<K> {
    /// Remembers whether the cluster has the kind, and says so; whether that is new.
    fn found(&self, now: Presence) -> bool {
        let Some(presence) = &self.presence else { return false };
        let before = presence.send_replace(now);
        let is_new = before != now;
        if is_new {
            tracing::info!(kind = self.name, before = ?before, now = ?now, "an optional kind");
        }
        is_new
    }

    /// Tells of a failure, the log once until the watch works again; returns how long
    /// to wait. A missing right is counted once, too, where we work without it.
    fn broke(&self, error: &watcher::Error, trouble: &mut Trouble, metrics: &Metrics) -> Duration {
        let pause = trouble.pause;
        self.failed(error, pause);
        let is_barred = self.optional && is_forbidden(error);
        let is_new = !std::mem::replace(&mut trouble.told, true);
        if is_new || !is_barred {
            metrics.watch_failed(self.name);
        }
        if is_new {
            let error = crate::chain(error);
            tracing::warn!(kind = self.name, error, "watch broke; trying again until it works");
        }
        trouble.pause = MAX_PAUSE.min(pause * 2);
        if is_barred { BARRED_PAUSE } else { pause }
    }

    /// The next failure is another one.
    fn works(&self, trouble: &mut Trouble) {
        if std::mem::take(trouble).told {
            tracing::info!(kind = self.name, "watch works again");
        }
    }

    /// A kind that may be absent and cannot be read must not hold up all others,
    /// but what was listed once stays.
    fn failed(&self, error: &watcher::Error, pause: Duration) {
        let Some(presence) = &self.presence else { return };
        let is_unknown = *presence.borrow() == Presence::Unknown;
        if is_unknown && (is_forbidden(error) || pause == MAX_PAUSE) {
            self.found(Presence::Unreadable);
        }
    }
}

/// Our own kinds: everything but the status matters, which we write ourselves.
fn root<K: Resource>(name: &'static str) -> Kind<K> {
    let config = watcher::Config::default();
    Kind { name, config, thin: thin::<K>, matters: asks_otherwise, optional: false, presence: None }
}

/// Objects of all owners, thinned out.
fn all<K: Resource + Clone + PartialEq>(name: &'static str, thin: fn(&mut K)) -> Kind<K> {
    let config = watcher::Config::default();
    Kind { name, config, thin, matters: is_different, optional: false, presence: None }
}

/// Objects that we own, whole.
fn owned<K: Resource + Clone + PartialEq>(name: &'static str) -> Kind<K> {
    let config = watcher::Config::default().labels(&format!("{}={}", MANAGED_BY.0, MANAGED_BY.1));
    Kind { name, config, thin: thin::<K>, matters: is_different, optional: false, presence: None }
}

/// The one trouble of a pod that its status does not tell.
fn mount_failures_of_pods() -> Kind<Event> {
    let config = watcher::Config::default().fields("involvedObject.kind=Pod,reason=FailedMount");
    let matters = |old: &Event, new: &Event| old.message != new.message;
    Kind { name: "Event", config, thin: thin::<Event>, matters, optional: true, presence: None }
}

/// Pools of the Gateway API: what gateways write into their status does not matter.
fn gateway_pools_if_any(presence: watch::Sender<Presence>) -> Kind<GatewayPool> {
    let config = watcher::Config::default();
    let matters = |old: &GatewayPool, new: &GatewayPool| old.spec != new.spec;
    let (name, presence) = ("GatewayPool", Some(presence));
    Kind { name, config, thin: thin::<GatewayPool>, matters, optional: true, presence }
}

/// Versions change with things that were thinned out.
fn is_different<K: Resource + Clone + PartialEq>(old: &K, new: &K) -> bool {
    let still = |object: &K| {
        let mut object = object.clone();
        object.meta_mut().resource_version = None;
        object
    };
    still(old) != still(new)
}

/// Whether people ask for something else: another generation, other annotations,
/// an end. Our own writes of the status are none of these.
fn asks_otherwise<K: Resource>(old: &K, new: &K) -> bool {
    let (old, new) = (old.meta(), new.meta());
    old.uid != new.uid
        || old.generation != new.generation
        || old.annotations != new.annotations
        || old.deletion_timestamp != new.deletion_timestamp
}

#[cfg(test)]
mod tests {
    use k8s_openapi::jiff::Timestamp;
    use serde_json::{Value, json};

    use super::*;
    use crate::poller::Reports;
    use crate::sample::{engine, flags, named_pool, router as sample_router};
    use crate::{pool, router};

    /// Two pools and a pod of both: `named` says so itself, `referring` by `gw`.
    struct Sharing {
        reach: Reach,
        pools: Writer<InferencePool>,
        gateway_pools: Writer<GatewayPool>,
        presence: watch::Sender<Presence>,
    }

    impl Sharing {
        fn new() -> Self {
            let (pools, pools_writer) = reflector::store();
            let (pods, mut pods_writer) = reflector::store();
            let (gateway_pools, gateway_writer) = reflector::store();
            let (presence, gateway) = watch::channel(Presence::Listed);
            let depth = || IntGauge::new("depth", "objects").expect("a gauge");
            let queues = Queues { pools: Queue::new(depth()).0, routers: Queue::new(depth()).0 };
            let stores = Stores {
                pools,
                routers: reflector::store().0,
                pods,
                deployments: reflector::store().0,
                stateful_sets: reflector::store().0,
                services: reflector::store().0,
                config_maps: reflector::store().0,
                service_accounts: reflector::store().0,
                role_bindings: reflector::store().0,
                budgets: reflector::store().0,
                mount_failures: reflector::store().0,
                gateway_pools,
                gateway,
                remembered: Arc::default(),
            };
            let pod = engine("both", json!({"metadata": {"labels": {"tier": "x"}}}));
            pods_writer.apply_watcher_event(&watcher::Event::Apply(Pod::clone(&pod)));
            let reach = Reach { stores, queues: Arc::new(queues) };
            let mut new = Self { reach, pools: pools_writer, gateway_pools: gateway_writer, presence };
            new.pool(watcher::Event::Apply(Self::named("named", json!({}))));
            new.pool(watcher::Event::Apply(Self::referring("gw")));
            new.gateway_pool(watcher::Event::Apply(Self::gateway("x")));
            new
        }

        fn named(name: &str, spec: Value) -> InferencePool {
            let mut pool = named_pool(name, spec);
            pool.metadata.uid = Some(format!("{name}-uid"));
            pool
        }

        fn referring(to: &str) -> InferencePool {
            let reference = json!({"selector": null, "targetPorts": null, "gatewayPoolRef": {"name": to}});
            Self::named("referring", reference)
        }

        fn gateway(tier: &str) -> GatewayPool {
            serde_json::from_value(json!({
                "apiVersion": "inference.networking.k8s.io/v1", "kind": "InferencePool",
                "metadata": {"name": "gw", "namespace": "models"},
                "spec": {"selector": {"matchLabels": {"tier": tier}}, "targetPorts": [{"number": 8000}]},
            }))
            .expect("a gateway pool")
        }

        fn pool(&mut self, event: watcher::Event<InferencePool>) {
            self.pools.apply_watcher_event(&event);
            if let watcher::Event::Apply(pool) | watcher::Event::Delete(pool) = &event {
                self.reach.pool_changed(pool);
            }
        }

        fn gateway_pool(&mut self, event: watcher::Event<GatewayPool>) {
            self.gateway_pools.apply_watcher_event(&event);
            if let watcher::Event::Apply(pool) | watcher::Event::Delete(pool) = &event {
                self.reach.gateway_pool_changed(pool);
            }
        }

        /// What `named` says of itself, and which selectors its routers leave to others.
        #[track_caller]
        fn check(&self, why: &str, conflict: bool, foreign: &[&str]) {
            let (stores, reports) = (&self.reach.stores, Reports::default());
            let named = Self::named("named", json!({}));
            let seen = pool::observe::observe(&named, None, stores, &reports, Timestamp::UNIX_EPOCH);
            assert_eq!(pool::validate::validate(&named, &seen, &flags()).is_err(), conflict, "{why}");
            let chat = sample_router(json!({"poolRef": {"name": "named"}}));
            let seen = router::observe::observe(&chat, stores, &reports, Vec::new(), Timestamp::UNIX_EPOCH);
            let valid = router::validate::validate(&chat, &seen, &flags()).expect("in order");
            let tiers: Vec<_> =
                valid.foreign_selectors.iter().map(|labels| labels["tier"].as_str()).collect();
            assert_eq!(tiers, foreign, "{why}");
        }

        fn is_resolved(&self) -> bool {
            self.reach.stores.pool("models", "referring").expect("there").unresolved.is_none()
        }
    }

    #[test]
    fn a_reference_that_gives_nothing_changes_no_other_pool() {
        let mut world = Sharing::new();
        world.check("both have the pod", true, &["x"]);
        world.gateway_pool(watcher::Event::Delete(Sharing::gateway("x")));
        assert!(!world.is_resolved(), "of nothing");
        world.check("its pool is gone", true, &["x"]);
        world.reach.everything();
        world.check("all is listed anew", true, &["x"]);
        world.presence.send_replace(Presence::NotInstalled);
        world.reach.everything();
        world.check("the kind is gone", true, &["x"]);
        world.presence.send_replace(Presence::Listed);
        world.gateway_pool(watcher::Event::Apply(Sharing::gateway("y")));
        assert!(world.is_resolved());
        world.check("its pool says something else", false, &["y"]);
    }

    #[test]
    fn what_a_reference_gave_is_forgotten_with_it() {
        let mut world = Sharing::new();
        world.gateway_pool(watcher::Event::Delete(Sharing::gateway("x")));
        world.pool(watcher::Event::Apply(Sharing::referring("another")));
        world.check("another reference", false, &[]);
        world.pool(watcher::Event::Apply(Sharing::referring("gw")));
        world.check("the first again, which gives nothing", false, &[]);
        let mut world = Sharing::new();
        world.gateway_pool(watcher::Event::Delete(Sharing::gateway("x")));
        world.pool(watcher::Event::Delete(Sharing::referring("gw")));
        world.check("no such pool", false, &[]);
        world.pool(watcher::Event::Apply(Sharing::referring("gw")));
        world.check("made anew", false, &[]);
        let mut own = Sharing::named("referring", json!({"selector": {"matchLabels": {"tier": "z"}}}));
        own.spec.selector.match_labels.remove("app");
        world.pool(watcher::Event::Apply(own));
        world.check("a selector of its own", false, &["z"]);
    }

    fn answer(code: u16) -> watcher::Error {
        let status = kube::core::Status::failure("", "").with_code(code);
        watcher::Error::InitialListFailed(kube::Error::Api(Box::new(status)))
    }

    /// How often two failures of this code count, and how long is waited after each.
    #[track_caller]
    fn check_failures<K>(kind: &Kind<K>, code: u16, counted: u32, pauses: [Duration; 2]) {
        let (metrics, mut trouble) = (Metrics::new().expect("registers"), Trouble::default());
        let count = || {
            let page = metrics.render().expect("renders");
            let name = format!("watch_errors_total{{kind=\"{}\"}} ", kind.name);
            page.lines().find_map(|line| line.split_once(&name)?.1.parse::<u32>().ok())
        };
        let waited = [(); 2].map(|()| kind.broke(&answer(code), &mut trouble, &metrics));
        assert_eq!((count(), waited), (Some(counted), pauses), "{} {code}", kind.name);
        kind.works(&mut trouble);
        assert!(!trouble.told, "the next is told again");
        kind.broke(&answer(code), &mut trouble, &metrics);
        assert_eq!(count(), Some(counted + 1), "{} {code}: another one", kind.name);
    }

    #[test]
    fn a_right_that_may_be_lacking_is_not_asked_for_all_the_time() {
        let soon = [MIN_PAUSE, MIN_PAUSE * 2];
        let gateway = gateway_pools_if_any(watch::channel(Presence::Unknown).0);
        check_failures(&gateway, 403, 1, [BARRED_PAUSE; 2]);
        check_failures(&gateway, 500, 2, soon);
        check_failures(&mount_failures_of_pods(), 403, 1, [BARRED_PAUSE; 2]);
        check_failures(&root::<KvRouter>("KvRouter"), 403, 2, soon);
    }

    /// What was listed once stays, and a kind that cannot be read holds nobody up.
    #[test]
    fn an_optional_kind_is_known_before_it_can_be_read() {
        let (sender, presence) = watch::channel(Presence::Unknown);
        let kind = gateway_pools_if_any(sender);
        let after = |code, pause| {
            kind.failed(&answer(code), pause);
            *presence.borrow()
        };
        assert_eq!(after(500, MIN_PAUSE), Presence::Unknown, "it may heal at once");
        assert_eq!(after(500, MAX_PAUSE), Presence::Unreadable, "it does not");
        assert!(kind.found(Presence::Listed) && !kind.found(Presence::Listed), "new once");
        assert_eq!(after(403, MAX_PAUSE), Presence::Listed, "it was listed");
        assert!(kind.found(Presence::Unknown));
        assert_eq!(after(403, MIN_PAUSE), Presence::Unreadable, "nobody grants rights at once");
        let of_ours = root::<KvRouter>("KvRouter");
        of_ours.failed(&answer(403), MAX_PAUSE);
        assert!(!of_ours.found(Presence::NotInstalled), "a kind that must be there");
    }

    #[test]
    fn an_object_waits_once() {
        let depth = IntGauge::new("depth", "objects").expect("a gauge");
        let (queue, mut waiting) = Queue::<KvRouter>::new(depth.clone());
        let object = || ObjectRef::new("chat").within("ns");
        queue.push(object());
        queue.push(object());
        assert_eq!(depth.get(), 1);
        assert!(waiting.try_recv().is_ok());
        assert!(waiting.try_recv().is_err(), "twice");
        queue.begin(&object());
        assert_eq!(depth.get(), 0);
        queue.push(object());
        assert!(waiting.try_recv().is_ok(), "a change during its reconcile was lost");
    }
}
