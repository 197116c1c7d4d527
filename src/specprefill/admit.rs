//! Whether a prompt is prefilled sparsely, decided in one place.

use serde::{Deserialize, Serialize};

use super::spans::union;
use super::{Required, Scoring, Settings};

/// Why a prompt is, or is not, prefilled sparsely.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Reason {
    /// It is.
    Admitted,
    /// The settings say no.
    #[default]
    Disabled,
    /// There is no draft model.
    NoDraft,
    /// It is not longer than the threshold.
    TooShort,
    /// The share to keep is 1.
    KeepsAll,
    /// What must be kept is all there is.
    AllMandatory,
    /// It is longer than the draft's context.
    DraftContext,
    /// The draft could not score it.
    ScoringFailed,
}

impl Reason {
    /// In words, for a prompt of `tokens` tokens.
    pub fn explain(self, settings: &Settings, tokens: usize) -> String {
        let threshold = settings.threshold;
        match self {
            Self::Admitted => {
                format!("{tokens} prompt tokens are more than the threshold, {threshold}")
            }
            Self::Disabled => "SpecPrefill is off".into(),
            Self::NoDraft => "there is no draft model".into(),
            Self::TooShort => {
                format!("{tokens} prompt tokens are not more than the threshold, {threshold}")
            }
            Self::KeepsAll => "the settings keep every token".into(),
            Self::AllMandatory => "all of the prompt must be kept".into(),
            Self::DraftContext => {
                format!("{tokens} prompt tokens are more than the draft model's context")
            }
            Self::ScoringFailed => "the draft could not score the prompt".into(),
        }
    }
}

/// What happens to a prompt that the draft cannot score.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnFailure {
    /// The target reads all of it, and the usage says why.
    #[default]
    Dense,
    /// The request fails.
    Error,
}

/// Whether a prompt of `tokens` tokens, of which `required` must be kept, is prefilled sparsely. `draft` is the draft's context
/// in tokens, if there is a draft.
pub fn admit(
    settings: &Settings,
    draft: Option<usize>,
    tokens: usize,
    required: &[Required],
) -> Reason {
    // Ranges may overlap: what must be kept is their union.
    let must = union(required.iter().map(|r| r.tokens.clone()), tokens);
    let must: usize = must.iter().map(|r| r.len()).sum();
    // Look-ahead tokens need positions too.
    let ahead = match &settings.scorer {
        Scoring::Attention(scorer) => scorer.lookahead,
        _ => 0,
    };
    let reason = match (settings.enabled, draft) {
        (false, _) => Reason::Disabled,
        (_, None) => Reason::NoDraft,
        _ if settings.keep.is_all(tokens) => Reason::KeepsAll,
        _ if tokens <= settings.threshold => Reason::TooShort,
        (_, Some(context)) if tokens + ahead > context => Reason::DraftContext,
        _ if must >= tokens => Reason::AllMandatory,
        _ => Reason::Admitted,
    };
    tracing::info!(
        ?reason,
        tokens,
        must,
        settings.threshold,
        "SpecPrefill's admission"
    );
    reason
}
