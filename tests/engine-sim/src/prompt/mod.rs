//! From a request's text to token ids and back, as the engines do it: the model's chat
//! template, its tokenizer, and each engine's own habits.
//!
//! Chats are encoded without special tokens (the template wrote them), completions with.

mod template;
mod tools;
mod words;

use std::path::Path;

use parking_lot::RwLock;
use serde_json::{Map, Value};
use tokenizers::pipeline::{EncodeOptions, PipelineToken, PipelineTokenizer};

use crate::config::Wire;
use template::ChatTemplate;
use words::Words;

/// Why a prompt could not be made.
#[derive(Debug, thiserror::Error)]
pub enum PromptError {
    /// The tokenizer's files are unreadable.
    #[error("failed to load {file}")]
    Load {
        /// Which file.
        file: String,
        /// Cause.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Text came to an engine that was started without a tokenizer.
    #[error("this engine has no tokenizer; send token ids")]
    NoTokenizer,
    /// A chat came to a model without a template.
    #[error("the model has no chat template")]
    NoTemplate,
    /// The template refused the chat.
    #[error("failed to render the chat template: {0}")]
    Render(#[from] minijinja::Error),
    /// The tokenizer refused the text.
    #[error("failed to tokenize the prompt")]
    Tokenize(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// A chat that is no list of messages.
    #[error("messages must be a list of objects with a role")]
    Messages,
}

/// A model's text side. Without a tokenizer only token ids are served.
pub(crate) struct Prompter {
    wire: Wire,
    tokenizer: Option<PipelineTokenizer>,
    template: Option<ChatTemplate>,
    /// What stands in for the model's own template, by a fault.
    other_template: RwLock<Option<ChatTemplate>>,
    words: Words,
}

impl Prompter {
    /// Reads the tokenizer in `directory`, if there is one.
    pub(crate) fn load(wire: Wire, directory: Option<&Path>) -> Result<Self, PromptError> {
        let Some(directory) = directory else {
            let words = Words::without_tokenizer();
            return Ok(Self {
                wire,
                tokenizer: None,
                template: None,
                other_template: RwLock::default(),
                words,
            });
        };
        let file = directory.join("tokenizer.json");
        let failed = |source| PromptError::Load { file: file.display().to_string(), source };
        let json = tokenizers::canonicalize_file(&file).map_err(|error| failed(error.into()))?;
        let tokenizer = tokenizers::from_json(&json).map_err(failed)?;
        let template = ChatTemplate::load(directory)?;
        let words = Words::of(&tokenizer);
        Ok(Self { wire, tokenizer: Some(tokenizer), template, other_template: RwLock::default(), words })
    }

    /// Renders chats with `source` from now on; with the model's own template where it is empty.
    pub(crate) fn use_template(&self, source: &str) -> Result<(), PromptError> {
        let other = if source.is_empty() { None } else { Some(ChatTemplate::new(source, Map::new())?) };
        *self.other_template.write() = other;
        Ok(())
    }

    /// Token ids of a completion's text.
    pub(crate) fn encode_completion(&self, text: &str) -> Result<Vec<u32>, PromptError> {
        encode(self.tokenizer()?, text, &EncodeOptions::default())
    }

    /// Token ids of a chat body.
    pub(crate) fn encode_chat(&self, body: &Value) -> Result<Vec<u32>, PromptError> {
        let tokenizer = self.tokenizer()?;
        let other = self.other_template.read();
        let template = other.as_ref().or(self.template.as_ref()).ok_or(PromptError::NoTemplate)?;
        let text = template.render(self.wire, body)?;
        encode(tokenizer, &text, &EncodeOptions::no_specials())
    }

    /// Text of token ids, special tokens left out.
    pub(crate) fn decode(&self, tokens: &[u32]) -> Result<String, PromptError> {
        self.tokenizer()?.decode(tokens, true).map_err(PromptError::Tokenize)
    }

    /// What the model answers to `prompt`: always the same `count` tokens with their text. The
    /// `choice`-th of several answers differs from the others.
    pub(crate) fn answer(&self, prompt: &[u32], choice: usize, count: usize) -> Answer {
        self.words.answer(prompt, choice, count)
    }

    fn tokenizer(&self) -> Result<&PipelineTokenizer, PromptError> {
        self.tokenizer.as_ref().ok_or(PromptError::NoTokenizer)
    }
}

/// Output tokens and the text that each of them adds.
pub(crate) struct Answer {
    pub(crate) tokens: Vec<u32>,
    pub(crate) pieces: Vec<String>,
}

fn encode(
    tokenizer: &PipelineTokenizer,
    text: &str,
    options: &EncodeOptions,
) -> Result<Vec<u32>, PromptError> {
    let mut tokens: Vec<PipelineToken> = Vec::new();
    tokenizer.encode_into(text, options, &mut tokens).map_err(PromptError::Tokenize)?;
    Ok(tokens.into_iter().map(u32::from).collect())
}

#[cfg(test)]
mod tests;
