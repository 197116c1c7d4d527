//! `config.json` of the Qwen3.5 family, nested (`text_config`) or flat, checked before anything is sized by it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::affine::AffineFormat;
use crate::error::{Error, Result};

use super::rope::{RopeKind, RopeParameters};

/// No published model comes near these; a larger value is a damaged file, and would size allocations.
const MAX_DIM: usize = 1 << 24;
const MAX_LAYERS: usize = 4096;

/// What mixes a layer's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LayerType {
    /// Gated delta net.
    LinearAttention,
    /// Gated softmax attention.
    FullAttention,
}

/// The experts of a mixture-of-experts model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MoeConfig {
    /// Experts of a layer.
    pub num_experts: usize,
    /// Experts that a row visits.
    pub num_experts_per_tok: usize,
    /// Inner size of an expert.
    pub moe_intermediate_size: usize,
    /// Inner size of the expert that every row visits.
    pub shared_expert_intermediate_size: usize,
}

/// The text model's sizes and constants.
#[derive(Clone, Debug, PartialEq)]
pub struct TextConfig {
    /// Tokens.
    pub vocab_size: usize,
    /// Size of a row.
    pub hidden_size: usize,
    /// Inner size of the feed-forward layers.
    pub intermediate_size: usize,
    /// Layers.
    pub num_hidden_layers: usize,
    /// Query heads of full attention.
    pub num_attention_heads: usize,
    /// Key and value heads of full attention.
    pub num_key_value_heads: usize,
    /// Size of a head of full attention.
    pub head_dim: usize,
    /// What each layer is.
    pub layer_types: Vec<LayerType>,
    /// Key heads of the gated delta net.
    pub linear_num_key_heads: usize,
    /// Value heads of the gated delta net.
    pub linear_num_value_heads: usize,
    /// Size of a key of the gated delta net.
    pub linear_key_head_dim: usize,
    /// Size of a value of the gated delta net.
    pub linear_value_head_dim: usize,
    /// Taps of its convolution.
    pub linear_conv_kernel_dim: usize,
    /// Epsilon of every RMSNorm.
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Share of a head's lanes that are rotated.
    pub partial_rotary_factor: f64,
    /// Pairs per axis of mRoPE, where the model has it.
    pub mrope_section: Option<[usize; 3]>,
    /// How the rotary frequencies follow from the base.
    pub rope_kind: RopeKind,
    /// Positions that the model takes: the file's `max_position_embeddings`, as its RoPE kind stretches it.
    pub max_position_embeddings: usize,
    /// Whether the output head is the embedding table.
    pub tie_word_embeddings: bool,
    /// Layers of the MTP head that the file promises (the tensors decide).
    pub mtp_num_hidden_layers: usize,
    /// Tokens that end a text.
    pub eos_token_ids: Vec<u32>,
    /// Experts, in a mixture-of-experts model.
    pub moe: Option<MoeConfig>,
}

impl TextConfig {
    /// Lanes of a head that are rotated.
    pub fn rotary_dims(&self) -> usize {
        (self.head_dim as f64 * self.partial_rotary_factor) as usize
    }
}

/// How the file says its modules are quantized. The tensors' shapes decide; what is said here must agree.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Quantization {
    modules: BTreeMap<String, AffineFormat>,
}

impl Quantization {
    /// The format stated for a module (its tensors' name without suffix), if the file speaks of it.
    pub fn format_for(&self, module: &str) -> Option<AffineFormat> {
        self.modules.get(module).copied()
    }
}

/// A model's `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The text model.
    pub text: TextConfig,
    /// How modules are quantized, in an MLX checkpoint.
    pub quantization: Option<Quantization>,
}

impl Config {
    /// Reads `config.json` of a model's folder.
    pub fn read(dir: impl AsRef<Path>) -> Result<Self> {
        let dir = dir.as_ref();
        let file = dir.join("config.json");
        if !file.is_file() {
            let what = match dir.is_dir() {
                true => "missing: this folder is not a model",
                false => "no such folder: name a folder with config.json and *.safetensors",
            };
            return Err(Error::config(&file, what));
        }
        let text = std::fs::read_to_string(&file).map_err(|e| Error::io(&file, e))?;
        Self::parse(&text, &file)
    }

    /// Parses the text of a `config.json`; `file` is named in errors.
    pub fn parse(text: &str, file: &Path) -> Result<Self> {
        let root: Value = serde_json::from_str(text)
            .map_err(|e| Error::config(file, format!("not valid JSON ({e})")))?;
        let Value::Object(root) = root else {
            return Err(Error::config(file, "not a JSON object"));
        };
        let text = match root.get("text_config") {
            Some(Value::Object(text)) => text,
            Some(_) => return Err(Error::config(file, "text_config is not an object")),
            None => &root,
        };
        let fields = Fields {
            root: &root,
            text,
            file: file.to_path_buf(),
        };
        Ok(Self {
            text: fields.text_config()?,
            quantization: fields.quantization()?,
        })
    }
}

/// The two levels of the file: a field is looked up in `text_config` first, then at the top.
struct Fields<'a> {
    root: &'a Map<String, Value>,
    text: &'a Map<String, Value>,
    file: PathBuf,
}

impl Fields<'_> {
    fn error(&self, what: impl Into<String>) -> Error {
        Error::config(&self.file, what)
    }

    fn get(&self, name: &str) -> Option<&Value> {
        let found = self.text.get(name).or_else(|| self.root.get(name));
        found.filter(|v| !v.is_null())
    }

    fn optional<T: serde::de::DeserializeOwned>(&self, name: &str) -> Result<Option<T>> {
        let parse = |v: &Value| {
            serde_json::from_value(v.clone()).map_err(|e| self.error(format!("{name}: {e}")))
        };
        self.get(name).map(parse).transpose()
    }

    /// A size in `1..=MAX_DIM`.
    fn size(&self, name: &str, default: Option<usize>) -> Result<usize> {
        let value = self.optional::<usize>(name)?.or(default);
        match value {
            Some(v) if (1..=MAX_DIM).contains(&v) => Ok(v),
            Some(v) => Err(self.error(format!("{name} is {v}, expected 1 to {MAX_DIM}"))),
            None => Err(self.error(format!("{name} is missing"))),
        }
    }

    fn text_config(&self) -> Result<TextConfig> {
        self.check_model_type()?;
        let layers = self.size("num_hidden_layers", None)?;
        if layers > MAX_LAYERS {
            return Err(self.error(format!(
                "num_hidden_layers is {layers}, more than {MAX_LAYERS}"
            )));
        }
        let moe = self.moe()?;
        let inner = moe.map(|m| m.shared_expert_intermediate_size);
        let positions = self.size("max_position_embeddings", Some(262_144))?;
        let rope = self.rope(positions)?;
        let config = TextConfig {
            vocab_size: self.size("vocab_size", None)?,
            hidden_size: self.size("hidden_size", None)?,
            intermediate_size: self.size("intermediate_size", inner)?,
            num_hidden_layers: layers,
            num_attention_heads: self.size("num_attention_heads", None)?,
            num_key_value_heads: self.size("num_key_value_heads", None)?,
            head_dim: self.size("head_dim", Some(256))?,
            layer_types: self.layer_types(layers)?,
            linear_num_key_heads: self.size("linear_num_key_heads", Some(16))?,
            linear_num_value_heads: self.size("linear_num_value_heads", None)?,
            linear_key_head_dim: self.size("linear_key_head_dim", Some(128))?,
            linear_value_head_dim: self.size("linear_value_head_dim", Some(128))?,
            linear_conv_kernel_dim: self.size("linear_conv_kernel_dim", Some(4))?,
            rms_norm_eps: self.optional("rms_norm_eps")?.unwrap_or(1e-6),
            rope_theta: rope.theta,
            partial_rotary_factor: rope.partial,
            mrope_section: rope.sections,
            max_position_embeddings: rope.kind.reach(positions).min(MAX_DIM),
            rope_kind: rope.kind,
            tie_word_embeddings: self.optional("tie_word_embeddings")?.unwrap_or(false),
            mtp_num_hidden_layers: self.optional("mtp_num_hidden_layers")?.unwrap_or(0),
            eos_token_ids: self.eos()?,
            moe,
        };
        self.check(&config)?;
        Ok(config)
    }

    fn check_model_type(&self) -> Result<()> {
        let known = ["qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"];
        let found: Option<String> = self.optional("model_type")?;
        match found {
            Some(kind) if known.contains(&kind.as_str()) => Ok(()),
            Some(kind) => Err(self.error(format!(
                "model_type {kind:?} is not supported: expected one of {known:?}"
            ))),
            None => Err(self.error("model_type is missing")),
        }
    }

    fn layer_types(&self, layers: usize) -> Result<Vec<LayerType>> {
        if let Some(types) = self.optional::<Vec<LayerType>>("layer_types")? {
            if types.len() != layers {
                return Err(self.error(format!(
                    "layer_types has {} entries for num_hidden_layers {layers}",
                    types.len()
                )));
            }
            return Ok(types);
        }
        let every = self.size("full_attention_interval", Some(4))?;
        let kind = |i: usize| match (i + 1) % every {
            0 => LayerType::FullAttention,
            _ => LayerType::LinearAttention,
        };
        Ok((0..layers).map(kind).collect())
    }

    fn moe(&self) -> Result<Option<MoeConfig>> {
        if self.optional::<usize>("num_experts")?.unwrap_or(0) == 0 {
            return Ok(None);
        }
        let moe = MoeConfig {
            num_experts: self.size("num_experts", None)?,
            num_experts_per_tok: self.size("num_experts_per_tok", None)?,
            moe_intermediate_size: self.size("moe_intermediate_size", None)?,
            shared_expert_intermediate_size: self.size("shared_expert_intermediate_size", None)?,
        };
        if moe.num_experts_per_tok > moe.num_experts {
            return Err(self.error(format!(
                "num_experts_per_tok {} is more than num_experts {}",
                moe.num_experts_per_tok, moe.num_experts
            )));
        }
        Ok(Some(moe))
    }

    fn eos(&self) -> Result<Vec<u32>> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Ids {
            One(u32),
            Many(Vec<u32>),
        }
        let mut all = vec![];
        for level in [self.root, self.text] {
            match level.get("eos_token_id").filter(|v| !v.is_null()) {
                None => {}
                Some(v) => match serde_json::from_value(v.clone()) {
                    Ok(Ids::One(id)) => all.push(id),
                    Ok(Ids::Many(ids)) => all.extend(ids),
                    Err(_) => {
                        return Err(self.error("eos_token_id is neither an id nor a list of ids"))
                    }
                },
            }
        }
        all.sort_unstable();
        all.dedup();
        Ok(all)
    }

    fn rope(&self, positions: usize) -> Result<RopeFields> {
        let outer = self.optional("original_max_position_embeddings")?;
        let mut rope = RopeFields {
            kind: RopeKind::Default,
            theta: self.optional("rope_theta")?.unwrap_or(1e7),
            partial: self.optional("partial_rotary_factor")?.unwrap_or(0.25),
            sections: None,
        };
        for name in ["rope_parameters", "rope_scaling"] {
            let Some(parameters) = self.optional::<RopeParameters>(name)? else {
                continue;
            };
            let kind = parameters.kind(positions, outer);
            rope.kind = kind.map_err(|what| self.error(format!("{name}: {what}")))?;
            rope.theta = parameters.rope_theta.unwrap_or(rope.theta);
            rope.partial = parameters.partial_rotary_factor.unwrap_or(rope.partial);
            rope.sections = parameters.mrope_section.or(rope.sections);
        }
        Ok(rope)
    }

    fn check(&self, c: &TextConfig) -> Result<()> {
        let divides = |a: usize, b: usize, names: &str| match a % b {
            0 => Ok(()),
            _ => Err(self.error(format!("{names}: {a} is not a multiple of {b}"))),
        };
        divides(
            c.num_attention_heads,
            c.num_key_value_heads,
            "num_attention_heads and num_key_value_heads",
        )?;
        divides(
            c.linear_num_value_heads,
            c.linear_num_key_heads,
            "linear_num_value_heads and linear_num_key_heads",
        )?;
        if !(c.rms_norm_eps.is_finite() && c.rms_norm_eps > 0.0) {
            return Err(self.error(format!("rms_norm_eps {} is not positive", c.rms_norm_eps)));
        }
        if !(c.rope_theta.is_finite() && c.rope_theta > 0.0) {
            return Err(self.error(format!("rope_theta {} is not positive", c.rope_theta)));
        }
        let share = c.partial_rotary_factor;
        if !(share > 0.0 && share <= 1.0)
            || c.rotary_dims() == 0
            || !c.rotary_dims().is_multiple_of(2)
        {
            return Err(self.error(format!(
                "partial_rotary_factor {share} of head_dim {} does not give an even number of rotary lanes",
                c.head_dim
            )));
        }
        // Products that size buffers must stay far from overflow.
        let products = [
            [c.num_attention_heads, c.head_dim],
            [c.num_key_value_heads, c.head_dim],
            [c.linear_num_value_heads, c.linear_value_head_dim],
            [c.linear_num_key_heads, c.linear_key_head_dim],
            [c.linear_key_head_dim, c.linear_value_head_dim],
            [
                c.linear_num_value_heads * c.linear_value_head_dim,
                c.linear_key_head_dim,
            ],
        ];
        let too_large = products
            .iter()
            .find(|[a, b]| a.saturating_mul(*b) > MAX_DIM);
        if let Some([a, b]) = too_large {
            return Err(self.error(format!("heads of {a} × {b} are too large")));
        }
        // Tables that the kind cannot make are the file's fault, whatever the length.
        for longest in [1, usize::MAX] {
            c.rope(longest)
                .map_err(|e| self.error(format!("rope_parameters: {e}")))?;
        }
        Ok(())
    }

    fn quantization(&self) -> Result<Option<Quantization>> {
        let found = ["quantization", "quantization_config"]
            .into_iter()
            .find_map(|name| Some((name, self.root.get(name).filter(|v| !v.is_null())?)));
        let Some((name, value)) = found else {
            return Ok(None);
        };
        let Value::Object(map) = value else {
            return Err(self.error(format!("{name} is not an object")));
        };
        if let Some(Value::String(method)) = map.get("quant_method") {
            return Err(self.error(format!(
                "{name}: quant_method {method:?} is not supported: use a bf16 or an MLX affine checkpoint"
            )));
        }
        self.format(name, map)?;
        let mut quantization = Quantization::default();
        for (module, value) in map {
            if let Value::Object(entry) = value {
                if let Some(format) = self.format(module, entry)? {
                    quantization.modules.insert(module.clone(), format);
                }
            }
        }
        Ok(Some(quantization))
    }

    fn format(&self, name: &str, map: &Map<String, Value>) -> Result<Option<AffineFormat>> {
        match map.get("mode") {
            None | Some(Value::Null) => {}
            Some(Value::String(mode)) if mode == "affine" => {}
            Some(mode) => {
                return Err(self.error(format!(
                    "quantization of {name}: mode {mode} is not supported, only affine is"
                )))
            }
        }
        let number = |key: &str| map.get(key).and_then(Value::as_u64);
        match (number("bits"), number("group_size")) {
            (Some(bits), Some(group)) => AffineFormat::new(bits as usize, group as usize)
                .map(Some)
                .map_err(|e| self.error(format!("quantization of {name}: {e}"))),
            _ => Ok(None),
        }
    }
}

struct RopeFields {
    theta: f64,
    partial: f64,
    sections: Option<[usize; 3]>,
    kind: RopeKind,
}
