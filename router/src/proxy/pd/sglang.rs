//! SGLang: both workers get the request at once, and meet in rooms.
//!
//! Authority: sglang/srt/managers/io_struct.py (`bootstrap_host`, `bootstrap_port`,
//! `bootstrap_room`, a list of each for a list of prompts) and
//! sglang/srt/managers/data_parallel_controller.py (`follow_bootstrap_room`: the
//! prefill rank is the room modulo the ranks). All samples of one prompt share its
//! room, which is a room twice, so `n` above 1 cannot be served.

use serde_json::Value;

use super::division::{Division, Indivisible};
use super::{Begun, Contract, Outgoing, Pair};
use crate::proxy::forward::Ids;
use crate::proxy::splice::Splice;

/// SGLang's contract.
#[derive(Debug)]
pub struct SGLang;

/// Rooms are numbers of 63 bits.
const ROOMS: u64 = 1 << 63;
/// Most prompts in a body: each needs a room, and the body grows with them.
const MAX_BATCH: usize = 4096;

impl Contract for SGLang {
    fn refuses(&self, division: &Division) -> Option<Indivisible> {
        match division {
            Division { choices: 2.., .. } => Some(Indivisible::Choices),
            Division { batch: Some(prompts), .. } if *prompts > MAX_BATCH => Some(Indivisible::Batch),
            _ => None,
        }
    }

    fn begin(&self, request: &Outgoing<'_>, pair: &Pair<'_>) -> Begun {
        let meeting = Meeting::new(request.division.batch, pair);
        let body = |ids: Option<&Ids>| {
            let mut splice = request.splice();
            meeting.write(&mut splice);
            if let Some(ids) = ids {
                super::hand(&mut splice, ids);
            }
            splice.apply(request.body)
        };
        Begun::Together {
            prefill: body(request.prefill_ids.as_ref()),
            decode: body(request.decode_ids.as_ref()),
        }
    }
}

/// Where the two meet, as JSON.
struct Meeting {
    host: String,
    port: String,
    room: String,
}

impl Meeting {
    fn new(batch: Option<usize>, pair: &Pair<'_>) -> Self {
        let (host, _) = pair.prefill.rsplit_once(':').unwrap_or((pair.prefill, ""));
        let host = Value::from(host).to_string();
        let room = || room((pair.unique)(), pair.rank.into(), pair.ranks.into()).to_string();
        let Some(prompts) = batch else {
            return Self { host, port: pair.bootstrap_port.to_string(), room: room() };
        };
        let list = |one: &dyn Fn() -> String| {
            let all: Vec<String> = (0..prompts).map(|_| one()).collect();
            format!("[{}]", all.join(","))
        };
        Self {
            host: list(&|| host.clone()),
            port: list(&|| pair.bootstrap_port.to_string()),
            room: list(&room),
        }
    }

    fn write(&self, splice: &mut Splice<'_>) {
        splice.set("bootstrap_host", self.host.clone());
        splice.set("bootstrap_port", self.port.clone());
        splice.set("bootstrap_room", self.room.clone());
        // The room leads to prefill's rank, and the header to either's own.
        for rank in ["routed_dp_rank", "disagg_prefill_dp_rank", "data_parallel_rank"] {
            splice.set_if_given(rank, "null");
        }
    }
}

/// A room for `rank` of `ranks`, made of a random number.
fn room(random: u64, rank: u64, ranks: u64) -> u64 {
    let ranks = ranks.max(1);
    let random = random % (ROOMS - ranks);
    random - random % ranks + rank % ranks
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::super::tests::{division, outgoing, pair};
    use super::*;
    use Endpoint::{Chat, Completions, Generate};

    use crate::prompt::endpoint::Endpoint;
    use crate::proxy::forward::Way;

    #[test]
    fn rooms_are_of_63_bits_and_lead_to_the_rank() {
        for random in [0, 1, 7, ROOMS - 1, ROOMS, u64::MAX] {
            for (rank, ranks) in [(0, 1), (0, 4), (3, 4), (319, 320)] {
                let room = room(random, rank, ranks);
                assert!(room < ROOMS, "{room}");
                assert_eq!(room % ranks, rank, "{random}");
            }
        }
        assert_ne!(room(8, 0, 4), room(16, 0, 4));
    }

    #[test]
    fn both_get_the_same_body_with_a_place_to_meet() {
        let check = |endpoint, body: &'static str, expected: &str| {
            let division = division(endpoint, body).expect("divisible");
            let body = Bytes::from(body);
            let request = outgoing(&body, &division, [None, None]);
            let counter = std::cell::Cell::new(100);
            let unique = || counter.replace(counter.get() + 100);
            let Begun::Together { prefill, decode } =
                SGLang.begin(&request, &pair("10.0.0.1:30000", &unique))
            else {
                panic!("both at once")
            };
            assert_eq!(prefill, decode);
            assert_eq!(prefill, expected);
        };
        check(
            Chat,
            r#"{"messages": [],"x":1e400}"#,
            r#"{"bootstrap_host":"10.0.0.1","bootstrap_port":8998,"bootstrap_room":101,"messages": [],"x":1e400}"#,
        );
        check(
            Completions,
            r#"{"prompt":["a","b"]}"#,
            r#"{"bootstrap_host":["10.0.0.1","10.0.0.1"],"bootstrap_port":[8998,8998],"bootstrap_room":[101,201],"prompt":["a","b"]}"#,
        );
        check(
            Generate,
            r#"{"text":"a","bootstrap_room":5,"bootstrap_host":"evil","bootstrap_port":1}"#,
            r#"{"text":"a","bootstrap_room":101,"bootstrap_host":"10.0.0.1","bootstrap_port":8998}"#,
        );
        check(
            Generate,
            r#"{"text":"a","disagg_prefill_dp_rank":3,"routed_dp_rank":2,"data_parallel_rank":1}"#,
            r#"{"bootstrap_host":"10.0.0.1","bootstrap_port":8998,"bootstrap_room":101,"text":"a","disagg_prefill_dp_rank":null,"routed_dp_rank":null,"data_parallel_rank":null}"#,
        );
    }

    #[test]
    fn each_gets_the_ids_that_it_may_have() {
        let body = Bytes::from_static(b"{\"messages\":[]}");
        let division = division(Chat, "{\"messages\":[]}").expect("divisible");
        let ids = || Some(Ids { way: Way::Member(1), text: "[1,2]".into() });
        for (prefill_ids, decode_ids) in [(ids(), None), (None, ids())] {
            let expected = [prefill_ids.is_some(), decode_ids.is_some()];
            let request = outgoing(&body, &division, [prefill_ids, decode_ids]);
            let Begun::Together { prefill, decode } = SGLang.begin(&request, &pair("p:1", &|| 0)) else {
                panic!("both at once")
            };
            let has_ids = |body: Bytes| String::from_utf8_lossy(&body).contains("\"input_ids\":[1,2]");
            assert_eq!([prefill, decode].map(has_ids), expected);
        }
    }

    /// Case E07: what needs a room per sample is refused, never left waiting.
    #[test]
    fn several_answers_of_one_prompt_are_refused() {
        for (endpoint, body, expected) in [
            (Chat, r#"{"n":4}"#, Some(Indivisible::Choices)),
            (Chat, r#"{"n":1}"#, None),
            (Generate, r#"{"text":"a","sampling_params":{"n":2}}"#, Some(Indivisible::Choices)),
            (Completions, r#"{"prompt":["a","b"],"n":2}"#, Some(Indivisible::Choices)),
            (Completions, r#"{"prompt":["a","b"]}"#, None),
        ] {
            assert_eq!(SGLang.refuses(&division(endpoint, body).expect("divisible")), expected, "{body}");
        }
        for (prompts, expected) in [(MAX_BATCH, None), (MAX_BATCH + 1, Some(Indivisible::Batch))] {
            let body = format!("{{\"prompt\":[[1]{}]}}", ",[1]".repeat(prompts - 1));
            let found = SGLang.refuses(&division(Completions, &body).expect("divisible"));
            assert_eq!(found, expected, "{prompts} prompts");
        }
    }
}
