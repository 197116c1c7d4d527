//! Whether a draft fits a target.

use crate::error::{Error, Result};
use crate::qwen3_5::config::{LayerType, TextConfig};

/// Refuses a draft that cannot read the target's tokens or cannot score them, and says what differs. `tokens` is the number
/// of entries of the tokenizer that both share.
pub fn check_draft(target: &TextConfig, draft: &TextConfig, tokens: usize) -> Result<()> {
    if draft.vocab_size < target.vocab_size.min(tokens) {
        return Err(Error::Draft(format!(
            "it has embeddings of {} tokens, the target of {} (the tokenizer has {tokens}): use a draft of the target's family",
            draft.vocab_size, target.vocab_size
        )));
    }
    if !draft.layer_types.contains(&LayerType::FullAttention) {
        return Err(Error::Draft(
            "it has no full-attention layer, so nothing can score: use another draft".into(),
        ));
    }
    if draft.max_position_embeddings < target.max_position_embeddings {
        tracing::info!(
            draft = draft.max_position_embeddings,
            target = target.max_position_embeddings,
            "the draft's context is shorter than the target's: longer prompts are read whole"
        );
    }
    Ok(())
}
