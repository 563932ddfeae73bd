//! `InferencePool`: the engines that serve one model, and what must be equal
//! among them.
//!
//! Shape, bounds, defaults and contradictions are in the schema, so that the
//! API server refuses them. What needs other objects (is there such a
//! workload, do two pools share pods) is a condition. The plural is
//! `kvinferencepools`: the plain one belongs to the Gateway API Inference
//! Extension, whose pools can be referred to.

#![allow(unreachable_pub, reason = "the schema derive copies these structs inside a function")]

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::config::{
    DEFAULT_SUBJECT_PREFIX, Engine, EventTransport, MAX_BLOCK_SIZE, MAX_DP_SIZE, MAX_TARGET_PORTS,
    PageSizePolicy, Protocol, RoleName,
};

/// The engines that serve one model.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "kvrouter.dev",
    version = "v1alpha1",
    kind = "InferencePool",
    plural = "kvinferencepools",
    singular = "kvinferencepool",
    shortname = "kvpool",
    category = "inference",
    namespaced,
    derive = "PartialEq",
    status = "InferencePoolStatus",
    doc = "The engines that serve one model, and what must be equal among them.",
    validation = Rule::new("self.metadata.name.size() <= 50 && self.metadata.name.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$')")
        .message("metadata.name must be a DNS label of at most 50 characters: names of children are derived from it"),
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].status"),
    printcolumn(name = "Reason", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].reason"),
    printcolumn(name = "Pods", type_ = "string", json_path = ".status.endpoints.summary"),
    printcolumn(name = "Parity", type_ = "string", json_path = ".status.conditions[?(@.type==\"PageSizeParity\")].status"),
    printcolumn(name = "Events", type_ = "string", json_path = ".status.conditions[?(@.type==\"EventsConnected\")].status"),
    printcolumn(name = "Model", type_ = "string", json_path = ".spec.model.name", priority = 1),
    printcolumn(name = "Block", type_ = "integer", json_path = ".spec.blockSize", priority = 1),
    printcolumn(name = "Seed", type_ = "string", json_path = ".status.conditions[?(@.type==\"HashSeedStable\")].reason", priority = 1),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.selector) || has(self.gatewayPoolRef)")
    .message("selector and targetPorts are missing: name both, or gatewayPoolRef instead of them").field_path(".selector"))]
#[x_kube(validation = Rule::new("has(self.targetPorts) || !has(self.selector)")
    .message("targetPorts are missing: name the ports that engines serve requests on").field_path(".targetPorts"))]
#[x_kube(validation = Rule::new("!has(self.gatewayPoolRef) || (!has(self.selector) && !has(self.targetPorts))")
    .message("gatewayPoolRef stands instead of selector and targetPorts: remove it, or both of them").field_path(".gatewayPoolRef"))]
#[x_kube(validation = Rule::new("!has(self.workloads) || self.workloads.all(w, self.workloads.exists_one(o, o.kind == w.kind && o.name == w.name))")
    .message("a workload is named twice: name each kind and name once").field_path(".workloads"))]
#[x_kube(validation = Rule::new("self.kvEvents.bridge != 'Inject' || (has(self.workloads) && self.workloads.size() > 0)")
    .message("bridge: Inject needs spec.workloads: name the Deployments or StatefulSets that may get the bridge, or use bridge: External").field_path(".kvEvents.bridge"))]
#[x_kube(validation = Rule::new("self.kvEvents.transport == 'None' || !has(self.targetPorts) || !self.targetPorts.exists(p, (self.kvEvents.port <= p.number && p.number < self.kvEvents.port + self.targetPorts.size() * self.dpSize) || (self.kvEvents.replayPort <= p.number && p.number < self.kvEvents.replayPort + self.targetPorts.size() * self.dpSize))")
    .message("a target port is also a port of kvEvents: engines serve requests and events on different ports, and every rank has its own").field_path(".kvEvents"))]
#[x_kube(validation = Rule::new("self.kvEvents.transport == 'None' || !has(self.targetPorts) || self.kvEvents.port == self.kvEvents.replayPort || self.kvEvents.port + self.targetPorts.size() * self.dpSize <= self.kvEvents.replayPort || self.kvEvents.replayPort + self.targetPorts.size() * self.dpSize <= self.kvEvents.port")
    .message("port and replayPort are too close: each of targetPorts times dpSize ranks has one of both; move one of them").field_path(".kvEvents"))]
#[x_kube(validation = Rule::new("self.kvEvents.transport == 'None' || !has(self.targetPorts) || (self.kvEvents.port + self.targetPorts.size() * self.dpSize <= 65536 && self.kvEvents.replayPort + self.targetPorts.size() * self.dpSize <= 65536)")
    .message("the last rank's port is beyond 65535: each of targetPorts times dpSize ranks has a port and a replayPort; lower one of them").field_path(".kvEvents"))]
#[x_kube(validation = Rule::new("!has(self.roles) || !has(self.targetPorts) || self.roles.all(r, !has(r.bootstrapPort) || r.bootstrapPort + self.targetPorts.size() <= 65536)")
    .message("the last target port's bootstrapPort is beyond 65535: each of targetPorts has its own, counted on; lower it").field_path(".roles"))]
#[x_kube(validation = Rule::new("!has(self.roles) || self.roles.all(r, !has(r.protocol) || self.engine == 'Auto' || (r.protocol == 'SGLang') == (self.engine == 'SGLang'))")
    .message("protocol: SGLang is for engine: SGLang and NIXL for the others: correct one of them, or use engine: Auto").field_path(".roles"))]
pub struct InferencePoolSpec {
    /// The model that all engines of the pool serve.
    pub model: ModelSpec,
    /// Labels that all pods of the pool carry. Needed, with targetPorts, unless gatewayPoolRef is there.
    #[serde(default, skip_serializing_if = "LabelSelector::is_empty")]
    pub selector: LabelSelector,
    /// Ports that engines serve requests on. Every port of a pod is a worker.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(validation = Rule::new("self.all(p, self.exists_one(o, o.number == p.number))").message("port numbers must be unique"))]
    #[schemars(length(min = 1, max = MAX_TARGET_PORTS))]
    pub target_ports: Vec<TargetPort>,
    /// Instead of selector and targetPorts: a pool of the Gateway API Inference Extension that has both. It is only read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway_pool_ref: Option<GatewayPoolRef>,
    /// Data-parallel ranks behind each target port. Routers pick ranks, and bridges follow each of them.
    #[serde(default = "default_dp_size")]
    #[schemars(range(min = 1, max = MAX_DP_SIZE))]
    pub dp_size: u32,
    /// What the engines are; Auto asks each one.
    #[serde(default)]
    pub engine: Engine,
    /// Who prefills and who decodes. Absent: every pod does both.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(validation = Rule::new("self.all(r, self.exists_one(o, o.name == r.name))").message("a role may be named once"))]
    #[x_kube(validation = Rule::new("self.exists(r, r.name == 'Prefill') == self.exists(r, r.name == 'Decode')")
        .message("Prefill and Decode serve requests together: name both roles or neither"))]
    #[x_kube(validation = Rule::new("self.all(r, !has(r.protocol) || self.all(o, !has(o.protocol) || o.protocol == r.protocol))")
        .message("Prefill and Decode hand requests over to each other: give both the same protocol"))]
    #[schemars(length(max = 3))]
    pub roles: Vec<RoleSpec>,
    /// Secret that keys all block hashes of the pool; routers and bridges mount it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity_seed_secret_ref: Option<SecretKeyRef>,
    /// Tokens per block. The page of every engine must divide it.
    #[serde(default = "default_block_size")]
    #[schemars(range(min = 1, max = MAX_BLOCK_SIZE))]
    pub block_size: u32,
    /// What happens to a pod whose page size is not the others'.
    #[serde(default)]
    pub page_size_policy: PageSizePolicy,
    /// Workloads that run the engines. Naming one is the consent to set its hash seed and to inject the bridge.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub workloads: Vec<WorkloadRef>,
    /// PYTHONHASHSEED on the named workloads.
    #[serde(default)]
    pub hash_seed: HashSeed,
    /// How cache events reach the routers.
    #[serde(default)]
    pub kv_events: KvEventsSpec,
}

/// The model that a pool serves.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ModelSpec {
    /// The name that requests use.
    #[schemars(length(min = 1, max = 256))]
    pub name: String,
    /// Revision, where two of them are served under one name.
    #[serde(default)]
    #[schemars(length(max = 128))]
    pub revision: String,
    /// Where the tokenizer is. Absent: requests are routed by load.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<TokenizerSource>,
}

/// Where the tokenizer's folder comes from: exactly one source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("[has(self.image), has(self.persistentVolumeClaim), has(self.configMap), has(self.path)].filter(x, x).size() == 1")
    .message("name exactly one of image, persistentVolumeClaim, configMap and path"))]
pub struct TokenizerSource {
    /// An image whose files are mounted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<ImageSource>,
    /// A claim in the pool's namespace, mounted read-only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub persistent_volume_claim: Option<ClaimSource>,
    /// A ConfigMap in the pool's namespace whose keys are the files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config_map: Option<ConfigMapSource>,
    /// A folder of the router's own image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("self.startsWith('/')").message("must be an absolute path of the router's image: begin it with /"))]
    #[schemars(length(max = 512))]
    pub path: Option<String>,
}

/// Files of an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ImageSource {
    /// The image.
    #[schemars(length(min = 1, max = 512))]
    pub reference: String,
    /// Folder inside the image; empty for its root.
    #[serde(default)]
    #[schemars(length(max = 512))]
    pub path: String,
}

/// Files of a persistent volume claim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ClaimSource {
    /// The claim's name.
    #[schemars(length(min = 1, max = 253))]
    pub claim_name: String,
    /// Folder inside the volume; empty for its root.
    #[serde(default)]
    #[schemars(length(max = 512))]
    pub path: String,
}

/// Files of a ConfigMap.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ConfigMapSource {
    /// The ConfigMap's name.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
}

/// An InferencePool of inference.networking.k8s.io/v1 in the same namespace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GatewayPoolRef {
    /// Its name.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
}

/// Labels, all of which a pod must carry.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct LabelSelector {
    /// Names and values; at least one, at most 64.
    #[x_kube(validation = Rule::new("self.all(k, k.size() <= 317 && self[k].size() <= 63)").message("label names have at most 317 and values at most 63 characters"))]
    #[schemars(extend("minProperties" = 1, "maxProperties" = 64))]
    #[schemars(schema_with = "label_map")]
    pub match_labels: BTreeMap<String, String>,
}

impl LabelSelector {
    /// Whether it names no label, which matches nothing.
    pub fn is_empty(&self) -> bool {
        self.match_labels.is_empty()
    }
}

/// A port that engines serve requests on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TargetPort {
    /// The number.
    #[schemars(range(min = 1, max = 65535))]
    pub number: u16,
}

/// Which pods of the pool are of a role.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("(self.name != 'Mixed') == has(self.protocol)")
    .message("Prefill and Decode need a protocol, SGLang or NIXL, and Mixed has none: correct protocol or name"))]
#[x_kube(validation = Rule::new("!has(self.bootstrapPort) || (self.name == 'Prefill' && has(self.protocol) && self.protocol == 'SGLang')")
    .message("bootstrapPort is of Prefill with protocol: SGLang alone: remove it").field_path(".bootstrapPort"))]
pub struct RoleSpec {
    /// The role.
    pub name: RoleName,
    /// Labels that its pods carry beside the pool's.
    pub selector: LabelSelector,
    /// How Prefill and Decode hand requests over: the same for both, and for them alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protocol: Option<Protocol>,
    /// Port of the bootstrap server of Prefill with SGLang. That of the n-th target port, from 0, is n higher. Absent: 8998.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65535))]
    pub bootstrap_port: Option<u16>,
}

/// One key of a Secret in the same namespace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SecretKeyRef {
    /// The Secret's name.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
    /// The key.
    #[schemars(length(min = 1, max = 253))]
    pub key: String,
}

/// A workload that runs engines.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct WorkloadRef {
    /// Its kind.
    pub kind: WorkloadKind,
    /// Its name.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
    /// The engine's container. Absent: the one that declares the first target port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 63))]
    pub container: Option<String>,
}

/// A kind of workload that may be patched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub enum WorkloadKind {
    /// apps/v1 Deployment.
    Deployment,
    /// apps/v1 StatefulSet.
    StatefulSet,
}

impl WorkloadKind {
    /// As manifests spell it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Deployment => "Deployment",
            Self::StatefulSet => "StatefulSet",
        }
    }
}

/// PYTHONHASHSEED on the named workloads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct HashSeed {
    /// Whether it is set or only looked at.
    pub policy: HashSeedPolicy,
    /// The value; any fixed number makes hashes of equal processes equal.
    #[schemars(schema_with = "seed_value")]
    pub value: u32,
}

/// Whether the seed is set or only looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
pub enum HashSeedPolicy {
    /// Set it on the named workloads, one rollout at a time.
    #[default]
    Enforce,
    /// Only report.
    Observe,
}

/// How cache events reach the routers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.port != self.replayPort").message("port and replayPort must differ: one publishes, the other answers"))]
#[x_kube(validation = Rule::new("self.bridge != 'Inject' || self.transport == 'NATS'")
    .message("bridge: Inject needs transport: NATS: with ZMQ routers connect to the engines themselves").field_path(".bridge"))]
#[x_kube(validation = Rule::new("!has(self.nats) || self.transport == 'NATS'")
    .message("nats needs transport: NATS: remove it or change the transport").field_path(".nats"))]
pub struct KvEventsSpec {
    /// By which way.
    #[serde(default)]
    pub transport: EventTransport,
    /// The engines' publisher port. Rank r of the n-th target port, both from 0, uses port + n * dpSize + r.
    #[serde(default = "default_event_port")]
    #[schemars(range(min = 1, max = 65535))]
    pub port: u16,
    /// The engines' replay port, counted on in the same way.
    #[serde(default = "default_replay_port")]
    #[schemars(range(min = 1, max = 65535))]
    pub replay_port: u16,
    /// Who runs the bridge from the engines' sockets to NATS.
    #[serde(default)]
    pub bridge: Bridge,
    /// The broker. Absent: the operator's own, where it was installed with one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nats: Option<NatsSpec>,
}

impl Default for KvEventsSpec {
    fn default() -> Self {
        Self {
            transport: EventTransport::default(),
            port: default_event_port(),
            replay_port: default_replay_port(),
            bridge: Bridge::default(),
            nats: None,
        }
    }
}

/// Who runs the bridge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
pub enum Bridge {
    /// It is in the pods already.
    #[default]
    External,
    /// The operator adds it to the named workloads as a native sidecar.
    Inject,
}

/// A NATS broker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct NatsSpec {
    /// `nats://host:port` or `tls://host:port`.
    #[x_kube(validation = Rule::new(r"self.matches(r'^(nats|tls)://([^\s/@:\[\]]+|\[[0-9a-fA-F:.]+\])(:[0-9]{1,5})?$')")
        .message("must be nats://host:port or tls://host:port: what logs in belongs into credentialsSecretRef"))]
    #[schemars(length(max = 512))]
    pub url: String,
    /// Key of a Secret with the credentials file. Absent: no authentication.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub credentials_secret_ref: Option<SecretKeyRef>,
    /// First token of every subject.
    #[serde(default = "default_subject_prefix")]
    #[x_kube(validation = Rule::new("self.matches('^[A-Za-z0-9_-]+$')").message("must be letters, digits, - and _: it is one token of a subject"))]
    #[schemars(length(max = 64))]
    pub subject_prefix: String,
}

/// What the operator last saw. Nothing in it moves with traffic.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct InferencePoolStatus {
    /// Generation of the spec that the conditions speak of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Pods of the pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoints: Option<Endpoints>,
    /// Page sizes seen, by role and engine.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    pub page_sizes: Vec<PageSizeSeen>,
    /// What was done to the named workloads.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub workloads: Vec<WorkloadStatus>,
    /// Accepted, ResolvedRefs, PageSizeParity, HashSeedStable, EventsConnected, Degraded, Ready.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

/// Pods of a pool.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Endpoints {
    /// Ready and all, as `kubectl get` shows them: `3/4`.
    pub summary: String,
    /// The same by role; pods of no role or of two are in none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 3))]
    pub roles: Vec<RoleEndpoints>,
}

/// Pods of one role.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RoleEndpoints {
    /// The role.
    pub role: RoleName,
    /// Pods that are ready.
    pub ready: u32,
    /// All of them.
    pub total: u32,
}

/// One page size and who has it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PageSizeSeen {
    /// Their role.
    pub role: RoleName,
    /// Their engine, in lower case.
    pub engine: String,
    /// Tokens per page; absent while unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub page_size: Option<u32>,
    /// Number of pods.
    pub pods: u32,
    /// Where it was seen: `events`, `endpoint`, `arguments` or `none`.
    pub evidence: String,
}

/// What was done to one named workload.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct WorkloadStatus {
    /// Its kind.
    pub kind: WorkloadKind,
    /// Its name.
    pub name: String,
    /// Digest of the changes that were applied to it; one that is reverted is not applied again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub applied: Option<String>,
    /// A stable word: Patched, AlreadyRight, RollingOut, Paused, PatchReverted, ...
    pub state: String,
    /// A sentence with the next step, where there is one.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
}

fn label_map(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({
        "type": "object",
        "additionalProperties": {"type": "string", "maxLength": 63},
        "minProperties": 1,
        "maxProperties": 64,
    })
}

fn seed_value(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({
        "type": "integer", "format": "int64", "minimum": 0, "maximum": 4_294_967_295_i64, "default": 0,
        "description": "The value; any fixed number makes hashes of equal processes equal.",
    })
}

const fn default_event_port() -> u16 {
    5557
}

const fn default_replay_port() -> u16 {
    5657
}

const fn default_block_size() -> u32 {
    16
}

const fn default_dp_size() -> u32 {
    1
}

fn default_subject_prefix() -> String {
    DEFAULT_SUBJECT_PREFIX.to_owned()
}
