//! When a condition may flip.
//!
//! What the spec or the API server says flips at once. What is observed from
//! afar (health reports, probes, evidence in pods) flips when it was seen the
//! same way for a whole window, so that one lost poll is not an alarm. A new
//! leader has seen nothing yet: it keeps what is published for one window.
//!
//! A pure state machine: [`Memory`] goes in and comes out, time is an argument.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kvrouter_crds::conditions::{ConditionType, Finding, Reason, Status, find, merge};

/// What a pass over an object comes to.
#[derive(Clone, Debug)]
pub struct Outcome<S> {
    /// What its status should be.
    pub status: S,
    /// What the next pass needs to know.
    pub memory: Memory,
    /// When to look again although nothing has changed; none if that is of no use.
    pub recheck_after: Option<SignedDuration>,
}

/// What is remembered of one object between passes; lost with the leader.
#[derive(Clone, Debug, PartialEq)]
pub struct Memory {
    /// First pass of this leader.
    since: Timestamp,
    pending: BTreeMap<ConditionType, Pending>,
    /// Pods that the published findings blame.
    blamed: BTreeMap<ConditionType, BTreeSet<String>>,
}

/// A status that differs from the published one, and since when.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Pending {
    status: Status,
    since: Timestamp,
}

/// How certain a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// Certain: the spec or the API server says so.
    AtOnce,
    /// Seen from afar.
    AfterWindow,
}

/// A finding, how certain it is and which pods it blames.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// What it is about.
    pub type_: ConditionType,
    /// What the condition should say.
    pub finding: Finding,
    /// How certain it is.
    pub pace: Pace,
    /// Names of the pods that are to blame: when all of them are gone, the
    /// blame goes with them, at once.
    pub blamed: BTreeSet<String>,
}

impl Seen {
    /// A finding that is certain.
    pub fn certain(type_: ConditionType, finding: Finding) -> Self {
        Self { type_, finding, pace: Pace::AtOnce, blamed: BTreeSet::new() }
    }

    /// A finding from afar that blames nobody.
    pub fn afar(type_: ConditionType, finding: Finding) -> Self {
        Self { type_, finding, pace: Pace::AfterWindow, blamed: BTreeSet::new() }
    }
}

/// What stays the same for all conditions of one pass.
#[derive(Clone, Copy, Debug)]
pub struct Pass<'a> {
    /// When.
    pub now: Timestamp,
    /// How long an observation must last.
    pub window: SignedDuration,
    /// Generation of the spec.
    pub generation: Option<i64>,
    /// What is published.
    pub published: &'a [Condition],
    /// Names of all pods that exist.
    pub pods: &'a BTreeSet<String>,
}

impl Memory {
    /// Of an object that this leader sees for the first time.
    pub fn new(now: Timestamp) -> Self {
        Self { since: now, pending: BTreeMap::new(), blamed: BTreeMap::new() }
    }

    /// Whether this leader is too new to contradict what is published.
    pub fn is_new(&self, now: Timestamp, window: SignedDuration) -> bool {
        now.duration_since(self.since) < window
    }

    /// The condition to publish for what was seen.
    pub fn settle(&mut self, pass: &Pass<'_>, seen: &Seen) -> Condition {
        let published = find(pass.published, seen.type_);
        if published.is_none() && seen.pace == Pace::AfterWindow && seen.finding.status == Status::False {
            // Nobody was told anything yet: an alarm waits for the window here too.
            self.remember(pass.now, seen.type_, Status::False);
            let waiting = Finding::unknown(Reason::Pending, "It is being looked at; wait.");
            return merge(None, seen.type_, &waiting, pass.generation, pass.now);
        }
        let condition = |finding: &Finding| merge(published, seen.type_, finding, pass.generation, pass.now);
        let kept = published.filter(|published| !self.decide(pass, seen, published));
        match kept {
            Some(published) => Condition { observed_generation: pass.generation, ..published.clone() },
            None => {
                self.pending.remove(&seen.type_);
                self.blamed.insert(seen.type_, seen.blamed.clone());
                condition(&seen.finding)
            }
        }
    }

    /// Time until the first pending flip may happen.
    pub fn recheck_after(&self, now: Timestamp, window: SignedDuration) -> Option<SignedDuration> {
        let ripe = |pending: &Pending| (pending.since + window).duration_since(now);
        self.pending.values().map(ripe).min().map(|left| left.max(SignedDuration::from_secs(1)))
    }

    /// Whether what was seen replaces what is published. The first rule that holds
    /// decides:
    ///
    /// 1. It is certain: yes.
    /// 2. Nothing was known, and now all is well: yes. That is no alarm.
    /// 3. The status is the same: yes, for the sake of a newer reason; a leader keeps the
    ///    reason that it found for its first window.
    /// 4. The pods that were to blame are gone: yes.
    /// 5. The status is another one: once it has been seen for a window.
    ///
    /// Remembers since when a status has been seen where it waits for a window.
    fn decide(&mut self, pass: &Pass<'_>, seen: &Seen, published: &Condition) -> bool {
        let before = Status::of(&published.status);
        if seen.pace == Pace::AtOnce {
            return true;
        }
        if before == Status::Unknown && seen.finding.status == Status::True {
            return true;
        }
        if before == seen.finding.status {
            if self.is_new(pass.now, pass.window) && published.reason != Reason::Pending.as_str() {
                self.remember(pass.now, seen.type_, seen.finding.status);
                return false;
            }
            self.pending.remove(&seen.type_);
            return true;
        }
        if self.is_blame_gone(pass, seen) {
            return true;
        }
        let since = self.remember(pass.now, seen.type_, seen.finding.status);
        pass.window <= pass.now.duration_since(since)
    }

    /// Since when that status has been seen without a break.
    fn remember(&mut self, now: Timestamp, type_: ConditionType, status: Status) -> Timestamp {
        match self.pending.get(&type_) {
            Some(pending) if pending.status == status => pending.since,
            _ => {
                self.pending.insert(type_, Pending { status, since: now });
                now
            }
        }
    }

    /// Whether all pods that the published condition blames are gone.
    fn is_blame_gone(&self, pass: &Pass<'_>, seen: &Seen) -> bool {
        let blamed = self.blamed.get(&seen.type_);
        blamed.is_some_and(|blamed| !blamed.is_empty() && blamed.is_disjoint(pass.pods))
    }
}

#[cfg(test)]
#[path = "hysteresis_tests.rs"]
mod tests;
