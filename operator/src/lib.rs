//! The control plane of kvrouter: reconciles InferencePool and KvRouter.
//!
//! Each kind has five stages, one file each: `observe` reads stores, `validate`
//! judges, `build` says what should be, `status` says what is, and `mod`
//! calls them in order. `apply` and `workload` are the only writers. The
//! operator knows Kubernetes and nothing of prompts; it meets the router in its
//! settings and in its health report, whose types live in `kvrouter_crds`.

pub mod apply;
pub mod check;
pub mod config;
pub mod controller;
pub mod definitions;
pub mod drift;
pub mod events;
pub mod facts;
pub mod gateway;
pub mod hysteresis;
pub mod lease;
pub mod ledger;
pub mod metrics;
pub mod parts;
pub mod poller;
pub mod pool;
pub mod probes;
pub mod render;
pub mod rollout;
pub mod router;
pub mod run;
#[cfg(test)]
mod sample;
pub mod schema;
pub mod stores;
pub mod verdict;
pub mod watch;
pub mod workload;
pub mod yaml;

/// Who we are to the API server: the owner of the fields that we apply.
pub const FIELD_MANAGER: &str = "kvrouter-operator";

/// An error and all its causes, in one line.
pub fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |error| error.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}
