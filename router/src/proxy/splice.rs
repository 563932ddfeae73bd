//! Changes to a JSON body that leave all its other bytes as they came.
//!
//! An [`Edit`] is new text for some bytes; [`edited`] writes a body once with all of
//! them. A [`Layout`] says where members stand; [`Splice`] collects values for them. Of
//! two members with one name the later counts, as it does for engines, so that is the
//! one whose value changes.

use std::borrow::Cow;
use std::cell::OnceCell;
use std::collections::HashMap;
use std::ops::Range;

use bytes::Bytes;
use serde_json::value::RawValue;

/// New text for some bytes of a body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Edit {
    /// The bytes that go; empty to put something between two.
    pub at: Range<usize>,
    /// What stands there then.
    pub text: String,
}

/// `body` with all of `edits`, which do not overlap.
pub fn edited(body: &Bytes, mut edits: Vec<Edit>) -> Bytes {
    if edits.is_empty() {
        return body.clone();
    }
    edits.sort_by_key(|edit| (edit.at.start, edit.at.end));
    let more: usize = edits.iter().map(|edit| edit.text.len()).sum();
    let (mut out, mut from) = (Vec::with_capacity(body.len() + more), 0);
    for Edit { at, text } in edits {
        out.extend_from_slice(body.get(from..at.start).unwrap_or_default());
        out.extend_from_slice(text.as_bytes());
        from = at.end;
    }
    out.extend_from_slice(body.get(from..).unwrap_or_default());
    Bytes::from(out)
}

/// The members of an object by their names.
pub type ByName<'a> = HashMap<Cow<'a, str>, &'a RawValue>;

/// The members of a body, read when somebody first asks for them, and once.
#[derive(Debug)]
pub struct Members<'a> {
    /// The body.
    pub body: &'a [u8],
    read: OnceCell<Option<ByName<'a>>>,
}

impl<'a> Members<'a> {
    /// Those of `body`.
    pub const fn of(body: &'a [u8]) -> Self {
        Self { body, read: OnceCell::new() }
    }

    /// By their names, where they stand in the body; `None` for anything but an object.
    pub fn by_name(&self) -> Option<&ByName<'a>> {
        self.read.get_or_init(|| serde_json::from_slice(self.body).ok()).as_ref()
    }
}

/// Where `value` stands in `body`, which it was borrowed from.
pub fn range_in(body: &[u8], value: &RawValue) -> Option<Range<usize>> {
    let value = value.get();
    let start = (value.as_ptr() as usize).checked_sub(body.as_ptr() as usize)?;
    let range = start..start + value.len();
    (range.end <= body.len()).then_some(range)
}

/// Where an object begins and where some of its members' values stand.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Behind the opening brace.
    start: usize,
    /// Whether there are members, which new ones need a comma before.
    is_empty: bool,
    values: Vec<(&'static str, Range<usize>)>,
}

impl Layout {
    /// Of the object with these `members`, with the values of those `names` that it
    /// has; `None` where there is no object.
    pub fn of(members: &Members<'_>, names: &[&'static str]) -> Option<Self> {
        let (body, by_name) = (members.body, members.by_name()?);
        let start = body.iter().position(|byte| *byte == b'{')? + 1;
        let value = |name: &&'static str| Some((*name, range_in(body, by_name.get(*name)?)?));
        let values = names.iter().filter_map(value).collect();
        Some(Self { start, is_empty: by_name.is_empty(), values })
    }

    fn value(&self, name: &str) -> Option<&Range<usize>> {
        self.values.iter().find(|(own, _)| *own == name).map(|(_, range)| range)
    }
}

/// New values for a body.
#[derive(Debug)]
pub struct Splice<'a> {
    layout: &'a Layout,
    edits: Vec<Edit>,
    members: String,
}

impl<'a> Splice<'a> {
    /// No changes yet.
    pub const fn new(layout: &'a Layout) -> Self {
        Self { layout, edits: Vec::new(), members: String::new() }
    }

    /// Writes `value`, which is JSON, in these bytes.
    pub fn replace(&mut self, at: Range<usize>, value: impl Into<String>) {
        self.edits.push(Edit { at, text: value.into() });
    }

    /// Gives the member `name` the value `value`, which is JSON. A member whose place
    /// the layout does not know must not be there.
    pub fn set(&mut self, name: &str, value: impl Into<String>) {
        match self.layout.value(name) {
            Some(range) => self.replace(range.clone(), value),
            None => {
                let comma = if self.members.is_empty() { "" } else { "," };
                self.members.push_str(&format!("{comma}\"{name}\":{}", value.into()));
            }
        }
    }

    /// The same, where there is such a member.
    pub fn set_if_given(&mut self, name: &str, value: impl Into<String>) {
        if let Some(range) = self.layout.value(name) {
            self.replace(range.clone(), value);
        }
    }

    /// The body with all changes. They do not overlap.
    pub fn apply(mut self, body: &Bytes) -> Bytes {
        if !self.members.is_empty() {
            if !self.layout.is_empty {
                self.members.push(',');
            }
            let members = std::mem::take(&mut self.members);
            self.replace(self.layout.start..self.layout.start, members);
        }
        edited(body, self.edits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_set_changes() {
        let check = |why: &str, body: &str, sets: &[(&'static str, &'static str)], expected: &str| {
            let names: Vec<&'static str> = sets.iter().map(|(name, _)| *name).collect();
            let layout = Layout::of(&Members::of(body.as_bytes()), &names).expect("an object");
            let mut splice = Splice::new(&layout);
            sets.iter().for_each(|(name, value)| splice.set(name, *value));
            assert_eq!(splice.apply(&Bytes::copy_from_slice(body.as_bytes())), expected, "{why}");
        };
        check("nothing", r#" {"a": 1e400}"#, &[], r#" {"a": 1e400}"#);
        check("a new member", r#" { "a":1}"#, &[("b", "2")], r#" {"b":2, "a":1}"#);
        check("two", r#"{"a":1}"#, &[("b", "2"), ("c", "3")], r#"{"b":2,"c":3,"a":1}"#);
        check("into nothing", "{}", &[("b", "2")], r#"{"b":2}"#);
        check("a value", r#"{"a": [1, {"b":0}],"b" : 5 }"#, &[("b", "2")], r#"{"a": [1, {"b":0}],"b" : 2 }"#);
        check("the later of two", r#"{"b":1,"b":5}"#, &[("b", "2")], r#"{"b":1,"b":2}"#);
        check("its key escaped", r#"{"\u0062":5}"#, &[("b", "2")], r#"{"\u0062":2}"#);
        check(
            "both, in any order",
            r#"{"a":1,"b":2}"#,
            &[("b", "x"), ("a", "y"), ("c", "z")],
            r#"{"c":z,"a":y,"b":x}"#,
        );
    }

    #[test]
    fn edits_are_made_in_the_order_of_the_body() {
        let body = Bytes::from_static(b"0123456789");
        let edit = |at: Range<usize>, text: &str| Edit { at, text: text.to_owned() };
        let edits = vec![edit(8..10, "z"), edit(1..3, ""), edit(1..1, "ab"), edit(5..6, "five")];
        assert_eq!(edited(&body, edits), "0ab34five67z");
        assert_eq!(edited(&body, Vec::new()).as_ptr(), body.as_ptr(), "nothing to do, nothing copied");
    }
}
