//! What vLLM's prefill engine keeps for decode engines: the blocks of finished requests, each until it is
//! pulled once or its time is over.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::Value;
use tokio::time::Instant;

use super::Wrong;

/// Leases at once, and requests remembered after they were pulled or let go. Beyond it the oldest go first.
const MAX_REMEMBERED: usize = 16_384;

/// The blocks that one prefill engine keeps.
#[derive(Default)]
pub(crate) struct Leases {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    leases: HashMap<String, Lease>,
    /// Their names in the order of their grants, some of them gone.
    order: VecDeque<String>,
}

struct Lease {
    /// What the client was answered, word for word.
    params: Value,
    prompt_sha256: String,
    granted: Instant,
    pulled: bool,
}

impl Leases {
    /// Keeps the blocks of a request, under the `remote_request_id` of what it is answered.
    pub(crate) fn grant(&self, params: Value, prompt_sha256: String) {
        let name = params["remote_request_id"].as_str().unwrap_or_default().to_owned();
        let mut state = self.state.lock();
        if state.order.len() == MAX_REMEMBERED
            && let Some(oldest) = state.order.pop_front()
        {
            state.leases.remove(&oldest);
        }
        state.order.push_back(name.clone());
        let lease = Lease { params, prompt_sha256, granted: Instant::now(), pulled: false };
        state.leases.insert(name, lease);
    }

    /// Gives the blocks away, once.
    pub(crate) fn pull(&self, params: &Value, prompt_sha256: &str, patience: Duration) -> Result<(), Wrong> {
        let mut state = self.state.lock();
        let name = params["remote_request_id"].as_str().unwrap_or_default();
        let lease = state.leases.get_mut(name).ok_or(Wrong::ParamsUnknown)?;
        if lease.params != *params {
            return Err(Wrong::ParamsAltered);
        }
        if lease.pulled {
            return Err(Wrong::PulledTwice);
        }
        if lease.granted.elapsed() >= patience {
            return Err(Wrong::LeaseExpired);
        }
        if lease.prompt_sha256 != prompt_sha256 {
            return Err(Wrong::PromptDiffers);
        }
        lease.pulled = true;
        Ok(())
    }

    /// Requests whose blocks are kept now.
    pub(crate) fn held(&self, patience: Duration) -> usize {
        let is_held = |lease: &&Lease| !lease.pulled && lease.granted.elapsed() < patience;
        self.state.lock().leases.values().filter(is_held).count()
    }

    /// A new process keeps nothing.
    pub(crate) fn forget(&self) {
        *self.state.lock() = State::default();
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(10);

    #[tokio::test(start_paused = true)]
    async fn blocks_are_pulled_once_with_what_was_answered_and_in_time() {
        let leases = Leases::default();
        let params = |name: &str| json!({"remote_request_id": name, "remote_port": 5600});
        for name in ["a", "b", "c"] {
            leases.grant(params(name), "p".to_owned());
        }
        let pull = |params: Value, prompt: &str| leases.pull(&params, prompt, PATIENCE);
        assert_eq!(leases.held(PATIENCE), 3);
        assert_eq!(pull(params("x"), "p"), Err(Wrong::ParamsUnknown));
        assert_eq!(pull(json!({"remote_request_id": "a"}), "p"), Err(Wrong::ParamsAltered));
        let more = json!({"remote_port": 5600, "remote_request_id": "a", "x": 1});
        assert_eq!(pull(more, "p"), Err(Wrong::ParamsAltered));
        assert_eq!(pull(params("b"), "q"), Err(Wrong::PromptDiffers));
        assert_eq!(pull(json!({"remote_port": 5600, "remote_request_id": "a"}), "p"), Ok(()), "in any order");
        assert_eq!(pull(params("a"), "p"), Err(Wrong::PulledTwice));
        tokio::time::advance(PATIENCE - Duration::from_millis(1)).await;
        assert_eq!(pull(params("b"), "p"), Ok(()));
        tokio::time::advance(Duration::from_millis(1)).await;
        assert_eq!(pull(params("c"), "p"), Err(Wrong::LeaseExpired));
        assert_eq!(leases.held(PATIENCE), 0);
        leases.forget();
        assert_eq!(pull(params("a"), "p"), Err(Wrong::ParamsUnknown));
    }
}
