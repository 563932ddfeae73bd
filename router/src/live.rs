//! Live settings: taken over while the router runs.
//!
//! They come from a file or from a ConfigMap. Content that is refused, or gone,
//! leaves the last good settings in force, and the health report says so.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::pool::Pool;

/// How often the file is looked at.
const LOOK: Duration = Duration::from_millis(200);

/// Takes over the settings in `text`, which came from `origin`, or refuses them.
pub fn take(pool: &Pool, text: &str, origin: &Path) {
    match pool.config.live_of(text, origin) {
        Ok(live) => {
            pool.live_refused.write().take();
            if pool.live.read().digest == live.digest {
                return;
            }
            tracing::info!(target: "kv_router", policy = %live.settings.policy.label(), "live settings taken");
            *pool.live.write() = live;
            pool.live_changed.send_modify(|count| *count += 1);
        }
        Err(error) => refuse(pool, error.to_string()),
    }
}

/// Notes why what is there now is not in force.
pub fn refuse(pool: &Pool, why: String) {
    let mut refused = pool.live_refused.write();
    if refused.as_ref() != Some(&why) {
        tracing::error!(target: "kv_router", error = %why, "live settings refused");
        *refused = Some(why);
    }
}

/// Takes over the live settings whenever their file changes.
pub async fn watch_file(pool: Arc<Pool>) {
    let Some(path) = pool.config.live_path.clone() else { return };
    let mut seen = tokio::fs::read(&path).await.ok();
    loop {
        tokio::time::sleep(LOOK).await;
        let now = tokio::fs::read(&path).await.ok();
        if now == seen || now.is_none() {
            continue;
        }
        match now.as_deref().map(std::str::from_utf8) {
            Some(Ok(text)) => take(&pool, text, &path),
            Some(Err(_)) => refuse(&pool, format!("{}:0: is not UTF-8", path.display())),
            None => {}
        }
        seen = now;
    }
}
