//! Settings: bad files by line and field, what beats what.

use super::*;

const GOOD: &str = "schemaVersion: 1
pool: {namespace: default, name: demo}
model: {name: tiny}
blockSize: 16
listen: {http: 127.0.0.1:0, metrics: 127.0.0.1:0, admin: 127.0.0.1:0}
discovery:
  backend: Static
  workers:
    - {url: \"http://127.0.0.1:8001\"}
    - url: http://127.0.0.1:8002
      dpSize: 2
kvEvents:
  transport: ZMQ
";

fn load(text: &str, flags: &[&str]) -> Result<ServeConfig, ConfigError> {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("router.yaml");
    std::fs::write(&path, text).expect("written");
    let path = path.to_str().expect("plain");
    let arguments = [&["kv-router", "serve", "--config", path], flags].concat();
    let Command::Serve(flags) = Cli::try_parse_from(arguments).expect("valid flags").command else {
        panic!("serve")
    };
    ServeConfig::load(&flags)
}

#[track_caller]
fn check(why: &str, from: &str, to: &str, expected: &str) {
    let text = GOOD.replace(from, to);
    assert_ne!(text, GOOD, "{why}: the case changes the file");
    let message = load(&text, &[]).expect_err(why).to_string();
    let message = message.split_once("router.yaml:").expect("names the file").1;
    assert!(message.starts_with(expected), "{why}: {message}");
}

#[test]
fn bad_files_are_refused_by_line_and_field() {
    load(GOOD, &[]).expect("the base is good");
    check("unknown field", "blockSize: 16", "blockSizes: 16", "4: unknown field `blockSizes`");
    check(
        "unknown nested field",
        "dpSize: 2",
        "dpsize: 2",
        "11: discovery.workers[1]: unknown field `dpsize`",
    );
    check("wrong type", "blockSize: 16", "blockSize: big", "4: blockSize: invalid type");
    check("unknown word", "transport: ZMQ", "transport: on", "13: kvEvents.transport: ");
    check("missing field", "model: {name: tiny}\n", "", "1: missing field `model`");
    check("zero block", "blockSize: 16", "blockSize: 0", "4: blockSize: must be");
    check("no broker", "transport: ZMQ", "transport: NATS", "12: kvEvents.nats: is missing");
    check("twice the same worker", "8002", "8001", "10: discovery.workers[1].url: names 127.0.0.1:8001");
    check("https", "url: http://127", "url: https://127", "10: discovery.workers[1].url: must be plain http");
    check(
        "no such port",
        "127.0.0.1:8002",
        "127.0.0.1:99999",
        "10: discovery.workers[1].url: must have a port",
    );
    check(
        "a user",
        "http://127.0.0.1:8002",
        "http://me@127.0.0.1:8002",
        "10: discovery.workers[1].url: must have",
    );
    check("no ranks", "dpSize: 2", "dpSize: 0", "11: discovery.workers[1].dpSize: must be");
    check("newer file", "schemaVersion: 1", "schemaVersion: 2", "1: schemaVersion: is 2");
    check(
        "two ports alike",
        "metrics: 127.0.0.1:0, admin: 127.0.0.1:0",
        "metrics: 127.0.0.1:7, admin: 127.0.0.1:7",
        "5: listen.admin: has the port",
    );
    let weights = |text: &str| GOOD.to_owned() + text;
    for (why, addition, expected) in [
        ("contradiction", "policy: KvAware\nloadWeights: {queue: 2}\n", "15: loadWeights: only count"),
        ("negative weight", "overlapWeights: {default: -1}\n", "14: overlapWeights.default: is -1"),
        ("not a number", "overlapWeights: {default: .nan}\n", "14: overlapWeights.default: is NaN"),
        ("a reserve of nothing", "overload: {coldReserve: 0.2}\n", "14: overload.coldReserve: is a share"),
        ("a cap of nothing", "overload: {maxQueuedTokens: 0}\n", "14: overload.maxQueuedTokens: must"),
        (
            "a session for ever",
            "sessionAffinity: {mode: Both, ttlSeconds: 0}\n",
            "14: sessionAffinity.ttlSeconds",
        ),
        ("an unknown shadow", "shadowPolicies: [Best]\n", "14: shadowPolicies[0]: unknown variant"),
        ("a boolean", "inFlightCredit: off\n", "14: inFlightCredit: "),
        ("short budget", "freshness: {budgetSeconds: 1}\n", "14: freshness.budgetSeconds: must be"),
    ] {
        let message = load(&weights(addition), &[]).expect_err(why).to_string();
        assert!(message.contains(&format!("router.yaml:{expected}")), "{why}: {message}");
    }
}

#[test]
fn flags_beat_the_file() {
    let config = load(GOOD, &["--router-policy", "kv-aware", "--kv-overlap-weight", "2.5"]).expect("good");
    assert_eq!(config.live.settings.policy, PolicyKind::KvAware);
    assert_eq!(config.live.settings.overlap.default, 2.5);
}

#[test]
fn live_settings_change_only_what_they_name() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("live.yaml");
    std::fs::write(&path, "schemaVersion: 1\noverlapWeights: {default: 3}\n").expect("written");
    let before = Live::of(&parse(Path::new("router.yaml"), GOOD).expect("good"));
    let after = before.updated(&path, &ServeFlags::default()).expect("good");
    assert_eq!(after.settings.overlap.default, 3.0);
    assert_eq!(after.settings.load, before.settings.load);
    assert_eq!(after.freshness, before.freshness);
}

/// The file's defaults and the core's are written down in two crates, which must not know each
/// other; a file that says nothing must mean the core's.
#[test]
fn a_file_that_names_no_setting_means_the_cores_defaults() {
    let config = load(GOOD, &[]).expect("good");
    assert_eq!(config.live, Live::default());
}
