//! Writes a checkpoint of seeded random weights in the shape of a published model: for benchmarks and loaders, where the
//! real weights are not needed.
//!
//! `cargo run --release --example make_checkpoint -- TARGET --size 0.8b --bits 4`

mod shapes;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{bail, Context, Result};
use candle_specprefill::affine::AffineFormat;
use candle_specprefill::qwen3_5::convert::{convert, ConvertOptions};
use clap::Parser;
use half::bf16;
use safetensors::{Dtype, View};
use serde_json::json;
use shapes::{Fill, Shape, Size};

/// Writes a checkpoint of seeded random weights. Without --bits it is a Hugging Face bf16 one, with it an MLX affine one.
#[derive(Parser, Debug)]
struct Cli {
    /// Folder to make
    target: PathBuf,
    /// The model whose dimensions it gets
    #[arg(long, value_enum, default_value = "tiny")]
    size: Size,
    /// Quantize to this many bits
    #[arg(long)]
    bits: Option<usize>,
    /// Weights that share a scale
    #[arg(long, default_value_t = 64)]
    group: usize,
    /// Mix bits by module as oQ checkpoints do (needs --bits)
    #[arg(long, requires = "bits")]
    oq: bool,
    /// Leave out the MTP head
    #[arg(long)]
    no_mtp: bool,
    /// Layers, if not the model's own number
    #[arg(long)]
    layers: Option<usize>,
    /// Names as in text-only copies: `model.` and no `text_config`
    #[arg(long)]
    flat: bool,
    /// Seed of the weights
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Copy tokenizer and chat template from this folder
    #[arg(long, value_name = "FOLDER")]
    tokenizer: Option<PathBuf>,
    /// Replace the target if it is a checkpoint already
    #[arg(long)]
    force: bool,
}

/// A tensor that is made when it is written.
struct Random {
    shape: Shape,
    seed: u64,
}

impl View for Random {
    fn dtype(&self) -> Dtype {
        Dtype::BF16
    }

    fn shape(&self) -> &[usize] {
        &self.shape.dims
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let mut state = self.seed | 1;
        let mut uniform = move || {
            // xorshift64*, whose upper half is random enough for weights.
            state ^= state >> 12;
            state ^= state << 25;
            state ^= state >> 27;
            (state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 40) as f32 / (1u32 << 24) as f32
        };
        let count: usize = self.shape.dims.iter().product();
        let mut bytes = Vec::with_capacity(count * 2);
        for _ in 0..count {
            let value = match self.shape.fill {
                Fill::Uniform(size) => (2.0 * uniform() - 1.0) * size,
                Fill::Between(low, high) => low + uniform() * (high - low),
            };
            bytes.extend(bf16::from_f32(value).to_le_bytes());
        }
        Cow::Owned(bytes)
    }

    fn data_len(&self) -> usize {
        self.shape.dims.iter().product::<usize>() * 2
    }
}

/// Most bytes of a file, as in published checkpoints.
const SHARD: u64 = 5 << 30;

/// Writes the Hugging Face form; returns its bytes.
fn write(cli: &Cli, dir: &Path) -> Result<u64> {
    let mut dims = cli.size.dims();
    dims.layers = cli.layers.unwrap_or(dims.layers);
    if dims.layers == 0 {
        bail!("--layers must be at least 1");
    }
    let mut shards: Vec<Vec<(String, Random)>> = vec![vec![]];
    let (mut filled, mut total) = (0, 0);
    for (i, (name, shape)) in dims.tensors(cli.flat, !cli.no_mtp).into_iter().enumerate() {
        let seed = (cli.seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ ((i as u64) << 32);
        let tensor = Random { shape, seed };
        let size = tensor.data_len() as u64;
        if filled > 0 && filled + size > SHARD {
            shards.push(vec![]);
            filled = 0;
        }
        (filled, total) = (filled + size, total + size);
        if let Some(shard) = shards.last_mut() {
            shard.push((name, tensor));
        }
    }
    let mut weight_map = BTreeMap::new();
    let count = shards.len();
    for (i, tensors) in shards.into_iter().enumerate() {
        let file = match count {
            1 => "model.safetensors".to_string(),
            _ => format!("model-{:05}-of-{count:05}.safetensors", i + 1),
        };
        weight_map.extend(tensors.iter().map(|(name, _)| (name.clone(), file.clone())));
        let format = [("format".to_string(), "pt".to_string())].into();
        safetensors::serialize_to_file(tensors, Some(format), &dir.join(&file))?;
    }
    let json = |name: &str, value: &serde_json::Value| -> Result<()> {
        let path = dir.join(name);
        let text = serde_json::to_string_pretty(value)?;
        std::fs::write(&path, text).with_context(|| path.display().to_string())
    };
    if count > 1 {
        let index = json!({"metadata": {"total_size": total}, "weight_map": weight_map});
        json("model.safetensors.index.json", &index)?;
    }
    json("config.json", &dims.config(cli.flat, !cli.no_mtp))?;
    if let Some(from) = &cli.tokenizer {
        let names = [
            "tokenizer.json",
            "tokenizer_config.json",
            "chat_template.jinja",
            "generation_config.json",
        ];
        for name in names.iter().filter(|n| from.join(n).is_file()) {
            std::fs::copy(from.join(name), dir.join(name)).with_context(|| name.to_string())?;
        }
    }
    Ok(total)
}

/// The mix of an oQ4-like checkpoint: 8-bit tables, 5 and 6 bits where it hurts most, 128 to a group for many experts.
fn oq(format: AffineFormat, experts: usize, layers: usize) -> Vec<(String, Option<AffineFormat>)> {
    let with = |bits: usize| {
        Some(AffineFormat {
            bits: bits.max(format.bits).min(8),
            group_size: 64,
        })
    };
    let mut mix = vec![];
    if experts >= 150 {
        let wide = AffineFormat {
            bits: format.bits,
            group_size: 128,
        };
        mix.push(("switch_mlp".to_string(), Some(wide)));
    }
    for name in [
        "o_proj",
        "out_proj",
        "in_proj_z",
        "in_proj_a",
        "in_proj_b",
        "down_proj",
    ] {
        let next = if format.bits < 5 { 5 } else { format.bits + 1 };
        mix.push((name.to_string(), with(if next == 7 { 8 } else { next })));
    }
    let edge = (layers / 8).max(1);
    for layer in (0..edge).chain(layers.saturating_sub(edge)..layers) {
        for name in ["v_proj", "in_proj_qkv"] {
            let part = if name == "v_proj" {
                "self_attn"
            } else {
                "linear_attn"
            };
            mix.push((format!("layers.{layer}.{part}.{name}"), with(6)));
        }
    }
    mix.push(("embed_tokens".into(), with(8)));
    mix.push(("lm_head".into(), with(8)));
    mix
}

fn run(cli: &Cli) -> Result<()> {
    if cli.target.exists() && !(cli.force && cli.target.join("config.json").is_file()) {
        bail!(
            "{} is there already: name another folder, or --force to replace a checkpoint",
            cli.target.display()
        );
    }
    let parent = cli.target.parent().filter(|p| !p.as_os_str().is_empty());
    let parent = parent.unwrap_or(Path::new("."));
    std::fs::create_dir_all(parent).with_context(|| parent.display().to_string())?;
    let made = tempfile::Builder::new()
        .prefix(".make_checkpoint-")
        .tempdir_in(parent)?;
    let source = made.path().join("bf16");
    std::fs::create_dir(&source)?;
    let mut bytes = write(cli, &source)?;
    if let Some(bits) = cli.bits {
        let format = AffineFormat::new(bits, cli.group)?;
        let dims = cli.size.dims();
        let layers = cli.layers.unwrap_or(dims.layers);
        let overrides = match cli.oq {
            true => oq(format, dims.experts, layers),
            false => vec![],
        };
        // Overrides of modules that this shape lacks would be refused.
        let names = dims.tensors(cli.flat, !cli.no_mtp);
        let there = |o: &(String, Option<AffineFormat>)| {
            let last = o.0.rsplit('.').next().unwrap_or_default();
            let layer =
                o.0.strip_prefix("layers.")
                    .and_then(|r| r.split('.').next());
            match (o.0.as_str(), layer) {
                ("switch_mlp", _) => dims.experts > 0,
                ("lm_head", _) => !dims.tied,
                (_, None) => true,
                (_, Some(layer)) => names
                    .iter()
                    .any(|(n, _)| n.contains(&format!("layers.{layer}.")) && n.contains(last)),
            }
        };
        let options = ConvertOptions {
            format,
            overrides: overrides.into_iter().filter(there).collect(),
            overwrite: cli.force,
            ..Default::default()
        };
        bytes = convert(&source, &cli.target, &options, &mut |_| {})?.bytes;
    } else {
        if cli.target.exists() {
            std::fs::remove_dir_all(&cli.target)?;
        }
        std::fs::rename(&source, &cli.target)?;
    }
    println!("{}: {:.3} GB", cli.target.display(), bytes as f64 / 1e9);
    Ok(())
}

fn main() -> ExitCode {
    match run(&Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
