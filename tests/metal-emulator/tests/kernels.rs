//! Sample kernels give the right numbers in both modes.
use half::bf16;
use metal_emulator::{
    available, Buffer, Constant, Fault, FaultKind, Grid, Launch, Library, Mode, Options, Report,
};
use std::path::PathBuf;

const MODES: [Mode; 2] = [Mode::Fast, Mode::Checked];

fn file(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("tests/kernels")
        .join(name)
}

fn numbers(seed: u64, n: usize) -> Vec<f32> {
    let mut s = seed;
    (0..n)
        .map(|_| {
            s = s
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (s >> 33 & 0xffff) as f32 / 32768.0 - 1.0
        })
        .collect()
}

fn rope(library: &Library, mode: Mode, interleaved: bool) {
    let (tokens, heads, dim, rotary, length) = (5usize, 3usize, 128usize, 96usize, 64usize);
    let x: Vec<bf16> = numbers(1, tokens * heads * dim)
        .into_iter()
        .map(bf16::from_f32)
        .collect();
    let positions = [3u32, 63, 0, 17, 40];
    let half = rotary / 2;
    let angle = |p: usize, i: usize| p as f64 * 10000f64.powf(-2.0 * i as f64 / rotary as f64);
    let table = |f: fn(f64) -> f64| {
        (0..length * half)
            .map(|k| f(angle(k / half, k % half)) as f32)
            .collect::<Vec<_>>()
    };
    let (cos, sin) = (table(f64::cos), table(f64::sin));
    let mut out = vec![bf16::ZERO; x.len()];
    let library = library
        .with_constants(&[("interleaved", Constant::Bool(interleaved))])
        .unwrap();
    let mut launch = Launch {
        kernel: "rope_pos_bfloat16",
        buffers: vec![
            Buffer::read(0, &x),
            Buffer::write(1, &mut out),
            Buffer::read(2, &cos),
            Buffer::read(3, &sin),
            Buffer::read(4, &positions),
            Buffer::values(5, &[heads as u32, dim as u32, rotary as u32, length as u32]),
        ],
        grid: Grid::Threads([dim / 2, heads, tokens]),
        threadgroup: [32, 1, 1],
        ..Launch::default()
    };
    library.run(&mut launch, mode).unwrap();
    for (head, (x, out)) in x.chunks(dim).zip(out.chunks(dim)).enumerate() {
        let mut want: Vec<f32> = x.iter().map(|v| v.to_f32()).collect();
        for i in 0..half {
            let (i0, i1) = if interleaved {
                (2 * i, 2 * i + 1)
            } else {
                (i, i + half)
            };
            let at = positions[head / heads] as usize * half + i;
            let (a, b) = (x[i0].to_f32(), x[i1].to_f32());
            want[i0] = a * cos[at] - b * sin[at];
            want[i1] = b.mul_add(cos[at], a * sin[at]);
        }
        let want: Vec<bf16> = want.into_iter().map(bf16::from_f32).collect();
        assert_eq!(out, want, "head {head}");
    }
}

#[test]
fn rope_matches_bitwise_in_both_layouts() {
    if !available("rope") {
        return;
    }
    let library = Library::compile(file("rope.metal"), &[]).unwrap();
    for mode in MODES {
        for interleaved in [false, true] {
            rope(&library, mode, interleaved);
        }
    }
}

/// A 4-bit matmul of `m` rows; the worst error, absolute for small and relative for large results.
fn matmul(
    library: &Library,
    matrix: bool,
    m: usize,
    (n, k): (usize, usize),
    mode: Mode,
    seed: u32,
) -> Result<(Report, f32), Fault> {
    let words: Vec<u32> = numbers(7, n * k / 8)
        .into_iter()
        .enumerate()
        .map(|(i, v)| v.to_bits().rotate_left(i as u32) ^ 0x9e37_79b9u32.wrapping_mul(i as u32 + 1))
        .collect();
    let bf = |v: Vec<f32>, f: fn(f32) -> f32| {
        v.into_iter()
            .map(|x| bf16::from_f32(f(x)))
            .collect::<Vec<_>>()
    };
    let scales = bf(numbers(8, n * k / 64), |v| 0.02 + 0.01 * v);
    let biases = bf(numbers(9, n * k / 64), |v| -0.15 + 0.05 * v);
    let x = bf(numbers(10, m * k), |v| v);
    let mut y = vec![bf16::ZERO; m * n];
    let name = format!("qmv_verify_bfloat16_m{m}");
    let mut launch = Launch {
        kernel: if matrix {
            "qmm_verify_8x8_bfloat16"
        } else {
            &name
        },
        buffers: vec![
            Buffer::read(0, &words),
            Buffer::read(1, &scales),
            Buffer::read(2, &biases),
            Buffer::read(3, &x),
            Buffer::write(4, &mut y),
            Buffer::value(5, k as u32),
            Buffer::value(6, n as u32),
            Buffer::value(7, m as u32),
        ],
        grid: Grid::Threadgroups([n.div_ceil(if matrix { 32 } else { 8 }), 1, 1]),
        threadgroup: [if matrix { 128 } else { 64 }, 1, 1],
        seed,
        ..Launch::default()
    };
    let start = std::time::Instant::now();
    let report = library.run(&mut launch, mode)?;
    if n >= 1024 {
        println!(
            "{mode:?} {m}x{k}x{n} matrix {matrix}: {:?}, {report:?}",
            start.elapsed()
        );
    }
    let mut worst = 0f32;
    for (i, got) in y.iter().enumerate() {
        let (row, col) = (i / n, i % n);
        let sum: f64 = (0..k)
            .map(|j| {
                let code = words[col * k / 8 + j / 8] >> (4 * (j % 8)) & 15;
                let g = col * k / 64 + j / 64;
                let mut w = scales[g].to_f32() * code as f32 + biases[g].to_f32();
                if matrix {
                    w = bf16::from_f32(w).to_f32();
                }
                f64::from(w) * f64::from(x[row * k + j].to_f32())
            })
            .sum();
        let error = (f64::from(got.to_f32()) - sum).abs() / (1.0 + sum.abs());
        worst = if error.is_nan() {
            f32::NAN
        } else {
            worst.max(error as f32)
        };
    }
    Ok((report, worst))
}

#[test]
fn matmul_matches_at_every_width() {
    if !available("matmul") {
        return;
    }
    let library = Library::compile(file("qmm_verify.metal"), &[]).unwrap();
    MODES
        .iter()
        .for_each(|&m| library.prepare(m, |k| k.contains("bfloat16")).unwrap());
    for mode in MODES {
        for m in 2..=8 {
            for matrix in [false, true] {
                let (report, worst) =
                    matmul(&library, matrix, m, (61, 512), mode, m as u32).unwrap();
                assert!(
                    worst < 0.006,
                    "{mode:?} m {m} matrix {matrix}: {worst} {report:?}"
                );
            }
        }
    }
}

#[test]
#[ignore = "prints times"]
fn speed() {
    let library = Library::compile(file("qmm_verify.metal"), &[]).unwrap();
    for (mode, k) in [
        (Mode::Fast, 4096),
        (Mode::Fast, 4096),
        (Mode::Checked, 1024),
        (Mode::Checked, 1024),
    ] {
        for matrix in [false, true] {
            matmul(&library, matrix, 8, (1024, k), mode, 0).unwrap();
        }
    }
}

/// Bugs in a matmul that works: what is missing or wrong, the form it is in, and what it must be called.
const INJECTED: &[(&str, bool, FaultKind)] = &[
    ("OOB_ROWS", false, FaultKind::OutOfBounds),
    ("DIVERGENT_SIMD", false, FaultKind::SimdDivergence),
    ("INACTIVE_LANE", false, FaultKind::InactiveLane),
    ("UNINIT", true, FaultKind::Uninitialised),
    ("MISSING_BARRIER_1", true, FaultKind::Race),
    ("MISSING_BARRIER_2", true, FaultKind::Race),
    ("WRONG_FENCE", true, FaultKind::Race),
    ("DIVERGENT_BARRIER", true, FaultKind::Race),
    ("SIMD_BARRIER_ONLY", true, FaultKind::Race),
    ("RACE", true, FaultKind::Race),
    ("EARLY_RETURN", true, FaultKind::BarrierDivergence),
    ("OOB_WRITE", true, FaultKind::OutOfBounds),
];

#[test]
fn bugs_injected_into_a_matmul_are_found() {
    if !available("injected bugs") {
        return;
    }
    for &(bug, matrix, kind) in INJECTED {
        let options = Options {
            defines: vec![format!("BUG_{bug}"), "FEW_INSTANCES".into()],
            ..Options::default()
        };
        let library = Library::compile_with(file("qmm_verify.metal"), &[], &options).unwrap();
        // an early return only matters where a threadgroup is not full
        let n = if bug == "EARLY_RETURN" { 40 } else { 61 };
        let fault = match matmul(&library, matrix, 5, (n, 256), Mode::Checked, 0) {
            Ok(report) => panic!("{bug}: not found ({report:?})"),
            Err(fault) => fault,
        };
        println!("{bug}: {}", fault.to_string().lines().next().unwrap());
        assert_eq!(fault.kind, kind, "{bug}: {fault}");
        assert!(
            fault
                .place
                .as_deref()
                .is_some_and(|p| p.starts_with("qmm_verify.metal:")),
            "{bug}: {fault}"
        );
    }
}

#[test]
#[ignore = "prints times"]
fn launch_overhead() {
    let library = Library::compile(file("language.metal"), &[]).unwrap();
    for mode in MODES {
        for (groups, threads) in [(1, 1), (1, 256), (64, 256)] {
            let start = std::time::Instant::now();
            for _ in 0..500 {
                let mut y = vec![0.0f32; 20];
                let mut launch = Launch {
                    kernel: "nothing",
                    buffers: vec![Buffer::read_write(0, &mut y)],
                    grid: Grid::Threadgroups([groups, 1, 1]),
                    threadgroup: [threads, 1, 1],
                    ..Launch::default()
                };
                library.run(&mut launch, mode).unwrap();
            }
            println!(
                "{mode:?}: {groups} threadgroups of {threads}: {:?} a launch",
                start.elapsed() / 500
            );
        }
    }
}
