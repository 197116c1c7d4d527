//! What a launch consists of and what comes back.
use std::fmt;

/// A plain number type whose slices may be bound as bytes.
///
/// # Safety
/// No padding, and every bit pattern is a value.
pub unsafe trait Plain: Copy + 'static {}
macro_rules! plain { ($($t:ty),*) => { $(unsafe impl Plain for $t {})* } }
plain!(
    u8,
    i8,
    u16,
    i16,
    u32,
    i32,
    u64,
    i64,
    f32,
    half::f16,
    half::bf16
);

/// The bytes of a slice of numbers.
pub fn bytes_of<T: Plain>(v: &[T]) -> &[u8] {
    // SAFETY: Plain types have no padding.
    unsafe { std::slice::from_raw_parts(v.as_ptr().cast(), std::mem::size_of_val(v)) }
}

/// The bytes of a slice of numbers, to write to.
pub fn bytes_of_mut<T: Plain>(v: &mut [T]) -> &mut [u8] {
    // SAFETY: Plain types have no padding and take every bit pattern.
    unsafe { std::slice::from_raw_parts_mut(v.as_mut_ptr().cast(), std::mem::size_of_val(v)) }
}

/// A binding of an argument table entry, `[[buffer(index)]]`.
#[derive(Debug)]
pub struct Buffer<'a> {
    pub index: usize,
    pub data: Data<'a>,
    /// Where the kernel's pointer starts, in bytes from the beginning of the data (`setBuffer:offset:`).
    pub offset: usize,
}

/// The memory behind a binding.
#[derive(Debug)]
pub enum Data<'a> {
    /// Small constants by value (`setBytes`).
    Bytes(Vec<u8>),
    /// Read only: a write is a fault.
    Read(&'a [u8]),
    /// Output: starts uninitialised. In checked mode every byte must be written, and none read before.
    Write(&'a mut [u8]),
    /// Read and written; what the kernel leaves alone keeps its value.
    ReadWrite(&'a mut [u8]),
    /// The same memory as the buffer bound at that index.
    Same(usize),
}

impl<'a> Buffer<'a> {
    fn new(index: usize, data: Data<'a>) -> Self {
        Self {
            index,
            data,
            offset: 0,
        }
    }
    /// See [`Data::Read`].
    pub fn read<T: Plain>(index: usize, data: &'a [T]) -> Self {
        Self::new(index, Data::Read(bytes_of(data)))
    }
    /// See [`Data::Write`].
    pub fn write<T: Plain>(index: usize, data: &'a mut [T]) -> Self {
        Self::new(index, Data::Write(bytes_of_mut(data)))
    }
    /// See [`Data::ReadWrite`].
    pub fn read_write<T: Plain>(index: usize, data: &'a mut [T]) -> Self {
        Self::new(index, Data::ReadWrite(bytes_of_mut(data)))
    }
    /// One number by value (`setBytes`).
    pub fn value<T: Plain>(index: usize, value: T) -> Self {
        Self::values(index, &[value])
    }
    /// Several numbers by value (`setBytes`): a parameter struct, field by field or as its bytes.
    pub fn values<T: Plain>(index: usize, values: &[T]) -> Self {
        Self::new(index, Data::Bytes(bytes_of(values).to_vec()))
    }
    /// The memory of the buffer bound at `other`, from `offset` bytes on.
    pub fn same(index: usize, other: usize, offset: usize) -> Self {
        Self {
            index,
            data: Data::Same(other),
            offset,
        }
    }
    /// The same binding, from `offset` bytes on.
    pub fn at(mut self, offset: usize) -> Self {
        self.offset = offset;
        self
    }
}

/// The size of a dispatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grid {
    /// `dispatchThreadgroups`
    Threadgroups([usize; 3]),
    /// `dispatchThreads`: threadgroups at the edge may be smaller.
    Threads([usize; 3]),
}

impl Default for Grid {
    fn default() -> Self {
        Grid::Threadgroups([1, 1, 1])
    }
}

/// One dispatch of a kernel.
#[derive(Debug)]
pub struct Launch<'a> {
    /// The kernel's host name.
    pub kernel: &'a str,
    pub buffers: Vec<Buffer<'a>>,
    pub grid: Grid,
    /// Threads per threadgroup, at most 1024 in all.
    pub threadgroup: [usize; 3],
    /// Bytes for `[[threadgroup(i)]]`, by i.
    pub threadgroup_memory: Vec<usize>,
    /// Other than 0: simdgroups of a threadgroup run in an order drawn from it.
    pub seed: u32,
    /// Lanes of a simdgroup may wait at different simd operations at once. Legal in Metal, and nearly always a mistake.
    pub allow_divergent_simd: bool,
}

impl Default for Launch<'_> {
    fn default() -> Self {
        Self {
            kernel: "",
            buffers: vec![],
            grid: Grid::default(),
            threadgroup: [1, 1, 1],
            threadgroup_memory: vec![],
            seed: 0,
            allow_divergent_simd: false,
        }
    }
}

/// How to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    /// Optimised, threadgroups in parallel. Finds barrier and simdgroup divergence, inactive lanes and wrong bindings.
    Fast,
    /// Every access is checked, one threadgroup after the other.
    Checked,
}

/// The value of a function constant.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Constant {
    Bool(bool),
    I16(i16),
    U16(u16),
    I32(i32),
    U32(u32),
    I64(i64),
    U64(u64),
    F16(half::f16),
    F32(f32),
}

impl Constant {
    /// Size in bytes, bits, and the name of the MSL type.
    pub(crate) fn parts(self) -> (u32, u64, &'static str) {
        match self {
            Constant::Bool(v) => (1, v.into(), "bool"),
            Constant::I16(v) => (2, v as u16 as u64, "short"),
            Constant::U16(v) => (2, v.into(), "ushort"),
            Constant::I32(v) => (4, v as u32 as u64, "int"),
            Constant::U32(v) => (4, v.into(), "uint"),
            Constant::I64(v) => (8, v as u64, "long"),
            Constant::U64(v) => (8, v, "ulong"),
            Constant::F16(v) => (2, v.to_bits().into(), "half"),
            Constant::F32(v) => (4, v.to_bits().into(), "float"),
        }
    }
}

macro_rules! constant_from { ($($t:ty => $v:ident),*) => { $(impl From<$t> for Constant { fn from(v: $t) -> Self { Constant::$v(v) } })* } }
constant_from!(bool => Bool, i16 => I16, u16 => U16, i32 => I32, u32 => U32, i64 => I64, u64 => U64, half::f16 => F16, f32 => F32);

/// What a run did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    pub threadgroups: u64,
    /// Memory accesses that were checked (0 in fast mode).
    pub accesses: u64,
    /// Times that a thread had to wait for others.
    pub waits: u64,
    /// Most threadgroup memory in use, in bytes.
    pub threadgroup_bytes: u64,
}

/// What kind of mistake a [`Fault`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FaultKind {
    /// Two threads use the same bytes, one writes, and no barrier that fences this memory lies between.
    Race,
    /// A barrier that not all threads reach.
    BarrierDivergence,
    /// Lanes of a simdgroup at different simd operations.
    SimdDivergence,
    OutOfBounds,
    /// A read of threadgroup memory or of an output that nobody has written.
    Uninitialised,
    Misaligned,
    /// More than 32 KiB of threadgroup memory.
    ThreadgroupMemory,
    /// A shuffle from a lane that takes no part, or a simdgroup matrix operation without all 32 lanes.
    InactiveLane,
    /// A buffer or constant that is missing, too small or of another type; a launch that Metal would refuse.
    Binding,
    /// A write to a buffer bound for reading.
    ReadOnly,
    /// Bytes of an output that were never written.
    Unwritten,
    /// A thread's private memory overflowed.
    Stack,
    /// A shift by the type's width or more, or an integer division by zero.
    Arithmetic,
    /// The kernel could not be compiled for this mode.
    Compile,
}

/// A mistake in a kernel or a launch.
#[derive(Clone, Debug)]
pub struct Fault {
    pub kind: FaultKind,
    pub kernel: Box<str>,
    /// `file.metal:line`, where known.
    pub place: Option<Box<str>>,
    pub message: Box<str>,
    /// Thread in threadgroup and threadgroup in grid.
    pub thread: Option<([u32; 3], [u32; 3])>,
    /// Further faults of the same run.
    pub others: Vec<Fault>,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}: ", self.kernel)?;
        if let Some(p) = &self.place {
            write!(f, "{p}: ")?;
        }
        write!(f, "{}", self.message)?;
        if let Some(([x, y, z], [gx, gy, gz])) = self.thread {
            write!(f, " [thread {x},{y},{z} of threadgroup {gx},{gy},{gz}]")?;
        }
        for o in &self.others {
            write!(f, "\n  also {o}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Fault {}
