//! What `render` prints, compared with files, and what it complains about.
//!
//! `UPDATE_EXPECT=1 cargo test -p kvrouter-operator render` writes the files anew.

#![allow(clippy::disallowed_methods, reason = "UPDATE_EXPECT is read from the environment")]

use std::path::PathBuf;

use super::*;
use crate::sample;

fn flags() -> RenderFlags {
    RenderFlags { children: sample::flags(), files: Vec::new(), namespace: "default".to_owned() }
}

fn golden(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("golden").join(name)
}

fn input(name: &str) -> String {
    std::fs::read_to_string(golden(&format!("{name}.in.yaml"))).expect("the input")
}

#[track_caller]
fn check_golden(name: &str) {
    let found = render_texts(&[(format!("{name}.in.yaml"), input(name))], &flags()).expect("in order");
    let path = golden(&format!("{name}.out.yaml"));
    if std::env::var_os("UPDATE_EXPECT").is_some() {
        std::fs::write(&path, &found).expect("writable");
    }
    let expected = std::fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(found, expected, "{name}: if this is right, run with UPDATE_EXPECT=1");
}

#[test]
fn what_is_printed_is_what_is_expected() {
    check_golden("one");
    check_golden("minimal");
    check_golden("divided");
    check_golden("gateway");
}

#[test]
fn files_may_be_split_in_any_way() {
    let whole = input("one");
    let documents: Vec<(String, String)> =
        whole.split("---\n").map(|text| ("part".to_owned(), text.to_owned())).collect();
    let mut reversed = documents.clone();
    reversed.reverse();
    let children = |texts: &[(String, String)]| {
        let text = render_texts(texts, &flags()).expect("in order");
        text.split_once("---\n").expect("children").1.to_owned()
    };
    assert_eq!(children(&documents), children(&reversed));
    assert_eq!(children(&documents), children(&[("whole".to_owned(), whole)]));
}

#[test]
fn what_is_printed_is_yaml_with_config_maps_first() {
    let text = render_texts(&[("f".to_owned(), input("one"))], &flags()).expect("in order");
    let kinds: Vec<String> = yaml::documents(&text)
        .expect("YAML")
        .iter()
        .map(|document| document["kind"].as_str().unwrap_or("-").to_owned())
        .collect();
    let expected = [
        "ConfigMap",
        "ConfigMap",
        "ServiceAccount",
        "RoleBinding",
        "Deployment",
        "Service",
        "PodDisruptionBudget",
    ];
    assert_eq!(kinds, expected);
}

/// Both kinds in order, with one text replaced.
#[track_caller]
fn check(why: &str, from: &str, to: &str, expected: &str) {
    let whole = input("one");
    assert!(whole.contains(from), "{why}: {from}");
    let found = render_texts(&[("f.yaml".to_owned(), whole.replacen(from, to, 1))], &flags());
    let errors = found.expect_err(why);
    assert!(errors.iter().any(|error| error.contains(expected)), "{why}: {errors:#?}");
}

// tidy: long, because it is one table.
#[test]
fn errors_name_file_document_and_field() {
    let pool = "f.yaml: document 1 (InferencePool qwen): ";
    let router = "f.yaml: document 2 (KvRouter chat): ";
    let words = format!("{router}spec.inFlightCredit: \"on\" is none of Disabled, Enabled");
    check("a word that some take for a boolean", "poolRef:", "inFlightCredit: on\n  poolRef:", &words);
    let words = format!("{router}spec.inFlightCredit: true is none of Disabled, Enabled");
    check("a boolean", "poolRef:", "inFlightCredit: true\n  poolRef:", &words);
    check(
        "an unknown word",
        "bridge: Inject",
        "bridge: Sometimes",
        &format!("{pool}spec.kvEvents.bridge: \"Sometimes\" is none of External, Inject"),
    );
    check("an unknown field", "replicas: 3", "replicaz: 3", &format!("{router}spec.replicaz: is no field"));
    check(
        "a missing field",
        "poolRef: {name: qwen}",
        "poolRef: {}",
        &format!("{router}spec.poolRef.name: is missing"),
    );
    check(
        "too small",
        "{number: 8000}",
        "{number: 0}",
        &format!("{pool}spec.targetPorts[0].number: is 0, at least 1 is needed"),
    );
    check(
        "text for a number",
        "replicas: 3",
        "replicas: \"3\"",
        &format!("{router}spec.replicas: \"3\" is no whole number"),
    );
    check(
        "a number for text",
        "name: Qwen/Qwen3-8B",
        "name: 8",
        &format!("{pool}spec.model.name: 8 is no text"),
    );
    check(
        "too many",
        "default: 1.5",
        "default: 1000001",
        &format!("{router}spec.overlapWeights.default: is 1000001, at most 1000000 is possible"),
    );
    check("no entries", "{app: qwen}", "{}", &format!("{pool}spec.selector.matchLabels: has 0 entries"));
    check(
        "what CEL says",
        "targetPorts: [{number: 8000}]",
        "targetPorts: [{number: 5557}]",
        &format!("{pool}spec.kvEvents: InvalidSpec"),
    );
    check(
        "another contradiction",
        "poolRef:",
        "policy: KvAware\n  loadWeights: {}\n  poolRef:",
        &format!("{router}spec.loadWeights: InvalidSpec"),
    );
    check(
        "no pool",
        "poolRef: {name: qwen}",
        "poolRef: {name: x}",
        &format!("{router}spec.poolRef.name: there is no InferencePool x"),
    );
    check(
        "another version",
        "v1alpha1\nkind: InferencePool",
        "v1\nkind: InferencePool",
        &format!("{pool}apiVersion: kvrouter.dev/v1 is not known"),
    );
    check("another kind", "kind: KvRouter", "kind: KvRuoter", "document 2 (KvRuoter chat): is neither");
    check("no name", "name: chat\n", "labels: {}\n", "document 2 (KvRouter ): metadata.name: is missing");
    check("no YAML", "replicas: 3", "replicas: [3", "f.yaml: document 2: ");
}

/// A folder with these files and texts; folders end in `/`.
fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    for (name, text) in files {
        let path = folder.path().join(name);
        if name.ends_with('/') {
            std::fs::create_dir(path).expect("a folder");
        } else {
            std::fs::write(path, text).expect("written");
        }
    }
    folder
}

#[test]
fn a_folder_is_its_manifests_in_the_order_of_their_names() {
    let whole = input("one");
    let (pool, rest) = whole.split_once("---\n").expect("a pool");
    let (router, _) = rest.split_once("---\n").expect("a router");
    let router_json = serde_json::to_string(&yaml::documents(router).expect("YAML")[0]).expect("JSON");
    // What is not ours is told in the order in which it is read.
    let namespace = "apiVersion: v1\nkind: Namespace\nmetadata: {name: models}\n";
    let given = folder(&[
        ("c.yaml", namespace),
        ("b.json", &router_json),
        ("a.yml", pool),
        ("0.yaml", namespace),
        ("notes.md", "not: [YAML"),
        ("Makefile", "all:\n\ttrue"),
        ("old.yaml/", ""),
    ]);
    let render = |files: Vec<PathBuf>| render(&RenderFlags { files, ..flags() });
    let at = |name: &str| given.path().join(name);
    let found = render(vec![given.path().to_owned()]).expect("in order");
    assert_eq!(found, render(["0.yaml", "a.yml", "b.json", "c.yaml"].map(at).to_vec()).expect("in order"));
    let name = at("a.yml").display().to_string();
    assert!(found.contains(&format!("# {name}: document 1 (InferencePool qwen) in namespace")), "{found}");
    // A file that is named is read, whatever its ending.
    let errors = render(vec![at("a.yml"), at("notes.md")]).expect_err("no YAML");
    assert!(errors[0].starts_with(&format!("{}: document 1: ", at("notes.md").display())), "{errors:?}");
}

#[test]
fn what_cannot_be_read_is_named() {
    let given = folder(&[("a.txt", ""), ("bad.yaml", "a: [")]);
    let empty = folder(&[("a.txt", "")]);
    let render = |files: Vec<PathBuf>| render(&RenderFlags { files, ..flags() }).expect_err("errors");
    let path = |folder: &tempfile::TempDir, name: &str| folder.path().join(name);
    let check = |files: Vec<PathBuf>, expected: &[String]| {
        let errors = render(files);
        assert_eq!(errors.len(), expected.len(), "{errors:?}");
        for (error, expected) in errors.iter().zip(expected) {
            assert!(error.starts_with(expected), "{error}");
        }
    };
    check(
        vec![path(&empty, ""), path(&empty, "absent.yaml")],
        &[
            format!("{}: no file in this folder ends in", path(&empty, "").display()),
            format!("{}: failed to read: No such file", path(&empty, "absent.yaml").display()),
        ],
    );
    check(vec![path(&given, "")], &[format!("{}: document 1: ", path(&given, "bad.yaml").display())]);
    let twice = render(vec![PathBuf::from("-"), PathBuf::from("-")]);
    assert_eq!(twice, ["-: standard input can be read once; name it once"]);
}

#[test]
fn a_gateway_pool_must_be_in_the_files() {
    let whole = input("gateway");
    let (gateway_pool, ours) = whole.split_once("---\n").expect("a gateway pool and ours");
    let render = |text: String| render_texts(&[("f.yaml".to_owned(), text)], &flags());
    let alone = render(ours.to_owned()).expect_err("it is missing");
    let missing = "GatewayPoolNotFound: There is no InferencePool gw of inference.networking.k8s.io/v1 in namespace default in \
                   the files; give its file too, or correct spec.gatewayPoolRef.name.";
    assert_eq!(alone[0], format!("f.yaml: document 1 (InferencePool qwen): spec.gatewayPoolRef: {missing}"));
    assert!(
        alone[1].starts_with("f.yaml: document 2 (KvRouter chat): spec.poolRef: GatewayPoolNotFound: "),
        "{alone:?}"
    );
    let check = |why: &str, from: &str, to: &str, expected: &str| {
        assert!(gateway_pool.contains(from), "{why}: {from}");
        let changed = gateway_pool.replace(from, to);
        let errors = render(format!("{changed}---\n{ours}")).expect_err(why);
        assert!(errors.iter().any(|error| error.contains(expected)), "{why}: {errors:#?}");
    };
    check(
        "another version",
        "k8s.io/v1",
        "k8s.io/v1alpha2",
        "There is no InferencePool gw of inference.networking.k8s.io/v1",
    );
    check("another namespace", "{name: gw}", "{name: gw, namespace: a}", "in namespace default in the files");
    check(
        "of no use",
        "matchLabels: {app: vllm}",
        "matchLabels: {}",
        "its spec.selector.matchLabels is empty",
    );
    check(
        "unreadable",
        "[{number: 8000}",
        "[{number: http}",
        "f.yaml: document 1 (InferencePool gw): invalid type",
    );
    check("no name", "metadata: {name: gw}", "metadata: gw", "(InferencePool ): metadata.name: is missing");
    let twice = render(format!("{gateway_pool}---\n{whole}")).expect_err("twice");
    assert!(
        twice[0].contains("(InferencePool gw): is there twice, first in f.yaml: document 1"),
        "{twice:?}"
    );
    let both = ours.replace("gatewayPoolRef:", "targetPorts: [{number: 1}]\n  gatewayPoolRef:");
    let errors = render(format!("{gateway_pool}---\n{both}")).expect_err("both");
    assert!(
        errors[0].contains("spec.gatewayPoolRef: InvalidSpec: spec.gatewayPoolRef stands instead"),
        "{errors:?}"
    );
}

#[test]
fn no_object_at_all_is_an_error() {
    let errors = render_texts(&[("f".to_owned(), "---\n".to_owned())], &flags()).expect_err("nothing");
    assert_eq!(errors, ["there is no InferencePool and no KvRouter in the files"]);
}

#[test]
fn an_object_that_is_there_twice_is_an_error() {
    let text = input("minimal");
    let texts = [("a".to_owned(), text.clone()), ("b".to_owned(), text)];
    let errors = render_texts(&texts, &flags()).expect_err("twice");
    assert_eq!(errors.len(), 3);
    assert!(
        errors[0].contains("b: document 1 (KvRouter chat): is there twice, first in a: document 1"),
        "{errors:?}"
    );
}
