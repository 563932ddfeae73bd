//! A tenant's salt in a body on its way to a worker.
//!
//! Only the object's own members count, by the name that engines read: a name may be
//! written with escapes, and of two with one name the later counts, so that a value
//! of ours stands in every place of its name.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::errors::ClientError;
use super::splice::{Edit, Splice, range_in};
use crate::prompt::endpoint::Endpoint;
use crate::tenancy::Tenant;

/// The field in which engines take a cache salt.
const CACHE_SALT: &str = "cache_salt";
/// The fields by which vLLM is told of blocks that other requests left somewhere.
const OF_BLOCKS: [&str; 2] = ["kv_transfer_params", "vllm_xargs"];

/// A tenant's salt and where it goes in the body.
#[derive(Clone, Debug)]
pub struct Salting {
    /// Where the body goes.
    pub endpoint: Endpoint,
    /// The salt.
    pub salt: Arc<str>,
    place: Place,
}

/// Where a salt goes.
#[derive(Clone, Debug)]
enum Place {
    /// Instead of these values.
    Values(Vec<Range<usize>>),
    /// As a member of its own, at this byte, with this behind it.
    Member(usize, &'static str),
}

impl Salting {
    /// The salt of `tenant` for `body`, a JSON object, instead of any that it has.
    pub fn of(tenant: Tenant, endpoint: Endpoint, body: &[u8]) -> Result<Self, ClientError> {
        let [of_blocks, of_more] = OF_BLOCKS;
        let found = members_named(body, [CACHE_SALT, of_blocks, of_more])
            .map_err(|error| ClientError::NotJson { error: error.to_string() })?;
        let [salts, blocks @ ..] = &found.values;
        for (field, values) in OF_BLOCKS.into_iter().zip(blocks) {
            if values.iter().any(|value| names_blocks(field, value)) {
                return Err(ClientError::NamesBlocks { field });
            }
        }
        let own = salts.last().map(|value| serde_json::from_str::<Option<String>>(value.get()));
        let own = own.transpose().map_err(|_| ClientError::SaltNotText)?.flatten();
        let salt = tenant.salt(own.as_deref().filter(|own| !own.is_empty()));
        let place = if salts.is_empty() {
            let at = body.iter().position(|byte| *byte == b'{').map_or(0, |at| at + 1);
            Place::Member(at, if found.count == 0 { "" } else { "," })
        } else {
            Place::Values(salts.iter().filter_map(|value| range_in(body, value)).collect())
        };
        Ok(Self { endpoint, salt, place })
    }

    /// What it changes in the body where nothing else does.
    pub fn edits(&self) -> Vec<Edit> {
        match &self.place {
            Place::Values(all) => all.iter().map(|at| Edit { at: at.clone(), text: self.json() }).collect(),
            Place::Member(at, behind) => {
                let text = format!("\"{CACHE_SALT}\":{}{behind}", self.json());
                vec![Edit { at: *at..*at, text }]
            }
        }
    }

    /// Puts it in among other changes.
    pub fn put(&self, splice: &mut Splice<'_>) {
        match &self.place {
            Place::Values(all) => all.iter().for_each(|at| splice.replace(at.clone(), self.json())),
            Place::Member(..) => splice.set(CACHE_SALT, self.json()),
        }
    }

    fn json(&self) -> String {
        format!("\"{}\"", self.salt)
    }
}

/// Whether the value of a field may name blocks. A salt is no bar to who can name them.
fn names_blocks(field: &str, value: &RawValue) -> bool {
    let members: Option<HashMap<Cow<'_, str>, &RawValue>> = serde_json::from_str(value.get()).ok();
    match members {
        None => value.get() != "null",
        Some(members) if field == "vllm_xargs" => members.contains_key("kv_transfer_params"),
        Some(members) => members.keys().any(|name| name != "prompt_token_ids"),
    }
}

/// Members of an object: how many, and the values of some names.
struct Found<'a, const NAMES: usize> {
    count: usize,
    values: [Vec<&'a RawValue>; NAMES],
}

fn members_named<'a, const NAMES: usize>(
    body: &'a [u8],
    names: [&str; NAMES],
) -> serde_json::Result<Found<'a, NAMES>> {
    struct Members<'n, const NAMES: usize>([&'n str; NAMES]);
    impl<'de, const NAMES: usize> Visitor<'de> for Members<'_, NAMES> {
        type Value = Found<'de, NAMES>;

        fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
            formatter.write_str("an object")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut found = Found { count: 0, values: [const { Vec::new() }; NAMES] };
            while let Some(which) = map.next_key_seed(Which(&self.0))? {
                let value: &RawValue = map.next_value()?;
                found.count += 1;
                if let Some(which) = which {
                    found.values[which].push(value);
                }
            }
            Ok(found)
        }
    }
    let mut deserializer = serde_json::Deserializer::from_slice(body);
    let found = Deserializer::deserialize_map(&mut deserializer, Members(names))?;
    deserializer.end().map(|()| found)
}

/// Which of these a name is. Names are read as bytes: one with half a character in
/// it is none of ours, and no mistake.
struct Which<'n>(&'n [&'n str]);

impl<'de> DeserializeSeed<'de> for Which<'_> {
    type Value = Option<usize>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_bytes(self)
    }
}

impl Visitor<'_> for Which<'_> {
    type Value = Option<usize>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a name")
    }

    fn visit_bytes<E: Error>(self, name: &[u8]) -> Result<Self::Value, E> {
        Ok(self.0.iter().position(|own| own.as_bytes() == name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proxy::splice::{Layout, Members, edited};
    use crate::tenancy::Tenancy;
    use bytes::Bytes;
    use http::{HeaderMap, HeaderName, HeaderValue, Method};
    use kvrouter_crds::config::WithoutHeader;
    use serde_json::Value;

    fn tenant() -> Tenant {
        let name = HeaderName::from_static("x-tenant");
        let tenancy = Tenancy::new(name.clone(), WithoutHeader::Refuse, b"secret");
        let headers: HeaderMap = [(name, HeaderValue::from_static("a"))].into_iter().collect();
        let tenant = tenancy.tenant(&Method::POST, "/v1/completions", &headers);
        tenant.expect("one tenant").expect("a tenant")
    }

    /// What becomes of `body`, with `SALT` for the salt of the tenant and `own`.
    #[track_caller]
    fn check(why: &str, body: &str, own: Option<&str>, expected: &str) {
        let salting = Salting::of(tenant(), Endpoint::Chat, body.as_bytes()).expect("an object");
        assert_eq!(salting.salt, tenant().salt(own), "{why}");
        let bytes = Bytes::copy_from_slice(body.as_bytes());
        let salted = edited(&bytes, salting.edits());
        let salted = std::str::from_utf8(&salted).expect("text");
        assert_eq!(salted.replace(&*salting.salt, "SALT"), expected, "{why}");
        // The oracle reads it as engines do.
        if let Ok(read) = serde_json::from_str::<Value>(salted) {
            assert_eq!(read["cache_salt"], *salting.salt, "{why}");
        }
    }

    #[test]
    fn a_salt_has_its_place_and_all_else_stays() {
        check("none", r#" { "a": 1.0 }"#, None, r#" {"cache_salt":"SALT", "a": 1.0 }"#);
        check("nothing at all", "{ }", None, r#"{"cache_salt":"SALT" }"#);
        check("its own", r#"{"cache_salt" : "b","a":1}"#, Some("b"), r#"{"cache_salt" : "SALT","a":1}"#);
        check("null", r#"{"a":1,"cache_salt":null}"#, None, r#"{"a":1,"cache_salt":"SALT"}"#);
        check("empty", r#"{"cache_salt":""}"#, None, r#"{"cache_salt":"SALT"}"#);
        check("escaped", r#"{"cache\u005fsalt":"b"}"#, Some("b"), r#"{"cache\u005fsalt":"SALT"}"#);
        check(
            "twice",
            r#"{"cache_salt":"b","a":[],"cache_salt":"c"}"#,
            Some("c"),
            r#"{"cache_salt":"SALT","a":[],"cache_salt":"SALT"}"#,
        );
        check(
            "deeper ones are others",
            r#"{"a":{"cache_salt":"b"},"p":"{\"cache_salt\":1"}"#,
            None,
            r#"{"cache_salt":"SALT","a":{"cache_salt":"b"},"p":"{\"cache_salt\":1"}"#,
        );
        check(
            "half a character",
            r#"{"\ud800":"\ud800"}"#,
            None,
            r#"{"cache_salt":"SALT","\ud800":"\ud800"}"#,
        );
        check("out of range", r#"{"a":1e999}"#, None, r#"{"cache_salt":"SALT","a":1e999}"#);
        let deep = format!(r#""a":{}{}}}"#, "[".repeat(9999), "]".repeat(9999));
        check("deep", &format!("{{{deep}"), None, &format!(r#"{{"cache_salt":"SALT",{deep}"#));
    }

    /// Whoever can name another tenant's blocks needs no salt to read them.
    #[test]
    fn blocks_of_other_requests_are_not_to_be_named() {
        for good in [
            r#"{"kv_transfer_params":null}"#,
            r#"{"kv_transfer_params":{"prompt_token_ids":[1]}}"#,
            r#"{"vllm_xargs":{"a":1}}"#,
            r#"{"metadata":{"kv_transfer_params":{"remote_host":"x"}}}"#,
        ] {
            assert!(Salting::of(tenant(), Endpoint::Chat, good.as_bytes()).is_ok(), "{good}");
        }
        for bad in [
            r#"{"kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":[[1]]}}"#,
            r#"{"kv_transfer_params":{"do_remote_decode":true},"kv_transfer_params":null}"#,
            r#"{"kv_transfer_params":{"remote_host":"x"}}"#,
            r#"{"kv_transfer_params":"x"}"#,
            r#"{"vllm_xargs":{"kv_transfer_params":{"remote_host":"x"}}}"#,
        ] {
            let error = Salting::of(tenant(), Endpoint::Chat, bad.as_bytes()).expect_err(bad);
            assert_eq!(error.code(), "not_kept_apart", "{bad}");
        }
    }

    #[test]
    fn a_salt_that_is_no_text_is_refused() {
        for bad in ["5", "[\"a\",\"b\"]", "{}", "true", "\"\\ud800\""] {
            let body = format!("{{\"cache_salt\":{bad}}}");
            let error = Salting::of(tenant(), Endpoint::Chat, body.as_bytes()).expect_err(bad);
            assert_eq!(error.code(), "invalid_cache_salt", "{bad}");
        }
        let twice = br#"{"cache_salt":5,"cache_salt":"b"}"#;
        assert!(Salting::of(tenant(), Endpoint::Chat, twice).is_ok(), "the later counts");
        for bad in ["", "[]", "{}}", "{\"a\":"] {
            let error = Salting::of(tenant(), Endpoint::Chat, bad.as_bytes()).expect_err(bad);
            assert_eq!(error.code(), "invalid_json", "{bad}");
        }
    }

    /// With members that others write, in an object that had none and in one that did.
    #[test]
    fn a_salt_goes_in_among_other_changes() {
        let both = |body: &str| {
            let salting = Salting::of(tenant(), Endpoint::Chat, body.as_bytes()).expect("an object");
            let layout = Layout::of(&Members::of(body.as_bytes()), &["a"]).expect("an object");
            let mut splice = Splice::new(&layout);
            salting.put(&mut splice);
            splice.set("a", "1");
            let written = splice.apply(&Bytes::copy_from_slice(body.as_bytes()));
            String::from_utf8(written.to_vec()).expect("text").replace(&*salting.salt, "SALT")
        };
        assert_eq!(both("{}"), r#"{"cache_salt":"SALT","a":1}"#);
        assert_eq!(both(r#"{"b":2}"#), r#"{"cache_salt":"SALT","a":1,"b":2}"#);
        assert_eq!(both(r#"{"a":0,"cache_salt":"x"}"#), r#"{"a":1,"cache_salt":"SALT"}"#);
        let twice = r#"{"cache_salt":"x","a":0,"cache_salt":"y"}"#;
        assert_eq!(both(twice), r#"{"cache_salt":"SALT","a":1,"cache_salt":"SALT"}"#);
    }
}
