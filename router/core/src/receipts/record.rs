//! The binary record: what a decision writes on its way, and nothing more.
//!
//! JSON and digests are made of it later, off the hot path. A record stays in
//! the process that made it, so there is one version and no compatibility; it
//! is checked all the same, because a record that was read wrongly is a receipt
//! that lies.
//!
//! Layout, integers as LEB128 varints unless said otherwise:
//!
//! ```text
//! u32 le   length of the whole record
//! u8       VERSION
//! text     request id                       text: length, then bytes
//! ints     time, attempt, prompt tokens, prompt blocks, block size, images
//! u8 × 5   role, exact tokens, outcome, session, tie (0xff: nobody chosen)
//! u128 le  namespace
//! settings see `write_settings`
//! target?  turn: 0, or 1 and a target       target: text and rank
//! int      place of the chosen candidate, where there is one
//! int      how many candidates were priced
//! int      how many follow
//!   each   target; u8 flags; u8 state and reason, four bits each; claimed × 3,
//!          hits × 3, predicted, active blocks, queued, context, requests,
//!          shared active, images seen, elsewhere, epoch, seq, [age];
//!          f64 le × 4: cost, uncached, load, images; [u64 le next block]
//! int      how many shadows follow: u8 policy, target, zigzag regret
//! ```
//!
//! Flags: bits 0 and 1 evidence, 2 credited, 3 age follows, 4 and 5 rejection
//! plus one, 6 a next block, 7 it is that of the candidate before.

use std::sync::Arc;

use super::labels::Named;
use super::{CandidateRecord, ChosenRecord, Receipt, SCHEMA_VERSION};
use crate::blocks::{BlockHash, NamespaceId};
use crate::ids::{DpRank, Epoch, Role, Target, WorkerId};
use crate::policy::decode_demand::DecodeDemand;
use crate::policy::sessions::SessionUse;
use crate::policy::shadow::{PolicySet, Shadow};
use crate::policy::tie::TieBranch;
use crate::policy::{
    Candidate, ImageWeight, Load, LoadWeights, Outcome, OverlapWeights, Overload, PolicyKind,
    SessionSettings, Settings, Terms, TierCredit,
};
use crate::trust::Verdict;
use crate::units::{Millis, TierHits, Tokens};

/// Version of the layout above.
const VERSION: u8 = 1;
/// Most bytes of a record: 4,096 candidates with the longest names fit.
pub const MAX_RECORD_BYTES: usize = 2 << 20;
/// Bytes of a record without names and candidates, about.
const HEAD_BYTES: usize = 320;
/// Bytes of a candidate with its name, about.
const CANDIDATE_BYTES: usize = 112;
/// No tie: nobody was chosen.
const NOBODY: u8 = 0xff;

/// What is known of a decision when it is made. Borrows everything; candidates
/// are sorted by target and each has its terms.
#[derive(Clone, Copy, Debug)]
pub struct Draft<'a> {
    /// The request's id.
    pub request_id: &'a str,
    /// Milliseconds since 1970.
    pub time_unix_ms: u64,
    /// Attempt of the request, from 1; 0 where nothing was decided.
    pub attempt: u32,
    /// What was picked for.
    pub role: Role,
    /// The settings in force.
    pub settings: &'a Settings,
    /// Digest of the namespace.
    pub namespace: NamespaceId,
    /// Tokens of the prompt; an estimate unless `exact_tokens`.
    pub prompt_tokens: Tokens,
    /// Whether the prompt was tokenised.
    pub exact_tokens: bool,
    /// Its full blocks.
    pub blocks: &'a [BlockHash],
    /// Tokens per block.
    pub block_size: u32,
    /// Pictures, clips and recordings in the request.
    pub images: u64,
    /// The target that was chosen before this pick.
    pub turn: Option<&'a Target>,
    /// Who stood for choice.
    pub candidates: &'a [Candidate],
    /// Their prices.
    pub terms: &'a [Terms],
    /// What some of them hold for another namespace, sorted by target.
    pub elsewhere: &'a [(Target, u64)],
    /// Place of the chosen one, and what decided among equals.
    pub chosen: Option<(usize, TieBranch)>,
    /// How the route ended.
    pub outcome: Outcome,
    /// What the request's session had to say.
    pub session: SessionUse,
    /// What shadow policies would have chosen.
    pub shadows: &'a [Shadow],
}

/// One decision in bytes. Clones share them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record(Arc<[u8]>);

/// Why bytes are no record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}, at byte {offset}: {fault}")]
pub struct RecordError {
    /// What was being read.
    pub field: &'static str,
    /// Where.
    pub offset: usize,
    /// What is wrong.
    pub fault: Fault,
}

/// What is wrong with a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The bytes end early.
    #[error("the record is cut off")]
    Truncated,
    /// Bytes are left, or the length is not theirs.
    #[error("the record's length is not its own")]
    Length,
    /// Another version.
    #[error("version {0} is not known")]
    Version(u8),
    /// A number that stands for nothing.
    #[error("{0} stands for nothing")]
    Unknown(u8),
    /// A number that does not fit.
    #[error("a number is too large")]
    Number,
    /// Bytes that are no text.
    #[error("no text")]
    Text,
    /// Candidates were priced that are not there.
    #[error("{priced} candidates were priced and {found} are recorded")]
    Candidates {
        /// How many were priced.
        priced: u64,
        /// How many follow.
        found: u64,
    },
}

impl<'a> Draft<'a> {
    /// The draft of a request of which nothing is known and for which nothing
    /// was decided; what is known goes over it.
    pub const fn undecided(request_id: &'a str, settings: &'a Settings, block_size: u32) -> Self {
        Self {
            request_id,
            time_unix_ms: 0,
            attempt: 0,
            role: Role::Mixed,
            settings,
            namespace: NamespaceId(0),
            prompt_tokens: Tokens(0),
            exact_tokens: false,
            blocks: &[],
            block_size,
            images: 0,
            turn: None,
            candidates: &[],
            terms: &[],
            elsewhere: &[],
            chosen: None,
            outcome: Outcome::NoTarget,
            session: SessionUse::None,
            shadows: &[],
        }
    }

    /// The record. Two allocations, whatever the number of candidates. Those
    /// beyond [`MAX_RECORD_BYTES`] are left out, which the reader will notice.
    pub fn encode(&self) -> Record {
        let room = HEAD_BYTES + self.request_id.len() + self.candidates.len() * CANDIDATE_BYTES;
        let mut out = Writer { out: Vec::with_capacity(room) };
        out.out.extend_from_slice(&[0; 4]);
        out.out.push(VERSION);
        out.text(self.request_id);
        for number in [
            self.time_unix_ms,
            u64::from(self.attempt),
            self.prompt_tokens.0,
            self.blocks.len() as u64,
            u64::from(self.block_size),
            self.images,
        ] {
            out.int(number);
        }
        let tie = self.chosen.map_or(NOBODY, |(_, tie)| tie.code());
        let labels =
            [self.role.code(), u8::from(self.exact_tokens), self.outcome.code(), self.session.code(), tie];
        out.out.extend_from_slice(&labels);
        out.out.extend_from_slice(&self.namespace.0.to_le_bytes());
        out.settings(self.settings);
        out.out.push(u8::from(self.turn.is_some()));
        if let Some(turn) = self.turn {
            out.target(turn);
        }
        if let Some((place, _)) = self.chosen {
            out.int(place as u64);
        }
        out.candidates(self);
        out.int(self.shadows.len() as u64);
        for shadow in self.shadows {
            out.out.push(shadow.policy.code());
            out.target(&shadow.target);
            let regret = shadow.regret_blocks;
            out.int((regret.wrapping_shl(1) ^ (regret >> 63)).cast_unsigned());
        }
        let length = u32::try_from(out.out.len()).unwrap_or(u32::MAX);
        out.out[..4].copy_from_slice(&length.to_le_bytes());
        Record(out.out.into())
    }
}

/// Appends to a record.
struct Writer {
    out: Vec<u8>,
}

/// The numbers of one candidate: eighteen varints of ten bytes at most, four
/// doubles, a hash and two bytes.
struct Scratch {
    bytes: [u8; 256],
    length: usize,
}

impl Scratch {
    #[inline]
    fn int(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.byte(value as u8 | 0x80);
            value >>= 7;
        }
        self.byte(value as u8);
    }

    #[inline]
    fn byte(&mut self, byte: u8) {
        // 256 bytes hold any candidate; the mask spares the check.
        self.bytes[self.length & 255] = byte;
        self.length += 1;
    }

    #[inline]
    fn words(&mut self, word: [u8; 8]) {
        if let Some(place) = self.bytes.get_mut(self.length..self.length + 8) {
            place.copy_from_slice(&word);
        }
        self.length += 8;
    }
}

impl Writer {
    fn int(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.out.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.out.push(value as u8);
    }

    fn text(&mut self, text: &str) {
        self.int(text.len() as u64);
        self.out.extend_from_slice(text.as_bytes());
    }

    fn target(&mut self, target: &Target) {
        self.text(target.worker.as_str());
        self.int(u64::from(target.rank.0));
    }

    fn doubles(&mut self, numbers: &[f64]) {
        numbers.iter().for_each(|number| self.out.extend_from_slice(&number.to_le_bytes()));
    }

    fn optional(&mut self, number: Option<f64>) {
        self.out.push(u8::from(number.is_some()));
        self.doubles(number.as_slice());
    }

    /// Policy, overlap × 3 (the last two optional), load × 4, tiers × 3, in-flight
    /// credit, most queued (optional), cold reserve, image weight, session mode and
    /// time to live, shadows, demand mode and its request weight.
    fn settings(&mut self, settings: &Settings) {
        let Settings { policy, overlap, load, tiers, in_flight_credit, overload, .. } = settings;
        self.out.push(policy.code());
        self.doubles(&[overlap.default]);
        self.optional(overlap.prefill);
        self.optional(overlap.decode);
        self.doubles(&[load.queue, load.decode, load.request, load.imbalance]);
        self.doubles(&[tiers.device, tiers.host, tiers.disk]);
        self.out.push(in_flight_credit.code());
        self.out.push(u8::from(overload.max_queued.is_some()));
        overload.max_queued.iter().for_each(|most| self.int(most.0));
        self.doubles(&[overload.cold_reserve, settings.image_weight.0]);
        self.out.push(settings.sessions.mode.code());
        self.int(settings.sessions.time_to_live.0);
        self.int(settings.shadows.iter().fold(0, |set, policy| set | 1 << policy.code()));
        self.out.push(settings.decode_demand.mode.code());
        self.doubles(&[settings.decode_demand.request_weight]);
    }

    fn candidates(&mut self, draft: &Draft<'_>) {
        self.int(draft.terms.len() as u64);
        self.int(draft.candidates.len() as u64);
        let mut scratch = Scratch { bytes: [0; 256], length: 0 };
        let mut elsewhere = draft.elsewhere.iter().peekable();
        let mut before = None;
        for (candidate, terms) in draft.candidates.iter().zip(draft.terms) {
            if self.out.len() > MAX_RECORD_BYTES {
                return;
            }
            let rejected = elsewhere.next_if(|(target, _)| *target == candidate.target);
            let rejected = rejected.map_or(0, |(_, blocks)| *blocks);
            let next = usize::try_from(candidate.hits.total()).ok().and_then(|at| draft.blocks.get(at));
            scratch.length = 0;
            scratch.candidate(candidate, terms, rejected, next.copied(), before);
            before = next.copied();
            self.target(&candidate.target);
            self.out.extend_from_slice(scratch.bytes.get(..scratch.length).unwrap_or_default());
        }
    }
}

impl Scratch {
    #[inline]
    fn candidate(
        &mut self,
        candidate: &Candidate,
        terms: &Terms,
        elsewhere: u64,
        next: Option<BlockHash>,
        before: Option<BlockHash>,
    ) {
        let Candidate { claimed, hits, load, trust, .. } = candidate;
        let repeats = next.is_some() && next == before;
        let rejection = terms.rejection.map_or(0, |rejection| rejection.code() + 1);
        let flags = candidate.evidence.code()
            | u8::from(trust.credited) << 2
            | u8::from(trust.age.is_some()) << 3
            | rejection << 4
            | u8::from(next.is_some()) << 6
            | u8::from(repeats) << 7;
        self.byte(flags);
        self.byte(trust.state.code() | trust.reason.code() << 4);
        for number in [
            claimed.device,
            claimed.host,
            claimed.disk,
            hits.device,
            hits.host,
            hits.disk,
            candidate.predicted,
            load.active_blocks,
            load.queued.0,
            load.context.0,
            load.requests,
            candidate.shared_active,
            candidate.images_seen,
            elsewhere,
            trust.epoch.0,
            trust.seq,
        ] {
            self.int(number);
        }
        if let Some(age) = trust.age {
            self.int(age.0);
        }
        for number in [terms.cost, terms.uncached, terms.load, terms.images] {
            self.words(number.to_le_bytes());
        }
        if let Some(next) = next.filter(|_| !repeats) {
            self.words(next.0.to_le_bytes());
        }
    }
}

impl Record {
    /// Takes bytes for a record; whether they are one shows when it is read.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        Self(bytes.into())
    }

    /// Its bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// The request's id, without reading the rest.
    pub fn request_id(&self) -> &str {
        let mut reader = Reader { bytes: &self.0, at: 5, field: "request_id" };
        reader.text().unwrap_or_default()
    }

    /// The receipt, as yet without a result.
    pub fn decode(&self) -> Result<Receipt, RecordError> {
        Reader { bytes: &self.0, at: 0, field: "length" }.receipt()
    }
}

/// Reads a record from its beginning.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    /// What is being read, for complaints.
    field: &'static str,
}

type Read<T> = Result<T, RecordError>;

impl<'a> Reader<'a> {
    fn wrong<T>(&self, fault: Fault) -> Read<T> {
        Err(RecordError { field: self.field, offset: self.at, fault })
    }

    fn take(&mut self, count: usize) -> Read<&'a [u8]> {
        let taken = self.at.checked_add(count).and_then(|end| self.bytes.get(self.at..end));
        match taken {
            Some(taken) => {
                self.at += count;
                Ok(taken)
            }
            None => self.wrong(Fault::Truncated),
        }
    }

    fn array<const N: usize>(&mut self) -> Read<[u8; N]> {
        let taken = self.take(N)?;
        Ok(taken.try_into().expect("as many as were asked for"))
    }

    fn byte(&mut self) -> Read<u8> {
        self.array::<1>().map(|[byte]| byte)
    }

    fn int(&mut self) -> Read<u64> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let part = u64::from(byte & 0x7f);
            if part << shift >> shift != part {
                return self.wrong(Fault::Number);
            }
            value |= part << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        self.wrong(Fault::Number)
    }

    fn int32(&mut self) -> Read<u32> {
        let value = self.int()?;
        u32::try_from(value).or_else(|_| self.wrong(Fault::Number))
    }

    fn double(&mut self) -> Read<f64> {
        self.array().map(f64::from_le_bytes)
    }

    fn text(&mut self) -> Read<&'a str> {
        let length = self.int()?;
        let bytes = self.take(usize::try_from(length).unwrap_or(usize::MAX))?;
        std::str::from_utf8(bytes).or_else(|_| self.wrong(Fault::Text))
    }

    fn target(&mut self) -> Read<Target> {
        let worker = WorkerId::new(self.text()?);
        Ok(Target { worker, rank: DpRank(self.int32()?) })
    }

    fn flag(&mut self) -> Read<bool> {
        match self.byte()? {
            0 => Ok(false),
            1 => Ok(true),
            other => self.wrong(Fault::Unknown(other)),
        }
    }

    fn optional<T>(&mut self, read: impl FnOnce(&mut Self) -> Read<T>) -> Read<Option<T>> {
        if self.flag()? { read(self).map(Some) } else { Ok(None) }
    }

    fn named<T: Named>(&mut self) -> Read<T> {
        let code = self.byte()?;
        self.of_code(code)
    }

    fn of_code<T: Named>(&self, code: u8) -> Read<T> {
        T::of_code(code).map_or_else(|| self.wrong(Fault::Unknown(code)), Ok)
    }

    /// Says what comes next.
    fn next(&mut self, field: &'static str) -> &mut Self {
        self.field = field;
        self
    }

    fn receipt(mut self) -> Read<Receipt> {
        let length = u32::from_le_bytes(self.array()?);
        if usize::try_from(length) != Ok(self.bytes.len()) {
            return self.wrong(Fault::Length);
        }
        match self.next("version").byte()? {
            VERSION => {}
            other => return self.wrong(Fault::Version(other)),
        }
        let request_id = self.next("request_id").text()?.into();
        let time_unix_ms = self.next("time_unix_ms").int()?;
        let attempt = self.next("attempt").int32()?;
        let prompt_tokens = Tokens(self.next("prompt_tokens").int()?);
        let prompt_blocks = self.next("prompt_blocks").int()?;
        let block_size = self.next("block_size").int32()?;
        let images = self.next("images").int()?;
        let role = self.next("role").named()?;
        let exact_tokens = self.next("exact_tokens").flag()?;
        let outcome = self.next("outcome").named()?;
        let session = self.next("session").named()?;
        let tie = match self.next("chosen.tie").byte()? {
            NOBODY => None,
            code => Some(self.of_code::<TieBranch>(code)?),
        };
        let namespace = NamespaceId(u128::from_le_bytes(self.next("namespace").array()?));
        let settings = self.next("settings").settings()?;
        let turn = self.next("turn").optional(Self::target)?;
        self.next("chosen");
        let place = tie.map(|_| self.int()).transpose()?;
        let candidates = self.next("candidates").candidates()?;
        let shadows = self.next("shadows").shadows()?;
        if self.next("length").at != self.bytes.len() {
            return self.wrong(Fault::Length);
        }
        let mut predicted_hit_tokens = Tokens(0);
        let mut chosen = None;
        if let (Some(place), Some(tie)) = (place, tie) {
            let found = usize::try_from(place).ok().and_then(|place| candidates.get(place));
            let Some(found) = found else { return self.next("chosen").wrong(Fault::Number) };
            predicted_hit_tokens = Tokens(found.hits.total().saturating_mul(u64::from(block_size)));
            chosen = Some(ChosenRecord { target: found.target.clone(), tie });
        }
        let mut receipt = Receipt {
            schema_version: SCHEMA_VERSION,
            request_id,
            time_unix_ms,
            attempt,
            role,
            policy_digest: super::policy_digest(&settings),
            settings,
            namespace,
            prompt_tokens,
            exact_tokens,
            prompt_blocks,
            block_size,
            turn,
            candidate_count: candidates.len() as u64,
            candidates,
            chosen,
            outcome,
            predicted_hit_tokens,
            images,
            session,
            shadows,
            result: None,
        };
        super::dominance::mark(&mut receipt.candidates);
        Ok(receipt)
    }

    fn settings(&mut self) -> Read<Settings> {
        Ok(Settings {
            policy: self.named()?,
            overlap: OverlapWeights {
                default: self.double()?,
                prefill: self.optional(Self::double)?,
                decode: self.optional(Self::double)?,
            },
            load: LoadWeights {
                queue: self.double()?,
                decode: self.double()?,
                request: self.double()?,
                imbalance: self.double()?,
            },
            tiers: TierCredit { device: self.double()?, host: self.double()?, disk: self.double()? },
            in_flight_credit: self.named()?,
            overload: Overload {
                max_queued: self.optional(Self::int)?.map(Tokens),
                cold_reserve: self.double()?,
            },
            image_weight: ImageWeight(self.double()?),
            sessions: SessionSettings { mode: self.named()?, time_to_live: Millis(self.int()?) },
            shadows: {
                let set = self.int()?;
                let of = |policy: &&PolicyKind| set & 1 << policy.code() != 0;
                PolicyKind::ALL.iter().filter(of).copied().fold(PolicySet::default(), PolicySet::with)
            },
            decode_demand: DecodeDemand { mode: self.named()?, request_weight: self.double()? },
        })
    }

    fn candidates(&mut self) -> Read<Vec<CandidateRecord>> {
        let (priced, found) = (self.int()?, self.int()?);
        if priced != found {
            return self.wrong(Fault::Candidates { priced, found });
        }
        let mut all: Vec<CandidateRecord> = Vec::new();
        for _ in 0..found {
            let before = all.last().and_then(|last| last.next_block);
            all.push(self.candidate(before)?);
        }
        Ok(all)
    }

    fn candidate(&mut self, before: Option<BlockHash>) -> Read<CandidateRecord> {
        let target = self.next("candidates.target").target()?;
        let flags = self.next("candidates.evidence").byte()?;
        let evidence = self.of_code(flags & 3)?;
        let rejection = match self.next("candidates.terms.rejection").field_of(flags) {
            0 => None,
            code => Some(self.of_code(code - 1)?),
        };
        let verdict = self.next("candidates.trust").byte()?;
        let (state, reason) = (self.of_code(verdict & 15)?, self.of_code(verdict >> 4)?);
        let claimed = self.next("candidates.claimed").tiers()?;
        let hits = self.next("candidates.hits").tiers()?;
        let predicted = self.next("candidates.predicted").int()?;
        self.next("candidates.load");
        let load = Load {
            active_blocks: self.int()?,
            queued: Tokens(self.int()?),
            context: Tokens(self.int()?),
            requests: self.int()?,
        };
        let shared_active = self.next("candidates.shared_active").int()?;
        let images_seen = self.next("candidates.images_seen").int()?;
        let rejected_other_namespace = self.next("candidates.rejected_other_namespace").int()?;
        self.next("candidates.trust");
        let (epoch, seq) = (Epoch(self.int()?), self.int()?);
        let age = if flags & 8 != 0 { Some(Millis(self.int()?)) } else { None };
        self.next("candidates.terms");
        let (cost, uncached) = (self.double()?, self.double()?);
        let terms = Terms { cost, uncached, load: self.double()?, images: self.double()?, rejection };
        self.next("candidates.next_block");
        let next_block = match (flags & 64 != 0, flags & 128 != 0) {
            (false, _) => None,
            (true, true) => before,
            (true, false) => Some(BlockHash(u64::from_le_bytes(self.array()?))),
        };
        let trust = Verdict { state, reason, credited: flags & 4 != 0, epoch, seq, age };
        Ok(CandidateRecord {
            target,
            claimed,
            hits,
            predicted,
            evidence,
            rejected_other_namespace,
            next_block,
            load,
            shared_active,
            images_seen,
            trust,
            terms,
            dominated_by: None,
        })
    }

    /// The rejection in a candidate's flags.
    const fn field_of(&self, flags: u8) -> u8 {
        flags >> 4 & 3
    }

    fn tiers(&mut self) -> Read<TierHits> {
        Ok(TierHits { device: self.int()?, host: self.int()?, disk: self.int()? })
    }

    fn shadows(&mut self) -> Read<Vec<Shadow>> {
        let count = self.int()?;
        let mut all = Vec::new();
        for _ in 0..count {
            let (policy, target, zigzag) = (self.named()?, self.target()?, self.int()?);
            let regret_blocks = (zigzag >> 1).cast_signed() ^ -(zigzag & 1).cast_signed();
            all.push(Shadow { policy, target, regret_blocks });
        }
        Ok(all)
    }
}
