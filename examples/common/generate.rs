//! The example `generate`, callable from tests.

use std::ffi::OsString;
use std::io::Write;

use anyhow::Result;
use candle_specprefill::mtp::Depth;
use candle_specprefill::pipeline::{
    Completion, GenerateOptions, Message, SpecPrefillPipeline, Usage,
};
use clap::Parser;
use serde::Serialize;

use super::stream::stream;
use super::{GenerateArgs, ModelArgs, PromptArgs};

/// Answers a prompt: SpecPrefill reads it, MTP decoding streams the answer, a summary says what it cost.
#[derive(Parser, Debug)]
#[command(name = "generate")]
pub struct Cli {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    prompt: PromptArgs,
    #[command(flatten)]
    generate: GenerateArgs,
    /// Also answer with SpecPrefill and MTP off, and show the numbers side by side
    #[arg(long)]
    compare: bool,
    /// Print one JSON object on standard output, everything else on standard error
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    #[serde(flatten)]
    answer: Completion,
    #[serde(skip_serializing_if = "Option::is_none")]
    compare: Option<Completion>,
}

/// Runs the example and returns its exit status: 0 an answer, 1 an error, 2 bad arguments.
pub fn run<I, T>(args: I, out: &mut dyn Write, err: &mut dyn Write) -> u8
where
    I: IntoIterator<Item = T>,
    T: Into<OsString> + Clone,
{
    let cli: Cli = match super::parse(args, out, err) {
        Ok(cli) => cli,
        Err(status) => return status,
    };
    match answer(&cli, out, err) {
        Ok(()) => 0,
        Err(error) => super::report(err, &error),
    }
}

fn answer(cli: &Cli, out: &mut dyn Write, err: &mut dyn Write) -> Result<()> {
    cli.generate.options().validate()?;
    let messages = cli.prompt.messages()?;
    let pipeline = cli.model.load()?;
    let options = &cli.generate.options_for(&pipeline);
    let mut sink = std::io::sink();
    let shown: &mut dyn Write = if cli.json { &mut sink } else { &mut *out };
    let answer = generate(&pipeline, &messages, options, shown)?;
    let compare = if cli.compare {
        let mut plain = options.clone();
        plain.specprefill.enabled = false;
        plain.mtp_depth = Depth::Off;
        Some(generate(
            &pipeline,
            &messages,
            &plain,
            &mut std::io::sink(),
        )?)
    } else {
        None
    };
    if cli.json {
        let report = Report { answer, compare };
        writeln!(out, "{}", serde_json::to_string(&report)?)?;
    } else {
        out.flush()?;
        summary(&answer, compare.as_ref(), err)?;
    }
    Ok(())
}

fn generate(
    pipeline: &SpecPrefillPipeline,
    messages: &[Message],
    options: &GenerateOptions,
    out: &mut dyn Write,
) -> Result<Completion> {
    stream(pipeline.generate(messages, options)?, out)
}

/// What an answer cost, as a table; beside it the same of another answer.
pub fn summary(
    answer: &Completion,
    compare: Option<&Completion>,
    err: &mut dyn Write,
) -> Result<()> {
    let columns: Vec<&Completion> = std::iter::once(answer).chain(compare).collect();
    let mut row = |name: &str, value: &dyn Fn(&Usage) -> String| {
        let cells: String = columns
            .iter()
            .map(|column| format!(" {:>20}", value(&column.usage)))
            .collect();
        writeln!(err, "{name:<22}{cells}")
    };
    if compare.is_some() {
        row("", &|usage| {
            let off = !usage.specprefill.admitted && usage.mtp.stats.depth == 0;
            (if off { "both off" } else { "as asked" }).into()
        })?;
    }
    row("prompt tokens", &|u| u.prompt_tokens.to_string())?;
    row("kept tokens", &|u| {
        let share = 100.0 * u.kept_tokens as f64 / u.prompt_tokens.max(1) as f64;
        format!("{} ({share:.1} %)", u.kept_tokens)
    })?;
    row("time to first token", &|u| {
        format!("{:.3} s", u.time_to_first_token_s)
    })?;
    row("  scoring", &|u| {
        format!("{:.3} s", u.specprefill.scoring_s)
    })?;
    row("  look-ahead", &|u| {
        format!("{:.3} s", u.specprefill.lookahead_s)
    })?;
    row("  prefill", &|u| {
        format!("{:.3} s", u.specprefill.prefill_s)
    })?;
    row("answer tokens", &|u| u.completion_tokens.to_string())?;
    row("decode speed", &|u| {
        format!("{:.1} tok/s", u.generation_tokens_per_second)
    })?;
    row("tokens per cycle", &|u| {
        format!("{:.2}", u.mtp.stats.tokens_per_cycle)
    })?;
    row("accepted by depth", &|u| {
        if u.mtp.stats.drafted.is_empty() {
            return "-".into();
        }
        let shares = u.mtp.stats.drafted.iter().zip(&u.mtp.stats.accepted);
        let shares: Vec<String> = shares.map(|(d, a)| format!("{a}/{d}")).collect();
        shares.join(" ")
    })?;
    row("copied tokens", &|u| {
        format!("{} of {}", u.mtp.stats.sources.copy, u.mtp.stats.copied)
    })?;
    row("cycles by depth", &|u| {
        let counts: Vec<String> = u.mtp.stats.depths.iter().map(u64::to_string).collect();
        counts.join(" ")
    })?;
    if let Some(note) = &answer.usage.mtp.note {
        writeln!(err, "MTP: {note}")?;
    }
    writeln!(err, "SpecPrefill: {}", answer.usage.specprefill.explanation)?;
    writeln!(err, "routes:")?;
    for (route, calls) in &answer.usage.routes {
        writeln!(err, "  {route:<44} {calls:>8}")?;
    }
    if let Some(plain) = compare {
        let same = if plain.text == answer.text {
            "the same text"
        } else {
            "another text"
        };
        writeln!(err, "with both off: {same}: {:?}", plain.text)?;
    }
    Ok(())
}
