//! What is seen around one KvRouter. Reads stores only.

use std::sync::Arc;

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::jiff::Timestamp;
use kvrouter_crds::InferencePool;

use crate::facts::RouterPod;

/// Everything that the pure stages of a router may know besides its spec.
#[derive(Clone, Debug)]
pub struct Observed {
    /// When.
    pub now: Timestamp,
    /// The pool that it names; none where there is no such object.
    pub pool: Option<Arc<InferencePool>>,
    /// All other pools of the namespace, by name.
    pub other_pools: Vec<Arc<InferencePool>>,
    /// Its Deployment.
    pub deployment: Option<Arc<Deployment>>,
    /// Its pods, by name; also those that are ending.
    pub pods: Vec<RouterPod>,
    /// Children's names that are taken by objects which this router does not
    /// control, as `Kind/name`, sorted.
    pub taken: Vec<String>,
}
