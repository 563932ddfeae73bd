//! Events about our objects: one for each transition, none for a state.
//!
//! A condition that flips, or a workload that comes to another state, is an
//! event; anything that a second look would say again is not. An event that
//! cannot be written is logged and forgotten: the status says the same.

use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::Client;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use kvrouter_crds::conditions::WorkloadState;
use serde_json::Value;

use crate::apply::is_namespace_ending;
use crate::controller::conditions;

/// Longest note that the API server takes, in bytes.
const NOTE: usize = 1024;
/// Reasons of conditions that do not hold for a good reason, for a while.
const EXPECTED: &[&str] =
    &["RolloutPending", "RollingOut", "Syncing", "EngineStarting", "ScaledToZero", "Paused", "NoPods"];

/// The hand that writes events.
#[derive(Clone)]
pub struct Announcer(Recorder);

/// How a condition is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Mood {
    Good,
    Bad,
    Unsure,
    /// Nothing is known yet.
    Pending,
}

/// One thing to say.
#[derive(Clone, Debug, PartialEq)]
struct Note {
    is_warning: bool,
    reason: String,
    action: String,
    text: String,
}

impl Announcer {
    /// Speaks as the operator, from the pod `instance`.
    pub fn new(client: Client, instance: Option<String>) -> Self {
        Self(Recorder::new(client, Reporter { controller: "kvrouter.dev/operator".into(), instance }))
    }

    /// Says what changed between two statuses of `object`.
    pub async fn announce(&self, object: &ObjectReference, before: &Value, after: &Value) {
        for note in notes(before, after) {
            let event = Event {
                type_: if note.is_warning { EventType::Warning } else { EventType::Normal },
                reason: note.reason,
                note: Some(note.text),
                action: note.action,
                secondary: None,
            };
            match self.0.publish(&event, object).await {
                Ok(()) => {}
                Err(error) if is_namespace_ending(&error) => {
                    tracing::debug!(
                        namespace = object.namespace,
                        reason = event.reason,
                        "the namespace is ending"
                    );
                }
                Err(error) => {
                    tracing::warn!(error = %crate::chain(&error), reason = event.reason, "event not written")
                }
            }
        }
    }
}

fn notes(before: &Value, after: &Value) -> Vec<Note> {
    let (old, new) = (conditions(before), conditions(after));
    let flipped = new.iter().filter_map(|new| {
        let old = old.iter().find(|old| old.type_ == new.type_);
        let (was, is) = (old.map_or(Mood::Pending, mood), mood(new));
        let matters = match (was, is) {
            // To come up is news of the object as a whole only.
            (Mood::Pending, Mood::Good) => new.type_ == "Ready",
            (_, Mood::Pending) => false,
            (was, is) => was != is,
        };
        let is_warning = is != Mood::Good && !EXPECTED.contains(&new.reason.as_str());
        matters.then(|| Note {
            is_warning,
            reason: new.reason.clone(),
            action: new.type_.clone(),
            text: shorten(&format!("{}={}: {}", new.type_, new.status, new.message)),
        })
    });
    flipped.chain(workloads(before, after)).collect()
}

/// Workloads that came to a state that somebody did or must do something about.
fn workloads(before: &Value, after: &Value) -> Vec<Note> {
    let list =
        |status: &Value| status.get("workloads").and_then(Value::as_array).cloned().unwrap_or_default();
    let field =
        |record: &Value, name: &str| record.get(name).and_then(Value::as_str).unwrap_or_default().to_owned();
    let old = list(before);
    let mut notes = Vec::new();
    for record in list(after) {
        let same = |old: &&Value| {
            field(old, "kind") == field(&record, "kind") && field(old, "name") == field(&record, "name")
        };
        let was = old.iter().find(same);
        let state = field(&record, "state");
        let newly_applied = was.and_then(|was| was.get("applied")) != record.get("applied")
            && record.get("applied").is_some();
        let reason = match WorkloadState::of(&state) {
            Some(WorkloadState::RollingOut) if newly_applied => "WorkloadPatched",
            Some(WorkloadState::PatchReverted) => "PatchReverted",
            Some(WorkloadState::PatchFailed) => "PatchFailed",
            Some(WorkloadState::Patched) => "WorkloadRolledOut",
            _ => continue,
        };
        if was.is_some_and(|was| field(was, "state") == state) && !newly_applied {
            continue;
        }
        let named = format!("{} {}", field(&record, "kind"), field(&record, "name"));
        let message = field(&record, "message");
        let text = if message.is_empty() { format!("{named} runs as the pool asks.") } else { message };
        notes.push(Note {
            is_warning: matches!(reason, "PatchReverted" | "PatchFailed"),
            reason: reason.to_owned(),
            action: "PatchWorkload".to_owned(),
            text: shorten(&text),
        });
    }
    notes
}

fn mood(condition: &Condition) -> Mood {
    let holds = match condition.status.as_str() {
        "True" => true,
        "False" => false,
        _ if condition.reason == "Pending" => return Mood::Pending,
        _ => return Mood::Unsure,
    };
    let is_good = match condition.type_.as_str() {
        "Degraded" => !holds,
        "Progressing" => holds || matches!(condition.reason.as_str(), "RolloutComplete" | "Paused"),
        _ => holds,
    };
    if is_good { Mood::Good } else { Mood::Bad }
}

fn shorten(text: &str) -> String {
    if text.len() <= NOTE {
        return text.to_owned();
    }
    let end = (0..=NOTE - '…'.len_utf8()).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
    format!("{}…", &text[..end])
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn status(type_: &str, status: &str, reason: &str) -> Value {
        json!({"conditions": [{"type": type_, "status": status, "reason": reason, "message": "m",
            "lastTransitionTime": "2026-01-01T00:00:00Z"}]})
    }

    #[track_caller]
    fn check(why: &str, type_: &str, before: (&str, &str), after: (&str, &str), expected: Option<bool>) {
        let found = notes(&status(type_, before.0, before.1), &status(type_, after.0, after.1));
        assert_eq!(found.first().map(|note| note.is_warning), expected, "{why}: {found:?}");
    }

    #[test]
    fn only_transitions_are_events() {
        //    why                    type        before                 after                     warning
        check("a state", "Ready", ("True", "Serving"), ("True", "Serving"), None);
        check("a reason", "Ready", ("False", "NoPods"), ("False", "NoPodsReady"), None);
        check("broke", "PageSizeParity", ("True", "SamePageSize"), ("False", "MixedWithinRole"), Some(true));
        check(
            "healed",
            "PageSizeParity",
            ("False", "MixedWithinRole"),
            ("True", "SamePageSize"),
            Some(false),
        );
        check("degraded", "Degraded", ("False", "AsExpected"), ("True", "NatsUnreachable"), Some(true));
        check("came up", "Ready", ("Unknown", "Pending"), ("True", "Serving"), Some(false));
        check("a part came up", "Accepted", ("Unknown", "Pending"), ("True", "Accepted"), None);
        check(
            "broken from the start",
            "Accepted",
            ("Unknown", "Pending"),
            ("False", "InvalidSpec"),
            Some(true),
        );
        check("a rollout", "ConfigApplied", ("True", "Applied"), ("False", "RolloutPending"), Some(false));
        check(
            "rolling is no event",
            "Progressing",
            ("False", "RolloutComplete"),
            ("True", "RollingOut"),
            None,
        );
        check(
            "too late",
            "Progressing",
            ("True", "RollingOut"),
            ("False", "ProgressDeadlineExceeded"),
            Some(true),
        );
    }

    #[test]
    fn a_patch_and_its_end_are_events() {
        let status = |state: &str, applied: Option<&str>| {
            let mut record = json!({"kind": "Deployment", "name": "qwen", "state": state});
            if let Some(applied) = applied {
                record["applied"] = applied.into();
            }
            json!({"workloads": [record]})
        };
        let reasons = |before: &Value, after: &Value| -> Vec<String> {
            notes(before, after).into_iter().map(|note| note.reason).collect()
        };
        let (waiting, rolling) = (status("Waiting", None), status("RollingOut", Some("d")));
        assert_eq!(reasons(&waiting, &rolling), ["WorkloadPatched"]);
        assert_eq!(reasons(&rolling, &rolling), [""; 0]);
        assert_eq!(reasons(&rolling, &status("Patched", Some("d"))), ["WorkloadRolledOut"]);
        assert_eq!(reasons(&rolling, &status("PatchReverted", Some("d"))), ["PatchReverted"]);
        assert_eq!(reasons(&waiting, &status("RollingOut", None)), [""; 0], "for another reason");
    }

    #[test]
    fn a_long_note_is_cut_at_a_letter() {
        assert!(shorten(&"ä".repeat(600)).len() <= NOTE);
    }
}
