//! From views to candidates: what the index, trust and routing history are worth
//! for one request.
//!
//! It stands between [`crate::index`], which policies must not know, and
//! [`crate::policy`], and decides nothing: hits are cut to what an engine can skip,
//! and credited as trust has it.

use std::sync::Arc;

use parking_lot::Mutex;
use smallvec::{SmallVec, smallvec};

use crate::blocks::{BlockHash, NamespaceId};
use crate::ids::{Role, Slot};
use crate::index::Holdings;
use crate::policy::Evidence;
use crate::policy::field::{Claim, Field};
use crate::policy::history::History;
use crate::policy::hits;
use crate::policy::lineup::Lineup;
use crate::trust::{Freshness, Worth};
use crate::units::{BlockSize, Tick, TierHits, Tokens};

/// Claims that are remembered to find the same ones.
const ALIKE: usize = 16;

/// One prompt of a request, and who holds how much of it.
#[derive(Clone, Debug)]
pub struct Lookup<'a> {
    /// Its length.
    pub tokens: Tokens,
    /// Its full blocks.
    pub blocks: &'a [BlockHash],
    /// What targets hold of them.
    pub held: &'a Holdings,
}

/// What views are asked.
#[derive(Clone, Debug)]
pub struct Question<'a> {
    /// When.
    pub now: Tick,
    /// What targets are wanted for.
    pub role: Role,
    /// How long trust lasts.
    pub freshness: Freshness,
    /// Tokens per block.
    pub size: BlockSize,
    /// What may share the request's blocks.
    pub namespace: NamespaceId,
    /// Its prompts. Engines skip a prefix of each, so each has its own limit.
    pub prompts: &'a [Lookup<'a>],
    /// What targets hold of the first prompt for another namespace.
    pub others: &'a Holdings,
    /// The engine will not read its cache for it.
    pub bypasses_cache: bool,
    /// Stands in for views without credit; `None` where it must not.
    pub history: Option<&'a Mutex<History>>,
}

/// Makes `field` the candidates among `lineup` that are open for the role and
/// that `admits` takes, by place.
pub fn gather(
    question: &Question<'_>,
    lineup: &Arc<Lineup>,
    admits: impl Fn(usize) -> bool,
    field: &mut Field,
) {
    field.begin(lineup);
    let Question { now, role, freshness, others, .. } = *question;
    let has_others = !others.is_empty();
    let limits = question.limits();
    // Most targets hold as much as some other: they make the same claim.
    let mut made = [(([0; 3], Worth::NOTHING), u32::MAX); ALIKE];
    let mut last = made[0];
    for (place, entrant) in lineup.entrants().iter().enumerate() {
        if !entrant.standing.takes(role) || !admits(place) {
            continue;
        }
        let view = entrant.trust.read(now, freshness);
        // Not the view itself: one that has an address is written down twice.
        let worth = view.worth();
        let claim = match question.prompts {
            [one] if worth.is_credited() => {
                let key = (one.held.by_tier(entrant.slot), worth);
                if last.0 != key || last.1 == u32::MAX {
                    let held: u32 = key.0.iter().sum();
                    let like = &mut made[(held ^ held >> 4) as usize % ALIKE];
                    if like.0 != key || like.1 == u32::MAX {
                        *like = (key, field.claim(question.claim(entrant.slot, worth, &limits)));
                    }
                    last = *like;
                }
                last.1
            }
            _ => field.claim(question.claim(entrant.slot, worth, &limits)),
        };
        field.push(place as u32, claim, view);
        if has_others {
            let (elsewhere, own) = (others.of(entrant.slot).total(), question.claimed(entrant.slot).total());
            if elsewhere > own {
                field.held_elsewhere(elsewhere);
            }
        }
    }
}

/// Most leading blocks that an engine can skip, by prompt; of engines whose tokens come
/// one by one, and in pairs.
struct Limits([SmallVec<[u64; 1]>; 2]);

impl Question<'_> {
    /// What the view of `slot` claims of all prompts.
    fn claimed(&self, slot: Slot) -> TierHits {
        self.prompts.iter().map(|one| one.held.of(slot)).fold(TierHits::default(), added)
    }

    /// Most leading blocks of each prompt that an engine can skip, with and without
    /// pairs of tokens.
    fn limits(&self) -> Limits {
        let limit = |paired: bool| move |one: &Lookup<'_>| hits::limit(one.tokens, self.size, paired);
        let of = |paired: bool| match self.bypasses_cache {
            true => smallvec![0; self.prompts.len()],
            false => self.prompts.iter().map(limit(paired)).collect(),
        };
        Limits([of(false), of(true)])
    }

    #[inline(never)]
    fn claim(&self, slot: Slot, worth: Worth, limits: &Limits) -> Claim {
        let (credited, limits) = (worth.is_credited(), &limits.0[usize::from(worth.is_paired())]);
        let usable = |of: &dyn Fn(&Lookup<'_>) -> TierHits| {
            let each = self.prompts.iter().zip(limits).map(|(one, limit)| of(one).at_most(*limit));
            each.fold(TierHits::default(), added)
        };
        let (hits, evidence) = match self.history {
            _ if credited => (worth.share().of(usable(&|one| one.held.of(slot))), Evidence::View),
            Some(history) if worth.is_open_to_history() => {
                let history = history.lock();
                let sent = |one: &Lookup<'_>| history.hits(self.now, slot, self.namespace, one.blocks);
                let hits = usable(&|one| TierHits { device: sent(one), ..TierHits::default() });
                (hits, Evidence::History)
            }
            _ => (TierHits::default(), Evidence::Nothing),
        };
        let evidence = if hits.total() == 0 { Evidence::Nothing } else { evidence };
        Claim { claimed: self.claimed(slot), hits, usable: limits.iter().sum(), evidence, credited }
    }
}

fn added(one: TierHits, other: TierHits) -> TierHits {
    TierHits { device: one.device + other.device, host: one.host + other.host, disk: one.disk + other.disk }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::Delta;
    use crate::ids::{Epoch, Target, WorkerId};
    use crate::index::Index;
    use crate::policy::leases::{Ledger, Pick};
    use crate::policy::lineup::{Entrant, Standing};
    use crate::policy::{PickRequest, Settings};
    use crate::reconcile::Share;
    use crate::trust::SharedTrust;
    use crate::units::Tier;

    const SPACE: NamespaceId = NamespaceId(0);

    fn size() -> BlockSize {
        BlockSize::new(16).expect("not zero")
    }

    /// Targets whose views hold all of `chain`, each worth its share.
    fn fleet(index: &Index, chain: &[BlockHash], shares: &[u32]) -> Arc<Lineup> {
        let entrant = |(number, share): (usize, &u32)| {
            let (slot, trust) = (index.add_target(), SharedTrust::default());
            let (hashes, tier) = (chain.to_vec(), Tier::Device);
            index.apply(slot, &Delta::Stored { namespace: SPACE, parent: BlockHash(0), hashes, tier });
            trust.lock().synced(Tick(0), Epoch(1), 1, Default::default());
            trust.set_credit(Share::of_thousandths(*share));
            let standing = Arc::new(Standing::open(Role::Mixed));
            let target = Target::new(WorkerId::new(format!("w:{number}")), 0);
            (target, Entrant { slot, account: Arc::default(), trust: Arc::new(trust), standing })
        };
        Arc::new(Lineup::new(shares.iter().enumerate().map(entrant)))
    }

    fn field(index: &Index, chain: &[BlockHash], lineup: &Arc<Lineup>) -> Field {
        let mut held = Holdings::default();
        index.look_up(SPACE, chain, &mut held);
        let question = Question {
            now: Tick(0),
            role: Role::Mixed,
            freshness: Freshness::default(),
            size: size(),
            namespace: SPACE,
            prompts: &[Lookup { tokens: Tokens(8 * 16 + 1), blocks: chain, held: &held }],
            others: &Holdings::default(),
            bypasses_cache: false,
            history: None,
        };
        let mut field = Field::default();
        gather(&question, lineup, |_| true, &mut field);
        field
    }

    fn book(ledger: &Ledger, chain: &Arc<[BlockHash]>, field: &mut Field) -> Pick {
        let request = PickRequest {
            id: "r",
            role: Role::Mixed,
            prompt: Tokens(8 * 16 + 1),
            blocks: chain,
            size: size(),
            images: &[],
            session: None,
            choices: 1,
        };
        ledger.select_and_book(Tick(0), &Settings::default(), &request, SPACE, chain, field).expect("one")
    }

    /// Views that claim the same are not worth the same: each has its own share.
    #[test]
    fn hits_count_as_far_as_engines_confirm_them() {
        let (index, ledger) = (Index::default(), Ledger::default());
        let chain: Arc<[BlockHash]> = (1..=8).map(BlockHash).collect();
        let lineup = fleet(&index, &chain, &[1000, 500, 1000, 0]);
        let mut four = field(&index, &chain, &lineup);
        book(&ledger, &chain, &mut four);
        let hits: Vec<u64> = four.rows().iter().map(|row| row.hits.total()).collect();
        assert_eq!(hits, [8, 4, 8, 0]);
        assert!(four.rows().iter().all(|row| row.claimed.total() == 8), "the claim stays");
    }

    #[test]
    fn a_sibling_on_its_way_brings_nothing_that_the_view_claims() {
        let (index, ledger) = (Index::default(), Ledger::default());
        let chain: Arc<[BlockHash]> = (1..=8).map(BlockHash).collect();
        let lineup = fleet(&index, &chain, &[500]);
        let first = book(&ledger, &chain, &mut field(&index, &chain, &lineup));
        let mut next = field(&index, &chain, &lineup);
        let second = book(&ledger, &chain, &mut next);
        let sibling = next.candidate(0);
        assert_eq!((sibling.hits.total(), sibling.predicted), (4, 0));
        drop((first, second));
    }
}
