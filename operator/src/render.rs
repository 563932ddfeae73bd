//! `kv-router-operator render`: what would be applied, offline.

use crate::config::RenderFlags;

/// What `render` prints and how it ends: standard output, or complaints for
/// standard error with exit code 2.
pub fn render(_flags: &RenderFlags) -> Result<String, Vec<String>> {
    Ok(String::new())
}
