//! The shell around the deciding core: one request in, one target out.
//!
//! A request passes through [`prompt`] (body to token ids), [`route`] (ids to a
//! pick, by `kvrouter_core`) and [`proxy`] (bytes to the worker and back).
//! [`fleet`] knows the workers, [`feed`] brings their cache events, [`admin`]
//! answers people and probes, [`pool`] is what they share. [`listen`] accepts
//! connections, [`live`] takes over settings, [`receipts`] keeps what was decided, [`replay`]
//! repeats it. [`tenancy`] keeps tenants' prompts apart. [`clock`] is the only file that asks for the time.

pub mod admin;
pub mod clock;
pub mod config;
pub mod expected;
pub mod feed;
pub mod fleet;
pub mod lab;
pub mod listen;
pub mod live;
pub mod metrics;
pub mod page;
pub mod plot;
pub mod pool;
pub mod prompt;
pub mod proxy;
pub mod receipts;
pub mod replay;
pub mod responses;
pub mod route;
pub mod serve;
pub mod study;
pub mod tenancy;

/// An error and its causes, as one line for a log.
pub fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut line = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        line.push_str(": ");
        line.push_str(&error.to_string());
        cause = error.source();
    }
    line
}
