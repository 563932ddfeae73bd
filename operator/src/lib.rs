//! The control plane of kvrouter: reconciles InferencePool and KvRouter.
//!
//! Each kind has five stages, one file each: `observe` reads stores, `validate`
//! judges, `build` says what should be, `status` says what is, and `mod`
//! calls them in order. `apply` and `workload` are the only writers. The
//! operator knows Kubernetes and nothing of prompts; it meets the router in its
//! settings and in its health report, whose types live in `kvrouter_crds`.

pub mod apply;
pub mod config;
pub mod facts;
pub mod hysteresis;
pub mod lease;
pub mod metrics;
pub mod poller;
pub mod pool;
pub mod render;
pub mod router;
pub mod verdict;
pub mod workload;
