//! NATS subjects, the same on both sides.
//!
//! `<prefix>.<namespace>.<pool>.events.<pod uid>.<rank>` carries envelopes,
//! `….snapshot.<pod uid>.<rank>` answers with pages. Outside Kubernetes the
//! unpadded base64url of `host:port` stands for the pod's UID; there is no other
//! discovery yet.

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
    pub fn events(&self, uid: &str, rank: u32) -> String {
        format!("{}.events.{uid}.{rank}", self.stem)
    }

    /// Snapshot requests to one rank.
    pub fn snapshot(&self, uid: &str, rank: u32) -> String {
        format!("{}.snapshot.{uid}.{rank}", self.stem)
    }

    /// The UID and the rank that an events subject ends in.
    pub fn source(&self, subject: &str) -> Option<(String, u32)> {
        let rest = subject.strip_prefix(&self.stem)?.strip_prefix(".events.")?;
        let (uid, rank) = rest.split_once('.')?;
        Some((uid.to_owned(), rank.parse().ok()?))
    }
}

/// What stands for the pod UID of `worker` outside Kubernetes.
pub fn uid_of(worker: &WorkerId) -> String {
    BASE64_URL_SAFE_NO_PAD.encode(worker.as_str())
}

/// The target that a UID and a rank name outside Kubernetes.
pub fn target_of(uid: &str, rank: u32) -> Option<Target> {
    let bytes = BASE64_URL_SAFE_NO_PAD.decode(uid).ok()?;
    Some(Target::new(WorkerId::new(String::from_utf8(bytes).ok()?), rank))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_subject_names_its_source() {
        let subjects = Subjects::new("kvrouter", "default", "demo");
        let worker = WorkerId::new("127.0.0.1:8001");
        let subject = subjects.events(&uid_of(&worker), 3);
        let (uid, rank) = subjects.source(&subject).expect("its own");
        assert_eq!(target_of(&uid, rank), Some(Target::new(worker, 3)));
        assert_eq!(Subjects::new("kvrouter", "default", "other").source(&subject), None);
        assert_eq!(subjects.source("kvrouter.default.demo.events.x.y"), None);
    }
}
