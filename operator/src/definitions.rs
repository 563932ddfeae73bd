//! Whether the custom resource definitions are there, and new enough.
//!
//! An API server with older definitions drops the fields that it does not know,
//! silently; an operator that worked on would then see its own writes vanish.
//! So it does not begin, and says which command helps.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, ListParams};
use kube::{Client, CustomResourceExt, Resource};
use kvrouter_crds::{CRD_REVISION, CRD_REVISION_ANNOTATION, InferencePool, KvRouter};

/// What brings the definitions up to date.
const COMMAND: &str = "run `helm upgrade` with the chart of this release, or `kubectl apply --server-side --force-conflicts -f crds/yaml/`";

/// Why the operator cannot begin. All of it may heal.
#[derive(Debug, thiserror::Error)]
pub enum DefinitionError {
    /// It was never installed, or was deleted.
    #[error("definition {name} is missing: {COMMAND}")]
    Missing {
        /// Its name.
        name: String,
    },
    /// It is of an older release.
    #[error("definition {name} is of revision {found}, this operator needs {CRD_REVISION}: {COMMAND}")]
    TooOld {
        /// Its name.
        name: String,
        /// Its revision; 0 for none.
        found: u32,
    },
    /// The API server has not taken it into service.
    #[error(
        "definition {name} is not established yet; wait, and if it stays so, run `kubectl describe crd {name}`"
    )]
    NotEstablished {
        /// Its name.
        name: String,
    },
    /// The API server does not answer.
    #[error(
        "unable to read definition {name} (check the API server, the network to it, and the operator's role)"
    )]
    Read {
        /// Its name.
        name: String,
        /// What it said instead.
        #[source]
        source: Box<kube::Error>,
    },
}

impl DefinitionError {
    /// The `reason` label.
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::Missing { .. } => "definitions_missing",
            Self::TooOld { .. } => "definitions_too_old",
            Self::NotEstablished { .. } => "definitions_not_established",
            Self::Read { .. } => "api_server_unreachable",
        }
    }
}

/// Looks at both definitions. In `namespace` it is tried whether the kinds are
/// served, where the definitions themselves may not be read.
pub async fn check(client: &Client, namespace: Option<&str>) -> Result<(), DefinitionError> {
    one::<InferencePool>(client, namespace).await?;
    one::<KvRouter>(client, namespace).await
}

async fn one<K>(client: &Client, namespace: Option<&str>) -> Result<(), DefinitionError>
where
    K: CustomResourceExt
        + Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>
        + Clone
        + serde::de::DeserializeOwned
        + std::fmt::Debug,
{
    let name = K::crd_name().to_owned();
    let api: Api<CustomResourceDefinition> = Api::all(client.clone());
    match api.get(&name).await {
        Ok(found) => judge(&name, &found),
        Err(kube::Error::Api(status)) if status.code == 404 => Err(DefinitionError::Missing { name }),
        // A namespaced installation may not read cluster-wide objects.
        Err(kube::Error::Api(status)) if status.code == 403 => {
            let api: Api<K> = match namespace {
                Some(namespace) => Api::namespaced(client.clone(), namespace),
                None => Api::all(client.clone()),
            };
            match api.list_metadata(&ListParams::default().limit(1)).await {
                Ok(_) => Ok(()),
                Err(kube::Error::Api(status)) if status.code == 404 => Err(DefinitionError::Missing { name }),
                Err(source) => Err(DefinitionError::Read { name, source: Box::new(source) }),
            }
        }
        Err(source) => Err(DefinitionError::Read { name, source: Box::new(source) }),
    }
}

fn judge(name: &str, found: &CustomResourceDefinition) -> Result<(), DefinitionError> {
    let name = name.to_owned();
    let annotations = found.metadata.annotations.as_ref();
    let revision = annotations.and_then(|all| all.get(CRD_REVISION_ANNOTATION));
    let revision = revision.and_then(|revision| revision.parse().ok()).unwrap_or(0);
    if revision < CRD_REVISION {
        return Err(DefinitionError::TooOld { name, found: revision });
    }
    let mut conditions = found.status.iter().flat_map(|status| status.conditions.iter().flatten());
    if conditions.any(|condition| condition.type_ == "Established" && condition.status == "True") {
        Ok(())
    } else {
        Err(DefinitionError::NotEstablished { name })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[track_caller]
    fn check_revision(why: &str, revision: Option<&str>, established: &str, expected: &str) {
        let mut definition = serde_json::to_value(KvRouter::crd()).expect("serializes");
        if let Some(revision) = revision {
            definition["metadata"]["annotations"][CRD_REVISION_ANNOTATION] = revision.into();
        }
        definition["status"] = json!({"conditions": [{"type": "Established", "status": established}]});
        let definition = serde_json::from_value(definition).expect(why);
        let found = judge("kvrouters.kvrouter.dev", &definition);
        assert_eq!(found.as_ref().err().map_or("ok", DefinitionError::reason), expected, "{why}");
    }

    #[test]
    fn older_definitions_are_refused() {
        let next = (CRD_REVISION + 1).to_string();
        check_revision("ours", Some(&CRD_REVISION.to_string()), "True", "ok");
        check_revision("a newer one", Some(&next), "True", "ok");
        check_revision("none", None, "True", "definitions_too_old");
        check_revision("an older one", Some("0"), "True", "definitions_too_old");
        check_revision("not a number", Some("x"), "True", "definitions_too_old");
        check_revision("not served", Some(&next), "False", "definitions_not_established");
    }
}
