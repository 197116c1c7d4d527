//! Compiled kernels, loaded.
use crate::compiler::{compile, Compiled, Options};
use crate::ffi::{Crash, CrashStack, Kernel, RawConstant, RunGroups, WorkerNew};
use crate::launch::{Constant, Mode};
use crate::translate::FunctionConstant;
use rayon::prelude::*;
use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};

/// A .metal file that could not be compiled, or constants that do not fit it.
#[derive(Clone, Debug)]
pub struct CompileError(pub String);

impl fmt::Display for CompileError {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for CompileError {}

/// The kernels of one .metal file, specialised by function constants.
#[derive(Clone)]
pub struct Library {
    module: Arc<Module>,
    constants: Box<[RawConstant; 64]>,
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.debug_struct("Library")
            .field("file", &self.module.file)
            .field("kernels", &self.module.names)
            .finish()
    }
}

/// Kernels that are compiled together: neighbours in a file are often wanted together, and clang reads the file once for all.
const GROUP: usize = 4;

type Group = OnceLock<Result<Vec<Loaded>, String>>;

/// One file with its options; shared by all libraries that differ in constants only.
struct Module {
    file: PathBuf,
    compiled: Compiled,
    names: Vec<String>,
    /// By mode and group of kernels.
    loaded: [Vec<Group>; 2],
}

/// A kernel of a shared library, which stays loaded until the process ends.
pub(crate) struct Loaded {
    pub path: PathBuf,
    pub kernel: KernelPointer,
    pub worker_new: WorkerNew,
    pub run_groups: RunGroups,
    pub crash: Crash,
    pub crash_stack: CrashStack,
}

#[derive(Clone, Copy)]
pub(crate) struct KernelPointer(pub *const Kernel);
// SAFETY: points to constant data of a library that stays loaded.
unsafe impl Send for KernelPointer {}
unsafe impl Sync for KernelPointer {}

impl Library {
    /// Compiles a .metal file (or takes it from the cache) and sets function constants, by name or by index.
    pub fn compile(
        file: impl AsRef<Path>,
        constants: &[(&str, Constant)],
    ) -> Result<Self, CompileError> {
        Self::compile_with(file, constants, &Options::default())
    }

    /// The same with macro definitions and include folders.
    pub fn compile_with(
        file: impl AsRef<Path>,
        constants: &[(&str, Constant)],
        options: &Options,
    ) -> Result<Self, CompileError> {
        let module = Module::get(file.as_ref(), options).map_err(CompileError)?;
        Self {
            module,
            constants: Box::new([RawConstant::default(); 64]),
        }
        .with_constants(constants)
    }

    /// The same kernels with other constants; those not named keep their values. Costs nothing.
    pub fn with_constants(&self, constants: &[(&str, Constant)]) -> Result<Self, CompileError> {
        let mut library = self.clone();
        let declared = self.function_constants();
        for (name, value) in constants {
            let index = name.parse::<usize>().ok();
            let Some((slot, c)) = declared
                .iter()
                .enumerate()
                .find(|(_, c)| c.name == *name || Some(c.index) == index)
            else {
                let names: Vec<_> = declared
                    .iter()
                    .map(|c| format!("{} ({})", c.name, c.index))
                    .collect();
                return Err(CompileError(format!(
                    "{}: no function constant {name}; it has: {}",
                    self.module.file.display(),
                    names.join(", ")
                )));
            };
            let (size, bits, ty) = value.parts();
            if !same_type(&c.ty, ty) {
                return Err(CompileError(format!(
                    "{}: function constant {} is a {}, not a {ty}",
                    self.module.file.display(),
                    c.name,
                    c.ty
                )));
            }
            library.constants[slot] = RawConstant { bits, set: 1, size };
        }
        Ok(library)
    }

    /// Compiles the kernels that `wanted` says yes to on all processors. Without it a kernel is compiled, with its neighbours in the
    /// file, when it first runs.
    pub fn prepare(
        &self,
        mode: Mode,
        wanted: impl Fn(&str) -> bool + Sync,
    ) -> Result<(), CompileError> {
        let m = &self.module;
        let groups: Vec<usize> = (0..m.names.len().div_ceil(GROUP))
            .filter(|&g| m.names[g * GROUP..].iter().take(GROUP).any(|n| wanted(n)))
            .collect();
        groups
            .par_iter()
            .map(|&g| m.group(g, mode).map(|_| ()))
            .collect::<Result<(), String>>()
            .map_err(CompileError)
    }

    /// The file as CUDA C++ for clang, an entry per kernel, against tests/metal-gpu/include; function constants are numbered in
    /// the order of [`Self::function_constants`].
    pub fn cuda(&self) -> String {
        self.module.compiled.translation.for_cuda()
    }

    /// Host names of all kernels.
    pub fn kernels(&self) -> &[String] {
        &self.module.names
    }

    /// The function constants that the file declares: name, MSL type, index.
    pub fn function_constants(&self) -> &[FunctionConstant] {
        &self.module.compiled.translation.constants
    }

    pub(crate) fn constants(&self) -> &[RawConstant; 64] {
        &self.constants
    }

    pub(crate) fn loaded(&self, kernel: &str, mode: Mode) -> Result<&Loaded, String> {
        let m = &self.module;
        let Some(i) = m.names.iter().position(|n| n == kernel) else {
            let names = m.names[..m.names.len().min(40)].join(", ");
            return Err(format!(
                "{}: no kernel {kernel}; there are: {names}",
                m.file.display()
            ));
        };
        Ok(&m.group(i / GROUP, mode)?[i % GROUP])
    }
}

fn same_type(declared: &str, given: &str) -> bool {
    let declared = declared.trim();
    declared == given
        || matches!(
            (declared, given),
            ("uint32_t" | "unsigned int" | "unsigned", "uint")
                | ("int32_t", "int")
                | ("uint16_t", "ushort")
                | ("int16_t", "short")
                | ("uint64_t" | "size_t", "ulong")
                | ("int64_t", "long")
                | ("float16_t", "half")
        )
}

type Slot = Arc<OnceLock<Result<Arc<Module>, String>>>;

impl Module {
    fn group(&self, group: usize, mode: Mode) -> Result<&[Loaded], String> {
        let build = || {
            let first = group * GROUP;
            let kernels: Vec<usize> = (first..self.names.len().min(first + GROUP)).collect();
            load(self.compiled.kernels(&kernels, mode)?, kernels.len())
        };
        let slot = &self.loaded[usize::from(mode == Mode::Checked)][group];
        slot.get_or_init(build)
            .as_ref()
            .map(Vec::as_slice)
            .map_err(Clone::clone)
    }

    /// Compiles once per process: later changes of the file are not seen.
    fn get(file: &Path, options: &Options) -> Result<Arc<Module>, String> {
        static MODULES: OnceLock<Mutex<HashMap<(PathBuf, Options), Slot>>> = OnceLock::new();
        let path = file
            .canonicalize()
            .map_err(|e| format!("{}: {e}", file.display()))?;
        let slot = MODULES
            .get_or_init(Mutex::default)
            .lock()
            .unwrap_or_else(|e| e.into_inner())
            .entry((path, options.clone()))
            .or_default()
            .clone();
        let build = || {
            let compiled = compile(file, options)?;
            let names: Vec<String> = compiled
                .translation
                .kernels
                .iter()
                .map(|k| k.name.clone())
                .collect();
            let slots = || names.chunks(GROUP).map(|_| OnceLock::new()).collect();
            Ok(Arc::new(Module {
                file: file.to_path_buf(),
                compiled,
                loaded: [slots(), slots()],
                names,
            }))
        };
        slot.get_or_init(build).clone()
    }
}

/// Loads a shared library with that many kernels.
fn load(path: PathBuf, count: usize) -> Result<Vec<Loaded>, String> {
    let text = |e: libloading::Error| format!("{}: {e}", path.display());
    // SAFETY: the library was built by this crate; its symbols have the types of runtime/abi.h, and it has no constructors.
    unsafe {
        let library = Box::leak(Box::new(libloading::Library::new(&path).map_err(text)?));
        let table: *const Kernel = *library.get(b"emu_kernels\0").map_err(text)?;
        let worker_new = *library
            .get::<WorkerNew>(b"emu_worker_new\0")
            .map_err(text)?;
        let run_groups = *library
            .get::<RunGroups>(b"emu_run_groups\0")
            .map_err(text)?;
        let crash = *library.get::<Crash>(b"emu_crash\0").map_err(text)?;
        let crash_stack = *library
            .get::<CrashStack>(b"emu_crash_stack\0")
            .map_err(text)?;
        let one = |i| Loaded {
            path: path.clone(),
            kernel: KernelPointer(table.add(i)),
            worker_new,
            run_groups,
            crash,
            crash_stack,
        };
        Ok((0..count).map(one).collect())
    }
}
