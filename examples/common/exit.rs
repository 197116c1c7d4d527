//! How every example begins and ends: arguments, one line for an error, exit status 0, 1 (an error) or 2 (bad options).

use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;

use anyhow::Result;
use candle_specprefill::Error;
use clap::{Command, Parser};

/// Arguments, or the exit status after what there is to say about them.
pub fn parse<C: Parser>(
    args: impl IntoIterator<Item = impl Into<OsString> + Clone>,
    out: &mut dyn Write,
    err: &mut dyn Write,
) -> Result<C, u8> {
    let parsed = signed(C::command())
        .try_get_matches_from(args)
        .and_then(|matches| C::from_arg_matches(&matches));
    parsed.map_err(|error| {
        if !error.use_stderr() {
            let _ = write!(out, "{error}");
            return 0;
        }
        // clap's first paragraph says what is wrong; the rest repeats the usage.
        let text = error.to_string();
        let lines = text.split("\n\n").next().unwrap_or(&text).lines();
        let line = lines.map(str::trim).collect::<Vec<_>>().join(" ");
        let _ = writeln!(err, "{line} (see --help)");
        2
    })
}

/// Takes `-1` for the value of a flag and not for a flag that nobody knows, so that the error names what was out of range.
fn signed(command: Command) -> Command {
    command
        .mut_args(|arg| match arg.get_action().takes_values() {
            true => arg.allow_negative_numbers(true),
            false => arg,
        })
        .mut_subcommands(signed)
}

/// Says on one line what went wrong.
pub fn complain(err: &mut dyn Write, error: &anyhow::Error) {
    let _ = writeln!(err, "error: {}", one_line(error));
}

/// Says on one line what went wrong, and returns the exit status for it.
pub fn report(err: &mut dyn Write, error: &anyhow::Error) -> u8 {
    if matches!(error.downcast_ref(), Some(Error::Option { .. })) {
        let _ = writeln!(err, "error: {} (see --help)", one_line(error));
        return 2;
    }
    complain(err, error);
    1
}

/// An error and its causes; those that the error before has said already are left out.
fn one_line(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for cause in error.chain() {
        let cause = cause.to_string().replace('\n', " ");
        if line.is_empty() {
            line = cause;
        } else if !line.ends_with(&cause) {
            line = format!("{line}: {cause}");
        }
    }
    line
}

/// The `main` of an example that a terminal alone calls.
pub fn main<C: Parser>(run: impl FnOnce(&C) -> Result<()>) -> ExitCode {
    let (mut out, mut err) = (std::io::stdout(), std::io::stderr());
    ExitCode::from(match parse(std::env::args_os(), &mut out, &mut err) {
        Err(status) => status,
        Ok(cli) => match run(&cli) {
            Ok(()) => 0,
            Err(error) => report(&mut err, &error),
        },
    })
}
