//! What an op call needs beside its tensors.

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
}

impl Context {
    /// The counter of routes.
    pub fn routes(&self) -> &Routes {
        &self.routes
    }
}
