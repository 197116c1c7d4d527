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
    /// The file with the entries of some kernels: only what they need gets compiled.
    pub fn with_kernels(&self, indices: &[usize]) -> String {
        let (mut out, mut table) = (self.source.clone(), String::new());
        for &n in indices {
            let k = &self.kernels[n];
            let (name, function, count) = (&k.name, &k.function, k.nparams);
            out += &format!(
                "static const emu_param emu_params_{n}[] = {{{}{{0, 0}}}};\n\
                 namespace msl {{ namespace {{ using namespace metal;\n\
                 void (*const emu_function_{n})(const emu_param *) = &emu_entry<&{function}>;\n\
                 static_assert(emu_call<decltype(&{function})>::arity == {count}, \"parameters of {name}\"); }} }}\n",
                k.params
            );
            table += &format!(
                "{{\"{name}\", msl::emu_function_{n}, emu_params_{n}, {count}, {}}},\n",
                k.max_threads
            );
        }
        out + &format!(
            "extern \"C\" {{ __attribute__((visibility(\"default\"))) extern const emu_kernel emu_kernels[];\n\
             const emu_kernel emu_kernels[] = {{\n{table}}}; }}\n"
        )
    }

    /// The file with an entry per kernel for clang's CUDA mode, against tests/metal-gpu/include.
    pub fn for_cuda(&self) -> String {
        let mut out = self.source.clone();
        for k in &self.kernels {
            out += &format!(
                "namespace msl {{ namespace {{ using namespace metal;\n\
                 extern \"C\" __attribute__((global)) void gpu_{}(emu_gpu gpu) {{\n\
                 const emu_param parameters[] = {{{}{{0, 0}}}};\n\
                 if (!emu_outside(gpu)) emu_call<decltype(&{2})>::run(&{2}, parameters, gpu);\n}} }} }}\n",
                k.name, k.params, k.function
            );
        }
        out + "#pragma clang force_cuda_host_device end\n"
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
