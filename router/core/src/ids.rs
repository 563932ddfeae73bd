//! Names of things: workers, ranks, targets, epochs, roles.
//!
//! Names only; what they own lives in `index`, `policy` and `trust`.

use std::cmp::Ordering;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use serde::{Deserialize, Serialize, Serializer};

/// One engine process group behind one URL, named by its `host:port`.
///
/// A decision copies the names of all its candidates. Short ones are copied as
/// they are: a counted reference would be written to by every thread that
/// decides, once for every worker.
#[derive(Clone)]
pub struct WorkerId(Name);

/// Longest name that is copied: all of IPv4, and most of IPv6.
const SHORT: usize = 30;

#[derive(Clone)]
enum Name {
    Short { length: u8, bytes: [u8; SHORT] },
    Long(Arc<str>),
}

impl WorkerId {
    /// A worker named `host_port`.
    pub fn new(host_port: impl Into<Arc<str>>) -> Self {
        let name = host_port.into();
        let mut bytes = [0; SHORT];
        match bytes.get_mut(..name.len()) {
            Some(room) => {
                room.copy_from_slice(name.as_bytes());
                Self(Name::Short { length: name.len() as u8, bytes })
            }
            None => Self(Name::Long(name)),
        }
    }

    /// The `host:port` it was named by.
    pub fn as_str(&self) -> &str {
        match &self.0 {
            Name::Short { .. } => std::str::from_utf8(self.as_bytes()).expect("it was made of a string"),
            Name::Long(name) => name,
        }
    }

    /// The bytes of [`WorkerId::as_str`].
    pub fn as_bytes(&self) -> &[u8] {
        match &self.0 {
            Name::Short { length, bytes } => &bytes[..usize::from(*length)],
            Name::Long(name) => name.as_bytes(),
        }
    }
}

impl PartialEq for WorkerId {
    fn eq(&self, other: &Self) -> bool {
        self.as_bytes() == other.as_bytes()
    }
}

impl Eq for WorkerId {}

impl PartialOrd for WorkerId {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for WorkerId {
    fn cmp(&self, other: &Self) -> Ordering {
        self.as_bytes().cmp(other.as_bytes())
    }
}

impl Hash for WorkerId {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.as_bytes().hash(state);
    }
}

impl fmt::Debug for WorkerId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), formatter)
    }
}

impl fmt::Display for WorkerId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.as_str())
    }
}

impl Serialize for WorkerId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

/// Data-parallel rank inside a worker, counted from 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct DpRank(pub u32);

/// What a decision picks: one rank of one worker. Displayed as `host:port#rank`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Target {
    /// The worker.
    pub worker: WorkerId,
    /// The rank inside it; 0 for a worker without data parallelism.
    pub rank: DpRank,
}

impl Target {
    /// Rank `rank` of `worker`.
    pub fn new(worker: WorkerId, rank: u32) -> Self {
        Self { worker, rank: DpRank(rank) }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}#{}", self.worker, self.rank.0)
    }
}

impl Serialize for Target {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// A target's place in the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(pub u32);

/// One life of one engine process: larger is younger. Milliseconds since 1970
/// when the process was first seen; only order and equality matter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Epoch(pub u64);

/// What a worker does with a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Role {
    /// Prefill and decode.
    #[default]
    Mixed,
    /// Prefill only.
    Prefill,
    /// Decode only.
    Decode,
}

impl Role {
    /// Lower-case name, for logs and labels.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Mixed => "mixed",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_mean_the_same_whether_they_are_copied_or_shared() {
        let names = ["", "a:1", "10.0.0.10:8000", "10.0.0.9:8000", "worker.\u{e4}.example:80"];
        let long = ["[fd12:3456:789a:1::abcd]:8000-and-more", "[fd12:3456:789a:1::abce]:8000-and-more"];
        let all: Vec<&str> = names.into_iter().chain(long).collect();
        for one in &all {
            assert_eq!(WorkerId::new(*one).as_str(), *one);
            for other in &all {
                let (a, b) = (WorkerId::new(*one), WorkerId::new(*other));
                assert_eq!((a.cmp(&b), a == b), (one.cmp(other), one == other), "{one} and {other}");
            }
        }
    }
}
