//! Decoding: draft with the model's own head, verify in one pass, accept what plain decoding would have said.

mod block;
mod controller;
mod cycle;
mod history;
mod ngram;
mod prefill;
mod row;
mod sampling;
mod self_check;
mod session;
mod stats;

pub use controller::{Controller, Depth, MAX_DEPTH};
pub use cycle::{step_all, Ends, Step};
pub use history::LogitsProcessor;
pub use ngram::{Drafter, NGram};
pub use prefill::{prefill, PrefillOptions};
pub use sampling::Sampling;
pub use self_check::{check_head, HeadCheck};
pub use session::{Acceptance, FinishReason, Session, SessionOptions};
pub use stats::{DecodeStats, TokenSources};
