//! Where compiled kernels are kept, and the stand-in's files there.
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

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
pub const RUNTIME: &[(&str, &str)] = &[
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

/// Writes the stand-in's headers and the runtime's source to the cache, in a folder named by their hash.
pub fn unpack(cache: &Path) -> Result<PathBuf, String> {
    static DONE: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let go = || {
        prune(cache);
        let swizzle = crate::swizzle::header();
        let dir = cache.join(format!(
            "standin-{:016x}",
            hash(&(
                STANDIN,
                RUNTIME,
                &swizzle,
                include_str!("../stdlib/spaces.h")
            ))
        ));
        for (name, text) in STANDIN.iter().chain(&[("swizzle.h", swizzle.as_str())]) {
            write_once(&dir.join("include").join(name), text)?;
        }
        // the address-space check's own msl.h, with the macros that both share
        let (spaces, msl) = (
            include_str!("../stdlib/spaces.h"),
            include_str!("../stdlib/msl.h"),
        );
        let macros = msl.find("#define INFINITY").map_or("", |i| &msl[i..]);
        write_once(&dir.join("spaces/msl.h"), &format!("{spaces}{macros}"))?;
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

/// Keeps the cache from growing for ever: when it is large, what nobody has used for a day goes.
fn prune(cache: &Path) {
    const LARGE: usize = 8000;
    let Ok(dir) = std::fs::read_dir(cache) else {
        return;
    };
    let files: Vec<_> = dir.flatten().collect();
    if files.len() < LARGE {
        return;
    }
    for f in files {
        let unused = f
            .metadata()
            .ok()
            .filter(|m| m.is_file())
            .and_then(|m| m.modified().ok())
            .and_then(|t| t.elapsed().ok());
        if unused.is_some_and(|d| d.as_secs() > 24 * 3600) {
            let _ = std::fs::remove_file(f.path());
        }
    }
}

/// Notes that a file of the cache is in use.
pub fn touch(path: &Path) {
    if let Ok(f) = std::fs::File::options().append(true).open(path) {
        let _ = f.set_modified(std::time::SystemTime::now());
    }
}

fn write_once(path: &Path, text: &str) -> Result<(), String> {
    if path.exists() {
        return Ok(());
    }
    write_atomically(path, text.as_bytes())
}

pub fn write_atomically(path: &Path, bytes: &[u8]) -> Result<(), String> {
    let dir = path.parent().unwrap_or(Path::new("."));
    let temporary = path.with_extension(format!("{}.tmp", unique()));
    std::fs::create_dir_all(dir)
        .and_then(|()| std::fs::write(&temporary, bytes))
        .and_then(|()| std::fs::rename(&temporary, path))
        .map_err(|e| format!("{}: {e}", path.display()))
}

/// `METAL_EMULATOR_CACHE`, or a folder beside the running test in cargo's target directory.
pub fn cache_dir() -> PathBuf {
    if let Ok(d) = std::env::var("METAL_EMULATOR_CACHE") {
        return d.into();
    }
    let exe = std::env::current_exe().unwrap_or_default();
    let target = exe.ancestors().find(|a| a.join("CACHEDIR.TAG").exists());
    target
        .map_or_else(std::env::temp_dir, Path::to_path_buf)
        .join("metal-emulator")
}

pub fn unique() -> String {
    use std::sync::atomic::{AtomicUsize, Ordering};
    static N: AtomicUsize = AtomicUsize::new(0);
    format!(
        "{}-{}",
        std::process::id(),
        N.fetch_add(1, Ordering::Relaxed)
    )
}

pub fn hash<T: Hash>(v: &T) -> u64 {
    let mut h = DefaultHasher::new();
    v.hash(&mut h);
    h.finish()
}
