//! How a body is read: what serde calls for each kind of JSON.
//!
//! See [`super::body`] for what comes of it. Each type here is a place in a body
//! where something is read in its own way; what is in no such place becomes a plain
//! JSON value.

use std::fmt;
use std::sync::Arc;

use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use super::body::Message;
use super::media;

/// Roles of plain messages.
const PLAIN_ROLES: [&str; 2] = ["user", "assistant"];

/// An object, and apart from it its messages.
pub(super) struct ReadBody {
    /// Its fields, without `messages` if they are a list.
    pub(super) fields: Map<String, Value>,
    /// The list.
    pub(super) messages: Option<Vec<Message>>,
}

/// `messages`, whatever they are.
enum Messages {
    List(Vec<Message>),
    Other(Value),
}

/// The role or the content of a message.
enum Field {
    Text(Arc<str>),
    Other(Value),
}

impl Messages {
    fn into_json(self) -> Value {
        match self {
            Self::List(messages) => messages.into_iter().map(Message::into_json).collect(),
            Self::Other(value) => value,
        }
    }
}

impl From<Value> for Messages {
    fn from(value: Value) -> Self {
        Self::Other(value)
    }
}

impl From<Value> for Field {
    fn from(value: Value) -> Self {
        Self::Other(value)
    }
}

impl Field {
    fn into_json(self) -> Value {
        match self {
            Self::Text(text) => Value::from(&*text),
            Self::Other(value) => value,
        }
    }
}

/// Reads what is neither text nor a list nor an object.
macro_rules! visit_scalars {
    () => {
        fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
            formatter.write_str("any JSON value")
        }

        fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
            Ok(Value::Null.into())
        }

        fn visit_bool<E: Error>(self, value: bool) -> Result<Self::Value, E> {
            Ok(Value::from(value).into())
        }

        fn visit_i64<E: Error>(self, value: i64) -> Result<Self::Value, E> {
            Ok(Value::from(value).into())
        }

        fn visit_u64<E: Error>(self, value: u64) -> Result<Self::Value, E> {
            Ok(Value::from(value).into())
        }

        fn visit_f64<E: Error>(self, value: f64) -> Result<Self::Value, E> {
            Ok(Value::from(value).into())
        }
    };
}

impl<'de> Deserialize<'de> for ReadBody {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;
        impl<'de> Visitor<'de> for Reader {
            type Value = ReadBody;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<ReadBody, A::Error> {
                let mut body = ReadBody { fields: Map::new(), messages: None };
                while let Some(name) = map.next_key::<String>()? {
                    if name != "messages" {
                        let value = match name.as_str() {
                            "images" => map.next_value::<Reference>()?.0,
                            // Of `/v1/responses`: messages, and more.
                            "input" => map.next_value::<Messages>()?.into_json(),
                            _ => map.next_value()?,
                        };
                        body.fields.insert(name, value);
                        continue;
                    }
                    // The last one counts, as everywhere.
                    match map.next_value()? {
                        Messages::List(messages) => {
                            body.fields.shift_remove(&name);
                            body.messages = Some(messages);
                        }
                        Messages::Other(value) => {
                            body.messages = None;
                            body.fields.insert(name, value);
                        }
                    }
                }
                Ok(body)
            }
        }
        deserializer.deserialize_map(Reader)
    }
}

impl<'de> Deserialize<'de> for Messages {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;
        impl<'de> Visitor<'de> for Reader {
            type Value = Messages;
            visit_scalars!();

            fn visit_str<E: Error>(self, text: &str) -> Result<Messages, E> {
                Ok(Messages::Other(Value::from(text)))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Messages, A::Error> {
                let mut messages = Vec::new();
                while let Some(message) = list.next_element()? {
                    messages.push(message);
                }
                Ok(Messages::List(messages))
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Messages, A::Error> {
                Value::deserialize(MapAccessDeserializer::new(map)).map(Messages::Other)
            }
        }
        deserializer.deserialize_any(Reader)
    }
}

impl<'de> Deserialize<'de> for Message {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;
        impl<'de> Visitor<'de> for Reader {
            type Value = Message;
            visit_scalars!();

            fn visit_str<E: Error>(self, text: &str) -> Result<Message, E> {
                Ok(Message::Other(Value::from(text)))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Message, A::Error> {
                Value::deserialize(SeqAccessDeserializer::new(list)).map(Message::Other)
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Message, A::Error> {
                message(map)
            }
        }
        deserializer.deserialize_any(Reader)
    }
}

impl<'de> Deserialize<'de> for Field {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;
        impl<'de> Visitor<'de> for Reader {
            type Value = Field;
            visit_scalars!();

            fn visit_str<E: Error>(self, text: &str) -> Result<Field, E> {
                Ok(Field::Text(text.into()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Field, A::Error> {
                let mut parts = Vec::new();
                while let Some(Part(part)) = list.next_element()? {
                    parts.push(part);
                }
                Ok(Field::Other(Value::Array(parts)))
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Field, A::Error> {
                Value::deserialize(MapAccessDeserializer::new(map)).map(Field::Other)
            }
        }
        deserializer.deserialize_any(Reader)
    }
}

/// A plain message if it is one: a role and a text, in either order, and nothing
/// else.
fn message<'de, A: MapAccess<'de>>(mut map: A) -> Result<Message, A::Error> {
    // Names of what is in the way of a plain message are kept, too.
    let mut seen: [Option<(Name, Field)>; 2] = [None, None];
    for slot in &mut seen {
        let Some(name) = map.next_key()? else { break };
        let value = match name {
            Name::Other(_) => Field::Other(map.next_value()?),
            Name::Role | Name::Content => map.next_value()?,
        };
        *slot = Some((name, value));
    }
    let next = map.next_key::<Name>()?;
    let seen = match seen {
        [Some((Name::Role, Field::Text(role))), Some((Name::Content, Field::Text(content)))]
        | [Some((Name::Content, Field::Text(content))), Some((Name::Role, Field::Text(role)))]
            if next.is_none() =>
        {
            match PLAIN_ROLES.into_iter().find(|plain| **plain == *role) {
                Some(role) => return Ok(Message::Plain { role, content }),
                None => [Some((Name::Role, Field::Text(role))), Some((Name::Content, Field::Text(content)))],
            }
        }
        seen => seen,
    };
    let mut fields = Map::new();
    for (name, value) in seen.into_iter().flatten() {
        fields.insert(name.into(), value.into_json());
    }
    let mut next = next;
    while let Some(name) = next {
        let value = match name {
            Name::Content => map.next_value::<Field>()?.into_json(),
            Name::Role | Name::Other(_) => map.next_value()?,
        };
        fields.insert(name.into(), value);
        next = map.next_key()?;
    }
    Ok(Message::Other(Value::Object(fields)))
}

/// The name of a message's field.
enum Name {
    Role,
    Content,
    Other(String),
}

impl From<Name> for String {
    fn from(name: Name) -> Self {
        match name {
            Name::Role => "role".to_owned(),
            Name::Content => "content".to_owned(),
            Name::Other(name) => name,
        }
    }
}

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;
        impl Visitor<'_> for Reader {
            type Value = Name;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a name")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Name, E> {
                Ok(match text {
                    "role" => Name::Role,
                    "content" => Name::Content,
                    other => Name::Other(other.to_owned()),
                })
            }
        }
        deserializer.deserialize_str(Reader)
    }
}

/// A part of a content that is a list.
struct Part(Value);

/// What a part says of media: a reference, or an object with one.
struct Reference(Value);

impl From<Value> for Part {
    fn from(value: Value) -> Self {
        Self(value)
    }
}

impl From<Value> for Reference {
    fn from(value: Value) -> Self {
        Self(value)
    }
}

impl<'de> Deserialize<'de> for Part {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;
        impl<'de> Visitor<'de> for Reader {
            type Value = Part;
            visit_scalars!();

            fn visit_str<E: Error>(self, text: &str) -> Result<Part, E> {
                Ok(Part(Value::from(text)))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Part, A::Error> {
                Value::deserialize(SeqAccessDeserializer::new(list)).map(Part)
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Part, A::Error> {
                let mut fields = Map::new();
                while let Some(name) = map.next_key::<String>()? {
                    let value = match name.as_str() {
                        // What a tool answered has parts of its own.
                        "content" => map.next_value::<Field>()?.into_json(),
                        name if media::REFERENCES.contains(&name) => map.next_value::<Reference>()?.0,
                        _ => map.next_value()?,
                    };
                    fields.insert(name, value);
                }
                Ok(Part(Value::Object(fields)))
            }
        }
        deserializer.deserialize_any(Reader)
    }
}

impl<'de> Deserialize<'de> for Reference {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;
        impl<'de> Visitor<'de> for Reader {
            type Value = Reference;
            visit_scalars!();

            fn visit_str<E: Error>(self, text: &str) -> Result<Reference, E> {
                Ok(Reference(Value::from(media::short(text).into_owned())))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Reference, A::Error> {
                let mut references = Vec::new();
                while let Some(Reference(reference)) = list.next_element()? {
                    references.push(reference);
                }
                Ok(Reference(Value::Array(references)))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Reference, A::Error> {
                let mut fields = Map::new();
                while let Some(name) = map.next_key::<String>()? {
                    let value = match name.as_str() {
                        "url" | "data" => map.next_value::<Reference>()?.0,
                        _ => map.next_value()?,
                    };
                    fields.insert(name, value);
                }
                Ok(Reference(Value::Object(fields)))
            }
        }
        deserializer.deserialize_any(Reader)
    }
}
