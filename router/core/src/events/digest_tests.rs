//! Tests of `digest`: every rule by name, recorded engines, random trees of pages.
//!
//! Every batch is checked twice, whatever the test is about: its deltas applied to a set, and the snapshot applied
//! to nothing. Both are compared with expected prefixes or with the oracle in `digest_oracle.rs`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc;
use std::time::Duration;

use proptest::prelude::*;
use proptest::sample::{Index, select};
use serde_json::Value;

use self::oracle::{Oracle, block_of};
use super::*;
use crate::blocks::{IdentitySeed, chain};
use crate::events::captures;
use crate::events::wire::{WireError, decode};

#[path = "digest_oracle.rs"]
mod oracle;

/// Held blocks, and the hash that each follows.
type View = BTreeMap<(NamespaceId, BlockHash, Tier), BlockHash>;

/// Tokens per block in the tables of rules.
const BLOCK: u32 = 4;
/// Three blocks of text.
const TEXT: &[u32] = &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12];

fn apply_to(view: &mut View, deltas: &[Delta]) {
    for delta in deltas {
        match delta {
            Delta::Cleared => view.clear(),
            Delta::Stored { namespace, parent, hashes, tier } => {
                assert!(!hashes.is_empty(), "a store names blocks");
                let mut before = *parent;
                for hash in hashes {
                    let known = view.insert((*namespace, *hash, *tier), before);
                    assert_eq!(known, None, "what is held is not stored again: {hash:?}");
                    before = *hash;
                }
            }
            Delta::Removed { namespace, hashes, tier } => {
                assert!(!hashes.is_empty(), "a removal names blocks");
                for hash in hashes {
                    let known = view.remove(&(*namespace, *hash, *tier));
                    assert!(known.is_some(), "only what is held is removed: {hash:?}");
                }
            }
        }
    }
}

/// A digester, and the view of somebody who reads its deltas.
struct Followed {
    digester: Digester,
    view: View,
}

impl Followed {
    fn new(size: u32) -> Self {
        let digester = Digester::new(Identity::default(), BlockSize::new(size).expect("not zero"));
        Self { digester, view: View::new() }
    }

    fn feed(&mut self, events: &[Event]) -> Vec<Delta> {
        let batch = Batch { timestamp: 0.0, events: events.to_vec(), rank: None };
        let deltas = self.digester.apply(&batch);
        apply_to(&mut self.view, &deltas);
        self.assert_snapshot_is_the_view();
        deltas
    }

    #[track_caller]
    fn assert_snapshot_is_the_view(&self) {
        let mut rebuilt = View::new();
        for delta in self.digester.snapshot() {
            if let Delta::Stored { namespace, parent, tier, .. } = &delta {
                let parent = (*namespace, *parent, *tier);
                let is_held = self.view.contains_key(&parent);
                assert!(!is_held || rebuilt.contains_key(&parent), "a child before its parent: {delta:?}");
            }
            apply_to(&mut rebuilt, &[delta]);
        }
        assert_eq!(rebuilt, self.view, "the snapshot differs from the deltas");
        let blocks: BTreeSet<_> = self.view.keys().map(|(namespace, hash, _)| (*namespace, *hash)).collect();
        assert_eq!(self.digester.block_count(), blocks.len(), "the count of blocks");
    }
}

// Rules, in blocks of four tokens.

/// A store; its page size follows from its arguments. Without tokens it is a tier update.
fn stored(parent: Option<u64>, hashes: &[u64], tokens: &[u32]) -> Stored {
    Stored {
        hashes: hashes.iter().copied().map(EngineHash::Int).collect(),
        parent: parent.map_or(Parent::Root, |hash| Parent::Page(EngineHash::Int(hash))),
        tokens: tokens.to_vec(),
        page: tokens.len().checked_div(hashes.len()).unwrap_or(0) as u32,
        adapter: None,
        salt: None,
        extra_keys: Vec::new(),
        tier: Tier::Device,
        group: None,
        kind: GroupKind::Main,
        paired: false,
        of_session: false,
    }
}

fn store(parent: Option<u64>, hashes: &[u64], tokens: &[u32]) -> Event {
    Event::Stored(stored(parent, hashes, tokens))
}

fn removed(hashes: &[u64]) -> Removed {
    Removed { hashes: hashes.iter().copied().map(EngineHash::Int).collect(), tier: Tier::Device, group: None }
}

fn remove(hashes: &[u64]) -> Event {
    Event::Removed(removed(hashes))
}

fn update(hashes: &[u64], tier: Tier) -> Event {
    Event::Stored(Stored { tier, ..stored(None, hashes, &[]) })
}

/// An event of this tag that could not be read.
fn unread(tag: &str) -> Event {
    Event::Rejected { removal: tag == "BlockRemoved", error: WireError::Missing { field: "block_hashes" } }
}

fn namespace(adapter: Option<&str>, salt: Option<&str>) -> Namespace {
    Namespace { adapter: adapter.map(Into::into), salt: salt.map(Into::into) }
}

/// A held block, by its whole prefix.
struct Held {
    namespace: Namespace,
    prefix: Vec<u32>,
    tier: Tier,
}

fn held(prefix: &[u32]) -> Held {
    Held { namespace: Namespace::default(), prefix: prefix.to_vec(), tier: Tier::Device }
}

/// The blocks that end at these positions of [`TEXT`].
fn text<const N: usize>(ends: [usize; N]) -> [Held; N] {
    ends.map(|end| held(&TEXT[..end]))
}

#[track_caller]
fn check(why: &str, events: &[Event], expected: &[Held]) -> Digester {
    let (identity, size) = (Identity::default(), BlockSize::new(BLOCK).expect("not zero"));
    let expected: View = expected
        .iter()
        .map(|Held { namespace, prefix, tier }| {
            let (block, base) = block_of(&identity, namespace, size, prefix);
            ((identity.id(namespace), block, *tier), base)
        })
        .collect();
    let mut followed = Followed::new(BLOCK);
    followed.feed(events);
    assert_eq!(followed.view, expected, "{why}");
    followed.digester
}

#[track_caller]
fn check_quality(why: &str, events: &[Event], expected: Quality) {
    let mut digester = Followed::new(BLOCK);
    digester.feed(events);
    assert_eq!(digester.digester.quality(), expected, "{why}");
}

/// A view of pages of four.
fn good() -> Quality {
    Quality { page: Some(4), ..Quality::default() }
}

/// Case G12: vLLM names one physical copy per removal.
#[test]
fn a_block_leaves_with_its_last_copy() {
    let rows = [
        ("S", 1, 0),
        ("SR", 0, 0),
        ("SSR", 1, 0),
        ("SSRR", 0, 0),
        ("SSRRR", 0, 1),
        ("RS", 1, 1),
        ("SRSR", 0, 0),
    ];
    for (order, held, unknown) in rows {
        let event = |step| if step == 'S' { store(None, &[1], &TEXT[..4]) } else { remove(&[1]) };
        let events: Vec<Event> = order.chars().map(event).collect();
        let digester = check(order, &events, &text([4])[..held]);
        assert_eq!(digester.counts().unknown, unknown, "{order}");
    }
}

#[test]
fn an_orphan_is_counted_and_never_chained_from_the_root() {
    let parent = || store(None, &[1], &TEXT[..4]);
    let child = || store(Some(1), &[2], &TEXT[4..8]);
    let grandchild = || store(Some(2), &[3], &TEXT[8..]);
    let orphans = |digester: Digester| (digester.counts().orphans, digester.quality().incomplete);
    assert_eq!(orphans(check("no parent", &[child()], &[])), (1, true));
    assert_eq!(orphans(check("no grandparent", &[child(), grandchild()], &[])), (2, true));
    assert_eq!(orphans(check("a late parent stands alone", &[child(), parent()], &text([4]))), (1, true));
    assert_eq!(
        orphans(check("the next store finds it", &[child(), parent(), child()], &text([4, 8]))),
        (1, true)
    );
    assert_eq!(orphans(check("a parent that left", &[parent(), remove(&[1]), child()], &[])), (1, true));
    assert_eq!(orphans(check("a family", &[parent(), child(), grandchild()], &text([4, 8, 12]))), (0, false));
}

#[test]
fn a_hole_ends_its_own_block_only() {
    let four = || store(None, &[1, 2, 3, 4], &TEXT[..8]);
    let first = || store(None, &[1], &TEXT[..2]);
    check("half a block is none", &[first()], &[]);
    check("two stores fill a block", &[first(), store(Some(1), &[2], &TEXT[2..4])], &text([4]));
    check("at the beginning", &[four(), remove(&[1])], &text([8]));
    check("at the end", &[four(), remove(&[4])], &text([4]));
    check("in both", &[four(), remove(&[2, 3])], &[]);
    check("a hole is filled again", &[four(), remove(&[1]), first()], &text([4, 8]));
    let other = || store(Some(1), &[5], &[90, 91]);
    check("a gone half still says where the next belongs", &[four(), remove(&[1]), other()], &text([8]));
    let both = [held(&TEXT[..4]), held(&TEXT[..8]), held(&[1, 2, 90, 91])];
    check("and completes both when it returns", &[four(), remove(&[1]), other(), first()], &both);
    check("a half that nothing needs is forgotten", &[first(), remove(&[1]), other()], &[]);
    check("pages of one", &[store(None, &[1, 2, 3, 4, 5], &TEXT[..5]), remove(&[5])], &text([4]));
}

#[test]
fn salts_and_adapters_keep_blocks_apart() {
    let salted = |salt: &str| Stored { salt: Some(salt.into()), ..stored(None, &[1], &TEXT[..4]) };
    let keyed = |adapter: Option<&str>, keys: &[&str]| {
        let extra_keys = vec![keys.iter().map(|key| ExtraKey::Text((*key).into())).collect()];
        Stored { adapter: adapter.map(Into::into), extra_keys, ..stored(None, &[1], &TEXT[..4]) }
    };
    let rows = [
        ("neither", keyed(None, &[]), namespace(None, None)),
        ("a salt as a field", salted("s"), namespace(None, Some("s"))),
        ("the same salt as a key", keyed(None, &["s"]), namespace(None, Some("s"))),
        ("another salt", salted("t"), namespace(None, Some("t"))),
        ("an empty salt", salted(""), namespace(None, Some(""))),
        ("an adapter", keyed(Some("a"), &[]), namespace(Some("a"), None)),
        ("an adapter and its key", keyed(Some("a"), &["a"]), namespace(Some("a"), None)),
        ("an adapter and a salt", keyed(Some("a"), &["a", "s"]), namespace(Some("a"), Some("s"))),
        ("a salt spelt like the adapter", keyed(Some("a"), &["a", "a"]), namespace(Some("a"), Some("a"))),
        ("a salt spelt like another adapter", keyed(None, &["a"]), namespace(None, Some("a"))),
    ];
    let (mut together, mut expected) = (Vec::new(), Vec::new());
    for (number, (why, stored, namespace)) in rows.into_iter().enumerate() {
        let held = || Held { namespace: namespace.clone(), ..held(&TEXT[..4]) };
        expected.push(held());
        together
            .push(Event::Stored(Stored { hashes: vec![EngineHash::Int(number as u64)], ..stored.clone() }));
        check(why, &[Event::Stored(stored)], &[held()]);
    }
    check("all at once", &together, &expected);
    let child = store(Some(1), &[2], &TEXT[4..8]);
    let inherited = text([4, 8]).map(|held| Held { namespace: namespace(None, Some("s")), ..held });
    check("children share their parent's", &[Event::Stored(salted("s")), child], &inherited);
    let extra_keys = vec![vec![ExtraKey::Text("a".into())]; 2];
    let adapted = Stored { adapter: Some("a".into()), extra_keys, ..stored(None, &[1, 2], &TEXT[..8]) };
    let inherited = text([4, 8]).map(|held| Held { namespace: namespace(Some("a"), None), ..held });
    check("the adapter's key is on every page", &[Event::Stored(adapted)], &inherited);
}

#[test]
fn media_end_the_text_for_all_that_follows() {
    let keyed = |parent, hashes: &[u64], tokens: &[u32], at: usize, key: ExtraKey| {
        let mut extra_keys = vec![Vec::new(); hashes.len()];
        extra_keys[at].push(key);
        Event::Stored(Stored { extra_keys, ..stored(parent, hashes, tokens) })
    };
    let media = |at| keyed(None, &[1, 2, 3], TEXT, at, ExtraKey::Media);
    check("on the first page", &[media(0)], &[]);
    check("on the second", &[media(1)], &text([4]));
    check("on the third", &[media(2)], &text([4, 8]));
    check("children", &[media(1), store(Some(2), &[4], &[7; 4]), store(Some(4), &[5], &[8; 4])], &text([4]));
    let sibling = store(Some(1), &[4], &TEXT[4..8]);
    check("a sibling is text", &[media(1), sibling], &text([4, 8]));
    check("embeddings", &[keyed(None, &[1, 2, 3], TEXT, 1, ExtraKey::Opaque)], &text([4]));
    let name = keyed(None, &[1, 2, 3], TEXT, 1, ExtraKey::Text("image".into()));
    check("a bare name, as vLLM sent before 0.20", &[name], &text([4]));
    let half = keyed(None, &[1, 2, 3, 4], &TEXT[..8], 1, ExtraKey::Media);
    check("in a block's second half", &[half], &[]);
    let later = keyed(Some(1), &[2], &TEXT[4..8], 0, ExtraKey::Text("s".into()));
    check("no salt begins below the root", &[store(None, &[1], &TEXT[..4]), later], &text([4]));
    let gone = check("they leave like others", &[media(1), remove(&[3, 2, 1])], &[]);
    assert_eq!((gone.counts().unknown, gone.counts().dropped), (0, 0));
}

#[test]
fn other_groups_mark_the_view_and_index_nothing() {
    let group = |kind, group| Stored { kind, group: Some(group), ..stored(None, &[1], &TEXT[..4]) };
    let main = || Event::Stored(group(GroupKind::Main, 1));
    let window = || Event::Stored(group(GroupKind::Other, 0));
    let gone = |group| Event::Removed(Removed { group: Some(group), ..removed(&[1]) });
    let sparse = Stored { tokens: TEXT.to_vec(), page: 4, ..group(GroupKind::Other, 0) };
    check("a window alone", &[window()], &[]);
    check("fewer hashes than pages", &[Event::Stored(sparse)], &[]);
    check("beside the main group", &[window(), main()], &text([4]));
    let digester = check("its removals touch nothing", &[window(), main(), gone(0), gone(0)], &text([4]));
    assert_eq!(digester.counts().unknown, 0, "they are no surprise either");
    check("the main group's do", &[window(), main(), gone(1)], &[]);
    check_quality("a window alone", &[window()], Quality { hybrid: true, ..Quality::default() });
    check_quality("both", &[main(), window()], Quality { hybrid: true, ..good() });
}

#[test]
fn a_block_stays_while_any_tier_holds_it() {
    let on_device = || Event::Stored(Stored { group: Some(0), ..stored(None, &[1], &TEXT[..4]) });
    let off = |tier, group| Event::Removed(Removed { tier, group, ..removed(&[1]) });
    let on = |tier| [Held { tier, ..held(&TEXT[..4]) }];
    let copied = || update(&[1], Tier::Host);
    check("the fastest tier counts", &[on_device(), copied()], &on(Tier::Device));
    let offloaded = || [on_device(), copied(), off(Tier::Device, Some(0))];
    check("the device copy goes", &offloaded(), &on(Tier::Host));
    let [first, second, third] = offloaded();
    check("then the host's", &[first, second, third, off(Tier::Host, None)], &[]);
    check("an unknown page is not placed", &[copied()], &[]);
    check_quality("but missed", &[copied()], Quality { incomplete: true, ..Quality::default() });
    check("a removal without a group matches", &[on_device(), off(Tier::Device, None)], &[]);
    for (why, other) in
        [("another group", off(Tier::Device, Some(1))), ("another tier", off(Tier::Host, Some(0)))]
    {
        assert_eq!(check(why, &[on_device(), other], &on(Tier::Device)).counts().unknown, 1, "{why}");
    }
    let halves = [store(None, &[1, 2], &TEXT[..4]), update(&[2], Tier::Disk), remove(&[2])];
    check("a block is as slow as its slowest page", &halves, &on(Tier::Disk));

    let mut followed = Followed::new(BLOCK);
    followed.feed(&[on_device(), copied()]);
    let deltas = followed.feed(&[off(Tier::Device, Some(0))]);
    let (namespace, parent) = (Identity::default().id(&Namespace::default()), BlockHash(0));
    let hashes = chain(parent, BlockSize::new(BLOCK).expect("not zero"), &TEXT[..4]);
    let stored = Delta::Stored { namespace, parent, hashes: hashes.clone(), tier: Tier::Host };
    let removed = Delta::Removed { namespace, hashes, tier: Tier::Device };
    assert_eq!(deltas, [stored, removed], "no reader sees the block gone in between");
}

#[test]
fn a_reused_hash_means_its_new_content() {
    let first = || store(None, &[1, 2], &TEXT[..8]);
    let again = || store(None, &[1], &[9; 4]);
    check("the old block is gone", &[first(), again()], &[held(&[9; 4]), held(&TEXT[..8])]);
    check("with its copies", &[first(), first(), again(), remove(&[1])], &text([8]));
    let halves = || store(None, &[1, 2], &TEXT[..4]);
    let half = || store(None, &[1], &[9; 2]);
    check("half a block takes it all", &[halves(), half()], &[]);
    let next = || store(Some(1), &[2], &TEXT[2..4]);
    check("the next page follows", &[halves(), half(), next()], &[held(&[9, 9, 3, 4])]);
    check("it fills no block of its old content", &[halves(), half(), update(&[2], Tier::Host)], &[]);
}

#[test]
fn a_page_whose_child_moved_away_is_forgotten_with_its_last_copy() {
    let moved = [store(None, &[1, 2], &TEXT[..4]), store(None, &[2], &[9; 2]), remove(&[1])];
    let mut followed = Followed::new(BLOCK);
    followed.feed(&moved);
    followed.feed(&[store(Some(1), &[3], &TEXT[2..4])]);
    assert_eq!(followed.digester.counts().orphans, 1, "page 1 is unknown");
}

/// SGLang up to 0.5.7 hashed a page without its prefix, so a page may come twice in one block.
#[test]
fn a_hash_that_comes_twice_in_a_block_ends() {
    let rows: [(Vec<u64>, Vec<u32>); 3] =
        [(vec![1, 1], vec![5, 6, 5, 6]), (vec![1, 2, 1, 3], vec![7, 8, 7, 9]), (vec![1; 4], vec![5; 4])];
    for (hashes, tokens) in rows {
        let (done, finished) = mpsc::channel();
        let (event, truth) = (store(None, &hashes, &tokens), held(&tokens));
        // An endless loop must fail, not hang.
        std::thread::spawn(move || {
            let mut followed = Followed::new(BLOCK);
            followed.feed(&[event]);
            done.send(followed.view).expect("somebody waits");
        });
        let view = finished.recv_timeout(Duration::from_secs(20)).expect("the digester loops, or panicked");
        let size = BlockSize::new(BLOCK).expect("not zero");
        let (block, _) = block_of(&Identity::default(), &truth.namespace, size, &truth.prefix);
        assert!(view.keys().all(|(_, hash, _)| *hash == block), "{hashes:?} claims what was never stored");
    }
}

#[test]
fn pages_that_do_not_divide_the_block_are_named() {
    for page in [32, 3, 17, 0] {
        let tokens: Vec<u32> = (0..96).collect();
        let mut followed = Followed::new(16);
        let deltas = followed.feed(&[Event::Stored(Stored { page, ..stored(None, &[1, 2, 3], &tokens) })]);
        assert!(deltas.is_empty(), "pages of {page}: {deltas:?}");
        let expected = Quality { page: Some(page), page_misfit: true, ..Quality::default() };
        assert_eq!(followed.digester.quality(), expected, "pages of {page}");
    }
    let mixed = [store(None, &[1], &TEXT[..2]), store(Some(1), &[2], &TEXT[2..6])];
    let digester = check("a page across the end of its block", &mixed, &[]);
    assert_eq!((digester.counts().dropped, digester.quality().incomplete), (1, true));
}

#[test]
fn a_clear_makes_a_lossy_view_whole() {
    let page = || store(None, &[1], &TEXT[..4]);
    let losses = || [page(), store(Some(9), &[2], &TEXT[..4]), unread("BlockRemoved"), Event::Cleared];
    check("nothing is left", &losses(), &[]);
    check_quality("and nothing is missed", &losses(), good());
    let [a, b, c, clear] = losses();
    check("what comes behind it counts", &[a, b, c, clear, page()], &text([4]));
    check("parents are forgotten", &[page(), Event::Cleared, store(Some(1), &[2], &TEXT[4..8])], &[]);
    let mut followed = Followed::new(BLOCK);
    assert_eq!(followed.feed(&losses()), [Delta::Cleared], "what was before it is not sent");
    assert_eq!(followed.digester.counts().cleared, 1);
}

#[test]
fn what_was_lost_is_told() {
    let page = || store(None, &[1], &TEXT[..4]);
    let (incomplete, lost_removal) = (true, true);
    check_quality("nothing", &[page(), remove(&[1]), remove(&[1])], good());
    check_quality("an unknown event is harmless", &[page(), Event::Unknown], good());
    check_quality("a store", &[page(), unread("BlockStored")], Quality { incomplete, ..good() });
    check_quality(
        "a removal",
        &[unread("BlockRemoved"), page()],
        Quality { incomplete, lost_removal, ..good() },
    );
    check_quality(
        "a removal, then a store",
        &[unread("BlockRemoved"), unread("BlockStored"), page()],
        Quality { incomplete, lost_removal, ..good() },
    );
    let pairs = Event::Stored(Stored { paired: true, ..stored(None, &[1], &TEXT[..4]) });
    check_quality("pairs are told", &[pairs], Quality { paired: true, ..good() });
    let digester =
        check("what is known stays", &[page(), unread("BlockRemoved"), unread("BlockStored")], &text([4]));
    assert_eq!((digester.counts().rejected, digester.counts().stored), (2, 1));
}

#[test]
fn a_reset_forgets_all_but_counts_and_page() {
    let mut followed = Followed::new(BLOCK);
    followed.feed(&[store(None, &[1, 2], &TEXT[..8]), unread("BlockRemoved")]);
    followed.digester.mark_incomplete();
    followed.digester.reset();
    followed.view.clear();
    followed.feed(&[store(Some(1), &[3], &TEXT[4..8])]);
    assert_eq!(
        followed.digester.quality(),
        Quality { incomplete: true, ..good() },
        "an orphan of the new life"
    );
    let expected = Counts { stored: 3, orphans: 1, rejected: 1, ..Counts::default() };
    assert_eq!(followed.digester.counts(), expected);
}

#[test]
fn equal_views_have_equal_snapshots() {
    let salted = || Event::Stored(Stored { salt: Some("s".into()), ..stored(None, &[7], &TEXT[..4]) });
    let (trunk, branch) = (|| store(None, &[1, 2], &TEXT[..8]), || store(Some(1), &[3], &[9; 4]));
    let orders =
        [[trunk(), branch(), salted()], [salted(), trunk(), branch()], [trunk(), salted(), branch()]];
    let snapshots = orders.map(|events| {
        let mut followed = Followed::new(BLOCK);
        followed.feed(&events);
        followed.digester.snapshot()
    });
    assert_eq!(snapshots[0], snapshots[1]);
    assert_eq!(snapshots[0], snapshots[2]);
}

#[test]
fn a_seed_keys_the_first_block() {
    let size = BlockSize::new(BLOCK).expect("not zero");
    let identity = Identity::new(IdentitySeed::new(b"secret"));
    let (block, parent) = block_of(&identity, &Namespace::default(), size, &TEXT[..4]);
    let batch = Batch { timestamp: 0.0, events: vec![store(None, &[1], &TEXT[..4])], rank: None };
    let namespace = identity.id(&Namespace::default());
    let expected = Delta::Stored { namespace, parent, hashes: vec![block], tier: Tier::Device };
    assert_eq!(Digester::new(identity, size).apply(&batch), [expected]);
    assert_ne!(parent, BlockHash(0), "a public root");
}

#[test]
fn namespaces_beyond_the_limit_are_dropped_and_counted() {
    let salted = |number: usize| {
        let hashes = vec![EngineHash::Int(number as u64)];
        Event::Stored(Stored {
            salt: Some(number.to_string().into()),
            hashes,
            ..stored(None, &[1], &TEXT[..4])
        })
    };
    let mut digester = Digester::new(Identity::default(), BlockSize::new(BLOCK).expect("not zero"));
    let events = (0..=MAX_NAMESPACES).map(salted).chain([salted(0)]).collect();
    digester.apply(&Batch { timestamp: 0.0, events, rank: None });
    assert_eq!(digester.block_count(), MAX_NAMESPACES);
    assert_eq!((digester.counts().dropped, digester.quality().incomplete), (1, true));
}

// Recorded engines.

/// Replays a recorded engine and compares with the oracle after every batch.
fn check_capture(folder: &str, size: u32) {
    let (mut followed, mut oracle) = (Followed::new(size), Oracle::new(size));
    let mut most = 0;
    for capture in captures::live(folder) {
        let batch = decode(capture.payload).expect(capture.name);
        for (event, described) in batch.events.iter().zip(capture.events()) {
            let of_session = described.get("session_id").is_some_and(Value::is_string);
            match event {
                Event::Stored(stored) if of_session => oracle.report(stored),
                event => oracle.apply(event),
            }
        }
        followed.feed(&batch.events);
        assert_eq!(followed.view, oracle.held(), "{} in blocks of {size}", capture.name);
        most = most.max(followed.view.len());
    }
    assert!(most > 0, "{folder} in blocks of {size} shows nothing");
    assert_eq!(followed.digester.counts().orphans, 0, "{folder}");
}

#[test]
fn recorded_engines_are_followed_exactly() {
    for folder in ["dp0", "dp1", "swa", "nixl_pd/nixl_p", "nixl_pd/nixl_d"] {
        for size in [32, 64] {
            check_capture(&format!("vllm-0.32.0-live/{folder}"), size);
        }
    }
    for size in [16, 48, 64] {
        check_capture("sglang-0.5.23-live/sg", size);
    }
}

#[test]
fn a_report_of_hits_is_no_second_copy() {
    for size in [32, 64] {
        check_capture("vllm-0.32.0-live/run1", size);
    }
}

#[test]
fn no_view_exceeds_the_cache_it_describes() {
    let mut followed = Followed::new(32);
    for capture in captures::live("vllm-0.32.0-live/run1") {
        followed.feed(&decode(capture.payload).expect(capture.name).events);
        // The engine ran with 24 blocks, of which vLLM keeps one as the null block.
        assert!(followed.view.len() <= 23, "{} blocks after {}", followed.view.len(), capture.name);
    }
}

#[test]
fn pages_stored_twice_by_extra_keys_leave_with_the_second_removal() {
    let size = BlockSize::new(16).expect("not zero");
    let tokens: Vec<u32> = (1000..1096).collect();
    let shared = chain(BlockHash(0), size, &tokens);
    let default = Identity::default().id(&Namespace::default());
    let mut followed = Followed::new(16);
    let mut held = Vec::new();
    for capture in captures::live("sglang-0.5.23-live/sg") {
        followed.feed(&decode(capture.payload).expect(capture.name).events);
        let is_held = |block: &&BlockHash| followed.view.contains_key(&(default, **block, Tier::Device));
        held.push(shared.iter().filter(is_held).count());
    }
    // Batch 2 stores the first two again, 9 removes all six once, 10 the two, 17 begins anew.
    assert_eq!(held, [6, 6, 6, 6, 6, 6, 6, 6, 6, 2, 0, 0, 0, 0, 0, 0, 0, 2]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn damaged_streams_never_panic(
        folder in select(vec!["vllm-0.32.0-live/run1", "vllm-0.32.0-live/swa", "sglang-0.5.23-live/sg"]),
        damage in prop::collection::vec((any::<Index>(), any::<Index>(), any::<u8>()), 1..40),
    ) {
        let recorded = captures::recorded().into_iter().filter(|(name, _)| name.starts_with(folder));
        let mut payloads: Vec<Vec<u8>> = recorded.map(|(_, payload)| payload.to_vec()).collect();
        for (which, position, byte) in &damage {
            let which = which.index(payloads.len());
            let position = position.index(payloads[which].len());
            payloads[which][position] = *byte;
        }
        // `feed` compares deltas with the snapshot, whatever they say.
        let mut followed = Followed::new(32);
        for batch in payloads.iter().filter_map(|payload| decode(payload).ok()) {
            followed.feed(&batch.events);
        }
    }
}

// Random trees of pages.

#[derive(Clone, Debug)]
enum Step {
    /// Stores a path of `tokens` that leaves the trunk at `branch`, from the root or from a page on the way.
    Store {
        salt: Option<&'static str>,
        tokens: usize,
        branch: usize,
        from: Option<Index>,
        tier: Tier,
    },
    /// Removes some neighbours of the oracle's list.
    Remove {
        page: Index,
        count: usize,
        copy: Index,
        groupless: bool,
    },
    /// Says that a page is in another tier too.
    Update {
        page: Index,
        tier: Tier,
    },
    /// A sliding-window group stores, or removes, a page of the same name.
    Slide {
        page: Index,
        stores: bool,
    },
    Clear,
}

fn step() -> impl Strategy<Value = Step> {
    let tier = || select(Tier::ALL.to_vec());
    let from = prop::option::of(any::<Index>());
    let salt = select(vec![None, Some("salty")]);
    prop_oneof![
        12 => (salt, 1..=48_usize, 0..48_usize, from, tier())
            .prop_map(|(salt, tokens, branch, from, tier)| Step::Store { salt, tokens, branch, from, tier }),
        14 => (any::<Index>(), 1..8_usize, any::<Index>(), any::<bool>())
            .prop_map(|(page, count, copy, groupless)| Step::Remove { page, count, copy, groupless }),
        4 => (any::<Index>(), tier()).prop_map(|(page, tier)| Step::Update { page, tier }),
        2 => (any::<Index>(), any::<bool>()).prop_map(|(page, stores)| Step::Slide { page, stores }),
        1 => Just(Step::Clear),
    ]
}

/// Devices name their group, connectors do not.
fn group_of(tier: Tier) -> Option<u32> {
    (tier == Tier::Device).then_some(0)
}

/// A path's pages: every page of the trunk has the same tokens, the page at `branch` others. So equal pages stand
/// under many prefixes, and only the prefix tells them apart.
fn path(salt: Option<&str>, pages: usize, branch: usize, page: u32) -> (Vec<EngineHash>, Vec<u32>) {
    let namespace = u64::from(salt.is_some()) << 32;
    let hash = |at: usize| {
        let branch = if at >= branch { branch as u64 + 1 } else { 0 };
        EngineHash::Int(namespace | ((at as u64) << 16) | branch)
    };
    let tokens = |at: usize| (0..page).map(move |token| if at == branch { 1000 + token } else { token });
    ((0..pages).map(hash).collect(), (0..pages).flat_map(tokens).collect())
}

/// The event that `step` means where the oracle's pages are known.
fn event(step: &Step, page: u32, oracle: &Oracle) -> Event {
    let known = |index: &Index| match oracle.pages.len() {
        0 => 0,
        length => index.index(length),
    };
    let hash = |at: usize| oracle.pages.get(at).map_or(EngineHash::Int(u64::MAX), |page| page.hash);
    match step {
        Step::Store { salt, tokens, branch, from, tier } => {
            let (mut hashes, mut tokens) =
                path(*salt, tokens.div_ceil(page as usize), branch / page as usize, page);
            let skipped = from.map_or(0, |from| from.index(hashes.len()));
            let parent = skipped.checked_sub(1).map_or(Parent::Root, |last| Parent::Page(hashes[last]));
            hashes.drain(..skipped);
            tokens.drain(..skipped * page as usize);
            let salt = salt.map(Into::into);
            let event = Stored { hashes, parent, tokens, page, salt, ..stored(None, &[], &[]) };
            Event::Stored(Stored { tier: *tier, group: group_of(*tier), ..event })
        }
        Step::Remove { page, count, copy, groupless } => {
            let first = known(page);
            let copies = oracle.pages.get(first).map(|page| &page.copies[..]).unwrap_or_default();
            let tier = if copies.is_empty() { Tier::Device } else { copy.get(copies).1 };
            let group = if *groupless { None } else { group_of(tier) };
            Event::Removed(Removed { hashes: (first..first + count).map(hash).collect(), tier, group })
        }
        Step::Update { page, tier } => {
            let update = Stored { hashes: vec![hash(known(page))], ..stored(None, &[], &[]) };
            Event::Stored(Stored { tier: *tier, group: group_of(*tier), ..update })
        }
        Step::Slide { page: at, stores: true } => {
            let event = Stored {
                hashes: vec![hash(known(at))],
                page,
                kind: GroupKind::Other,
                ..stored(None, &[], TEXT)
            };
            Event::Stored(Stored { group: Some(7), ..event })
        }
        Step::Slide { page: at, stores: false } => {
            Event::Removed(Removed { hashes: vec![hash(known(at))], tier: Tier::Device, group: Some(7) })
        }
        Step::Clear => Event::Cleared,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn a_block_is_held_while_all_its_pages_are(steps in prop::collection::vec(step(), 1..40)) {
        for page in [1, 2, 4, 8, 16] {
            let (mut followed, mut oracle) = (Followed::new(16), Oracle::new(16));
            for (number, step) in steps.iter().enumerate() {
                let event = event(step, page, &oracle);
                oracle.apply(&event);
                followed.feed(&[event]);
                prop_assert_eq!(&followed.view, &oracle.held(), "pages of {}, step {}", page, number);
                prop_assert_eq!(followed.digester.counts().orphans, oracle.orphans, "pages of {}", page);
            }
        }
    }
}
