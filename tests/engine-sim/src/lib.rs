//! A faithful stand-in for vLLM and SGLang: their HTTP interface, prefix caches, hash chains,
//! KV events and timing, without a model. Faults come on demand.
//!
//! [`EngineSim::start`] runs one inside the caller's runtime; the program of the same name
//! wraps it. What is modelled and what is not stands in the crate's README.

mod cache;
mod clock;
pub mod config;
pub mod events;
mod handover;
pub mod hash;
mod http;
mod prompt;
mod publisher;
mod rank;

use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

pub use config::{Config, ConfigError, Disaggregation, EventPort, Lora, Wire};
use handover::Handover;
use http::{Connections, CuttableListener, Engine, EventPorts};
pub use prompt::PromptError;
use publisher::{Listeners, Publisher};
use rank::Rank;

/// A running engine. Dropping it ends it and cuts its connections.
#[derive(Debug)]
pub struct EngineSim {
    http: SocketAddr,
    transfer: Option<SocketAddr>,
    ports: EventPorts,
    connections: Connections,
    tasks: JoinSet<()>,
}

/// Why an engine did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The configuration is out of bounds.
    #[error("invalid configuration")]
    Config(#[from] ConfigError),
    /// The tokenizer cannot be used.
    #[error("failed to load the tokenizer")]
    Prompt(#[from] PromptError),
    /// A port is taken, or there are not enough consecutive ones.
    #[error("failed to listen for {socket}")]
    Listen {
        /// Which socket.
        socket: &'static str,
        /// Cause.
        #[source]
        source: std::io::Error,
    },
    /// ZMQ refused a socket.
    #[error("failed to start a publisher")]
    Publisher(#[from] zeromq::ZmqError),
}

impl EngineSim {
    /// Starts an engine; all its sockets listen when this returns.
    pub async fn start(config: Config) -> Result<Self, StartError> {
        config.validate()?;
        let config = Arc::new(config);
        let prompter = prompt::Prompter::load(config.wire, config.tokenizer.as_deref())?;
        let listener = TcpListener::bind(config.listen).await.map_err(listen_error("http"))?;
        let http = listener.local_addr().map_err(listen_error("http"))?;
        let mut tasks = JoinSet::new();
        let (ranks, ports) = start_ranks(&config, http, &mut tasks).await?;
        let connections = Connections::default();
        let transfers = listen_for_transfers(&config).await?;
        let transfer = transfers.as_ref().map(TcpListener::local_addr).transpose();
        let transfer = transfer.map_err(listen_error("transfers"))?;
        let handover = Handover::new(Arc::clone(&config), transfer);
        if let Some(transfers) = transfers {
            tasks.spawn(serve(transfers, connections.clone(), handover::router(Arc::clone(&handover))));
        }
        let engine = Engine::new(config, prompter, ranks, ports.clone(), connections.clone(), handover);
        tasks.spawn(serve(listener, connections.clone(), http::router(engine)));
        Ok(Self { http, transfer, ports, connections, tasks })
    }

    /// Where HTTP is served.
    pub fn http_addr(&self) -> SocketAddr {
        self.http
    }

    /// Where a prefill engine hands prompts over; none for any other.
    pub fn transfer_addr(&self) -> Option<SocketAddr> {
        self.transfer
    }

    /// Event publishers, by rank; empty when events are off.
    pub fn kv_event_endpoints(&self) -> Vec<String> {
        endpoints(&self.ports.events)
    }

    /// Replay sockets, by rank; empty when replay is off.
    pub fn replay_endpoints(&self) -> Vec<String> {
        endpoints(&self.ports.replay)
    }

    /// Ends the engine and waits for its tasks.
    pub async fn stop(mut self) {
        self.connections.replace().cancel();
        self.tasks.shutdown().await;
    }
}

impl Drop for EngineSim {
    fn drop(&mut self) {
        self.connections.replace().cancel();
    }
}

/// Serves until the task is cancelled.
async fn serve(listener: TcpListener, connections: Connections, router: axum::Router) {
    let listener = CuttableListener::new(listener, connections);
    if let Err(error) = axum::serve(listener, router).await {
        tracing::error!(%error, "failed to serve HTTP");
    }
}

/// A prefill engine's port for decode engines.
async fn listen_for_transfers(config: &Config) -> Result<Option<TcpListener>, StartError> {
    if config.disaggregation != Some(Disaggregation::Prefill) {
        return Ok(None);
    }
    let address = SocketAddr::new(config.listen.ip(), config.transfer_port);
    Ok(Some(TcpListener::bind(address).await.map_err(listen_error("transfers"))?))
}

/// Starts every rank's scheduler and, unless events are off, its publisher.
async fn start_ranks(
    config: &Arc<Config>,
    http: SocketAddr,
    tasks: &mut JoinSet<()>,
) -> Result<(Vec<Arc<Rank>>, EventPorts), StartError> {
    let bind = |port, socket| match port {
        EventPort::Off => Ok(Vec::new()),
        EventPort::Base(base) => {
            publisher::bind_consecutive(http.ip(), base, config.dp_size).map_err(listen_error(socket))
        }
    };
    let events = bind(config.kv_events_port, "kv events")?;
    let replay = if events.is_empty() { Vec::new() } else { bind(config.replay_port, "replay")? };
    let mut ports = EventPorts::default();
    let mut replay = replay.into_iter();
    let mut events = events.into_iter();
    let mut ranks = Vec::new();
    for index in 0..config.dp_size {
        let mut publisher = None;
        if let Some(events) = events.next() {
            let listeners = Listeners { events, replay: replay.next() };
            ports.events.push(listeners.events.local_addr().map_err(listen_error("kv events"))?);
            if let Some(replay) = &listeners.replay {
                ports.replay.push(replay.local_addr().map_err(listen_error("replay"))?);
            }
            let topic = Bytes::from(config.topic.clone());
            let has_topic = config.wire.replay_has_topic();
            let (handle, task) = Publisher::start(listeners, topic, has_topic, config.replay_batches).await?;
            tasks.spawn(task);
            publisher = Some(handle);
        }
        let rank = Rank::new(Arc::clone(config), index, publisher);
        tasks.spawn(rank::run(Arc::clone(&rank)));
        ranks.push(rank);
    }
    Ok((ranks, ports))
}

fn endpoints(addresses: &[SocketAddr]) -> Vec<String> {
    addresses.iter().map(|address| format!("tcp://{address}")).collect()
}

fn listen_error(socket: &'static str) -> impl Fn(std::io::Error) -> StartError {
    move |source| StartError::Listen { socket, source }
}
