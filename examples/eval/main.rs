//! What SpecPrefill costs in quality and saves in time, beside full prefill and two controls that choose blindly.
//!
//! `cargo run --release --example eval -- --out eval`

#[path = "../common/mod.rs"]
mod common;
mod decode;
mod divergence;
mod gate;
mod output;
mod tasks;

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result};
use candle_specprefill::mtp::Depth;
use candle_specprefill::pipeline::{Event, GenerateOptions, SpecPrefillPipeline, Usage};
use candle_specprefill::specprefill::{AttentionScorer, Keep, Scoring};
use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};

use output::{Case, Results};
use tasks::{Kind, Maker, Task};

/// Measures SpecPrefill's quality and time against full prefill.
#[derive(Parser, Debug)]
#[command(name = "eval")]
struct Cli {
    #[command(flatten)]
    model: common::ModelArgs,
    /// Prompt lengths of the needle grid, in tokens
    #[arg(long, value_delimiter = ',', default_values_t = [4096, 8192, 15500])]
    lengths: Vec<usize>,
    /// Depths of the needle, 0 to 1; lengths of 12000 and more take the first and the last
    #[arg(long, value_delimiter = ',', default_values_t = [0.1, 0.5, 0.9])]
    depths: Vec<f64>,
    /// How much is kept; the first is the only one for tasks other than needles and for lengths of 12000 and more
    #[arg(long, value_delimiter = ',', default_values = ["0.2", "0.1", "0.4"])]
    keep: Vec<Keep>,
    /// What scores
    #[arg(long, value_delimiter = ',', default_values = ["look-ahead-wide", "look-ahead", "tail-window", "spec-pc", "random", "uniform"])]
    scorers: Vec<String>,
    /// Tokens of the other tasks
    #[arg(long, default_value_t = 4096)]
    task_length: usize,
    /// Prompts per cell
    #[arg(long, default_value_t = 1)]
    samples: usize,
    /// Tokens at the end that are always kept
    #[arg(long, default_value_t = 512)]
    tail: usize,
    /// Chunks on either side of a chosen one that are kept too
    #[arg(long, default_value_t = 0)]
    neighbours: usize,
    /// Read everything where the target gives the draft's first token less probability than this; 0 is off
    #[arg(long, default_value_t = 0.0)]
    gate: f64,
    /// Tokens before every kept run that are kept too
    #[arg(long, default_value_t = 0)]
    seam: usize,
    /// Plain texts for the divergence from full prefill
    #[arg(long, default_value_t = 2)]
    texts: usize,
    /// Tokens drafted per cycle by the target's head; answers are the same at every depth, and full prefill is cheaper without
    #[arg(long, default_value_t = 0)]
    mtp_depth: usize,
    /// Text to hide facts in, paragraphs apart by empty lines [default: the embedded prompts']
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// Seed of prompts
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Write FILE.json, FILE.md and FILE.svg
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// Prompts of so many tokens are read at fewer depths and one share only.
pub const LONG: usize = 12_000;

fn main() -> Result<()> {
    let cli = Cli::parse();
    let start = Instant::now();
    let pipeline = cli.model.load()?;
    let mut maker = Maker::new(pipeline.tokenizer(), cli.seed)?;
    if let Some(file) = &cli.text {
        maker = maker.with_text(file)?;
    }
    let tasks = tasks(&cli, &mut maker);
    let scorers: Vec<(String, Scoring)> = cli
        .scorers
        .iter()
        .map(|name| Ok((name.clone(), name.parse()?)))
        .collect::<Result<_>>()?;
    let keeps = |task: &Task| match task.kind {
        Kind::Needle if task.length < LONG => &cli.keep[..],
        _ => &cli.keep[..1],
    };
    let answers = tasks.iter().map(|t| 1 + scorers.len() * keeps(t).len());
    let bar = ProgressBar::new(answers.sum::<usize>() as u64).with_style(
        ProgressStyle::with_template("{bar:40} {pos}/{len} {msg} {elapsed}, {eta} left")?,
    );
    let mut cases = vec![];
    let attention = scorers.iter().filter_map(|(_, scoring)| match scoring {
        Scoring::Attention(scorer) => Some(scorer.clone()),
        _ => None,
    });
    let attention: Vec<AttentionScorer> = attention.collect();
    for (i, task) in tasks.iter().enumerate() {
        bar.set_message(format!("{:?} {}", task.kind, task.length));
        let mut options = options(&cli);
        options.specprefill.enabled = false;
        cases.push(case(&pipeline, (i, task), "full", &options)?);
        bar.inc(1);
        // One pass of the draft serves all of them, and each bears the time that its share of it took.
        let scores = match pipeline.draft() {
            Some(_) => pipeline.score_all(task.messages.clone(), &attention, &options)?,
            None => vec![],
        };
        for (name, scoring) in &scorers {
            let place = |scorer: &AttentionScorer| attention.iter().position(|s| s == scorer);
            let scores = match scoring {
                Scoring::Attention(scorer) => place(scorer).and_then(|at| scores.get(at)),
                _ => None,
            };
            for keep in keeps(task) {
                options.specprefill.enabled = true;
                options.specprefill.keep = *keep;
                options.specprefill.scorer = scoring.clone();
                let mut case = case(&pipeline, (i, task), name, &options)?;
                if let (true, Some(scores)) = (case.sparse, scores) {
                    case.draft_prefill_s = scores.prefill_s;
                    case.scoring_s = scores.prefill_s + scores.lookahead_s;
                    case.ttft_s += case.scoring_s;
                }
                cases.push(case);
                bar.inc(1);
            }
        }
    }
    bar.finish_and_clear();
    let texts = (0..cli.texts).map(|_| maker.plain(cli.task_length));
    let texts: Vec<Vec<u32>> = texts.collect::<Result<_>>()?;
    let divergences = divergence::measure(&pipeline, &texts, &scorers, &cli.keep, &options(&cli))?;
    let decode = match texts.first() {
        Some(text) => decode::measure(&pipeline, text, &options(&cli))?,
        None => None,
    };
    let results = Results {
        decode,
        cases,
        divergences,
        seconds: start.elapsed().as_secs_f64(),
    };
    let table = results.markdown();
    println!("{table}");
    if let Some(out) = &cli.out {
        let write = |ending: &str, text: &str| {
            let file = out.with_extension(ending);
            std::fs::write(&file, text).with_context(|| file.display().to_string())
        };
        write("json", &serde_json::to_string_pretty(&results)?)?;
        write("md", &table)?;
        write("svg", &results.plot()?)?;
    }
    Ok(())
}

fn options(cli: &Cli) -> GenerateOptions {
    let mut options = GenerateOptions {
        mtp_depth: match cli.mtp_depth {
            0 => Depth::Off,
            depth => Depth::Fixed(depth),
        },
        ..Default::default()
    };
    options.specprefill.threshold = 600;
    options.specprefill.tail = cli.tail;
    options.specprefill.neighbours = cli.neighbours;
    options.specprefill.gate.min_probability = cli.gate;
    options.specprefill.seam = cli.seam;
    options
}

fn tasks(cli: &Cli, maker: &mut Maker) -> Vec<Task> {
    let mut tasks = vec![];
    for _ in 0..cli.samples {
        for &length in &cli.lengths {
            let ends = [cli.depths[0], cli.depths[cli.depths.len() - 1]];
            let depths = if length >= LONG {
                &ends[..]
            } else {
                &cli.depths[..]
            };
            tasks.extend(depths.iter().map(|d| maker.make(Kind::Needle, length, *d)));
        }
        for kind in [
            Kind::Multi,
            Kind::ToolResult,
            Kind::SystemSecret,
            Kind::Quote,
        ] {
            for depth in [0.3, 0.7] {
                tasks.push(maker.make(kind, cli.task_length, depth));
            }
        }
    }
    tasks
}

fn case(
    pipeline: &SpecPrefillPipeline,
    (index, task): (usize, &Task),
    scorer: &str,
    options: &GenerateOptions,
) -> Result<Case> {
    let mut options = options.clone();
    options.max_tokens = match task.kind {
        Kind::Quote => 90,
        _ => 12,
    };
    let (text, usage) = answer(pipeline, task, &options)?;
    let sparse = usage.specprefill.admitted;
    Ok(Case {
        task: index,
        kind: task.kind,
        length: task.length,
        depth: task.depth,
        scorer: scorer.into(),
        keep: options
            .specprefill
            .enabled
            .then_some(options.specprefill.keep),
        score: tasks::score(task, &text),
        text,
        answer: task.answer.clone(),
        sparse,
        prompt_tokens: usage.prompt_tokens,
        kept_tokens: usage.kept_tokens,
        draft_prefill_s: usage.specprefill.scoring_s,
        ttft_s: usage.time_to_first_token_s,
        scoring_s: usage.specprefill.scoring_s + usage.specprefill.lookahead_s,
        prefill_s: usage.specprefill.prefill_s,
        agreement: usage.specprefill.agreement,
        reread: usage.specprefill.reread,
    })
}

fn answer(
    pipeline: &SpecPrefillPipeline,
    task: &Task,
    options: &GenerateOptions,
) -> Result<(String, Usage)> {
    let mut text = String::new();
    for event in pipeline.generate(task.messages.clone(), options)? {
        match event? {
            Event::Text { text: more, .. } => text.push_str(&more),
            Event::Finished(usage) => return Ok((text, *usage)),
            _ => {}
        }
    }
    anyhow::bail!("the answer ended without its usage")
}
