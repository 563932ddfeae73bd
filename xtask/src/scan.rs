//! Reads Rust source as far as `tidy` needs it: comments apart from code, functions, mentioned paths.
//!
//! A scanner, not a parser. It knows strings, characters, lifetimes, comments and brackets, and takes the
//! rest as it comes; source that the compiler refuses may be misread, and no rule depends on such source.

/// One source file, split in two texts of the same shape: every character stands at its line and column in
/// one of them and is a blank in the other.
pub(crate) struct Source {
    /// Everything but comments; what stands inside string and character literals is blank.
    pub(crate) code: String,
    /// The comments alone, with their slashes.
    pub(crate) comments: String,
}

/// A function with a body.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Function {
    pub(crate) name: String,
    /// The line of the word `fn`, from 1.
    pub(crate) line: usize,
    /// Lines from the word `fn` to the closing brace, both counted.
    pub(crate) length: usize,
}

/// What the next characters belong to.
#[derive(Clone, Copy)]
enum Kind {
    Code,
    Comment,
    /// Inside a literal: in neither text.
    Literal,
}

impl Source {
    pub(crate) fn new(text: &str) -> Self {
        let chars: Vec<char> = text.chars().collect();
        let mut source = Self { code: String::new(), comments: String::new() };
        let mut at = 0;
        while at < chars.len() {
            let (kind, length) = next_piece(&chars, at);
            for &char in &chars[at..at + length] {
                source.push(kind, char);
            }
            at += length;
        }
        source
    }

    fn push(&mut self, kind: Kind, char: char) {
        let blank = if char == '\n' { '\n' } else { ' ' };
        self.code.push(if matches!(kind, Kind::Code) { char } else { blank });
        self.comments.push(if matches!(kind, Kind::Comment) { char } else { blank });
    }
}

/// The kind and length of the piece that starts at `at`; a piece of code is one character long.
fn next_piece(chars: &[char], at: usize) -> (Kind, usize) {
    let rest = &chars[at..];
    // The `r` and the quote of `br"` or `cr#"` are not part of the word before them.
    let starts_word = at == 0 || !is_word(chars[at - 1]);
    match rest {
        ['/', '/', ..] => (Kind::Comment, rest.iter().position(|&char| char == '\n').unwrap_or(rest.len())),
        ['/', '*', ..] => (Kind::Comment, block_comment(rest)),
        ['"', ..] => (Kind::Literal, quoted(rest, '"')),
        ['r', '"' | '#', ..] if starts_word => raw_string(rest, 1),
        ['b' | 'c', 'r', '"' | '#', ..] if starts_word => raw_string(rest, 2),
        // A quote, something, a quote is a character; anything else behind a quote is a lifetime.
        ['\'', '\\', ..] | ['\'', _, '\'', ..] => (Kind::Literal, quoted(rest, '\'')),
        _ => (Kind::Code, 1),
    }
}

/// Length of a block comment; they nest.
fn block_comment(rest: &[char]) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at < rest.len() {
        match rest[at..] {
            ['/', '*', ..] => (depth, at) = (depth + 1, at + 2),
            ['*', '/', ..] => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            break;
        }
    }
    at
}

/// Length of a literal in quotes, with backslashes that escape.
fn quoted(rest: &[char], quote: char) -> usize {
    let mut at = 1;
    while at < rest.len() && rest[at] != quote {
        at += if rest[at] == '\\' { 2 } else { 1 };
    }
    (at + 1).min(rest.len())
}

/// A raw string whose hashes or quote start at `prefix`, or the code `r` of a raw identifier such as `r#fn`.
fn raw_string(rest: &[char], prefix: usize) -> (Kind, usize) {
    let hashes = rest[prefix..].iter().take_while(|&&char| char == '#').count();
    let start = prefix + hashes + 1;
    if rest.get(start - 1) != Some(&'"') {
        return (Kind::Code, 1);
    }
    let ends = |at: usize| {
        rest[at] == '"' && rest[at + 1..].iter().take(hashes).filter(|&&c| c == '#').count() == hashes
    };
    let end = (start..rest.len()).find(|&at| ends(at));
    (Kind::Literal, end.map_or(rest.len(), |end| end + 1 + hashes))
}

pub(crate) fn is_word(char: char) -> bool {
    char.is_alphanumeric() || char == '_'
}

/// The line, from 1, of a byte offset.
pub(crate) fn line_of(text: &str, offset: usize) -> usize {
    text[..offset].matches('\n').count() + 1
}

/// Byte offsets at which `word` stands in `code`, not as a part of a longer word.
pub(crate) fn words<'a>(code: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    code.match_indices(word).map(|(offset, _)| offset).filter(move |&offset| {
        !code[..offset].ends_with(is_word) && !code[offset + word.len()..].starts_with(is_word)
    })
}

/// All functions with a body, in the order in which they begin; one inside another is listed too.
pub(crate) fn functions(code: &str) -> Vec<Function> {
    words(code, "fn").filter_map(|offset| function_at(code, offset)).collect()
}

fn function_at(code: &str, offset: usize) -> Option<Function> {
    let behind = code[offset + 2..].trim_start();
    let name: String = behind.chars().take_while(|&char| is_word(char)).collect();
    // `fn(u8) -> u8` is a type.
    if name.is_empty() {
        return None;
    }
    let end = offset + body_end(&code[offset..])?;
    let line = line_of(code, offset);
    Some(Function { name, line, length: line_of(code, end) - line + 1 })
}

/// The offset of the brace that closes the body; none if there is no body.
fn body_end(code: &str) -> Option<usize> {
    let (mut braces, mut brackets) = (0, 0);
    for (at, char) in code.char_indices() {
        match char {
            '(' | '[' => brackets += 1,
            ')' | ']' => brackets -= 1,
            ';' if braces == 0 && brackets == 0 => return None,
            '{' if brackets == 0 || braces > 0 => braces += 1,
            '}' if braces > 0 => {
                braces -= 1;
                if braces == 0 {
                    return Some(at);
                }
            }
            _ => {}
        }
    }
    None
}

/// Every attribute's text between `#[` or `#![` and its closing bracket, with its offset.
pub(crate) fn attributes(code: &str) -> impl Iterator<Item = (usize, &str)> {
    code.match_indices('#').filter_map(|(offset, _)| {
        let inner = code[offset + 1..].trim_start_matches('!').strip_prefix('[')?;
        let mut depth = 1;
        let end = inner.find(|char| {
            depth += i32::from(char == '[') - i32::from(char == ']');
            depth == 0
        })?;
        Some((offset, &inner[..end]))
    })
}

/// The offset of the first mention of `path`, written out (`std::fs::read`) or in a `use` with braces
/// (`use std::{fs, io}`). `path` is at least one word; a longer path that begins with it is a mention.
pub(crate) fn mention(code: &str, path: &str) -> Option<usize> {
    let (first, rest) = path.split_once("::").unwrap_or((path, ""));
    words(code, first).find(|&offset| rest.is_empty() || leads_to(&code[offset + first.len()..], rest))
}

/// Whether `code`, behind a path's beginning, goes on with `::path` or with `::{..., path, ...}`.
fn leads_to(code: &str, path: &str) -> bool {
    let Some(behind) = code.trim_start().strip_prefix("::") else { return false };
    let behind = behind.trim_start();
    let (first, rest) = path.split_once("::").unwrap_or((path, ""));
    let matches = |item: &str| {
        let item = item.trim_start();
        let Some(tail) = item.strip_prefix(first) else { return false };
        !tail.starts_with(is_word) && (rest.is_empty() || leads_to(tail, rest))
    };
    match behind.strip_prefix('{') {
        Some(group) => group_items(group).any(matches),
        None => matches(behind),
    }
}

/// The items of a `use` group whose opening brace is already read, split at the commas that belong to it.
fn group_items(group: &str) -> impl Iterator<Item = &str> {
    let mut depth = 0;
    let end = group.find(|char| {
        depth += i32::from(char == '{') - i32::from(char == '}');
        depth < 0
    });
    let mut depth = 0;
    group[..end.unwrap_or(group.len())].split(move |char| {
        depth += i32::from(char == '{') - i32::from(char == '}');
        char == ',' && depth == 0
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check_code(why: &str, text: &str, expected: &str) {
        let code: Vec<String> = Source::new(text).code.split_whitespace().map(str::to_owned).collect();
        assert_eq!(code.join(" "), expected, "{why}");
    }

    #[test]
    fn tells_code_from_comments_and_literals() {
        check_code("line comment", "a // b\nc", "a c");
        check_code("doc comment", "//! b\n/// d\nc", "c");
        check_code("nested block comment", "a /* b /* c */ d */ e", "a e");
        check_code("slashes in a string", r#"a "b // c" d"#, "a d");
        check_code("an escaped quote", r#"a "b \" c" d"#, "a d");
        check_code("an escaped backslash before the quote", r#"a "b \\" c"#, "a c");
        check_code("a raw string", r##"a r#"b " c"# d"##, "a d");
        check_code("a raw string without hashes", r#"a r"b \" c"#, "a c");
        check_code("byte and C strings", r##"a b"b" br#"b"# c"b" d"##, "a b c d");
        check_code("a raw identifier", "r#fn a", "r#fn a");
        check_code("a word that ends in r", r#"for"b" a"#, "for a");
        check_code("a character that is a quote", r#"a '"' b '\'' c '{' d"#, "a b c d");
        check_code("an escaped character", r"a '\u{7d}' b", "a b");
        check_code("a lifetime", "&'a str, 'b: loop {}", "&'a str, 'b: loop {}");
        check_code("an unfinished string", "a \"b", "a");
    }

    #[test]
    fn keeps_lines_and_columns() {
        let text = "a \"x\n\" // é\nb /* c\n */ d 'é'";
        let source = Source::new(text);
        let shape = |text: &str| text.lines().map(|line| line.chars().count()).collect::<Vec<_>>();
        assert_eq!(shape(&source.code), shape(text));
        assert_eq!(shape(&source.comments), shape(text));
        assert_eq!(source.comments, "    \n  // é\n  /* c\n */      ");
    }

    #[track_caller]
    fn check_functions(why: &str, text: &str, expected: &[(&str, usize, usize)]) {
        let found = functions(&Source::new(text).code);
        let found: Vec<_> = found.iter().map(|f| (f.name.as_str(), f.line, f.length)).collect();
        assert_eq!(found, expected, "{why}");
    }

    #[test]
    fn measures_functions() {
        check_functions("one line", "fn a() {}", &[("a", 1, 1)]);
        check_functions("from the word to the brace", "\npub async fn a()\n{\n}\n", &[("a", 2, 3)]);
        check_functions("no body", "trait T { fn a(&self) -> [u8; 2]; }", &[]);
        check_functions("a function type", "struct S { f: fn(u8) }\nfn a() {}", &[("a", 2, 1)]);
        check_functions("a brace in a literal", "fn a() {\n'}'; \"}\"; // }\n}", &[("a", 1, 3)]);
        check_functions("one in another", "fn a() {\nfn b() {}\n}", &[("a", 1, 3), ("b", 2, 1)]);
        check_functions("a block among the bounds", "fn a<T>() where [(); { 1 }]: {\n}", &[("a", 1, 2)]);
        check_functions("a word that ends in fn", "let myfn = 1; {}", &[]);
    }

    #[track_caller]
    fn check_mention(why: &str, code: &str, path: &str, expected: bool) {
        assert_eq!(mention(code, path).is_some(), expected, "{why}");
    }

    #[test]
    fn finds_mentioned_paths() {
        check_mention("written out", "std::fs::read(x)", "std::fs", true);
        check_mention("in a use", "use std::fs;", "std::fs", true);
        check_mention("in a group", "use std::{io, fs as files};", "std::fs", true);
        check_mention(
            "deep in groups",
            "use std::{io::{self, Read}, time::{Duration, Instant}};",
            "std::time::Instant",
            true,
        );
        check_mention(
            "a neighbour in the group",
            "use std::{io, time::{Duration}};",
            "std::time::Instant",
            false,
        );
        check_mention(
            "the same word under another path",
            "use std::{io::{fs}, fmt}; my::fs()",
            "std::fs",
            false,
        );
        check_mention("a longer word", "use std::fs2; mystd::fs", "std::fs", false);
        check_mention("one word", "#[tokio::main]", "tokio", true);
        check_mention("one word inside another", "tokio_util::x", "tokio", false);
    }

    #[test]
    fn finds_attributes() {
        let code = "#![allow(x)]\n#[cfg_attr(a, b([c]))]\nfn f() { a[1] # }";
        let found: Vec<&str> = attributes(code).map(|(_, text)| text).collect();
        assert_eq!(found, ["allow(x)", "cfg_attr(a, b([c]))"]);
    }
}
