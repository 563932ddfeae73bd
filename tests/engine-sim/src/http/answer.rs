//! Responses in each engine's shape: whole, or as chunks of an event stream. The authority is
//! what vLLM 0.32 and SGLang 0.5.23 answered when they were recorded.

use axum::body::Bytes;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header::CONTENT_TYPE};
use axum::response::Response;
use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};

use super::body::{Kind, Wanted};
use super::{Engine, json_response, unix_time};
use crate::config::Wire;
use crate::prompt::Answer;
use crate::rank::Progress;

/// All that a response is made of, known before the first token.
pub(super) struct Output {
    pub(super) wanted: Wanted,
    wire: Wire,
    prompts: Vec<Vec<u32>>,
    answers: Vec<Answer>,
    id: String,
    serial: u64,
    created: u64,
    /// How decode comes by the prompt; null unless this is vLLM's prefill.
    pub(super) kv_transfer_params: Value,
}

/// An output and how far it has come.
pub(super) struct Answering {
    output: Output,
    /// Tokens of each answer that exist.
    generated: Vec<usize>,
    /// Cached tokens of each answer's prompt.
    cached: Vec<usize>,
    closed: bool,
}

impl Output {
    pub(super) fn new(
        engine: &Engine,
        wanted: Wanted,
        prompts: Vec<Vec<u32>>,
        answers: Vec<Answer>,
        serial: u64,
        request_id: Option<&str>,
    ) -> Self {
        let wire = engine.config.wire;
        let digest = Sha256::digest([engine.config.model.as_bytes(), &serial.to_le_bytes()].concat());
        let random: String = digest.iter().take(16).map(|byte| format!("{byte:02x}")).collect();
        let id = match (wire.is_vllm(), wanted.kind) {
            (true, Kind::Chat) => format!("chatcmpl-{}", request_id.unwrap_or(&random[..16])),
            (true, Kind::Completion) => format!("cmpl-{}", request_id.unwrap_or(&random[..16])),
            (false, _) => random,
        };
        let (created, kv_transfer_params) = (unix_time(), Value::Null);
        Self { wanted, wire, prompts, answers, id, serial, created, kv_transfer_params }
    }

    /// The response's name.
    pub(super) fn id(&self) -> &str {
        &self.id
    }

    /// The number of its request in this engine.
    pub(super) fn serial(&self) -> u64 {
        self.serial
    }

    /// The prompt of one answer.
    pub(super) fn prompt_of(&self, choice: usize) -> &[u32] {
        &self.prompts[choice / self.wanted.answers]
    }

    pub(super) fn stream_headers(&self) -> HeaderMap {
        let kind = HeaderValue::from_static("text/event-stream; charset=utf-8");
        HeaderMap::from_iter([(CONTENT_TYPE, kind)])
    }

    fn usage(&self, generated: usize, cached: usize, streamed: bool) -> Value {
        let prompt: usize = self.prompts.iter().map(Vec::len).sum();
        let details = match self.wire {
            Wire::Vllm032 | Wire::Vllm033 if streamed => {
                json!({"cached_tokens": cached, "created_cache_tokens": null})
            }
            Wire::Vllm032 | Wire::Vllm033 => {
                json!({"cached_tokens": cached, "created_cache_tokens": null, "multimodal_tokens": null})
            }
            Wire::Vllm022 | Wire::Sglang0518 | Wire::Sglang0523 => json!({"cached_tokens": cached}),
        };
        let mut usage = json!({"prompt_tokens": prompt, "total_tokens": prompt + generated,
                               "completion_tokens": generated, "prompt_tokens_details": details});
        if !self.wire.is_vllm() {
            usage["reasoning_tokens"] = json!(0);
        }
        if !(self.wire.is_vllm() && streamed) {
            usage["completion_tokens_details"] = Value::Null;
        }
        usage
    }

    fn fingerprint(&self) -> String {
        format!("vllm-{}-simulated", self.wire.version())
    }

    /// A response or chunk around `choices`.
    fn envelope(&self, object: &str, choices: Value) -> Map<String, Value> {
        let mut map = Map::new();
        map.insert("id".to_owned(), json!(self.id));
        map.insert("object".to_owned(), json!(object));
        map.insert("created".to_owned(), json!(self.created));
        map.insert("model".to_owned(), json!(self.wanted.model));
        map.insert("choices".to_owned(), choices);
        map
    }

    /// A stop's reason under each engine's name.
    const fn stop_field(&self) -> &'static str {
        if self.wire.is_vllm() { "stop_reason" } else { "matched_stop" }
    }

    fn whole_choice(&self, index: usize) -> Value {
        let answer = &self.answers[index];
        let text = answer.pieces.concat();
        let tokens = self.wanted.return_token_ids.then_some(&answer.tokens);
        let mut choice = json!({"index": index});
        match (self.wanted.kind, self.wire.is_vllm()) {
            (Kind::Completion, _) => choice["text"] = json!(text),
            (Kind::Chat, true) => {
                choice["message"] = json!({"role": "assistant", "content": text, "refusal": null,
                    "annotations": null, "audio": null, "function_call": null, "reasoning": null});
            }
            (Kind::Chat, false) => {
                choice["message"] = json!({"role": "assistant", "content": text, "reasoning_content": null});
            }
        }
        choice["logprobs"] = Value::Null;
        choice["finish_reason"] = json!(self.wanted.finish_reason);
        choice[self.stop_field()] = Value::Null;
        if self.wire.is_vllm() {
            choice["token_ids"] = json!(tokens);
            if self.wanted.kind == Kind::Completion {
                choice["prompt_logprobs"] = Value::Null;
                let prompt = self.prompt_of(index);
                choice["prompt_token_ids"] = json!(tokens.map(|_| prompt));
            }
        }
        choice
    }

    /// One streamed piece of an answer; `last` carries the reason.
    fn piece_choice(&self, index: usize, delta: Value, last: bool) -> Value {
        let reason = if last { json!(self.wanted.finish_reason) } else { Value::Null };
        let mut choice = json!({"index": index});
        match self.wanted.kind {
            Kind::Chat => choice["delta"] = delta,
            Kind::Completion => choice["text"] = delta,
        }
        choice["logprobs"] = Value::Null;
        choice["finish_reason"] = reason;
        if !self.wire.is_vllm() || last || self.wanted.kind == Kind::Completion {
            choice[self.stop_field()] = Value::Null;
        }
        choice
    }

    fn chunk(&self, choices: Value) -> Bytes {
        let object = match self.wanted.kind {
            Kind::Chat => "chat.completion.chunk",
            Kind::Completion => "text_completion",
        };
        data(&Value::Object(self.envelope(object, choices)))
    }
}

impl Answering {
    pub(super) fn new(output: Output) -> Self {
        let count = output.answers.len();
        Self { output, generated: vec![0; count], cached: vec![0; count], closed: false }
    }

    /// Whether all tokens exist.
    pub(super) fn is_finished(&self) -> bool {
        self.output.answers.iter().zip(&self.generated).all(|(answer, count)| *count == answer.tokens.len())
    }

    /// Whether the stream has said all.
    pub(super) fn is_closed(&self) -> bool {
        self.closed
    }

    /// The text of the first answer.
    pub(super) fn text(&self) -> String {
        self.output.answers[0].pieces.concat()
    }

    /// What the next token of an answer adds to its text.
    pub(super) fn next_piece(&self, progress: &Progress) -> String {
        self.output.answers[progress.choice].pieces[self.generated[progress.choice]].clone()
    }

    /// How decode comes by the prompt; null unless this is vLLM's prefill.
    pub(super) fn kv_transfer_params(&self) -> &Value {
        &self.output.kv_transfer_params
    }

    /// Tokens of the prompt, of these cached, and tokens generated.
    pub(super) fn counts(&self) -> (usize, usize, usize) {
        let prompt = self.output.prompts.iter().map(Vec::len).sum();
        (prompt, self.cached_prompt_tokens(), self.generated.iter().sum())
    }

    pub(super) fn advance(&mut self, progress: Progress) {
        self.generated[progress.choice] += 1;
        self.cached[progress.choice] = progress.cached_tokens;
    }

    /// The whole response, once finished.
    pub(super) fn whole_response(&self) -> Response {
        let output = &self.output;
        let choices: Vec<Value> = (0..output.answers.len()).map(|index| output.whole_choice(index)).collect();
        let object = match output.wanted.kind {
            Kind::Chat => "chat.completion",
            Kind::Completion => "text_completion",
        };
        let mut body = output.envelope(object, json!(choices));
        let usage = output.usage(self.generated.iter().sum(), self.cached_prompt_tokens(), false);
        if output.wire.is_vllm() {
            body.insert("service_tier".to_owned(), Value::Null);
            body.insert("system_fingerprint".to_owned(), json!(output.fingerprint()));
        }
        body.insert("usage".to_owned(), usage);
        if output.wire.is_vllm() {
            if output.wanted.kind == Kind::Chat {
                let prompt = output.wanted.return_token_ids.then_some(&output.prompts[0]);
                body.insert("prompt_logprobs".to_owned(), Value::Null);
                body.insert("prompt_token_ids".to_owned(), json!(prompt));
            }
            body.insert("kv_transfer_params".to_owned(), output.kv_transfer_params.clone());
        } else {
            body.insert("metadata".to_owned(), json!({"weight_version": "default"}));
        }
        json_response(StatusCode::OK, &Value::Object(body))
    }

    /// What a stream says in front of its first token.
    pub(super) fn opening_chunks(&self) -> Vec<Bytes> {
        if self.output.wanted.kind == Kind::Completion {
            return Vec::new();
        }
        let delta = if self.output.wire.is_vllm() {
            json!({"role": "assistant", "content": ""})
        } else {
            json!({"reasoning_content": null, "role": "assistant", "content": ""})
        };
        let opening = |index| {
            let choice = self.output.piece_choice(index, delta.clone(), false);
            self.output.chunk(json!([choice]))
        };
        (0..self.output.answers.len()).map(opening).collect()
    }

    /// What a stream says for one more token.
    pub(super) fn advance_chunks(&mut self, progress: Progress) -> Vec<Bytes> {
        let index = progress.choice;
        let at = self.generated[index];
        self.advance(progress);
        let output = &self.output;
        let last = self.generated[index] == output.answers[index].tokens.len();
        let piece = &output.answers[index].pieces[at];
        let vllm = output.wire.is_vllm();
        let delta = match output.wanted.kind {
            Kind::Completion => json!(piece),
            Kind::Chat if vllm => json!({"content": piece}),
            Kind::Chat => json!({"reasoning_content": null, "content": piece}),
        };
        // SGLang ends a chat's answer in a chunk of its own.
        let apart = last && !vllm && output.wanted.kind == Kind::Chat;
        let mut choice = output.piece_choice(index, delta, last && !apart);
        if vllm {
            let token = output.wanted.return_token_ids.then(|| [output.answers[index].tokens[at]]);
            choice["token_ids"] = json!(token);
        }
        let mut chunks = vec![output.chunk(json!([choice]))];
        if apart {
            let choice = output.piece_choice(index, json!({"reasoning_content": null}), true);
            chunks.push(output.chunk(json!([choice])));
        }
        if self.is_finished() {
            chunks.extend(self.closing_chunks());
            self.closed = true;
        }
        chunks
    }

    fn closing_chunks(&self) -> Vec<Bytes> {
        let output = &self.output;
        let mut chunks = Vec::new();
        if output.wanted.include_usage {
            let object = match output.wanted.kind {
                Kind::Chat => "chat.completion.chunk",
                Kind::Completion => "text_completion",
            };
            let mut body = output.envelope(object, json!([]));
            let usage = output.usage(self.generated.iter().sum(), self.cached_prompt_tokens(), true);
            body.insert("usage".to_owned(), usage);
            if output.wire.is_vllm() {
                body.insert("system_fingerprint".to_owned(), json!(output.fingerprint()));
            }
            chunks.push(data(&Value::Object(body)));
        }
        chunks.push(Bytes::from_static(b"data: [DONE]\n\n"));
        chunks
    }

    /// Cached tokens of each prompt, counted once however many answers it has.
    fn cached_prompt_tokens(&self) -> usize {
        self.cached.iter().step_by(self.output.wanted.answers).sum()
    }
}

fn data(value: &Value) -> Bytes {
    Bytes::from(format!("data: {value}\n\n"))
}
