//! One file by byte ranges, several at a time, appended in order: what a break leaves is a beginning that the next attempt
//! continues.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

use hf_hub::progress::{DownloadEvent, ProgressEvent, ProgressHandler};

use super::fault::Fault;
use crate::{Error, Result};

/// Requests at a time.
const PARALLEL: u64 = 4;

/// A file that is being fetched.
pub(super) struct RangedFile<'a> {
    file: File,
    path: &'a Path,
    have: u64,
    size: u64,
}

impl<'a> RangedFile<'a> {
    /// Opens what is there of a file of `size` bytes.
    pub fn open(path: &'a Path, size: u64) -> Result<Self> {
        let file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .map_err(|e| Error::io(path, e))?;
        let have = file.metadata().map_err(|e| Error::io(path, e))?.len();
        let mut this = Self {
            file,
            path,
            have,
            size,
        };
        if have > size {
            this.file.set_len(0).map_err(|e| Error::io(path, e))?;
            this.have = 0;
        }
        Ok(this)
    }

    /// Bytes that are here.
    pub fn have(&self) -> u64 {
        self.have
    }

    /// Whether all are.
    pub fn is_whole(&self) -> bool {
        self.have == self.size
    }

    /// Asks for the next ranges with `get` and appends what came, up to the first fault.
    pub fn advance<G, B>(
        &mut self,
        range_bytes: u64,
        get: G,
    ) -> Result<std::result::Result<(), Fault>>
    where
        G: Fn(std::ops::Range<u64>) -> std::result::Result<B, Fault> + Sync,
        B: AsRef<[u8]> + Send,
    {
        let ranges: Vec<_> = (0..PARALLEL)
            .map(|i| self.have.saturating_add(range_bytes.saturating_mul(i)))
            .take_while(|start| *start < self.size)
            .map(|start| start..self.size.min(start.saturating_add(range_bytes)))
            .collect();
        let get = &get;
        let answers: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = ranges
                .iter()
                .map(|range| scope.spawn(move || get(range.clone())))
                .collect();
            threads.into_iter().map(|thread| thread.join()).collect()
        });
        for (range, answer) in ranges.into_iter().zip(answers) {
            let bytes = match answer {
                Ok(Ok(bytes)) => bytes,
                Ok(Err(fault)) => return Ok(Err(fault)),
                Err(panic) => std::panic::resume_unwind(panic),
            };
            let (bytes, expected) = (bytes.as_ref(), range.end - range.start);
            if bytes.len() as u64 != expected {
                return Ok(Err(Fault::Answer(format!(
                    "the hub sent {} bytes where {expected} were asked for",
                    bytes.len()
                ))));
            }
            self.file
                .write_all(bytes)
                .map_err(|e| Error::io(self.path, e))?;
            self.have += expected;
        }
        Ok(Ok(()))
    }

    /// Makes sure that the bytes are on the disk.
    pub fn finish(self) -> Result<()> {
        self.file.sync_all().map_err(|e| Error::io(self.path, e))
    }
}

/// Adds the bytes of one request to a common count as they arrive.
pub(super) struct Arriving<F> {
    /// Bytes of this request that are counted.
    counted: AtomicU64,
    total: Arc<AtomicU64>,
    report: F,
}

impl<F: Fn(u64) + Send + Sync> Arriving<F> {
    /// Counts into `total`, and tells `report` of it.
    pub fn new(total: Arc<AtomicU64>, report: F) -> Self {
        Self {
            counted: AtomicU64::new(0),
            total,
            report,
        }
    }
}

impl<F: Fn(u64) + Send + Sync> ProgressHandler for Arriving<F> {
    fn on_progress(&self, event: &ProgressEvent) {
        let ProgressEvent::Download(DownloadEvent::Progress { files }) = event else {
            return;
        };
        for file in files {
            let before = self
                .counted
                .fetch_max(file.bytes_completed, Ordering::Relaxed);
            let more = file.bytes_completed.saturating_sub(before);
            let total = self.total.fetch_add(more, Ordering::Relaxed) + more;
            (self.report)(total);
        }
    }
}
