//! InferencePool, in five stages.

pub mod build;
pub mod observe;
pub mod rules;
pub mod status;
pub mod validate;
