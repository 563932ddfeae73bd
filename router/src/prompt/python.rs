//! Where Jinja2 is Python and minijinja is not: text forms, blanks, dates.
//!
//! Templates print values, trim text and ask for the date, and Python decides
//! what comes of it: `None` and `True` with capitals, lists as `repr` writes them,
//! blanks by `str.isspace`. Authority: CPython 3.11.

use std::fmt::Write;

use minijinja::value::{Value as Jinja, ValueKind};
use minijinja::{Error, ErrorKind, State};

/// A day, as `strftime` wants it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Day {
    year: i64,
    month: u32,
    day: u32,
    /// 0 is Sunday.
    weekday: u32,
    /// From 1.
    of_year: u32,
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const WEEKDAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

impl Day {
    /// The day, in UTC, of a moment given in milliseconds since 1970.
    pub fn of_unix_ms(ms: u64) -> Self {
        let days = i64::try_from(ms / 86_400_000).unwrap_or(0);
        // Days since 0000-03-01, so that the leap day is a year's last.
        let shifted = days + 719_468;
        let era = shifted / 146_097;
        let of_era = shifted % 146_097;
        let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
        let of_march_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let march_month = (5 * of_march_year + 2) / 153;
        let day = of_march_year - (153 * march_month + 2) / 5 + 1;
        let month = if march_month < 10 { march_month + 3 } else { march_month - 9 };
        let year = year_of_era + era * 400 + i64::from(month <= 2);
        let leap = i64::from(year % 4 == 0 && (year % 100 != 0 || year % 400 == 0));
        let before = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334];
        let small = |number: i64| u32::try_from(number).unwrap_or(0);
        let passed = before[(month - 1) as usize] + if month > 2 { leap } else { 0 };
        Self {
            year,
            month: small(month),
            day: small(day),
            weekday: small((days + 4) % 7),
            of_year: small(passed + day),
        }
    }

    /// Python's `strftime` in the C locale. `None` for what changes within a day
    /// or is not known: nobody can tell what the engine's clock will say.
    pub fn format(&self, format: &str) -> Option<String> {
        let mut out = String::new();
        let mut rest = format.chars();
        while let Some(character) = rest.next() {
            if character != '%' {
                out.push(character);
                continue;
            }
            let month = MONTHS[(self.month - 1) as usize];
            let weekday = WEEKDAYS[self.weekday as usize];
            let (code, padded) = match rest.next()? {
                '-' => (rest.next()?, false),
                code => (code, true),
            };
            let number = |value: u32, width: usize| match padded {
                true => format!("{value:0width$}"),
                false => value.to_string(),
            };
            match code {
                'Y' => out.push_str(&self.year.to_string()),
                'y' => out.push_str(&number(u32::try_from(self.year % 100).unwrap_or(0), 2)),
                'm' => out.push_str(&number(self.month, 2)),
                'd' => out.push_str(&number(self.day, 2)),
                'j' => out.push_str(&number(self.of_year, 3)),
                'e' => write!(out, "{:2}", self.day).ok()?,
                'B' => out.push_str(month),
                'b' | 'h' => out.push_str(&month[..3]),
                'A' => out.push_str(weekday),
                'a' => out.push_str(&weekday[..3]),
                'w' => out.push_str(&self.weekday.to_string()),
                'F' => write!(out, "{}-{:02}-{:02}", self.year, self.month, self.day).ok()?,
                'D' => write!(out, "{:02}/{:02}/{:02}", self.month, self.day, self.year % 100).ok()?,
                '%' => out.push('%'),
                _ => return None,
            }
        }
        Some(out)
    }
}

/// Python's `str(value)`.
pub fn str_of(value: &Jinja) -> Result<String, Error> {
    let mut out = String::new();
    match value.kind() {
        ValueKind::Undefined => {}
        ValueKind::String => out.push_str(value.as_str().unwrap_or_default()),
        _ => repr(value, &mut out)?,
    }
    Ok(out)
}

/// Python's `repr(value)`, for what a template can hold.
fn repr(value: &Jinja, out: &mut String) -> Result<(), Error> {
    match value.kind() {
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number if value.is_integer() => out.push_str(&value.to_string()),
        ValueKind::Number => {
            let float = f64::try_from(value.clone())?;
            out.push_str(&super::python_json::repr(float));
        }
        ValueKind::String => repr_of_text(value.as_str().unwrap_or_default(), out),
        // A slice is one of the latter here, and a list in Python.
        ValueKind::Seq | ValueKind::Iterable => {
            out.push('[');
            for (position, item) in value.try_iter()?.enumerate() {
                out.push_str(if position > 0 { ", " } else { "" });
                repr(&item, out)?;
            }
            out.push(']');
        }
        ValueKind::Map if value.downcast_object_ref::<minijinja::value::Kwargs>().is_none() => {
            out.push('{');
            for (position, key) in value.try_iter()?.enumerate() {
                out.push_str(if position > 0 { ", " } else { "" });
                repr(&key, out)?;
                out.push_str(": ");
                repr(&value.get_item(&key)?, out)?;
            }
            out.push('}');
        }
        _ => {
            return Err(Error::new(ErrorKind::InvalidOperation, "a value has no text form that is known"));
        }
    }
    Ok(())
}

/// Single quotes, unless the text has some and no double ones.
fn repr_of_text(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for character in text.chars() {
        match character {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            character if character == quote => {
                out.push('\\');
                out.push(character);
            }
            character if u32::from(character) < 0x20 || character == '\u{7f}' => {
                let _ = write!(out, "\\x{:02x}", u32::from(character));
            }
            character if is_unprintable(character) => {
                let code = u32::from(character);
                let _ = match code {
                    0..=0xff => write!(out, "\\x{code:02x}"),
                    0x100..=0xffff => write!(out, "\\u{code:04x}"),
                    _ => write!(out, "\\U{code:08x}"),
                };
            }
            character => out.push(character),
        }
    }
    out.push(quote);
}

/// Control, format and separator characters, as far as they are likely.
fn is_unprintable(character: char) -> bool {
    character.is_control()
        || (character.is_whitespace() && character != ' ')
        || matches!(character, '\u{ad}' | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

/// Python's `str.isspace`: Unicode's white space and the four separators of ASCII.
pub fn is_space(character: char) -> bool {
    character.is_whitespace() || matches!(character, '\u{1c}'..='\u{1f}')
}

/// Methods of text whose idea of a blank is Python's; everything else is
/// minijinja-contrib's.
pub fn method(state: &mut State, value: &Jinja, name: &str, args: &[Jinja]) -> Result<Jinja, Error> {
    if let (Some(text), []) = (value.as_str(), args) {
        match name {
            "strip" => return Ok(Jinja::from(text.trim_matches(is_space))),
            "lstrip" => return Ok(Jinja::from(text.trim_start_matches(is_space))),
            "rstrip" => return Ok(Jinja::from(text.trim_end_matches(is_space))),
            "split" => {
                let words = text.split(is_space).filter(|word| !word.is_empty()).map(str::to_owned);
                return Ok(words.collect::<Vec<String>>().into());
            }
            _ => {}
        }
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args)
}

/// The `trim` filter.
pub fn trim(value: &Jinja, characters: Option<String>) -> Result<String, Error> {
    let text = str_of(value)?;
    Ok(match characters {
        None => text.trim_matches(is_space).to_owned(),
        Some(set) => text.trim_matches(|character| set.contains(character)).to_owned(),
    })
}

/// The `join` filter.
pub fn join(value: &Jinja, separator: Option<String>, attribute: Option<String>) -> Result<String, Error> {
    if attribute.is_some() {
        return Err(Error::new(ErrorKind::InvalidOperation, "join by an attribute is not supported"));
    }
    let texts: Result<Vec<String>, Error> = value.try_iter()?.map(|item| str_of(&item)).collect();
    Ok(texts?.join(separator.as_deref().unwrap_or_default()))
}

/// The `sequence` test: whatever has a length and items, text and maps too.
pub fn is_sequence(value: &Jinja) -> bool {
    matches!(value.kind(), ValueKind::Undefined | ValueKind::Seq | ValueKind::Map | ValueKind::String)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected values are CPython's.
    #[test]
    fn days_are_written_as_python_writes_them() {
        let of = |ms: u64, format: &str| Day::of_unix_ms(ms).format(format);
        let all = "%Y-%m-%d %y %j %b %B %a %A %e %-d %F %D %w %%";
        let cases = [
            (0, "1970-01-01 70 001 Jan January Thu Thursday  1 1 1970-01-01 01/01/70 4 %"),
            (951_782_400_000, "2000-02-29 00 060 Feb February Tue Tuesday 29 29 2000-02-29 02/29/00 2 %"),
            (1_709_251_199_999, "2024-02-29 24 060 Feb February Thu Thursday 29 29 2024-02-29 02/29/24 4 %"),
            (1_735_603_200_000, "2024-12-31 24 366 Dec December Tue Tuesday 31 31 2024-12-31 12/31/24 2 %"),
            (4_102_444_800_000, "2100-01-01 00 001 Jan January Fri Friday  1 1 2100-01-01 01/01/00 5 %"),
        ];
        for (ms, expected) in cases {
            assert_eq!(of(ms, all).as_deref(), Some(expected));
        }
        for changing in ["%H", "%M:%S", "%c", "%-I", "%", "%Q"] {
            assert_eq!(of(0, changing), None, "{changing}");
        }
    }

    #[test]
    fn values_are_printed_as_python_prints_them() {
        let json: serde_json::Value = serde_json::from_str(
            r#"{"a": [1, 2.0, null, true, "it's", "\"", "'\"", "\n\u001b\u00a0é"], "b": {}}"#,
        )
        .expect("valid");
        let value = Jinja::from(minijinja::value::Serde(&json));
        let expected = r#"{'a': [1, 2.0, None, True, "it's", '"', '\'"', '\n\x1b\xa0é'], 'b': {}}"#;
        assert_eq!(str_of(&value).expect("it has one"), expected);
        assert_eq!(str_of(&Jinja::from("it's")).expect("it has one"), "it's");
        assert_eq!(str_of(&Jinja::UNDEFINED).expect("it has one"), "");
    }
}
