//! vLLM's NixlConnector: prefill first, then decode with what it returned.
//!
//! Prefill gets the request for one token and keeps the prompt's blocks; it answers
//! with `kv_transfer_params`, which go to decode as they are, with the client's own
//! limits. Decode pulls the blocks once, so one prompt and one answer go over.
//!
//! Authority: vllm/distributed/kv_transfer/kv_connector/v1/nixl and
//! vllm/entrypoints/openai (`kv_transfer_params` of requests and answers).

use bytes::Bytes;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::division::{Division, Indivisible};
use super::{Begun, Continued, Contract, Outgoing, Pair};
use crate::prompt::endpoint::Endpoint;
use crate::proxy::forward::{Ids, Way};
use crate::proxy::splice::Splice;

/// NixlConnector's contract.
#[derive(Debug)]
pub struct Nixl;

/// What prefill is asked to do.
const REMOTE_DECODE: &str = "\"do_remote_decode\":true,\"do_remote_prefill\":false,\"remote_engine_id\":null,\"remote_block_ids\":null,\"remote_host\":null,\"remote_port\":null";

/// What matters of prefill's answer.
#[derive(Deserialize)]
struct Answer<'a> {
    #[serde(borrow)]
    kv_transfer_params: Option<&'a RawValue>,
}

/// What matters of its parameters.
#[derive(Default, Deserialize)]
struct Parameters {
    remote_prefill_cached_tokens: Option<u64>,
}

impl Contract for Nixl {
    fn refuses(&self, division: &Division) -> Option<Indivisible> {
        match division {
            Division { endpoint: Endpoint::Chat | Endpoint::Completions, .. } => {}
            _ => return Some(Indivisible::Endpoint),
        }
        match division {
            Division { wants: Some(wants), .. } => Some(*wants),
            Division { choices: 2.., .. } => Some(Indivisible::Choices),
            Division { batch: Some(2..), .. } => Some(Indivisible::Batch),
            _ => None,
        }
    }

    fn begin(&self, request: &Outgoing<'_>, _: &Pair<'_>) -> Begun {
        let mut splice = request.splice();
        splice.set("max_tokens", "1");
        splice.set_if_given("max_completion_tokens", "1");
        splice.set_if_given("min_tokens", "1");
        splice.set("stream", "false");
        splice.set_if_given("stream_options", "null");
        set_parameters(&mut splice, request, REMOTE_DECODE, request.prefill_ids.as_ref());
        Begun::PrefillFirst { prefill: splice.apply(request.body), go_on }
    }
}

fn go_on(request: &Outgoing<'_>, prefill: &Bytes) -> Result<Continued, &'static str> {
    let answer: Answer<'_> = serde_json::from_slice(prefill).map_err(|_| "prefill_answer_unreadable")?;
    let given = answer.kv_transfer_params.map(RawValue::get).unwrap_or_default();
    let inner = given.strip_prefix('{').and_then(|rest| rest.strip_suffix('}'));
    let inner = inner.map(str::trim).filter(|inner| !inner.is_empty()).ok_or("no_kv_transfer_params")?;
    let told: Parameters = serde_json::from_str(given).unwrap_or_default();
    let mut splice = request.splice();
    set_parameters(&mut splice, request, inner, request.decode_ids.as_ref());
    Ok(Continued { decode: splice.apply(request.body), cached: told.remote_prefill_cached_tokens })
}

/// Sets `kv_transfer_params` to `members`, and to the ids that belong there: ours, or
/// those that the request has itself.
fn set_parameters(splice: &mut Splice<'_>, request: &Outgoing<'_>, members: &str, ids: Option<&Ids>) {
    let own = request.division.own_ids.clone().and_then(|at| request.body.get(at));
    let own = own.and_then(|ids| std::str::from_utf8(ids).ok());
    let parameters = match ids {
        Some(Ids { way: Way::InParameters(_), text }) => format!("{{{members},\"prompt_token_ids\":{text}}}"),
        Some(ids) => {
            super::hand(splice, ids);
            format!("{{{members}}}")
        }
        None => match own {
            // They are the prompt, whatever the messages say.
            Some(text) => format!("{{{members},\"prompt_token_ids\":{text}}}"),
            None => format!("{{{members}}}"),
        },
    };
    splice.set("kv_transfer_params", parameters);
}

#[cfg(test)]
mod tests {
    use super::super::tests::{division, outgoing, pair};
    use super::*;
    use Endpoint::{Chat, Completions, Generate};

    const FLAGS: &str = "\"kv_transfer_params\":{\"do_remote_decode\":true,\"do_remote_prefill\":false,\"remote_engine_id\":null,\"remote_block_ids\":null,\"remote_host\":null,\"remote_port\":null";

    fn ids(way: Way, text: &str) -> Ids {
        Ids { way, text: text.into() }
    }

    #[test]
    fn prefill_is_asked_for_one_token_and_its_blocks() {
        let check = |endpoint, body: &'static str, ids: Option<Ids>, expected: &str| {
            let division = division(endpoint, body).expect("divisible");
            let body = Bytes::from(body);
            let request = outgoing(&body, &division, [ids, None]);
            let Begun::PrefillFirst { prefill, .. } = Nixl.begin(&request, &pair("p:1", &|| 0)) else {
                panic!("prefill first")
            };
            assert_eq!(prefill, expected.replace("FLAGS", FLAGS));
        };
        check(
            Chat,
            r#"{"messages": [],"x":1e400}"#,
            None,
            r#"{"max_tokens":1,"stream":false,FLAGS},"messages": [],"x":1e400}"#,
        );
        check(
            Chat,
            r#"{"max_tokens": 9,"max_completion_tokens":8,"min_tokens":7,"stream":true,"stream_options":{"include_usage":true},"kv_transfer_params":{"remote_host":"evil"}}"#,
            None,
            r#"{"max_tokens": 1,"max_completion_tokens":1,"min_tokens":1,"stream":false,"stream_options":null,FLAGS}}"#,
        );
        check(
            Chat,
            r#"{"messages":[],"kv_transfer_params":{"remote_host":"evil","prompt_token_ids":[7, 8]}}"#,
            None,
            r#"{"max_tokens":1,"stream":false,"messages":[],FLAGS,"prompt_token_ids":[7, 8]}}"#,
        );
        check(
            Chat,
            r#"{"messages":[]}"#,
            Some(ids(Way::InParameters(1), "[1,2]")),
            r#"{"max_tokens":1,"stream":false,FLAGS,"prompt_token_ids":[1,2]},"messages":[]}"#,
        );
        check(
            Completions,
            r#"{"prompt":"ab","max_tokens":5}"#,
            Some(ids(Way::Value(10..14), "[1,2]")),
            r#"{"stream":false,FLAGS},"prompt":[1,2],"max_tokens":1}"#,
        );
    }

    #[test]
    fn decode_gets_what_prefill_returned_word_for_word() {
        let check = |answer: &'static str, ids: Option<Ids>, expected: Result<(&str, Option<u64>), &str>| {
            let text = r#"{"messages":[],"max_tokens":9,"stream":true}"#;
            let (body, division) = (Bytes::from(text), division(Chat, text).expect("divisible"));
            let request = outgoing(&body, &division, [None, ids]);
            let found = go_on(&request, &Bytes::from(answer));
            let found = found.map(|it| (String::from_utf8_lossy(&it.decode).into_owned(), it.cached));
            let expected = expected.map(|(parameters, cached)| {
                let rest = r#""messages":[],"max_tokens":9,"stream":true}"#;
                (format!("{{\"kv_transfer_params\":{parameters},{rest}"), cached)
            });
            assert_eq!(found, expected);
        };
        let whole = r#"{"id":"x","kv_transfer_params":{"remote_block_ids": [[1, 2]],"remote_host":"h","remote_prefill_cached_tokens":32},"choices":[]}"#;
        let verbatim =
            r#"{"remote_block_ids": [[1, 2]],"remote_host":"h","remote_prefill_cached_tokens":32}"#;
        check(whole, None, Ok((verbatim, Some(32))));
        let merged = r#"{"remote_block_ids": [[1, 2]],"remote_host":"h","remote_prefill_cached_tokens":32,"prompt_token_ids":[5]}"#;
        check(whole, Some(ids(Way::InParameters(1), "[5]")), Ok((merged, Some(32))));
        check(r#"{"kv_transfer_params":{"a":1}}"#, None, Ok((r#"{"a":1}"#, None)));
        check(r#"{"kv_transfer_params":null}"#, None, Err("no_kv_transfer_params"));
        check(r#"{"choices":[]}"#, None, Err("no_kv_transfer_params"));
        check(r#"{"kv_transfer_params":{}}"#, None, Err("no_kv_transfer_params"));
        check("data: x", None, Err("prefill_answer_unreadable"));
    }

    /// Case E07: blocks are pulled once, so there is one answer of one prompt.
    #[test]
    fn several_answers_or_prompts_are_refused() {
        for (endpoint, body, expected) in [
            (Chat, r#"{"n":4}"#, Some(Indivisible::Choices)),
            (Chat, "{}", None),
            (Completions, r#"{"prompt":["a","b"]}"#, Some(Indivisible::Batch)),
            (Completions, r#"{"prompt":["a"]}"#, None),
            (Generate, r#"{"text":"a"}"#, Some(Indivisible::Endpoint)),
        ] {
            assert_eq!(Nixl.refuses(&division(endpoint, body).expect("divisible")), expected, "{body}");
        }
    }
}
