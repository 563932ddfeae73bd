//! Model families whose chats do not go through a Jinja template.
//!
//! Their engines encode messages by code of their own, so whatever the folder's
//! template writes is another prompt. They are recognised by the model's
//! configuration, or by marks that only their templates have, and refused.
//! Authority: vllm/renderers/registry.py (0.32) and
//! sglang/srt/entrypoints/openai/chat_encoding.py (0.5.23).

use std::path::Path;

use kvrouter_crds::config::Engine;
use serde_json::Value;

use super::endpoint::Endpoint;
use super::template::{TemplateError, read_json};

/// A family that encodes chats itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Family {
    /// gpt-oss: OpenAI's harmony format.
    Harmony,
    /// DeepSeek V3.2.
    DeepSeekV32,
    /// DeepSeek V4.
    DeepSeekV4,
    /// Kimi K3.
    KimiK3,
    /// Mistral's own tokenizer.
    Mistral,
    /// Inkling.
    Inkling,
    /// Cohere's Command.
    Cohere,
}

impl Family {
    /// The family of the model in `folder`; `None` for those that use Jinja.
    pub fn of(folder: &Path) -> Result<Option<Self>, TemplateError> {
        let config = read_json(&folder.join("config.json"))?;
        let tokenizer = read_json(&folder.join("tokenizer_config.json"))?;
        let template = std::fs::read_to_string(folder.join("chat_template.jinja")).ok();
        let template = template.or_else(|| Some(tokenizer.get("chat_template")?.as_str()?.to_owned()));
        let by_mistral = folder.join("tekken.json").exists();
        Ok(recognise(&config, template.as_deref().unwrap_or_default(), by_mistral))
    }

    /// Its name, for logs and messages.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Harmony => "harmony",
            Self::DeepSeekV32 => "deepseek_v32",
            Self::DeepSeekV4 => "deepseek_v4",
            Self::KimiK3 => "kimi_k3",
            Self::Mistral => "mistral",
            Self::Inkling => "inkling",
            Self::Cohere => "cohere",
        }
    }

    /// Whether engines of a kind bypass the template for requests to `endpoint`.
    pub const fn bypasses(self, engine: Engine, endpoint: Endpoint) -> bool {
        match self {
            // SGLang renders gpt-oss's chats with Jinja, but not its responses.
            Self::Harmony => !matches!(engine, Engine::SGLang) || matches!(endpoint, Endpoint::Responses),
            Self::DeepSeekV32
            | Self::DeepSeekV4
            | Self::KimiK3
            | Self::Mistral
            | Self::Inkling
            | Self::Cohere => true,
        }
    }
}

fn recognise(config: &Value, template: &str, by_mistral: bool) -> Option<Family> {
    let kind = config.get("model_type").and_then(Value::as_str).unwrap_or_default();
    let architecture = config.pointer("/architectures/0").and_then(Value::as_str).unwrap_or_default();
    let is = |kinds: &[&str], part: &str| {
        kinds.contains(&kind) || (!part.is_empty() && architecture.contains(part))
    };
    // Marks of the harmony format, which no other template has together.
    let harmony = template.contains("<|channel|>") && template.contains("<|start|>");
    if is(&["gpt_oss"], "GptOss") || harmony {
        return Some(Family::Harmony);
    }
    if is(&["deepseek_v32"], "DeepseekV32") {
        return Some(Family::DeepSeekV32);
    }
    if is(&["deepseek_v4", "deepseek_v41"], "DeepseekV4") {
        return Some(Family::DeepSeekV4);
    }
    if is(&["kimi_k3"], "KimiK3") {
        return Some(Family::KimiK3);
    }
    if is(&["inkling"], "Inkling") {
        return Some(Family::Inkling);
    }
    if is(&["cohere", "cohere2", "command_a"], "Cohere") {
        return Some(Family::Cohere);
    }
    by_mistral.then_some(Family::Mistral)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[track_caller]
    fn check(why: &str, config: Value, template: &str, tekken: bool, expected: Option<Family>) {
        assert_eq!(recognise(&config, template, tekken), expected, "{why}");
    }

    #[test]
    fn families_that_bypass_jinja_are_recognised() {
        check("most", json!({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}), "", false, None);
        check("no configuration", Value::Null, "", false, None);
        check("by model type", json!({"model_type": "gpt_oss"}), "", false, Some(Family::Harmony));
        check("by template", Value::Null, "<|start|>a<|channel|>", false, Some(Family::Harmony));
        let v32 = json!({"architectures": ["DeepseekV32ForCausalLM"]});
        check("by architecture", v32, "", false, Some(Family::DeepSeekV32));
        let v3 = json!({"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]});
        check("its predecessor has a template", v3, "x", false, None);
        check("by a file", json!({"model_type": "mistral"}), "", true, Some(Family::Mistral));
        check("Mistral by Hugging Face's files", json!({"model_type": "mistral"}), "", false, None);
        let harmony = |engine, endpoint| Family::Harmony.bypasses(engine, endpoint);
        assert!(harmony(Engine::VLLM, Endpoint::Chat) && !harmony(Engine::SGLang, Endpoint::Chat));
        assert!(harmony(Engine::SGLang, Endpoint::Responses));
    }
}
