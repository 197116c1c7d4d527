//! Shows what SpecPrefill keeps of a prompt and why: a table of spans, JSON, or an HTML page.
//!
//! `cargo run --release --example inspect -- --html out.html`

#[path = "../common/mod.rs"]
mod common;

use std::path::PathBuf;

use anyhow::{Context, Result};
use candle_specprefill::pipeline::Selected;
use clap::Parser;

/// Shows what SpecPrefill keeps of a prompt and why.
#[derive(Parser, Debug)]
#[command(name = "inspect")]
struct Cli {
    #[command(flatten)]
    model: common::ModelArgs,
    #[command(flatten)]
    prompt: common::PromptArgs,
    #[command(flatten)]
    generate: common::GenerateArgs,
    /// Write a page that shows the prompt with kept and dropped text
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Print the selection as JSON
    #[arg(long)]
    json: bool,
}

fn main() -> Result<()> {
    let cli = Cli::parse();
    let pipeline = cli.model.load()?;
    let options = cli.generate.options();
    let selected = pipeline.select(cli.prompt.messages()?, &options)?;
    let Some(selection) = &selected.selection else {
        eprintln!(
            "every token is kept: {} (see --threshold)",
            selected.usage.explanation
        );
        return Ok(());
    };
    if let Some(file) = &cli.html {
        let usage = &selected.usage;
        let facts = [
            ("scorer".to_string(), cli.generate.scorer_name()),
            (
                "draft's reading".to_string(),
                format!("{:.2} s", usage.scoring_s),
            ),
            (
                "look-ahead".to_string(),
                format!("{:.2} s", usage.lookahead_s),
            ),
        ];
        let page = selected.html("What SpecPrefill kept", &facts);
        std::fs::write(file, page.unwrap_or_default())
            .with_context(|| file.display().to_string())?;
        eprintln!("{}", file.display());
    }
    if cli.json {
        println!("{}", serde_json::to_string(selection)?);
    } else {
        table(&selected);
    }
    Ok(())
}

fn table(selected: &Selected) {
    let Some(selection) = &selected.selection else {
        return;
    };
    println!(
        "{} of {} tokens kept ({:.1} %), {} of them required",
        selection.kept.len(),
        selection.total,
        100.0 * selection.share(),
        selection.required_tokens()
    );
    println!("{:<16} {:>8} {:>8} {:>8}", "span", "from", "tokens", "kept");
    for span in &selected.prompt.spans {
        let kept = |i: &u32| span.tokens.contains(&(*i as usize));
        println!(
            "{:<16} {:>8} {:>8} {:>8}",
            format!("{:?}", span.role),
            span.tokens.start,
            span.tokens.len(),
            selection.kept.iter().filter(|i| kept(i)).count()
        );
    }
}
