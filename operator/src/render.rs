//! `kv-router-operator render`: what would be applied, offline.
//!
//! The same stages as with a cluster, with nothing observed. Standard output is
//! YAML that `kubectl apply` takes, ConfigMaps first; what else can be said is in
//! comments. Any error in any file is an error of the whole.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use k8s_openapi::jiff::Timestamp;
use kvrouter_crds::pool::{Bridge, HashSeedPolicy, InferencePoolSpec};
use kvrouter_crds::{InferencePool, KvRouter};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::config::RenderFlags;
use crate::gateway::{self, GatewayPool, Lookup, Resolved};
use crate::router::build::{Desired, build};
use crate::verdict::Complaint;
use crate::{pool, router, schema, yaml};

/// First line of what is printed.
const HEADER: &str = "# What kv-router-operator would apply, and what it can say without a cluster.\n";
/// Most errors that are told.
const MOST_ERRORS: usize = 50;
/// How files of a folder must end to be read, as kubectl does it.
const EXTENSIONS: &[&str] = &["yaml", "yml", "json"];

/// What `render` prints; or what is wrong, a line each, for standard error and
/// exit code 2.
pub fn render(flags: &RenderFlags) -> Result<String, Vec<String>> {
    let mut texts = Vec::new();
    let mut errors = Vec::new();
    if flags.files.iter().filter(|path| is_standard_input(path)).count() > 1 {
        return Err(vec!["-: standard input can be read once; name it once".to_owned()]);
    }
    for named in &flags.files {
        let files = match files_of(named) {
            Ok(files) => files,
            Err(error) => {
                errors.push(format!("{}: {error}", named.display()));
                continue;
            }
        };
        for path in files {
            match read(&path) {
                Ok(text) => texts.push((path.display().to_string(), text)),
                Err(error) => errors.push(format!("{}: failed to read: {error}", path.display())),
            }
        }
    }
    if !errors.is_empty() {
        return Err(errors);
    }
    render_texts(&texts, flags)
}

fn is_standard_input(path: &Path) -> bool {
    path == Path::new("-")
}

/// The files that `named` stands for: of a folder, but not of folders in it,
/// those with manifests, in the order of their names.
fn files_of(named: &Path) -> Result<Vec<PathBuf>, String> {
    if is_standard_input(named) || !named.is_dir() {
        return Ok(vec![named.to_owned()]);
    }
    let entries = std::fs::read_dir(named).and_then(Iterator::collect::<std::io::Result<Vec<_>>>);
    let entries = entries.map_err(|error| format!("failed to list: {error}"))?;
    let is_manifest = |path: &PathBuf| {
        let extension = path.extension().and_then(|extension| extension.to_str());
        extension.is_some_and(|extension| EXTENSIONS.contains(&extension)) && !path.is_dir()
    };
    let mut files: Vec<PathBuf> = entries.into_iter().map(|entry| entry.path()).filter(is_manifest).collect();
    files.sort();
    if files.is_empty() {
        return Err("no file in this folder ends in .yaml, .yml or .json; name the files".to_owned());
    }
    Ok(files)
}

fn read(path: &Path) -> std::io::Result<String> {
    if is_standard_input(path) {
        return std::io::read_to_string(std::io::stdin());
    }
    std::fs::read_to_string(path)
}

/// An object and where it stands.
struct Placed<T> {
    at: String,
    object: T,
}

/// Objects of one kind, by namespace and name.
type ByName<T> = BTreeMap<(String, String), Placed<T>>;

#[derive(Default)]
struct Objects {
    pools: ByName<Arc<InferencePool>>,
    routers: ByName<KvRouter>,
    /// Pools of the Gateway API, which ours may refer to.
    gateway_pools: ByName<Arc<GatewayPool>>,
    /// What is said of what is in the files and not ours.
    skipped: Vec<String>,
    errors: Vec<String>,
}

/// The same of texts and their names. Pure.
pub fn render_texts(texts: &[(String, String)], flags: &RenderFlags) -> Result<String, Vec<String>> {
    let mut objects = Objects::default();
    for (file, text) in texts {
        match yaml::documents(text) {
            Ok(documents) => {
                for (at, document) in documents.into_iter().enumerate() {
                    objects.take(file, at + 1, document, &flags.namespace);
                }
            }
            Err((at, error)) => objects.errors.push(format!("{file}: document {at}: {error}")),
        }
    }
    if objects.pools.is_empty() && objects.routers.is_empty() && objects.errors.is_empty() {
        objects.errors.push("there is no InferencePool and no KvRouter in the files".to_owned());
    }
    let mut out = Printed::default();
    for skipped in &objects.skipped {
        out.comment(skipped);
    }
    let Objects { pools, gateway_pools, routers, mut errors, .. } = objects;
    let pools = resolved(pools, &gateway_pools);
    for read in pools.values() {
        tell_pool(read, &pools, flags, &mut out, &mut errors);
    }
    for read in routers.values() {
        tell_router(read, &pools, flags, &mut out, &mut errors);
    }
    if errors.is_empty() {
        return Ok(out.text());
    }
    let more = errors.len().saturating_sub(MOST_ERRORS);
    errors.truncate(MOST_ERRORS);
    if more != 0 {
        errors.push(format!("and {more} more"));
    }
    Err(errors)
}

/// The pools, with what they have from pools of the Gateway API.
fn resolved(pools: ByName<Arc<InferencePool>>, gateway_pools: &ByName<Arc<GatewayPool>>) -> Pools {
    let look_up = |namespace: &str, name: &str| {
        let found = gateway_pools.get(&(namespace.to_owned(), name.to_owned()));
        found.map_or(Lookup::NotInFiles, |found| Lookup::Found(Arc::clone(&found.object)))
    };
    let resolve = |Placed { at, object }| Placed { at, object: Resolved::of(object, look_up) };
    pools.into_iter().map(|(key, pool)| (key, resolve(pool))).collect()
}

impl Objects {
    fn take(&mut self, file: &str, at: usize, mut document: Value, namespace: &str) {
        if document.is_null() {
            return;
        }
        let text =
            |pointer: &str| document.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned();
        let (kind, version, name) = (text("/kind"), text("/apiVersion"), text("/metadata/name"));
        let at = format!("{file}: document {at} ({kind} {name})");
        if kind == "InferencePool" && version == format!("{}/{}", gateway::GROUP, gateway::VERSION) {
            self.take_gateway_pool(at, document, namespace);
            return;
        }
        let ours = matches!(kind.as_str(), "InferencePool" | "KvRouter");
        let group = format!("{}/", kvrouter_crds::GROUP);
        if !ours || !version.starts_with(&group) {
            if version.starts_with(&group) || version.is_empty() || kind.is_empty() {
                let message = "is neither an InferencePool nor a KvRouter; correct kind and apiVersion";
                self.errors.push(format!("{at}: {message}"));
            } else {
                self.skipped.push(format!("{at} is not this operator's and is left out."));
            }
            return;
        }
        if version != format!("{group}{}", kvrouter_crds::VERSION) {
            let wanted = kvrouter_crds::VERSION;
            self.errors.push(format!("{at}: apiVersion: {version} is not known; write {group}{wanted}"));
            return;
        }
        if name.is_empty() {
            self.errors.push(format!("{at}: metadata.name: is missing"));
            return;
        }
        let schema = if kind == "KvRouter" { schema::of_router() } else { schema::of_pool() };
        let misfits = schema::misfits(&schema, &mut document);
        if !misfits.is_empty() {
            let errors = misfits.iter().map(|misfit| format!("{at}: {}: {}", misfit.field, misfit.message));
            self.errors.extend(errors);
            return;
        }
        let key = key(&mut document, namespace);
        let kept = if kind == "KvRouter" {
            keep::<KvRouter>(&mut self.routers, key, at, document)
        } else {
            keep(&mut self.pools, key, at, document)
        };
        self.errors.extend(kept.err());
    }

    /// Only those that a pool refers to matter, and only what is read of them.
    fn take_gateway_pool(&mut self, at: String, mut document: Value, namespace: &str) {
        if document.pointer("/metadata/name").and_then(Value::as_str).is_none_or(str::is_empty) {
            self.errors.push(format!("{at}: metadata.name: is missing"));
            return;
        }
        let key = key(&mut document, namespace);
        self.skipped.push(format!("{at} is only read, for pools that refer to it."));
        self.errors.extend(keep(&mut self.gateway_pools, key, at, document).err());
    }
}

/// Namespace and name; a missing namespace is written into the document.
fn key(document: &mut Value, namespace: &str) -> (String, String) {
    let text = |document: &Value, pointer: &str| {
        document.pointer(pointer).and_then(Value::as_str).map(str::to_owned)
    };
    let namespace = text(document, "/metadata/namespace").unwrap_or_else(|| {
        document["metadata"]["namespace"] = Value::from(namespace);
        namespace.to_owned()
    });
    (namespace, text(document, "/metadata/name").unwrap_or_default())
}

/// Keeps the object, or says why not.
fn keep<T: DeserializeOwned>(
    objects: &mut ByName<T>,
    key: (String, String),
    at: String,
    document: Value,
) -> Result<(), String> {
    let object = serde_json::from_value(document).map_err(|error| format!("{at}: {error}"))?;
    if let Some(former) = objects.get(&key) {
        return Err(format!("{at}: is there twice, first in {}; keep one", former.at));
    }
    objects.insert(key, Placed { at, object });
    Ok(())
}

/// What is printed, in its order.
#[derive(Default)]
struct Printed {
    comments: String,
    config_maps: String,
    others: String,
}

impl Printed {
    fn comment(&mut self, line: &str) {
        self.comments.push_str("# ");
        self.comments.push_str(&line.replace('\n', " "));
        self.comments.push('\n');
    }

    fn children(&mut self, desired: &Desired) {
        fn document<T: Serialize>(child: &T) -> String {
            format!("---\n{}", yaml::text(child))
        }
        self.config_maps.push_str(&document(&desired.start_settings));
        self.config_maps.push_str(&document(&desired.live_settings));
        self.others.push_str(&document(&desired.service_account));
        self.others.push_str(&document(&desired.role_binding));
        self.others.push_str(&document(&desired.deployment));
        self.others.push_str(&document(&desired.service));
        if let Some(budget) = &desired.disruption_budget {
            self.others.push_str(&document(budget));
        }
    }

    fn text(self) -> String {
        format!("{HEADER}{}{}{}", self.comments, self.config_maps, self.others)
    }
}

type Pools = ByName<Resolved>;

/// All pools of the namespace but the one of that name.
fn others(pools: &Pools, namespace: &str, name: &str) -> Vec<Arc<InferencePool>> {
    let others = pools.iter().filter(|(key, _)| key.0 == namespace && key.1 != name);
    others.map(|(_, read)| Arc::clone(&read.object.pool)).collect()
}

fn tell_pool(
    read: &Placed<Resolved>,
    pools: &Pools,
    flags: &RenderFlags,
    out: &mut Printed,
    errors: &mut Vec<String>,
) {
    let Resolved { pool, unresolved } = &read.object;
    let metadata = &pool.metadata;
    let namespace = metadata.namespace.as_deref().unwrap_or_default();
    let name = metadata.name.as_deref().unwrap_or_default();
    let observed = pool::observe::Observed {
        now: Timestamp::UNIX_EPOCH,
        unresolved: unresolved.clone(),
        pods: Vec::new(),
        // Whether they are there is for a cluster to say.
        workloads: Vec::new(),
        other_pools: others(pools, namespace, name),
        routers: Vec::new(),
    };
    match pool::validate::validate(pool, &observed, &flags.children) {
        Err(pool::validate::Invalid(complaints)) => {
            errors.extend(complaints.iter().map(|it| complaint(&read.at, it)))
        }
        Ok(valid) => {
            out.comment(&format!("{} in namespace {namespace}: Accepted=True.", read.at));
            for line in gateway::taken_over(&valid.spec).into_iter().chain(changes(&valid.spec)) {
                out.comment(&format!("  {line}"));
            }
            out.comment("  All other conditions need a cluster.");
        }
    }
}

/// What the operator would do to named workloads.
fn changes(spec: &InferencePoolSpec) -> Vec<String> {
    let title = |reference: &kvrouter_crds::pool::WorkloadRef| pool::validate::title(reference);
    let named: Vec<String> = spec.workloads.iter().map(title).collect();
    let named = named.join(", ");
    let mut lines = Vec::new();
    if named.is_empty() {
        return lines;
    }
    if spec.hash_seed.policy == HashSeedPolicy::Enforce {
        let seed = spec.hash_seed.value;
        lines.push(format!("PYTHONHASHSEED={seed} would be set where it is absent, in: {named}."));
    }
    if spec.kv_events.bridge == Bridge::Inject {
        lines.push(format!("The sidecar {} would be added to: {named}.", pool::build::BRIDGE));
    }
    lines
}

fn tell_router(
    read: &Placed<KvRouter>,
    pools: &Pools,
    flags: &RenderFlags,
    out: &mut Printed,
    errors: &mut Vec<String>,
) {
    let namespace = read.object.metadata.namespace.clone().unwrap_or_default();
    let pool_name = &read.object.spec.pool_ref.name;
    let Some(pool) = pools.get(&(namespace.clone(), pool_name.clone())) else {
        let message = format!(
            "spec.poolRef.name: there is no InferencePool {pool_name} in namespace {namespace} in the files; give its \
             file too, or correct the name"
        );
        errors.push(format!("{}: {message}", read.at));
        return;
    };
    let observed = router::observe::Observed {
        now: Timestamp::UNIX_EPOCH,
        pool: Some(Arc::clone(&pool.object.pool)),
        unresolved: pool.object.unresolved.clone(),
        other_pools: others(pools, &namespace, pool_name),
        deployment: None,
        pods: Vec::new(),
        taken: Vec::new(),
    };
    match router::validate::validate(&read.object, &observed, &flags.children) {
        Err(router::validate::Invalid(complaints)) => {
            errors.extend(complaints.iter().map(|it| complaint(&read.at, it)));
        }
        Ok(valid) => {
            let desired = build(&valid, &flags.children);
            out.comment(&format!(
                "{} in namespace {namespace}: Accepted=True, ResolvedRefs=True as far as the files show.",
                read.at
            ));
            out.comment(&format!(
                "  Its settings are {}/{}, its address is {}.",
                desired.start_digest, desired.live_digest, desired.url
            ));
            out.comment("  All other conditions need a cluster. The operator adds owner references.");
            out.children(&desired);
        }
    }
}

fn complaint(at: &str, complaint: &Complaint) -> String {
    let Complaint { field, reason, message, .. } = complaint;
    format!("{at}: {field}: {}: {message}", reason.as_str())
}

#[cfg(test)]
#[path = "render_tests.rs"]
mod tests;
