//! What a router consists of. Pure, and cannot fail.

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{ConfigMap, Service, ServiceAccount};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::rbac::v1::RoleBinding;

use super::validate::ValidRouter;
use crate::config::ChildFlags;

/// All children of a router, each with its owner reference.
#[derive(Clone, Debug, PartialEq)]
pub struct Desired {
    /// What routers run as.
    pub service_account: ServiceAccount,
    /// What they may read.
    pub role_binding: RoleBinding,
    /// Start settings; immutable, named by their digest.
    pub start_settings: ConfigMap,
    /// Live settings.
    pub live_settings: ConfigMap,
    /// The routers.
    pub deployment: Deployment,
    /// The Service in front of them.
    pub service: Service,
    /// Present with more than one replica.
    pub disruption_budget: Option<PodDisruptionBudget>,
    /// Digest of the start settings, as routers report it.
    pub start_digest: String,
    /// Digest of the live settings, as routers report it.
    pub live_digest: String,
}

/// Everything that the router consists of.
pub fn build(_router: &ValidRouter, _flags: &ChildFlags) -> Desired {
    unimplemented_yet()
}

fn unimplemented_yet() -> Desired {
    Desired {
        service_account: ServiceAccount::default(),
        role_binding: RoleBinding::default(),
        start_settings: ConfigMap::default(),
        live_settings: ConfigMap::default(),
        deployment: Deployment::default(),
        service: Service::default(),
        disruption_budget: None,
        start_digest: String::new(),
        live_digest: String::new(),
    }
}
