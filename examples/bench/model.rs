//! Which model is measured.

use std::path::PathBuf;

use anyhow::Result;
use candle_specprefill::hub::ModelSource;
use candle_specprefill::qwen3_5::{LoadOptions, Model};

use crate::common::model::{hub, or_embedded, Dtype};

/// A model and its dtype.
#[derive(clap::Args)]
pub struct ModelArgs {
    /// A folder, or owner/name[@revision] on the hub [default: the embedded target]; make_checkpoint makes one of any size
    #[arg(long, value_name = "MODEL")]
    model: Option<ModelSource>,
    /// Dtype of activations
    #[arg(long, value_enum, default_value = "bf16")]
    dtype: Dtype,
    /// Fetch nothing: models on the hub come from its cache
    #[arg(long)]
    offline: bool,
}

impl ModelArgs {
    /// Loads it; its folder comes along.
    pub fn load(&self) -> Result<(PathBuf, Model)> {
        let dir = or_embedded(&self.model).resolve(&hub(self.offline))?;
        let options = LoadOptions {
            dtype: self.dtype.into(),
            ..Default::default()
        };
        let model = Model::load(&dir, &options)?;
        Ok((dir, model))
    }
}
