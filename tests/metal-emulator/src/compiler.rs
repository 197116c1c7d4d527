//! Finds clang and turns a .metal file into shared libraries, kept under the target directory by the hash of all that went in.
use crate::launch::Mode;
use crate::translate::{translate, Translation};
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

/// The oldest clang that has `_Float16` without excess precision on x86-64.
const OLDEST: u32 = 16;
const NEWEST: u32 = 30;

const STANDIN: &[(&str, &str)] = &[
    ("abi.h", include_str!("../runtime/abi.h")),
    ("msl.h", include_str!("../stdlib/msl.h")),
    ("scalar.h", include_str!("../stdlib/scalar.h")),
    ("vector.h", include_str!("../stdlib/vector.h")),
    ("math.h", include_str!("../stdlib/math.h")),
    ("simd.h", include_str!("../stdlib/simd.h")),
    ("matrix.h", include_str!("../stdlib/matrix.h")),
    ("atomic.h", include_str!("../stdlib/atomic.h")),
    ("bind.h", include_str!("../stdlib/bind.h")),
];
const RUNTIME: &[(&str, &str)] = &[
    ("abi.h", include_str!("../runtime/abi.h")),
    ("fiber.h", include_str!("../runtime/fiber.h")),
    ("worker.h", include_str!("../runtime/worker.h")),
    ("schedule.h", include_str!("../runtime/schedule.h")),
    ("shadow.h", include_str!("../runtime/shadow.h")),
    ("runtime.cpp", include_str!("../runtime/runtime.cpp")),
];
/// Headers of Apple's that a file may include: empty here, since everything is included already.
const APPLE_HEADERS: &str = "metal_stdlib metal_simdgroup metal_simdgroup_matrix metal_math metal_atomic metal_common metal_compute metal_geometric \
    metal_integer metal_limits metal_matrix metal_numeric metal_pack metal_packed_vec metal_quadgroup metal_relational metal_type_traits metal_types \
    metal_uniform metal_array metal_assert metal_extended_vector metal_logging metal_texture";

/// What a .metal file is compiled with, besides its own text.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Options {
    /// `NAME` or `NAME=VALUE`, as for `-D`.
    pub defines: Vec<String>,
    /// Further folders for `#include "…"`; the file's own folder is always searched.
    pub include_dirs: Vec<PathBuf>,
}

pub struct Clang {
    pub path: PathBuf,
    full: String,
}

/// The newest clang++ on PATH that will do (`METAL_EMULATOR_CLANG` names another), or why there is none.
pub fn clang() -> Result<&'static Clang, String> {
    static FOUND: OnceLock<Result<Clang, String>> = OnceLock::new();
    FOUND.get_or_init(find_clang).as_ref().map_err(Clone::clone)
}

fn find_clang() -> Result<Clang, String> {
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

/// A translated file; its kernels are compiled one by one, when they are first wanted.
pub struct Compiled {
    pub translation: Translation,
    clang: &'static Clang,
    cache: PathBuf,
    standin: PathBuf,
}

/// Preprocesses, translates and checks what can be checked without instantiating templates.
pub fn compile(file: &Path, options: &Options) -> Result<Compiled, String> {
    let clang = clang()?;
    let cache = cache_dir();
    let standin = unpack(&cache)?;
    let dir = file
        .parent()
        .filter(|d| !d.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    let mut cmd = Command::new(&clang.path);
    cmd.args(["-E", "-x", "c++", "-std=c++17", "-nostdinc", "-nostdinc++"]);
    cmd.args([
        "-D__METAL__=1",
        "-D__METAL_VERSION__=310",
        "-D__HAVE_BFLOAT__=1",
    ]);
    cmd.arg("-I").arg(standin.join("apple")).arg("-I").arg(dir);
    for i in &options.include_dirs {
        cmd.arg("-I").arg(i);
    }
    cmd.args(options.defines.iter().map(|d| format!("-D{d}")))
        .arg(file);
    let out = finish(cmd, "preprocessing")?;
    let source =
        String::from_utf8(out.stdout).map_err(|e| format!("{}: not UTF-8: {e}", file.display()))?;
    let translation = translate(&source).map_err(|e| format!("{}: {e}", file.display()))?;
    let compiled = Compiled {
        translation,
        clang,
        cache,
        standin,
    };
    compiled.check_syntax()?;
    Ok(compiled)
}

const FAST: &[&str] = &["-O2"];
/// The thread sanitizer's calls without its runtime: every access goes to runtime/shadow.h. The others see what it does not:
/// private arrays, vector types at odd addresses, shifts and divisions.
const CHECKED: &[&str] = &[
    "-O1",
    "-DEMU_CHECKED=1",
    "-fno-omit-frame-pointer",
    "-fno-vectorize",
    "-fno-slp-vectorize",
    "-fsanitize=thread",
    "-mllvm",
    "-tsan-instrument-atomics=0",
    "-mllvm",
    "-tsan-instrument-func-entry-exit=0",
    "-mllvm",
    "-tsan-instrument-read-before-write=1",
    "-fsanitize=array-bounds,alignment,shift-exponent,integer-divide-by-zero",
    "-fsanitize-recover=array-bounds,alignment,shift-exponent,integer-divide-by-zero",
];

impl Compiled {
    fn check_syntax(&self) -> Result<(), String> {
        let key = hash(&(
            &self.translation.source,
            &self.standin,
            &self.clang.full,
            FLAGS,
        ));
        let done = self.cache.join(format!("syntax-{key:016x}"));
        if done.exists() {
            return Ok(());
        }
        let source = self.cache.join(format!("source-{key:016x}.cpp"));
        write_atomically(&source, self.translation.source.as_bytes())?;
        let mut cmd = Command::new(&self.clang.path);
        cmd.args(FLAGS)
            .arg("-fsyntax-only")
            .arg("-I")
            .arg(self.standin.join("include"))
            .arg(&source);
        finish(cmd, "compiling")?;
        write_atomically(&done, b"")
    }

    /// The shared library with one kernel.
    pub fn kernel(&self, index: usize, mode: Mode) -> Result<PathBuf, String> {
        let extra = match mode {
            Mode::Fast => FAST,
            Mode::Checked => CHECKED,
        };
        let cpp = self.translation.with_kernel(index);
        let runtime = runtime_object(self.clang, &self.standin, &self.cache)?;
        let key = hash(&(
            &cpp,
            extra,
            &self.standin,
            &runtime,
            &self.clang.full,
            FLAGS,
            machine(),
        ));
        let library = self.cache.join(format!("kernel-{key:016x}.so"));
        if library.exists() {
            return Ok(library);
        }
        let source = self
            .cache
            .join(format!("kernel-{key:016x}.{}.cpp", unique()));
        write_atomically(&source, cpp.as_bytes())?;
        let temporary = source.with_extension("tmp");
        let mut cmd = Command::new(&self.clang.path);
        cmd.args(FLAGS)
            .args(machine())
            .args(extra)
            .arg("-I")
            .arg(self.standin.join("include"));
        cmd.arg(&source).args(["-x", "none"]).arg(&runtime);
        cmd.args([
            "-shared",
            "-fno-sanitize-link-runtime",
            "-Wl,--build-id=none",
            "-lm",
            "-o",
        ])
        .arg(&temporary);
        let built = finish(cmd, "compiling");
        // what is not there any more is no loss
        let _ = std::fs::remove_file(&source);
        built?;
        std::fs::rename(&temporary, &library).map_err(|e| format!("{}: {e}", library.display()))?;
        Ok(library)
    }
}

const FLAGS: &[&str] = &[
    "-x",
    "c++",
    "-std=c++17",
    "-nostdinc++",
    "-gline-tables-only",
    "-fPIC",
    "-fvisibility=hidden",
    "-fdeclspec",
    "-ffp-contract=off",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-math-errno",
    "-fwrapv",
    "-fno-strict-aliasing",
    "-fno-threadsafe-statics",
    "-fno-stack-protector",
    "-Xclang",
    "-ffloat16-excess-precision=none",
    "-Xclang",
    "-cl-single-precision-constant",
    "-Wno-unknown-attributes",
    "-Wno-duplicate-decl-specifier",
    "-Wno-user-defined-literals",
    "-Wno-reserved-user-defined-literal",
    "-Wno-ignored-attributes",
    "-Wno-inline-namespace-reopened-noninline",
];

/// Instructions of this machine that matter here: fused multiply-add and half conversion would be library calls without them.
fn machine() -> &'static [&'static str] {
    #[cfg(target_arch = "x86_64")]
    if std::is_x86_feature_detected!("avx2")
        && std::is_x86_feature_detected!("fma")
        && std::is_x86_feature_detected!("f16c")
    {
        return &["-mavx2", "-mfma", "-mf16c"];
    }
    &[]
}

fn runtime_object(clang: &Clang, standin: &Path, cache: &Path) -> Result<PathBuf, String> {
    let object = cache.join(format!("runtime-{:016x}.o", hash(&(RUNTIME, &clang.full))));
    if !object.exists() {
        let temporary = cache.join(format!("runtime.{}.tmp", unique()));
        let mut cmd = Command::new(&clang.path);
        cmd.args([
            "-x",
            "c++",
            "-std=c++17",
            "-O2",
            "-g0",
            "-fno-omit-frame-pointer",
            "-fPIC",
            "-fvisibility=hidden",
            "-fno-exceptions",
            "-fno-rtti",
            "-fno-strict-aliasing",
            "-fno-threadsafe-statics",
            "-c",
        ]);
        cmd.arg(standin.join("runtime/runtime.cpp"))
            .arg("-o")
            .arg(&temporary);
        finish(cmd, "compiling the runtime")?;
        std::fs::rename(&temporary, &object).map_err(|e| format!("{}: {e}", object.display()))?;
    }
    Ok(object)
}

/// Writes the stand-in's headers and the runtime's source to the cache, in a folder named by their hash.
fn unpack(cache: &Path) -> Result<PathBuf, String> {
    static DONE: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let go = || {
        let swizzle = crate::swizzle::header();
        let dir = cache.join(format!(
            "standin-{:016x}",
            hash(&(STANDIN, RUNTIME, &swizzle))
        ));
        for (name, text) in STANDIN.iter().chain(&[("swizzle.h", swizzle.as_str())]) {
            write_once(&dir.join("include").join(name), text)?;
        }
        for (name, text) in RUNTIME {
            write_once(&dir.join("runtime").join(name), text)?;
        }
        for name in APPLE_HEADERS.split_whitespace() {
            write_once(&dir.join("apple").join(name), "\n")?;
        }
        Ok(dir)
    };
    DONE.get_or_init(go).clone()
}

fn write_once(path: &Path, text: &str) -> Result<(), String> {
    if path.exists() {
        return Ok(());
    }
    write_atomically(path, text.as_bytes())
}

fn write_atomically(path: &Path, bytes: &[u8]) -> Result<(), String> {
    let dir = path.parent().unwrap_or(Path::new("."));
    let temporary = path.with_extension(format!("{}.tmp", unique()));
    std::fs::create_dir_all(dir)
        .and_then(|()| std::fs::write(&temporary, bytes))
        .and_then(|()| std::fs::rename(&temporary, path))
        .map_err(|e| format!("{}: {e}", path.display()))
}

/// `METAL_EMULATOR_CACHE`, or a folder beside the running test in cargo's target directory.
fn cache_dir() -> PathBuf {
    if let Ok(d) = std::env::var("METAL_EMULATOR_CACHE") {
        return d.into();
    }
    let exe = std::env::current_exe().unwrap_or_default();
    let target = exe.ancestors().find(|a| a.join("CACHEDIR.TAG").exists());
    target
        .map_or_else(std::env::temp_dir, Path::to_path_buf)
        .join("metal-emulator")
}

fn unique() -> String {
    use std::sync::atomic::{AtomicUsize, Ordering};
    static N: AtomicUsize = AtomicUsize::new(0);
    format!(
        "{}-{}",
        std::process::id(),
        N.fetch_add(1, Ordering::Relaxed)
    )
}

fn hash<T: Hash>(v: &T) -> u64 {
    let mut h = DefaultHasher::new();
    v.hash(&mut h);
    h.finish()
}

fn finish(mut cmd: Command, what: &str) -> Result<Output, String> {
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
