//! Fast long prompts and lossless self-speculation for Qwen3.5-family models on candle.
#![deny(missing_docs)]

pub mod affine;
mod error;
pub mod hub;
pub mod mtp;
pub mod ops;
pub mod pipeline;
pub mod qwen3_5;
pub mod specprefill;

pub use error::{Error, Result};
