//! Mirrors of the structures in runtime/abi.h.
use std::ffi::{c_char, c_void};

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct U3 {
    pub x: u32,
    pub y: u32,
    pub z: u32,
}

impl From<U3> for [u32; 3] {
    fn from(u: U3) -> Self {
        [u.x, u.y, u.z]
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Param {
    pub kind: i32,
    pub index: i32,
}

pub const PARAM_THREADGROUP: i32 = 1;

#[repr(C)]
pub struct Kernel {
    pub name: *const c_char,
    pub entry: *const c_void,
    pub params: *const Param,
    pub nparams: u32,
    pub max_threads: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Site {
    pub file: *const c_char,
    pub line: i32,
    pub col: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct RawFault {
    pub kind: i32,
    pub site: Site,
    pub pcs: [u64; 8],
    pub earlier: u64,
    pub has_thread: u32,
    pub simdgroup: u32,
    pub lane: u32,
    pub thread: U3,
    pub group: U3,
    pub text: [c_char; 320],
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct RawConstant {
    pub bits: u64,
    pub set: u32,
    pub size: u32,
}

pub const READ: i32 = 0;
pub const WRITE: i32 = 1;
pub const READ_WRITE: i32 = 2;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Region {
    pub lo: usize,
    pub hi: usize,
    pub kind: i32,
    pub index: i32,
    pub w: *mut u64,
    pub r: *mut u64,
    pub wpc: *mut u32,
    pub rpc: *mut u32,
}

#[repr(C)]
pub struct RawLaunch {
    pub kernel: *const Kernel,
    pub regions: *mut Region,
    pub nregions: u64,
    pub buf: [*mut c_void; 32],
    pub len: [u64; 32],
    pub tgmem: [u64; 32],
    pub constants: [RawConstant; 64],
    pub groups: U3,
    pub grid: U3,
    pub tg: U3,
    pub checked: u32,
    pub seed: u32,
    pub flags: u32,
    pub abort: u32,
    pub nfaults: u32,
    pub lock: u32,
    pub faults: [RawFault; 8],
    pub accesses: u64,
    pub switches: u64,
    pub tg_bytes: u64,
}

pub type WorkerNew = unsafe extern "C" fn() -> *mut c_void;
pub type RunGroups = unsafe extern "C" fn(*mut RawLaunch, *mut c_void, u64, u64);
pub type Crash = unsafe extern "C" fn(*mut c_void, usize, usize, i32, i32);
pub type CrashStack = unsafe extern "C" fn(*mut c_void) -> *mut c_void;
