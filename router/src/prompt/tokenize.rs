//! Text to token ids, by Hugging Face `tokenizers`, and where a text may be cut.
//!
//! A *safe boundary* is where an added token begins that takes no blanks with it,
//! is no word and is matched before normalization: what stands before it and what
//! follows are tokenised independently, so the ids of a text are those of its
//! pieces. The tokenizer's own matcher finds them. That the pieces do agree with
//! the whole is not taken for granted: every tokenizer is tried when it is loaded,
//! see [`Tokenizer::splits`].

use std::path::{Path, PathBuf};

use tokenizers::pipeline::{
    EncodeOptions, Override, PipelinePatternMatcher, PipelineToken, PipelineTokenizer,
};

/// Texts on which a loaded tokenizer is tried.
const TRIALS: usize = 256;
/// Added tokens that occur in the trials.
const TRIED_TOKENS: usize = 256;

/// Whether the tokenizer adds its own special tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Specials {
    /// It adds them: completions.
    Add,
    /// Only those in the text: rendered chats.
    #[default]
    AsWritten,
}

/// A loaded tokenizer. Shared by all threads.
pub struct Tokenizer {
    pipeline: PipelineTokenizer,
    /// Ids of the added tokens at which a text may be cut, ascending.
    safe: Vec<u32>,
    /// What stands before and after a text with special tokens; `None` if that
    /// depends on the text.
    affixes: Option<(Vec<u32>, Vec<u32>)>,
    /// Why texts must not be cut.
    unsplittable: Option<String>,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Tokenizer")
    }
}

/// Why a tokenizer was not loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The file cannot be read.
    #[error("failed to read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What was wrong.
        #[source]
        source: std::io::Error,
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
        let text = std::fs::read_to_string(&path);
        let text = text.map_err(|source| LoadError::Read { path: path.clone(), source })?;
        // Their errors repeat their causes, so the text is all that is kept of them.
        let build = |message: String| LoadError::Build { path: path.clone(), message };
        let canonical = tokenizers::canonicalize_str(&text).map_err(|error| build(error.to_string()))?;
        let pipeline = tokenizers::from_json(&canonical).map_err(|error| build(error.to_string()))?;
        let added = pipeline.get_added_vocabulary().get_added_tokens_decoder();
        let begins_alone = |text: &str| {
            text.chars().next().is_some_and(|first| {
                !first.is_alphanumeric()
                    && !super::python::is_space(first)
                    && first != '_'
                    && first != '\u{2581}'
            })
        };
        let mut safe: Vec<u32> = added
            .iter()
            .filter(|(_, token)| !(token.lstrip || token.rstrip || token.single_word || token.normalized))
            .filter(|(_, token)| begins_alone(&token.content))
            .map(|(id, _)| *id)
            .collect();
        safe.sort_unstable();
        let mut loaded = Self { pipeline, safe, affixes: None, unsplittable: None };
        loaded.affixes = loaded.find_affixes();
        let mut contents: Vec<String> = added.into_iter().map(|(_, token)| token.content).collect();
        contents.sort();
        loaded.unsplittable = loaded.try_splitting(&contents).err();
        Ok(loaded)
    }

    /// Token ids of the whole `text`, never truncated or padded.
    pub fn encode(&self, text: &str, specials: Specials) -> Result<Vec<u32>, EncodeError> {
        let options = EncodeOptions {
            add_special_tokens: specials == Specials::Add,
            encode_special_tokens: false,
            padding: Override::Off,
            truncation: Override::Off,
        };
        let mut tokens: Vec<PipelineToken> = Vec::with_capacity(text.len() / 3);
        self.pipeline
            .encode_into(text, &options, &mut tokens)
            .map_err(|error| EncodeError { bytes: text.len(), message: error.to_string() })?;
        Ok(tokens.iter().map(|token| token.id()).collect())
    }

    /// What special tokens put before and after a text; nothing where they are not
    /// added. `None` if that is not known.
    pub fn affixes(&self, specials: Specials) -> Option<(&[u32], &[u32])> {
        match specials {
            Specials::AsWritten => Some((&[], &[])),
            Specials::Add => {
                self.affixes.as_ref().map(|(before, after)| (before.as_slice(), after.as_slice()))
            }
        }
    }

    /// Whether texts may be cut at safe boundaries; `Err` says why not.
    pub fn splits(&self) -> Result<(), &str> {
        self.unsplittable.as_deref().map_or(Ok(()), Err)
    }

    /// Where `text` may be cut, in order; never its beginning.
    pub fn boundaries<'a>(&'a self, text: &'a str) -> impl Iterator<Item = usize> + 'a {
        let mut at = 0;
        std::iter::from_fn(move || {
            while at < text.len() {
                let vocabulary = self.pipeline.get_added_vocabulary();
                let ((start, end), id) = vocabulary.extract_next(text.as_bytes(), at, false, false)?;
                // A match is never empty; a loop that stands still would be for ever.
                at = end.max(at + 1);
                if start > 0 && self.safe.binary_search(&id).is_ok() {
                    return Some(start);
                }
            }
            None
        })
    }

    fn find_affixes(&self) -> Option<(Vec<u32>, Vec<u32>)> {
        let around = |text: &str| {
            let (whole, bare) =
                (self.encode(text, Specials::Add).ok()?, self.encode(text, Specials::AsWritten).ok()?);
            let before =
                (0..=whole.len().checked_sub(bare.len())?).find(|at| whole[*at..].starts_with(&bare))?;
            Some((whole[..before].to_vec(), whole[before + bare.len()..].to_vec()))
        };
        around("a").filter(|found| around("two words").as_ref() == Some(found))
    }

    /// Compares whole and cut texts that put every kind of character next to added
    /// tokens.
    fn try_splitting(&self, added: &[String]) -> Result<(), String> {
        const SCRAPS: [&str; 24] = [
            "",
            " ",
            "  ",
            "\n",
            "\n\n",
            "\t",
            "a",
            "Word",
            " word",
            "9",
            "_",
            ".",
            "<",
            "<|",
            "|>",
            "'s",
            "\u{301}",
            "é",
            "e\u{301}",
            "漢字",
            "👩\u{200d}💻",
            "\u{200d}",
            "مرحبا",
            "\u{2581}",
        ];
        if self.safe.is_empty() {
            return Err("no added token is a safe boundary".to_owned());
        }
        // A linear congruential generator: the trials are the same on every start.
        let mut state = 0x2545_f491_4f6c_dd1d_u64;
        let mut pick = |many: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            usize::try_from(state >> 33).unwrap_or(0) % many
        };
        for trial in 0..TRIALS {
            let mut text = String::new();
            for _ in 0..8 {
                let token = if added.len() > TRIED_TOKENS && trial % 2 == 0 {
                    pick(TRIED_TOKENS)
                } else {
                    pick(added.len())
                };
                for _ in 0..pick(3) {
                    text.push_str(SCRAPS[pick(SCRAPS.len())]);
                }
                text.push_str(&added[token]);
            }
            text.push_str(SCRAPS[pick(SCRAPS.len())]);
            let whole = self.encode(&text, Specials::AsWritten).map_err(|error| error.to_string())?;
            let mut cut = Vec::with_capacity(whole.len());
            let mut from = 0;
            for to in self.boundaries(&text).chain([text.len()]) {
                cut.extend(
                    self.encode(&text[from..to], Specials::AsWritten).map_err(|error| error.to_string())?,
                );
                from = to;
            }
            if cut != whole {
                return Err(format!("a text of {} bytes has other tokens when it is cut", text.len()));
            }
        }
        Ok(())
    }
}
