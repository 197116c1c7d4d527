//! The model: packed rows in, hidden states and logits out.

use std::path::Path;

use candle_core::{DType, Device, Tensor};

use crate::error::{Error, Result};
use crate::ops::affine_matmul::Weight;
use crate::ops::gated_delta::Keep;
use crate::ops::rope::Rope;
use crate::ops::{self, Context};

use super::attention;
use super::cache::Cache;
use super::checkpoint::Checkpoint;
use super::config::{Config, LayerType, TextConfig};
use super::embeddings::Packed;
use super::layer::Layer;
use super::mtp::DraftHead;
use super::weights::Weights;

/// How a model is loaded.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// Where it runs.
    pub device: Device,
    /// The dtype of its activations and of its key/value caches: f32, bf16 or f16.
    pub dtype: DType,
    /// Whether to load the draft head, where the checkpoint has one.
    pub mtp: bool,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self {
            device: Device::Cpu,
            dtype: DType::F32,
            mtp: true,
        }
    }
}

/// A Qwen3.5 text model with its draft head.
pub struct Model {
    pub(super) config: TextConfig,
    embedding: Weight,
    pub(super) layers: Vec<Layer>,
    pub(super) norm: Tensor,
    lm_head: Option<Weight>,
    head: Option<DraftHead>,
    pub(super) rope: Rope,
    /// Positions that rows may have.
    limit: usize,
    device: Device,
    dtype: DType,
}

/// One sequence's rows of a pass.
pub struct Rows<'a> {
    /// The sequence's cache.
    pub cache: &'a mut Cache,
    /// A token per row.
    pub tokens: &'a [u32],
    /// A position per row: where the token stands in the prompt, whatever was left out before it.
    pub positions: &'a [u32],
    /// Whether the rows are committed at once or stay pending.
    pub keep: Keep,
}

/// One sequence's rows of a pass through the draft head.
pub struct DraftRows<'a> {
    /// The sequence's cache.
    pub cache: &'a mut Cache,
    /// Per row the token that comes after it.
    pub tokens: &'a [u32],
    /// Per row the hidden state, `[rows, hidden]`: the trunk's after its final norm, or the head's own output.
    pub hidden: &'a Tensor,
    /// Per row the position of the trunk's row.
    pub positions: &'a [u32],
}

/// An output head over some of the tokens, for drafts.
#[derive(Clone, Debug)]
pub struct DraftVocabulary {
    ids: Vec<u32>,
    weight: Weight,
    full: usize,
}

impl DraftVocabulary {
    /// Its tokens, sorted.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }
}

/// What a pass records beside its result.
#[derive(Debug, Default)]
pub struct Capture {
    /// Per full-attention layer that ran the queries after normalisation and RoPE, `[rows, heads, head_dim]`; of the last
    /// layer only those of wanted rows.
    pub queries: Vec<Tensor>,
}

/// What is wanted of a pass. Less is computed when less is wanted; what is computed has the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Wanted {
    /// Every row's hidden state.
    #[default]
    All,
    /// The hidden state of every sequence's last row: in the last layer the other rows only leave what later rows read.
    Last,
    /// The caches alone.
    Nothing,
    /// The cached keys and, in a capture, the queries of the first full-attention layers up to this index. No layer after
    /// it runs, so the caches can only be continued by passes that stop there too.
    Keys(usize),
}

impl Model {
    /// Loads a model from a folder: Hugging Face (bf16 and such) or MLX affine.
    pub fn load(dir: impl AsRef<Path>, options: &LoadOptions) -> Result<Self> {
        let dir = dir.as_ref();
        let config = Config::read(dir)?;
        let checkpoint = Checkpoint::open(dir)?;
        Self::from_checkpoint(&config, &checkpoint, options)
    }

    /// Loads a model from an open checkpoint.
    pub fn from_checkpoint(
        config: &Config,
        checkpoint: &Checkpoint,
        options: &LoadOptions,
    ) -> Result<Self> {
        if !matches!(options.dtype, DType::F32 | DType::BF16 | DType::F16) {
            return Err(Error::Option {
                name: "dtype",
                what: format!("{:?} is not f32, bf16 or f16", options.dtype),
            });
        }
        let weights = Weights::new(checkpoint, config, &options.device)?;
        let text = &config.text;
        let trunk = weights.trunk();
        let layers = trunk.pp("layers");
        let layer = |(i, kind): (usize, &_)| Layer::load(&layers.pp(&i.to_string()), *kind, text);
        let head = match weights.draft() {
            Some(scope) if options.mtp => Some(DraftHead::load(&scope, text)?),
            _ => None,
        };
        let promised = options.mtp && text.mtp_num_hidden_layers > 0;
        if promised && head.is_none() {
            tracing::warn!(
                "config.json promises an MTP head, but the checkpoint has no mtp.* tensors: decoding goes on without one"
            );
        }

        Ok(Self {
            embedding: trunk.linear("embed_tokens", text.vocab_size, text.hidden_size)?,
            layers: text
                .layer_types
                .iter()
                .enumerate()
                .map(layer)
                .collect::<Result<_>>()?,
            norm: trunk.norm("norm", text.hidden_size)?,
            lm_head: weights.lm_head()?,
            head,
            rope: text.rope(text.max_position_embeddings)?,
            limit: text.max_position_embeddings,
            config: text.clone(),
            device: options.device.clone(),
            dtype: options.dtype,
        })
    }

    /// Takes sequences of up to `tokens` (at most `max_position_embeddings`) and fits the frequencies of those RoPE kinds to
    /// them that depend on the length (`dynamic`, `longrope`); without this call they fit the longest. Caches made before
    /// hold keys of the former frequencies.
    pub fn with_longest(mut self, tokens: usize) -> Result<Self> {
        let most = self.config.max_position_embeddings;
        if tokens == 0 || tokens > most {
            return Err(Error::Option {
                name: "context",
                what: format!("{tokens} tokens, expected 1 to {most} (max_position_embeddings)"),
            });
        }
        self.rope = self.config.rope(tokens)?;
        self.limit = tokens;
        Ok(self)
    }

    /// The longest sequence that it takes: [`Model::with_longest`], or else `max_position_embeddings`.
    pub fn longest(&self) -> usize {
        self.limit
    }

    /// The text model's configuration.
    pub fn config(&self) -> &TextConfig {
        &self.config
    }

    /// The dtype of activations.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Where the model runs.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Whether a draft head is loaded.
    pub fn has_mtp(&self) -> bool {
        self.head.is_some()
    }

    /// Bytes of weights that a pass with logits reads: all but the draft head, and but an embedding table that is no output
    /// head. In a mixture of experts it reads less, by the experts that no row visits.
    pub fn pass_bytes(&self) -> usize {
        let draft = self.head.as_ref().map_or(0, DraftHead::size_bytes);
        let table = match self.lm_head {
            Some(_) => self.embedding.size_bytes(),
            None => 0,
        };
        self.size_bytes() - draft - table
    }

    /// Bytes of weights that `passes` passes with logits, and no drafts, read: [`Model::pass_bytes`] for each, but of the experts
    /// only those that rows visited, each once a pass, as `cx` counted them.
    pub fn bytes_read(&self, cx: &Context, passes: usize) -> usize {
        let layers = self.layers.iter().map(Layer::experts);
        let experts: usize = layers.sum::<usize>() * self.expert_bytes();
        let routes = cx.routes().snapshot();
        let visits = routes
            .iter()
            .filter(|(route, _)| route.starts_with("moe/expert/"));
        let visits: u64 = visits.map(|(_, calls)| calls).sum();
        passes * (self.pass_bytes() - experts) + visits as usize * self.expert_bytes()
    }

    /// Bytes of the prepared weights.
    pub fn size_bytes(&self) -> usize {
        let head = self.lm_head.as_ref().map_or(0, Weight::size_bytes);
        let draft = self.head.as_ref().map_or(0, DraftHead::size_bytes);
        let layers: usize = self.layers.iter().map(Layer::size_bytes).sum();
        self.embedding.size_bytes() + layers + head + draft
    }

    /// Bytes of one expert's weights, in a mixture of experts: the route `moe/expert` counts how often a pass read one.
    pub fn expert_bytes(&self) -> usize {
        let layers = self.layers.iter().map(Layer::expert_bytes);
        layers.max().unwrap_or(0)
    }

    /// An empty cache for one sequence.
    pub fn new_cache(&self) -> Result<Cache> {
        Cache::new(&self.config, self.has_mtp(), self.dtype, &self.device)
    }

    /// Runs the rows of any number of sequences in one pass and returns the hidden state after the final norm,
    /// `[total rows, hidden]`. Every row's result is bitwise what it is alone. Input is checked before any cache changes.
    pub fn forward(&self, cx: &Context, batch: &mut [Rows]) -> Result<Tensor> {
        let hidden = self.forward_wanted(cx, batch, Wanted::All)?;
        hidden.ok_or_else(no_rows)
    }

    /// [`Model::forward`], of which only a part is wanted: the wanted hidden states, in order, or `None` if there are none.
    pub fn forward_wanted(
        &self,
        cx: &Context,
        batch: &mut [Rows],
        wanted: Wanted,
    ) -> Result<Option<Tensor>> {
        self.in_pool(|| self.token_pass(cx, batch, wanted, None))
    }

    /// [`Model::forward_wanted`] of one sequence, which also records queries.
    pub fn forward_capturing(
        &self,
        cx: &Context,
        rows: Rows,
        wanted: Wanted,
        capture: &mut Capture,
    ) -> Result<Option<Tensor>> {
        capture.queries.clear();
        self.in_pool(|| self.token_pass(cx, &mut [rows], wanted, Some(&mut capture.queries)))
    }

    /// The layer of the `index`-th full-attention layer.
    fn attention_layer(&self, index: usize) -> Result<usize> {
        let kinds = self.config.layer_types.iter().enumerate();
        let mut attention = kinds.filter(|(_, kind)| **kind == LayerType::FullAttention);
        attention.nth(index).map(|(i, _)| i).ok_or_else(|| {
            let what = format!("the model has no full-attention layer {index} (from 0)");
            Error::argument("forward", what)
        })
    }

    /// Runs a pass on a thread of the pool: from another thread, each of its hundreds of parallel loops would wake the pool and
    /// wait, tens of microseconds at a time.
    pub(crate) fn in_pool<R: Send>(&self, pass: impl FnOnce() -> R + Send) -> R {
        match self.device {
            Device::Cpu => rayon::scope(|_| pass()),
            _ => ops::memory::pooled(pass),
        }
    }

    fn token_pass(
        &self,
        cx: &Context,
        batch: &mut [Rows],
        wanted: Wanted,
        queries: Option<&mut Vec<Tensor>>,
    ) -> Result<Option<Tensor>> {
        let depth = self.depth(wanted)?;
        for rows in batch.iter() {
            self.check_rows(rows.tokens, rows.positions)?;
            rows.cache.ready(&self.config.layer_types, depth)?;
        }
        let tokens: Vec<u32> = batch.iter().flat_map(|r| r.tokens).copied().collect();
        let positions: Vec<u32> = batch.iter().flat_map(|r| r.positions).copied().collect();
        let x = self.embed(cx, &tokens)?;
        let positions = Tensor::new(positions, &self.device)?;
        let packed = batch.iter_mut().map(|r| Packed {
            cache: r.cache,
            rows: r.tokens.len(),
            ends: r.positions,
            keep: r.keep,
        });
        let mut packed: Vec<_> = packed.collect();
        self.pass(cx, x, &positions, &mut packed, wanted, queries)
    }

    /// Layers that a pass runs.
    pub(super) fn depth(&self, wanted: Wanted) -> Result<usize> {
        Ok(match wanted {
            Wanted::Keys(index) => self.attention_layer(index)? + 1,
            _ => self.layers.len(),
        })
    }

    /// Logits `[rows, vocab]` of hidden states `[rows, hidden]`, from the trunk or from the draft head.
    pub fn logits(&self, cx: &Context, hidden: &Tensor) -> Result<Tensor> {
        let head = self.lm_head.as_ref().unwrap_or(&self.embedding);
        let rows = hidden.dim(0)?;
        if rows <= ops::DECODE_ROWS || !ops::on_launches(cx, hidden) {
            return self.in_pool(|| ops::matmul(cx, hidden, head));
        }
        let parts = (0..rows).step_by(ops::DECODE_ROWS).map(|first| {
            let part = hidden.narrow(0, first, ops::DECODE_ROWS.min(rows - first))?;
            self.in_pool(|| ops::matmul(cx, &part, head))
        });
        Ok(Tensor::cat(&parts.collect::<Result<Vec<_>>>()?, 0)?)
    }

    /// A smaller output head for drafts, of the tokens `ids` (sorted here, repeats dropped): drafts then cost less, and
    /// verification keeps the text what it is.
    pub fn draft_vocabulary(&self, ids: &[u32]) -> Result<DraftVocabulary> {
        let mut ids = ids.to_vec();
        ids.sort_unstable();
        ids.dedup();
        if ids.is_empty() {
            return Err(Error::argument("draft_vocabulary", "no tokens"));
        }
        let head = self.lm_head.as_ref().unwrap_or(&self.embedding);
        Ok(DraftVocabulary {
            weight: head.select(&ids)?,
            ids,
            full: self.config.vocab_size,
        })
    }

    /// [`Model::logits`] over a smaller vocabulary, f32 `[rows][vocab]` with `-inf` for the tokens it lacks.
    pub fn draft_logits(
        &self,
        cx: &Context,
        hidden: &Tensor,
        vocabulary: &DraftVocabulary,
    ) -> Result<Vec<Vec<f32>>> {
        let logits = self.in_pool(|| ops::matmul(cx, hidden, &vocabulary.weight))?;
        let rows = logits.to_dtype(DType::F32)?.to_vec2::<f32>()?;
        let spread = |row: Vec<f32>| {
            let mut all = vec![f32::NEG_INFINITY; vocabulary.full];
            for (id, logit) in vocabulary.ids.iter().zip(row) {
                all[*id as usize] = logit;
            }
            all
        };
        Ok(rows.into_iter().map(spread).collect())
    }

    /// The most likely token of each row over a smaller vocabulary.
    pub(crate) fn draft_tokens(
        &self,
        cx: &Context,
        hidden: &Tensor,
        vocabulary: &DraftVocabulary,
    ) -> Result<Vec<Result<u32>>> {
        let logits = self.in_pool(|| ops::matmul(cx, hidden, &vocabulary.weight))?;
        let best = ops::argmax::tokens(cx, &logits)?.into_iter();
        Ok(best
            .map(|best| best.map(|i| vocabulary.ids[i as usize]))
            .collect())
    }

    /// Runs rows through the draft head, appends them to its cache and returns its output after `mtp.norm`,
    /// `[total rows, hidden]`.
    pub fn draft(&self, cx: &Context, batch: &mut [DraftRows]) -> Result<Tensor> {
        let out = self.in_pool(|| self.draft_pass(cx, batch, false))?;
        out.ok_or_else(no_rows)
    }

    /// [`Model::draft`] for rows whose prediction nobody wants: only their keys and values are computed.
    pub fn prime(&self, cx: &Context, batch: &mut [DraftRows]) -> Result<()> {
        self.in_pool(|| self.draft_pass(cx, batch, true))
            .map(|_| ())
    }

    fn draft_pass(
        &self,
        cx: &Context,
        batch: &mut [DraftRows],
        keys_only: bool,
    ) -> Result<Option<Tensor>> {
        let Some(head) = &self.head else {
            return Err(Error::argument("draft", "this model has no MTP head"));
        };
        let hidden: Vec<&Tensor> = batch.iter().map(|r| r.hidden).collect();
        for rows in batch.iter() {
            self.check_rows(rows.tokens, rows.positions)?;
            let expected = [rows.tokens.len(), self.config.hidden_size];
            if rows.hidden.dims() != expected {
                return Err(Error::Shape {
                    op: "draft",
                    name: "hidden",
                    found: rows.hidden.dims().to_vec(),
                    expected: format!("{expected:?}"),
                });
            }
            if rows.cache.draft.is_none() {
                return Err(Error::Cache(
                    "this cache was made without a draft head".into(),
                ));
            }
        }
        let hidden = match hidden.as_slice() {
            [one] => (*one).clone(),
            many => Tensor::cat(many, 0)?,
        };
        let tokens: Vec<u32> = batch.iter().flat_map(|r| r.tokens).copied().collect();
        let positions: Vec<u32> = batch.iter().flat_map(|r| r.positions).copied().collect();
        let embeddings = self.embed(cx, &tokens)?;
        let positions = Tensor::new(positions, &self.device)?;
        let spans = batch.iter_mut().filter_map(|r| {
            let filled = r.cache.draft_rows();
            r.cache.draft.as_mut().map(|key_values| attention::Span {
                key_values,
                filled,
                rows: r.tokens.len(),
                wanted: r.tokens.len(),
            })
        });
        let mut spans: Vec<_> = spans.collect();
        let x = head.combine(cx, &embeddings, &hidden)?;
        let out = match keys_only {
            true => {
                head.prime(cx, &x, &positions, &self.rope, &mut spans)?;
                None
            }
            false => Some(head.forward(cx, &x, &positions, &self.rope, &mut spans)?),
        };
        for rows in batch.iter_mut() {
            rows.cache.finish_draft(rows.tokens.len());
        }
        Ok(out)
    }

    pub(super) fn embed(&self, cx: &Context, tokens: &[u32]) -> Result<Tensor> {
        ops::affine_matmul::embed(cx, &self.embedding, tokens, self.dtype)
    }

    fn check_rows(&self, tokens: &[u32], positions: &[u32]) -> Result<()> {
        if tokens.is_empty() {
            return Err(Error::Prompt(
                "empty: a pass needs at least one token".into(),
            ));
        }
        if tokens.len() != positions.len() {
            return Err(Error::Prompt(format!(
                "{} tokens, but {} positions",
                tokens.len(),
                positions.len()
            )));
        }
        let vocab = self.config.vocab_size;
        if let Some(id) = tokens.iter().find(|id| **id as usize >= vocab) {
            return Err(Error::Prompt(format!(
                "token id {id} is outside the vocabulary of {vocab}"
            )));
        }
        self.check_positions(positions)
    }

    pub(super) fn check_positions(&self, positions: &[u32]) -> Result<()> {
        let limit = self.limit;
        match positions.iter().find(|p| **p as usize >= limit) {
            Some(p) => Err(Error::Prompt(format!(
                "position {p} is past the model's {limit} positions (max_position_embeddings): shorten the prompt or max-tokens"
            ))),
            None => Ok(()),
        }
    }
}

fn no_rows() -> Error {
    Error::argument("forward", "the pass gave no rows")
}
