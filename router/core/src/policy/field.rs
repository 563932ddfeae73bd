//! The candidates of one pick, as columns.
//!
//! What differs from candidate to candidate, load and the age of its view, is a
//! column each. What a candidate has to do with the prompt is a `Shape`, and most
//! candidates of a pick share one: those without hits, or those that hold the
//! same system prompt. Columns are read in one go, and go into the receipt as
//! they are. A field that is used again keeps its memory.

use std::sync::Arc;

use super::candidates::{Affinity, Candidate, Candidates};
use super::decode_demand::Demand;
use super::leases::Account;
use super::lineup::{Entrant, Lineup, Names, Standing};
use super::prefixes::Depth;
use super::price::Prices;
use super::{Evidence, Load};
use crate::ids::{Role, Slot, Target};
use crate::trust::Reading;
use crate::units::TierHits;

/// The candidates of one pick, sorted by target.
#[derive(Clone, Debug, Default)]
pub struct Field {
    lineup: Arc<Lineup>,
    pub(crate) sights: Vec<Sight>,
    claims: Vec<Claim>,
    pub(crate) shapes: Vec<Shape>,
    pub(crate) shape_of: Vec<u32>,
    pub(crate) loads: Vec<Load>,
    /// Input booked for decoding; empty unless that is counted.
    demands: Vec<Demand>,
    /// Who holds more of the prompt for another namespace, and how many blocks.
    pub(crate) elsewhere: Vec<(u32, u64)>,
    pub(super) prices: Prices,
    /// What every holder of prompts shares with this one; memory to use again.
    depths: Vec<Depth>,
}

/// A candidate as its view has it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sight {
    /// Where it stands in the lineup.
    pub(crate) place: u32,
    /// Number of its claim.
    pub(super) claim: u32,
    /// Its view.
    pub(crate) view: Reading,
}

/// What a view says of the prompt, and what of that counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Claim {
    /// Leading blocks that the view claims, before trust.
    pub claimed: TierHits,
    /// Leading blocks that count.
    pub hits: TierHits,
    /// Most leading blocks that the engine can skip: see `hits::usable`.
    pub usable: u64,
    /// Where `hits` come from.
    pub evidence: Evidence,
    /// Whether the view earns credit.
    pub credited: bool,
}

/// What a candidate has to do with the prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) claimed: TierHits,
    pub(crate) hits: TierHits,
    pub(crate) predicted: u64,
    pub(crate) evidence: Evidence,
    pub(crate) credited: bool,
    pub(crate) shared_active: u64,
    pub(crate) images_seen: u64,
}

impl Field {
    /// Begins anew, with nobody of `lineup` in it.
    pub fn begin(&mut self, lineup: &Arc<Lineup>) {
        if !Arc::ptr_eq(&self.lineup, lineup) {
            self.lineup = Arc::clone(lineup);
        }
        self.sights.clear();
        self.claims.clear();
        self.elsewhere.clear();
        self.sights.reserve(lineup.names().len());
    }

    /// Notes a claim that candidates make; its number is for [`Field::push`].
    pub fn claim(&mut self, claim: Claim) -> u32 {
        /// Claims among which the same one is looked for.
        const LOOKS: usize = 4;
        let from = self.claims.len().saturating_sub(LOOKS);
        let same = self.claims[from..].iter().position(|known| *known == claim);
        let at = same.map_or(self.claims.len(), |at| from + at);
        if same.is_none() {
            self.claims.push(claim);
        }
        at as u32
    }

    /// Adds the target at `place` of the lineup, behind all that come before it.
    #[inline]
    pub fn push(&mut self, place: u32, claim: u32, view: Reading) {
        debug_assert!(self.sights.last().is_none_or(|last| last.place < place), "in order");
        self.sights.push(Sight { place, claim, view });
    }

    /// The candidate added last holds `blocks` of the prompt for another
    /// namespace.
    pub fn held_elsewhere(&mut self, blocks: u64) {
        if let Some(last) = self.sights.len().checked_sub(1) {
            self.elsewhere.push((last as u32, blocks));
        }
    }

    /// How many candidates there are.
    pub const fn len(&self) -> usize {
        self.sights.len()
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.sights.is_empty()
    }

    /// The lineup that they are of.
    pub const fn lineup(&self) -> &Arc<Lineup> {
        &self.lineup
    }

    /// The names that their places are among.
    pub fn names(&self) -> &Names {
        self.lineup.names()
    }

    /// Where the candidate at `at` stands in the lineup.
    pub fn place(&self, at: usize) -> usize {
        self.sights[at].place as usize
    }

    /// The account of the candidate at `at`.
    pub fn account(&self, at: usize) -> &Arc<Account> {
        &self.lineup.entrants()[self.place(at)].account
    }

    /// The input that each candidate holds for decoding; empty where that is not
    /// counted.
    pub fn demands(&self) -> &[Demand] {
        &self.demands
    }

    /// Where `target` is.
    pub(super) fn find(&self, target: &Target) -> Option<usize> {
        let names = self.names();
        self.sights.binary_search_by(|sight| names[sight.place as usize].cmp(target)).ok()
    }

    /// The candidate at `at` as a row.
    pub fn candidate(&self, at: usize) -> Candidate {
        let Shape { claimed, hits, predicted, evidence, shared_active, images_seen, .. } = *self.shape(at);
        Candidate {
            target: self.target(at).clone(),
            claimed,
            hits,
            predicted,
            evidence,
            trust: self.sights[at].view.verdict(),
            load: self.loads[at],
            shared_active,
            images_seen,
            demand: self.demand(at),
        }
    }

    /// All candidates as rows.
    pub fn rows(&self) -> Vec<Candidate> {
        (0..self.len()).map(|at| self.candidate(at)).collect()
    }

    fn shape(&self, at: usize) -> &Shape {
        &self.shapes[self.shape_of[at] as usize]
    }

    /// Makes room for the loads and shapes of all candidates, and hands out what
    /// they are made of.
    pub(super) fn begin_loads(&mut self) -> Loading<'_> {
        let Self { lineup, sights, claims, shapes, shape_of, loads, demands, depths, .. } = self;
        shapes.clear();
        shape_of.clear();
        loads.clear();
        demands.clear();
        depths.clear();
        shape_of.reserve(sights.len());
        loads.reserve(sights.len());
        Loading { entrants: lineup.entrants(), sights, claims, shapes, shape_of, loads, demands, depths }
    }
}

/// A field whose loads are being read.
pub(super) struct Loading<'a> {
    pub(super) entrants: &'a [Entrant],
    pub(super) sights: &'a [Sight],
    pub(super) claims: &'a [Claim],
    pub(super) shapes: &'a mut Vec<Shape>,
    pub(super) shape_of: &'a mut Vec<u32>,
    pub(super) loads: &'a mut Vec<Load>,
    pub(super) demands: &'a mut Vec<Demand>,
    pub(super) depths: &'a mut Vec<Depth>,
}

impl Shape {
    /// A claim, with `expected` leading blocks on their way: chained hashes make
    /// them a prefix. What a credited view claims is not on its way, even where only
    /// a share of it counts.
    pub(super) fn of(claim: &Claim, expected: u64) -> Self {
        let Claim { claimed, mut hits, mut evidence, credited, .. } = *claim;
        let there = if credited { claimed.total().max(hits.total()) } else { hits.total() };
        let predicted = expected.min(claim.usable).saturating_sub(there);
        if predicted > 0 {
            hits.device += predicted;
            evidence = Evidence::InFlight;
        }
        Self { claimed, hits, predicted, evidence, credited, shared_active: 0, images_seen: 0 }
    }
}

impl Candidates for Field {
    fn count(&self) -> usize {
        self.len()
    }

    fn target(&self, at: usize) -> &Target {
        &self.names()[self.place(at)]
    }

    fn kinds(&self) -> usize {
        self.shapes.len()
    }

    #[inline]
    fn kind(&self, at: usize) -> usize {
        self.shape_of[at] as usize
    }

    fn affinity(&self, kind: usize) -> Affinity {
        let Shape { hits, shared_active, images_seen, .. } = self.shapes[kind];
        Affinity { hits, shared_active, images_seen }
    }

    #[inline]
    fn load(&self, at: usize) -> Load {
        self.loads[at]
    }

    fn evidence(&self, at: usize) -> Evidence {
        self.shape(at).evidence
    }

    fn demand(&self, at: usize) -> Demand {
        self.demands.get(at).copied().unwrap_or_default()
    }

    fn is_discredited(&self, at: usize) -> bool {
        let shape = self.shape(at);
        shape.claimed.total() > 0 && !shape.credited
    }
}

impl From<&[Candidate]> for Field {
    /// The same candidates as columns; their accounts are empty ones.
    fn from(rows: &[Candidate]) -> Self {
        let entrant = || Entrant {
            slot: Slot(0),
            account: Arc::default(),
            trust: Arc::default(),
            standing: Arc::new(Standing::open(Role::Mixed)),
        };
        let entrant = |row: &Candidate| (row.target.clone(), entrant());
        let lineup = Arc::new(Lineup::new(rows.iter().map(entrant)));
        let mut field = Self { lineup, ..Self::default() };
        for (place, row) in (0..).zip(rows) {
            field.push(place, 0, row.trust.into());
            field.shape_of.push(place);
            field.shapes.push(Shape {
                claimed: row.claimed,
                hits: row.hits,
                predicted: row.predicted,
                evidence: row.evidence,
                credited: row.trust.credited,
                shared_active: row.shared_active,
                images_seen: row.images_seen,
            });
            field.loads.push(row.load);
            field.demands.push(row.demand);
        }
        field
    }
}
