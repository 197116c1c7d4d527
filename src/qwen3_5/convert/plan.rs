//! Which tensors an MLX checkpoint gets from a Hugging Face one: names, layouts, formats. Pure.

use std::collections::BTreeMap;
use std::path::PathBuf;

use candle_core::DType;

use super::ConvertOptions;
use crate::affine::AffineFormat;
use crate::error::{Error, Result};
use crate::qwen3_5::checkpoint::Checkpoint;

/// Prefixes of a Hugging Face text trunk, multimodal and text-only.
const TRUNKS: [&str; 2] = ["model.language_model.", "model."];
/// What routers are quantized to, as mlx-lm does.
const ROUTER: AffineFormat = AffineFormat {
    bits: 8,
    group_size: 64,
};
/// Norms that Hugging Face stores as `w` of `1 + w`.
const ZERO_CENTRED: [&str; 8] = [
    "input_layernorm",
    "post_attention_layernorm",
    "q_norm",
    "k_norm",
    "model.norm",
    "mtp.norm",
    "pre_fc_norm_embedding",
    "pre_fc_norm_hidden",
];
const LINEAR: [&str; 16] = [
    "embed_tokens",
    "lm_head",
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "in_proj_qkv",
    "in_proj_z",
    "in_proj_a",
    "in_proj_b",
    "out_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "gate",
    "shared_expert_gate",
];

/// How a float tensor changes on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    None,
    /// A zero-centred norm becomes the gain itself.
    AddOne,
    /// A convolution's `[C, 1, K]` becomes `[C, K, 1]`.
    Conv,
}

/// Rows of a source tensor, its leading dimensions taken together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub tensor: String,
    pub first: usize,
    pub rows: usize,
}

/// One module of the new checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Item {
    Float {
        name: String,
        source: String,
        dtype: DType,
        shape: Vec<usize>,
        change: Change,
    },
    /// A matrix `[rows, k]`, or `[stacked, rows, k]`, of pieces one after the other; plain when `format` is `None`.
    Linear {
        module: String,
        pieces: Vec<Piece>,
        stacked: Option<usize>,
        rows: usize,
        k: usize,
        dtype: DType,
        format: Option<AffineFormat>,
    },
}

#[derive(Debug, Default)]
pub(super) struct Plan {
    pub trunk: Vec<Item>,
    /// The MTP head, which has a file of its own.
    pub head: Vec<Item>,
    /// Tensors of other towers, left out.
    pub dropped: Vec<String>,
    /// Modules left plain because their rows do not divide into groups.
    pub undivided: Vec<String>,
}

pub(super) fn plan(checkpoint: &Checkpoint, options: &ConvertOptions) -> Result<Plan> {
    let mut planner = Planner::new(checkpoint, options)?;
    for name in checkpoint.names() {
        planner.tensor(name)?;
    }
    planner.finish()
}

struct Planner<'a> {
    checkpoint: &'a Checkpoint,
    options: &'a ConvertOptions,
    trunk: &'static str,
    dtype: DType,
    plan: Plan,
    /// Per module of stacked experts: what each expert contributes.
    experts: BTreeMap<String, BTreeMap<usize, (String, usize, usize)>>,
    used: Vec<bool>,
}

impl<'a> Planner<'a> {
    fn new(checkpoint: &'a Checkpoint, options: &'a ConvertOptions) -> Result<Self> {
        let table = |p: &&&str| checkpoint.contains(&format!("{p}embed_tokens.weight"));
        let Some(trunk) = TRUNKS.iter().find(table).copied() else {
            return Err(file_error(
                checkpoint,
                "holds no Hugging Face text model (no model.embed_tokens.weight or model.language_model.embed_tokens.weight)",
            ));
        };
        if checkpoint.is_mlx() || checkpoint.names().any(|n| n.ends_with(".scales")) {
            return Err(file_error(
                checkpoint,
                "is an MLX or a quantized checkpoint already: take the Hugging Face bf16 one",
            ));
        }
        let dtype = checkpoint.dtype(&format!("{trunk}embed_tokens.weight"));
        Ok(Self {
            checkpoint,
            options,
            trunk,
            dtype: dtype.unwrap_or(DType::BF16),
            plan: Plan::default(),
            experts: BTreeMap::new(),
            used: vec![false; options.overrides.len()],
        })
    }

    /// The MLX name, or `None` for what is not of the text model.
    fn rename(&self, name: &str) -> Option<String> {
        if name == "lm_head.weight" || name.starts_with("mtp.") {
            return Some(format!("language_model.{name}"));
        }
        let rest = name.strip_prefix(self.trunk)?;
        let text = ["layers.", "embed_tokens.", "norm."];
        text.iter()
            .any(|t| rest.starts_with(t))
            .then(|| format!("language_model.model.{rest}"))
    }

    fn tensor(&mut self, source: &str) -> Result<()> {
        let Some(name) = self.rename(source) else {
            self.plan.dropped.push(source.to_string());
            return Ok(());
        };
        let shape = self.checkpoint.shape(source).unwrap_or(&[]).to_vec();
        if let Some((module, expert)) = name.split_once(".experts.") {
            return self.expert(module, expert, source, &shape);
        }
        let module = name.strip_suffix(".weight").unwrap_or(&name);
        let last = module.rsplit('.').next().unwrap_or_default();
        let head = name.starts_with("language_model.mtp.");
        if shape.len() == 2 && (LINEAR.contains(&last) || (head && last == "fc")) {
            let pieces = vec![Piece {
                tensor: source.to_string(),
                first: 0,
                rows: shape[0],
            }];
            let module = module.to_string();
            self.linear(module, pieces, None, shape[0], shape[1]);
            return Ok(());
        }
        let centred = ZERO_CENTRED.iter().any(|n| module.ends_with(n));
        let (change, shape) = match (last, &shape[..]) {
            ("conv1d", [c, 1, k]) => (Change::Conv, vec![*c, *k, 1]),
            ("conv1d", _) => {
                return Err(self.error(source, format!("shape {shape:?}, expected [C, 1, K]")))
            }
            _ if centred => (Change::AddOne, shape),
            _ => (Change::None, shape),
        };
        let dtype = match last {
            "A_log" => self.checkpoint.dtype(source).unwrap_or(DType::F32),
            _ => self.dtype,
        };
        let item = Item::Float {
            name,
            source: source.to_string(),
            dtype,
            shape,
            change,
        };
        self.push(head, item);
        Ok(())
    }

    /// `experts.gate_up_proj` and `experts.down_proj` of all experts, or `experts.7.up_proj.weight` of one.
    fn expert(&mut self, module: &str, rest: &str, source: &str, shape: &[usize]) -> Result<()> {
        let switch = |projection: &str| format!("{module}.switch_mlp.{projection}");
        let parts: Vec<&str> = rest.split('.').collect();
        match (&parts[..], shape) {
            (["gate_up_proj"], [count, both, _]) if both % 2 == 0 => {
                for (half, projection) in ["gate_proj", "up_proj"].iter().enumerate() {
                    let n = both / 2;
                    for e in 0..*count {
                        let part = (source.to_string(), e * both + half * n, n);
                        self.stack(switch(projection), e, part);
                    }
                }
            }
            (["down_proj"], [count, n, _]) => {
                for e in 0..*count {
                    self.stack(switch("down_proj"), e, (source.to_string(), e * n, *n));
                }
            }
            ([index, projection @ ("gate_proj" | "up_proj" | "down_proj"), "weight"], [n, _]) => {
                let index = index
                    .parse()
                    .map_err(|_| self.error(source, format!("expert {index:?} is not a number")))?;
                self.stack(switch(projection), index, (source.to_string(), 0, *n));
            }
            _ => {
                return Err(self.error(
                    source,
                    format!("shape {shape:?} under an unknown name for experts"),
                ))
            }
        }
        Ok(())
    }

    fn stack(&mut self, module: String, expert: usize, part: (String, usize, usize)) {
        self.experts.entry(module).or_default().insert(expert, part);
    }

    fn finish(mut self) -> Result<Plan> {
        for (module, experts) in std::mem::take(&mut self.experts) {
            let mut pieces = vec![];
            for (want, (expert, (tensor, first, rows))) in experts.into_iter().enumerate() {
                if expert != want {
                    return Err(self.error(&tensor, format!("expert {want} before it is missing")));
                }
                pieces.push(Piece {
                    tensor,
                    first,
                    rows,
                });
            }
            let k = |p: &Piece| {
                self.checkpoint
                    .shape(&p.tensor)
                    .and_then(|s| s.last().copied())
            };
            let (rows, width) = (pieces[0].rows, k(&pieces[0]));
            if let Some(odd) = pieces.iter().find(|p| p.rows != rows || k(p) != width) {
                return Err(self.error(&odd.tensor, "not of the shape of the other experts"));
            }
            let count = pieces.len();
            self.linear(module, pieces, Some(count), rows, width.unwrap_or(0));
        }
        if let Some(i) = self.used.iter().position(|used| !used) {
            return Err(Error::Option {
                name: "override",
                what: format!(
                    "no module of this checkpoint matches {:?}; modules are named like model.layers.0.mlp.down_proj",
                    self.options.overrides[i].0
                ),
            });
        }
        let name = |item: &Item| match item {
            Item::Float { name, .. } => name.clone(),
            Item::Linear { module, .. } => module.clone(),
        };
        self.plan.trunk.sort_by_key(name);
        self.plan.head.sort_by_key(name);
        Ok(self.plan)
    }

    fn linear(
        &mut self,
        module: String,
        pieces: Vec<Piece>,
        stacked: Option<usize>,
        rows: usize,
        k: usize,
    ) {
        let head = module.starts_with("language_model.mtp.");
        let last = module.rsplit('.').next().unwrap_or_default();
        let mut format = match last {
            // A quantized fc costs the head its acceptance.
            "fc" => None,
            "gate" | "shared_expert_gate" => Some(ROUTER),
            _ => Some(self.options.format),
        };
        for (i, (pattern, chosen)) in self.options.overrides.iter().enumerate() {
            if matches(pattern, &module) {
                (format, self.used[i]) = (*chosen, true);
            }
        }
        if format.is_some_and(|f| !k.is_multiple_of(f.group_size)) {
            self.plan.undivided.push(module.clone());
            format = None;
        }
        let item = Item::Linear {
            module,
            pieces,
            stacked,
            rows,
            k,
            dtype: self.dtype,
            format,
        };
        self.push(head, item);
    }

    fn push(&mut self, head: bool, item: Item) {
        match head {
            true => self.plan.head.push(item),
            false => self.plan.trunk.push(item),
        }
    }

    fn error(&self, tensor: &str, what: impl Into<String>) -> Error {
        Error::Tensor {
            file: self.checkpoint.file(tensor).to_path_buf(),
            tensor: tensor.to_string(),
            what: what.into(),
        }
    }
}

/// Whether a pattern's names appear in a module's one after the other: `layers.0.mlp` and `down_proj` match
/// `language_model.model.layers.0.mlp.down_proj`, `proj` does not.
fn matches(pattern: &str, module: &str) -> bool {
    let (pattern, module) = (pattern.trim_matches('.'), format!(".{module}."));
    !pattern.is_empty() && module.contains(&format!(".{pattern}."))
}

fn file_error(checkpoint: &Checkpoint, what: &str) -> Error {
    Error::File {
        file: PathBuf::from(checkpoint.dir()),
        what: what.into(),
    }
}
