//! Canonical JSON, RFC 8785: equal values have equal bytes, everywhere.
//!
//! Keys stand in the order of their UTF-16 code units, numbers as ECMAScript
//! prints a double, strings with no escape that is not needed, and no spaces. A
//! whole number beyond 2^53 is a double like any other and may lose digits:
//! whoever must keep them writes a string.

use std::cmp::Ordering;
use std::fmt::{self, Write as _};

use serde::de::{MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use serde_json::value::RawValue;

/// The largest whole number that every reader of JSON reads alike.
pub const MAX_WHOLE: u64 = (1 << 53) - 1;

/// `value` in canonical form.
pub fn canonical_json(value: &Value) -> String {
    let mut out = String::new();
    write_value(value, &mut out);
    out
}

/// JSON text in canonical form; `None` if it is no JSON, or an object in it has
/// a key twice. Numbers are rounded correctly, however many digits they have.
/// O(length × depth).
pub fn canonical_text(text: &str) -> Option<String> {
    let raw: &RawValue = serde_json::from_str(text).ok()?;
    let mut out = String::with_capacity(text.len());
    write_raw(raw.get(), &mut out)?;
    Some(out)
}

fn write_value(value: &Value, out: &mut String) {
    match value {
        Value::Object(fields) => {
            let mut keys: Vec<_> = fields.iter().collect();
            keys.sort_by(|(a, _), (b, _)| by_code_units(a, b));
            out.push('{');
            for (position, (key, value)) in keys.into_iter().enumerate() {
                write_key(position, key, out);
                write_value(value, out);
            }
            out.push('}');
        }
        Value::Array(items) => {
            out.push('[');
            for (position, item) in items.iter().enumerate() {
                if position > 0 {
                    out.push(',');
                }
                write_value(item, out);
            }
            out.push(']');
        }
        Value::Number(number) => match (number.as_u64(), number.as_f64()) {
            (Some(whole), _) if whole <= MAX_WHOLE => write_whole(whole, out),
            (_, Some(double)) => write_number(double, out),
            (_, None) => out.push_str(&number.to_string()),
        },
        Value::String(text) => write_string(text, out),
        scalar => out.push_str(&scalar.to_string()),
    }
}

fn write_raw(text: &str, out: &mut String) -> Option<()> {
    match text.as_bytes().first()? {
        b'{' => {
            let Entries(mut entries) = serde_json::from_str(text).ok()?;
            entries.sort_by(|(a, _), (b, _)| by_code_units(a, b));
            if entries.windows(2).any(|pair| pair[0].0 == pair[1].0) {
                return None;
            }
            out.push('{');
            for (position, (key, value)) in entries.into_iter().enumerate() {
                write_key(position, &key, out);
                write_raw(value.get(), out)?;
            }
            out.push('}');
        }
        b'[' => {
            let Items(items) = serde_json::from_str(text).ok()?;
            out.push('[');
            for (position, item) in items.into_iter().enumerate() {
                if position > 0 {
                    out.push(',');
                }
                write_raw(item.get(), out)?;
            }
            out.push(']');
        }
        b'"' => write_string(&serde_json::from_str::<String>(text).ok()?, out),
        b't' | b'f' | b'n' => out.push_str(text),
        _ => write_number(text.parse().ok().filter(|number: &f64| number.is_finite())?, out),
    }
    Some(())
}

fn write_key(position: usize, key: &str, out: &mut String) {
    if position > 0 {
        out.push(',');
    }
    write_string(key, out);
    out.push(':');
}

/// As `serde_json` escapes, which is as RFC 8785 asks.
fn write_string(text: &str, out: &mut String) {
    if text.bytes().all(|byte| byte >= b' ' && byte != b'"' && byte != b'\\') {
        out.push('"');
        out.push_str(text);
        out.push('"');
    } else {
        out.push_str(&Value::from(text).to_string());
    }
}

/// A string as it stands in canonical JSON.
pub(crate) fn quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    write_string(text, &mut out);
    out
}

/// As ECMAScript's `Number::toString` prints a finite double.
fn write_number(number: f64, out: &mut String) {
    if number == 0.0 {
        // Minus zero too.
        out.push('0');
        return;
    }
    if number < 0.0 {
        out.push('-');
    }
    let size = number.abs();
    if size <= MAX_WHOLE as f64 && size.fract() == 0.0 {
        return write_whole(size as u64, out);
    }
    let shortest = shortest(size);
    let (mantissa, exponent) = shortest.split_once('e').unwrap_or((&shortest, "0"));
    let digits: String = mantissa.chars().filter(char::is_ascii_digit).collect();
    // Digits before the point.
    let point = exponent.parse::<i32>().unwrap_or(0) + 1;
    let count = i32::try_from(digits.len()).unwrap_or(i32::MAX);
    let zeros = |count: i32| "0".repeat(usize::try_from(count).unwrap_or(0));
    if (1..=21).contains(&point) && count <= point {
        *out += &digits;
        *out += &zeros(point - count);
    } else if (1..=21).contains(&point) {
        let (whole, fraction) = digits.split_at(usize::try_from(point).unwrap_or(0));
        *out += &format!("{whole}.{fraction}");
    } else if (-5..=0).contains(&point) {
        *out += &format!("0.{}{digits}", zeros(-point));
    } else {
        let (first, rest) = digits.split_at(1);
        let dot = if rest.is_empty() { "" } else { "." };
        *out += &format!("{first}{dot}{rest}e{:+}", point - 1);
    }
}

fn write_whole(number: u64, out: &mut String) {
    write!(out, "{number}").expect("a string takes everything");
}

/// The fewest digits that read back as this double, with an exponent. Of two that
/// are equally near ECMAScript wants the even one, `{:e}` does not; rounding to as
/// many digits does.
fn shortest(number: f64) -> String {
    let shortest = format!("{number:e}");
    let digits = shortest.split_once('e').map_or(0, |(mantissa, _)| mantissa.len().saturating_sub(2));
    let rounded = format!("{number:.digits$e}");
    if rounded.parse() == Ok(number) { rounded } else { shortest }
}

/// The order of UTF-16 code units: not that of code points, where surrogates
/// meet what stands above them.
fn by_code_units(a: &str, b: &str) -> Ordering {
    if a.is_ascii() && b.is_ascii() { a.cmp(b) } else { a.encode_utf16().cmp(b.encode_utf16()) }
}

/// An object's entries in their order, repeated ones too.
pub(super) struct Entries<'a>(pub(super) Vec<(String, &'a RawValue)>);

impl<'de> Deserialize<'de> for Entries<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Collect;
        impl<'de> Visitor<'de> for Collect {
            type Value = Entries<'de>;
            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Entries(entries))
            }
        }
        deserializer.deserialize_map(Collect)
    }
}

/// A list's items.
struct Items<'a>(Vec<&'a RawValue>);

impl<'de> Deserialize<'de> for Items<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Collect;
        impl<'de> Visitor<'de> for Collect {
            type Value = Items<'de>;
            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str("a list")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
                let mut all = Vec::new();
                while let Some(item) = items.next_element()? {
                    all.push(item);
                }
                Ok(Items(all))
            }
        }
        deserializer.deserialize_seq(Collect)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// RFC 8785, appendix B, and the edges of the four notations.
    #[test]
    fn numbers_are_printed_as_ecmascript_prints_them() {
        let vectors: [(u64, &str); 27] = [
            (0x0000000000000000, "0"),
            (0x8000000000000000, "0"),
            (0x0000000000000001, "5e-324"),
            (0x8000000000000001, "-5e-324"),
            (0x7fefffffffffffff, "1.7976931348623157e+308"),
            (0xffefffffffffffff, "-1.7976931348623157e+308"),
            (0x4340000000000000, "9007199254740992"),
            (0xc340000000000000, "-9007199254740992"),
            (0x4430000000000000, "295147905179352830000"),
            (0x44b52d02c7e14af5, "9.999999999999997e+22"),
            (0x44b52d02c7e14af6, "1e+23"),
            (0x44b52d02c7e14af7, "1.0000000000000001e+23"),
            (0x444b1ae4d6e2ef4e, "999999999999999700000"),
            (0x444b1ae4d6e2ef4f, "999999999999999900000"),
            (0x444b1ae4d6e2ef50, "1e+21"),
            (0x3eb0c6f7a0b5ed8c, "9.999999999999997e-7"),
            (0x3eb0c6f7a0b5ed8d, "0.000001"),
            (0x41b3de4355555553, "333333333.3333332"),
            (0x41b3de4355555554, "333333333.33333325"),
            (0x41b3de4355555555, "333333333.3333333"),
            (0x41b3de4355555556, "333333333.3333334"),
            (0x41b3de4355555557, "333333333.33333343"),
            (0xbecbf647612f3696, "-0.0000033333333333333333"),
            (0x43143ff3c1cb0959, "1424953923781206.2"),
            (0x3fe0000000000000, "0.5"),
            (0x3ff0000000000000, "1"),
            (0x4059000000000000, "100"),
        ];
        for (bits, expected) in vectors {
            let mut out = String::new();
            write_number(f64::from_bits(bits), &mut out);
            assert_eq!(out, expected, "{bits:016x}");
        }
        assert_eq!(
            canonical_json(&json!([u64::MAX, -7, MAX_WHOLE])),
            "[18446744073709552000,-7,9007199254740991]"
        );
    }

    /// RFC 8785, section 3.2.3 (keys) and section 3.2.2 (strings, literals).
    #[test]
    fn keys_and_strings_are_as_the_rfc_has_them() {
        let keys = "{\"\\u20ac\":\"Euro Sign\",\"\\r\":\"Carriage Return\",\"\\ufb33\":\"Hebrew Letter Dalet With Dagesh\",\
                    \"1\":\"One\",\"\\ud83d\\ude00\":\"Emoji: Grinning Face\",\"\\u0080\":\"Control\",\
                    \"\\u00f6\":\"Latin Small Letter O With Diaeresis\"}";
        let sorted = "{\"\\r\":\"Carriage Return\",\"1\":\"One\",\"\u{80}\":\"Control\",\
                      \"\u{f6}\":\"Latin Small Letter O With Diaeresis\",\"\u{20ac}\":\"Euro Sign\",\
                      \"\u{1f600}\":\"Emoji: Grinning Face\",\"\u{fb33}\":\"Hebrew Letter Dalet With Dagesh\"}";
        assert_eq!(canonical_text(keys).as_deref(), Some(sorted));
        let text = r#"{ "numbers": [333333333.33333329, 1E30, 4.50, 2e-3, 0.000000000000000000000000001],
            "string": "\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/", "literals": [null, true, false] }"#;
        let expected = r#"{"literals":[null,true,false],"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],"string":"€$\u000f\nA'B\"\\\\\"/"}"#;
        assert_eq!(canonical_text(text).as_deref(), Some(expected));
        let value: Value = serde_json::from_str(keys).expect("good");
        assert_eq!(canonical_json(&value), sorted, "values as texts");
    }

    #[test]
    fn what_has_no_one_meaning_has_no_canonical_form() {
        for bad in ["{\"a\":1,\"a\":1}", "[1", "", "01", "1e999", "{\"a\":[{\"b\":1,\"b\":2}]}", "[1] 2"] {
            assert_eq!(canonical_text(bad), None, "{bad}");
        }
        assert_eq!(canonical_text(" [ 1.0 , {} , -0.0 ] ").as_deref(), Some("[1,{},0]"));
    }
}
