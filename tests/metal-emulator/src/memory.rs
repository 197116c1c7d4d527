//! A launch's buffers in memory of their own: inaccessible pages on both sides, shadow cells where checked mode needs them.
use crate::ffi::{Region, READ, READ_WRITE, WRITE};
use crate::pages::{protect, Access, Pages};
use std::ptr::null_mut;

/// Inaccessible space on both sides, so that a stray access meets no other buffer.
const GUARD: usize = 1 << 20;
/// What the free bytes of a buffer's own pages hold: NaNs to whoever reads them.
const POISON: u8 = 0xff;
/// The strictest alignment of an MSL type (ulong4).
const ALIGN: usize = 32;

pub(crate) struct Copy {
    pages: Pages,
    shadow: Option<Pages>,
    pub start: *mut u8,
    pub len: usize,
    pub kind: i32,
    pub index: usize,
}

impl Copy {
    /// Memory for `data`; an output starts as NaNs. The end lies as close to an inaccessible page as alignment allows.
    pub fn new(index: usize, kind: i32, data: &[u8], checked: bool) -> Self {
        let len = data.len();
        let body = len
            .next_multiple_of(crate::pages::PAGE)
            .max(crate::pages::PAGE);
        let pages = Pages::new(body + 2 * GUARD, Access::None);
        // two cells and two program counters per byte
        let shadow = (checked && kind != READ).then(|| Pages::new(len * 24, Access::Write));
        // SAFETY: the body lies inside the mapping, the data inside the body.
        unsafe {
            let first = pages.at.add(GUARD);
            protect(first, body, Access::Write);
            let slack = body - len.next_multiple_of(ALIGN);
            let start = first.add(slack);
            first.write_bytes(POISON, slack);
            start.add(len).write_bytes(POISON, body - slack - len);
            match kind {
                WRITE => start.write_bytes(POISON, len),
                _ => start.copy_from_nonoverlapping(data.as_ptr(), len),
            }
            if kind == READ {
                protect(first, body, Access::Read);
            }
            Self {
                pages,
                shadow,
                start,
                len,
                kind,
                index,
            }
        }
    }

    pub fn region(&self) -> Region {
        let lo = self.start as usize;
        let mut region = Region {
            lo,
            hi: lo + self.len,
            kind: self.kind,
            index: self.index as i32,
            w: null_mut(),
            r: null_mut(),
            wpc: null_mut(),
            rpc: null_mut(),
        };
        if let Some(s) = &self.shadow {
            let cells = s.at.cast::<u64>();
            let counters = cells.wrapping_add(2 * self.len).cast::<u32>();
            (region.w, region.r) = (cells, cells.wrapping_add(self.len));
            (region.wpc, region.rpc) = (counters, counters.wrapping_add(self.len));
        }
        region
    }

    /// What the kernel left.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: start and len lie inside the mapping.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }

    /// The first byte that no thread wrote, and how many there are (checked mode, outputs).
    pub fn unwritten(&self) -> Option<(usize, usize)> {
        debug_assert!(self.kind == WRITE || self.kind == READ_WRITE);
        // SAFETY: one cell per byte.
        let cells =
            unsafe { std::slice::from_raw_parts(self.shadow.as_ref()?.at.cast::<u64>(), self.len) };
        let first = cells.iter().position(|&c| c == 0)?;
        Some((first, cells.iter().filter(|&&c| c == 0).count()))
    }

    /// Did a write hit the free bytes of the buffer's own pages? (The pages beyond them fault at once.)
    pub fn strayed(&self) -> Option<String> {
        let first = self.pages.at.wrapping_add(GUARD);
        let before = self.start as usize - first as usize;
        let after = (self.pages.len - 2 * GUARD) - before - self.len;
        // SAFETY: the body of the mapping.
        let all = unsafe { std::slice::from_raw_parts(first, before + self.len + after) };
        let hit = |s: &[u8]| s.iter().any(|&b| b != POISON);
        let place = match (hit(&all[..before]), hit(&all[before + self.len..])) {
            (true, _) => "before the start of",
            (_, true) => "past the end of",
            _ => return None,
        };
        Some(format!(
            "a write {place} buffer({}) ({} bytes long): checked mode says where",
            self.index, self.len
        ))
    }
}
