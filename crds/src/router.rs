//! `KvRouter`: the routers in front of one pool.
//!
//! What may change without a restart (policy, weights, modes) and what rolls
//! the routers (the rest) is decided by the operator; see `config`.

#![allow(unreachable_pub, reason = "the schema derive copies these structs inside a function")]

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{LocalObjectReference, ResourceRequirements, Toleration};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::config::{
    DEFAULT_IMAGE_WEIGHT, DEFAULT_TENANT_HEADER, DecodeInputDemand, ForwardTokenIds, Freshness, LoadWeights,
    MAX_WEIGHT, OverlapWeights, Overload, Policy, PrefillGuardRelease, SessionAffinity, Switch, TierCredits,
    WithoutHeader,
};
use crate::pool::SecretKeyRef;

/// The routers in front of one pool.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "kvrouter.dev",
    version = "v1alpha1",
    kind = "KvRouter",
    plural = "kvrouters",
    singular = "kvrouter",
    shortname = "kvr",
    category = "inference",
    namespaced,
    derive = "PartialEq",
    status = "KvRouterStatus",
    doc = "The routers in front of one InferencePool.",
    scale(
        spec_replicas_path = ".spec.replicas",
        status_replicas_path = ".status.replicas",
        label_selector_path = ".status.selector"
    ),
    selectable = ".spec.poolRef.name",
    validation = Rule::new("self.metadata.name.size() <= 50 && self.metadata.name.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$')")
        .message("metadata.name must be a DNS label of at most 50 characters: names of children are derived from it"),
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].status"),
    printcolumn(name = "Reason", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].reason"),
    printcolumn(name = "Workers", type_ = "string", json_path = ".status.workers"),
    printcolumn(name = "Policy", type_ = "string", json_path = ".spec.policy"),
    printcolumn(name = "Degraded", type_ = "string", json_path = ".status.conditions[?(@.type==\"Degraded\")].status"),
    printcolumn(name = "Pool", type_ = "string", json_path = ".spec.poolRef.name", priority = 1),
    printcolumn(name = "Replicas", type_ = "integer", json_path = ".status.replicas", priority = 1),
    printcolumn(name = "URL", type_ = "string", json_path = ".status.url", priority = 1),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("!has(self.loadWeights) || self.policy == 'CachePlusLoad'")
    .message("loadWeights needs policy: CachePlusLoad: remove them or change the policy").field_path(".loadWeights"))]
#[x_kube(validation = Rule::new("!has(self.shadowPolicies) || !self.shadowPolicies.exists(p, p == self.policy)")
    .message("a shadow policy is the real one: shadows are evaluated beside it").field_path(".shadowPolicies"))]
#[x_kube(validation = Rule::new("!has(self.overload.coldReserve) || self.overload.coldReserve == 0.0 || has(self.overload.maxQueuedTokens)")
    .message("overload.coldReserve is a share of overload.maxQueuedTokens: set both or neither").field_path(".overload"))]
#[x_kube(validation = Rule::new("self.tierCredits.disk <= self.tierCredits.host && self.tierCredits.host <= self.tierCredits.device")
    .message("a slower tier cannot be worth more than a faster one: disk at most host, host at most device").field_path(".tierCredits"))]
#[x_kube(validation = Rule::new("self.decodeInputDemand.mode == 'Disabled' || self.policy in ['CachePlusLoad', 'KvAware']")
    .message("decodeInputDemand needs policy: CachePlusLoad or KvAware: set its mode: Disabled or change the policy").field_path(".decodeInputDemand"))]
pub struct KvRouterSpec {
    /// Router pods.
    #[serde(default = "default_replicas")]
    #[schemars(range(min = 0, max = 1000))]
    pub replicas: i32,
    /// The pool, in the same namespace.
    #[x_kube(validation = Rule::new("self == oldSelf").message("poolRef cannot change: make another KvRouter for the other pool"))]
    pub pool_ref: PoolRef,
    /// Which rule chooses.
    #[serde(default)]
    pub policy: Policy,
    /// Weight of what is not cached, per role.
    #[serde(default)]
    pub overlap_weights: OverlapWeights,
    /// Weights of load; only with policy CachePlusLoad.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load_weights: Option<LoadWeights>,
    /// Whether decode picks follow the input that targets hold.
    #[serde(default)]
    pub decode_input_demand: DecodeInputDemand,
    /// How long a prefill worker is charged for a request that another decodes.
    #[serde(default)]
    pub pd_prefill_guard_release: PrefillGuardRelease,
    /// Which picks follow their session.
    #[serde(default)]
    pub session_affinity: SessionAffinity,
    /// How long trust in a view lasts and what comes after it.
    #[serde(default)]
    pub freshness: Freshness,
    /// What a target may be given at most.
    #[serde(default)]
    pub overload: Overload,
    /// Whether blocks of prompts in flight count as hits to come.
    #[serde(default)]
    pub in_flight_credit: Switch,
    /// What a picture costs that the target has not seen, in blocks of prefill.
    #[serde(default = "default_image_weight")]
    #[schemars(range(min = 0.0, max = MAX_WEIGHT))]
    pub image_weight: f64,
    /// What a held block is worth, by the tier that it is in.
    #[serde(default)]
    pub tier_credits: TierCredits,
    /// Policies that are evaluated beside the real one, for comparison.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 5))]
    pub shadow_policies: Vec<Policy>,
    /// Whether workers get the token ids of their prompts.
    #[serde(default)]
    pub forward_token_ids: ForwardTokenIds,
    /// Whose prompts are kept apart. Absent: nobody's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenancy: Option<TenancySpec>,
    /// The router's image. Absent: the operator's release.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 512))]
    pub image: Option<String>,
    /// When the image is pulled. Absent: as Kubernetes chooses by the tag.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_pull_policy: Option<ImagePullPolicy>,
    /// Secrets with registry credentials, in the same namespace.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8))]
    pub image_pull_secrets: Vec<LocalObjectReference>,
    /// Requests and limits of a router. Absent: the operator's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resources: Option<ResourceRequirements>,
    /// Where routers run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scheduling: Option<Scheduling>,
    /// How long open answers may go on when a router stops, in seconds; those that take longer are cut.
    #[serde(default = "default_drain_timeout_seconds")]
    #[schemars(range(min = 0, max = 86_400))]
    pub drain_timeout_seconds: u64,
    /// The Service in front of the routers.
    #[serde(default)]
    pub service: ServiceSpec,
}

/// Keeps the cached prompts of tenants apart: each has a cache salt of its own,
/// at the engines too.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct TenancySpec {
    /// The header that names a request's tenant.
    #[serde(default = "default_tenant_header")]
    #[x_kube(validation = Rule::new("self.matches('^[A-Za-z0-9_-]+$')").message("must be letters, digits, - and _"))]
    #[x_kube(validation = Rule::new("!(self.lowerAscii() in ['connection', 'content-length', 'expect', 'host', 'keep-alive', 'proxy-authenticate', 'proxy-authorization', 'proxy-connection', 'te', 'trailer', 'transfer-encoding', 'upgrade', 'x-data-parallel-rank', 'x-request-id'])")
        .message("is about one connection or written by the router, so it cannot name a tenant: choose another header"))]
    #[schemars(length(min = 1, max = 64))]
    pub header: String,
    /// Secret that keys the salts; routers mount it. At least 16 bytes.
    pub salt_secret_ref: SecretKeyRef,
    /// What becomes of a request without the header.
    #[serde(default)]
    pub without_header: WithoutHeader,
}

/// A pool in the same namespace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PoolRef {
    /// The pool's name.
    #[schemars(length(min = 1, max = 50))]
    pub name: String,
}

/// When an image is pulled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ImagePullPolicy {
    /// At every start.
    Always,
    /// Where the node lacks it.
    IfNotPresent,
    /// At no time.
    Never,
}

impl ImagePullPolicy {
    /// As manifests spell it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Always => "Always",
            Self::IfNotPresent => "IfNotPresent",
            Self::Never => "Never",
        }
    }
}

/// Where routers run. Everything is handed to the pods as it is.
///
/// What the schema leaves open is a bare value here: with a type, one object
/// that does not fit would end the watch of all objects.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Scheduling {
    /// Labels of nodes.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 64))]
    pub node_selector: BTreeMap<String, String>,
    /// Taints that are tolerated.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    pub tolerations: Vec<Toleration>,
    /// Affinities, as in a pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "opaque")]
    pub affinity: Option<Value>,
    /// Spread. Absent: over nodes and zones, where possible.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "opaque_list")]
    pub topology_spread_constraints: Option<Vec<Value>>,
    /// Name of a PriorityClass.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub priority_class_name: Option<String>,
}

/// The Service in front of the routers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct ServiceSpec {
    /// Its type.
    #[serde(rename = "type")]
    pub type_: ServiceType,
    /// The port that clients use.
    #[schemars(range(min = 1, max = 65535))]
    pub port: u16,
    /// Annotations, for load balancers.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 32))]
    pub annotations: BTreeMap<String, String>,
}

impl Default for ServiceSpec {
    fn default() -> Self {
        Self { type_: ServiceType::default(), port: 8000, annotations: BTreeMap::new() }
    }
}

/// A type of Service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
pub enum ServiceType {
    /// Inside the cluster.
    #[default]
    ClusterIP,
    /// On a port of every node.
    NodePort,
    /// Through the cloud's load balancer.
    LoadBalancer,
}

impl ServiceType {
    /// As manifests spell it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::ClusterIP => "ClusterIP",
            Self::NodePort => "NodePort",
            Self::LoadBalancer => "LoadBalancer",
        }
    }
}

/// What the operator last saw. Nothing in it moves with traffic.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct KvRouterStatus {
    /// Generation of the spec that the conditions speak of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Router pods; the scale subresource reads it.
    #[serde(default)]
    pub replicas: i32,
    /// Selector of the router pods; the scale subresource reads it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selector: Option<String>,
    /// Workers that may be picked and all that are known, as `kubectl get` shows them: `3/4`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workers: Option<String>,
    /// Where clients reach the routers, inside the cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    /// Digests of the start and the live settings that the spec asks for: `start/live`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config_hash: Option<String>,
    /// Accepted, ResolvedRefs, Progressing, RouterAvailable, ConfigApplied, TokenizerReady, RenderParity, IndexWarm, EventsConnected, Degraded, Ready.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

/// An object whose fields Kubernetes itself checks when the pods are made: its
/// full schema would be most of the definition.
fn opaque(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({"type": "object", "x-kubernetes-preserve-unknown-fields": true, "description": "As in a pod."})
}

fn opaque_list(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({
        "type": "array", "maxItems": 16, "description": "As in a pod.",
        "items": {"type": "object", "x-kubernetes-preserve-unknown-fields": true},
    })
}

fn default_tenant_header() -> String {
    DEFAULT_TENANT_HEADER.to_owned()
}

const fn default_replicas() -> i32 {
    2
}

/// As long as a router's file has it.
const fn default_drain_timeout_seconds() -> u64 {
    120
}

const fn default_image_weight() -> f64 {
    DEFAULT_IMAGE_WEIGHT
}
