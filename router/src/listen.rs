//! Accepts connections and serves HTTP/1.1 on them, until told to stop.
//!
//! What axum's own loop does not set: packets of a stream leave at once, peers
//! that vanished are noticed, a request's head must arrive in time, and open
//! connections have a limit. Stopping closes idle connections and lets answers
//! under way end.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

/// How long a request's head may take, and how long a connection may be idle
/// between two requests: hyper counts both alike.
const HEAD_TIMEOUT: Duration = Duration::from_secs(75);
/// Silence after which a peer is asked whether it is still there, and between
/// two questions. A client that vanished without a word would otherwise hold
/// its connection, and its request a place at an engine, for hours.
const KEEPALIVE: Duration = Duration::from_secs(15);
/// Open connections per listener. Each needs a file, and one more towards a
/// worker while it has a request: twice this is half of the 65,536 files that
/// container runtimes usually allow. Further ones wait in the kernel's queue.
const MAX_CONNECTIONS: usize = 16_384;
/// Pause after a failed accept. The usual reason is that files ran out; asking
/// again at once would only burn a core until some are closed.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Serves `router` on `listener` until `stop`; returns once the last answer has
/// ended. Dropping the future does not cut connections, but the accepting.
pub async fn serve(listener: TcpListener, router: axum::Router, stop: CancellationToken) {
    let open = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let graceful = GracefulShutdown::new();
    let service = TowerToHyperService::new(router);
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT);
    loop {
        let accepted = tokio::select! {
            biased;
            () = stop.cancelled() => break,
            accepted = accept(&listener, &open) => accepted,
        };
        let Some((stream, place)) = accepted else { continue };
        let connection = http.serve_connection(TokioIo::new(stream), service.clone());
        let connection = graceful.watch(connection);
        tokio::spawn(async move {
            let _place = place;
            if let Err(error) = connection.await {
                // Clients hang up as they like; nothing to do about it.
                tracing::debug!(target: "kv_router::listen", error = %crate::chain(&error), "connection ended");
            }
        });
    }
    // New connections must be refused while answers end, not left to wait.
    drop(listener);
    graceful.shutdown().await;
}

/// The next connection and its place among the open ones; `None` if there was
/// none after all.
async fn accept(listener: &TcpListener, open: &Arc<Semaphore>) -> Option<(TcpStream, OwnedSemaphorePermit)> {
    // The semaphore is never closed.
    let place = Arc::clone(open).acquire_owned().await.ok()?;
    match listener.accept().await {
        Ok((stream, _)) => {
            if let Err(error) = tune(&stream) {
                tracing::debug!(target: "kv_router::listen", error = %error, "socket options were not set");
            }
            Some((stream, place))
        }
        Err(error) => {
            if !is_of_one_connection(&error) {
                tracing::error!(target: "kv_router::listen", error = %error, "accept failed");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
            None
        }
    }
}

/// Without `TCP_NODELAY` the kernel holds small packets back until the last one
/// is acknowledged, and tokens arrive in bursts of 40 ms.
fn tune(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let keepalive = TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE);
    SockRef::from(stream).set_tcp_keepalive(&keepalive)
}

/// Whether only the connection failed that was about to be accepted.
fn is_of_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}

#[cfg(test)]
mod tests {
    use super::*;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    async fn listener() -> TcpListener {
        TcpListener::bind("127.0.0.1:0").await.expect("a free port")
    }

    #[tokio::test]
    async fn accepted_sockets_send_at_once_and_notice_peers_that_vanish() {
        let listener = listener().await;
        let _client = TcpStream::connect(listener.local_addr().expect("bound")).await.expect("connects");
        let open = Arc::new(Semaphore::new(1));
        let (stream, place) = accept(&listener, &open).await.expect("accepted");
        assert!(stream.nodelay().expect("readable"));
        assert!(SockRef::from(&stream).keepalive().expect("readable"));
        assert_eq!(open.available_permits(), 0, "it has its place");
        drop(place);
        assert_eq!(open.available_permits(), 1);
    }

    #[tokio::test]
    async fn stopping_lets_the_answer_under_way_end_and_closes_idle_connections() {
        let listener = listener().await;
        let address = listener.local_addr().expect("bound");
        let (stop, asked, go) =
            (CancellationToken::new(), CancellationToken::new(), CancellationToken::new());
        let (told, waits) = (asked.clone(), go.clone());
        let slow = axum::routing::get(move || async move {
            told.cancel();
            waits.cancelled().await;
            "done"
        });
        let router = axum::Router::new().route("/slow", slow);
        let serving = tokio::spawn(serve(listener, router, stop.clone()));
        let mut idle = TcpStream::connect(address).await.expect("connects");
        let mut busy = TcpStream::connect(address).await.expect("connects");
        busy.write_all(b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n").await.expect("written");
        asked.cancelled().await;
        stop.cancel();
        assert_eq!(idle.read(&mut [0; 8]).await.expect("closed in order"), 0);
        go.cancel();
        let mut answer = String::new();
        busy.read_to_string(&mut answer).await.expect("ends");
        assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("done"), "{answer}");
        serving.await.expect("ends");
        assert!(TcpStream::connect(address).await.is_err(), "nobody listens any more");
    }
}
