//! Writes launches with their memory before and after to the folder `METAL_LAUNCHES`, for tests/metal-gpu.

use std::collections::HashMap;
use std::fmt::Write;
use std::path::PathBuf;
use std::sync::Mutex;

use candle_specprefill::ops::launch::{Argument, Constant, Grid, Launch, Place};

/// Launches of a kind that are kept, and their largest memory where `METAL_LARGEST` does not say.
const OF_A_KIND: usize = 2;
const LARGEST: usize = 1 << 20;

static SEEN: Mutex<Option<HashMap<String, usize>>> = Mutex::new(None);

pub type Memory = [(Place, Vec<u8>, bool)];

/// The memory before a launch, if it is to be recorded.
pub fn before(launch: &Launch, memory: &Memory) -> Option<(PathBuf, Vec<Vec<u8>>)> {
    let dir = PathBuf::from(std::env::var_os("METAL_LAUNCHES")?);
    let size: usize = memory.iter().map(|m| m.1.len()).sum();
    let largest = std::env::var("METAL_LARGEST").ok();
    let largest = largest.and_then(|l| l.parse().ok()).unwrap_or(LARGEST);
    if size > largest || launch.is_empty() {
        return None;
    }
    let kind = format!(
        "{} {:?} {:?}",
        launch.kernel, launch.constants, launch.defines
    );
    let mut seen = SEEN.lock().unwrap();
    let seen = seen.get_or_insert_default();
    let number: usize = seen.values().sum();
    let count = seen.entry(kind).or_default();
    if *count == OF_A_KIND {
        return None;
    }
    *count += 1;
    let path = dir.join(format!("{number:05}"));
    Some((path, memory.iter().map(|m| m.1.clone()).collect()))
}

/// Writes a launch after it has run.
pub fn after(launch: &Launch, (path, before): (PathBuf, Vec<Vec<u8>>), memory: &Memory) {
    let mut data: Vec<u8> = vec![];
    let mut put = |bytes: &[u8]| {
        let at = data.len();
        data.extend(bytes);
        format!("[{at}, {}]", bytes.len())
    };
    let mut places = vec![];
    for (before, (place, after, _)) in before.iter().zip(memory) {
        let writes = |a: &(usize, Argument)| matches!(a.1, Argument::Write(p, _) if p == *place);
        let written = launch.arguments.iter().any(writes);
        places.push(format!("[{}, {}, {written}]", put(before), put(after)));
    }
    let place = |p: &Place| memory.iter().position(|m| m.0 == *p).unwrap();
    let arguments: Vec<String> = launch
        .arguments
        .iter()
        .map(|(index, a)| match a {
            Argument::Read(p, offset) | Argument::Write(p, offset) => {
                format!("[{index}, \"place\", {}, {offset}]", place(p))
            }
            Argument::Bytes(b) => format!("[{index}, \"bytes\", {}, 0]", put(b)),
        })
        .collect();
    let constants: Vec<String> = launch
        .constants
        .iter()
        .map(|(index, c)| {
            let bits = match c {
                Constant::Bool(v) => *v as u32,
                Constant::U16(v) => *v as u32,
                Constant::F32(v) => v.to_bits(),
            };
            format!("[{index}, {bits}]")
        })
        .collect();
    let (kind, grid) = match launch.grid {
        Grid::Threads(g) => ("threads", g),
        Grid::Threadgroups(g) => ("groups", g),
    };
    let defines: Vec<String> = (launch.defines.iter())
        .map(|(n, v)| format!("\"{n}={v}\""))
        .collect();
    let mut json = String::new();
    write!(
        json,
        "{{\"file\": \"{}\", \"defines\": [{}], \"kernel\": \"{}\", \"constants\": [{}], \"grid\": [\"{kind}\", {grid:?}], \
         \"threadgroup\": {:?}, \"memory\": {:?}, \"places\": [{}], \"arguments\": [{}]}}",
        launch.source.file,
        defines.join(", "),
        launch.kernel,
        constants.join(", "),
        launch.threadgroup,
        launch.threadgroup_memory,
        places.join(", "),
        arguments.join(", "),
    )
    .unwrap();
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path.with_extension("json"), json).unwrap();
    std::fs::write(path.with_extension("bin"), data).unwrap();
}
