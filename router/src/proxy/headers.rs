//! Which headers travel: end-to-end ones pass both ways, hop-by-hop ones do not.
//!
//! Authority: RFC 9110 §7.6.1.

use http::header::{self, HeaderName};
use http::{HeaderMap, HeaderValue};

/// Names a request in our logs, receipts and at the engine.
pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Chooses a rank of an engine with several.
pub const DATA_PARALLEL_RANK: HeaderName = HeaderName::from_static("x-data-parallel-rank");

/// Names the session that a request belongs to.
pub const SESSION_ID: HeaderName = HeaderName::from_static("x-session-id");

/// Headers that speak to the next hop only. `Expect` is answered by us, `Host`
/// and `Content-Length` are written anew.
const HOP_BY_HOP: [HeaderName; 12] = [
    header::CONNECTION,
    header::CONTENT_LENGTH,
    header::EXPECT,
    header::HOST,
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
];

/// Appends the end-to-end headers of `from` to `to`, repeats included. Headers
/// that `Connection` names are hop-by-hop too.
pub fn copy_end_to_end(from: &HeaderMap, to: &mut HeaderMap) {
    let named: Vec<String> = from
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(|name| name.trim().to_ascii_lowercase())
        .collect();
    for (name, value) in from {
        if !HOP_BY_HOP.contains(name) && !named.iter().any(|hop| hop == name.as_str()) {
            to.append(name.clone(), value.clone());
        }
    }
}

/// Sets `name` to `value`; a value that is no header value is left out.
pub fn set(headers: &mut HeaderMap, name: HeaderName, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        headers.insert(name, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hop_by_hop_headers_stay_behind() {
        let mut from = HeaderMap::new();
        for (name, value) in [
            ("connection", "close, X-Own"),
            ("x-own", "1"),
            ("expect", "100-continue"),
            ("te", "trailers"),
            ("upgrade", "h2c"),
            ("content-length", "5"),
            ("authorization", "Bearer x"),
            ("traceparent", "00-1-2-01"),
            ("accept", "a"),
            ("accept", "b"),
        ] {
            from.append(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        let mut to = HeaderMap::new();
        copy_end_to_end(&from, &mut to);
        let mut names: Vec<_> =
            to.iter().map(|(name, value)| format!("{name}={}", value.to_str().expect("plain"))).collect();
        names.sort();
        assert_eq!(names, ["accept=a", "accept=b", "authorization=Bearer x", "traceparent=00-1-2-01"]);
    }
}
