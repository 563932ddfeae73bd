//! What a run measured: one row per policy, the table, and whether the cache-aware policies won.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail};
use serde::Serialize;
use serde_json::json;

use super::drive::Driven;
use super::fleet;
use super::workload::Shape;
use crate::client::Chat;

/// A policy of the router.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// In turn.
    RoundRobin,
    /// Fewest active blocks.
    LeastLoad,
    /// The published formula.
    KvAware,
    /// The router's default.
    CachePlusLoad,
}

/// What one policy achieved.
#[derive(Clone, Debug, Serialize)]
pub struct PolicyResult {
    /// The policy's label.
    pub policy: &'static str,
    /// Requests, all of which were answered.
    pub requests: usize,
    /// How long all of it took.
    pub seconds: f64,
    /// Prompt tokens, as the engines counted them.
    pub prompt_tokens: u64,
    /// Of which engines found so many in their caches, as they report in `usage`.
    pub cached_tokens: u64,
    /// The rest: prompt tokens that were computed.
    pub recomputed_tokens: u64,
    /// Cached of all prompt tokens, 0 to 1.
    pub hit_share: f64,
    /// Median time to the first token.
    pub first_token_p50_ms: f64,
    /// 99th percentile of it.
    pub first_token_p99_ms: f64,
    /// Requests that each engine received.
    pub requests_per_worker: Vec<u64>,
    /// The most of these over their mean.
    pub max_over_mean: f64,
}

impl Policy {
    /// All, in the order in which they run; the default last.
    pub const ALL: [Self; 4] = [Self::RoundRobin, Self::LeastLoad, Self::KvAware, Self::CachePlusLoad];

    /// Its name in logs and tables.
    pub const fn label(self) -> &'static str {
        match self {
            Self::RoundRobin => "round-robin",
            Self::LeastLoad => "least-load",
            Self::KvAware => "kv-aware",
            Self::CachePlusLoad => "cache-plus-load",
        }
    }

    /// Its name in configuration files.
    pub const fn in_files(self) -> kvrouter_crds::config::Policy {
        use kvrouter_crds::config::Policy;
        match self {
            Self::RoundRobin => Policy::RoundRobin,
            Self::LeastLoad => Policy::LeastLoad,
            Self::KvAware => Policy::KvAware,
            Self::CachePlusLoad => Policy::CachePlusLoad,
        }
    }

    /// Whether it looks at caches, by its label.
    fn is_cache_aware(label: &str) -> bool {
        [Self::KvAware, Self::CachePlusLoad].iter().any(|policy| policy.label() == label)
    }
}

impl PolicyResult {
    /// Adds up what was measured. `driven` has at least one answer.
    pub fn new(policy: &'static str, driven: &Driven, requests_per_worker: Vec<u64>) -> Self {
        let sum = |count: fn(&Chat) -> u64| driven.chats.iter().map(count).sum::<u64>();
        let (prompt, cached) = (sum(|chat| chat.prompt_tokens), sum(|chat| chat.cached_tokens));
        let mut times: Vec<Duration> = driven.chats.iter().map(|chat| chat.first_token).collect();
        times.sort();
        let all: u64 = requests_per_worker.iter().sum();
        let mean = all as f64 / requests_per_worker.len().max(1) as f64;
        let most = requests_per_worker.iter().max().copied().unwrap_or(0);
        Self {
            policy,
            requests: driven.chats.len(),
            seconds: driven.elapsed.as_secs_f64(),
            prompt_tokens: prompt,
            cached_tokens: cached,
            recomputed_tokens: prompt.saturating_sub(cached),
            hit_share: cached as f64 / prompt.max(1) as f64,
            first_token_p50_ms: quantile_ms(&times, 0.5),
            first_token_p99_ms: quantile_ms(&times, 0.99),
            requests_per_worker,
            max_over_mean: most as f64 / mean.max(1.0),
        }
    }
}

/// The time that a share `q` of the sorted `times` does not exceed; 0 of none.
fn quantile_ms(times: &[Duration], q: f64) -> f64 {
    let rank = (q * times.len() as f64).ceil() as usize;
    times.get(rank.saturating_sub(1)).map_or(0.0, |time| time.as_secs_f64() * 1000.0)
}

/// The table, with a line on each column that needs one.
pub fn table(all: &[PolicyResult]) -> String {
    let mut text = format!(
        "{:<16} {:>9} {:>11} {:>9} {:>9}   {:<21} {:>8}\n",
        "policy", "hit share", "recomputed", "TTFT p50", "TTFT p99", "requests per worker", "max/mean",
    );
    let units = format!("{:<16} {:>9} {:>11} {:>9} {:>9}\n", "", "of prompt", "tokens", "ms", "ms");
    text.push_str(&units);
    text.push_str(&format!("{}\n", "-".repeat(89)));
    for row in all {
        let workers: Vec<String> = row.requests_per_worker.iter().map(u64::to_string).collect();
        text.push_str(&format!(
            "{:<16} {:>7.1} % {:>11} {:>9.0} {:>9.0}   {:<21} {:>8.2}\n",
            row.policy,
            row.hit_share * 100.0,
            thousands(row.recomputed_tokens),
            row.first_token_p50_ms,
            row.first_token_p99_ms,
            workers.join(" "),
            row.max_over_mean
        ));
    }
    text.push_str(
        "\nHit share is what the engines report (usage.prompt_tokens_details.cached_tokens), not what the\n\
         router believes. TTFT is the time to the first token at the client.\n",
    );
    text
}

/// One sentence: the default policy against the plainest one.
pub fn conclusion(all: &[PolicyResult]) -> String {
    let find = |policy: Policy| all.iter().find(|row| row.policy == policy.label());
    let (Some(plain), Some(ours)) = (find(Policy::RoundRobin), find(Policy::CachePlusLoad)) else {
        return String::new();
    };
    format!(
        "{} computed {:.1} times fewer prompt tokens than {}, and its median first token came {:.1} times sooner.\n",
        ours.policy,
        plain.recomputed_tokens as f64 / ours.recomputed_tokens.max(1) as f64,
        plain.policy,
        plain.first_token_p50_ms / ours.first_token_p50_ms.max(1e-3)
    )
}

/// Fails unless each cache-aware policy is ahead of each other one in hit share and in median TTFT.
pub fn judge(all: &[PolicyResult]) -> anyhow::Result<()> {
    let (aware, blind): (Vec<_>, Vec<_>) = all.iter().partition(|row| Policy::is_cache_aware(row.policy));
    for ours in &aware {
        for other in &blind {
            if ours.hit_share <= other.hit_share {
                bail!(
                    "{} found {:.1} % of prompt tokens cached, and {} {:.1} %: a cache-aware policy must find \
                     more; read the router's log for lines with `pick` and their `trust`",
                    ours.policy,
                    ours.hit_share * 100.0,
                    other.policy,
                    other.hit_share * 100.0
                );
            }
            if ours.first_token_p50_ms >= other.first_token_p50_ms {
                bail!(
                    "the median first token took {:.0} ms under {}, and {:.0} ms under {}: a cache-aware policy \
                     must be sooner; is the machine busy with other work?",
                    ours.first_token_p50_ms,
                    ours.policy,
                    other.first_token_p50_ms,
                    other.policy
                );
            }
        }
    }
    Ok(())
}

/// Writes all that was measured, and what was asked for.
pub fn write_json(path: &Path, seed: u64, shape: &Shape, all: &[PolicyResult]) -> anyhow::Result<()> {
    let results = json!({
        "seed": seed,
        "workload": shape,
        "fleet": {
            "engines": fleet::ENGINES,
            "cache_tokens_per_engine": fleet::PAGES * fleet::PAGE_TOKENS,
            "block_tokens": fleet::PAGE_TOKENS,
            "prefill_tokens_per_second": fleet::PREFILL_TOKENS_PER_SECOND,
        },
        "policies": all,
    });
    fs::write(path, format!("{results:#}\n")).with_context(|| format!("failed to write {}", path.display()))
}

/// `1234567` as `1,234,567`.
pub fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(policy: Policy, hit_share: f64, p50: f64) -> PolicyResult {
        PolicyResult {
            policy: policy.label(),
            requests: 1,
            seconds: 1.0,
            prompt_tokens: 100,
            cached_tokens: 0,
            recomputed_tokens: 100,
            hit_share,
            first_token_p50_ms: p50,
            first_token_p99_ms: p50,
            requests_per_worker: vec![1],
            max_over_mean: 1.0,
        }
    }

    #[test]
    fn both_cache_aware_policies_must_win_in_both_ways() {
        let check = |why: &str, kv_aware: (f64, f64), default: (f64, f64), good: bool| {
            let all = [
                row(Policy::RoundRobin, 0.4, 200.0),
                row(Policy::LeastLoad, 0.5, 150.0),
                row(Policy::KvAware, kv_aware.0, kv_aware.1),
                row(Policy::CachePlusLoad, default.0, default.1),
            ];
            assert_eq!(judge(&all).is_ok(), good, "{why}");
        };
        check("both ahead", (0.8, 60.0), (0.8, 50.0), true);
        check("one finds less than the best of the others", (0.45, 60.0), (0.8, 50.0), false);
        check("the other is later", (0.8, 60.0), (0.8, 150.0), false);
    }

    #[test]
    fn quantiles_are_of_the_sorted_times() {
        let times: Vec<Duration> = (1..=100).map(Duration::from_millis).collect();
        assert_eq!((quantile_ms(&times, 0.5), quantile_ms(&times, 0.99)), (50.0, 99.0));
        assert_eq!(quantile_ms(&[], 0.5), 0.0);
    }

    #[test]
    fn thousands_are_set_apart() {
        let texts = [0, 999, 1000, 1_234_567].map(thousands);
        assert_eq!(texts, ["0", "999", "1,000", "1,234,567"]);
    }
}
