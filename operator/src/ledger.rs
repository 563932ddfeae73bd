//! What this leader remembers of each object between two reconciles.
//!
//! All of it may be lost: a new leader begins with an empty ledger, and then
//! works from what is published. The stores lag behind our own writes; what was
//! written last is therefore kept here, so that a second look does not take the
//! past for a change.

use std::collections::HashMap;

use jiff::Timestamp;
use parking_lot::Mutex;
use serde_json::Value;
use tokio::time::Instant;

use crate::hysteresis::Memory;

/// Namespace and name.
pub type Key = (String, String);

/// The ledger of one kind.
#[derive(Default)]
pub struct Ledger(Mutex<HashMap<Key, Entry>>);

/// What is remembered of one object.
#[derive(Clone)]
pub struct Entry {
    /// Whose entry this is: an object that was made anew gets a new one.
    pub uid: String,
    /// What its conditions need to know.
    pub memory: Memory,
    /// The status that was published last, and when; none before the first.
    pub published: Option<(Value, Instant)>,
    /// Names of children that others hold, as `Kind/name`.
    pub taken: Vec<String>,
    /// Children as they were when they were last applied, by `Kind/name`.
    pub applied: HashMap<String, Applied>,
    /// Workloads that were patched, by uid.
    pub patched: HashMap<String, Patched>,
    /// Failures in a row.
    pub failures: u32,
}

/// A workload that was patched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Patched {
    /// Its version before. While the store shows this version, it has not heard
    /// of the patch.
    pub before: String,
    /// When.
    pub at: Timestamp,
    /// Digest of what the spec asked for, for the record: the status that holds
    /// it may have failed to be written.
    pub digest: Option<String>,
}

/// A child that was applied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Applied {
    /// Its version before; none if it was not there. While the store shows this
    /// version, it has not heard of the change, or there was none.
    pub before: Option<String>,
    /// Digest of what was applied.
    pub digest: String,
}

impl Entry {
    fn new(uid: &str) -> Self {
        Self {
            uid: uid.to_owned(),
            memory: Memory::new(Timestamp::now()),
            published: None,
            taken: Vec::new(),
            applied: HashMap::new(),
            patched: HashMap::new(),
            failures: 0,
        }
    }
}

impl Ledger {
    /// The entry of that object; an empty one for a new uid.
    pub fn entry(&self, key: &Key, uid: &str) -> Entry {
        let all = self.0.lock();
        all.get(key).filter(|entry| entry.uid == uid).cloned().unwrap_or_else(|| Entry::new(uid))
    }

    /// Changes the entry of that object.
    pub fn update(&self, key: &Key, uid: &str, change: impl FnOnce(&mut Entry)) {
        let mut all = self.0.lock();
        let entry = all.entry(key.clone()).or_insert_with(|| Entry::new(uid));
        if entry.uid != uid {
            *entry = Entry::new(uid);
        }
        change(entry);
    }

    /// Forgets an object that is gone.
    pub fn forget(&self, key: &Key) {
        self.0.lock().remove(key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_made_anew_inherits_nothing() {
        let ledger = Ledger::default();
        let key = ("ns".to_owned(), "chat".to_owned());
        ledger.update(&key, "1", |entry| entry.failures = 3);
        assert_eq!(ledger.entry(&key, "1").failures, 3, "its own");
        assert_eq!(ledger.entry(&key, "2").failures, 0, "another's");
        ledger.update(&key, "2", |_| {});
        assert_eq!(ledger.entry(&key, "1").failures, 0, "replaced");
        ledger.forget(&key);
        assert_eq!(ledger.entry(&key, "2").failures, 0, "forgotten");
    }
}
