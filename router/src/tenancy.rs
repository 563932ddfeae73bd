//! Whose prompts are kept apart: a tenant's header to a cache salt of its own.
//!
//! The salt is HMAC-SHA256 under the secret of the settings, over the tenant's name
//! and the salt that its request has itself. It goes into the body as `cache_salt`,
//! so that the engine keeps apart what the router does, and it is the salt of the
//! namespace in which the router looks up and books. Who does not know the secret
//! makes no other tenant's salt, whatever the body says. Names and salts are in no
//! log, metric or receipt.
//!
//! What would be cached without a salt is refused: every path is, unless it is known
//! to take one or to compute no prompt. Authority: `cache_salt` in the request types
//! of vllm/entrypoints (0.32) and sglang/srt (0.5.23); vLLM has it for chats since
//! 0.9.0, for completions and responses since 0.10.0, for all models since 0.10.2.

use std::sync::Arc;

use http::{HeaderMap, HeaderName, Method};
use kvrouter_crds::config::{Engine, WithoutHeader};
use ring::hmac;

use crate::prompt::endpoint::{Endpoint, computes_no_prompt};
use crate::proxy::errors::ClientError;
use crate::proxy::forward::version;

/// Longest name of a tenant.
const MAX_TENANT: usize = 1024;
/// Shortest secret: one that can be tried out keys nothing.
pub const MIN_SECRET: usize = 16;
/// What these digests are for.
const PURPOSE: &[u8] = b"kvrouter tenant salt 1";
/// How tenants are told from each other.
#[derive(Clone, Debug)]
pub struct Tenancy {
    header: HeaderName,
    without_header: WithoutHeader,
    key: hmac::Key,
}

/// Who sent a request; not by name.
#[derive(Clone)]
pub struct Tenant(hmac::Context);

impl std::fmt::Debug for Tenant {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Tenant")
    }
}

impl Tenancy {
    /// Tenants named by `header`, with salts under `secret`.
    pub fn new(header: HeaderName, without_header: WithoutHeader, secret: &[u8]) -> Self {
        Self { header, without_header, key: hmac::Key::new(hmac::HMAC_SHA256, secret) }
    }

    /// Who sent a request; `None` if it computes no prompt, or names nobody and need
    /// not.
    pub fn tenant(
        &self,
        method: &Method,
        path: &str,
        headers: &HeaderMap,
    ) -> Result<Option<Tenant>, ClientError> {
        if computes_no_prompt(method, path) {
            return Ok(None);
        }
        let mut given = headers.get_all(&self.header).iter();
        let name = match (given.next().map(|value| value.as_bytes()), given.next()) {
            (None, _) if self.without_header == WithoutHeader::Share => return Ok(None),
            (Some(name), None) if (1..=MAX_TENANT).contains(&name.len()) => Some(name),
            (Some(_), _) => return Err(ClientError::BadTenant { header: self.header.clone() }),
            (None, _) => None,
        };
        // Before the name is asked for: no name would help.
        let endpoint = Endpoint::of(path);
        if *method != Method::POST || !(endpoint.has_a_prompt()) {
            return Err(ClientError::NotApart { path: path.to_owned() });
        }
        let name = name.ok_or_else(|| ClientError::NoTenant { header: self.header.clone() })?;
        Ok(Some(self.named(name)))
    }

    fn named(&self, name: &[u8]) -> Tenant {
        let mut context = hmac::Context::with_key(&self.key);
        for field in [PURPOSE, name] {
            frame(&mut context, field);
        }
        Tenant(context)
    }
}

impl Tenant {
    /// A number that no other tenant has, as good as surely, and never 0. Who does not
    /// know the secret cannot find one with another's.
    pub fn digest(&self) -> u64 {
        let signed = self.0.clone().sign();
        let first = signed.as_ref().first_chunk().copied().unwrap_or_default();
        u64::from_le_bytes(first).max(1)
    }

    /// Its salt for a request that has the salt `own` itself: 64 hexadecimal digits,
    /// which vLLM and SGLang take.
    pub fn salt(self, own: Option<&str>) -> Arc<str> {
        let mut context = self.0;
        if let Some(own) = own {
            frame(&mut context, own.as_bytes());
        }
        let digits = context.sign().as_ref().iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        digits.into()
    }
}

/// No two lists of fields are the same bytes.
fn frame(context: &mut hmac::Context, field: &[u8]) {
    context.update(&(field.len() as u64).to_le_bytes());
    context.update(field);
}

/// Whether such an engine keeps prompts to `endpoint` apart by their salts.
pub fn heeds_salt(endpoint: Endpoint, engine: Engine, release: Option<&str>) -> bool {
    let release = release.and_then(version);
    match (endpoint, engine) {
        (Endpoint::Chat | Endpoint::Completions | Endpoint::Responses, Engine::VLLM) => {
            release.is_none_or(|release| release >= [0, 10, 2])
        }
        (Endpoint::Messages, Engine::VLLM) => release.is_some_and(|release| release >= [0, 32, 0]),
        (
            Endpoint::Chat | Endpoint::Completions | Endpoint::Responses | Endpoint::Generate,
            Engine::SGLang,
        ) => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;

    fn tenancy(without_header: WithoutHeader) -> Tenancy {
        Tenancy::new(HeaderName::from_static("x-tenant"), without_header, b"a secret of some length")
    }

    fn headers(values: &[&[u8]]) -> HeaderMap {
        let name = || HeaderName::from_static("x-tenant");
        values.iter().map(|value| (name(), HeaderValue::from_bytes(value).expect("a value"))).collect()
    }

    #[test]
    fn a_salt_is_the_tenants_and_the_bodys() {
        let salt = |secret: &[u8], name: &[u8], own| {
            let tenancy = Tenancy::new(HeaderName::from_static("x"), WithoutHeader::Refuse, secret);
            tenancy.named(name).salt(own)
        };
        let first = salt(b"secret", b"a", None);
        assert_eq!(first, salt(b"secret", b"a", None), "the same again");
        // Made with Python's hmac and struct.
        assert_eq!(&*first, "833f2002b9e723230c470061551d623fd95111b3626eb78587af8a5ccfbced05");
        let all = [
            first,
            salt(b"secret", b"b", None),
            salt(b"other", b"a", None),
            salt(b"secret", b"a", Some("")),
            salt(b"secret", b"a", Some("b")),
            salt(b"secret", b"ab", None),
            salt(b"secret", b"", Some("ab")),
        ];
        let different: std::collections::HashSet<_> = all.iter().collect();
        assert_eq!(different.len(), all.len());
        let digest = |name: &[u8]| tenancy(WithoutHeader::Refuse).named(name).digest();
        assert!(digest(b"a") == digest(b"a") && digest(b"a") != digest(b"b"));
        assert!(all.iter().all(|salt| salt.len() == 64 && salt.bytes().all(|byte| byte.is_ascii_hexdigit())));
        assert_eq!(format!("{:?}", tenancy(WithoutHeader::Refuse).named(b"a")), "Tenant", "not by name");
    }

    #[test]
    fn a_request_has_one_tenant_or_is_refused() {
        use WithoutHeader::{Refuse, Share};
        let long = [b'x'; MAX_TENANT + 1];
        let (post, get, put, delete) = (Method::POST, Method::GET, Method::PUT, Method::DELETE);
        let chat = "/v1/chat/completions";
        //    why                  without  method path  header values   who, or the error
        type Case<'a> = (&'a str, WithoutHeader, &'a Method, &'a str, &'a [&'a [u8]], Result<bool, &'a str>);
        let cases: [Case<'_>; 24] = [
            ("one", Refuse, &post, chat, &[b"a"], Ok(true)),
            ("any bytes", Refuse, &post, chat, &[b"\xff b"], Ok(true)),
            ("the longest", Refuse, &post, chat, &[&long[1..]], Ok(true)),
            ("none", Refuse, &post, chat, &[], Err("tenant_missing")),
            ("none, and need not", Share, &post, chat, &[], Ok(false)),
            ("one all the same", Share, &post, chat, &[b"a"], Ok(true)),
            ("two", Refuse, &post, chat, &[b"a", b"a"], Err("invalid_tenant")),
            ("two, and need not", Share, &post, chat, &[b"a", b"b"], Err("invalid_tenant")),
            ("empty", Share, &post, chat, &[b""], Err("invalid_tenant")),
            ("too long", Refuse, &post, chat, &[&long], Err("invalid_tenant")),
            ("no prompt", Refuse, &post, "/tokenize", &[], Ok(false)),
            ("no prompt", Refuse, &post, "/v1/responses/resp_1/cancel", &[], Ok(false)),
            ("read only", Refuse, &get, "/v1/responses/resp_1", &[], Ok(false)),
            ("no salt", Refuse, &post, "/v1/embeddings", &[b"a"], Err("not_kept_apart")),
            ("no name would help", Refuse, &post, "/v1/embeddings", &[], Err("not_kept_apart")),
            ("of nobody", Share, &post, "/v1/embeddings", &[], Ok(false)),
            ("unknown", Refuse, &post, "/v1/chat/completions/", &[b"a"], Err("not_kept_apart")),
            ("spelt otherwise", Refuse, &post, "/v1/chat/completion%73", &[b"a"], Err("not_kept_apart")),
            ("no prompt", Refuse, &post, "/v1/messages/count_tokens", &[], Ok(false)),
            ("of no response", Refuse, &post, "/v1/files/f_1/cancel", &[b"a"], Err("not_kept_apart")),
            ("another method", Refuse, &delete, "/v1/responses/resp_1", &[b"a"], Err("not_kept_apart")),
            ("another method", Refuse, &put, "/generate", &[b"a"], Err("not_kept_apart")),
            ("SGLang's", Refuse, &post, "/generate", &[b"a"], Ok(true)),
            ("Anthropic's", Refuse, &post, "/v1/messages", &[b"a"], Ok(true)),
        ];
        for (why, without_header, method, path, values, expected) in cases {
            let found = tenancy(without_header).tenant(method, path, &headers(values));
            let found = found.map(|tenant| tenant.is_some()).map_err(|error| error.code());
            assert_eq!(found, expected, "{why}: {method} {path}");
        }
    }

    #[test]
    fn only_endpoints_that_are_known_to_take_a_salt_get_one() {
        use Endpoint::{Chat, Completions, Embeddings, Generate, Messages, Other, Responses};
        for (endpoint, engine, release, expected) in [
            (Chat, Engine::VLLM, Some("0.32.0"), true),
            (Completions, Engine::VLLM, Some("0.10.2"), true),
            (Responses, Engine::VLLM, None, true),
            (Completions, Engine::VLLM, Some("0.10.1"), false),
            (Messages, Engine::VLLM, Some("0.32.1.dev3"), true),
            (Messages, Engine::VLLM, Some("0.31.0"), false),
            (Messages, Engine::VLLM, None, false),
            (Generate, Engine::VLLM, Some("0.32.0"), false),
            (Chat, Engine::SGLang, None, true),
            (Responses, Engine::SGLang, Some("0.5.23"), true),
            (Generate, Engine::SGLang, Some("0.5.23"), true),
            (Messages, Engine::SGLang, Some("0.5.23"), false),
            (Chat, Engine::ATOM, None, false),
            (Chat, Engine::Auto, None, false),
            (Embeddings, Engine::VLLM, Some("0.32.0"), false),
            (Other, Engine::SGLang, Some("0.5.23"), false),
        ] {
            assert_eq!(
                heeds_salt(endpoint, engine, release),
                expected,
                "{endpoint:?} {engine:?} {release:?}"
            );
        }
    }
}
