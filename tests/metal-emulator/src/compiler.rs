//! Turns a .metal file into shared libraries, one per kernel and mode, kept by the hash of all that went in.
use crate::cache::{cache_dir, hash, touch, unique, unpack, write_atomically, RUNTIME};
use crate::clang::{clang, finish, Clang};
use crate::launch::Mode;
use crate::translate::{translate, Translation};
use std::path::{Path, PathBuf};
use std::process::Command;

/// What a .metal file is compiled with, besides its own text.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Options {
    /// `NAME` or `NAME=VALUE`, as for `-D`.
    pub defines: Vec<String>,
    /// Further folders for `#include "…"`; the file's own folder is always searched.
    pub include_dirs: Vec<PathBuf>,
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
    let translation = translate(&source).map_err(|e| {
        if e.contains(".metal:") {
            e
        } else {
            format!("{}: {e}", file.display())
        }
    })?;
    let compiled = Compiled {
        translation,
        clang,
        cache,
        standin,
    };
    compiled.check()?;
    Ok(compiled)
}

const FAST: &[&str] = &["-O2"];
/// The thread sanitizer's calls without its runtime: every access goes to runtime/shadow.h. The others see what it does not:
/// private arrays, vector types at odd addresses, shifts and divisions.
const CHECKED: &[&str] = &[
    "-O1",
    "-DEMU_CHECKED=1",
    "-fno-omit-frame-pointer",
    "-ftrivial-auto-var-init=pattern", // a variable that nobody set: a NaN, or a wild index
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
    /// Types, names and address spaces; code of the file's that no kernel uses included.
    fn check(&self) -> Result<(), String> {
        let t = &self.translation;
        let everything = t.with_all_kernels();
        let key = hash(&(
            &everything,
            &self.standin,
            &self.clang.full,
            FLAGS,
            include_str!("spaces.rs"),
        ));
        let done = self.cache.join(format!("checked-{key:016x}"));
        if done.exists() {
            return Ok(());
        }
        let source = self
            .cache
            .join(format!("check-{key:016x}.{}.cpp", unique()));
        write_atomically(&source, t.source.as_bytes())?;
        let mut cmd = Command::new(&self.clang.path);
        cmd.args(FLAGS)
            .arg("-fsyntax-only")
            .arg("-I")
            .arg(self.standin.join("include"))
            .arg(&source);
        let result = finish(cmd, "compiling").and_then(|_| {
            write_atomically(&source, everything.as_bytes())?;
            crate::spaces::check(self.clang, &self.standin, &source)
        });
        let _ = std::fs::remove_file(&source);
        result?;
        write_atomically(&done, b"")
    }

    /// A shared library with some of the kernels.
    pub fn kernels(&self, indices: &[usize], mode: Mode) -> Result<PathBuf, String> {
        let extra = match mode {
            Mode::Fast => FAST,
            Mode::Checked => CHECKED,
        };
        let cpp = self.translation.with_kernels(indices);
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
        let library = self.cache.join(format!("kernels-{key:016x}.so"));
        if library.exists() {
            touch(&library);
            return Ok(library);
        }
        let source = self
            .cache
            .join(format!("kernels-{key:016x}.{}.cpp", unique()));
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
