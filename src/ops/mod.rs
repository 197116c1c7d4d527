//! Ops on candle tensors. They know tensors and nothing about models.
//!
//! Each op is one file: a public function that checks its input, a fast CPU path, a Metal path, and a plain
//! `reference` in tensor ops that serves as the oracle. Every op returns its input's dtype, sums in f32 or exact
//! integers, and gives row `r` of an `M`-row call the bits that the same row gets alone.

pub mod affine_matmul;
pub mod argmax;
pub mod attention;
mod check;
mod context;
mod cpu;
pub mod gated_delta;
pub mod gates;
pub mod launch;
pub(crate) mod memory;
#[cfg(feature = "metal")]
mod metal;
pub mod moe;
mod operand;
pub mod rms_norm;
pub mod rope;
pub mod routes;
mod vector;

pub(crate) use launch::wanted as on_launches;

/// Rows up to which the kernels of launches give a row the bits that it has alone; with more, those of prompts run.
pub(crate) const DECODE_ROWS: usize = 16;

pub use affine_matmul::{gate_up_silu, matmul, matmul_grouped};
pub use argmax::argmax;
pub use attention::attention;
pub use context::{CancelToken, Context};
pub use gated_delta::gated_delta;
pub use gates::{sigmoid_gate, silu_gate};
pub use rms_norm::{rms_norm, rms_norm_gated};
pub use rope::rope;
