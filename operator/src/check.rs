//! `kv-router-operator check`: one chat completion through each router, for
//! `helm test` and for people.
//!
//! It asks as a client would, over the routers' Services. Engines are not
//! dialled.

use std::time::Duration;

use http::{Method, Request, Uri};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper_util::client::legacy::Client as HttpClient;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use kube::api::{Api, ListParams};
use kvrouter_crds::KvRouter;
use serde_json::{Value, json};

use crate::config::CheckFlags;

/// Most bytes of an answer that are read.
const MAX_ANSWER: usize = 1 << 20;
/// Tokens that are asked for.
const MAX_TOKENS: u32 = 16;

/// Why a check failed.
#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    /// The API server did not say which routers there are.
    #[error("unable to list KvRouters; name a router with --url http://HOST:PORT")]
    List {
        /// What it said.
        #[source]
        source: Box<kube::Error>,
    },
    /// There is nothing to ask.
    #[error("there is no KvRouter; apply one, or name a router with --url http://HOST:PORT")]
    NoRouters,
    /// A router has no address yet.
    #[error("KvRouter {} has no address yet; {} says what its status waits for", router.title(), router.describe())]
    NoAddress {
        /// The router.
        router: RouterName,
    },
    /// Some routers did not answer as they should.
    #[error("{failed} of {all} routers failed")]
    Failed {
        /// Those that failed.
        failed: usize,
        /// All that were asked.
        all: usize,
    },
}

/// Where a KvRouter is.
#[derive(Debug)]
pub struct RouterName {
    namespace: String,
    name: String,
}

/// What is asked.
struct Asked {
    url: String,
    /// None for a URL that was given.
    router: Option<RouterName>,
}

/// Why one router failed.
#[derive(Debug, thiserror::Error)]
enum AskError {
    #[error("{url} is no URL of a router; write http://HOST:PORT")]
    Url { url: String },
    #[error("{url} did not answer within {} s", limit.as_secs())]
    TimeOut { url: String, limit: Duration },
    #[error("failed to ask {url}: {message}")]
    Exchange { url: String, message: String },
    #[error("{url} answered {status}: {text}")]
    Status { url: String, status: u16, text: String },
    #[error("{url} answered what is no chat completion: {text}")]
    Answer { url: String, text: String },
    #[error("{url} lists no model, so none of its engines is ready")]
    NoModel { url: String },
}

/// Asks every router and prints what each one says.
pub async fn check(flags: &CheckFlags) -> Result<(), CheckError> {
    let routers = match &flags.url {
        Some(url) => vec![Asked { url: url.clone(), router: None }],
        None => routers(&flags.watch_namespaces).await?,
    };
    let limit = Duration::from_secs(flags.timeout_seconds);
    let mut failed = 0;
    for asked in &routers {
        let title = asked.title();
        match ask(asked.url.trim_end_matches('/'), flags.model.as_deref(), limit).await {
            Ok(text) => println!("{title}: {text:?}"),
            Err(error) => {
                failed += 1;
                eprintln!("{title}: {error}{}", asked.next(&error));
            }
        }
    }
    if failed > 0 {
        return Err(CheckError::Failed { failed, all: routers.len() });
    }
    Ok(())
}

impl RouterName {
    fn title(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    fn describe(&self) -> String {
        format!("`kubectl describe kvr -n {} {}`", self.namespace, self.name)
    }
}

impl Asked {
    fn title(&self) -> String {
        self.router.as_ref().map_or_else(|| self.url.clone(), RouterName::title)
    }

    /// What to do about `error`, behind its text.
    fn next(&self, error: &AskError) -> String {
        match (error, &self.router) {
            (AskError::Url { .. }, _) => String::new(),
            (_, Some(router)) => format!("; {} says what is wrong", router.describe()),
            (_, None) => "; /health/report on the router's port 9090 says what is wrong".to_owned(),
        }
    }
}

/// All KvRouters in `namespaces`, and their addresses; empty for everywhere.
async fn routers(namespaces: &[String]) -> Result<Vec<Asked>, CheckError> {
    let failed = |source| CheckError::List { source: Box::new(source) };
    let client = kube::Client::try_default().await.map_err(failed)?;
    let apis: Vec<Api<KvRouter>> = match namespaces {
        [] => vec![Api::all(client)],
        some => some.iter().map(|namespace| Api::namespaced(client.clone(), namespace)).collect(),
    };
    let mut found = Vec::new();
    for api in apis {
        for router in api.list(&ListParams::default()).await.map_err(failed)? {
            let [namespace, name] =
                [router.metadata.namespace, router.metadata.name].map(Option::unwrap_or_default);
            let name = RouterName { namespace, name };
            match router.status.and_then(|status| status.url) {
                Some(url) => found.push(Asked { url, router: Some(name) }),
                None => return Err(CheckError::NoAddress { router: name }),
            }
        }
    }
    if found.is_empty() { Err(CheckError::NoRouters) } else { Ok(found) }
}

/// The text of a short answer.
async fn ask(url: &str, model: Option<&str>, limit: Duration) -> Result<String, AskError> {
    let model = match model {
        Some(model) => model.to_owned(),
        None => {
            let models = exchange(Method::GET, &format!("{url}/v1/models"), None, limit).await?;
            let first = models.pointer("/data/0/id").and_then(Value::as_str).map(str::to_owned);
            first.ok_or_else(|| AskError::NoModel { url: url.to_owned() })?
        }
    };
    let body = json!({
        "model": model, "max_tokens": MAX_TOKENS,
        "messages": [{"role": "user", "content": "Say hello."}],
    });
    let url = format!("{url}/v1/chat/completions");
    let answer = exchange(Method::POST, &url, Some(&body), limit).await?;
    match answer.pointer("/choices/0/message/content").and_then(Value::as_str) {
        Some(text) => Ok(text.to_owned()),
        None => Err(AskError::Answer { url, text: shortened(&answer.to_string()) }),
    }
}

async fn exchange(
    method: Method,
    url: &str,
    body: Option<&Value>,
    limit: Duration,
) -> Result<Value, AskError> {
    let wrong = || AskError::Url { url: url.to_owned() };
    let uri: Uri = url.parse().map_err(|_| wrong())?;
    let body = Full::new(Bytes::from(body.map(Value::to_string).unwrap_or_default()));
    let request =
        Request::builder().method(method).uri(uri).header("content-type", "application/json").body(body);
    let request = request.map_err(|_| wrong())?;
    let failed = |error: &dyn std::error::Error| AskError::Exchange {
        url: url.to_owned(),
        message: crate::chain(error),
    };
    let asked = async {
        let client: HttpClient<HttpConnector, Full<Bytes>> =
            HttpClient::builder(TokioExecutor::new()).build_http();
        let answer = client.request(request).await.map_err(|error| failed(&error))?;
        let status = answer.status();
        let bytes = Limited::new(answer.into_body(), MAX_ANSWER).collect().await;
        let bytes = bytes.map_err(|error| failed(error.as_ref()))?.to_bytes();
        let text = String::from_utf8_lossy(&bytes);
        if !status.is_success() {
            return Err(AskError::Status {
                url: url.to_owned(),
                status: status.as_u16(),
                text: shortened(&text),
            });
        }
        serde_json::from_str(&text)
            .map_err(|_| AskError::Answer { url: url.to_owned(), text: shortened(&text) })
    };
    match tokio::time::timeout(limit, asked).await {
        Ok(answer) => answer,
        Err(_) => Err(AskError::TimeOut { url: url.to_owned(), limit }),
    }
}

/// Enough of a text to see what it is.
fn shortened(text: &str) -> String {
    text.chars().take(300).collect()
}
