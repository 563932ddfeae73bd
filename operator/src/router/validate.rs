//! Is the spec of a router in order, and is its pool? Pure.

use std::collections::BTreeMap;

use kvrouter_crds::KvRouter;
use kvrouter_crds::pool::InferencePoolSpec;
use kvrouter_crds::router::KvRouterSpec;

use super::observe::Observed;
use crate::config::ChildFlags;
use crate::pool::validate::Broker;
use crate::verdict::Complaint;

/// A router whose spec makes sense, with the pool that it serves.
#[derive(Clone, Debug)]
pub struct ValidRouter {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its uid; empty offline.
    pub uid: String,
    /// Its spec.
    pub spec: KvRouterSpec,
    /// The pool's spec.
    pub pool: InferencePoolSpec,
    /// The pool's broker; none without NATS.
    pub broker: Option<Broker>,
    /// Selectors of other pools that could match the same pods, sorted.
    pub foreign_selectors: Vec<BTreeMap<String, String>>,
}

/// Why a router cannot be made: at least one complaint, worst first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Invalid(pub Vec<Complaint>);

/// Judges a router.
pub fn validate(
    _router: &KvRouter,
    _observed: &Observed,
    _flags: &ChildFlags,
) -> Result<ValidRouter, Invalid> {
    Err(Invalid(Vec::new()))
}
