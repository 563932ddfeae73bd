//! Parts of pods that routers and bridges have in common. Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    Capabilities, EnvVar, HTTPGetAction, KeyToPath, Probe, ResourceRequirements, SeccompProfile,
    SecretVolumeSource, SecurityContext, Volume, VolumeMount,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kvrouter_crds::pool::SecretKeyRef;

/// User and group of our images: neither root nor anybody else.
pub const USER: i64 = 65532;
/// Folder of the broker's credentials.
pub const CREDENTIALS_FOLDER: &str = "/etc/kvrouter-nats";
/// Folder of the identity seed.
pub const IDENTITY_FOLDER: &str = "/etc/kvrouter-identity";
/// Folder of the secret that keys tenants' salts.
pub const TENANCY_FOLDER: &str = "/etc/kvrouter-tenancy";

/// Volumes of a pod, and where its container has them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Mounts {
    /// The volumes.
    pub volumes: Vec<Volume>,
    /// Their mounts, in the same order.
    pub mounts: Vec<VolumeMount>,
}

/// Whether a container may write into what it mounts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// It may not.
    Read,
    /// It may.
    Write,
}

impl Mounts {
    /// Adds a volume at `folder`.
    pub fn add(&mut self, volume: Volume, folder: &str, access: Access) {
        self.mounts.push(VolumeMount {
            name: volume.name.clone(),
            mount_path: folder.to_owned(),
            read_only: (access == Access::Read).then_some(true),
            ..Default::default()
        });
        self.volumes.push(volume);
    }

    /// Adds one key of a Secret, as a file of the key's name in `folder`; nothing
    /// where there is no Secret.
    pub fn add_secret(&mut self, name: &str, secret: Option<&SecretKeyRef>, folder: &str) {
        let Some(secret) = secret else { return };
        let item = KeyToPath { key: secret.key.clone(), path: secret.key.clone(), mode: None };
        let source = SecretVolumeSource {
            secret_name: Some(secret.name.clone()),
            items: Some(vec![item]),
            ..Default::default()
        };
        let volume = Volume { name: name.to_owned(), secret: Some(source), ..Default::default() };
        self.add(volume, folder, Access::Read);
    }
}

/// A variable with a fixed value.
pub fn variable(name: &str, value: &str) -> EnvVar {
    EnvVar { name: name.to_owned(), value: Some(value.to_owned()), ..Default::default() }
}

/// A container that may do nothing but run, as the restricted profile of pod
/// security asks for.
pub fn security_context() -> SecurityContext {
    SecurityContext {
        allow_privilege_escalation: Some(false),
        capabilities: Some(Capabilities { drop: Some(vec!["ALL".to_owned()]), ..Default::default() }),
        read_only_root_filesystem: Some(true),
        run_as_non_root: Some(true),
        run_as_user: Some(USER),
        run_as_group: Some(USER),
        seccomp_profile: Some(seccomp_profile()),
        ..Default::default()
    }
}

/// The system calls that the runtime allows everybody.
pub fn seccomp_profile() -> SeccompProfile {
    SeccompProfile { type_: "RuntimeDefault".to_owned(), ..Default::default() }
}

/// Cores and memory that are asked for, and the most memory. No limit of cores:
/// throttling is latency.
pub fn resources(cpu: &str, memory: &str, most_memory: &str) -> ResourceRequirements {
    let quantities = |pairs: &[(&str, &str)]| {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), quantity(value))).collect::<BTreeMap<_, _>>()
    };
    ResourceRequirements {
        requests: Some(quantities(&[("cpu", cpu), ("memory", memory)])),
        limits: Some(quantities(&[("memory", most_memory)])),
        ..Default::default()
    }
}

/// An amount as manifests spell it.
pub fn quantity(text: &str) -> Quantity {
    Quantity(text.to_owned())
}

/// A GET of `path` at the named port; any other answer than 2xx or 3xx fails it.
pub fn probe(path: &str, port: &str, period_seconds: i32, timeout_seconds: i32, failures: i32) -> Probe {
    let get = HTTPGetAction {
        path: Some(path.to_owned()),
        port: IntOrString::String(port.to_owned()),
        scheme: Some("HTTP".to_owned()),
        ..Default::default()
    };
    Probe {
        http_get: Some(get),
        period_seconds: Some(period_seconds),
        timeout_seconds: Some(timeout_seconds),
        failure_threshold: Some(failures),
        success_threshold: Some(1),
        ..Default::default()
    }
}
