//! What a failed request means to the user, and whether to send it again.

use std::time::Duration;

use hf_hub::HFError;

use super::Repository;
use crate::Error;

/// Longest wait that the hub may ask for.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// A request that failed.
pub(super) enum Fault {
    /// The hub's answer, or none.
    Request(HFError),
    /// An answer that is not what was asked for.
    Answer(String),
}

impl Fault {
    /// Whether the same request may succeed later.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Answer(_) => true,
            Self::Request(error) => match error {
                HFError::Request { source, .. } => !source.is_builder(),
                HFError::RateLimited { .. } | HFError::Xet { .. } => true,
                HFError::Http { context } => matches!(context.status.as_u16(), 408 | 500..=599),
                _ => false,
            },
        }
    }

    /// Whether no connection came about at all, which waiting seldom mends.
    pub fn is_connect(&self) -> bool {
        matches!(self, Self::Request(HFError::Request { source, .. }) if source.is_connect())
    }

    /// How long the hub asks to wait.
    pub fn wait(&self) -> Option<Duration> {
        match self {
            Self::Request(HFError::RateLimited { retry_after, .. }) => {
                retry_after.map(|wait| wait.min(LONGEST_WAIT))
            }
            _ => None,
        }
    }

    /// As the user reads it.
    pub fn explain(&self, repository: &Repository, endpoint: &str) -> Error {
        let page = format!("{endpoint}/{}", repository.id());
        let what = match self {
            Self::Answer(what) => what.clone(),
            Self::Request(error) => match error {
                // The hub answers so for what does not exist too, lest names of private repositories be guessed.
                HFError::AuthRequired { .. } => format!(
                    "the hub asks for a login: no such repository (nor a folder of this name here), or it is private or gated. Check the name at {page}; if it is right, set HF_TOKEN to a token that may read it"
                ),
                HFError::Forbidden { .. } => format!(
                    "access is refused: accept the model's terms at {page}, and set HF_TOKEN to a token that may read it"
                ),
                HFError::RepoNotFound { .. } => format!(
                    "no such repository at {endpoint} (or it is private and HF_TOKEN is not set), and no such folder here: check the name"
                ),
                HFError::RevisionNotFound { revision, .. } => {
                    format!("has no branch, tag or commit {revision:?}: see {page}/tree/main")
                }
                HFError::EntryNotFound { path, .. } => format!("has no file {path}"),
                HFError::RateLimited { retry_after, .. } => {
                    let wait = match retry_after {
                        Some(wait) => format!("{} seconds", wait.as_secs()),
                        None => "some minutes".into(),
                    };
                    format!("the hub answers too many requests: wait {wait}; with HF_TOKEN set more are allowed")
                }
                HFError::Http { context } => format!(
                    "the hub answers {}{}",
                    context.status,
                    context.server_message.as_ref().map_or(String::new(), |m| format!(": {m}"))
                ),
                HFError::Request { source, .. } if source.is_connect() => format!(
                    "no such folder here, and {endpoint} cannot be reached ({}): check the name and the network; with HF_HUB_OFFLINE=1 the cache alone is used",
                    causes(source)
                ),
                HFError::Request { source, .. } => format!(
                    "the connection to {endpoint} broke off ({}): try again, what has arrived is kept",
                    causes(source)
                ),
                other => other.to_string(),
            },
        };
        Error::Hub {
            repo: repository.to_string(),
            what,
        }
    }
}

/// An error with what caused it: the outer ones often say nothing.
fn causes(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}
