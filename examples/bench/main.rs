//! Measures the crate's ops on this machine.

mod matmul;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(about = "Measures the crate's ops on this machine")]
struct Cli {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// The affine and the plain matmul, beside candle's k-quants.
    Matmul(matmul::Args),
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().what {
        What::Matmul(args) => matmul::run(&args),
    }
}
