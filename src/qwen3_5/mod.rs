//! The Qwen3.5 model family: packed rows with a position each, any number of sequences in one pass.

mod attention;
mod cache;
pub mod checkpoint;
pub mod config;
pub mod convert;
mod embeddings;
mod gated_delta_net;
mod layer;
mod length;
mod memory;
mod mlp;
mod model;
mod moe;
mod mtp;
mod pass;
mod rope;
mod scope;
mod weights;

pub use crate::ops::gated_delta::Keep;
pub use cache::{Cache, Mark};
pub use embeddings::EmbeddingRows;
pub use length::{CacheLength, Position};
pub use memory::ModelMemory;
pub use model::{Capture, DraftRows, DraftVocabulary, LoadOptions, Model, Rows, Wanted};
pub use rope::RopeKind;
