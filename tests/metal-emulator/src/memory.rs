//! A launch's buffers in memory of their own: free space on both sides, shadow cells where checked mode needs them.
use crate::ffi::{Region, READ, READ_WRITE, WRITE};
use std::alloc::{alloc_zeroed, dealloc, Layout};

/// Free space on both sides of a buffer, so that a stray access meets no other buffer.
const MARGIN: usize = 1 << 16;
const ALIGN: usize = 4096;

pub(crate) struct Copy {
    base: *mut u8,
    layout: Layout,
    shadow: *mut u64,
    shadow_layout: Layout,
    pub start: *mut u8,
    pub len: usize,
    pub kind: i32,
    pub index: usize,
}

impl Copy {
    /// Memory for `data`; an output starts as NaNs.
    pub fn new(index: usize, kind: i32, data: &[u8], checked: bool) -> Self {
        let len = data.len();
        let layout = Layout::from_size_align(len + 2 * MARGIN, ALIGN)
            .unwrap_or_else(|e| panic!("buffer({index}) of {len} bytes: {e}"));
        let shadow_len = if checked && kind != READ { len * 16 } else { 0 };
        let shadow_layout = Layout::from_size_align(shadow_len.max(16), ALIGN)
            .unwrap_or_else(|e| panic!("buffer({index}) of {len} bytes: {e}"));
        // SAFETY: the layouts are not empty, and the copy stays inside.
        unsafe {
            let base = alloc_zeroed(layout);
            let shadow = alloc_zeroed(shadow_layout).cast::<u64>();
            if base.is_null() || shadow.is_null() {
                std::alloc::handle_alloc_error(layout);
            }
            let start = base.add(MARGIN);
            match kind {
                WRITE => start.write_bytes(0xff, len),
                _ => start.copy_from_nonoverlapping(data.as_ptr(), len),
            }
            Self {
                base,
                layout,
                shadow,
                shadow_layout,
                start,
                len,
                kind,
                index,
            }
        }
    }

    pub fn region(&self) -> Region {
        // SAFETY: the shadow holds two cells per byte, unless the kind is READ, where nobody looks.
        let r = if self.kind == READ {
            self.shadow
        } else {
            unsafe { self.shadow.add(self.len) }
        };
        let lo = self.start as usize;
        Region {
            lo,
            hi: lo + self.len,
            kind: self.kind,
            index: self.index as i32,
            w: self.shadow,
            r,
        }
    }

    /// What the kernel left.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: start and len lie inside the allocation.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }

    /// The first byte that no thread wrote, and how many there are (checked mode, outputs).
    pub fn unwritten(&self) -> Option<(usize, usize)> {
        debug_assert!(self.kind == WRITE || self.kind == READ_WRITE);
        // SAFETY: one cell per byte.
        let cells = unsafe { std::slice::from_raw_parts(self.shadow, self.len) };
        let first = cells.iter().position(|&c| c == 0)?;
        Some((first, cells.iter().filter(|&&c| c == 0).count()))
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        // SAFETY: allocated with these layouts.
        unsafe {
            dealloc(self.base, self.layout);
            dealloc(self.shadow.cast(), self.shadow_layout);
        }
    }
}
