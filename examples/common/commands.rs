//! What a user can type in a chat beside messages.

use std::str::FromStr;

use anyhow::{anyhow, bail, Result};
use candle_specprefill::pipeline::GenerateOptions;

use super::depth;

/// What `/help` prints.
pub const HELP: &str = "\
A line is a message; one that ends with \\ goes on in the next. A message that begins with / is written with //.
  /file FILE            says what a text file contains
  /retry                answers the last message again
  /undo                 takes the last message and its answer back
  /reset                begins anew, with the same settings and system message
  /system [TEXT]        sets the system message, or removes it
  /history              shows what was said
  /save FILE            writes the conversation as JSON, which --prompt-file of other examples reads
  /load FILE            goes on with a conversation that was saved
  /stats                shows what the last answer cost
  /settings             shows the settings
  /keep 0.2             how much of a long text SpecPrefill keeps, as --keep
  /threshold N          texts of more tokens than this are read sparsely
  /scorer NAME          what scores tokens, as --scorer
  /specprefill on|off   whether texts may be read sparsely
  /depth N|auto         tokens drafted per cycle, 0 is off
  /max-tokens N         most tokens of an answer
  /temperature X        0 is greedy
  /top-p X, /top-k N, /min-p X, /seed N, /repetition-penalty X, /presence-penalty X, /frequency-penalty X
  /think on|off|auto    whether the model thinks before it answers, if its template knows that
  /stop [TEXT]          ends answers before this text, or no longer
  /help, /quit
Ctrl-C stops an answer; what was said of it stays. At the prompt it ends the program.";

/// Changes a setting; `false` if there is none of that name.
pub fn set(options: &mut GenerateOptions, name: &str, value: &str) -> Result<bool> {
    let mut new = options.clone();
    let sampling = &mut new.sampling;
    let sparse = &mut new.specprefill;
    match name {
        "keep" => sparse.keep = value.parse().map_err(|e| anyhow!("{e}"))?,
        "threshold" => sparse.threshold = number(value)?,
        "scorer" => sparse.scorer = value.parse().map_err(|e| anyhow!("{e}"))?,
        "specprefill" => sparse.enabled = switch(value)?,
        "depth" => new.mtp_depth = depth(value).map_err(|e| anyhow!("{value:?}: {e}"))?,
        "max-tokens" => new.max_tokens = number(value)?,
        "temperature" => sampling.temperature = number(value)?,
        "top-p" => sampling.top_p = number(value)?,
        "top-k" => sampling.top_k = number(value)?,
        "min-p" => sampling.min_p = number(value)?,
        "seed" => sampling.seed = number(value)?,
        "repetition-penalty" => sampling.repetition_penalty = number(value)?,
        "presence-penalty" => sampling.presence_penalty = number(value)?,
        "frequency-penalty" => sampling.frequency_penalty = number(value)?,
        "think" if value == "auto" => new.template.enable_thinking = None,
        "think" => new.template.enable_thinking = Some(switch(value)?),
        "stop" => {
            new.stop = (!value.is_empty())
                .then(|| value.into())
                .into_iter()
                .collect()
        }
        _ => return Ok(false),
    }
    new.validate()?;
    *options = new;
    Ok(true)
}

fn number<T: FromStr>(value: &str) -> Result<T> {
    match value.parse() {
        Ok(number) => Ok(number),
        Err(_) => bail!("{value:?} is not such a number"),
    }
}

fn switch(value: &str) -> Result<bool> {
    match value {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => bail!("{value:?} is neither on nor off"),
    }
}

/// The settings, a line each.
pub fn settings(options: &GenerateOptions) -> Result<String> {
    let think = match options.template.enable_thinking {
        None => "auto",
        Some(true) => "on",
        Some(false) => "off",
    };
    let settings = serde_json::json!({
        "max-tokens": options.max_tokens,
        "sampling": options.sampling,
        "specprefill": options.specprefill,
        "depth": options.mtp_depth,
        "think": think,
        "stop": options.stop,
    });
    Ok(serde_json::to_string_pretty(&settings)?)
}
