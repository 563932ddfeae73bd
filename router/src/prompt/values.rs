//! JSON as a template sees it.
//!
//! A chat has hundreds of small objects of which a template looks at every one,
//! several times. Here they are lists of fields, searched from the front: that is
//! faster to make and to look into than a hash table, up to a size that only
//! schemas of tools reach. Templates see no difference: an object is a mapping
//! with its keys in their order.

use std::sync::Arc;

use minijinja::value::{Enumerator, Object, ObjectExt, Serde, Value as Jinja};
use serde_json::Value;

use super::body::Message;

/// Objects of more fields are hash tables.
const MOST_FIELDS: usize = 12;

/// `value` for a template. Texts are copied once.
pub fn of(value: &Value) -> Jinja {
    match value {
        Value::Null => Jinja::from(()),
        Value::Bool(truth) => Jinja::from(*truth),
        Value::Number(number) => Jinja::from(Serde(number)),
        Value::String(text) => Jinja::from(text.as_str()),
        Value::Array(items) => Jinja::from_object(items.iter().map(of).collect::<Vec<Jinja>>()),
        Value::Object(fields) if fields.len() <= MOST_FIELDS => {
            let field = |(name, value): (&String, &Value)| (Jinja::from(name.as_str()), of(value));
            Jinja::from_object(Fields(fields.iter().map(field).collect()))
        }
        Value::Object(fields) => Jinja::from(Serde(fields)),
    }
}

/// The messages of a chat for a template. Texts of plain ones are shared.
pub fn messages(messages: &[Message]) -> Jinja {
    let message = |message: &Message| match message {
        Message::Plain { role, content } => {
            Jinja::from_object(Plain { role: Jinja::from(*role), content: Jinja::from(Arc::clone(content)) })
        }
        Message::Other(value) => of(value),
    };
    Jinja::from_object(messages.iter().map(message).collect::<Vec<Jinja>>())
}

/// A message that is a role and a text.
#[derive(Debug)]
struct Plain {
    role: Jinja,
    content: Jinja,
}

impl Object for Plain {
    fn get_value(self: &Arc<Self>, key: &Jinja) -> Option<Jinja> {
        self.get_value_by_str(key.as_str()?)
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Jinja> {
        match key {
            "role" => Some(self.role.clone()),
            "content" => Some(self.content.clone()),
            _ => None,
        }
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Str(&["role", "content"])
    }
}

/// A small object. Names differ, as they do in what it was made of.
#[derive(Debug)]
struct Fields(Vec<(Jinja, Jinja)>);

impl Object for Fields {
    fn get_value(self: &Arc<Self>, key: &Jinja) -> Option<Jinja> {
        self.get_value_by_str(key.as_str()?)
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Jinja> {
        let found = self.0.iter().find(|(name, _)| name.as_str() == Some(key));
        found.map(|(_, value)| value.clone())
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        self.mapped_rev_key_value_enumerator(|fields| Box::new(fields.0.iter().cloned()))
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        Some(self.0.len())
    }
}
