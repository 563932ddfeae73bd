//! The ZMTP client against hand-made peers, and against the `zeromq` crate.

use tokio::io::{AsyncWriteExt, DuplexStream, duplex};
use tokio::net::TcpListener;
use zeromq::{PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

use super::*;

const PUB: &[u8] = b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03PUB";
const ROUTER: &[u8] = b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06ROUTER";
/// Bytes of our greeting, READY and subscription to "kv".
const SUBSCRIBED_BYTES: usize = 64 + 27 + 5;

fn frames(parts: &[&[u8]]) -> Vec<Bytes> {
    parts.iter().map(|part| Bytes::copy_from_slice(part)).collect()
}

fn endpoint(text: &str) -> Endpoint {
    text.parse().expect("an endpoint")
}

/// A greeting as libzmq sends it, and READY. A real one sets the last byte of the padding.
fn hello(minor: u8, ready: &[u8]) -> Vec<u8> {
    let mut bytes = [&b"\xff\0\0\0\0\0\0\0\x01\x7f\x03"[..], &[minor], b"NULL"].concat();
    bytes.resize(64, 0);
    [&bytes[..], ready].concat()
}

async fn listen() -> (TcpListener, Endpoint) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a listener");
    let address = listener.local_addr().expect("an address");
    (listener, endpoint(&format!("tcp://{address}")))
}

async fn accept(listener: &TcpListener, said: &[u8]) -> TcpStream {
    let (mut peer, _) = listener.accept().await.expect("a connection");
    peer.write_all(said).await.expect("a peer that speaks");
    peer
}

async fn heard(peer: &mut (impl AsyncRead + Unpin), count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    peer.read_exact(&mut bytes).await.expect("bytes from us");
    bytes
}

/// A subscription to "kv" at a peer that said `said`, and the peer's end.
async fn attempt(said: &[u8], limits: Limits) -> (Result<Connection, ZmtpError>, TcpStream) {
    let (listener, endpoint) = listen().await;
    tokio::join!(Connection::subscribe(&endpoint, b"kv", limits), accept(&listener, said))
}

/// The same without a socket, for tests on paused time.
async fn paired(minor: u8) -> (Connection<DuplexStream>, DuplexStream) {
    let (ours, mut peer) = duplex(64 << 10);
    peer.write_all(&hello(minor, PUB)).await.expect("a peer that speaks");
    let endpoint = endpoint("tcp://peer:1");
    let opened = Connection::open(ours, &endpoint, SUBSCRIBER, &[b"\x01kv"], Limits::default()).await;
    heard(&mut peer, SUBSCRIBED_BYTES).await;
    (opened.expect("a connection"), peer)
}

#[tokio::test]
async fn subscribes_and_receives() {
    let (long, huge) = ([7_u8; 300], vec![9_u8; 3 * READ_CHUNK]);
    let said = [
        &hello(1, PUB)[..],
        b"\x01\x02kv\x01\0\x02\0\0\0\0\0\0\x01\x2c",
        &long[..],
        b"\x00\x01a\x02\0\0\0\0\0\x01\x80\0",
        &huge[..],
    ]
    .concat();
    let (connection, mut peer) = attempt(&said, Limits::default()).await;
    let mut connection = connection.expect("a connection");
    assert!(connection.heartbeats());
    assert_eq!(connection.recv().await.expect("multipart"), frames(&[b"kv", b"", &long]));
    assert_eq!(connection.recv().await.expect("short"), frames(&[b"a"]));
    assert_eq!(connection.recv().await.expect("long"), frames(&[&huge]));
    let mut expected = b"\xff\0\0\0\0\0\0\0\0\x7f\x03\0NULL".to_vec();
    expected.resize(64, 0);
    expected.extend(b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03SUB\x00\x03\x01kv");
    assert_eq!(heard(&mut peer, SUBSCRIBED_BYTES).await, expected);
}

#[tokio::test]
async fn a_dealer_asks_for_a_replay_and_gets_it() {
    let (listener, endpoint) = listen().await;
    let hello = hello(1, ROUTER);
    let (dealer, mut peer) =
        tokio::join!(Connection::dealer(&endpoint, Limits::default()), accept(&listener, &hello));
    let mut dealer = dealer.expect("a connection");
    dealer.send(&[b"", &5_u64.to_be_bytes()]).await.expect("a request");
    let expected = b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x01\0\x00\x08\0\0\0\0\0\0\0\x05";
    assert_eq!(heard(&mut peer, 64 + expected.len()).await[64..], expected[..]);
    let end = b"\x01\0\x01\x08\xff\xff\xff\xff\xff\xff\xff\xff\x00\0";
    peer.write_all(b"\x01\0\x01\x08\0\0\0\0\0\0\0\x05\x00\x02ab").await.expect("a reply");
    peer.write_all(end).await.expect("the last reply");
    let reply = dealer.recv().await.expect("a reply");
    assert_eq!(reply, frames(&[b"", &5_u64.to_be_bytes(), b"ab"]));
    assert_eq!(dealer.recv().await.expect("the last reply"), frames(&[b"", &[0xff; 8], b""]));
    assert_eq!(dealer.send(&[&[0; OUTGOING_BYTES]]).await.expect_err("too long").reason(), "limit");
}

#[tokio::test]
async fn refuses_what_protocol_and_limits_forbid() {
    let greeting = |at: usize, byte: u8| {
        let mut bytes = hello(0, PUB);
        bytes[at] = byte;
        bytes
    };
    let ready = |ready: &[u8]| hello(0, ready);
    let then = |bytes: &[u8]| [&hello(0, PUB)[..], bytes].concat();
    for (why, said, reason) in [
        ("another protocol", b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(), "handshake"),
        ("no signature", greeting(9, 0), "handshake"),
        ("ZMTP 2", greeting(10, 2), "handshake"),
        ("another mechanism", greeting(12, b'C'), "handshake"),
        ("a longer mechanism", greeting(16, b'S'), "handshake"),
        ("a wrong socket type", ready(ROUTER), "handshake"),
        ("no socket type", ready(b"\x04\x06\x05READY"), "handshake"),
        ("properties cut short", ready(b"\x04\x09\x05READY\x0bSo"), "handshake"),
        ("a message for READY", ready(b"\x00\x01x"), "handshake"),
        ("a huge READY", ready(b"\x06\0\0\0\0\0\0\x10\x01"), "limit"),
        ("ERROR for READY", ready(b"\x04\x0a\x05ERROR\x03bad"), "peer_error"),
        ("ERROR later", then(b"\x04\x0a\x05ERROR\x03bad"), "peer_error"),
        ("a reserved flag", then(b"\x08\0"), "protocol"),
        ("a command in parts", then(b"\x05\0"), "protocol"),
        ("a command without name", then(b"\x04\0"), "protocol"),
        ("a PING without time", then(b"\x04\x05\x04PING"), "protocol"),
        ("a PING with a long context", then(b"\x04\x18\x04PING\0\x0012345678901234567"), "protocol"),
        ("an absurd length", then(b"\x02\x40\0\0\0\0\0\0\0"), "limit"),
        ("a length that wraps", then(b"\x01\x01x\x02\xff\xff\xff\xff\xff\xff\xff\xff"), "limit"),
        ("a sum above the limit", then(b"\x01\x02kv\x02\0\0\0\0\0\0\x03\xff"), "limit"),
        ("too many frames", then(b"\x01\0\x01\0\x01\0\x00\0"), "limit"),
    ] {
        let (connection, _peer) = attempt(&said, Limits { message_bytes: 1024, frames: 3 }).await;
        let error = match connection {
            Ok(mut connection) => {
                let error = connection.recv().await.expect_err(why);
                assert!(connection.decoder.buffer.capacity() <= 2 * READ_CHUNK, "{why}");
                error
            }
            Err(error) => error,
        };
        assert_eq!(error.reason(), reason, "{why}: {error}");
        assert!(!error.is_transient(), "{why}");
    }
}

#[tokio::test]
async fn every_loss_is_an_error() {
    for (why, said, reason) in [
        ("between messages", &b"\x00\x01a"[..], "closed"),
        ("inside a header", &b"\x00\x01a\x00"[..], "io"),
        ("inside a frame", &b"\x00\x01a\x00\x05ab"[..], "io"),
        ("between frames", &b"\x00\x01a\x01\x01b"[..], "io"),
    ] {
        let (connection, mut peer) = attempt(&[&hello(0, PUB)[..], said].concat(), Limits::default()).await;
        let mut connection = connection.expect(why);
        // A socket closed with bytes unread would reset the connection.
        heard(&mut peer, SUBSCRIBED_BYTES).await;
        drop(peer);
        assert_eq!(connection.recv().await.expect(why), frames(&[b"a"]));
        let error = connection.recv().await.expect_err(why);
        assert_eq!((error.reason(), error.is_transient()), (reason, true), "{why}");
    }
    let (listener, endpoint) = listen().await;
    drop(listener);
    let error = Connection::dealer(&endpoint, Limits::default()).await.expect_err("nobody listens");
    assert_eq!((error.reason(), error.is_transient()), ("connect", true));
}

#[test]
fn every_split_gives_the_same_units() {
    fn units<'a>(chunks: impl Iterator<Item = &'a [u8]>) -> Vec<Unit> {
        let limits = Limits::default();
        let mut decoder = Decoder { buffer: BytesMut::new(), parts: Vec::new(), parts_bytes: 0, limits };
        let mut units = Vec::new();
        for chunk in chunks {
            decoder.buffer.extend_from_slice(chunk);
            while let Some(unit) = decoder.next_unit().expect("a well-formed wire") {
                units.push(unit);
            }
        }
        assert!(decoder.is_between_messages());
        units
    }
    let (long, huge) = ([7_u8; 300], vec![9_u8; READ_CHUNK]);
    let wire = [
        &b"\x01\x02kv\x04\x07\x04PING\0\0\x02\0\0\0\0\0\0\x01\x2c"[..],
        &long[..],
        b"\x01\0\x02\0\0\0\0\0\0\x80\0",
        &huge[..],
    ]
    .concat();
    let expected = [
        Unit::Command(Bytes::from_static(b"\x04PING\0\0")),
        Unit::Message(frames(&[b"kv", &long])),
        Unit::Message(frames(&[b"", &huge])),
    ];
    for at in (0..400).chain([wire.len() - 1, wire.len()]) {
        assert_eq!(units([&wire[..at], &wire[at..]].into_iter()), expected, "split at {at}");
    }
    assert_eq!(units(wire.chunks(1)), expected);
}

#[tokio::test]
async fn a_cancelled_recv_loses_nothing() {
    let wire = b"\x01\x02kv\x04\x07\x04PING\0\0\x00\x03abc";
    let (mut connection, mut peer) = paired(0).await;
    for at in 1..wire.len() {
        peer.write_all(&wire[..at]).await.expect("the first part");
        tokio::select! {
            biased;
            early = connection.recv() => panic!("{early:?} from {at} bytes"),
            () = std::future::ready(()) => {}
        }
        peer.write_all(&wire[at..]).await.expect("the rest");
        assert_eq!(connection.recv().await.expect("a message"), frames(&[b"kv", b"abc"]), "cut at {at}");
    }
}

#[tokio::test]
async fn answers_pings_with_their_context() {
    let said = [&hello(1, PUB)[..], b"\x04\x05\x04WHAT\x04\x0a\x04PING\0\x0aabc"].concat();
    let (connection, mut peer) = attempt(&said, Limits::default()).await;
    let mut connection = connection.expect("a connection");
    heard(&mut peer, SUBSCRIBED_BYTES).await;
    let (message, ()) = tokio::join!(connection.recv(), async {
        assert_eq!(heard(&mut peer, 10).await, b"\x04\x08\x04PONGabc");
        peer.write_all(b"\x00\x01x").await.expect("a message");
    });
    assert_eq!(message.expect("a message"), frames(&[b"x"]));
}

#[tokio::test(start_paused = true)]
async fn a_peer_that_answers_no_ping_is_silent() {
    let (mut connection, mut peer) = paired(1).await;
    let error = connection.recv().await.expect_err("silence");
    assert_eq!((error.reason(), error.is_transient()), ("silent", true));
    assert_eq!(connection.last_heard().elapsed().as_secs(), 6);
    drop(connection);
    let pings = b"\x04\x07\x04PING\0\0\x04\x07\x04PING\0\0";
    assert_eq!(heard(&mut peer, pings.len()).await, pings);
}

#[tokio::test(start_paused = true)]
async fn a_peer_that_answers_is_not_silent_however_late_we_ask() {
    let (mut connection, mut peer) = paired(1).await;
    tokio::time::advance(HEARTBEAT * 30).await;
    let (message, ()) = tokio::join!(connection.recv(), async {
        for _ in 0..9 {
            assert_eq!(heard(&mut peer, 9).await, b"\x04\x07\x04PING\0\0");
            peer.write_all(b"\x04\x05\x04PONG").await.expect("an answer");
        }
        peer.write_all(b"\x00\x01x").await.expect("a message");
    });
    assert_eq!(message.expect("a message"), frames(&[b"x"]));
}

#[tokio::test(start_paused = true)]
async fn a_peer_that_says_nothing_fails_the_handshake_in_time() {
    let (ours, _peer) = duplex(1024);
    let start = Instant::now();
    let opened = Connection::open(ours, &endpoint("tcp://peer:1"), DEALER, &[], Limits::default()).await;
    assert_eq!(opened.expect_err("silence").reason(), "handshake_timeout");
    assert_eq!(start.elapsed().as_secs(), HANDSHAKE_TIMEOUT.as_secs());
}

#[tokio::test]
async fn speaks_with_another_implementation() {
    let mut publisher = PubSocket::new();
    let bound = publisher.bind("tcp://127.0.0.1:0").await.expect("a publisher").to_string();
    let subscribed = Connection::subscribe(&endpoint(&bound), b"kv", Limits::default()).await;
    let mut subscriber = subscribed.expect("a subscriber");
    assert!(!subscriber.heartbeats());
    let sent = frames(&[b"kv", &7_u64.to_be_bytes(), &[9; 300]]);
    // Nothing tells when a subscription holds, so the message is repeated.
    let received = loop {
        let message = ZmqMessage::try_from(sent.clone()).expect("frames");
        publisher.send(message).await.expect("a message out");
        if let Ok(received) = timeout(Duration::from_millis(10), subscriber.recv()).await {
            break received.expect("a message in");
        }
    };
    assert_eq!(received, sent);

    let mut router = RouterSocket::new();
    let bound = router.bind("tcp://127.0.0.1:0").await.expect("a router").to_string();
    let dealer = Connection::dealer(&endpoint(&bound), Limits::default()).await;
    let mut dealer = dealer.expect("a dealer");
    dealer.send(&[b"", b"start"]).await.expect("a request out");
    let request = router.recv().await.expect("a request in").into_vec();
    assert_eq!(request[1..], frames(&[b"", b"start"])[..]);
    let reply = ZmqMessage::try_from([&request[..1], &sent[..]].concat()).expect("frames");
    router.send(reply).await.expect("a reply out");
    assert_eq!(dealer.recv().await.expect("a reply in"), sent);
}

#[tokio::test]
async fn endpoints_and_prefixes_are_checked() {
    for text in ["tcp://engine-0.engines:5557", "tcp://10.0.0.7:1", "tcp://[fd00::7]:65535"] {
        assert_eq!(endpoint(text).to_string(), text);
    }
    let parsed = |text: &str| text.parse::<Endpoint>().expect_err(text);
    for text in ["ipc:///tmp/kv", "engine:5557", ""] {
        assert_eq!(parsed(text), EndpointError::Scheme(text.to_owned()));
    }
    for text in ["tcp://*:5557", "tcp://:5557", "tcp://fd00::7:5557", "tcp://[engine]:5557"] {
        assert_eq!(parsed(text), EndpointError::Host(text.to_owned()));
    }
    for text in ["tcp://engine", "tcp://engine:", "tcp://engine:0", "tcp://engine:+80", "tcp://e:65536"] {
        assert_eq!(parsed(text), EndpointError::Port(text.to_owned()));
    }
    let refused = Connection::subscribe(&endpoint("tcp://engine:1"), &[0; 255], Limits::default()).await;
    assert_eq!(refused.expect_err("a long prefix").reason(), "limit");
}
