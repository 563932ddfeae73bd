//! What a router adds to a request, before engines that take no time of their own.
//!
//! All routers stand before the same engines at once. Latency: one request after the other, in
//! turn straight to an engine and through each router, so that whatever else the machine does hits
//! all alike; what counts is the median of the differences. Cost: many requests at once through
//! one router, and how much processor time its process took for each beyond what it takes idle.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use serde::Serialize;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::contenders::{Contender, Running};
use super::median;
use crate::client::Client;
use crate::demo::drive::{body, chats};
use crate::demo::fleet::Engines;

/// Characters of the short chat.
const SHORT: usize = 2_000;
/// Characters of the long conversation at its beginning, and of each turn.
const LONG: usize = 24_000;
const TURN: usize = 300;
/// Turns of the long conversation, and rounds of the short chat.
const TURNS: usize = 50;
const ROUNDS: usize = 300;
/// Requests of which the cost is measured: so many conversations of [`TURNS`] turns, which
/// go on at once.
const AT_ONCE: usize = 8;
const COSTED_SHORT: usize = 4_000;
/// How long an idle router is watched.
const IDLE: Duration = Duration::from_secs(3);

/// What one router adds.
#[derive(Clone, Debug, Serialize)]
pub struct Hop {
    router: &'static str,
    /// Milliseconds to the first token above the direct way: the short chat, and the next turn of
    /// the long one.
    added_ms: [f64; 2],
    /// Microseconds of processor time a request, of the short chat and of all turns of long ones.
    processor_us: [f64; 2],
    /// Requests a second, of the same two; engines and clients share the machine.
    per_second: [f64; 2],
}

/// Measures all contenders.
pub async fn measure(programs: &Path, logs: &Path) -> anyhow::Result<Vec<Hop>> {
    let engines = Engines::start("hop", &["--time-scale", "0"], logs).await?;
    let mut routers = Vec::new();
    for contender in Contender::ALL {
        routers.push((contender, contender.start(programs, &engines, logs).await?));
    }
    let direct = engines.addresses.first().context("there are engines")?;
    let direct = chats(&direct.http);
    let urls: Vec<&str> = std::iter::once(&direct)
        .chain(routers.iter().map(|(_, router)| &router.url))
        .map(String::as_str)
        .collect();
    let client = Client::new();

    let short = vec![json!({"role": "user", "content": text(0, SHORT)})];
    let mut long = vec![json!({"role": "system", "content": text(1, LONG)})];
    let mut samples = [vec![Vec::new(); urls.len()], vec![Vec::new(); urls.len()]];
    for round in 0..ROUNDS {
        in_turn(&client, &urls, round, &short, &mut samples[0]).await?;
    }
    for round in 0..TURNS {
        long.push(json!({"role": "user", "content": text(2 + round, TURN)}));
        in_turn(&client, &urls, round, &long, &mut samples[1]).await?;
        long.push(json!({"role": "assistant", "content": "I see."}));
    }
    let mut hops = Vec::new();
    for (at, (contender, router)) in routers.iter().enumerate() {
        let added = |samples: &[Vec<f64>]| {
            let pairs = samples[at + 1].iter().zip(&samples[0]);
            median(pairs.map(|(through, direct)| through - direct).collect())
        };
        let added_ms = [added(&samples[0]), added(&samples[1])];
        let idle = idle_share(router).await?;
        let short = Arc::new(body(&short, 1));
        let short = vec![vec![short; COSTED_SHORT / AT_ONCE]; AT_ONCE];
        let short = cost(&client, router, idle, short).await?;
        let long = (0..AT_ONCE).map(|user| grown(1_000 * (1 + at * AT_ONCE + user))).collect();
        let long = cost(&client, router, idle, long).await?;
        let router = contender.label();
        hops.push(Hop { router, added_ms, processor_us: [short.0, long.0], per_second: [short.1, long.1] });
    }
    Ok(hops)
}

/// The bodies of a long conversation, turn by turn; another one for each number.
fn grown(number: usize) -> Vec<Arc<Value>> {
    let mut messages = vec![json!({"role": "system", "content": text(number, LONG)})];
    let turns = (1..=TURNS).map(|turn| {
        messages.push(json!({"role": "user", "content": text(number + turn, TURN)}));
        let body = Arc::new(body(&messages, 1));
        messages.push(json!({"role": "assistant", "content": "I see."}));
        body
    });
    turns.collect()
}

/// The share of a processor that the router takes while nobody asks anything.
async fn idle_share(router: &Running) -> anyhow::Result<f64> {
    let (before, began) = (router.processor_time()?, Instant::now());
    tokio::time::sleep(IDLE).await;
    let used = router.processor_time()?.saturating_sub(before);
    Ok(used.as_secs_f64() / began.elapsed().as_secs_f64())
}

/// The same chat once by each way, beginning with another one each round.
async fn in_turn(
    client: &Client,
    urls: &[&str],
    round: usize,
    messages: &[Value],
    samples: &mut [Vec<f64>],
) -> anyhow::Result<()> {
    let body = body(messages, 1);
    for at in 0..urls.len() {
        let at = (at + round) % urls.len();
        let id = format!("hop-{round}");
        let chat = client.chat(urls[at], &id, &body).await;
        let chat = chat.with_context(|| format!("a chat over {}", urls[at]))?;
        samples[at].push(chat.first_token.as_secs_f64() * 1e3);
    }
    Ok(())
}

/// Microseconds of processor time that `router` takes for a request above its `idle` share, and
/// requests a second. Every user sends its bodies one after the other.
async fn cost(
    client: &Client,
    router: &Running,
    idle: f64,
    users: Vec<Vec<Arc<Value>>>,
) -> anyhow::Result<(f64, f64)> {
    let requests = users.iter().map(Vec::len).sum::<usize>() as f64;
    let (before, began) = (router.processor_time()?, Instant::now());
    let mut talking = JoinSet::new();
    for bodies in users {
        let (client, url) = (client.clone(), router.url.clone());
        talking.spawn(async move {
            for body in bodies {
                client.chat(&url, "cost", &body).await?;
            }
            anyhow::Ok(())
        });
    }
    while let Some(user) = talking.join_next().await {
        user.context("a user panicked")??;
    }
    let (elapsed, used) = (began.elapsed().as_secs_f64(), router.processor_time()?.saturating_sub(before));
    let each = (used.as_secs_f64() - idle * elapsed) * 1e6 / requests;
    Ok((each, requests / elapsed))
}

/// Text of so many characters, another one for each number.
fn text(number: usize, characters: usize) -> String {
    let sentence =
        |at: usize| format!("In note {number}, line {at}, the harbour master writes of the weather. ");
    let mut text: String = (0..characters / 50).map(sentence).collect();
    text.truncate(characters);
    text
}

/// The table.
pub fn table(hops: &[Hop]) -> String {
    let mut text = format!(
        "{:<24} {:>8} {:>8}   {:>8} {:>8}   {:>8} {:>8}\n{:<24} {:>8} {:>8}   {:>8} {:>8}   {:>8} {:>8}\n{}\n",
        "a hop",
        "added ms",
        "",
        "CPU us",
        "",
        "a second",
        "",
        "",
        "short",
        "long",
        "short",
        "long",
        "short",
        "long",
        "-".repeat(81)
    );
    for Hop { router, added_ms, processor_us, per_second } in hops {
        text.push_str(&format!(
            "{router:<24} {:>8.2} {:>8.2}   {:>8.0} {:>8.0}   {:>8.0} {:>8.0}\n",
            added_ms[0], added_ms[1], processor_us[0], processor_us[1], per_second[0], per_second[1]
        ));
    }
    text
}
