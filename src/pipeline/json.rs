//! Reading a model's JSON companions.

use std::path::Path;

use serde_json::Value;

use crate::{Error, Result};

/// The file's content, `None` when there is no such file.
pub(super) fn read_optional(file: &Path) -> Result<Option<String>> {
    match std::fs::read_to_string(file) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Error::io(file, error)),
    }
}

/// The file as JSON, `None` when there is no such file.
pub(super) fn parse_optional(file: &Path) -> Result<Option<Value>> {
    match read_optional(file)? {
        None => Ok(None),
        Some(text) => serde_json::from_str(&text)
            .map(Some)
            .map_err(|error| Error::config(file, format!("not valid JSON: {error}"))),
    }
}
