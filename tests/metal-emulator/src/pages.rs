//! Memory by pages, some of them inaccessible. Only Linux runs kernels; elsewhere this is ordinary memory, so that the crate builds.

pub(crate) const PAGE: usize = 4096;

#[derive(Clone, Copy)]
pub(crate) enum Access {
    None,
    Read,
    Write,
}

/// Pages that are given back when dropped.
pub(crate) struct Pages {
    pub at: *mut u8,
    pub len: usize,
}

#[cfg(target_os = "linux")]
fn flags(access: Access) -> i32 {
    match access {
        Access::None => libc::PROT_NONE,
        Access::Read => libc::PROT_READ,
        Access::Write => libc::PROT_READ | libc::PROT_WRITE,
    }
}

#[cfg(target_os = "linux")]
impl Pages {
    pub fn new(len: usize, access: Access) -> Self {
        let len = len.next_multiple_of(PAGE).max(PAGE);
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping anywhere.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), len, flags(access), kind, -1, 0) };
        assert!(at != libc::MAP_FAILED, "no memory for {len} bytes");
        Self { at: at.cast(), len }
    }
}

#[cfg(target_os = "linux")]
impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: mapped with this length.
        unsafe { libc::munmap(self.at.cast(), self.len) };
    }
}

/// Changes the access to whole pages.
///
/// # Safety
/// `at` and `len` are pages of a [`Pages`].
#[cfg(target_os = "linux")]
pub(crate) unsafe fn protect(at: *mut u8, len: usize, access: Access) {
    let ok = libc::mprotect(at.cast(), len, flags(access));
    assert!(ok == 0, "no memory for {len} bytes");
}

#[cfg(not(target_os = "linux"))]
fn layout(len: usize) -> std::alloc::Layout {
    std::alloc::Layout::from_size_align(len, PAGE)
        .unwrap_or_else(|e| panic!("no memory for {len} bytes: {e}"))
}

#[cfg(not(target_os = "linux"))]
impl Pages {
    pub fn new(len: usize, _: Access) -> Self {
        let len = len.next_multiple_of(PAGE).max(PAGE);
        // SAFETY: not empty.
        let at = unsafe { std::alloc::alloc_zeroed(layout(len)) };
        assert!(!at.is_null(), "no memory for {len} bytes");
        Self { at, len }
    }
}

#[cfg(not(target_os = "linux"))]
impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { std::alloc::dealloc(self.at, layout(self.len)) };
    }
}

/// Nothing to protect with.
///
/// # Safety
/// None needed.
#[cfg(not(target_os = "linux"))]
pub(crate) unsafe fn protect(_: *mut u8, _: usize, access: Access) {
    // the variants are meant for systems with page protection
    let _ = matches!(access, Access::None | Access::Read | Access::Write);
}
