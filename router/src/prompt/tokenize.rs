//! Text to token ids, by Hugging Face `tokenizers`.

use std::path::{Path, PathBuf};

use tokenizers::pipeline::{EncodeOptions, Override, PipelineTokenizer};

/// Whether the tokenizer adds its own special tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Specials {
    /// It adds them: completions.
    Add,
    /// Only those in the text: rendered chats.
    AsWritten,
}

/// A loaded tokenizer. Shared by all threads.
pub struct Tokenizer {
    pipeline: PipelineTokenizer,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Tokenizer")
    }
}

/// Why a tokenizer was not loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The file cannot be read or upgraded.
    #[error("failed to read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What was wrong.
        #[source]
        source: tokenizers::ConvertError,
    },
    /// The file describes no tokenizer that is supported.
    #[error("failed to build the tokenizer of {}: {message}", path.display())]
    Build {
        /// The file.
        path: PathBuf,
        /// What was wrong.
        message: String,
    },
}

/// Why a text was not tokenised.
#[derive(Debug, thiserror::Error)]
#[error("failed to tokenise {bytes} bytes: {message}")]
pub struct EncodeError {
    bytes: usize,
    message: String,
}

impl Tokenizer {
    /// Loads `tokenizer.json` from `folder`, upgrading older files on the fly.
    pub fn load(folder: &Path) -> Result<Self, LoadError> {
        let path = folder.join("tokenizer.json");
        let canonical = tokenizers::canonicalize_file(&path)
            .map_err(|source| LoadError::Read { path: path.clone(), source })?;
        let pipeline = tokenizers::from_json(&canonical)
            .map_err(|error| LoadError::Build { path, message: error.to_string() })?;
        Ok(Self { pipeline })
    }

    /// Token ids of `text`, never truncated or padded.
    pub fn encode(&self, text: &str, specials: Specials) -> Result<Vec<u32>, EncodeError> {
        let options = EncodeOptions {
            add_special_tokens: specials == Specials::Add,
            encode_special_tokens: false,
            padding: Override::Off,
            truncation: Override::Off,
        };
        let mut tokens = Vec::with_capacity(text.len() / 4);
        self.pipeline
            .encode_into(text, &options, &mut tokens)
            .map_err(|error| EncodeError { bytes: text.len(), message: error.to_string() })?;
        Ok(tokens.iter().map(|token| token.id()).collect())
    }
}
