//! Leader election: one Lease, held by whoever may write.
//!
//! The clocks of two machines are never compared: whether a lease has run out
//! is judged by how long this process has seen it unchanged. Whoever cannot
//! renew in time must stop writing before anybody else may begin, so the
//! deadline for renewing is shorter than the lease. What loses the lease ends
//! the process: nothing that was under way can then write any more.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::api::{Api, PostParams};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::config::LeaseName;

/// Name of the Lease.
pub const LEASE: &str = "kvrouter-operator";
/// How long others wait before they take a lease that nobody renews.
const DURATION: Duration = Duration::from_secs(15);
/// How long the holder tries to renew before it gives up. Shorter than
/// [`DURATION`], so that it has stopped before another begins.
const RENEW_DEADLINE: Duration = Duration::from_secs(10);
/// Time between two tries, of holder and waiting alike.
const RETRY: Duration = Duration::from_secs(2);

/// Why an attempt at the Lease failed. All of it may heal.
#[derive(Debug, thiserror::Error)]
enum LeaseError {
    #[error("unable to read lease {LEASE}")]
    Read(#[source] kube::Error),
    #[error("unable to write lease {LEASE}")]
    Write(#[source] kube::Error),
    #[error("no answer about lease {LEASE} within {RETRY:?}")]
    Timeout,
}

/// The Lease as this process sees it.
pub struct Elector {
    api: Api<Lease>,
    holder: String,
    /// The record that was last seen, by its version, and since when.
    seen: Option<(String, Instant)>,
}

/// What one look at the Lease came to.
#[derive(Debug, PartialEq, Eq)]
enum Turn {
    Held,
    HeldBy(String),
    /// Somebody wrote between our look and our write; the next look will tell who.
    Raced,
}

impl Elector {
    /// An elector that has not asked yet.
    pub fn new(client: kube::Client, name: &LeaseName) -> Self {
        Self { api: Api::namespaced(client, &name.namespace), holder: name.holder.clone(), seen: None }
    }

    /// Returns once the Lease is held; never, while another renews it.
    pub async fn acquire(&mut self) {
        let mut told = None;
        loop {
            match self.attempt().await {
                Ok(Turn::Held) => return,
                Ok(Turn::Raced) => {}
                Ok(Turn::HeldBy(other)) => {
                    if told.as_ref() != Some(&other) {
                        tracing::info!(leader = %other, "waiting: another operator leads");
                        told = Some(other);
                    }
                }
                Err(error) => tracing::warn!(error = %crate::chain(&error), "lease not looked at"),
            }
            sleep(jittered(RETRY, &self.holder)).await;
        }
    }

    /// Renews the Lease until it is lost, or until `stop`; then it is given
    /// back, so that another need not wait. Says whether it was lost.
    pub async fn hold(&mut self, stop: &CancellationToken) -> Ended {
        let mut renewed = Instant::now();
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => {
                    self.release().await;
                    return Ended::Released;
                }
                () = sleep(jittered(RETRY, &self.holder)) => {}
            }
            let left = RENEW_DEADLINE.saturating_sub(renewed.elapsed());
            match timeout(left, self.attempt()).await {
                Ok(Ok(Turn::Held)) => renewed = Instant::now(),
                Ok(Ok(Turn::Raced)) => {}
                Ok(Ok(Turn::HeldBy(other))) => {
                    tracing::error!(leader = %other, "lease lost to another operator");
                    return Ended::Lost;
                }
                Ok(Err(error)) => tracing::warn!(error = %crate::chain(&error), "lease not renewed"),
                Err(_) => {}
            }
            if RENEW_DEADLINE <= renewed.elapsed() {
                tracing::error!(seconds = RENEW_DEADLINE.as_secs(), "lease lost: not renewed in time");
                return Ended::Lost;
            }
        }
    }

    /// Takes or renews the Lease if that is allowed now.
    async fn attempt(&mut self) -> Result<Turn, LeaseError> {
        let read = timeout(RETRY, self.api.get_opt(LEASE)).await.map_err(|_| LeaseError::Timeout)?;
        let Some(current) = read.map_err(LeaseError::Read)? else {
            return self.write(self.record(None)).await;
        };
        let version = current.metadata.resource_version.clone().unwrap_or_default();
        if self.seen.as_ref().is_none_or(|(seen, _)| *seen != version) {
            self.seen = Some((version, Instant::now()));
        }
        let since = self.seen.as_ref().map_or(Duration::ZERO, |(_, since)| since.elapsed());
        match blocking_holder(&current, &self.holder, since) {
            Some(other) => Ok(Turn::HeldBy(other)),
            None => self.write(self.record(Some(&current))).await,
        }
    }

    /// The Lease with us as its holder.
    fn record(&self, current: Option<&Lease>) -> Lease {
        let now = MicroTime(Timestamp::now());
        let old = current.and_then(|lease| lease.spec.clone()).unwrap_or_default();
        let is_ours = old.holder_identity.as_deref() == Some(&self.holder);
        let transitions = old.lease_transitions.unwrap_or(0);
        Lease {
            metadata: current.map_or_else(
                || ObjectMeta { name: Some(LEASE.to_owned()), ..ObjectMeta::default() },
                |lease| lease.metadata.clone(),
            ),
            spec: Some(LeaseSpec {
                holder_identity: Some(self.holder.clone()),
                lease_duration_seconds: Some(DURATION.as_secs() as i32),
                acquire_time: if is_ours { old.acquire_time } else { Some(now.clone()) },
                renew_time: Some(now),
                lease_transitions: Some(if is_ours { transitions } else { transitions.saturating_add(1) }),
                ..LeaseSpec::default()
            }),
        }
    }

    /// Writes `lease` over the version that it was made from.
    async fn write(&mut self, lease: Lease) -> Result<Turn, LeaseError> {
        let params =
            PostParams { field_manager: Some(crate::FIELD_MANAGER.to_owned()), ..Default::default() };
        let write = async {
            if lease.metadata.resource_version.is_none() {
                self.api.create(&params, &lease).await
            } else {
                self.api.replace(LEASE, &params, &lease).await
            }
        };
        match timeout(RETRY, write).await.map_err(|_| LeaseError::Timeout)? {
            Ok(_) => Ok(Turn::Held),
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(Turn::Raced),
            Err(error) => Err(LeaseError::Write(error)),
        }
    }

    /// Gives the Lease back, if it is ours. Failing is harmless: it runs out.
    async fn release(&mut self) {
        let Ok(Ok(Some(mut lease))) = timeout(RETRY, self.api.get_opt(LEASE)).await else { return };
        let Some(spec) = lease.spec.as_mut() else { return };
        if spec.holder_identity.as_deref() != Some(&self.holder) {
            return;
        }
        spec.holder_identity = None;
        match timeout(RETRY, self.api.replace(LEASE, &PostParams::default(), &lease)).await {
            Ok(Ok(_)) => tracing::info!("lease released"),
            Ok(Err(error)) => tracing::warn!(error = %crate::chain(&error), "lease not released"),
            Err(_) => tracing::warn!("lease not released in time"),
        }
    }
}

/// How holding the Lease ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// Given back on purpose.
    Released,
    /// Another may write now.
    Lost,
}

/// Who keeps us from taking `lease`, which has been unchanged for `since`.
fn blocking_holder(lease: &Lease, us: &str, since: Duration) -> Option<String> {
    let spec = lease.spec.as_ref()?;
    let holder = spec.holder_identity.as_deref().filter(|holder| !holder.is_empty() && *holder != us)?;
    let lasts =
        spec.lease_duration_seconds.map_or(DURATION, |s| Duration::from_secs(s.max(0).unsigned_abs().into()));
    (since < lasts).then(|| holder.to_owned())
}

/// `base` and up to a fifth more, so that operators that started together do not
/// ask together for ever.
fn jittered(base: Duration, holder: &str) -> Duration {
    let salt = holder.bytes().fold(0_u32, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte.into()));
    let noise = Timestamp::now().subsec_nanosecond().unsigned_abs().wrapping_add(salt) % 1000;
    base + base * noise / 5000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(why: &str, holder: Option<&str>, seconds: Option<i32>, unchanged: u64, expected: Option<&str>) {
        let spec = LeaseSpec {
            holder_identity: holder.map(str::to_owned),
            lease_duration_seconds: seconds,
            ..LeaseSpec::default()
        };
        let lease = Lease { spec: Some(spec), ..Lease::default() };
        let found = blocking_holder(&lease, "us", Duration::from_secs(unchanged));
        assert_eq!(found.as_deref(), expected, "{why}");
    }

    #[test]
    fn only_a_lease_that_nobody_renews_is_taken() {
        //    why                         holder        lasts     unchanged  blocked by
        check("ours", Some("us"), Some(15), 0, None);
        check("given back", None, Some(15), 0, None);
        check("given back, the empty way", Some(""), Some(15), 0, None);
        check("another's", Some("them"), Some(15), 14, Some("them"));
        check("another's, run out", Some("them"), Some(15), 15, None);
        check("another's own duration holds", Some("them"), Some(60), 59, Some("them"));
        check("no duration is the usual one", Some("them"), None, 14, Some("them"));
        check("a negative duration has run out", Some("them"), Some(-1), 0, None);
    }

    #[test]
    fn jitter_never_outlasts_the_deadline() {
        for holder in ["a", "b", "operator-7d9f_18c2"] {
            let pause = jittered(RETRY, holder);
            assert!(RETRY <= pause && pause * 3 < RENEW_DEADLINE, "{holder}: {pause:?}");
        }
    }
}
