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
        ("asked too often", "engineLoad: {intervalSeconds: 1}\n", "14: engineLoad.intervalSeconds: must"),
        ("a tier above 1", "tierCredits: {host: 1.5}\n", "14: tierCredits.host: is 1.5; must be 0 to 1"),
        ("a tier that is no number", "tierCredits: {disk: .nan}\n", "14: tierCredits.disk: is NaN"),
        ("a slow tier worth more", "tierCredits: {host: 0.2}\n", "14: tierCredits.disk: is 0.25, more than"),
        ("an unknown shadow", "shadowPolicies: [Best]\n", "14: shadowPolicies[0]: unknown variant"),
        (
            "a shadow of itself",
            "shadowPolicies: [CachePlusLoad]\n",
            "14: shadowPolicies[0]: is the real policy",
        ),
        (
            "a shadow twice",
            "shadowPolicies: [LMetric, KvAware, LMetric]\n",
            "14: shadowPolicies[2]: names LMetric a second time",
        ),
        ("a boolean", "inFlightCredit: off\n", "14: inFlightCredit: "),
        ("short budget", "freshness: {budgetSeconds: 1}\n", "14: freshness.budgetSeconds: must be"),
    ] {
        let message = load(&weights(addition), &[]).expect_err(why).to_string();
        assert!(message.contains(&format!("router.yaml:{expected}")), "{why}: {message}");
    }
}

/// The ends of both ranges are in them.
#[test]
fn receipt_files_have_a_folder_and_are_neither_small_nor_many() {
    let of = |fields: &str| load(&format!("{GOOD}receiptFiles: {{{fields}}}\n"), &[]);
    for (bytes, files) in [(65_536, 2), (65_536, 10_000), (1 << 40, 2)] {
        let config = of(&format!("directory: d, maxBytes: {bytes}, maxFiles: {files}")).expect("good");
        let found = config.file.receipt_files.expect("they are asked for");
        assert_eq!((found.max_bytes, found.max_files), (bytes, files));
    }
    for (fields, expected) in [
        ("directory: ''", "directory: must not be empty; name a folder"),
        ("directory: d, maxBytes: 65535", "maxBytes: must be at least 65536"),
        ("directory: d, maxFiles: 1", "maxFiles: must be 2 to 10000"),
        ("directory: d, maxFiles: 10001", "maxFiles: must be 2 to 10000"),
    ] {
        let message = of(fields).expect_err(fields).to_string();
        assert!(message.contains(&format!("router.yaml:14: receiptFiles.{expected}")), "{fields}: {message}");
    }
}

const PODS: &str = "schemaVersion: 1
model: {name: tiny}
discovery:
  backend: Kubernetes
  kubernetes:
    namespace: ai
    selector: {app: qwen}
    targetPorts: [8000, 8001]
    roles:
      - name: Mixed
        selector: {part: all}
      - name: Prefill
        selector: {part: prefill}
        protocol: SGLang
    liveSettingsConfigMap: live
kvEvents:
  transport: ZMQ
";

#[test]
fn discovery_of_pods_is_checked() {
    let good = load(PODS, &[]).expect("the base is good");
    assert_eq!(good.live_map(), Some(("ai", "live")));
    let labels = "selector: {app: qwen}";
    let at = |line: u32, field: &str| format!("{line}: discovery.kubernetes{field}: ");
    let ports = "targetPorts: [8000, 8001]";
    for (why, from, to, expected) in [
        (
            "no block",
            "Kubernetes\n  kubernetes:",
            "Kubernetes\n  other:",
            "5: discovery: unknown field".into(),
        ),
        ("static", "backend: Kubernetes", "backend: Static", at(5, "") + "is set, but"),
        (
            "workers too",
            "  kubernetes:",
            "  workers: [{url: \"http://a:1\"}]\n  kubernetes:",
            "5: discovery.workers: are listed".into(),
        ),
        ("every pod", labels, "selector: {}", at(7, ".selector") + "must not be empty"),
        ("no selector", "    selector: {app: qwen}\n", "", "6: discovery.kubernetes: missing field".into()),
        ("a bad label", labels, "selector: {app: \"a b\"}", at(7, ".selector") + "`app: a b` is no label"),
        ("a bad name", labels, "selector: {-app: a}", at(7, ".selector") + "`-app: a` is no label"),
        ("no ports", ports, "targetPorts: []", at(8, ".targetPorts") + "must be 1 to 8"),
        ("port 0", ports, "targetPorts: [0]", at(8, ".targetPorts[0]") + "must be 1 to 65535"),
        ("a port twice", ports, "targetPorts: [1, 1]", at(8, ".targetPorts[1]") + "names 1 a second time"),
        ("a large port", ports, "targetPorts: [70000]", at(8, ".targetPorts[0]") + "invalid value"),
        ("no rank", ports, "targetPorts: [1]\n    dpSize: 0", at(9, ".dpSize") + "must be 1 to 1024"),
        (
            "no ports for the last rank",
            "ZMQ",
            "ZMQ\n  port: 65535",
            at(5, ".dpSize") + "makes 2 ranks per pod, and the last one's",
        ),
        ("a role twice", "name: Prefill", "name: Mixed", at(12, ".roles[1].name") + "names Mixed a second"),
        (
            "all of a role",
            "selector: {part: prefill}",
            "selector: {}",
            at(13, ".roles[1].selector") + "must not",
        ),
        ("no role", "name: Prefill", "name: Both", at(12, ".roles[1].name") + "unknown variant"),
        ("a namespace", "namespace: ai", "namespace: a.b", at(6, ".namespace") + "must be a DNS label"),
        ("a map", "Map: live", "Map: Live", at(15, ".liveSettingsConfigMap") + "must be the name"),
    ] {
        check_pods(why, from, to, &expected);
    }
    let text =
        PODS.split("  kubernetes:").next().expect("the head").to_owned() + "kvEvents: {transport: ZMQ}\n";
    let message = load(&text, &[]).expect_err("no block").to_string();
    assert!(message.contains("3: discovery.kubernetes: is missing"), "{message}");
    let message = load(PODS, &["--live-config", "x"]).expect_err("two sources").to_string();
    assert!(message.contains("15: discovery.kubernetes.liveSettingsConfigMap: is set, and"), "{message}");
}

#[track_caller]
fn check_pods(why: &str, from: &str, to: &str, expected: &str) {
    let text = PODS.replacen(from, to, 1);
    assert_ne!(text, PODS, "{why}: the case changes the file");
    let message = load(&text, &[]).expect_err(why).to_string();
    let message = message.split_once("router.yaml:").expect("names the file").1;
    assert!(message.starts_with(expected), "{why}: {message}, not {expected}");
}

#[test]
fn roles_say_how_they_hand_requests_over() {
    let at = |line: u32, field: &str| format!("{line}: discovery.kubernetes.roles{field}: ");
    for (why, from, to, expected) in [
        (
            "no protocol",
            "        protocol: SGLang\n",
            "",
            at(12, "[1].protocol") + "is missing; write SGLang or NIXL",
        ),
        (
            "a protocol of mixed pods",
            "{part: all}",
            "{part: all}\n        protocol: NIXL",
            at(12, "[0].protocol") + "is of Prefill and Decode alone",
        ),
        (
            "another protocol's port",
            "protocol: SGLang",
            "protocol: NIXL\n        bootstrapPort: 9000",
            at(15, "[1].bootstrapPort") + "is of Prefill with protocol SGLang alone",
        ),
        (
            "bootstrap port 0",
            "protocol: SGLang",
            "protocol: SGLang\n        bootstrapPort: 0",
            at(15, "[1].bootstrapPort") + "must be 1 to 65535",
        ),
        (
            "the last bootstrap port",
            "protocol: SGLang",
            "protocol: SGLang\n        bootstrapPort: 65535",
            at(15, "[1].bootstrapPort") + "is that of the first target port",
        ),
    ] {
        check_pods(why, from, to, &expected);
    }
}

/// The same of workers that are listed.
#[test]
fn listed_workers_have_roles() {
    let of = |entry: &str| {
        let head = "schemaVersion: 1\nmodel: {name: tiny}\nkvEvents: {transport: None}\n";
        let workers =
            format!("discovery:\n  backend: Static\n  workers:\n    - {{url: \"http://a:1\", {entry}}}\n");
        load(&(head.to_owned() + &workers), &[]).map_err(|error| error.to_string())
    };
    let good = of("role: Prefill, protocol: SGLang, bootstrapPort: 9000").expect("good");
    assert_eq!(good.protocols().into_iter().collect::<Vec<_>>(), [Protocol::SGLang]);
    assert!(of("role: Mixed").expect("good").protocols().is_empty());
    for (entry, expected) in [
        ("role: Decode", "workers[0].protocol: is missing; write SGLang or NIXL"),
        ("protocol: NIXL", "workers[0].protocol: is of Prefill and Decode alone"),
        ("role: Decode, protocol: SGLang, bootstrapPort: 1", "workers[0].bootstrapPort: is of Prefill"),
    ] {
        let message = of(entry).expect_err("refused");
        assert!(message.contains(expected), "{entry}: {message}");
    }
}

#[test]
fn labels_are_told_from_other_words() {
    let check = |name: &str, value: &str, expected: bool| {
        let selector = BTreeMap::from([(name.to_owned(), value.to_owned())]);
        assert_eq!(checks::check_selector("x", &selector).is_ok(), expected, "{name}={value}");
    };
    let long = "a".repeat(64);
    for (name, expected) in [
        ("app", true),
        ("a.b/c", true),
        ("A_b-c.d", true),
        ("", false),
        ("/a", false),
        ("a/", false),
        ("a/b/c", false),
        ("a-", false),
        ("A.b/c", false),
        (&*long, false),
    ] {
        check(name, "x", expected);
    }
    for (value, expected) in [("", true), ("v1.2_3-x", true), ("-a", false), ("a,b", false), (&*long, false)]
    {
        check("app", value, expected);
    }
}

/// A newer file may have fields that this router does not know; what matters is
/// that it is newer.
#[test]
fn a_newer_file_is_refused_for_its_version() {
    let text = GOOD.replace("schemaVersion: 1", "schemaVersion: 2\nfieldOfTheFuture: 1");
    let message = load(&text, &[]).expect_err("newer").to_string();
    assert!(message.contains("1: schemaVersion: is 2") && message.contains("VersionSkew"), "{message}");
    let config = load(GOOD, &[]).expect("good");
    let text = "schemaVersion: 2\nfieldOfTheFuture: 1\n";
    let error = config.live_of(text, Path::new("live.yaml")).expect_err("newer");
    assert!(error.to_string().contains("VersionSkew"), "{error}");
}

#[test]
fn selectors_of_other_pools_are_about_pods() {
    let check = |file: &str, selectors: &str, expected: Option<&str>| {
        let text = format!("schemaVersion: 1\nforeignSelectors: {selectors}\n");
        let taken = load(file, &[]).expect("good").live_of(&text, Path::new("live.yaml"));
        let error = taken.err().map(|error| error.to_string());
        assert_eq!(error.as_deref(), expected, "{selectors}");
    };
    let pods = GOOD.replace(
        GOOD.split_once("discovery:\n").and_then(|(_, rest)| rest.split_once("kvEvents:")).expect("both").0,
        "  backend: Kubernetes\n  kubernetes: {namespace: a, selector: {app: a}, targetPorts: [8000]}\n",
    );
    check(&pods, "[{a: b}]", None);
    let empty =
        "live.yaml:2: foreignSelectors[1]: must not be empty: it would be every pod; give at least one label";
    check(&pods, "[{a: b}, {}]", Some(empty));
    check(GOOD, "[]", None);
    let listed =
        "live.yaml:2: foreignSelectors: are about pods, and discovery.backend is Static; remove them";
    check(GOOD, "[{a: b}]", Some(listed));
}

#[test]
fn flags_beat_the_file() {
    let config = load(GOOD, &["--router-policy", "kv-aware", "--kv-overlap-weight", "2.5"]).expect("good");
    assert_eq!(config.live.settings.policy, PolicyKind::KvAware);
    assert_eq!(config.live.settings.overlap.default, 2.5);
}

/// The same of the start file, where it would be refused without the flag.
#[test]
fn a_flag_for_the_policy_leaves_the_rest_of_the_file_in_force() {
    let file = GOOD.to_owned()
        + "loadWeights: {queue: 2}\nimageWeight: 7\nshadowPolicies: [KvAware, LeastLoad]\ndecodeInputDemand: {mode: Shadow}\n";
    let usual = LoadWeights::default().queue;
    use PolicyKind::{KvAware, LeastLoad};
    let cases: [(&str, f64, &[PolicyKind], DemandMode); 3] = [
        ("cache-plus-load", 2.0, &[KvAware, LeastLoad], DemandMode::Shadow),
        ("kv-aware", usual, &[LeastLoad], DemandMode::Shadow),
        ("least-load", usual, &[KvAware], DemandMode::Disabled),
    ];
    for (flag, queue, shadows, demand) in cases {
        let settings = load(&file, &["--router-policy", flag]).expect(flag).live.settings;
        assert_eq!((settings.load.queue, settings.image_weight.0), (queue, 7.0), "{flag}");
        assert_eq!(settings.shadows.iter().collect::<Vec<_>>(), shadows, "{flag}");
        assert_eq!(settings.decode_demand.mode, demand, "{flag}");
    }
    let flags = ["--router-policy", "least-load", "--decode-input-demand", "enabled"];
    let error = load(&file, &flags).expect_err("two flags that contradict each other").to_string();
    assert!(error.contains("decodeInputDemand"), "{error}");
}

/// What a live file says of another policy is left out, and nothing else of it.
#[test]
fn a_flag_for_the_policy_leaves_the_rest_of_a_live_file_in_force() {
    let live = "schemaVersion: 1\npolicy: CachePlusLoad\nloadWeights: {queue: 2}\nimageWeight: 7
shadowPolicies: [KvAware, LeastLoad]\ndecodeInputDemand: {mode: Shadow, requestWeight: 5}\n";
    let (path, usual) = (Path::new("live.yaml"), LoadWeights::default().queue);
    use PolicyKind::{CachePlusLoad, KvAware, LeastLoad};
    let cases: [(&str, PolicyKind, f64, &[PolicyKind], DemandMode); 3] = [
        ("cache-plus-load", CachePlusLoad, 2.0, &[KvAware, LeastLoad], DemandMode::Shadow),
        ("kv-aware", KvAware, usual, &[LeastLoad], DemandMode::Shadow),
        ("least-load", LeastLoad, usual, &[KvAware], DemandMode::Disabled),
    ];
    for (flag, policy, queue, shadows, demand) in cases {
        let config = load(GOOD, &["--router-policy", flag]).expect("good");
        let settings = config.live_of(live, path).expect(flag).settings;
        assert_eq!((settings.policy, settings.load.queue), (policy, queue), "{flag}");
        assert_eq!(settings.shadows.iter().collect::<Vec<_>>(), shadows, "{flag}");
        assert_eq!((settings.decode_demand.mode, settings.image_weight.0), (demand, 7.0), "{flag}");
    }
    let config = load(GOOD, &[]).expect("good");
    let refused = |text: &str| config.live_of(text, path).expect_err(text).to_string();
    let contradiction = refused(&live.replace("policy: CachePlusLoad", "policy: KvAware"));
    assert!(contradiction.contains("live.yaml:3: loadWeights: only count"), "{contradiction}");
    let itself = refused("schemaVersion: 1\nshadowPolicies: [CachePlusLoad]\n");
    assert!(itself.contains("live.yaml:2: shadowPolicies[0]: is the real policy"), "{itself}");
}

/// Whoever looked at a policy in shadow may take it without touching the start settings.
#[test]
fn a_live_policy_may_be_a_shadow_of_the_start() {
    let config = load(&(GOOD.to_owned() + "shadowPolicies: [KvAware]\n"), &[]).expect("good");
    let live = config.live_of("schemaVersion: 1\npolicy: KvAware\n", Path::new("live.yaml")).expect("good");
    assert_eq!(live.settings.policy, PolicyKind::KvAware);
}

#[test]
fn any_number_of_requests_may_be_allowed_to_wait() {
    for (limit, places) in [("0", 0), ("7", 7), ("18446744073709551615", Semaphore::MAX_PERMITS)] {
        let text = format!("{GOOD}limits: {{noWorkerWaitRequests: {limit}}}\n");
        let places_found = load(&text, &[]).expect("good").waiting_places();
        // It must not be more than there can be.
        assert_eq!(Semaphore::new(places_found).available_permits(), places);
    }
}

#[test]
fn live_settings_change_only_what_they_name() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("live.yaml");
    std::fs::write(&path, "schemaVersion: 1\noverlapWeights: {default: 3}\n").expect("written");
    let before = load(GOOD, &[]).expect("good").live;
    let after = load(GOOD, &["--live-config", path.to_str().expect("plain")]).expect("good").live;
    assert_eq!(after.settings.overlap.default, 3.0);
    assert_eq!(after.settings.load, before.settings.load);
    assert_eq!(after.freshness, before.freshness);
}

#[test]
fn decode_demand_is_live_and_its_flags_beat_both_files() {
    let of = |more: &str, flags: &[&str]| load(&(GOOD.to_owned() + more), flags);
    let demand = |live: &Live| {
        let DecodeDemand { mode, request_weight } = live.settings.decode_demand;
        (mode.label(), request_weight)
    };
    let plain = of("", &[]).expect("good");
    assert_eq!(demand(&plain.live), ("disabled", 0.0));
    let asked = of("decodeInputDemand: {mode: Shadow, requestWeight: 5}\n", &[]).expect("good");
    assert_eq!(demand(&asked.live), ("shadow", 5.0));
    let live = |text: &str| "schemaVersion: 1\n".to_owned() + text;
    let on = live("decodeInputDemand: {mode: Enabled}\npdPrefillGuardRelease: Completion\n");
    let path = Path::new("live.yaml");
    let after = asked.live_of(&on, path).expect("good");
    assert_eq!(demand(&after), ("enabled", 0.0));
    assert_eq!(after.prefill_guard, PrefillGuardRelease::Completion);
    let flags = [
        "--decode-input-demand",
        "disabled",
        "--decode-request-weight",
        "7",
        "--pd-prefill-guard-release",
        "decode",
    ];
    let flagged = of("decodeInputDemand: {mode: Shadow}\n", &flags).expect("good");
    assert_eq!(demand(&flagged.live), ("disabled", 7.0));
    let after = flagged.live_of(&on, path).expect("good");
    assert_eq!((demand(&after), after.prefill_guard), (("disabled", 7.0), PrefillGuardRelease::Decode));
    let wrong = asked.live_of(&live("policy: LeastLoad\n"), path).expect_err("no cost").to_string();
    assert!(wrong.contains("decodeInputDemand.mode: needs policy CachePlusLoad or KvAware"), "{wrong}");
    let wrong = of("decodeInputDemand: {requestWeight: -1}\n", &[]).expect_err("negative").to_string();
    assert!(wrong.contains("decodeInputDemand.requestWeight: is -1; must be 0 to"), "{wrong}");
}

#[test]
fn forwarding_is_off_unless_asked_for_and_its_flag_beats_both_files() {
    let of = |more: &str, flags: &[&str]| load(&(GOOD.to_owned() + more), flags).expect("good");
    assert_eq!(of("", &[]).live.forward_token_ids, ForwardTokenIds::Never);
    let asked = of("forwardTokenIds: WhenConfirmed\n", &[]);
    assert_eq!(asked.live.forward_token_ids, ForwardTokenIds::WhenConfirmed);
    let live = "schemaVersion: 1\nforwardTokenIds: Never\n";
    let after = asked.live_of(live, Path::new("live.yaml")).expect("good");
    assert_eq!(after.forward_token_ids, ForwardTokenIds::Never);
    let flagged = of("", &["--forward-token-ids", "when-confirmed"]);
    assert_eq!(flagged.live.forward_token_ids, ForwardTokenIds::WhenConfirmed);
    let after = flagged.live_of(live, Path::new("live.yaml")).expect("good");
    assert_eq!(after.forward_token_ids, ForwardTokenIds::WhenConfirmed);
    let wrong = load(&(GOOD.to_owned() + "forwardTokenIds: on\n"), &[]).expect_err("a word of YAML's");
    assert!(wrong.to_string().contains("forwardTokenIds"), "{wrong}");
    assert_eq!(of("", &["--render-check-seconds", "5"]).render_check, Duration::from_secs(5));
}

#[test]
fn tenancy_has_a_header_and_a_secret_that_is_long_enough() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = |content: &str| {
        let path = folder.path().join("salt");
        std::fs::write(&path, content).expect("it is written");
        path.display().to_string()
    };
    let of = |fields: &str| load(&format!("{GOOD}tenancy: {{{fields}}}\n"), &[]);
    assert!(load(GOOD, &[]).expect("good").tenancy.is_none());
    let secret = file("16 bytes, a line\n");
    let good = of(&format!("saltSecretFile: {secret}")).expect("good");
    assert!(good.tenancy.is_some());
    let file_of = good.file.tenancy.expect("as in the file");
    assert_eq!((&*file_of.header, file_of.without_header), ("X-Tenant", file::WithoutHeader::Refuse));
    for (fields, complaint) in [
        (format!("saltSecretFile: {secret}, header: a b"), "tenancy.header: is no name of a header"),
        (format!("saltSecretFile: {secret}, header: \"\""), "tenancy.header: is no name of a header"),
        (format!("saltSecretFile: {secret}, header: Host"), "tenancy.header: is about one connection"),
        (format!("saltSecretFile: {secret}, withoutHeader: no"), "tenancy.withoutHeader"),
        (format!("saltSecretFile: {secret}, other: 1"), "unknown field `other`"),
        ("header: X-Tenant".to_owned(), "missing field `saltSecretFile`"),
        (format!("saltSecretFile: {secret}x"), "check that it exists"),
    ] {
        let error = of(&fields).expect_err(&fields).to_string();
        assert!(error.contains(complaint), "{fields}: {error}");
    }
    let short = file("15 bytes, a lin\n");
    let error = of(&format!("saltSecretFile: {short}")).expect_err("too short").to_string();
    assert!(error.contains("tenancy.saltSecretFile: names a file with fewer than 16 bytes"), "{error}");
}

/// The file's defaults and the core's are written down in two crates, which must not know each
/// other; a file that says nothing must mean the core's.
#[test]
fn tier_credits_come_from_the_file_and_change_while_running() {
    let text = GOOD.to_owned() + "tierCredits: {host: 0.5, disk: 0}\n";
    let config = load(&text, &[]).expect("good");
    assert_eq!(config.live.settings.tiers, TierCredit { device: 1.0, host: 0.5, disk: 0.0 });
    let live = LiveSettings {
        tier_credits: Some(file::TierCredits { host: 0.9, ..file::TierCredits::default() }),
        ..LiveSettings::default()
    };
    let tiers = config.base.with(&live).settings.tiers;
    assert_eq!(tiers, TierCredit { device: 1.0, host: 0.9, disk: 0.25 });
}

#[test]
fn a_file_that_names_no_setting_means_the_cores_defaults() {
    let config = load(GOOD, &[]).expect("good");
    assert_eq!(config.live, Live::default());
}
