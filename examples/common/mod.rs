//! What the examples share: their flags, the embedded models, and prompts from files.
#![allow(dead_code)]

pub mod chat;
pub mod commands;
pub mod exit;
pub mod generate;
pub mod model;
pub mod stream;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use candle_specprefill::mtp::{Depth, Sampling};
use candle_specprefill::pipeline::{GenerateOptions, Message, SpecPrefillPipeline};
use candle_specprefill::specprefill::{Keep, Scoring};
use clap::Args;
use serde::Deserialize;

#[allow(unused_imports)]
pub use exit::{complain, parse, report};
pub use model::{tiny, ModelArgs};

/// The prompt that is asked when none is given.
pub const DEFAULT_PROMPT: &str = "prompts/needle_16k_00.json";

/// What is asked.
#[derive(Args, Clone, Debug)]
pub struct PromptArgs {
    /// The user's message [default: an embedded needle question]
    #[arg(long, conflicts_with = "prompt_file")]
    pub prompt: Option<String>,
    /// A text file (one user message) or a JSON file with `messages`
    #[arg(long, value_name = "FILE")]
    pub prompt_file: Option<PathBuf>,
    /// A system message before the prompt
    #[arg(long)]
    pub system: Option<String>,
}

#[derive(Deserialize)]
struct PromptFile {
    messages: Vec<Message>,
}

impl PromptArgs {
    /// The conversation.
    pub fn messages(&self) -> Result<Vec<Message>> {
        let mut messages = match (&self.prompt, &self.prompt_file) {
            (Some(prompt), _) => vec![Message::user(prompt)],
            (None, Some(file)) => read_messages(file)?,
            (None, None) => read_messages(&tiny().join(DEFAULT_PROMPT))?,
        };
        if let Some(system) = &self.system {
            messages.insert(0, Message::system(system));
        }
        Ok(messages)
    }
}

/// Reads a prompt file: an object with `messages` when its name ends in .json, else one user message.
pub fn read_messages(file: &Path) -> Result<Vec<Message>> {
    let text = std::fs::read_to_string(file).with_context(|| file.display().to_string())?;
    if file
        .extension()
        .is_some_and(|extension| extension == "json")
    {
        let prompt: PromptFile = serde_json::from_str(&text)
            .with_context(|| format!("{}: not a JSON object with `messages`", file.display()))?;
        return Ok(prompt.messages);
    }
    Ok(vec![Message::user(text)])
}

/// How the answer is generated.
#[derive(Args, Clone, Debug)]
pub struct GenerateArgs {
    /// Most tokens to generate
    #[arg(long, default_value_t = 256)]
    pub max_tokens: usize,
    /// Sample as the model's generation_config.json recommends, but for the flags given beside this one
    #[arg(long)]
    pub model_sampling: bool,
    /// Sampling temperature; 0 is greedy [default: 0]
    #[arg(long)]
    pub temperature: Option<f32>,
    /// Sample from the smallest set of tokens with this probability [default: 1]
    #[arg(long)]
    pub top_p: Option<f32>,
    /// Sample from the most probable tokens only; 0 is off [default: 0]
    #[arg(long)]
    pub top_k: Option<usize>,
    /// Sample from tokens at least this probable relative to the best [default: 0]
    #[arg(long)]
    pub min_p: Option<f32>,
    /// Seed of sampling; the text does not depend on --mtp-depth
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// How much of the prompt SpecPrefill keeps: 0.2 (share), 4000t (tokens), mass:0.9 (share of importance), 1.5s (time to
    /// first token)
    #[arg(long, default_value = "0.2")]
    pub keep: Keep,
    /// What scores prompt tokens: look-ahead-wide, look-ahead (as published), tail-window, spec-pc, random or uniform
    #[arg(long, default_value = "look-ahead-wide")]
    pub scorer: Scoring,
    /// Use SpecPrefill for prompts of more tokens than this
    #[arg(long, default_value_t = 8192)]
    pub threshold: usize,
    /// Read the whole prompt with the target
    #[arg(long)]
    pub no_specprefill: bool,
    /// Tokens drafted per cycle by the MTP head: a number (0 is off), or `auto` for as many as pay
    #[arg(long, default_value = "auto", value_name = "0..8|auto", value_parser = depth)]
    pub mtp_depth: Depth,
    /// Do not copy drafts from prompt and text
    #[arg(long)]
    pub no_copy: bool,
    /// Divide logits of tokens that prompt or text have; 1 is off [default: 1]
    #[arg(long)]
    pub repetition_penalty: Option<f32>,
    /// Take this from logits of tokens that the text has
    #[arg(long, default_value_t = 0.0)]
    pub presence_penalty: f32,
    /// Take this from a token's logit as often as the text has it
    #[arg(long, default_value_t = 0.0)]
    pub frequency_penalty: f32,
    /// End the answer before this text; may be given several times
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
}

/// A depth as a user writes it.
pub fn depth(text: &str) -> std::result::Result<Depth, String> {
    match text {
        "auto" => Ok(Depth::default()),
        "0" => Ok(Depth::Off),
        number => number
            .parse()
            .map(Depth::Fixed)
            .map_err(|_| "must be a number from 0 (off) to 8, or auto".into()),
    }
}

impl GenerateArgs {
    /// The scorer, in a word.
    pub fn scorer_name(&self) -> String {
        match &self.scorer {
            Scoring::Attention(s) if s.lookahead > 1 => format!("look-ahead of {}", s.lookahead),
            Scoring::Attention(s) => format!("window of {}", s.window),
            Scoring::Random { seed } => format!("random, seed {seed}"),
            Scoring::Uniform => "uniform".into(),
        }
    }

    /// Sets what was asked for.
    fn take_sampling(&self, sampling: &mut Sampling) {
        let set = |to: &mut f32, asked: Option<f32>| *to = asked.unwrap_or(*to);
        set(&mut sampling.temperature, self.temperature);
        set(&mut sampling.top_p, self.top_p);
        set(&mut sampling.min_p, self.min_p);
        set(&mut sampling.repetition_penalty, self.repetition_penalty);
        sampling.top_k = self.top_k.unwrap_or(sampling.top_k);
    }

    /// [`GenerateArgs::options`] for a loaded model: with `--model-sampling` as its makers recommend.
    pub fn options_for(&self, pipeline: &SpecPrefillPipeline) -> GenerateOptions {
        let mut options = self.options();
        if self.model_sampling {
            let recommended = &pipeline.generation_config().sampling;
            options.sampling = Sampling {
                presence_penalty: self.presence_penalty,
                frequency_penalty: self.frequency_penalty,
                seed: self.seed,
                ..recommended.clone()
            };
            self.take_sampling(&mut options.sampling);
        }
        options
    }

    /// As the library takes them, without a model.
    pub fn options(&self) -> GenerateOptions {
        let mut options = GenerateOptions {
            max_tokens: self.max_tokens,
            mtp_depth: self.mtp_depth,
            copy: !self.no_copy,
            stop: self.stop.clone(),
            ..Default::default()
        };
        options.sampling.seed = self.seed;
        self.take_sampling(&mut options.sampling);
        options.sampling.presence_penalty = self.presence_penalty;
        options.sampling.frequency_penalty = self.frequency_penalty;
        options.specprefill.enabled = !self.no_specprefill;
        options.specprefill.keep = self.keep;
        options.specprefill.scorer = self.scorer.clone();
        options.specprefill.threshold = self.threshold;
        options
    }
}
