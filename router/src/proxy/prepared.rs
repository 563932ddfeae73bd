//! A request's body as routing needs it.
//!
//! Only broken syntax is the router's to refuse. What engines may take and the
//! router cannot read, or fails on, goes out unchanged and is routed by load.

use std::sync::Arc;

use bytes::Bytes;
use kvrouter_core::blocks::Namespace;
use kvrouter_core::units::Tokens;
use kvrouter_crds::config::{Engine, ForwardTokenIds};
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;
use tokio::sync::Semaphore;

use super::errors::ClientError;
use super::forward::Forwardable;
use super::pd::division::{self, Division, Indivisible};
use super::salting::Salting;
use super::splice::Members;
use crate::pool::Pool;
use crate::prompt::body::Body;
use crate::prompt::endpoint::{self, Endpoint};
use crate::prompt::{Asked, Prompt, Refusal, Work};
use crate::route::Ask;
use crate::tenancy::Tenant;

/// What a body says to routing.
#[derive(Debug)]
pub struct Prepared {
    /// What to pick for.
    pub ask: Ask,
    /// The client wants server-sent events.
    pub streamed: bool,
    /// Its ids, where workers may get them.
    pub forwardable: Option<Arc<Forwardable>>,
    /// Its tenant's salt, where it has one.
    pub salting: Option<Salting>,
    /// What is needed to divide it between two workers, where a pool has such.
    pub division: Option<Result<Division, Indivisible>>,
    /// Why there are no token ids; `None` when there are.
    refused: Option<Refusal>,
    /// Whose rendering was followed.
    variant: Engine,
    /// What it cost.
    work: Work,
}

/// The fields that matter of a body that is not read as a whole. What cannot be
/// read is absent: the engine will say what it thinks of it.
#[derive(Deserialize)]
struct Head {
    model: Option<String>,
    stream: Option<bool>,
}

/// Bodies from this size on take a millisecond or more, and leave a thread to
/// others.
const LARGE_BODY_BYTES: usize = 64 << 10;

/// [`prepare_blocking`] on a thread of the CPU pool, of which as many work as
/// there are cores; counts how it went.
pub async fn prepare(
    pool: &Arc<Pool>,
    endpoint: Endpoint,
    request_id: Arc<str>,
    body: Bytes,
    tenant: Option<Tenant>,
) -> Result<Prepared, ClientError> {
    let permit = async |of: &Arc<Semaphore>| {
        Arc::clone(of).acquire_owned().await.map_err(|_| ClientError::ShuttingDown)
    };
    let of_large = match body.len() >= LARGE_BODY_BYTES {
        true => Some(permit(&pool.cpu_for_large).await?),
        false => None,
    };
    let permits = (of_large, permit(&pool.cpu).await?);
    let (own, id, bytes) = (Arc::clone(pool), Arc::clone(&request_id), body.clone());
    let whose = tenant.clone();
    let work = move || {
        let _permits = permits;
        prepare_blocking(&own, endpoint, id, &bytes, whose)
    };
    match tokio::task::spawn_blocking(work).await {
        Ok(prepared) => prepared.inspect(|prepared| count(pool, endpoint, prepared)),
        Err(error) if error.is_panic() => {
            count_refusal(pool, endpoint, Refusal::Panicked);
            tracing::error!(
                target: "kv_router::prompt", request_id = %request_id, endpoint = %endpoint.label(),
                bytes = body.len(), "preparing the prompt panicked; it is routed by load"
            );
            let own = Arc::clone(pool);
            let work = move || {
                let salting = tenant.map(|tenant| Salting::of(tenant, endpoint, &body)).transpose()?;
                let prepared = unread(&own, endpoint, request_id, &body, salting)?;
                Ok(Prepared { division: division(&own, endpoint, &Members::of(&body)), ..prepared })
            };
            tokio::task::spawn_blocking(work).await.map_err(|_| ClientError::ShuttingDown)?
        }
        Err(_) => Err(ClientError::ShuttingDown),
    }
}

fn count_refusal(pool: &Pool, endpoint: Endpoint, refusal: Refusal) {
    pool.metrics.refusals.with_label_values(&[endpoint.label(), refusal.label()]).inc();
    pool.unrendered.lock().note(pool.clock.now(), refusal);
}

fn count(pool: &Pool, endpoint: Endpoint, prepared: &Prepared) {
    match prepared.refused {
        // The path has none; nothing was refused.
        None | Some(Refusal::NoPrompt) => {}
        Some(refusal) => count_refusal(pool, endpoint, refusal),
    }
    let endpoint = endpoint.label();
    let Work { tokenisations, reused, encoded } = prepared.work;
    pool.metrics.tokenisations.with_label_values(&[endpoint, prepared.variant.label()]).inc_by(tokenisations);
    pool.metrics.prompt_tokens.with_label_values(&["cached"]).inc_by(reused.0);
    pool.metrics.prompt_tokens.with_label_values(&["encoded"]).inc_by(encoded.0);
}

/// Parses, renders, tokenises and hashes, on this thread. Counts nothing.
pub fn prepare_blocking(
    pool: &Pool,
    endpoint: Endpoint,
    request_id: Arc<str>,
    body: &[u8],
    tenant: Option<Tenant>,
) -> Result<Prepared, ClientError> {
    let members = Members::of(body);
    let parsed = pool.prompter.read(endpoint, tenant.as_ref().map_or(0, Tenant::digest), body);
    if !endpoint.has_a_prompt() {
        let prepared = other(pool, endpoint, request_id, &parsed.unwrap_or(Body::from_json(Value::Null)));
        return Ok(Prepared { division: division(pool, endpoint, &members), ..prepared });
    }
    let salting = |tenant: Option<Tenant>| tenant.map(|it| Salting::of(it, endpoint, body)).transpose();
    let Ok(mut parsed) = parsed else {
        check_syntax(body)?;
        let prepared = unread(pool, endpoint, request_id, body, salting(tenant)?)?;
        return Ok(Prepared { division: division(pool, endpoint, &members), ..prepared });
    };
    if !parsed.fields.is_object() {
        return Err(ClientError::NotAnObject);
    }
    let (found, limit) =
        (endpoint::prompts_in(endpoint, &parsed.fields), pool.config.file.limits.prompts_per_request);
    if found as u64 > limit {
        return Err(ClientError::TooManyPrompts { found, limit });
    }
    let salting = salting(tenant)?;
    if let Some(salting) = &salting {
        // As the engine will read it.
        parsed.fields["cache_salt"] = Value::from(&*salting.salt);
    }
    let named = match parsed.fields.get("model") {
        None | Some(Value::Null) => None,
        Some(Value::String(name)) => Some(name.as_str()),
        Some(_) => return Err(ClientError::ModelNotText),
    };
    let named = match endpoint.names_a_model() {
        true => adapter(pool, named)?,
        false => adapter(pool, named).unwrap_or(None),
    };
    let variant = pool.engine();
    let asked = Asked {
        endpoint,
        engine: variant,
        adapter: named,
        identity: &pool.identity,
        size: pool.config.size,
        now_unix_ms: pool.clock.unix_ms(),
    };
    let streamed = is_streamed(&parsed.fields);
    let choices = choices(&parsed.fields);
    let sequences = endpoint::sequences_in(endpoint, &parsed.fields);
    let prompt = pool.prompter.prepare(&asked, parsed);
    // Adapters are named in other fields too.
    adapter(pool, prompt.namespace.adapter.as_deref())?;
    let (refused, work) = (prompt.refused, prompt.work);
    let forwardable = match pool.live.read().forward_token_ids {
        ForwardTokenIds::Never => None,
        ForwardTokenIds::WhenConfirmed => Forwardable::of(endpoint, variant, &members, &prompt).map(Arc::new),
    };
    let apart = salting.as_ref().map(|salting| salting.endpoint);
    let ask = Ask { choices, sequences, apart, ..Ask::new(pool, request_id, prompt) };
    let division = division(pool, endpoint, &members);
    Ok(Prepared { ask, streamed, forwardable, salting, division, refused, variant, work })
}

/// Numbers out of range, lone surrogates and deep nesting pass: they are JSON,
/// and engines in other languages read them.
fn check_syntax(body: &[u8]) -> Result<(), ClientError> {
    match serde_json::from_slice::<&RawValue>(body) {
        Ok(text) if text.get().starts_with('{') => Ok(()),
        Ok(_) => Err(ClientError::NotAnObject),
        Err(error) => Err(ClientError::NotJson { error: error.to_string() }),
    }
}

/// A body that is forwarded without having been read as a whole: as long as its
/// bytes, by four.
fn unread(
    pool: &Pool,
    endpoint: Endpoint,
    request_id: Arc<str>,
    body: &[u8],
    salting: Option<Salting>,
) -> Result<Prepared, ClientError> {
    let head = Head::of(body);
    let count = Tokens(body.len() as u64 / 4);
    let mut prompt = without_tokens(count, adapter(pool, head.model.as_deref())?, Refusal::Malformed);
    prompt.namespace.salt = salting.as_ref().map(|salting| Arc::clone(&salting.salt));
    let prepared = Prepared::unread(pool, request_id, prompt, head.stream.unwrap_or(false));
    let apart = salting.as_ref().map(|salting| salting.endpoint);
    let sequences = division::sequences(endpoint, &Members::of(body));
    Ok(Prepared { ask: Ask { apart, sequences, ..prepared.ask }, salting, ..prepared })
}

/// A request to a path whose prompts are not read.
fn other(pool: &Pool, endpoint: Endpoint, request_id: Arc<str>, body: &Body) -> Prepared {
    // Engines may know more models on such paths; only adapters bind.
    let named = adapter(pool, body.fields.get("model").and_then(Value::as_str)).unwrap_or(None);
    let prompt = without_tokens(endpoint::estimate(body), named, Refusal::NoPrompt);
    let prepared = Prepared::unread(pool, request_id, prompt, is_streamed(&body.fields));
    let sequences = endpoint::sequences_in(endpoint, &body.fields);
    Prepared { ask: Ask { sequences, ..prepared.ask }, ..prepared }
}

fn division(pool: &Pool, endpoint: Endpoint, members: &Members<'_>) -> Option<Result<Division, Indivisible>> {
    (!pool.config.protocols().is_empty()).then(|| Division::of(endpoint, members))
}

/// Answers that it wants of its prompt; what is no count is 1.
fn choices(body: &Value) -> u32 {
    let n = body.get("n").and_then(Value::as_u64).and_then(|n| u32::try_from(n).ok());
    n.unwrap_or(1).max(1)
}

fn is_streamed(body: &Value) -> bool {
    body.get("stream").and_then(Value::as_bool).unwrap_or(false)
}

fn without_tokens(count: Tokens, adapter: Option<Arc<str>>, refusal: Refusal) -> Prompt {
    let namespace = Namespace { adapter, salt: None };
    Prompt { count, namespace, refused: Some(refusal), ..Prompt::default() }
}

/// The adapter that `name` is; `None` for the base model, which a request that
/// names none wants too. A model that nobody serves is the client's mistake, as
/// far as all workers say what they serve.
fn adapter(pool: &Pool, name: Option<&str>) -> Result<Option<Arc<str>>, ClientError> {
    let base = pool.config.file.model.name.as_str();
    let Some(name) = name.filter(|name| *name != base) else { return Ok(None) };
    let models = pool.fleet.models(base);
    if let Some(model) = models.iter().find(|model| model.name == name) {
        return Ok(model.adapter.then(|| name.into()));
    }
    match pool.fleet.silent() {
        0 => Err(ClientError::UnknownModel {
            name: name.to_owned(),
            known: models.into_iter().map(|model| model.name).collect(),
        }),
        silent => Err(ClientError::ModelNotKnownYet { name: name.to_owned(), silent }),
    }
}

impl Prepared {
    /// Of a body whose prompt was not read.
    fn unread(pool: &Pool, request_id: Arc<str>, prompt: Prompt, streamed: bool) -> Self {
        let refused = prompt.refused;
        let ask = Ask::new(pool, request_id, prompt);
        let (variant, work) = (Engine::Auto, Work::default());
        Self { ask, streamed, forwardable: None, salting: None, division: None, refused, variant, work }
    }
}

impl Head {
    fn of(body: &[u8]) -> Self {
        serde_json::from_slice(body).unwrap_or(Self { model: None, stream: None })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_broken_syntax_is_refused() {
        let deep = format!("{{\"a\": {}{}}}", "[".repeat(200), "]".repeat(200));
        let cases: [(&str, &str, Result<(), &str>); 8] = [
            ("a number out of range", r#"{"temperature": 1e400}"#, Ok(())),
            ("a lone surrogate", r#"{"prompt": "\ud800"}"#, Ok(())),
            ("deep nesting", &deep, Ok(())),
            ("space around", " {} \n", Ok(())),
            ("no object", "[1e400]", Err("not_an_object")),
            ("cut off", r#"{"a": 1e400"#, Err("invalid_json")),
            ("more after the end", "{} {}", Err("invalid_json")),
            ("nothing", "", Err("invalid_json")),
        ];
        for (why, body, expected) in cases {
            let found = check_syntax(body.as_bytes()).map_err(|error| error.code());
            assert_eq!(found, expected, "{why}");
        }
    }

    #[test]
    fn what_matters_is_found_in_bodies_that_cannot_be_read() {
        let cases: [(&str, Option<&str>, Option<bool>); 4] = [
            (r#"{"x": 1e400, "model": "m", "stream": true}"#, Some("m"), Some(true)),
            (r#"{"model": "m", "prompt": "\ud800"}"#, Some("m"), None),
            (r#"{"model": null, "prompt": "\ud800"}"#, None, None),
            (r#"{"model": 5, "stream": true}"#, None, None),
        ];
        for (body, model, stream) in cases {
            let head = Head::of(body.as_bytes());
            assert_eq!((head.model.as_deref(), head.stream), (model, stream), "{body}");
        }
    }
}
