//! The settings of a router, from both specs and nothing else. Pure.
//!
//! What may change while a router runs is in the live settings only; the start
//! settings keep their defaults of it, so that an edit of a weight does not
//! replace pods.

use std::path::PathBuf;

use kvrouter_crds::config::{
    DEFAULT_IMAGE_WEIGHT, DecodeInputDemand, Discovery, DiscoveryBackend, EngineLoad, ForwardTokenIds,
    Freshness, KubernetesDiscovery, KvEvents, Limits, Listen, LiveSettings, Model, Nats, OverlapWeights,
    Overload, PageSizePolicy, Policy, PoolName, PrefillGuardRelease, RoleSelector, RouterConfig,
    SCHEMA_VERSION, SessionAffinity, Switch, Tenancy, TierCredits, Tokenizer,
};
use kvrouter_crds::pool::{SecretKeyRef, TokenizerSource};

use super::validate::ValidRouter;
use crate::parts::{CREDENTIALS_FOLDER, IDENTITY_FOLDER, TENANCY_FOLDER};

/// Where the start settings are mounted.
pub const SETTINGS_FOLDER: &str = "/etc/kvrouter";
/// Where the tokenizer's volume is mounted.
pub const TOKENIZER_FOLDER: &str = "/var/lib/kvrouter/tokenizer";

/// Name of the ConfigMap with the live settings.
pub fn live_settings_name(router: &str) -> String {
    format!("{router}-router-live")
}

/// What cannot change while a router runs.
pub fn start_settings(router: &ValidRouter) -> RouterConfig {
    let pool = &router.pool;
    RouterConfig {
        schema_version: SCHEMA_VERSION,
        pool: PoolName { namespace: router.namespace.clone(), name: router.spec.pool_ref.name.clone() },
        model: Model {
            name: pool.model.name.clone(),
            revision: pool.model.revision.clone(),
            tokenizer: pool
                .model
                .tokenizer
                .as_ref()
                .map(|source| Tokenizer { path: tokenizer_folder(source) }),
        },
        block_size: pool.block_size,
        engine: pool.engine,
        listen: Listen::default(),
        discovery: discovery(router),
        kv_events: KvEvents {
            transport: pool.kv_events.transport,
            port: pool.kv_events.port,
            replay_port: pool.kv_events.replay_port,
            nats: router.broker.as_ref().map(|broker| Nats {
                url: broker.url.clone(),
                credentials_file: broker.credentials.as_ref().map(|secret| file(CREDENTIALS_FOLDER, secret)),
                subject_prefix: broker.subject_prefix.clone(),
            }),
        },
        identity_seed_file: pool
            .identity_seed_secret_ref
            .as_ref()
            .map(|secret| file(IDENTITY_FOLDER, secret)),
        tenancy: router.spec.tenancy.as_ref().map(|tenancy| Tenancy {
            header: tenancy.header.clone(),
            salt_secret_file: file(TENANCY_FOLDER, &tenancy.salt_secret_ref),
            without_header: tenancy.without_header,
        }),
        admin_token_file: None,
        limits: limits(router),
        policy: Policy::default(),
        overlap_weights: OverlapWeights::default(),
        load_weights: None,
        freshness: Freshness::default(),
        in_flight_credit: Switch::default(),
        overload: Overload::default(),
        image_weight: DEFAULT_IMAGE_WEIGHT,
        tier_credits: TierCredits::default(),
        receipt_files: None,
        session_affinity: SessionAffinity::default(),
        shadow_policies: Vec::new(),
        page_size_policy: PageSizePolicy::default(),
        engine_load: EngineLoad::default(),
        forward_token_ids: ForwardTokenIds::default(),
        decode_input_demand: DecodeInputDemand::default(),
        pd_prefill_guard_release: PrefillGuardRelease::default(),
    }
}

/// Time-outs and limits: the router's own, but for how long it drains.
pub fn limits(router: &ValidRouter) -> Limits {
    Limits { drain_timeout_seconds: router.spec.drain_timeout_seconds, ..Limits::default() }
}

/// What may change while a router runs: every field that routers of all releases
/// know, so that nothing depends on the start settings' defaults; of the others
/// those that differ from them.
pub fn live_settings(router: &ValidRouter) -> LiveSettings {
    let spec = &router.spec;
    LiveSettings {
        schema_version: SCHEMA_VERSION,
        policy: Some(spec.policy),
        overlap_weights: Some(spec.overlap_weights),
        load_weights: spec.load_weights,
        freshness: Some(spec.freshness),
        in_flight_credit: Some(spec.in_flight_credit),
        overload: Some(spec.overload),
        image_weight: Some(spec.image_weight),
        tier_credits: Some(spec.tier_credits),
        session_affinity: Some(spec.session_affinity),
        shadow_policies: Some(spec.shadow_policies.clone()),
        page_size_policy: Some(router.pool.page_size_policy),
        forward_token_ids: (!spec.forward_token_ids.is_never()).then_some(spec.forward_token_ids),
        decode_input_demand: (!spec.decode_input_demand.is_default()).then_some(spec.decode_input_demand),
        pd_prefill_guard_release: (!spec.pd_prefill_guard_release.is_decode())
            .then_some(spec.pd_prefill_guard_release),
        foreign_selectors: router.foreign_selectors.clone(),
    }
}

fn discovery(router: &ValidRouter) -> Discovery {
    let pool = &router.pool;
    let role = |role: &kvrouter_crds::pool::RoleSpec| RoleSelector {
        name: role.name,
        selector: role.selector.match_labels.clone(),
        protocol: role.protocol,
        bootstrap_port: role.bootstrap_port,
    };
    let kubernetes = KubernetesDiscovery {
        namespace: router.namespace.clone(),
        selector: pool.selector.match_labels.clone(),
        target_ports: pool.target_ports.iter().map(|port| port.number).collect(),
        dp_size: pool.dp_size,
        roles: pool.roles.iter().map(role).collect(),
        live_settings_config_map: Some(live_settings_name(&router.name)),
    };
    Discovery { backend: DiscoveryBackend::Kubernetes, workers: Vec::new(), kubernetes: Some(kubernetes) }
}

fn tokenizer_folder(source: &TokenizerSource) -> PathBuf {
    let mounted = PathBuf::from(TOKENIZER_FOLDER);
    let TokenizerSource { image, persistent_volume_claim, config_map: _, path } = source;
    let inside = image.as_ref().map(|image| &image.path);
    let inside = inside.or(persistent_volume_claim.as_ref().map(|claim| &claim.path));
    match (path, inside) {
        (Some(path), _) => PathBuf::from(path),
        (None, Some(inside)) if !inside.is_empty() => mounted.join(inside),
        _ => mounted,
    }
}

fn file(folder: &str, secret: &SecretKeyRef) -> PathBuf {
    PathBuf::from(folder).join(&secret.key)
}
