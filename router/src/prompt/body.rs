//! A request body, parsed once.
//!
//! A long conversation is mostly messages that are a role and a text. They are
//! read into just that ([`Message::Plain`]), without the tree of JSON values
//! around them, and their texts are shared from there on. Pictures that came with
//! the body are hashed where they are and not copied ([`super::media`]). Everything
//! else is JSON as usual, and means the same whichever way it was read.

use std::sync::Arc;

use serde_json::Value;

use super::chat::message_of;
use super::endpoint::Endpoint;
use super::reading::ReadBody;

/// A body.
#[derive(Clone, Debug, PartialEq)]
pub struct Body {
    /// The JSON, without the messages if they are beside it.
    pub fields: Value,
    /// `messages` of a chat, if they are a list.
    pub messages: Option<Vec<Message>>,
}

/// A message of a chat.
#[derive(Clone, Debug, PartialEq)]
pub enum Message {
    /// A role that has no rules of its own, and a text: engines hand it to the
    /// template as it is.
    Plain {
        /// `user` or `assistant`.
        role: &'static str,
        /// What was said.
        content: Arc<str>,
    },
    /// Any other.
    Other(Value),
}

impl Body {
    /// Parses the body of a request to `endpoint`.
    pub fn parse(endpoint: Endpoint, bytes: &[u8]) -> Result<Self, serde_json::Error> {
        let Ok(text) = std::str::from_utf8(bytes) else {
            // Says where.
            return serde_json::from_slice(bytes).map(Self::from_json);
        };
        if !text.trim_ascii_start().starts_with('{') {
            return serde_json::from_str(text).map(Self::from_json);
        }
        let ReadBody { mut fields, messages, .. } = serde_json::from_str(text)?;
        let messages = messages.map(|list| list.into_iter().map(|placed| placed.message));
        if endpoint == Endpoint::Chat {
            return Ok(Self { fields: Value::Object(fields), messages: messages.map(Iterator::collect) });
        }
        if let Some(messages) = messages {
            fields.insert("messages".to_owned(), messages.map(Message::into_json).collect());
        }
        Ok(Self::from_json(Value::Object(fields)))
    }

    /// A body that was JSON already.
    pub const fn from_json(fields: Value) -> Self {
        Self { fields, messages: None }
    }
}

impl Message {
    /// The message as JSON.
    pub fn into_json(self) -> Value {
        match self {
            Self::Plain { role, content } => message_of(role, &*content),
            Self::Other(value) => value,
        }
    }

    /// A field of it, unless it is plain.
    pub fn get(&self, name: &str) -> Option<&Value> {
        match self {
            Self::Plain { .. } => None,
            Self::Other(value) => value.get(name),
        }
    }
}

impl From<Value> for Message {
    fn from(value: Value) -> Self {
        Self::Other(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The oracle is the JSON that everything else reads.
    #[track_caller]
    fn check(why: &str, text: &str, plain: usize) {
        let body = Body::parse(Endpoint::Chat, text.as_bytes()).expect("valid");
        let of_kind = |message: &&Message| matches!(message, Message::Plain { .. });
        assert_eq!(body.messages.iter().flatten().filter(of_kind).count(), plain, "{why}");
        let mut whole = body.fields;
        if let Some(messages) = body.messages {
            whole["messages"] = messages.into_iter().map(Message::into_json).collect();
        }
        let expected: Value = serde_json::from_str(text).expect("valid");
        assert_eq!(whole, expected, "{why}");
        let other = Body::parse(Endpoint::Messages, text.as_bytes()).expect("valid");
        assert_eq!(other, Body::from_json(expected), "{why}");
    }

    #[test]
    fn a_body_means_the_same_however_it_is_read() {
        let of = |messages: &str| format!(r#"{{"model": "m", "messages": {messages}, "n": 1.5}}"#);
        check("plain", &of(r#"[{"role": "user", "content": "a\n\"\u00e9"}]"#), 1);
        check("content first", &of(r#"[{"content": "a", "role": "assistant"}]"#), 1);
        check("a role with rules", &of(r#"[{"role": "system", "content": "a"}]"#), 0);
        check("one more field", &of(r#"[{"role": "user", "content": "a", "name": "n"}]"#), 0);
        check("one field", &of(r#"[{"role": "user"}, {}, {"content": "a"}]"#), 0);
        check("other fields", &of(r#"[{"name": "n", "role": "user", "content": "a"}]"#), 0);
        check("twice", &of(r#"[{"role": "user", "role": "user"}]"#), 0);
        check("twice, text last", &of(r#"[{"role": "user", "content": 1, "content": "a"}]"#), 0);
        let picture = r#"{"type": "image_url", "image_url": {"url": "data:,x", "detail": "low"}}"#;
        let result =
            format!(r#"{{"type": "tool_result", "content": [{picture}, 5], "source": {{"data": "x"}}}}"#);
        check(
            "a picture",
            &of(&format!(r#"[{{"role": "user", "content": [{picture}, {result}, "a", null]}}]"#)),
            0,
        );
        check("no references", &of(r#"[{"content": [{"image_url": 5, "source": [1], "content": "a"}]}]"#), 0);
        check("parts", &of(r#"[{"role": "user", "content": [{"type": "text", "text": "a"}]}]"#), 0);
        check("an object", &of(r#"[{"role": {"a": [1]}, "content": null}]"#), 0);
        check("no objects", &of(r#"[null, true, -1, 2, 1.5, "a", [1]]"#), 0);
        for other in ["null", "{}", "\"a\"", "1", "[]"] {
            check("no list", &of(other), 0);
        }
        check("the last counts", r#"{"messages": [{"role": "user", "content": "a"}], "messages": 5}"#, 0);
        check("the last counts", r#"{"messages": 5, "messages": [{"role": "user", "content": "a"}]}"#, 1);
        check("nothing", "{}", 0);
        check("space before", " \n{\"messages\": []}", 0);
    }

    /// Text that looks like a picture is text; a picture has the key that its whole
    /// text has.
    #[test]
    fn large_media_are_only_their_keys() {
        let large = format!("data:image/png;base64,{}", "iVBORw0K".repeat(1000));
        let base64 = large.rsplit(',').next().expect("there is a comma");
        let with = |part: Value| serde_json::json!({"messages": [{"role": "user", "content": [part]}]});
        let cases = [
            (true, with(serde_json::json!({"type": "image_url", "image_url": {"url": large}}))),
            (true, with(serde_json::json!({"type": "image_url", "image_url": large}))),
            (true, with(serde_json::json!({"type": "image", "source": {"type": "base64", "data": base64}}))),
            (
                true,
                with(serde_json::json!({"type": "tool_result", "content": [{"source": {"data": base64}}]})),
            ),
            (false, with(serde_json::json!({"type": "text", "text": large}))),
            (false, with(serde_json::json!({"type": "x", "arguments": {"url": large, "data": base64}}))),
            (false, serde_json::json!({"messages": [{"role": "user", "content": large}]})),
            (false, serde_json::json!({"prompt": large})),
            (
                false,
                serde_json::json!({"messages": [{"role": "user", "tool_calls": [{"image_url": large}]}]}),
            ),
        ];
        for (is_media, whole) in cases {
            let bytes = serde_json::to_vec(&whole).expect("it is JSON");
            for endpoint in [Endpoint::Chat, Endpoint::Messages] {
                let read = Body::parse(endpoint, &bytes).expect("it is JSON");
                let keys = super::super::media::keys(&read);
                assert_eq!(keys, super::super::media::keys(&Body::from_json(whole.clone())), "{whole}");
                assert_eq!(keys.len(), usize::from(is_media));
                let mut json = read.fields;
                if let Some(messages) = read.messages {
                    json["messages"] = messages.into_iter().map(Message::into_json).collect();
                }
                assert_eq!(json.to_string().len() < 1000, is_media, "{json}");
                assert!(is_media || json == whole, "{json}");
            }
        }
    }

    #[test]
    fn what_is_no_json_is_refused_either_way() {
        for text in ["", "{", "{}x", r#"{"messages": [{"role": "user", "content": "a}]}"#, "{\"a\": \"\n\"}"]
        {
            assert!(Body::parse(Endpoint::Chat, text.as_bytes()).is_err(), "{text}");
            assert!(Body::parse(Endpoint::Completions, text.as_bytes()).is_err(), "{text}");
        }
        assert!(Body::parse(Endpoint::Chat, b"{\"messages\": \"\xff\"}").is_err());
        let list = Body::parse(Endpoint::Chat, b"[1]").expect("it is JSON");
        assert_eq!(list, Body::from_json(serde_json::json!([1])));
    }
}
