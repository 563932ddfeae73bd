//! Session traces in runs: one JSON object a line, ids as `[start, length]`.
//!
//! A header `{"s": session, "kind": "session", "block_size": 64, ..}` opens a
//! session; `{"s", "i", "t": seconds from the session's start, "in", "out",
//! "runs": [[start, length], ..]}` is its request `i`. Ids are the session's own:
//! two sessions share nothing. Headers of other kinds carry no request. Ids are
//! grouped into blocks of the size that the replay asks for; ids that fill no
//! block are dropped, as engines do with partial blocks. The format does not say
//! when a session starts: session `k`, in the order of their names, starts `k`
//! spacings after the first. A higher rate brings the starts closer together and
//! leaves the pace within a session alone: more people, not faster ones.

use rustc_hash::{FxHashMap, FxHashSet};
use xxhash_rust::xxh3::xxh3_64;

use super::trace::{Chain, MAX_REQUESTS, MAX_TOKENS, TimedRequest, Trace};
use crate::json::fields::{Fields, Problem, TraceError};
use crate::units::{BlockSize, Tokens};

/// Name of the format.
pub const FORMAT: &str = "runs";
/// Most runs in one prompt.
const MAX_RUNS: usize = 65_536;
/// Largest id: a session of a billion distinct tokens.
const MAX_ID: u64 = 1 << 24;

/// How foreign ids become blocks, and sessions one stream of arrivals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Tokens per block; every session's own block size must divide it.
    pub size: BlockSize,
    /// Milliseconds between the starts of two sessions.
    pub spacing_ms: u64,
}

/// What a session has shown so far.
struct Session {
    unit: u32,
    /// The id that each id stood behind, plus 2; 1 for none, 0 for not seen.
    parents: Vec<u64>,
    numbers: FxHashSet<u64>,
}

/// Reads a whole file.
pub fn parse(text: &str, layout: Layout) -> Result<Trace, TraceError> {
    let size = layout.size;
    let mut sessions: FxHashMap<String, Session> = FxHashMap::default();
    let mut requests = Vec::new();
    for (at, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let fields = Fields::root(line, at + 1)?;
        let name = fields.text("s")?;
        if fields.has("kind") {
            if fields.text("kind")? == "session" {
                open(&fields, name, size, &mut sessions)?;
            }
            continue;
        }
        if requests.len() == MAX_REQUESTS {
            let (found, limit) = (requests.len() as u64 + 1, MAX_REQUESTS as u64);
            return Err(fields.wrong("i", Problem::Limit { found, limit }));
        }
        let Some(session) = sessions.get_mut(&name) else {
            return Err(fields.wrong("s", Problem::UnknownName(name)));
        };
        requests.push(request(&fields, &name, session, size)?);
    }
    let mut names: Vec<&String> = sessions.keys().collect();
    names.sort();
    for request in &mut requests {
        let session = request.id.rsplit_once('/').map_or("", |(session, _)| session);
        let place = names.binary_search_by(|name| name.as_str().cmp(session)).unwrap_or(0);
        request.at = layout.spacing_ms.saturating_mul(place as u64).saturating_mul(1_000_000);
    }
    Ok(Trace::new(FORMAT, size, requests))
}

fn open(
    fields: &Fields<'_>,
    name: String,
    size: BlockSize,
    sessions: &mut FxHashMap<String, Session>,
) -> Result<(), TraceError> {
    let unit = fields.whole("block_size", u64::from(size.tokens()))? as u32;
    if !size.holds_pages_of(unit) {
        return Err(fields.wrong("block_size", Problem::Expected("a divisor of the replay's block size")));
    }
    let session = Session { unit, parents: Vec::new(), numbers: FxHashSet::default() };
    match sessions.insert(name.clone(), session) {
        Some(_) => Err(fields.wrong("s", Problem::Duplicate(name))),
        None => Ok(()),
    }
}

fn request(
    fields: &Fields<'_>,
    name: &str,
    session: &mut Session,
    size: BlockSize,
) -> Result<TimedRequest, TraceError> {
    let number = fields.whole("i", u64::from(u32::MAX))?;
    if !session.numbers.insert(number) {
        return Err(fields.wrong("i", Problem::Duplicate(format!("{name}/{number}"))));
    }
    let prompt = Tokens(fields.whole("in", MAX_TOKENS)?);
    let output = fields.whole("out", MAX_TOKENS)?.max(1);
    let runs: Vec<(u64, u64)> = fields.list("runs", MAX_RUNS, "a list of [start, length]")?;
    let expected = prompt.0 / u64::from(session.unit);
    let found = runs.iter().fold(0u64, |sum, (_, length)| sum.saturating_add(*length));
    if found != expected {
        return Err(fields.wrong("runs", Problem::Count { found, expected }));
    }
    let mut chain = Chain::new(xxh3_64(name.as_bytes()), (size.tokens() / session.unit) as usize);
    let mut parent = 1;
    for (start, length) in runs {
        let end = start.saturating_add(length);
        if end > MAX_ID {
            return Err(fields.wrong("runs", Problem::Limit { found: end, limit: MAX_ID }));
        }
        if session.parents.len() < end as usize {
            session.parents.resize(end as usize, 0);
        }
        for id in start..end {
            let seen = &mut session.parents[id as usize];
            if *seen == 0 {
                *seen = parent;
            } else if *seen != parent {
                return Err(fields.wrong("runs", unchained(id, parent, *seen)));
            }
            parent = id + 2;
            chain.push(id);
        }
    }
    Ok(TimedRequest {
        id: format!("{name}/{number:06}").into(),
        at: 0,
        pace: fields.time("t", 1_000_000_000)?,
        prompt,
        output,
        blocks: chain.finish(),
        dense: Box::default(),
    })
}

fn unchained(id: u64, found: u64, before: u64) -> Problem {
    let name = |parent: u64| match parent.checked_sub(2) {
        Some(id) => id.to_string(),
        None => "nothing".to_owned(),
    };
    Problem::Chain { block: id.to_string(), found: name(found), before: name(before) }
}
