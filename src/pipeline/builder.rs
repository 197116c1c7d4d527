//! Loading a target with its draft.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use candle_core::{DType, Device};

use super::generation::{self, Generation, Job};
use super::memory::{self, MemoryEstimate};
use super::prefix::PrefixStore;
use super::reading::Reading;
use super::spans::Selected;
use super::{ChatTemplate, Conversation, GenerateOptions, GenerationConfig, Prompt, TextTokenizer};
use crate::hub::{Hub, ModelSource};
use crate::mtp::{check_head, Controller};
use crate::ops::Context;
use crate::qwen3_5::checkpoint::Checkpoint;
use crate::qwen3_5::config::Config;
use crate::qwen3_5::{LoadOptions, Model, ModelMemory};
use crate::specprefill::{
    check_draft, AttentionScorer, Costs, ScoreMemo, Scorer, ScorerInput, Scores,
};
use crate::{Error, Result};

/// Settings of a pipeline that is to be loaded.
#[derive(Clone, Debug)]
pub struct Builder {
    target: ModelSource,
    draft: Option<ModelSource>,
    head: Option<ModelSource>,
    hub: Hub,
    device: Device,
    dtype: DType,
    force_mtp: bool,
    scorer: Option<Arc<dyn Scorer>>,
    prefix_bytes: usize,
    draft_limit: Option<u64>,
    memory_limit: Option<u64>,
    context: Option<usize>,
}

/// Tokens that memory is counted for where nobody said how long sequences will be.
const USUAL_CONTEXT: usize = 32_768;

/// A model's folder, opened: nothing of its weights is read yet.
struct Opened {
    dir: PathBuf,
    config: Config,
    checkpoint: Checkpoint,
    load: LoadOptions,
}

impl Opened {
    fn memory(&self, context: usize) -> Result<ModelMemory> {
        ModelMemory::new(&self.config, &self.checkpoint, &self.load, context)
    }

    /// The longest sequence that the model takes.
    fn most(&self) -> usize {
        self.config.text.max_position_embeddings
    }

    fn load(&self, context: Option<usize>) -> Result<Model> {
        let model = Model::from_checkpoint(&self.config, &self.checkpoint, &self.load)?;
        match context {
            Some(context) => model.with_longest(context),
            None => Ok(model),
        }
    }
}

/// What the MTP head is checked on.
const CHECK_TEXT: &str = "The water cycle describes how water moves between the sea, the air and the land. The sun warms the sea, water \
    rises as vapour, cools into clouds, and falls again as rain or snow. Rivers carry it back to the sea, and the cycle begins again.";

impl Builder {
    /// The small model that chooses prompt tokens; it must share the target's tokenizer.
    pub fn draft(mut self, model: impl Into<ModelSource>) -> Self {
        self.draft = Some(model.into());
        self
    }

    /// An MTP head for the target from a repository of its own (`qwen3_5_mtp`), in place of one that the target may have.
    pub fn mtp_head(mut self, model: impl Into<ModelSource>) -> Self {
        self.head = Some(model.into());
        self
    }

    /// How models on the hub are fetched; by default as the environment says.
    pub fn hub(mut self, hub: Hub) -> Self {
        self.hub = hub;
        self
    }

    /// Where both models run; the CPU by default.
    pub fn device(mut self, device: Device) -> Self {
        self.device = device;
        self
    }

    /// The dtype of activations and caches: f32 (default), bf16 or f16.
    pub fn dtype(mut self, dtype: DType) -> Self {
        self.dtype = dtype;
        self
    }

    /// Uses the target's MTP head even if it does no better than chance on a short text, which otherwise turns it off.
    pub fn force_mtp(mut self, force: bool) -> Self {
        self.force_mtp = force;
        self
    }

    /// A scorer of one's own for prompt tokens, in place of the one that the settings name.
    pub fn scorer(mut self, scorer: Arc<dyn Scorer>) -> Self {
        self.scorer = Some(scorer);
        self
    }

    /// Bytes that the caches of leading system blocks may hold, so that a later request with the same block need not read it
    /// again; 256 MiB by default, 0 is off.
    pub fn prefix_cache_bytes(mut self, bytes: usize) -> Self {
        self.prefix_bytes = bytes;
        self
    }

    /// Refuses a draft whose weights take more bytes than this, before anything of it is loaded.
    pub fn draft_limit_bytes(mut self, bytes: u64) -> Self {
        self.draft_limit = Some(bytes);
        self
    }

    /// The longest sequence, prompt and answer, that will be asked for. Longer ones are refused, memory is counted for it, and
    /// RoPE kinds whose frequencies depend on the length fit it. By default the target's own limit, with memory counted for
    /// 32,768 tokens.
    pub fn context(mut self, tokens: usize) -> Self {
        self.context = Some(tokens);
        self
    }

    /// Refuses models that need more bytes than this; by default what the system has available. `u64::MAX` loads whatever is
    /// asked.
    pub fn memory_limit_bytes(mut self, bytes: u64) -> Self {
        self.memory_limit = Some(bytes);
        self
    }

    /// What the models will need in memory. Fetches them from the hub where they are not in its cache, and loads nothing.
    pub fn memory(&self) -> Result<MemoryEstimate> {
        let (target, draft) = self.open()?;
        self.estimate(&target, draft.as_ref())
    }

    fn open(&self) -> Result<(Opened, Option<Opened>)> {
        let open = |source: &ModelSource, mtp| -> Result<Opened> {
            let dir = source.resolve(&self.hub)?;
            Ok(Opened {
                config: Config::read(&dir)?,
                checkpoint: Checkpoint::open(&dir)?,
                load: LoadOptions {
                    device: self.device.clone(),
                    dtype: self.dtype,
                    mtp,
                },
                dir,
            })
        };
        let mut target = open(&self.target, true)?;
        if let Some(head) = &self.head {
            target.checkpoint = target.checkpoint.with_head(head.resolve(&self.hub)?)?;
        }
        let draft = self.draft.as_ref().map(|draft| open(draft, false));
        Ok((target, draft.transpose()?))
    }

    fn estimate(&self, target: &Opened, draft: Option<&Opened>) -> Result<MemoryEstimate> {
        let context = self.context.unwrap_or(USUAL_CONTEXT).min(target.most());
        Ok(MemoryEstimate {
            context,
            target: target.memory(context)?,
            draft: draft.map(|draft| draft.memory(context)).transpose()?,
            available: self.memory_limit.or_else(memory::available),
        })
    }

    /// Loads the models.
    pub fn build(self) -> Result<SpecPrefillPipeline> {
        let (target_files, draft_files) = self.open()?;
        let estimate = self.estimate(&target_files, draft_files.as_ref())?;
        if let (Some(limit), Some(draft)) = (self.draft_limit, &estimate.draft) {
            if draft.weights > limit {
                return Err(Error::Draft(format!(
                    "its weights take {} bytes, more than the limit of {limit}: use a smaller draft",
                    draft.weights
                )));
            }
        }
        estimate.check()?;
        let target_dir = &target_files.dir;
        let tokenizer = TextTokenizer::read(target_dir)?;
        let template = ChatTemplate::read(target_dir)?;
        let generation = GenerationConfig::read(target_dir)?;
        let mut stop_tokens = generation.eos_token_ids.clone();
        let target = target_files.load(self.context)?;
        stop_tokens.extend(&target.config().eos_token_ids);
        stop_tokens.extend(template.eos_token().and_then(|token| tokenizer.id(token)));
        stop_tokens.sort_unstable();
        stop_tokens.dedup();
        let draft = match &draft_files {
            None => None,
            Some(files) => {
                let theirs = TextTokenizer::read(&files.dir)?;
                if let Some(difference) = tokenizer.difference(&theirs) {
                    return Err(Error::Draft(format!(
                        "the tokenizers of {} and {} differ: {difference}; use a draft of the target's family",
                        target_dir.display(),
                        files.dir.display(),
                    )));
                }
                let draft = files.load(self.context.map(|c| c.min(files.most())))?;
                check_draft(target.config(), draft.config(), tokenizer.len())?;
                Some(draft)
            }
        };
        let head_fault = match self.force_mtp {
            true => None,
            false => head_fault(&target, &tokenizer)?,
        };
        Ok(SpecPrefillPipeline {
            parts: Arc::new(Parts {
                target,
                head_fault,
                controller: Mutex::new(None),
                draft,
                tokenizer,
                template,
                generation,
                stop_tokens,
                scorer: self.scorer,
                memo: ScoreMemo::default(),
                prefixes: PrefixStore::new(self.prefix_bytes),
                costs: Mutex::new(None),
            }),
        })
    }
}

/// Why the target's MTP head should not be used.
fn head_fault(target: &Model, tokenizer: &TextTokenizer) -> Result<Option<String>> {
    let promised = target.config().mtp_num_hidden_layers > 0;
    if !target.has_mtp() {
        let what = "config.json promises an MTP head, but the checkpoint has no mtp.* tensors";
        return Ok(promised.then(|| what.to_string()));
    }
    let vocab = target.config().vocab_size as u32;
    let tokens: Vec<u32> = tokenizer.encode(CHECK_TEXT)?;
    let known = tokens.into_iter().filter(|t| *t < vocab);
    let tokens: Vec<u32> = known.take(target.longest()).collect();
    match check_head(target, &Context::default(), &tokens)? {
        Some(check) if !check.passed() => {
            let advice = check.advice();
            tracing::warn!("{advice}");
            Ok(Some(advice))
        }
        _ => Ok(None),
    }
}

/// What every generation reads.
pub(super) struct Parts {
    pub target: Model,
    /// Why the target's MTP head is not used.
    pub head_fault: Option<String>,
    /// What earlier answers taught about the depth of drafts.
    pub controller: Mutex<Option<Controller>>,
    pub draft: Option<Model>,
    pub tokenizer: TextTokenizer,
    pub template: ChatTemplate,
    pub generation: GenerationConfig,
    pub stop_tokens: Vec<u32>,
    /// In place of the settings' scorer.
    pub scorer: Option<Arc<dyn Scorer>>,
    pub memo: ScoreMemo,
    pub prefixes: PrefixStore,
    /// What reading a token costs, once a prompt was read.
    pub costs: Mutex<Option<Costs>>,
}

/// A loaded target, its draft, tokenizer and chat template. Clones share them; any number of generations may run at once.
#[derive(Clone)]
pub struct SpecPrefillPipeline {
    parts: Arc<Parts>,
}

impl SpecPrefillPipeline {
    /// Begins with the target: a folder, or `owner/name[@revision]` on the hub.
    pub fn builder(target: impl Into<ModelSource>) -> Builder {
        Builder {
            target: target.into(),
            draft: None,
            head: None,
            hub: Hub::default(),
            device: Device::Cpu,
            dtype: DType::F32,
            force_mtp: false,
            scorer: None,
            prefix_bytes: 256 << 20,
            draft_limit: None,
            memory_limit: None,
            context: None,
        }
    }

    /// The target.
    pub fn target(&self) -> &Model {
        &self.parts.target
    }

    /// The draft, if there is one.
    pub fn draft(&self) -> Option<&Model> {
        self.parts.draft.as_ref()
    }

    /// Why the target's MTP head is not used, if it should have been.
    pub fn head_fault(&self) -> Option<&str> {
        self.parts.head_fault.as_deref()
    }

    /// The tokenizer that both models share.
    pub fn tokenizer(&self) -> &TextTokenizer {
        &self.parts.tokenizer
    }

    /// The target's chat template.
    pub fn template(&self) -> &ChatTemplate {
        &self.parts.template
    }

    /// What the target's `generation_config.json` says: how its makers recommend to sample.
    pub fn generation_config(&self) -> &GenerationConfig {
        &self.parts.generation
    }

    /// The tokens that end an answer.
    pub fn stop_tokens(&self) -> &[u32] {
        &self.parts.stop_tokens
    }

    /// What SpecPrefill would keep of a prompt, without an answer.
    pub fn select(&self, prompt: impl Into<Prompt>, options: &GenerateOptions) -> Result<Selected> {
        options.validate()?;
        let prompt = self.prompt(prompt.into(), options)?;
        let reading = Reading {
            parts: &self.parts,
            prompt: &prompt,
            options,
            prime: false,
            split: None,
            progress: &|_, _, _| {},
        };
        let (selection, usage) = reading.choose(&Context::default())?;
        Ok(Selected {
            prompt,
            selection,
            usage,
        })
    }

    /// Scores a prompt by several scorers with one pass of the draft, whatever its length. Later requests with the same prompt
    /// and one of these scorers find its scores in the memo.
    pub fn score_all(
        &self,
        prompt: impl Into<Prompt>,
        scorers: &[AttentionScorer],
        options: &GenerateOptions,
    ) -> Result<Vec<Arc<Scores>>> {
        options.validate()?;
        let prompt = self.prompt(prompt.into(), options)?;
        let Some(draft) = &self.parts.draft else {
            return Err(Error::Draft("there is none to score with".into()));
        };
        let input = ScorerInput {
            draft,
            cx: &Context::default(),
            tokens: &prompt.tokens,
            prefill_chunk: options.specprefill.prefill_chunk,
        };
        let all = AttentionScorer::score_all(scorers, &input, &mut |_| {})?;
        let remember = |(scorer, scores): (&AttentionScorer, Scores)| {
            let scores = Arc::new(scores);
            let id = scorer.id();
            self.parts.memo.insert(&id, input.tokens, scores.clone());
            scores
        };
        Ok(scorers.iter().zip(all).map(remember).collect())
    }

    /// Starts an answer. What is wrong with the prompt or the options is refused here; the work runs on a thread of its own
    /// and arrives as events. Dropping the iterator ends it.
    pub fn generate(
        &self,
        prompt: impl Into<Prompt>,
        options: &GenerateOptions,
    ) -> Result<Generation> {
        let start = std::time::Instant::now();
        options.validate()?;
        let prompt = self.prompt(prompt.into(), options)?;
        let job = Job {
            parts: self.parts.clone(),
            prompt,
            before: vec![],
            split: None,
            note: None,
            options: options.clone(),
            start,
        };
        Ok(generation::start(job, None)?.0)
    }

    /// Starts a conversation, whose turns share a cache.
    pub fn conversation(&self) -> Conversation {
        Conversation::new(self.clone())
    }

    pub(super) fn parts(&self) -> &Arc<Parts> {
        &self.parts
    }
}
