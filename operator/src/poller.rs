//! Reads the health reports of router pods into a store.
//!
//! This is the only thing that the operator asks of anybody but the API
//! server, and it asks routers only, never engines. Every router pod is asked
//! once per interval at its pod address; a few at a time, each with a time-out
//! and a bound on its answer. What was read is kept per pod and uid, so that the
//! report of a pod is never taken for its successor's. A failure keeps the last
//! report beside it: how old a report may be is for its readers to say.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use http_body_util::{BodyExt, Empty, Limited};
use hyper_util::rt::TokioIo;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kvrouter_crds::health::{self, HealthReport};
use parking_lot::Mutex;
use tokio::net::TcpStream;
use tokio::time::{MissedTickBehavior, interval, timeout};

use crate::facts::{REPORT_MAX_AGE, Reported, is_finished, name, uid};
use crate::metrics::Metrics;

/// How long a router may take to answer.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Routers asked at the same time. With it 1,000 dead pods take 2 min a round,
/// and the file descriptors stay few.
const CONCURRENCY: usize = 16;
/// Largest report: 2,000 targets take about 600 kB.
const MAX_REPORT: usize = 8 << 20;

/// A pod of a router, by namespace, name and uid.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PodKey {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its uid.
    pub uid: String,
}

/// What was heard of one pod.
#[derive(Clone, Debug, Default)]
pub struct Heard {
    /// The last report and when it was read; none before the first.
    pub report: Option<Reported>,
    /// Why the last poll failed; none if it succeeded.
    pub failure: Option<String>,
    /// Whether readers were told that the report is too old.
    told_stale: bool,
}

/// All that was heard. Cheap to read while polls are under way.
#[derive(Debug, Default)]
pub struct Reports(Mutex<BTreeMap<PodKey, Heard>>);

/// Why there is no report. Every router can be asked again.
#[derive(Debug, thiserror::Error)]
pub enum PollError {
    /// No connection.
    #[error("unable to connect to {address}")]
    Connect {
        /// Where to.
        address: String,
        /// Why not.
        #[source]
        source: std::io::Error,
    },
    /// The exchange broke off.
    #[error("unable to ask {address}")]
    Exchange {
        /// Whom.
        address: String,
        /// Why not.
        #[source]
        source: hyper::Error,
    },
    /// Too slow.
    #[error("no answer from {address} within 2 s")]
    Timeout {
        /// From whom.
        address: String,
    },
    /// Another status than 200.
    #[error("{address} answered with status {status}")]
    Status {
        /// Who.
        address: String,
        /// Which status.
        status: u16,
    },
    /// More bytes than a report may have.
    #[error("the report of {address} is longer than {MAX_REPORT} bytes or broke off")]
    Body {
        /// Whose.
        address: String,
    },
    /// Not a report.
    #[error("the report of {address} is not understood")]
    Decode {
        /// Whose.
        address: String,
        /// What is wrong.
        #[source]
        source: serde_json::Error,
    },
}

impl PollError {
    /// The `result` label.
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::Connect { .. } => "connect",
            Self::Exchange { .. } => "exchange",
            Self::Timeout { .. } => "timeout",
            Self::Status { .. } => "status",
            Self::Body { .. } => "body",
            Self::Decode { .. } => "decode",
        }
    }
}

/// Where to ask a pod, and what it is.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Target {
    key: PodKey,
    address: String,
}

impl PodKey {
    /// The key of `pod`.
    pub fn of(pod: &Pod) -> Self {
        Self {
            namespace: pod.metadata.namespace.clone().unwrap_or_default(),
            name: name(pod).to_owned(),
            uid: uid(pod).to_owned(),
        }
    }
}

impl Reports {
    /// What was heard of `pod`; nothing before the first poll.
    pub fn heard(&self, pod: &Pod) -> Heard {
        self.0.lock().get(&PodKey::of(pod)).cloned().unwrap_or_default()
    }

    /// Takes in one poll. Says whether readers should look again.
    fn take(&self, key: &PodKey, result: Result<HealthReport, PollError>, now: Timestamp) -> bool {
        let mut all = self.0.lock();
        let heard = all.entry(key.clone()).or_default();
        match result {
            Ok(report) => {
                let same = heard.report.as_ref().is_some_and(|old| is_same(&old.report, &report));
                let recovered = heard.failure.take().is_some();
                // The new one even if it says the same: its age counts.
                let report = match heard.report.take() {
                    Some(old) if same => old.report,
                    _ => Arc::new(report),
                };
                heard.report = Some(Reported { report, at: now });
                heard.told_stale = false;
                !same || recovered
            }
            Err(error) => {
                let failure = crate::chain(&error);
                let news = heard.failure.as_ref() != Some(&failure);
                heard.failure = Some(failure);
                let is_stale =
                    heard.report.as_ref().is_none_or(|report| REPORT_MAX_AGE < now.duration_since(report.at));
                let grew_stale = is_stale && !heard.told_stale;
                heard.told_stale |= is_stale;
                news || grew_stale
            }
        }
    }

    /// Forgets pods that are not in `keys` any more.
    fn keep(&self, targets: &[Target]) {
        let keys: std::collections::BTreeSet<&PodKey> = targets.iter().map(|target| &target.key).collect();
        self.0.lock().retain(|key, _| keys.contains(key));
    }
}

/// Whether two reports say the same of everything that conditions are made of:
/// message numbers, views' sizes, and the replicas that are heard, move with traffic.
fn is_same(old: &HealthReport, new: &HealthReport) -> bool {
    let still = |report: &HealthReport| {
        let mut report = report.clone();
        report.events.replicas_heard = None;
        for target in report.workers.iter_mut().flat_map(|worker| &mut worker.targets) {
            (target.seq, target.blocks) = (0, None);
        }
        report
    };
    old == new || still(old) == still(new)
}

/// Polls for ever. `pods` lists all router pods as they are now; `changed` is
/// told of each one that readers should look at again.
pub async fn run(
    reports: Arc<Reports>,
    metrics: Arc<Metrics>,
    every: Duration,
    port: u16,
    pods: impl Fn() -> Vec<Arc<Pod>>,
    changed: impl Fn(&PodKey),
) {
    let mut ticks = interval(every);
    // A round that took long must not be followed by several at once.
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let targets: Vec<Target> = pods().iter().filter_map(|pod| target(pod, port)).collect();
        reports.keep(&targets);
        let mut polls = futures::stream::iter(targets.into_iter().map(|target| async move {
            let result = read(&target.address).await;
            (target.key, result)
        }))
        .buffer_unordered(CONCURRENCY);
        while let Some((key, result)) = polls.next().await {
            metrics.polled(result.as_ref().map_or_else(PollError::reason, |_| "ok"));
            if reports.take(&key, result, Timestamp::now()) {
                changed(&key);
            }
        }
    }
}

/// How to ask `pod`; none while it has no address or has ended.
fn target(pod: &Pod, port: u16) -> Option<Target> {
    let ip = pod.status.as_ref()?.pod_ip.as_deref().filter(|ip| !ip.is_empty())?;
    if is_finished(pod) {
        return None;
    }
    let address = if ip.contains(':') { format!("[{ip}]:{port}") } else { format!("{ip}:{port}") };
    Some(Target { key: PodKey::of(pod), address })
}

async fn read(address: &str) -> Result<HealthReport, PollError> {
    match timeout(TIMEOUT, exchange(address)).await {
        Ok(result) => result,
        Err(_) => Err(PollError::Timeout { address: address.to_owned() }),
    }
}

/// One request on a connection of its own: routers come and go, and a
/// connection that is kept open to each would outnumber the answers.
async fn exchange(address: &str) -> Result<HealthReport, PollError> {
    let at = || address.to_owned();
    let stream =
        TcpStream::connect(address).await.map_err(|source| PollError::Connect { address: at(), source })?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .map_err(|source| PollError::Exchange { address: at(), source })?;
    // Ends with the sender or the peer; aborted with this future.
    let mut connections = tokio::task::JoinSet::new();
    connections.spawn(connection);
    let request = http::Request::get("/health/report")
        .header(http::header::HOST, address)
        .header(http::header::CONNECTION, "close")
        .body(Empty::<Bytes>::new())
        .expect("a constant path and an address of digits make a request");
    let response =
        sender.send_request(request).await.map_err(|source| PollError::Exchange { address: at(), source })?;
    if response.status() != http::StatusCode::OK {
        return Err(PollError::Status { address: at(), status: response.status().as_u16() });
    }
    let body = Limited::new(response.into_body(), MAX_REPORT)
        .collect()
        .await
        .map_err(|_| PollError::Body { address: at() })?
        .to_bytes();
    let report: HealthReport =
        serde_json::from_slice(&body).map_err(|source| PollError::Decode { address: at(), source })?;
    if health::SCHEMA_VERSION < report.schema_version {
        tracing::debug!(address, version = report.schema_version, "report of a newer router");
    }
    Ok(report)
}

#[cfg(test)]
mod tests {
    use jiff::SignedDuration;
    use serde_json::json;

    use super::*;

    fn report(seq: u64, trust: &str) -> HealthReport {
        serde_json::from_value(json!({
            "schemaVersion": 1, "routerVersion": "0", "pool": "ns/qwen", "config": {"start": "a", "live": null},
            "ready": true, "readyReason": "ok", "draining": false, "policy": "x", "blockSize": 16,
            "events": {"transport": "nats", "connected": true, "replicasHeard": seq},
            "tokenizer": {"ready": true, "message": null},
            "liveSettings": {"watched": true, "refused": null}, "problems": [],
            "workers": [{"worker": "a:1", "pod": "a", "role": "mixed", "engine": "vllm", "engineVersion": null,
                "ready": true, "reason": "ok", "reportedPageSize": 16, "targets": [{"rank": 0, "trust": trust,
                "reason": "ok", "credited": true, "eventPageSize": 16, "hybrid": false, "epoch": 1, "seq": seq}]}],
        }))
        .expect("a report")
    }

    fn key(uid: &str) -> PodKey {
        PodKey { namespace: "ns".into(), name: "chat-0".into(), uid: uid.into() }
    }

    fn refused() -> PollError {
        PollError::Timeout { address: "10.0.0.1:9090".into() }
    }

    #[test]
    fn only_news_are_told() {
        let reports = Reports::default();
        let at = |seconds: i64| Timestamp::UNIX_EPOCH + SignedDuration::from_secs(seconds);
        //    when  what                           told
        for (seconds, result, expected, why) in [
            (0, Ok(report(1, "exact")), true, "the first"),
            (5, Ok(report(2, "exact")), false, "traffic"),
            (10, Ok(report(3, "unsound")), true, "another trust"),
            (15, Err(refused()), true, "a failure"),
            (20, Err(refused()), false, "the same failure"),
            (31, Err(refused()), true, "the report is too old now"),
            (36, Err(refused()), false, "it stays too old"),
            (41, Ok(report(4, "unsound")), true, "back again"),
        ] {
            assert_eq!(reports.take(&key("1"), result, at(seconds)), expected, "{why}");
        }
    }

    #[test]
    fn a_pod_never_inherits_a_report() {
        let reports = Reports::default();
        reports.take(&key("1"), Ok(report(1, "exact")), Timestamp::UNIX_EPOCH);
        let pod = |uid: &str| -> Pod {
            serde_json::from_value(json!({"metadata": {"namespace": "ns", "name": "chat-0", "uid": uid}}))
                .expect("a pod")
        };
        assert!(reports.heard(&pod("1")).report.is_some());
        assert!(reports.heard(&pod("2")).report.is_none(), "its successor");
        reports.keep(&[]);
        assert!(reports.heard(&pod("1")).report.is_none(), "a pod that is gone");
    }

    #[test]
    fn only_pods_with_an_address_are_asked() {
        let address = |status: serde_json::Value| {
            let pod =
                serde_json::from_value(json!({"metadata": {"name": "a"}, "status": status})).expect("a pod");
            target(&pod, 9090).map(|target| target.address)
        };
        assert_eq!(address(json!({"podIP": "10.0.0.1"})).as_deref(), Some("10.0.0.1:9090"));
        assert_eq!(address(json!({"podIP": "fd00::1"})).as_deref(), Some("[fd00::1]:9090"));
        assert_eq!(address(json!({})), None);
        assert_eq!(address(json!({"podIP": "10.0.0.1", "phase": "Succeeded"})), None);
    }
}
