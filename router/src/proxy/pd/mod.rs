//! Two legs: one worker prefills a request, another one decodes it.
//!
//! A request is divided where a ready prefill and a ready decode worker of one
//! protocol stand for its model and the protocol can take it; mixed workers serve
//! the rest, and prefill and decode workers never get a request as it is. The two
//! picks share the prompt's one tokenisation, and each books a lease and leaves a
//! receipt. Clients get decode's answer.
//!
//! [`Contract`] is what a protocol does to bodies, one file each: [`sglang`],
//! [`nixl`]. [`division`] is what they need of a body; [`legs`] runs the two
//! requests; [`usage`] tells clients what prefill had cached.

pub mod division;
pub mod legs;
pub mod nixl;
pub mod sglang;
pub mod usage;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderName, Request, header};
use http_body_util::Full;
use kvrouter_core::ids::{Role, WorkerId};
use kvrouter_crds::config::{PrefillGuardRelease, Protocol};

use super::answer::Watch;
use super::arrival::Arrival;
use super::errors::ClientError;
use super::forward::{Ids, Way};
use super::salting::Salting;
use super::splice::Splice;
use super::{App, Attempt, Inbound, outbound};
use crate::fleet::{Exclusion, Needs, Place, ReadyReason, Worker};
use crate::pool::Pool;
use crate::route::Routed;
use division::{Division, Indivisible};

/// What a protocol writes to the two workers.
pub trait Contract: Sync {
    /// Why it cannot take such a body.
    fn refuses(&self, division: &Division) -> Option<Indivisible>;
    /// The first body or bodies of a request.
    fn begin(&self, request: &Outgoing<'_>, pair: &Pair<'_>) -> Begun;
}

/// A request on its way to two workers.
#[derive(Debug)]
pub struct Outgoing<'a> {
    /// The client's bytes.
    pub body: &'a Bytes,
    /// What is known of them.
    pub division: &'a Division,
    /// Its tenant's salt, where it has one.
    pub salting: Option<&'a Salting>,
    /// Token ids for prefill, where it may have them.
    pub prefill_ids: Option<Ids>,
    /// The same for decode.
    pub decode_ids: Option<Ids>,
}

/// What the workers must know of each other.
pub struct Pair<'a> {
    /// `host:port` of prefill.
    pub prefill: &'a str,
    /// Port of its bootstrap server.
    pub bootstrap_port: u16,
    /// Its rank.
    pub rank: u32,
    /// How many it has.
    pub ranks: u32,
    /// A number that nobody else gets.
    pub unique: &'a dyn Fn() -> u64,
}

/// How a request begins.
#[derive(Debug)]
pub enum Begun {
    /// Both get it at once.
    Together {
        /// Prefill's body.
        prefill: Bytes,
        /// Decode's.
        decode: Bytes,
    },
    /// Decode waits for prefill's answer.
    PrefillFirst {
        /// Prefill's body.
        prefill: Bytes,
        /// What comes of its answer.
        go_on: GoOn,
    },
}

/// Decode's body, made of prefill's answer; `Err` is a stable label.
pub type GoOn = fn(&Outgoing<'_>, &Bytes) -> Result<Continued, &'static str>;

/// How it goes on after prefill.
#[derive(Debug)]
pub struct Continued {
    /// Decode's body.
    pub decode: Bytes,
    /// Tokens that prefill had cached, where it says so outside its usage.
    pub cached: Option<u64>,
}

/// What `protocol` does to bodies.
pub fn contract(protocol: Protocol) -> &'static dyn Contract {
    match protocol {
        Protocol::SGLang => &sglang::SGLang,
        Protocol::NIXL => &nixl::Nixl,
    }
}

impl<'a> Outgoing<'a> {
    /// Changes to its body, with those in it that are no protocol's.
    fn splice(&self) -> Splice<'a> {
        let mut splice = Splice::new(&self.division.layout);
        if let Some(salting) = self.salting {
            salting.put(&mut splice);
        }
        splice
    }
}

/// Puts ids into a body, outside any member that belongs to a protocol.
fn hand(splice: &mut Splice<'_>, ids: &Ids) {
    let text = ids.text.as_ref();
    match &ids.way {
        Way::Value(at) => splice.replace(at.clone(), text),
        Way::Member(_) => splice.set("input_ids", text),
        Way::InParameters(_) => {
            splice.set("kv_transfer_params", format!("{{\"prompt_token_ids\":{text}}}"));
        }
    }
}

/// Ready workers of each part of `protocol` that serve `ask` and are not `excluded`.
pub fn ready(pool: &Pool, protocol: Protocol, needs: Needs<'_>, excluded: &[WorkerId]) -> [usize; 2] {
    let workers = pool.fleet.workers();
    [Role::Prefill, Role::Decode].map(|role| {
        let does =
            |worker: &&Arc<Worker>| worker.does(role, protocol, needs) && !excluded.contains(&worker.id);
        workers.iter().filter(does).count()
    })
}

/// The protocol of a pair that stands now for a request with these needs.
pub fn standing(pool: &Pool, needs: Needs<'_>) -> Option<Protocol> {
    let stands = |protocol: &Protocol| ready(pool, *protocol, needs, &[]).iter().all(|ready| *ready > 0);
    Protocol::ALL.into_iter().find(stands)
}

/// The protocol of a pair that can serve `inbound` now.
pub(super) fn pair_for(app: &App, inbound: &Inbound, excluded: &[WorkerId]) -> Option<Protocol> {
    let division = inbound.division.as_ref()?.as_ref().ok()?;
    let needs = inbound.ask.needs();
    let stands = |protocol: &Protocol| {
        contract(*protocol).refuses(division).is_none()
            && ready(&app.pool, *protocol, needs, excluded).iter().all(|ready| *ready > 0)
    };
    Protocol::ALL.into_iter().find(stands)
}

/// Why nobody in the fleet will ever serve `inbound`: it cannot be divided, and
/// there are no mixed workers, ready or not.
pub(super) fn refusal(app: &App, inbound: &Inbound) -> Option<ClientError> {
    let division = inbound.division.as_ref()?;
    // One of no role, or of two, serves nothing until its labels are mended.
    let is_of_a_role =
        |place: &Place| !matches!(place.exclusion, Some(Exclusion::NoRole | Exclusion::TwoRoles));
    let workers = app.pool.fleet.workers();
    let places: Vec<_> = workers.iter().map(|worker| worker.place()).filter(is_of_a_role).collect();
    if places.is_empty() || places.iter().any(|place| place.role == Role::Mixed) {
        return None;
    }
    let protocols = Protocol::ALL.into_iter().filter(|protocol| {
        places.iter().any(|place| place.handover.is_some_and(|handover| handover.protocol == *protocol))
    });
    let mut reason = None;
    for protocol in protocols {
        match division {
            Err(indivisible) => reason = Some(*indivisible),
            Ok(division) => reason = Some(contract(protocol).refuses(division)?),
        }
    }
    reason.map(|reason| ClientError::Indivisible { reason })
}

/// What is said where nobody may be picked: that pages differ, where this is why
/// no pair stands.
pub(super) fn nobody(pool: &Pool) -> ClientError {
    let workers = pool.fleet.workers();
    let is_odd =
        |worker: &&Arc<Worker>| worker.place().handover.is_some() && worker.reason() == ReadyReason::PageSize;
    let is_served = || {
        standing(pool, Needs::default()).is_some() || workers.iter().any(|worker| worker.takes(Role::Mixed))
    };
    match workers.iter().find(is_odd) {
        Some(worker) if !is_served() => {
            ClientError::UnequalPages { worker: worker.id.clone(), page: worker.page().unwrap_or_default() }
        }
        _ => ClientError::NoWorker,
    }
}

/// One attempt on a pair.
pub(super) async fn try_pair(
    app: &App,
    inbound: &Inbound,
    protocol: Protocol,
    arrival: &mut Arrival,
    attempt: u32,
    excluded: &[WorkerId],
) -> Attempt {
    let Some(Ok(division)) = &inbound.division else {
        // `pair_for` has looked; a fleet that changes cannot change the body.
        return legs::refused(ClientError::NoWorker);
    };
    let prefill = inbound.ask.part(Role::Prefill, protocol);
    let mut prefill = match super::pick(app, &prefill, arrival, attempt, excluded) {
        Ok(routed) => Watch::of_prefill(app, routed),
        Err(unrouted) => return Attempt::Unrouted(unrouted),
    };
    let decode = inbound.ask.part(Role::Decode, protocol);
    let mut decode = match super::pick(app, &decode, arrival, attempt, excluded) {
        Ok(routed) => Watch::new(app.pool.clone(), routed, inbound.streamed),
        Err(unrouted) => {
            prefill.give_up("no_decode_target");
            return Attempt::Unrouted(unrouted);
        }
    };
    let workers = [&prefill, &decode].map(|watch| Arc::clone(&watch.routed().worker));
    let (body, salting) = (&inbound.body.bytes, inbound.salting.as_ref());
    let [prefill_ids, decode_ids] = match ids_for_pair(app, inbound, &workers).await {
        Ok(ids) => ids,
        Err((at, error)) => {
            prefill.give_up(error.code());
            decode.give_up(error.code());
            return Attempt::Failed { worker: workers[at].id.clone(), error };
        }
    };
    let request = Outgoing { body, division, salting, prefill_ids, decode_ids };
    let begun = begin(app, contract(protocol), &request, prefill.routed());
    let (guard, limit) = (app.pool.live.read().prefill_guard, super::first_byte_limit(app));
    let run = Run { app, inbound, attempt, guard, limit };
    match begun {
        Begun::Together { prefill: first, decode: second } => {
            legs::together(&run, (prefill, first), (decode, second)).await
        }
        Begun::PrefillFirst { prefill: first, go_on } => {
            legs::in_turn(&run, (prefill, first), decode, |answer| go_on(&request, answer)).await
        }
    }
}

/// What both get of the token ids; an error with the number of the worker that
/// cannot serve the request.
async fn ids_for_pair(
    app: &App,
    inbound: &Inbound,
    workers: &[Arc<Worker>; 2],
) -> Result<[Option<Ids>; 2], (usize, ClientError)> {
    for (at, worker) in workers.iter().enumerate() {
        inbound.is_kept_apart_by(worker).map_err(|error| (at, error))?;
    }
    super::ids_for(app, inbound, [&workers[0], &workers[1]]).await.map_err(|error| (0, error))
}

fn begin(app: &App, contract: &dyn Contract, request: &Outgoing<'_>, prefill: &Routed) -> Begun {
    let handover = prefill.worker.place().handover;
    let pair = Pair {
        prefill: prefill.worker.id.as_str(),
        bootstrap_port: handover.map_or(0, |handover| handover.bootstrap_port),
        rank: prefill.target.rank.0,
        ranks: u32::try_from(prefill.worker.targets.len()).unwrap_or(u32::MAX),
        unique: &|| app.pool.clock.unique(),
    };
    contract.begin(request, &pair)
}

/// What legs of one attempt have in common.
struct Run<'a> {
    app: &'a App,
    inbound: &'a Inbound,
    attempt: u32,
    guard: PrefillGuardRelease,
    /// How long either leg may take to its first byte.
    limit: Duration,
}

impl Run<'_> {
    /// What is sent to the worker of `watch`; an error is in its receipt.
    fn outbound(&self, watch: &mut Watch, body: Bytes) -> Result<Request<Full<Bytes>>, ClientError> {
        let mut request = outbound(self.inbound, body, watch.routed(), self.attempt)
            .inspect_err(|error| watch.give_up(error.code()))?;
        let all = request.headers_mut();
        if watch.routed().role == Role::Prefill {
            // Its answer is read here.
            all.remove(header::ACCEPT_ENCODING);
        }
        // SGLang lets these win over the body, where it was told to read them.
        let overrides = |name: &&HeaderName| name.as_str().starts_with("x-override-");
        let overrides: Vec<HeaderName> = all.keys().filter(overrides).cloned().collect();
        overrides.iter().for_each(|name| drop(all.remove(name)));
        Ok(request)
    }

    /// Whether another attempt may follow one in which `worker` failed.
    fn may_retry(&self, worker: &WorkerId) -> bool {
        let excluded = std::slice::from_ref(worker);
        self.attempt < super::ATTEMPTS && self.app.way(self.inbound, excluded).is_some()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::prompt::endpoint::Endpoint;
    use crate::proxy::splice::Members;

    pub(super) fn division(endpoint: Endpoint, body: &str) -> Result<Division, Indivisible> {
        Division::of(endpoint, &Members::of(body.as_bytes()))
    }

    /// A request without a tenant, with the ids that prefill and decode may have.
    pub(super) fn outgoing<'a>(
        body: &'a Bytes,
        division: &'a Division,
        [prefill_ids, decode_ids]: [Option<Ids>; 2],
    ) -> Outgoing<'a> {
        Outgoing { body, division, salting: None, prefill_ids, decode_ids }
    }

    /// Rank 1 of 4, with the usual port.
    pub(super) fn pair<'a>(prefill: &'a str, unique: &'a dyn Fn() -> u64) -> Pair<'a> {
        Pair { prefill, bootstrap_port: 8998, rank: 1, ranks: 4, unique }
    }
}
