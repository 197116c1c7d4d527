//! Every kind of mistake, planted, is caught: with its kind and the right line of the source.
use metal_emulator::FaultKind::*;
use metal_emulator::{
    available, Buffer, Constant, Fault, FaultKind, Grid, Launch, Library, Mode, Report,
};
use std::path::{Path, PathBuf};

fn file() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kernels/faults.metal")
}

struct Case<'a> {
    library: &'a Library,
    kernel: &'a str,
    mode: Mode,
    threads: usize,
    groups: usize,
    memory: Vec<usize>,
    more: Vec<Buffer<'a>>,
}

impl<'a> Case<'a> {
    fn new(library: &'a Library, kernel: &'a str) -> Self {
        Self {
            library,
            kernel,
            mode: Mode::Checked,
            threads: 64,
            groups: 1,
            memory: vec![],
            more: vec![],
        }
    }

    fn run(self) -> Result<Report, Fault> {
        let input: Vec<f32> = (0..64).map(|v| v as f32).collect();
        // where several threadgroups write the whole output, it has one part for each
        let parts = if self.kernel.contains("other_group") {
            self.groups
        } else {
            1
        };
        let mut output = vec![0.0f32; 64 * parts];
        let mut buffers = vec![Buffer::read(0, &input), Buffer::write(1, &mut output)];
        buffers.extend(self.more);
        let mut launch = Launch {
            kernel: self.kernel,
            buffers,
            grid: Grid::Threadgroups([self.groups, 1, 1]),
            threadgroup: [self.threads, 1, 1],
            threadgroup_memory: self.memory,
            ..Launch::default()
        };
        self.library.run(&mut launch, self.mode)
    }
}

/// The line that a kernel's fault must name.
fn line(kernel: &str) -> Option<usize> {
    let text = std::fs::read_to_string(file()).unwrap();
    let at = text
        .lines()
        .position(|l| l.ends_with(&format!("FAULT {kernel}")))?;
    Some(at + 1)
}

fn expect(result: Result<Report, Fault>, kernel: &str, kind: FaultKind) {
    let fault = match result {
        Ok(report) => panic!("{kernel}: not caught ({report:?})"),
        Err(fault) => fault,
    };
    assert_eq!(fault.kind, kind, "{fault}");
    if let Some(line) = line(kernel) {
        // a race has two places: the line is one of them
        let line = format!("faults.metal:{line}");
        let there = fault.place.as_deref() == Some(&line);
        let earlier = kind == Race && fault.message.ends_with(&line);
        assert!(there || earlier, "{line} expected: {fault}");
        assert!(fault.thread.is_some(), "{fault}");
    }
    println!("caught: {}", fault.to_string().lines().next().unwrap());
}

const CHECKED: &[(&str, FaultKind)] = &[
    ("race_no_barrier", Race),
    ("race_refill", Race),
    ("race_device_fence", Race),
    ("race_threadgroup_fence", Race),
    ("race_no_fence", Race),
    ("race_simdgroup_barrier", Race),
    ("race_within_simdgroup", Race),
    ("race_one_address", Race),
    ("race_plain_and_atomic", Race),
    ("race_tile_store", Race),
    ("barrier_in_branch", BarrierDivergence),
    ("barrier_after_return", BarrierDivergence),
    ("barrier_two_places", BarrierDivergence),
    ("barrier_of_simdgroup", BarrierDivergence),
    ("barrier_trip_counts", BarrierDivergence),
    ("simd_two_places", SimdDivergence),
    ("bounds_read", OutOfBounds),
    ("bounds_write", OutOfBounds),
    ("bounds_before", OutOfBounds),
    ("bounds_far", OutOfBounds),
    ("bounds_crossing", OutOfBounds),
    ("bounds_threadgroup", OutOfBounds),
    ("bounds_threadgroup_index", OutOfBounds),
    ("bounds_private", OutOfBounds),
    ("uninitialised_tile", Uninitialised),
    ("uninitialised_output", Uninitialised),
    ("misaligned_scalar", Misaligned),
    ("misaligned_vector", Misaligned),
    ("read_only", ReadOnly),
    ("unwritten", Unwritten),
    ("memory_static", ThreadgroupMemory),
    ("shift_width", Arithmetic),
    ("divide_by_zero", Arithmetic),
    ("stack_overflow", Stack),
    ("inactive_shuffle", InactiveLane),
    ("inactive_range", InactiveLane),
    ("inactive_returned", InactiveLane),
    ("inactive_matrix", InactiveLane),
    ("inactive_load", InactiveLane),
    ("race_device_simdgroups", Race),
    ("race_overlap", Race),
    ("race_atomic_start", Race),
    ("race_matrix_device", Race),
    ("race_behind_uniform_branch", Race),
    ("barrier_lane_trip_counts", BarrierDivergence),
    ("barrier_break", BarrierDivergence),
    ("bounds_threadgroup_next", OutOfBounds),
    ("bounds_threadgroup_before", OutOfBounds),
    ("bounds_overflow", OutOfBounds),
    ("bounds_matrix", OutOfBounds),
    ("misaligned_half", Misaligned),
    ("misaligned_tile", Misaligned),
    ("uninitialised_component", Uninitialised),
    ("uninitialised_matrix", Uninitialised),
    ("unwritten_half", Unwritten),
    ("inactive_past", InactiveLane),
    ("inactive_quad", InactiveLane),
    ("binding_null", Binding),
    ("binding_missing", Binding),
    ("binding_constant", Binding),
    ("binding_threads", Binding),
];

/// Those that need a launch of their own; see the test.
const LAUNCHED: [&str; 4] = [
    "race_between_threadgroups",
    "uninitialised_from_other_group",
    "memory_dynamic",
    "binding_small",
];

#[test]
fn checked_mode_catches_every_planted_fault() {
    if !available("planted faults, checked mode") {
        return;
    }
    let library = Library::compile(file(), &[]).unwrap();
    library.prepare(Mode::Checked, |_| true).unwrap();
    // Every kernel of the file is a case of this test, but for the one that is right.
    let cases = CHECKED.iter().map(|c| c.0).chain(LAUNCHED);
    let cases: std::collections::HashSet<_> = cases.chain(["binding_optional"]).collect();
    assert!(library.kernels().iter().all(|k| cases.contains(&**k)));
    assert_eq!(cases.len(), library.kernels().len());
    for &(kernel, kind) in CHECKED {
        expect(Case::new(&library, kernel).run(), kernel, kind);
    }
    for kernel in [
        "race_between_threadgroups",
        "uninitialised_from_other_group",
    ] {
        let kind = if kernel.starts_with("race") {
            Race
        } else {
            Uninitialised
        };
        expect(
            Case {
                groups: 2,
                ..Case::new(&library, kernel)
            }
            .run(),
            kernel,
            kind,
        );
    }
    let memory_dynamic = Case {
        memory: vec![16384 + 256],
        ..Case::new(&library, "memory_dynamic")
    };
    expect(memory_dynamic.run(), "memory_dynamic", ThreadgroupMemory);
    let small = Case {
        more: vec![Buffer::value(2, 1u32)],
        ..Case::new(&library, "binding_small")
    };
    expect(small.run(), "binding_small", Binding);
}

#[test]
fn fast_mode_catches_what_needs_no_checks() {
    if !available("planted faults, fast mode") {
        return;
    }
    let library = Library::compile(file(), &[]).unwrap();
    let kinds = [
        BarrierDivergence,
        SimdDivergence,
        InactiveLane,
        Binding,
        ThreadgroupMemory,
        Stack,
    ];
    // In fast mode a matrix load exchanges nothing, so nobody notices who is missing.
    let not_seen = ["inactive_load"];
    // Crashes: the kernel is abandoned and the test goes on. (aarch64 divides by zero without a word.)
    let division = if cfg!(target_arch = "aarch64") {
        ""
    } else {
        "divide_by_zero"
    };
    let crashes = [
        "bounds_read",
        "bounds_write",
        "bounds_far",
        "bounds_crossing",
        "read_only",
        division,
    ];
    let seen = |(k, kind): &&(&str, FaultKind)| {
        (kinds.contains(kind) && !not_seen.contains(k)) || crashes.contains(k)
    };
    let cases: Vec<_> = CHECKED.iter().filter(seen).collect();
    library
        .prepare(Mode::Fast, |name| cases.iter().any(|(k, _)| *k == name))
        .unwrap();
    for (kernel, kind) in cases {
        expect(
            Case {
                mode: Mode::Fast,
                ..Case::new(&library, kernel)
            }
            .run(),
            kernel,
            *kind,
        );
    }
}

#[test]
fn a_buffer_that_nobody_touches_may_be_missing() {
    if !available("optional buffers") {
        return;
    }
    let library = Library::compile(file(), &[]).unwrap();
    for mode in [Mode::Fast, Mode::Checked] {
        Case {
            mode,
            ..Case::new(&library, "binding_optional")
        }
        .run()
        .unwrap();
    }
}

#[test]
fn launches_that_metal_refuses_are_refused() {
    if !available("launches") {
        return;
    }
    let library = Library::compile(file(), &[]).unwrap();
    let text = |case: Case| case.run().unwrap_err().to_string();
    let case = || Case::new(&library, "binding_optional");
    assert!(text(Case {
        threads: 1025,
        ..case()
    })
    .contains("Metal allows 1 to 1024"));
    assert!(text(Case {
        threads: 0,
        ..case()
    })
    .contains("Metal allows 1 to 1024"));
    assert!(text(Case {
        groups: 0,
        ..case()
    })
    .contains("is empty"));
    assert!(text(Case {
        kernel: "nothing",
        ..case()
    })
    .contains("no kernel nothing"));
    assert!(text(Case {
        more: vec![Buffer::value(1, 0u32)],
        ..case()
    })
    .contains("bound twice"));
    assert!(text(Case {
        more: vec![Buffer::value(2, 0u32).at(8)],
        ..case()
    })
    .contains("offset 8"));
    assert!(text(Case {
        more: vec![Buffer::same(2, 9, 0)],
        ..case()
    })
    .contains("buffer(9)"));
    assert!(text(Case {
        more: vec![Buffer::values(2, &[0u8; 5000])],
        ..case()
    })
    .contains("at most 4096"));
    assert!(text(Case {
        memory: vec![20],
        ..case()
    })
    .contains("multiple of 16"));
    assert!(text(Case {
        memory: vec![40960],
        ..case()
    })
    .contains("over 32 KiB"));
    assert!(text(Case::new(&library, "memory_dynamic")).contains("threadgroup(0) has no length"));
}

#[test]
fn function_constants_are_checked() {
    if !available("function constants") {
        return;
    }
    let e = Library::compile(file(), &[("factr", Constant::U32(1))])
        .unwrap_err()
        .to_string();
    assert!(
        e.contains("no function constant factr") && e.contains("factor (3)"),
        "{e}"
    );
    let e = Library::compile(file(), &[("factor", Constant::F32(1.0))])
        .unwrap_err()
        .to_string();
    assert!(e.contains("is a uint, not a float"), "{e}");
    for name in ["factor", "3"] {
        let library = Library::compile(file(), &[(name, Constant::U32(2))]).unwrap();
        Case::new(&library, "binding_constant").run().unwrap();
    }
}
