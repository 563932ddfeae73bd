//! Types shared by the operator and the router.
//!
//! The two do not know each other: they meet in the router's configuration
//! file ([`config`]) and in its health report ([`health`]). Users meet both in
//! the custom resources ([`pool`], [`router`]). This crate holds types, their
//! defaults and their schemas; it reads no file and talks to nobody.

pub mod conditions;
pub mod config;
pub mod health;
pub mod pages;
pub mod pool;
pub mod router;

pub use pool::InferencePool;
pub use router::KvRouter;

/// API group of both kinds.
pub const GROUP: &str = "kvrouter.dev";
/// API version of both kinds.
pub const VERSION: &str = "v1alpha1";

/// Annotation of both definitions: [`CRD_REVISION`] of the release they are of.
pub const CRD_REVISION_ANNOTATION: &str = "kvrouter.dev/crd-revision";
/// Counts the changes of the definitions. An operator refuses to work with a
/// lower one than its own: the API server would drop the fields that it writes.
/// Raise it with every change of a schema.
pub const CRD_REVISION: u32 = 3;
