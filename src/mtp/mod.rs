//! Decoding: draft with the model's own head, verify in one pass, accept what plain decoding would have said.

mod prefill;
mod sampling;
mod session;
mod stats;

pub use prefill::{prefill, PrefillOptions};
pub use sampling::Sampling;
pub use session::{FinishReason, Session, SessionOptions};
pub use stats::DecodeStats;
