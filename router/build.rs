//! Embeds the page of the lab and the explorer, where it was built.
//!
//! `make web` builds it into web/dist with Node. Without it everything else
//! still builds, and the page says what is missing.

#![allow(clippy::disallowed_methods, reason = "cargo talks to build scripts through variables")]

use std::path::{Path, PathBuf};
use std::{env, fs, io};

fn main() -> io::Result<()> {
    let folder = env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default();
    let built = Path::new(&folder).join("web/dist");
    // The folder is always there, with a .gitignore in it: one that comes and goes
    // would make cargo build the crate anew every time.
    println!("cargo::rerun-if-changed=web/dist");
    let files = [
        ("DOCUMENT", "index.html"),
        ("SCRIPT", "page.js"),
        ("STYLE", "page.css"),
        ("LICENCES", "licences.txt"),
    ];
    let complete = files.iter().all(|(_, name)| built.join(name).is_file());
    let mut source = String::new();
    for (constant, name) in files {
        let text = if complete { fs::read_to_string(built.join(name))? } else { String::new() };
        source += &format!("const {constant}: &str = {text:?};\n");
    }
    source += &format!("const BUILT: bool = {complete};\n");
    fs::write(PathBuf::from(env::var_os("OUT_DIR").unwrap_or_default()).join("page.rs"), source)
}
