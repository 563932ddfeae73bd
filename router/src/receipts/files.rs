//! Receipts in files: a chain of JSON lines, over files and restarts.
//!
//! A thread of its own takes decisions and results from a bounded queue, joins
//! them, and appends a line for each receipt that is complete, or has waited for
//! its result for [`RESULT_WAIT`]. A request never waits: what the queue has no
//! room for is counted, and the next line says how many are missing.
//!
//! Files are `receipts-` and the sequence of their first line. A line is written
//! with one call and reaches the disk within `SYNC_EVERY`; so a router that
//! dies loses what was in flight, a machine that dies up to a second more. What a
//! crash left of a line is cut off at the next start and kept beside the file. A
//! write that fails is undone and its receipts count as lost.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use kvrouter_core::receipts::chain::Head;
use kvrouter_core::receipts::read;
use kvrouter_core::receipts::ring::Entry;
use kvrouter_core::receipts::{Receipt, ReceiptNumber, Record, ResultRecord};
use kvrouter_core::units::{Millis, Tick};
use kvrouter_crds::config::ReceiptFiles;

use crate::clock::Clock;

/// Decisions and results on their way to the thread: a second of 4,000 requests.
const QUEUE: usize = 8192;
/// Most bytes of records on their way, and as many again that wait for results.
const MAX_BYTES: usize = 32 << 20;
/// How long a receipt waits for its result. Longer than an answer may take to its
/// first byte unless somebody raised that; then receipts of slow answers have none.
pub const RESULT_WAIT: Millis = Millis::from_secs(900);
/// How long written lines may be on their way to the disk.
const SYNC_EVERY: Millis = Millis(1000);
/// Most messages that become one write.
const BATCH: usize = 256;
/// Most of a file's end that is searched for its last whole line: longer than any
/// line.
const LONGEST_TAIL: u64 = 64 << 20;

/// The way to the thread. Clones lead to the same one.
#[derive(Clone, Debug)]
pub struct Queue {
    messages: SyncSender<Message>,
    counts: Arc<Counts>,
}

/// What became of receipts so far.
#[derive(Debug, Default)]
pub struct Counts {
    written: AtomicU64,
    /// Written without a result.
    unfinished: AtomicU64,
    lost: AtomicU64,
    /// Bytes of records in the queue.
    queued: AtomicUsize,
}

/// The thread that writes.
#[derive(Debug)]
pub struct Writer {
    queue: Queue,
    thread: JoinHandle<()>,
}

/// Why receipts cannot be written to files.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The folder or a file in it cannot be used.
    #[error("failed to use {} for receipts (receiptFiles.directory must be a folder that the router may write)", path.display())]
    Use {
        /// The folder or file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Another process has it.
    #[error("{} is in use by another process; give every router its own", path.display())]
    Shared {
        /// The folder.
        path: PathBuf,
    },
}

#[derive(Debug)]
enum Message {
    Filed(ReceiptNumber, Record, Option<ResultRecord>),
    Joined(ReceiptNumber, ResultRecord),
    Stop,
}

impl Queue {
    /// A decision. Without room it is lost, and counted.
    pub fn filed(&self, number: ReceiptNumber, record: Record, result: Option<ResultRecord>) {
        let bytes = record.memory();
        if self.counts.queued.fetch_add(bytes, Ordering::Relaxed) + bytes <= MAX_BYTES
            && self.messages.try_send(Message::Filed(number, record, result)).is_ok()
        {
            return;
        }
        self.counts.queued.fetch_sub(bytes, Ordering::Relaxed);
        self.counts.lost.fetch_add(1, Ordering::Relaxed);
    }

    /// A result. Without room its receipt is written later, without it.
    pub fn joined(&self, number: ReceiptNumber, result: ResultRecord) {
        // Nothing to do where it has no room.
        let _ = self.messages.try_send(Message::Joined(number, result));
    }

    /// `written`, `unfinished` (of those) and `lost`, for metrics.
    pub fn counts(&self) -> [(&'static str, u64); 3] {
        let Counts { written, unfinished, lost, .. } = &*self.counts;
        [("written", written), ("unfinished", unfinished), ("lost", lost)]
            .map(|(label, count)| (label, count.load(Ordering::Relaxed)))
    }
}

impl Writer {
    /// Finds where the chain in the folder ends, and starts to continue it.
    pub fn start(settings: &ReceiptFiles) -> Result<Self, StartError> {
        let clock = Clock::start();
        let folder = Folder::open(settings, clock.unix_ms())?;
        let (messages, receiver) = sync_channel(QUEUE);
        let counts = Arc::new(Counts::default());
        counts.lost.store(folder.set_aside, Ordering::Relaxed);
        let queue = Queue { messages, counts: Arc::clone(&counts) };
        let work =
            Work { folder, counts, clock, waiting: BTreeMap::new(), bytes: 0, told: 0, failing: false };
        let use_error = |source| StartError::Use { path: settings.directory.clone(), source };
        let thread = std::thread::Builder::new().name("receipts".to_owned());
        let thread = thread.spawn(move || work.run(&receiver)).map_err(use_error)?;
        Ok(Self { queue, thread })
    }

    /// The way to it.
    pub fn queue(&self) -> Queue {
        self.queue.clone()
    }

    /// Writes what is there, results or not, and ends. Blocks.
    pub fn finish(self) {
        let stopped = self.queue.messages.send(Message::Stop).is_ok() && self.thread.join().is_ok();
        if !stopped {
            tracing::error!(target: "kv_router", "the last receipts were not written");
        }
    }
}

/// The thread's own state.
struct Work {
    folder: Folder,
    counts: Arc<Counts>,
    clock: Clock,
    /// Decisions without a result, the oldest first, and since when.
    waiting: BTreeMap<ReceiptNumber, (Tick, Record)>,
    /// Their bytes.
    bytes: usize,
    /// Lost receipts that a line in the chain tells of.
    told: u64,
    /// Whether the last write failed.
    failing: bool,
}

impl Work {
    fn run(mut self, messages: &Receiver<Message>) {
        let mut running = true;
        while running {
            let mut ready = Vec::new();
            match messages.recv_timeout(Duration::from_millis(SYNC_EVERY.0)) {
                Ok(message) => running = self.take(message, &mut ready),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => running = false,
            }
            for _ in 1..BATCH {
                match messages.try_recv() {
                    Ok(message) => running &= self.take(message, &mut ready),
                    Err(TryRecvError::Empty | TryRecvError::Disconnected) => break,
                }
            }
            self.give_up(running, &mut ready);
            self.write(&ready);
            self.folder.sync(self.clock.now(), running);
        }
    }

    /// Takes one message in; false when it is the last.
    fn take(&mut self, message: Message, ready: &mut Vec<Entry>) -> bool {
        match message {
            Message::Filed(number, record, result) => {
                let bytes = record.memory();
                self.counts.queued.fetch_sub(bytes, Ordering::Relaxed);
                match result {
                    Some(_) => ready.push(Entry { record, result }),
                    None => {
                        self.bytes += bytes;
                        self.waiting.insert(number, (self.clock.now(), record));
                    }
                }
            }
            Message::Joined(number, result) => {
                if let Some((_, record)) = self.waiting.remove(&number) {
                    self.bytes -= record.memory();
                    ready.push(Entry { record, result: Some(result) });
                }
            }
            Message::Stop => return false,
        }
        true
    }

    /// Stops waiting for results: of all, of those that waited too long, or of the
    /// oldest where too many wait.
    fn give_up(&mut self, running: bool, ready: &mut Vec<Entry>) {
        let now = self.clock.now();
        while let Some(oldest) = self.waiting.first_entry() {
            if running && self.bytes <= MAX_BYTES && now.since(oldest.get().0) < RESULT_WAIT {
                return;
            }
            let (_, record) = oldest.remove();
            self.bytes -= record.memory();
            self.counts.unfinished.fetch_add(1, Ordering::Relaxed);
            ready.push(Entry { record, result: None });
        }
    }

    fn write(&mut self, ready: &[Entry]) {
        let lost = self.counts.lost.load(Ordering::Relaxed);
        if ready.is_empty() && (lost == self.told || self.failing) {
            return;
        }
        let before = self.folder.head;
        let mut lines = String::new();
        if lost > self.told {
            lines += &self.folder.head.gap(self.clock.unix_ms(), lost - self.told);
            lines.push('\n');
        }
        let receipts: Vec<Receipt> = ready.iter().filter_map(Entry::receipt).collect();
        for receipt in &receipts {
            lines += &self.folder.head.receipt(receipt);
            lines.push('\n');
        }
        match self.folder.append(before, &lines) {
            Ok(()) => {
                self.told = lost;
                self.counts.written.fetch_add(receipts.len() as u64, Ordering::Relaxed);
                self.counts.lost.fetch_add((ready.len() - receipts.len()) as u64, Ordering::Relaxed);
                if std::mem::take(&mut self.failing) {
                    tracing::info!(target: "kv_router", "receipts are written again");
                }
            }
            Err(error) => {
                self.folder.head = before;
                self.counts.lost.fetch_add(ready.len() as u64, Ordering::Relaxed);
                if !std::mem::replace(&mut self.failing, true) {
                    let error = crate::chain(&error);
                    tracing::error!(
                        target: "kv_router", folder = %self.folder.directory.display(), error = %error,
                        "receipts are not written; look at the room and the rights there"
                    );
                }
            }
        }
    }
}

/// The folder and the end of the chain in it.
struct Folder {
    directory: PathBuf,
    max_bytes: u64,
    max_files: usize,
    head: Head,
    /// The file that is written to, and its length.
    current: Option<(File, u64)>,
    /// Lines that were cut off at the start.
    set_aside: u64,
    /// Since when lines are on their way to the disk.
    unsynced: Option<Tick>,
    /// Held as long as this lives.
    _lock: File,
}

impl Folder {
    fn open(settings: &ReceiptFiles, unix_ms: u64) -> Result<Self, StartError> {
        let directory = settings.directory.clone();
        let failed = |source| StartError::Use { path: directory.clone(), source };
        std::fs::create_dir_all(&directory).map_err(failed)?;
        let lock =
            OpenOptions::new().create(true).append(true).open(directory.join("lock")).map_err(failed)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(StartError::Shared { path: directory }),
            Err(TryLockError::Error(source)) => return Err(failed(source)),
        }
        let mut folder = Self {
            max_bytes: settings.max_bytes,
            max_files: usize::try_from(settings.max_files).unwrap_or(usize::MAX),
            head: Head::default(),
            current: None,
            set_aside: 0,
            unsynced: None,
            _lock: lock,
            directory: directory.clone(),
        };
        for path in names(&directory).map_err(failed)?.into_iter().rev() {
            let failed = |source| StartError::Use { path: path.clone(), source };
            if let Some(head) = folder.resume(&path, unix_ms).map_err(failed)? {
                folder.head = head;
                break;
            }
        }
        Ok(folder)
    }

    /// Opens the last file and cuts off what is no line of the chain; `None` if
    /// nothing is left of it.
    fn resume(&mut self, path: &Path, unix_ms: u64) -> io::Result<Option<Head>> {
        let mut file = OpenOptions::new().read(true).append(true).open(path)?;
        let length = file.metadata()?.len();
        let skipped = length.saturating_sub(LONGEST_TAIL);
        file.seek(SeekFrom::Start(skipped))?;
        let mut tail = Vec::new();
        file.read_to_end(&mut tail)?;
        let (good, head) = last_line(&tail);
        let torn = &tail[good..];
        if !torn.is_empty() {
            let aside = path.with_extension(format!("torn-{unix_ms}"));
            std::fs::write(&aside, torn)?;
            file.set_len(skipped + good as u64)?;
            self.set_aside += torn.split_inclusive(|byte| *byte == b'\n').count() as u64;
            tracing::warn!(
                target: "kv_router", path = %path.display(), bytes = torn.len(), aside = %aside.display(),
                "a torn line of receipts was set aside"
            );
        }
        if head.is_none() && skipped == 0 {
            drop(file);
            std::fs::remove_file(path)?;
            return Ok(None);
        }
        self.current = Some((file, skipped + good as u64));
        Ok(head)
    }

    /// Appends `lines`, which lead on from `before`, all or nothing.
    fn append(&mut self, before: Head, lines: &str) -> io::Result<()> {
        let more = lines.len() as u64;
        if self.current.as_ref().is_some_and(|(_, length)| *length > 0 && length + more > self.max_bytes) {
            self.close()?;
        }
        let (file, length) = match &mut self.current {
            Some(current) => current,
            none => {
                let path = self.directory.join(format!("receipts-{:016}.jsonl", before.sequence));
                let file = OpenOptions::new().create_new(true).append(true).open(path)?;
                // The file's name must reach the disk too.
                File::open(&self.directory)?.sync_all()?;
                make_room(&self.directory, self.max_files);
                none.insert((file, 0))
            }
        };
        if let Err(error) = file.write_all(lines.as_bytes()) {
            // What cannot be undone is cut off at the next start.
            let _ = file.set_len(*length);
            return Err(error);
        }
        *length += more;
        // Since the next look at the clock.
        self.unsynced.get_or_insert(Tick(u64::MAX));
        Ok(())
    }

    fn close(&mut self) -> io::Result<()> {
        if let Some((file, _)) = &self.current {
            file.sync_data()?;
        }
        (self.current, self.unsynced) = (None, None);
        Ok(())
    }

    /// Brings to the disk what has waited long enough; at the end everything.
    fn sync(&mut self, now: Tick, running: bool) {
        let Some(since) = self.unsynced else { return };
        let since = since.min(now);
        self.unsynced = Some(since);
        if running && now.since(since) < SYNC_EVERY {
            return;
        }
        if let Some((file, _)) = &self.current
            && let Err(error) = file.sync_data()
        {
            tracing::error!(target: "kv_router", error = %error, "receipts did not reach the disk");
        }
        self.unsynced = None;
    }
}

/// The oldest files go. That one stays too long is no reason not to write.
fn make_room(directory: &Path, max_files: usize) {
    let all = names(directory).unwrap_or_default();
    let surplus = all.len().saturating_sub(max_files);
    for path in &all[..surplus] {
        if let Err(error) = std::fs::remove_file(path) {
            tracing::warn!(target: "kv_router", path = %path.display(), error = %error, "old receipts were not removed");
        }
    }
}

/// Where the last whole line of `tail` ends, and where the chain stands there.
fn last_line(tail: &[u8]) -> (usize, Option<Head>) {
    let mut end = tail.len();
    while let Some(feed) = tail[..end].iter().rposition(|byte| *byte == b'\n') {
        let start = tail[..feed].iter().rposition(|byte| *byte == b'\n').map_or(0, |before| before + 1);
        let text = std::str::from_utf8(&tail[start..feed]).unwrap_or_default();
        if let Ok(line) = read::line(text, 1) {
            return (feed + 1, Some(Head { sequence: line.sequence + 1, digest: line.digest }));
        }
        end = start;
    }
    (0, None)
}

/// Files of receipts in `directory`, the oldest first.
fn names(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(directory)? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let number = name.strip_prefix("receipts-").and_then(|name| name.strip_suffix(".jsonl"));
        if number.is_some_and(|number| number.len() == 16 && number.bytes().all(|byte| byte.is_ascii_digit()))
        {
            all.push(path);
        }
    }
    all.sort();
    Ok(all)
}

#[cfg(test)]
#[path = "files_tests.rs"]
mod tests;
