//! The endpoints that run the model: what is checked before a request reaches a rank, and how
//! its tokens come back.

use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tokio::sync::mpsc;

use super::answer::{Answering, Output};
use super::body::{Kind, Wanted, brings_ids, completion_prompts, named_rank, prompts, token_ids};
use super::disaggregated::Part;
use super::{Engine, Refusal, json_response};
use crate::cache::RequestId;
use crate::prompt::Answer;
use crate::rank::{Job, Progress, Rank};

/// Chunks that wait for a slow client before its request's stream blocks.
const MAX_PENDING_CHUNKS: usize = 64;
/// Numbers in an embedding.
const EMBEDDING_SIZE: usize = 8;

/// Requests of one HTTP request; dropping it aborts those that still run.
pub(super) struct Running {
    rank: Arc<Rank>,
    ids: Vec<RequestId>,
}

/// A stream's connection was cut on purpose.
#[derive(Debug, thiserror::Error)]
#[error("the simulated engine died")]
struct Died;

impl Drop for Running {
    fn drop(&mut self) {
        for id in &self.ids {
            self.rank.abort(*id);
        }
    }
}

pub(super) async fn chat(engine: State<Arc<Engine>>, headers: HeaderMap, body: Bytes) -> Response {
    infer(engine.0, Kind::Chat, "/v1/chat/completions", headers, body).await
}

pub(super) async fn completions(engine: State<Arc<Engine>>, headers: HeaderMap, body: Bytes) -> Response {
    infer(engine.0, Kind::Completion, "/v1/completions", headers, body).await
}

async fn infer(engine: Arc<Engine>, kind: Kind, path: &str, headers: HeaderMap, body: Bytes) -> Response {
    let serial = engine.receive(path, &headers, &body);
    if let Some(response) = engine.faulty_answer().await {
        return response;
    }
    match accept(&engine, kind, serial, &headers, body).await {
        Ok((running, progress, output)) if output.wanted.stream => {
            let cut_after = engine.faults.lock().die_after_chunks.take();
            stream(running, progress, output, cut_after)
        }
        Ok((running, progress, output)) => collect(running, progress, output).await,
        Err(refusal) => engine.refuse(&refusal),
    }
}

/// Checks a request, tokenises it and hands it to a rank.
pub(super) async fn accept(
    engine: &Arc<Engine>,
    kind: Kind,
    serial: u64,
    headers: &HeaderMap,
    body: Bytes,
) -> Result<(Running, mpsc::Receiver<Progress>, Output), Refusal> {
    let body = Arc::new(parse(&body)?);
    check_model(engine, &body)?;
    let mut wanted = Wanted::read(engine, kind, headers, &body)?;
    let named = named_rank(engine, headers, &body)?;
    let given_ids = brings_ids(engine, kind, &body);
    let prompts = {
        let (engine, body) = (Arc::clone(engine), Arc::clone(&body));
        blocking(move || prompts(&engine, kind, &body)).await?
    };
    for prompt in &prompts {
        check_length(engine, prompt.len(), wanted.max_tokens)?;
    }
    let part = Part::read(engine, &body, &mut wanted, prompts.len())?;
    let rank = named.or_else(|| part.rank(engine)).unwrap_or_else(|| least_loaded(&engine.ranks));
    engine.assign(serial, rank, &prompts, given_ids);
    let held = part.open(engine, named)?;
    let prefills = part.receive(engine, &prompts, wanted.answers).await?;
    let answer = |at: usize| {
        let prompt = &prompts[at / wanted.answers];
        engine.prompter.answer(prompt, at % wanted.answers, wanted.max_tokens)
    };
    let answers: Vec<Answer> = (0..prompts.len() * wanted.answers).map(answer).collect();
    let (sender, progress) = mpsc::channel(answers.len() * wanted.max_tokens);
    let runner = &engine.ranks[rank];
    let mut running = Running { rank: Arc::clone(runner), ids: Vec::with_capacity(answers.len()) };
    for (choice, answer) in answers.iter().enumerate() {
        running.ids.push(runner.submit(Job {
            key: wanted.key.clone(),
            prompt: prompts[choice / wanted.answers].clone(),
            prefill: prefills[choice],
            output: answer.tokens.clone().into(),
            choice,
            progress: sender.clone(),
        }));
    }
    // From here on the channel ends with the rank's life.
    drop(sender);
    let request_id = headers.get("x-request-id").and_then(|value| value.to_str().ok());
    let mut output = Output::new(engine, wanted, prompts, answers, serial, request_id);
    let progress = part.hand_over(engine, rank, held, progress, &mut output).await?;
    Ok((running, progress, output))
}

pub(super) fn parse(body: &[u8]) -> Result<Value, Refusal> {
    match serde_json::from_slice(body) {
        Ok(body @ Value::Object(_)) => Ok(body),
        Ok(_) => Err(Refusal::bad_request("the body must be a JSON object")),
        Err(error) => Err(Refusal::bad_request(format!("the body is not JSON: {error}"))),
    }
}

/// vLLM knows its models by name; SGLang serves whatever it is asked for.
fn check_model(engine: &Engine, body: &Value) -> Result<(), Refusal> {
    let Some(model) = body["model"].as_str().filter(|_| engine.config.wire.is_vllm()) else { return Ok(()) };
    if model == engine.config.model || engine.config.lora.iter().any(|lora| lora.name == model) {
        return Ok(());
    }
    let message = format!("The model `{model}` does not exist.");
    Err(Refusal { status: StatusCode::NOT_FOUND, message })
}

fn check_length(engine: &Engine, prompt: usize, output: usize) -> Result<(), Refusal> {
    let config = &engine.config;
    let usage = engine.ranks[0].snapshot().usage;
    let room = usage.capacity.saturating_mul(config.page_size as usize);
    let most = config.max_model_len.min(room);
    if prompt.saturating_add(output) <= most {
        return Ok(());
    }
    Err(Refusal::bad_request(if config.wire.is_vllm() {
        format!(
            "This model's maximum context length is {most} tokens. However, you requested {output} output \
             tokens and your prompt contains {prompt} input tokens, for a total of {} tokens. Please reduce \
             the length of the input prompt or the number of requested output tokens.",
            prompt.saturating_add(output)
        )
    } else {
        format!(
            "Requested token count exceeds the model's maximum context length of {most} tokens. You requested \
             a total of {} tokens: {prompt} tokens from the input messages and {output} tokens for the \
             completion. Please reduce the number of tokens in the input messages or the completion to fit \
             within the limit.",
            prompt.saturating_add(output)
        )
    }))
}

fn least_loaded(ranks: &[Arc<Rank>]) -> usize {
    (0..ranks.len()).min_by_key(|rank| (ranks[*rank].load(), *rank)).unwrap_or(0)
}

/// Runs slow work off the async threads.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Refusal> + Send + 'static,
) -> Result<T, Refusal> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => {
            Err(Refusal { status: StatusCode::INTERNAL_SERVER_ERROR, message: format!("tokenizer: {error}") })
        }
    }
}

async fn collect(running: Running, mut progress: mpsc::Receiver<Progress>, output: Output) -> Response {
    let mut answering = Answering::new(output);
    while !answering.is_finished() {
        match progress.recv().await {
            Some(token) => answering.advance(token),
            // The process died; its connections are about to be cut.
            None => std::future::pending().await,
        }
    }
    drop(running);
    answering.whole_response()
}

/// Streams chunks as tokens come. `cut_after` chunks the connection breaks.
fn stream(
    running: Running,
    mut progress: mpsc::Receiver<Progress>,
    output: Output,
    cut_after: Option<usize>,
) -> Response {
    let (sender, receiver) = mpsc::channel::<Result<Bytes, Died>>(MAX_PENDING_CHUNKS);
    let headers = output.stream_headers();
    tokio::spawn(async move {
        let _running = running;
        let mut answering = Answering::new(output);
        // Both engines say the role together with the first token: a client's
        // first byte is the end of prefill.
        let mut opening = answering.opening_chunks();
        let mut chunks = Vec::new();
        let mut sent = 0;
        loop {
            for chunk in chunks {
                if cut_after.is_some_and(|most| sent >= most) {
                    let _ = sender.send(Err(Died)).await;
                    return;
                }
                sent += 1;
                if sender.send(Ok(chunk)).await.is_err() {
                    return;
                }
            }
            if answering.is_closed() {
                return;
            }
            let token = tokio::select! {
                token = progress.recv() => token,
                () = sender.closed() => return,
            };
            let Some(token) = token else {
                let _ = sender.send(Err(Died)).await;
                return;
            };
            chunks = std::mem::take(&mut opening);
            chunks.extend(answering.advance_chunks(token));
        }
    });
    let body = futures::stream::unfold(receiver, |mut receiver| async {
        receiver.recv().await.map(|chunk| (chunk, receiver))
    });
    (headers, Body::from_stream(body)).into_response()
}

pub(super) async fn tokenize(State(engine): State<Arc<Engine>>, body: Bytes) -> Response {
    let vllm = engine.config.wire.is_vllm();
    let most = engine.config.max_model_len;
    let shared = Arc::clone(&engine);
    let body = match parse(&body) {
        Ok(body) => body,
        Err(refusal) => return engine.refuse(&refusal),
    };
    if let Some(response) = engine.faulty_tokenize(body["messages"].is_array()).await {
        return response;
    }
    let tokens = blocking(move || {
        check_model(&shared, &body)?;
        if body["messages"].is_array() {
            return Ok(shared.prompter.encode_chat(&body)?);
        }
        let text = body["prompt"].as_str().ok_or_else(|| Refusal::bad_request("prompt must be a string"))?;
        Ok(shared.prompter.encode_completion(text)?)
    });
    match tokens.await {
        Ok(tokens) if vllm => json_response(
            StatusCode::OK,
            &json!({"count": tokens.len(), "max_model_len": most, "tokens": tokens, "token_strs": null}),
        ),
        Ok(tokens) => json_response(
            StatusCode::OK,
            &json!({"tokens": tokens, "count": tokens.len(), "max_model_len": most}),
        ),
        Err(refusal) => engine.refuse(&refusal),
    }
}

pub(super) async fn detokenize(State(engine): State<Arc<Engine>>, body: Bytes) -> Response {
    let name = if engine.config.wire.is_vllm() { "prompt" } else { "text" };
    let text = parse(&body).and_then(|body| {
        let tokens =
            token_ids(&body["tokens"]).ok_or_else(|| Refusal::bad_request("tokens must be token ids"))?;
        Ok(engine.prompter.decode(&tokens)?)
    });
    match text {
        Ok(text) => json_response(StatusCode::OK, &json!({ name: text })),
        Err(refusal) => engine.refuse(&refusal),
    }
}

/// Embeddings run outside the scheduler: pooling does not touch the prefix cache.
pub(super) async fn embeddings(
    State(engine): State<Arc<Engine>>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    engine.receive("/v1/embeddings", &headers, &body);
    if let Some(response) = engine.faulty_answer().await {
        return response;
    }
    let shared = Arc::clone(&engine);
    let inputs = blocking(move || {
        let body = parse(&body)?;
        check_model(&shared, &body)?;
        completion_prompts(&shared, &body["input"])
    });
    match inputs.await {
        Ok(inputs) => {
            let tokens: usize = inputs.iter().map(Vec::len).sum();
            let entry = |(at, input): (usize, &Vec<u32>)| json!({"object": "embedding", "index": at, "embedding": embedding(input)});
            let data: Vec<Value> = inputs.iter().enumerate().map(entry).collect();
            let usage = json!({"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0});
            let body = json!({"object": "list", "data": data, "model": engine.config.model, "usage": usage});
            json_response(StatusCode::OK, &body)
        }
        Err(refusal) => engine.refuse(&refusal),
    }
}

/// Numbers in `-1..1` that depend on the tokens alone.
fn embedding(tokens: &[u32]) -> Vec<f64> {
    let mut hasher = Sha256::new();
    for token in tokens {
        hasher.update(token.to_le_bytes());
    }
    hasher.finalize().iter().take(EMBEDDING_SIZE).map(|byte| f64::from(*byte) / 127.5 - 1.0).collect()
}
