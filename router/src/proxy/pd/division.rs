//! What must be known of a body before two of it are written.
//!
//! Worked out once, on the thread that prepares the prompt; written without
//! reading the body again.

use std::ops::Range;

use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::prompt::endpoint::{Endpoint, MAX_SEQUENCES};
use crate::proxy::splice::{ByName, Layout, Members, range_in};

/// Members that protocols write.
const WRITTEN: [&str; 13] = [
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "data_parallel_rank",
    "disagg_prefill_dp_rank",
    "input_ids",
    "kv_transfer_params",
    "max_completion_tokens",
    "max_tokens",
    "min_tokens",
    "routed_dp_rank",
    "stream",
    "stream_options",
];

/// A body that can be divided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Division {
    /// Where it was sent.
    pub endpoint: Endpoint,
    /// Where its members stand.
    pub layout: Layout,
    /// Answers that it wants of each prompt; at least one.
    pub choices: u64,
    /// How many prompts a list of them has; `None` for one that stands by itself.
    pub batch: Option<usize>,
    /// Why what is handed over would not be enough to answer it.
    pub wants: Option<Indivisible>,
    /// Where the ids are that it has itself, in the member for what is handed over.
    pub own_ids: Option<Range<usize>>,
}

/// Why a request cannot be divided between two workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Indivisible {
    /// The protocol has no such endpoint.
    Endpoint,
    /// The body is no JSON object that can be read.
    Unreadable,
    /// More than one answer of one prompt: what is handed over can be fetched once.
    Choices,
    /// Several prompts in one body: one of them is handed over.
    Batch,
    /// What the engine says of the prompt itself is not handed over.
    OfPrompt,
    /// Several answers are followed at once, and none of them handed over.
    BeamSearch,
}

impl Indivisible {
    /// What to do about it, for clients.
    pub const fn advice(self) -> &'static str {
        match self {
            Self::Endpoint => {
                "its endpoint cannot be divided between them; use /v1/chat/completions or /v1/completions"
            }
            Self::Unreadable => "its body cannot be read; send a JSON object with numbers and texts in range",
            Self::Choices => "it wants more than one answer of a prompt; send it once for each with `n` 1",
            Self::Batch => "it has several prompts; send each by itself",
            Self::OfPrompt => {
                "it wants its prompt back or log probabilities of it; leave out `echo` and `prompt_logprobs`"
            }
            Self::BeamSearch => "it wants a beam search; leave out `use_beam_search`",
        }
    }
}

impl Division {
    /// Of the body with these `members`, which was sent to `endpoint`.
    pub fn of(endpoint: Endpoint, members: &Members<'_>) -> Result<Self, Indivisible> {
        match endpoint {
            Endpoint::Chat | Endpoint::Completions | Endpoint::Generate => {}
            Endpoint::Messages | Endpoint::Responses | Endpoint::Embeddings | Endpoint::Other => {
                return Err(Indivisible::Endpoint);
            }
        }
        let layout = Layout::of(members, &WRITTEN).ok_or(Indivisible::Unreadable)?;
        let by_name = members.by_name().ok_or(Indivisible::Unreadable)?;
        let batch = prompts(endpoint, by_name).find_map(count);
        let (choices, wants) = (choices(by_name), wants(by_name));
        Ok(Self { endpoint, layout, choices, batch, wants, own_ids: own_ids(members.body, by_name) })
    }
}

/// How many sequences a body with these `members` is to an engine, whether or not its
/// values can be read: all answers of all its prompts; at least one.
pub fn sequences(endpoint: Endpoint, members: &Members<'_>) -> u64 {
    let Some(by_name) = members.by_name() else { return 1 };
    let prompts = prompts(endpoint, by_name).filter_map(count).max().unwrap_or(1);
    let best_of = by_name.get("best_of").and_then(|value| value.get().parse().ok());
    let answers = choices(by_name).max(best_of.unwrap_or(1));
    (prompts as u64).saturating_mul(answers).clamp(1, MAX_SEQUENCES)
}

/// The values that may be lists of prompts.
fn prompts<'a>(endpoint: Endpoint, members: &'a ByName<'_>) -> impl Iterator<Item = &'a RawValue> {
    let names: &[&str] = match endpoint {
        Endpoint::Completions => &["prompt"],
        Endpoint::Generate => &["text", "input_ids"],
        _ => &[],
    };
    names.iter().filter_map(|name| members.get(*name).copied())
}

/// How many prompts a list has; `None` for a text or the ids of one prompt.
fn count(value: &RawValue) -> Option<usize> {
    let items: Vec<&RawValue> = serde_json::from_str(value.get()).ok()?;
    let first = items.first()?.get();
    (first.starts_with('"') || first.starts_with('[')).then_some(items.len())
}

/// What it wants that decode cannot tell of a prompt that it did not compute.
fn wants(members: &ByName<'_>) -> Option<Indivisible> {
    let is = |name: &str| members.get(name).is_some_and(|value| !matches!(value.get(), "null" | "false"));
    if is("use_beam_search") {
        return Some(Indivisible::BeamSearch);
    }
    (is("echo") || is("prompt_logprobs")).then_some(Indivisible::OfPrompt)
}

/// vLLM reads the ids of a chat in `kv_transfer_params`, in place of its messages.
fn own_ids(body: &[u8], members: &ByName<'_>) -> Option<Range<usize>> {
    #[derive(Deserialize)]
    struct Parameters<'a> {
        #[serde(borrow)]
        prompt_token_ids: Option<&'a RawValue>,
    }
    let parameters: Parameters<'_> = serde_json::from_str(members.get("kv_transfer_params")?.get()).ok()?;
    range_in(body, parameters.prompt_token_ids?)
}

/// The largest `n` that the body asks for. What is no count is the engine's to
/// refuse.
fn choices(members: &ByName<'_>) -> u64 {
    let read = |name: &str| serde_json::from_str::<Value>(members.get(name)?.get()).ok();
    let sampling = read("sampling_params").unwrap_or_default();
    let own = std::slice::from_ref(&sampling);
    let each = sampling.as_array().map_or(own, Vec::as_slice).iter().map(|one| one.get("n").cloned());
    let all = each.chain([read("n")]).filter_map(|n| n?.as_u64());
    all.max().unwrap_or(1).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequences_are_counted_in_bodies_that_cannot_be_read() {
        for (endpoint, body, expected) in [
            (Endpoint::Chat, r#"{"messages":[1,2],"n":4,"top_p":1e400}"#, 4),
            (Endpoint::Completions, r#"{"prompt":["\ud800","b"],"n":2,"best_of":3}"#, 6),
            (Endpoint::Completions, r#"{"prompt":[1,2,3]}"#, 1),
            (Endpoint::Generate, r#"{"input_ids":[[1],[2]],"sampling_params":{"n":3}}"#, 6),
            (Endpoint::Chat, "[]", 1),
        ] {
            assert_eq!(sequences(endpoint, &Members::of(body.as_bytes())), expected, "{body}");
        }
    }

    #[test]
    fn prompts_and_choices_are_counted() {
        use Endpoint::{Chat, Completions, Generate, Messages, Other, Responses};
        let check = |endpoint, body: &str, expected: Result<(Option<usize>, u64), Indivisible>| {
            let found = Division::of(endpoint, &Members::of(body.as_bytes()));
            assert_eq!(found.map(|it| (it.batch, it.choices)), expected, "{body}");
        };
        check(Chat, r#"{"messages":[]}"#, Ok((None, 1)));
        check(Chat, r#"{"n":4,"temperature":1e400}"#, Ok((None, 4)));
        check(Chat, r#"{"n":"4"}"#, Ok((None, 1)));
        check(Chat, r#"{"n":0}"#, Ok((None, 1)));
        check(Completions, r#"{"prompt":"a"}"#, Ok((None, 1)));
        check(Completions, r#"{"prompt":[1,2,3]}"#, Ok((None, 1)));
        check(Completions, r#"{"prompt":["a","\ud800"]}"#, Ok((Some(2), 1)));
        check(Completions, r#"{"prompt":[[1],[2],[3]],"n":2}"#, Ok((Some(3), 2)));
        check(Generate, r#"{"text":["a"],"sampling_params":{"n":3}}"#, Ok((Some(1), 3)));
        check(Generate, r#"{"input_ids":[[1],[2]],"sampling_params":[{"n":1},{"n":2}]}"#, Ok((Some(2), 2)));
        check(Generate, "[1]", Err(Indivisible::Unreadable));
        check(Messages, "{}", Err(Indivisible::Endpoint));
        check(Responses, "{}", Err(Indivisible::Endpoint));
        check(Other, "{}", Err(Indivisible::Endpoint));
    }

    #[test]
    fn what_cannot_be_handed_over_is_seen() {
        let wants = |body: &str| {
            Division::of(Endpoint::Chat, &Members::of(body.as_bytes())).expect("an object").wants
        };
        assert_eq!(wants(r#"{"echo":false,"prompt_logprobs":null}"#), None);
        assert_eq!(wants(r#"{"echo":true}"#), Some(Indivisible::OfPrompt));
        assert_eq!(wants(r#"{"prompt_logprobs":0}"#), Some(Indivisible::OfPrompt));
        assert_eq!(wants(r#"{"use_beam_search":true}"#), Some(Indivisible::BeamSearch));
    }

    #[test]
    fn ids_of_the_clients_own_are_found() {
        let own = |body: &str| {
            let found =
                Division::of(Endpoint::Chat, &Members::of(body.as_bytes())).expect("an object").own_ids;
            found.map(|at| body[at].to_owned())
        };
        let ids = r#"{"kv_transfer_params":{"remote_host":"x","prompt_token_ids":[1, 2]}}"#;
        assert_eq!(own(ids).as_deref(), Some("[1, 2]"));
        assert_eq!(own(r#"{"kv_transfer_params":{"prompt_token_ids":null}}"#), None);
        assert_eq!(own(r#"{"kv_transfer_params":5}"#), None);
    }
}
