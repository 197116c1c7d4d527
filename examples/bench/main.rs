//! Measures the crate's ops on this machine.

mod bandwidth;
#[path = "../common/mod.rs"]
mod common;
mod decode;
mod matmul;
mod model;
mod mtp;

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
    /// Decode speed by MTP depth, beside plain decoding.
    Mtp(mtp::Args),
    /// Passes of a model by number of rows, against what its bytes allow.
    Decode(decode::Args),
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().what {
        What::Matmul(args) => matmul::run(&args),
        What::Mtp(args) => mtp::run(&args),
        What::Decode(args) => decode::run(&args),
    }
}
