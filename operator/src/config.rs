//! Flags and environment, checked before anything starts.
//!
//! Nothing else in this crate reads a flag or a variable. Every flag has a
//! variable `KVROUTER_OPERATOR_*`; the flag wins.

#![allow(clippy::disallowed_methods, reason = "this is the file that reads the environment")]

use std::net::{Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use jiff::SignedDuration;

/// The release's own router image; images are tagged with the version.
pub const DEFAULT_ROUTER_IMAGE: &str = concat!("ghcr.io/kvrouter/kv-router:", env!("CARGO_PKG_VERSION"));
/// Where a pod finds the namespace it runs in.
const NAMESPACE_FILE: &str = "/var/run/secrets/kubernetes.io/serviceaccount/namespace";
/// Longest name of a namespace, a ClusterRole's label and the like.
const DNS_LABEL: usize = 63;

/// The control plane of kvrouter.
#[derive(Debug, Parser)]
#[command(name = "kv-router-operator", version, about)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Reconciles InferencePools and KvRouters until told to stop.
    // The last of two equal flags wins: charts append what users add.
    #[command(args_override_self = true)]
    Run(RunFlags),
    /// Prints, without a cluster, the objects it would apply and the conditions it can already know.
    Render(RenderFlags),
    /// Sends one chat completion through a router, or through every KvRouter, and prints the answers.
    Check(CheckFlags),
}

/// What both commands put into the objects they make.
#[derive(Clone, Debug, Args)]
pub struct ChildFlags {
    /// Image of routers whose KvRouter names none.
    #[arg(long, env = "KVROUTER_OPERATOR_ROUTER_IMAGE", default_value = DEFAULT_ROUTER_IMAGE)]
    pub router_image: String,
    /// Image of injected bridges. Default: the router image.
    #[arg(long, env = "KVROUTER_OPERATOR_BRIDGE_IMAGE")]
    pub bridge_image: Option<String>,
    /// Broker of pools without kvEvents.nats: nats://host:port or tls://host:port.
    #[arg(long, env = "KVROUTER_OPERATOR_NATS_URL")]
    pub nats_url: Option<String>,
    /// ClusterRole that routers are bound to in their namespace.
    #[arg(long, env = "KVROUTER_OPERATOR_ROUTER_CLUSTER_ROLE", default_value = "kvrouter-router")]
    pub router_cluster_role: String,
    /// Whether named engine workloads may be patched.
    #[arg(long, env = "KVROUTER_OPERATOR_WORKLOAD_PATCHING", default_value_t = true,
          action = clap::ArgAction::Set, num_args = 0..=1, default_missing_value = "true")]
    pub workload_patching: bool,
}

/// Flags of `run`.
#[derive(Clone, Debug, Args)]
pub struct RunFlags {
    /// What goes into children.
    #[command(flatten)]
    pub children: ChildFlags,
    /// Namespaces to work in, separated by commas. Default: all.
    #[arg(long, env = "KVROUTER_OPERATOR_WATCH_NAMESPACES", value_delimiter = ',')]
    pub watch_namespaces: Vec<String>,
    /// Namespace of the leader's Lease. Default: the one the operator runs in.
    #[arg(long, env = "KVROUTER_OPERATOR_LEASE_NAMESPACE")]
    pub lease_namespace: Option<String>,
    /// Whether only one of several operators writes.
    #[arg(long, env = "KVROUTER_OPERATOR_LEADER_ELECT", default_value_t = true,
          action = clap::ArgAction::Set, num_args = 0..=1, default_missing_value = "true")]
    pub leader_elect: bool,
    /// Where /livez, /readyz and /metrics are served.
    #[arg(long, env = "KVROUTER_OPERATOR_LISTEN", default_value = "0.0.0.0:8080")]
    pub listen: SocketAddr,
    /// How long an observed condition must agree before it flips.
    #[arg(long, env = "KVROUTER_OPERATOR_HYSTERESIS_SECONDS", default_value_t = 30)]
    pub hysteresis_seconds: u64,
    /// How often the routers' health reports are read.
    #[arg(long, env = "KVROUTER_OPERATOR_POLL_SECONDS", default_value_t = 5)]
    pub poll_seconds: u64,
    /// Port of the routers' health reports; only tests need another.
    #[arg(long, env = "KVROUTER_OPERATOR_REPORT_PORT", default_value_t = 9090, hide = true)]
    pub report_port: u16,
    /// Logs are JSON, one object a line.
    #[arg(long, env = "KVROUTER_OPERATOR_LOG_JSON", default_value_t = false,
          action = clap::ArgAction::Set, num_args = 0..=1, default_missing_value = "true")]
    pub log_json: bool,
}

/// Flags of `check`.
#[derive(Clone, Debug, Args)]
pub struct CheckFlags {
    /// The router: http://HOST:PORT. Default: every KvRouter that may be listed.
    #[arg(long)]
    pub url: Option<String>,
    /// The model to name. Default: the first that the router lists.
    #[arg(long)]
    pub model: Option<String>,
    /// Namespaces whose KvRouters are asked, separated by commas. Default: all.
    #[arg(long, env = "KVROUTER_OPERATOR_WATCH_NAMESPACES", value_delimiter = ',')]
    pub watch_namespaces: Vec<String>,
    /// How long a router may take for an answer.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub timeout_seconds: u64,
}

/// Flags of `render`.
#[derive(Clone, Debug, Args)]
pub struct RenderFlags {
    /// What goes into children.
    #[command(flatten)]
    pub children: ChildFlags,
    /// Files with InferencePools and KvRouters, or folders with .yaml, .yml and .json files; `-` is standard input.
    #[arg(short = 'f', long = "file", required = true)]
    pub files: Vec<PathBuf>,
    /// Namespace of objects that name none.
    #[arg(short = 'n', long, default_value = "default")]
    pub namespace: String,
}

/// Checked settings of `run`.
#[derive(Clone, Debug)]
pub struct Config {
    /// What goes into children.
    pub children: ChildFlags,
    /// Namespaces to work in; empty for all. Sorted, none twice.
    pub watch_namespaces: Vec<String>,
    /// The Lease to hold before writing; absent when there is one operator only.
    pub lease: Option<LeaseName>,
    /// Where probes and metrics are served.
    pub listen: SocketAddr,
    /// How long an observed condition must agree before it flips.
    pub hysteresis: Duration,
    /// How often health reports are read.
    pub poll_interval: Duration,
    /// Port of the health reports.
    pub report_port: u16,
    /// Name of the pod that this runs in, for events; none outside of one.
    pub instance: Option<String>,
}

/// A Lease and who asks for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseName {
    /// Its namespace.
    pub namespace: String,
    /// What this process is called in it: the pod's name, where there is one.
    pub holder: String,
}

/// Why the settings cannot be used.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ConfigError {
    /// A flag has a value of the wrong shape.
    #[error("{flag} is `{value}`: {expected}")]
    Value {
        /// The flag.
        flag: &'static str,
        /// What was given.
        value: String,
        /// What would do.
        expected: &'static str,
    },
    /// Nobody said where the Lease is.
    #[error(
        "no namespace for the leader's Lease: outside a pod, add --lease-namespace NAME or --leader-elect=false"
    )]
    NoLeaseNamespace,
}

impl Config {
    /// [`Config::hysteresis`], as calendars count.
    pub fn window(&self) -> SignedDuration {
        SignedDuration::try_from(self.hysteresis).unwrap_or(SignedDuration::MAX)
    }
}

impl ChildFlags {
    /// Image of injected bridges.
    pub fn bridge_image(&self) -> &str {
        self.bridge_image.as_deref().unwrap_or(&self.router_image)
    }

    /// Checks every value.
    pub fn check(&self) -> Result<(), ConfigError> {
        let image = "an image such as registry.example/kv-router:1.0 is needed";
        check("--router-image", &self.router_image, image, is_word)?;
        if let Some(bridge) = &self.bridge_image {
            check("--bridge-image", bridge, image, is_word)?;
        }
        if let Some(url) = &self.nats_url {
            check("--nats-url", url, "nats://host:port or tls://host:port is needed", is_broker)?;
        }
        let role = "the name of a ClusterRole is needed, such as kvrouter-router";
        check("--router-cluster-role", &self.router_cluster_role, role, is_word)
    }
}

impl RunFlags {
    /// Checks every value and finds out what was left to the surroundings.
    pub fn config(&self) -> Result<Config, ConfigError> {
        let namespace = std::fs::read_to_string(NAMESPACE_FILE).ok();
        let host = std::env::var("POD_NAME").or_else(|_| std::env::var("HOSTNAME")).ok();
        self.checked(namespace.as_deref().map(str::trim), host.as_deref())
    }

    fn checked(&self, own_namespace: Option<&str>, host: Option<&str>) -> Result<Config, ConfigError> {
        self.children.check()?;
        let mut watch_namespaces = self.watch_namespaces.clone();
        watch_namespaces.retain(|name| !name.is_empty());
        for name in watch_namespaces.iter().chain(&self.lease_namespace) {
            let expected = "names of namespaces are lower-case letters, digits and dashes";
            check("--watch-namespaces or --lease-namespace", name, expected, is_dns_label)?;
        }
        watch_namespaces.sort();
        watch_namespaces.dedup();
        between("--poll-seconds", self.poll_seconds, 1, 60, "1 to 60 seconds are possible")?;
        between("--hysteresis-seconds", self.hysteresis_seconds, 0, 600, "0 to 600 seconds are possible")?;
        let lease = match (self.leader_elect, self.lease_namespace.as_deref().or(own_namespace)) {
            (false, _) => None,
            (true, None) => return Err(ConfigError::NoLeaseNamespace),
            (true, Some(namespace)) => {
                // Two processes of one pod name (a restarted container) must not
                // take each other for themselves.
                let host = host.unwrap_or("kv-router-operator");
                let life = jiff::Timestamp::now().as_millisecond();
                Some(LeaseName { namespace: namespace.to_owned(), holder: format!("{host}_{life:x}") })
            }
        };
        Ok(Config {
            children: self.children.clone(),
            watch_namespaces,
            lease,
            listen: self.listen,
            hysteresis: Duration::from_secs(self.hysteresis_seconds),
            poll_interval: Duration::from_secs(self.poll_seconds),
            report_port: self.report_port,
            instance: host.map(str::to_owned),
        })
    }
}

fn check(
    flag: &'static str,
    value: &str,
    expected: &'static str,
    is_right: fn(&str) -> bool,
) -> Result<(), ConfigError> {
    if is_right(value) {
        return Ok(());
    }
    Err(ConfigError::Value { flag, value: value.to_owned(), expected })
}

fn between(
    flag: &'static str,
    value: u64,
    least: u64,
    most: u64,
    expected: &'static str,
) -> Result<(), ConfigError> {
    if (least..=most).contains(&value) {
        return Ok(());
    }
    Err(ConfigError::Value { flag, value: value.to_string(), expected })
}

fn is_word(value: &str) -> bool {
    !value.is_empty() && value.len() <= 512 && !value.contains(char::is_whitespace)
}

/// Whether it is `nats://host:port` or `tls://host:port`, with no password in
/// it; without a port it is 4222.
pub fn is_broker(url: &str) -> bool {
    let Some(address) = url.strip_prefix("nats://").or_else(|| url.strip_prefix("tls://")) else {
        return false;
    };
    let (host, port) = match address.rsplit_once(':').filter(|_| !address.ends_with(']')) {
        Some((host, port)) => (host, Some(port)),
        None => (address, None),
    };
    let is_host = match host.strip_prefix('[').and_then(|inner| inner.strip_suffix(']')) {
        Some(inner) => inner.parse::<Ipv6Addr>().is_ok(),
        None => is_word(host) && !host.contains(['/', '@', ':', '[', ']']),
    };
    is_host && port.is_none_or(|port| port.parse::<u16>().is_ok_and(|port| port != 0))
}

fn is_dns_label(name: &str) -> bool {
    let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    !name.is_empty()
        && name.len() <= DNS_LABEL
        && name.chars().all(inner)
        && !name.starts_with('-')
        && !name.ends_with('-')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check_flags(why: &str, flags: &[&str], expected: Result<&str, &str>) {
        let all = ["kv-router-operator", "run"].iter().chain(flags);
        let Command::Run(flags) = Cli::try_parse_from(all).expect(why).command else { panic!("{why}") };
        let found = flags.checked(Some("kvrouter-system"), Some("operator-0"));
        match (found, expected) {
            (Ok(config), Ok(part)) => assert!(format!("{config:?}").contains(part), "{why}: {config:?}"),
            (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{why}: {error}"),
            (found, expected) => panic!("{why}: {found:?}, expected {expected:?}"),
        }
    }

    #[test]
    fn flags_are_checked_before_anything_starts() {
        check_flags("defaults", &[], Ok("poll_interval: 5s"));
        check_flags("the pod's namespace", &[], Ok("kvrouter-system"));
        check_flags("sorted", &["--watch-namespaces=b,a,,b"], Ok(r#"["a", "b"]"#));
        check_flags("one operator", &["--leader-elect=false"], Ok("lease: None"));
        check_flags("a bare switch", &["--leader-elect"], Ok("lease: Some"));
        check_flags("the last one wins", &["--poll-seconds=7", "--poll-seconds=9"], Ok("poll_interval: 9s"));
        check_flags("patching off", &["--workload-patching=false"], Ok("workload_patching: false"));
        check_flags("a broker", &["--nats-url=nats://nats.kvrouter-system:4222"], Ok("4222"));
        check_flags("no scheme", &["--nats-url=nats:4222"], Err("nats://host:port"));
        check_flags("a password", &["--nats-url=nats://a:b@host:4222"], Err("--nats-url"));
        check_flags("a bad port", &["--nats-url=nats://host:99999"], Err("--nats-url"));
        check_flags("no poll", &["--poll-seconds=0"], Err("1 to 60"));
        check_flags("too patient", &["--hysteresis-seconds=601"], Err("0 to 600"));
        check_flags("not a namespace", &["--watch-namespaces=Prod"], Err("`Prod`"));
        check_flags("an empty image", &["--router-image="], Err("--router-image"));
    }

    #[test]
    fn a_lease_needs_a_namespace() {
        let Command::Run(flags) = Cli::try_parse_from(["kv-router-operator", "run"]).expect("parses").command
        else {
            panic!("not run")
        };
        assert_eq!(flags.checked(None, None).map(|_| ()), Err(ConfigError::NoLeaseNamespace));
    }
}
