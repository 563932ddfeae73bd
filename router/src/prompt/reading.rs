//! How a body is read: what serde calls for each kind of JSON.
//!
//! See [`super::body`] for what comes of it. Each type here is a place in a body
//! where something is read in its own way; what is in no such place becomes a plain
//! JSON value.

use std::fmt;
use std::ops::Range;
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
    pub(super) messages: Option<Vec<Placed>>,
    /// How often there were `messages`: the last ones count.
    pub(super) lists: usize,
}

/// A message, and where it stands.
pub(super) struct Placed {
    pub(super) message: Message,
    /// The addresses of its first name in the text that is read, if it is an object
    /// that has one without escapes.
    pub(super) name_at: Option<Range<usize>>,
}

/// `messages`, whatever they are.
enum Messages {
    List(Vec<Placed>),
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
            Self::List(messages) => messages.into_iter().map(|placed| placed.message.into_json()).collect(),
            Self::Other(value) => value,
        }
    }
}

impl From<Value> for Messages {
    fn from(value: Value) -> Self {
        Self::Other(value)
    }
}

impl From<Value> for Placed {
    fn from(value: Value) -> Self {
        Self { message: Message::Other(value), name_at: None }
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
                let mut body = ReadBody { fields: Map::new(), messages: None, lists: 0 };
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
                    body.lists += 1;
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

impl<'de> Deserialize<'de> for Placed {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;
        impl<'de> Visitor<'de> for Reader {
            type Value = Placed;
            visit_scalars!();

            fn visit_str<E: Error>(self, text: &str) -> Result<Placed, E> {
                Ok(Value::from(text).into())
            }

            fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Placed, A::Error> {
                Value::deserialize(SeqAccessDeserializer::new(list)).map(Placed::from)
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Placed, A::Error> {
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
fn message<'de, A: MapAccess<'de>>(mut map: A) -> Result<Placed, A::Error> {
    let first: Option<FirstName> = map.next_key()?;
    let name_at = first.as_ref().and_then(|first| first.at.clone());
    let mut next = first.map(|first| first.name);
    // Names of what is in the way of a plain message are kept, too.
    let mut seen: [Option<(Name, Field)>; 2] = [None, None];
    for slot in &mut seen {
        let Some(name) = next else { break };
        let value = match name {
            Name::Other(_) => Field::Other(map.next_value()?),
            Name::Role | Name::Content => map.next_value()?,
        };
        *slot = Some((name, value));
        next = map.next_key()?;
    }
    let seen = match seen {
        [Some((Name::Role, Field::Text(role))), Some((Name::Content, Field::Text(content)))]
        | [Some((Name::Content, Field::Text(content))), Some((Name::Role, Field::Text(role)))]
            if next.is_none() =>
        {
            match PLAIN_ROLES.into_iter().find(|plain| **plain == *role) {
                Some(role) => return Ok(Placed { message: Message::Plain { role, content }, name_at }),
                None => [Some((Name::Role, Field::Text(role))), Some((Name::Content, Field::Text(content)))],
            }
        }
        seen => seen,
    };
    let mut fields = Map::new();
    for (name, value) in seen.into_iter().flatten() {
        fields.insert(name.into(), value.into_json());
    }
    while let Some(name) = next {
        let value = match name {
            Name::Content => map.next_value::<Field>()?.into_json(),
            Name::Role | Name::Other(_) => map.next_value()?,
        };
        fields.insert(name.into(), value);
        next = map.next_key()?;
    }
    Ok(Placed { message: Message::Other(Value::Object(fields)), name_at })
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

/// The first name of a message, and its addresses where it has no escapes.
struct FirstName {
    name: Name,
    at: Option<Range<usize>>,
}

impl From<&str> for Name {
    fn from(text: &str) -> Self {
        match text {
            "role" => Self::Role,
            "content" => Self::Content,
            other => Self::Other(other.to_owned()),
        }
    }
}

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        FirstName::deserialize(deserializer).map(|first| first.name)
    }
}

impl<'de> Deserialize<'de> for FirstName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;
        impl<'de> Visitor<'de> for Reader {
            type Value = FirstName;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a name")
            }

            fn visit_borrowed_str<E: Error>(self, text: &'de str) -> Result<FirstName, E> {
                let at = text.as_bytes().as_ptr_range();
                Ok(FirstName { name: text.into(), at: Some(at.start as usize..at.end as usize) })
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<FirstName, E> {
                Ok(FirstName { name: text.into(), at: None })
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
