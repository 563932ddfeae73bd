//! When conditions flip.

use kvrouter_crds::conditions::{Finding, Reason};

use super::*;
use crate::sample::{WINDOW, at};

const TYPE: ConditionType = ConditionType::EventsConnected;

fn good() -> Finding {
    Finding::holds(Reason::Connected, "good")
}

fn bad() -> Finding {
    Finding::fails(Reason::NoPublishers, "bad")
}

fn unknown() -> Finding {
    Finding::unknown(Reason::RouterUnreachable, "who knows")
}

/// One object whose condition is settled again and again.
struct Story {
    memory: Memory,
    published: Vec<Condition>,
    pods: BTreeSet<String>,
}

impl Story {
    fn new() -> Self {
        Self { memory: Memory::new(at(0)), published: Vec::new(), pods: BTreeSet::new() }
    }

    fn see(&mut self, seconds: i64, seen: &Seen) -> Condition {
        let pass = Pass {
            now: at(seconds),
            window: WINDOW,
            generation: Some(1),
            published: &self.published,
            pods: &self.pods,
        };
        let condition = self.memory.settle(&pass, seen);
        self.published = vec![condition.clone()];
        condition
    }

    #[track_caller]
    fn check(&mut self, why: &str, seconds: i64, finding: Finding, expected: Reason) {
        let condition = self.see(seconds, &Seen::afar(TYPE, finding));
        assert_eq!(condition.reason, expected.as_str(), "{why}");
    }

    /// The next passes are those of another leader.
    fn change_leader(&mut self, seconds: i64) {
        self.memory = Memory::new(at(seconds));
    }
}

#[test]
fn an_observation_flips_after_a_window_of_agreement() {
    let mut story = Story::new();
    story.check("good news need no window at first", 0, good(), Reason::Connected);
    story.check("bad news does", 5, bad(), Reason::Connected);
    story.check("just before its end", 34, bad(), Reason::Connected);
    story.check("at its end", 35, bad(), Reason::NoPublishers);
    story.check("and back", 36, good(), Reason::NoPublishers);
    story.check("an interruption", 50, bad(), Reason::NoPublishers);
    story.check("begins the window anew", 51, good(), Reason::NoPublishers);
    story.check("not yet", 80, good(), Reason::NoPublishers);
    story.check("now", 81, good(), Reason::Connected);
}

#[test]
fn the_first_alarm_waits_too() {
    let mut story = Story::new();
    story.check("nobody was told anything", 0, bad(), Reason::Pending);
    story.check("still", 29, bad(), Reason::Pending);
    story.check("now", 30, bad(), Reason::NoPublishers);
}

#[test]
fn what_is_unknown_becomes_true_at_once() {
    let mut story = Story::new();
    story.check("first", 0, good(), Reason::Connected);
    story.check("a lost poll", 40, unknown(), Reason::Connected);
    story.check("lost for long", 70, unknown(), Reason::RouterUnreachable);
    story.check("back", 71, good(), Reason::Connected);
    story.check("to the worse it waits", 72, unknown(), Reason::Connected);
}

#[test]
fn what_is_certain_flips_at_once() {
    let mut story = Story::new();
    story.see(0, &Seen::certain(TYPE, good()));
    let condition = story.see(1, &Seen::certain(TYPE, bad()));
    assert_eq!(condition.reason, "NoPublishers");
}

#[test]
fn the_blame_goes_with_the_pod() {
    let mut story = Story::new();
    let blamed = BTreeSet::from(["a".to_owned(), "b".to_owned()]);
    story.pods = blamed.clone();
    let seen = Seen { blamed, ..Seen::afar(TYPE, bad()) };
    story.see(0, &seen);
    story.see(30, &seen);
    story.pods.remove("a");
    story.check("one of two is left", 31, good(), Reason::NoPublishers);
    story.pods.remove("b");
    story.check("none is left", 32, good(), Reason::Connected);
}

#[test]
fn a_new_leader_keeps_what_is_published_for_a_window() {
    let mut story = Story::new();
    story.check("first", 0, good(), Reason::Connected);
    story.check("seen", 100, bad(), Reason::Connected);
    story.check("flipped", 130, bad(), Reason::NoPublishers);
    story.change_leader(200);
    let other = Finding::fails(Reason::NatsUnreachable, "another reason");
    story.check("not even the reason", 201, other.clone(), Reason::NoPublishers);
    story.check("after its window", 231, other, Reason::NatsUnreachable);
    story.change_leader(300);
    story.check("it has heard nothing yet", 300, unknown(), Reason::NatsUnreachable);
    story.check("but good news is no news from before", 329, good(), Reason::NatsUnreachable);
}

#[test]
fn transition_times_move_with_the_status_only() {
    let mut story = Story::new();
    let first = story.see(0, &Seen::certain(TYPE, bad()));
    let reason = story.see(9, &Seen::certain(TYPE, Finding::fails(Reason::NatsUnreachable, "other")));
    assert_eq!(reason.last_transition_time, first.last_transition_time, "another reason");
    let flipped = story.see(10, &Seen::certain(TYPE, good()));
    assert_eq!(flipped.last_transition_time.0, at(10), "another status");
}

#[test]
fn a_pending_flip_is_looked_at_again_in_time() {
    let mut story = Story::new();
    story.check("first", 0, good(), Reason::Connected);
    assert_eq!(story.memory.recheck_after(at(0), WINDOW), None, "nothing is pending");
    story.check("pending", 10, bad(), Reason::Connected);
    assert_eq!(
        story.memory.recheck_after(at(15), WINDOW),
        Some(SignedDuration::from_secs(25)),
        "25 s are left"
    );
    story.check("flipped", 40, bad(), Reason::NoPublishers);
    assert_eq!(story.memory.recheck_after(at(40), WINDOW), None, "done");
}
