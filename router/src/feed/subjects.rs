//! NATS subjects, the same on both sides.
//!
//! `<prefix>.<namespace>.<pool>.events.<worker>.<rank>` carries envelopes,
//! `….snapshot.<worker>.<rank>` answers with pages; on `….load` routers say what they
//! have booked. `<worker>` is the unpadded
//! base64url of the worker's `host:port`, in Kubernetes too: all that a bridge need
//! know is the address of its pod. A pod that gets the address of one before it has
//! another epoch, and routers know it by its UID as another worker, whose view
//! begins with a snapshot of its own.

use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use kvrouter_core::ids::{Target, WorkerId};

/// The subjects of one pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subjects {
    /// `<prefix>.<namespace>.<pool>`.
    stem: String,
}

impl Subjects {
    /// Subjects of `pool` in `namespace`; all three are single tokens.
    pub fn new(prefix: &str, namespace: &str, pool: &str) -> Self {
        Self { stem: format!("{prefix}.{namespace}.{pool}") }
    }

    /// Events of every rank of every bridge.
    pub fn all_events(&self) -> String {
        format!("{}.events.*.*", self.stem)
    }

    /// Events of one rank.
    pub fn events(&self, name: &str, rank: u32) -> String {
        format!("{}.events.{name}.{rank}", self.stem)
    }

    /// Snapshot requests to one rank.
    pub fn snapshot(&self, name: &str, rank: u32) -> String {
        format!("{}.snapshot.{name}.{rank}", self.stem)
    }

    /// What the pool's routers have booked.
    pub fn load(&self) -> String {
        format!("{}.load", self.stem)
    }

    /// The worker's name and the rank that an events subject ends in.
    pub fn source(&self, subject: &str) -> Option<(String, u32)> {
        let rest = subject.strip_prefix(&self.stem)?.strip_prefix(".events.")?;
        let (name, rank) = rest.split_once('.')?;
        Some((name.to_owned(), rank.parse().ok()?))
    }
}

/// What `worker` is called in subjects.
pub fn name_of(worker: &WorkerId) -> String {
    BASE64_URL_SAFE_NO_PAD.encode(worker.as_str())
}

/// The target that a worker's name in subjects and a rank stand for.
pub fn target_of(name: &str, rank: u32) -> Option<Target> {
    let bytes = BASE64_URL_SAFE_NO_PAD.decode(name).ok()?;
    Some(Target::new(WorkerId::new(String::from_utf8(bytes).ok()?), rank))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_subject_names_its_source() {
        let subjects = Subjects::new("kvrouter", "default", "demo");
        let worker = WorkerId::new("127.0.0.1:8001");
        let subject = subjects.events(&name_of(&worker), 3);
        let (name, rank) = subjects.source(&subject).expect("its own");
        assert_eq!(target_of(&name, rank), Some(Target::new(worker, 3)));
        assert_eq!(Subjects::new("kvrouter", "default", "other").source(&subject), None);
        assert_eq!(subjects.source("kvrouter.default.demo.events.x.y"), None);
    }
}
