//! What other routers of the pool have booked, and what this one has, over NATS.
//!
//! One task reads the ledger's sums every few milliseconds, without a lock that a
//! decision takes, and publishes what changed; it takes what others publish into the
//! accounts of the same targets. What the words are is `kvrouter_core::replicas`'.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use async_nats::Client;
use async_nats::connection::State;
use futures::StreamExt;
use kvrouter_core::ids::Target;
use kvrouter_core::policy::outside::{Booking, ReplicaId};
use kvrouter_core::replicas::{self, Message, Telling};
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use crate::fleet;
use crate::pool::Pool;

/// Between two looks at what is booked. A change waits half of it on average, and
/// all changes of that time are one message: 40 rounds a second at most.
const LOOK: Duration = Duration::from_millis(25);
/// Other routers for which one look is enough. Where there are more, each looks less
/// often: what all of them hear together grows with their number, not its square.
const OTHERS: usize = 4;
/// Most bytes of a message, where the server takes as many: a router with hundreds of
/// busy targets says so in a few messages, and none of them holds up events.
const MESSAGE_BYTES: usize = 32 << 10;

/// Tells as `replica`, and listens, until `leaving`; then says that nothing is booked
/// any more.
pub(super) async fn share(
    pool: Arc<Pool>,
    client: Client,
    subject: String,
    replica: ReplicaId,
    leaving: CancellationToken,
) -> anyhow::Result<()> {
    let mut others = client.subscribe(subject.clone()).await.context("failed to subscribe to loads")?;
    let mut sharing = Sharing { pool, client, subject, replica, telling: Telling::default() };
    let (mut look, mut looks) = (interval(LOOK), 0);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            message = others.next() => match message {
                Some(message) => sharing.hear(&message.payload),
                None => anyhow::bail!("subscription to loads ended"),
            },
            _ = look.tick() => {
                looks += 1;
                if looks >= sharing.others().div_ceil(OTHERS) {
                    looks = 0;
                    sharing.tell().await;
                }
            }
            () = leaving.cancelled() => return sharing.leave().await,
        }
    }
}

struct Sharing {
    pool: Arc<Pool>,
    client: Client,
    subject: String,
    replica: ReplicaId,
    telling: Telling,
}

impl Sharing {
    /// Publishes what is due. While the broker is away nothing is, and others forget.
    async fn tell(&mut self) {
        if self.client.connection_state() != State::Connected {
            return;
        }
        let workers = self.pool.fleet.workers();
        let targets = workers.iter().flat_map(|worker| &worker.targets);
        let booked = targets.map(|target| (&target.target, target.account.booking()));
        let due = self.telling.due(self.pool.clock.now(), booked);
        self.publish(&due).await;
    }

    fn others(&self) -> usize {
        self.pool.heard.lock().count(self.pool.clock.now())
    }

    async fn leave(&mut self) -> anyhow::Result<()> {
        let last = self.telling.farewell();
        if self.client.connection_state() == State::Connected {
            self.publish(&last).await;
            self.client.flush().await.context("failed to send the last loads")?;
        }
        Ok(())
    }

    async fn publish(&self, loads: &[(Target, Booking)]) {
        let bytes = MESSAGE_BYTES.min(self.client.max_payload() / 2);
        for message in replicas::encode(self.pool.domain, self.replica, loads, bytes) {
            let result = match self.client.publish(self.subject.clone(), message.into()).await {
                Ok(()) => "ok",
                Err(_) => "refused",
            };
            self.count("sent", result);
        }
    }

    fn hear(&self, payload: &[u8]) {
        let result = match Message::decode(payload) {
            Ok(message) if message.replica == self.replica => return,
            Ok(message) => self.take(&message),
            Err(error) => {
                tracing::debug!(target: "kv_router::feed", error = %crate::chain(&error), "load not understood");
                error.reason()
            }
        };
        self.count("received", result);
    }

    /// Takes over what another router says of targets that both know.
    fn take(&self, message: &Message<'_>) -> &'static str {
        if message.domain != self.pool.domain {
            return "other_domain";
        }
        let now = self.pool.clock.now();
        if !self.pool.heard.lock().note(now, message.replica) {
            return "too_many_replicas";
        }
        let workers = self.pool.fleet.workers();
        let mut result = "ok";
        for told in &message.loads {
            let worker = fleet::find(&workers, told.worker);
            match worker.and_then(|worker| worker.target(told.rank)) {
                Some(target) => target.account.replica_booked(now, message.replica, told.told),
                None => result = "unknown_target",
            }
        }
        result
    }

    fn count(&self, direction: &str, result: &str) {
        self.pool.metrics.loads.with_label_values(&[direction, result]).inc();
    }
}
