//! Shows an answer while it is made.

use std::io::Write;

use anyhow::Result;
use candle_specprefill::pipeline::{Completion, Event, Stage};
use indicatif::{ProgressBar, ProgressStyle};

/// Writes the answer's text as it comes, with a bar before it while a long prompt is read.
pub fn stream(
    events: impl Iterator<Item = candle_specprefill::Result<Event>>,
    out: &mut dyn Write,
) -> Result<Completion> {
    // Draws on standard error, and only when that is a terminal.
    let bar = ProgressBar::no_length().with_style(ProgressStyle::with_template(
        "{msg} {bar:30} {pos}/{len} tokens, {elapsed}",
    )?);
    let (mut text, mut token_ids) = (String::new(), Vec::new());
    for event in events {
        let event = event.inspect_err(|_| bar.finish_and_clear())?;
        match event {
            Event::Progress { stage, done, total } => {
                bar.set_message(match stage {
                    Stage::Scoring => "draft reads the prompt",
                    _ => "target reads the prompt",
                });
                bar.set_length(total as u64);
                bar.set_position(done as u64);
            }
            Event::Text {
                text: more,
                token_ids: ids,
            } => {
                bar.finish_and_clear();
                write!(out, "{more}")?;
                out.flush()?;
                text.push_str(&more);
                token_ids.extend(ids);
            }
            Event::Finished(usage) => {
                writeln!(out)?;
                return Ok(Completion {
                    text,
                    token_ids,
                    usage: *usage,
                });
            }
            _ => {}
        }
    }
    anyhow::bail!("the answer ended without its usage")
}
