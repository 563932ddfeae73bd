//! Files of receipts: rotation, restarts, crashes, overflow.

use kvrouter_core::policy::Settings;
use kvrouter_core::receipts::Draft;
use kvrouter_core::receipts::chain::Follower;
use kvrouter_core::receipts::read::{Content, Line};

use super::*;

fn settings(directory: &Path, max_bytes: u64, max_files: u64) -> ReceiptFiles {
    ReceiptFiles { directory: directory.to_owned(), max_bytes, max_files }
}

fn record(id: &str) -> Record {
    Draft::undecided(id, &Settings::default(), 16).encode()
}

fn done() -> ResultRecord {
    ResultRecord { status: 200, ..ResultRecord::default() }
}

/// Writes receipts with these ids, in one life of the router.
fn life(settings: &ReceiptFiles, ids: std::ops::Range<u64>) {
    let writer = Writer::start(settings).expect("a folder");
    let queue = writer.queue();
    for id in ids {
        queue.filed(ReceiptNumber(id), record(&id.to_string()), None);
        queue.joined(ReceiptNumber(id), done());
    }
    writer.finish();
}

/// All lines of all files, in order, and what gaps say is lost.
fn lines(directory: &Path) -> (Vec<Line>, u64) {
    let mut follower = Follower::default();
    let mut all = Vec::new();
    for path in names(directory).expect("a folder") {
        let text = std::fs::read_to_string(&path).expect("a file");
        all.extend(follower.file(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display())));
    }
    (all, follower.lost)
}

fn ids(lines: &[Line]) -> Vec<u64> {
    let id = |line: &Line| match &line.content {
        Content::Receipt(receipt) => receipt.request_id.parse().ok(),
        Content::Gap { .. } => None,
    };
    lines.iter().filter_map(id).collect()
}

#[test]
fn the_chain_goes_on_across_files_and_restarts() {
    let folder = tempfile::tempdir().expect("a folder");
    let settings = settings(folder.path(), 8_000, 100);
    for start in [0, 30, 31, 60] {
        life(&settings, start..start + if start == 30 { 1 } else { 30 });
    }
    let (all, lost) = lines(folder.path());
    assert_eq!((lost, all[0].sequence, all.len()), (0, 0, 91));
    assert!(names(folder.path()).expect("a folder").len() > 3, "files were closed and begun");
    let expected: Vec<u64> = (0..61).chain(60..90).collect();
    assert_eq!(ids(&all), expected);
    assert!(all.iter().all(|line| match &line.content {
        Content::Receipt(receipt) => receipt.result == Some(done()),
        Content::Gap { .. } => false,
    }));
}

#[test]
fn the_oldest_files_go_and_the_rest_is_still_a_chain() {
    let folder = tempfile::tempdir().expect("a folder");
    let settings = settings(folder.path(), 3_000, 3);
    for life_of in 0..8 {
        life(&settings, life_of * 10..life_of * 10 + 10);
    }
    let (all, _) = lines(folder.path());
    assert_eq!(names(folder.path()).expect("a folder").len(), 3);
    assert!(all[0].sequence > 0 && ids(&all).last() == Some(&79));
}

#[test]
fn a_torn_line_is_set_aside_and_counted() {
    let check = |why: &str, change: &dyn Fn(Vec<u8>) -> Vec<u8>, kept: u64, lost: u64| {
        let folder = tempfile::tempdir().expect("a folder");
        let settings = settings(folder.path(), 1 << 20, 3);
        life(&settings, 0..3);
        let path = names(folder.path()).expect("a folder").remove(0);
        let bytes = std::fs::read(&path).expect("a file");
        std::fs::write(&path, change(bytes)).expect("written");
        life(&settings, 3..5);
        let (all, found) = lines(folder.path());
        assert_eq!(ids(&all), (0..kept).chain(3..5).collect::<Vec<_>>(), "{why}");
        assert_eq!(found, lost, "{why}");
        let aside = std::fs::read_dir(folder.path()).expect("a folder");
        let aside = aside.filter(|entry| {
            entry.as_ref().is_ok_and(|entry| entry.file_name().to_string_lossy().contains("torn"))
        });
        assert_eq!(aside.count() as u64, u64::from(lost > 0), "{why}");
    };
    check("whole", &|bytes| bytes, 3, 0);
    check("cut in its last line", &|bytes| bytes[..bytes.len() - 40].to_vec(), 2, 1);
    check("zeros at the end", &|bytes| [&bytes[..], &[0; 50]].concat(), 3, 1);
    check("nothing whole is left", &|bytes| bytes[..20].to_vec(), 0, 1);
    let flip = |mut bytes: Vec<u8>| {
        let at = bytes.len() - 30;
        bytes[at] ^= 1;
        bytes
    };
    check("changed in its last line", &flip, 2, 1);
}

#[test]
fn what_has_no_result_is_written_at_the_end_without_one() {
    let folder = tempfile::tempdir().expect("a folder");
    let writer = Writer::start(&settings(folder.path(), 1 << 20, 3)).expect("a folder");
    let queue = writer.queue();
    queue.filed(ReceiptNumber(0), record("0"), None);
    queue.filed(ReceiptNumber(1), record("1"), Some(done()));
    queue.joined(ReceiptNumber(77), done());
    writer.finish();
    let (all, lost) = lines(folder.path());
    assert_eq!((ids(&all), lost), (vec![1, 0], 0));
    assert_eq!(queue.counts(), [("written", 2), ("unfinished", 1), ("lost", 0)]);
}

#[test]
fn a_receipt_waits_for_its_result_but_not_for_ever() {
    let folder = tempfile::tempdir().expect("a folder");
    let open = Folder::open(&settings(folder.path(), 1 << 20, 3), 0).expect("a folder");
    let counts = Arc::new(Counts::default());
    let clock = Clock::start();
    let mut work =
        Work { folder: open, counts, clock, waiting: BTreeMap::new(), bytes: 0, told: 0, failing: false };
    let mut ready = Vec::new();
    work.take(Message::Filed(ReceiptNumber(0), record("0"), None), &mut ready);
    work.give_up(true, &mut ready);
    assert!(ready.is_empty(), "it waits");
    work.bytes += MAX_BYTES;
    work.give_up(true, &mut ready);
    assert_eq!(ready.len(), 1, "too many wait: the oldest goes");
    work.take(Message::Joined(ReceiptNumber(0), done()), &mut ready);
    assert_eq!(ready.len(), 1, "its result comes too late");
}

/// Nobody takes from the queue, as if the disk had stopped.
#[test]
fn a_full_queue_loses_receipts_never_time_and_says_how_many() {
    let (messages, receiver) = sync_channel(3);
    let queue = Queue { messages, counts: Arc::default() };
    for id in 0..10 {
        queue.filed(ReceiptNumber(id), record(&id.to_string()), Some(done()));
    }
    assert_eq!(queue.counts()[2], ("lost", 7));
    let folder = tempfile::tempdir().expect("a folder");
    let open = Folder::open(&settings(folder.path(), 1 << 20, 3), 0).expect("a folder");
    let work = Work {
        folder: open,
        counts: Arc::clone(&queue.counts),
        clock: Clock::start(),
        waiting: BTreeMap::new(),
        bytes: 0,
        told: 0,
        failing: false,
    };
    let counts = Arc::clone(&queue.counts);
    drop(queue);
    work.run(&receiver);
    let (all, lost) = lines(folder.path());
    assert_eq!((ids(&all), lost), (vec![0, 1, 2], 7));
    assert_eq!(counts.queued.load(Ordering::Relaxed), 0, "what was taken has left the queue");
}

#[test]
fn a_folder_has_one_writer() {
    let folder = tempfile::tempdir().expect("a folder");
    let settings = settings(folder.path(), 1 << 20, 3);
    let writer = Writer::start(&settings).expect("a folder");
    assert!(matches!(Writer::start(&settings), Err(StartError::Shared { .. })));
    writer.finish();
    Writer::start(&settings).expect("free again").finish();
}

#[test]
fn a_write_that_fails_is_made_up_for_by_a_gap() {
    let folder = tempfile::tempdir().expect("a folder");
    let settings = settings(folder.path(), 1 << 20, 3);
    let mut open = Folder::open(&settings, 0).expect("a folder");
    // A file that can only be read stands for a disk that is full.
    let path = folder.path().join("receipts-0000000000000000.jsonl");
    std::fs::write(&path, "").expect("written");
    open.current = Some((File::open(&path).expect("a file"), 0));
    let counts = Arc::new(Counts::default());
    let mut work = Work {
        folder: open,
        counts: Arc::clone(&counts),
        clock: Clock::start(),
        waiting: BTreeMap::new(),
        bytes: 0,
        told: 0,
        failing: false,
    };
    let entry = |id: &str| Entry { record: record(id), result: Some(done()) };
    work.write(&[entry("0"), entry("1")]);
    assert_eq!(counts.lost.load(Ordering::Relaxed), 2);
    let whole = OpenOptions::new().append(true).open(&path).expect("a file");
    work.folder.current = Some((whole, 0));
    work.write(&[entry("2")]);
    let (all, lost) = lines(folder.path());
    assert_eq!((ids(&all), lost), (vec![2], 2));
}
