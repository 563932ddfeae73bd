//! Metrics of the operator, all under `kvrouter_operator_`.
//!
//! docs/metrics.md describes each of them; its table and this file change
//! together. Labels are kinds, verbs, reasons and names of objects that the
//! operator has in its stores anyway, so their number is bounded by the objects.

use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use prometheus::{
    HistogramOpts, HistogramVec, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry, TextEncoder,
};

/// What `kvrouter_operator_condition` may say about a condition.
const STATUSES: [&str; 3] = ["True", "False", "Unknown"];

/// All metrics.
pub struct Metrics {
    registry: Registry,
    reconciles: IntCounterVec,
    durations: HistogramVec,
    /// Objects that wait for their reconcile, by kind.
    pub queue: IntGaugeVec,
    /// 1 while this process may write.
    pub leader: IntGauge,
    not_ready: IntGaugeVec,
    conditions: IntGaugeVec,
    writes: IntCounterVec,
    watch_errors: IntCounterVec,
    polls: IntCounterVec,
}

/// Registers metrics under our prefix.
struct Register<'a>(&'a Registry);

impl Register<'_> {
    fn keep<T: prometheus::core::Collector + Clone + 'static>(
        &self,
        metric: T,
    ) -> Result<T, prometheus::Error> {
        self.0.register(Box::new(metric.clone()))?;
        Ok(metric)
    }

    fn counters(&self, name: &str, help: &str, labels: &[&str]) -> Result<IntCounterVec, prometheus::Error> {
        self.keep(IntCounterVec::new(Opts::new(format!("kvrouter_operator_{name}"), help), labels)?)
    }

    fn gauges(&self, name: &str, help: &str, labels: &[&str]) -> Result<IntGaugeVec, prometheus::Error> {
        self.keep(IntGaugeVec::new(Opts::new(format!("kvrouter_operator_{name}"), help), labels)?)
    }

    fn gauge(&self, name: &str, help: &str) -> Result<IntGauge, prometheus::Error> {
        self.keep(IntGauge::new(format!("kvrouter_operator_{name}"), help)?)
    }

    fn durations(&self, name: &str, help: &str) -> Result<HistogramVec, prometheus::Error> {
        let buckets = prometheus::exponential_buckets(0.0005, 3.0, 10)?;
        let options = HistogramOpts::new(format!("kvrouter_operator_{name}"), help).buckets(buckets);
        self.keep(HistogramVec::new(options, &["kind"])?)
    }
}

impl Metrics {
    /// Registers everything.
    pub fn new() -> Result<Self, prometheus::Error> {
        let registry = Registry::new();
        let register = Register(&registry);
        Ok(Self {
            reconciles: register.counters(
                "reconciles_total",
                "Reconciles by kind and result: ok, or the reason of the error.",
                &["kind", "result"],
            )?,
            durations: register.durations("reconcile_duration_seconds", "Time of a reconcile, by kind.")?,
            queue: register.gauges("queue_depth", "Objects that wait for their reconcile.", &["kind"])?,
            leader: register.gauge("leader", "1 while this process may write.")?,
            not_ready: register.gauges(
                "not_ready",
                "1 for the reason that /readyz gives; absent when it succeeds.",
                &["reason"],
            )?,
            conditions: register.gauges(
                "condition",
                "1 for the status that a condition of an object has, 0 for the others.",
                &["kind", "namespace", "name", "type", "status"],
            )?,
            writes: register.counters(
                "api_writes_total",
                "Writes to the API server by verb and kind.",
                &["verb", "kind"],
            )?,
            watch_errors: register.counters("watch_errors_total", "Broken watches by kind.", &["kind"])?,
            polls: register.counters(
                "polls_total",
                "Health reports asked for, by result: ok, or the reason of the failure.",
                &["result"],
            )?,
            registry,
        })
    }

    /// Counts a reconcile.
    pub fn reconciled(&self, kind: &str, result: &str, took: Duration) {
        self.reconciles.with_label_values(&[kind, result]).inc();
        self.durations.with_label_values(&[kind]).observe(took.as_secs_f64());
    }

    /// Counts a write.
    pub fn wrote(&self, verb: &str, kind: &str) {
        self.writes.with_label_values(&[verb, kind]).inc();
    }

    /// Counts a broken watch.
    pub fn watch_failed(&self, kind: &str) {
        self.watch_errors.with_label_values(&[kind]).inc();
    }

    /// Counts a health report.
    pub fn polled(&self, result: &str) {
        self.polls.with_label_values(&[result]).inc();
    }

    /// Says why `/readyz` fails; `None` when it succeeds.
    pub fn set_not_ready(&self, reason: Option<&str>) {
        self.not_ready.reset();
        if let Some(reason) = reason {
            self.not_ready.with_label_values(&[reason]).set(1);
        }
    }

    /// Shows the conditions of an object.
    pub fn set_conditions(&self, kind: &str, namespace: &str, name: &str, conditions: &[Condition]) {
        for condition in conditions {
            for status in STATUSES {
                let labels = [kind, namespace, name, condition.type_.as_str(), status];
                self.conditions.with_label_values(&labels).set((condition.status == status).into());
            }
        }
    }

    /// Forgets the conditions of an object that is gone.
    pub fn forget(&self, kind: &str, namespace: &str, name: &str, types: &[&str]) {
        for type_ in types {
            for status in STATUSES {
                // It was never there when the object had no status yet.
                let _ = self.conditions.remove_label_values(&[kind, namespace, name, type_, status]);
            }
        }
    }

    /// Everything in Prometheus' text format.
    pub fn render(&self) -> Result<String, prometheus::Error> {
        TextEncoder::new().encode_to_string(&self.registry.gather())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_metric_is_documented() {
        let metrics = Metrics::new().expect("registers");
        metrics.reconciled("KvRouter", "ok", Duration::ZERO);
        metrics.queue.with_label_values(&["KvRouter"]).set(1);
        metrics.set_not_ready(Some("starting"));
        metrics.wrote("apply", "Service");
        metrics.watch_failed("Pod");
        metrics.polled("ok");
        let ready = Condition {
            type_: "Ready".into(),
            status: "True".into(),
            last_transition_time: k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(
                jiff::Timestamp::UNIX_EPOCH,
            ),
            message: String::new(),
            observed_generation: None,
            reason: "Serving".into(),
        };
        metrics.set_conditions("KvRouter", "ns", "chat", &[ready]);
        let text = metrics.render().expect("renders");
        let names: Vec<&str> = text
            .lines()
            .filter_map(|line| line.strip_prefix("# TYPE "))
            .filter_map(|line| line.split(' ').next())
            .collect();
        assert_eq!(names.len(), 9, "{names:?}");
        let documented = include_str!("../../docs/metrics.md");
        for name in names {
            assert!(documented.contains(&format!("| `{name}` |")), "docs/metrics.md lacks {name}");
        }
        metrics.forget("KvRouter", "ns", "chat", &["Ready"]);
        assert!(!metrics.render().expect("renders").contains("chat"), "an object that is gone is forgotten");
    }
}
