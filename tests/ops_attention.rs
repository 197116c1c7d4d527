//! Attention against its oracle, and bit for bit against itself whatever shares the call.

mod support_ops;

use candle_core::{DType, Tensor};
use candle_specprefill::ops::attention::{attention_probabilities, reference};
use candle_specprefill::ops::{attention, Context};
use proptest::prelude::*;
use support_ops::*;

struct Case {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    len: usize,
    scale: f32,
}

/// `len` filled slots, the last `rows` of them by the queries' rows, and `spare` empty ones.
fn case(
    rows: usize,
    kv_heads: usize,
    group: usize,
    dim: usize,
    (len, spare): (usize, usize),
    dtype: DType,
) -> Case {
    let cache = [kv_heads, len + spare, dim];
    Case {
        q: noise(&[rows, kv_heads * group, dim], 1, 2.0, dtype),
        k: noise(&cache, 2, 2.0, dtype),
        v: noise(&cache, 3, 2.0, dtype),
        len,
        scale: (dim as f32).powf(-0.5),
    }
}

impl Case {
    fn rows(&self) -> usize {
        self.q.dims()[0]
    }

    /// Rows `from .. from + n`, when the cache has been filled up to them.
    fn part(&self, from: usize, n: usize) -> Tensor {
        let len = self.len - self.rows() + from + n;
        let q = self.q.narrow(0, from, n).unwrap();
        attention(&Context::default(), &q, &self.k, &self.v, len, self.scale).unwrap()
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(60) })]

    #[test]
    fn agrees_with_the_oracle(
        rows in 0usize..70, before in 1usize..200, spare in 0usize..9, kv_heads in 1usize..3, group in 1usize..4,
        dim in 1usize..80, dtype in 0usize..3,
    ) {
        let c = case(rows, kv_heads, group, dim, (before + rows, spare), DTYPES[dtype]);
        let got = c.part(0, rows);
        prop_assert_eq!(got.dims(), c.q.dims());
        if rows == 0 {
            return Ok(());
        }
        let want = reference(&c.q, &c.k, &c.v, c.len, c.scale).unwrap();
        assert_close(&got, &want, tolerance(DTYPES[dtype]));
        let cx = Context::default();
        let strided = attention(&cx, &strided(&c.q), &strided(&c.k), &strided(&c.v), c.len, c.scale).unwrap();
        prop_assert_eq!(bits(&strided), bits(&got));

        let f32 = |t: &Tensor| t.to_dtype(DType::F32).unwrap();
        let p = attention_probabilities(&cx, &c.q, &c.k, c.len, c.scale).unwrap();
        let q = f32(&c.q).reshape((rows, kv_heads, group, dim)).unwrap().permute((1, 2, 0, 3)).unwrap();
        let q = q.contiguous().unwrap().reshape((kv_heads, group * rows, dim)).unwrap();
        let k = f32(&c.k).narrow(1, 0, c.len).unwrap().transpose(1, 2).unwrap().contiguous().unwrap();
        let scores = (q.matmul(&k).unwrap() * c.scale as f64).unwrap();
        let want = candle_nn::ops::softmax_last_dim(&scores).unwrap();
        assert_close(&p, &want.reshape((kv_heads * group, rows, c.len)).unwrap(), 1e-5);
    }
}

#[test]
fn a_row_is_the_same_in_any_company_and_at_any_split() {
    for dtype in DTYPES {
        // Crosses block boundaries both ways.
        let c = case(80, 2, 2, 64, (80 + 57, 5), dtype);
        let single: Vec<Vec<u32>> = (0..80).map(|r| bits(&c.part(r, 1))).collect();
        for m in (1..=16).chain([31, 33, 64, 80]) {
            for from in [0, 3, 7, 80 - m.min(80)] {
                if from + m <= 80 {
                    assert_eq!(
                        bits(&c.part(from, m)),
                        single[from..from + m].concat(),
                        "{m} rows from {from}"
                    );
                }
            }
        }
    }
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let c = case(70, 2, 3, 48, (300, 0), DType::BF16);
    let run = |threads| {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap();
        pool.install(|| bits(&c.part(0, 70)))
    };
    let want = run(1);
    assert_eq!([run(2), run(5)], [want.clone(), want]);
}

#[test]
fn nan_stays_in_the_rows_that_see_it() {
    let c = case(6, 1, 2, 16, (70, 4), DType::F32);
    let clean = bits(&c.part(0, 6));
    let poison = (noise(&[1, 1, 16], 1, 1.0, DType::F32) * f64::NAN).unwrap();
    let q = Tensor::cat(
        &[
            &c.q.narrow(0, 0, 2).unwrap(),
            &Tensor::cat(&[&poison, &poison], 1).unwrap(),
            &c.q.narrow(0, 3, 3).unwrap(),
        ],
        0,
    )
    .unwrap();
    let out = attention(&Context::default(), &q, &c.k, &c.v, 70, c.scale).unwrap();
    let out = bits(&out);
    assert!(out[2 * 32..3 * 32]
        .iter()
        .all(|b| f32::from_bits(*b).is_nan()));
    assert_eq!((&out[..64], &out[96..]), (&clean[..64], &clean[96..]));
    // Slot 67 is the fourth row's own: earlier rows, and slots past the end, must not feel it.
    let part = |t: &Tensor, from, n| t.narrow(1, from, n).unwrap();
    for slot in [67, 72] {
        let poisoned = |t: &Tensor| {
            Tensor::cat(
                &[&part(t, 0, slot), &poison, &part(t, slot + 1, 73 - slot)],
                1,
            )
            .unwrap()
        };
        let out = attention(
            &Context::default(),
            &c.q,
            &poisoned(&c.k),
            &poisoned(&c.v),
            70,
            c.scale,
        );
        let out = bits(&out.unwrap());
        let clean_rows = if slot == 67 { 3 } else { 6 };
        assert_eq!(out[..clean_rows * 32], clean[..clean_rows * 32]);
        assert!(out[clean_rows * 32..]
            .iter()
            .all(|b| f32::from_bits(*b).is_nan()));
    }
}

#[test]
fn many_keys_take_linear_memory_and_the_time_of_their_products() {
    // 4K rows: a [rows, keys] f32 matrix would be 64 MiB a head. The call's own memory is the output and a few tiles.
    let c = case(4096, 1, 2, 64, (4096, 0), DType::F32);
    let before = peak_kib();
    let got = c.part(0, 4096);
    if let (Some(before), Some(after)) = (before, peak_kib()) {
        assert!(after - before < 40 * 1024, "{} KiB", after - before);
    }
    let tail = Case {
        q: c.q.narrow(0, 4093, 3).unwrap(),
        ..c
    };
    let want = reference(&tail.q, &tail.k, &tail.v, 4096, tail.scale).unwrap();
    assert_close(&got.narrow(0, 4093, 3).unwrap(), &want, 1e-5);
}

/// The process's highest resident memory so far, where the system tells it.
fn peak_kib() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|l| l.starts_with("VmHWM:"))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

#[test]
fn wrong_calls_are_errors() {
    let c = case(2, 1, 2, 8, (4, 0), DType::BF16);
    let cx = Context::default();
    let other = c.k.to_dtype(DType::F32).unwrap();
    let text = attention(&cx, &c.q, &other, &c.v, 4, 1.0)
        .unwrap_err()
        .to_string();
    assert!(text.contains("F32") && text.contains("bf16"), "{text}");
    assert!(attention(&cx, &c.q, &c.k, &other, 4, 1.0).is_err());
    assert!(attention(&cx, &c.q, &c.k, &c.v, 5, 1.0).is_err());
    assert!(attention(&cx, &c.q, &c.k, &c.v, 1, 1.0).is_err());
    assert!(attention(&cx, &c.q.narrow(2, 0, 4).unwrap(), &c.k, &c.v, 4, 1.0).is_err());
}

#[test]
#[ignore = "prints speed"]
fn speed() {
    for (rows, len) in [(4096, 4096), (512, 16384), (1, 16384), (4, 16384)] {
        let c = case(rows, 2, 4, 256, (len, 0), DType::BF16);
        let start = std::time::Instant::now();
        c.part(0, rows);
        let pairs = (0..rows).map(|r| len - rows + r + 1).sum::<usize>();
        let flops = pairs as f64 * 8.0 * 256.0 * 4.0;
        let took = start.elapsed();
        println!(
            "{rows} rows, {len} keys: {took:?}, {:.1} GFLOP/s",
            flops / took.as_secs_f64() / 1e9
        );
    }
}
