//! `kv-router tokenize`: what the router makes of one body, step by step.
//!
//! Prints the text, the ids, the block hashes and the time of each step, for
//! whoever wants to know why a prompt does not hit. Offline: it needs the model's
//! folder and nothing else. Block hashes are those of the namespace that the body
//! names, without an identity seed.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::{Args, ValueEnum};
use kvrouter_core::blocks::{Identity, IdentitySeed};
use kvrouter_core::units::BlockSize;
use kvrouter_crds::config::Engine;

use super::body::Body;
use super::endpoint::{Content, Endpoint};
use super::{Asked, LoadError, Part, Prompter, Refusal, Work, namespace};
use crate::clock::Clock;

/// Room for prefixes: enough to show what the second time costs.
const CACHE_BYTES: usize = 64 << 20;

/// Flags of `tokenize`.
#[derive(Clone, Debug, Args)]
pub struct TokenizeFlags {
    /// Folder with `tokenizer.json` and the chat template.
    #[arg(long)]
    pub model: PathBuf,
    /// File with a request's body; `-` reads standard input.
    #[arg(long)]
    pub body: PathBuf,
    /// Whose rendering to follow.
    #[arg(long, default_value = "vllm")]
    pub engine: EngineFlag,
    /// Path that the body is for.
    #[arg(long, default_value = "/v1/chat/completions")]
    pub endpoint: String,
    /// Tokens per block.
    #[arg(long, default_value_t = 16)]
    pub block_size: u32,
}

/// An engine family as flags spell it.
#[derive(Clone, Copy, Debug, ValueEnum)]
#[allow(missing_docs, reason = "the names are the engines'")]
pub enum EngineFlag {
    Vllm,
    #[value(name = "sglang")]
    SGLang,
}

/// Why nothing was printed, or not everything.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The model's folder.
    #[error("failed to load the tokenizer of {}", path.display())]
    Load {
        /// The folder.
        path: PathBuf,
        /// What was wrong.
        #[source]
        source: LoadError,
    },
    /// The body.
    #[error("failed to read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What was wrong.
        #[source]
        source: std::io::Error,
    },
    /// The body is not JSON.
    #[error("failed to parse {}", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// What was wrong.
        #[source]
        source: serde_json::Error,
    },
    /// A flag.
    #[error("--block-size must be at least 1")]
    BlockSize,
    /// The prompt is refused.
    #[error("the router would not tokenise this prompt, and route it by history and load: {}", .0.label())]
    Refused(Refusal),
    /// The terminal.
    #[error("failed to print")]
    Print(#[source] std::io::Error),
}

impl TraceError {
    /// What the program exits with: 2 where an input is at fault, 1 otherwise.
    pub const fn exit_code(&self) -> u8 {
        match self {
            Self::Load { .. } | Self::Read { .. } | Self::Parse { .. } | Self::BlockSize => 2,
            Self::Refused(_) | Self::Print(_) => 1,
        }
    }
}

/// Steps and how long they took.
struct Steps<'a> {
    clock: &'a Clock,
    started: u64,
    taken: Vec<(&'static str, u64)>,
}

impl Steps<'_> {
    fn done(&mut self, step: &'static str) {
        let now = self.clock.micros();
        self.taken.push((step, now - self.started));
        self.started = now;
    }
}

/// Runs `kv-router tokenize`.
pub fn run(flags: &TokenizeFlags) -> Result<(), TraceError> {
    let out = &mut std::io::stdout().lock();
    let clock = Clock::start();
    let size = BlockSize::new(flags.block_size).ok_or(TraceError::BlockSize)?;
    let prompter = Prompter::load(&flags.model, CACHE_BYTES, clock.unique())
        .map_err(|source| TraceError::Load { path: flags.model.clone(), source })?;
    let bytes = read(&flags.body)?;
    let identity = Identity::new(IdentitySeed::new(b""));
    let asked = Asked {
        endpoint: Endpoint::of(&flags.endpoint),
        engine: match flags.engine {
            EngineFlag::Vllm => Engine::VLLM,
            EngineFlag::SGLang => Engine::SGLang,
        },
        adapter: None::<Arc<str>>,
        identity: &identity,
        size,
        now_unix_ms: clock.unix_ms(),
    };
    let mut steps = Steps { clock: &clock, started: clock.micros(), taken: Vec::new() };
    let parts = trace(&prompter, &asked, &flags.body, &bytes, &mut steps, out)?;
    print(out, &parts, &steps.taken, prompter.uncached()).map_err(TraceError::Print)
}

fn read(path: &Path) -> Result<Vec<u8>, TraceError> {
    let mut bytes = Vec::new();
    let done = match path.to_str() {
        Some("-") => std::io::stdin().lock().read_to_end(&mut bytes).map(drop),
        _ => std::fs::read(path).map(|found| bytes = found),
    };
    done.map(|()| bytes).map_err(|source| TraceError::Read { path: path.to_owned(), source })
}

/// The steps of [`Prompter::prepare`], one after the other; prints texts.
fn trace(
    prompter: &Prompter,
    asked: &Asked<'_>,
    path: &Path,
    bytes: &[u8],
    steps: &mut Steps<'_>,
    out: &mut impl Write,
) -> Result<Vec<(Part, Work)>, TraceError> {
    let mut body = Body::parse(asked.endpoint, bytes)
        .map_err(|source| TraceError::Parse { path: path.to_owned(), source })?;
    steps.done("parse");
    let root = asked.identity.root(&namespace(asked, &body.fields));
    let content = prompter.content(asked.endpoint, &mut body, asked.engine).map_err(TraceError::Refused)?;
    let (texts, specials) = match content {
        Content::Ids(lists) => {
            let part = |tokens: Vec<u32>| Part {
                blocks: kvrouter_core::blocks::chain(root, asked.size, &tokens),
                tokens,
            };
            let parts = lists.into_iter().map(|ids| (part(ids), Work::default())).collect();
            steps.done("hash");
            return Ok(parts);
        }
        Content::Texts(texts, specials) => (texts, specials),
        Content::Chat(chat) => {
            let specials = chat.specials;
            let rendered =
                prompter.render(*chat, asked.engine, asked.now_unix_ms).map_err(TraceError::Refused)?;
            let known = prompter.known(&rendered).map_err(TraceError::Refused)?.to_owned();
            steps.done("render");
            if known.len() < rendered.text.len() {
                let note = "text up to the first media, of which there is more behind it";
                writeln!(out, "# {note}").map_err(TraceError::Print)?;
            }
            (vec![known], specials)
        }
    };
    let mut parts = Vec::new();
    for text in &texts {
        writeln!(out, "text ({} bytes):\n{text}\n", text.len()).map_err(TraceError::Print)?;
    }
    steps.done("print the text");
    for step in ["encode and hash", "encode and hash again, with the cache"] {
        let encode = |text: &String| prompter.encode(text, specials, root, asked.size);
        parts = texts.iter().map(encode).collect::<Result<Vec<_>, Refusal>>().map_err(TraceError::Refused)?;
        steps.done(step);
    }
    Ok(parts)
}

fn print(
    out: &mut impl Write,
    parts: &[(Part, Work)],
    steps: &[(&str, u64)],
    uncached: Option<&str>,
) -> std::io::Result<()> {
    for (part, _) in parts {
        writeln!(out, "ids ({}):\n{:?}\n", part.tokens.len(), part.tokens)?;
        let hashes: Vec<String> = part.blocks.iter().map(|block| format!("{:016x}", block.0)).collect();
        writeln!(out, "block hashes ({}):\n{}\n", hashes.len(), hashes.join(" "))?;
    }
    if let Some(reason) = uncached {
        writeln!(out, "prefixes are not kept: {reason}")?;
    }
    for (step, micros) in steps {
        writeln!(out, "{:>9.3} ms  {step}", *micros as f64 / 1000.0)?;
    }
    Ok(())
}
