//! Strict reading of JSON objects: every complaint names a line and a field.
//!
//! Traces are written by hand and by scripts, and receipts come from disks, so
//! the reader of an error wants to know the place. Values stay unparsed slices of the text until a field is
//! asked for; their place in the text gives the line.

use serde::Deserialize;
use serde_json::value::RawValue;

use super::canonical::{Entries, MAX_WHOLE, quoted};

/// Why a trace, or a file of receipts, cannot be used.
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
    /// A label that means nothing.
    #[error("is {0:?}, which is not one of its values")]
    Label(String),
    /// A version that this program does not read.
    #[error("is {found}, and this program reads {known}")]
    Version {
        /// The version found.
        found: u64,
        /// The version that is read.
        known: u64,
    },
    /// Equal values would have other bytes.
    #[error("is not canonical JSON (RFC 8785)")]
    NotCanonical,
    /// A value does not follow from others.
    #[error("is {found}, and {expected} was expected: {why}")]
    Differs {
        /// What stands there.
        found: String,
        /// What should stand there.
        expected: String,
        /// What it should follow from.
        why: &'static str,
    },
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
            Self::Label(_) => "label",
            Self::Version { .. } => "version",
            Self::NotCanonical => "not_canonical",
            Self::Differs { .. } => "differs",
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
    /// This object, a slice of the base.
    text: &'a str,
    /// Where it is, with a dot behind it unless it is the root.
    path: String,
    entries: Vec<(String, &'a RawValue)>,
}

impl<'a> Fields<'a> {
    /// The object that `base` is. `line` is the line of its first byte.
    pub fn root(base: &'a str, line: usize) -> Result<Self, TraceError> {
        Self::read(base, line, base, String::new())
    }

    fn read(base: &'a str, first_line: usize, text: &'a str, path: String) -> Result<Self, TraceError> {
        let mut fields = Self { base, first_line, text, path, entries: Vec::new() };
        match serde_json::from_str(text) {
            Ok(Entries(entries)) => fields.entries = entries,
            Err(error) => {
                let line = fields.line_of(text) + error.line().max(1) - 1;
                let field = if fields.path.is_empty() { "object".to_owned() } else { fields.path };
                let problem = match error.is_data() {
                    true => Problem::Expected("an object"),
                    false => Problem::Json(plain(&error)),
                };
                return Err(TraceError { line, field, problem });
            }
        }
        if !fields.path.is_empty() {
            fields.path.push('.');
        }
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
        let line = self.line_of(found.map_or(self.text, |(_, raw)| raw.get()));
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
            Self::read(self.base, self.first_line, item.get(), path)
        };
        items.iter().enumerate().map(read).collect()
    }

    /// The object that must stand there.
    pub fn object(&self, name: &str) -> Result<Fields<'a>, TraceError> {
        let text = self.required(name)?.get();
        Self::read(self.base, self.first_line, text, format!("{}{name}", self.path))
    }

    /// What `read` makes of the field, which must stand there; `None` for null.
    pub fn nullable<T>(
        &self,
        name: &str,
        read: impl FnOnce(&Self, &str) -> Result<T, TraceError>,
    ) -> Result<Option<T>, TraceError> {
        match self.entries.iter().find(|(known, _)| known == name) {
            None => Err(self.wrong(name, Problem::Missing)),
            Some((_, raw)) if raw.get() == "null" => Ok(None),
            Some(_) => read(self, name).map(Some),
        }
    }

    /// A whole number that every reader of JSON reads alike.
    pub fn count(&self, name: &str) -> Result<u64, TraceError> {
        self.whole(name, MAX_WHOLE)
    }

    /// A whole number, negative ones too.
    pub fn integer(&self, name: &str) -> Result<i64, TraceError> {
        let number = self.required(name)?.get().parse::<i64>();
        number.map_err(|_| self.wrong(name, Problem::Expected("a whole number")))
    }

    /// The object as it stands there, without the field `name`. Canonical where
    /// the object is.
    pub fn without(&self, name: &str) -> String {
        let mut text = String::with_capacity(self.text.len());
        for (key, value) in self.entries.iter().filter(|(key, _)| key != name) {
            text.push(if text.is_empty() { '{' } else { ',' });
            text += &quoted(key);
            text.push(':');
            text += value.get();
        }
        text.push('}');
        text
    }

    /// A finite number, rounded correctly.
    pub fn number(&self, name: &str) -> Result<f64, TraceError> {
        let number = self.required(name)?.get().parse::<f64>().ok();
        number
            .filter(|number| number.is_finite())
            .ok_or_else(|| self.wrong(name, Problem::Expected("a number")))
    }

    /// `true` or `false`.
    pub fn flag(&self, name: &str) -> Result<bool, TraceError> {
        match self.required(name)?.get() {
            "true" => Ok(true),
            "false" => Ok(false),
            _ => Err(self.wrong(name, Problem::Expected("true or false"))),
        }
    }

    /// One of the values that `of` knows by their names.
    pub fn choice<T>(&self, name: &str, of: impl FnOnce(&str) -> Option<T>) -> Result<T, TraceError> {
        let text = self.text(name)?;
        of(&text).ok_or_else(|| self.wrong(name, Problem::Label(text)))
    }

    /// A number of exactly `digits` lower-case hexadecimal digits, at most 32.
    pub fn hexadecimal(&self, name: &str, digits: usize) -> Result<u128, TraceError> {
        let text = self.text(name)?;
        let plain = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        let number = u128::from_str_radix(&text, 16).ok();
        number
            .filter(|_| text.len() == digits && text.bytes().all(plain))
            .ok_or_else(|| self.wrong(name, Problem::Expected("hexadecimal digits, as many as it has")))
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
