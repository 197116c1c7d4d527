//! Answers a long prompt with SpecPrefill and MTP. Without arguments: an embedded needle question and model pair.
//!
//! `cargo run --release --example generate -- --help`

#[path = "../common/mod.rs"]
mod common;

use std::process::ExitCode;

fn main() -> ExitCode {
    let (mut out, mut err) = (std::io::stdout(), std::io::stderr());
    ExitCode::from(common::generate::run(
        std::env::args_os(),
        &mut out,
        &mut err,
    ))
}
