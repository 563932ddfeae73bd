//! Request bodies on their way in: read in whole, within limits.
//!
//! A body is held until its request is answered, so bodies compete for memory
//! with each other and with the views. All of them draw on one [`Budget`], piece
//! by piece as they arrive: what a client only announces costs nothing.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body::Body;
use http_body_util::BodyExt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout};

use super::errors::ClientError;

/// What all bodies together may hold, in KiB: 2 GiB. 32 bodies of the largest
/// size that is allowed by default, or 20,000 of 100 KiB, more than a router
/// serves at once; while a body is put together and parsed it takes a few times
/// its size.
const MAX_BODY_KIB: usize = 2 << 20;
/// How long a body waits for room before its client is told to come back.
const ROOM_WAIT: Duration = Duration::from_secs(5);
/// How long a client may take to its next piece. A slow link delivers
/// something; a client that stopped would keep its part of the budget.
const PIECE_TIMEOUT: Duration = Duration::from_secs(30);

/// What has to come of a body on average once [`HEAD_START`] is over, in bytes a
/// second. Clients that drip a piece now and then would keep their parts of the
/// budget for hours, and together all of it.
const LEAST_RATE: u64 = 8 << 10;
/// How long a body may be slower than that.
const HEAD_START: Duration = Duration::from_secs(60);

/// Room for the bodies of one process. Clones share it.
#[derive(Clone, Debug)]
pub struct Budget(Arc<Semaphore>);

/// A whole body and its part of the budget.
#[derive(Debug)]
pub struct Held {
    /// The body.
    pub bytes: Bytes,
    /// Given back when this is dropped.
    _room: Room,
}

/// A part of the budget.
#[derive(Debug, Default)]
struct Room(Option<OwnedSemaphorePermit>);

impl Default for Budget {
    fn default() -> Self {
        Self::of_kib(MAX_BODY_KIB)
    }
}

impl Budget {
    fn of_kib(kib: usize) -> Self {
        Self(Arc::new(Semaphore::new(kib)))
    }
}

impl Room {
    /// Makes room for `bytes` in all. Part of a KiB counts as one.
    async fn grow(&mut self, budget: &Budget, bytes: usize) -> Result<(), ClientError> {
        let held = self.0.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        let more = bytes.div_ceil(1024).saturating_sub(held);
        if more == 0 {
            return Ok(());
        }
        let more = u32::try_from(more).map_err(|_| ClientError::BodiesOverloaded)?;
        let permit = timeout(ROOM_WAIT, Arc::clone(&budget.0).acquire_many_owned(more)).await;
        let Ok(Ok(permit)) = permit else { return Err(ClientError::BodiesOverloaded) };
        match &mut self.0 {
            Some(held) => held.merge(permit),
            none => *none = Some(permit),
        }
        Ok(())
    }
}

/// Bytes of a body that is too large which are read and forgotten: most such
/// bodies are a picture too many, not gigabytes.
const DISCARDED_BYTES: usize = 64 << 20;
/// How long that may take.
const DISCARD_TIMEOUT: Duration = Duration::from_secs(5);

/// How long the next piece may take of a body of which `received` bytes came in
/// `elapsed`, and what it is that it comes too late for.
fn patience(received: usize, elapsed: Duration) -> (Duration, ClientError) {
    let due = HEAD_START + Duration::from_secs(received as u64 / LEAST_RATE);
    match due.saturating_sub(elapsed) {
        left if left < PIECE_TIMEOUT => (left, ClientError::BodyTooSlow { least: LEAST_RATE }),
        _ => (PIECE_TIMEOUT, ClientError::BodyTimeout { limit: PIECE_TIMEOUT }),
    }
}

/// Reads `body` to its end: at most `limit` bytes, each piece and the whole in time
/// and within the budget. Trailers are left out.
pub async fn read<B>(budget: &Budget, mut body: B, limit: usize) -> Result<Held, ClientError>
where
    B: Body<Data = Bytes> + Unpin,
{
    if body.size_hint().lower() > limit as u64 {
        discard(&mut body).await;
        return Err(ClientError::BodyTooLarge { limit });
    }
    let mut room = Room::default();
    let mut whole = BytesMut::new();
    // Waiting for room is not the client's slowness.
    let (began, mut waited) = (Instant::now(), Duration::ZERO);
    loop {
        let (patience, too_late) = patience(whole.len(), began.elapsed().saturating_sub(waited));
        let piece = match timeout(patience, body.frame()).await {
            Err(_) => return Err(too_late),
            Ok(None) => break,
            Ok(Some(Err(_))) => return Err(ClientError::BodyUnreadable),
            Ok(Some(Ok(frame))) => match frame.into_data() {
                Ok(piece) => piece,
                Err(_trailers) => continue,
            },
        };
        if piece.len() > limit - whole.len() {
            drop(std::mem::take(&mut whole));
            discard(&mut body).await;
            return Err(ClientError::BodyTooLarge { limit });
        }
        let asked = Instant::now();
        room.grow(budget, whole.len() + piece.len()).await?;
        waited += asked.elapsed();
        if whole.is_empty() && body.is_end_stream() {
            // The usual case, a body in one piece, is not copied.
            return Ok(Held { bytes: piece, _room: room });
        }
        // Pieces are copied together as they come: many small ones, kept apart,
        // would take a multiple of what they hold. Room is made for as much again
        // as there is, but not for more than is still to come.
        if whole.capacity() - whole.len() < piece.len() {
            let rest = usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX);
            whole.reserve(piece.len().saturating_add(rest.min(whole.len())));
        }
        whole.extend_from_slice(&piece);
    }
    Ok(Held { bytes: whole.freeze(), _room: room })
}

/// Reads on for a while and forgets: a client that still writes when the answer
/// comes would see a broken connection instead of it.
async fn discard<B>(body: &mut B)
where
    B: Body<Data = Bytes> + Unpin,
{
    let mut left = DISCARDED_BYTES;
    let reading = async {
        while let Some(Ok(frame)) = body.frame().await {
            left = left.saturating_sub(frame.data_ref().map_or(0, Bytes::len));
            if left == 0 {
                return;
            }
        }
    };
    let _ = timeout(DISCARD_TIMEOUT, reading).await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;

    use futures::stream::{self, StreamExt};
    use http_body::Frame;
    use http_body_util::{Full, StreamBody};

    fn pieces(all: &[&'static str]) -> impl Body<Data = Bytes, Error = Infallible> + Unpin + use<> {
        let frame = |piece: &'static str| Ok(Frame::data(Bytes::from(piece)));
        let frames: Vec<_> = all.iter().copied().map(frame).collect();
        StreamBody::new(stream::iter(frames))
    }

    #[tokio::test]
    async fn a_body_is_put_together_up_to_its_limit() {
        let budget = Budget::of_kib(1);
        let cases: [(&str, &[&'static str], Option<&str>); 5] = [
            ("none", &[], Some("")),
            ("one", &["abcd"], Some("abcd")),
            ("empty ones", &["", "ab", "", "cd", ""], Some("abcd")),
            ("too much at once", &["abcde"], None),
            ("too much in all", &["abc", "de"], None),
        ];
        for (why, all, expected) in cases {
            let held = read(&budget, pieces(all), 4).await.map(|held| held.bytes);
            assert_eq!(held.as_deref().ok(), expected.map(str::as_bytes), "{why}");
        }
        let announced = read(&budget, Full::new(Bytes::from("abcde")), 4).await;
        assert!(matches!(announced, Err(ClientError::BodyTooLarge { limit: 4 })));
        assert_eq!(budget.0.available_permits(), 1, "everything was given back");
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_without_room_is_refused_and_room_is_given_back() {
        let budget = Budget::of_kib(2);
        let first = read(&budget, pieces(&["a", "b"]), 9).await.expect("there is room");
        assert_eq!(budget.0.available_permits(), 1, "two bytes are one KiB");
        let large = || Full::new(Bytes::from(vec![b'x'; 1025]));
        let refused = read(&budget, large(), 4096).await;
        assert!(matches!(refused, Err(ClientError::BodiesOverloaded)));
        drop(first);
        let second = read(&budget, large(), 4096).await.expect("there is room again");
        assert_eq!(second.bytes.len(), 1025);
        drop(second);
        assert_eq!(budget.0.available_permits(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_stops_in_the_middle_is_not_waited_for() {
        let budget = Budget::of_kib(1);
        let start = stream::iter([Ok::<_, Infallible>(Frame::data(Bytes::from("ab")))]);
        let body = StreamBody::new(start.chain(stream::pending()));
        let stopped = read(&budget, body, 9).await;
        assert!(matches!(stopped, Err(ClientError::BodyTimeout { .. })));
        assert_eq!(budget.0.available_permits(), 1);
    }

    /// Case A24: no piece is late, and all together would take for ever.
    #[tokio::test(start_paused = true)]
    async fn a_client_that_drips_is_not_waited_for() {
        let drip = |bytes: usize, pause: u64, count: usize| {
            let piece = move |_| async move {
                tokio::time::sleep(Duration::from_secs(pause)).await;
                Ok::<_, Infallible>(Frame::data(Bytes::from(vec![b'x'; bytes])))
            };
            StreamBody::new(Box::pin(stream::iter(0..count).then(piece)))
        };
        let (budget, limit, began) = (Budget::of_kib(4096), 4 << 20, Instant::now());
        let dripped = read(&budget, drip(1, 29, 1000), limit).await;
        assert!(matches!(dripped, Err(ClientError::BodyTooSlow { least: LEAST_RATE })));
        assert_eq!(began.elapsed(), HEAD_START);
        assert_eq!(budget.0.available_permits(), 4096, "everything was given back");
        let slow = read(&budget, drip(29 * 8192, 29, 10), limit).await.expect("as fast as it must be");
        assert_eq!(slow.bytes.len(), 290 * 8192);
    }
}
