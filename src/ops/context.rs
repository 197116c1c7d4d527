//! What an op call needs beside its tensors.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

use super::launch::Launcher;
use super::routes::Routes;
use crate::{Error, Result};

/// Ends work from another thread: a model begins no pass whose context was cancelled. Clones share the state.
#[derive(Clone, Debug, Default)]
pub struct CancelToken(Arc<AtomicBool>);

impl CancelToken {
    /// Asks for the end. There is no way back.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether the end was asked for.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Passed to every op: counts the routes that the calls take. Nothing is global, so two requests never mix.
///
/// ```
/// # use candle_specprefill::ops::Context;
/// let cx = Context::default();
/// assert!(cx.routes().snapshot().is_empty());
/// ```
#[derive(Debug, Default)]
pub struct Context {
    routes: Routes,
    launcher: Option<Arc<dyn Launcher>>,
    verify_rows: Option<usize>,
    cancel: CancelToken,
}

impl Context {
    /// A context whose ops run their Metal launches on CPU tensors through `launcher`, instead of the CPU kernels: for
    /// tests of kernels without a Mac.
    pub fn with_launcher(launcher: Arc<dyn Launcher>) -> Self {
        Self {
            launcher: Some(launcher),
            ..Self::default()
        }
    }

    /// Says how many rows the widest verify pass has (1 more than the draft's depth; 4 unless said). Metal weights take the form that suits
    /// it, for every number of rows, decoding included: contexts that differ here may differ in the last bits.
    pub fn with_verify_rows(mut self, rows: usize) -> Self {
        self.verify_rows = Some(rows);
        self
    }

    /// Passes end with [`Error::Cancelled`], and change nothing, once `token` is cancelled.
    pub fn with_cancel(mut self, token: CancelToken) -> Self {
        self.cancel = token;
        self
    }

    /// What ends this context's passes.
    pub fn cancel_token(&self) -> &CancelToken {
        &self.cancel
    }

    /// Whether a pass may begin.
    pub(crate) fn go_on(&self) -> Result<()> {
        match self.cancel.is_cancelled() {
            true => Err(Error::Cancelled),
            false => Ok(()),
        }
    }

    pub(crate) fn verify_rows(&self) -> usize {
        self.verify_rows.unwrap_or(4)
    }

    /// The counter of routes.
    pub fn routes(&self) -> &Routes {
        &self.routes
    }

    pub(crate) fn launcher(&self) -> Option<&dyn Launcher> {
        self.launcher.as_deref()
    }

    /// The launcher, for what outlives the call.
    pub(crate) fn shared_launcher(&self) -> Option<Arc<dyn Launcher>> {
        self.launcher.clone()
    }
}
