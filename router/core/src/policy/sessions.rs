//! Session affinity: later requests of a session go where the first one went.
//!
//! A binding is (session, role) to target. Its time to live runs only while no
//! request of the session is in flight. The table is bounded; a session in
//! flight is never evicted, so at capacity a new session may stay unbound. A
//! policy picks a session's first target and its replacement; a failed request
//! or a target over its hard cap ends the binding.

use std::collections::BTreeMap;
use std::sync::Arc;

use rustc_hash::FxHashMap;
use serde::Serialize;

use crate::ids::{Role, Target, WorkerId};
use crate::units::{Millis, Tick};

/// Most bindings: at 200 bytes each about 13 MB.
pub const CAPACITY: usize = 65_536;

/// Which picks are bound.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum SessionMode {
    /// None: the header is ignored.
    #[default]
    Disabled,
    /// Prefill picks.
    Prefill,
    /// Prefill, decode and mixed picks.
    Both,
}

impl SessionMode {
    /// Whether picks of `role` are bound.
    pub const fn binds(self, role: Role) -> bool {
        matches!((self, role), (Self::Both, _) | (Self::Prefill, Role::Prefill))
    }
}

/// Names a session's binding.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionKey {
    /// The client's id of the session, under its model.
    pub id: Arc<str>,
    /// What is picked.
    pub role: Role,
}

/// What the table said about a request's session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SessionUse {
    /// The request names none, or none is wanted.
    #[default]
    None,
    /// It is bound from now on.
    New,
    /// It was bound, and followed.
    Followed,
    /// Its target is gone: bound anew.
    Replaced,
    /// Its target is over the hard cap: bound anew.
    Overloaded,
    /// The table is full of sessions in flight: not bound.
    Unbound,
    /// It goes on from a response, and goes to the worker that made it.
    ResponseFollowed,
    /// The worker that made the response it goes on from left, is not ready or has
    /// just failed.
    ResponseGone,
    /// Nobody here knows the response that it goes on from.
    ResponseUnknown,
}

impl SessionUse {
    /// Stable label for logs and metrics.
    pub const fn label(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::New => "new",
            Self::Followed => "followed",
            Self::Replaced => "replaced",
            Self::Overloaded => "overloaded",
            Self::Unbound => "unbound",
            Self::ResponseFollowed => "response_followed",
            Self::ResponseGone => "response_gone",
            Self::ResponseUnknown => "response_unknown",
        }
    }
}

/// A request's hold on its session's binding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hold {
    key: SessionKey,
    generation: u64,
}

/// The bindings of one pool.
#[derive(Debug, Default)]
pub struct Sessions {
    bindings: FxHashMap<SessionKey, Binding>,
    /// Bindings without a request in flight, the longest idle first.
    idle: BTreeMap<(Tick, u64), SessionKey>,
    generations: u64,
}

#[derive(Debug)]
struct Binding {
    target: Target,
    /// Tells this binding from others of the same session.
    generation: u64,
    in_flight: u32,
    /// Since when nothing is in flight.
    idle_since: Tick,
}

impl Sessions {
    /// The target that the session is bound to, unless it expired.
    pub fn bound(&mut self, now: Tick, time_to_live: Millis, key: &SessionKey) -> Option<Target> {
        self.expire(now, time_to_live);
        self.bindings.get(key).map(|binding| binding.target.clone())
    }

    /// Binds the session to `target`, or keeps the binding if it is that one,
    /// and holds it; `None` if the table is full of sessions in flight.
    pub fn hold(&mut self, key: &SessionKey, target: &Target) -> Option<Hold> {
        if self.bindings.get(key).is_some_and(|binding| binding.target != *target) {
            self.forget(key);
        }
        if !self.bindings.contains_key(key) {
            if self.bindings.len() >= CAPACITY {
                let (_, oldest) = self.idle.pop_first()?;
                self.bindings.remove(&oldest);
            }
            self.generations += 1;
            let binding = Binding {
                target: target.clone(),
                generation: self.generations,
                in_flight: 0,
                idle_since: Tick(0),
            };
            self.bindings.insert(key.clone(), binding);
        }
        let binding = self.bindings.get_mut(key)?;
        if binding.in_flight == 0 {
            self.idle.remove(&(binding.idle_since, binding.generation));
        }
        binding.in_flight += 1;
        Some(Hold { key: key.clone(), generation: binding.generation })
    }

    /// Lets go of a binding at `now`. One that was replaced meanwhile is left
    /// alone.
    pub fn release(&mut self, now: Tick, hold: &Hold) {
        let Some(binding) = self.bindings.get_mut(&hold.key) else { return };
        if binding.generation != hold.generation {
            return;
        }
        binding.in_flight = binding.in_flight.saturating_sub(1);
        if binding.in_flight == 0 {
            binding.idle_since = now;
            self.idle.insert((now, binding.generation), hold.key.clone());
        }
    }

    /// Ends a binding because its request failed.
    pub fn fail(&mut self, hold: &Hold) {
        if self.bindings.get(&hold.key).is_some_and(|binding| binding.generation == hold.generation) {
            self.forget(&hold.key);
        }
    }

    /// Ends all bindings to ranks of `worker`, which left: another process at its
    /// address has none of their prompts.
    pub fn remove_worker(&mut self, worker: &WorkerId) {
        self.bindings.retain(|_, binding| binding.target.worker != *worker);
        self.idle.retain(|_, key| self.bindings.contains_key(key));
    }

    /// Bindings held.
    pub fn len(&self) -> usize {
        self.bindings.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.bindings.is_empty()
    }

    fn forget(&mut self, key: &SessionKey) {
        if let Some(binding) = self.bindings.remove(key) {
            self.idle.remove(&(binding.idle_since, binding.generation));
        }
    }

    fn expire(&mut self, now: Tick, time_to_live: Millis) {
        while let Some(entry) = self.idle.first_entry() {
            if now.since(entry.key().0) < time_to_live {
                return;
            }
            let key = entry.remove();
            self.bindings.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Millis = Millis(1000);

    fn key(id: &str) -> SessionKey {
        SessionKey { id: id.into(), role: Role::Mixed }
    }

    fn target(number: u32) -> Target {
        Target::new(WorkerId::new("w:1"), number)
    }

    #[test]
    fn the_time_to_live_runs_only_while_the_session_is_idle() {
        let mut sessions = Sessions::default();
        let hold = sessions.hold(&key("a"), &target(1)).expect("room");
        assert_eq!(sessions.bound(Tick(99_999), TTL, &key("a")), Some(target(1)), "in flight");
        sessions.release(Tick(100_000), &hold);
        assert_eq!(sessions.bound(Tick(100_999), TTL, &key("a")), Some(target(1)), "just before the end");
        assert_eq!(sessions.bound(Tick(101_000), TTL, &key("a")), None, "at the end");
        assert!(sessions.is_empty() && sessions.idle.is_empty());
    }

    #[test]
    fn a_late_release_or_failure_spares_the_successor() {
        let mut sessions = Sessions::default();
        let old = sessions.hold(&key("a"), &target(1)).expect("room");
        let new = sessions.hold(&key("a"), &target(2)).expect("room");
        sessions.release(Tick(5), &old);
        sessions.fail(&old);
        assert_eq!(sessions.bound(Tick(9_999), TTL, &key("a")), Some(target(2)));
        sessions.fail(&new);
        assert_eq!(sessions.bound(Tick(9_999), TTL, &key("a")), None);
    }

    #[test]
    fn a_worker_that_left_has_no_sessions() {
        let mut sessions = Sessions::default();
        let elsewhere = Target::new(WorkerId::new("w:2"), 0);
        let held = sessions.hold(&key("a"), &target(0)).expect("room");
        let idle = sessions.hold(&key("b"), &target(1)).expect("room");
        let other = sessions.hold(&key("c"), &elsewhere).expect("room");
        sessions.release(Tick(1), &idle);
        sessions.release(Tick(1), &other);
        sessions.remove_worker(&WorkerId::new("w:1"));
        let bound = ["a", "b", "c"].map(|id| sessions.bound(Tick(2), TTL, &key(id)));
        assert_eq!(bound, [None, None, Some(elsewhere)]);
        sessions.release(Tick(3), &held);
        assert_eq!((sessions.len(), sessions.idle.len()), (1, 1), "a late release brings nothing back");
    }

    /// Case G32.
    #[test]
    fn a_full_table_evicts_the_longest_idle_and_never_one_in_flight() {
        let mut sessions = Sessions::default();
        let holds: Vec<Hold> =
            (0..CAPACITY).map(|n| sessions.hold(&key(&n.to_string()), &target(0)).expect("room")).collect();
        assert_eq!(sessions.hold(&key("one more"), &target(0)), None, "all are in flight");
        sessions.release(Tick(2), &holds[7]);
        sessions.release(Tick(1), &holds[9]);
        assert!(sessions.hold(&key("one more"), &target(0)).is_some());
        assert_eq!(sessions.bound(Tick(3), TTL, &key("9")), None, "the longest idle one went");
        assert_eq!(sessions.bound(Tick(3), TTL, &key("7")), Some(target(0)));
        assert_eq!(sessions.len(), CAPACITY);
    }
}
