//! From program counters to `file.metal:line`, by the library's debug information.
use crate::ffi::{RawFault, Site};
use std::ffi::CStr;
use std::path::Path;

/// Where a fault happened and, for a race, where the other access was.
pub(crate) fn places(library: &Path, f: &RawFault) -> (Option<String>, Option<String>) {
    let loader = addr2line::Loader::new(library).ok();
    let of = |pc: u64| loader.as_ref().and_then(|l| of_counter(l, pc));
    let place = of_site(&f.site).or_else(|| f.pcs.iter().find_map(|&pc| of(pc)));
    (place, of(f.earlier))
}

fn of_site(site: &Site) -> Option<String> {
    if site.file.is_null() || site.line == 0 {
        return None;
    }
    // SAFETY: a string literal of the loaded library.
    let file = unsafe { CStr::from_ptr(site.file) }.to_string_lossy();
    named(&file, site.line as u32)
}

fn of_counter(loader: &addr2line::Loader, pc: u64) -> Option<String> {
    let mut frames = loader.find_frames(pc.checked_sub(1)?).ok()?; // the call itself, not what follows it
    while let Ok(Some(frame)) = frames.next() {
        let Some(l) = frame.location else { continue };
        let place = l
            .file
            .zip(l.line)
            .and_then(|(file, line)| named(file, line));
        if place.is_some() {
            return place;
        }
    }
    None
}

/// Functions of the stand-in are skipped: the mistake lies where they are called.
fn named(file: &str, line: u32) -> Option<String> {
    let path = Path::new(file);
    let name = path
        .file_name()
        .map_or(file.into(), |n| n.to_string_lossy());
    let standin =
        path.parent().is_some_and(|d| d.ends_with("include")) && STANDIN.contains(&name.as_ref());
    (!standin && name != "emulator table").then(|| format!("{name}:{line}"))
}

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
];
