//! Joining and leaving: what stays, what goes, and that nothing is left behind.

use std::time::Duration;

use clap::Parser;
use kvrouter_core::blocks::{BlockHash, NamespaceId};
use kvrouter_core::events::Delta;
use kvrouter_core::ids::Role;
use kvrouter_core::policy::PickRequest;
use kvrouter_core::policy::Settings;
use kvrouter_core::policy::field::{Claim, Field};
use kvrouter_core::policy::leases::{Account, Lease, Pick};
use kvrouter_core::policy::lineup::{Entrant, Standing};
use kvrouter_core::policy::sessions::{SessionKey, SessionMode, SessionUse};
use kvrouter_core::units::{Tick, Tier, Tokens};
use kvrouter_crds::config::Engine;

use super::*;
use crate::config::{Cli, Command, ServeConfig};
use crate::pool::Change as Learnt;

const SPACE: NamespaceId = NamespaceId(1);

pub(crate) fn pool() -> Arc<Pool> {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("router.yaml");
    let text =
        "{schemaVersion: 1, model: {name: m}, discovery: {backend: Static}, kvEvents: {transport: ZMQ}}";
    std::fs::write(&path, text).expect("written");
    let arguments = ["kv-router", "serve", "--config", path.to_str().expect("plain")];
    let Command::Serve(flags) = Cli::try_parse_from(arguments).expect("flags").command else {
        unreachable!("serve")
    };
    Arc::new(Pool::new(ServeConfig::load(&flags).expect("good")).expect("metrics"))
}

/// A worker at port `port` of this machine; the pod's UID tells lives apart.
pub(crate) fn member(port: u16, uid: &str, exclusion: Option<Exclusion>) -> Member {
    let id = WorkerId::new(format!("127.0.0.1:{port}"));
    let socket = |port| format!("tcp://127.0.0.1:{port}").parse().expect("an endpoint");
    Member {
        id,
        pod: Some(PodName { name: "pod".into(), uid: uid.into() }),
        place: Place { role: Role::Mixed, handover: None, exclusion },
        engine: Engine::Auto,
        dp_size: 1,
        events: Some(EventSockets { publisher: socket(1), replay: Some(socket(2)) }),
    }
}

pub(crate) fn worker_named(id: &str) -> Arc<Worker> {
    let member = Member { id: WorkerId::new(id), ..member(1, "uid", None) };
    Arc::new(Worker::new(&member, &Arc::default()))
}

fn ids(workers: &[Arc<Worker>]) -> Vec<&str> {
    workers.iter().map(|worker| worker.id.as_str()).collect()
}

fn store(pool: &Pool, target: &TargetState, hash: u64) {
    let (parent, hashes) = (BlockHash(0), vec![BlockHash(hash)]);
    let deltas = vec![Delta::Stored { namespace: SPACE, parent, hashes, tier: Tier::Device }];
    let epoch = kvrouter_core::ids::Epoch(1);
    pool.apply(target, Learnt::Continued { epoch, seq: 1, deltas, status: Default::default(), page: 16 });
}

/// Books one request on `account`.
fn book(pool: &Pool, target: &TargetState, account: &Arc<Account>) -> Lease {
    picked(pool, target, account, &Settings::default(), None).lease
}

/// The pick of one request among one candidate.
fn picked(
    pool: &Pool,
    target: &TargetState,
    account: &Arc<Account>,
    settings: &Settings,
    session: Option<&SessionKey>,
) -> Pick {
    let request = PickRequest {
        id: "r",
        role: Role::Mixed,
        prompt: Tokens(100),
        blocks: &[],
        size: pool.config.size,
        images: &[],
        session,
        choices: 1,
    };
    let entrant = Entrant {
        slot: target.slot,
        account: Arc::clone(account),
        trust: Arc::clone(&target.trust),
        standing: Arc::new(Standing::open(Role::Mixed)),
    };
    let lineup = Arc::new(Lineup::new([(target.target.clone(), entrant)]));
    let mut field = Field::default();
    field.begin(&lineup);
    let view = target.trust.read(Tick(0), pool.live.read().freshness);
    let claim = field.claim(Claim::default());
    field.push(0, claim, view);
    let none: Arc<[BlockHash]> = Arc::from([]);
    let picked = pool.ledger.select_and_book(Tick(0), settings, &request, SPACE, &none, &mut field);
    picked.expect("one candidate")
}

#[test]
fn a_worker_stays_itself_while_its_address_and_pod_do() {
    let (fleet, index) = (Fleet::default(), Arc::default());
    let out = Some(Exclusion::PodNotReady);
    assert!(!fleet.is_known());
    let change = fleet.update(&[member(2, "a", None), member(1, "b", None), member(3, "c", out)], &index);
    assert_eq!(ids(&change.joined), ["127.0.0.1:2", "127.0.0.1:1"], "a pod that is not ready yet is none");
    assert_eq!(ids(&fleet.workers()), ["127.0.0.1:1", "127.0.0.1:2"], "sorted");
    assert_eq!((fleet.is_known(), fleet.excluded().waiting), (true, 1));
    let before = fleet.workers();
    let blip = fleet.update(&[member(1, "b", out), member(2, "a", None)], &index);
    assert!(blip.joined.is_empty() && blip.left.is_empty(), "a blip");
    assert!(Arc::ptr_eq(&before, &fleet.workers()), "the list is the same");
    assert_eq!(before[0].reason().label(), "pod_not_ready");
    fleet.update(&[member(1, "b", None), member(2, "a", None)], &index);
    assert_eq!(before[0].reason().label(), "not_probed", "it is back");
    let change = fleet.update(&[member(1, "b", None), member(2, "d", None)], &index);
    assert_eq!((ids(&change.joined), ids(&change.left)), (vec!["127.0.0.1:2"], vec!["127.0.0.1:2"]));
    let change = fleet.update(&[member(1, "b", Some(Exclusion::SameAddress))], &index);
    assert_eq!(change.left.len(), 2, "its address is another's");
    assert_eq!(fleet.excluded().count, 1);
}

#[test]
fn at_most_so_many_excluded_pods_are_listed() {
    let (fleet, index) = (Fleet::default(), Arc::default());
    let all: Vec<_> = (1..=100).map(|port| member(port, "a", Some(Exclusion::NoRole))).collect();
    fleet.update(&all, &index);
    let excluded = fleet.excluded();
    assert_eq!((excluded.listed.len(), excluded.count, excluded.waiting), (MAX_EXCLUDED, 100, 0));
}

/// Case: a release that is keyed by the name of an endpoint hits its successor.
#[test]
fn a_late_release_never_touches_the_successor() {
    let pool = pool();
    pool.fleet.update(&[member(1, "a", None)], &pool.index);
    let old = Arc::clone(&pool.fleet.workers()[0].targets[0]);
    let first = book(&pool, &old, &old.account);
    pool.fleet.update(&[], &pool.index);
    pool.fleet.update(&[member(1, "b", None)], &pool.index);
    let new = Arc::clone(&pool.fleet.workers()[0].targets[0]);
    let second = book(&pool, &new, &new.account);
    assert_eq!((old.target.clone(), new.account.load().requests), (new.target.clone(), 1));
    drop(first);
    assert_eq!((old.account.load().requests, new.account.load().requests), (0, 1));
    drop(second);
    assert_eq!((new.account.load().requests, new.account.turnover().released), (0, 1));
}

/// Feeds and picks under way still know a target that left.
#[test]
fn what_is_learnt_of_a_leaver_reaches_nobody() {
    let pool = pool();
    pool.fleet.update(&[member(1, "a", None)], &pool.index);
    let old = Arc::clone(&pool.fleet.workers()[0].targets[0]);
    store(&pool, &old, 7);
    pool.remember(&old, SPACE, &[BlockHash(7)]);
    assert_eq!((pool.index.block_count(old.slot), pool.history.lock().len()), (1, 1));
    let change = pool.fleet.update(&[member(1, "b", None)], &pool.index);
    change.left.iter().for_each(|worker| pool.forget(worker));
    drop(change);
    let new = Arc::clone(&pool.fleet.workers()[0].targets[0]);
    store(&pool, &old, 7);
    pool.remember(&old, SPACE, &[BlockHash(7)]);
    assert_ne!(old.slot, new.slot, "the slot is still known to someone");
    assert_eq!((pool.index.unique_blocks(), pool.history.lock().len()), (0, 0));
    assert_eq!(pool.index.slots_in_use(), 2);
    let freed = old.slot;
    drop(old);
    assert_eq!(pool.index.slots_in_use(), 1);
    pool.fleet.update(&[member(2, "c", None)], &pool.index);
    assert_eq!(pool.fleet.workers()[0].targets[0].slot, freed, "handed out again");
}

#[tokio::test]
async fn a_thousand_joins_and_leaves_leave_nothing_behind() {
    let pool = pool();
    let upstream = Upstream::new(Duration::from_millis(100));
    let tasks = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
    let (tasks_before, series_before) = (tasks(), pool.metrics.render(&pool).expect("text").lines().count());
    for life in 0..1000u16 {
        let uid = life.to_string();
        take(&pool, &upstream, &[member(9, "stays", None), member(1000 + life, &uid, None)]);
        let worker = pool.fleet.worker(&format!("127.0.0.1:{}", 1000 + life)).expect("joined");
        store(&pool, &worker.targets[0], u64::from(life));
        pool.remember(&worker.targets[0], SPACE, &[BlockHash(u64::from(life))]);
        if life.is_multiple_of(100) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    take(&pool, &upstream, &[]);
    let settled = || {
        let series = pool.metrics.render(&pool).expect("text").lines().count();
        // The counters of joins and leaves, and of what probes and feeds met, stay.
        series < series_before + 30 && tasks() == tasks_before && pool.index.slots_in_use() == 0
    };
    for _ in 0..500 {
        if settled() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(tasks(), tasks_before, "probes and feeds ended");
    assert_eq!((pool.index.slots_in_use(), pool.index.unique_blocks()), (0, 0));
    assert_eq!(pool.history.lock().len(), 0);
    assert!(settled(), "{}", pool.metrics.render(&pool).expect("text"));
    let changes = |change| pool.metrics.fleet_changes.with_label_values(&[change]).get();
    assert_eq!((changes("joined"), changes("left")), (1001, 1001));
}

/// A session's binding ends with its worker, not with its time to live.
#[test]
fn a_worker_that_left_is_no_sessions_home() {
    let pool = pool();
    let worker = Arc::new(Worker::new(&member(1, "uid", None), &pool.index));
    let key = SessionKey { id: "s".into(), role: Role::Mixed };
    let mut settings = Settings::default();
    settings.sessions.mode = SessionMode::Both;
    let target = &worker.targets[0];
    let pick = || picked(&pool, target, &target.account, &settings, Some(&key)).session;
    assert_eq!((pick(), pick()), (SessionUse::New, SessionUse::Followed));
    pool.forget(&worker);
    assert_eq!((pool.ledger.sessions(), pick()), (0, SessionUse::New));
}
