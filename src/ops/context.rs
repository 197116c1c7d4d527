//! What an op call needs beside its tensors.

use std::sync::Arc;

use super::launch::Launcher;
use super::routes::Routes;

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
