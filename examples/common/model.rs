//! Where the examples get models from: a folder, the hub, or the embedded pair.

use std::path::{Path, PathBuf};

use anyhow::Result;
use candle_core::DType;
use candle_specprefill::hub::{FetchProgress, Hub, ModelSource};
use candle_specprefill::pipeline::SpecPrefillPipeline;
use clap::{Args, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};

/// The folder of the embedded models and prompts.
pub fn tiny() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/tiny")
}

/// A dtype of activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Dtype {
    F32,
    Bf16,
    F16,
}

impl From<Dtype> for DType {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => Self::F32,
            Dtype::Bf16 => Self::BF16,
            Dtype::F16 => Self::F16,
        }
    }
}

/// Which models, and how they run.
#[derive(Args, Clone, Debug)]
pub struct ModelArgs {
    /// The target: a folder, or owner/name[@revision] on the hub [default: the embedded one]
    #[arg(long, value_name = "MODEL")]
    pub model: Option<ModelSource>,
    /// The draft that chooses prompt tokens: a folder, or owner/name[@revision] [default: the embedded one, with the embedded target]
    #[arg(long, value_name = "MODEL")]
    pub draft: Option<ModelSource>,
    /// An MTP head in a repository of its own (qwen3_5_mtp) for the target
    #[arg(long, value_name = "MODEL")]
    pub mtp_head: Option<ModelSource>,
    /// Dtype of activations and caches
    #[arg(long, value_enum, default_value = "f32")]
    pub dtype: Dtype,
    /// Fetch nothing: models on the hub come from its cache (as with HF_HUB_OFFLINE=1)
    #[arg(long)]
    pub offline: bool,
    /// The longest sequence, prompt and answer, in tokens [default: the model's; memory is then counted for 32768]
    #[arg(long, value_name = "TOKENS")]
    pub context: Option<usize>,
    /// Load the models even if they seem not to fit in memory
    #[arg(long)]
    pub force: bool,
}

impl ModelArgs {
    /// Loads them.
    pub fn load(&self) -> Result<SpecPrefillPipeline> {
        let target = or_embedded(&self.model);
        let draft = match (&self.draft, &self.model) {
            (Some(draft), _) => Some(draft.clone()),
            (None, None) => Some(tiny().join("draft").into()),
            (None, Some(_)) => None,
        };
        let mut builder = SpecPrefillPipeline::builder(target)
            .dtype(self.dtype.into())
            .hub(hub(self.offline));
        if let Some(draft) = draft {
            builder = builder.draft(draft);
        }
        if let Some(head) = &self.mtp_head {
            builder = builder.mtp_head(head.clone());
        }
        if let Some(tokens) = self.context {
            builder = builder.context(tokens);
        }
        if self.force {
            builder = builder.memory_limit_bytes(u64::MAX);
        }
        Ok(builder.build()?)
    }
}

/// A model, or the embedded target.
pub fn or_embedded(model: &Option<ModelSource>) -> ModelSource {
    let embedded = || tiny().join("target").into();
    model.clone().unwrap_or_else(embedded)
}

/// The hub as the environment has it, with a bar on standard error while something is fetched.
pub fn hub(offline: bool) -> Hub {
    let style =
        ProgressStyle::with_template("{msg} {bar:30} {bytes}/{total_bytes} {bytes_per_sec} {eta}");
    let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
    let bar = ProgressBar::no_length().with_style(style);
    let hub = Hub::default().on_progress(move |progress: &FetchProgress| {
        bar.set_length(progress.total);
        bar.set_position(progress.done);
        bar.set_message(progress.file.clone());
        if progress.done == progress.total {
            bar.finish_and_clear();
        }
    });
    match offline {
        true => hub.offline(true),
        false => hub,
    }
}
