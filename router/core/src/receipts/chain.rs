//! Receipts in a row: every line names the digest of the one before.
//!
//! A line is one JSON object in canonical form. Beside its content it has
//! `kind`, `sequence` (how many lines the chain had before it), `previous` (the
//! digest of the line before; zeros for the first of all) and `digest`: SHA-256
//! of the line's own canonical JSON without that field, so `previous` included.
//! A line that is changed, left out, added or moved breaks the chain where it
//! stands. A chain that is cut off at its end is still a chain: keep the last
//! digest elsewhere to notice.

use serde_json::{Value, json};

use super::read::{self, Content, Line};
use super::{Digest, Receipt, SCHEMA_VERSION};
use crate::json::canonical::quoted;
use crate::json::canonical_json;
use crate::json::fields::{Problem, TraceError};

/// Where a chain ends: what its next line follows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Head {
    /// Lines so far.
    pub sequence: u64,
    /// Digest of the last one.
    pub digest: Digest,
}

impl Head {
    /// The next line, without a line feed: a receipt.
    pub fn receipt(&mut self, receipt: &Receipt) -> String {
        self.link("receipt", receipt.to_value())
    }

    /// The next line: at `time_unix_ms` it was found that `lost` receipts were not
    /// written.
    pub fn gap(&mut self, time_unix_ms: u64, lost: u64) -> String {
        self.link(
            "gap",
            json!({"schema_version": SCHEMA_VERSION, "time_unix_ms": time_unix_ms, "lost": lost}),
        )
    }

    fn link(&mut self, kind: &str, value: Value) -> String {
        let Value::Object(fields) = value else { return String::new() };
        let mut fields: Vec<(String, String)> =
            fields.iter().map(|(key, value)| (key.clone(), canonical_json(value))).collect();
        fields.push(("kind".to_owned(), quoted(kind)));
        fields.push(("sequence".to_owned(), self.sequence.to_string()));
        fields.push(("previous".to_owned(), quoted(&self.digest.to_string())));
        // All keys are ASCII, where every order is the same.
        fields.sort_unstable();
        let digest = Digest::of(&object(&fields));
        let place = fields.partition_point(|(key, _)| key.as_str() < "digest");
        fields.insert(place, ("digest".to_owned(), quoted(&digest.to_string())));
        *self = Self { sequence: self.sequence + 1, digest };
        object(&fields)
    }
}

/// The object with these fields, whose values are JSON.
fn object(fields: &[(String, String)]) -> String {
    let mut out = String::with_capacity(fields.iter().map(|(_, value)| value.len() + 32).sum());
    for (key, value) in fields {
        out.push(if out.is_empty() { '{' } else { ',' });
        out += &quoted(key);
        out.push(':');
        out += value;
    }
    out.push('}');
    out
}

/// Follows a chain line by line, over one file or several.
#[derive(Clone, Debug, Default)]
pub struct Follower {
    /// Where the chain stands; `None` before the first line.
    pub head: Option<Head>,
    /// Receipts so far.
    pub receipts: u64,
    /// Receipts that gaps say were lost.
    pub lost: u64,
}

impl Follower {
    /// Reads the next line, which is line `number` of its file. The first line of
    /// all may continue a chain that is not here.
    pub fn line(&mut self, text: &str, number: usize) -> Result<Line, TraceError> {
        let line = read::line(text, number)?;
        let wrong = |field: &str, found: &dyn ToString, expected: &dyn ToString| TraceError {
            line: number,
            field: field.to_owned(),
            problem: Problem::Differs {
                found: found.to_string(),
                expected: expected.to_string(),
                why: "the line before leads to that",
            },
        };
        let begins = Head { sequence: line.sequence, digest: line.previous };
        let expected = match self.head {
            Some(head) => head,
            None if line.sequence == 0 => Head::default(),
            None => begins,
        };
        if line.sequence != expected.sequence {
            return Err(wrong("sequence", &line.sequence, &expected.sequence));
        }
        if line.previous != expected.digest {
            return Err(wrong("previous", &line.previous, &expected.digest));
        }
        self.head = Some(Head { sequence: line.sequence + 1, digest: line.digest });
        match &line.content {
            Content::Receipt(_) => self.receipts += 1,
            Content::Gap { lost, .. } => self.lost += lost,
        }
        Ok(line)
    }

    /// Reads a whole file. Nothing of it counts if a line of it is wrong.
    pub fn file(&mut self, text: &str) -> Result<Vec<Line>, TraceError> {
        let mut ahead = self.clone();
        let lines = text.lines().enumerate();
        let all = lines.map(|(place, text)| ahead.line(text, place + 1)).collect::<Result<_, _>>()?;
        *self = ahead;
        Ok(all)
    }
}
