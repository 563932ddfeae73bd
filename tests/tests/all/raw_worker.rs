//! A worker made by hand, byte by byte, for what no engine does on purpose.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use crate::harness::MODEL;

/// What a worker received: the head as text, and the body.
pub(crate) struct Received {
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
}

impl Received {
    /// The value of a header, if there is one.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| {
            let (found, value) = line.split_once(':')?;
            found.eq_ignore_ascii_case(name).then(|| value.trim())
        })
    }
}

/// Answers every POST with the pieces that its script returns, each in a write of its own, and
/// closes the connection then; behind an empty piece it stays open. Dropping it ends it.
pub(crate) struct RawWorker {
    pub(crate) address: SocketAddr,
    posts: Arc<AtomicUsize>,
    task: JoinHandle<()>,
}

impl RawWorker {
    /// A worker that serves the model.
    pub(crate) async fn start(script: impl Fn(Received) -> Vec<Vec<u8>> + Send + Sync + 'static) -> Self {
        let models =
            format!("{{\"object\":\"list\",\"data\":[{{\"id\":\"{MODEL}\",\"object\":\"model\"}}]}}");
        Self::with_models(models, script).await
    }

    /// A worker whose `/v1/models` is `models`.
    pub(crate) async fn with_models(
        models: String,
        script: impl Fn(Received) -> Vec<Vec<u8>> + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let posts = Arc::new(AtomicUsize::new(0));
        let (counted, script) = (Arc::clone(&posts), Arc::new(script));
        let task = tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                stream.set_nodelay(true).unwrap();
                let (models, counted, script) = (models.clone(), Arc::clone(&counted), Arc::clone(&script));
                tokio::spawn(async move {
                    // A client that goes away ends this connection only.
                    let _ = serve(stream, &models, &counted, &*script).await;
                });
            }
        });
        Self { address, posts, task }
    }

    /// Requests with a body so far, but for those by which the router compares tokens.
    pub(crate) fn posts(&self) -> usize {
        self.posts.load(Ordering::Relaxed)
    }
}

impl Drop for RawWorker {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(
    mut stream: TcpStream,
    models: &str,
    posts: &AtomicUsize,
    script: &(dyn Fn(Received) -> Vec<Vec<u8>> + Send + Sync),
) -> std::io::Result<()> {
    let received = receive(&mut stream).await?;
    if !received.head.starts_with("POST ") {
        let (status, body) = match received.head.split(' ').nth(1) {
            Some("/v1/models") => ("200 OK", models),
            Some("/health") => ("200 OK", ""),
            _ => ("404 Not Found", ""),
        };
        let length = body.len();
        let answer =
            format!("HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}");
        return stream.write_all(answer.as_bytes()).await;
    }
    // The router asks engines to tokenize when they join, at a moment of its own.
    let probes = ["POST /tokenize ", "POST /v1/tokenize "];
    if !probes.iter().any(|probe| received.head.starts_with(probe)) {
        posts.fetch_add(1, Ordering::Relaxed);
    }
    for piece in script(received) {
        if piece.is_empty() {
            return std::future::pending().await;
        }
        stream.write_all(&piece).await?;
        stream.flush().await?;
        // Lets the other side read this piece before the next one.
        tokio::task::yield_now().await;
    }
    stream.shutdown().await
}

/// Reads one request, whose body has a length.
async fn receive(stream: &mut TcpStream) -> std::io::Result<Received> {
    let mut bytes = Vec::new();
    let end = loop {
        if let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
            break end + 4;
        }
        if stream.read_buf(&mut bytes).await? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
    };
    let head = String::from_utf8_lossy(&bytes[..end]).into_owned();
    let mut received = Received { head, body: bytes.split_off(end) };
    let length = received.header("content-length").map_or(0, |length| length.parse().unwrap());
    while received.body.len() < length {
        if stream.read_buf(&mut received.body).await? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
    }
    Ok(received)
}

/// The head of a chunked stream of events.
pub(crate) const STREAM_HEAD: &str =
    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";

/// One chunk of a chunked body; an empty one ends it.
pub(crate) fn chunk(bytes: &[u8]) -> Vec<u8> {
    let mut framed = format!("{:x}\r\n", bytes.len()).into_bytes();
    framed.extend_from_slice(bytes);
    framed.extend_from_slice(b"\r\n");
    framed
}
