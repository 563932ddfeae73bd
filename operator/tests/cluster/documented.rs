//! Specs that people get wrong, as the documentation lists them: each row of
//! both tables is tried against the API server, and what it or the operator says
//! is compared with what the row says.
//!
//! A row without a case here fails, and so does a case without a row.

use std::collections::BTreeSet;

use futures::StreamExt;
use futures::future::LocalBoxFuture;
use serde_json::{Value, json};

use crate::control_plane::ControlPlane;
use crate::schema::{POOL, ROUTER, apply, with};
use crate::world::{
    FakeRouter, World, condition_of, engine, merged, next_ip, pool, report, router, settings,
};

/// Where the tables are.
const DOCUMENTATION: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/kubernetes.md");
/// The namespace that messages name in the documentation.
const NAMESPACE: &str = "demo";
/// Rows that are worked on at once.
const CONCURRENCY: usize = 8;

/// The rows of the table behind the line that begins with `heading`: two cells each.
fn table(heading: &str) -> Vec<(String, String)> {
    let text = std::fs::read_to_string(DOCUMENTATION).expect("docs/kubernetes.md");
    let begin = text.find(&format!("\n{heading}")).expect("the heading");
    let lines = text[begin + 1..].lines().skip_while(|line| !line.starts_with("| written")).skip(2);
    let row = |line: &str| {
        let line = line.replace("\\|", "\u{1}");
        let cells = line.trim_matches('|').split_once(" | ").expect("two cells");
        let plain = |cell: &str| cell.trim().replace('\u{1}', "|");
        (plain(cells.0), plain(cells.1))
    };
    lines.take_while(|line| line.starts_with('|')).map(row).collect()
}

#[track_caller]
fn same_rows(rows: &[(String, String)], cases: impl Iterator<Item = &'static str>) {
    let rows: BTreeSet<&str> = rows.iter().map(|(written, _)| written.as_str()).collect();
    assert_eq!(rows, cases.collect(), "rows of the documentation, and cases");
}

/// What is applied: the smallest pool or router, with lines added to its spec or
/// with a part replaced.
enum Manifest {
    PoolWith(&'static str),
    RouterWith(&'static str),
    Pool(&'static str, &'static str),
    Router(&'static str, &'static str),
}

use Manifest::{Pool, PoolWith, Router, RouterWith};

// tidy: long, because it is one table.
const REJECTED: &[(&str, &[Manifest])] = &[
    ("`inFlightCredit: on`", &[RouterWith("inFlightCredit: on")]),
    ("`sessionAffinity: {mode: off}`", &[RouterWith("sessionAffinity: {mode: off}")]),
    ("`kvEvents: {transport: none}`", &[PoolWith("kvEvents: {transport: none}")]),
    ("`policy: kv-aware`", &[RouterWith("policy: kv-aware")]),
    ("`roles: [{name: Encode, …}]`", &[PoolWith("roles: [{name: Encode, selector: {matchLabels: {r: e}}}]")]),
    (
        "a role twice",
        &[PoolWith(
            "roles: [{name: Decode, selector: {matchLabels: {r: a}}}, {name: Decode, selector: {matchLabels: {r: b}}}]",
        )],
    ),
    (
        "`Prefill` without `Decode`, or the other way round",
        &[
            PoolWith("roles: [{name: Prefill, protocol: NIXL, selector: {matchLabels: {r: p}}}]"),
            PoolWith("roles: [{name: Decode, protocol: NIXL, selector: {matchLabels: {r: d}}}]"),
        ],
    ),
    (
        "`Decode` without `protocol`, or `Mixed` with one",
        &[
            PoolWith(
                "roles: [{name: Prefill, protocol: NIXL, selector: {matchLabels: {r: p}}}, {name: Decode, selector: {matchLabels: {r: d}}}]",
            ),
            PoolWith("roles: [{name: Mixed, protocol: NIXL, selector: {matchLabels: {r: p}}}]"),
        ],
    ),
    (
        "`Prefill` with `SGLang` and `Decode` with `NIXL`",
        &[PoolWith(
            "roles: [{name: Prefill, protocol: SGLang, selector: {matchLabels: {r: p}}}, {name: Decode, protocol: NIXL, selector: {matchLabels: {r: d}}}]",
        )],
    ),
    (
        "`protocol: Mooncake`",
        &[PoolWith("roles: [{name: Prefill, protocol: Mooncake, selector: {matchLabels: {r: p}}}]")],
    ),
    (
        "`protocol: NIXL` with `engine: SGLang`",
        &[PoolWith(
            "engine: SGLang\nroles: [{name: Prefill, protocol: NIXL, selector: {matchLabels: {r: p}}}, {name: Decode, protocol: NIXL, selector: {matchLabels: {r: d}}}]",
        )],
    ),
    (
        "`bootstrapPort` of `Decode`, or with `NIXL`",
        &[
            PoolWith(
                "roles: [{name: Prefill, protocol: SGLang, selector: {matchLabels: {r: p}}}, {name: Decode, protocol: SGLang, bootstrapPort: 8998, selector: {matchLabels: {r: d}}}]",
            ),
            PoolWith(
                "roles: [{name: Prefill, protocol: NIXL, bootstrapPort: 8998, selector: {matchLabels: {r: p}}}, {name: Decode, protocol: NIXL, selector: {matchLabels: {r: d}}}]",
            ),
        ],
    ),
    (
        "`bootstrapPort: 65535` with two target ports",
        &[Pool(
            "[{number: 8000}]",
            "[{number: 8000}, {number: 8001}]\n  roles: [{name: Prefill, protocol: SGLang, bootstrapPort: 65535, selector: {matchLabels: {r: p}}}, {name: Decode, protocol: SGLang, selector: {matchLabels: {r: d}}}]",
        )],
    ),
    ("`blockSize: 0`", &[PoolWith("blockSize: 0")]),
    ("`blockSize: \"16\"`", &[PoolWith("blockSize: \"16\"")]),
    ("`overlapWeights: {default: -1}`", &[RouterWith("overlapWeights: {default: -1}")]),
    ("`overlapWeights: {default: \"2.0\"}`", &[RouterWith("overlapWeights: {default: \"2.0\"}")]),
    ("`overlapWeight: 2`", &[RouterWith("overlapWeight: 2")]),
    ("`loadWeights` with `policy: KvAware`", &[RouterWith("policy: KvAware\nloadWeights: {queue: 1}")]),
    (
        "`decodeInputDemand` with `policy: LeastLoad`",
        &[RouterWith("policy: LeastLoad\ndecodeInputDemand: {mode: Enabled}")],
    ),
    ("`decodeInputDemand: {mode: off}`", &[RouterWith("decodeInputDemand: {mode: off}")]),
    (
        "`decodeInputDemand: {requestWeight: -1}`",
        &[RouterWith("decodeInputDemand: {mode: Enabled, requestWeight: -1}")],
    ),
    ("`pdPrefillGuardRelease: completion`", &[RouterWith("pdPrefillGuardRelease: completion")]),
    ("the policy among `shadowPolicies`", &[RouterWith("shadowPolicies: [CachePlusLoad]")]),
    ("`overload: {coldReserve: 0.1}` alone", &[RouterWith("overload: {coldReserve: 0.1}")]),
    ("`tierCredits: {host: 0.2, disk: 0.5}`", &[RouterWith("tierCredits: {host: 0.2, disk: 0.5}")]),
    ("no `poolRef`", &[Router("poolRef: {name: qwen}", "replicas: 1")]),
    (
        "`poolRef: {name: qwen, namespace: other}`",
        &[Router("poolRef: {name: qwen}", "poolRef: {name: qwen, namespace: other}")],
    ),
    ("`model: Qwen/Qwen3-8B`", &[Pool("{name: Qwen/Qwen3-8B}", "Qwen/Qwen3-8B")]),
    ("`selector: {matchLabels: {}}`", &[Pool("{app: qwen}", "{}")]),
    (
        "`selector: {matchExpressions: …}`",
        &[Pool("matchLabels: {app: qwen}", "matchLabels: {app: qwen}, matchExpressions: []")],
    ),
    ("`matchLabels: {generation: 3}`", &[Pool("{app: qwen}", "{generation: 3}")]),
    ("no `selector`", &[Pool("  selector: {matchLabels: {app: qwen}}\n", "")]),
    ("no `targetPorts`", &[Pool("  targetPorts: [{number: 8000}]\n", "")]),
    ("`gatewayPoolRef` beside `selector` or `targetPorts`", &[PoolWith("gatewayPoolRef: {name: gw}")]),
    ("`targetPorts: [8000]`", &[Pool("[{number: 8000}]", "[8000]")]),
    ("a target port twice", &[Pool("[{number: 8000}]", "[{number: 8000}, {number: 8000}]")]),
    ("`targetPorts: [{number: 5557}]`", &[Pool("number: 8000", "number: 5557")]),
    ("`port` equal to `replayPort`", &[PoolWith("kvEvents: {port: 5557, replayPort: 5557}")]),
    ("`dpSize: 128` with the usual ports", &[PoolWith("dpSize: 128")]),
    ("`dpSize: 8` with `replayPort: 65530`", &[PoolWith("dpSize: 8\nkvEvents: {replayPort: 65530}")]),
    ("`bridge: Inject` without `workloads`", &[PoolWith("kvEvents: {bridge: Inject}")]),
    (
        "`bridge: Inject` with `transport: ZMQ`",
        &[PoolWith("workloads: [{kind: Deployment, name: a}]\nkvEvents: {transport: ZMQ, bridge: Inject}")],
    ),
    ("`nats` with `transport: ZMQ`", &[PoolWith("kvEvents: {transport: ZMQ, nats: {url: 'nats://a:4222'}}")]),
    (
        "`nats: {url: \"nats.messaging.svc:4222\"}`",
        &[PoolWith("kvEvents: {nats: {url: 'nats.messaging.svc:4222'}}")],
    ),
    (
        "`nats: {url: \"nats://user:secret@nats:4222\"}`",
        &[PoolWith("kvEvents: {nats: {url: 'nats://user:secret@nats:4222'}}")],
    ),
    (
        "`nats: {subjectPrefix: kv.router, …}`",
        &[PoolWith("kvEvents: {nats: {url: 'nats://a:4222', subjectPrefix: kv.router}}")],
    ),
    ("`workloads: [{kind: DaemonSet, …}]`", &[PoolWith("workloads: [{kind: DaemonSet, name: a}]")]),
    (
        "a workload twice",
        &[PoolWith("workloads: [{kind: Deployment, name: a}, {kind: Deployment, name: a}]")],
    ),
    ("`hashSeed: {value: random}`", &[PoolWith("hashSeed: {value: random}")]),
    (
        "two sources of a tokenizer",
        &[Pool("{name: Qwen/Qwen3-8B}", "{name: a, tokenizer: {path: /a, configMap: {name: b}}}")],
    ),
    (
        "`tokenizer: {path: Qwen3-8B}`",
        &[Pool("{name: Qwen/Qwen3-8B}", "{name: a, tokenizer: {path: Qwen3-8B}}")],
    ),
    (
        "a name with a dot, or of more than 50 characters",
        &[
            Pool("{name: qwen}", "{name: qwen.3}"),
            Router("metadata: {name: qwen}", "metadata: {name: qwen.3}"),
            Pool("{name: qwen}", "{name: q12345678901234567890123456789012345678901234567890}"),
        ],
    ),
    (
        "`kind: InferencePool` with another group",
        &[Pool("kvrouter.dev/v1alpha1", "inference.networking.k8s.io/v1")],
    ),
];

/// The one that needs an object that is there already.
const CHANGED: &str = "another `poolRef.name` later";

impl Manifest {
    fn text(&self) -> String {
        let replaced = |base: &str, from: &str, to: &str| {
            assert!(base.contains(from), "{from}");
            base.replacen(from, to, 1)
        };
        match self {
            PoolWith(lines) => with(POOL, lines),
            RouterWith(lines) => with(ROUTER, lines),
            Pool(from, to) => replaced(POOL, from, to),
            Router(from, to) => replaced(ROUTER, from, to),
        }
    }
}

#[test]
fn what_the_api_server_refuses_is_answered_as_documented() {
    let rows = table("What the API server answers");
    same_rows(&rows, REJECTED.iter().map(|(written, _)| *written).chain([CHANGED]));
    let mut wrong = Vec::new();
    for (written, answer) in &rows {
        let answer = answer.trim_matches('`');
        let said: Vec<String> = match REJECTED.iter().find(|(case, _)| case == written) {
            Some((_, manifests)) => {
                manifests.iter().map(|it| apply(&it.text()).err().unwrap_or_default()).collect()
            }
            None => vec![changed_reference()],
        };
        wrong.extend(said.iter().filter(|said| !said.contains(answer)).map(|said| {
            let said = if said.is_empty() { "accepted" } else { said };
            format!("{written}\n  documented: {answer}\n  answered:   {said}")
        }));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

fn changed_reference() -> String {
    let plane = ControlPlane::shared();
    plane.kubectl_ok(&["create", "namespace", "changed-reference"], None);
    plane.kubectl_ok(&["apply", "-n", "changed-reference", "-f", "-"], Some(ROUTER));
    let other = ROUTER.replace("poolRef: {name: qwen}", "poolRef: {name: other}");
    let (success, said) = plane.kubectl(&["apply", "-n", "changed-reference", "-f", "-"], Some(&other));
    if success { String::new() } else { said }
}

/// What makes a case, and what must go on while its condition is awaited.
type Arrange = for<'a> fn(&'a World) -> LocalBoxFuture<'a, Option<FakeRouter>>;

// tidy: long, because it is one table.
const CONDITIONS: &[(&str, Arrange)] = &[
    ("a `poolRef` that names no pool, or one of another namespace", |world| {
        Box::pin(async {
            world.create("KvRouter", "qwen", router("qwen")).await;
            None
        })
    }),
    ("`gatewayPoolRef` in a cluster without the Gateway API's kind", |world| alone(world, referring())),
    ("a `poolRef` to such a pool", |world| both(world, referring(), json!({}))),
    ("`Prefill` and `Decode` without a pod of `Decode`", |world| {
        Box::pin(async {
            world.pod("qwen-0", next_ip(), &[("app", "qwen"), ("role", "prefill")], engine(&[])).await;
            alone(world, json!({"spec": {"roles": divided("prefill", "decode")}})).await
        })
    }),
    ("`Mixed` pods beside `Decode` ones, and none of `Prefill`", |world| {
        Box::pin(async {
            for role in ["decode", "mixed"] {
                let labels = [("app", "qwen"), ("role", role)];
                world.pod(&format!("qwen-{role}"), next_ip(), &labels, engine(&[])).await;
            }
            let mut roles = divided("prefill", "decode");
            let mixed = json!({"name": "Mixed", "selector": {"matchLabels": {"role": "mixed"}}});
            roles.as_array_mut().expect("a list").push(mixed);
            alone(world, json!({"spec": {"roles": roles}})).await
        })
    }),
    ("a `poolRef` to a pool that is not accepted", |world| {
        let roles = json!([{"name": "Mixed", "selector": {"matchLabels": {"app": "other"}}}]);
        both(world, json!({"spec": {"roles": roles}}), json!({}))
    }),
    (WITHOUT_BROKER, |world| alone(world, json!({"spec": {"kvEvents": {"nats": null}}}))),
    ("a role that wants another value of a label than the pool", |world| {
        let roles = json!([{"name": "Mixed", "selector": {"matchLabels": {"app": "other"}}}]);
        alone(world, json!({"spec": {"roles": roles}}))
    }),
    ("two roles with one selector", |world| alone(world, json!({"spec": {"roles": divided("a", "a")}}))),
    ("`tokenizer: {image: {path: /qwen, …}}`", |world| {
        let image = json!({"reference": "registry.example/tokenizer:1", "path": "/qwen"});
        alone(world, json!({"spec": {"model": {"tokenizer": {"image": image}}}}))
    }),
    ("a selector that matches pods of another pool", |world| {
        Box::pin(async {
            for name in ["qwen-0", "qwen-1"] {
                world.pod(name, next_ip(), &[("app", "qwen"), ("team", "a")], engine(&[])).await;
            }
            let selector = json!({"spec": {"selector": {"matchLabels": {"app": null, "team": "a"}}}});
            world.create("InferencePool", "other", merged(pool("qwen"), selector)).await;
            world.create("InferencePool", "qwen", pool("qwen")).await;
            None
        })
    }),
    ("a selector that matches nothing", |world| alone(world, json!({}))),
    ("a target port that no container declares and no router reaches", |world| {
        Box::pin(async {
            world.pod("qwen-0", next_ip(), &[("app", "qwen")], engine(&[])).await;
            alone(world, json!({"spec": {"targetPorts": [{"number": 8001}]}})).await
        })
    }),
    ("a workload that is not there", |world| naming(world, json!({"kind": "Deployment", "name": "qwen"}))),
    ("a workload of other pods", |world| {
        Box::pin(async {
            world
                .create("Deployment", "other", deployment("other", json!([{"name": "engine", "image": "a"}])))
                .await;
            naming(world, json!({"kind": "Deployment", "name": "other"})).await
        })
    }),
    ("a workload that another controller makes", |world| {
        Box::pin(async {
            let owner = json!({"apiVersion": "serving.example/v1", "kind": "Model", "name": "m", "uid": "1", "controller": true});
            let mut owned = deployment("qwen", json!([{"name": "engine", "image": "a"}]));
            owned["metadata"]["ownerReferences"] = json!([owner]);
            world.create("Deployment", "qwen", owned).await;
            naming(world, json!({"kind": "Deployment", "name": "qwen"})).await
        })
    }),
    ("a container that is not there", |world| {
        Box::pin(async {
            world
                .create("Deployment", "qwen", deployment("qwen", json!([{"name": "engine", "image": "a"}])))
                .await;
            naming(world, json!({"kind": "Deployment", "name": "qwen", "container": "vllm"})).await
        })
    }),
    ("no `container`, and several that could be the engine's", |world| {
        Box::pin(async {
            let containers = json!([{"name": "engine", "image": "a"}, {"name": "logs", "image": "a"}]);
            world.create("Deployment", "qwen", deployment("qwen", containers)).await;
            naming(world, json!({"kind": "Deployment", "name": "qwen"})).await
        })
    }),
    ("a Secret that is not there", |world| {
        let identity = json!({"spec": {"identitySeedSecretRef": {"name": "nothere", "key": "seed"}}});
        unmounted(world, identity, "identity", "secret")
    }),
    ("a ConfigMap that is not there", |world| {
        let tokenizer = json!({"spec": {"model": {"tokenizer": {"configMap": {"name": "nothere"}}}}});
        unmounted(world, tokenizer, "tokenizer", "configmap")
    }),
    ("a claim that is not there", |world| {
        let tokenizer =
            json!({"spec": {"model": {"tokenizer": {"persistentVolumeClaim": {"claimName": "nothere"}}}}});
        let message = "0/2 nodes are available: persistentvolumeclaim \"nothere\" not found.";
        let scheduled = json!([{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}]);
        stuck(world, tokenizer, json!({}), json!({"phase": "Pending", "conditions": scheduled}))
    }),
    ("an `image` that is not there", |world| {
        let waiting =
            json!({"reason": "ImagePullBackOff", "message": "Back-off pulling image \"kv-router:nothere\""});
        let container = json!({"name": "router", "image": "kv-router:nothere", "imageID": "", "ready": false,
            "restartCount": 0, "state": {"waiting": waiting}});
        let image = json!({"spec": {"image": "kv-router:nothere"}});
        stuck(world, json!({}), image, json!({"phase": "Pending", "containerStatuses": [container]}))
    }),
    ("a name that a foreign Deployment or Service has", |world| {
        Box::pin(async {
            world.create("Service", "qwen-router", json!({"spec": {"ports": [{"port": 1}]}})).await;
            both(world, json!({}), json!({})).await
        })
    }),
    ("`scheduling: {affinity: {nodeAffinity: here}}`", |world| {
        both(world, json!({}), json!({"spec": {"scheduling": {"affinity": {"nodeAffinity": "here"}}}}))
    }),
    ("`replicas: 0`", |world| both(world, json!({}), json!({"spec": {"replicas": 0}}))),
    ("a `tokenizer` folder without `tokenizer.json`", |world| {
        let tokenizer = json!({"spec": {"model": {"tokenizer": {"path": "/models/qwen"}}}});
        // As the router says it.
        let message = "failed to read /models/qwen/tokenizer.json: No such file or directory (os error 2)";
        reporting(world, tokenizer, move |said| {
            said["tokenizer"] = json!({"ready": false, "message": message})
        })
    }),
    ("`model.name` that engines do not serve", |world| {
        reporting(world, json!({}), |said| {
            said["workers"][0]["ready"] = json!(false);
            said["workers"][0]["reason"] = json!("other_model");
        })
    }),
];

/// The one that an operator with a broker would not find wrong.
const WITHOUT_BROKER: &str = "a pool over NATS, and no broker anywhere";

/// The pool `qwen`, changed.
fn alone(world: &World, change: Value) -> LocalBoxFuture<'_, Option<FakeRouter>> {
    Box::pin(async move {
        world.create("InferencePool", "qwen", merged(pool("qwen"), change)).await;
        None
    })
}

/// The same with the router `qwen`, changed too.
fn both(world: &World, of_pool: Value, of_router: Value) -> LocalBoxFuture<'_, Option<FakeRouter>> {
    Box::pin(async move {
        alone(world, of_pool).await;
        world.create("KvRouter", "qwen", merged(router("qwen"), of_router)).await;
        None
    })
}

fn naming(world: &World, workload: Value) -> LocalBoxFuture<'_, Option<FakeRouter>> {
    alone(world, json!({"spec": {"workloads": [workload]}}))
}

/// What makes a pool refer to one of the Gateway API.
fn referring() -> Value {
    json!({"spec": {"selector": null, "targetPorts": null, "gatewayPoolRef": {"name": "gw"}}})
}

/// Roles that hand requests over to each other, by the value of their pods' label `role`.
fn divided(prefill: &str, decode: &str) -> Value {
    let role = |name: &str, label: &str| json!({"name": name, "protocol": "NIXL", "selector": {"matchLabels": {"role": label}}});
    json!([role("Prefill", prefill), role("Decode", decode)])
}

fn deployment(app: &str, containers: Value) -> Value {
    let labels = json!({"app": app});
    let template = json!({"metadata": {"labels": labels}, "spec": {"containers": containers}});
    json!({"spec": {"selector": {"matchLabels": labels}, "template": template}})
}

/// A router pod as the kubelet or the scheduler leaves it.
fn stuck(
    world: &World,
    of_pool: Value,
    of_router: Value,
    status: Value,
) -> LocalBoxFuture<'_, Option<FakeRouter>> {
    Box::pin(async move {
        both(world, of_pool, of_router).await;
        let template = world.appears("Deployment", "qwen-router").await["spec"]["template"].clone();
        world
            .create(
                "Pod",
                "qwen-router-0",
                json!({"metadata": {"labels": template["metadata"]["labels"],
            "annotations": template["metadata"]["annotations"]}, "spec": template["spec"]}),
            )
            .await;
        world.set_status("Pod", "qwen-router-0", status).await;
        None
    })
}

/// The same of a pod of which a volume cannot be mounted: only an event tells.
fn unmounted<'a>(
    world: &'a World,
    of_pool: Value,
    volume: &'a str,
    kind: &'a str,
) -> LocalBoxFuture<'a, Option<FakeRouter>> {
    Box::pin(async move {
        stuck(world, of_pool, json!({}), json!({"phase": "Pending"})).await;
        let pod = world.get("Pod", "qwen-router-0").await.expect("there");
        let message =
            format!("MountVolume.SetUp failed for volume \"{volume}\" : {kind} \"nothere\" not found");
        let about = json!({"apiVersion": "v1", "kind": "Pod", "name": "qwen-router-0", "namespace": world.namespace,
            "uid": pod["metadata"]["uid"]});
        world.create("CoreEvent", "qwen-router-0.1", json!({"involvedObject": about, "type": "Warning",
            "reason": "FailedMount", "message": message, "lastTimestamp": pod["metadata"]["creationTimestamp"]})).await;
        None
    })
}

/// A router that knows one engine, and reports what `change` makes of it.
fn reporting(
    world: &World,
    of_pool: Value,
    change: impl FnOnce(&mut Value) + 'static,
) -> LocalBoxFuture<'_, Option<FakeRouter>> {
    Box::pin(async move {
        let pod = world.pod("qwen-0", next_ip(), &[("app", "qwen")], engine(&[])).await;
        both(world, of_pool, json!({"spec": {"replicas": 1}})).await;
        let found =
            world.becomes("settings", "KvRouter", "qwen", |it| it["status"]["configHash"].is_string()).await;
        let (start, live) = settings(&found);
        let mut said = report(&world.namespace, "qwen", (&start, &live), &[crate::world::worker(&pod, 16)]);
        change(&mut said);
        world.roll_out("Deployment", "qwen-router").await;
        Some(world.router_pod("qwen", "qwen-router-0", said).await)
    })
}

/// A row's second cell: `` KvRouter `Ready=False`, `NoPods`: message``.
fn condition(cell: &str) -> Option<[&str; 5]> {
    let (kind, rest) = cell.split_once(" `")?;
    let (type_, rest) = rest.split_once('=')?;
    let (status, rest) = rest.split_once("`, `")?;
    let (reason, message) = rest.split_once("`: ")?;
    Some([if kind == "pool" { "InferencePool" } else { kind }, type_, status, reason, message])
}

#[tokio::test(flavor = "multi_thread")]
async fn what_only_a_condition_can_say_is_said_as_documented() {
    let rows = table("What only a condition can say");
    same_rows(&rows, CONDITIONS.iter().map(|(written, _)| *written));
    let mut worlds = Vec::new();
    for (number, (written, arrange)) in CONDITIONS.iter().enumerate() {
        let cell = rows.iter().find(|row| row.0 == *written).expect("compared before").1.clone();
        let world = World::new(&format!("documented-{number}")).await;
        worlds.push((written, arrange, cell, world));
    }
    let named = |has_broker: bool| {
        let names = worlds.iter().filter(|world| (*world.0 == WITHOUT_BROKER) != has_broker);
        names.map(|world| world.3.namespace.clone()).collect::<Vec<_>>().join(",")
    };
    let all = &worlds[0].3;
    let _operator = all.operator_of(&named(true), &[crate::world::BROKER]);
    let _other = all.operator_of(&named(false), &[]);
    let port = all.report_port;
    let wrong: Vec<Option<String>> = futures::stream::iter(worlds.into_iter())
        .map(|(written, arrange, cell, mut world)| async move {
            world.report_port = port;
            differs(written, *arrange, &cell, &world).await
        })
        .buffer_unordered(CONCURRENCY)
        .collect()
        .await;
    let wrong: Vec<String> = wrong.into_iter().flatten().collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// How what is said differs from what is documented; none if it does not.
async fn differs(written: &str, arrange: Arrange, cell: &str, world: &World) -> Option<String> {
    let Some([kind, type_, status, reason, message]) = condition(cell) else {
        return Some(format!("{written}: no condition with a message: {cell}"));
    };
    let _router = arrange(world).await;
    let mut last = String::new();
    for _ in 0..150 {
        let object = world.get(kind, "qwen").await.unwrap_or_default();
        let found = condition_of(&object, type_);
        let text =
            |field: &str| found[field].as_str().unwrap_or_default().replace(&world.namespace, NAMESPACE);
        last = format!("{kind} `{type_}={}`, `{}`: {}", text("status"), text("reason"), text("message"));
        if text("status") == status && text("reason") == reason && text("message") == message {
            return None;
        }
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
    Some(format!("{written}\n  documented: {cell}\n  said:       {last}"))
}
