//! KvRouter, in five stages.

pub mod build;
pub mod observe;
pub mod status;
pub mod validate;
