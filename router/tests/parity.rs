//! Our token ids are the engines' for every request of the suite that needs no
//! model from elsewhere: the part of `make parity` that runs in every test.
#![allow(clippy::unwrap_used, clippy::panic)] // A test reports by failing.

#[path = "../examples/parity/compare.rs"]
mod compare;

use std::path::Path;

/// Cases B10, B15 and B16: texts of special tokens in what users say, and what
/// begins a prompt, are among the bodies. Refusals are few and named; a case that moves from equal to refused shows.
#[test]
fn ids_are_those_of_the_engines_or_there_are_none() {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/tokenizer");
    for engine in compare::ENGINES {
        let row = compare::compare("fixture", &fixture, engine).unwrap();
        assert_eq!(row.different, Vec::<String>::new(), "{}", engine.1);
        let refused: usize = row.refused.values().map(Vec::len).sum();
        assert!(refused <= 12, "{}: {:?}", engine.1, row.refused);
        assert!(row.equal > 190, "{}: {}", engine.1, row.equal);
    }
}
