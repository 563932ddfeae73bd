//! Flags of the simulator and the values they stand for. One type serves the
//! program and in-process tests, so that a default exists in one place only.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Parser, ValueEnum};

/// Ranks one simulator may hold: a node of eight boards with two engines each.
pub const MAX_DP_SIZE: u32 = 16;
/// Pages per rank: 16 Mi pages of 16 tokens exceed any engine in the field.
pub const MAX_NUM_PAGES: u32 = 1 << 24;

/// Which engine, and which layout of its wire formats, to imitate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Wire {
    /// vLLM 0.22: positional events, untagged extra keys in hashes.
    #[value(name = "vllm-0.22")]
    Vllm022,
    /// vLLM 0.32: map events. The release whose bytes were recorded live.
    #[value(name = "vllm-0.32")]
    Vllm032,
    /// vLLM 0.33: map events; a stored block's map header is 16 bits wide.
    #[value(name = "vllm-0.33")]
    Vllm033,
    /// SGLang 0.5.18: positional events, one per page.
    #[value(name = "sglang-0.5.18")]
    Sglang0518,
    /// SGLang 0.5.23: map events, consecutive pages in one event.
    #[value(name = "sglang-0.5.23")]
    Sglang0523,
}

/// Which part of its requests a disaggregated engine does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Disaggregation {
    /// Computes prompts and hands their keys and values over.
    Prefill,
    /// Takes them and generates.
    Decode,
}

/// Where a ZMQ socket listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventPort {
    /// The socket does not exist.
    Off,
    /// Port of rank 0; rank `n` uses this plus `n`. Zero picks free ports.
    Base(u16),
}

/// A LoRA adapter, served under its own model name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lora {
    /// The model name that selects it.
    pub name: String,
    /// Enters vLLM's block hash since 0.31.
    pub path: String,
}

/// A simulated engine. `Config::default()` has the program's defaults.
#[derive(Clone, Debug, Parser)]
#[command(
    name = "engine-sim",
    version,
    about = "A faithful stand-in for vLLM and SGLang",
    args_override_self = true
)]
pub struct Config {
    /// HTTP address; port 0 picks a free one.
    #[arg(long, default_value = "127.0.0.1:0")]
    pub listen: SocketAddr,
    /// Engine and wire layout.
    #[arg(long, value_enum, default_value = "vllm-0.33")]
    pub wire: Wire,
    /// Served model name.
    #[arg(long, default_value = "sim-model")]
    pub model: String,
    /// Directory with `tokenizer.json`, and `tokenizer_config.json` or `chat_template.jinja`
    /// for chats. Without it only prompts of token ids are served.
    #[arg(long)]
    pub tokenizer: Option<PathBuf>,
    /// Tokens per page (vLLM's block).
    #[arg(long, default_value_t = 16)]
    pub page_size: u32,
    /// Pages per rank. vLLM keeps one of them as its null block.
    #[arg(long, default_value_t = 4096)]
    pub num_pages: u32,
    /// Data-parallel ranks.
    #[arg(long, default_value_t = 1)]
    pub dp_size: u32,
    /// Rank of the first of them among all of a deployment over several pods; events name it so.
    #[arg(long, default_value_t = 0)]
    pub first_rank: u32,
    /// Base port of the event publishers, 0 for free ports, or `off`.
    #[arg(long, default_value = "0")]
    pub kv_events_port: EventPort,
    /// Base port of the replay sockets, 0 for free ports, or `off`.
    #[arg(long, default_value = "0")]
    pub replay_port: EventPort,
    /// Batches that a replay can return: the engines' `buffer_steps`.
    #[arg(long, default_value_t = 10_000)]
    pub replay_batches: usize,
    /// Topic frame of the events.
    #[arg(long, default_value = "")]
    pub topic: String,
    /// Requests that run at once, per rank.
    #[arg(long, default_value_t = 256)]
    pub max_running: usize,
    /// Prefill speed.
    #[arg(long, default_value_t = 100_000.0)]
    pub prefill_tokens_per_second: f64,
    /// Most prefill tokens in one step.
    #[arg(long, default_value_t = 8192)]
    pub chunk_tokens: usize,
    /// Fixed time of a step, in milliseconds.
    #[arg(long, default_value_t = 1.0)]
    pub step_ms: f64,
    /// Time a step takes for each decoding request, in milliseconds.
    #[arg(long, default_value_t = 0.05)]
    pub decode_request_ms: f64,
    /// Time a step takes for each context token of a decoding request, in nanoseconds.
    #[arg(long, default_value_t = 0.0)]
    pub context_token_ns: f64,
    /// Factor on every step time; 0 runs as fast as the machine can.
    #[arg(long, default_value_t = 1.0)]
    pub time_scale: f64,
    /// Longest prompt plus output, in tokens.
    #[arg(long, default_value_t = 131_072)]
    pub max_model_len: usize,
    /// Adapters, `NAME` or `NAME=PATH`; repeatable.
    #[arg(long)]
    pub lora: Vec<Lora>,
    /// Keep no prefixes: vLLM's `--no-enable-prefix-caching`, SGLang's `--disable-radix-cache`.
    #[arg(long)]
    pub no_prefix_caching: bool,
    /// Tell every store a second time for a group with a sliding window, as vLLM does for
    /// models with both kinds of attention.
    #[arg(long)]
    pub hybrid: bool,
    /// Where events say that its pages are: `GPU`, or as an engine tells of offloaded ones
    /// `CPU` or `DISK`.
    #[arg(long, default_value = "GPU")]
    pub medium: String,
    /// `PYTHONHASHSEED` of a vLLM process. Unset, vLLM up to 0.28 roots its hashes at
    /// random in each process.
    #[arg(long)]
    pub hash_seed: Option<String>,
    /// Do one part of each request: SGLang's `--disaggregation-mode`, vLLM with NixlConnector.
    #[arg(long, value_enum)]
    pub disaggregation: Option<Disaggregation>,
    /// Port where a prefill engine hands prompts over: SGLang's bootstrap port, vLLM's side
    /// channel. 0 picks a free one.
    #[arg(long, default_value_t = 0)]
    pub transfer_port: u16,
    /// Host under which vLLM's prefill engine tells decode to find that port; absent, the one
    /// that it listens at.
    #[arg(long)]
    pub transfer_host: Option<String>,
    /// How long a decode engine waits for a prompt, and a prefill engine keeps one.
    #[arg(long, default_value_t = 300_000)]
    pub transfer_timeout_ms: u64,
}

/// Why a configuration cannot be served.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// A number is outside its bounds.
    #[error("--{flag} must be between {least} and {most}")]
    OutOfRange {
        /// The flag's name.
        flag: &'static str,
        /// Smallest accepted value.
        least: u64,
        /// Largest accepted value.
        most: u64,
    },
    /// A speed or time that is negative, or not a number, or a prefill speed of zero.
    #[error("--{flag} must be a finite number that is not negative (a speed: above zero)")]
    NotATime {
        /// The flag's name.
        flag: &'static str,
    },
}

impl Wire {
    /// Whether this is vLLM; otherwise it is SGLang.
    pub const fn is_vllm(self) -> bool {
        match self {
            Self::Vllm022 | Self::Vllm032 | Self::Vllm033 => true,
            Self::Sglang0518 | Self::Sglang0523 => false,
        }
    }

    /// The imitated release.
    pub const fn version(self) -> &'static str {
        match self {
            Self::Vllm022 => "0.22.0",
            Self::Vllm032 => "0.32.0",
            Self::Vllm033 => "0.33.0",
            Self::Sglang0518 => "0.5.18",
            Self::Sglang0523 => "0.5.23",
        }
    }

    /// Whether events are maps with a `type` key; otherwise tagged arrays.
    pub const fn has_map_events(self) -> bool {
        match self {
            Self::Vllm032 | Self::Vllm033 | Self::Sglang0523 => true,
            Self::Vllm022 | Self::Sglang0518 => false,
        }
    }

    /// Whether a chat may bring its own token ids: vLLM since 0.27, SGLang since 0.5.13.
    pub const fn takes_token_ids(self) -> bool {
        match self {
            Self::Vllm032 | Self::Vllm033 | Self::Sglang0518 | Self::Sglang0523 => true,
            Self::Vllm022 => false,
        }
    }

    /// Whether replies of the replay socket carry the topic frame.
    pub const fn replay_has_topic(self) -> bool {
        // The same releases that changed to map events and a little later: between them
        // lie none that this program imitates.
        self.has_map_events()
    }
}

impl Disaggregation {
    /// Its name in flags and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

impl Config {
    /// Whether prompts are found again: SGLang's decode engine has no radix cache.
    pub fn keeps_prefixes(&self) -> bool {
        let sglang_decode = !self.wire.is_vllm() && self.disaggregation == Some(Disaggregation::Decode);
        !self.no_prefix_caching && !sglang_decode
    }

    /// Checks the bounds. Called by [`crate::EngineSim::start`].
    pub fn validate(&self) -> Result<(), ConfigError> {
        let bounds = [
            ("page-size", u64::from(self.page_size), 1, 4096),
            ("num-pages", u64::from(self.num_pages), 2, u64::from(MAX_NUM_PAGES)),
            ("dp-size", u64::from(self.dp_size), 1, u64::from(MAX_DP_SIZE)),
            ("first-rank", u64::from(self.first_rank), 0, 65_536),
            ("max-running", self.max_running as u64, 1, 65_536),
            ("chunk-tokens", self.chunk_tokens as u64, 1, 1 << 24),
            ("max-model-len", self.max_model_len as u64, 2, 1 << 24),
        ];
        for (flag, value, least, most) in bounds {
            if value < least || value > most {
                return Err(ConfigError::OutOfRange { flag, least, most });
            }
        }
        let times = [
            ("step-ms", self.step_ms),
            ("decode-request-ms", self.decode_request_ms),
            ("context-token-ns", self.context_token_ns),
            ("time-scale", self.time_scale),
            ("prefill-tokens-per-second", self.prefill_tokens_per_second),
        ];
        for (flag, value) in times {
            let least = if flag == "prefill-tokens-per-second" { f64::MIN_POSITIVE } else { 0.0 };
            if !value.is_finite() || value < least {
                return Err(ConfigError::NotATime { flag });
            }
        }
        Ok(())
    }
}

impl Default for Config {
    fn default() -> Self {
        Self::parse_from(["engine-sim"])
    }
}

impl FromStr for EventPort {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "off" { Ok(Self::Off) } else { text.parse().map(Self::Base) }
    }
}

impl FromStr for Lora {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (name, path) = match text.split_once('=') {
            Some((name, path)) => (name.to_owned(), path.to_owned()),
            None => (text.to_owned(), format!("/adapters/{text}")),
        };
        Ok(Self { name, path })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_valid_and_bounds_are_checked() {
        assert_eq!(Config::default().validate(), Ok(()));
        let check = |why: &str, change: fn(&mut Config)| {
            let mut config = Config::default();
            change(&mut config);
            assert!(config.validate().is_err(), "{why}");
        };
        check("a page holds tokens", |c| c.page_size = 0);
        check("a rank exists", |c| c.dp_size = 0);
        check("vLLM needs its null block and one more", |c| c.num_pages = 1);
        check("prefill ends", |c| c.prefill_tokens_per_second = 0.0);
        check("time does not run backwards", |c| c.time_scale = -1.0);
        check("not a number", |c| c.step_ms = f64::NAN);
    }

    #[test]
    fn ports_and_adapters_are_read_from_flags() {
        let flags = ["engine-sim", "--kv-events-port", "off", "--replay-port", "5657", "--lora", "a=/x"];
        let config = Config::try_parse_from(flags).unwrap();
        assert_eq!(config.kv_events_port, EventPort::Off);
        assert_eq!(config.replay_port, EventPort::Base(5657));
        assert_eq!(config.lora, [Lora { name: "a".to_owned(), path: "/x".to_owned() }]);
    }
}
