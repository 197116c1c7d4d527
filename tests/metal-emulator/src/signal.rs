//! Crashes of kernels in fast mode become faults: the handler sends the thread to the runtime, which abandons the kernel.
//! Signals that arise anywhere else go to whoever handled them before.
use crate::library::Loaded;
use std::ffi::c_void;

#[cfg(not(target_os = "linux"))]
pub(crate) fn guarded(loaded: &Loaded, _: *mut c_void, f: impl FnOnce()) {
    let _ = (loaded.crash, loaded.crash_stack);
    f();
}

#[cfg(target_os = "linux")]
pub(crate) use linux::guarded;

#[cfg(target_os = "linux")]
mod linux {
    use super::*;
    use std::cell::Cell;
    use std::mem::MaybeUninit;
    use std::ptr::null;
    use std::sync::OnceLock;

    const SIGNALS: [i32; 5] = [
        libc::SIGSEGV,
        libc::SIGBUS,
        libc::SIGFPE,
        libc::SIGILL,
        libc::SIGTRAP,
    ];

    thread_local! {
        static RUNNING: Cell<(*const Loaded, *mut c_void)> = const { Cell::new((null(), std::ptr::null_mut())) };
    }

    /// Runs `f`, during which crashes of the kernel that `worker` runs are caught.
    pub(crate) fn guarded(loaded: &Loaded, worker: *mut c_void, f: impl FnOnce()) {
        install();
        let before = RUNNING.replace((loaded, worker));
        f();
        RUNNING.set(before);
    }

    static PREVIOUS: OnceLock<[libc::sigaction; SIGNALS.len()]> = OnceLock::new();

    fn install() {
        PREVIOUS.get_or_init(|| {
            SIGNALS.map(|signal| {
                // SAFETY: sigaction structures are plain data; the handler is of the SA_SIGINFO kind.
                unsafe {
                    let mut previous = MaybeUninit::<libc::sigaction>::zeroed().assume_init();
                    let mut new = MaybeUninit::<libc::sigaction>::zeroed().assume_init();
                    new.sa_sigaction = handler as *const () as usize;
                    new.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
                    libc::sigemptyset(&mut new.sa_mask);
                    libc::sigaction(signal, &new, &mut previous);
                    previous
                }
            })
        });
    }

    extern "C" fn handler(signal: i32, info: *mut libc::siginfo_t, context: *mut c_void) {
        let (loaded, worker) = RUNNING.get();
        let stack = match loaded.is_null() {
            true => 0,
            // SAFETY: set by `guarded` around the run.
            false => unsafe { ((*loaded).crash_stack)(worker) as usize & !15 },
        };
        if stack != 0 {
            // SAFETY: as above; the context is this signal's.
            unsafe {
                let address = (*info).si_addr() as usize;
                let crash = (*loaded).crash as usize;
                let to = [crash, stack, worker as usize, address, kind(signal)];
                redirect(to, &mut *context.cast());
            }
        } else {
            // Back to the previous handler: the instruction runs again and meets it.
            let i = SIGNALS.iter().position(|&s| s == signal).unwrap_or(0);
            if let Some(previous) = PREVIOUS.get() {
                // SAFETY: what was installed before.
                unsafe { libc::sigaction(signal, &previous[i], std::ptr::null_mut()) };
            }
        }
    }

    /// 0 memory, 1 division, 2 trap. (The runtime's last argument: 0 read, 1 write, 2 unknown.)
    fn kind(signal: i32) -> usize {
        match signal {
            libc::SIGSEGV | libc::SIGBUS => 0,
            libc::SIGFPE => 1,
            _ => 2,
        }
    }

    /// Goes on in `crash(worker, address, pc, kind, write)` on that stack. The pc is as a return address: after the instruction's start.
    #[cfg(target_arch = "x86_64")]
    unsafe fn redirect(
        [crash, stack, worker, address, kind]: [usize; 5],
        uc: &mut libc::ucontext_t,
    ) {
        let g = &mut uc.uc_mcontext.gregs;
        let write = (g[libc::REG_ERR as usize] & 2) != 0;
        let pc = g[libc::REG_RIP as usize] + 1;
        g[libc::REG_RDI as usize] = worker as i64;
        g[libc::REG_RSI as usize] = address as i64;
        g[libc::REG_RDX as usize] = pc;
        g[libc::REG_RCX as usize] = kind as i64;
        g[libc::REG_R8 as usize] = i64::from(write);
        g[libc::REG_RSP as usize] = stack as i64 - 8;
        g[libc::REG_RIP as usize] = crash as i64;
    }

    #[cfg(target_arch = "aarch64")]
    unsafe fn redirect(
        [crash, stack, worker, address, kind]: [usize; 5],
        uc: &mut libc::ucontext_t,
    ) {
        let m = &mut uc.uc_mcontext;
        let pc = m.pc + 1;
        let arguments = [worker as u64, address as u64, pc, kind as u64, 2];
        m.regs[..5].copy_from_slice(&arguments);
        (m.sp, m.pc) = (stack as u64, crash as u64);
    }
}
