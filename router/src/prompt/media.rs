//! Pictures, clips and recordings in a body, as affinity keys.
//!
//! A key is the XXH3 of the reference: a URL as it is, or the base64 of the
//! bytes made canonical, so that the same picture has one key as a data URI, as
//! an Anthropic `source` and in a top-level `images` list. Nothing is copied or
//! decoded: 20 MB hash in a few milliseconds, in the body as it came. What is kept
//! of a long reference is its key ([`short`]).

use std::borrow::Cow;

use kvrouter_core::policy::images::ImageKey;
use serde_json::Value;
use xxhash_rust::xxh3::Xxh3;

use super::body::Body;

/// Most pictures of one request that count. Beyond that they are one document.
const MAX_IMAGES: usize = 256;
/// Bytes hashed at a time.
const CHUNK: usize = 4096;

/// Fields of a part that refer to media. No engine shows them to a template.
pub const REFERENCES: [&str; 5] = ["image_url", "video_url", "audio_url", "input_audio", "source"];
/// Longer references are kept as their keys.
const SHORT: usize = 1024;
/// Begins a reference of which only the key was kept. A client that writes one
/// itself says which picture it wants to be near to, as with any other.
const KEPT: &str = "data:application/vnd.kvrouter.key,";

/// `reference`, or what has the same key and fits into a line.
pub fn short(reference: &str) -> Cow<'_, str> {
    match reference.len() > SHORT {
        true => format!("{KEPT}{:016x}", key(reference).0).into(),
        false => reference.into(),
    }
}

/// Keys of all media in `body`, in document order, repeats included.
pub fn keys(body: &Body) -> Vec<ImageKey> {
    let mut keys = Vec::new();
    let of_chat = body.messages.iter().flatten().map(|message| message.get("content"));
    let others = ["messages", "input"].into_iter().flat_map(|name| list(body.fields.get(name)));
    let of_others = others.map(|message| message.get("content"));
    for content in of_chat.chain(of_others) {
        list(content).iter().for_each(|part| part_keys(part, &mut keys));
    }
    for part in list(body.fields.get("system")) {
        part_keys(part, &mut keys);
    }
    for image in list(body.fields.get("images")) {
        keys.extend(reference(image));
    }
    keys.truncate(MAX_IMAGES);
    keys
}

fn list(value: Option<&Value>) -> &[Value] {
    value.and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

/// OpenAI's `image_url`, `video_url` and `input_audio` parts, Anthropic's
/// `image` and `document` blocks, and what tool results nest.
fn part_keys(part: &Value, keys: &mut Vec<ImageKey>) {
    keys.extend(REFERENCES.iter().find_map(|name| part.get(*name).and_then(reference)));
    for nested in list(part.get("content")) {
        part_keys(nested, keys);
    }
}

/// The key of a reference: text, or an object with `url` or `data`.
fn reference(value: &Value) -> Option<ImageKey> {
    match value {
        Value::String(text) => Some(key(text)),
        Value::Object(fields) => {
            let named = |name| fields.get(name).and_then(Value::as_str);
            named("url").or_else(|| named("data")).map(key)
        }
        _ => None,
    }
}

fn key(reference: &str) -> ImageKey {
    let reference = reference.trim();
    if let Some(kept) = reference.strip_prefix(KEPT).and_then(|hex| u64::from_str_radix(hex, 16).ok()) {
        return ImageKey(kept);
    }
    match reference.strip_prefix("data:").and_then(|rest| rest.split_once(";base64,")) {
        Some((_, base64)) => base64_key(base64),
        None if reference.contains("://") || reference.starts_with("data:") => {
            let mut hasher = Xxh3::new();
            hasher.update(b"url");
            hasher.update(reference.as_bytes());
            ImageKey(hasher.digest())
        }
        // An `images` list may hold bare base64.
        None => base64_key(reference),
    }
}

/// White space and padding do not count, and both alphabets are one.
fn base64_key(base64: &str) -> ImageKey {
    let mut hasher = Xxh3::new();
    hasher.update(b"b64");
    let mut chunk = Vec::with_capacity(CHUNK);
    for part in base64.as_bytes().chunks(CHUNK) {
        // Nearly always there is nothing to change, and looking takes a tenth of copying.
        if !part.iter().fold(false, |varies, byte| varies | is_varied(*byte)) {
            hasher.update(part);
            continue;
        }
        chunk.clear();
        chunk.extend(part.iter().filter_map(|byte| match byte {
            b'=' | b' ' | b'\n' | b'\r' | b'\t' => None,
            b'-' => Some(b'+'),
            b'_' => Some(b'/'),
            byte => Some(*byte),
        }));
        hasher.update(&chunk);
    }
    ImageKey(hasher.digest())
}

/// Whether the same bytes may be written without `byte`, or with another one.
const fn is_varied(byte: u8) -> bool {
    matches!(byte, b'=' | b' ' | b'\n' | b'\r' | b'\t' | b'-' | b'_')
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const BASE64: &str = "iVBORw0KGgo+/A==";

    /// Case E14: pictures that differ in their last letter differ, however they are
    /// broken into lines.
    #[test]
    fn large_pictures_are_told_apart() {
        let picture = "iVBORw0K".repeat(256 << 10);
        let other = format!("{}L", &picture[..picture.len() - 1]);
        assert_ne!(key(&picture), key(&other));
        assert_eq!(key(&picture.replace("BORw", "BO\nRw")), key(&picture), "chunk by chunk");
    }

    #[test]
    fn the_same_picture_has_one_key_in_every_shape() {
        let uri = format!("data:image/png;base64,{BASE64}");
        let message = |part: Value| json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]});
        let shapes = [
            message(json!({"type": "image_url", "image_url": {"url": uri}})),
            message(json!({"type": "image_url", "image_url": uri})),
            message(
                json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BASE64}}),
            ),
            message(
                json!({"type": "tool_result", "content": [{"type": "image", "source": {"data": BASE64}}]}),
            ),
            json!({"images": [BASE64]}),
            json!({"images": [uri]}),
            json!({"images": ["iVBORw0K\nGgo-_A"]}),
        ];
        let keys = |body: &Value| keys(&Body::from_json(body.clone()));
        let expected = keys(&shapes[0]);
        assert_eq!(expected.len(), 1);
        for shape in &shapes {
            assert_eq!(keys(shape), expected, "{shape}");
        }
    }

    #[test]
    fn pictures_that_differ_in_the_last_byte_differ() {
        let keys = |body: Value| keys(&Body::from_json(body));
        let of = |text: &str| keys(json!({"images": [text]}));
        assert_ne!(of("AAAA"), of("AAAB"));
        assert_ne!(of("http://a/1.png"), of("http://a/2.png"));
        assert_eq!(keys(json!({"messages": [{"content": "no parts"}], "images": "x"})), []);
    }
}
