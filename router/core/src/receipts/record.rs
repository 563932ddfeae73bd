//! The binary record: what a decision writes on its way, and nothing more.
//!
//! JSON and digests are made of it later, off the hot path. A record stays in
//! the process that made it, so there is one version and no compatibility; it
//! is checked all the same, because a record that was read wrongly is a receipt
//! that lies.
//!
//! What candidates have in common is written once. Their names are the lineup's,
//! which a record shares with all others of its time, so it says only where each
//! stands there. What they hold of the prompt is a shape, and few differ. Their
//! loads and views are columns, each as wide as its largest number needs. Terms are
//! not written at all: they follow from the facts, by the code that decided, and
//! the price of the chosen one is there to check it.
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
//! int      place of the chosen candidate, f64 le: its price, where there is one
//! where decode input-demand counts (see `decode_demand::counts`):
//!   int, u8  choices; 0, or 1 and the judgement: suggested, original, projected
//! int      how many candidates were priced
//! int      how many follow; nothing more of them if none
//!   u8       0: they are the first of the lineup; 1: a column of their places
//!   int      how many shapes follow
//!     each     u8 flags; claimed × 3, hits × 3, predicted, shared active, images
//!              seen; [u64 le next block]
//!   columns  shape, state and reason (three and five bits), epoch, seq, age plus one,
//!            active blocks, queued, context, requests; and where demand counts:
//!            tokens and requests of it
//!   int      how many hold more for another namespace: candidate, blocks
//! int      how many shadows follow: u8 policy, target, zigzag regret
//! int      how many prompts follow, 0 for a single one: tokens, blocks, claimed × 3
//! ```
//!
//! Flags: bits 0 and 1 evidence, 2 credited, 6 a next block.
//!
//! A column is the first number (u64 le), the width of all (u8: 0, 1, 2, 4 or 8
//! bytes), and for each candidate what it has exclusive-or the first.
//!
//! tidy: large, because what is written and how it is read back change together.

use std::sync::Arc;

use super::labels::Named;
use super::{
    CandidateRecord, ChosenRecord, DemandRecord, JudgementRecord, PromptRecord, Receipt, SCHEMA_VERSION,
};
use crate::blocks::{BlockHash, NamespaceId};
use crate::ids::{DpRank, Epoch, Role, Target, WorkerId};
use crate::policy::candidates::Task;
use crate::policy::decode_demand::{self, DecodeDemand, Demand, Judgement};
use crate::policy::field::{Field, Shape};
use crate::policy::lineup::Names;
use crate::policy::price;
use crate::policy::sessions::SessionUse;
use crate::policy::shadow::{PolicySet, Shadow};
use crate::policy::tie::TieBranch;
use crate::policy::{
    Candidate, Choice, ImageWeight, Load, LoadWeights, Outcome, OverlapWeights, Overload, PolicyKind,
    SessionSettings, Settings, Terms, TierCredit,
};
use crate::trust::{Reason, State, Verdict};
use crate::units::{BlockSize, Millis, TierHits, Tokens};

/// Version of the layout above.
const VERSION: u8 = 4;
/// No tie: nobody was chosen.
const NOBODY: u8 = 0xff;

/// What is known of a decision when it is made. Borrows everything.
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
    /// Its prompts, where it has several; empty else.
    pub prompts: &'a [PromptRecord],
    /// Pictures, clips and recordings in the request.
    pub images: u64,
    /// The target that was chosen before this pick.
    pub turn: Option<&'a Target>,
    /// Who stood for choice, with the loads that were read.
    pub field: Option<&'a Field>,
    /// How many of them were priced.
    pub priced: usize,
    /// Answers that the request wants of its prompt.
    pub choices: u32,
    /// What was chosen; `None` where nobody could be.
    pub choice: Option<&'a Choice>,
    /// What the request's session had to say.
    pub session: SessionUse,
    /// What shadow policies would have chosen.
    pub shadows: &'a [Shadow],
}

/// One decision in bytes, and the names that it refers to. Clones share both.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Record {
    bytes: Arc<Vec<u8>>,
    names: Names,
}

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
    /// The facts give the chosen candidate another price than it had.
    #[error("the facts do not give the price that was recorded")]
    Price,
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
            prompts: &[],
            images: 0,
            turn: None,
            field: None,
            priced: 0,
            choices: 1,
            choice: None,
            session: SessionUse::None,
            shadows: &[],
        }
    }

    /// The record.
    pub fn encode(&self) -> Record {
        self.encode_over(None)
    }

    /// The record, written over one that is not needed any more, in its memory where
    /// nobody else has it.
    pub fn encode_over(&self, spare: Option<Record>) -> Record {
        let mut spare = spare.unwrap_or_default();
        match self.field {
            Some(field) if Arc::ptr_eq(&spare.names, field.names()) => {}
            Some(field) => spare.names = Arc::clone(field.names()),
            None => spare.names = Names::default(),
        }
        match Arc::get_mut(&mut spare.bytes) {
            Some(bytes) => {
                self.write(bytes);
                // One of a larger fleet's: it would keep that room for ever.
                if bytes.capacity() > 4 * bytes.len() {
                    bytes.shrink_to(2 * bytes.len());
                }
            }
            None => {
                let mut bytes = Vec::new();
                self.write(&mut bytes);
                spare.bytes = Arc::new(bytes);
            }
        }
        spare
    }

    fn write(&self, bytes: &mut Vec<u8>) {
        bytes.clear();
        let mut out = Writer { out: bytes };
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
        let tie = self.choice.map_or(NOBODY, |choice| choice.tie.code());
        let outcome = self.choice.map_or(Outcome::NoTarget, |choice| choice.outcome);
        let labels =
            [self.role.code(), u8::from(self.exact_tokens), outcome.code(), self.session.code(), tie];
        out.out.extend_from_slice(&labels);
        out.out.extend_from_slice(&self.namespace.0.to_le_bytes());
        out.settings(self.settings);
        out.out.push(u8::from(self.turn.is_some()));
        if let Some(turn) = self.turn {
            out.target(turn);
        }
        if let Some(choice) = self.choice {
            out.int(choice.chosen as u64);
            out.doubles([choice.cost]);
        }
        let counted = decode_demand::counts(self.settings, self.role);
        if counted {
            out.demand(self.choices, self.choice.and_then(|choice| choice.demand));
        }
        out.int(self.priced as u64);
        out.int(self.field.map_or(0, Field::len) as u64);
        if let Some(field) = self.field.filter(|field| !field.is_empty()) {
            out.field(field, self.blocks);
            if counted {
                out.demands(field.demands());
            }
            out.elsewhere(field);
        }
        out.int(self.shadows.len() as u64);
        for shadow in self.shadows {
            out.out.push(shadow.policy.code());
            out.target(&shadow.target);
            let regret = shadow.regret_blocks;
            out.int((regret.wrapping_shl(1) ^ (regret >> 63)).cast_unsigned());
        }
        out.int(self.prompts.len() as u64);
        for PromptRecord { tokens, blocks, claimed } in self.prompts {
            let numbers = [tokens.0, *blocks, claimed.device, claimed.host, claimed.disk];
            numbers.into_iter().for_each(|number| out.int(number));
        }
        let length = u32::try_from(out.out.len()).unwrap_or(u32::MAX);
        out.out[..4].copy_from_slice(&length.to_le_bytes());
    }
}

/// Appends to a record.
struct Writer<'a> {
    out: &'a mut Vec<u8>,
}

impl Writer<'_> {
    /// Appends fields of at most `ROOM` bytes.
    #[inline]
    fn few<const ROOM: usize>(&mut self, write: impl FnOnce(&mut Few<'_>)) {
        let start = self.out.len();
        self.out.extend_from_slice(&[0; ROOM]);
        let mut few = Few { room: &mut self.out[start..], length: 0 };
        write(&mut few);
        let end = start + few.length;
        self.out.truncate(end);
    }

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

    fn doubles<const COUNT: usize>(&mut self, numbers: [f64; COUNT]) {
        self.out.extend_from_slice(numbers.map(f64::to_le_bytes).as_flattened());
    }

    /// Policy, overlap × 3 (the last two optional), load × 4, tiers × 3, in-flight
    /// credit, most queued (optional), cold reserve, image weight, session mode and
    /// time to live, shadows, demand mode and its request weight.
    fn settings(&mut self, settings: &Settings) {
        let Settings { policy, overlap, load, tiers, in_flight_credit, overload, .. } = settings;
        let shadows = settings.shadows.iter().fold(0, |set, policy| set | 1 << policy.code());
        self.few::<160>(|few| {
            few.bytes([policy.code()]);
            few.doubles([overlap.default]);
            few.optional(overlap.prefill);
            few.optional(overlap.decode);
            few.doubles([load.queue, load.decode, load.request, load.imbalance]);
            few.doubles([tiers.device, tiers.host, tiers.disk]);
            few.bytes([in_flight_credit.code(), u8::from(overload.max_queued.is_some())]);
            overload.max_queued.iter().for_each(|most| few.int(most.0));
            few.doubles([overload.cold_reserve, settings.image_weight.0]);
            few.bytes([settings.sessions.mode.code()]);
            few.int(settings.sessions.time_to_live.0);
            few.int(shadows);
            few.bytes([settings.decode_demand.mode.code()]);
            few.doubles([settings.decode_demand.request_weight]);
        });
    }

    fn demand(&mut self, choices: u32, judgement: Option<Judgement>) {
        self.int(choices.into());
        self.out.push(u8::from(judgement.is_some()));
        if let Some(Judgement { suggested, original, projected }) = judgement {
            [suggested as u64, original as u64, projected.0].into_iter().for_each(|number| self.int(number));
        }
    }

    fn demands(&mut self, demands: &[Demand]) {
        let spans = Span::of(demands, |demand| [demand.tokens.0, demand.requests]);
        self.column(demands, spans[0], |demand| demand.tokens.0);
        self.column(demands, spans[1], |demand| demand.requests);
    }

    fn elsewhere(&mut self, field: &Field) {
        self.int(field.elsewhere.len() as u64);
        for (at, blocks) in &field.elsewhere {
            self.int((*at).into());
            self.int(*blocks);
        }
    }

    fn field(&mut self, field: &Field, blocks: &[BlockHash]) {
        let Field { sights, shapes, loads, .. } = field;
        let scattered = sights.last().is_some_and(|last| last.place as usize + 1 != sights.len());
        self.out.push(u8::from(scattered));
        if scattered {
            let [span] = Span::of(sights, |sight| [sight.place.into()]);
            self.column(sights, span, |sight| sight.place.into());
        }
        self.int(shapes.len() as u64);
        shapes.iter().for_each(|shape| self.shape(shape, blocks));
        let [span] = Span::of(&field.shape_of, |shape| [(*shape).into()]);
        self.column(&field.shape_of, span, |shape| (*shape).into());
        let spans = Span::of(sights, |sight| sight.view.columns());
        self.column(sights, spans[0], |sight| sight.view.columns()[0]);
        self.column(sights, spans[1], |sight| sight.view.columns()[1]);
        self.column(sights, spans[2], |sight| sight.view.columns()[2]);
        self.column(sights, spans[3], |sight| sight.view.columns()[3]);
        let numbers = |load: &Load| [load.active_blocks, load.queued.0, load.context.0, load.requests];
        let spans = Span::of(loads, numbers);
        self.column(loads, spans[0], |load| load.active_blocks);
        self.column(loads, spans[1], |load| load.queued.0);
        self.column(loads, spans[2], |load| load.context.0);
        self.column(loads, spans[3], |load| load.requests);
    }

    fn shape(&mut self, shape: &Shape, blocks: &[BlockHash]) {
        let Shape { claimed, hits, predicted, evidence, credited, shared_active, images_seen } = *shape;
        let next = usize::try_from(hits.total()).ok().and_then(|at| blocks.get(at));
        let flags = evidence.code() | u8::from(credited) << 2 | u8::from(next.is_some()) << 6;
        self.few::<99>(|few| {
            few.bytes([flags]);
            for tiers in [claimed, hits] {
                [tiers.device, tiers.host, tiers.disk].into_iter().for_each(|blocks| few.int(blocks));
            }
            [predicted, shared_active, images_seen].into_iter().for_each(|number| few.int(number));
            if let Some(next) = next {
                few.bytes(next.0.to_le_bytes());
            }
        });
    }

    fn column<T>(&mut self, values: &[T], span: Span, number: impl Fn(&T) -> u64) {
        self.out.extend_from_slice(&span.first.to_le_bytes());
        let cell = |value: &T| number(value) ^ span.first;
        match span.differs.checked_ilog2().map_or(0, |bit| bit / 8 + 1) {
            0 => self.out.push(0),
            1 => self.cells::<T, 1>(values, cell),
            2 => self.cells::<T, 2>(values, cell),
            3 | 4 => self.cells::<T, 4>(values, cell),
            _ => self.cells::<T, 8>(values, cell),
        }
    }

    fn cells<T, const WIDTH: usize>(&mut self, values: &[T], number: impl Fn(&T) -> u64) {
        self.out.push(WIDTH as u8);
        let start = self.out.len();
        self.out.resize(start + values.len() * WIDTH, 0);
        let (cells, _) = self.out[start..].as_chunks_mut::<WIDTH>();
        for (cell, value) in cells.iter_mut().zip(values) {
            cell.copy_from_slice(&number(value).to_le_bytes()[..WIDTH]);
        }
    }
}

/// Room for a few fields at the end of a record: to append them one by one costs
/// several times as much.
struct Few<'a> {
    room: &'a mut [u8],
    length: usize,
}

impl Few<'_> {
    #[inline]
    fn bytes<const COUNT: usize>(&mut self, bytes: [u8; COUNT]) {
        self.room[self.length..self.length + COUNT].copy_from_slice(&bytes);
        self.length += COUNT;
    }

    #[inline]
    fn int(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.bytes([value as u8 | 0x80]);
            value >>= 7;
        }
        self.bytes([value as u8]);
    }

    #[inline]
    fn doubles<const COUNT: usize>(&mut self, numbers: [f64; COUNT]) {
        numbers.into_iter().for_each(|number| self.bytes(number.to_le_bytes()));
    }

    fn optional(&mut self, number: Option<f64>) {
        self.bytes([u8::from(number.is_some())]);
        number.into_iter().for_each(|number| self.doubles([number]));
    }
}

/// What a column's numbers have in common.
#[derive(Clone, Copy)]
struct Span {
    first: u64,
    /// The bits in which any other differs from it.
    differs: u64,
}

impl Span {
    /// Of all numbers of `values` in one go.
    fn of<T, const COUNT: usize>(values: &[T], numbers: impl Fn(&T) -> [u64; COUNT]) -> [Self; COUNT] {
        let first = values.first().map_or([0; COUNT], &numbers);
        let mut spans = first.map(|first| Self { first, differs: 0 });
        for value in values {
            for (span, number) in spans.iter_mut().zip(numbers(value)) {
                span.differs |= number ^ span.first;
            }
        }
        spans
    }
}

impl Record {
    /// Takes bytes for a record of candidates among `names`; whether they are one
    /// shows when it is read.
    pub fn from_parts(bytes: &[u8], names: Names) -> Self {
        Self { bytes: Arc::new(bytes.to_vec()), names }
    }

    /// Memory that it takes, without the names.
    pub fn memory(&self) -> usize {
        self.bytes.capacity()
    }

    /// Its bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The names that it refers to.
    pub const fn names(&self) -> &Names {
        &self.names
    }

    /// The request's id, without reading the rest.
    pub fn request_id(&self) -> &str {
        let mut reader = Reader { bytes: &self.bytes, at: 5, field: "request_id" };
        reader.text().unwrap_or_default()
    }

    /// The namespace of its prompt, without reading the rest.
    pub fn namespace(&self) -> Option<NamespaceId> {
        let mut reader = Reader { bytes: &self.bytes, at: 5, field: "namespace" };
        reader.text().ok()?;
        // Time, attempt, tokens, blocks, block size, images; then five labels.
        for _ in 0..6 {
            reader.int().ok()?;
        }
        reader.take(5).ok()?;
        reader.array().ok().map(|bytes| NamespaceId(u128::from_le_bytes(bytes)))
    }

    /// The receipt, as yet without a result.
    pub fn decode(&self) -> Result<Receipt, RecordError> {
        Reader { bytes: &self.bytes, at: 0, field: "length" }.receipt(&self.names)
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

    // tidy: long, because fields are read in the order of the layout.
    fn receipt(mut self, names: &[Target]) -> Read<Receipt> {
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
        let place = tie.map(|_| Ok((self.int()?, self.double()?))).transpose()?;
        let counted = decode_demand::counts(&settings, role);
        let demand = counted.then(|| self.next("demand").demand()).transpose()?;
        let size = BlockSize::new(block_size).unwrap_or(ONE);
        let task = Task { role, prompt: prompt_tokens, blocks: prompt_blocks, size, images };
        // A session that is followed takes nobody's turn.
        let counted = turn.as_ref().filter(|_| tie != Some(TieBranch::Session));
        let candidates = self.next("candidates").candidates(names, &settings, &task, counted)?;
        let shadows = self.next("shadows").shadows()?;
        let prompts = self.next("prompts").prompts()?;
        if self.next("length").at != self.bytes.len() {
            return self.wrong(Fault::Length);
        }
        let demand = demand.map(|demand| self.next("demand").judged(demand, &candidates)).transpose()?;
        let found = place.map(|place| self.next("chosen").priced(place, &candidates)).transpose()?;
        let hits = found.map_or(0, |found| found.hits.total());
        let predicted_hit_tokens = Tokens(hits.saturating_mul(u64::from(block_size)));
        let chosen = found.zip(tie).map(|(found, tie)| ChosenRecord { target: found.target.clone(), tie });
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
            prompts,
            turn,
            candidate_count: candidates.len() as u64,
            candidates,
            chosen,
            demand,
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

    fn demand(&mut self) -> Read<(u32, Option<[u64; 3]>)> {
        let choices = self.int32()?;
        Ok((choices, self.optional(|reader| Ok([reader.int()?, reader.int()?, reader.int()?]))?))
    }

    /// The judgement, with the names of candidates for their places.
    fn judged(
        &self,
        (choices, judgement): (u32, Option<[u64; 3]>),
        candidates: &[CandidateRecord],
    ) -> Read<DemandRecord> {
        let target = |place: u64| {
            let found = usize::try_from(place).ok().and_then(|place| candidates.get(place));
            found.map_or_else(|| self.wrong(Fault::Number), |found| Ok(found.target.clone()))
        };
        let judged = |[suggested, original, projected]: [u64; 3]| {
            let (suggested, original) = (target(suggested)?, target(original)?);
            Ok(JudgementRecord { suggested, original, projected: Tokens(projected) })
        };
        Ok(DemandRecord { choices, judgement: judgement.map(judged).transpose()? })
    }

    /// The candidate at a place, if it has that price.
    fn priced<'c>(
        &mut self,
        (place, cost): (u64, f64),
        candidates: &'c [CandidateRecord],
    ) -> Read<&'c CandidateRecord> {
        let found = usize::try_from(place).ok().and_then(|place| candidates.get(place));
        match found {
            None => self.wrong(Fault::Number),
            Some(found) if found.terms.cost.to_bits() != cost.to_bits() => {
                self.next("candidates.terms").wrong(Fault::Price)
            }
            Some(found) => Ok(found),
        }
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

    fn candidates(
        &mut self,
        names: &[Target],
        settings: &Settings,
        task: &Task,
        turn: Option<&Target>,
    ) -> Read<Vec<CandidateRecord>> {
        let (priced, found) = (self.int()?, self.int()?);
        if priced != found {
            return self.wrong(Fault::Candidates { priced, found });
        }
        let count = self.fitting(found, names.len())?;
        if count == 0 {
            return Ok(Vec::new());
        }
        let (mut rows, next_blocks) = self.rows(names, count)?;
        let counted = decode_demand::counts(settings, task.role);
        if counted {
            let [tokens, requests] = [self.next("candidates.demand").column(count)?, self.column(count)?];
            for (row, (tokens, requests)) in rows.iter_mut().zip(tokens.into_iter().zip(requests)) {
                row.demand = Demand { tokens: Tokens(tokens), requests };
            }
        }
        let terms = price::terms(settings, task, &rows[..], turn);
        let parts = rows.into_iter().zip(next_blocks).zip(terms);
        let of = |row: &Candidate| counted.then_some(row.demand);
        let mut all: Vec<_> = parts
            .map(|((row, next), terms)| CandidateRecord { demand: of(&row), ..record(row, next, terms) })
            .collect();
        let others = self.next("candidates.rejected_other_namespace").int()?;
        for _ in 0..self.fitting(others, count)? {
            let (at, blocks) = (self.int()?, self.int()?);
            let candidate = usize::try_from(at).ok().and_then(|at| all.get_mut(at));
            let Some(candidate) = candidate else { return self.wrong(Fault::Number) };
            candidate.rejected_other_namespace = blocks;
        }
        Ok(all)
    }

    /// The facts of `count` candidates, and the block that each would hit next.
    fn rows(&mut self, names: &[Target], count: usize) -> Read<(Vec<Candidate>, Vec<Option<BlockHash>>)> {
        let places = match self.next("candidates.target").flag()? {
            true => self.column(count)?,
            false => (0..count as u64).collect(),
        };
        let mut shapes = Vec::new();
        let differing = self.next("candidates.hits").int()?;
        for _ in 0..self.fitting(differing, names.len())? {
            shapes.push(self.shape()?);
        }
        let shape_of = self.column(count)?;
        let states = self.next("candidates.trust").column(count)?;
        let [epochs, seqs, ages] = [self.column(count)?, self.column(count)?, self.column(count)?];
        self.next("candidates.load");
        let [active, queued] = [self.column(count)?, self.column(count)?];
        let [context, requests] = [self.column(count)?, self.column(count)?];
        let (mut rows, mut next_blocks) = (Vec::with_capacity(count), Vec::with_capacity(count));
        for (at, place) in places.into_iter().enumerate() {
            let name = usize::try_from(place).ok().and_then(|place| names.get(place));
            let Some(target) = name else { return self.next("candidates.target").wrong(Fault::Number) };
            let shape = usize::try_from(shape_of[at]).ok().and_then(|shape| shapes.get(shape));
            let Some((shape, next)) = shape else { return self.next("candidates.hits").wrong(Fault::Number) };
            let (state, reason) = self.next("candidates.trust").verdict(states[at])?;
            let Shape { claimed, hits, predicted, evidence, credited, shared_active, images_seen } = *shape;
            let age = ages[at].checked_sub(1).map(Millis);
            rows.push(Candidate {
                target: target.clone(),
                claimed,
                hits,
                predicted,
                evidence,
                trust: Verdict { state, reason, credited, epoch: Epoch(epochs[at]), seq: seqs[at], age },
                load: Load {
                    active_blocks: active[at],
                    queued: Tokens(queued[at]),
                    context: Tokens(context[at]),
                    requests: requests[at],
                },
                shared_active,
                images_seen,
                demand: Demand::default(),
            });
            next_blocks.push(*next);
        }
        Ok((rows, next_blocks))
    }

    fn shape(&mut self) -> Read<(Shape, Option<BlockHash>)> {
        let flags = self.next("candidates.evidence").byte()?;
        let (evidence, credited) = (self.of_code(flags & 3)?, flags & 4 != 0);
        let claimed = self.next("candidates.claimed").tiers()?;
        let hits = self.next("candidates.hits").tiers()?;
        let predicted = self.next("candidates.predicted").int()?;
        let shared_active = self.next("candidates.shared_active").int()?;
        let images_seen = self.next("candidates.images_seen").int()?;
        self.next("candidates.next_block");
        let next = if flags & 64 != 0 { Some(BlockHash(u64::from_le_bytes(self.array()?))) } else { None };
        Ok((Shape { claimed, hits, predicted, evidence, credited, shared_active, images_seen }, next))
    }

    fn verdict(&self, code: u64) -> Read<(State, Reason)> {
        let Ok(code) = u8::try_from(code) else { return self.wrong(Fault::Number) };
        Ok((self.of_code(code & 7)?, self.of_code(code >> 3)?))
    }

    /// `count`, if there can be so many.
    fn fitting(&self, count: u64, most: usize) -> Read<usize> {
        let fitting = usize::try_from(count).ok().filter(|count| *count <= most);
        fitting.map_or_else(|| self.wrong(Fault::Number), Ok)
    }

    fn column(&mut self, count: usize) -> Read<Vec<u64>> {
        let first = u64::from_le_bytes(self.array()?);
        let width = match self.byte()? {
            width @ (0 | 1 | 2 | 4 | 8) => usize::from(width),
            other => return self.wrong(Fault::Unknown(other)),
        };
        let cells = self.take(count * width)?;
        let number = |at: usize| {
            let mut bytes = [0; 8];
            bytes[..width].copy_from_slice(&cells[at * width..][..width]);
            u64::from_le_bytes(bytes) ^ first
        };
        Ok((0..count).map(number).collect())
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

    fn prompts(&mut self) -> Read<Vec<PromptRecord>> {
        let count = self.int()?;
        if count == 1 {
            return self.wrong(Fault::Number);
        }
        let mut all = Vec::new();
        for _ in 0..count {
            let (tokens, blocks) = (Tokens(self.int()?), self.int()?);
            all.push(PromptRecord { tokens, blocks, claimed: self.tiers()? });
        }
        Ok(all)
    }
}

/// For records of requests that nothing is known of.
const ONE: BlockSize = BlockSize::new(1).expect("one is not zero");

fn record(facts: Candidate, next_block: Option<BlockHash>, terms: Terms) -> CandidateRecord {
    CandidateRecord {
        target: facts.target,
        claimed: facts.claimed,
        hits: facts.hits,
        predicted: facts.predicted,
        evidence: facts.evidence,
        rejected_other_namespace: 0,
        next_block,
        load: facts.load,
        demand: None,
        shared_active: facts.shared_active,
        images_seen: facts.images_seen,
        trust: facts.trust,
        terms,
        dominated_by: None,
    }
}
