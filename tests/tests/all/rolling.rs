//! Case C21: routers are replaced one by one under load, and clients notice nothing: no error, no stream
//! that ends early, and as many hits as before.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use engine_sim::EngineSim;
use futures::future::join_all;
use kvrouter_tests::client::Client;
use serde_json::{Value, json};

use crate::harness::{MODEL, Router, Setup, chat_directly, engine, text, unique};
use crate::nats::{self, Bridge, Broker};

/// Prompts that are cached, each on one of the engines. A router that does not know them sends two of three to
/// another engine, which has to compute them.
const PROMPTS: usize = 120;
/// How long a router may take to end.
const END: Duration = Duration::from_secs(30);
/// Clients at once.
const CLIENTS: usize = 4;

fn system(prompt: usize) -> Value {
    json!({"role": "system", "content": text(prompt as u32, 40)})
}

/// What clients share: whom they may ask, and what came of it.
#[derive(Default)]
struct Load {
    routers: Mutex<Vec<String>>,
    next: AtomicUsize,
    /// Cached tokens, prompt tokens and requests since the last look.
    sums: Mutex<(u64, u64, usize)>,
    failures: Mutex<Vec<String>>,
    over: AtomicBool,
}

impl Load {
    /// One client: asks the routers in turn, until the load is over.
    async fn client(&self) {
        let client = Client::new();
        while !self.over.load(Ordering::Relaxed) {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            let url = {
                let routers = self.routers.lock().unwrap();
                // Not in step with the prompts: each comes to every router.
                format!("http://{}/v1/chat/completions", routers[(number + number / PROMPTS) % routers.len()])
            };
            let messages =
                json!([system(number % PROMPTS), {"role": "user", "content": format!("go on {number}")}]);
            let body = json!({
                "model": MODEL, "messages": messages, "max_tokens": 8, "stream": true,
                "stream_options": {"include_usage": true}
            });
            match client.chat(&url, &unique(), &body).await {
                Ok(chat) => {
                    let mut sums = self.sums.lock().unwrap();
                    sums.0 += chat.cached_tokens;
                    sums.1 += chat.prompt_tokens;
                    sums.2 += 1;
                }
                Err(error) => self.failures.lock().unwrap().push(format!("{url}: {error:#}")),
            }
        }
    }

    /// The share of prompt tokens that engines had cached, in percent, of every prompt from now on.
    async fn hit_rate(&self) -> f64 {
        *self.sums.lock().unwrap() = (0, 0, 0);
        loop {
            let (cached, prompt, requests) = *self.sums.lock().unwrap();
            if requests >= PROMPTS || !self.failures.lock().unwrap().is_empty() {
                return 100.0 * cached as f64 / prompt as f64;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

#[tokio::test]
async fn routers_are_replaced_one_by_one_and_nobody_notices() {
    let broker = Broker::start().await;
    let engines = join_all((0..3).map(|_| engine(|_| {}))).await;
    let all: Vec<&EngineSim> = engines.iter().collect();
    let _bridges: Vec<Bridge> = all.iter().map(|engine| Bridge::start(engine, &broker.url())).collect();
    for prompt in 0..PROMPTS {
        chat_directly(all[prompt % 3], &json!([system(prompt), {"role": "user", "content": "begin"}]), None)
            .await;
    }
    let start = || {
        let setup: Setup = nats::setup(&all, &broker.url());
        Router::start(setup.events_only().more("limits: {drainDelaySeconds: 1}"))
    };
    let mut routers = join_all((0..3).map(|_| start())).await;
    let load = Load::default();
    *load.routers.lock().unwrap() = routers.iter().map(|router| router.at.http.clone()).collect();
    let clients = join_all((0..CLIENTS).map(|_| load.client()));
    let roll = async {
        let before = load.hit_rate().await;
        let mut after = Vec::new();
        for (turn, router) in routers.iter_mut().enumerate() {
            // Ready: from now on it is asked, and the one that it replaces is not.
            let successor = start().await;
            load.routers.lock().unwrap()[turn] = successor.at.http.clone();
            let mut predecessor = std::mem::replace(router, successor);
            predecessor.process.terminate().unwrap();
            after.push(load.hit_rate().await);
            assert_eq!(predecessor.process.ended(END).await.unwrap().code(), Some(0));
        }
        load.over.store(true, Ordering::Relaxed);
        (before, after)
    };
    let (_, (before, after)) = tokio::join!(clients, roll);
    assert_eq!(*load.failures.lock().unwrap(), Vec::<String>::new());
    assert!(before > 70.0, "the fleet is warm: {before}");
    let worst = after.iter().copied().fold(f64::INFINITY, f64::min);
    assert!(before - worst < 3.0, "{before} before, then {after:?}");
}
