//! `bench mtp`: decode speed by depth on the loaded model, plain and adaptive decoding side by side.

use std::time::Instant;

use anyhow::{Context as _, Result};
use candle_core::Tensor;
use candle_specprefill::mtp::{
    prefill, Controller, Depth, Drafter, NGram, PrefillOptions, Session, SessionOptions, MAX_DEPTH,
};
use candle_specprefill::ops::Context;
use candle_specprefill::pipeline::{ChatTemplate, Message, TextTokenizer};
use candle_specprefill::qwen3_5::{Cache, Model};
use serde_json::json;

use crate::model::ModelArgs;

/// What to measure.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Most tokens of an answer
    #[arg(long, default_value_t = 96)]
    max_tokens: usize,
    /// The deepest adaptive decoding may go, and fixed depths up to it
    #[arg(long, default_value_t = 4)]
    max_depth: usize,
    /// Times that every prompt is answered by every setting
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Let drafts also be copied from prompt and text
    #[arg(long)]
    copy: bool,
    /// Do not show the prompt to the draft head
    #[arg(long)]
    no_priming: bool,
    /// Ask this instead of the built-in prompts
    #[arg(long)]
    prompt: Option<String>,
    /// Print one JSON object instead of the table
    #[arg(long)]
    json: bool,
}

/// Kinds of prompts that the embedded pair knows, and three of each.
const KINDS: [(&str, [&str; 3]); 4] = [
    ("copy", [
        "Copy this paragraph exactly:\n\nThe server reads a request, looks the answer up in a table and writes it back. If the table does not have it, the request is put in a queue and answered later.",
        "Copy this paragraph exactly:\n\nA transaction is a series of operations that either all take effect or have no effect at all. The log is written before the data, so that a crash can be undone.",
        "Copy this paragraph exactly:\n\nIn the morning the ship left the harbour with a fair wind, and by noon the coast was only a thin line behind it. Nobody on board spoke of what lay ahead.",
    ]),
    ("quote", [
        "Repeat the following text:\n\nThe garbage collector stops the program, marks what can still be reached, and frees the rest of the memory.",
        "Repeat the following text:\n\nEvery packet carries the address of the machine that sent it and of the machine that shall receive it.",
        "Repeat the following text:\n\nIn the beginning God created the heaven and the earth. And the earth was without form, and void.",
    ]),
    ("define", [
        "Define the word \"harbour\".",
        "Define the word \"lantern\".",
        "What does the word \"garden\" mean?",
    ]),
    ("tell me", [
        "Tell me about error handling.",
        "Write a paragraph about sorting.",
        "Tell me about the sea.",
    ]),
];

struct Bench<'a> {
    args: &'a Args,
    model: Model,
    stop: Vec<u32>,
}

/// One answer: tokens after the first, seconds for them, and the cycles.
struct Run {
    tokens: Vec<u32>,
    seconds: f64,
    cycles: u64,
}

impl Bench<'_> {
    fn run(
        &self,
        (prompt, cache, last): &(Vec<u32>, Cache, Tensor),
        depth: Depth,
        learned: &mut Option<Controller>,
    ) -> Result<Run> {
        let cx = Context::default();
        let copy = self.args.copy && depth != Depth::Off;
        let options = SessionOptions {
            depth,
            controller: learned.clone(),
            stop_tokens: self.stop.clone(),
            max_tokens: self.args.max_tokens,
            drafter: copy.then(|| Box::new(NGram::default()) as Box<dyn Drafter>),
            prompt: prompt.to_vec(),
            ..Default::default()
        };
        let mut session = Session::new(&self.model, &cx, cache.fork()?, last, options)?;
        let mut tokens = session.step(&self.model, &cx)?;
        let start = Instant::now();
        while session.finished().is_none() {
            tokens.extend(session.step(&self.model, &cx)?);
        }
        if let Some(controller) = session.controller() {
            *learned = Some(controller.clone());
        }
        Ok(Run {
            seconds: start.elapsed().as_secs_f64(),
            cycles: session.stats().cycles,
            tokens,
        })
    }
}

/// Runs the measurement and prints it.
pub fn run(args: &Args) -> Result<()> {
    let (dir, model) = args.model.load()?;
    if !model.has_mtp() {
        anyhow::bail!("{} has no MTP head", dir.display());
    }
    let (tokenizer, template) = (TextTokenizer::read(&dir)?, ChatTemplate::read(&dir)?);
    let mut stop = model.config().eos_token_ids.clone();
    stop.extend(template.eos_token().and_then(|t| tokenizer.id(t)));
    let own = args.prompt.as_deref().map(|p| ("prompt", vec![p]));
    let kinds: Vec<(&str, Vec<&str>)> = match own {
        Some(own) => vec![own],
        None => KINDS
            .iter()
            .map(|(kind, prompts)| (*kind, prompts.to_vec()))
            .collect(),
    };
    let mut settings = vec![
        Depth::Off,
        Depth::Adaptive {
            max: args.max_depth,
        },
    ];
    settings.extend((1..=args.max_depth.min(MAX_DEPTH)).map(Depth::Fixed));
    let bench = Bench { args, model, stop };
    let name = |depth: &Depth| match depth {
        Depth::Off => "plain".to_string(),
        Depth::Adaptive { .. } => "adaptive".into(),
        Depth::Fixed(depth) => format!("depth {depth}"),
    };
    if !args.json {
        let names: Vec<String> = settings
            .iter()
            .map(|d| format!("{:>17}", name(d)))
            .collect();
        println!(
            "{:<8} {}   (tokens per second over plain, tokens per cycle)",
            "",
            names.join("")
        );
    }
    // As in a pipeline, an answer begins with what earlier ones taught.
    let mut learned = vec![None; settings.len()];
    let (mut rows, mut ratios) = (vec![], vec![vec![]; settings.len()]);
    for (kind, prompts) in &kinds {
        let mut prefilled = vec![];
        for text in prompts {
            let messages = [Message::user(*text)];
            let tokens = tokenizer.encode(&template.render(&messages)?)?;
            let mut cache = bench.model.new_cache()?;
            let cx = Context::default();
            let o = PrefillOptions {
                prime: !args.no_priming,
                ..Default::default()
            };
            let last = prefill(
                &bench.model,
                &cx,
                &mut cache,
                &tokens,
                None,
                &o,
                &mut |_| {},
            )
            .with_context(|| text.to_string())?;
            prefilled.push((tokens, cache, last));
        }
        // Every setting in turn for every prompt, so that a disturbance meets them alike; the median round counts.
        let mut rounds = vec![vec![]; settings.len()];
        let (mut tokens, mut cycles) = (vec![0; settings.len()], vec![0; settings.len()]);
        for round in 0..args.rounds + 1 {
            for prompt in &prefilled {
                let mut plain = vec![];
                for (i, depth) in settings.iter().enumerate() {
                    let run = bench.run(prompt, *depth, &mut learned[i])?;
                    match i {
                        0 => plain = run.tokens.clone(),
                        _ if run.tokens != plain => {
                            anyhow::bail!("{} changed the text", name(depth))
                        }
                        _ => {}
                    }
                    // The first round warms up.
                    if round > 0 {
                        if rounds[i].len() < round {
                            rounds[i].push(0.0);
                        }
                        rounds[i][round - 1] += run.seconds;
                        tokens[i] += run.tokens.len() - 1;
                        cycles[i] += run.cycles;
                    }
                }
            }
        }
        let medians: Vec<f64> = rounds
            .iter_mut()
            .map(|r| {
                r.sort_by(f64::total_cmp);
                r[r.len() / 2]
            })
            .collect();
        let per_round = tokens[0] / args.rounds;
        let mut line = format!("{kind:<8} ");
        let mut cells = vec![];
        for (i, depth) in settings.iter().enumerate() {
            let ratio = medians[0] / medians[i];
            let per_cycle = tokens[i] as f64 / cycles[i].max(1) as f64;
            ratios[i].push(ratio);
            line += &format!("    {ratio:>6.2}x {per_cycle:>5.2}");
            cells.push(
                json!({"setting": name(depth), "tokens_per_second": per_round as f64 / medians[i],
                "ratio_to_plain": ratio, "tokens_per_cycle": per_cycle}),
            );
        }
        if !args.json {
            println!("{line}   plain {:.0} tok/s", per_round as f64 / medians[0]);
        }
        rows.push(json!({"kind": kind, "settings": cells}));
    }
    let means: Vec<f64> = ratios
        .iter()
        .map(|r| r.iter().sum::<f64>() / r.len() as f64)
        .collect();
    if args.json {
        let all = json!({"rows": rows, "mean_ratios": settings.iter().map(name).zip(&means).collect::<Vec<_>>()});
        println!("{all}");
    } else {
        let cells: Vec<String> = means
            .iter()
            .map(|m| format!("    {m:>6.2}x      "))
            .collect();
        println!("{:<8} {}", "mean", cells.join(""));
        println!("every setting gave the text of plain decoding");
    }
    Ok(())
}
