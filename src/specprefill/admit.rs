//! Whether a prompt is prefilled sparsely, decided in one place.

use serde::{Deserialize, Serialize};

use super::spans::union;
use super::{Required, Settings};

/// Why a prompt is, or is not, prefilled sparsely.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// It is.
    Admitted,
    /// The settings say no.
    Disabled,
    /// There is no draft model.
    NoDraft,
    /// It is not longer than the threshold.
    TooShort,
    /// The share to keep is 1.
    KeepsAll,
    /// What must be kept is all there is.
    AllMandatory,
    /// The draft could not score it.
    ScoringFailed,
}

/// Whether a prompt of `tokens` tokens, of which `required` must be kept, is prefilled sparsely.
pub fn admit(settings: &Settings, has_draft: bool, tokens: usize, required: &[Required]) -> Reason {
    // Ranges may overlap: what must be kept is their union.
    let must = union(required.iter().map(|r| r.tokens.clone()), tokens);
    let must: usize = must.iter().map(|r| r.len()).sum();
    match () {
        _ if !settings.enabled => Reason::Disabled,
        _ if !has_draft => Reason::NoDraft,
        _ if settings.keep.is_all(tokens) => Reason::KeepsAll,
        _ if tokens <= settings.threshold => Reason::TooShort,
        _ if must >= tokens => Reason::AllMandatory,
        _ => Reason::Admitted,
    }
}
