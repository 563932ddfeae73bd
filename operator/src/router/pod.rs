//! The pods of a router. Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    ConfigMapVolumeSource, Container, ContainerPort, EmptyDirVolumeSource, ImageVolumeSource,
    PersistentVolumeClaimVolumeSource, PodSecurityContext, PodSpec, PodTemplateSpec,
    TopologySpreadConstraint, Volume, VolumeMount,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kvrouter_crds::config::START_SETTINGS_KEY;
use kvrouter_crds::pool::TokenizerSource;

use super::build::{child_name, label_selector, pod_labels};
use super::config::{SETTINGS_FOLDER, TOKENIZER_FOLDER, limits};
use super::validate::ValidRouter;
use crate::config::ChildFlags;
use crate::parts::{
    Access, CREDENTIALS_FOLDER, IDENTITY_FOLDER, Mounts, TENANCY_FOLDER, USER, probe, resources,
    seccomp_profile, security_context, variable,
};

/// Annotation of router pods: digest of the start settings. Another one replaces the pods.
pub const START_ANNOTATION: &str = "kvrouter.dev/start-settings";
/// Name of the volume with the secret that keys tenants' salts.
pub const TENANCY_VOLUME: &str = "tenancy";
/// Name of the router's container.
pub const CONTAINER: &str = "router";

/// Port of requests and probes, and its name.
const HTTP: (&str, i32) = ("http", 8000);
/// Port of `/metrics` and `/health/report`, and its name.
const METRICS: (&str, i32) = ("metrics", 9090);
/// What stopping takes beside draining.
const STOP_MARGIN_SECONDS: u64 = 15;
/// How long a router may take to become ready. Waiting for views ends after 60 s.
const START_SECONDS: i32 = 150;

/// Template of the router's pods.
pub fn template(
    router: &ValidRouter,
    flags: &ChildFlags,
    start_settings_name: &str,
    start_digest: &str,
) -> PodTemplateSpec {
    let annotations = BTreeMap::from([
        (START_ANNOTATION.to_owned(), start_digest.to_owned()),
        ("kubectl.kubernetes.io/default-container".to_owned(), CONTAINER.to_owned()),
    ]);
    let metadata =
        ObjectMeta { labels: Some(pod_labels(router)), annotations: Some(annotations), ..Default::default() };
    PodTemplateSpec { metadata: Some(metadata), spec: Some(spec(router, flags, start_settings_name)) }
}

fn spec(router: &ValidRouter, flags: &ChildFlags, start_settings_name: &str) -> PodSpec {
    let scheduling = router.spec.scheduling.clone().unwrap_or_default();
    let secrets = &router.spec.image_pull_secrets;
    let Mounts { volumes, mounts } = mounts(router, start_settings_name);
    PodSpec {
        service_account_name: Some(child_name(&router.name)),
        // Routers watch pods and their live settings.
        automount_service_account_token: Some(true),
        // A Service called kvrouter-config would become the variable KVROUTER_CONFIG_...
        enable_service_links: Some(false),
        termination_grace_period_seconds: Some(grace_seconds(router)),
        security_context: Some(PodSecurityContext {
            run_as_non_root: Some(true),
            run_as_user: Some(USER),
            run_as_group: Some(USER),
            fs_group: Some(USER),
            seccomp_profile: Some(seccomp_profile()),
            ..Default::default()
        }),
        image_pull_secrets: (!secrets.is_empty()).then(|| secrets.clone()),
        containers: vec![container(router, flags, mounts)],
        volumes: Some(volumes),
        node_selector: (!scheduling.node_selector.is_empty()).then_some(scheduling.node_selector),
        tolerations: (!scheduling.tolerations.is_empty()).then_some(scheduling.tolerations),
        affinity: router.affinity.clone(),
        topology_spread_constraints: Some(router.spread.clone().unwrap_or_else(|| spread(router))),
        priority_class_name: scheduling.priority_class_name,
        ..Default::default()
    }
}

/// The kubelet kills what has not stopped by then: longer than routers drain.
pub(super) fn grace_seconds(router: &ValidRouter) -> i64 {
    let limits = limits(router);
    let seconds = limits.drain_delay_seconds + limits.drain_timeout_seconds + STOP_MARGIN_SECONDS;
    i64::try_from(seconds).unwrap_or(i64::MAX)
}

fn container(router: &ValidRouter, flags: &ChildFlags, mounts: Vec<VolumeMount>) -> Container {
    let port = |(name, number): (&str, i32)| ContainerPort {
        name: Some(name.to_owned()),
        container_port: number,
        protocol: Some("TCP".to_owned()),
        ..Default::default()
    };
    let config = format!("{SETTINGS_FOLDER}/{START_SETTINGS_KEY}");
    Container {
        name: CONTAINER.to_owned(),
        image: Some(router.spec.image.clone().unwrap_or_else(|| flags.router_image.clone())),
        image_pull_policy: router.spec.image_pull_policy.map(|policy| policy.as_str().to_owned()),
        command: Some(["kv-router", "serve", "--config", &config].map(str::to_owned).to_vec()),
        env: Some(vec![variable("KVROUTER_LOG_JSON", "true")]),
        ports: Some(vec![port(HTTP), port(METRICS)]),
        // Half a core, and room for the index of a large fleet.
        resources: Some(router.spec.resources.clone().unwrap_or_else(|| resources("500m", "512Mi", "2Gi"))),
        security_context: Some(security_context()),
        startup_probe: Some(probe("/readyz", HTTP.0, 1, 2, START_SECONDS)),
        readiness_probe: Some(probe("/readyz", HTTP.0, 5, 2, 3)),
        liveness_probe: Some(probe("/livez", HTTP.0, 10, 5, 6)),
        // Why a router refused its settings is in the pod's status then.
        termination_message_policy: Some("FallbackToLogsOnError".to_owned()),
        volume_mounts: Some(mounts),
        ..Default::default()
    }
}

/// Over nodes and zones, where possible. Pods of an older template do not count,
/// so that a rollout does not leave the new ones in one place.
fn spread(router: &ValidRouter) -> Vec<TopologySpreadConstraint> {
    let over = |key: &str| TopologySpreadConstraint {
        topology_key: key.to_owned(),
        max_skew: 1,
        when_unsatisfiable: "ScheduleAnyway".to_owned(),
        label_selector: Some(label_selector(router)),
        match_label_keys: Some(vec!["pod-template-hash".to_owned()]),
        ..Default::default()
    };
    vec![over("kubernetes.io/hostname"), over("topology.kubernetes.io/zone")]
}

fn mounts(router: &ValidRouter, start_settings_name: &str) -> Mounts {
    let settings = ConfigMapVolumeSource { name: start_settings_name.to_owned(), ..Default::default() };
    let volume = |name: &str| Volume { name: name.to_owned(), ..Default::default() };
    let settings = Volume { config_map: Some(settings), ..volume("settings") };
    let scratch = Volume { empty_dir: Some(EmptyDirVolumeSource::default()), ..volume("tmp") };
    let credentials = router.broker.as_ref().and_then(|broker| broker.credentials.as_ref());
    let mut mounts = Mounts::default();
    mounts.add(settings, SETTINGS_FOLDER, Access::Read);
    mounts.add(scratch, "/tmp", Access::Write);
    mounts.add_secret("nats", credentials, CREDENTIALS_FOLDER);
    mounts.add_secret("identity", router.pool.identity_seed_secret_ref.as_ref(), IDENTITY_FOLDER);
    let tenancy = router.spec.tenancy.as_ref().map(|tenancy| &tenancy.salt_secret_ref);
    mounts.add_secret(TENANCY_VOLUME, tenancy, TENANCY_FOLDER);
    if let Some(tokenizer) = router.pool.model.tokenizer.as_ref().and_then(tokenizer) {
        mounts.add(tokenizer, TOKENIZER_FOLDER, Access::Read);
    }
    mounts
}

/// The tokenizer's volume; none for a folder of the router's own image.
fn tokenizer(source: &TokenizerSource) -> Option<Volume> {
    let TokenizerSource { image, persistent_volume_claim, config_map, path: _ } = source;
    let volume = Volume {
        name: "tokenizer".to_owned(),
        image: image.as_ref().map(|image| ImageVolumeSource {
            reference: Some(image.reference.clone()),
            ..Default::default()
        }),
        persistent_volume_claim: persistent_volume_claim.as_ref().map(|claim| {
            PersistentVolumeClaimVolumeSource { claim_name: claim.claim_name.clone(), read_only: Some(true) }
        }),
        config_map: config_map
            .as_ref()
            .map(|config_map| ConfigMapVolumeSource { name: config_map.name.clone(), ..Default::default() }),
        ..Default::default()
    };
    let is_path =
        volume.image.is_none() && volume.persistent_volume_claim.is_none() && volume.config_map.is_none();
    (!is_path).then_some(volume)
}
