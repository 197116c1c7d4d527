//! What a pipeline will need in memory, against what there is.

use std::fmt;

use sysinfo::System;

use crate::qwen3_5::ModelMemory;
use crate::{Error, Result};

/// What loading a target with its draft and one answer takes, computed before anything is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryEstimate {
    /// The longest sequence that is counted with, in tokens.
    pub context: usize,
    /// The target, with its MTP head.
    pub target: ModelMemory,
    /// The draft.
    pub draft: Option<ModelMemory>,
    /// Bytes that may be used: the caller's limit, or else what the system has available; `None` if it does not say.
    pub available: Option<u64>,
}

impl MemoryEstimate {
    /// Bytes in all.
    pub fn total(&self) -> u64 {
        self.target.total() + self.draft.map_or(0, |draft| draft.total())
    }

    /// Refuses what does not fit.
    pub(super) fn check(&self) -> Result<()> {
        match self.available {
            Some(available) if self.total() > available => Err(Error::Memory {
                needed: self.total(),
                available,
                what: self.to_string(),
            }),
            _ => Ok(()),
        }
    }
}

impl fmt::Display for MemoryEstimate {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let context = self.context;
        let model = |name: &str, m: &ModelMemory| {
            let [weights, cache, scratch, total] =
                [m.weights, m.cache, m.scratch, m.total()].map(Bytes);
            format!(
                "the {name} takes {total} (weights {weights}, cache of {context} tokens {cache}, scratch {scratch})"
            )
        };
        f.write_str(&model("target", &self.target))?;
        if let Some(draft) = &self.draft {
            write!(f, ", {}", model("draft", draft))?;
        }
        match self.available {
            Some(available) => write!(f, "; {} may be used", Bytes(available)),
            None => Ok(()),
        }
    }
}

/// Bytes for people.
struct Bytes(u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self.0 {
            bytes if bytes < 1_000_000_000 => write!(f, "{:.0} MB", bytes as f64 / 1e6),
            bytes => write!(f, "{:.1} GB", bytes as f64 / 1e9),
        }
    }
}

/// Bytes that this process may still take: what the machine has available, within its control group's limit.
pub(super) fn available() -> Option<u64> {
    let mut system = System::new();
    system.refresh_memory();
    // Page cache counts as used in a group and can be taken: the limit less what is resident.
    let group = system.cgroup_limits();
    let group = group.map_or(u64::MAX, |g| g.total_memory.saturating_sub(g.rss));
    // Zero is how it says that the platform is unknown.
    Some(system.available_memory().min(group)).filter(|bytes| *bytes > 0)
}
