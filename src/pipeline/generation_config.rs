//! `generation_config.json`: which tokens end an answer.

use std::path::Path;

use serde_json::Value;

use super::json::parse_optional;
use crate::{Error, Result};

/// What a model's `generation_config.json` says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GenerationConfig {
    /// The tokens that end an answer.
    pub eos_token_ids: Vec<u32>,
}

impl GenerationConfig {
    /// Reads the file of a model's folder; a missing file gives the default.
    pub fn read(dir: impl AsRef<Path>) -> Result<Self> {
        let file = dir.as_ref().join("generation_config.json");
        let Some(value) = parse_optional(&file)? else {
            return Ok(Self::default());
        };
        let malformed = || Error::config(&file, "eos_token_id is neither an id nor a list of ids");
        let id = |value: &Value| {
            value
                .as_u64()
                .and_then(|id| u32::try_from(id).ok())
                .ok_or_else(malformed)
        };
        let eos_token_ids = match value.get("eos_token_id") {
            None | Some(Value::Null) => Vec::new(),
            Some(Value::Array(ids)) => ids.iter().map(id).collect::<Result<_>>()?,
            Some(one) => vec![id(one)?],
        };
        Ok(Self { eos_token_ids })
    }
}
