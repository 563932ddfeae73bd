//! The load generator: users who talk to the router, each waiting for its answer.
//!
//! A closed loop: so many conversations at a time, and the next begins when one ends. What is said
//! and how long users think comes from the workload; only times differ between two runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, ensure};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::fleet::MODEL;
use super::workload::{Conversation, Workload};
use crate::client::{Chat, Client};

/// How users reach several routers.
#[derive(Clone, Copy, Debug)]
pub enum Reach {
    /// A conversation stays with one: a client that keeps its connection.
    Kept,
    /// Each turn goes to another one than the turn before: a proxy that balances requests.
    InTurn,
}

/// Answers of a whole workload.
#[derive(Clone, Debug)]
pub struct Driven {
    /// One per request, in no order.
    pub chats: Vec<Chat>,
    /// From the first request to the last answer.
    pub elapsed: Duration,
}

/// Where a router or an engine at `address` takes chats.
pub fn chats(address: &str) -> String {
    format!("http://{address}/v1/chat/completions")
}

/// A bar for all requests of `workload`. Hidden by itself where standard error is no terminal.
pub fn progress(label: &'static str, workload: &Workload) -> anyhow::Result<ProgressBar> {
    let style = ProgressStyle::with_template("{prefix:<24} [{bar:40}] {pos}/{len} requests, {elapsed}")
        .context("bad progress template")?
        .progress_chars("=> ");
    let bar = ProgressBar::with_draw_target(Some(workload.requests() as u64), ProgressDrawTarget::stderr());
    Ok(bar.with_style(style).with_prefix(label))
}

/// Talks through all of `workload` at `urls`, which are reached by `reach`. Request ids are
/// `demo-LABEL-CONVERSATION-TURN`. The first request that fails ends it.
pub async fn drive(
    client: &Client,
    urls: &[String],
    reach: Reach,
    label: &str,
    workload: &Workload,
    bar: &ProgressBar,
) -> anyhow::Result<Driven> {
    let began = Instant::now();
    let conversations: Arc<[Conversation]> = workload.conversations.clone().into();
    let next = Arc::new(AtomicUsize::new(0));
    let mut users = JoinSet::new();
    for _ in 0..workload.concurrent {
        let (client, urls, label, bar) = (client.clone(), urls.to_owned(), label.to_owned(), bar.clone());
        let (conversations, next) = (Arc::clone(&conversations), Arc::clone(&next));
        users.spawn(async move {
            let mut chats = Vec::new();
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                let Some(conversation) = conversations.get(number) else { return Ok(chats) };
                let id = format!("demo-{label}-{number}");
                let url = |turn: usize| match reach {
                    Reach::Kept => urls[number % urls.len()].as_str(),
                    Reach::InTurn => urls[(number + turn) % urls.len()].as_str(),
                };
                chats.extend(converse(&client, url, &id, conversation, &bar).await?);
            }
        });
    }
    let mut chats = Vec::new();
    while let Some(user) = users.join_next().await {
        let user: anyhow::Result<Vec<Chat>> = user.context("a user panicked")?;
        chats.extend(user?);
    }
    ensure!(chats.len() == workload.requests(), "{} of {} answers", chats.len(), workload.requests());
    Ok(Driven { chats, elapsed: began.elapsed() })
}

/// One conversation from its first turn to its last.
async fn converse<'a>(
    client: &Client,
    url: impl Fn(usize) -> &'a str,
    id: &str,
    conversation: &Conversation,
    bar: &ProgressBar,
) -> anyhow::Result<Vec<Chat>> {
    let mut messages = vec![json!({"role": "system", "content": &*conversation.system})];
    let mut chats = Vec::new();
    for (number, turn) in conversation.turns.iter().enumerate() {
        // Users think; nothing waits for this.
        tokio::time::sleep(turn.think).await;
        messages.push(json!({"role": "user", "content": turn.text}));
        let body = body(&messages, turn.answer_tokens);
        let request_id = format!("{id}-{number}");
        let chat = client.chat(url(number), &request_id, &body).await;
        let chat = chat.with_context(|| format!("request {request_id}"))?;
        messages.push(json!({"role": "assistant", "content": chat.text}));
        chats.push(chat);
        bar.inc(1);
    }
    Ok(chats)
}

/// A streamed chat that ends with usage.
pub fn body(messages: &[Value], max_tokens: usize) -> Value {
    json!({
        "model": MODEL, "messages": messages, "max_tokens": max_tokens,
        "stream": true, "stream_options": {"include_usage": true},
    })
}
