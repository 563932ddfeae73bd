//! JSON as this crate needs it: written so that equal values have equal bytes,
//! read so that every complaint names a line and a field.
//!
//! [`canonical`] writes RFC 8785; [`fields`] reads objects strictly.

pub mod canonical;
pub mod fields;

pub use canonical::canonical_json;
