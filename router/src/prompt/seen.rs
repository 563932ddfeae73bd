//! Bodies whose beginnings were read before.
//!
//! The next turn of a conversation sends all of it again, and its body begins with
//! the very bytes of the last one's. Those need not be read again. What they said is
//! kept by chunks of bytes, counted from the body's start: a chunk's key names its
//! bytes and all before them, and under it are the messages that end in it. What a
//! beginning of a body says does not depend on what follows, with one exception that
//! is looked after: a second list of `messages` replaces the first.
//!
//! A reader of JSON cannot begin in the middle. So the messages that are known are
//! left out, and what is before and behind them is read as a body of its own:
//!
//! ```text
//! {"model": "m", "messages": [{known}, {known}, {new}], "stream": true}
//!                             ^ begin           ^ resume
//! {"model": "m", "messages": [{new}], "stream": true}
//! ```
//!
//! Whatever is wrong with that is found by reading all of it the plain way, whose
//! errors name the right place. Tenants have keys of their own, and what was said under
//! a cache salt is not kept: no tenant's request is faster for what another one sent.

use std::ops::Range;

use serde_json::{Map, Value};

use super::body::{Body, Message};
use super::cache::{Cache, Key};
use super::endpoint::Endpoint;
use super::reading::{Placed, ReadBody};
use kvrouter_core::blocks::BlockHash;

/// Bytes in a chunk: as much is read again at most, beside one message. Shorter
/// chunks take more keys, longer ones more reading.
const CHUNK_BYTES: usize = 8 << 10;
/// Tells the keys of chunks from those of texts, which begin at other roots.
const VARIANT: u64 = u64::MAX;
/// What an allocation takes beside its contents.
const ALLOCATION_BYTES: usize = 16;
/// What a field of an object takes beside its name and value: its hash, and its
/// places in a table that is half full.
const FIELD_BYTES: usize = 40;

/// What one chunk of a body adds.
#[derive(Debug)]
pub struct Chunk {
    /// Messages that end in it; more precisely, behind which another one begins.
    messages: Box<[Message]>,
    /// Where it leaves the reader.
    place: Place,
}

/// Where known messages stand in a body. Both are zero as long as there are none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Place {
    /// Where the first message begins.
    begin: usize,
    /// Where the first one begins that is not known.
    resume: usize,
}

/// What the cache has of a body.
struct Known {
    messages: Vec<Message>,
    place: Place,
    /// The key of the last chunk that was found, and how many were.
    key: Key,
    chunks: usize,
}

/// Where a message begins, in the body.
#[derive(Clone, Copy)]
struct Begin {
    /// Its brace.
    brace: usize,
    /// Behind its first name, from where on nothing about this changes.
    name_end: usize,
}

/// What is read of a body, and where each of its messages begins, if that is known.
struct Read {
    fields: Map<String, Value>,
    messages: Option<Vec<Message>>,
    begins: Vec<Option<Begin>>,
    /// There is one list of messages.
    is_plain: bool,
}

impl Chunk {
    /// What it takes in the cache, but for its entry.
    pub fn bytes(&self) -> usize {
        size_of::<Self>() + self.messages.iter().map(bytes_of).sum::<usize>()
    }
}

/// Reads the body of a chat, and keeps what can be known of the next turn's, for
/// those who are `whose` alone.
pub fn read(cache: &Cache, whose: u64, bytes: &[u8]) -> Result<Body, serde_json::Error> {
    if bytes.len() >= CHUNK_BYTES {
        let mut known = Known::nothing(cache, whose);
        known.find(cache, bytes);
        if let Some(read) = Read::behind(bytes, known.place) {
            return Ok(known.with(cache, bytes, read));
        }
        if let Some(read) = Read::all(bytes) {
            return Ok(Known::nothing(cache, whose).with(cache, bytes, read));
        }
    }
    Body::parse(Endpoint::Chat, bytes)
}

impl Known {
    fn nothing(cache: &Cache, whose: u64) -> Self {
        let key = cache.root(BlockHash(whose), VARIANT);
        Self { messages: Vec::new(), place: Place::default(), key, chunks: 0 }
    }

    fn find(&mut self, cache: &Cache, bytes: &[u8]) {
        for chunk in bytes.chunks_exact(CHUNK_BYTES) {
            let key = self.key.next(chunk);
            let Some(found) = cache.chunk(key) else { break };
            self.messages.extend_from_slice(&found.messages);
            (self.place, self.key) = (found.place, key);
            self.chunks += 1;
        }
    }

    /// The whole body, of which `read` is what was not known. Keeps what it adds.
    fn with(mut self, cache: &Cache, bytes: &[u8], read: Read) -> Body {
        let Read { fields, messages, begins, is_plain } = read;
        let Some(messages) = messages else { return Body { fields: Value::Object(fields), messages } };
        let count = self.messages.len();
        self.messages.extend(messages);
        let has_salt = fields.get("cache_salt").is_some_and(|salt| !salt.is_null());
        if is_plain && !has_salt {
            self.keep(cache, bytes, count, &begins);
        }
        Body { fields: Value::Object(fields), messages: Some(self.messages) }
    }

    /// Keeps the messages that were not among the `known` first; `begins` says where
    /// they stand.
    fn keep(&self, cache: &Cache, bytes: &[u8], known: usize, begins: &[Option<Begin>]) {
        let Some(Some(first)) = begins.first().copied() else { return };
        let begin = if known == 0 { first.brace } else { self.place.begin };
        let (mut key, mut place, mut kept) = (self.key, self.place, known);
        let mut next = begins.iter().enumerate().skip(1).peekable();
        for (chunk, end) in
            bytes.chunks_exact(CHUNK_BYTES).zip((CHUNK_BYTES..).step_by(CHUNK_BYTES)).skip(self.chunks)
        {
            key = key.next(chunk);
            let from = kept;
            // The first name of a message is in the chunk, all of it, so every body with
            // this chunk goes on with an object whose beginning is known in the same way.
            // What a chunk says must not depend on anything behind it.
            let begins = |begin: &Option<Begin>| begin.is_none_or(|begin| begin.name_end <= end);
            while let Some((at, begin_of)) = next.next_if(|(_, begin)| begins(begin)) {
                if let Some(Begin { brace: resume, .. }) = *begin_of {
                    (place, kept) = (Place { begin, resume }, known + at);
                }
            }
            cache.insert(key, Chunk { messages: self.messages[from..kept].into(), place });
        }
    }
}

impl Read {
    /// Reads all of a body; `None` if it is no object, or is wrong.
    fn all(bytes: &[u8]) -> Option<Self> {
        Self::object(bytes, |at| at)
    }

    /// Reads a body without the messages that are known; `None` if something is wrong,
    /// or they are the smaller part, which is not worth a copy of the rest.
    fn behind(bytes: &[u8], Place { begin, resume }: Place) -> Option<Self> {
        let rest = bytes.get(resume..).filter(|rest| rest.len() < resume - begin)?;
        let short = [bytes.get(..begin)?, rest].concat();
        Self::object(&short, |at| at + resume - begin).filter(|read| read.is_plain && read.messages.is_some())
    }

    /// Reads an object. `place` tells where in the body something in `bytes` stands.
    fn object(bytes: &[u8], place: impl Fn(usize) -> usize) -> Option<Self> {
        let text = std::str::from_utf8(bytes).ok()?;
        if !text.trim_ascii_start().starts_with('{') {
            return None;
        }
        let ReadBody { fields, messages, lists } = serde_json::from_str(text).ok()?;
        let mut begins = Vec::with_capacity(messages.as_ref().map_or(0, Vec::len));
        let message = |Placed { message, name_at }| {
            let begin = |name: Range<usize>| {
                let start = name.start.checked_sub(bytes.as_ptr() as usize)?;
                let name_end = start + name.len() + 1;
                Some(Begin { brace: place(brace(bytes, start)?), name_end: place(name_end) })
            };
            begins.push(name_at.and_then(begin));
            message
        };
        let messages = messages.map(|list| list.into_iter().map(message).collect());
        Some(Self { fields, messages, begins, is_plain: lists == 1 })
    }
}

/// Where the object begins whose first name is at `name`.
fn brace(bytes: &[u8], name: usize) -> Option<usize> {
    let before = bytes.get(..name)?.strip_suffix(b"\"")?.trim_ascii_end().strip_suffix(b"{")?;
    Some(before.len())
}

/// What a message takes.
fn bytes_of(message: &Message) -> usize {
    size_of::<Message>()
        + match message {
            Message::Plain { content, .. } => content.len() + ALLOCATION_BYTES,
            Message::Other(value) => bytes_behind(value),
        }
}

/// What a value takes beside itself.
fn bytes_behind(value: &Value) -> usize {
    let inner = match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => return 0,
        Value::String(text) => text.len(),
        Value::Array(items) => items.iter().map(|item| size_of::<Value>() + bytes_behind(item)).sum(),
        Value::Object(fields) => {
            let field = |(name, value): (&String, &Value)| {
                let own = size_of::<String>() + size_of::<Value>() + FIELD_BYTES;
                own + name.len() + ALLOCATION_BYTES + bytes_behind(value)
            };
            fields.iter().map(field).sum()
        }
    };
    inner + ALLOCATION_BYTES
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::prompt::tests::Lot;

    /// The oracle reads all of it; what is wrong has the same place.
    #[track_caller]
    fn check(cache: &Cache, why: &str, bytes: &[u8]) {
        let text = |read: Result<Body, serde_json::Error>| read.map_err(|error| error.to_string());
        let expected = text(Body::parse(Endpoint::Chat, bytes));
        assert_eq!(text(read(cache, 0, bytes)), expected, "{why}: {}", String::from_utf8_lossy(bytes));
    }

    /// How many messages of a body are known.
    fn known(cache: &Cache, bytes: &[u8]) -> usize {
        let mut known = Known::nothing(cache, 0);
        known.find(cache, bytes);
        known.messages.len()
    }

    fn roomy() -> Cache {
        Cache::new(64 << 20, 1)
    }

    /// A message as some client writes it, or something that is none.
    fn message(lot: &mut Lot) -> String {
        let text = |lot: &mut Lot| json!(lot.text().repeat(lot.below(12))).to_string();
        match lot.below(16) {
            0 => format!(r#"{{"r\u006fle": "user", "content": {}}}"#, text(lot)),
            1 => format!("{{ \n \"content\" : {} , \"role\":\"user\" }} ", text(lot)),
            2 => "{}".to_owned(),
            3 => r#"[1, {"role": "user"}]"#.to_owned(),
            4 => "null".to_owned(),
            5 => text(lot),
            6 => format!(r#"{{"x": {{"messages": [{{"role": "user"}}, {}]}}}}"#, text(lot)),
            _ => lot.message().to_string(),
        }
    }

    /// A body around messages: other fields in other places, and sometimes a second
    /// list, which counts.
    fn body(lot: &mut Lot, messages: &[String]) -> String {
        let list = messages.join([",", " ,\n "][lot.below(2)]);
        match lot.below(12) {
            0 => format!(r#"{{"messages":[{list}],"model":"m","stream":true}}"#),
            1 => {
                format!(
                    r#"{{"model":"m","temperature":0.5,"messages":[{list}],"messages":[{{"role":"user","content":"x"}}]}}"#
                )
            }
            2 => format!(r#"{{"model":"m","temperature":0.5,"messages":[{list}],"messages":5}}"#),
            3 => format!(r#"{{"messages":[{{"role":"user","content":"x"}}],"messages":[{list}]}}"#),
            4 => format!(r#"{{"model":"m","temperature":0.5,"messages":[{list}],"cache_salt":"s"}}"#),
            at => format!(r#"{{"model":"m","temperature":0.5,"messages":[{list}],"n":{at}}}"#),
        }
    }

    #[test]
    fn a_body_means_the_same_whatever_was_read_before() {
        let (roomy, tiny) = (roomy(), Cache::new(1 << 20, 1));
        let mut lot = Lot(3);
        let (mut messages, mut known_messages): (Vec<String>, usize) = (Vec::new(), 0);
        for step in 0..250 {
            match lot.below(6) {
                0 if !messages.is_empty() => {
                    let at = lot.below(messages.len());
                    messages[at] = message(&mut lot);
                }
                1 => messages.truncate(lot.below(messages.len() + 1)),
                _ => {}
            }
            messages.extend((0..=lot.below(30)).map(|_| message(&mut lot)));
            let mut bytes = body(&mut lot, &messages).into_bytes();
            match lot.below(8) {
                0 => bytes.truncate(lot.below(bytes.len())),
                1 => {
                    let at = lot.below(bytes.len());
                    bytes[at] = b"\"],{}x\xff"[lot.below(7)];
                }
                _ => {}
            }
            known_messages += known(&roomy, &bytes);
            check(&roomy, &format!("step {step}"), &bytes);
            check(&tiny, &format!("step {step}, with little room"), &bytes);
            assert!(tiny.bytes() <= 1 << 20);
        }
        assert!(known_messages > 1_000 && tiny.evicted() > 20, "{known_messages}, {}", tiny.evicted());
    }

    fn plain(name: &str, count: usize) -> String {
        let message = |at: usize| format!(r#"{{"role":"user","content":"{at}{}"}}"#, "x".repeat(90));
        let list: Vec<String> = (0..count).map(message).collect();
        format!(r#"{{"model":"{name}","messages":[{}]}}"#, list.join(","))
    }

    /// Whichever byte of a message a chunk ends at, what may not follow there is
    /// refused.
    #[test]
    fn what_follows_a_chunk_is_read_as_it_stands() {
        for pad in 0..130 {
            let cache = roomy();
            let good = plain(&"m".repeat(pad), 100);
            check(&cache, "good", good.as_bytes());
            let count = known(&cache, good.as_bytes());
            assert!(count > 50, "{pad}: {count}");
            for end in (CHUNK_BYTES - 4..CHUNK_BYTES + 4).filter(|end| good.is_char_boundary(*end)) {
                for rest in ["]}", "]]}", "5]}", "{}]}", ",{}]}", "}]}", "\"}]}", ""] {
                    let other = format!("{}{rest}{}", &good[..end], " ".repeat(CHUNK_BYTES / 2));
                    check(&cache, &format!("{pad}, {end}, {rest}"), other.as_bytes());
                }
            }
        }
    }

    /// Where a chunk ends between the brace and the name of a message, the bodies that
    /// share it may go on so that the message is placed in one and not in the other.
    #[test]
    fn what_is_kept_of_one_body_goes_with_what_is_kept_of_another() {
        let cache = roomy();
        let good = (0..130).map(|pad| plain(&"m".repeat(pad), 400));
        let good = good.into_iter().find(|body| body[..CHUNK_BYTES].ends_with('{')).expect("one of them");
        let odd = format!(r#"{}"r\u006fle":"user","content":"b"}}]}}"#, &good[..CHUNK_BYTES]);
        for (why, body) in [("odd", &odd), ("good", &good), ("again", &good)] {
            check(&cache, why, body.as_bytes());
        }
    }

    /// A message that began in the chunk before ends in this one.
    #[test]
    fn a_chunk_is_known_behind_the_one_it_stood_behind() {
        let cache = roomy();
        let one = plain("m", 400);
        let other = format!("{}{}", one[..CHUNK_BYTES].replace('x', "y"), &one[CHUNK_BYTES..]);
        for (why, body) in [("one", &one), ("other", &other), ("again", &other)] {
            check(&cache, why, body.as_bytes());
        }
    }

    #[test]
    fn a_next_turn_is_known_up_to_its_last_chunk() {
        let cache = roomy();
        for count in [400, 401, 410] {
            let body = plain("m", count);
            check(&cache, "a turn", body.as_bytes());
            let unknown = count - known(&cache, body.as_bytes());
            assert!(unknown <= CHUNK_BYTES / 115 + 2, "{unknown} of {count}");
        }
        assert_eq!(known(&cache, plain("n", 400).as_bytes()), 0, "another beginning");
        assert_eq!(known(&Cache::new(64 << 20, 2), plain("m", 400).as_bytes()), 0, "another seed");
    }

    #[test]
    fn room_is_charged_for_what_is_kept() {
        let cache = roomy();
        let body = plain("m", 1_000);
        check(&cache, "whole", body.as_bytes());
        let before = cache.bytes();
        assert!((90_000..250_000).contains(&before), "{before}");
        check(&cache, "again", body.as_bytes());
        assert_eq!(cache.bytes(), before, "nothing is kept twice");
        let deep =
            json!({"messages": vec![json!({"tool_calls": [{"a": ["b", {"c": "d".repeat(50)}]}]}); 1_000]});
        check(&cache, "objects", deep.to_string().as_bytes());
        assert!(cache.bytes() - before > 1_000 * (50 + 8 * 24), "{}", cache.bytes() - before);
    }

    /// Bodies that go on differently behind a chunk, one oddly and one plainly, with the
    /// chunk's end at every byte around the beginning of a message: neither may change
    /// what the other is read as, nor what its next turn is.
    #[test]
    fn what_a_chunk_says_does_not_depend_on_what_follows() {
        let head = r#"{"messages":["#;
        let fill = |length: usize| {
            let frame = r#"{"role":"user","content":""},"#.len();
            format!(r#"{{"role":"user","content":"{}"}},"#, "x".repeat(length - frame))
        };
        let (plain, odd) = (r#"{"role":"user","content":"y"}"#, r#"{"r\u006fle":"user","content":"x"}"#);
        for cut in 0..=plain.len() {
            let before = format!("{head}{}{}", fill(1_000), fill(CHUNK_BYTES - 1_000 - head.len() - cut));
            assert_eq!(before.len() + cut, CHUNK_BYTES);
            let long: String = (0..40).map(|_| fill(1_000)).collect();
            let bodies = [
                format!("{before}{odd}]}}"),
                format!("{before}{{}}]}}"),
                format!("{before}{plain},{long}{plain}]}}"),
                format!("{before}{plain},{long}{plain},{plain}]}}"),
            ];
            for order in [[0, 2, 3, 1], [1, 2, 3, 0], [2, 0, 3, 1], [3, 1, 2, 0]] {
                let cache = roomy();
                order.iter().for_each(|at| check(&cache, &format!("{cut} {at}"), bodies[*at].as_bytes()));
            }
        }
    }

    #[test]
    fn what_a_salt_keeps_apart_is_not_kept() {
        let cache = roomy();
        let salted = plain("m", 400).replace("]}", r#"],"cache_salt":"s"}"#);
        check(&cache, "salted", salted.as_bytes());
        assert_eq!(cache.bytes(), 0);
    }

    #[test]
    fn what_one_tenant_sent_is_not_known_to_another() {
        let cache = roomy();
        let body = plain("m", 400);
        let found = |whose| {
            let mut known = Known::nothing(&cache, whose);
            known.find(&cache, body.as_bytes());
            known.messages.len()
        };
        read(&cache, 7, body.as_bytes()).expect("it is JSON");
        assert!(found(7) > 300, "{}", found(7));
        assert_eq!([found(0), found(8)], [0, 0]);
    }
}
