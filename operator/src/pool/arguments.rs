//! What a container's command line and environment say of the engine in it.
//! Pure.
//!
//! A command line is the weakest evidence there is: engines may overrule it.
//! What it does not say stays unknown; no engine's default is assumed.

use k8s_openapi::api::core::v1::Container;
use kvrouter_crds::config::Engine;

use super::build::SEED_VARIABLE;

/// Flags that name the page, dashes and underscores being the same.
const PAGE_FLAGS: &[&str] = &["--block-size", "--page-size"];
/// vLLM's connectors to caches that several engines share, and in which blocks are
/// found by their hashes. LMCache's has several suffixes.
const SHARED_CACHES: &[&str] = &["MooncakeStoreConnector", "LMCacheConnector"];
/// Options of a shell after which a command follows as one word.
const SHELL_OPTIONS: &[&str] = &["-c", "-ec", "-lc", "-xc", "-exc", "-euc", "-euxc", "-uc"];

/// Tokens per page by the last flag that names it; none where there is no such
/// flag or it is no number.
pub fn page_size(container: &Container) -> Option<u32> {
    let words = words(container);
    let mut found = None;
    for (at, word) in words.iter().enumerate() {
        let (flag, inline) =
            word.split_once('=').map_or((word.as_str(), None), |(flag, value)| (flag, Some(value)));
        if PAGE_FLAGS.contains(&flag.replace('_', "-").as_str()) {
            let value = inline.or(words.get(at + 1).map(String::as_str));
            found = Some(value.and_then(|value| value.parse().ok()).filter(|page| *page != 0));
        }
    }
    found.flatten()
}

/// The engine by the words of the command or the image; `Auto` for neither or both.
pub fn engine(container: &Container) -> Engine {
    let words = words(container);
    let image = container.image.iter().map(String::as_str);
    let said = |engine: &str| {
        words.iter().map(String::as_str).chain(image.clone()).any(|word| word.contains(engine))
    };
    match (said("vllm"), said("sglang")) {
        (true, false) => Engine::VLLM,
        (false, true) => Engine::SGLang,
        _ => Engine::Auto,
    }
}

/// The connector to a cache that is shared with other engines; none where the
/// command names none.
pub fn shared_cache(container: &Container) -> Option<&'static str> {
    let words = words(container);
    SHARED_CACHES.iter().copied().find(|name| words.iter().any(|word| word.contains(name)))
}

/// What a container says of its hash seed.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Seed {
    /// It is this one.
    Fixed(String),
    /// Each process has another one.
    Missing,
    /// It comes from an object that cannot be read.
    Elsewhere,
}

/// The hash seed of a container. One that a command sets counts: it is what
/// Python sees.
pub fn seed(container: &Container) -> Seed {
    let assigned = words(container)
        .iter()
        .rev()
        .find_map(|word| word.strip_prefix("PYTHONHASHSEED=").map(str::to_owned));
    let variable = container.env.iter().flatten().rev().find(|variable| variable.name == SEED_VARIABLE);
    let value = match (assigned, variable) {
        (Some(value), _) => value,
        (None, Some(variable)) if variable.value_from.is_some() => return Seed::Elsewhere,
        (None, Some(variable)) => variable.value.clone().unwrap_or_default(),
        (None, None) if container.env_from.as_ref().is_some_and(|sources| !sources.is_empty()) => {
            return Seed::Elsewhere;
        }
        (None, None) => return Seed::Missing,
    };
    let is_fixed = value.parse::<u32>().is_ok();
    if is_fixed { Seed::Fixed(value) } else { Seed::Missing }
}

/// All words of the command line, in order: variables are replaced as far as
/// they are known, and a command that a shell gets as one word is taken apart.
fn words(container: &Container) -> Vec<String> {
    let line: Vec<String> = container
        .command
        .iter()
        .flatten()
        .chain(container.args.iter().flatten())
        .map(|word| expand(word, container, Dollar::Kubelet))
        .collect();
    let mut words = Vec::new();
    for (at, word) in line.iter().enumerate() {
        let is_script =
            at.checked_sub(1).is_some_and(|before| SHELL_OPTIONS.contains(&line[before].as_str()));
        if is_script {
            words.extend(shell_words(&expand(word, container, Dollar::Shell)));
        } else {
            words.push(word.clone());
        }
    }
    words
}

/// Whose way of naming variables.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Dollar {
    /// `$(VAR)`; `$$` is a dollar sign.
    Kubelet,
    /// `$VAR` and `${VAR}`.
    Shell,
}

/// Replaces variables that the container's environment names with a value; all
/// others stay as they are, so that they are no numbers.
fn expand(text: &str, container: &Container, dollar: Dollar) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find('$') {
        out.push_str(&rest[..at]);
        let after = &rest[at + 1..];
        if dollar == Dollar::Kubelet && after.starts_with('$') {
            out.push('$');
            rest = &after[1..];
            continue;
        }
        match variable_at(after, dollar).and_then(|(name, length)| Some((value_of(container, name)?, length)))
        {
            Some((value, length)) => {
                out.push_str(value);
                rest = &after[length..];
            }
            None => {
                out.push('$');
                rest = after;
            }
        }
    }
    out + rest
}

/// The variable that begins here, and how much of the text names it.
fn variable_at(after: &str, dollar: Dollar) -> Option<(&str, usize)> {
    let bracketed = |open: char, close: char| {
        let inside = after.strip_prefix(open)?;
        let end = inside.find(close)?;
        Some((&inside[..end], end + 2))
    };
    match dollar {
        Dollar::Kubelet => bracketed('(', ')'),
        Dollar::Shell => bracketed('{', '}').or_else(|| {
            let is_end = |character: char| !character.is_ascii_alphanumeric() && character != '_';
            let end = after.find(is_end).unwrap_or(after.len());
            (end != 0).then(|| (&after[..end], end))
        }),
    }
}

fn value_of<'a>(container: &'a Container, name: &str) -> Option<&'a str> {
    let variable = container.env.iter().flatten().rev().find(|variable| variable.name == name)?;
    variable.value.as_deref()
}

/// The words of a shell command, without quotes. Comments and substitutions are
/// words like any other.
fn shell_words(script: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut word = String::new();
    let mut quote = None;
    let mut characters = script.chars();
    while let Some(character) = characters.next() {
        match (quote, character) {
            (Some(open), _) if character == open => quote = None,
            (Some('\''), _) => word.push(character),
            (_, '\\') => match characters.next() {
                Some('\n') | None => {}
                Some(escaped) => word.push(escaped),
            },
            (Some(_), _) => word.push(character),
            (None, '"' | '\'') => quote = Some(character),
            (None, ';' | '&' | '|' | '(' | ')') => words.push(std::mem::take(&mut word)),
            (None, _) if character.is_whitespace() => words.push(std::mem::take(&mut word)),
            (None, _) => word.push(character),
        }
    }
    words.push(word);
    words.retain(|word| !word.is_empty());
    words
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::{EnvFromSource, EnvVar, EnvVarSource};

    use super::*;

    fn container(command: &[&str], env: &[(&str, &str)]) -> Container {
        let variable = |(name, value): &(&str, &str)| EnvVar {
            name: (*name).to_owned(),
            value: (*value != "@ref").then(|| (*value).to_owned()),
            value_from: (*value == "@ref").then(EnvVarSource::default),
        };
        Container {
            command: Some(command.iter().map(|word| (*word).to_owned()).collect()),
            env: Some(env.iter().map(variable).collect()),
            ..Default::default()
        }
    }

    #[track_caller]
    fn check_page(why: &str, command: &[&str], env: &[(&str, &str)], expected: Option<u32>) {
        assert_eq!(page_size(&container(command, env)), expected, "{why}");
    }

    #[test]
    fn the_last_flag_that_names_the_page_wins() {
        check_page("no flag is no default", &["vllm", "serve"], &[], None);
        check_page("two words", &["vllm", "--block-size", "64"], &[], Some(64));
        check_page("one word", &["vllm", "--block-size=64"], &[], Some(64));
        check_page("SGLang's", &["python", "-m", "sglang.launch_server", "--page-size", "32"], &[], Some(32));
        check_page("underscores", &["vllm", "--block_size=8"], &[], Some(8));
        check_page("the last wins", &["vllm", "--block-size=8", "--block-size", "16"], &[], Some(16));
        check_page(
            "an unreadable last one too",
            &["vllm", "--block-size=8", "--block-size", "$(X)"],
            &[],
            None,
        );
        check_page("nothing after it", &["vllm", "--block-size"], &[], None);
        check_page("no page", &["vllm", "--block-size=0"], &[], None);
        check_page("a longer flag", &["vllm", "--block-size-x=8"], &[], None);
        check_page("a variable", &["vllm", "--block-size=$(PAGE)"], &[("PAGE", "64")], Some(64));
        check_page("by reference", &["vllm", "--block-size=$(PAGE)"], &[("PAGE", "@ref")], None);
        check_page("an escaped dollar", &["vllm", "--block-size=$$(PAGE)"], &[("PAGE", "64")], None);
        check_page("a shell", &["sh", "-c", "exec vllm serve m --block-size 64 --x"], &[], Some(64));
        check_page("quotes", &["bash", "-lc", "vllm serve 'a b' --block-size=\"64\""], &[], Some(64));
        check_page("a line that goes on", &["sh", "-c", "vllm serve m \\\n  --block-size 64"], &[], Some(64));
        check_page("a shell's variable", &["sh", "-c", "vllm --block-size ${P}"], &[("P", "64")], Some(64));
        check_page("a bare one", &["sh", "-c", "vllm --block-size $P;"], &[("P", "64")], Some(64));
        check_page("of the shell itself", &["sh", "-c", "P=8; vllm --block-size $P"], &[], None);
    }

    #[track_caller]
    fn check_seed(why: &str, command: &[&str], env: &[(&str, &str)], expected: Seed) {
        assert_eq!(seed(&container(command, env)), expected, "{why}");
    }

    #[test]
    fn the_seed_is_what_python_sees() {
        let fixed = |value: &str| Seed::Fixed(value.to_owned());
        check_seed("absent", &["vllm"], &[], Seed::Missing);
        check_seed("set", &["vllm"], &[("PYTHONHASHSEED", "0")], fixed("0"));
        check_seed("leading zeros are another seed", &["vllm"], &[("PYTHONHASHSEED", "00")], fixed("00"));
        check_seed("random", &["vllm"], &[("PYTHONHASHSEED", "random")], Seed::Missing);
        check_seed("empty", &["vllm"], &[("PYTHONHASHSEED", "")], Seed::Missing);
        check_seed("by reference", &["vllm"], &[("PYTHONHASHSEED", "@ref")], Seed::Elsewhere);
        check_seed("in a script", &["sh", "-c", "PYTHONHASHSEED=7 vllm serve"], &[], fixed("7"));
        check_seed("env", &["env", "PYTHONHASHSEED=7", "vllm"], &[("PYTHONHASHSEED", "0")], fixed("7"));
        let mut from_map = container(&["vllm"], &[]);
        from_map.env_from = Some(vec![EnvFromSource::default()]);
        assert_eq!(seed(&from_map), Seed::Elsewhere, "a whole ConfigMap may hold it");
    }

    #[test]
    fn the_engine_is_what_the_command_or_the_image_says() {
        let of = |command: &[&str], image: &str| {
            engine(&Container { image: Some(image.to_owned()), ..container(command, &[]) })
        };
        assert_eq!(of(&["vllm", "serve"], "x"), Engine::VLLM);
        assert_eq!(of(&["serve"], "lmsysorg/sglang:v0.5.20"), Engine::SGLang);
        assert_eq!(of(&["serve"], "x"), Engine::Auto);
        assert_eq!(of(&["vllm"], "sglang"), Engine::Auto, "both is neither");
    }
}
