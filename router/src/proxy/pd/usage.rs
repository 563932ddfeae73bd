//! Puts prefill's cached tokens into the usage of decode's answer.
//!
//! A decode worker had nothing cached: it fetched all of the prompt. What prefill
//! skipped is what the client asks about. Only the number changes; a line of events
//! is held back until it ends, and a body in one piece until it is whole.

use std::ops::Range;

use bytes::Bytes;

use crate::proxy::splice::{Members, range_in};

/// Longest line and body that is looked at; longer ones pass as they are.
const MAX_KEPT: usize = 8 << 20;

/// Changes one answer.
#[derive(Debug)]
pub struct Rewriter {
    cached: u64,
    kind: Kind,
    kept: Vec<u8>,
    /// The line or the body is too long, and passes.
    passing: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Events,
    Whole,
}

impl Rewriter {
    /// For a stream of events in whose usage prefill had `cached` tokens.
    pub const fn of_events(cached: u64) -> Self {
        Self { cached, kind: Kind::Events, kept: Vec::new(), passing: false }
    }

    /// For a JSON body.
    pub const fn of_whole(cached: u64) -> Self {
        Self { cached, kind: Kind::Whole, kept: Vec::new(), passing: false }
    }

    /// What may go out now that `bytes` have come.
    pub fn pass(&mut self, bytes: Bytes) -> Bytes {
        if self.kind == Kind::Events && self.kept.is_empty() && !self.passing && self.may_pass(&bytes) {
            return bytes;
        }
        let mut out = Vec::with_capacity(bytes.len() + 8);
        match self.kind {
            Kind::Whole => self.keep(&bytes, &mut out),
            Kind::Events => {
                for line in bytes.split_inclusive(|byte| *byte == b'\n') {
                    self.keep(line, &mut out);
                    if line.ends_with(b"\n") {
                        out.extend(self.line());
                    }
                }
            }
        }
        out.into()
    }

    /// What is still held back: the answer has ended.
    pub fn finish(&mut self) -> Bytes {
        self.line().into()
    }

    /// Whether these are whole lines that have nothing to change.
    fn may_pass(&self, bytes: &[u8]) -> bool {
        let word = b"cached_tokens".as_slice();
        let details = b"prompt_tokens_details".as_slice();
        let has = |word: &[u8]| bytes.windows(word.len()).any(|window| window == word);
        bytes.ends_with(b"\n") && !has(word) && !has(details)
    }

    fn keep(&mut self, bytes: &[u8], out: &mut Vec<u8>) {
        if !self.passing && self.kept.len() + bytes.len() > MAX_KEPT {
            self.passing = true;
            out.append(&mut self.kept);
        }
        match self.passing {
            true => out.extend_from_slice(bytes),
            false => self.kept.extend_from_slice(bytes),
        }
    }

    /// The line or body that has ended, changed where it tells of usage.
    fn line(&mut self) -> Vec<u8> {
        self.passing = false;
        let kept = std::mem::take(&mut self.kept);
        let offset = match self.kind {
            Kind::Whole => 0,
            Kind::Events if kept.starts_with(b"data:") => 5,
            Kind::Events => return kept,
        };
        let Some((range, text)) = change(&kept[offset..], self.cached) else { return kept };
        let (before, after) = (&kept[..offset + range.start], &kept[offset + range.end..]);
        [before, text.as_bytes(), after].concat()
    }
}

/// Where the count stands in the usage of `json`, and what stands there instead.
fn change(json: &[u8], cached: u64) -> Option<(Range<usize>, String)> {
    let usage = *Members::of(json).by_name()?.get("usage")?;
    let details = *Members::of(usage.get().as_bytes()).by_name()?.get("prompt_tokens_details")?;
    if details.get() == "null" {
        return Some((range_in(json, details)?, format!("{{\"cached_tokens\":{cached}}}")));
    }
    let count = *Members::of(details.get().as_bytes()).by_name()?.get("cached_tokens")?;
    Some((range_in(json, count)?, cached.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cut_of_a_stream_gets_the_same_count() {
        let stream = "data: {\"choices\":[{\"delta\":{\"content\":\"cached_tokens\"}}]}\r\n\r\n: ping\n\ndata: {\"choices\":[],\"usage\":{\"prompt_tokens\":65,\"prompt_tokens_details\":{\"cached_tokens\": 0, \"x\":1}}}\n\ndata: [DONE]\n\n";
        let expected = stream.replace("\"cached_tokens\": 0", "\"cached_tokens\": 64");
        for cut in 0..=stream.len() {
            let mut rewriter = Rewriter::of_events(64);
            let (head, tail) = stream.as_bytes().split_at(cut);
            let mut out = rewriter.pass(Bytes::copy_from_slice(head)).to_vec();
            out.extend(rewriter.pass(Bytes::copy_from_slice(tail)));
            out.extend(rewriter.finish());
            assert_eq!(String::from_utf8_lossy(&out), expected, "cut at {cut}");
        }
    }

    #[test]
    fn a_body_in_one_piece_gets_it_where_it_has_room_for_it() {
        let check = |why: &str, body: &str, expected: &str| {
            let mut rewriter = Rewriter::of_whole(64);
            let mut out = rewriter.pass(Bytes::copy_from_slice(body.as_bytes())).to_vec();
            assert_eq!(out.len(), 0, "held until it is whole");
            out.extend(rewriter.finish());
            assert_eq!(String::from_utf8_lossy(&out), expected, "{why}");
        };
        check(
            "a count",
            r#"{"usage":{"prompt_tokens_details":{"cached_tokens":0}},"x":1e400}"#,
            r#"{"usage":{"prompt_tokens_details":{"cached_tokens":64}},"x":1e400}"#,
        );
        check(
            "null",
            r#"{"usage":{"prompt_tokens_details": null}}"#,
            r#"{"usage":{"prompt_tokens_details": {"cached_tokens":64}}}"#,
        );
        let same = [r#"{"usage":{"prompt_tokens":5}}"#, r#"{"choices":[]}"#, "no json", r#"{"usage":null}"#];
        same.iter().for_each(|body| check("nothing to change", body, body));
    }

    #[test]
    fn a_stream_gets_it_in_place_of_nothing() {
        let mut rewriter = Rewriter::of_events(64);
        let event = "data: {\"usage\":{\"prompt_tokens_details\":null}}\n";
        let expected = "data: {\"usage\":{\"prompt_tokens_details\":{\"cached_tokens\":64}}}\n";
        assert_eq!(rewriter.pass(Bytes::from_static(event.as_bytes())), expected);
    }

    #[test]
    fn what_is_too_long_passes() {
        let mut rewriter = Rewriter::of_events(64);
        let long = Bytes::from(vec![b'x'; MAX_KEPT]);
        assert_eq!(rewriter.pass(long.clone()).len(), 0);
        assert_eq!(rewriter.pass(long).len(), 2 * MAX_KEPT);
        assert_eq!(rewriter.pass(Bytes::from_static(b"y\nz")), "y\n", "the next line is held back again");
        assert_eq!(rewriter.finish(), "z");
    }
}
