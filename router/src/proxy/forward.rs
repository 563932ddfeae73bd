//! Handing a worker the token ids of its prompt, so that it need not tokenise.
//!
//! Only where `forwardTokenIds` is `WhenConfirmed`, the worker's tokens were
//! compared and are the router's, its release takes ids, and the ids stand for the
//! whole prompt. They are written down only then, and spliced into the client's bytes;
//! all other bytes stay. Otherwise the body goes out as it came.
//!
//! Authority: vllm/renderers/online_renderer.py (`kv_transfer_params` of a chat,
//! since 0.27) and sglang/srt/entrypoints/openai/serving_chat.py (`input_ids` of
//! a chat, since 0.5.13); both take ids as the `prompt` of a completion.

use std::fmt::Write as _;
use std::ops::Range;
use std::sync::Arc;

use kvrouter_crds::config::Engine;
use serde_json::Value;

use super::splice::{ByName, Edit, Members, range_in};
use crate::fleet::Worker;
use crate::prompt::Prompt;
use crate::prompt::endpoint::Endpoint;

/// Ids that a worker may get, and where they go in the body.
#[derive(Clone, Debug)]
pub struct Forwardable {
    /// Whose rendering made them.
    variant: Engine,
    /// One list for each prompt.
    lists: Vec<Vec<u32>>,
    /// Whether the body has a list of prompts.
    is_list: bool,
    place: Place,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Place {
    /// A member of its own, at this byte.
    Member(usize),
    /// Instead of the value in these bytes.
    Value(Range<usize>),
}

/// How a worker takes ids.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Way {
    /// Instead of the value in these bytes.
    Value(Range<usize>),
    /// As the member `input_ids`, at this byte.
    Member(usize),
    /// As `prompt_token_ids` of the member `kv_transfer_params`, at this byte.
    InParameters(usize),
}

/// Token ids for one worker, as JSON, and where its engine reads them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ids {
    /// Where.
    pub way: Way,
    /// One list, or one for each prompt.
    pub text: Arc<str>,
}

/// Why a worker gets no ids that could be forwarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotForwarded {
    /// Its tokens are not known to be the router's.
    Unconfirmed,
    /// Its release takes none, or is not known.
    Unsupported,
}

impl NotForwarded {
    /// Stable label for metrics.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Unconfirmed => "unconfirmed",
            Self::Unsupported => "unsupported",
        }
    }
}

impl Forwardable {
    /// The ids of `prompt`, which the body with these `members` became; `None` where
    /// they do not stand for all of it or the body has its own.
    pub fn of(endpoint: Endpoint, variant: Engine, members: &Members<'_>, prompt: &Prompt) -> Option<Self> {
        let whole = prompt.refused.is_none() && prompt.is_exact && prompt.images.is_empty();
        if !whole || prompt.parts.iter().any(|part| part.tokens.is_empty()) {
            return None;
        }
        let place = match endpoint {
            Endpoint::Chat if prompt.parts.len() == 1 => place_in_chat(members)?,
            Endpoint::Completions => place_in_completion(members)?,
            _ => return None,
        };
        let is_list = matches!(&place, Place::Value(range) if members.body.get(range.start) == Some(&b'['));
        let lists = prompt.parts.iter().map(|part| part.tokens.clone()).collect();
        Some(Self { variant, lists, is_list, place })
    }

    /// How `worker` takes the ids, or why it gets none.
    pub fn way(&self, worker: &Worker) -> Result<Way, NotForwarded> {
        if !worker.rendering.is_confirmed(self.variant, worker.times_ready()) {
            return Err(NotForwarded::Unconfirmed);
        }
        let status = worker.status();
        let version = status.engine_version.as_deref().and_then(version);
        match (&self.place, status.engine, version) {
            (Place::Value(at), Engine::VLLM | Engine::SGLang, _) => Ok(Way::Value(at.clone())),
            (Place::Member(at), Engine::VLLM, Some(version)) if version >= [0, 27, 0] => {
                Ok(Way::InParameters(*at))
            }
            (Place::Member(at), Engine::SGLang, Some(version)) if version >= [0, 5, 13] => {
                Ok(Way::Member(*at))
            }
            _ => Err(NotForwarded::Unsupported),
        }
    }

    /// The ids as JSON. CPU-bound: some 20 ns for each.
    pub fn text(&self) -> Arc<str> {
        let ids = self.lists.iter().map(Vec::len).sum::<usize>();
        let mut text = String::with_capacity(ids * 7 + 4);
        if self.is_list {
            text.push('[');
        }
        for (at, list) in self.lists.iter().enumerate() {
            text.push_str(if at == 0 { "" } else { "," });
            write_list(&mut text, list);
        }
        if self.is_list {
            text.push(']');
        }
        text.into()
    }
}

impl Ids {
    /// What they change in the body where nothing else belongs to their member.
    pub fn edit(&self) -> Edit {
        let text = &self.text;
        match &self.way {
            Way::Value(at) => Edit { at: at.clone(), text: text.as_ref().to_owned() },
            Way::Member(at) => Edit { at: *at..*at, text: format!("\"input_ids\":{text},") },
            Way::InParameters(at) => {
                let text = format!("\"kv_transfer_params\":{{\"prompt_token_ids\":{text}}},");
                Edit { at: *at..*at, text }
            }
        }
    }
}

fn is(by_name: &ByName<'_>, name: &str) -> bool {
    by_name.get(name).is_some_and(|value| value.get() == "true")
}

/// Right behind the opening brace. Not where the body has ids or parameters of its
/// own, or wants text back that ids would take away.
fn place_in_chat(members: &Members<'_>) -> Option<Place> {
    let by_name = members.by_name()?;
    let own = ["input_ids", "kv_transfer_params"];
    if own.iter().any(|name| by_name.contains_key(*name)) {
        return None;
    }
    if is(by_name, "echo") || is(by_name, "continue_final_message") {
        return None;
    }
    members.body.iter().position(|byte| *byte == b'{').map(|at| Place::Member(at + 1))
}

/// In place of `prompt`: a text, or a list of texts.
fn place_in_completion(members: &Members<'_>) -> Option<Place> {
    let by_name = members.by_name()?;
    if is(by_name, "echo") {
        return None;
    }
    let prompt = *by_name.get("prompt")?;
    let texts = match serde_json::from_str::<Value>(prompt.get()).ok()? {
        Value::String(_) => true,
        Value::Array(items) => !items.is_empty() && items.iter().all(Value::is_string),
        _ => false,
    };
    range_in(members.body, prompt).filter(|_| texts).map(Place::Value)
}

fn write_list(text: &mut String, ids: &[u32]) {
    text.push('[');
    for (at, id) in ids.iter().enumerate() {
        let _ = write!(text, "{}{id}", if at == 0 { "" } else { "," });
    }
    text.push(']');
}

/// The first three numbers of a version: `0.33.1.dev123+gdeadbeef` is 0.33.1.
pub fn version(text: &str) -> Option<[u32; 3]> {
    let number = |part: &str| {
        let digits = part.trim_start_matches('v');
        let end = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
        digits[..end].parse().ok()
    };
    let mut parts = text.split('.');
    let (major, minor) = (number(parts.next()?)?, number(parts.next()?)?);
    Some([major, minor, parts.next().and_then(number).unwrap_or(0)])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prompt::Part;
    use crate::proxy::splice::edited;
    use bytes::Bytes;

    fn prompt(parts: &[&[u32]]) -> Prompt {
        let part = |tokens: &&[u32]| Part { tokens: tokens.to_vec(), blocks: Vec::new() };
        Prompt { parts: parts.iter().map(part).collect(), is_exact: true, ..Prompt::default() }
    }

    #[test]
    fn ids_have_their_place_in_the_body() {
        let check = |why: &str, endpoint, body: &str, parts: &[&[u32]], expected: Option<&str>| {
            let found =
                Forwardable::of(endpoint, Engine::VLLM, &Members::of(body.as_bytes()), &prompt(parts));
            let text = found.map(|found| {
                let way = match found.place.clone() {
                    Place::Member(at) => Way::Member(at),
                    Place::Value(at) => Way::Value(at),
                };
                let ids = Ids { way, text: found.text() };
                let body = edited(&Bytes::copy_from_slice(body.as_bytes()), vec![ids.edit()]);
                String::from_utf8(body.to_vec()).expect("text")
            });
            assert_eq!(text.as_deref(), expected, "{why}");
        };
        use Endpoint::{Chat, Completions, Messages};
        let one: &[&[u32]] = &[&[1, 23]];
        check(
            "a chat",
            Chat,
            r#" { "messages": [] }"#,
            one,
            Some(r#" {"input_ids":[1,23], "messages": [] }"#),
        );
        check("with ids of its own", Chat, r#"{"messages":[],"input_ids":[1]}"#, one, None);
        check("with parameters", Chat, r#"{"messages":[],"kv_transfer_params":null}"#, one, None);
        check("its key escaped", Chat, r#"{"messages":[],"input\u005fids":[1]}"#, one, None);
        check("echo", Chat, r#"{"messages":[],"echo": true}"#, one, None);
        check(
            "no echo",
            Chat,
            r#"{"messages":[],"echo":false}"#,
            one,
            Some(r#"{"input_ids":[1,23],"messages":[],"echo":false}"#),
        );
        check("continued", Chat, r#"{"messages":[],"continue_final_message":true}"#, one, None);
        check("Anthropic's", Messages, r#"{"messages":[]}"#, one, None);
        check(
            "a text",
            Completions,
            r#"{"prompt": "a\"b", "n": 1}"#,
            one,
            Some(r#"{"prompt": [1,23], "n": 1}"#),
        );
        check(
            "texts",
            Completions,
            r#"{"prompt":["a","b"]}"#,
            &[&[1], &[2, 3]],
            Some(r#"{"prompt":[[1],[2,3]]}"#),
        );
        check("one text in a list", Completions, r#"{"prompt":["a"]}"#, &[&[1]], Some(r#"{"prompt":[[1]]}"#));
        check(
            "the later of two",
            Completions,
            r#"{"prompt":"a","prompt":"b"}"#,
            one,
            Some(r#"{"prompt":"a","prompt":[1,23]}"#),
        );
        check("ids already", Completions, r#"{"prompt":[1,2]}"#, one, None);
        check("echo of a text", Completions, r#"{"prompt":"a","echo":true}"#, one, None);
        check("an empty prompt", Completions, r#"{"prompt":""}"#, &[&[]], None);
    }

    #[test]
    fn ids_that_are_not_all_of_the_prompt_stay_here() {
        let body = br#"{"messages":[]}"#;
        let members = Members::of(body);
        let of = |prompt: &Prompt| Forwardable::of(Endpoint::Chat, Engine::VLLM, &members, prompt).is_some();
        let whole = prompt(&[&[1]]);
        assert!(of(&whole));
        assert!(!of(&Prompt { is_exact: false, ..whole.clone() }));
        assert!(!of(&Prompt { refused: Some(crate::prompt::Refusal::Media), ..whole }));
    }

    #[test]
    fn versions_are_compared_by_their_numbers() {
        for (text, numbers) in [
            ("0.33.1.dev123+gdeadbeef", Some([0, 33, 1])),
            ("0.5.23", Some([0, 5, 23])),
            ("0.5.13rc1", Some([0, 5, 13])),
            ("v1.2", Some([1, 2, 0])),
            ("main", None),
            ("", None),
        ] {
            assert_eq!(version(text), numbers, "{text}");
        }
        assert!(version("0.5.9") < version("0.5.13"), "not as text");
    }
}
