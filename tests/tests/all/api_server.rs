//! A scripted Kubernetes API server: lists and watches of pods and ConfigMaps, with the failures
//! that real ones have.
//!
//! It keeps objects as JSON and a log of changes, selects by labels or name as a real one does (an
//! object that no longer matches is told as deleted), and streams changes from a resource version
//! on. It can fall silent, refuse, and go away and come back on the same port.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use futures::stream::BoxStream;
use http::{Request, Response, StatusCode};
use http_body_util::StreamBody;
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use std::sync::Mutex;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;

type Body = StreamBody<BoxStream<'static, Result<Frame<Bytes>, Infallible>>>;

/// The server. Dropping it ends it.
pub(crate) struct ApiServer {
    address: SocketAddr,
    shared: Arc<Shared>,
    tasks: JoinSet<()>,
}

struct Shared {
    state: Mutex<State>,
    /// Counts changes of any kind.
    changed: watch::Sender<u64>,
}

#[derive(Default)]
struct State {
    version: u64,
    /// By (resource, name).
    objects: BTreeMap<(String, String), Value>,
    log: Vec<Entry>,
    /// Watches send nothing more and do not end.
    silent: bool,
    /// The verb and resource that are refused.
    forbidden: Option<(&'static str, &'static str)>,
    lists: BTreeMap<String, u64>,
}

/// One change of one object.
#[derive(Clone)]
struct Entry {
    version: u64,
    resource: String,
    before: Option<Value>,
    after: Option<Value>,
}

/// What a request asks for.
#[derive(Clone)]
struct Query {
    resource: String,
    labels: Vec<(String, String)>,
    name: Option<String>,
    from: u64,
    limit: Duration,
}

impl ApiServer {
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let state = Mutex::new(State { version: 1000, ..State::default() });
        let shared = Arc::new(Shared { state, changed: watch::Sender::new(0) });
        let mut server = Self { address, shared, tasks: JoinSet::new() };
        server.serve(listener);
        server
    }

    /// What `KUBECONFIG` must name.
    pub(crate) fn kubeconfig(&self) -> String {
        json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "it",
            "clusters": [{"name": "it", "cluster": {"server": format!("http://{}", self.address)}}],
            "users": [{"name": "it", "user": {"token": "t"}}],
            "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
        })
        .to_string()
    }

    /// Creates or replaces an object of `resource`.
    pub(crate) fn put(&self, resource: &str, mut object: Value) {
        let name = object["metadata"]["name"].as_str().unwrap().to_owned();
        self.change(|state| {
            state.version += 1;
            object["metadata"]["resourceVersion"] = json!(state.version.to_string());
            let key = (resource.to_owned(), name);
            let before = state.objects.insert(key, object.clone());
            let (version, resource) = (state.version, resource.to_owned());
            state.log.push(Entry { version, resource, before, after: Some(object) });
        });
    }

    /// Changes an object in place.
    pub(crate) fn edit(&self, resource: &str, name: &str, edit: impl FnOnce(&mut Value)) {
        let key = (resource.to_owned(), name.to_owned());
        let mut object = self.shared.state.lock().unwrap().objects[&key].clone();
        edit(&mut object);
        self.put(resource, object);
    }

    pub(crate) fn delete(&self, resource: &str, name: &str) {
        self.change(|state| {
            state.version += 1;
            let mut before = state.objects.remove(&(resource.to_owned(), name.to_owned())).unwrap();
            before["metadata"]["resourceVersion"] = json!(state.version.to_string());
            let (version, resource) = (state.version, resource.to_owned());
            state.log.push(Entry { version, resource, before: Some(before), after: None });
        });
    }

    /// Watches that are open send nothing more, and never end.
    pub(crate) fn fall_silent(&self) {
        self.change(|state| state.silent = true);
    }

    /// Refuses a verb on a resource, or nothing any more.
    pub(crate) fn forbid(&self, what: Option<(&'static str, &'static str)>) {
        self.change(|state| state.forbidden = what);
    }

    /// Lists of `resource` so far.
    pub(crate) fn lists(&self, resource: &str) -> u64 {
        self.shared.state.lock().unwrap().lists.get(resource).copied().unwrap_or(0)
    }

    /// Closes the port and all connections.
    pub(crate) async fn go_away(&mut self) {
        self.tasks.shutdown().await;
    }

    /// Listens again, on the same port.
    pub(crate) async fn come_back(&mut self) {
        let listener = TcpListener::bind(self.address).await.unwrap();
        self.serve(listener);
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.shared.state.lock().unwrap());
        self.shared.changed.send_modify(|count| *count += 1);
    }

    fn serve(&mut self, listener: TcpListener) {
        let shared = Arc::clone(&self.shared);
        self.tasks.spawn(async move {
            // Connections end with this task.
            let mut connections = JoinSet::new();
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let shared = Arc::clone(&shared);
                let answer = service_fn(move |request| {
                    let answer = answer(&shared, &request);
                    async move { Ok::<_, Infallible>(answer) }
                });
                let connection =
                    hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), answer);
                connections.spawn(async move { drop(connection.await) });
            }
        });
    }
}

fn answer(shared: &Arc<Shared>, request: &Request<Incoming>) -> Response<Body> {
    let path = request.uri().path().to_owned();
    let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
    let ["api", "v1", "namespaces", "ai", resource] = parts[..] else {
        return json_answer(404, &json!({"kind": "Status", "code": 404, "message": path}));
    };
    let resource = resource.to_owned();
    let found: BTreeMap<String, String> = request
        .uri()
        .query()
        .unwrap_or("")
        .split('&')
        .filter_map(|pair| pair.split_once('='))
        .map(|(name, value)| (name.to_owned(), unescape(value)))
        .collect();
    let text = |name: &str| found.get(name).cloned().unwrap_or_default();
    let pair = |text: &str| text.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned()));
    let query = Query {
        labels: text("labelSelector").split(',').filter_map(pair).collect(),
        name: pair(&text("fieldSelector")).map(|(_, name)| name),
        from: text("resourceVersion").parse().unwrap_or(0),
        limit: Duration::from_secs(text("timeoutSeconds").parse().unwrap_or(290)),
        resource,
    };
    let verb = if text("watch") == "true" { "watch" } else { "list" };
    if shared.state.lock().unwrap().forbidden == Some((verb, query.resource.as_str())) {
        let message = format!(
            "{0} is forbidden: User \"system:serviceaccount:ai:kv-router\" cannot {verb} resource \"{0}\" in API group \"\" in the namespace \"ai\"",
            query.resource
        );
        let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message,
                            "reason": "Forbidden", "code": 403});
        return json_answer(403, &status);
    }
    if verb == "list" { list(shared, &query) } else { watching(Arc::clone(shared), query) }
}

fn unescape(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((first, more)) = rest.split_first() {
        let hex = (*first == b'%').then(|| std::str::from_utf8(&more[..2]).unwrap());
        bytes.push(hex.map_or(*first, |hex| u8::from_str_radix(hex, 16).unwrap()));
        rest = if hex.is_some() { &more[2..] } else { more };
    }
    String::from_utf8(bytes).unwrap()
}

fn json_answer(status: u16, body: &Value) -> Response<Body> {
    let frame = Ok(Frame::data(Bytes::from(body.to_string())));
    let body = StreamBody::new(futures::stream::iter([frame]).boxed());
    Response::builder()
        .status(StatusCode::from_u16(status).unwrap())
        .header("content-type", "application/json")
        .body(body)
        .unwrap()
}

fn list(shared: &Shared, query: &Query) -> Response<Body> {
    let mut state = shared.state.lock().unwrap();
    *state.lists.entry(query.resource.clone()).or_default() += 1;
    let of_resource = state.objects.iter().filter(|((resource, _), _)| *resource == query.resource);
    let items: Vec<&Value> =
        of_resource.map(|(_, object)| object).filter(|object| query.selects(object)).collect();
    let kind = if query.resource == "pods" { "PodList" } else { "ConfigMapList" };
    let version = state.version.to_string();
    let list =
        json!({"kind": kind, "apiVersion": "v1", "metadata": {"resourceVersion": version}, "items": items});
    json_answer(200, &list)
}

/// The changes behind version `query.from`, as they come.
fn watching(shared: Arc<Shared>, query: Query) -> Response<Body> {
    let ends = Instant::now() + query.limit;
    let changed = shared.changed.subscribe();
    let start = (shared, query.clone(), changed, query.from);
    let stream = futures::stream::unfold(start, move |(shared, query, mut changed, mut from)| async move {
        loop {
            changed.borrow_and_update();
            let (silent, entry) = {
                let state = shared.state.lock().unwrap();
                let behind = |entry: &&Entry| entry.version > from && entry.resource == query.resource;
                (state.silent, state.log.iter().find(behind).cloned())
            };
            if silent {
                std::future::pending::<()>().await;
            }
            if let Some(entry) = entry {
                from = entry.version;
                let Some(event) = query.event(&entry) else { continue };
                let frame = Ok(Frame::data(Bytes::from(format!("{event}\n"))));
                return Some((frame, (shared, query, changed, from)));
            }
            tokio::select! {
                heard = changed.changed() => heard.unwrap(),
                () = tokio::time::sleep_until(ends) => return None,
            }
        }
    });
    Response::builder()
        .header("content-type", "application/json")
        .body(StreamBody::new(stream.boxed()))
        .unwrap()
}

impl Query {
    fn selects(&self, object: &Value) -> bool {
        let meta = &object["metadata"];
        self.name.as_ref().is_none_or(|name| meta["name"] == **name)
            && self.labels.iter().all(|(name, value)| meta["labels"][name] == **value)
    }

    /// As whoever watches with this selection is told it.
    fn event(&self, entry: &Entry) -> Option<Value> {
        let selected = |object: &Option<Value>| object.clone().filter(|object| self.selects(object));
        let (kind, object) = match (selected(&entry.before), selected(&entry.after)) {
            (None, None) => return None,
            (None, Some(after)) => ("ADDED", after),
            (Some(_), Some(after)) => ("MODIFIED", after),
            (Some(before), None) => {
                let mut last = entry.after.clone().unwrap_or(before);
                last["metadata"]["resourceVersion"] = json!(entry.version.to_string());
                ("DELETED", last)
            }
        };
        Some(json!({"type": kind, "object": object}))
    }
}
