//! A client of one ZMTP 3 peer over TCP: SUB for events, DEALER for replays.
//!
//! Owns the greeting, the NULL handshake, framing under limits, and heartbeats.
//! Does not own reconnection (one value is one connection, every loss is an
//! error, the caller loops), what frames mean, or security other than NULL.
//!
//! Data: bytes read -> `Decoder` (unread bytes, parts of the unfinished
//! message) -> messages and commands; what is to be written waits in
//! `outgoing`. All state between two polls is in these fields, so dropping a
//! future of `recv` or `send` loses nothing and tears no frame. A length is
//! checked before memory is found for it, and memory grows with bytes received,
//! not with bytes announced.
//!
//! We announce ZMTP 3.0, which every peer since libzmq 4.0 speaks and where a
//! subscription is a message. Heartbeats are of 3.1, but libzmq answers PING
//! whatever we announce, so the peer's own version decides. The clock is
//! tokio's timer, and it decides nothing but when a peer is given up.
//!
//! Authority: ZMTP 3.0 (<https://rfc.zeromq.org/spec/23/>) and ZMTP 3.1
//! (<https://rfc.zeromq.org/spec/37/>). Why not a crate: `docs/adr/0001-own-zmtp-client.md`.

use std::fmt;
use std::future::poll_fn;
use std::io;
use std::mem;
use std::net::Ipv6Addr;
use std::num::NonZeroU16;
use std::pin::{Pin, pin};
use std::str::FromStr;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout, timeout_at};

/// How long name resolution and TCP may take. Two lost SYNs cost 3 s; after a third the node is gone.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long greeting and READY may take. A peer that accepts and then says
/// nothing is hung, or is no ZMTP peer; without a limit it would hold us for ever.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Silence after which the peer is asked for a sign of life, and between two such questions.
pub const HEARTBEAT: Duration = Duration::from_secs(2);
/// Heartbeats without a byte after which the peer is lost. The last question
/// then had one heartbeat to be answered in.
const MISSED_HEARTBEATS: u32 = 3;
/// The same in time; also how long the peer may take to take what we write.
const SILENCE: Duration = HEARTBEAT.saturating_mul(MISSED_HEARTBEATS);

/// Most bytes taken from the socket at once. Frames shorter than this are
/// copied out of the read buffer, so that none pins more than its own size.
const READ_CHUNK: usize = 32 << 10;
/// Most bytes that wait to be written. Requests are tens of bytes; the limit is
/// for a peer that asks for PONGs and never reads them.
const OUTGOING_BYTES: usize = 64 << 10;
/// Largest command. READY with every property libzmq knows is below 1 KiB.
const COMMAND_BYTES: usize = 4 << 10;
/// Longest prefix whose subscription still fits a short frame.
const PREFIX_BYTES: usize = 254;
/// Longest context of a PING (ZMTP 3.1).
const PING_CONTEXT_BYTES: usize = 16;
/// Most bytes of a peer's words that an error repeats.
const SHOWN_BYTES: usize = 64;
/// Size of a frame's header with an eight-byte length.
const LONG_HEADER_BYTES: usize = 9;

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;
const GREETING_BYTES: usize = 64;
const MECHANISM: [u8; 20] = *b"NULL\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
/// A PING that asks for no time to live and has no context.
const PING: &[u8] = b"\x04PING\0\0";

/// Where a peer listens: `tcp://host:port`, IPv6 addresses in brackets.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Endpoint {
    host: String,
    port: u16,
}

/// Why a text is no [`Endpoint`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EndpointError {
    /// Another transport, or none.
    #[error("endpoint {0:?} does not start with tcp://")]
    Scheme(String),
    /// No host, a wildcard, or an IPv6 address without brackets.
    #[error("endpoint {0:?} names no host to connect to")]
    Host(String),
    /// No port, or port 0.
    #[error("endpoint {0:?} does not end in a port of 1 to 65535")]
    Port(String),
}

/// What one peer may make us hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most bytes of one message, all frames together, headers aside.
    pub message_bytes: usize,
    /// Most frames of one message.
    pub frames: usize,
}

/// Why a connection was not made, or is lost.
#[derive(Debug, thiserror::Error)]
pub enum ZmtpError {
    /// Name resolution or TCP failed.
    #[error("unable to connect to {endpoint}")]
    Connect {
        /// The peer.
        endpoint: Endpoint,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// [`CONNECT_TIMEOUT`] passed.
    #[error("unable to connect to {0} within {limit:?}", limit = CONNECT_TIMEOUT)]
    ConnectTimeout(Endpoint),
    /// The peer is not the ZMTP 3 peer that we need.
    #[error("failed to shake hands: expected {expected}, found \"{found}\"")]
    Handshake {
        /// What the handshake needed.
        expected: &'static str,
        /// What came instead, escaped and cut.
        found: String,
    },
    /// [`HANDSHAKE_TIMEOUT`] passed.
    #[error("unable to shake hands with {0} within {limit:?}", limit = HANDSHAKE_TIMEOUT)]
    HandshakeTimeout(Endpoint),
    /// The peer closed the connection between two messages.
    #[error("unable to go on: the peer closed the connection")]
    Closed,
    /// The connection broke, perhaps inside a message.
    #[error("unable to exchange bytes with the peer")]
    Io(#[source] io::Error),
    /// The peer broke this rule of ZMTP.
    #[error("failed to read what the peer sent: {0}")]
    Protocol(&'static str),
    /// More than a limit allows was announced or asked for.
    #[error("refused {found} {what}, the limit is {limit}")]
    Limit {
        /// What was counted.
        what: &'static str,
        /// How many there would have been.
        found: u64,
        /// How many there may be.
        limit: u64,
    },
    /// The peer answered no heartbeat, or did not take what we wrote.
    #[error("unable to get a sign of life from the peer within {limit:?}", limit = SILENCE)]
    Silent,
    /// The peer sent the command ERROR with this reason, here escaped and cut.
    #[error("failed to talk to the peer, which refused with \"{0}\"")]
    PeerError(String),
}

/// One connection to one peer, after its handshake.
///
/// After an error from any method it is of no further use: drop it. `S` is
/// other than a socket in tests only, where time is paused.
pub struct Connection<S = TcpStream> {
    stream: S,
    decoder: Decoder,
    /// Whole frames; the first may be partly written.
    outgoing: BytesMut,
    heartbeats: bool,
    last_heard: Instant,
    /// When silence needs its next PING or the verdict.
    beat_due: Instant,
    /// PINGs since a byte was last heard.
    unanswered: u32,
}

/// Which socket we are.
#[derive(Clone, Copy)]
struct Role {
    /// The body of our READY.
    ready: &'static [u8],
    /// Socket types that are for us, and the same in words.
    peers: &'static [&'static [u8]],
    expected: &'static str,
}

const SUBSCRIBER: Role = Role {
    ready: b"\x05READY\x0bSocket-Type\0\0\0\x03SUB",
    peers: &[b"PUB", b"XPUB"],
    expected: "the socket type PUB or XPUB",
};
const DEALER: Role = Role {
    ready: b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER",
    peers: &[b"ROUTER"],
    expected: "the socket type ROUTER",
};

/// Bytes of a peer -> messages and commands. No I/O.
struct Decoder {
    /// Read and not yet decoded; starts at a frame's first byte.
    buffer: BytesMut,
    /// Frames of the message whose last frame has not come.
    parts: Vec<Bytes>,
    parts_bytes: usize,
    limits: Limits,
}

/// What a peer says in one go. A command may come between frames of a message.
#[derive(Debug, PartialEq, Eq)]
enum Unit {
    Message(Vec<Bytes>),
    Command(Bytes),
}

impl Endpoint {
    /// The same host `ranks` ports further: engines give every rank its own.
    /// `None` beyond the last port.
    pub fn offset(&self, ranks: u32) -> Option<Self> {
        let port = u32::from(self.port).checked_add(ranks).and_then(|port| u16::try_from(port).ok())?;
        Some(Self { host: self.host.clone(), port })
    }
}

impl FromStr for Endpoint {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Self, EndpointError> {
        let rest = text.strip_prefix("tcp://").ok_or_else(|| EndpointError::Scheme(text.to_owned()))?;
        let (host, port) = rest.rsplit_once(':').ok_or_else(|| EndpointError::Port(text.to_owned()))?;
        // Without the filter "+80" would be a port.
        let port = Some(port).filter(|port| port.bytes().all(|byte| byte.is_ascii_digit()));
        let port = port.and_then(|port| port.parse::<NonZeroU16>().ok());
        let port = port.ok_or_else(|| EndpointError::Port(text.to_owned()))?.get();
        let host = match host.strip_prefix('[').and_then(|inner| inner.strip_suffix(']')) {
            Some(inner) => inner.parse::<Ipv6Addr>().ok().map(|address| address.to_string()),
            None => Some(host).filter(|host| is_name(host)).map(str::to_owned),
        };
        Ok(Self { host: host.ok_or_else(|| EndpointError::Host(text.to_owned()))?, port })
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(formatter, "tcp://[{}]:{}", self.host, self.port)
        } else {
            write!(formatter, "tcp://{}:{}", self.host, self.port)
        }
    }
}

impl Default for Limits {
    /// 64 MiB in 16 frames. A batch of engine events for a prompt of a million
    /// tokens is about 5 MB in three frames, and a replay adds two.
    fn default() -> Self {
        Self { message_bytes: 64 << 20, frames: 16 }
    }
}

impl ZmtpError {
    /// The `reason` label and log field. Part of the interface.
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::Connect { .. } => "connect",
            Self::ConnectTimeout(_) => "connect_timeout",
            Self::Handshake { .. } => "handshake",
            Self::HandshakeTimeout(_) => "handshake_timeout",
            Self::Closed => "closed",
            Self::Io(_) => "io",
            Self::Protocol(_) => "protocol",
            Self::Limit { .. } => "limit",
            Self::Silent => "silent",
            Self::PeerError(_) => "peer_error",
        }
    }

    /// Whether a new connection can fare better without anyone changing anything.
    pub const fn is_transient(&self) -> bool {
        match self {
            Self::Connect { .. }
            | Self::ConnectTimeout(_)
            | Self::HandshakeTimeout(_)
            | Self::Closed
            | Self::Io(_)
            | Self::Silent => true,
            Self::Handshake { .. } | Self::Protocol(_) | Self::Limit { .. } | Self::PeerError(_) => false,
        }
    }

    fn handshake(expected: &'static str, found: &[u8]) -> Self {
        Self::Handshake { expected, found: printable(found) }
    }
}

impl Connection {
    /// Connects and asks for messages whose first frame starts with `prefix`;
    /// an empty prefix asks for all.
    ///
    /// A publisher confirms no subscription: messages may be missed for some
    /// time after this returns. A prefix of more than 254 bytes is an error.
    pub async fn subscribe(endpoint: &Endpoint, prefix: &[u8], limits: Limits) -> Result<Self, ZmtpError> {
        if prefix.len() > PREFIX_BYTES {
            return Err(limit("bytes of subscription prefix", prefix.len() as u64, PREFIX_BYTES));
        }
        let subscription = [&[1_u8][..], prefix].concat();
        Self::open(connect(endpoint).await?, endpoint, SUBSCRIBER, &[&subscription], limits).await
    }

    /// Connects to a ROUTER. The empty frame that many of them expect first is
    /// the caller's to send.
    pub async fn dealer(endpoint: &Endpoint, limits: Limits) -> Result<Self, ZmtpError> {
        Self::open(connect(endpoint).await?, endpoint, DEALER, &[], limits).await
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> Connection<S> {
    /// Sends one message; no frames send nothing.
    ///
    /// A message that does not fit 64 KiB with what still waits to be written
    /// is refused. If the future is dropped, the message is sent by later
    /// calls, whole, or not at all if the future was never polled.
    pub async fn send(&mut self, frames: &[&[u8]]) -> Result<(), ZmtpError> {
        self.reserve(frames.iter().map(|frame| LONG_HEADER_BYTES + frame.len()).sum())?;
        let last = frames.len().saturating_sub(1);
        for (position, frame) in frames.iter().enumerate() {
            encode(&mut self.outgoing, if position < last { MORE } else { 0 }, frame);
        }
        self.flush().await
    }

    /// The next message: at least one frame, any of which may be empty.
    ///
    /// Cancel-safe. Heartbeats are answered and sent only while this is
    /// polled. If the peer can answer them, silence of three heartbeats is
    /// [`ZmtpError::Silent`]; if it cannot, silence proves nothing and this
    /// waits for ever.
    pub async fn recv(&mut self) -> Result<Vec<Bytes>, ZmtpError> {
        loop {
            match self.decoder.next_unit()? {
                Some(Unit::Message(frames)) => return Ok(frames),
                Some(Unit::Command(command)) => self.obey(&command)?,
                None => self.exchange().await?,
            }
        }
    }

    /// Whether the peer answers heartbeats (ZMTP 3.1 and later).
    pub fn heartbeats(&self) -> bool {
        self.heartbeats
    }

    /// When bytes were last read; when the connection was made, if none were.
    pub fn last_heard(&self) -> Instant {
        self.last_heard
    }

    async fn open(
        stream: S,
        endpoint: &Endpoint,
        role: Role,
        first: &[&[u8]],
        limits: Limits,
    ) -> Result<Self, ZmtpError> {
        let opened = timeout(HANDSHAKE_TIMEOUT, Self::shake_hands(stream, role, first, limits)).await;
        opened.unwrap_or_else(|_| Err(ZmtpError::HandshakeTimeout(endpoint.clone())))
    }

    /// Ends with sending `first`, a message that may have no frames.
    async fn shake_hands(stream: S, role: Role, first: &[&[u8]], limits: Limits) -> Result<Self, ZmtpError> {
        let now = Instant::now();
        let mut connection = Self {
            stream,
            decoder: Decoder { buffer: BytesMut::new(), parts: Vec::new(), parts_bytes: 0, limits },
            outgoing: BytesMut::new(),
            heartbeats: false,
            last_heard: now,
            beat_due: now,
            unanswered: 0,
        };
        // Signature, version 3.0, mechanism, then as-server and filler: all zero for a client.
        connection.outgoing.put_slice(b"\xff\0\0\0\0\0\0\0\0\x7f\x03\0");
        connection.outgoing.put_slice(&MECHANISM);
        connection.outgoing.put_bytes(0, 32);
        let heartbeats = loop {
            match read_greeting(&connection.decoder.buffer)? {
                Some(heartbeats) => break heartbeats,
                None => connection.exchange().await?,
            }
        };
        connection.decoder.buffer.advance(GREETING_BYTES);
        encode(&mut connection.outgoing, COMMAND, role.ready);
        loop {
            match connection.decoder.next_unit()? {
                Some(Unit::Command(command)) => break check_ready(&command, role)?,
                Some(Unit::Message(_)) => return Err(ZmtpError::handshake("a command", b"a message")),
                None => connection.exchange().await?,
            }
        }
        // This writes our READY too: if the peer's came with its greeting, nothing else has.
        connection.send(first).await?;
        connection.heartbeats = heartbeats;
        Ok(connection)
    }

    /// Waits for bytes to be read, or for a heartbeat to become due.
    async fn exchange(&mut self) -> Result<(), ZmtpError> {
        if !self.heartbeats {
            return poll_fn(|context| self.poll_exchange(context)).await;
        }
        let due = self.beat_due;
        let exchanged = timeout_at(due, poll_fn(|context| self.poll_exchange(context))).await;
        exchanged.unwrap_or_else(|_| self.beat())
    }

    /// Acts on a heartbeat without a byte. Questions are counted, not time:
    /// after a long pause of the caller, silence means only that nobody asked.
    fn beat(&mut self) -> Result<(), ZmtpError> {
        self.unanswered += 1;
        if self.unanswered >= MISSED_HEARTBEATS {
            return Err(ZmtpError::Silent);
        }
        self.beat_due = Instant::now() + HEARTBEAT;
        self.reserve(LONG_HEADER_BYTES + PING.len())?;
        encode(&mut self.outgoing, COMMAND, PING);
        Ok(())
    }

    fn obey(&mut self, command: &[u8]) -> Result<(), ZmtpError> {
        let (name, data) = split_command(command)?;
        match name {
            b"PING" => self.answer(data),
            b"ERROR" => Err(peer_error(data)),
            // A PONG has done its work by being heard; what we do not know is to be ignored.
            _ => Ok(()),
        }
    }

    fn answer(&mut self, ping: &[u8]) -> Result<(), ZmtpError> {
        // The time to live, in front, is what the peer allows us; we close nothing on it.
        let context = ping.get(2..).filter(|context| context.len() <= PING_CONTEXT_BYTES);
        let context = context.ok_or(ZmtpError::Protocol("a PING is too short or too long"))?;
        let pong = [&b"\x04PONG"[..], context].concat();
        self.reserve(LONG_HEADER_BYTES + pong.len())?;
        encode(&mut self.outgoing, COMMAND, &pong);
        Ok(())
    }

    /// Refuses to queue more than a peer that does not read may make us hold.
    fn reserve(&self, bytes: usize) -> Result<(), ZmtpError> {
        let found = self.outgoing.len().saturating_add(bytes);
        if found > OUTGOING_BYTES {
            return Err(limit("bytes waiting to be written", found as u64, OUTGOING_BYTES));
        }
        Ok(())
    }

    async fn flush(&mut self) -> Result<(), ZmtpError> {
        let flushed = timeout(SILENCE, poll_fn(|context| self.poll_flush(context))).await;
        flushed.map_err(|_| ZmtpError::Silent)?.map_err(ZmtpError::Io)
    }

    /// Writes what waits and reads what came; ready once bytes were read.
    ///
    /// Both on every poll, so that two peers with full buffers cannot wait for
    /// each other, and a failed write does not hide the peer's last words.
    fn poll_exchange(&mut self, context: &mut Context<'_>) -> Poll<Result<(), ZmtpError>> {
        let flushed = self.poll_flush(context);
        let read = match (self.poll_read(context), flushed) {
            (Poll::Ready(read), _) => read,
            (Poll::Pending, Poll::Ready(Err(source))) => Err(source),
            (Poll::Pending, Poll::Ready(Ok(())) | Poll::Pending) => return Poll::Pending,
        };
        Poll::Ready(match read {
            Ok(0) if self.decoder.is_between_messages() => Err(ZmtpError::Closed),
            Ok(0) => Err(ZmtpError::Io(io::ErrorKind::UnexpectedEof.into())),
            Ok(_) => {
                self.last_heard = Instant::now();
                self.beat_due = self.last_heard + HEARTBEAT;
                self.unanswered = 0;
                Ok(())
            }
            Err(source) => Err(ZmtpError::Io(source)),
        })
    }

    fn poll_read(&mut self, context: &mut Context<'_>) -> Poll<io::Result<usize>> {
        self.decoder.buffer.reserve(READ_CHUNK);
        let mut target = (&mut self.decoder.buffer).limit(READ_CHUNK);
        // This future keeps nothing between polls, so a new one each time is as good.
        let read = pin!(self.stream.read_buf(&mut target));
        read.poll(context)
    }

    fn poll_flush(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.outgoing.is_empty() {
            let written = ready!(Pin::new(&mut self.stream).poll_write(context, &self.outgoing))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.outgoing.advance(written);
        }
        Poll::Ready(Ok(()))
    }
}

impl<S> fmt::Debug for Connection<S> {
    /// Without what it holds: events carry token ids, which belong in no log.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Connection").field("heartbeats", &self.heartbeats).finish_non_exhaustive()
    }
}

impl Decoder {
    /// The next message or command, or `None` until more bytes are read.
    fn next_unit(&mut self) -> Result<Option<Unit>, ZmtpError> {
        while let Some((flags, body)) = self.next_frame()? {
            if flags & COMMAND != 0 {
                return Ok(Some(Unit::Command(body)));
            }
            self.parts_bytes += body.len();
            self.parts.push(body);
            if flags & MORE == 0 {
                self.parts_bytes = 0;
                return Ok(Some(Unit::Message(mem::take(&mut self.parts))));
            }
        }
        Ok(None)
    }

    fn next_frame(&mut self) -> Result<Option<(u8, Bytes)>, ZmtpError> {
        let Some((flags, size, length)) = self.header()? else { return Ok(None) };
        let Some(body) = self.buffer.get(size..).and_then(|rest| rest.get(..length)) else { return Ok(None) };
        if length < READ_CHUNK {
            let body = Bytes::copy_from_slice(body);
            self.buffer.advance(size + length);
            return Ok(Some((flags, body)));
        }
        // A long frame takes the buffer with it and the rest, at most one chunk, moves out:
        // else frame and buffer would keep each other's memory alive.
        self.buffer.advance(size);
        let body = self.buffer.split_to(length).freeze();
        self.buffer = BytesMut::from(&self.buffer[..]);
        Ok(Some((flags, body)))
    }

    /// Flags, size of the header and length of the body of the frame at the
    /// front, checked; `None` until the header is read.
    fn header(&self) -> Result<Option<(u8, usize, usize)>, ZmtpError> {
        let Some((&flags, rest)) = self.buffer.split_first() else { return Ok(None) };
        if flags & !(MORE | LONG | COMMAND) != 0 {
            return Err(ZmtpError::Protocol("a frame has reserved flags"));
        }
        if flags & (MORE | COMMAND) == MORE | COMMAND {
            return Err(ZmtpError::Protocol("a command is part of a message"));
        }
        let (size, length) = if flags & LONG != 0 {
            let Some(length) = rest.first_chunk() else { return Ok(None) };
            (LONG_HEADER_BYTES, u64::from_be_bytes(*length))
        } else {
            let Some(&length) = rest.first() else { return Ok(None) };
            (2, u64::from(length))
        };
        Ok(Some((flags, size, self.admit(flags, length)?)))
    }

    /// The announced length, if a frame of it may be taken in.
    fn admit(&self, flags: u8, length: u64) -> Result<usize, ZmtpError> {
        let (what, held, most) = if flags & COMMAND != 0 {
            ("bytes in one command", 0, COMMAND_BYTES)
        } else if self.parts.len() >= self.limits.frames {
            return Err(limit("frames in one message", self.parts.len() as u64 + 1, self.limits.frames));
        } else {
            ("bytes in one message", self.parts_bytes, self.limits.message_bytes)
        };
        let fits = usize::try_from(length).ok().filter(|&length| length <= most.saturating_sub(held));
        fits.ok_or_else(|| limit(what, length.saturating_add(held as u64), most))
    }

    fn is_between_messages(&self) -> bool {
        self.buffer.is_empty() && self.parts.is_empty()
    }
}

async fn connect(endpoint: &Endpoint) -> Result<TcpStream, ZmtpError> {
    let refused = |source| ZmtpError::Connect { endpoint: endpoint.clone(), source };
    let address = (endpoint.host.as_str(), endpoint.port);
    let connected = timeout(CONNECT_TIMEOUT, TcpStream::connect(address)).await;
    let stream = connected.map_err(|_| ZmtpError::ConnectTimeout(endpoint.clone()))?.map_err(refused)?;
    stream.set_nodelay(true).map_err(refused)?;
    Ok(stream)
}

/// Whether the peer answers heartbeats, or `None` until the greeting is whole.
/// The first byte is looked at once it is there: other protocols may send less than 64.
fn read_greeting(bytes: &[u8]) -> Result<Option<bool>, ZmtpError> {
    if bytes.first().is_some_and(|&byte| byte != 0xff) {
        return Err(ZmtpError::handshake("a ZMTP signature", bytes));
    }
    let Some(greeting) = bytes.first_chunk::<GREETING_BYTES>() else { return Ok(None) };
    if greeting[9] & 1 == 0 || greeting[10] < 3 {
        return Err(ZmtpError::handshake("ZMTP 3", &greeting[9..12]));
    }
    if greeting[12..32] != MECHANISM {
        return Err(ZmtpError::handshake("the mechanism NULL", &greeting[12..32]));
    }
    Ok(Some((greeting[10], greeting[11]) >= (3, 1)))
}

fn check_ready(command: &[u8], role: Role) -> Result<(), ZmtpError> {
    let (name, data) = split_command(command)?;
    match name {
        b"READY" => {}
        b"ERROR" => return Err(peer_error(data)),
        _ => return Err(ZmtpError::handshake("the command READY", name)),
    }
    let peer = socket_type(data).ok_or_else(|| ZmtpError::handshake("the property Socket-Type", data))?;
    if role.peers.contains(&peer) { Ok(()) } else { Err(ZmtpError::handshake(role.expected, peer)) }
}

/// Value of the property `Socket-Type`; `None` if it is absent or cannot be
/// reached, either of which ends the handshake.
fn socket_type(mut properties: &[u8]) -> Option<&[u8]> {
    loop {
        let (&size, rest) = properties.split_first()?;
        let (name, rest) = rest.split_at_checked(usize::from(size))?;
        let (size, rest) = rest.split_first_chunk()?;
        let (value, rest) = rest.split_at_checked(usize::try_from(u32::from_be_bytes(*size)).ok()?)?;
        if name.eq_ignore_ascii_case(b"Socket-Type") {
            return Some(value);
        }
        properties = rest;
    }
}

/// A command's name and what follows it.
fn split_command(command: &[u8]) -> Result<(&[u8], &[u8]), ZmtpError> {
    let split = command.split_first().and_then(|(&size, rest)| rest.split_at_checked(usize::from(size)));
    split.filter(|(name, _)| !name.is_empty()).ok_or(ZmtpError::Protocol("a command has no name"))
}

fn peer_error(data: &[u8]) -> ZmtpError {
    // One byte of length, then the reason, which ends the command.
    ZmtpError::PeerError(printable(data.get(1..).unwrap_or(data)))
}

fn limit(what: &'static str, found: u64, most: usize) -> ZmtpError {
    ZmtpError::Limit { what, found, limit: most as u64 }
}

fn encode(outgoing: &mut BytesMut, flags: u8, body: &[u8]) {
    if let Ok(length) = u8::try_from(body.len()) {
        outgoing.put_slice(&[flags, length]);
    } else {
        outgoing.put_u8(flags | LONG);
        outgoing.put_u64(body.len() as u64);
    }
    outgoing.put_slice(body);
}

fn printable(bytes: &[u8]) -> String {
    bytes.get(..SHOWN_BYTES).unwrap_or(bytes).escape_ascii().to_string()
}

/// Whether `host` can be a DNS name or an IPv4 address.
fn is_name(host: &str) -> bool {
    !host.is_empty() && host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte))
}

#[cfg(test)]
#[path = "zmtp_tests.rs"]
mod tests;
