//! One rank's engine sockets to a sound stream of changes.
//!
//! Subscribe first, then replay from the last message known, then drop by
//! sequence number: so nothing is missed in between. Every reconnection and
//! every idle spell is checked by asking for the last message again; an engine
//! that answers with another payload under its number, or not at all, has been
//! restarted. What cannot be repaired is said, and the view is rebuilt from
//! empty once its credit is used up: a view that began empty claims too little,
//! never too much.
//!
//! Runs beside the engine (in the bridge) and in the router (ZMQ feed); both
//! give it a [`Sink`]. It owns the digester and holds the view's full content.

use std::time::Duration;

use bytes::Bytes;
use kvrouter_core::blocks::Identity;
use kvrouter_core::events::Delta;
use kvrouter_core::events::digest::Digester;
use kvrouter_core::events::envelope::Status;
use kvrouter_core::events::sequence::{Sequence, Source, Step, payload_digest};
use kvrouter_core::events::wire;
use kvrouter_core::ids::Epoch;
use kvrouter_core::units::BlockSize;
use tokio::time::{Instant, timeout};

use super::zmtp::{Connection, Endpoint, Limits, ZmtpError};

/// Between two looks at a connection, and so between two proofs.
pub const TICK: Duration = Duration::from_secs(1);
/// Without a message for this long the last one is asked for again.
const IDLE_CHECK: Duration = Duration::from_secs(5);
/// Between two attempts to connect.
const RECONNECT: Duration = Duration::from_millis(500);
/// A replay that sends nothing for this long has ended: its end marker can be
/// dropped by the engine's own high-water mark.
const REPLAY_SILENCE: Duration = Duration::from_secs(2);
/// How long one catching up may take while live messages wait. It goes on from
/// where it stopped.
const REPLAY_LIMIT: Duration = Duration::from_secs(4);
/// After a replay that failed the next one waits this long, and longer each time.
const REPLAY_PAUSE: Duration = Duration::from_secs(2);
/// Replays in a row that brought nothing new before a gap counts as lost.
const REPLAY_ATTEMPTS: u32 = 3;
/// A view in doubt is kept for so long at least, however short its credit: a
/// later replay may still end the doubt.
const KEPT_AT_LEAST: Duration = Duration::from_secs(10);
/// The end marker of a replay.
const END: [u8; 8] = [0xff; 8];

/// What a rank's stream tells, in order.
#[derive(Debug)]
pub enum Told {
    /// Forget the view; `epoch` begins.
    NewEpoch {
        /// The life that begins.
        epoch: Epoch,
    },
    /// Message `seq` changed this. Numbers count from 1; several calls in a row
    /// may be parts of one catching up.
    Changed {
        /// The life it belongs to.
        epoch: Epoch,
        /// Its number.
        seq: u64,
        /// What changed; may be nothing.
        deltas: Vec<Delta>,
    },
    /// The view is current: the stream was caught up, or continuity was proven.
    Current {
        /// The life it belongs to.
        epoch: Epoch,
        /// Number of the last message in it.
        seq: u64,
        /// The engine's own number and the payload digest of that message.
        last: Option<(u64, u64)>,
    },
    /// Something about an event that a metric should count: a stable label.
    Counted(&'static str),
}

/// Where a rank's stream goes.
pub trait Sink: Send {
    /// Takes what happened. `status` and `page` describe the view after it.
    fn tell(&mut self, told: Told, status: Status, page: u32) -> impl Future<Output = ()> + Send;
    /// Milliseconds since 1970, for epochs.
    fn unix_ms(&self) -> u64;
    /// How long a view earns credit that has a gap or is in doubt. It is rebuilt
    /// from empty thereafter.
    fn credit_lasts(&self) -> Duration;
    /// Waits for a wish to see the whole view, answered through
    /// [`Sink::snapshot`]; pends for ever where nobody asks. Cancel-safe.
    fn snapshot_wanted(&mut self) -> impl Future<Output = ()> + Send;
    /// Answers the wish with the view as of message `seq`.
    fn snapshot(&mut self, view: View<'_>) -> impl Future<Output = ()> + Send;
}

/// A rank's view at one point of its stream.
#[derive(Debug)]
pub struct View<'a> {
    /// Its content.
    pub digester: &'a Digester,
    /// The life it is of.
    pub epoch: Epoch,
    /// The message it stands behind.
    pub seq: u64,
    /// How sound it is.
    pub status: Status,
}

/// What is remembered of a stream across a restart of whoever reads it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Remembered {
    /// The life.
    pub epoch: u64,
    /// The engine's number of the last message; `None` before the first.
    pub last: Option<(u64, u64)>,
}

/// One rank's stream.
#[derive(Debug)]
pub struct Stream {
    publisher: Endpoint,
    replay: Option<Endpoint>,
    digester: Digester,
    sequence: Sequence,
    epoch: Epoch,
    /// What was remembered and is not yet confirmed by the engine. Until it is,
    /// nothing is told: the epoch is in doubt.
    remembered: Option<Remembered>,
    connected: bool,
    unsequenced: bool,
    /// The rank that is read, and of how many.
    rank: (u32, u32),
    /// Whether a batch of this life named another rank.
    rank_mismatch: bool,
    /// Messages without numbers, counted by us.
    counted: u64,
    /// Since when a gap is unrepaired.
    gap: Option<Instant>,
    /// Since when it is not proven that the engine is still the one we know.
    doubt: Option<Instant>,
    last_message: Instant,
    /// Replays that failed in a row, and when the next one may be tried.
    failed_replays: u32,
    replay_after: Instant,
}

/// How a replay ended.
enum Replayed {
    /// It proved or brought something: the stream is continuous.
    Continuous,
    /// The engine lives anew.
    Restarted,
    /// It brought nothing that closes the gap, or there is no replay socket.
    Useless,
}

impl Stream {
    /// The stream of a rank (and how many its worker has) in blocks of `size`
    /// tokens. `remembered` is what an earlier reader of the same engine left.
    pub fn new(
        (publisher, replay): (Endpoint, Option<Endpoint>),
        rank: (u32, u32),
        identity: Identity,
        size: BlockSize,
        remembered: Option<Remembered>,
    ) -> Self {
        Self {
            publisher,
            replay,
            rank,
            rank_mismatch: false,
            digester: Digester::new(identity, size),
            sequence: Sequence::default(),
            epoch: Epoch(remembered.map_or(0, |remembered| remembered.epoch)),
            remembered,
            connected: false,
            unsequenced: false,
            counted: 0,
            gap: None,
            doubt: None,
            last_message: Instant::now(),
            failed_replays: 0,
            replay_after: Instant::now(),
        }
    }

    /// Reads for ever.
    pub async fn run(mut self, sink: &mut impl Sink) {
        if self.remembered.is_none() {
            self.begin_epoch(sink).await;
        }
        loop {
            match Connection::subscribe(&self.publisher, b"", Limits::default()).await {
                Ok(connection) => {
                    let error = self.follow(connection, sink).await;
                    tracing::info!(target: "kv_router::feed", endpoint = %self.publisher, error = %crate::chain(&error), "event connection lost");
                }
                Err(error) => {
                    tracing::debug!(target: "kv_router::feed", endpoint = %self.publisher, error = %crate::chain(&error), "unable to follow events");
                    sink.tell(Told::Counted(error.reason()), self.status(), self.page()).await;
                }
            }
            self.connected = false;
            let pause = tokio::time::sleep(RECONNECT);
            tokio::pin!(pause);
            loop {
                tokio::select! {
                    () = &mut pause => break,
                    () = sink.snapshot_wanted() => self.show(sink).await,
                }
            }
            self.tell_current(sink).await;
        }
    }

    /// Follows one connection until it is lost.
    async fn follow(&mut self, mut connection: Connection, sink: &mut impl Sink) -> ZmtpError {
        tracing::info!(target: "kv_router::feed", endpoint = %self.publisher, "following events");
        self.connected = true;
        if self.unsequenced {
            // Nothing can tell whether it is the same engine: begin anew.
            self.restart(sink).await;
            self.digester.mark_incomplete();
        }
        self.prove(sink).await;
        self.confirm(sink).await;
        self.tell_current(sink).await;
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                message = connection.recv() => match message {
                    Ok(frames) => self.message(&frames, sink).await,
                    Err(error) => return error,
                },
                _ = tick.tick() => self.on_tick(sink).await,
                () = sink.snapshot_wanted() => self.show(sink).await,
            }
        }
    }

    /// Keeps the remembered epoch if the engine proves that it is still the one
    /// remembered and tells everything from its beginning; else begins another,
    /// which makes routers fetch the view anew.
    async fn confirm(&mut self, sink: &mut impl Sink) {
        let Some(remembered) = self.remembered.take() else { return };
        let same = remembered.last.is_some_and(|(seq, digest)| self.sequence.has(seq, digest));
        if !same || self.digester.quality().incomplete {
            self.begin_epoch(sink).await;
        }
    }

    async fn show(&mut self, sink: &mut impl Sink) {
        if self.remembered.is_some() {
            // The epoch is in doubt: whoever asks asks again.
            return;
        }
        let (epoch, seq, status) = (self.epoch, self.number(), self.status());
        sink.snapshot(View { digester: &self.digester, epoch, seq, status }).await;
    }

    async fn on_tick(&mut self, sink: &mut impl Sink) {
        let kept = sink.credit_lasts().max(KEPT_AT_LEAST);
        let over = |since: Option<Instant>| since.is_some_and(|since| since.elapsed() >= kept);
        if over(self.gap) || over(self.doubt) {
            self.rebuild(sink).await;
        }
        if self.last_message.elapsed() >= IDLE_CHECK && self.replay.is_some() && !self.unsequenced {
            self.last_message = Instant::now();
            // The connection is the same, so the engine is too; a replay can only
            // tell what was lost on the way, or end an older doubt.
            if self.catch_up(sink).await {
                self.doubt = None;
            }
        }
        self.tell_current(sink).await;
    }

    /// Reads one message from the publisher: `[topic, seq, payload]`, or
    /// `[topic, payload]` from engines that number nothing.
    async fn message(&mut self, frames: &[Bytes], sink: &mut impl Sink) {
        self.last_message = Instant::now();
        let Some((payload, seq)) = split(frames) else {
            return sink.tell(Told::Counted("bad_frames"), self.status(), self.page()).await;
        };
        match seq {
            Some(seq) => self.numbered(seq, payload, sink).await,
            None => {
                self.unsequenced = true;
                self.counted += 1;
                self.apply(payload, sink).await;
            }
        }
    }

    /// Handles a numbered message from the publisher, repairing what is missing
    /// before it.
    async fn numbered(&mut self, seq: u64, payload: &[u8], sink: &mut impl Sink) {
        let digest = payload_digest(payload);
        let begins = self.sequence.last().is_none();
        match self.sequence.observe(Source::Live, seq, digest) {
            Step::Apply => {
                if begins {
                    // The engine's first message: nothing can have been missed.
                    self.digester.reset();
                }
                self.apply(payload, sink).await;
            }
            Step::Duplicate => {}
            Step::Restarted => {
                self.restart(sink).await;
                self.catch_up(sink).await;
                self.settle(seq, digest, payload, sink).await;
            }
            Step::Repair { .. } => {
                sink.tell(Told::Counted("gap"), self.status(), self.page()).await;
                self.catch_up(sink).await;
                self.settle(seq, digest, payload, sink).await;
            }
        }
    }

    /// Applies a message after a replay did what it could.
    async fn settle(&mut self, seq: u64, digest: u64, payload: &[u8], sink: &mut impl Sink) {
        match self.sequence.observe(Source::Live, seq, digest) {
            Step::Apply => self.apply(payload, sink).await,
            Step::Duplicate => {}
            Step::Restarted | Step::Repair { .. } => {
                if self.sequence.last().is_none() {
                    // Nothing was claimed yet, so nothing can be claimed wrongly.
                    self.digester.mark_incomplete();
                } else {
                    self.open_gap(sink).await;
                }
                self.sequence.skip_to(seq, digest);
                self.apply(payload, sink).await;
            }
        }
    }

    async fn open_gap(&mut self, sink: &mut impl Sink) {
        self.gap.get_or_insert_with(Instant::now);
        sink.tell(Told::Counted("gap_unrepaired"), self.status(), self.page()).await;
    }

    /// Catches up, and notes whether that proved that the engine is still the one
    /// we know. Where it did not, the view is in doubt from now on.
    async fn prove(&mut self, sink: &mut impl Sink) {
        let known = self.sequence.last().is_some();
        if self.catch_up(sink).await {
            self.doubt = None;
        } else if known && self.sequence.last().is_some() {
            self.doubt.get_or_insert_with(Instant::now);
        }
    }

    /// Asks the replay socket for everything from the last message on; whether
    /// the stream is continuous now. A replay socket that does not answer is
    /// left alone for a while: live messages are waiting meanwhile.
    async fn catch_up(&mut self, sink: &mut impl Sink) -> bool {
        if Instant::now() < self.replay_after {
            return false;
        }
        let caught_up = timeout(REPLAY_LIMIT, self.replay_until_current(sink)).await.unwrap_or(false);
        if caught_up || self.replay.is_none() {
            self.failed_replays = 0;
        } else {
            let pause = REPLAY_PAUSE.saturating_mul(1 << self.failed_replays.min(5));
            self.failed_replays += 1;
            self.replay_after = Instant::now() + pause;
        }
        if self.sequence.last().is_none() && !caught_up {
            // The engine may hold what it stored before we came.
            self.digester.mark_incomplete();
        }
        caught_up
    }

    async fn replay_until_current(&mut self, sink: &mut impl Sink) -> bool {
        let mut useless = 0;
        while useless < REPLAY_ATTEMPTS {
            let before = self.sequence.last();
            match self.replay_once(sink).await {
                Replayed::Continuous => return true,
                Replayed::Restarted => self.restart(sink).await,
                Replayed::Useless if self.sequence.last() == before => useless += 1,
                Replayed::Useless => useless = 0,
            }
            if self.replay.is_none() {
                break;
            }
        }
        false
    }

    /// One replay, from the last message known.
    async fn replay_once(&mut self, sink: &mut impl Sink) -> Replayed {
        let Some(endpoint) = self.replay.clone() else { return Replayed::Useless };
        let proof = self.sequence.last();
        let from = proof.map_or(0, |(seq, _)| seq);
        let mut connection = match ask_replay(&endpoint, from).await {
            Ok(connection) => connection,
            Err(error) => {
                tracing::debug!(target: "kv_router::feed", %endpoint, error = %crate::chain(&error), "unable to ask for a replay");
                sink.tell(Told::Counted(error.reason()), self.status(), self.page()).await;
                return Replayed::Useless;
            }
        };
        let (mut first, mut ended) = (true, false);
        while let Ok(Ok(frames)) = timeout(REPLAY_SILENCE, connection.recv()).await {
            let Some((payload, seq)) = split_reply(&frames) else { break };
            if seq == END {
                ended = true;
                break;
            }
            let (seq, digest) = (u64::from_be_bytes(seq), payload_digest(payload));
            if first && proof.is_some_and(|proof| proof != (seq, digest)) {
                // The engine does not have our last message under its number.
                return Replayed::Restarted;
            }
            if first && proof.is_none() && seq > 0 {
                // Its buffer has rolled over: the beginning is gone.
                self.digester.mark_incomplete();
                self.sequence.skip_to(seq, digest);
                self.apply(payload, sink).await;
            } else {
                match self.sequence.observe(Source::Replay, seq, digest) {
                    Step::Apply => self.apply(payload, sink).await,
                    Step::Duplicate => {}
                    Step::Restarted => return Replayed::Restarted,
                    // Replies were dropped on the way: ask again from here.
                    Step::Repair { .. } => return Replayed::Useless,
                }
            }
            first = false;
        }
        match (first, ended, proof) {
            // Nothing came at all: right for an engine that has sent nothing.
            (true, true, None) => Replayed::Continuous,
            (true, true, Some(_)) => Replayed::Restarted,
            (false, true, _) => Replayed::Continuous,
            (_, false, _) => Replayed::Useless,
        }
    }

    /// Applies a payload that continues the stream.
    async fn apply(&mut self, payload: &[u8], sink: &mut impl Sink) {
        let deltas = match wire::decode(payload) {
            Ok(batch) if batch.is_of(self.rank.0, self.rank.1) => self.digest(&batch, sink).await,
            Ok(batch) => {
                self.refuse(&batch, sink).await;
                Vec::new()
            }
            Err(error) => {
                tracing::warn!(target: "kv_router::feed", endpoint = %self.publisher, error = %crate::chain(&error), "batch rejected");
                sink.tell(Told::Counted(error.reason()), self.status(), self.page()).await;
                // It may have held removals.
                self.gap.get_or_insert_with(Instant::now);
                Vec::new()
            }
        };
        if deltas.first() == Some(&Delta::Cleared) {
            self.gap = None;
        }
        if self.remembered.is_none() {
            let told = Told::Changed { epoch: self.epoch, seq: self.number(), deltas };
            sink.tell(told, self.status(), self.page()).await;
        }
    }

    /// Leaves out a batch that names another rank: its blocks are in another
    /// cache. Nothing of this life counts from here on, for what it says may have
    /// been missed.
    async fn refuse(&mut self, batch: &wire::Batch, sink: &mut impl Sink) {
        if !self.rank_mismatch {
            let (rank, ranks) = self.rank;
            tracing::warn!(target: "kv_router::feed", endpoint = %self.publisher, rank, ranks, named = batch.rank, "events of another rank: their blocks are credited to nobody");
        }
        self.rank_mismatch = true;
        sink.tell(Told::Counted("rank_mismatch"), self.status(), self.page()).await;
    }

    /// Digests a batch and counts what was odd about it.
    async fn digest(&mut self, batch: &wire::Batch, sink: &mut impl Sink) -> Vec<Delta> {
        for event in &batch.events {
            let odd = match event {
                wire::Event::Rejected { error, .. } => {
                    tracing::debug!(target: "kv_router::feed", endpoint = %self.publisher, error = %crate::chain(error), "event rejected");
                    error.reason()
                }
                wire::Event::Unknown => "unknown_event",
                wire::Event::Stored(_) | wire::Event::Removed(_) | wire::Event::Cleared => continue,
            };
            sink.tell(Told::Counted(odd), self.status(), self.page()).await;
        }
        let before = self.digester.counts();
        let deltas = self.digester.apply(batch);
        let after = self.digester.counts();
        if after.orphans > before.orphans {
            sink.tell(Told::Counted("orphan"), self.status(), self.page()).await;
        }
        if after.dropped > before.dropped {
            sink.tell(Told::Counted("store_dropped"), self.status(), self.page()).await;
        }
        if self.digester.quality().lost_removal {
            self.gap.get_or_insert_with(Instant::now);
        }
        deltas
    }

    /// The engine lives anew.
    async fn restart(&mut self, sink: &mut impl Sink) {
        tracing::info!(target: "kv_router::feed", endpoint = %self.publisher, "engine restarted: its view begins anew");
        self.sequence = Sequence::default();
        self.digester.reset();
        (self.gap, self.doubt) = (None, None);
        (self.unsequenced, self.counted) = (false, 0);
        self.rank_mismatch = false;
        self.begin_epoch(sink).await;
    }

    /// Begins anew from empty, because a gap could not be repaired: from here on
    /// the view claims too little, never too much. A replay would not help, it
    /// lacks the same messages. The engine's own cache is left alone.
    async fn rebuild(&mut self, sink: &mut impl Sink) {
        self.digester.reset();
        self.digester.mark_incomplete();
        (self.gap, self.doubt) = (None, None);
        self.rank_mismatch = false;
        self.begin_epoch(sink).await;
    }

    async fn begin_epoch(&mut self, sink: &mut impl Sink) {
        self.epoch = Epoch(sink.unix_ms().max(self.epoch.0 + 1));
        self.remembered = None;
        sink.tell(Told::NewEpoch { epoch: self.epoch }, self.status(), self.page()).await;
    }

    async fn tell_current(&mut self, sink: &mut impl Sink) {
        if self.remembered.is_none() {
            let told = Told::Current { epoch: self.epoch, seq: self.number(), last: self.sequence.last() };
            sink.tell(told, self.status(), self.page()).await;
        }
    }

    /// Numbers count from 1, so that 0 is "before the first".
    fn number(&self) -> u64 {
        if self.unsequenced { self.counted } else { self.sequence.expects() }
    }

    fn status(&self) -> Status {
        let mut status = Status::of(self.digester.quality());
        status.unsound |= self.gap.is_some();
        status.disconnected = !self.connected || self.doubt.is_some();
        status.unsequenced = self.unsequenced;
        status.rank_mismatch = self.rank_mismatch;
        status
    }

    fn page(&self) -> u32 {
        self.digester.quality().page.unwrap_or(0)
    }
}

/// Opens a replay from `from` on. DEALER, because REQ would read one reply only.
async fn ask_replay(endpoint: &Endpoint, from: u64) -> Result<Connection, ZmtpError> {
    let mut connection = Connection::dealer(endpoint, Limits::default()).await?;
    connection.send(&[b"", &from.to_be_bytes()]).await?;
    Ok(connection)
}

/// Payload and number of a replayed message, read from its end: what stands
/// before them differs between engines.
fn split_reply(frames: &[Bytes]) -> Option<(&[u8], [u8; 8])> {
    let [.., seq, payload] = frames else { return None };
    Some((payload, <[u8; 8]>::try_from(&seq[..]).ok()?))
}

/// Payload and number of a published message; `None` for fewer than two frames
/// or a number that is none.
fn split(frames: &[Bytes]) -> Option<(&[u8], Option<u64>)> {
    match frames {
        [_topic, payload] => Some((payload, None)),
        [.., seq, payload] => {
            let seq = <[u8; 8]>::try_from(&seq[..]).ok()?;
            Some((payload, Some(u64::from_be_bytes(seq))))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts the lives that begin.
    struct Lives {
        credit: Duration,
        begun: u32,
    }

    impl Sink for Lives {
        async fn tell(&mut self, told: Told, _: Status, _: u32) {
            self.begun += u32::from(matches!(told, Told::NewEpoch { .. }));
        }

        fn unix_ms(&self) -> u64 {
            0
        }

        fn credit_lasts(&self) -> Duration {
            self.credit
        }

        async fn snapshot_wanted(&mut self) {
            std::future::pending().await
        }

        async fn snapshot(&mut self, _: View<'_>) {}
    }

    #[tokio::test(start_paused = true)]
    async fn a_view_with_a_gap_or_in_doubt_is_rebuilt_when_its_credit_is_over() {
        for (credit, kept) in [(3, 10), (10, 10), (60, 60)] {
            for doubt in [false, true] {
                let mut sink = Lives { credit: Duration::from_secs(credit), begun: 0 };
                let size = BlockSize::new(16).expect("not zero");
                let identity = Identity::new(kvrouter_core::blocks::IdentitySeed::new(b""));
                let nobody = "tcp://127.0.0.1:1".parse().expect("an endpoint");
                let mut stream = Stream::new((nobody, None), (0, 1), identity, size, None);
                match doubt {
                    true => stream.doubt = Some(Instant::now()),
                    false => stream.open_gap(&mut sink).await,
                }
                tokio::time::advance(Duration::from_secs(kept) - TICK).await;
                stream.on_tick(&mut sink).await;
                assert_eq!(sink.begun, 0, "{credit} s, doubt {doubt}: kept as long as it may earn credit");
                tokio::time::advance(TICK).await;
                stream.on_tick(&mut sink).await;
                assert_eq!(sink.begun, 1, "{credit} s, doubt {doubt}: rebuilt");
                stream.on_tick(&mut sink).await;
                assert_eq!(sink.begun, 1, "once");
            }
        }
    }

    /// Cases E10 and K6.
    #[tokio::test]
    async fn a_batch_of_another_rank_makes_the_view_worthless_until_the_next_life() {
        let mut sink = Lives { credit: Duration::from_secs(10), begun: 0 };
        let size = BlockSize::new(16).expect("not zero");
        let identity = Identity::new(kvrouter_core::blocks::IdentitySeed::new(b""));
        let nobody = "tcp://127.0.0.1:1".parse().expect("an endpoint");
        let mut stream = Stream::new((nobody, None), (1, 2), identity, size, None);
        // `[0.0, [], rank]`
        for (named, expected) in [(1, false), (3, false), (2, true), (1, true)] {
            let payload = [&b"\x93\xcb\0\0\0\0\0\0\0\0\x90"[..], &[named]].concat();
            stream.apply(&payload, &mut sink).await;
            assert_eq!(stream.status().rank_mismatch, expected, "rank {named}");
        }
        stream.restart(&mut sink).await;
        assert!(!stream.status().rank_mismatch);
    }

    /// Case C09: live messages and replayed ones differ in what precedes the number.
    #[test]
    fn replies_are_read_with_a_topic_an_empty_frame_or_nothing_before_the_number() {
        let (seq, payload) = (Bytes::from_static(&[0, 0, 0, 0, 0, 0, 1, 2]), Bytes::from_static(b"batch"));
        let expected = Some((&b"batch"[..], [0, 0, 0, 0, 0, 0, 1, 2]));
        for before in [vec![], vec![Bytes::from_static(b"kv")], vec![Bytes::new()], vec![Bytes::new(); 2]] {
            let frames = [before.clone(), vec![seq.clone(), payload.clone()]].concat();
            assert_eq!(split_reply(&frames), expected, "{before:?}");
        }
        assert_eq!(split_reply(&[payload.clone(), payload]), None, "a number has eight bytes");
        let live = [Bytes::from_static(b"kv"), seq, Bytes::from_static(b"batch")];
        assert_eq!(split(&live), Some((&b"batch"[..], Some(258))));
    }
}
