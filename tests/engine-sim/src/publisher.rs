//! The ZMQ side of one rank: a PUB socket that sends `[topic, seq, payload]`, and a ROUTER
//! socket that replays batches to whoever asks `["", first seq]`.
//!
//! One task owns both sockets and the buffer, as one thread does in the engines. The sequence
//! number comes from the rank, which consumes it even when a batch is lost.

use std::collections::VecDeque;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use tokio::sync::mpsc;
use zeromq::{PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqError, ZmqMessage};

/// Batches that wait for the socket: the engines' default `max_queue_size`.
const MAX_QUEUE_SIZE: usize = 100_000;
/// The end of a replay, where the sequence number stands in other replies.
const END_OF_REPLAY: [u8; 8] = [0xff; 8];
/// Tries to bind a port again after a restart.
const REBIND_ATTEMPTS: u32 = 50;

/// The rank's end of the task.
#[derive(Clone, Debug)]
pub(crate) struct Publisher {
    commands: mpsc::Sender<Command>,
    /// Batches sent in replays so far.
    replayed: Arc<AtomicU64>,
}

/// Sockets of one rank, bound and ready.
pub(crate) struct Listeners {
    pub(crate) events: TcpListener,
    pub(crate) replay: Option<TcpListener>,
}

#[derive(Debug)]
enum Command {
    Batch { seq: u64, payload: Bytes, lost: bool },
    Restart,
}

struct Sockets {
    events: PubSocket,
    events_address: SocketAddr,
    replay: Option<(RouterSocket, SocketAddr)>,
}

impl Publisher {
    /// Starts the task. `topic` is the first frame; `replay_has_topic` selects the framing of
    /// replies, of which there are `replay_batches` at most.
    pub(crate) async fn start(
        listeners: Listeners,
        topic: Bytes,
        replay_has_topic: bool,
        replay_batches: usize,
    ) -> Result<(Self, impl Future<Output = ()> + Send + 'static), ZmqError> {
        let sockets = Sockets::adopt(listeners).await?;
        let (commands, receiver) = mpsc::channel(MAX_QUEUE_SIZE);
        let replayed = Arc::new(AtomicU64::new(0));
        let kept = replay_batches;
        let serving = serve(sockets, receiver, topic, replay_has_topic, kept, Arc::clone(&replayed));
        Ok((Self { commands, replayed }, serving))
    }

    /// Batches sent in replays so far, in all lives.
    pub(crate) fn replayed(&self) -> u64 {
        self.replayed.load(Ordering::Relaxed)
    }

    /// Sends a batch, or only remembers it for replays when it is to be lost on the way.
    pub(crate) fn publish(&self, seq: u64, payload: Bytes, lost: bool) {
        // A full queue loses the batch; the gap in the sequence tells.
        let _ = self.commands.try_send(Command::Batch { seq, payload, lost });
    }

    /// Closes all connections, forgets the buffer and listens again on the same ports.
    pub(crate) fn restart(&self) {
        let _ = self.commands.try_send(Command::Restart);
    }
}

impl Sockets {
    async fn adopt(listeners: Listeners) -> Result<Self, ZmqError> {
        let events_address = listeners.events.local_addr()?;
        let mut events = PubSocket::new();
        events.bind_listener(listeners.events).await?;
        let mut replay = None;
        if let Some(listener) = listeners.replay {
            let address = listener.local_addr()?;
            let mut socket = RouterSocket::new();
            socket.bind_listener(listener).await?;
            replay = Some((socket, address));
        }
        Ok(Self { events, events_address, replay })
    }

    /// Closes both sockets and binds new ones. None when a port is lost for good.
    async fn reopen(self) -> Option<Self> {
        self.events.close().await;
        let replay_address = match self.replay {
            Some((socket, address)) => {
                socket.close().await;
                Some(address)
            }
            None => None,
        };
        let events = rebind(self.events_address).await?;
        let replay = match replay_address {
            Some(address) => Some(rebind(address).await?),
            None => None,
        };
        Self::adopt(Listeners { events, replay }).await.ok()
    }
}

async fn rebind(address: SocketAddr) -> Option<TcpListener> {
    for _ in 0..REBIND_ATTEMPTS {
        if let Ok(listener) = TcpListener::bind(address) {
            return Some(listener);
        }
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    tracing::error!(%address, "failed to listen again after the simulated restart");
    None
}

async fn serve(
    mut sockets: Sockets,
    mut commands: mpsc::Receiver<Command>,
    topic: Bytes,
    replay_has_topic: bool,
    replay_batches: usize,
    replayed: Arc<AtomicU64>,
) {
    let mut buffer: VecDeque<(u64, Bytes)> = VecDeque::new();
    loop {
        let request = async {
            match &mut sockets.replay {
                Some((socket, _)) => socket.recv().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            command = commands.recv() => match command {
                None => return,
                Some(Command::Batch { seq, payload, lost }) => {
                    buffer.push_back((seq, payload.clone()));
                    if buffer.len() > replay_batches {
                        buffer.pop_front();
                    }
                    if !lost {
                        let frames = vec![topic.clone(), seq_frame(seq), payload];
                        send(&mut sockets.events, frames).await;
                    }
                }
                Some(Command::Restart) => {
                    buffer.clear();
                    match sockets.reopen().await {
                        Some(reopened) => sockets = reopened,
                        None => return,
                    }
                }
            },
            request = request => {
                if let (Ok(request), Some((socket, _))) = (request, &mut sockets.replay) {
                    let topic = replay_has_topic.then_some(&topic);
                    let sent = replay(socket, &request.into_vec(), &buffer, topic).await;
                    replayed.fetch_add(sent, Ordering::Relaxed);
                }
            }
        }
    }
}

/// Answers `[identity, "", first seq]` with every later batch and an end marker. Requests of
/// another shape are ignored, as in the engines. How many batches it was.
async fn replay(
    socket: &mut RouterSocket,
    request: &[Bytes],
    buffer: &VecDeque<(u64, Bytes)>,
    topic: Option<&Bytes>,
) -> u64 {
    let [identity, _, first] = request else { return 0 };
    let Ok(first) = <[u8; 8]>::try_from(first.as_ref()) else { return 0 };
    let first = u64::from_be_bytes(first);
    let reply = |topic: Option<Bytes>, seq: Bytes, payload: Bytes| {
        let mut frames = vec![identity.clone(), Bytes::new()];
        frames.extend(topic);
        frames.extend([seq, payload]);
        frames
    };
    let mut sent = 0;
    for (seq, payload) in buffer.iter().filter(|(seq, _)| *seq >= first) {
        sent += 1;
        send(socket, reply(topic.cloned(), seq_frame(*seq), payload.clone())).await;
    }
    // The engines leave the end marker's topic empty.
    let end = reply(topic.map(|_| Bytes::new()), Bytes::from_static(&END_OF_REPLAY), Bytes::new());
    send(socket, end).await;
    sent
}

async fn send(socket: &mut impl SocketSend, frames: Vec<Bytes>) {
    let Ok(message) = ZmqMessage::try_from(frames) else { return };
    if let Err(error) = socket.send(message).await {
        tracing::debug!(%error, "failed to send to a subscriber");
    }
}

fn seq_frame(seq: u64) -> Bytes {
    Bytes::copy_from_slice(&seq.to_be_bytes())
}

/// Binds `count` consecutive ports from `base` on; base 0 looks for free ones.
pub(crate) fn bind_consecutive(
    host: std::net::IpAddr,
    base: u16,
    count: u32,
) -> std::io::Result<Vec<TcpListener>> {
    let attempts = if base == 0 { REBIND_ATTEMPTS } else { 1 };
    let mut last = std::io::Error::from(std::io::ErrorKind::AddrInUse);
    for _ in 0..attempts {
        match bind_run(host, base, count) {
            Ok(listeners) => return Ok(listeners),
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn bind_run(host: std::net::IpAddr, base: u16, count: u32) -> std::io::Result<Vec<TcpListener>> {
    let mut listeners = vec![TcpListener::bind((host, base))?];
    let first = listeners[0].local_addr()?.port();
    for offset in 1..count {
        let port = u16::try_from(offset).ok().and_then(|offset| first.checked_add(offset));
        let port = port.ok_or(std::io::ErrorKind::AddrNotAvailable)?;
        listeners.push(TcpListener::bind((host, port))?);
    }
    Ok(listeners)
}
