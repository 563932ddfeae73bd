//! Connections that all end at once when the simulated process dies: a listener for axum whose
//! streams fail as soon as their token is cancelled.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

/// Pause before the next accept when the process is out of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// The switch of all connections that are open now.
#[derive(Clone, Debug, Default)]
pub(crate) struct Connections {
    current: Arc<Mutex<CancellationToken>>,
}

/// Accepts connections that [`Connections`] can cut.
pub(crate) struct CuttableListener {
    listener: TcpListener,
    connections: Connections,
}

/// One such connection.
pub(crate) struct CuttableStream {
    stream: TcpStream,
    cut: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl Connections {
    /// Connections accepted from here on survive; the token cuts those before.
    pub(crate) fn replace(&self) -> CancellationToken {
        std::mem::take(&mut *self.current.lock())
    }
}

impl CuttableListener {
    pub(crate) fn new(listener: TcpListener, connections: Connections) -> Self {
        Self { listener, connections }
    }
}

impl axum::serve::Listener for CuttableListener {
    type Io = CuttableStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        loop {
            match self.listener.accept().await {
                Ok((stream, address)) => {
                    // Tokens of a stream are small and must not wait for each other.
                    let _ = stream.set_nodelay(true);
                    let token = self.connections.current.lock().clone();
                    let cut = Box::pin(token.cancelled_owned());
                    return (CuttableStream { stream, cut }, address);
                }
                Err(error) => {
                    tracing::warn!(%error, "failed to accept a connection");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        self.listener.local_addr()
    }
}

impl CuttableStream {
    fn check(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        match self.cut.as_mut().poll(context) {
            Poll::Ready(()) => Err(io::ErrorKind::ConnectionReset.into()),
            Poll::Pending => Ok(()),
        }
    }
}

impl AsyncRead for CuttableStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check(context)?;
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for CuttableStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.check(context)?;
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
