//! The example `chat`, callable from tests.

use std::ffi::OsString;
use std::io::{BufRead, Write};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{bail, Context, Result};
use candle_specprefill::ops::CancelToken;
use candle_specprefill::pipeline::{
    Completion, Conversation, FinishReason, GenerateOptions, Message,
};
use candle_specprefill::Error;
use clap::Parser;

use super::commands::{self, HELP};
use super::stream::stream;
use super::{complain, generate, read_messages, GenerateArgs, ModelArgs};

/// A conversation in the terminal, or through a pipe, a message per line. Every turn goes on from the cache of those before;
/// /help lists what can be typed beside messages.
#[derive(Parser, Debug)]
#[command(name = "chat")]
pub struct Cli {
    #[command(flatten)]
    model: ModelArgs,
    /// A system message at the start
    #[arg(long)]
    system: Option<String>,
    /// Go on with a conversation: a JSON file with `messages`, as /save writes it
    #[arg(long, value_name = "FILE")]
    load: Option<std::path::PathBuf>,
    #[command(flatten)]
    generate: GenerateArgs,
}

/// Ends the answer under way from another thread.
#[derive(Clone, Default)]
pub struct Interrupt(Arc<Mutex<Option<CancelToken>>>);

impl Interrupt {
    /// Ends it; `false` if there is none.
    pub fn stop(&self) -> bool {
        let answer = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        answer.as_ref().map(CancelToken::cancel).is_some()
    }

    fn set(&self, answer: Option<CancelToken>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = answer;
    }
}

/// Where a chat takes its lines from and shows what happens.
pub struct Terminal<'a> {
    /// Lines.
    pub input: &'a mut dyn BufRead,
    /// Answers, and what commands were asked to show.
    pub out: &'a mut dyn Write,
    /// All else.
    pub err: &'a mut dyn Write,
    /// Whether somebody sits there, who is shown a prompt.
    pub interactive: bool,
}

/// Runs the example and returns its exit status: 0 at the end of the input, 1 an error, 2 bad arguments.
pub fn run<I, T>(args: I, terminal: &mut Terminal, interrupt: &Interrupt) -> u8
where
    I: IntoIterator<Item = T>,
    T: Into<OsString> + Clone,
{
    let cli: Cli = match super::parse(args, terminal.out, terminal.err) {
        Ok(cli) => cli,
        Err(status) => return status,
    };
    match chat(&cli, terminal, interrupt) {
        Ok(()) => 0,
        Err(error) => super::report(terminal.err, &error),
    }
}

fn chat(cli: &Cli, terminal: &mut Terminal, interrupt: &Interrupt) -> Result<()> {
    cli.generate.options().validate()?;
    let pipeline = cli.model.load()?;
    let mut chat = Chat {
        talk: pipeline.conversation(),
        options: cli.generate.options_for(&pipeline),
        last: None,
        interrupt,
    };
    if let Some(file) = &cli.load {
        *chat.talk.messages_mut() = read_messages(file)?;
    }
    if let Some(text) = &cli.system {
        chat.system(text);
    }
    if terminal.interactive {
        writeln!(
            terminal.err,
            "Type a message, or /help. Ctrl-C stops an answer."
        )?;
    }
    while let Some(line) = read(terminal)? {
        match chat.take(&line, terminal) {
            Ok(true) => {}
            Ok(false) => break,
            // The conversation is as it was.
            Err(error) => complain(terminal.err, &error),
        }
    }
    Ok(())
}

/// The next message or command: a line, and those after it while they end with a backslash.
fn read(terminal: &mut Terminal) -> Result<Option<String>> {
    let mut text = String::new();
    loop {
        if terminal.interactive {
            write!(
                terminal.err,
                "{}",
                if text.is_empty() { "> " } else { "| " }
            )?;
            terminal.err.flush()?;
        }
        let mut bytes = vec![];
        if terminal.input.read_until(b'\n', &mut bytes)? == 0 {
            return Ok((!text.is_empty()).then_some(text));
        }
        let line = String::from_utf8_lossy(&bytes);
        let line = line.trim_end_matches(['\n', '\r']);
        match line.strip_suffix('\\') {
            Some(line) => text += &format!("{line}\n"),
            None => return Ok(Some(text + line)),
        }
    }
}

struct Chat<'a> {
    talk: Conversation,
    options: GenerateOptions,
    last: Option<Completion>,
    interrupt: &'a Interrupt,
}

impl Chat<'_> {
    /// Does what a line says; `false` if that is the end.
    fn take(&mut self, line: &str, terminal: &mut Terminal) -> Result<bool> {
        let Some(command) = line.strip_prefix('/').filter(|c| !c.starts_with('/')) else {
            let text = line.strip_prefix('/').unwrap_or(line);
            if !text.trim().is_empty() {
                self.say(Message::user(text), terminal)?;
            }
            return Ok(true);
        };
        let (name, value) = command
            .split_once(char::is_whitespace)
            .unwrap_or((command, ""));
        let value = value.trim();
        match name {
            "help" => writeln!(terminal.out, "{HELP}")?,
            "quit" | "exit" => return Ok(false),
            "file" => {
                let text = std::fs::read_to_string(value).with_context(|| value.to_string())?;
                self.say(Message::user(text), terminal)?;
            }
            "retry" => {
                let undone = self.talk.undo();
                let said = undone.first().cloned();
                let said = said.context("nothing was said that could be answered again")?;
                let before = self.talk.messages().len();
                let result = self.say(said, terminal);
                // Without a new answer the old one stays.
                if self.talk.messages().len() == before {
                    self.talk.messages_mut().extend(undone);
                }
                result?;
            }
            "undo" => match self.talk.undo().first() {
                Some(said) => writeln!(terminal.err, "took back: {}", beginning(&said.content))?,
                None => bail!("nothing was said that could be taken back"),
            },
            "reset" => {
                let system = self.system_message().map(|m| m.content.clone());
                self.talk.clear();
                self.last = None;
                self.system(&system.unwrap_or_default());
            }
            "system" => self.system(value),
            "history" => {
                for message in self.talk.messages() {
                    writeln!(terminal.out, "{}: {}", message.role, message.content)?;
                }
            }
            "save" => {
                let messages = serde_json::json!({ "messages": self.talk.messages() });
                let text = serde_json::to_string_pretty(&messages)?;
                std::fs::write(value, text).with_context(|| value.to_string())?;
                writeln!(terminal.err, "wrote {value}")?;
            }
            "load" => {
                let messages = read_messages(Path::new(value))?;
                self.talk.clear();
                *self.talk.messages_mut() = messages;
            }
            "stats" => match &self.last {
                Some(answer) => self.stats(answer, terminal.out)?,
                None => bail!("there is no answer yet"),
            },
            "settings" => writeln!(terminal.out, "{}", commands::settings(&self.options)?)?,
            name => {
                if !commands::set(&mut self.options, name, value)
                    .with_context(|| format!("/{name}"))?
                {
                    bail!("/{name} is not a command: see /help");
                }
            }
        }
        Ok(true)
    }

    fn system_message(&self) -> Option<&Message> {
        self.talk.messages().first().filter(|m| m.role == "system")
    }

    /// Sets the system message; none if the text is empty.
    fn system(&mut self, text: &str) {
        let old = self.system_message().is_some();
        let messages = self.talk.messages_mut();
        messages.drain(..old as usize);
        if !text.is_empty() {
            messages.insert(0, Message::system(text));
        }
    }

    fn say(&mut self, message: Message, terminal: &mut Terminal) -> Result<()> {
        let mut turn = self.talk.send(message, &self.options)?;
        self.interrupt.set(Some(turn.cancel_token()));
        let answer = stream(&mut turn, terminal.out);
        drop(turn);
        self.interrupt.set(None);
        let answer = match answer {
            Err(error) if matches!(error.downcast_ref(), Some(Error::Cancelled)) => {
                writeln!(
                    terminal.err,
                    "[stopped before the answer; the message is taken back]"
                )?;
                return Ok(());
            }
            answer => answer?,
        };
        let usage = &answer.usage;
        let read = usage.prompt_tokens - usage.reused_tokens;
        let mut line = format!(
            "{} tokens, {:.1} tok/s, {:.2} tokens per cycle; read {} of {read} new tokens in {:.2} s",
            usage.completion_tokens,
            usage.generation_tokens_per_second,
            usage.mtp.stats.tokens_per_cycle,
            usage.kept_tokens,
            usage.time_to_first_token_s,
        );
        match usage.finish_reason {
            FinishReason::Stop => {}
            FinishReason::Length => line += "; cut at /max-tokens or the context's end",
            FinishReason::Cancelled => line += "; stopped",
        }
        writeln!(terminal.err, "[{line}]")?;
        self.last = Some(answer);
        Ok(())
    }

    fn stats(&self, answer: &Completion, out: &mut dyn Write) -> Result<()> {
        generate::summary(answer, None, out)?;
        let (length, position) = (self.talk.cache_length(), self.talk.next_position());
        let mib = self.talk.size_bytes() as f64 / (1 << 20) as f64;
        writeln!(out, "conversation: {length} in the cache ({mib:.1} MiB with its snapshots), goes on at {position}")?;
        if let Some(note) = &answer.usage.reuse_note {
            writeln!(out, "cache: {note}")?;
        }
        Ok(())
    }
}

/// The beginning of a text, on one line.
fn beginning(text: &str) -> String {
    let line = text.lines().next().unwrap_or_default();
    let short: String = line.chars().take(60).collect();
    match short.len() < text.len() {
        true => format!("{short} …"),
        false => short,
    }
}
