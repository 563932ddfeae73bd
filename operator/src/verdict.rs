//! What is wrong with a spec, as the pure stages hand it to each other.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kvrouter_crds::conditions::{ConditionType, Finding, Reason, Status, find};

/// One thing that is wrong with a spec or with what it names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Complaint {
    /// `Accepted` or `ResolvedRefs`.
    pub type_: ConditionType,
    /// Why it is false.
    pub reason: Reason,
    /// A sentence that ends with the next step.
    pub message: String,
    /// The field that it is about, as in `spec.kvEvents.nats`; empty for none.
    pub field: String,
}

impl Complaint {
    /// The spec cannot be acted upon.
    pub fn accepted(reason: Reason, field: &str, message: impl Into<String>) -> Self {
        let (field, message) = (field.to_owned(), message.into());
        Self { type_: ConditionType::Accepted, reason, message, field }
    }

    /// Something that the spec names is not as it should be.
    pub fn resolved(reason: Reason, field: &str, message: impl Into<String>) -> Self {
        let (field, message) = (field.to_owned(), message.into());
        Self { type_: ConditionType::ResolvedRefs, reason, message, field }
    }
}

/// Most complaints that a message spells out.
const SPELT_OUT: usize = 5;

/// What the condition `type_` says of all complaints; none if no complaint is
/// about it. Its reason is the first's.
pub fn finding(complaints: &[Complaint], type_: ConditionType) -> Option<Finding> {
    let about: Vec<&Complaint> = complaints.iter().filter(|complaint| complaint.type_ == type_).collect();
    let first = about.first()?;
    let mut message: Vec<String> = about.iter().take(SPELT_OUT).map(|it| it.message.clone()).collect();
    if about.len() > SPELT_OUT {
        message.push(format!("And {} more.", about.len() - SPELT_OUT));
    }
    Some(Finding::fails(first.reason, message.join(" ")))
}

/// What `Ready` says because `dependency` does not hold; none if it does.
pub fn first_failure(conditions: &[Condition], dependency: ConditionType) -> Option<Finding> {
    let condition = find(conditions, dependency)?;
    let status = Status::of(&condition.status);
    let reason = Reason::of(&condition.reason).unwrap_or(Reason::Pending);
    (status != Status::True).then(|| Finding { status, reason, message: condition.message.clone() })
}

/// What `Degraded` says of the published conditions that speak of quality:
/// True if one of them is False, else Unknown if one of them is, else False.
/// Earlier types are worse.
pub fn degraded(conditions: &[Condition], quality: &[ConditionType]) -> Finding {
    let failures: Vec<Finding> =
        quality.iter().filter_map(|type_| first_failure(conditions, *type_)).collect();
    let broken = failures.iter().find(|finding| finding.status == Status::False);
    let unknown = failures.first();
    match (broken, unknown) {
        (Some(finding), _) => Finding { status: Status::True, ..finding.clone() },
        (None, Some(finding)) => finding.clone(),
        (None, None) => Finding::fails(Reason::AsExpected, "Requests are routed as the spec asks for."),
    }
}
