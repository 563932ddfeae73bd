//! Watches an answer as it passes: usage and progress, never changing a byte.
//!
//! Events may be cut anywhere between two chunks; the watcher reads lines, so
//! every cut gives the same result.

use serde_json::Value;

use super::pd::usage::Rewriter;

/// Longest line that is looked at. Usage comes in short lines; a longer one is
/// passed on unread.
const MAX_LINE: usize = 1 << 20;
/// Longest whole body that is kept to read its usage.
const MAX_BODY: usize = 8 << 20;

/// Token counts as an engine reports them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt: Option<u64>,
    /// Of which it had cached.
    pub cached: Option<u64>,
    /// Tokens generated.
    pub completion: Option<u64>,
}

/// Reads an answer's usage from its bytes.
#[derive(Debug)]
pub struct Reader {
    kind: Kind,
    /// The unfinished line, or the body so far; emptied when over its limit.
    kept: Vec<u8>,
    overflown: bool,
    usage: Usage,
    /// The id of the response that the body is, until somebody takes it.
    response_id: Option<Box<str>>,
    /// Events with content.
    events: u64,
    /// `[DONE]` has passed.
    done: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Events,
    Json,
    Opaque,
}

impl Reader {
    /// A reader for a body of `content_type`.
    pub fn new(content_type: Option<&str>) -> Self {
        let kind = match content_type.map(|kind| kind.trim().to_ascii_lowercase()) {
            Some(kind) if kind.starts_with("text/event-stream") => Kind::Events,
            Some(kind) if kind.starts_with("application/json") => Kind::Json,
            _ => Kind::Opaque,
        };
        let usage = Usage::default();
        Self { kind, kept: Vec::new(), overflown: false, usage, response_id: None, events: 0, done: false }
    }

    /// Whether the body is a stream of events.
    pub fn is_event_stream(&self) -> bool {
        self.kind == Kind::Events
    }

    /// What puts `cached` tokens into such a body's usage; `None` where it has none.
    pub fn rewriter(&self, cached: u64) -> Option<Rewriter> {
        match self.kind {
            Kind::Events => Some(Rewriter::of_events(cached)),
            Kind::Json => Some(Rewriter::of_whole(cached)),
            Kind::Opaque => None,
        }
    }

    /// Whether the stream has said that it is over: what is missing is only the
    /// end of its framing.
    pub fn is_done(&self) -> bool {
        self.done
    }

    /// Reads the next bytes; returns how many events with content they complete.
    pub fn read(&mut self, bytes: &[u8]) -> u64 {
        match self.kind {
            Kind::Opaque => 0,
            Kind::Json => {
                self.keep(bytes, MAX_BODY);
                0
            }
            Kind::Events => {
                let before = self.events;
                let mut rest = bytes;
                while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
                    self.keep(&rest[..end], MAX_LINE);
                    self.line();
                    rest = &rest[end + 1..];
                }
                self.keep(rest, MAX_LINE);
                self.events - before
            }
        }
    }

    /// The usage found; of a JSON body only once it is whole.
    pub fn usage(&mut self) -> Usage {
        if self.kind == Kind::Json && !self.overflown && !self.kept.is_empty() {
            let body = std::mem::take(&mut self.kept);
            self.note(&serde_json::from_slice(&body).unwrap_or(Value::Null));
        }
        self.usage
    }

    /// The id that later requests name to go on from this response: of a stream as
    /// soon as it was said, of a JSON body once its usage was read.
    pub fn take_response_id(&mut self) -> Option<Box<str>> {
        self.response_id.take()
    }

    fn keep(&mut self, bytes: &[u8], limit: usize) {
        if self.overflown || self.kept.len() + bytes.len() > limit {
            self.overflown = true;
            self.kept = Vec::new();
            return;
        }
        self.kept.extend_from_slice(bytes);
    }

    fn line(&mut self) {
        let line = std::mem::take(&mut self.kept);
        let overflown = std::mem::take(&mut self.overflown);
        let Some(data) = line.trim_ascii().strip_prefix(b"data:").filter(|_| !overflown) else { return };
        let data = data.trim_ascii();
        if data == b"[DONE]" {
            self.done = true;
            return;
        }
        self.events += 1;
        // Most events carry neither usage nor an id; they are not worth parsing.
        if contains(data, b"\"usage\":") || contains(data, b"response.created") {
            self.note(&serde_json::from_slice(data).unwrap_or(Value::Null));
        }
    }

    /// Usage stands at the top, or in the response or message that an event
    /// speaks of; SGLang's `/generate` has its own name for it.
    fn note(&mut self, body: &Value) {
        let whole = Some(body).filter(|body| body.get("object").is_some_and(|kind| kind == "response"));
        let response = whole.or_else(|| body.get("response"));
        if let Some(id) = response.and_then(|response| response.get("id")).and_then(Value::as_str) {
            self.response_id = Some(id.into());
        }
        let inner = response.or_else(|| body.get("message"));
        let usage = [body.get("usage"), inner.and_then(|inner| inner.get("usage")), body.get("meta_info")];
        if let Some(usage) = usage.into_iter().flatten().find(|usage| usage.is_object()) {
            self.usage.take(usage);
        }
    }
}

impl Usage {
    /// What `usage` says, in the words of any of the endpoints; what it leaves out
    /// stays as it was.
    fn take(&mut self, usage: &Value) {
        let count = |path: &str| usage.pointer(path).and_then(Value::as_u64);
        let details = |name: &str| usage.get(name).filter(|details| details.is_object());
        let in_details = |name: &str| {
            // Engines leave the count out when nothing was cached.
            details(name).map(|details| details.get("cached_tokens").and_then(Value::as_u64).unwrap_or(0))
        };
        let read = count("/cache_read_input_tokens");
        let input = count("/input_tokens").map(|input| match details("input_tokens_details") {
            // The responses' count is of the whole prompt, the messages' of the rest.
            Some(_) => input,
            None => input + read.unwrap_or(0) + count("/cache_creation_input_tokens").unwrap_or(0),
        });
        self.prompt = count("/prompt_tokens").or(input).or(self.prompt);
        self.completion = count("/completion_tokens").or_else(|| count("/output_tokens")).or(self.completion);
        let cached = in_details("prompt_tokens_details").or_else(|| in_details("input_tokens_details"));
        self.cached = cached.or(read).or_else(|| count("/cached_tokens")).or(self.cached);
    }
}

fn contains(data: &[u8], word: &[u8]) -> bool {
    data.windows(word.len()).any(|window| window == word)
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: &str = "data: {\"choices\":[{\"delta\":{\"content\":\"é\"}}]}\r\n\r\n: ping\n\ndata: {\"choices\":[],\"usage\":{\"prompt_tokens\":65,\"completion_tokens\":2,\"prompt_tokens_details\":{\"cached_tokens\":64}}}\n\ndata: [DONE]\n\n";

    #[test]
    fn every_cut_of_a_stream_reads_the_same() {
        let whole = Usage { prompt: Some(65), cached: Some(64), completion: Some(2) };
        for cut in 0..=STREAM.len() {
            let mut reader = Reader::new(Some("text/event-stream; charset=utf-8"));
            let (head, tail) = STREAM.as_bytes().split_at(cut);
            let before = reader.read(head);
            let done = head.ends_with(b"[DONE]\n") || head.ends_with(b"[DONE]\n\n");
            assert_eq!(reader.is_done(), done, "cut at {cut}");
            let events = before + reader.read(tail);
            assert_eq!((events, reader.usage(), reader.is_done()), (2, whole, true), "cut at {cut}");
        }
    }

    #[test]
    fn a_json_body_is_read_when_it_is_whole() {
        let body = r#"{"usage":{"prompt_tokens":9,"completion_tokens":1,"prompt_tokens_details":null}}"#;
        let mut reader = Reader::new(Some("application/json"));
        reader.read(&body.as_bytes()[..20]);
        reader.read(&body.as_bytes()[20..]);
        assert_eq!(reader.usage(), Usage { prompt: Some(9), cached: None, completion: Some(1) });
    }

    #[test]
    fn every_endpoint_has_its_words_for_usage() {
        let json = "application/json";
        let of =
            |prompt, cached, completion| Usage { prompt: Some(prompt), cached, completion: Some(completion) };
        let cases: [(&str, &str, Usage); 6] = [
            ("chat", r#"{"usage":{"prompt_tokens":9,"completion_tokens":1}}"#, of(9, None, 1)),
            (
                "chat, nothing cached",
                r#"{"usage":{"prompt_tokens":9,"completion_tokens":1,"prompt_tokens_details":{}}}"#,
                of(9, Some(0), 1),
            ),
            (
                "responses",
                r#"{"object":"response","id":"resp_1","usage":{"input_tokens":9,"input_tokens_details":{"cached_tokens":4},"output_tokens":2}}"#,
                of(9, Some(4), 2),
            ),
            (
                "messages",
                r#"{"type":"message","usage":{"input_tokens":5,"cache_read_input_tokens":4,"output_tokens":2}}"#,
                of(9, Some(4), 2),
            ),
            (
                "messages, nothing reported",
                r#"{"type":"message","usage":{"input_tokens":5,"output_tokens":2}}"#,
                of(5, None, 2),
            ),
            (
                "generate",
                r#"{"text":"x","meta_info":{"prompt_tokens":9,"cached_tokens":8,"completion_tokens":3}}"#,
                of(9, Some(8), 3),
            ),
        ];
        for (why, body, expected) in cases {
            let mut reader = Reader::new(Some(json));
            reader.read(body.as_bytes());
            assert_eq!(reader.usage(), expected, "{why}");
            assert_eq!(reader.take_response_id().as_deref(), (why == "responses").then_some("resp_1"));
        }
    }

    /// Case A02: the last event of a response carries its usage, the first its id.
    #[test]
    fn every_cut_of_a_response_reads_the_same() {
        let stream = "event: response.created\ndata: {\"response\":{\"id\":\"resp_\u{e9}\",\"usage\":null},\"type\":\"response.created\"}\n\nevent: response.completed\ndata: {\"response\":{\"id\":\"resp_\u{e9}\",\"usage\":{\"input_tokens\":9,\"input_tokens_details\":{\"cached_tokens\":4},\"output_tokens\":2}}}\n\n";
        for cut in 0..=stream.len() {
            let mut reader = Reader::new(Some("text/event-stream"));
            let (head, tail) = stream.as_bytes().split_at(cut);
            reader.read(head);
            let early = reader.take_response_id();
            reader.read(tail);
            let usage = Usage { prompt: Some(9), cached: Some(4), completion: Some(2) };
            assert_eq!(reader.usage(), usage, "cut at {cut}");
            assert_eq!(early.or(reader.take_response_id()).as_deref(), Some("resp_\u{e9}"), "cut at {cut}");
        }
    }

    #[test]
    fn an_endless_line_is_not_kept() {
        let mut reader = Reader::new(Some("text/event-stream"));
        for _ in 0..40 {
            reader.read(&[b'x'; 1 << 16]);
        }
        assert!(reader.kept.is_empty());
        reader.read(b"\n");
        assert_eq!(reader.read(STREAM.as_bytes()), 2, "the next line is read again");
    }
}
