//! Rendering and tokenising against what the owners' code made of it.

use std::path::PathBuf;

use serde_json::{Value, json};

use super::*;

fn folder() -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "..", "tests", "fixtures", "tokenizer"].iter().collect()
}

fn prompter() -> Prompter {
    Prompter::load(&folder()).expect("the fixture loads")
}

/// Texts and ids were made by Jinja2 and by Hugging Face's Python tokenizers;
/// see make.py beside the fixture.
#[test]
fn every_golden_case_renders_to_the_same_ids() {
    let text = std::fs::read_to_string(folder().join("expected.json")).expect("the fixture is there");
    let cases: Vec<Value> = serde_json::from_str(&text).expect("the fixture is JSON");
    assert!(cases.len() >= 30, "the fixture is whole");
    let prompter = prompter();
    for case in &cases {
        let name = case["name"].as_str().expect("cases are named");
        let endpoint = if case["kind"] == "chat" { Endpoint::Chat } else { Endpoint::Completions };
        let engine = if case["join"] == " " { Engine::SGLang } else { Engine::VLLM };
        let prompt = prompter.prepare(endpoint, &case["body"], engine, None);
        let expected: Vec<u32> = serde_json::from_value(case["ids"].clone()).expect("ids");
        assert_eq!((prompt.refused, &*prompt.tokens), (None, &expected[..]), "{name}");
    }
}

#[track_caller]
fn check(why: &str, body: &Value, expected: Refusal) {
    let prompt = prompter().prepare(Endpoint::Chat, body, Engine::VLLM, None);
    assert_eq!((prompt.refused, prompt.tokens.len()), (Some(expected), 0), "{why}");
}

#[test]
fn what_cannot_be_rendered_exactly_is_refused_by_name() {
    let user = |content: Value| json!({"messages": [{"role": "user", "content": content}]});
    check(
        "an image",
        &user(json!([{"type": "image_url", "image_url": {"url": "http://x"}}])),
        Refusal::Media,
    );
    check("a number", &user(json!(5)), Refusal::Malformed);
    check("no role", &json!({"messages": [{"content": "a"}]}), Refusal::Malformed);
    check("no messages", &json!({}), Refusal::Malformed);
    let call = json!([{"function": {"name": "f", "arguments": "{"}}]);
    let broken = json!({"messages": [{"role": "assistant", "content": "", "tool_calls": call}]});
    check("broken arguments", &broken, Refusal::Malformed);
}

#[test]
fn without_a_tokenizer_only_ids_are_taken() {
    let prompter = Prompter::without_tokenizer();
    let text = prompter.prepare(Endpoint::Completions, &json!({"prompt": "abcdefgh"}), Engine::VLLM, None);
    assert_eq!((text.refused, text.count), (Some(Refusal::NoTokenizer), Tokens(2)));
    let ids = prompter.prepare(Endpoint::Completions, &json!({"prompt": [5, 6]}), Engine::VLLM, None);
    assert_eq!((ids.refused, &*ids.tokens), (None, &[5, 6][..]));
}

#[test]
fn salt_and_adapter_name_the_namespace() {
    let body = json!({"prompt": [1], "cache_salt": "s"});
    let prompt =
        Prompter::without_tokenizer().prepare(Endpoint::Completions, &body, Engine::VLLM, Some("a".into()));
    assert_eq!(prompt.namespace, Namespace { adapter: Some("a".into()), salt: Some("s".into()) });
}

#[test]
fn a_template_that_never_ends_is_stopped() {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(
        folder.path().join("chat_template.jinja"),
        "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    )
    .expect("written");
    let template = Template::load(folder.path()).expect("valid").expect("there");
    let body = json!({"messages": [{"role": "user", "content": "a"}]});
    let Ok(Content::Chat(chat)) = endpoint::content(Endpoint::Chat, &body, Engine::VLLM) else {
        panic!("a chat")
    };
    let error = template.render(&chat, Profile::of(Engine::VLLM)).expect_err("it must stop");
    assert_eq!(error.refusal(), Refusal::Unrenderable);
}
