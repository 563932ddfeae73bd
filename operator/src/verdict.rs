//! What is wrong with a spec, as the pure stages hand it to each other.

use kvrouter_crds::conditions::{ConditionType, Finding, Reason};

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
