//! Does a worker make the tokens of a request that the router makes?
//!
//! Blocks are hashes of the router's tokens. Where the engine renders another
//! template, or encodes with another tokenizer, they are about other prompts and
//! every hit is imagined. So each worker is given [`PROBES`] through its tokenize
//! endpoint, and its ids are compared one by one with ours: when it joins, after
//! each new life of its engine, and on an interval. This runs beside the probes
//! that let it join, and never keeps it from joining.
//!
//! What differs ends the credit of its views at once; what cannot be compared is
//! unknown, and counts as before. The time that the engine takes per token is
//! measured along the way: it is what forwarded ids would save.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kvrouter_core::trust::Parity;
use kvrouter_core::units::Tokens;
use kvrouter_crds::config::Engine;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::time::{Instant, timeout};

use super::Worker;
use crate::pool::Pool;
use crate::prompt::Asked;
use crate::prompt::body::Body;
use crate::prompt::endpoint::Endpoint;
use crate::proxy::upstream::Upstream;

/// Workers that are compared at the same time: it takes a core's time here too.
pub const AT_ONCE: usize = 4;
/// How often a worker is looked at for whether a comparison is due.
const LOOK: Duration = Duration::from_millis(500);
/// One answer of a tokenize endpoint; a busy API server takes a second.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// All of them.
const CHECK_TIMEOUT: Duration = Duration::from_secs(20);
/// After a comparison that got no answers.
const RETRY: Duration = Duration::from_secs(10);
/// Largest answer that is read: 4,000 ids take 30 KB, with their texts ten times
/// that.
const MAX_ANSWER: usize = 1 << 20;
/// What a later measurement moves the time per token by.
const SMOOTHING: f64 = 0.3;
/// What a later answer leaves of the sums behind the share of first bytes.
const DECAY: f64 = 63.0 / 64.0;

/// What is known of one worker's tokens.
#[derive(Debug, Default)]
pub struct Rendering {
    known: Mutex<Known>,
    first_bytes: Mutex<FirstBytes>,
}

/// The outcome of the latest comparison.
#[derive(Clone, Debug, Default)]
pub struct Known {
    /// Whether the tokens are the same.
    pub parity: Parity,
    /// Why.
    pub reason: Reason,
    /// Whose rendering the router followed.
    pub variant: Engine,
    /// Times that the worker had become ready by then.
    pub times_ready: u32,
    /// Probes that were compared.
    pub compared: usize,
    /// The first difference.
    pub difference: Option<Difference>,
    /// What the engine takes to tokenise, per token. Above that of a short text:
    /// the way to it is not counted.
    pub micros_per_token: Option<f64>,
}

/// Where the ids of a probe begin to differ. Positions and counts, never ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The probe.
    pub probe: &'static str,
    /// The first token that differs, from 0.
    pub position: usize,
    /// How many tokens the router makes of it.
    pub ours: usize,
    /// How many the worker does.
    pub theirs: usize,
}

/// Why parity is what it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reason {
    /// Nobody has compared yet.
    #[default]
    NotCompared,
    /// All ids are the same.
    Same,
    /// Some are not.
    Differs,
    /// The router has no tokenizer, or renders none of the probes.
    NothingToCompare,
    /// Which engine it is, is not known.
    EngineUnknown,
    /// The engine has no tokenize endpoint.
    NoEndpoint,
    /// Its tokenize endpoint takes texts and no chats.
    TextsOnly,
    /// Its tokenize endpoint refuses the probes.
    Refused,
    /// Its tokenize endpoint does not answer.
    Unanswered,
}

/// Streamed answers, later ones counting more.
#[derive(Debug, Default)]
struct FirstBytes {
    prompt_tokens: f64,
    micros: f64,
}

/// One text of which tokens are compared.
struct Probe {
    name: &'static str,
    endpoint: Endpoint,
    body: Value,
}

/// What happened when a worker was asked about one probe.
enum Heard {
    Ids(Vec<u32>, Duration),
    /// The status of its refusal.
    Refused(u16),
    Unanswered,
}

/// Names of the probes, in the order in which they are compared.
pub const PROBES: [&str; 8] =
    ["text", "system", "turns", "tools", "tool_turns", "parts", "unicode", "long_text"];
/// Words in the long text: some thousand tokens, so that their time shows above
/// that of the way.
const LONG_WORDS: usize = 3000;

impl Reason {
    /// Stable label for metrics and reports.
    pub const fn label(self) -> &'static str {
        match self {
            Self::NotCompared => "not_compared",
            Self::Same => "same",
            Self::Differs => "differs",
            Self::NothingToCompare => "nothing_to_compare",
            Self::EngineUnknown => "engine_unknown",
            Self::NoEndpoint => "no_endpoint",
            Self::TextsOnly => "texts_only",
            Self::Refused => "refused",
            Self::Unanswered => "unanswered",
        }
    }
}

/// Stable label for metrics and reports.
pub const fn label(parity: Parity) -> &'static str {
    match parity {
        Parity::Unknown => "unknown",
        Parity::Confirmed => "confirmed",
        Parity::Diverged => "diverged",
    }
}

impl Rendering {
    /// The outcome of the latest comparison.
    pub fn known(&self) -> Known {
        self.known.lock().clone()
    }

    /// Whether the ids that the router makes in `variant` are those of a worker that
    /// became ready `times_ready` times: it has not begun anew since.
    pub fn is_confirmed(&self, variant: Engine, times_ready: u32) -> bool {
        let known = self.known.lock();
        known.parity == Parity::Confirmed && (known.variant, known.times_ready) == (variant, times_ready)
    }

    /// A streamed answer to so long a prompt began after `micros`.
    pub fn first_byte(&self, prompt: Tokens, micros: u64) {
        let mut sums = self.first_bytes.lock();
        sums.prompt_tokens = sums.prompt_tokens * DECAY + prompt.0 as f64;
        sums.micros = sums.micros * DECAY + micros as f64;
    }

    /// The part of the time to the first byte that the engine tokenises, 0 to 1;
    /// `None` before both are known.
    pub fn share_of_first_byte(&self) -> Option<f64> {
        let per_token = self.known.lock().micros_per_token?;
        let sums = self.first_bytes.lock();
        (sums.micros > 0.0).then(|| (per_token * sums.prompt_tokens / sums.micros).min(1.0))
    }

    /// A new life of the engine: what was confirmed is so no more, what differed
    /// does until it is compared again.
    fn doubt(&self) -> bool {
        let mut known = self.known.lock();
        let confirmed = known.parity == Parity::Confirmed;
        if confirmed {
            (known.parity, known.reason) = (Parity::Unknown, Reason::NotCompared);
        }
        confirmed
    }
}

/// What a comparison holds for: when any of it changes, another is due.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Life {
    variant: Engine,
    engine: Engine,
    /// Times that the worker became ready.
    times_ready: u32,
    /// The epochs of its ranks; 0 before one is known.
    epochs: Vec<u64>,
}

impl Life {
    fn of(pool: &Pool, worker: &Worker) -> Self {
        let (now, freshness) = (pool.clock.now(), pool.live.read().freshness);
        let epoch = |target: &Arc<super::TargetState>| target.trust.read(now, freshness).verdict().epoch.0;
        Self {
            variant: pool.engine(),
            engine: worker.status().engine,
            times_ready: worker.times_ready(),
            epochs: worker.targets.iter().map(epoch).collect(),
        }
    }

    /// Whether `later` is the same one: an epoch that only became known is no
    /// new one.
    fn goes_on_in(&self, later: &Self) -> bool {
        let same = |(one, other): (&u64, &u64)| *one == 0 || one == other;
        let epochs = self.epochs.iter().zip(&later.epochs).all(same);
        epochs && Self { epochs: Vec::new(), ..self.clone() } == Self { epochs: Vec::new(), ..later.clone() }
    }
}

/// Compares `worker` for ever; dropped when it leaves.
pub async fn watch(pool: Arc<Pool>, upstream: Upstream, worker: Arc<Worker>) {
    let mut compared: Option<Life> = None;
    let mut due = Instant::now();
    loop {
        if worker.is_able() {
            let life = Life::of(&pool, &worker);
            let same = compared.as_ref().is_some_and(|compared| compared.goes_on_in(&life));
            if !same && worker.rendering.doubt() {
                tell(&worker, Parity::Unknown);
            }
            if !same || due <= Instant::now() {
                let found = compare(&pool, &upstream, &worker, life.variant).await;
                let found = Known { times_ready: life.times_ready, ..found };
                let answered = found.reason != Reason::Unanswered;
                due = Instant::now() + if answered { pool.config.render_check } else { RETRY };
                publish(&pool, &worker, found);
                compared = Some(life);
            } else if compared.as_ref() != Some(&life) {
                compared = Some(life);
            }
        }
        tokio::time::sleep(LOOK).await;
    }
}

fn tell(worker: &Worker, parity: Parity) {
    worker.targets.iter().for_each(|target| target.trust.lock().set_parity(parity));
}

/// Takes over what was found. No answer changes nothing but the reason of what is
/// unknown anyway; nor does what cannot be compared any more make good a
/// difference.
fn publish(pool: &Pool, worker: &Worker, found: Known) {
    let result = if found.reason == Reason::Unanswered { "unanswered" } else { label(found.parity) };
    pool.metrics.tokens.render_checks.with_label_values(&[result]).inc();
    let mut known = worker.rendering.known.lock();
    if found.reason == Reason::Unanswered {
        if known.parity == Parity::Unknown {
            known.reason = found.reason;
        }
        return;
    }
    // Only a comparison that succeeds makes good what differed.
    if known.parity == Parity::Diverged && found.parity == Parity::Unknown && known.variant == found.variant {
        return;
    }
    if (known.parity, known.difference) != (found.parity, found.difference) {
        let (probe, position) = found.difference.map_or(("", 0), |it| (it.probe, it.position));
        tracing::info!(
            target: "kv_router::fleet", worker = %worker.id, parity = %label(found.parity),
            reason = %found.reason.label(), variant = %found.variant.label(), probe, position,
            "worker's tokens compared"
        );
    }
    let smoothed = match (known.micros_per_token, found.micros_per_token) {
        (Some(before), Some(now)) => Some(before + (now - before) * SMOOTHING),
        (before, now) => now.or(before),
    };
    let parity = found.parity;
    *known = Known { micros_per_token: smoothed, ..found };
    drop(known);
    tell(worker, parity);
}

/// Compares all probes, in bounded time and with few others.
async fn compare(pool: &Arc<Pool>, upstream: &Upstream, worker: &Worker, variant: Engine) -> Known {
    let unanswered = || Known { reason: Reason::Unanswered, variant, ..Known::default() };
    let Ok(_turn) = pool.fleet.comparing.acquire().await else { return unanswered() };
    let comparing = Comparing { pool, upstream, worker, variant };
    timeout(CHECK_TIMEOUT, comparing.all()).await.unwrap_or_else(|_| unanswered())
}

struct Comparing<'a> {
    pool: &'a Arc<Pool>,
    upstream: &'a Upstream,
    worker: &'a Worker,
    variant: Engine,
}

impl Comparing<'_> {
    async fn all(&self) -> Known {
        let mut known = Known { variant: self.variant, ..Known::default() };
        let path = match self.worker.status().engine {
            Engine::SGLang => "/v1/tokenize",
            Engine::VLLM | Engine::ATOM => "/tokenize",
            Engine::Auto => return Known { reason: Reason::EngineUnknown, ..known },
        };
        let (mut chats_refused, mut texts_refused) = (false, false);
        let mut times = Vec::new();
        for probe in probes(&self.pool.config.file.model.name) {
            let Some(ours) = self.ours(&probe).await else { continue };
            let refused = match self.theirs(path, &probe).await {
                Heard::Unanswered => return Known { reason: Reason::Unanswered, ..known },
                Heard::Refused(404 | 405 | 501) => return Known { reason: Reason::NoEndpoint, ..known },
                Heard::Refused(_) => true,
                Heard::Ids(theirs, time) => {
                    if let Some(difference) = self.looked_at_twice(path, &probe, &ours, &theirs).await {
                        known.difference = Some(difference);
                        (known.parity, known.reason) = (Parity::Diverged, Reason::Differs);
                        return known;
                    }
                    known.compared += 1;
                    if !probe.endpoint.is_a_chat() {
                        times.push((theirs.len(), time));
                    }
                    false
                }
            };
            match probe.endpoint.is_a_chat() {
                true => chats_refused |= refused,
                false => texts_refused |= refused,
            }
        }
        known.micros_per_token = slope(&times);
        known.reason = match (known.compared, chats_refused, texts_refused) {
            (0, false, false) => Reason::NothingToCompare,
            (1.., true, false) => Reason::TextsOnly,
            (1.., false, false) => Reason::Same,
            _ => Reason::Refused,
        };
        if known.reason == Reason::Same {
            known.parity = Parity::Confirmed;
        }
        known
    }

    /// The router's ids of a probe; `None` where it refuses to make any.
    async fn ours(&self, probe: &Probe) -> Option<Vec<u32>> {
        let permit = Arc::clone(&self.pool.cpu).acquire_owned().await.ok()?;
        let (pool, variant) = (Arc::clone(self.pool), self.variant);
        let (endpoint, body) = (probe.endpoint, probe.body.clone());
        let work = move || {
            let _permit = permit;
            let asked = Asked {
                endpoint,
                engine: variant,
                adapter: None,
                identity: &pool.identity,
                size: pool.config.size,
                now_unix_ms: pool.clock.unix_ms(),
            };
            let prompt = pool.prompter.prepare(&asked, Body::from_json(body));
            let whole = prompt.refused.is_none() && prompt.is_exact;
            prompt.parts.into_iter().next().filter(|_| whole).map(|part| part.tokens)
        };
        tokio::task::spawn_blocking(work).await.ok().flatten()
    }

    /// The worker's ids of a probe.
    async fn theirs(&self, path: &str, probe: &Probe) -> Heard {
        let started = Instant::now();
        let body = Bytes::from(probe.body.to_string());
        let answer = self.upstream.post(&self.worker.id, path, body, MAX_ANSWER);
        let Ok(Ok((status, body))) = timeout(ANSWER_TIMEOUT, answer).await else { return Heard::Unanswered };
        let time = started.elapsed();
        match status {
            200 => ids_in(&body).map_or(Heard::Refused(status), |ids| Heard::Ids(ids, time)),
            500.. if status != 501 => Heard::Unanswered,
            _ => Heard::Refused(status),
        }
    }

    /// A difference that is there a second time too: a template that prints the
    /// day may have met midnight.
    async fn looked_at_twice(
        &self,
        path: &str,
        probe: &Probe,
        ours: &[u32],
        theirs: &[u32],
    ) -> Option<Difference> {
        difference(probe.name, ours, theirs)?;
        let ours = self.ours(probe).await?;
        match self.theirs(path, probe).await {
            Heard::Ids(theirs, _) => difference(probe.name, &ours, &theirs),
            // It was different when it was last heard of.
            Heard::Refused(_) | Heard::Unanswered => difference(probe.name, &ours, theirs),
        }
    }
}

/// The field `tokens`, which both engines answer with.
fn ids_in(body: &[u8]) -> Option<Vec<u32>> {
    let answer: Value = serde_json::from_slice(body).ok()?;
    let id = |id: &Value| id.as_u64().and_then(|id| u32::try_from(id).ok());
    answer.get("tokens")?.as_array()?.iter().map(id).collect()
}

fn difference(probe: &'static str, ours: &[u32], theirs: &[u32]) -> Option<Difference> {
    let differs = ours.iter().zip(theirs).position(|(one, other)| one != other);
    let position = differs.or_else(|| (ours.len() != theirs.len()).then(|| ours.len().min(theirs.len())))?;
    Some(Difference { probe, position, ours: ours.len(), theirs: theirs.len() })
}

/// Microseconds per token between the shortest and the longest text.
fn slope(times: &[(usize, Duration)]) -> Option<f64> {
    let short = times.iter().min_by_key(|(tokens, _)| *tokens)?;
    let long = times.iter().max_by_key(|(tokens, _)| *tokens)?;
    let tokens = long.0.checked_sub(short.0).filter(|tokens| *tokens > 0)?;
    Some(long.1.saturating_sub(short.1).as_secs_f64() * 1e6 / tokens as f64)
}

/// The bodies, as a tokenize endpoint takes them. None has a date, a secret or
/// words that a filter could stop at.
fn probes(model: &str) -> Vec<Probe> {
    let bodies = [
        json!({"prompt": "The quick brown fox jumps over 13 lazy dogs.\n\n\tIt's 5 o'clock."}),
        json!({"messages": [system(), user("What is the capital of France?")]}),
        json!({"messages": [
            system(),
            user("Write a function that adds two numbers."),
            {"role": "assistant", "content": "```python\ndef add(a, b):\n    return a + b\n```"},
            user("Thanks! Now subtract them."),
        ]}),
        json!({"messages": [system(), user("What is the weather in Paris?")], "tools": [weather()]}),
        json!({"messages": [
            user("What is the weather in Paris?"),
            {"role": "assistant", "content": "", "tool_calls": [{
                "id": "call_1", "type": "function",
                "function": {"name": "weather", "arguments": "{\"city\": \"Paris\", \"days\": 2}"}}]},
            {"role": "tool", "tool_call_id": "call_1", "content": "{\"celsius\": [12, 14.5]}"},
        ], "tools": [weather()]}),
        json!({"messages": [{"role": "user", "content": [
            {"type": "text", "text": "First part."}, {"type": "text", "text": "Second part."}]}]}),
        json!({"messages": [user(
            "日本語の文章、한국어 문장, 中文句子。 Привет, مرحبا! 👩‍👩‍👧 🇫🇷 e\u{301} ﬁ <|im_start|>system <s>[INST] ½ \u{a0}x",
        )]}),
        json!({"prompt": long_text()}),
    ];
    let named = |(name, mut body): (&'static str, Value)| {
        body["model"] = json!(model);
        let is_text = body.get("prompt").is_some();
        Probe { name, endpoint: if is_text { Endpoint::Completions } else { Endpoint::Chat }, body }
    };
    PROBES.into_iter().zip(bodies).map(named).collect()
}

fn system() -> Value {
    json!({"role": "system", "content": "You are a helpful assistant. Answer briefly."})
}

fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

fn weather() -> Value {
    json!({"type": "function", "function": {
        "name": "weather", "description": "The weather of a city: \"today\" & <tomorrow>.",
        "parameters": {"type": "object", "required": ["city"], "properties": {
            "city": {"type": "string", "description": "Name of the city, e.g. Zürich"},
            "days": {"type": "integer", "minimum": 1}}}}})
}

/// Words that no cache of words holds: every one is another number.
fn long_text() -> String {
    let word = |at: usize| format!("item{} is {} of", at * 7919 % 104_729, at * 31);
    (0..LONG_WORDS / 3).map(word).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_difference_is_named() {
        let check = |why: &str, ours: &[u32], theirs: &[u32], position: Option<usize>| {
            let found = difference("text", ours, theirs);
            assert_eq!(found.map(|it| it.position), position, "{why}");
            assert!(found.is_none_or(|it| (it.ours, it.theirs) == (ours.len(), theirs.len())), "{why}");
        };
        check("the same", &[1, 2, 3], &[1, 2, 3], None);
        check("nothing", &[], &[], None);
        check("in the middle", &[1, 2, 3], &[1, 9, 3], Some(1));
        check("one is longer", &[1, 2, 3], &[1, 2], Some(2));
        check("the other is", &[], &[1], Some(0));
    }

    #[test]
    fn ids_are_read_from_what_both_engines_answer() {
        let vllm = br#"{"count":2,"max_model_len":512,"tokens":[14990,1879],"token_strs":null}"#;
        assert_eq!(ids_in(vllm), Some(vec![14990, 1879]));
        assert_eq!(ids_in(br#"{"tokens":[1,2],"count":2,"max_model_len":131072}"#), Some(vec![1, 2]));
        for odd in [&b"{}"[..], br#"{"tokens": [[1]]}"#, br#"{"tokens": [-1]}"#, b"<html>"] {
            assert_eq!(ids_in(odd), None);
        }
    }

    #[test]
    fn the_time_per_token_leaves_out_the_way() {
        let times = [(10, Duration::from_micros(1500)), (1010, Duration::from_micros(3500))];
        assert_eq!(slope(&times), Some(2.0));
        assert_eq!(slope(&[times[1], times[1]]), None, "of one length");
        assert_eq!(slope(&[]), None);
        assert_eq!(slope(&[(10, times[1].1), (20, times[0].1)]), Some(0.0), "noise is not negative");
    }

    #[test]
    fn every_probe_is_named_and_none_is_large() {
        let all = probes("m");
        assert_eq!(all.len(), PROBES.len());
        let size: usize = all.iter().map(|probe| probe.body.to_string().len()).sum();
        assert!(size < 64 << 10, "{size}");
        assert!(all.iter().all(|probe| probe.body["model"] == "m"));
    }

    #[test]
    fn an_epoch_that_becomes_known_is_no_new_life() {
        let life = |epochs: &[u64], times_ready| Life {
            variant: Engine::VLLM,
            engine: Engine::VLLM,
            times_ready,
            epochs: epochs.to_vec(),
        };
        let check =
            |why: &str, one: &Life, other: &Life, same| assert_eq!(one.goes_on_in(other), same, "{why}");
        check("nothing changed", &life(&[5], 1), &life(&[5], 1), true);
        check("it became known", &life(&[0], 1), &life(&[5], 1), true);
        check("another one", &life(&[5], 1), &life(&[6], 1), false);
        check("ready once more", &life(&[5], 1), &life(&[5], 2), false);
        check("another variant", &life(&[5], 1), &Life { variant: Engine::SGLang, ..life(&[5], 1) }, false);
    }

    #[test]
    fn the_share_of_the_first_byte_follows_from_both_times() {
        let rendering = Rendering::default();
        assert_eq!(rendering.share_of_first_byte(), None);
        rendering.first_byte(Tokens(1000), 10_000);
        assert_eq!(rendering.share_of_first_byte(), None, "the time per token is not known");
        rendering.known.lock().micros_per_token = Some(2.0);
        assert_eq!(rendering.share_of_first_byte(), Some(0.2));
    }

    #[test]
    fn a_new_life_doubts_what_was_confirmed_and_not_what_differed() {
        let rendering = Rendering::default();
        rendering.known.lock().parity = Parity::Diverged;
        assert!(!rendering.doubt());
        rendering.known.lock().parity = Parity::Confirmed;
        assert!(rendering.doubt());
        assert_eq!(rendering.known().parity, Parity::Unknown);
    }
}
