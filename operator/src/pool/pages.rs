//! Are page sizes equal, and do they divide the block? Pure.
//!
//! Evidence, best first: cache events and the engine's live endpoint, both as
//! routers report them; then the command line. No engine's default is ever
//! assumed: what nothing shows is unknown.
//!
//! Which page is the pool's is decided as routers decide it, and of workers that
//! may be picked, as far as routers tell: the pods that are named are those that
//! routers leave out where `RequireParity` asks them to.

use std::collections::{BTreeMap, BTreeSet};

use kvrouter_crds::InferencePool;
use kvrouter_crds::conditions::{ConditionType, Finding, Reason, names};
use kvrouter_crds::config::RoleName;
use kvrouter_crds::health::{ODD_PAGE, WorkerHealth};
use kvrouter_crds::pages::usual;
use kvrouter_crds::pool::{InferencePoolSpec, PageSizeSeen};

use super::arguments;
use super::members::Member;
use super::validate::no_pods;
use crate::hysteresis::{Pace, Seen};

/// Most rows of `status.pageSizes`; the schema allows no more.
const MOST_ROWS: usize = 32;

/// Where a page size was seen, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Evidence {
    Events,
    Endpoint,
    Arguments,
    None,
}

impl Evidence {
    const fn label(self) -> &'static str {
        match self {
            Self::Events => "events",
            Self::Endpoint => "endpoint",
            Self::Arguments => "arguments",
            Self::None => "none",
        }
    }
}

/// The page sizes of one pod: more than one when its ranks differ.
struct Pages<'a> {
    pod: &'a str,
    ready: bool,
    role: RoleName,
    engine: &'static str,
    sizes: BTreeSet<u32>,
    evidence: Evidence,
    /// Pages of its workers that could be picked, their pages aside.
    votes: Vec<u32>,
    /// Whether a router leaves it out for its page.
    left_out: bool,
}

/// What `PageSizeParity` should say, and the rows of `status.pageSizes`.
pub fn page_sizes(pool: &InferencePool, members: &[Member<'_>]) -> (Seen, Vec<PageSizeSeen>) {
    let spec = &pool.spec;
    let pages: Vec<Pages<'_>> = members.iter().filter_map(|member| pages(spec, member)).collect();
    let (finding, blamed) = judge(pool, &pages);
    let pace = if finding.reason == Reason::NoPods { Pace::AtOnce } else { Pace::AfterWindow };
    (Seen { type_: ConditionType::PageSizeParity, finding, pace, blamed }, rows(&pages))
}

/// Pods of no role or of two are not routed to, so their pages do not matter.
fn pages<'a>(spec: &InferencePoolSpec, member: &Member<'a>) -> Option<Pages<'a>> {
    let events = member.workers.iter().flat_map(|worker| &worker.targets);
    let events: BTreeSet<u32> = events.filter_map(|target| target.event_page_size).collect();
    let endpoint: BTreeSet<u32> =
        member.workers.iter().filter_map(|worker| worker.reported_page_size).collect();
    let arguments: BTreeSet<u32> =
        member.engines(spec).into_iter().filter_map(arguments::page_size).collect();
    let candidates =
        [(events, Evidence::Events), (endpoint, Evidence::Endpoint), (arguments, Evidence::Arguments)];
    let best = candidates.into_iter().find(|(sizes, _)| !sizes.is_empty());
    let (sizes, evidence) = best.unwrap_or((BTreeSet::new(), Evidence::None));
    let able = member.workers.iter().filter(|worker| worker.ready || worker.reason == ODD_PAGE);
    // Every router tells of the same workers.
    let votes: BTreeMap<&str, u32> =
        able.filter_map(|worker| Some((worker.worker.as_str(), page_of(worker)?))).collect();
    let by_itself = member.workers.is_empty() && member.ready;
    Some(Pages {
        votes: if by_itself { sizes.iter().copied().collect() } else { votes.into_values().collect() },
        left_out: member.workers.iter().any(|worker| worker.reason == ODD_PAGE),
        pod: member.name(),
        ready: member.ready,
        role: member.role?,
        engine: member.engine(spec).label(),
        sizes,
        evidence,
    })
}

/// The page of a worker, as routers find it.
fn page_of(worker: &WorkerHealth) -> Option<u32> {
    worker.targets.iter().find_map(|target| target.event_page_size).or(worker.reported_page_size)
}

fn judge(pool: &InferencePool, pages: &[Pages<'_>]) -> (Finding, BTreeSet<String>) {
    let nobody = BTreeSet::new();
    if pages.is_empty() {
        return (no_pods(pool), nobody);
    }
    let block = pool.spec.block_size;
    let misfits = listed(pages, |_, size| !block.is_multiple_of(size));
    if !misfits.is_empty() {
        let message = format!(
            "Pages do not divide spec.blockSize {block}: {}; these caches earn no credit{}: start the engines with a page \
             that divides it, or set spec.blockSize to a multiple of their page.",
            text(&misfits),
            left_out(pages)
        );
        return (Finding::fails(Reason::BlockSizeMismatch, message), blamed(&misfits));
    }
    if let Some(found) = mixed(block, pages) {
        return found;
    }
    let unknown = |ready: bool| {
        let pods = pages.iter().filter(|pages| pages.sizes.is_empty() && pages.ready == ready);
        pods.map(|pages| pages.pod).collect::<BTreeSet<&str>>()
    };
    let silent = unknown(true);
    if !silent.is_empty() {
        let message = format!(
            "Nothing shows the page size of {}: neither cache events nor the engine's endpoint, and no --block-size or \
             --page-size is given; create a KvRouter for the pool, or name the page on the command line.",
            names(silent.iter().copied())
        );
        return (Finding::unknown(Reason::NotObservable, message), nobody);
    }
    match pages.iter().flat_map(|pages| &pages.sizes).next() {
        Some(size) => {
            let message = format!("Every page seen has {size} tokens, which divides spec.blockSize {block}.");
            (Finding::holds(Reason::SamePageSize, message), nobody)
        }
        None => {
            let starting = unknown(false);
            let message =
                format!("Engines are not ready yet: {}; wait, or look at their logs.", names(starting));
            (Finding::unknown(Reason::EngineStarting, message), nobody)
        }
    }
}

/// Pods whose page is not the pool's, in roles that have several pages or in
/// roles of which each has one.
fn mixed(block: u32, pages: &[Pages<'_>]) -> Option<(Finding, BTreeSet<String>)> {
    let votes = pages.iter().flat_map(|pages| pages.votes.iter().map(|page| (pages.role, *page)));
    let all = pages.iter().flat_map(|pages| pages.sizes.iter().map(|page| (pages.role, *page)));
    // While nobody may be picked, everybody counts.
    let common = usual(block, votes).or_else(|| usual(block, all))?;
    let odd = listed(pages, |_, size| size != common);
    if odd.is_empty() {
        return None;
    }
    let mut by_role: BTreeMap<RoleName, BTreeSet<u32>> = BTreeMap::new();
    for pages in pages.iter().filter(|pages| !pages.sizes.is_empty()) {
        by_role.entry(pages.role).or_default().extend(&pages.sizes);
    }
    let (odd_ones, effect) = (text(&odd), left_out(pages));
    let finding = match by_role.iter().find(|(_, sizes)| 1 < sizes.len()) {
        Some((role, _)) => {
            let message = format!(
                "Page sizes of {} pods differ: the pool's page has {common} tokens, but not that of {odd_ones}{effect}; \
                 start all engines with the same page.",
                role.label()
            );
            Finding::fails(Reason::MixedWithinRole, message)
        }
        None => {
            let each = by_role.iter().flat_map(|(role, sizes)| sizes.iter().map(move |size| (role, size)));
            let each: Vec<String> = each.map(|(role, size)| format!("{} {size}", role.label())).collect();
            let message = format!(
                "Roles have different page sizes: {}; the pool's page has {common} tokens, but not that of \
                 {odd_ones}{effect}; start all engines with the same page.",
                each.join(", ")
            );
            Finding::fails(Reason::MixedAcrossRoles, message)
        }
    };
    Some((finding, blamed(&odd)))
}

/// Who gets no requests, as a part of a sentence; empty for nobody.
fn left_out(pages: &[Pages<'_>]) -> String {
    let pods = names(pages.iter().filter(|pages| pages.left_out).map(|pages| pages.pod));
    if pods.is_empty() { pods } else { format!(", and routers send no requests to {pods}") }
}

/// Pods with such a size, and the size.
fn listed<'a>(pages: &[Pages<'a>], wrong: impl Fn(&Pages<'a>, u32) -> bool) -> Vec<(&'a str, u32)> {
    let of_pod = |pages: &Pages<'a>| {
        let size = pages.sizes.iter().copied().find(|size| wrong(pages, *size))?;
        Some((pages.pod, size))
    };
    pages.iter().filter_map(of_pod).collect()
}

fn text(pods: &[(&str, u32)]) -> String {
    let described: Vec<String> = pods.iter().map(|(pod, size)| format!("{pod} ({size} tokens)")).collect();
    names(described.iter().map(String::as_str))
}

fn blamed(pods: &[(&str, u32)]) -> BTreeSet<String> {
    pods.iter().map(|(pod, _)| (*pod).to_owned()).collect()
}

fn rows(pages: &[Pages<'_>]) -> Vec<PageSizeSeen> {
    let mut counts: BTreeMap<(RoleName, &str, Option<u32>, &str), u32> = BTreeMap::new();
    for pages in pages {
        let sizes: Vec<Option<u32>> = pages.sizes.iter().copied().map(Some).collect();
        for size in if sizes.is_empty() { vec![None] } else { sizes } {
            *counts.entry((pages.role, pages.engine, size, pages.evidence.label())).or_default() += 1;
        }
    }
    let row = |((role, engine, page_size, evidence), pods): (_, _)| {
        let (engine, evidence): (&str, &str) = (engine, evidence);
        PageSizeSeen { role, engine: engine.to_owned(), page_size, pods, evidence: evidence.to_owned() }
    };
    counts.into_iter().map(row).take(MOST_ROWS).collect()
}
