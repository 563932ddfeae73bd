//! Rendering and tokenising against what the owners' code made of it.

use std::path::PathBuf;

use kvrouter_core::blocks::IdentitySeed;
use serde_json::{Value, json};

use super::*;

/// Room for prefixes in tests.
const ROOM: usize = 1 << 20;

fn folder() -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "..", "tests", "fixtures", "tokenizer"].iter().collect()
}

fn prompter() -> Prompter {
    Prompter::load(&folder(), ROOM, 1).expect("the fixture loads")
}

fn size() -> BlockSize {
    BlockSize::new(16).expect("not zero")
}

fn prepare(prompter: &Prompter, endpoint: Endpoint, body: &Value, engine: Engine) -> Prompt {
    let identity = Identity::new(IdentitySeed::new(b""));
    let asked = Asked { endpoint, engine, adapter: None, identity: &identity, size: size(), now_unix_ms: 0 };
    // Read from bytes, as requests are, and from JSON: it must be the same.
    let bytes = serde_json::to_vec(body).expect("it is JSON");
    let read = prompter.read(endpoint, 0, &bytes).expect("it is JSON");
    let prompt = prompter.prepare(&asked, read);
    let mut again = prompter.prepare(&asked, Body::from_json(body.clone()));
    again.work = prompt.work;
    assert_eq!(prompt, again, "{body}");
    prompt
}

/// The only prompt's ids.
#[track_caller]
fn only(prompt: &Prompt) -> &[u32] {
    assert_eq!(prompt.refused, None);
    let [part] = prompt.parts.as_slice() else { panic!("one prompt, not {}", prompt.parts.len()) };
    &part.tokens
}

/// Texts and ids were made by Jinja2 and by Hugging Face's Python tokenizers;
/// see make.py beside the fixture.
#[test]
fn every_golden_case_renders_to_the_same_ids() {
    let text = std::fs::read_to_string(folder().join("expected.json")).expect("the fixture is there");
    let cases: Vec<Value> = serde_json::from_str(&text).expect("the fixture is JSON");
    assert!(cases.len() >= 30, "the fixture is whole");
    let prompter = prompter();
    for _ in ["cold", "warm"] {
        for case in &cases {
            let name = case["name"].as_str().expect("cases are named");
            let endpoint = if case["kind"] == "chat" { Endpoint::Chat } else { Endpoint::Completions };
            let engine = if case["join"] == " " { Engine::SGLang } else { Engine::VLLM };
            let mut body = case["body"].clone();
            if body["tools"] == json!([]) {
                // vLLM refuses what Jinja2 takes for none.
                body["tools"] = Value::Null;
            }
            let prompt = prepare(&prompter, endpoint, &body, engine);
            let expected: Vec<u32> = serde_json::from_value(case["ids"].clone()).expect("ids");
            assert_eq!((prompt.refused, only(&prompt)), (None, &expected[..]), "{name}");
            assert_eq!(prompt.work.tokenisations, 1, "{name}");
        }
    }
}

#[track_caller]
fn refuses(why: &str, body: &Value, expected: Refusal) {
    let prompt = prepare(&prompter(), Endpoint::Chat, body, Engine::VLLM);
    assert_eq!((prompt.refused, prompt.parts.len()), (Some(expected), 0), "{why}");
}

#[test]
fn what_cannot_be_rendered_exactly_is_refused_by_name() {
    let user = |content: Value| json!({"messages": [{"role": "user", "content": content}]});
    refuses("a number", &user(json!(5)), Refusal::Malformed);
    refuses("no role", &json!({"messages": [{"content": "a"}]}), Refusal::Malformed);
    refuses("no messages", &json!({}), Refusal::Malformed);
    for (name, loose) in [("add_generation_prompt", json!(0)), ("continue_final_message", json!("true"))] {
        let mut body = user(json!("a"));
        body[name] = loose;
        refuses("what engines read as true or false", &body, Refusal::Malformed);
    }
    refuses("an empty list", &json!({"messages": []}), Refusal::Malformed);
    refuses("a part of an unknown kind", &user(json!([{"type": "hologram"}])), Refusal::Unrenderable);
    let mut images = user(json!("a"));
    images["images"] = json!(["x"]);
    refuses("images beside the messages", &images, Refusal::Media);
}

/// Arguments that are no JSON are an empty object to vLLM, and an error to SGLang.
#[test]
fn broken_arguments_are_what_each_engine_makes_of_them() {
    let body = |arguments: &str| {
        let call =
            json!([{"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}]);
        json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": call}, {"role": "tool", "content": "x"}]})
    };
    let prompter = prompter();
    let of = |arguments: &str, engine| prepare(&prompter, Endpoint::Chat, &body(arguments), engine);
    assert_eq!(only(&of("{", Engine::VLLM)), only(&of("{}", Engine::VLLM)));
    assert_eq!(of("{", Engine::SGLang).refused, Some(Refusal::Malformed));
}

#[test]
fn without_a_tokenizer_only_ids_are_taken() {
    let prompter = Prompter::without_tokenizer();
    let text = prepare(&prompter, Endpoint::Completions, &json!({"prompt": "abcdefgh"}), Engine::VLLM);
    assert_eq!((text.refused, text.count, text.is_exact), (Some(Refusal::NoTokenizer), Tokens(2), false));
    let ids = prepare(&prompter, Endpoint::Completions, &json!({"prompt": [5, 6]}), Engine::VLLM);
    assert_eq!((only(&ids), ids.count, ids.is_exact), (&[5, 6][..], Tokens(2), true));
}

#[test]
fn each_prompt_of_a_list_has_its_blocks() {
    let prompter = Prompter::without_tokenizer();
    let lists: Vec<Vec<u32>> = (0..8).map(|number| vec![number; 16 * number as usize]).collect();
    let prompt = prepare(&prompter, Endpoint::Completions, &json!({"prompt": lists}), Engine::VLLM);
    let blocks: Vec<usize> = prompt.parts.iter().map(|part| part.blocks.len()).collect();
    assert_eq!(blocks, [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!((prompt.count, prompt.is_exact), (Tokens(16 * 28), true));
}

#[test]
fn salt_and_adapter_name_the_namespace() {
    let identity = Identity::new(IdentitySeed::new(b""));
    let of = |endpoint, engine, body: Value| {
        let adapter = Some("a".into());
        let asked = Asked { endpoint, engine, adapter, identity: &identity, size: size(), now_unix_ms: 0 };
        Prompter::without_tokenizer().prepare(&asked, Body::from_json(body)).namespace
    };
    let salted = |salt: &str| json!({"prompt": [1], "messages": [], "cache_salt": salt});
    let expected = Namespace { adapter: Some("a".into()), salt: Some("s".into()) };
    assert_eq!(of(Endpoint::Completions, Engine::VLLM, salted("s")), expected);
    assert_eq!(of(Endpoint::Messages, Engine::VLLM, salted("s")), expected);
    let unsalted = Namespace { salt: None, ..expected };
    assert_eq!(
        of(Endpoint::Messages, Engine::SGLang, salted("s")),
        unsalted,
        "SGLang has no such field there"
    );
}

/// A chat of the small model, `turns` long.
fn conversation(turns: usize) -> Value {
    let message = |turn: usize| {
        let role = if turn.is_multiple_of(2) { "user" } else { "assistant" };
        json!({"role": role, "content": format!("Turn {turn}: {}", "which oven is warm? ".repeat(20))})
    };
    json!({"messages": (0..turns).map(message).collect::<Vec<Value>>()})
}

/// Split and whole agree for every prefix of a conversation, and a next turn
/// costs its new text only.
#[test]
fn a_next_turn_costs_its_new_text_only() {
    let warm = prompter();
    let mut before = 0;
    for turns in (1..24).step_by(2) {
        let body = conversation(turns);
        let cold = prepare(&prompter(), Endpoint::Chat, &body, Engine::VLLM);
        let next = prepare(&warm, Endpoint::Chat, &body, Engine::VLLM);
        assert_eq!(next.parts, cold.parts, "{turns} turns");
        assert_eq!(next.parts[0].blocks, chain(Default::default(), size(), &next.parts[0].tokens));
        assert_eq!((next.work.tokenisations, cold.work.reused), (1, Tokens(0)));
        let all = next.count.0;
        assert!(turns < 5 || next.work.encoded.0 <= all - before + 300, "{turns}: {:?} of {all}", next.work);
        before = all;
    }
}

/// Numbers that look random and are the same in every run.
pub(super) struct Lot(pub(super) u64);

impl Lot {
    pub(super) fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).expect("it has 31 bits") % end
    }

    /// Text with all that JSON and templates may stumble over.
    pub(super) fn text(&mut self) -> String {
        const SCRAPS: [&str; 12] = [
            "which oven is warm? ",
            "\n",
            "\"quoted\" \\ ",
            "路由器",
            "🔥\u{301}",
            "<|im_end|>",
            "<tool_response>",
            "{\"messages\":[",
            "}],",
            "\t\u{1}",
            " ",
            "a",
        ];
        (0..self.below(60)).map(|_| SCRAPS[self.below(SCRAPS.len())]).collect()
    }

    /// A message of any kind that an engine takes.
    pub(super) fn message(&mut self) -> Value {
        let text = self.text();
        match self.below(12) {
            0 => json!({"role": "system", "content": text}),
            1 => json!({"content": text, "role": "user"}),
            2 => {
                json!({"role": "user", "content": [{"type": "text", "text": text}, {"type": "text", "text": self.text()}]})
            }
            3 => json!({"role": "assistant", "content": null, "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": json!({"a": text}).to_string()}}
            ]}),
            4 => json!({"role": "tool", "tool_call_id": "c", "content": text}),
            5 => json!({"role": "user", "content": text, "name": "n"}),
            6 => json!({"role": "assistant", "content": text, "reasoning_content": "hm"}),
            at if at % 2 == 0 => json!({"role": "assistant", "content": text}),
            _ => json!({"role": "user", "content": text}),
        }
    }
}

/// Conversations that go on, are edited in the middle, cut, or sent with other tools
/// and other variables: what is kept changes nothing about them. The oracle keeps
/// nothing.
#[test]
fn what_is_kept_changes_no_prompt() {
    let (keeps, plain) = (prompter(), Prompter::load(&folder(), 0, 1).expect("the fixture loads"));
    let mut lot = Lot(11);
    let mut messages: Vec<Value> = Vec::new();
    let tool = |name: &str| json!([{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}]);
    let mut reused = 0;
    for step in 0..150 {
        match lot.below(8) {
            0 if !messages.is_empty() => {
                let at = lot.below(messages.len());
                messages[at] = lot.message();
            }
            1 => messages.truncate(lot.below(messages.len() + 1)),
            _ => {}
        }
        messages.extend((0..=lot.below(9)).map(|_| lot.message()));
        let mut body = json!({"model": "m", "messages": messages});
        match lot.below(6) {
            0 => body["tools"] = tool("f"),
            1 => body = json!({"tools": tool("g"), "messages": messages, "stream": true}),
            2 => body["chat_template_kwargs"] = json!({"enable_thinking": false}),
            3 => body["add_generation_prompt"] = json!(false),
            _ => {}
        }
        let (kept, whole) = (
            prepare(&keeps, Endpoint::Chat, &body, Engine::VLLM),
            prepare(&plain, Endpoint::Chat, &body, Engine::VLLM),
        );
        reused += kept.work.reused.0;
        assert_eq!((kept.refused, &kept.parts), (None, &whole.parts), "step {step}: {body}");
    }
    assert!(reused > 10_000, "{reused} tokens were known");
}

/// Another salt shares nothing: neither hashes nor the time it takes.
#[test]
fn prefixes_are_not_shared_between_salts() {
    let prompter = prompter();
    let salted = |salt: &str| {
        let mut body = conversation(9);
        body["cache_salt"] = json!(salt);
        prepare(&prompter, Endpoint::Chat, &body, Engine::VLLM)
    };
    let (one, other, again) = (salted("a"), salted("b"), salted("a"));
    assert_eq!((one.work.reused, other.work.reused), (Tokens(0), Tokens(0)));
    assert!(again.work.reused > Tokens(0));
    assert_eq!(one.parts[0].tokens, other.parts[0].tokens);
    assert!(one.parts[0].blocks.iter().all(|block| !other.parts[0].blocks.contains(block)));
    assert_eq!(again.parts, one.parts);
}

/// Credit for text before the first picture, none for what follows.
#[test]
fn a_prompt_with_media_has_the_ids_before_them() {
    let mut body = conversation(5);
    let text = prepare(&prompter(), Endpoint::Chat, &body, Engine::VLLM);
    let picture = json!({"type": "image_url", "image_url": {"url": "http://x/1.png"}});
    let last = body["messages"].as_array_mut().and_then(|all| all.last_mut()).expect("there is one");
    last["content"] = json!([last["content"], picture]);
    let prompt = prepare(&prompter(), Endpoint::Chat, &body, Engine::VLLM);
    assert_eq!((prompt.refused, prompt.is_exact, prompt.images.len()), (None, false, 1));
    let known = &prompt.parts[0].tokens;
    assert!(known.len() > 100 && text.parts[0].tokens.starts_with(known), "{} tokens", known.len());
    assert!(prompt.count >= Tokens(known.len() as u64));
}

#[test]
fn bad_input_is_refused_and_harms_nobody() {
    let prompter = prompter();
    let good = conversation(3);
    let expected = prepare(&prompter, Endpoint::Chat, &good, Engine::VLLM);
    let many: Vec<Value> = (0..100_000).map(|_| json!({"role": "user", "content": "a"})).collect();
    let many = prepare(&prompter, Endpoint::Chat, &json!({"messages": many}), Engine::VLLM);
    assert!(many.refused.is_none() && many.count > Tokens(300_000), "100,000 messages are only many");
    let bad = [
        json!(null),
        json!([]),
        json!({"messages": "a"}),
        json!({"messages": [1, null]}),
        json!({"messages": {}}),
        json!({"messages": [{"role": "user", "content": {"a": 1}}]}),
        json!({"messages": good["messages"], "tools": 5}),
        json!({"messages": [{"role": "assistant", "tool_calls": [{}]}]}),
    ];
    for body in bad {
        for engine in [Engine::VLLM, Engine::SGLang] {
            for endpoint in [
                Endpoint::Chat,
                Endpoint::Completions,
                Endpoint::Messages,
                Endpoint::Responses,
                Endpoint::Generate,
            ] {
                let prompt = prepare(&prompter, endpoint, &body, engine);
                assert!(prompt.refused.is_some(), "{endpoint:?} {engine:?} {body}");
            }
        }
    }
    assert_eq!(prepare(&prompter, Endpoint::Chat, &good, Engine::VLLM).parts, expected.parts);
}

#[test]
fn a_tokenizer_that_is_cut_off_is_an_error_with_the_reason() {
    let cut = tempfile::tempdir().expect("a folder");
    let whole = std::fs::read(folder().join("tokenizer.json")).expect("the fixture is there");
    std::fs::write(cut.path().join("tokenizer.json"), &whole[..whole.len() / 2]).expect("written");
    let error = Prompter::load(cut.path(), ROOM, 1).expect_err("it must not load");
    assert!(crate::chain(&error).contains("tokenizer.json"), "{}", crate::chain(&error));
    let absent = tempfile::tempdir().expect("a folder");
    let absent = Prompter::load(absent.path(), ROOM, 1).expect_err("it must not load");
    for (error, cause) in [(error, "not JSON"), (absent, "No such file")] {
        let told = crate::chain(&error);
        assert_eq!(told.matches(cause).count(), 1, "the cause, once: {told}");
    }
}
