//! What the named workloads should have. Pure, and cannot fail.
//!
//! Only what is missing is asked for: a value that the user set is never
//! overwritten, and a bridge that is there is replaced only when the spec has
//! changed, never because the operator has.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, Volume};
use kvrouter_crds::pool::WorkloadRef;
use serde_json::Value;

use super::validate::ValidPool;
use crate::config::ChildFlags;

/// Name of the injected container.
pub const BRIDGE: &str = "kvrouter-bridge";

/// What one workload should have and lacks.
#[derive(Clone, Debug, PartialEq)]
pub struct WantedPatch {
    /// The workload.
    pub reference: WorkloadRef,
    /// Its uid.
    pub uid: String,
    /// Its version: a patch of any other one must fail.
    pub resource_version: String,
    /// Name of the engine's container.
    pub container: String,
    /// PYTHONHASHSEED, where the engine's container lacks it.
    pub seed: Option<String>,
    /// The bridge, where it lacks or is of older settings.
    pub bridge: Option<Bridge>,
    /// Annotations of the pod template that say what of it is ours.
    pub annotations: BTreeMap<String, String>,
    /// Digest of all that the spec asks for of this workload, whether it is
    /// there or not. Another digest is another spec: what was reverted may be
    /// tried again. An operator's release does not enter it.
    pub digest: String,
    /// A bridge of ours is there, with the right settings and another image:
    /// said, not changed.
    pub outdated_bridge: Option<OutdatedBridge>,
}

/// The bridge and what it mounts.
#[derive(Clone, Debug, PartialEq)]
pub struct Bridge {
    /// The native sidecar.
    pub container: Container,
    /// Volumes that it mounts.
    pub volumes: Vec<Volume>,
}

/// A bridge of another release.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutdatedBridge {
    /// Image that it runs.
    pub image: String,
    /// A sentence with the command that updates it.
    pub message: String,
}

impl WantedPatch {
    /// Whether nothing is missing.
    pub fn is_empty(&self) -> bool {
        self.seed.is_none() && self.bridge.is_none()
    }

    /// The body of a strategic merge patch, guarded by the resource version.
    pub fn strategic_merge(&self) -> Value {
        Value::Null
    }
}

/// What every target of the pool should have, in the order of the spec.
pub fn build(_pool: &ValidPool, _flags: &ChildFlags) -> Vec<WantedPatch> {
    Vec::new()
}
