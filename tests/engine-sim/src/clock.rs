//! The only file that asks for the wall clock: engines stamp events and answers with it.
#![allow(clippy::disallowed_methods)] // No decision depends on it; steps run on tokio's clock.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Time since 1970.
pub(crate) fn since_epoch() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}
