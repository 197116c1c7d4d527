//! What a model will hold in memory, from its configuration and its files' headers: nothing is loaded.

use candle_core::DType;

use crate::error::Result;

use super::cache::{self, delta_dims};
use super::checkpoint::Checkpoint;
use super::config::{Config, LayerType, TextConfig};
use super::weights::Weights;
use super::LoadOptions;

/// Rows of a pass while a prompt is read.
const PASS_ROWS: u64 = 512;
/// Rows whose logits are there at a time while drafts are verified.
const LOGIT_ROWS: u64 = 16;
/// Output columns that weights are packed by.
const COLUMNS: u64 = 16;

/// Bytes that a model needs, by what they are for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ModelMemory {
    /// The prepared weights.
    pub weights: u64,
    /// The largest tensor as it is read, before it is prepared: only while the model is loaded.
    pub loading: u64,
    /// One sequence's cache: keys and values of every row, gated-delta states, and the draft head's keys and values.
    pub cache: u64,
    /// Activations of a pass of 512 rows, and logits.
    pub scratch: u64,
}

impl ModelMemory {
    /// Of a model that is loaded from `checkpoint` with `options`, and one sequence of `context` rows.
    pub fn new(
        config: &Config,
        checkpoint: &Checkpoint,
        options: &LoadOptions,
        context: usize,
    ) -> Result<Self> {
        let weights = Weights::new(checkpoint, config, &options.device)?;
        let mut need = Self::default();
        for name in weights.names(options.mtp) {
            let (Some(shape), Some(bytes)) = (checkpoint.shape(name), checkpoint.size_bytes(name))
            else {
                continue;
            };
            let bytes = bytes as u64;
            need.loading = need.loading.max(2 * bytes);
            need.weights += match shape {
                // Norms, convolutions and gates become f32.
                [] | [_] | [_, 1, _] | [_, _, 1] => 4 * shape.iter().product::<usize>() as u64,
                [.., n, _] => bytes / (*n as u64).max(1) * (*n as u64).next_multiple_of(COLUMNS),
            };
        }
        let text = &config.text;
        let head = options.mtp && weights.draft().is_some();
        need.cache = cache_bytes(text, head, options.dtype, context as u64);
        need.scratch = scratch_bytes(text);
        Ok(need)
    }

    /// All of it, with the largest tensor only as far as it exceeds what comes after loading.
    pub fn total(&self) -> u64 {
        self.weights + self.loading.max(self.cache + self.scratch)
    }
}

fn cache_bytes(text: &TextConfig, head: bool, dtype: DType, rows: u64) -> u64 {
    let kinds = text.layer_types.iter();
    let attention = kinds
        .filter(|kind| **kind == LayerType::FullAttention)
        .count() as u64;
    let delta = text.layer_types.len() as u64 - attention;
    let lanes = 2 * (text.num_key_value_heads * text.head_dim) as u64;
    let slots = cache::capacity_for(rows as usize) as u64;
    let key_values = (attention + u64::from(head)) * slots * lanes * dtype.size_in_bytes() as u64;

    let dims = delta_dims(text);
    let state = (dims.value_heads * dims.key_dim * dims.value_dim) as u64;
    // The tape of a verified draft holds raw inputs and what the recurrence takes of them.
    let rows = (dims.taps as u64 - 1) + 2 * LOGIT_ROWS;
    let states = delta * 4 * (state + rows * dims.channels() as u64);
    key_values + states
}

fn scratch_bytes(text: &TextConfig) -> u64 {
    let dims = delta_dims(text);
    let heads = (2 * text.num_attention_heads + 2 * text.num_key_value_heads) * text.head_dim;
    let mixer = heads.max(dims.channels() + 2 * dims.value_heads * dims.value_dim);
    let inner = match &text.moe {
        None => 3 * text.intermediate_size,
        Some(moe) => {
            let chosen =
                moe.num_experts_per_tok * (text.hidden_size + 3 * moe.moe_intermediate_size);
            chosen + 3 * moe.shared_expert_intermediate_size
        }
    };
    let row = 6 * text.hidden_size + mixer.max(inner);
    4 * (PASS_ROWS * row as u64 + LOGIT_ROWS * text.vocab_size as u64)
}
