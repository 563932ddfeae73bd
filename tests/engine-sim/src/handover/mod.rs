//! How a prefill engine hands a prompt's keys and values over to a decode engine: who waits for whom, what
//! each side refuses, and what is counted when somebody has mixed something up.
//!
//! No keys and values travel: what does is the digest of the prompt they belong to, over HTTP on a port of
//! its own, which stands for SGLang's bootstrap server ([`rooms`]) and vLLM's side channel ([`leases`]). The
//! two engines' contracts are read in `http::disaggregated`; here is what outlives one request.

pub(crate) mod leases;
mod peer;
pub(crate) mod rooms;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::Router;
use axum::extract::{Path, Query, State};
use axum::routing::{get, post};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::clock;
use crate::config::{Config, Disaggregation};
use leases::Leases;
pub(crate) use peer::Peer;
use rooms::{Offer, Rooms};

/// One engine's side of all its handovers.
pub(crate) struct Handover {
    config: Arc<Config>,
    /// Where decode engines ask; none unless this is a prefill engine.
    address: Option<SocketAddr>,
    pub(crate) rooms: Arc<Rooms>,
    pub(crate) leases: Leases,
    pub(crate) peer: Peer,
    state: Mutex<Counted>,
}

/// What happened since the start or the last reset.
#[derive(Default)]
struct Counted {
    /// Names this life of the process.
    engine_id: String,
    done: BTreeMap<Outcome, u64>,
    wrong: BTreeMap<Wrong, u64>,
}

/// How far a handover came.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Outcome {
    /// Prefill: a prompt is computed and can be fetched.
    Offered,
    /// Prefill: it was fetched.
    Taken,
    /// Prefill: its request ended before it was fetched.
    Abandoned,
    /// Decode: a prompt came from a prefill engine.
    Received,
    /// Decode: a prompt should have come from a prefill engine and was computed here.
    Recomputed,
    /// Decode: nobody was asked to compute the prompt elsewhere.
    Local,
}

/// What nobody who follows the contract causes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Wrong {
    /// A request without `bootstrap_room`.
    MissingRoom,
    /// Rooms that are no numbers of 63 bits, or not one for each answer.
    BadRooms,
    /// Decode: a request without `bootstrap_host`.
    MissingHost,
    /// Prefill: a room that is or was another request's.
    RoomReused,
    /// Prefill: a second decode engine asked for the same room.
    RoomTakenTwice,
    /// Prefill: nobody asked for a room in time.
    RoomNotTaken,
    /// Decode: nobody answers, or not as a prefill engine, where the request says that one is.
    PrefillUnreachable,
    /// Decode: the prefill engine never had the room.
    PrefillSilent,
    /// Decode: the prefill engine computed another prompt.
    PromptDiffers,
    /// The request is for the other role.
    OtherRole,
    /// vLLM's prefill: a request without `do_remote_decode`.
    NotRemoteDecode,
    /// vLLM's prefill: a request for more than one token, or for a stream.
    MoreThanOneToken,
    /// vLLM's decode: `kv_transfer_params` are not what prefill answered.
    ParamsAltered,
    /// vLLM's decode: the prefill engine knows no such request.
    ParamsUnknown,
    /// vLLM's decode: the same parameters a second time.
    PulledTwice,
    /// vLLM's decode: prefill has let the blocks go.
    LeaseExpired,
}

/// What a decode engine asks for a room.
#[derive(Deserialize)]
struct RoomQuery {
    /// The prefill rank that it was told to expect; absent, the room says it.
    rank: Option<u64>,
}

/// What a decode engine sends to pull blocks.
#[derive(Serialize, Deserialize)]
pub(crate) struct Pull {
    /// `kv_transfer_params`, as the prefill engine answered them.
    pub(crate) params: Value,
    pub(crate) prompt_sha256: String,
}

/// What it is answered.
#[derive(Serialize, Deserialize)]
pub(crate) struct Pulled {
    /// Why there are no blocks; none if there are.
    pub(crate) wrong: Option<Wrong>,
}

impl Handover {
    pub(crate) fn new(config: Arc<Config>, address: Option<SocketAddr>) -> Arc<Self> {
        let handover = Self {
            config,
            address,
            rooms: Arc::default(),
            leases: Leases::default(),
            peer: Peer::new(),
            state: Mutex::default(),
        };
        handover.restart();
        Arc::new(handover)
    }

    /// A new life of the process: what was held is gone, and the engine has another name.
    pub(crate) fn restart(&self) {
        self.rooms.forget();
        self.leases.forget();
        let now = clock::since_epoch().as_nanos();
        let own = self.address.map(|address| address.to_string()).unwrap_or_default();
        let digest = Sha256::digest([own.as_bytes(), &now.to_le_bytes()].concat());
        self.state.lock().engine_id = digest.iter().take(16).map(|byte| format!("{byte:02x}")).collect();
    }

    pub(crate) fn role(&self) -> Option<Disaggregation> {
        self.config.disaggregation
    }

    /// Where decode engines ask.
    pub(crate) fn address(&self) -> Option<SocketAddr> {
        self.address
    }

    /// How long one side waits for the other.
    pub(crate) fn patience(&self) -> Duration {
        Duration::from_millis(self.config.transfer_timeout_ms)
    }

    /// vLLM's name of this life of the process, of one rank.
    pub(crate) fn engine_id(&self, rank: usize) -> String {
        let id = self.state.lock().engine_id.clone();
        if self.config.dp_size > 1 { format!("{id}_dp{rank}") } else { id }
    }

    pub(crate) fn count(&self, outcome: Outcome, times: usize) {
        *self.state.lock().done.entry(outcome).or_default() += times as u64;
    }

    pub(crate) fn wrong(&self, wrong: Wrong) {
        tracing::warn!(?wrong, "a handover went wrong");
        *self.state.lock().wrong.entry(wrong).or_default() += 1;
    }

    pub(crate) fn reset_counters(&self) {
        let mut state = self.state.lock();
        state.done.clear();
        state.wrong.clear();
    }

    /// For `/sim/state`. Counters that are zero are left out.
    pub(crate) fn report(&self) -> Value {
        let state = self.state.lock();
        let role = self.role().map(Disaggregation::name);
        json!({"role": role, "held": self.rooms.open() + self.leases.held(self.patience()),
               "total": state.done, "wrong": state.wrong})
    }
}

/// What a prefill engine serves to decode engines.
pub(crate) fn router(handover: Arc<Handover>) -> Router {
    Router::new().route("/room/{room}", get(room)).route("/pull", post(pull)).with_state(handover)
}

/// Answers when the room's prompt is computed; never, where nobody brings it.
async fn room(
    State(handover): State<Arc<Handover>>,
    Path(room): Path<u64>,
    Query(query): Query<RoomQuery>,
) -> Json<Offer> {
    let rank = query.rank.unwrap_or(room % u64::from(handover.config.dp_size));
    match handover.rooms.take(room, rank).await {
        Some(offer) => {
            handover.count(Outcome::Taken, 1);
            Json(offer)
        }
        None => {
            handover.wrong(Wrong::RoomTakenTwice);
            std::future::pending().await
        }
    }
}

async fn pull(State(handover): State<Arc<Handover>>, Json(pull): Json<Pull>) -> Json<Pulled> {
    let wrong = handover.leases.pull(&pull.params, &pull.prompt_sha256, handover.patience()).err();
    match wrong {
        None => handover.count(Outcome::Taken, 1),
        Some(wrong) => handover.wrong(wrong),
    }
    Json(Pulled { wrong })
}
