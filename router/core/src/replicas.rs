//! What the routers of one pool tell each other of their bookings.
//!
//! A message is a MessagePack array with the version first: `[version, domain,
//! replica, loads]`; a load is `[worker, rank, active blocks, queued, context,
//! requests, begun, ended, left]`, the whole of what the replica itself has booked on
//! that target and sent there, never what it heard. Readers ignore elements they do not
//! know, and do without the last three. [`Telling`] says what is
//! to be told, [`Heard`] who spoke. Carrying the bytes is the shell's; what was
//! heard counts by the rules of [`crate::policy::outside`].

use std::collections::HashMap;

use rmp::encode as write;

use crate::blocks::Domain;
use crate::events::msgpack::{ReadError, Reader, infallible};
use crate::ids::{DpRank, Target};
use crate::policy::Load;
use crate::policy::outside::{Booking, LIFETIME, MAX_REPLICAS, ReplicaId};
use crate::policy::strangers::{ROUND, Sent};
use crate::units::{Millis, Tick, Tokens};

/// Version of this encoding. A reader refuses a newer one by name.
pub const VERSION: u64 = 1;
/// Most loads that are read of one message; writers begin another one before.
pub const MAX_LOADS: usize = 4096;
/// Largest number in a load. The sum over all replicas is exact in a receipt's JSON.
pub const MAX_AMOUNT: u64 = ROUND;
/// Longest name of a worker: a host name and a port.
const MAX_WORKER: usize = 261;
/// How often a load that does not change is told again: three times in its lifetime.
const RENEWAL: Millis = Millis(LIFETIME.0 / 3);
/// Most bytes of a message besides its loads.
const HEAD_BYTES: usize = 40;

const MESSAGE_ELEMENTS: usize = 4;
const LOAD_ELEMENTS: usize = 9;
/// Without what was sent: routers of earlier releases do not tell.
const LEAST_LOAD_ELEMENTS: usize = 6;

/// One message of another router, or an own one that came back.
#[derive(Debug, PartialEq, Eq)]
pub struct Message<'a> {
    /// What its blocks are about.
    pub domain: Domain,
    /// Who says so.
    pub replica: ReplicaId,
    /// What it has booked; of targets that it does not name it says nothing.
    pub loads: Vec<TargetLoad<'a>>,
}

/// What a router has booked on one target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TargetLoad<'a> {
    /// The worker's `host:port`, which subjects of events carry in base64url.
    pub worker: &'a str,
    /// Its rank.
    pub rank: DpRank,
    /// All of it; a load of zero where nothing is left.
    pub told: Booking,
}

/// Why a message was not understood.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MessageError {
    /// Not the expected MessagePack.
    #[error("failed to read {field} of a load message")]
    Field {
        /// Name of the field.
        field: &'static str,
        /// What was wrong.
        #[source]
        source: ReadError,
    },
    /// A newer router.
    #[error("replica speaks version {found} of load messages, this router understands {VERSION}")]
    Version {
        /// The version it speaks.
        found: u64,
    },
    /// A value that cannot be.
    #[error("{field} of a load message is out of range")]
    Range {
        /// Name of the field.
        field: &'static str,
    },
}

impl MessageError {
    /// Stable label for metrics and logs.
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::Field { .. } => "unreadable_field",
            Self::Version { .. } => "newer_version",
            Self::Range { .. } => "out_of_range",
        }
    }
}

/// What this router told of its own bookings, and when.
#[derive(Debug, Default)]
pub struct Telling {
    /// By target of the fleet that something was told of.
    told: HashMap<Target, Told>,
}

#[derive(Clone, Copy, Debug)]
struct Told {
    at: Tick,
    what: Booking,
    /// When its target was in the fleet.
    seen: Tick,
}

impl Telling {
    /// What is to be told at `now`, where `booked` is what is booked on each target
    /// of the fleet, and takes it for told. New, moved and ended requests are told at
    /// once, also where one came and went since the last look; what grows with every token
    /// is told with the renewal, and nothing is told twice of a target without load.
    pub fn due<'a>(
        &mut self,
        now: Tick,
        booked: impl Iterator<Item = (&'a Target, Booking)>,
    ) -> Vec<(Target, Booking)> {
        let mut due = Vec::new();
        for (target, what) in booked {
            let told = self.told.get_mut(target);
            let is_due = match &told {
                Some(told) => told.is_outdated(now, what),
                None => what.load != Load::default() || begun(what) > 0,
            };
            if is_due {
                due.push((target.clone(), what));
            } else if let Some(told) = told {
                told.seen = now;
            }
        }
        for (target, what) in &due {
            self.told.insert(target.clone(), Told { at: now, what: *what, seen: now });
        }
        // The others' targets left the fleet.
        self.told.retain(|_, told| told.seen == now);
        due
    }

    /// The last words of a router that stops: nothing is booked any more.
    pub fn farewell(&mut self) -> Vec<(Target, Booking)> {
        let busy = self.told.drain().filter(|(_, told)| told.what.load != Load::default());
        let last = |sent: Sent| Sent { left: sent.begun.saturating_sub(sent.ended), ..sent };
        busy.map(|(target, told)| (target, Booking { load: Load::default(), sent: told.what.sent.map(last) }))
            .collect()
    }
}

fn begun(booking: Booking) -> u64 {
    booking.sent.map_or(0, |sent| sent.begun)
}

impl Told {
    fn is_outdated(self, now: Tick, booked: Booking) -> bool {
        let key = |what: Booking| (what.load.requests, what.load.queued, begun(what));
        let is_busy = self.what.load != Load::default() || booked.load != Load::default();
        key(self.what) != key(booked) || (is_busy && now.since(self.at) >= RENEWAL)
    }
}

/// Which other routers were heard of lately.
#[derive(Debug, Default)]
pub struct Heard {
    replicas: Vec<(ReplicaId, Tick)>,
}

impl Heard {
    /// Notes that `replica` spoke; whether it may be listened to: there may be too
    /// many already.
    pub fn note(&mut self, now: Tick, replica: ReplicaId) -> bool {
        self.replicas.retain(|(id, at)| *id != replica && now.since(*at) <= LIFETIME);
        let is_known = self.replicas.len() < MAX_REPLICAS;
        if is_known {
            self.replicas.push((replica, now));
        }
        is_known
    }

    /// How many were heard of within the lifetime of their words.
    pub fn count(&self, now: Tick) -> usize {
        self.replicas.iter().filter(|(_, at)| now.since(*at) <= LIFETIME).count()
    }
}

/// The messages that tell `loads`, each of at most `bytes` bytes; each holds one
/// load at least, however small `bytes` is. Workers with names that are too long for
/// readers are left out.
pub fn encode(domain: Domain, replica: ReplicaId, loads: &[(Target, Booking)], bytes: usize) -> Vec<Vec<u8>> {
    let (mut messages, mut body, mut count) = (Vec::new(), Vec::new(), 0);
    for (target, load) in loads.iter().filter(|(target, _)| target.worker.as_str().len() <= MAX_WORKER) {
        let before = body.len();
        write_load(&mut body, target, *load);
        if count > 0 && (count == MAX_LOADS || HEAD_BYTES + body.len() > bytes) {
            let next = body.split_off(before);
            messages.push(message(domain, replica, count, &body));
            (body, count) = (next, 0);
        }
        count += 1;
    }
    if count > 0 {
        messages.push(message(domain, replica, count, &body));
    }
    messages
}

fn message(domain: Domain, replica: ReplicaId, count: usize, body: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEAD_BYTES + body.len());
    infallible(write::write_array_len(&mut out, MESSAGE_ELEMENTS as u32));
    infallible(write::write_uint(&mut out, VERSION));
    infallible(write::write_bin(&mut out, &domain.0.to_be_bytes()));
    infallible(write::write_uint(&mut out, replica.0));
    infallible(write::write_array_len(&mut out, count as u32));
    out.extend_from_slice(body);
    out
}

fn write_load(out: &mut Vec<u8>, target: &Target, booking: Booking) {
    let Booking { load, sent } = booking;
    let elements = if sent.is_some() { LOAD_ELEMENTS } else { LEAST_LOAD_ELEMENTS };
    infallible(write::write_array_len(out, elements as u32));
    infallible(write::write_str(out, target.worker.as_str()));
    infallible(write::write_uint(out, u64::from(target.rank.0)));
    let load = [load.active_blocks, load.queued.0, load.context.0, load.requests];
    let load = load.map(|amount| amount.min(MAX_AMOUNT));
    let sent = sent.into_iter().flat_map(|sent| [sent.begun, sent.ended, sent.left]);
    for amount in load.into_iter().chain(sent.map(|count| count % ROUND)) {
        infallible(write::write_uint(out, amount));
    }
}

impl<'a> Message<'a> {
    /// Reads a message. Its names are those of `bytes`.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, MessageError> {
        let mut reader = Reader::new(bytes);
        let length = reader.array_len().at("message")?;
        let found = reader.u64().at("version")?;
        if found > VERSION {
            return Err(MessageError::Version { found });
        }
        if length < MESSAGE_ELEMENTS {
            return Err(MessageError::Range { field: "message" });
        }
        let domain = reader.bin().at("domain")?;
        let domain: [u8; 16] = domain.try_into().map_err(|_| MessageError::Range { field: "domain" })?;
        let replica = ReplicaId(reader.u64().at("replica")?);
        let count = reader.array_len().at("loads")?;
        if count > MAX_LOADS {
            return Err(MessageError::Range { field: "loads" });
        }
        let loads = (0..count).map(|_| read_load(&mut reader)).collect::<Result<_, _>>()?;
        Ok(Self { domain: Domain(u128::from_be_bytes(domain)), replica, loads })
    }
}

fn read_load<'a>(reader: &mut Reader<'a>) -> Result<TargetLoad<'a>, MessageError> {
    let length = reader.array_len().at("load")?;
    if length < LEAST_LOAD_ELEMENTS {
        return Err(MessageError::Range { field: "load" });
    }
    let worker = reader.str().at("worker")?;
    if worker.len() > MAX_WORKER {
        return Err(MessageError::Range { field: "worker" });
    }
    let rank = DpRank(reader.u32().at("rank")?);
    let load = Load {
        active_blocks: amount(reader, "active blocks")?,
        queued: Tokens(amount(reader, "queued tokens")?),
        context: Tokens(amount(reader, "context tokens")?),
        requests: amount(reader, "requests")?,
    };
    let mut read = LEAST_LOAD_ELEMENTS;
    let mut sent = None;
    if length >= LOAD_ELEMENTS {
        let mut sequences = || amount(reader, "sequences");
        sent = Some(Sent { begun: sequences()?, ended: sequences()?, left: sequences()? });
        read = LOAD_ELEMENTS;
    }
    for _ in read..length {
        reader.skip().at("load")?;
    }
    Ok(TargetLoad { worker, rank, told: Booking { load, sent } })
}

fn amount(reader: &mut Reader<'_>, field: &'static str) -> Result<u64, MessageError> {
    match reader.u64().at(field)? {
        amount if amount <= MAX_AMOUNT => Ok(amount),
        _ => Err(MessageError::Range { field }),
    }
}

trait AtField<T> {
    fn at(self, field: &'static str) -> Result<T, MessageError>;
}

impl<T> AtField<T> for Result<T, ReadError> {
    fn at(self, field: &'static str) -> Result<T, MessageError> {
        self.map_err(|source| MessageError::Field { field, source })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::WorkerId;
    use proptest::prelude::*;

    const DOMAIN: Domain = Domain(0x0102_0304_0506_0708_090a_0b0c_0d0e_0f10);

    fn target(number: usize) -> Target {
        Target::new(WorkerId::new(format!("10.0.0.{number}:8000")), 1)
    }

    /// One that sent two sequences more than it has requests, one of which was given up.
    fn load(active_blocks: u64, queued: u64, context: u64, requests: u64) -> Booking {
        let load = Load { active_blocks, queued: Tokens(queued), context: Tokens(context), requests };
        Booking { load, sent: Some(Sent { begun: requests + 2, ended: 1, left: 1 }) }
    }

    fn one_message(loads: &[(Target, Booking)]) -> Vec<u8> {
        let mut body = Vec::new();
        loads.iter().for_each(|(target, load)| write_load(&mut body, target, *load));
        let replica = ReplicaId(0x1122_3344_5566_7788);
        let bytes = message(DOMAIN, replica, loads.len(), &body);
        let is_told = loads.iter().all(|(target, _)| target.worker.as_str().len() <= MAX_WORKER);
        let whole = is_told.then(|| bytes.clone());
        assert_eq!(encode(DOMAIN, replica, loads, 1 << 20).first().cloned(), whole, "or nothing at all");
        bytes
    }

    #[test]
    fn the_bytes_are_those_of_the_document() {
        let bytes = one_message(&[(target(7), load(9, 100, 300, 2))]);
        let text: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        let expected = [
            "94 01",
            "c410 0102030405060708090a0b0c0d0e0f10",
            "cf 1122334455667788",
            "91 99 ad 31302e302e302e373a38303030 01 09 64 cd012c 02 04 01 01",
        ];
        assert_eq!(text, expected.concat().replace(' ', ""));
    }

    #[test]
    fn what_is_written_is_read() {
        let loads = [(target(1), load(1, 2, 3, 4)), (target(2), load(u64::MAX, 0, 0, 1))];
        let bytes = one_message(&loads);
        let message = Message::decode(&bytes).expect("its own");
        assert_eq!((message.domain, message.replica), (DOMAIN, ReplicaId(0x1122_3344_5566_7788)));
        let read: Vec<_> = message.loads.iter().map(|it| (it.worker, it.rank.0, it.told)).collect();
        let (first, second) = (load(1, 2, 3, 4), load(MAX_AMOUNT, 0, 0, 1));
        assert_eq!(read, [("10.0.0.1:8000", 1, first), ("10.0.0.2:8000", 1, second)]);
    }

    #[test]
    fn elements_that_are_not_known_are_passed_over() {
        let mut bytes = one_message(&[(target(1), load(1, 2, 3, 4)), (target(2), load(5, 6, 7, 8))]);
        let first = bytes.iter().position(|byte| *byte == 0x99).expect("a load of nine");
        bytes[0] = 0x95;
        bytes[first] = 0x9a;
        bytes.insert(first + 23, 0xc3);
        bytes.push(0xc0);
        let message = Message::decode(&bytes).expect("more than it needs");
        assert_eq!([message.loads[0].told, message.loads[1].told], [load(1, 2, 3, 4), load(5, 6, 7, 8)]);
    }

    /// As earlier releases write them, and as they read what is written now: six elements.
    #[test]
    fn loads_that_do_not_tell_of_sequences_are_read() {
        let old = Booking { sent: None, ..load(1, 2, 3, 4) };
        let bytes = one_message(&[(target(1), old), (target(2), load(5, 6, 7, 8))]);
        assert!(bytes.contains(&0x96), "a load of six");
        let message = Message::decode(&bytes).expect("both kinds");
        assert_eq!([message.loads[0].told, message.loads[1].told], [old, load(5, 6, 7, 8)]);
        let [six, nine] = [old, load(1, 2, 3, 4)].map(|told| one_message(&[(target(1), told)]));
        assert_eq!(nine[31..six.len()], six[31..], "what is new comes behind what they know");
    }

    #[test]
    fn what_cannot_be_is_refused_with_its_reason() {
        #[track_caller]
        fn check(why: &str, bytes: &[u8], reason: &str) {
            let error = Message::decode(bytes).expect_err(why);
            assert_eq!(error.reason(), reason, "{why}: {error}");
        }
        let good = one_message(&[(target(1), load(1, 2, 3, 4))]);
        let changed = |at: usize, byte: u8| {
            let mut bytes = good.clone();
            bytes[at] = byte;
            bytes
        };
        check("nothing", &[], "unreadable_field");
        check("no array", b"{}", "unreadable_field");
        check("a newer one", &changed(1, 2), "newer_version");
        check("too short", &changed(0, 0x93), "out_of_range");
        check("a short domain", &[0x94, 1, 0xc4, 1, 0, 1, 0x90], "out_of_range");
        check(
            "more loads than bytes",
            &[&good[..29], &[0xdd, 255, 255, 255, 255]].concat(),
            "unreadable_field",
        );
        let many = [&good[..29], &[0xdd, 0, 0, 0x10, 0x01][..], &good[30..].repeat(4097)].concat();
        check("more loads than are read", &many, "out_of_range");
        let long = Target::new(WorkerId::new("x".repeat(262)), 0);
        check("a long name", &one_message(&[(long, load(1, 0, 0, 1))]), "out_of_range");
        check("a load of five", &changed(30, 0x95), "out_of_range");
        let mut huge = good.clone();
        huge.pop();
        huge.extend([0xcf, 0, 0, 1, 0, 0, 0, 0, 1]);
        check("an absurd amount", &huge, "out_of_range");
    }

    #[test]
    fn messages_are_cut_below_the_limit() {
        let loads: Vec<_> = (0..9_000).map(|at| (target(at), load(1, 1 << 20, 1 << 20, 1))).collect();
        for bytes in [0, 100, 1_000, 1 << 30] {
            let messages = encode(DOMAIN, ReplicaId(u64::MAX), &loads, bytes);
            let read: Vec<_> = messages.iter().map(|it| Message::decode(it).expect("its own")).collect();
            let told = || read.iter().flat_map(|message| &message.loads);
            assert_eq!(told().count(), loads.len());
            assert!(told().zip(&loads).all(|(told, (target, _))| told.worker == target.worker.as_str()));
            let fits = |message: &Vec<u8>| message.len() <= bytes.max(HEAD_BYTES + 50);
            assert!(messages.iter().all(fits), "{bytes}");
            assert!(read.iter().all(|message| message.loads.len() <= MAX_LOADS), "{bytes}");
        }
        assert_eq!(encode(DOMAIN, ReplicaId(1), &loads, 0).len(), loads.len(), "one at least");
        assert!(encode(DOMAIN, ReplicaId(1), &[], 100).is_empty(), "nothing is not told");
    }

    #[test]
    fn only_what_matters_is_told() {
        let (mut telling, one) = (Telling::default(), target(1));
        let mut check = |why: &str, now: u64, (blocks, queued, context, requests, begun), expected: bool| {
            let booked = Booking {
                sent: Some(Sent { begun, ..Sent::default() }),
                ..load(blocks, queued, context, requests)
            };
            let due = telling.due(Tick(now), [(&one, booked)].into_iter());
            let told = if expected { vec![(one.clone(), booked)] } else { vec![] };
            assert_eq!(due, told, "{why}");
        };
        check("no load", 0, (0, 0, 0, 0, 0), false);
        check("a request", 10, (5, 80, 80, 1, 1), true);
        check("no change", 20, (5, 80, 80, 1, 1), false);
        check("its prefill is done", 30, (5, 0, 80, 1, 1), true);
        check("a token more", 40, (6, 0, 81, 1, 1), false);
        check("not a second yet", 1_029, (6, 0, 99, 1, 1), false);
        check("a second", 1_030, (6, 0, 99, 1, 1), true);
        check("renewed", 1_040, (6, 0, 99, 1, 1), false);
        check("one more", 1_050, (7, 9, 120, 2, 2), true);
        check("another in the place of one", 1_055, (7, 9, 120, 2, 6), true);
        check("all gone", 1_060, (0, 0, 0, 0, 6), true);
        check("said once", 1_070, (0, 0, 0, 0, 6), false);
        check("nor renewed", 9_000, (0, 0, 0, 0, 6), false);
        check("one came and went", 9_010, (0, 0, 0, 0, 7), true);
        check("said once, too", 9_020, (0, 0, 0, 0, 7), false);
    }

    #[test]
    fn targets_that_left_are_forgotten_and_the_rest_gets_last_words() {
        let (mut telling, one, two, idle) = (Telling::default(), target(1), target(2), target(3));
        let (busy, nothing) = (load(1, 1, 1, 1), load(0, 0, 0, 0));
        let booked = [(&one, busy), (&two, busy), (&idle, nothing)].into_iter();
        assert_eq!(telling.due(Tick(0), booked).len(), 3, "what came and went is told as well");
        for second in 1..=4 {
            let booked = [(&two, busy), (&idle, nothing)].into_iter();
            assert_eq!(telling.due(Tick(second * 1_000), booked).len(), 1);
        }
        let last = Booking { load: Load::default(), sent: Some(Sent { begun: 3, ended: 1, left: 2 }) };
        assert_eq!(telling.farewell(), [(two, last)]);
        assert!(telling.farewell().is_empty());
    }

    #[test]
    fn those_who_fell_silent_make_room() {
        let mut heard = Heard::default();
        assert!((0..64).all(|id| heard.note(Tick(id), ReplicaId(id))));
        assert!(!heard.note(Tick(100), ReplicaId(64)), "too many");
        assert!(heard.note(Tick(100), ReplicaId(5)), "one that is known");
        assert_eq!(heard.count(Tick(3_000)), 64);
        assert_eq!(heard.count(Tick(3_063)), 2, "the last of them, and the one that spoke again");
        assert!(heard.note(Tick(3_001), ReplicaId(64)), "the first is silent");
        assert_eq!(heard.count(Tick(9_000)), 0);
    }

    proptest! {
        #[test]
        fn noise_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..200), cut in 0usize..200) {
            let _ = Message::decode(&bytes);
            let good = one_message(&[(target(1), load(1, 2, 3, 4)), (target(2), load(1, 2, 3, 4))]);
            let _ = Message::decode(&good[..cut.min(good.len())]);
        }
    }
}
