//! Are page sizes equal, and do they divide the block? Pure.
//!
//! Evidence, best first: cache events and the engine's live endpoint, both as
//! routers report them; then the command line. No engine's default is ever
//! assumed: what nothing shows is unknown.

use std::collections::{BTreeMap, BTreeSet};

use kvrouter_crds::conditions::{ConditionType, Finding, Reason, names};
use kvrouter_crds::config::RoleName;
use kvrouter_crds::pool::{InferencePoolSpec, PageSizeSeen};

use super::arguments;
use super::members::Member;
use super::validate::selector_text;
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
}

/// What `PageSizeParity` should say, and the rows of `status.pageSizes`.
pub fn parity(spec: &InferencePoolSpec, members: &[Member<'_>]) -> (Seen, Vec<PageSizeSeen>) {
    let pages: Vec<Pages<'_>> = members.iter().filter_map(|member| pages(spec, member)).collect();
    let (finding, blamed) = judge(spec, &pages);
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
    Some(Pages {
        pod: member.name(),
        ready: member.ready,
        role: member.role?,
        engine: member.engine(spec).label(),
        sizes,
        evidence,
    })
}

fn judge(spec: &InferencePoolSpec, pages: &[Pages<'_>]) -> (Finding, BTreeSet<String>) {
    let nobody = BTreeSet::new();
    if pages.is_empty() {
        let message = format!(
            "No pod carries the labels of spec.selector; check with: kubectl get pods -l {}",
            selector_text(spec)
        );
        return (Finding::unknown(Reason::NoPods, message), nobody);
    }
    let block = spec.block_size;
    let misfits = listed(pages, |_, size| !block.is_multiple_of(size));
    if !misfits.is_empty() {
        let message = format!(
            "Pages do not divide spec.blockSize {block}: {}; these caches earn no credit: start the engines with a page \
             that divides it, or set spec.blockSize to a multiple of their page.",
            text(&misfits)
        );
        return (Finding::fails(Reason::BlockSizeMismatch, message), blamed(&misfits));
    }
    if let Some(found) = mixed(pages) {
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

/// Page sizes that differ inside of one role, else between roles.
fn mixed(pages: &[Pages<'_>]) -> Option<(Finding, BTreeSet<String>)> {
    let mut usual: BTreeMap<RoleName, u32> = BTreeMap::new();
    for role in pages.iter().map(|pages| pages.role).collect::<BTreeSet<_>>() {
        let of_role: Vec<&Pages<'_>> = pages.iter().filter(|pages| pages.role == role).collect();
        let Some(majority) = majority(&of_role) else { continue };
        usual.insert(role, majority);
        let odd = listed(pages, |pages, size| pages.role == role && size != majority);
        if !odd.is_empty() {
            let message = format!(
                "Page sizes of {} pods differ: most have {majority} tokens, but {}; start all engines with the same page.",
                role.label(),
                text(&odd)
            );
            return Some((Finding::fails(Reason::MixedWithinRole, message), blamed(&odd)));
        }
    }
    let sizes: BTreeSet<u32> = usual.values().copied().collect();
    if sizes.len() < 2 {
        return None;
    }
    let by_role: Vec<String> = usual.iter().map(|(role, size)| format!("{} {size}", role.label())).collect();
    let message = format!(
        "Roles have different page sizes: {}; start all engines with the same page.",
        by_role.join(", ")
    );
    let everybody = pages.iter().map(|pages| pages.pod.to_owned()).collect();
    Some((Finding::fails(Reason::MixedAcrossRoles, message), everybody))
}

/// The size that most pods have; of several, the smallest. None while none is known.
fn majority(pages: &[&Pages<'_>]) -> Option<u32> {
    let mut counts: BTreeMap<u32, usize> = BTreeMap::new();
    for size in pages.iter().flat_map(|pages| &pages.sizes) {
        *counts.entry(*size).or_default() += 1;
    }
    let most = counts.values().copied().max()?;
    counts.into_iter().find(|(_, count)| *count == most).map(|(size, _)| size)
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
