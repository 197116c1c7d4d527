//! From a program counter to `file.metal:line`, by the library's debug information.
use std::path::Path;

pub(crate) fn place(library: &Path, pc: u64) -> Option<String> {
    if pc == 0 {
        return None;
    }
    let loader = addr2line::Loader::new(library).ok()?;
    let mut frames = loader.find_frames(pc - 1).ok()?; // the call itself, not what follows it
    let mut innermost = None;
    while let Ok(Some(frame)) = frames.next() {
        let Some(l) = frame.location else { continue };
        let (Some(file), Some(line)) = (l.file, l.line) else {
            continue;
        };
        let file = Path::new(file)
            .file_name()
            .map_or(file.into(), |n| n.to_string_lossy());
        let here = format!("{file}:{line}");
        if !STANDIN.contains(&file.as_ref()) {
            return Some(here);
        }
        innermost.get_or_insert(here);
    }
    innermost
}

/// Inlined functions of the stand-in are skipped: the mistake lies where they are called.
const STANDIN: &[&str] = &[
    "scalar.h",
    "swizzle.h",
    "vector.h",
    "math.h",
    "simd.h",
    "matrix.h",
    "atomic.h",
    "bind.h",
    "msl.h",
    "abi.h",
    "emulator table",
];
