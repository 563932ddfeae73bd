//! Where operator and router meet: what the operator renders is what the router
//! loads.
//!
//! Both are asked themselves: `render` of the operator, and the loader of
//! `kv-router serve`. What the schema of either kind lets through must be a file
//! that a router takes, to the last word and to both ends of every range.

use std::path::{Path, PathBuf};

use kvrouter_operator::config::{ChildFlags, RenderFlags};
use kvrouter_operator::{render, schema, yaml};
use kvrouter_router::config::{ServeConfig, ServeFlags};
use serde_json::{Value, json};

/// Fields that say how pods run; no part of them enters a router's settings.
const OF_PODS: &[&str] = &["spec.resources", "spec.scheduling", "spec.imagePullSecrets", "spec.service"];
/// Where the operator mounts the identity seed. Here it is in a folder of our own.
const IDENTITY_FOLDER: &str = "/etc/kvrouter-identity";
/// Where it mounts the secret of tenants' salts.
const TENANCY_FOLDER: &str = "/etc/kvrouter-tenancy";

fn samples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../config/samples")
}

/// Every object that the operator reads in the files of `folder` and of folders in it, with the file's name.
fn objects(folder: &Path) -> Vec<(String, Value)> {
    let mut found = Vec::new();
    let mut paths: Vec<PathBuf> =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    for path in paths {
        if path.is_dir() {
            found.extend(objects(&path));
        } else if path.extension().is_some_and(|extension| extension == "yaml") {
            let text = std::fs::read_to_string(&path).unwrap();
            let documents = yaml::documents(&text).unwrap().into_iter();
            let groups = ["kvrouter.dev/", "inference.networking.k8s.io/"];
            let is_read = |it: &str| groups.iter().any(|group| it.starts_with(group));
            let read = documents.filter(|it| it["apiVersion"].as_str().is_some_and(is_read));
            found.extend(read.map(|it| (path.display().to_string(), it)));
        }
    }
    found
}

fn is_ours(object: &Value) -> bool {
    object["apiVersion"] == "kvrouter.dev/v1alpha1"
}

fn is_pool(object: &Value) -> bool {
    is_ours(object) && object["kind"] == "InferencePool"
}

fn has_pool(objects: &[Value], name: &str) -> bool {
    objects.iter().any(|it| is_pool(it) && it["metadata"]["name"] == name)
}

fn pools_of_routers(objects: &[Value]) -> Vec<String> {
    objects.iter().filter_map(|it| it["spec"]["poolRef"]["name"].as_str().map(str::to_owned)).collect()
}

fn object(kind: &str, name: &str, spec: Value) -> Value {
    json!({"apiVersion": "kvrouter.dev/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec})
}

/// The least router of that pool.
fn router(pool: &str) -> Value {
    object("KvRouter", pool, json!({"poolRef": {"name": pool}}))
}

/// What `kv-router-operator render` prints of a file with these objects.
fn rendered(objects: &[Value]) -> Result<String, Vec<String>> {
    let text: String = objects.iter().map(|it| format!("---\n{}", yaml::text(it))).collect();
    let children = ChildFlags {
        router_image: "kv-router:test".to_owned(),
        bridge_image: None,
        nats_url: Some("nats://nats.kvrouter-system:4222".to_owned()),
        router_cluster_role: "kvrouter-router".to_owned(),
        workload_patching: true,
    };
    let flags = RenderFlags { children, files: Vec::new(), namespace: "demo".to_owned() };
    render::render_texts(&[("objects.yaml".to_owned(), text)], &flags)
}

/// Starts with every pair of ConfigMaps in `text`, as `kv-router serve` does; the number of pairs.
fn load(text: &str) -> Result<usize, String> {
    let folder = tempfile::tempdir().unwrap();
    let texts = |key: &str| {
        let documents = yaml::documents(text).unwrap().into_iter();
        documents.filter_map(|it| it["data"][key].as_str().map(str::to_owned)).collect::<Vec<_>>()
    };
    let (starts, lives) = (texts("config.yaml"), texts("live.yaml"));
    assert_eq!(starts.len(), lives.len(), "both settings of every router");
    for (start, live) in starts.iter().zip(&lives) {
        let path = folder.path().join("config.yaml");
        let own = folder.path().display().to_string();
        let start = start.replace(IDENTITY_FOLDER, &own).replace(TENANCY_FOLDER, &own);
        std::fs::write(folder.path().join("seed"), "secret").unwrap();
        std::fs::write(folder.path().join("salt"), "a secret of some length").unwrap();
        std::fs::write(&path, &start).unwrap();
        let flags = ServeFlags { config: path, ..ServeFlags::default() };
        let config = ServeConfig::load(&flags).map_err(|error| format!("{error}\n{start}"))?;
        config.live_of(live, Path::new("live.yaml")).map_err(|error| format!("{error}\n{live}"))?;
    }
    Ok(starts.len())
}

#[test]
fn settings_of_every_sample_are_loaded() {
    let all = objects(&samples());
    let mut loaded = 0;
    let files: std::collections::BTreeSet<&String> = all.iter().map(|(file, _)| file).collect();
    for file in files {
        let mut objects: Vec<Value> = all.iter().filter(|it| it.0 == *file).map(|it| it.1.clone()).collect();
        // Some samples show a router or a pool alone, for others to complete.
        for name in pools_of_routers(&objects) {
            if !has_pool(&objects, &name) {
                let mut pools =
                    all.iter().map(|(_, it)| it).filter(|it| has_pool(std::slice::from_ref(*it), &name));
                objects.push(pools.next().unwrap_or_else(|| panic!("{file}: no pool {name}")).clone());
            }
        }
        for pool in objects.clone().iter().filter(|it| is_pool(it)) {
            let name = pool["metadata"]["name"].as_str().unwrap();
            if !pools_of_routers(&objects).iter().any(|it| it == name) {
                objects.push(router(name));
            }
        }
        let text = rendered(&objects).unwrap_or_else(|errors| panic!("{file}: {errors:#?}"));
        loaded += load(&text).unwrap_or_else(|error| panic!("{file}: {error}"));
    }
    assert!(loaded >= 12, "{loaded} routers in the samples");
}

/// Both kinds with their schemas.
fn kinds() -> [(&'static str, Value); 2] {
    [("InferencePool", schema::of_pool()), ("KvRouter", schema::of_router())]
}

/// Calls `visit` for every field below `field` that may enter settings, lists and maps included.
fn fields(schema: &Value, field: &str, visit: &mut dyn FnMut(&str, &Value)) {
    if OF_PODS.contains(&field) {
        return;
    }
    for (name, inner) in schema["properties"].as_object().into_iter().flatten() {
        let path = format!("{field}.{name}");
        visit(&path, inner);
        fields(inner, &path, visit);
        fields(&inner["items"], &format!("{path}.0"), visit);
    }
}

fn pointer(path: &str) -> String {
    format!("/{}", path.replace('.', "/"))
}

/// The sample that shows every setting of both kinds.
fn full() -> [Value; 2] {
    let all = objects(&samples());
    let of = |kind: &str| {
        let mut found = all.iter().filter(|(file, it)| file.ends_with("/full.yaml") && it["kind"] == kind);
        found.next().unwrap_or_else(|| panic!("full.yaml has no {kind}")).1.clone()
    };
    [of("InferencePool"), of("KvRouter")]
}

/// The least that both kinds need, with a workload, so that a bridge may be injected, room for many ranks, and tiers
/// that are all worth the same.
fn least(tiers: f64) -> [Value; 2] {
    let spec = json!({
        "model": {"name": "m"}, "selector": {"matchLabels": {"app": "qwen"}}, "targetPorts": [{"number": 8000}],
        "workloads": [{"kind": "Deployment", "name": "qwen"}], "kvEvents": {"port": 20000, "replayPort": 30000},
    });
    let mut router = router("qwen");
    router["spec"]["tierCredits"] = json!({"device": tiers, "host": tiers, "disk": tiers});
    [object("InferencePool", "qwen", spec), router]
}

/// The least with these roles; those that hand requests over speak NIXL.
fn least_of(names: &[&str]) -> [Value; 2] {
    let role = |name: &&str| {
        let mut role = json!({"name": name, "selector": {"matchLabels": {"role": name}}});
        if *name != "Mixed" {
            role["protocol"] = json!("NIXL");
        }
        role
    };
    let [mut pool, router] = least(1.0);
    pool["spec"]["roles"] = names.iter().map(role).collect();
    [pool, router]
}

/// Sets a field, with everything around it that is not there.
fn set(object: &mut Value, path: &str, value: Value) {
    let mut at = object;
    for step in path.split('.') {
        at = match step.parse::<usize>() {
            Ok(index) => {
                if !at.is_array() {
                    *at = json!([{}]);
                }
                &mut at[index]
            }
            Err(_) => &mut at[step],
        };
    }
    *at = value;
}

/// Every setting is shown in one of the samples, so that the tests of samples are tests of every setting.
#[test]
fn the_samples_show_every_setting() {
    let all = objects(&samples());
    for (kind, schema) in kinds() {
        let mut missing = Vec::new();
        fields(&schema["properties"]["spec"], "spec", &mut |path, _| {
            let pointer = pointer(path);
            if !all.iter().any(|(_, it)| is_ours(it) && it["kind"] == kind && it.pointer(&pointer).is_some())
            {
                missing.push(path.to_owned());
            }
        });
        assert_eq!(missing, [""; 0], "{kind}: settings that no file in config/samples shows");
    }
}

#[test]
fn every_word_and_both_ends_of_every_range_are_loaded() {
    let mut tried = 0;
    for (at, (kind, schema)) in kinds().into_iter().enumerate() {
        let mut cases: Vec<(String, Value)> = Vec::new();
        fields(&schema["properties"]["spec"], "spec", &mut |path, field| {
            let words = field["enum"].as_array().cloned().unwrap_or_default();
            let ends = [field["minimum"].clone(), field["maximum"].clone()];
            let whole = |end: Value| match (field["type"] == "integer", end.as_f64()) {
                (true, Some(number)) => json!(number as i64),
                _ => end,
            };
            let ends = ends.into_iter().filter(|end| !end.is_null()).map(whole);
            cases.extend(words.into_iter().chain(ends).map(|value| (path.to_owned(), value)));
        });
        for (path, value) in cases {
            let mut refusals = Vec::new();
            let mut loaded = 0;
            let pairs = [least_of(&["Decode", "Prefill"]), least_of(&["Mixed"])];
            for mut objects in [full(), least(0.0), least(1.0)].into_iter().chain(pairs) {
                set(&mut objects[at], &path, value.clone());
                match rendered(&objects) {
                    Ok(text) => {
                        loaded +=
                            load(&text).unwrap_or_else(|error| panic!("{kind} {path}: {value}: {error}"));
                    }
                    Err(errors) => refusals.extend(errors),
                }
            }
            // Beside some settings a value is a contradiction, but not beside all.
            assert!(loaded != 0, "{kind} {path}: {value}: {refusals:#?}");
            tried += loaded;
        }
    }
    assert!(tried > 60, "{tried}");
}

/// What the schema keeps out is what a router would not take.
#[test]
fn both_know_the_headers_that_name_no_tenant() {
    let schema = schema::of_router();
    let header = &schema["properties"]["spec"]["properties"]["tenancy"]["properties"]["header"];
    let rules = header["x-kubernetes-validations"].to_string();
    for name in kvrouter_crds::config::NO_TENANT_HEADERS {
        assert!(rules.contains(&format!("'{name}'")), "{name}: {header}");
        let mut objects = full();
        set(&mut objects[1], "spec.tenancy.header", json!("X-Team"));
        let text = rendered(&objects).unwrap();
        assert_eq!(load(&text), Ok(1));
        let error = load(&text.replace("X-Team", name)).unwrap_err();
        assert!(error.contains("tenancy.header"), "{error}");
    }
}
