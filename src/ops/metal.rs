//! Encodes a [`Plan`] on candle's Metal device. Libraries and pipelines are compiled once per device and kept.
//!
//! candle runs all kernels through one concurrent encoder without hazard tracking and orders them by what is bound as input
//! and as output, so reads and writes are bound as such. The guard of the encoder holds the device's lock: all buffers
//! are made before it is taken, and nothing else happens while it is held.
//!
//! Faults of candle 0.11.1's Metal path, by its issues or its source, and what this crate does. Read, not run: see the README.
//!
//! | fault | here |
//! |---|---|
//! | objects that calls autorelease live as long as the thread (#2271) | a pool around every pass and cycle, every [`run`] and every upload ([`memory::pooled`]) |
//! | the pool of buffers rounds up to powers of two (#3464, #3197) | what stays (weights, keys and values) is uploaded, which keeps its size ([`memory::place`]); the rest goes at each read-back |
//! | `new_private_buffer` has the right size, but the residency set keeps it for ever | not used |
//! | an upload of a view takes the whole storage | [`memory::place`] copies the view first |
//! | a read-back reports errors of the last command buffer alone | [`memory::settle`] when a prompt is read, scored, or a text has ended, not after every cycle: candle's wait forgets the fences of other threads' encoders |
//! | a read-back waits for the GPU | greedy tokens, embeddings and experts of a decode pass are found on the device; one read-back of a few numbers a pass |
//! | `arg_sort` is wrong above 1024 columns (#2570) | no sort on a device; `argmax` and `moe::route` are kernels of this crate |
//! | `argmax` says nothing of NaN, and its ties are not documented | the first of equals; a NaN is reported |
//! | matmul refuses strided operands (#1948 and others); quantized ones are slow at 2 to 8 rows and misread f16 (#3898, #3856) | own kernels; candle's matmul only for plain weights whose K is no multiple of 8, counted as a fallback |
//! | RoPE tables in bf16, no f64 to f16 cast (#3520, #3461) | angles are f32 inside the kernel; no f64 tensor on a device |
//! | RMSNorm wants weights of x's dtype | own kernel, f32 weights |
//! | in-place ops on one storage are refused, or hang before 0.11.1 (#3227) | kernels write to new buffers; keys and values are set from other tensors |
//! | `candle-nn` without its `metal` feature has no kernels (#2184) | the feature `metal` switches it on |
//! | a cache of pipelines that mixes libraries (#3760) | keys are device, file, kernel and constants; a kernel's text is the same in every library of its file |
//! | threadgroup memory in multiples of 16 bytes, 32 KiB in all; pipelines that take fewer threads than asked | [`Launch::check`] and `Launch::threadgroup_memory`; an error, not a wrong result |
//! | names like `bfloat16_t` clash in newer toolchains (#3321) | plain `half` and `bfloat`, and those only from MSL 3.1 on |
//! | strided reductions of five dimensions (#3873) | none on a device |

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use candle_core::backend::BackendStorage;
use candle_core::metal_backend::{DeviceId, MetalDevice};
use candle_core::op::BackpropOp;
use candle_core::{DType, MetalError, MetalStorage, Storage, Tensor};
use candle_metal_kernels::metal::{
    Buffer, ComputeCommandEncoder, ComputePipeline, ConstantValues, Library, Value,
};
use objc2_metal::{MTLCompileOptions, MTLSize};

use super::launch::{Argument, Constant, Grid, Launch, Place, Plan};
use super::memory;
use crate::error::{Error, Result};

/// Device, file and macros.
type LibraryKey = (DeviceId, &'static str, Vec<(&'static str, usize)>);
/// Device, file, kernel, and constants by index and bits. A kernel's text does not depend on the macros.
type Key = (DeviceId, &'static str, String, Vec<(usize, u64)>);

#[derive(Default)]
struct Cache {
    libraries: HashMap<LibraryKey, Library>,
    pipelines: HashMap<Key, ComputePipeline>,
}

fn metal(e: impl Into<MetalError>) -> Error {
    Error::Candle(e.into().into())
}

/// The pipeline of a launch. The lock is held while it is compiled, so that no two threads compile the same.
fn pipeline(device: &MetalDevice, launch: &Launch) -> Result<ComputePipeline> {
    static CACHE: OnceLock<Mutex<Cache>> = OnceLock::new();
    let bits = |c: &(usize, Constant)| match c.1 {
        Constant::Bool(v) => (c.0, v as u64),
        Constant::U16(v) => (c.0, 1 << 32 | v as u64),
        Constant::F32(v) => (c.0, 2 << 32 | v.to_bits() as u64),
    };
    let constants = launch.constants.iter().map(bits).collect();
    let file = launch.source.file;
    let key = (device.id(), file, launch.kernel.to_string(), constants);
    let mut cache = CACHE
        .get_or_init(Default::default)
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    if let Some(pipeline) = cache.pipelines.get(&key) {
        return Ok(pipeline.clone());
    }
    let library_key = (device.id(), file, launch.defines.clone());
    let library = match cache.libraries.get(&library_key) {
        Some(library) => library.clone(),
        None => {
            let options = MTLCompileOptions::new();
            // Fast math reorders sums, and then rows differ. Deprecated, but the only switch before macOS 15.
            #[allow(deprecated)]
            options.setFastMathEnabled(false);
            let library = device
                .metal_device()
                .new_library_with_source(&launch.text(), Some(&options))
                .map_err(metal)?;
            cache.libraries.insert(library_key, library.clone());
            library
        }
    };
    let value = |c: &(usize, Constant)| match c.1 {
        Constant::Bool(v) => (c.0, Value::Bool(v)),
        Constant::U16(v) => (c.0, Value::U16(v)),
        Constant::F32(v) => (c.0, Value::F32(v)),
    };
    let constants = ConstantValues::new(launch.constants.iter().map(value).collect());
    let function = library
        .get_function(&launch.kernel, Some(&constants))
        .map_err(metal)?;
    let pipeline = device
        .metal_device()
        .new_compute_pipeline_state_with_function(&function)
        .map_err(metal)?;
    let (threads, most) = (
        launch.threadgroup.iter().product::<usize>(),
        pipeline.max_total_threads_per_threadgroup(),
    );
    if threads > most {
        return Err(Error::argument(
            "metal",
            format!(
                "{}: {threads} threads in a threadgroup, this GPU takes {most} for this kernel",
                launch.kernel
            ),
        ));
    }
    cache.pipelines.insert(key, pipeline.clone());
    Ok(pipeline)
}

/// A new uninitialised buffer from candle's pool; never empty, because Metal refuses that.
fn buffer(device: &MetalDevice, count: usize, dtype: DType) -> Result<Arc<Buffer>> {
    Ok(device.new_buffer(count.max(1), dtype, "specprefill")?)
}

fn size([width, height, depth]: [usize; 3]) -> MTLSize {
    MTLSize {
        width,
        height,
        depth,
    }
}

/// Runs a checked plan on `operands`, which must all be on `device`.
pub(super) fn run(device: &MetalDevice, plan: &Plan, operands: &[&Tensor]) -> Result<Vec<Tensor>> {
    memory::pooled(|| encode_all(device, plan, operands))
}

fn encode_all(device: &MetalDevice, plan: &Plan, operands: &[&Tensor]) -> Result<Vec<Tensor>> {
    let guards: Vec<_> = operands.iter().map(|x| x.storage_and_layout().0).collect();
    let mut inputs = Vec::with_capacity(operands.len());
    for guard in &guards {
        match &**guard {
            Storage::Metal(s) if s.device().id() == device.id() => inputs.push(s.buffer()),
            _ => {
                return Err(Error::argument(
                    "metal",
                    "operands on different devices; move them to one",
                ))
            }
        }
    }
    let pipelines = plan
        .launches
        .iter()
        .map(|launch| pipeline(device, launch))
        .collect::<Result<Vec<_>>>()?;
    let outputs = plan
        .outputs
        .iter()
        .map(|o| buffer(device, o.shape.iter().product(), o.dtype))
        .collect::<Result<Vec<_>>>()?;
    let scratch = plan
        .scratch
        .iter()
        .map(|bytes| buffer(device, *bytes, DType::U8))
        .collect::<Result<Vec<_>>>()?;
    {
        let place = |place: Place| -> Option<&Buffer> {
            match place {
                Place::Input(n) => inputs.get(n).copied(),
                Place::Output(n) => outputs.get(n).map(|b| &**b),
                Place::Scratch(n) => scratch.get(n).map(|b| &**b),
            }
        };
        for (launch, pipeline) in plan.launches.iter().zip(&pipelines) {
            // One guard per launch: candle counts them to decide when to commit.
            let guard = device.command_encoder()?;
            encode(guard.as_ref(), launch, pipeline, &place)?;
        }
    }
    let outputs = outputs.into_iter().zip(&plan.outputs);
    let tensor = |(buffer, o): (Arc<Buffer>, &super::launch::Output)| {
        let count = o.shape.iter().product();
        let storage = MetalStorage::new(buffer, device.clone(), count, o.dtype);
        Tensor::from_storage(
            Storage::Metal(storage),
            o.shape.as_slice(),
            BackpropOp::none(),
            false,
        )
    };
    Ok(outputs.map(tensor).collect())
}

fn encode<'a>(
    encoder: &ComputeCommandEncoder,
    launch: &Launch,
    pipeline: &ComputePipeline,
    place: &impl Fn(Place) -> Option<&'a Buffer>,
) -> Result<()> {
    let bound = |at: &Place| {
        place(*at).ok_or_else(|| {
            Error::argument("metal", format!("{}: no {at:?} to bind", launch.kernel))
        })
    };
    encoder.set_compute_pipeline_state(pipeline);
    for (index, argument) in &launch.arguments {
        match argument {
            Argument::Read(at, offset) => {
                encoder.set_input_buffer(*index, Some(bound(at)?), *offset)
            }
            Argument::Write(at, offset) => {
                encoder.set_output_buffer(*index, Some(bound(at)?), *offset)
            }
            // Metal copies the bytes at once.
            Argument::Bytes(bytes) => {
                encoder.set_bytes_directly(*index, bytes.len(), bytes.as_ptr().cast())
            }
        }
    }
    for (index, bytes) in launch.threadgroup_memory.iter().enumerate() {
        encoder.set_threadgroup_memory_length(index, *bytes);
    }
    match launch.grid {
        Grid::Threads(grid) => encoder.dispatch_threads(size(grid), size(launch.threadgroup)),
        Grid::Threadgroups(grid) => {
            encoder.dispatch_thread_groups(size(grid), size(launch.threadgroup))
        }
    }
    Ok(())
}
