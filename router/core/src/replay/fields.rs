//! Strict reading of JSON objects: every complaint names a line and a field.
//!
//! Traces are written by hand and by scripts, so the reader of an error is the
//! author of the trace. Values stay unparsed slices of the text until a field is
//! asked for; their place in the text gives the line.

use std::fmt;

use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

/// Why a trace cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {field}: {problem}")]
pub struct TraceError {
    /// Line of the file, from 1.
    pub line: usize,
    /// The field, as a path from the line's or the file's root.
    pub field: String,
    /// What is wrong with it.
    pub problem: Problem,
}

/// What is wrong with a field.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// The text ends early or is not JSON.
    #[error("is not JSON: {0}")]
    Json(String),
    /// The field is needed.
    #[error("is missing")]
    Missing,
    /// The field stands there twice.
    #[error("is given twice")]
    Repeated,
    /// No such field exists.
    #[error("is not a known field")]
    Unknown,
    /// The value is of another kind, or below its range.
    #[error("must be {0}")]
    Expected(&'static str),
    /// The value is above its limit.
    #[error("is {found}, and the limit is {limit}")]
    Limit {
        /// What was found.
        found: u64,
        /// The most that is accepted.
        limit: u64,
    },
    /// The number of hashes does not follow from the number of tokens.
    #[error("holds {found} blocks, and the prompt has {expected}")]
    Count {
        /// Blocks listed.
        found: u64,
        /// Blocks that the prompt's tokens make.
        expected: u64,
    },
    /// One hash stands behind two different ones.
    #[error("block {block} follows {found} here and {before} on an earlier line: the hashes do not chain")]
    Chain {
        /// The block.
        block: String,
        /// Its parent here.
        found: String,
        /// Its parent before.
        before: String,
    },
    /// A name that nothing in the trace has.
    #[error("names {0:?}, which the trace does not list")]
    UnknownName(String),
    /// A name that is taken.
    #[error("{0:?} is used twice")]
    Duplicate(String),
}

impl Problem {
    /// Stable label, for tests and logs.
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::Json(_) => "json",
            Self::Missing => "missing",
            Self::Repeated => "repeated",
            Self::Unknown => "unknown",
            Self::Expected(_) => "expected",
            Self::Limit { .. } => "limit",
            Self::Count { .. } => "count",
            Self::Chain { .. } => "chain",
            Self::UnknownName(_) => "unknown_name",
            Self::Duplicate(_) => "duplicate",
        }
    }
}

/// One object of a trace.
#[derive(Debug)]
pub struct Fields<'a> {
    /// The text that lines are counted in.
    base: &'a str,
    /// Line of the base's first byte.
    first_line: usize,
    /// Line of this object.
    line: usize,
    /// Where it is, with a dot behind it unless it is the root.
    path: String,
    entries: Vec<(String, &'a RawValue)>,
}

/// An object's entries in their order.
struct Entries<'a>(Vec<(String, &'a RawValue)>);

impl<'de> Deserialize<'de> for Entries<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Collect;
        impl<'de> Visitor<'de> for Collect {
            type Value = Entries<'de>;
            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Entries(entries))
            }
        }
        deserializer.deserialize_map(Collect)
    }
}

impl<'a> Fields<'a> {
    /// The object that `base` is. `line` is the line of its first byte.
    pub fn root(base: &'a str, line: usize) -> Result<Self, TraceError> {
        Self::read(base, line, base, line, String::new())
    }

    fn read(
        base: &'a str,
        first_line: usize,
        text: &'a str,
        line: usize,
        path: String,
    ) -> Result<Self, TraceError> {
        let named = || if path.is_empty() { "object".to_owned() } else { path.clone() };
        let Entries(entries) = serde_json::from_str(text).map_err(|error| TraceError {
            line: line + error.line().max(1) - 1,
            field: named(),
            problem: if error.is_data() {
                Problem::Expected("an object")
            } else {
                Problem::Json(plain(&error))
            },
        })?;
        let path = if path.is_empty() { path } else { format!("{path}.") };
        let fields = Self { base, first_line, line, path, entries };
        for (at, (name, _)) in fields.entries.iter().enumerate() {
            if fields.entries[..at].iter().any(|(earlier, _)| earlier == name) {
                return Err(fields.wrong(name, Problem::Repeated));
            }
        }
        Ok(fields)
    }

    /// Rejects every field that is not in `known`.
    pub fn only(&self, known: &[&str]) -> Result<(), TraceError> {
        match self.entries.iter().find(|(name, _)| !known.contains(&name.as_str())) {
            Some((name, _)) => Err(self.wrong(name, Problem::Unknown)),
            None => Ok(()),
        }
    }

    /// A complaint about `name`.
    pub fn wrong(&self, name: &str, problem: Problem) -> TraceError {
        let found = self.entries.iter().rev().find(|(known, _)| known == name);
        let line = found.map_or(self.line, |(_, raw)| self.line_of(raw.get()));
        TraceError { line, field: format!("{}{name}", self.path), problem }
    }

    /// Whether the field is there and not null.
    pub fn has(&self, name: &str) -> bool {
        self.optional(name).is_some()
    }

    /// A whole number of at least 0 and at most `limit`.
    pub fn whole(&self, name: &str, limit: u64) -> Result<u64, TraceError> {
        let raw = self.required(name)?;
        let found = raw
            .get()
            .parse::<u64>()
            .map_err(|_| self.wrong(name, Problem::Expected("a whole number, 0 or more")))?;
        if found > limit {
            return Err(self.wrong(name, Problem::Limit { found, limit }));
        }
        Ok(found)
    }

    /// A time in units of `unit` nanoseconds, 0 or more, fractions allowed.
    pub fn time(&self, name: &str, unit: u64) -> Result<u64, TraceError> {
        let wrong = || self.wrong(name, Problem::Expected("a time of 0 or more, below 100 years"));
        let text = self.required(name)?.get();
        if let Ok(whole) = text.parse::<u64>() {
            return whole.checked_mul(unit).filter(|time| *time <= MAX_TIME).ok_or_else(wrong);
        }
        let value = text.parse::<f64>().map_err(|_| wrong())?;
        let time = (value * unit as f64).round();
        if !(0.0..=MAX_TIME as f64).contains(&time) {
            return Err(wrong());
        }
        Ok(time as u64)
    }

    /// A string that is not empty.
    pub fn text(&self, name: &str) -> Result<String, TraceError> {
        let text: Option<String> = serde_json::from_str(self.required(name)?.get()).ok();
        text.filter(|text| !text.is_empty())
            .ok_or_else(|| self.wrong(name, Problem::Expected("a string that is not empty")))
    }

    /// A list of at most `limit` values of one kind, which `what` names.
    pub fn list<T: Deserialize<'a>>(
        &self,
        name: &str,
        limit: usize,
        what: &'static str,
    ) -> Result<Vec<T>, TraceError> {
        let list: Vec<T> = serde_json::from_str(self.required(name)?.get())
            .map_err(|_| self.wrong(name, Problem::Expected(what)))?;
        if list.len() > limit {
            let (found, limit) = (list.len() as u64, limit as u64);
            return Err(self.wrong(name, Problem::Limit { found, limit }));
        }
        Ok(list)
    }

    /// The objects in a list of at most `limit`.
    pub fn objects(&self, name: &str, limit: usize) -> Result<Vec<Fields<'a>>, TraceError> {
        let items: Vec<&'a RawValue> = self.list(name, limit, "a list of objects")?;
        let read = |(at, item): (usize, &&'a RawValue)| {
            let path = format!("{}{name}[{at}]", self.path);
            Self::read(self.base, self.first_line, item.get(), self.line_of(item.get()), path)
        };
        items.iter().enumerate().map(read).collect()
    }

    fn optional(&self, name: &str) -> Option<&'a RawValue> {
        let found = self.entries.iter().find(|(known, _)| known == name).map(|(_, raw)| *raw);
        found.filter(|raw| raw.get() != "null")
    }

    fn required(&self, name: &str) -> Result<&'a RawValue, TraceError> {
        self.optional(name).ok_or_else(|| self.wrong(name, Problem::Missing))
    }

    /// Line of `part`, which is a slice of the base.
    fn line_of(&self, part: &str) -> usize {
        let offset = (part.as_ptr() as usize).saturating_sub(self.base.as_ptr() as usize);
        let before = self.base.as_bytes().get(..offset).unwrap_or_default();
        self.first_line + before.iter().filter(|byte| **byte == b'\n').count()
    }
}

/// The parser's words without its own idea of the place.
fn plain(error: &serde_json::Error) -> String {
    let text = error.to_string();
    text.split(" at line ").next().unwrap_or_default().to_owned()
}

/// 100 years in nanoseconds: more is a unit mistaken.
const MAX_TIME: u64 = 100 * 366 * 86_400 * 1_000_000_000;
