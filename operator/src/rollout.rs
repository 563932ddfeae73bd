//! How the rollout of a workload stands. Pure.

use k8s_openapi::api::apps::v1::{Deployment, StatefulSet};

use crate::pool::observe::Rollout;

/// A Deployment's: complete when every replica is of the newest template and
/// available, and no older one is left.
pub fn of_deployment(deployment: &Deployment) -> Rollout {
    let Some(status) = deployment.status.as_ref() else { return Rollout::InProgress };
    if status.observed_generation < deployment.metadata.generation {
        return Rollout::InProgress;
    }
    let wanted = deployment.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(1);
    let updated = status.updated_replicas.unwrap_or(0);
    let complete = wanted <= updated
        && status.replicas.unwrap_or(0) <= updated
        && wanted <= status.available_replicas.unwrap_or(0);
    if complete {
        return Rollout::Complete;
    }
    let is_late = status.conditions.iter().flatten().any(|condition| {
        condition.type_ == "Progressing"
            && condition.status == "False"
            && condition.reason.as_deref() == Some("ProgressDeadlineExceeded")
    });
    if is_late { Rollout::DeadlineExceeded } else { Rollout::InProgress }
}

/// A StatefulSet's: pods below the partition keep the older template on purpose,
/// and with `OnDelete` nothing rolls by itself. It has no deadline.
pub fn of_stateful_set(set: &StatefulSet) -> Rollout {
    let (Some(spec), Some(status)) = (set.spec.as_ref(), set.status.as_ref()) else {
        return Rollout::InProgress;
    };
    if status.observed_generation < set.metadata.generation {
        return Rollout::InProgress;
    }
    let wanted = spec.replicas.unwrap_or(1);
    let strategy = spec.update_strategy.as_ref();
    let partition =
        strategy.and_then(|it| it.rolling_update.as_ref()).and_then(|it| it.partition).unwrap_or(0);
    // When all are updated the newest revision becomes the current one, and the
    // count of updated pods says nothing any more.
    let is_settled = status.current_revision == status.update_revision;
    let updated = status.updated_replicas.unwrap_or(0);
    let complete = is_on_delete(set) || is_settled || wanted.saturating_sub(partition) <= updated;
    if complete && wanted <= status.available_replicas.unwrap_or(0) {
        Rollout::Complete
    } else {
        Rollout::InProgress
    }
}

/// Whether its pods are replaced only when somebody deletes them.
pub fn is_on_delete(set: &StatefulSet) -> bool {
    let strategy = set.spec.as_ref().and_then(|spec| spec.update_strategy.as_ref());
    strategy.and_then(|strategy| strategy.type_.as_deref()) == Some("OnDelete")
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[track_caller]
    #[allow(clippy::needless_pass_by_value, reason = "the rows read better")]
    fn check_deployment(why: &str, replicas: i32, status: Value, expected: Rollout) {
        let object = json!({"metadata": {"generation": 2}, "status": status,
            "spec": {"replicas": replicas, "selector": {}, "template": {}}});
        let deployment = serde_json::from_value(object).expect(why);
        assert_eq!(of_deployment(&deployment), expected, "{why}");
    }

    #[test]
    fn a_deployment_is_complete_without_old_pods() {
        use Rollout::{Complete, DeadlineExceeded, InProgress};
        let status = |seen: i64, all: i32, updated: i32, available: i32| {
            json!({"observedGeneration": seen, "replicas": all, "updatedReplicas": updated,
                "availableReplicas": available})
        };
        check_deployment("complete", 2, status(2, 2, 2, 2), Complete);
        check_deployment("not looked at yet", 2, status(1, 2, 2, 2), InProgress);
        check_deployment("an old pod is left", 2, status(2, 3, 2, 3), InProgress);
        check_deployment("not available", 2, status(2, 2, 2, 1), InProgress);
        check_deployment("none wanted", 0, json!({"observedGeneration": 2}), Complete);
        let mut late = status(2, 3, 1, 2);
        late["conditions"] =
            json!([{"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}]);
        check_deployment("late", 2, late, DeadlineExceeded);
    }

    #[track_caller]
    #[allow(clippy::needless_pass_by_value, reason = "the rows read better")]
    fn check_set(why: &str, strategy: Value, status: Value, expected: Rollout) {
        let object = json!({"metadata": {"generation": 2}, "status": status,
            "spec": {"replicas": 3, "selector": {}, "template": {}, "updateStrategy": strategy, "serviceName": ""}});
        let set = serde_json::from_value(object).expect(why);
        assert_eq!(of_stateful_set(&set), expected, "{why}");
    }

    #[test]
    fn a_stateful_set_is_complete_above_its_partition() {
        use Rollout::{Complete, InProgress};
        let status = |revisions: (&str, &str), updated: i32, available: i32| {
            json!({"observedGeneration": 2, "replicas": 3, "currentRevision": revisions.0,
                "updateRevision": revisions.1, "updatedReplicas": updated, "availableReplicas": available})
        };
        let rolling =
            |partition: i32| json!({"type": "RollingUpdate", "rollingUpdate": {"partition": partition}});
        check_set("all are new", rolling(0), status(("b", "b"), 3, 3), Complete);
        check_set("one is old", rolling(0), status(("a", "b"), 2, 3), InProgress);
        check_set("old below the partition", rolling(1), status(("a", "b"), 2, 3), Complete);
        check_set("one is away", rolling(1), status(("a", "b"), 2, 2), InProgress);
        check_set("on delete", json!({"type": "OnDelete"}), status(("a", "b"), 0, 3), Complete);
    }
}
