//! Watches an answer as it passes: usage and progress, never changing a byte.
//!
//! Events may be cut anywhere between two chunks; the watcher reads lines, so
//! every cut gives the same result.

use serde_json::Value;

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
        Self { kind, kept: Vec::new(), overflown: false, usage: Usage::default(), events: 0, done: false }
    }

    /// Whether the body is a stream of events.
    pub fn is_event_stream(&self) -> bool {
        self.kind == Kind::Events
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
        // Most events carry no usage; they are not worth parsing.
        if data.windows(8).any(|window| window == b"\"usage\":") {
            self.note(&serde_json::from_slice(data).unwrap_or(Value::Null));
        }
    }

    fn note(&mut self, body: &Value) {
        let Some(usage) = body.get("usage").filter(|usage| usage.is_object()) else { return };
        let count = |path: &str| usage.pointer(path).and_then(Value::as_u64);
        self.usage.prompt = count("/prompt_tokens").or(self.usage.prompt);
        self.usage.completion = count("/completion_tokens").or(self.usage.completion);
        let details = usage.get("prompt_tokens_details");
        // Engines leave the details out, or null, when nothing was cached.
        self.usage.cached = match details {
            Some(Value::Object(_)) => count("/prompt_tokens_details/cached_tokens").or(Some(0)),
            _ => self.usage.cached,
        };
    }
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
