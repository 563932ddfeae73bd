//! Settings that keep tenants' caches apart.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Keeps the cached prompts of tenants apart: each has a cache salt of its own,
/// at the engines too.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Tenancy {
    /// The header that names a request's tenant.
    #[serde(default = "default_tenant_header")]
    pub header: String,
    /// File with the secret that keys the salts. Another secret makes all views
    /// cold, nothing worse.
    pub salt_secret_file: PathBuf,
    /// What becomes of a request without the header.
    #[serde(default)]
    pub without_header: WithoutHeader,
}

/// The header that names a request's tenant unless settings say otherwise.
pub const DEFAULT_TENANT_HEADER: &str = "X-Tenant";

/// Headers that cannot name a tenant: they speak of one connection, or the router
/// writes them itself. In lower case.
pub const NO_TENANT_HEADERS: [&str; 14] = [
    "connection",
    "content-length",
    "expect",
    "host",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "x-data-parallel-rank",
    "x-request-id",
];

/// What becomes of a request that names no tenant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum WithoutHeader {
    /// It is refused, where it has a prompt.
    #[default]
    Refuse,
    /// It shares its cached prompts with all others that name none.
    Share,
}

fn default_tenant_header() -> String {
    DEFAULT_TENANT_HEADER.to_owned()
}
