//! Tenants: what one's requests leave in a cache, no other one finds, in the router or at the engine.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use engine_sim::config::Wire;
use http::{HeaderMap, HeaderName, HeaderValue, Method};
use kvrouter_router::tenancy::Tenancy;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tempfile::NamedTempFile;

use crate::harness::{MODEL, Router, Setup, bare, engine, id, long, received, state, text, unique, until};
use crate::raw_worker::{RawWorker, Received};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const RESPONSES: &str = "/v1/responses";
const SECRET: &str = "a secret for tests";

/// A file with the secret.
fn secret() -> NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), format!("{SECRET}\n")).unwrap();
    file
}

/// Tenancy, with `more` of its settings.
fn tenancy(file: &NamedTempFile, more: &str) -> String {
    format!("tenancy: {{saltSecretFile: {:?}{more}}}", file.path())
}

/// The salt of a tenant.
fn salt(name: &str) -> String {
    let header = HeaderName::from_static("x-tenant");
    let tenancy = Tenancy::new(header.clone(), Default::default(), SECRET.as_bytes());
    let headers: HeaderMap = [(header, HeaderValue::from_str(name).unwrap())].into_iter().collect();
    tenancy.tenant(&Method::POST, CHAT, &headers).unwrap().unwrap().salt(None).to_string()
}

/// A request's answer and receipt; of `tenant`, if one is given.
async fn ask(router: &Router, path: &str, tenant: Option<&str>, body: &Value) -> (u16, String, Value) {
    let request_id = unique();
    let mut headers = vec![("x-request-id", request_id.as_str())];
    headers.extend(tenant.map(|tenant| ("X-Tenant", tenant)));
    let answer = router.send(path, &headers, body.to_string()).await;
    (answer.status, answer.text(), router.receipts(&request_id).await[0].clone())
}

/// A good answer's receipt: the namespace, the tokens that were predicted and reported to be cached, and how much
/// more the engine holds for somebody else.
async fn asked(router: &Router, path: &str, tenant: Option<&str>, body: &Value) -> (String, u64, u64, u64) {
    let (status, text, receipt) = ask(router, path, tenant, body).await;
    assert_eq!(status, 200, "{text}");
    let number = |value: &Value| value.as_u64().unwrap_or_else(|| panic!("{receipt}"));
    (
        receipt["namespace"].as_str().unwrap().to_owned(),
        number(&receipt["predicted_hit_tokens"]),
        number(&receipt["result"]["engine_cached_tokens"]),
        number(&receipt["candidates"][0]["rejected_other_namespace"]),
    )
}

/// The same prompt of two tenants, at every endpoint that takes a salt and of both families of engines.
#[tokio::test]
async fn a_tenant_finds_its_own_prompts_and_nobody_elses() {
    for wire in [Wire::Vllm033, Wire::Sglang0523] {
        for path in [CHAT, COMPLETIONS, RESPONSES] {
            let only = engine(|config| config.wire = wire).await;
            let file = secret();
            let router = Router::start(Setup::zmq(&[&only]).events_only().more(&tenancy(&file, ""))).await;
            let body = match path {
                CHAT => json!({"model": MODEL, "messages": long(1), "max_tokens": 1}),
                COMPLETIONS => json!({"model": MODEL, "prompt": text(1, 60), "max_tokens": 1}),
                _ => json!({"model": MODEL, "input": text(1, 60), "max_output_tokens": 1}),
            };
            let first = asked(&router, path, Some("tenant-a"), &body).await;
            assert_eq!((first.1, first.2, first.3), (0, 0, 0), "{wire:?} {path}: a cold cache");
            router.agrees_with(&only).await;
            let other = asked(&router, path, Some("tenant-b"), &body).await;
            assert_eq!((other.1, other.2), (0, 0), "{wire:?} {path}: no credit, and nothing was cached");
            assert!(other.3 > 10, "{wire:?} {path}: the receipt says what was not looked at: {}", other.3);
            assert_ne!(other.0, first.0, "{wire:?} {path}");
            router.agrees_with(&only).await;
            let again = asked(&router, path, Some("tenant-a"), &body).await;
            assert!(again.1 > 200 && again.1 == again.2, "{wire:?} {path}: {again:?}");
            assert_eq!((again.0, again.3), (first.0, 0), "{wire:?} {path}: its own namespace again");
            is_unnamed(&router, &["tenant-a", "tenant-b"]).await;
        }
    }
}

/// Neither names nor salts are where people look.
async fn is_unnamed(router: &Router, names: &[&str]) {
    let get = async |address: &str, path: &str| {
        router.client.get(&format!("http://{address}{path}")).await.unwrap().text()
    };
    let told = [
        get(&router.at.admin, "/v1/admin/receipts").await,
        get(&router.at.admin, "/v1/admin/workers").await,
        get(&router.at.metrics, "/metrics").await,
        get(&router.at.metrics, "/health/report").await,
        router.process.output(),
    ];
    assert!(told[0].contains("namespace"), "{}", told[0]);
    for name in names {
        for secret in [(*name).to_owned(), salt(name), SECRET.to_owned()] {
            assert!(!told.iter().any(|text| text.contains(&secret)), "{secret} in {told:?}");
        }
    }
}

/// Case B18: a tenant's header and its salt in the body are one namespace, where hits are looked up and where what
/// was sent is written down; and which of both counts.
#[tokio::test]
async fn a_header_and_its_salt_in_the_body_are_one_namespace() {
    let file = secret();
    let shared = tenancy(&file, ", withoutHeader: Share");
    let plain = json!({"model": MODEL, "messages": long(1), "max_tokens": 1});
    let salted = |salt: &str| {
        let mut body = plain.clone();
        body["cache_salt"] = json!(salt);
        body
    };
    // With events, and with what was sent alone.
    for has_events in [true, false] {
        let only = engine(|_| {}).await;
        let setup = match has_events {
            true => Setup::zmq(&[&only]).events_only(),
            false => Setup { events: "{transport: None}".to_owned(), ..Setup::of(vec![bare(&id(&only))]) },
        };
        let router = Router::start(setup.more(&shared)).await;
        let settle = async || {
            if has_events {
                router.agrees_with(&only).await;
            }
        };
        let header = asked(&router, CHAT, Some("a"), &plain).await;
        settle().await;
        let body = asked(&router, CHAT, None, &salted(&salt("a"))).await;
        assert_eq!(body.0, header.0, "one namespace");
        assert!(header.1 == 0 && body.1 > 200 && body.1 == body.2, "{header:?} {body:?}");
        settle().await;
        // The body's salt does not replace the tenant's: both count, and neither alone leads there.
        let both = asked(&router, CHAT, Some("a"), &salted("own")).await;
        let of_other = asked(&router, CHAT, Some("b"), &salted("own")).await;
        let reaching = asked(&router, CHAT, Some("b"), &salted(&salt("a"))).await;
        let alone = asked(&router, CHAT, None, &salted("own")).await;
        let nobody = asked(&router, CHAT, None, &plain).await;
        let all = [&header, &both, &of_other, &reaching, &alone, &nobody];
        let namespaces: std::collections::HashSet<&String> = all.iter().map(|asked| &asked.0).collect();
        assert_eq!(namespaces.len(), all.len(), "{all:?}");
        assert!(all[1..].iter().all(|asked| (asked.1, asked.2) == (0, 0)), "{all:?}");
        settle().await;
        let again = asked(&router, CHAT, Some("a"), &salted("own")).await;
        assert!(again.0 == both.0 && again.1 > 200 && again.1 == again.2, "{again:?}");
    }
}

#[tokio::test]
async fn a_request_that_cannot_be_kept_apart_goes_nowhere() {
    let only = engine(|_| {}).await;
    let file = secret();
    let router = Router::start(Setup::zmq(&[&only]).more(&tenancy(&file, ", header: X-Team"))).await;
    let body = json!({"model": MODEL, "messages": long(1), "max_tokens": 1});
    let bad_salt = json!({"model": MODEL, "messages": long(1), "cache_salt": ["a"]});
    let long_name = "x".repeat(1025);
    let cases: [(&str, &[&str], &Value, &str, &str); 8] = [
        (CHAT, &[], &body, "tenant_missing", "x-team"),
        (CHAT, &["a", "a"], &body, "invalid_tenant", "once"),
        (CHAT, &[""], &body, "invalid_tenant", "1 to 1024 bytes"),
        (CHAT, &[&long_name], &body, "invalid_tenant", "1 to 1024 bytes"),
        (CHAT, &["a"], &bad_salt, "invalid_cache_salt", "one string"),
        ("/v1/embeddings", &["a"], &body, "not_kept_apart", "at /v1/embeddings, so"),
        ("/v1/chat/completions/", &["a"], &body, "not_kept_apart", "/v1/chat/completions/"),
        (
            "/generate",
            &["a"],
            &body,
            "not_kept_apart",
            "of this pool is known to take a cache salt at /generate",
        ),
    ];
    for (path, tenants, body, code, hint) in cases {
        let request_id = unique();
        let mut headers = vec![("x-request-id", request_id.as_str()), ("x-tenant", "another header")];
        headers.extend(tenants.iter().map(|tenant| ("x-team", *tenant)));
        let answer = router.send(path, &headers, body.to_string()).await;
        assert_eq!(answer.status, 400, "{path} {tenants:?}: {}", answer.text());
        let error = answer.json().unwrap()["error"].clone();
        assert_eq!(error["code"], code, "{path} {tenants:?}: {error}");
        assert!(error["message"].as_str().unwrap().contains(hint), "{error}");
        let receipt = router.receipts(&request_id).await[0].clone();
        assert_eq!(receipt["result"]["failure"], code, "{path} {tenants:?}");
    }
    assert_eq!(received(&only).await.len(), 0, "the engine saw none of it");
    // What computes no prompt needs no tenant.
    let tokens = router.post("/tokenize", json!({"model": MODEL, "prompt": "a"})).await;
    assert_eq!((tokens.status, router.get("/v1/models").await.status), (200, 200), "{}", tokens.text());
    router.is_idle().await;
}

/// Whether a salt is heard is the engine's: what is unknown is not taken for yes.
#[tokio::test]
async fn an_engine_that_may_not_hear_a_salt_gets_no_prompt() {
    let file = secret();
    let models = |owner: &str| {
        json!({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": owner}]}).to_string()
    };
    let answer = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}";
    for (owner, path, expected) in [
        ("nobody", CHAT, 400),
        ("vllm", CHAT, 200),
        ("vllm", "/v1/messages", 400),
        ("sglang", "/v1/messages", 400),
        ("sglang", CHAT, 200),
        ("sglang", "/generate", 200),
    ] {
        let (sent, counted) = (Arc::new(AtomicUsize::new(0)), format!("POST {path} "));
        let count = Arc::clone(&sent);
        let script = move |received: Received| {
            count.fetch_add(usize::from(received.head.starts_with(&counted)), Ordering::Relaxed);
            vec![answer.into()]
        };
        let worker = RawWorker::with_models(models(owner), script).await;
        let address = worker.address.to_string();
        let router = Router::start(Setup::in_turn(&[&address]).more(&tenancy(&file, ""))).await;
        let messages = json!([{"role": "user", "content": "hello"}]);
        let body = json!({"model": MODEL, "messages": messages, "text": "hello", "max_tokens": 1});
        let (status, text, _) = ask(&router, path, Some("a"), &body).await;
        assert_eq!(status, expected, "{owner} {path}: {text}");
        assert_eq!(text.contains("not_kept_apart"), expected == 400, "{owner} {path}: {text}");
        // The path may be right, and the engines are not.
        assert_eq!(
            text.contains("No engine of this pool is known"),
            expected == 400,
            "{owner} {path}: {text}"
        );
        assert_eq!(sent.load(Ordering::Relaxed), usize::from(expected == 200), "{owner} {path}");
        router.is_idle().await;
    }
}

/// Who does not heed a salt at a path does not stand for choice there, however idle it is.
#[tokio::test]
async fn a_request_goes_to_an_engine_that_hears_its_salt() {
    let sglang = engine(|config| config.wire = Wire::Sglang0523).await;
    let other = engine(|config| config.wire = Wire::Sglang0523).await;
    let vllm = engine(|config| config.wire = Wire::Vllm033).await;
    let file = secret();
    let router = Router::start(Setup::zmq(&[&sglang, &vllm, &other]).more(&tenancy(&file, ""))).await;
    for number in 0..4 {
        let body = json!({"model": MODEL, "messages": long(number), "max_tokens": 1});
        let (status, text, receipt) = ask(&router, "/v1/messages", Some("a"), &body).await;
        // The simulated engine does not know the path, and says so: it was asked.
        assert_eq!(
            (status, &receipt["chosen"]["target"]),
            (404, &json!(format!("{}#0", id(&vllm)))),
            "{text}"
        );
        assert_eq!(receipt["candidate_count"], 1);
    }
}

/// The salt is one more member, and all other bytes are the client's, also of a body that the router cannot read
/// and of one that gets token ids.
#[tokio::test]
async fn a_salt_changes_no_other_byte() {
    let only = engine(|_| {}).await;
    let file = secret();
    let setup = Setup::zmq(&[&only]).more(&tenancy(&file, "")).more("forwardTokenIds: WhenConfirmed");
    let router = Router::start(setup).await;
    until("the engine's tokens are compared", async || {
        let report = router.report().await;
        (report["workers"][0]["rendering"]["parity"] == "confirmed").then_some(())
    })
    .await;
    let digest =
        |body: &str| Sha256::digest(body).iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let salt = salt("a");
    let rest = format!("\"model\":\"{MODEL}\",\n\"x_unknown\" : 1.50, ");
    let odd = format!("{rest}\"messages\":[{{\"role\":\"user\",\"content\":\"\\ud800\"}}] }}");
    let completion = |prompt: &str| format!("{rest}\"max_tokens\":1,\"prompt\":{prompt}}}");
    let ids = router.post("/tokenize", json!({"model": MODEL, "prompt": "hello"})).await.json().unwrap();
    let cases = [
        (CHAT, format!(" {{{odd}"), format!(" {{\"cache_salt\":\"{salt}\",{odd}"), false),
        (
            COMPLETIONS,
            format!("{{{}", completion("\"hello\"")),
            format!("{{\"cache_salt\":\"{salt}\",{}", completion(&ids["tokens"].to_string())),
            true,
        ),
    ];
    for (path, body, expected, given_ids) in cases {
        router.send(path, &[("x-tenant", "a"), ("x-other", "b")], body).await;
        let got = received(&only).await.last().unwrap().clone();
        assert_eq!(
            (&got["body_sha256"], &got["given_ids"]),
            (&json!(digest(&expected)), &json!(given_ids)),
            "{path}"
        );
        let headers = got["headers"].to_string();
        assert!(headers.contains("x-tenant") && headers.contains("x-other"), "all headers travel: {headers}");
    }
    assert_eq!(state(&only).await["given_ids_total"], 1);
}

/// The dry run asks for a tenant as requests do.
#[tokio::test]
async fn a_dry_run_has_a_tenant_too() {
    let only = engine(|_| {}).await;
    let file = secret();
    let router = Router::start(Setup::zmq(&[&only]).events_only().more(&tenancy(&file, ""))).await;
    let body = json!({"model": MODEL, "messages": long(1), "max_tokens": 1});
    let first = asked(&router, CHAT, Some("a"), &body).await;
    router.agrees_with(&only).await;
    let url = format!("http://{}/v1/admin/explain", router.at.admin);
    let explain = async |headers: &[(&str, &str)]| {
        router.client.send(Method::POST, &url, headers, body.to_string().into()).await.unwrap()
    };
    let own = explain(&[("x-tenant", "a")]).await.text();
    assert!(own.contains(&first.0), "{own}");
    let other = explain(&[("x-tenant", "b")]).await.text();
    assert!(!other.contains(&first.0), "{other}");
    assert_eq!(explain(&[]).await.status, 400);
}

/// What is known of one tenant's body is known for it alone: the same one of another tenant takes as much room again.
#[tokio::test]
async fn what_is_kept_of_a_body_is_its_tenants() {
    let only = engine(|_| {}).await;
    let file = secret();
    let router = Router::start(Setup::zmq(&[&only]).more(&tenancy(&file, ""))).await;
    let messages: Vec<Value> = (0..400).map(|at| json!({"role": "user", "content": text(at, 8)})).collect();
    let body = json!({"model": MODEL, "messages": messages, "max_tokens": 1});
    let (mut before, mut taken) = (0.0, Vec::new());
    for tenant in ["a", "b", "a"] {
        ask(&router, CHAT, Some(tenant), &body).await;
        let room = router.metric("kvrouter_pool", "\"prompt_cache_bytes\"").await;
        taken.push(room - before);
        before = room;
    }
    assert!(taken[0] > 2.0 * body.to_string().len() as f64, "text and ids are kept: {taken:?}");
    // The first one paid for the router's own small texts too.
    assert!(taken[1] > 0.95 * taken[0] && taken[2] == 0.0, "{taken:?}");
}
