//! The text side against a tokenizer made for the purpose.

use serde_json::json;

use super::*;

/// A byte-level BPE of a few words, with the pre-tokenizer of the GPT-2 family.
pub(crate) fn tiny_tokenizer() -> tempfile::TempDir {
    let mut vocabulary = serde_json::Map::new();
    let mut add = |token: String| {
        let id = vocabulary.len();
        vocabulary.entry(token).or_insert(json!(id));
    };
    // GPT-2's alphabet: printable bytes stand for themselves, the others for what follows 255.
    let printable = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let others = (0..=255_u8).filter(|byte| !printable(byte)).zip(256_u32..);
    for character in (0..=255_u8).filter(printable).map(char::from) {
        add(character.to_string());
    }
    for (_, code) in others {
        add(char::from_u32(code).unwrap().to_string());
    }
    let mut merges = Vec::new();
    for word in ["the", "cat", "sat", "Ġthe", "Ġcat", "Ġsat", "Ġon"] {
        let letters: Vec<char> = word.chars().collect();
        let mut left = letters[0].to_string();
        for letter in &letters[1..] {
            let pair = json!([left, letter.to_string()]);
            if !merges.contains(&pair) {
                merges.push(pair);
            }
            left.push(*letter);
            add(left.clone());
        }
    }
    let specials = ["<|im_start|>", "<|im_end|>"].iter().zip(vocabulary.len()..).map(|(content, id)| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false, "special": true})
    });
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": specials.collect::<Vec<_>>(),
        "normalizer": null, "post_processor": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
                  "vocab": vocabulary, "merges": merges},
    });
    let template = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}\
                    {% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";
    let directory = tempfile::tempdir().unwrap();
    let write = |name: &str, value: &Value| {
        std::fs::write(directory.path().join(name), serde_json::to_vec(value).unwrap()).unwrap();
    };
    write("tokenizer.json", &tokenizer);
    write("tokenizer_config.json", &json!({"chat_template": template, "eos_token": "<|im_end|>"}));
    directory
}

#[test]
fn the_next_turn_extends_the_previous_one_token_by_token() {
    let directory = tiny_tokenizer();
    for wire in [Wire::Vllm033, Wire::Sglang0523] {
        let prompter = Prompter::load(wire, Some(directory.path())).unwrap();
        let mut messages = vec![json!({"role": "user", "content": "the cat"})];
        for _ in 0..5 {
            let mut prompt = prompter.encode_chat(&json!({"messages": messages})).unwrap();
            let answer = prompter.answer(&prompt, 0, 12);
            assert_eq!(prompter.decode(&answer.tokens).unwrap(), answer.pieces.concat());
            messages.push(json!({"role": "assistant", "content": answer.pieces.concat()}));
            messages.push(json!({"role": "user", "content": "sat on"}));
            let next = prompter.encode_chat(&json!({"messages": messages})).unwrap();
            prompt.extend(&answer.tokens);
            assert_eq!(next[..prompt.len()], prompt, "{wire:?}");
        }
    }
}

#[test]
fn answers_depend_on_prompt_and_choice_alone() {
    let prompter = Prompter::load(Wire::Vllm033, None).unwrap();
    let tokens = |prompt: &[u32], choice| prompter.answer(prompt, choice, 8).tokens;
    assert_eq!(tokens(&[1, 2], 0), tokens(&[1, 2], 0));
    assert_ne!(tokens(&[1, 2], 0), tokens(&[1, 2], 1));
    assert_ne!(tokens(&[1, 2], 0), tokens(&[1, 3], 0));
}

#[test]
fn an_engine_without_a_tokenizer_says_so() {
    let prompter = Prompter::load(Wire::Vllm033, None).unwrap();
    assert!(matches!(prompter.encode_completion("the"), Err(PromptError::NoTokenizer)));
}
