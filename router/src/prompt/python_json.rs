//! `json.dumps` as Python writes it, for the `tojson` filter of chat templates.
//!
//! transformers defines `tojson` as `json.dumps(value, ensure_ascii=False,
//! indent=…, separators=…, sort_keys=…)`: a space behind `,` and `:`, keys in
//! their order, no HTML escaping. minijinja's own filter differs in all of it.

use std::fmt::Write;

use serde_json::Value;

/// How to write.
#[derive(Clone, Debug, Default)]
pub struct Style {
    /// Spaces per level; `None` for one line.
    pub indent: Option<usize>,
    /// Escape everything beyond ASCII.
    pub ensure_ascii: bool,
    /// Sort keys.
    pub sort_keys: bool,
    /// What stands between items and behind a key; `None` for Python's defaults.
    pub separators: Option<(String, String)>,
}

/// `value` as Python's `json.dumps` writes it.
pub fn dumps(value: &Value, style: &Style) -> String {
    let mut out = String::new();
    let item = if style.indent.is_some() { "," } else { ", " };
    let (item, key) = match &style.separators {
        Some((item, key)) => (item.as_str(), key.as_str()),
        None => (item, ": "),
    };
    Writer { style, item, key, out: &mut out }.value(value, 0);
    out
}

struct Writer<'a> {
    style: &'a Style,
    item: &'a str,
    key: &'a str,
    out: &'a mut String,
}

impl Writer<'_> {
    fn value(&mut self, value: &Value, level: usize) {
        match value {
            Value::Null => self.out.push_str("null"),
            Value::Bool(true) => self.out.push_str("true"),
            Value::Bool(false) => self.out.push_str("false"),
            Value::Number(number) => self.number(number),
            Value::String(text) => self.string(text),
            Value::Array(items) if items.is_empty() => self.out.push_str("[]"),
            Value::Array(items) => {
                self.out.push('[');
                for (position, item) in items.iter().enumerate() {
                    self.separate(position, level + 1);
                    self.value(item, level + 1);
                }
                self.line(level);
                self.out.push(']');
            }
            Value::Object(fields) if fields.is_empty() => self.out.push_str("{}"),
            Value::Object(fields) => {
                let mut fields: Vec<_> = fields.iter().collect();
                if self.style.sort_keys {
                    fields.sort_by_key(|(name, _)| *name);
                }
                self.out.push('{');
                for (position, (name, value)) in fields.into_iter().enumerate() {
                    self.separate(position, level + 1);
                    self.string(name);
                    self.out.push_str(self.key);
                    self.value(value, level + 1);
                }
                self.line(level);
                self.out.push('}');
            }
        }
    }

    fn separate(&mut self, position: usize, level: usize) {
        if position > 0 {
            self.out.push_str(self.item);
        }
        self.line(level);
    }

    fn line(&mut self, level: usize) {
        if let Some(indent) = self.style.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(' ', indent * level));
        }
    }

    fn number(&mut self, number: &serde_json::Number) {
        match number.as_f64().filter(|_| number.is_f64()) {
            Some(float) => self.out.push_str(&repr(float)),
            None => self.out.push_str(&number.to_string()),
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for character in text.chars() {
            match character {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                character
                    if u32::from(character) < 0x20 || (self.style.ensure_ascii && !character.is_ascii()) =>
                {
                    for unit in character.encode_utf16(&mut [0; 2]) {
                        let _ = write!(self.out, "\\u{unit:04x}");
                    }
                }
                character => self.out.push(character),
            }
        }
        self.out.push('"');
    }
}

/// Python's `repr` of a float: the shortest digits that read back equal, with
/// an exponent of at least two digits below 1e-4 and from 1e16 on, and always
/// a point otherwise.
pub fn repr(float: f64) -> String {
    let shortest = format!("{float:e}");
    let (mantissa, exponent) = shortest.split_once('e').unwrap_or((&shortest, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let plain = float.to_string();
        return if plain.contains('.') { plain } else { plain + ".0" };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{mantissa}e{sign}{:02}", exponent.unsigned_abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected values are the output of CPython 3.11's `json.dumps`.
    #[test]
    fn writes_what_python_writes() {
        let value: Value = serde_json::from_str(
            r#"{"b": [1, 2.0, -0.5, true, null], "a": {}, "text": "é\"\n\u0001</script>😀", "list": []}"#,
        )
        .expect("valid");
        let line =
            r#"{"b": [1, 2.0, -0.5, true, null], "a": {}, "text": "é\"\n\u0001</script>😀", "list": []}"#;
        assert_eq!(dumps(&value, &Style::default()), line);
        let small: Value = serde_json::from_str(r#"{"b": [1], "a": "é😀"}"#).expect("valid");
        let indented = "{\n    \"b\": [\n        1\n    ],\n    \"a\": \"é😀\"\n}";
        assert_eq!(dumps(&small, &Style { indent: Some(4), ..Style::default() }), indented);
        let ascii = Style { ensure_ascii: true, sort_keys: true, ..Style::default() };
        assert_eq!(dumps(&small, &ascii), r#"{"a": "\u00e9\ud83d\ude00", "b": [1]}"#);
        let tight = Style { separators: Some((",".into(), ":".into())), ..Style::default() };
        assert_eq!(dumps(&small, &tight), r#"{"b":[1],"a":"é😀"}"#);
        for (float, python) in [
            ("1e22", "1e+22"),
            ("1.5e-7", "1.5e-07"),
            ("0.1", "0.1"),
            ("1e15", "1000000000000000.0"),
            ("1e16", "1e+16"),
            ("0.0001", "0.0001"),
            ("-0.0", "-0.0"),
            ("1.5e300", "1.5e+300"),
        ] {
            assert_eq!(dumps(&serde_json::from_str(float).expect("valid"), &Style::default()), python);
        }
    }
}
