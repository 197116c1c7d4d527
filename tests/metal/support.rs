//! Runs the ops' Metal launches on the emulator: a [`Context`] that does so, and comparisons.
#![allow(dead_code)]

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::Arc;

use candle_core::{CpuStorage, DType, Device, Storage, Tensor};
#[cfg(feature = "metal")]
use candle_specprefill::ops::launch::run_on_device;
use candle_specprefill::ops::launch::{Argument, Constant, Grid, Launch, Launcher, Place, Plan};
use candle_specprefill::ops::Context;
use candle_specprefill::Result;
use half::{bf16, f16};
use metal_emulator as emu;

use super::record;
pub use metal_emulator::Mode;

pub const MODES: [Mode; 2] = [Mode::Fast, Mode::Checked];

/// A context that runs launches on the emulator in that mode; with the feature `metal` on a Mac, on the real device.
pub fn emulated(mode: Mode) -> Context {
    #[cfg(all(feature = "metal", target_vendor = "apple"))]
    let launcher = {
        let _ = mode;
        OnDevice
    };
    #[cfg(not(all(feature = "metal", target_vendor = "apple")))]
    let launcher = Emulator {
        mode,
        seed: AtomicU32::new(1),
    };
    Context::with_launcher(Arc::new(launcher))
}

/// Whether launches can run: on a Mac's own device, or on the emulator.
pub fn can_run(what: &str) -> bool {
    #[cfg(feature = "metal")]
    if cfg!(target_vendor = "apple") {
        return gpu_can(what);
    }
    metal_emulator::available(what)
}

/// Whether the machine has a GPU of M1's family or later, which have simdgroup matrices. Continuous integration often has a virtual one.
#[cfg(feature = "metal")]
fn gpu_can(what: &str) -> bool {
    use objc2_metal::{MTLDevice, MTLGPUFamily};
    use std::io::Write;
    let device = candle_metal_kernels::metal::Device::system_default();
    let can = device.is_some_and(|d| d.as_ref().supportsFamily(MTLGPUFamily::Apple7));
    if !can {
        // Not eprintln!, which a passing test swallows.
        let _ = writeln!(
            std::io::stderr(),
            "\n*** SKIPPED: {what}: no GPU of family Apple 7 or later ***\n"
        );
    }
    can
}

/// Skips a test, loudly, where there is neither a Metal device nor a clang.
#[macro_export]
macro_rules! needs_clang {
    () => {
        if !$crate::support::can_run(module_path!()) {
            return;
        }
    };
}

/// Every call must have run as a launch.
pub fn assert_all_emulated(cx: &Context) {
    for route in cx.routes().snapshot().keys() {
        assert!(route.contains("/metal"), "{route} left the Metal path");
    }
    assert!(!cx.routes().fell_back());
}

/// Runs plans for CPU tensors on the machine's GPU.
#[cfg(feature = "metal")]
#[derive(Debug)]
pub struct OnDevice;

#[cfg(feature = "metal")]
impl Launcher for OnDevice {
    fn run(&self, plan: &Plan, operands: &[&Tensor]) -> Result<Vec<Tensor>> {
        static DEVICE: std::sync::OnceLock<Device> = std::sync::OnceLock::new();
        let device = DEVICE.get_or_init(|| Device::new_metal(0).expect("a Metal device"));
        // Whole storages, so that a plan's offsets hold.
        let whole = |x: &&Tensor| {
            let bytes = bytes(x);
            let count = bytes.len() / x.dtype().size_in_bytes();
            tensor(&bytes, x.dtype(), &[count])?.to_device(device)
        };
        let operands = (operands.iter().map(whole)).collect::<candle_core::Result<Vec<_>>>()?;
        let operands: Vec<&Tensor> = operands.iter().collect();
        let outputs = run_on_device(device.as_metal_device()?, plan, &operands)?;
        let back = outputs.iter().map(|y| y.to_device(&Device::Cpu));
        Ok(back.collect::<candle_core::Result<Vec<_>>>()?)
    }
}

#[derive(Debug)]
pub struct Emulator {
    mode: Mode,
    seed: AtomicU32,
}

impl Launcher for Emulator {
    fn run(&self, plan: &Plan, operands: &[&Tensor]) -> Result<Vec<Tensor>> {
        let mut memory: Vec<(Place, Vec<u8>, bool)> = vec![];
        for (n, x) in operands.iter().enumerate() {
            memory.push((Place::Input(n), bytes(x), true));
        }
        for (n, o) in plan.outputs.iter().enumerate() {
            let len = o.shape.iter().product::<usize>() * o.dtype.size_in_bytes();
            memory.push(unwritten(plan, Place::Output(n), len));
        }
        for (n, len) in plan.scratch.iter().enumerate() {
            memory.push(unwritten(plan, Place::Scratch(n), *len));
        }
        for launch in &plan.launches {
            self.launch(launch, &mut memory)?;
        }
        let outputs = memory.iter().filter(|m| matches!(m.0, Place::Output(_)));
        let outputs = outputs.zip(&plan.outputs);
        outputs
            .map(|(m, o)| Ok(tensor(&m.1, o.dtype, &o.shape)?))
            .collect()
    }
}

impl Emulator {
    fn launch(&self, launch: &Launch, memory: &mut [(Place, Vec<u8>, bool)]) -> Result<()> {
        let before = record::before(launch, memory);
        let file = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
            .join("metal")
            .join(launch.source.file);
        let constants: Vec<(String, emu::Constant)> = launch
            .constants
            .iter()
            .map(|(i, c)| {
                let c = match c {
                    Constant::Bool(v) => emu::Constant::Bool(*v),
                    Constant::U16(v) => emu::Constant::U16(*v),
                    Constant::F32(v) => emu::Constant::F32(*v),
                };
                (i.to_string(), c)
            })
            .collect();
        let constants: Vec<_> = constants.iter().map(|(i, c)| (i.as_str(), *c)).collect();
        let defines = launch.defines.iter().map(|(n, v)| format!("{n}={v}"));
        let options = emu::Options {
            defines: defines.collect(),
            ..Default::default()
        };
        let library = emu::Library::compile_with(file, &constants, &options).map_err(failed)?;
        let mut buffers = vec![];
        for (index, argument) in &launch.arguments {
            if let Argument::Bytes(b) = argument {
                buffers.push(emu::Buffer::values(*index, b));
            }
        }
        for (place, bytes, filled) in memory.iter_mut() {
            let uses: Vec<(usize, bool, usize)> = launch
                .arguments
                .iter()
                .filter_map(|(index, a)| match a {
                    Argument::Read(p, offset) if p == place => Some((*index, false, *offset)),
                    Argument::Write(p, offset) if p == place => Some((*index, true, *offset)),
                    _ => None,
                })
                .collect();
            let Some((first, _, offset)) = uses.first().copied() else {
                continue;
            };
            let writes = uses.iter().any(|u| u.1);
            assert!(
                *filled || uses.iter().any(|u| u.1),
                "{}: reads {place:?}, which nobody wrote",
                launch.kernel
            );
            let data = match (writes, &filled) {
                (true, true) => emu::Buffer::read_write(first, bytes.as_mut_slice()),
                (true, false) => emu::Buffer::write(first, bytes.as_mut_slice()),
                _ => emu::Buffer::read(first, bytes.as_slice()),
            };
            *filled = true;
            buffers.push(data.at(offset));
            let others = uses.iter().skip(1);
            buffers.extend(others.map(|(i, _, offset)| emu::Buffer::same(*i, first, *offset)));
        }
        let mut run = emu::Launch {
            kernel: &launch.kernel,
            buffers,
            grid: match launch.grid {
                Grid::Threads(g) => emu::Grid::Threads(g),
                Grid::Threadgroups(g) => emu::Grid::Threadgroups(g),
            },
            threadgroup: launch.threadgroup,
            threadgroup_memory: launch.threadgroup_memory.clone(),
            seed: self.seed.fetch_add(1, Ordering::Relaxed),
            ..emu::Launch::default()
        };
        library.run(&mut run, self.mode).map_err(failed)?;
        if let Some(before) = before {
            record::after(launch, before, memory);
        }
        Ok(())
    }
}

/// Memory for a launch to fill. Where several launches share the work, it holds NaN and no launch has to write all of it.
fn unwritten(plan: &Plan, place: Place, len: usize) -> (Place, Vec<u8>, bool) {
    let writes = |l: &&Launch| {
        let mut arguments = l.arguments.iter();
        arguments.any(|(_, a)| matches!(a, Argument::Write(p, _) if *p == place))
    };
    let shared = plan.launches.iter().filter(writes).count() > 1;
    (place, vec![0xff; len], shared)
}

fn failed(e: impl std::fmt::Display) -> candle_specprefill::Error {
    candle_core::Error::Msg(e.to_string()).into()
}

/// The whole storage behind a tensor, so that offsets mean what they mean on the device.
fn bytes(x: &Tensor) -> Vec<u8> {
    let (storage, _) = x.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else {
        panic!("not a CPU tensor");
    };
    match storage {
        CpuStorage::F32(v) => emu::bytes_of(v).to_vec(),
        CpuStorage::BF16(v) => emu::bytes_of(v).to_vec(),
        CpuStorage::F16(v) => emu::bytes_of(v).to_vec(),
        CpuStorage::U32(v) => emu::bytes_of(v).to_vec(),
        CpuStorage::I64(v) => emu::bytes_of(v).to_vec(),
        CpuStorage::U8(v) => v.clone(),
        other => panic!("{:?} has no kernels", other),
    }
}

fn tensor(bytes: &[u8], dtype: DType, shape: &[usize]) -> candle_core::Result<Tensor> {
    fn numbers<T: emu::Plain + Default>(bytes: &[u8]) -> Vec<T> {
        let mut v = vec![T::default(); bytes.len() / std::mem::size_of::<T>()];
        emu::bytes_of_mut(&mut v).copy_from_slice(bytes);
        v
    }
    let device = &Device::Cpu;
    Ok(match dtype {
        DType::BF16 => Tensor::from_vec(numbers::<bf16>(bytes), shape, device)?,
        DType::F16 => Tensor::from_vec(numbers::<f16>(bytes), shape, device)?,
        DType::U32 => Tensor::from_vec(numbers::<u32>(bytes), shape, device)?,
        DType::I64 => Tensor::from_vec(numbers::<i64>(bytes), shape, device)?,
        DType::F32 => Tensor::from_vec(numbers::<f32>(bytes), shape, device)?,
        other => panic!("{other:?} is no output"),
    })
}
