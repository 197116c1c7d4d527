//! The README's numbers about the Metal side, counted from the sources and tables that they speak of.

use std::path::{Path, PathBuf};
use std::process::Command;

use metal_emulator::Library;

use crate::needs_clang;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: impl AsRef<Path>) -> String {
    std::fs::read_to_string(root().join(path)).unwrap()
}

fn lines(text: &str, like: impl Fn(&str) -> bool) -> usize {
    text.lines().filter(|l| like(l)).count()
}

/// Kernels are counted where they are defined, variants as the host names that a file's macros make of them.
fn kernels() -> (usize, usize) {
    let (mut kernels, mut variants) = (0, 0);
    for file in std::fs::read_dir(root().join("metal")).unwrap() {
        let path = file.unwrap().path();
        if path.extension().is_some_and(|e| e == "metal") {
            kernels += lines(&read(&path), |l| l.starts_with("[[kernel"));
            variants += Library::compile(&path, &[]).unwrap().kernels().len();
        }
    }
    (kernels, variants)
}

/// Tests that this suite runs, as the test harness lists them.
fn kernel_tests() -> usize {
    let list = |more: &[&str]| {
        let out = Command::new(std::env::current_exe().unwrap())
            .args(["--list", "--format=terse"])
            .args(more)
            .output()
            .unwrap();
        let text = String::from_utf8(out.stdout).unwrap();
        lines(&text, |l| l.ends_with(": test"))
    };
    list(&[]) - list(&["--ignored"])
}

#[test]
fn the_readmes_counts_are_those_of_the_sources() {
    needs_clang!();
    let of_emulator = |file: &str| read(Path::new("tests/metal-emulator/tests").join(file));
    // The emulator's own tests run every one of these tables and fail where a fault is not caught; see faults.rs.
    let planted = lines(&of_emulator("kernels/faults.metal"), |l| {
        (l.starts_with("kernel void ") || l.starts_with("[[kernel")) && !l.contains("_optional(")
    });
    let compile_time = lines(&of_emulator("kernels/errors.metal"), |l| {
        let name = l.rsplit_once("// ").map_or("", |(_, name)| name.trim());
        !name.is_empty() && name.chars().all(|c| c.is_ascii_uppercase() || c == '_')
    });
    let injected = lines(&of_emulator("kernels.rs"), |l| {
        l.starts_with("    (\"") && l.contains("FaultKind::")
    });
    let (kernels, variants) = kernels();
    let counts = [
        format!("{kernels} kernels in {variants} variants"),
        format!("{} tests", kernel_tests()),
        format!("{planted} run-time faults"),
        format!("{compile_time} errors of compilation"),
        format!("{injected} bugs injected"),
    ];
    let one_line = |text: String| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let readme = one_line(read("README.md"));
    let missing: Vec<_> = counts.iter().filter(|c| !readme.contains(*c)).collect();
    assert!(
        missing.is_empty(),
        "README.md does not say {missing:?}; it should say {counts:?}"
    );
    let emulator = one_line(read("tests/metal-emulator/README.md"));
    let own = [
        format!("{planted} of them, in `tests/kernels/faults.metal`"),
        format!("for {compile_time} errors of compilation"),
        format!("injects {injected} bugs"),
    ];
    let missing: Vec<_> = own.iter().filter(|c| !emulator.contains(*c)).collect();
    assert!(
        missing.is_empty(),
        "tests/metal-emulator/README.md: {own:?}"
    );
}
