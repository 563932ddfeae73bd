//! The page of the lab and the explorer: its files, its headers, who may ask.
//!
//! The page is built from `router/web` and embedded by `build.rs`. It is the same
//! for both: the document says which of them it is. Nothing in it comes from a
//! cluster or a trace; those arrive as JSON and are shown as text.

use std::net::IpAddr;

use axum::extract::Request;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http::{HeaderMap, HeaderName, Method, StatusCode, header};
use sha2::{Digest, Sha256};

include!(concat!(env!("OUT_DIR"), "/page.rs"));

/// Only our own files, and no inline script or style.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; \
    connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
/// Where the page's script and style stand in the document.
const STYLE_LINK: &str = r#"<link rel="stylesheet" href="page.css">"#;
const SCRIPT_LINK: &str = r#"<script src="page.js" defer></script>"#;
const LAB: &str = r#"data-source="lab""#;

/// What a build without Node shows.
const MISSING: &str = "<!doctype html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n<title>kvrouter</title>\n\
    <h1>This kv-router was built without its page</h1>\n\
    <p>The page is made from router/web with Node 20 or later, and Node was not there. To get it, \
    in a clone of the repository:</p>\n\
    <pre>make web\ncargo build --package kvrouter-router --bin kv-router</pre>\n\
    <p>Everything else works: <code>kv-router replay</code> replays traces, and \
    <code>/v1/admin/receipts</code> explains decisions.</p>\n";

/// Which page a document is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A frozen trace.
    Lab,
    /// A live router.
    Explorer,
}

/// The document; it asks for `page.js` and `page.css` under `folder`, which is
/// empty or ends with a slash.
pub fn document(kind: Kind, folder: &str) -> Response {
    if !BUILT {
        return file("text/html; charset=utf-8", MISSING.to_owned());
    }
    let mut text = DOCUMENT
        .replace("href=\"page.css\"", &format!("href=\"{folder}page.css\""))
        .replace("src=\"page.js\"", &format!("src=\"{folder}page.js\""));
    if kind == Kind::Explorer {
        text = text.replace(LAB, r#"data-source="live""#);
    }
    file("text/html; charset=utf-8", text)
}

/// The page's script.
pub async fn script() -> Response {
    file("text/javascript; charset=utf-8", SCRIPT.to_owned())
}

/// The page's style.
pub async fn style() -> Response {
    file("text/css; charset=utf-8", STYLE.to_owned())
}

/// What the page's libraries are licensed under.
pub async fn licences() -> Response {
    file("text/plain; charset=utf-8", LICENCES.to_owned())
}

fn file(kind: &'static str, text: String) -> Response {
    let headers = [
        (header::CONTENT_TYPE, kind),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::CACHE_CONTROL, "no-cache"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    ];
    (headers, text).into_response()
}

/// One file that shows `start` (JSON) from disk: script, style and data are
/// inside, and its policy allows exactly these and no network. `None` in a build
/// without the page.
pub fn export(start: &str) -> Option<String> {
    if !BUILT || SCRIPT.contains("</script") || STYLE.contains("</style") {
        return None;
    }
    let hash = |text: &str| format!("'sha256-{}'", STANDARD.encode(Sha256::digest(text.as_bytes())));
    let policy = format!(
        "default-src 'none'; script-src {}; style-src {}; img-src data:; base-uri 'none'; form-action 'none'",
        hash(SCRIPT),
        hash(STYLE)
    );
    let head =
        format!("<meta http-equiv=\"Content-Security-Policy\" content=\"{policy}\">\n<style>{STYLE}</style>");
    // Data, not script: but the parser must not find an end tag in it.
    let data = start.replace('<', "\\u003c");
    let tail = format!(
        "<script type=\"application/json\" id=\"start\">{data}</script>\n<script>{SCRIPT}</script>\n\
         <!--\n{}\n-->\n</body>",
        LICENCES.replace("--", "- -")
    );
    // Cut rather than replaced, so that nothing inserted is looked through again.
    let (before, rest) = DOCUMENT.split_once(STYLE_LINK)?;
    let (between, rest) = rest.split_once(SCRIPT_LINK)?;
    let (body, end) = rest.split_once("</body>")?;
    Some([before, &head, between, body, &tail, end].concat())
}

/// Who may ask: refuses what a page of another origin sends, and, where no token
/// protects the port, what a browser sends to a name that anybody can point here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guard {
    /// A token is asked for as well.
    Token,
    /// Nothing else is.
    Open,
}

impl Guard {
    /// Lets `request` through or refuses it.
    pub async fn check(self, request: Request, next: Next) -> Response {
        match self.refusal(request.method(), request.headers()) {
            None => next.run(request).await,
            Some(why) => {
                let text = format!("Refused: {why}.\n");
                (StatusCode::FORBIDDEN, [(header::CONTENT_TYPE, "text/plain; charset=utf-8")], text)
                    .into_response()
            }
        }
    }

    fn refusal(self, method: &Method, headers: &HeaderMap) -> Option<&'static str> {
        // Present and unreadable is not absent.
        let text = |name: &str| headers.get(name).map(|value| value.to_str().ok());
        let host = match text("host") {
            None => "",
            Some(Some(host)) => host,
            Some(None) => return Some("the Host header cannot be read"),
        };
        if let Some(origin) = text("origin") {
            let own = |origin: &str| {
                ["http://", "https://"].iter().any(|scheme| origin == format!("{scheme}{host}"))
            };
            if !origin.is_some_and(own) {
                return Some("the request comes from a page of another origin");
            }
        }
        // Following a link is no reading: the page that holds it sees nothing.
        let follows_link = method == Method::GET
            && text("sec-fetch-mode") == Some(Some("navigate"))
            && text("sec-fetch-dest") == Some(Some("document"));
        let site = text("sec-fetch-site");
        let near = site.is_none_or(|site| site.is_some_and(|site| matches!(site, "same-origin" | "none")));
        if !near && !follows_link {
            return Some("the request comes from a page of another origin");
        }
        let browser =
            site.is_some() || ["origin", "accept-language"].iter().any(|name| headers.contains_key(*name));
        if self == Self::Open && browser && !is_ours(host) {
            return Some(
                "without a token browsers must use an IP address or localhost, as other names can be pointed here by anybody",
            );
        }
        None
    }
}

/// Whether nobody else can make `host` mean us: an address, or localhost.
fn is_ours(host: &str) -> bool {
    let name = match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, _)) => return address.parse::<IpAddr>().is_ok(),
        None => host.rsplit_once(':').map_or(host, |(name, _)| name),
    };
    name == "localhost" || name.ends_with(".localhost") || name.parse::<IpAddr>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    use http::HeaderValue;

    #[track_caller]
    fn check(why: &str, guard: Guard, headers: &[(&'static str, &'static str)], passes: bool) {
        let pairs = headers
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)));
        let found = guard.refusal(&Method::GET, &pairs.collect());
        assert_eq!(found.is_none(), passes, "{why}: {found:?}");
    }

    #[test]
    fn pages_of_other_origins_are_refused() {
        let (open, token) = (Guard::Open, Guard::Token);
        let local = ("host", "127.0.0.1:9091");
        check("curl", open, &[local], true);
        check("curl by a name", open, &[("host", "router.svc:9091")], true);
        check("our page", open, &[local, ("origin", "http://127.0.0.1:9091")], true);
        check("behind TLS", token, &[("host", "a.example"), ("origin", "https://a.example")], true);
        check("another origin", open, &[local, ("origin", "http://evil.example")], false);
        check("another port", open, &[local, ("origin", "http://127.0.0.1:80")], false);
        check("an opaque origin", open, &[local, ("origin", "null")], false);
        check("another site", open, &[local, ("sec-fetch-site", "cross-site")], false);
        let link = [
            ("sec-fetch-mode", "navigate"),
            ("sec-fetch-dest", "document"),
            ("sec-fetch-site", "cross-site"),
        ];
        check("a link", open, &[&[local], &link[..]].concat(), true);
        check("a frame", open, &[local, link[0], ("sec-fetch-dest", "iframe"), link[2]], false);
        let rebound = [("host", "evil.example:9091"), ("accept-language", "en")];
        check("a name pointed here", open, &rebound, false);
        check("the same, and a token is needed", token, &rebound, true);
        check("IPv6", open, &[("host", "[::1]:9091"), ("accept-language", "en")], true);
        check("localhost", open, &[("host", "localhost:9091"), ("accept-language", "en")], true);
        check(
            "localhost of somebody",
            open,
            &[("host", "localhost.evil.example"), ("accept-language", "en")],
            false,
        );
    }

    /// Whatever stands in a trace, an exported file has one script that runs.
    #[test]
    fn data_in_an_exported_file_stays_data() {
        let start = r#"{"name":"</script><script>alert(1)</script><!--"}"#;
        let text = export(start);
        assert_eq!(text.is_some(), BUILT, "a build with the page can export, and no other");
        let Some(text) = text else { return };
        assert!(!text.contains("<script>alert"), "no tag of the data's");
        assert_eq!(text.matches("<script").count(), 2, "the data and the script");
        assert!(text.contains(&STANDARD.encode(Sha256::digest(SCRIPT.as_bytes()))), "its hash is allowed");
        assert!(!text.contains("unsafe"), "and nothing else");
    }

    #[test]
    fn a_build_without_the_page_says_how_to_get_it() {
        assert!(MISSING.contains("make web") && MISSING.contains("cargo build"));
        assert_eq!(
            BUILT,
            DOCUMENT.contains(STYLE_LINK) && DOCUMENT.contains(SCRIPT_LINK) && DOCUMENT.contains(LAB)
        );
    }
}
