//! Turns a Hugging Face bf16 folder into an MLX affine one.
//!
//! `cargo run --release --example quantize -- SOURCE TARGET --bits 4 --override lm_head=8`

#[path = "../common/model.rs"]
#[allow(dead_code)]
mod model;

use std::path::PathBuf;
use std::process::ExitCode;

use candle_specprefill::affine::AffineFormat;
use candle_specprefill::hub::ModelSource;
use candle_specprefill::qwen3_5::convert::{convert, ConvertOptions};
use candle_specprefill::Result;
use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};

/// Quantizes a Hugging Face checkpoint to the MLX affine format, bit for bit as MLX does. The MTP head is kept.
#[derive(Parser, Debug)]
struct Cli {
    /// The Hugging Face checkpoint: a folder, or owner/name[@revision] on the hub
    source: ModelSource,
    /// Folder to make
    target: PathBuf,
    /// Bits of a code: 2, 3, 4, 5, 6 or 8
    #[arg(long, default_value_t = 4)]
    bits: usize,
    /// Weights that share a scale: 32, 64 or 128
    #[arg(long, default_value_t = 64)]
    group: usize,
    /// What some modules get: NAME=BITS, NAME=BITS:GROUP or NAME=float, like lm_head=8 or layers.0.mlp=6:32; the last match counts
    #[arg(long = "override", value_name = "NAME=BITS[:GROUP]", value_parser = parse_override)]
    overrides: Vec<Override>,
    /// Replace the target if it is a checkpoint already
    #[arg(long)]
    force: bool,
}

#[derive(Clone, Debug)]
struct Override {
    name: String,
    bits: Option<usize>,
    group: Option<usize>,
}

fn parse_override(text: &str) -> std::result::Result<Override, String> {
    let (name, value) = text
        .split_once('=')
        .ok_or("expected NAME=BITS, NAME=BITS:GROUP or NAME=float")?;
    let name = name.to_string();
    if value == "float" {
        let (bits, group) = (None, None);
        return Ok(Override { name, bits, group });
    }
    let number = |t: &str| {
        t.parse::<usize>()
            .map_err(|_| format!("{t:?} is not a number"))
    };
    let (bits, group) = match value.split_once(':') {
        Some((bits, group)) => (number(bits)?, Some(number(group)?)),
        None => (number(value)?, None),
    };
    let bits = Some(bits);
    Ok(Override { name, bits, group })
}

fn run(cli: &Cli) -> Result<()> {
    let format = AffineFormat::new(cli.bits, cli.group)?;
    let mut overrides = vec![];
    for o in &cli.overrides {
        let chosen = o
            .bits
            .map(|bits| AffineFormat::new(bits, o.group.unwrap_or(cli.group)))
            .transpose()?;
        overrides.push((o.name.clone(), chosen));
    }
    let options = ConvertOptions {
        format,
        overrides,
        overwrite: cli.force,
        ..Default::default()
    };
    let source = cli.source.resolve(&model::hub(false))?;
    let style = ProgressStyle::with_template("{bar:30} {bytes}/{total_bytes} {eta} {msg}");
    let bar =
        ProgressBar::no_length().with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    let done = convert(&source, &cli.target, &options, &mut |p| {
        bar.set_length(p.total);
        bar.set_position(p.done);
        bar.set_message(p.module.to_string());
    });
    bar.finish_and_clear();
    let done = done?;
    println!(
        "{}: {}, {} modules quantized, {:.2} bits per weight, MTP head: {}",
        cli.target.display(),
        indicatif::HumanBytes(done.bytes),
        done.quantized,
        done.bits_per_weight,
        if done.mtp_head { "kept" } else { "none" }
    );
    if !done.undivided.is_empty() {
        println!(
            "left plain, rows not a multiple of the group size: {}",
            done.undivided.join(", ")
        );
    }
    if done.dropped > 0 {
        println!(
            "left out: {} tensors that are not of the text model",
            done.dropped
        );
    }
    Ok(())
}

fn main() -> ExitCode {
    match run(&Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
