//! A kernel call as data: pure code says what the GPU is told, one file encodes it ([`metal`](super) behind the feature), and
//! the tests run the very same value on a CPU.
//!
//! A [`Plan`] is what an op hands over: launches in order, the outputs they fill and the scratch between them. It names
//! memory by [`Place`]; whoever runs it binds the operands' buffers. Offsets and strides are in the plan, so an [`Operand`]
//! that a kernel cannot address is an error of the builder.

use std::borrow::Cow;
use std::fmt::Debug;

use candle_core::{DType, Tensor};

pub use super::operand::Operand;
use super::Context;
use crate::error::{Error, Result};

/// Threads that a threadgroup may have on every Apple GPU.
pub const MAX_THREADS: usize = 1024;
/// Bytes of threadgroup memory on every Apple GPU.
pub const MAX_THREADGROUP_MEMORY: usize = 32 << 10;
/// Bytes that one argument may have by value.
pub const MAX_BYTES: usize = 4096;

/// A `.metal` file, compiled once per device.
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct Source {
    /// Its name below `metal/`.
    pub file: &'static str,
    text: &'static str,
}

/// Headers that a source may include.
const HEADERS: [(&str, &str); 2] = [
    ("common.h", include_str!("../../metal/common.h")),
    ("matmul.h", include_str!("../../metal/matmul.h")),
];

impl Source {
    pub(crate) const fn new(file: &'static str, text: &'static str) -> Self {
        Self { file, text }
    }

    /// The text with its `#include "…"` lines replaced: a run-time compilation finds no files.
    pub fn text(&self) -> String {
        inlined(self.text, &mut vec![])
    }
}

fn inlined(text: &str, seen: &mut Vec<&'static str>) -> String {
    let mut out = String::with_capacity(text.len());
    for line in text.lines().filter(|l| *l != "#pragma once") {
        let name = line
            .strip_prefix("#include \"")
            .and_then(|l| l.strip_suffix('"'));
        match name.and_then(|n| HEADERS.iter().find(|h| h.0 == n)) {
            Some((name, _)) if seen.contains(name) => {}
            Some((name, header)) => {
                seen.push(name);
                out.push_str(&inlined(header, seen));
            }
            None => out.push_str(line),
        }
        out.push('\n');
    }
    out
}

/// The value of a function constant.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Constant {
    /// `bool`
    Bool(bool),
    /// `ushort`
    U16(u16),
    /// `float`
    F32(f32),
}

/// Memory that a plan reads or writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// The n-th operand: read only.
    Input(usize),
    /// The n-th result.
    Output(usize),
    /// The n-th buffer between launches, uninitialised at first.
    Scratch(usize),
}

/// What `[[buffer(i)]]` is bound to.
#[derive(Clone, Debug, PartialEq)]
pub enum Argument {
    /// Read from that many bytes past the buffer's start on.
    Read(Place, usize),
    /// Written, or read and written, from that many bytes past the buffer's start on.
    Write(Place, usize),
    /// By value.
    Bytes(Vec<u8>),
}

/// How many threads run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grid {
    /// Threads; threadgroups at the edge are smaller.
    Threads([usize; 3]),
    /// Whole threadgroups.
    Threadgroups([usize; 3]),
}

/// One dispatch.
#[derive(Clone, Debug)]
pub struct Launch {
    /// Where the kernel is.
    pub source: &'static Source,
    /// Its host name.
    pub kernel: Cow<'static, str>,
    /// Macros that leave out the instances that this launch does not need: a library is compiled once per set.
    pub defines: Vec<(&'static str, usize)>,
    /// Function constants by index.
    pub constants: Vec<(usize, Constant)>,
    /// Arguments by index.
    pub arguments: Vec<(usize, Argument)>,
    /// Threads or threadgroups.
    pub grid: Grid,
    /// Threads per threadgroup.
    pub threadgroup: [usize; 3],
    /// Bytes of `[[threadgroup(i)]]`, by i.
    pub threadgroup_memory: Vec<usize>,
}

impl Launch {
    pub(crate) fn new(source: &'static Source, kernel: impl Into<Cow<'static, str>>) -> Self {
        Self {
            source,
            kernel: kernel.into(),
            defines: vec![],
            constants: vec![],
            arguments: vec![],
            grid: Grid::Threadgroups([0; 3]),
            threadgroup: [1; 3],
            threadgroup_memory: vec![],
        }
    }

    pub(crate) fn define(mut self, name: &'static str, value: usize) -> Self {
        self.defines.push((name, value));
        self
    }

    /// What is compiled for it.
    pub fn text(&self) -> String {
        let lines = self
            .defines
            .iter()
            .map(|(n, v)| format!("#define {n} {v}\n"));
        lines.chain([self.source.text()]).collect()
    }

    pub(crate) fn constant(mut self, index: usize, value: Constant) -> Self {
        self.constants.push((index, value));
        self
    }

    /// The operand `n`, from its first element on.
    pub(crate) fn input(mut self, index: usize, n: usize, operand: &Operand) -> Self {
        let read = Argument::Read(Place::Input(n), operand.offset_bytes());
        self.arguments.push((index, read));
        self
    }

    pub(crate) fn read(mut self, index: usize, place: Place) -> Self {
        self.arguments.push((index, Argument::Read(place, 0)));
        self
    }

    pub(crate) fn write(mut self, index: usize, place: Place) -> Self {
        self.arguments.push((index, Argument::Write(place, 0)));
        self
    }

    /// Parameters by value; see [`Params`].
    pub(crate) fn params(mut self, index: usize, params: Params) -> Self {
        self.arguments.push((index, Argument::Bytes(params.0)));
        self
    }

    pub(crate) fn threads(mut self, grid: [usize; 3], threadgroup: [usize; 3]) -> Self {
        (self.grid, self.threadgroup) = (Grid::Threads(grid), threadgroup);
        self
    }

    pub(crate) fn threadgroups(mut self, grid: [usize; 3], threadgroup: [usize; 3]) -> Self {
        (self.grid, self.threadgroup) = (Grid::Threadgroups(grid), threadgroup);
        self
    }

    /// One more `[[threadgroup(i)]]` argument.
    #[allow(dead_code)] // Kernels so far declare theirs inside.
    pub(crate) fn threadgroup_memory(mut self, bytes: usize) -> Self {
        self.threadgroup_memory.push(bytes.next_multiple_of(16));
        self
    }

    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        let (Grid::Threads(g) | Grid::Threadgroups(g)) = self.grid;
        g.contains(&0)
    }

    /// The limits that hold on every Apple GPU.
    pub fn check(&self) -> Result<()> {
        let wrong =
            |what: String| Err(Error::argument("metal", format!("{}: {what}", self.kernel)));
        let threads: usize = self.threadgroup.iter().product();
        if threads == 0 || threads > MAX_THREADS {
            return wrong(format!("{threads} threads in a threadgroup"));
        }
        let memory: usize = self.threadgroup_memory.iter().sum();
        if memory > MAX_THREADGROUP_MEMORY {
            return wrong(format!("{memory} bytes of threadgroup memory"));
        }
        for (index, argument) in &self.arguments {
            match argument {
                Argument::Bytes(b) if b.len() > MAX_BYTES => {
                    return wrong(format!("{} bytes by value in buffer({index})", b.len()));
                }
                Argument::Write(Place::Input(n), _) => {
                    return wrong(format!("buffer({index}) writes to operand {n}"));
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// Parameters by value, field by field as in the kernel's `struct` of 4-byte fields.
#[derive(Default)]
pub(crate) struct Params(Vec<u8>);

impl Params {
    /// A `uint`. Sizes that do not fit are caught by [`Operand::new`].
    pub(crate) fn u32(mut self, v: usize) -> Self {
        self.0.extend((v as u32).to_le_bytes());
        self
    }

    pub(crate) fn f32(mut self, v: f32) -> Self {
        self.0.extend(v.to_le_bytes());
        self
    }

    pub(crate) fn f32s(self, v: impl IntoIterator<Item = f32>) -> Self {
        v.into_iter().fold(self, Self::f32)
    }
}

/// What a plan returns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    /// Its shape; contiguous.
    pub shape: Vec<usize>,
    /// Its dtype.
    pub dtype: DType,
}

/// An op's launches, in order.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    /// The launches.
    pub launches: Vec<Launch>,
    /// The results.
    pub outputs: Vec<Output>,
    /// Bytes of the buffers between launches.
    pub scratch: Vec<usize>,
}

impl Plan {
    pub(crate) fn output(&mut self, shape: &[usize], dtype: DType) -> Place {
        let shape = shape.to_vec();
        self.outputs.push(Output { shape, dtype });
        Place::Output(self.outputs.len() - 1)
    }

    pub(crate) fn scratch(&mut self, bytes: usize) -> Place {
        self.scratch.push(bytes);
        Place::Scratch(self.scratch.len() - 1)
    }

    pub(crate) fn launch(&mut self, launch: Launch) {
        if !launch.is_empty() {
            self.launches.push(launch);
        }
    }

    /// [`Launch::check`] of all launches, and that no buffer has more elements than kernels can count. ([`Operand::new`] does it for
    /// the operands.)
    pub fn check(&self) -> Result<()> {
        let most = u32::MAX as usize;
        let name = || self.launches.first().map_or("", |l| &l.kernel);
        let elements = |o: &Output| {
            let mut sizes = o.shape.iter();
            sizes.try_fold(1usize, |all, d| all.checked_mul(*d))
        };
        if let Some(o) = (self.outputs.iter()).find(|o| elements(o).is_none_or(|n| n > most)) {
            let what = format!(
                "{}: a result of shape {:?} has more than 2^32 elements; split the call",
                name(),
                o.shape
            );
            return Err(Error::argument("metal", what));
        }
        if let Some(bytes) = self.scratch.iter().find(|bytes| **bytes / 4 > most) {
            let what = format!(
                "{}: {bytes} bytes between launches are more than 2^32 numbers; split the call",
                name()
            );
            return Err(Error::argument("metal", what));
        }
        self.launches.iter().try_for_each(Launch::check)
    }
}

/// Runs plans on tensors in the CPU's memory, in place of the CPU kernels: the tests' emulator. See
/// [`Context::with_launcher`].
pub trait Launcher: Debug + Send + Sync {
    /// Runs the launches in order and returns the outputs. A plan's offsets count from the start of an operand's storage.
    fn run(&self, plan: &Plan, operands: &[&Tensor]) -> Result<Vec<Tensor>>;
}

/// Whether ops on `x` run as plans.
pub(crate) fn wanted(cx: &Context, x: &Tensor) -> bool {
    match x.device() {
        candle_core::Device::Metal(_) => true,
        candle_core::Device::Cpu => cx.launcher().is_some(),
        _ => false,
    }
}

/// Runs a plan where its operands are.
pub(crate) fn run(cx: &Context, plan: &Plan, operands: &[&Tensor]) -> Result<Vec<Tensor>> {
    plan.check()?;
    match (cx.launcher(), operands.first().map(|x| x.device())) {
        (Some(launcher), Some(candle_core::Device::Cpu)) => launcher.run(plan, operands),
        #[cfg(feature = "metal")]
        (_, Some(candle_core::Device::Metal(device))) => super::metal::run(device, plan, operands),
        _ => Err(Error::argument(
            "metal",
            "this build has no kernels for the tensor's device; the feature `metal` brings them",
        )),
    }
}

/// Runs a plan on a Metal device. Its offsets count from the start of an operand's buffer.
#[cfg(feature = "metal")]
pub fn run_on_device(
    device: &candle_core::MetalDevice,
    plan: &Plan,
    operands: &[&Tensor],
) -> Result<Vec<Tensor>> {
    plan.check()?;
    super::metal::run(device, plan, operands)
}

/// Runs a plan with one output.
pub(crate) fn run_one(cx: &Context, plan: &Plan, operands: &[&Tensor]) -> Result<Tensor> {
    let mut outputs = run(cx, plan, operands)?;
    outputs
        .pop()
        .ok_or_else(|| Error::argument("metal", "a plan without output"))
}

/// The suffix of a kernel's name for activations of that dtype.
pub(crate) fn suffix(dtype: DType) -> &'static str {
    match dtype {
        DType::BF16 => "bf16",
        DType::F16 => "f16",
        _ => "f32",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn includes_are_inlined() {
        let source = Source::new("x.metal", "#include \"common.h\"\nkernel void x() {}\n");
        let text = source.text();
        assert!(text.contains("#include <metal_stdlib>") && !text.contains("common.h"));
        assert!(text.ends_with("kernel void x() {}\n") && !text.contains("#pragma once"));
    }
}
