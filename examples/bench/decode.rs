//! `bench decode`: time of a pass over a model by number of rows, against what its bytes allow.

use std::time::Instant;

use anyhow::Result;
use candle_specprefill::ops::Context;
use candle_specprefill::qwen3_5::{Cache, Keep, Rows};
use serde_json::json;

use crate::bandwidth::read_bandwidth;
use crate::model::ModelArgs;

/// What to measure.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Rows of a pass
    #[arg(long, value_delimiter = ',', default_value = "1,2,3,4,6,8")]
    rows: Vec<usize>,
    /// Rows in the cache before the pass
    #[arg(long, default_value_t = 512)]
    context: usize,
    /// Passes per number of rows
    #[arg(long, default_value_t = 40)]
    passes: usize,
    /// Print one JSON object instead of the table
    #[arg(long)]
    json: bool,
}

/// Runs the measurement and prints it.
pub fn run(args: &Args) -> Result<()> {
    let started = Instant::now();
    let (_, model) = args.model.load()?;
    let load_s = started.elapsed().as_secs_f64();
    let (cx, vocab) = (Context::default(), model.config().vocab_size as u32);
    let mut cache = model.new_cache()?;
    let token = |i: usize| (i as u32).wrapping_mul(7919) % vocab;
    let feed = |cx: &Context, cache: &mut Cache, count: usize, keep| -> Result<()> {
        let first = cache.next_position().get();
        let tokens: Vec<u32> = (0..count).map(|i| token(i + first as usize)).collect();
        let positions: Vec<u32> = (first..first + count as u32).collect();
        let rows = Rows {
            cache,
            tokens: &tokens,
            positions: &positions,
            keep,
        };
        let hidden = model.forward(cx, &mut [rows])?;
        if keep == Keep::Pending {
            model.logits(cx, &hidden)?;
        }
        Ok(())
    };
    if args.context > 0 {
        feed(&cx, &mut cache, args.context, Keep::Commit)?;
    }
    // All widths in turn, again and again, so that a disturbance meets them alike.
    let mut times = vec![vec![]; args.rows.len()];
    for pass in 0..args.passes + 2 {
        for (count, times) in args.rows.iter().zip(&mut times) {
            let t = Instant::now();
            feed(&cx, &mut cache, *count, Keep::Pending)?;
            cache.accept(0)?;
            if pass >= 2 {
                times.push(t.elapsed().as_secs_f64());
            }
        }
    }
    // What a pass of each width reads: in a mixture of experts, those that its rows visit.
    let mut bytes = vec![];
    for count in &args.rows {
        let cx = Context::default();
        feed(&cx, &mut cache, *count, Keep::Pending)?;
        cache.accept(0)?;
        bytes.push(model.bytes_read(&cx, 1));
    }
    let bandwidth = rayon::scope(|_| read_bandwidth());
    let medians: Vec<f64> = times
        .iter_mut()
        .map(|t| {
            t.sort_by(f64::total_cmp);
            t[t.len() / 2]
        })
        .collect();
    let one = args.rows.iter().position(|r| *r == 1).map(|i| medians[i]);
    if !args.json {
        println!(
            "loaded in {load_s:.2} s; {:.1} GB/s is read at most",
            bandwidth / 1e9
        );
    }
    let mut rows = vec![];
    for ((count, time), bytes) in args.rows.iter().zip(&medians).zip(&bytes) {
        let limit = *bytes as f64 / bandwidth;
        let ratio = one.map(|one| time / one);
        if !args.json {
            let ratio = ratio.map_or(String::new(), |r| format!("  c {r:.2}"));
            println!(
                "rows {count:<3} {:8.2} ms  {:7.3} GB read  {:5.1} % of the limit{ratio}",
                time * 1e3,
                *bytes as f64 / 1e9,
                100.0 * limit / time
            );
        }
        rows.push(json!({"rows": count, "time_s": time, "bytes": bytes, "share_of_limit": limit / time, "ratio_to_one_row": ratio}));
    }
    if args.json {
        let all = json!({"load_s": load_s, "read_gb_per_s": bandwidth / 1e9, "rows": rows});
        println!("{all}");
    } else {
        for (route, calls) in cx.routes().snapshot() {
            println!("  {route:<44} {calls:>8}");
        }
    }
    Ok(())
}
