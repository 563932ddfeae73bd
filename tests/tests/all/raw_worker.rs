//! A worker made by hand, byte by byte, for what no engine does on purpose.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

use crate::harness::MODEL;

/// What a worker received: the head as text, and the body.
pub(crate) struct Received {
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
}

impl Received {
    /// Whether the router asks for tokens, at a moment of its own: when a worker joins, and every minute.
    pub(crate) fn is_probe(&self) -> bool {
        let probes = ["POST /tokenize ", "POST /v1/tokenize "];
        probes.iter().any(|probe| self.head.starts_with(probe))
    }

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
    counts: Arc<Counts>,
    task: JoinHandle<()>,
}

/// What it counts.
#[derive(Default)]
struct Counts {
    posts: AtomicUsize,
    /// Connections with a POST that is not over: neither answered nor given up.
    answering: AtomicUsize,
}

/// How a connection ends behind its answer.
#[derive(Clone, Copy)]
enum Ending {
    Closed,
    Reset,
}

/// What becomes of a connection that was idle for a time.
#[derive(Clone, Copy)]
pub(crate) enum Idle {
    /// It is closed then, as servers do.
    Closed(Duration),
    /// A request that comes later is not answered: what a client sees whose request meets the closing.
    Stranded(Duration),
}

impl RawWorker {
    /// A worker that serves the model.
    pub(crate) async fn start(script: impl Fn(Received) -> Vec<Vec<u8>> + Send + Sync + 'static) -> Self {
        Self::with_models(models(), script).await
    }

    /// A worker whose `/v1/models` is `models`.
    pub(crate) async fn with_models(
        models: String,
        script: impl Fn(Received) -> Vec<Vec<u8>> + Send + Sync + 'static,
    ) -> Self {
        Self::scripted("127.0.0.1:0", models, Ending::Closed, script).await.unwrap()
    }

    /// A worker that resets the connection behind the last piece of an answer, as one does that crashes:
    /// whoever closes the other side meets an error.
    pub(crate) async fn resetting(script: impl Fn(Received) -> Vec<Vec<u8>> + Send + Sync + 'static) -> Self {
        Self::scripted("127.0.0.1:0", models(), Ending::Reset, script).await.unwrap()
    }

    /// A worker at an address of its own; an error if it cannot be had.
    pub(crate) async fn at(
        address: &str,
        script: impl Fn(Received) -> Vec<Vec<u8>> + Send + Sync + 'static,
    ) -> std::io::Result<Self> {
        Self::scripted(address, models(), Ending::Closed, script).await
    }

    async fn scripted(
        address: &str,
        models: String,
        ending: Ending,
        script: impl Fn(Received) -> Vec<Vec<u8>> + Send + Sync + 'static,
    ) -> std::io::Result<Self> {
        let script = Arc::new(script);
        let serve = move |stream, counts: Arc<Counts>| {
            let (models, script) = (models.clone(), Arc::clone(&script));
            async move { serve(stream, &models, &counts, ending, &*script).await }
        };
        Self::listen(address, serve).await
    }

    /// A worker that serves the model, answers every POST with `answer`, and keeps connections.
    pub(crate) async fn keeping(idle: Idle, answer: &'static str) -> Self {
        let serve =
            move |stream, counts: Arc<Counts>| async move { keep(stream, &counts, idle, answer).await };
        Self::listen("127.0.0.1:0", serve).await.unwrap()
    }

    async fn listen<Served: Future<Output = std::io::Result<()>> + Send + 'static>(
        address: &str,
        serve: impl Fn(TcpStream, Arc<Counts>) -> Served + Send + 'static,
    ) -> std::io::Result<Self> {
        let listener = TcpListener::bind(address).await?;
        let address = listener.local_addr()?;
        let counts = Arc::new(Counts::default());
        let counted = Arc::clone(&counts);
        let task = tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                stream.set_nodelay(true).unwrap();
                // A client that goes away ends its connection only.
                tokio::spawn(serve(stream, Arc::clone(&counted)));
            }
        });
        Ok(Self { address, counts, task })
    }

    /// Requests with a body so far, but for those by which the router compares tokens.
    pub(crate) fn posts(&self) -> usize {
        self.counts.posts.load(Ordering::Relaxed)
    }

    /// How many of them are being answered.
    pub(crate) fn answering(&self) -> usize {
        self.counts.answering.load(Ordering::Relaxed)
    }
}

/// Counts a POST, and while it lives as one that is being answered.
struct Answering<'a>(&'a Counts);

impl<'a> Answering<'a> {
    fn of(received: &Received, counts: &'a Counts) -> Option<Self> {
        if received.is_probe() {
            return None;
        }
        counts.posts.fetch_add(1, Ordering::Relaxed);
        counts.answering.fetch_add(1, Ordering::Relaxed);
        Some(Self(counts))
    }
}

impl Drop for Answering<'_> {
    fn drop(&mut self) {
        self.0.answering.fetch_sub(1, Ordering::Relaxed);
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
    counts: &Counts,
    ending: Ending,
    script: &(dyn Fn(Received) -> Vec<Vec<u8>> + Send + Sync),
) -> std::io::Result<()> {
    let received = receive(&mut stream).await?;
    if !received.head.starts_with("POST ") {
        let (status, body) = answer_of_a_probe(&received, models);
        let length = body.len();
        let answer =
            format!("HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}");
        return stream.write_all(answer.as_bytes()).await;
    }
    let _answering = Answering::of(&received, counts);
    for piece in script(received) {
        if piece.is_empty() {
            // Open until the other side closes it.
            let _closed = stream.read(&mut [0; 1]).await?;
            break;
        }
        stream.write_all(&piece).await?;
        stream.flush().await?;
        // Lets the other side read this piece before the next one.
        tokio::task::yield_now().await;
    }
    match ending {
        Ending::Closed => stream.shutdown().await,
        Ending::Reset => stream.set_zero_linger(),
    }
}

fn answer_of_a_probe<'a>(received: &Received, models: &'a str) -> (&'static str, &'a str) {
    match received.head.split(' ').nth(1) {
        Some("/v1/models") => ("200 OK", models),
        Some("/health") => ("200 OK", ""),
        _ => ("404 Not Found", ""),
    }
}

/// Serves one request after the other.
async fn keep(
    mut stream: TcpStream,
    counts: &Counts,
    idle: Idle,
    answer: &'static str,
) -> std::io::Result<()> {
    let models = models();
    let mut answered: Option<Instant> = None;
    loop {
        let received = match (idle, answered) {
            (Idle::Closed(limit), Some(_)) => match timeout(limit, receive(&mut stream)).await {
                Ok(received) => received?,
                Err(_) => return stream.shutdown().await,
            },
            _ => receive(&mut stream).await?,
        };
        if let (Idle::Stranded(limit), Some(answered)) = (idle, answered)
            && answered.elapsed() > limit
        {
            return Ok(());
        }
        let is_post = received.head.starts_with("POST ");
        let _answering = is_post.then(|| Answering::of(&received, counts));
        let (status, body) = if is_post { ("200 OK", answer) } else { answer_of_a_probe(&received, &models) };
        let head = format!(
            "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all(&[head.as_bytes(), body.as_bytes()].concat()).await?;
        answered = Some(Instant::now());
    }
}

/// What `/v1/models` of a worker that serves the model is.
fn models() -> String {
    format!("{{\"object\":\"list\",\"data\":[{{\"id\":\"{MODEL}\",\"object\":\"model\"}}]}}")
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
