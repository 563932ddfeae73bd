//! What a disaggregated engine wants of a request, and what it does before and after the model runs.
//!
//! SGLang: both engines get the same body at once, with `bootstrap_host`, `bootstrap_port` and a
//! `bootstrap_room` for each answer; prefill ends when decode has its prompt. vLLM with NixlConnector: prefill
//! first, for one token and with `kv_transfer_params.do_remote_decode`; what it answers as
//! `kv_transfer_params` goes to decode word for word.
//! Authority: sglang/srt/disaggregation (0.5.23); vllm/distributed/kv_transfer/kv_connector/v1/nixl (0.32).

use std::sync::Arc;

use axum::http::StatusCode;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tokio::sync::mpsc;

use super::answer::Output;
use super::body::Wanted;
use super::{Engine, Refusal, hex};
use crate::clock;
use crate::config::Disaggregation;
use crate::handover::rooms::{Offer, OpenRoom};
use crate::handover::{Handover, Outcome, Pull, Wrong};
use crate::rank::{Prefill, Progress};

/// SGLang's bootstrap port where a request names none and the engine was given none.
const BOOTSTRAP_PORT: u64 = 8998;
/// Rooms are drawn from 63 bits.
const MAX_ROOM: u64 = i64::MAX as u64;

/// What this engine does of a request.
pub(super) enum Part {
    /// All of it.
    Whole,
    /// SGLang's prefill: computes the prompts and waits until each is taken from its room.
    Rooms(Vec<u64>),
    /// SGLang's decode: takes each prompt from its room.
    Guest(Vec<Invitation>),
    /// vLLM's prefill: computes the prompt and keeps it for whoever comes with the answer.
    Lease,
    /// vLLM's decode: comes with that answer.
    Pull(Value),
}

/// Where a prompt is to be found.
pub(super) struct Invitation {
    host: String,
    port: u64,
    room: u64,
    /// The prefill rank, where it is not the one that the room says.
    rank: Option<u64>,
}

/// Rooms of one request; dropping it closes them.
pub(super) struct Held {
    handover: Arc<Handover>,
    rooms: Vec<OpenRoom>,
}

impl Drop for Held {
    fn drop(&mut self) {
        let abandoned = self.rooms.iter().filter(|room| !room.is_taken()).count();
        if abandoned > 0 {
            self.handover.count(Outcome::Abandoned, abandoned);
        }
    }
}

impl Part {
    /// Reads what a body says of the handover. `wanted` shrinks to what this engine does.
    pub(super) fn read(
        engine: &Engine,
        body: &Value,
        wanted: &mut Wanted,
        prompts: usize,
    ) -> Result<Self, Refusal> {
        let answers = prompts * wanted.answers;
        match (engine.handover.role(), engine.config.wire.is_vllm()) {
            (None, _) => Ok(Self::Whole),
            (Some(Disaggregation::Prefill), false) => {
                let rooms = rooms(engine, body, answers)?;
                wanted.max_tokens = 1;
                Ok(Self::Rooms(rooms))
            }
            (Some(Disaggregation::Decode), false) => Ok(Self::Guest(invitations(engine, body, answers)?)),
            (Some(Disaggregation::Prefill), true) => lease(engine, body, wanted, answers),
            (Some(Disaggregation::Decode), true) => pull_of(engine, body),
        }
    }

    /// The rank that SGLang's prefill takes of itself; none where anyone may do.
    pub(super) fn rank(&self, engine: &Engine) -> Option<usize> {
        match self {
            Self::Rooms(rooms) => Some(rank_of(*rooms.first()?, engine)),
            Self::Whole | Self::Guest(_) | Self::Lease | Self::Pull(_) => None,
        }
    }

    /// Opens the rooms of SGLang's prefill, so that decode may come before there is anything in them.
    pub(super) fn open(&self, engine: &Engine, named: Option<usize>) -> Result<Held, Refusal> {
        let mut held = Held { handover: Arc::clone(&engine.handover), rooms: Vec::new() };
        let Self::Rooms(rooms) = self else { return Ok(held) };
        for room in rooms {
            let rank = named.unwrap_or_else(|| rank_of(*room, engine));
            match engine.handover.rooms.open_room(*room, rank as u64) {
                Some(open) => held.rooms.push(open),
                None => {
                    let message = format!("bootstrap_room {room} is or was another request's");
                    return Err(refuse(
                        engine,
                        Wrong::RoomReused,
                        StatusCode::INTERNAL_SERVER_ERROR,
                        message,
                    ));
                }
            }
        }
        Ok(held)
    }

    /// Gets the prompts' keys and values, one by one for each answer, where another engine has them.
    pub(super) async fn receive(
        &self,
        engine: &Engine,
        prompts: &[Vec<u32>],
        answers: usize,
    ) -> Result<Vec<Prefill>, Refusal> {
        let count = prompts.len() * answers;
        let prompt = |at: usize| digest(&prompts[at / answers]);
        match self {
            Self::Guest(invitations) => {
                let mut received = Vec::with_capacity(count);
                let all = async {
                    for (at, invitation) in invitations.iter().enumerate() {
                        received.push(take(engine, invitation, &prompt(at)).await?);
                    }
                    Ok::<(), Refusal>(())
                };
                match tokio::time::timeout(engine.handover.patience(), all).await {
                    Ok(result) => result?,
                    Err(_) => {
                        let message = "no prompt came from the prefill server in time".to_owned();
                        return Err(refuse(
                            engine,
                            Wrong::PrefillSilent,
                            StatusCode::INTERNAL_SERVER_ERROR,
                            message,
                        ));
                    }
                }
                Ok(received)
            }
            Self::Pull(params) => {
                let mut received = Vec::with_capacity(count);
                for at in 0..count {
                    received.push(pull(engine, params, prompt(at)).await);
                }
                Ok(received)
            }
            Self::Whole | Self::Rooms(_) | Self::Lease => {
                if engine.handover.role() == Some(Disaggregation::Decode) {
                    engine.handover.count(Outcome::Local, count);
                }
                Ok(vec![Prefill::Here; count])
            }
        }
    }

    /// Offers what prefill has computed, and waits for whom it waits.
    pub(super) async fn hand_over(
        &self,
        engine: &Engine,
        rank: usize,
        held: Held,
        progress: mpsc::Receiver<Progress>,
        output: &mut Output,
    ) -> Result<mpsc::Receiver<Progress>, Refusal> {
        match self {
            Self::Whole | Self::Guest(_) | Self::Pull(_) => Ok(progress),
            Self::Rooms(_) => hold(engine, &held, progress, output).await,
            Self::Lease => Ok(grant(engine, rank, progress, output).await),
        }
    }
}

fn refuse(engine: &Engine, wrong: Wrong, status: StatusCode, message: String) -> Refusal {
    engine.handover.wrong(wrong);
    Refusal { status, message }
}

/// Digest over the ids of a prompt.
fn digest(prompt: &[u32]) -> String {
    let mut hasher = Sha256::new();
    prompt.iter().for_each(|token| hasher.update(token.to_le_bytes()));
    hex(&hasher.finalize())
}

/// SGLang's `follow_bootstrap_room`.
fn rank_of(room: u64, engine: &Engine) -> usize {
    usize::try_from(room % engine.ranks.len() as u64).unwrap_or(0)
}

/// One value for each answer: a list of them, or the same for all.
fn each<T: Clone>(value: &Value, answers: usize, read: impl Fn(&Value) -> Option<T>) -> Option<Vec<T>> {
    match value.as_array() {
        None => Some(vec![read(value)?; answers]),
        Some(list) if list.len() == answers => list.iter().map(read).collect(),
        Some(_) => None,
    }
}

fn rooms(engine: &Engine, body: &Value, answers: usize) -> Result<Vec<u64>, Refusal> {
    let given = &body["bootstrap_room"];
    if given.is_null() {
        let message = "Disaggregated request received without bootstrap room id.".to_owned();
        return Err(refuse(engine, Wrong::MissingRoom, StatusCode::INTERNAL_SERVER_ERROR, message));
    }
    let room = |value: &Value| value.as_u64().filter(|room| *room <= MAX_ROOM);
    let rooms = if answers > 1 && !given.is_array() { None } else { each(given, answers, room) };
    rooms.ok_or_else(|| {
        let message = format!("bootstrap_room must be a number of 63 bits for each of {answers} answers");
        refuse(engine, Wrong::BadRooms, StatusCode::BAD_REQUEST, message)
    })
}

fn invitations(engine: &Engine, body: &Value, answers: usize) -> Result<Vec<Invitation>, Refusal> {
    let rooms = rooms(engine, body, answers)?;
    let own = u64::from(engine.config.transfer_port);
    let default_port = if own == 0 { BOOTSTRAP_PORT } else { own };
    let hosts = each(&body["bootstrap_host"], answers, |value| value.as_str().map(str::to_owned));
    let port = |value: &Value| if value.is_null() { Some(default_port) } else { value.as_u64() };
    let ports = each(&body["bootstrap_port"], answers, port);
    let (Some(hosts), Some(ports)) = (hosts, ports) else {
        let message = "bootstrap_host and bootstrap_port must name the prefill server".to_owned();
        return Err(refuse(engine, Wrong::MissingHost, StatusCode::INTERNAL_SERVER_ERROR, message));
    };
    let rank = body["disagg_prefill_dp_rank"].as_u64();
    let invitation = |((host, port), room)| Invitation { host, port, room, rank };
    Ok(hosts.into_iter().zip(ports).zip(rooms).map(invitation).collect())
}

/// SGLang's decode: waits for one prompt. The caller gives up when it takes too long.
async fn take(engine: &Engine, invitation: &Invitation, prompt: &str) -> Result<Prefill, Refusal> {
    let Invitation { host, port, room, rank } = invitation;
    match engine.handover.peer.take(host, *port, *room, *rank).await {
        Ok(offer) if offer.prompt_sha256 == prompt => {
            engine.handover.count(Outcome::Received, 1);
            Ok(Prefill::Elsewhere { cached_tokens: Some(offer.cached_tokens) })
        }
        Ok(_) => {
            let message = format!("room {room} holds another prompt");
            Err(refuse(engine, Wrong::PromptDiffers, StatusCode::INTERNAL_SERVER_ERROR, message))
        }
        Err(error) => {
            let message = format!("Could not fetch bootstrap info: {error}");
            Err(refuse(engine, Wrong::PrefillUnreachable, StatusCode::INTERNAL_SERVER_ERROR, message))
        }
    }
}

/// SGLang's prefill: its answer is ready when all its prompts have been taken.
async fn hold(
    engine: &Engine,
    held: &Held,
    mut progress: mpsc::Receiver<Progress>,
    output: &Output,
) -> Result<mpsc::Receiver<Progress>, Refusal> {
    let count = held.rooms.len();
    let (sender, again) = mpsc::channel(count);
    for _ in 0..count {
        let token = next(&mut progress).await;
        let prompt_sha256 = digest(output.prompt_of(token.choice));
        held.rooms[token.choice].fill(Offer { prompt_sha256, cached_tokens: token.cached_tokens });
        engine.handover.count(Outcome::Offered, 1);
        // There is room for all, and its receiver is here.
        let _ = sender.try_send(token);
    }
    let all_taken = async {
        for room in &held.rooms {
            room.taken().await;
        }
    };
    match tokio::time::timeout(engine.handover.patience(), all_taken).await {
        Ok(()) => Ok(again),
        Err(_) => {
            let message = "no decode server asked for the prompt in time".to_owned();
            Err(refuse(engine, Wrong::RoomNotTaken, StatusCode::INTERNAL_SERVER_ERROR, message))
        }
    }
}

async fn next(progress: &mut mpsc::Receiver<Progress>) -> Progress {
    match progress.recv().await {
        Some(token) => token,
        // The process died; its connections are about to be cut.
        None => std::future::pending().await,
    }
}

fn lease(engine: &Engine, body: &Value, wanted: &Wanted, answers: usize) -> Result<Part, Refusal> {
    let params = &body["kv_transfer_params"];
    let wrong =
        |wrong, message: &str| Err(refuse(engine, wrong, StatusCode::BAD_REQUEST, message.to_owned()));
    if params["do_remote_prefill"] == true {
        return wrong(Wrong::OtherRole, "this is the prefill server, and the request is for decode");
    }
    if params["do_remote_decode"] != true {
        return wrong(Wrong::NotRemoteDecode, "a prefill server needs kv_transfer_params.do_remote_decode");
    }
    let one_token = wanted.max_tokens == 1 && wanted.finish_reason == "length";
    if !one_token || wanted.stream || answers != 1 {
        return wrong(Wrong::MoreThanOneToken, "a prefill server needs max_tokens 1, stream false and n 1");
    }
    Ok(Part::Lease)
}

/// vLLM's prefill: keeps the prompt's blocks and says how to come by them.
async fn grant(
    engine: &Engine,
    rank: usize,
    mut progress: mpsc::Receiver<Progress>,
    output: &mut Output,
) -> mpsc::Receiver<Progress> {
    let token = next(&mut progress).await;
    let handover = &engine.handover;
    let prompt = output.prompt_of(0);
    let pages = prompt.len().div_ceil(engine.config.page_size as usize) as u64;
    let address = handover.address();
    let listening = address.map(|address| match address.ip() {
        ip if ip.is_unspecified() => "127.0.0.1".to_owned(),
        ip => ip.to_string(),
    });
    // Whole milliseconds: of a longer fraction serde_json reads back another number than it wrote.
    let expiry = ((clock::since_epoch() + handover.patience()).as_secs_f64() * 1e3).round() / 1e3;
    let first_page = 1 + output.serial() % u64::from(engine.config.num_pages);
    let params = json!({
        "do_remote_prefill": true,
        "do_remote_decode": false,
        "remote_block_ids": [(first_page..first_page + pages).collect::<Vec<u64>>()],
        "remote_engine_id": handover.engine_id(rank),
        "remote_request_id": format!("{}-0-{:08x}", output.id(), output.serial()),
        "remote_host": engine.config.transfer_host.clone().or(listening),
        "remote_port": address.map(|address| address.port()),
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": prompt.len(),
        "remote_blocks_expiry_time": expiry,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": token.cached_tokens,
    });
    handover.leases.grant(params.clone(), digest(prompt));
    handover.count(Outcome::Offered, 1);
    output.kv_transfer_params = params;
    let (sender, again) = mpsc::channel(1);
    // There is room for it, and its receiver is here.
    let _ = sender.try_send(token);
    again
}

fn pull_of(engine: &Engine, body: &Value) -> Result<Part, Refusal> {
    let params = &body["kv_transfer_params"];
    if params["do_remote_decode"] == true {
        let message = "this is the decode server, and the request is for prefill".to_owned();
        return Err(refuse(engine, Wrong::OtherRole, StatusCode::BAD_REQUEST, message));
    }
    if params["do_remote_prefill"] != true {
        return Ok(Part::Whole);
    }
    let mut params = params.clone();
    // The client's own part of the same object.
    params.as_object_mut().map(|fields| fields.shift_remove("prompt_token_ids"));
    Ok(Part::Pull(params))
}

/// vLLM's decode: pulls the blocks, or computes the prompt after all.
async fn pull(engine: &Engine, params: &Value, prompt_sha256: String) -> Prefill {
    let handover = &engine.handover;
    if params["remote_block_ids"].is_null() {
        handover.count(Outcome::Recomputed, 1);
        return Prefill::Here;
    }
    let (host, port) = (params["remote_host"].as_str(), params["remote_port"].as_u64());
    let wrong = match host.zip(port) {
        None => Some(Wrong::ParamsAltered),
        Some((host, port)) => {
            let pull = Pull { params: params.clone(), prompt_sha256 };
            let asked = handover.peer.pull(host, port, &pull);
            match tokio::time::timeout(handover.patience(), asked).await {
                Ok(Ok(pulled)) => pulled.wrong,
                Ok(Err(_)) | Err(_) => Some(Wrong::PrefillUnreachable),
            }
        }
    };
    match wrong {
        None => {
            handover.count(Outcome::Received, 1);
            Prefill::Elsewhere { cached_tokens: None }
        }
        Some(wrong) => {
            handover.wrong(wrong);
            handover.count(Outcome::Recomputed, 1);
            Prefill::Here
        }
    }
}
