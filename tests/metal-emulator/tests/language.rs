//! The stand-in's types and functions do what the Metal Shading Language specification says.
use half::{bf16, f16};
use metal_emulator::{available, bytes_of, Buffer, Constant, Grid, Launch, Library, Mode};
use std::path::Path;

const MODES: [Mode; 2] = [Mode::Fast, Mode::Checked];

/// All kernels, compiled once for all tests.
fn library() -> Library {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kernels/language.metal");
    let library = Library::compile(file, &[]).unwrap();
    static READY: std::sync::Once = std::sync::Once::new();
    READY.call_once(|| {
        MODES
            .iter()
            .for_each(|&m| library.prepare(m, |_| true).unwrap())
    });
    library
}

fn run(library: &Library, kernel: &str, buffers: Vec<Buffer>, threads: usize, mode: Mode) {
    let mut launch = Launch {
        kernel,
        buffers,
        threadgroup: [threads, 1, 1],
        ..Launch::default()
    };
    library.run(&mut launch, mode).unwrap();
}

fn values() -> Vec<f32> {
    (0..32)
        .map(|i| ((i * 37 + 11) % 64) as f32 / 4.0 - 7.5)
        .collect()
}

#[test]
fn simd_operations() {
    if !available("simd operations") {
        return;
    }
    let (library, x) = (library(), values());
    let at = |i: usize| x[i % 32];
    let want: Vec<Box<dyn Fn(usize) -> f32>> = vec![
        Box::new(|_| x.iter().sum()),
        Box::new(|_| x.iter().copied().fold(f32::MIN, f32::max)),
        Box::new(|_| x.iter().copied().fold(f32::MAX, f32::min)),
        Box::new(|_| x.iter().map(|v| 1.0 + v * 0.01).product()),
        Box::new(|i| x[..=i].iter().sum()),
        Box::new(|i| x[..i].iter().sum()),
        Box::new(|i| at(31 - i)),
        Box::new(|i| at(i ^ 5)),
        Box::new(|_| at(7)),
        Box::new(|_| at(0)),
        Box::new(|i| if i < 29 { at(i + 3) } else { -1.0 }),
        Box::new(|i| if i >= 3 { at(i - 3) } else { -1.0 }),
        Box::new(|i| at(i + 3)),
        Box::new(|i| at(i + 29)),
        Box::new(|i| x[i / 4 * 4..][..4].iter().sum()),
        Box::new(|i| at(i / 4 * 4 + 2)),
        Box::new(|_| (0..16).map(|i| u32::from(x[i] > 0.0) << i).sum::<u32>() as f32),
        Box::new(|_| 2.0),
        Box::new(|_| 31.0 + 64.0),
    ];
    for mode in MODES {
        let mut y = vec![0.0f32; 32 * want.len()];
        run(
            &library,
            "simd_operations",
            vec![Buffer::read(0, &x), Buffer::write(1, &mut y)],
            32,
            mode,
        );
        for (op, want) in want.iter().enumerate() {
            for i in 0..32 {
                let (got, want) = (y[32 * op + i], want(i));
                assert!(
                    (got - want).abs() <= 1e-5 * want.abs().max(1.0),
                    "{mode:?} operation {op}, lane {i}: {got}, not {want}"
                );
            }
        }
        let mut y = vec![0.0f32; 32];
        let some: f32 = x.iter().step_by(3).sum();
        run(
            &library,
            "simd_some_lanes",
            vec![Buffer::read(0, &x), Buffer::read_write(1, &mut y)],
            32,
            mode,
        );
        for (i, got) in y.into_iter().enumerate() {
            assert_eq!(got, if i % 3 == 0 { some } else { -1.0 }, "lane {i}");
        }
    }
}

fn matrices<T: metal_emulator::Plain>(
    library: &Library,
    kernel: &str,
    from: fn(f32) -> T,
    mode: Mode,
) {
    let (a, b): (Vec<f32>, Vec<f32>) = (
        (0..90).map(|i| (i % 13) as f32 - 6.0).collect(),
        (0..64).map(|i| (i % 7) as f32 / 2.0).collect(),
    );
    let (ta, tb): (Vec<T>, Vec<T>) = (
        a.iter().map(|&v| from(v)).collect(),
        b.iter().map(|&v| from(v)).collect(),
    );
    let mut y = vec![0.0f32; 192];
    run(
        library,
        kernel,
        vec![
            Buffer::read(0, &ta),
            Buffer::read(1, &tb),
            Buffer::write(2, &mut y),
        ],
        32,
        mode,
    );
    for r in 0..8 {
        for c in 0..8 {
            let row = |k: usize| a[(r + 1) * 10 + k + 2];
            let plain: f32 = 1.0 + (0..8).map(|k| row(k) * b[k * 8 + c]).sum::<f32>();
            let transposed: f32 = (0..8).map(|k| row(k) * b[c * 8 + k]).sum();
            assert_eq!(y[r * 8 + c], plain, "{kernel} {mode:?} {r},{c}");
            assert_eq!(
                y[64 + c * 8 + r],
                transposed,
                "{kernel} {mode:?} {r},{c} transposed"
            );
            assert_eq!(
                y[128 + r * 8 + c],
                if r == c { 2.0 } else { 0.0 },
                "diagonal {r},{c}"
            );
        }
    }
}

#[test]
fn simdgroup_matrices() {
    if !available("simdgroup matrices") {
        return;
    }
    let library = library();
    for mode in MODES {
        matrices(&library, "matrices_f32", |v| v, mode);
        matrices(&library, "matrices_f16", f16::from_f32, mode);
        matrices(&library, "matrices_bf16", bf16::from_f32, mode);
    }
}

#[test]
fn half_and_bfloat_round_after_every_operation() {
    if !available("rounding") {
        return;
    }
    let library = library();
    let x: Vec<[f32; 2]> = (0..256)
        .map(|i| [(i as f32 * 0.731 - 90.0) * 1.37, 0.013 + i as f32 * 0.0917])
        .collect();
    let flat: Vec<f32> = x.iter().flatten().copied().collect();
    for mode in MODES {
        let (mut h, mut b) = (vec![f16::ZERO; 1024], vec![bf16::ZERO; 1024]);
        let buffers = vec![
            Buffer::read(0, &flat),
            Buffer::write(1, &mut h),
            Buffer::write(2, &mut b),
        ];
        let mut launch = Launch {
            kernel: "rounding",
            buffers,
            grid: Grid::Threads([256, 1, 1]),
            threadgroup: [64, 1, 1],
            ..Launch::default()
        };
        library.run(&mut launch, mode).unwrap();
        for (i, [x0, x1]) in x.iter().copied().enumerate() {
            let (p, q) = (f16::from_f32(x0), f16::from_f32(x1));
            let product = f16::from_f32(p.to_f32() * q.to_f32());
            let fused = p.to_f64() * q.to_f64() + p.to_f64();
            let want = [
                f16::from_f32(product.to_f32() + p.to_f32()),
                f16::from_f32(p.to_f32() / q.to_f32()),
                f16::from_f64(fused),
                f16::from_f32(p.to_f32() * 3.0),
            ];
            assert_eq!(h[4 * i..][..4], want, "half {p} {q}");
            let (r, s) = (bf16::from_f32(x0), bf16::from_f32(x1));
            let product = bf16::from_f32(r.to_f32() * s.to_f32());
            let want = [
                bf16::from_f32(product.to_f32() + r.to_f32()),
                bf16::from_f32(r.to_f32() / s.to_f32()),
                bf16::from_f32(r.to_f32() * 2.5),
                -s,
            ];
            assert_eq!(b[4 * i..][..4], want, "bfloat {r} {s}");
        }
    }
}

#[test]
fn positions_also_in_a_ragged_grid() {
    if !available("positions") {
        return;
    }
    let library = library();
    let (grid, tg) = ([10usize, 3, 2], [4usize, 2, 2]);
    for mode in MODES {
        let mut p = vec![[0u32; 16]; 60].concat();
        let mut launch = Launch {
            kernel: "positions",
            buffers: vec![Buffer::write(0, &mut p)],
            grid: Grid::Threads(grid),
            threadgroup: tg,
            ..Launch::default()
        };
        library.run(&mut launch, mode).unwrap();
        for (at, got) in p.chunks(16).enumerate() {
            let g = [at % 10, at / 10 % 3, at / 30];
            let group = [g[0] / 4, g[1] / 2, g[2] / 2];
            let size = [0, 1, 2].map(|k| tg[k].min(grid[k] - group[k] * tg[k]));
            let inside = [0, 1, 2].map(|k| g[k] - group[k] * tg[k]);
            let index = inside[0] + size[0] * (inside[1] + size[1] * inside[2]);
            let want = [
                g[0],
                g[1],
                g[2],
                inside[0],
                inside[1],
                inside[2],
                group[0],
                group[1],
                group[2],
                size[0],
                size[1],
                3,
                index,
                index % 32,
                index / 32,
                32,
            ];
            assert_eq!(got, want.map(|v| v as u32), "thread {g:?}");
        }
    }
}

#[test]
fn function_constants() {
    if !available("function constants") {
        return;
    }
    let base = library();
    let extra = [42.0f32];
    for mode in MODES {
        let mut y = vec![0.0f32; 5];
        let on = base
            .with_constants(&[
                ("flag", true.into()),
                ("1", 5u32.into()),
                ("scale", 1.5f32.into()),
                ("small", Constant::U16(9)),
            ])
            .unwrap();
        run(
            &on,
            "constants",
            vec![Buffer::write(0, &mut y), Buffer::read(1, &extra)],
            1,
            mode,
        );
        assert_eq!(y, [42.0, 5.0, 10.0, 1.5, 9.0]);
        let off = base
            .with_constants(&[
                ("flag", false.into()),
                ("count", 6u32.into()),
                ("700", Constant::U16(8)),
            ])
            .unwrap();
        run(&off, "constants", vec![Buffer::write(0, &mut y)], 1, mode);
        assert_eq!(y, [-1.0, 6.0, 12.0, 0.5, 8.0]);
    }
}

#[test]
fn vectors() {
    if !available("vectors") {
        return;
    }
    let library = library();
    let want = [
        1.0, 3.0, 2.0, 5.0, 11.0, 8.0, 2.5, 5.0, 57.0, 3.0, 1.0, 2.0, 2.0, 4.0, 5.0, 3.0, 6.0,
        28.0, 8.0, 0.75,
    ];
    for mode in MODES {
        let mut y = vec![0.0f32; want.len()];
        run(&library, "vectors", vec![Buffer::write(0, &mut y)], 1, mode);
        assert_eq!(y, want);
    }
}

#[test]
fn legal_patterns_raise_no_alarm() {
    if !available("legal patterns") {
        return;
    }
    let library = library();
    let x: Vec<f32> = (0..100).map(|v| v as f32).collect();
    for (mode, seed) in [
        (Mode::Fast, 0),
        (Mode::Fast, 1),
        (Mode::Checked, 0),
        (Mode::Checked, 5),
    ] {
        let (mut y, mut total) = (vec![0.0f32; 100], [0u32]);
        let buffers = vec![
            Buffer::read(0, &x),
            Buffer::write(1, &mut y),
            Buffer::read_write(2, &mut total),
        ];
        let mut launch = Launch {
            kernel: "legal",
            buffers,
            grid: Grid::Threads([100, 1, 1]),
            threadgroup: [64, 1, 1],
            threadgroup_memory: vec![256],
            seed,
            ..Launch::default()
        };
        let report = library.run(&mut launch, mode).unwrap();
        assert_eq!((report.threadgroups, total), (2, [100]));
        assert_eq!(report.threadgroup_bytes, 256 + 256 + 256 + 4);
    }
}

#[test]
fn legal_corners_raise_no_alarm() {
    if !available("legal corners") {
        return;
    }
    let library = library();
    let x: Vec<f32> = (0..64).map(|v| v as f32).collect();
    for mode in MODES {
        for seed in [0, 3] {
            let (mut y, mut bytes, mut count) = (vec![0.0f32; 64], vec![0u8; 64], [0u32; 2]);
            let buffers = vec![
                Buffer::read(0, &x),
                Buffer::write(1, &mut y),
                Buffer::write(2, &mut bytes),
                Buffer::read_write(3, &mut count),
            ];
            let mut launch = Launch {
                kernel: "legal_corners",
                buffers,
                threadgroup: [8, 4, 2],
                seed,
                ..Launch::default()
            };
            let report = library.run(&mut launch, mode).unwrap();
            assert_eq!((report.threadgroup_bytes, count), (32 << 10, [64, 63]));
            for i in 0..64 {
                assert_eq!(y[(i + 62) % 64], (i + 2 * (63 - i)) as f32, "{mode:?} {i}");
            }
        }
    }
}

#[test]
fn offsets_and_shared_memory() {
    if !available("offsets") {
        return;
    }
    let library = library();
    // Input and output are parts of one allocation, as a pool makes them.
    let mut pool: Vec<f32> = values().into_iter().chain(vec![0.0; 32]).collect();
    for mode in MODES {
        let buffers = vec![
            Buffer::read_write(1, &mut pool).at(128),
            Buffer::same(0, 1, 0),
        ];
        run(&library, "simd_some_lanes", buffers, 32, mode);
        let some: f32 = values().iter().step_by(3).sum();
        assert_eq!(pool[32], some);
        assert_eq!(bytes_of(&pool[..32]), bytes_of(&values()));
    }
}

#[test]
fn lanes_that_diverge_meet_again() {
    if !available("divergence") {
        return;
    }
    let (library, x) = (library(), values());
    let sum: f32 = x[16..].iter().sum();
    let most = |round: usize| {
        (0..32)
            .filter(|i| i % 3 > round)
            .map(|i| x[i])
            .fold(f32::MIN, f32::max)
    };
    for mode in MODES {
        let mut y = vec![0.0f32; 32];
        let buffers = vec![Buffer::read(0, &x), Buffer::write(1, &mut y)];
        let mut launch = Launch {
            kernel: "divergent",
            buffers,
            threadgroup: [32, 1, 1],
            allow_divergent_simd: true,
            ..Launch::default()
        };
        library.run(&mut launch, mode).unwrap();
        for (i, got) in y.into_iter().enumerate() {
            let mut want = if i >= 16 { sum } else { 0.0 };
            want += (0..i % 3).map(most).sum::<f32>();
            assert!(
                (got - want - 32.0).abs() < 1e-4,
                "{mode:?} lane {i}: {got}, not {}",
                want + 32.0
            );
        }
    }
}

#[test]
fn kernels_in_namespaces_and_with_other_names() {
    if !available("names") {
        return;
    }
    let library = library();
    assert!(!library.kernels().iter().any(|k| k == "original"));
    for (kernel, factor) in [("renamed", 2.0), ("made_f32", 1.0)] {
        let mut y = vec![0.0f32; 8];
        run(
            &library,
            kernel,
            vec![Buffer::write(0, &mut y)],
            8,
            Mode::Checked,
        );
        assert_eq!(y[7], 7.0 * factor);
    }
}

#[test]
fn variables_that_nobody_set_are_nans_in_checked_mode() {
    if !available("variables that nobody set") {
        return;
    }
    let (library, x, mut y) = (library(), values(), vec![0.0f32; 32]);
    run(
        &library,
        "never_set",
        vec![Buffer::read(0, &x), Buffer::write(1, &mut y)],
        32,
        Mode::Checked,
    );
    assert!(y.iter().all(|v| v.is_nan()), "{y:?}");
}
