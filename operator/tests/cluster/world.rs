//! One namespace and its operator: what a test needs to act and to look.

use std::collections::BTreeMap;
use std::fs::File;
use std::net::IpAddr;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use kube::Client;
use kube::api::{
    Api, ApiResource, DynamicObject, GroupVersionKind, ListParams, Patch, PatchParams, PostParams,
};
use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::control_plane::{ControlPlane, free_port};

/// How long anything may take that should happen soon.
pub(crate) const SOON: Duration = Duration::from_secs(30);
/// How long nothing must happen.
pub(crate) const QUIET: Duration = Duration::from_secs(4);

/// Flag of an operator that was installed with a broker.
pub(crate) const BROKER: &str = "--nats-url=nats://nats.kvrouter-system:4222";

/// A namespace of a control plane.
pub(crate) struct World {
    pub(crate) plane: &'static ControlPlane,
    pub(crate) namespace: String,
    pub(crate) client: Client,
    /// Where the routers of this namespace serve their reports.
    pub(crate) report_port: u16,
}

/// A running operator; killed when dropped.
pub(crate) struct Operator {
    child: Child,
    pub(crate) port: u16,
    log: std::path::PathBuf,
}

/// Every kind that tests touch.
pub(crate) fn resource(kind: &str) -> ApiResource {
    let (group, version, plural) = match kind {
        "InferencePool" => ("kvrouter.dev", "v1alpha1", "kvinferencepools"),
        "GatewayPool" => ("inference.networking.k8s.io", "v1", "inferencepools"),
        "KvRouter" => ("kvrouter.dev", "v1alpha1", "kvrouters"),
        "Deployment" => ("apps", "v1", "deployments"),
        "StatefulSet" => ("apps", "v1", "statefulsets"),
        "PodDisruptionBudget" => ("policy", "v1", "poddisruptionbudgets"),
        "RoleBinding" => ("rbac.authorization.k8s.io", "v1", "rolebindings"),
        "Event" => ("events.k8s.io", "v1", "events"),
        "CoreEvent" => ("", "v1", "events"),
        "Lease" => ("coordination.k8s.io", "v1", "leases"),
        "Namespace" => ("", "v1", "namespaces"),
        "Pod" => ("", "v1", "pods"),
        "Service" => ("", "v1", "services"),
        "ServiceAccount" => ("", "v1", "serviceaccounts"),
        "ConfigMap" => ("", "v1", "configmaps"),
        other => panic!("tests do not know {other}"),
    };
    let kind = if kind == "GatewayPool" { "InferencePool" } else { kind.trim_start_matches("Core") };
    ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(group, version, kind), plural)
}

impl World {
    /// A fresh namespace of the shared control plane.
    pub(crate) async fn new(name: &str) -> Self {
        Self::on(ControlPlane::shared(), name).await
    }

    pub(crate) async fn on(plane: &'static ControlPlane, name: &str) -> Self {
        let client = plane.client().await;
        let world = Self { plane, namespace: name.to_owned(), client, report_port: free_port() };
        let api: Api<DynamicObject> = Api::all_with(world.client.clone(), &resource("Namespace"));
        let namespace = object("Namespace", name, json!({}));
        api.create(&PostParams::default(), &namespace).await.expect("a namespace");
        world
    }

    /// An operator of this namespace alone, which decides at once.
    pub(crate) fn operator(&self, flags: &[&str]) -> Operator {
        self.operator_of(&self.namespace, &[&[BROKER], flags].concat())
    }

    /// The same of several namespaces, with a broker only if a flag names one.
    pub(crate) fn operator_of(&self, namespaces: &str, flags: &[&str]) -> Operator {
        let namespaces = format!("--watch-namespaces={namespaces}");
        let port = format!("--report-port={}", self.report_port);
        let usual =
            [&namespaces, &port, "--leader-elect=false", "--hysteresis-seconds=0", "--poll-seconds=1"];
        Operator::start_as("operator", self.plane, &[&usual[..], flags].concat())
    }

    pub(crate) fn api(&self, kind: &str) -> Api<DynamicObject> {
        Api::namespaced_with(self.client.clone(), &self.namespace, &resource(kind))
    }

    #[track_caller]
    pub(crate) fn create(
        &self,
        kind: &'static str,
        name: &str,
        fields: Value,
    ) -> impl Future<Output = DynamicObject> {
        let (api, object) = (self.api(kind), object(kind, name, fields));
        async move {
            let params = PostParams::default();
            api.create(&params, &object).await.unwrap_or_else(|error| panic!("{kind}: {error}"))
        }
    }

    /// A merge patch, as a person's edit.
    pub(crate) async fn edit(&self, kind: &str, name: &str, patch: Value) -> DynamicObject {
        let api = self.api(kind);
        api.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await.expect("an edit")
    }

    pub(crate) async fn set_status(&self, kind: &str, name: &str, status: Value) {
        let patch = Patch::Merge(json!({"status": status}));
        self.api(kind).patch_status(name, &PatchParams::default(), &patch).await.expect("a status");
    }

    pub(crate) async fn get(&self, kind: &str, name: &str) -> Option<Value> {
        let found = self.api(kind).get_opt(name).await.expect("an answer");
        found.map(|object| serde_json::to_value(object).expect("serializes"))
    }

    pub(crate) async fn list(&self, kind: &str) -> Vec<Value> {
        let found = self.api(kind).list(&ListParams::default()).await.expect("an answer");
        found.items.iter().map(|object| serde_json::to_value(object).expect("serializes")).collect()
    }

    pub(crate) async fn delete(&self, kind: &str, name: &str) {
        self.api(kind).delete(name, &kube::api::DeleteParams::default()).await.expect("deleted");
    }

    /// Waits until `wanted` finds something.
    pub(crate) async fn until<T>(&self, what: &str, mut wanted: impl AsyncFnMut() -> Result<T, Value>) -> T {
        let began = Instant::now();
        loop {
            match wanted().await {
                Ok(found) => return found,
                Err(seen) if SOON < began.elapsed() => {
                    panic!("not within {SOON:?}: {what}; last seen: {seen:#}")
                }
                Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        }
    }

    /// Waits until the object is there.
    pub(crate) async fn appears(&self, kind: &str, name: &str) -> Value {
        self.until(&format!("{kind} {name}"), async || self.get(kind, name).await.ok_or(Value::Null)).await
    }

    /// Waits until the object satisfies `wanted`.
    pub(crate) async fn becomes(
        &self,
        what: &str,
        kind: &str,
        name: &str,
        wanted: impl Fn(&Value) -> bool,
    ) -> Value {
        self.until(what, async || match self.get(kind, name).await {
            Some(object) if wanted(&object) => Ok(object),
            other => Err(other.unwrap_or_default()),
        })
        .await
    }

    /// Waits until the condition of the object is so. Returns its message.
    pub(crate) async fn condition(
        &self,
        kind: &str,
        name: &str,
        type_: &str,
        status: &str,
        reason: &str,
    ) -> String {
        let what = format!("{kind} {name}: {type_}={status} {reason}");
        let found = self
            .becomes(&what, kind, name, |object| {
                let condition = condition_of(object, type_);
                condition["status"] == status && condition["reason"] == reason
            })
            .await;
        condition_of(&found, type_)["message"].as_str().unwrap_or_default().to_owned()
    }

    pub(crate) fn writes(&self) -> Vec<String> {
        self.plane.writes(&self.namespace)
    }

    /// Waits until the operator has written nothing for a while; returns all writes until then.
    pub(crate) async fn settles(&self) -> Vec<String> {
        let mut before = self.writes();
        for _ in 0..20 {
            tokio::time::sleep(Duration::from_millis(1500)).await;
            let now = self.writes();
            if now.len() == before.len() {
                return now;
            }
            before = now;
        }
        panic!("the operator does not come to rest: {:#?}", &before[before.len().saturating_sub(12)..]);
    }

    /// Nothing may be written from now on, for a while.
    pub(crate) async fn stays_quiet(&self, why: &str) {
        let before = self.writes();
        tokio::time::sleep(QUIET).await;
        let after = self.writes();
        assert_eq!(after[before.len()..], [""; 0], "{why}: writes in quiet time");
    }

    /// Plays the deployment controller: all pods are new and available.
    pub(crate) async fn roll_out(&self, kind: &str, name: &str) {
        let object = self.get(kind, name).await.expect("there");
        let replicas = object["spec"]["replicas"].as_i64().unwrap_or(1);
        let status = json!({
            "observedGeneration": object["metadata"]["generation"], "replicas": replicas,
            "updatedReplicas": replicas, "readyReplicas": replicas, "availableReplicas": replicas,
            "conditions": if kind == "Deployment" {
                json!([{"type": "Progressing", "status": "True", "reason": "NewReplicaSetAvailable"},
                    {"type": "Available", "status": "True", "reason": "MinimumReplicasAvailable"}])
            } else { json!([]) },
        });
        self.set_status(kind, name, status).await;
    }

    /// A pod that runs and is ready.
    pub(crate) async fn pod(
        &self,
        name: &str,
        ip: IpAddr,
        labels: &[(&str, &str)],
        container: Value,
    ) -> Value {
        let labels: BTreeMap<&str, &str> = labels.iter().copied().collect();
        self.create(
            "Pod",
            name,
            json!({"metadata": {"labels": labels}, "spec": {"containers": [container]}}),
        )
        .await;
        self.make_ready(name, ip).await;
        self.get("Pod", name).await.expect("there")
    }

    pub(crate) async fn make_ready(&self, name: &str, ip: IpAddr) {
        let ip = ip.to_string();
        let status = json!({"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}],
            "conditions": [{"type": "Ready", "status": "True"}]});
        self.set_status("Pod", name, status).await;
    }

    /// A router pod as the Deployment would make it, with a router that answers with `report`.
    pub(crate) async fn router_pod(&self, router: &str, pod: &str, report: Value) -> FakeRouter {
        let deployment = self.appears("Deployment", &format!("{router}-router")).await;
        let template = &deployment["spec"]["template"];
        let fake = FakeRouter::start(self.report_port, report).await;
        let metadata = json!({"labels": template["metadata"]["labels"], "annotations": template["metadata"]["annotations"]});
        self.create("Pod", pod, json!({"metadata": metadata, "spec": template["spec"]})).await;
        self.make_ready(pod, fake.ip).await;
        fake
    }
}

/// The condition of that type; null if there is none.
pub(crate) fn condition_of<'a>(object: &'a Value, type_: &str) -> &'a Value {
    let conditions = object.pointer("/status/conditions").and_then(Value::as_array);
    let found = conditions.into_iter().flatten().find(|condition| condition["type"] == type_);
    found.unwrap_or(&Value::Null)
}

fn object(kind: &str, name: &str, fields: Value) -> DynamicObject {
    let resource = resource(kind);
    let mut object = fields;
    object["apiVersion"] = resource.api_version.into();
    object["kind"] = resource.kind.into();
    object["metadata"]["name"] = name.into();
    serde_json::from_value(object).expect("an object")
}

impl Operator {
    /// With the rights of a cluster-wide installation.
    pub(crate) fn start(plane: &ControlPlane, flags: &[&str]) -> Self {
        Self::start_as("operator", plane, &[&[BROKER], flags].concat())
    }

    pub(crate) fn start_as(user: &str, plane: &ControlPlane, flags: &[&str]) -> Self {
        let port = free_port();
        let log = std::env::temp_dir().join(format!("kvrouter-{}-operator-{port}.log", std::process::id()));
        let file = File::create(&log).expect("a log");
        let child = Command::new(env!("CARGO_BIN_EXE_kv-router-operator"))
            .arg("run")
            .arg(format!("--listen=127.0.0.1:{port}"))
            .arg("--router-image=kv-router:test")
            .args(flags)
            .env("KUBECONFIG", plane.kubeconfig(user))
            .env("HOSTNAME", format!("operator-{port}"))
            .env_remove("RUST_LOG")
            .stdout(Stdio::null())
            .stderr(file)
            .spawn()
            .expect("the operator starts");
        Self { child, port, log }
    }

    /// Status and body of one of its pages; none while it does not answer.
    pub(crate) async fn page(&self, path: &str) -> Option<(u16, String)> {
        get(&format!("127.0.0.1:{}", self.port), path).await
    }

    pub(crate) async fn await_ready(&self) {
        let began = Instant::now();
        while self.page("/readyz").await.is_none_or(|(status, _)| status != 200) {
            assert!(began.elapsed() < SOON, "the operator is not ready: {}", self.logs());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    pub(crate) fn logs(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    pub(crate) fn has_ended(&mut self) -> Option<std::process::ExitStatus> {
        self.child.try_wait().expect("a child of ours")
    }

    pub(crate) fn signal(&self, name: &str) {
        let kill = Command::new("kill").args([name, &self.child.id().to_string()]).status();
        assert!(kill.expect("kill starts").success(), "kill {name}");
    }

    /// Resident memory in KiB.
    pub(crate) fn memory(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).expect("it runs");
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("a line");
        line.split_whitespace().nth(1).and_then(|kib| kib.parse().ok()).expect("a number")
    }

    /// Value of a metric, by its whole name with labels.
    pub(crate) async fn metric(&self, name: &str) -> Option<f64> {
        let (_, text) = self.page("/metrics").await?;
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.and_then(|value| value.parse().ok())
    }
}

impl Drop for Operator {
    fn drop(&mut self) {
        // Neither can fail in a way that matters: the process is ours or gone.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if !std::thread::panicking() {
            let _ = std::fs::remove_file(&self.log);
        } else {
            eprintln!("--- log of the operator\n{}", self.logs());
        }
    }
}

/// A plain GET.
pub(crate) async fn get(address: &str, path: &str) -> Option<(u16, String)> {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut stream = tokio::net::TcpStream::connect(address).await.ok()?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    Some((head.split(' ').nth(1)?.parse().ok()?, body.to_owned()))
}

/// A router's metrics port on a loopback address of its own.
pub(crate) struct FakeRouter {
    pub(crate) ip: IpAddr,
    report: Arc<Mutex<Value>>,
    server: tokio::task::JoinHandle<()>,
}

impl FakeRouter {
    async fn start(port: u16, report: Value) -> Self {
        let ip = next_ip();
        let listener = tokio::net::TcpListener::bind((ip, port)).await.expect("an address of our own");
        let report = Arc::new(Mutex::new(report));
        let shown = Arc::clone(&report);
        let page = axum::routing::get(move || {
            let shown = Arc::clone(&shown);
            async move { axum::Json(shown.lock().clone()) }
        });
        let router = axum::Router::new().route("/health/report", page);
        let server = tokio::spawn(async move { axum::serve(listener, router).await.expect("serves") });
        Self { ip, report, server }
    }

    /// What it says from now on.
    pub(crate) fn says(&self, change: impl FnOnce(&mut Value)) {
        change(&mut self.report.lock());
    }

    /// From now on nobody answers.
    pub(crate) fn stop(&self) {
        self.server.abort();
    }
}

impl Drop for FakeRouter {
    fn drop(&mut self) {
        self.server.abort();
    }
}

/// A loopback address that no other test uses.
pub(crate) fn next_ip() -> IpAddr {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let [_, _, high, low] = number.to_be_bytes();
    let process = u8::try_from(std::process::id() % 200).expect("below 200");
    IpAddr::from([127, 20 + process, high, low.max(1)])
}

/// `base` with the fields of `change`; null removes one.
pub(crate) fn merged(mut base: Value, change: Value) -> Value {
    match (&mut base, change) {
        (Value::Object(fields), Value::Object(changes)) => {
            for (key, change) in changes {
                let field = fields.remove(&key).unwrap_or_else(|| json!({}));
                if !change.is_null() {
                    fields.insert(key, if field.is_object() { merged(field, change) } else { change });
                }
            }
            base
        }
        (_, change) => change,
    }
}

/// A pool that engines of `app` form.
pub(crate) fn pool(app: &str) -> Value {
    json!({"spec": {
        "model": {"name": "Qwen/Qwen3-8B"}, "selector": {"matchLabels": {"app": app}},
        "targetPorts": [{"number": 8000}], "kvEvents": {"nats": {"url": "nats://nats:4222"}},
    }})
}

/// A router of the pool.
pub(crate) fn router(pool: &str) -> Value {
    json!({"spec": {"poolRef": {"name": pool}}})
}

/// The engine's container of a pod.
pub(crate) fn engine(arguments: &[&str]) -> Value {
    json!({"name": "engine", "image": "vllm", "args": arguments, "ports": [{"containerPort": 8000}]})
}

/// The settings that the router's children ask for now, as `(start, live)`.
pub(crate) fn settings(router: &Value) -> (String, String) {
    let hash = router["status"]["configHash"].as_str().unwrap_or_default();
    let (start, live) = hash.split_once('/').unwrap_or_default();
    (start.to_owned(), live.to_owned())
}

/// The report of a router that runs with these settings and knows these workers.
pub(crate) fn report(namespace: &str, pool: &str, settings: (&str, &str), workers: &[Value]) -> Value {
    json!({
        "schemaVersion": 1, "routerVersion": "0.1.0", "pool": format!("{namespace}/{pool}"),
        "config": {"start": settings.0, "live": settings.1}, "ready": true, "readyReason": "ok", "draining": false,
        "policy": "cacheplusload", "blockSize": 16, "events": {"transport": "nats", "connected": true},
        "tokenizer": {"ready": true, "message": null}, "liveSettings": {"watched": true, "refused": null},
        "workers": workers, "problems": [],
    })
}

/// A worker as a router reports it.
pub(crate) fn worker(pod: &Value, page_size: u32) -> Value {
    let ip = pod["status"]["podIP"].as_str().expect("an address");
    json!({
        "worker": format!("{ip}:8000"), "pod": pod["metadata"]["name"], "role": "mixed", "engine": "vllm",
        "engineVersion": "0.32.0", "ready": true, "reason": "ok", "reportedPageSize": page_size,
        "rendering": {"parity": "confirmed", "reason": "same", "variant": "vllm", "compared": 8, "probe": null,
            "position": null, "tokenizeMicrosecondsPerToken": 1.5, "tokenizeShareOfFirstByte": 0.01},
        "targets": [{"rank": 0, "trust": "exact", "reason": "ok", "credited": true, "eventPageSize": page_size,
            "hybrid": false, "epoch": 1, "seq": 1}],
    })
}

/// Name of an object.
pub(crate) fn name_of(object: &Value) -> String {
    object["metadata"]["name"].as_str().unwrap_or_default().to_owned()
}
