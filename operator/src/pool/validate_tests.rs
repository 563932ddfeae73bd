//! What is wrong with pools, in rows.

use std::sync::Arc;

use serde_json::{Value, json};

use super::*;
use crate::sample::{around_pool, engine, flags, merged, named_pool, pool, report, router_pod, worker};
use crate::verdict;

/// The reasons of all complaints and a part of the first one's message.
#[track_caller]
fn check_spec(why: &str, spec: Value, expected: &[(&str, &str)]) {
    let found = validate(&pool(spec), &around_pool(Vec::new()), &flags());
    let complaints = found.err().map(|invalid| invalid.0).unwrap_or_default();
    let fields: Vec<&str> = complaints.iter().map(|complaint| complaint.field.as_str()).collect();
    assert_eq!(fields, expected.iter().map(|(field, _)| *field).collect::<Vec<_>>(), "{why}: {complaints:?}");
    for (complaint, (_, part)) in complaints.iter().zip(expected) {
        assert!(complaint.message.contains(part), "{why}: {}", complaint.message);
        assert_eq!(complaint.reason, Reason::InvalidSpec, "{why}");
    }
}

// tidy: long, because it is one table.
#[test]
fn a_spec_must_make_sense() {
    let nats = |url: &str| json!({"kvEvents": {"nats": {"url": url}}});
    let workload = json!({"kind": "Deployment", "name": "qwen"});
    check_spec("the sample", json!({}), &[]);
    check_spec("no model", json!({"model": {"name": ""}}), &[("spec.model.name", "is empty")]);
    check_spec("block size", json!({"blockSize": 0}), &[("spec.blockSize", "1 to 65536")]);
    check_spec(
        "no selector",
        json!({"selector": {"matchLabels": {"app": null}}}),
        &[("spec.selector.matchLabels", "at least one")],
    );
    check_spec(
        "two tokenizers",
        json!({"model": {"tokenizer": {"configMap": {"name": "x"}}}}),
        &[("spec.model.tokenizer", "exactly one")],
    );
    check_spec(
        "no source",
        json!({"model": {"tokenizer": {"path": null}}}),
        &[("spec.model.tokenizer", "keep one")],
    );
    check_spec(
        "relative",
        json!({"model": {"tokenizer": {"path": "m"}}}),
        &[("spec.model.tokenizer.path", "absolute")],
    );
    check_spec(
        "out of the volume",
        json!({"model": {"tokenizer": {"path": null, "image": {"reference": "x", "path": "../etc"}}}}),
        &[("spec.model.tokenizer.image.path", "inside the volume")],
    );
    check_spec("no port", json!({"targetPorts": []}), &[("spec.targetPorts", "is empty")]);
    check_spec(
        "a port twice",
        json!({"targetPorts": [{"number": 1}, {"number": 1}]}),
        &[("spec.targetPorts", "twice")],
    );
    check_spec(
        "events on it",
        json!({"targetPorts": [{"number": 5557}]}),
        &[("spec.kvEvents", "different ports")],
    );
    check_spec(
        "one port of events",
        json!({"kvEvents": {"replayPort": 5557}}),
        &[("spec.kvEvents", "must differ")],
    );
    let field = "spec.kvEvents";
    let ranks = |spec: Value| merged(json!({"dpSize": 4}), spec);
    check_spec("four ranks", ranks(json!({})), &[]);
    check_spec(
        "events of the last rank on it",
        ranks(json!({"targetPorts": [{"number": 5560}]})),
        &[(field, "different ports")],
    );
    check_spec("behind the last rank", ranks(json!({"targetPorts": [{"number": 5561}]})), &[]);
    check_spec(
        "both in one",
        ranks(json!({"kvEvents": {"replayPort": 5560}})),
        &[(field, "5557 and replayPort 5560 are too close: 4 ranks")],
    );
    check_spec(
        "the other way round",
        ranks(json!({"kvEvents": {"replayPort": 5554}})),
        &[(field, "too close")],
    );
    check_spec("side by side", ranks(json!({"kvEvents": {"replayPort": 5561}})), &[]);
    check_spec("the last port", ranks(json!({"kvEvents": {"port": 65532}})), &[]);
    check_spec("beyond it", ranks(json!({"kvEvents": {"port": 65533}})), &[(field, "beyond 65535")]);
    check_spec("no rank", json!({"dpSize": 0}), &[("spec.dpSize", "1 to 1024")]);
    check_spec(
        "a workload twice",
        json!({"workloads": [workload, workload]}),
        &[("spec.workloads", "keep one")],
    );
    check_spec(
        "nothing to inject into",
        json!({"kvEvents": {"bridge": "Inject"}}),
        &[("spec.kvEvents.bridge", "needs spec.workloads")],
    );
    check_spec(
        "several at once, in the order of the spec",
        json!({"blockSize": 0, "kvEvents": {"bridge": "Inject", "transport": "ZMQ"}}),
        &[
            ("spec.blockSize", "1 to 65536"),
            ("spec.kvEvents.bridge", "needs transport: NATS"),
            ("spec.kvEvents.bridge", "needs spec.workloads"),
        ],
    );
    check_spec(
        "a broker for nobody",
        json!({"kvEvents": {"transport": "ZMQ", "nats": {"url": "nats://n:4222"}}}),
        &[("spec.kvEvents.nats", "remove it")],
    );
    check_spec("a password", nats("nats://a:b@n:4222"), &[("spec.kvEvents.nats.url", "no password")]);
    check_spec("no scheme", nats("n:4222"), &[("spec.kvEvents.nats.url", "nats://host:port")]);
    check_spec("no port is 4222", nats("nats://n"), &[]);
    check_spec("a bad port", nats("tls://n:0"), &[("spec.kvEvents.nats.url", "tls://host:port")]);
    check_spec("IPv6", nats("nats://[fd00::1]:4222"), &[]);
    check_spec("IPv6 without brackets", nats("nats://fd00::1"), &[("spec.kvEvents.nats.url", "host:port")]);
}

#[test]
fn roles_exclude_each_other() {
    let role = |name: &str, labels: Value| {
        let protocol = if name == "Mixed" { Value::Null } else { json!("NIXL") };
        json!({"name": name, "selector": {"matchLabels": labels}, "protocol": protocol})
    };
    let roles = |roles: &[Value]| json!({"roles": roles});
    let (prefill, decode) = (role("Prefill", json!({"role": "p"})), role("Decode", json!({"role": "d"})));
    check_spec("two", roles(&[prefill.clone(), decode.clone()]), &[]);
    check_spec(
        "one twice",
        roles(&[prefill.clone(), decode, role("Prefill", json!({"a": "b"}))]),
        &[("spec.roles[2]", "twice")],
    );
    check_spec(
        "the same pods",
        roles(&[prefill, role("Decode", json!({"role": "p"}))]),
        &[("spec.roles[1]", "same selector")],
    );
    check_spec("no labels", roles(&[role("Mixed", json!({}))]), &[("spec.roles[0]", "is empty")]);
    check_spec(
        "no pod",
        roles(&[role("Mixed", json!({"app": "other"}))]),
        &[("spec.roles[0]", "matches no pod")],
    );
}

#[test]
fn prefill_and_decode_come_together_and_speak_the_same() {
    let roles = |roles: &[(&str, Value)]| {
        let role = |(name, change): &(&str, Value)| {
            let base = json!({"name": name, "selector": {"matchLabels": {"role": name}}});
            merged(base, change.clone())
        };
        json!({"roles": roles.iter().map(role).collect::<Vec<_>>()})
    };
    let (sglang, nixl) = (json!({"protocol": "SGLang"}), json!({"protocol": "NIXL"}));
    let (prefill, decode) = (|it: &Value| ("Prefill", it.clone()), |it: &Value| ("Decode", it.clone()));
    check_spec("a pair", roles(&[prefill(&nixl), decode(&nixl), ("Mixed", json!({}))]), &[]);
    let at_port = |port: u32| merged(sglang.clone(), json!({"bootstrapPort": port}));
    check_spec("its last port", roles(&[prefill(&at_port(65535)), decode(&sglang)]), &[]);
    check_spec("half a pair", roles(&[prefill(&nixl)]), &[("spec.roles", "prefill needs decode")]);
    check_spec("the other half", roles(&[decode(&nixl)]), &[("spec.roles", "decode needs prefill")]);
    let two = roles(&[prefill(&nixl), decode(&sglang)]);
    check_spec("two protocols", two, &[("spec.roles", "are NIXL and SGLang; give both the same")]);
    let without = roles(&[prefill(&nixl), decode(&json!({}))]);
    check_spec("no protocol", without, &[("spec.roles[1]", "decode has no protocol")]);
    check_spec(
        "mixed with one",
        roles(&[("Mixed", nixl.clone())]),
        &[("spec.roles[0]", "remove its protocol")],
    );
    let of_decode = roles(&[prefill(&sglang), decode(&at_port(8998))]);
    check_spec("decode's port", of_decode, &[("spec.roles[1]", "of no use")]);
    let of_vllm = roles(&[prefill(&merged(nixl.clone(), json!({"bootstrapPort": 8998}))), decode(&nixl)]);
    check_spec("vLLM's port", of_vllm, &[("spec.roles[0]", "of no use")]);
    let ports = json!({"targetPorts": [{"number": 8000}, {"number": 8001}]});
    let beyond = merged(roles(&[prefill(&at_port(65535)), decode(&sglang)]), ports);
    check_spec("beyond the last port", beyond, &[("spec.roles[0]", "1 to 65535 for each")]);
    let served_there =
        merged(roles(&[prefill(&sglang), decode(&sglang)]), json!({"targetPorts": [{"number": 8998}]}));
    check_spec("the usual port, served on", served_there, &[("spec.roles[0]", "spec.targetPorts has one")]);
    let of_events = roles(&[prefill(&at_port(5557)), decode(&sglang)]);
    check_spec("a port of events", of_events, &[("spec.roles[0]", "spec.kvEvents has one")]);
    for (engine, protocol, wrong) in
        [("SGLang", &nixl, true), ("VLLM", &sglang, true), ("VLLM", &nixl, false)]
    {
        let spec = merged(roles(&[prefill(protocol), decode(protocol)]), json!({"engine": engine}));
        let expected = [("spec.roles[0]", "another engine's"), ("spec.roles[1]", "another engine's")];
        check_spec(engine, spec, if wrong { &expected } else { &[] });
    }
}

#[test]
fn names_leave_room_for_those_of_children() {
    let check = |name: &str, is_right: bool| {
        let found = validate(&named_pool(name, json!({})), &around_pool(Vec::new()), &flags());
        assert_eq!(found.is_ok(), is_right, "{name}");
    };
    check(&"a".repeat(50), true);
    check(&"a".repeat(51), false);
    check("a.b", false);
    check("-a", false);
    check("A", false);
}

#[test]
fn events_need_a_broker() {
    let no_flag = ChildFlags { nats_url: None, ..flags() };
    let found = validate(&pool(json!({})), &around_pool(Vec::new()), &no_flag).expect_err("no broker");
    assert_eq!(found.0[0].field, "spec.kvEvents.nats");
    assert!(found.0[0].message.contains("spec.kvEvents.nats.url"), "{}", found.0[0].message);
    let zmq = pool(json!({"kvEvents": {"transport": "ZMQ"}}));
    let valid = validate(&zmq, &around_pool(Vec::new()), &no_flag).expect("none is needed");
    assert_eq!(valid.broker, None);
    let own = pool(json!({"kvEvents": {"nats": {"url": "tls://own:4222", "subjectPrefix": "eu"}}}));
    let valid = validate(&own, &around_pool(Vec::new()), &flags()).expect("its own");
    assert_eq!(
        valid.broker.map(|broker| (broker.url, broker.subject_prefix)),
        Some(("tls://own:4222".into(), "eu".into()))
    );
}

#[test]
fn pods_of_two_pools_are_a_conflict() {
    let mut observed = around_pool(vec![
        engine("a", json!({})),
        engine("b", json!({"metadata": {"labels": {"tier": "x"}}})),
    ]);
    let check = |observed: &Observed, expected: Option<&str>| {
        let found = validate(&pool(json!({})), observed, &flags()).err().map(|invalid| invalid.0[0].clone());
        assert_eq!(found.as_ref().map(|complaint| complaint.reason), expected.map(|_| Reason::PoolConflict));
        if let (Some(found), Some(part)) = (found, expected) {
            assert!(found.message.contains(part), "{}", found.message);
        }
    };
    let other = |labels: Value| Arc::new(named_pool("other", json!({"selector": {"matchLabels": labels}})));
    observed.other_pools = vec![other(json!({"app": null, "tier": "y"}))];
    check(&observed, None);
    observed.other_pools = vec![other(json!({"app": null, "tier": "x"}))];
    check(&observed, Some("qwen and other, and get no requests: b;"));
    observed.pods = vec![engine(
        "b",
        json!({"metadata": {"labels": {"tier": "x"}, "deletionTimestamp": "2027-01-01T00:00:00Z"}}),
    )];
    check(&observed, None);
}

/// One workload and what becomes of it.
#[track_caller]
fn check_workload(
    why: &str,
    container: Option<&str>,
    facts: Option<WorkloadFacts>,
    expected: Result<&str, WorkloadState>,
) {
    let reference = json!({"kind": "Deployment", "name": "qwen", "container": container});
    let spec = pool(json!({"workloads": [crate::sample::merged(json!({}), reference)]}));
    let mut observed = around_pool(Vec::new());
    observed.workloads = vec![WorkloadSeen { reference: spec.spec.workloads[0].clone(), found: facts }];
    let valid = validate(&spec, &observed, &flags()).expect("the pool is in order");
    let found = match (&valid.targets[..], &valid.refused[..]) {
        ([target], []) => Ok(target.container.as_str()),
        ([], [refused]) => {
            assert!(refused.message.contains("Deployment qwen"), "{why}: {}", refused.message);
            let finding =
                verdict::finding(&valid.complaints, kvrouter_crds::conditions::ConditionType::ResolvedRefs);
            assert_eq!(finding.map(|it| it.reason.as_str()), Some(refused.why.state().as_str()), "{why}");
            Err(refused.why.state())
        }
        _ => panic!("{why}: {valid:?}"),
    };
    assert_eq!(found, expected, "{why}");
}

fn facts(labels: Value, containers: &[(&str, &[i32])]) -> WorkloadFacts {
    let container = |(name, ports): &(&str, &[i32])| {
        let ports: Vec<Value> = ports.iter().map(|port| json!({"containerPort": port})).collect();
        json!({"name": name, "ports": ports})
    };
    let containers: Vec<Value> = containers.iter().map(container).collect();
    let template = json!({"metadata": {"labels": labels}, "spec": {"containers": containers}});
    WorkloadFacts {
        template: serde_json::from_value(template).expect("a template"),
        ..WorkloadFacts::default()
    }
}

#[test]
fn a_named_workload_must_be_the_pools_and_have_an_engine() {
    use WorkloadState as State;
    let qwen = || json!({"app": "qwen", "more": "labels"});
    let two: &[(&str, &[i32])] = &[("proxy", &[9000]), ("engine", &[8000])];
    let owned = WorkloadFacts { controller: Some("LeaderWorkerSet/x".into()), ..facts(qwen(), two) };
    check_workload("the port", None, Some(facts(qwen(), two)), Ok("engine"));
    check_workload("the name", Some("proxy"), Some(facts(qwen(), two)), Ok("proxy"));
    check_workload("the only one", None, Some(facts(qwen(), &[("main", &[])])), Ok("main"));
    check_workload(
        "no port",
        None,
        Some(facts(qwen(), &[("a", &[]), ("b", &[])])),
        Err(State::ContainerAmbiguous),
    );
    check_workload(
        "both",
        None,
        Some(facts(qwen(), &[("a", &[8000]), ("b", &[8000])])),
        Err(State::ContainerAmbiguous),
    );
    check_workload("a wrong name", Some("x"), Some(facts(qwen(), two)), Err(State::ContainerNotFound));
    check_workload("absent", None, None, Err(State::WorkloadNotFound));
    check_workload("somebody's", None, Some(owned), Err(State::WorkloadControlled));
    check_workload(
        "other pods",
        None,
        Some(facts(json!({"app": "x"}), two)),
        Err(State::WorkloadOutsidePool),
    );
}

#[test]
fn a_target_port_is_declared_or_served() {
    let spec = pool(json!({"targetPorts": [{"number": 8001}]}));
    let mut observed = around_pool(vec![engine("a", json!({}))]);
    let reason = |observed: &Observed| {
        let valid = validate(&spec, observed, &flags()).expect("the pool is in order");
        valid.complaints.first().map(|complaint| complaint.reason)
    };
    assert_eq!(reason(&observed), Some(Reason::PortNotDeclared));
    let found = report(&[worker("a", json!({"worker": "10.0.0.1:8001"}))], json!({}));
    let pods = vec![router_pod("r", json!({}), Some(found))];
    observed.routers = vec![super::super::observe::RouterSeen { name: "chat".into(), pods }];
    assert_eq!(reason(&observed), None, "a router finds an engine there");
    let silent = engine("a", json!({"spec": {"containers": [{"name": "engine"}]}}));
    observed = around_pool(vec![silent]);
    assert_eq!(reason(&observed), None, "ports need no declaration");
}
