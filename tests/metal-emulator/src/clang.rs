//! Finds clang and runs it.
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::OnceLock;

/// The oldest clang that has `_Float16` without excess precision on x86-64.
const OLDEST: u32 = 16;
const NEWEST: u32 = 30;

pub struct Clang {
    pub path: PathBuf,
    pub full: String,
}

/// The newest clang++ on PATH that will do (`METAL_EMULATOR_CLANG` names another), or why there is none.
pub fn clang() -> Result<&'static Clang, String> {
    static FOUND: OnceLock<Result<Clang, String>> = OnceLock::new();
    FOUND.get_or_init(find_clang).as_ref().map_err(Clone::clone)
}

fn find_clang() -> Result<Clang, String> {
    if !cfg!(target_os = "linux") || !cfg!(any(target_arch = "x86_64", target_arch = "aarch64")) {
        return Err("the emulator runs on Linux, on x86-64 and aarch64".into());
    }
    let named = std::env::var("METAL_EMULATOR_CLANG").ok();
    let names: Vec<String> = match &named {
        Some(n) => vec![n.clone()],
        None => std::iter::once("clang++".into())
            .chain((OLDEST..=NEWEST).rev().map(|v| format!("clang++-{v}")))
            .collect(),
    };
    let mut seen = String::new();
    for name in names {
        let Ok(out) = Command::new(&name).arg("--version").output() else {
            continue;
        };
        let full = String::from_utf8_lossy(&out.stdout).into_owned();
        let apple = full.contains("Apple");
        let Some(version) = full
            .split("clang version ")
            .nth(1)
            .and_then(|r| r.split('.').next())
            .and_then(|v| v.trim().parse::<u32>().ok())
        else {
            continue;
        };
        if version >= OLDEST && !apple {
            return Ok(Clang {
                path: name.into(),
                full,
            });
        }
        seen = format!(" ({name} is version {version})");
    }
    Err(format!("no clang of version {OLDEST} or later on PATH{seen}: on Debian `apt-get install clang-19`, or set METAL_EMULATOR_CLANG"))
}

pub fn finish(mut cmd: Command, what: &str) -> Result<Output, String> {
    let out = cmd
        .output()
        .map_err(|e| format!("{what}: {:?}: {e}", cmd.get_program()))?;
    if out.status.success() {
        return Ok(out);
    }
    Err(format!(
        "{what} failed:\n{}",
        String::from_utf8_lossy(&out.stderr)
    ))
}
