//! The explorer's side of the router: the page is there, its data needs the token, other origins get nothing.

use bytes::Bytes;
use http::Method;
use serde_json::json;

use crate::harness::{MODEL, Router, Setup, engine, id, long, until};

#[tokio::test]
async fn the_page_is_open_and_what_it_asks_for_is_not() {
    let only = engine(|_| {}).await;
    let folder = tempfile::tempdir().unwrap();
    let token = folder.path().join("token");
    std::fs::write(&token, "s3cret").unwrap();
    let router = Router::start(Setup::zmq(&[&only]).more(&format!("adminTokenFile: {token:?}"))).await;
    let body = json!({"model": MODEL, "max_tokens": 2, "messages": long(1)});
    assert_eq!(router.post("/v1/chat/completions", body).await.status, 200);
    let at = |path: &str| format!("http://{}{path}", router.at.admin);
    let bearer = ("authorization", "Bearer s3cret");
    let ask = async |path: &str, headers: &[(&str, &str)]| {
        router.client.send(Method::GET, &at(path), headers, Bytes::new()).await.unwrap()
    };
    let page = ask("/explorer", &[]).await;
    assert_eq!(page.status, 200);
    let policy = page.headers["content-security-policy"].to_str().unwrap();
    assert!(policy.starts_with("default-src 'none'") && !policy.contains("unsafe"), "{policy}");
    assert_eq!(ask("/v1/admin/live", &[]).await.status, 401, "no token, no data");
    assert_eq!(ask("/v1/admin/live", &[bearer, ("origin", "http://evil.example")]).await.status, 403);
    assert_eq!(ask("/explorer", &[("sec-fetch-site", "cross-site")]).await.status, 403, "no frame elsewhere");

    let live = async |query: &str| ask(&format!("/v1/admin/live{query}"), &[bearer]).await.json().unwrap();
    let all = live("").await;
    assert_eq!(all["workers"].as_array().unwrap().len(), 1);
    assert_eq!(all["receipts"], json!([]), "none before a namespace is chosen");
    let namespaces = all["namespaces"].as_object().unwrap();
    let (namespace, seen) = namespaces.iter().next().unwrap();
    assert_eq!((namespaces.len(), seen), (1, &json!(1)));
    let receipts = until("its answer is joined", async || {
        let found = live(&format!("?namespace={namespace}")).await["receipts"].clone();
        found[0][12].is_u64().then_some(found)
    })
    .await;
    assert_eq!(receipts[0][8], json!(format!("{}#0", id(&only))));
    assert_eq!(live("?namespace=00").await["receipts"], json!([]), "nor those of another one");
}
