//! The crate's error: every variant says what was malformed, where, and what to do.

use std::path::{Path, PathBuf};

use candle_core::DType;

/// The crate's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong. Bad input is always one of these, never a panic.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An op got a tensor of a dtype that it does not take, or two dtypes that must agree and do not.
    #[error("{op}: {name} has dtype {found:?}, expected {expected}; no op converts silently, so convert it before the call")]
    DType {
        /// The op.
        op: &'static str,
        /// The argument.
        name: &'static str,
        /// The dtype that it has.
        found: DType,
        /// What it must be.
        expected: String,
    },
    /// An op got a tensor of a shape that it does not take.
    #[error("{op}: {name} has shape {found:?}, expected {expected}")]
    Shape {
        /// The op.
        op: &'static str,
        /// The argument.
        name: &'static str,
        /// The shape that it has.
        found: Vec<usize>,
        /// What it must be.
        expected: String,
    },
    /// An argument's value is out of range.
    #[error("{op}: {what}")]
    Argument {
        /// The function.
        op: &'static str,
        /// What is wrong, and what to do.
        what: String,
    },
    /// A model's `config.json` (or one of its companions) is malformed or asks for something unsupported.
    #[error("{}: {what}", file.display())]
    Config {
        /// The file.
        file: PathBuf,
        /// What is wrong, and what to do.
        what: String,
    },
    /// A tensor of a checkpoint is missing or malformed.
    #[error("{}: tensor {tensor}: {what}", file.display())]
    Tensor {
        /// The file, or the folder when the tensor is in none of its files.
        file: PathBuf,
        /// The tensor's name.
        tensor: String,
        /// What is wrong.
        what: String,
    },
    /// A file of a model is missing, truncated or not what its name says.
    #[error("{}: {what}", file.display())]
    File {
        /// The file.
        file: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// Reading or writing a file failed.
    #[error("{}: {source}", file.display())]
    Io {
        /// The file.
        file: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The prompt cannot be used: empty, too long, or with a token outside the vocabulary.
    #[error("prompt: {0}")]
    Prompt(String),
    /// A cache was used against its rules (a refusal leaves it as it was).
    #[error("cache: {0}")]
    Cache(String),
    /// An option's value is out of range or clashes with another's.
    #[error("option {name}: {what}")]
    Option {
        /// The option.
        name: &'static str,
        /// What is wrong, and what to do.
        what: String,
    },
    /// The tokenizer could not be loaded or used.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// The chat template could not be parsed or rendered.
    #[error("chat template: {0}")]
    Template(String),
    /// A model could not be fetched from the hub.
    #[error("hub: {repo}: {what}")]
    Hub {
        /// The repository as the user named it.
        repo: String,
        /// What is wrong, and what to do.
        what: String,
    },
    /// Models would not fit in memory.
    #[error("not enough memory: {what}: use a smaller model or context, or raise the limit (`memory_limit_bytes`, --force)")]
    Memory {
        /// Bytes that are needed.
        needed: u64,
        /// Bytes that may be used.
        available: u64,
        /// What takes them.
        what: String,
    },
    /// A draft model does not fit its target.
    #[error("draft model: {0}")]
    Draft(String),
    /// The caller asked for the end ([`CancelToken`](crate::ops::CancelToken)) before there was a result.
    #[error("cancelled")]
    Cancelled,
    /// candle's own error.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

impl Error {
    /// An [`Error::Argument`].
    pub(crate) fn argument(op: &'static str, what: impl Into<String>) -> Self {
        Self::Argument {
            op,
            what: what.into(),
        }
    }

    /// An [`Error::Io`].
    pub(crate) fn io(file: impl AsRef<Path>, source: std::io::Error) -> Self {
        Self::Io {
            file: file.as_ref().to_path_buf(),
            source,
        }
    }

    /// An [`Error::Config`].
    pub(crate) fn config(file: impl AsRef<Path>, what: impl Into<String>) -> Self {
        Self::Config {
            file: file.as_ref().to_path_buf(),
            what: what.into(),
        }
    }
}
