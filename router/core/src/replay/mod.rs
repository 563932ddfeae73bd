//! Traces to comparisons: every rule on the same arrivals, offline.
//!
//! A replay freezes a trace's requests, starts every rule from a clean copy of
//! the fleet, lets the policy code decide on a virtual clock, and reports what
//! came of it. The same inputs in any order give the same bytes.
//!
//! [`mooncake`] and [`runs`] read timed traces into [`trace`]; [`run`] replays
//! one of them over [`engine`]s whose step times are a stated model, so their
//! results are called modelled; [`report`] sums up, [`oracle`] recomputes it all.
//! [`contender`] names what can be compared: our policies, and models of other
//! routers' in [`peers`]. [`lab_trace`] and [`lab`] do the same for hand-made
//! traces, decision by decision, with receipts; [`recorded`] makes the decisions in
//! a router's own receipts again.

pub mod cache;
pub mod contender;
pub mod engine;
pub mod lab;
pub mod lab_oracle;
pub mod lab_trace;
pub mod load;
pub mod mooncake;
pub mod oracle;
pub mod peers;
pub mod recorded;
pub mod report;
pub mod run;
pub mod runs;
pub mod study;
pub mod trace;

#[cfg(test)]
mod tests;

/// What a trace file holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// [`mooncake`].
    Mooncake,
    /// [`runs`].
    Runs,
    /// [`recorded`].
    Receipts,
    /// [`lab_trace`].
    Lab,
}

impl Format {
    /// The format by the first line: one of the known objects, or the start of
    /// something longer.
    pub fn of(text: &str) -> Self {
        let first = text.lines().find(|line| !line.trim().is_empty()).unwrap_or_default();
        match crate::json::fields::Fields::root(first, 1) {
            Ok(fields) if fields.has("s") => Self::Runs,
            Ok(fields) if fields.has("kind") && fields.has("previous") => Self::Receipts,
            Ok(fields) if fields.has("schema_version") => Self::Lab,
            Ok(_) => Self::Mooncake,
            // A cut line of a line format is that format's to complain about.
            Err(_) if first.contains("\"hash_ids\"") || first.contains("\"timestamp\"") => Self::Mooncake,
            Err(_) if first.contains("\"runs\"") || first.trim_start().starts_with("{\"s\"") => Self::Runs,
            Err(_) if first.starts_with("{\"attempt\":") || first.starts_with("{\"digest\":") => {
                Self::Receipts
            }
            Err(_) => Self::Lab,
        }
    }
}
