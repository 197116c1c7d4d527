//! What the machine's memory gives.

use std::time::Instant;

use rayon::prelude::*;

/// Bytes per second that all threads read from memory; call it on a thread of the pool.
pub fn read_bandwidth() -> f64 {
    let data = vec![1u64; 48 << 20];
    let pass = || {
        let t = Instant::now();
        let chunk = data.len() / rayon::current_num_threads();
        let sum: u64 = data
            .par_chunks(chunk)
            .map(|c| c.iter().fold(0, |a: u64, b| a.wrapping_add(*b)))
            .sum();
        std::hint::black_box(sum);
        data.len() as f64 * 8.0 / t.elapsed().as_secs_f64()
    };
    (0..5).map(|_| pass()).fold(0.0, f64::max)
}
