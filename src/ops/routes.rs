//! Which kernel each op call took: a model that leaves its fast path must be visible at a glance.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use candle_core::DType;
use serde::Serialize;

/// Calls by route, named `op/kernel/dtype`, with a reason after `!` when the call fell back.
pub type RouteCounts = BTreeMap<String, u64>;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Route {
    op: &'static str,
    kernel: &'static str,
    dtype: &'static str,
    fallback: Option<&'static str>,
}

/// A counter of routes. One belongs to each [`Context`](crate::ops::Context).
#[derive(Debug, Default)]
pub struct Routes {
    counts: Mutex<BTreeMap<Route, u64>>,
}

impl Routes {
    /// Counts one call of `op` that ran as `kernel` on activations of `dtype`.
    pub fn count(&self, op: &'static str, kernel: &'static str, dtype: DType) {
        self.add(Route {
            op,
            kernel,
            dtype: dtype.as_str(),
            fallback: None,
        });
    }

    /// Counts one call that left the fast path, and why.
    pub fn count_fallback(
        &self,
        op: &'static str,
        kernel: &'static str,
        dtype: DType,
        reason: &'static str,
    ) {
        self.add(Route {
            op,
            kernel,
            dtype: dtype.as_str(),
            fallback: Some(reason),
        });
    }

    fn add(&self, route: Route) {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        *counts.entry(route).or_default() += 1;
    }

    /// The counts so far.
    pub fn snapshot(&self) -> RouteCounts {
        let counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let name = |r: &Route| match r.fallback {
            None => format!("{}/{}/{}", r.op, r.kernel, r.dtype),
            Some(why) => format!("{}/{}/{} !{why}", r.op, r.kernel, r.dtype),
        };
        counts.iter().map(|(r, n)| (name(r), *n)).collect()
    }

    /// Whether any call fell back.
    pub fn fell_back(&self) -> bool {
        let counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        counts.keys().any(|r| r.fallback.is_some())
    }
}

impl Serialize for Routes {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        self.snapshot().serialize(s)
    }
}
