//! The direct feed: one task per rank reads the engine's sockets.

use std::sync::Arc;
use std::time::Duration;

use kvrouter_core::events::Delta;
use kvrouter_core::events::envelope::Status;
use kvrouter_core::ids::Epoch;

use super::engine::{Sink, Stream, Told, View};
use crate::fleet::{TargetState, Worker};
use crate::pool::{Change, Pool};

/// Reads the events of all ranks of `worker`, until it leaves.
pub fn follow(pool: &Arc<Pool>, worker: &Arc<Worker>) {
    let Some(sockets) = &worker.events else { return };
    for target in &worker.targets {
        let rank = target.target.rank.0;
        let (Some(publisher), replay) =
            (sockets.publisher.offset(rank), sockets.replay.as_ref().and_then(|replay| replay.offset(rank)))
        else {
            tracing::error!(target: "kv_router::feed", target = %target.target, "event port of this rank is beyond 65535");
            continue;
        };
        let (sockets, rank) = ((publisher, replay), (rank, worker.targets.len() as u32));
        let stream = Stream::new(sockets, rank, pool.identity.clone(), pool.config.size, None);
        let mut sink = Direct { pool: Arc::clone(pool), target: Arc::clone(target), synced: false };
        let gone = worker.gone.clone();
        tokio::spawn(async move { gone.run_until_cancelled(stream.run(&mut sink)).await });
    }
}

/// Applies a rank's stream to the index at once.
struct Direct {
    pool: Arc<Pool>,
    target: Arc<TargetState>,
    /// Whether this life's view is complete once.
    synced: bool,
}

impl Direct {
    fn continued(&self, epoch: Epoch, seq: u64, deltas: Vec<Delta>, status: Status, page: u32) {
        self.pool.apply(&self.target, Change::Continued { epoch, seq, deltas, status, page });
    }
}

impl Sink for Direct {
    async fn tell(&mut self, told: Told, status: Status, page: u32) {
        match told {
            Told::NewEpoch { .. } => {
                self.synced = false;
                self.pool.apply(&self.target, Change::Reset);
            }
            Told::Changed { epoch, seq, deltas } => {
                self.pool.metrics.events.with_label_values(&["applied"]).inc();
                self.continued(epoch, seq, deltas, status, page);
            }
            Told::Current { epoch, seq, .. } => {
                if !self.synced && !status.disconnected {
                    self.synced = true;
                    self.pool.mark_synced(&self.target, epoch, seq, status);
                } else {
                    self.continued(epoch, seq, Vec::new(), status, page);
                }
            }
            Told::Counted(label) => self.pool.metrics.events.with_label_values(&[label]).inc(),
        }
    }

    fn unix_ms(&self) -> u64 {
        self.pool.clock.unix_ms()
    }

    fn credit_lasts(&self) -> Duration {
        Duration::from_millis(self.pool.live.read().freshness.budget.0)
    }

    async fn snapshot_wanted(&mut self) {
        std::future::pending().await
    }

    async fn snapshot(&mut self, _view: View<'_>) {}
}
