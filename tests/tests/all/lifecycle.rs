//! Start and stop: what is refused before a port opens, and how a router leaves.

use std::process::Command;
use std::time::Duration;

use http::Method;
use http_body_util::BodyExt;
use kvrouter_tests::client::Client;
use kvrouter_tests::process::sibling;
use serde_json::json;

use crate::harness::{MODEL, Router, Setup, TOKENIZER, engine, id, long, spawn, until};

/// How long a router may take to end.
const END: Duration = Duration::from_secs(20);

/// SIGTERM: no longer ready, open streams finish, exit code 0.
#[tokio::test]
async fn a_router_told_to_stop_finishes_what_it_has_begun() {
    let slow = engine(|config| config.step_ms = 20.0).await;
    let setup = Setup::in_turn(&[&id(&slow)]).more("limits: {drainDelaySeconds: 1}");
    let mut router = Router::start(setup).await;
    let body = json!({"messages": long(1), "max_tokens": 60, "stream": true});
    let url = router.url("/v1/chat/completions");
    let answer = router.client.open(Method::POST, &url, &[], body.to_string().into()).await.unwrap();
    let mut stream = answer.into_body();
    let mut text = Vec::new();
    text.extend_from_slice(&stream.frame().await.unwrap().unwrap().into_data().unwrap());
    router.process.terminate().unwrap();
    until("it says that it is not ready", async || {
        // On connections of its own: those that are kept end with their answer.
        let answer = Client::new().get(&router.url("/readyz")).await.ok()?;
        (answer.status == 503).then_some(())
    })
    .await;
    while let Some(frame) = stream.frame().await {
        text.extend_from_slice(&frame.unwrap().into_data().unwrap());
    }
    let text = String::from_utf8(text).unwrap();
    assert!(text.ends_with("data: [DONE]\n\n") && !text.contains("\"error\":"), "{text}");
    assert_eq!(router.process.ended(END).await.unwrap().code(), Some(0), "{}", router.process.output());
}

/// A router without anything to do ends as soon as its delay is over.
#[tokio::test]
async fn an_idle_router_stops_at_once() {
    let only = engine(|_| {}).await;
    let mut router = Router::start(Setup::zmq(&[&only]).more("limits: {drainDelaySeconds: 0}")).await;
    router.process.terminate().unwrap();
    assert_eq!(router.process.ended(Duration::from_secs(5)).await.unwrap().code(), Some(0));
}

/// An answer that outlasts the limit is cut, and the exit code is still 0.
#[tokio::test]
async fn draining_has_an_end() {
    let slow = engine(|config| config.step_ms = 50.0).await;
    let setup = Setup::in_turn(&[&id(&slow)]).more("limits: {drainDelaySeconds: 0, drainTimeoutSeconds: 1}");
    let mut router = Router::start(setup).await;
    let body = json!({"messages": long(1), "max_tokens": 1000, "stream": true});
    let url = router.url("/v1/chat/completions");
    let answer = router.client.open(Method::POST, &url, &[], body.to_string().into()).await.unwrap();
    let mut stream = answer.into_body();
    stream.frame().await.unwrap().unwrap();
    router.process.terminate().unwrap();
    assert_eq!(router.process.ended(END).await.unwrap().code(), Some(0), "{}", router.process.output());
}

/// A file that cannot be used: exit code 2, and where and what is wrong.
#[tokio::test]
async fn a_bad_file_is_refused_with_line_and_field() {
    let good = format!(
        "schemaVersion: 1\nmodel: {{name: {MODEL}}}\nblockSize: 16\ndiscovery:\n  backend: Static\nkvEvents: {{transport: None}}\n"
    );
    for (why, from, to, expected) in [
        ("unknown field", "blockSize", "blockSizes", "router.yaml:3: unknown field `blockSizes`"),
        ("wrong type", "blockSize: 16", "blockSize: many", "router.yaml:3: blockSize: "),
        ("out of range", "blockSize: 16", "blockSize: 0", "router.yaml:3: blockSize: "),
        ("contradiction", "{transport: None}", "{transport: NATS}", "router.yaml:6: kvEvents.nats: "),
        ("not YAML", "blockSize: 16", "blockSize: [", "router.yaml:"),
    ] {
        let file = good.replace(from, to);
        assert_ne!(file, good, "{why}");
        let (_folder, mut process) = spawn(&file);
        let status = process.ended(END).await.unwrap();
        let output = process.output();
        assert_eq!(status.code(), Some(2), "{why}: {output}");
        assert!(output.contains(expected), "{why}: {output}");
    }
}

/// A port that is taken is an error that names the setting.
#[tokio::test]
async fn a_taken_port_is_named() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let file = format!(
        "schemaVersion: 1\nmodel: {{name: {MODEL}}}\ndiscovery: {{backend: Static}}\nkvEvents: {{transport: None}}\nlisten: {{http: \"{}\", metrics: \"127.0.0.1:0\", admin: \"127.0.0.1:0\"}}\n",
        taken.local_addr().unwrap()
    );
    let (_folder, mut process) = spawn(&file);
    assert_eq!(process.ended(END).await.unwrap().code(), Some(1));
    assert!(process.output().contains("listen.http"), "{}", process.output());
}

/// Inputs that cannot be used end every command with 2, anything else that goes wrong with 1.
#[test]
fn bad_inputs_end_every_command_alike() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, content: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, content).unwrap();
        path.display().to_string()
    };
    let (bad, absent) = (file("bad", "{"), folder.path().join("absent").display().to_string());
    let refused = file("refused", "{\"prompt\": \"a\", \"suffix\": \"b\"}");
    let page = folder.path().join("page.html").display().to_string();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap().to_string();
    let of_completions = ["--endpoint", "/v1/completions"];
    let tokenize = |model: &str, body: &str| {
        let start = ["tokenize", "--model", model, "--body", body];
        start.iter().chain(&of_completions).map(|word| (*word).to_owned()).collect::<Vec<_>>()
    };
    let words = |all: &[&str]| all.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
    for (why, arguments, code) in [
        ("no model", tokenize(&absent, &bad), 2),
        ("no body", tokenize(TOKENIZER, &absent), 2),
        ("no JSON", tokenize(TOKENIZER, &bad), 2),
        ("no block", [tokenize(TOKENIZER, &refused), words(&["--block-size", "0"])].concat(), 2),
        ("a prompt that is refused", tokenize(TOKENIZER, &refused), 1),
        ("no trace to show", words(&["lab", "--trace", &absent]), 2),
        ("a bad trace to show", words(&["lab", "--trace", &bad]), 2),
        ("a bad trace to export", words(&["lab", "--trace", &bad, "--export", &page]), 2),
        ("a port that is taken", words(&["lab", "--listen", &taken]), 1),
        ("no trace", words(&["replay", "--trace", &absent]), 2),
        ("a bad trace", words(&["replay", "--trace", &bad]), 2),
        ("no receipts", words(&["receipts", "verify", &absent]), 2),
        ("bad receipts", words(&["receipts", "csv", &bad]), 2),
        ("no settings", words(&["serve", "--config", &absent]), 2),
    ] {
        let output = Command::new(sibling("kv-router").unwrap()).args(arguments).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{why}: {said}");
        assert!(said.starts_with("kv-router: ") && said.lines().count() == 1, "{why}: {said}");
    }
}
