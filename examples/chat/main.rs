//! A conversation in the terminal. Without arguments: with the embedded model pair.
//!
//! `cargo run --release --example chat -- --help`

#[path = "../common/mod.rs"]
mod common;

use std::io::IsTerminal;
use std::process::ExitCode;

use common::chat::{Interrupt, Terminal};

fn main() -> ExitCode {
    let interrupt = Interrupt::default();
    let handler = interrupt.clone();
    let handled = ctrlc::set_handler(move || {
        if !handler.stop() {
            eprintln!();
            std::process::exit(130);
        }
    });
    if let Err(error) = handled {
        eprintln!("Ctrl-C ends the program: {error}");
    }
    let interactive = std::io::stdin().is_terminal();
    let (mut out, mut err) = (std::io::stdout(), std::io::stderr());
    let mut terminal = Terminal {
        input: &mut std::io::stdin().lock(),
        out: &mut out,
        err: &mut err,
        interactive,
    };
    ExitCode::from(common::chat::run(
        std::env::args_os(),
        &mut terminal,
        &interrupt,
    ))
}
