//! What a replay compares: shipped policies with settings, and peers' rules.
//!
//! Spelt `name:key=value:key=value`, as flags take it and tables print it.

use serde::Serialize;

use super::peers::{CacheAware, Peer};
use crate::policy::{LoadWeights, PolicyKind, Settings};

/// One rule that is replayed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Contender {
    /// A policy of ours, by the code that serves.
    Shipped(Settings),
    /// A model of another router's.
    Peer(Peer),
}

/// Why a spelling names no contender.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpellingError {
    /// No such rule.
    #[error("no policy is called {0:?}")]
    Name(String),
    /// No such key for this rule.
    #[error("{name} has no setting {key:?}")]
    Key {
        /// The rule.
        name: String,
        /// The key.
        key: String,
    },
    /// The value is no number, or below 0.
    #[error("{key}={value:?} must be a number of 0 or more")]
    Value {
        /// The key.
        key: String,
        /// The value.
        value: String,
    },
}

impl Contender {
    /// Every shipped policy and every peer, with default settings.
    pub fn defaults() -> Vec<Self> {
        let mut all = Self::shipped();
        all.extend(Peer::DEFAULTS.map(Self::Peer));
        all
    }

    /// Every shipped policy with default settings.
    pub fn shipped() -> Vec<Self> {
        PolicyKind::ALL.map(|policy| Self::Shipped(Settings { policy, ..Settings::default() })).to_vec()
    }

    /// The rule that `text` spells.
    pub fn parse(text: &str) -> Result<Self, SpellingError> {
        let mut parts = text.split(':');
        let name = parts.next().unwrap_or_default();
        let found = Self::defaults().into_iter().find(|contender| contender.name() == name);
        let mut contender = found.ok_or_else(|| SpellingError::Name(name.to_owned()))?;
        for part in parts {
            let (key, value) = part.split_once('=').unwrap_or((part, ""));
            let wrong = || SpellingError::Value { key: key.to_owned(), value: value.to_owned() };
            let number: f64 = value.parse().map_err(|_| wrong())?;
            if !number.is_finite() || number < 0.0 {
                return Err(wrong());
            }
            let field = contender.field(key);
            *field.ok_or_else(|| SpellingError::Key { name: name.to_owned(), key: key.to_owned() })? = number;
        }
        Ok(contender)
    }

    /// The rule's name without settings.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Shipped(settings) => settings.policy.label(),
            Self::Peer(peer) => peer.label(),
        }
    }

    /// The rule with all settings that count for it.
    pub fn spelling(&self) -> String {
        let mut copy = *self;
        let keys = ["overlap", "queue", "decode", "request", "imbalance", "scale", "prefix", "utilisation"];
        let more = ["threshold", "abs", "rel"];
        keys.into_iter().chain(more).fold(self.name().to_owned(), |text, key| match copy.field(key) {
            Some(value) => format!("{text}:{key}={value}"),
            None => text,
        })
    }

    fn field(&mut self, key: &str) -> Option<&mut f64> {
        match self {
            Self::Shipped(settings) => shipped_field(settings, key),
            Self::Peer(Peer::Dynamo { scale }) => (key == "scale").then_some(scale),
            Self::Peer(Peer::Published { overlap }) => (key == "overlap").then_some(overlap),
            Self::Peer(Peer::LlmD { prefix, queue, utilisation }) => match key {
                "prefix" => Some(prefix),
                "queue" => Some(queue),
                "utilisation" => Some(utilisation),
                _ => None,
            },
            Self::Peer(Peer::Sglang(settings) | Peer::VllmRouter(settings)) => {
                let CacheAware { threshold, balance_abs, balance_rel } = settings;
                match key {
                    "threshold" => Some(threshold),
                    "abs" => Some(balance_abs),
                    "rel" => Some(balance_rel),
                    _ => None,
                }
            }
        }
    }
}

fn shipped_field<'a>(settings: &'a mut Settings, key: &str) -> Option<&'a mut f64> {
    let LoadWeights { queue, decode, request, imbalance } = &mut settings.load;
    let all = settings.policy == PolicyKind::CachePlusLoad;
    match key {
        "overlap" if all || settings.policy == PolicyKind::KvAware => Some(&mut settings.overlap.default),
        "queue" if all => Some(queue),
        "decode" if all => Some(decode),
        "request" if all => Some(request),
        "imbalance" if all => Some(imbalance),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spellings_are_read_back() {
        for contender in Contender::defaults() {
            assert_eq!(Contender::parse(&contender.spelling()), Ok(contender));
            assert_eq!(Contender::parse(contender.name()), Ok(contender));
        }
        let tuned = Contender::parse("cache-plus-load:decode=0.1:queue=2").expect("good");
        assert_eq!(tuned.spelling(), "cache-plus-load:overlap=1:queue=2:decode=0.1:request=0:imbalance=0");
        for (text, message) in [
            ("fastest", "no policy is called \"fastest\""),
            ("lmetric:decode=1", "lmetric has no setting \"decode\""),
            ("kv-aware:overlap=-1", "overlap=\"-1\" must be a number of 0 or more"),
            ("kv-aware:overlap", "overlap=\"\" must be a number of 0 or more"),
        ] {
            assert_eq!(Contender::parse(text).expect_err("bad").to_string(), message);
        }
    }
}
