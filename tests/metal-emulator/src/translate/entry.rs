//! What a translation consists of, and the table entries that make clang compile a kernel.

/// A `constant T name [[function_constant(n)]]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FunctionConstant {
    pub name: String,
    pub ty: String,
    pub index: usize,
}

pub struct Translation {
    /// The whole file as C++ for the stand-in, without the table of kernels.
    pub source: String,
    pub kernels: Vec<KernelEntry>,
    pub constants: Vec<FunctionConstant>,
}

pub struct KernelEntry {
    pub name: String,
    pub(super) params: String,
    pub(super) nparams: usize,
    pub(super) function: String,
    pub(super) max_threads: String,
}

impl Translation {
    /// The file with the entry of one kernel: only what it needs gets compiled.
    pub fn with_kernel(&self, index: usize) -> String {
        let k = &self.kernels[index];
        let (function, n) = (&k.function, k.nparams);
        format!(
            "{}static const emu_param emu_params[] = {{{}{{0, 0}}}};\n\
             namespace msl {{ namespace {{ using namespace metal; void (*const emu_function)(const emu_param *) = &emu_entry<&{function}>;\n\
             static_assert(emu_call<decltype(&{function})>::arity == {n}, \"parameters of {}\"); }} }}\n\
             extern \"C\" {{ __attribute__((visibility(\"default\"))) extern const emu_kernel emu_kernel_entry;\n\
             const emu_kernel emu_kernel_entry = {{\"{}\", msl::emu_function, emu_params, {n}, {}}}; }}\n",
            self.source, k.params, k.name, k.name, k.max_threads
        )
    }

    /// The file with a use of every kernel, to be checked and not compiled.
    pub fn with_all_kernels(&self) -> String {
        let mut out = format!(
            "{}namespace msl {{ namespace {{ using namespace metal;\n",
            self.source
        );
        for (n, k) in self.kernels.iter().enumerate() {
            out += &format!("auto emu_use_{n} = &{};\n", k.function);
        }
        out + "} }\n"
    }
}
