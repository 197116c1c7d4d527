//! Running a launch: bindings checked and copied, threadgroups spread over threads, faults named.
use crate::ffi::{RawFault, RawLaunch, Region, PARAM_THREADGROUP, READ, READ_WRITE, U3, WRITE};
use crate::launch::{Data, Fault, FaultKind, Grid, Launch, Mode, Report};
use crate::library::{Library, Loaded};
use crate::memory::Copy;
use rayon::prelude::*;
use std::ffi::{c_void, CStr};
use std::sync::Mutex;

const MAX_THREADS: usize = 1024;
const THREADGROUP_MEMORY: usize = 32 << 10;

impl Library {
    /// Runs a launch to its end. Outputs are written back also when a fault is found.
    pub fn run(&self, launch: &mut Launch, mode: Mode) -> Result<Report, Fault> {
        let fault = |kind, message: String| Fault {
            kind,
            kernel: launch.kernel.into(),
            place: None,
            message: message.into(),
            thread: None,
            others: vec![],
        };
        let missing = !self.kernels().iter().any(|k| k == launch.kernel);
        let kind = if missing {
            FaultKind::Binding
        } else {
            FaultKind::Compile
        };
        let loaded = self
            .loaded(launch.kernel, mode)
            .map_err(|e| fault(kind, e))?;
        let kernel = loaded.kernel;
        let mut raw = raw_launch(self, launch, mode).map_err(|m| fault(FaultKind::Binding, m))?;
        raw.kernel = kernel.0;
        // SAFETY: points to constant data of a library that stays loaded.
        let limit = unsafe { (*kernel.0).max_threads } as usize;
        let threads: usize = launch.threadgroup.iter().product();
        if limit != 0 && threads > limit {
            return Err(fault(FaultKind::Binding, format!("threadgroup of {threads} threads: the kernel allows {limit} (max_total_threads_per_threadgroup)")));
        }
        // SAFETY: as above.
        let params =
            unsafe { std::slice::from_raw_parts((*kernel.0).params, (*kernel.0).nparams as usize) };
        if let Some(p) = params
            .iter()
            .find(|p| p.kind == PARAM_THREADGROUP && raw.tgmem[p.index as usize] == 0)
        {
            return Err(fault(
                FaultKind::Binding,
                format!("threadgroup({}) has no length", p.index),
            ));
        }
        let dynamic: usize = launch
            .threadgroup_memory
            .iter()
            .map(|l| l.next_multiple_of(16))
            .sum();
        if dynamic > THREADGROUP_MEMORY {
            return Err(fault(
                FaultKind::ThreadgroupMemory,
                format!("threadgroup memory over 32 KiB: {dynamic} bytes"),
            ));
        }

        let copies = bind(launch, &mut raw, mode).map_err(|m| fault(FaultKind::Binding, m))?;
        let mut regions: Vec<Region> = copies.iter().map(Copy::region).collect();
        raw.regions = regions.as_mut_ptr();
        raw.nregions = regions.len() as u64;
        let groups = u64::from(raw.groups.x) * u64::from(raw.groups.y) * u64::from(raw.groups.z);
        if groups
            >= if mode == Mode::Checked {
                0xffff0
            } else {
                u64::from(u32::MAX)
            }
        {
            return Err(fault(
                FaultKind::Binding,
                format!("{groups} threadgroups are too many for this mode"),
            ));
        }
        dispatch(loaded, &mut raw, groups, mode);
        write_back(launch, &copies);
        let strayed = copies.iter().find_map(Copy::strayed);

        let mut faults: Vec<Fault> = raw.faults[..raw.nfaults as usize]
            .iter()
            .map(|f| name(loaded, launch.kernel, f))
            .collect();
        if mode == Mode::Checked && faults.is_empty() {
            for c in copies.iter().filter(|c| c.kind == WRITE) {
                if let Some((first, count)) = c.unwritten() {
                    faults.push(fault(FaultKind::Unwritten, format!("{count} of {} bytes of buffer({}) were never written, the first at byte {first}", c.len, c.index)));
                }
            }
        }
        if let (true, Some(m)) = (faults.is_empty(), strayed) {
            faults.push(fault(FaultKind::OutOfBounds, m));
        }
        if faults.is_empty() {
            return Ok(Report {
                threadgroups: groups,
                accesses: raw.accesses,
                waits: raw.switches,
                threadgroup_bytes: raw.tg_bytes,
            });
        }
        faults.sort_by_key(|f| f.kind != FaultKind::Race); // a missing barrier also shows as other faults
        let mut first = faults.remove(0);
        first.others = faults;
        Err(first)
    }
}

fn u3(v: [usize; 3], what: &str) -> Result<U3, String> {
    let f = |x: usize| u32::try_from(x).map_err(|_| format!("{what} {v:?}: too large"));
    Ok(U3 {
        x: f(v[0])?,
        y: f(v[1])?,
        z: f(v[2])?,
    })
}

fn raw_launch(library: &Library, launch: &Launch, mode: Mode) -> Result<Box<RawLaunch>, String> {
    let tg = launch.threadgroup;
    let threads = tg
        .iter()
        .try_fold(1usize, |a, &b| a.checked_mul(b))
        .unwrap_or(usize::MAX);
    if threads == 0 || threads > MAX_THREADS {
        return Err(format!(
            "threadgroup of {tg:?} threads: Metal allows 1 to {MAX_THREADS}"
        ));
    }
    let (groups, grid) = match launch.grid {
        Grid::Threadgroups(g) => (g, [0, 1, 2].map(|i| g[i] * tg[i])),
        Grid::Threads(g) => ([0, 1, 2].map(|i| g[i].div_ceil(tg[i])), g),
    };
    if groups.contains(&0) {
        return Err(format!("grid {:?} is empty", launch.grid));
    }
    // SAFETY: plain numbers and pointers; zeros are a value of each.
    let mut raw: Box<RawLaunch> = unsafe { Box::new(std::mem::zeroed()) };
    (raw.groups, raw.grid, raw.tg) = (
        u3(groups, "grid")?,
        u3(grid, "grid")?,
        u3(tg, "threadgroup")?,
    );
    raw.constants = *library.constants();
    raw.checked = u32::from(mode == Mode::Checked);
    raw.seed = launch.seed;
    raw.flags = u32::from(launch.allow_divergent_simd);
    if launch.threadgroup_memory.len() > 32 {
        return Err("more than 32 threadgroup memory arguments".into());
    }
    for (i, len) in launch.threadgroup_memory.iter().enumerate() {
        if len % 16 != 0 {
            return Err(format!(
                "threadgroup({i}): a length of {len} bytes is no multiple of 16, as Metal asks"
            ));
        }
        raw.tgmem[i] = *len as u64;
    }
    Ok(raw)
}

/// Copies the bound data and fills in the argument table.
fn bind(launch: &Launch, raw: &mut RawLaunch, mode: Mode) -> Result<Vec<Copy>, String> {
    let mut copies: Vec<Copy> = Vec::new();
    let checked = mode == Mode::Checked;
    for b in &launch.buffers {
        if b.index >= 31 {
            return Err(format!("buffer({}): Metal has 31 entries", b.index));
        }
        if launch.buffers.iter().filter(|o| o.index == b.index).count() > 1 {
            return Err(format!("buffer({}) is bound twice", b.index));
        }
        let (kind, data): (i32, &[u8]) = match &b.data {
            Data::Bytes(v) if v.len() > 4096 => {
                return Err(format!(
                    "buffer({}): {} bytes by value, Metal takes at most 4096",
                    b.index,
                    v.len()
                ))
            }
            Data::Bytes(v) => (READ, v),
            Data::Read(v) => (READ, v),
            Data::Write(v) => (WRITE, v),
            Data::ReadWrite(v) => (READ_WRITE, v),
            Data::Same(_) => continue,
        };
        copies.push(Copy::new(b.index, kind, data, checked));
    }
    for b in &launch.buffers {
        let owner = if let Data::Same(o) = b.data {
            o
        } else {
            b.index
        };
        let Some(c) = copies.iter().find(|c| c.index == owner) else {
            return Err(format!(
                "buffer({}) shares the memory of buffer({owner}), which has none of its own",
                b.index
            ));
        };
        if b.offset > c.len {
            return Err(format!(
                "buffer({}): offset {} lies past its {} bytes",
                b.index, b.offset, c.len
            ));
        }
        raw.buf[b.index] = c.start.wrapping_add(b.offset).cast::<c_void>();
        raw.len[b.index] = (c.len - b.offset) as u64;
    }
    Ok(copies)
}

fn write_back(launch: &mut Launch, copies: &[Copy]) {
    for b in &mut launch.buffers {
        if let Data::Write(v) | Data::ReadWrite(v) = &mut b.data {
            if let Some(c) = copies.iter().find(|c| c.index == b.index) {
                v.copy_from_slice(c.bytes());
            }
        }
    }
}

/// Stacks and threadgroup memory for one operating-system thread. The layout does not depend on the library that made it.
struct Worker(*mut c_void);
// SAFETY: plain memory, used by one thread at a time.
unsafe impl Send for Worker {}

static POOL: Mutex<Vec<Worker>> = Mutex::new(Vec::new());

fn with_worker(loaded: &Loaded, f: impl FnOnce(*mut c_void)) {
    let pooled = POOL.lock().unwrap_or_else(|e| e.into_inner()).pop();
    // SAFETY: no arguments, returns memory or null.
    let worker = pooled.unwrap_or_else(|| Worker(unsafe { (loaded.worker_new)() }));
    assert!(
        !worker.0.is_null(),
        "no address space for the threads' stacks"
    );
    crate::signal::guarded(loaded, worker.0, || f(worker.0));
    POOL.lock().unwrap_or_else(|e| e.into_inner()).push(worker);
}

struct Shared(*mut RawLaunch);
// SAFETY: workers change only what the runtime guards by atomics or its lock.
unsafe impl Sync for Shared {}

fn dispatch(loaded: &Loaded, raw: &mut RawLaunch, groups: u64, mode: Mode) {
    let threads = u64::from(raw.tg.x * raw.tg.y * raw.tg.z);
    let shared = Shared(raw);
    let shared = &shared;
    // SAFETY: the launch and its buffers outlive the call.
    let part = |first: u64, last: u64| {
        with_worker(loaded, |w| unsafe {
            (loaded.run_groups)(shared.0, w, first, last)
        })
    };
    let chunks = (rayon::current_num_threads() as u64 * 4).min(groups);
    if mode == Mode::Checked || chunks <= 1 || groups * threads < 256 {
        part(0, groups);
    } else {
        (0..chunks)
            .into_par_iter()
            .for_each(|c| part(c * groups / chunks, (c + 1) * groups / chunks));
    }
}

fn name(loaded: &Loaded, kernel: &str, f: &RawFault) -> Fault {
    let kind = match f.kind {
        1 => FaultKind::Race,
        2 => FaultKind::BarrierDivergence,
        3 => FaultKind::SimdDivergence,
        4 => FaultKind::OutOfBounds,
        5 => FaultKind::Uninitialised,
        6 => FaultKind::Misaligned,
        7 => FaultKind::ThreadgroupMemory,
        8 => FaultKind::InactiveLane,
        10 => FaultKind::ReadOnly,
        11 => FaultKind::Stack,
        12 => FaultKind::Arithmetic,
        _ => FaultKind::Binding,
    };
    // SAFETY: the runtime ends the text with a zero.
    let message = unsafe { CStr::from_ptr(f.text.as_ptr()) }
        .to_string_lossy()
        .into_owned();
    let (place, earlier) = crate::place::places(&loaded.path, f);
    let message = earlier.map_or(message.clone(), |e| format!("{message} at {e}"));
    Fault {
        kind,
        kernel: kernel.into(),
        place: place.map(Into::into),
        message: message.into(),
        thread: (f.has_thread != 0).then(|| (f.thread.into(), f.group.into())),
        others: vec![],
    }
}
