//! Weights in the order in which the kernels read them: blocks of 16 output columns, one stream from front to back.
//!
//! Affine: per block, per group along K: the codes in chunks of 32 K, then 16 scales and 16 biases. A chunk is `bits` lines
//! of 64 bytes; a line is 32 lanes of 16 bits, lane `2 * column + k % 2`; a lane holds `16 / width` codes of consecutive
//! pairs of K, lowest bits first. 6, 5 and 3 bits are two planes of 4 + 2, 4 + 1 and 2 + 1 bits.

use candle_core::{DType, Tensor};
use half::{bf16, f16};
use rayon::prelude::*;

use crate::affine::{unpack_row, AffineFormat};
use crate::error::Result;

/// Output columns of a block.
pub(super) const COLUMNS: usize = 16;

/// A cache line, so that no load crosses two; read through [`bytes`].
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
#[allow(dead_code)]
pub(super) struct Line([u8; 64]);

/// The type in which scales or plain weights are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Float {
    F32,
    Bf16,
    F16,
}

impl Float {
    pub(super) fn of(dtype: DType) -> Self {
        match dtype {
            DType::BF16 => Self::Bf16,
            DType::F16 => Self::F16,
            _ => Self::F32,
        }
    }

    pub(super) fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            _ => 2,
        }
    }

    fn write(self, bytes: &mut [u8], i: usize, value: f32) {
        match self {
            Self::F32 => bytes[4 * i..][..4].copy_from_slice(&value.to_le_bytes()),
            Self::Bf16 => bytes[2 * i..][..2].copy_from_slice(&bf16::from_f32(value).to_le_bytes()),
            Self::F16 => bytes[2 * i..][..2].copy_from_slice(&f16::from_f32(value).to_le_bytes()),
        }
    }

    #[inline(always)]
    pub(super) fn read(self, bytes: &[u8], i: usize) -> f32 {
        let two = |i: usize| [bytes[2 * i], bytes[2 * i + 1]];
        match self {
            Self::F32 => f32::from_le_bytes([0, 1, 2, 3].map(|b: usize| bytes[4 * i + b])),
            Self::Bf16 => bf16::from_le_bytes(two(i)).to_f32(),
            Self::F16 => f16::from_le_bytes(two(i)).to_f32(),
        }
    }
}

pub(super) fn bytes(lines: &[Line]) -> &[u8] {
    // SAFETY: a line is 64 plain bytes without padding.
    unsafe { std::slice::from_raw_parts(lines.as_ptr().cast(), lines.len() * 64) }
}

fn bytes_mut(lines: &mut [Line]) -> &mut [u8] {
    // SAFETY: as above, and the borrow is exclusive.
    unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), lines.len() * 64) }
}

/// Widths of the two planes of `bits`.
pub(super) fn planes(bits: usize) -> (usize, usize) {
    match bits {
        6 => (4, 2),
        5 => (4, 1),
        3 => (2, 1),
        one => (one, 0),
    }
}

/// Packed affine codes with their scales and biases.
#[derive(Clone, Debug)]
pub(super) struct Affine {
    pub n: usize,
    pub groups: usize,
    pub format: AffineFormat,
    pub float: Float,
    pub lines: Vec<Line>,
}

impl Affine {
    pub(super) fn new(
        codes: &Tensor,
        scales: &Tensor,
        biases: &Tensor,
        format: AffineFormat,
    ) -> Result<Self> {
        let (n, groups) = scales.dims2()?;
        let k = groups * format.group_size;
        let float = match scales.dtype() == biases.dtype() {
            true => Float::of(scales.dtype()),
            false => Float::F32,
        };
        let words = codes.flatten_all()?.to_vec1::<u32>()?;
        let floats = |t: &Tensor| t.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
        let (scales, biases) = (floats(scales)?, floats(biases)?);
        let mut packed = Self {
            n,
            groups,
            format,
            float,
            lines: vec![],
        };
        let block_lines = packed.block_lines();
        let mut lines = vec![Line([0; 64]); n.div_ceil(COLUMNS) * block_lines];
        let row_words = k * format.bits / 32;
        let pack = |(b, lines): (usize, &mut [Line])| {
            let columns = COLUMNS.min(n - b * COLUMNS);
            let rows: Vec<Vec<u8>> = (0..columns)
                .map(|c| {
                    let words = &words[(b * COLUMNS + c) * row_words..][..row_words];
                    unpack_row(words, format.bits, k)
                })
                .collect();
            for (g, lines) in lines.chunks_exact_mut(packed.group_lines()).enumerate() {
                let (codes, floats) = lines.split_at_mut(packed.code_lines());
                for (chunk, lines) in codes.chunks_exact_mut(format.bits).enumerate() {
                    let k0 = g * format.group_size + chunk * 32;
                    pack_chunk(bytes_mut(lines), &rows, k0, format.bits);
                }
                let floats = bytes_mut(floats);
                for c in 0..columns {
                    let at = (b * COLUMNS + c) * groups + g;
                    float.write(floats, c, scales[at]);
                    float.write(floats, COLUMNS + c, biases[at]);
                }
            }
        };
        if block_lines > 0 {
            lines
                .par_chunks_exact_mut(block_lines)
                .enumerate()
                .for_each(pack);
        }
        packed.lines = lines;
        Ok(packed)
    }

    /// The rows `ids`, which exist, as a weight of their own.
    pub(super) fn select(&self, ids: &[usize]) -> Self {
        let (k, size) = (self.k(), self.format.group_size);
        let mut chosen = Self {
            n: ids.len(),
            lines: vec![Line([0; 64]); ids.len().div_ceil(COLUMNS) * self.block_lines()],
            ..*self
        };
        let block_lines = self.block_lines().max(1);
        let pack = |(ids, lines): (&[usize], &mut [Line])| {
            let rows: Vec<Vec<u8>> = ids
                .iter()
                .map(|n| (0..k).map(|k| self.code(*n, k)).collect())
                .collect();
            for (g, lines) in lines.chunks_exact_mut(self.group_lines()).enumerate() {
                let (codes, floats) = lines.split_at_mut(self.code_lines());
                for (chunk, lines) in codes.chunks_exact_mut(self.format.bits).enumerate() {
                    pack_chunk(
                        bytes_mut(lines),
                        &rows,
                        g * size + chunk * 32,
                        self.format.bits,
                    );
                }
                let floats = bytes_mut(floats);
                for (c, n) in ids.iter().enumerate() {
                    let (scale, bias) = self.scale_bias(*n, g);
                    self.float.write(floats, c, scale);
                    self.float.write(floats, COLUMNS + c, bias);
                }
            }
        };
        ids.par_chunks(COLUMNS)
            .zip(chosen.lines.par_chunks_exact_mut(block_lines))
            .for_each(pack);
        chosen
    }

    pub(super) fn k(&self) -> usize {
        self.groups * self.format.group_size
    }

    /// Lines of a group's codes.
    pub(super) fn code_lines(&self) -> usize {
        self.format.bits * self.format.group_size / 32
    }

    /// Lines of a group: codes, scales, biases.
    pub(super) fn group_lines(&self) -> usize {
        self.code_lines() + self.float.size() / 2
    }

    /// Lines of a block of columns.
    pub(super) fn block_lines(&self) -> usize {
        self.group_lines() * self.groups
    }

    /// The code of row `n`, column `k`.
    pub(super) fn code(&self, n: usize, k: usize) -> u8 {
        let group = self.group(n, k / self.format.group_size);
        let in_group = k % self.format.group_size;
        let chunk = &group[in_group / 32 * self.format.bits * 64..];
        let (pair, lane) = (in_group % 32 / 2, n % COLUMNS * 2 + k % 2);
        let plane = |first: usize, width: usize| {
            let per_lane = 16 / width;
            let at = (first + pair / per_lane) * 64 + lane * 2;
            let lane = u16::from_le_bytes([chunk[at], chunk[at + 1]]);
            lane >> (pair % per_lane * width) & ((1 << width) - 1)
        };
        let (a, b) = planes(self.format.bits);
        match b {
            0 => plane(0, a) as u8,
            b => (plane(0, a) | plane(a, b) << a) as u8,
        }
    }

    /// Scale and bias of row `n` in group `g`.
    pub(super) fn scale_bias(&self, n: usize, g: usize) -> (f32, f32) {
        let floats = &self.group(n, g)[self.code_lines() * 64..];
        let c = n % COLUMNS;
        (
            self.float.read(floats, c),
            self.float.read(floats, COLUMNS + c),
        )
    }

    fn group(&self, n: usize, g: usize) -> &[u8] {
        let first = n / COLUMNS * self.block_lines() + g * self.group_lines();
        bytes(&self.lines[first..first + self.group_lines()])
    }

    /// Row `n`, dequantized.
    pub(super) fn row(&self, n: usize) -> impl Iterator<Item = f32> + '_ {
        (0..self.groups).flat_map(move |g| {
            let (scale, bias) = self.scale_bias(n, g);
            let k0 = g * self.format.group_size;
            (k0..k0 + self.format.group_size).map(move |k| scale * self.code(n, k) as f32 + bias)
        })
    }
}

fn pack_chunk(chunk: &mut [u8], rows: &[Vec<u8>], k0: usize, bits: usize) {
    let (a, b) = planes(bits);
    let mut plane = |first: usize, width: usize, shift: usize| {
        let per_lane = 16 / width;
        let mask = ((1u16 << width) - 1) as u8;
        for (line, bytes) in chunk[first * 64..][..width * 64]
            .chunks_exact_mut(64)
            .enumerate()
        {
            for (c, codes) in rows.iter().enumerate() {
                for parity in 0..2 {
                    let mut lane = 0u16;
                    for j in 0..per_lane {
                        let code = codes[k0 + (line * per_lane + j) * 2 + parity];
                        lane |= ((code >> shift & mask) as u16) << (j * width);
                    }
                    bytes[(2 * c + parity) * 2..][..2].copy_from_slice(&lane.to_le_bytes());
                }
            }
        }
    };
    plane(0, a, 0);
    if b > 0 {
        plane(a, b, a);
    }
}

/// A plain weight in its own dtype: per block of columns `[k][16]`.
#[derive(Clone, Debug)]
pub(super) struct Dense {
    pub n: usize,
    pub k: usize,
    pub float: Float,
    pub lines: Vec<Line>,
}

impl Dense {
    pub(super) fn new(weight: &Tensor) -> Result<Self> {
        let (n, k) = weight.dims2()?;
        let float = Float::of(weight.dtype());
        let mut packed = Self {
            n,
            k,
            float,
            lines: vec![],
        };
        let block_lines = packed.block_lines();
        let blocks = n.div_ceil(COLUMNS);
        let mut lines = Vec::with_capacity(blocks * block_lines);
        for b in 0..blocks {
            // Block by block, so that a large bf16 weight is never held as f32.
            let columns = COLUMNS.min(n - b * COLUMNS);
            let rows = weight
                .narrow(0, b * COLUMNS, columns)?
                .to_dtype(DType::F32)?
                .flatten_all()?
                .to_vec1::<f32>()?;
            let first = lines.len();
            lines.resize(first + block_lines, Line([0; 64]));
            let out = bytes_mut(&mut lines[first..]);
            for (c, row) in rows.chunks_exact(k.max(1)).enumerate() {
                for (i, w) in row.iter().enumerate() {
                    float.write(out, i * COLUMNS + c, *w);
                }
            }
        }
        packed.lines = lines;
        Ok(packed)
    }

    /// The rows `ids`, which exist, as a weight of their own.
    pub(super) fn select(&self, ids: &[usize]) -> Self {
        let mut chosen = Self {
            n: ids.len(),
            lines: vec![Line([0; 64]); ids.len().div_ceil(COLUMNS) * self.block_lines()],
            ..*self
        };
        let blocks = chosen.lines.chunks_exact_mut(self.block_lines().max(1));
        for (ids, lines) in ids.chunks(COLUMNS).zip(blocks) {
            let out = bytes_mut(lines);
            for (c, n) in ids.iter().enumerate() {
                for (k, w) in self.row(*n).enumerate() {
                    self.float.write(out, k * COLUMNS + c, w);
                }
            }
        }
        chosen
    }

    /// Lines of a block of columns.
    pub(super) fn block_lines(&self) -> usize {
        (self.k * COLUMNS * self.float.size()).div_ceil(64)
    }

    /// Row `n` in f32.
    pub(super) fn row(&self, n: usize) -> impl Iterator<Item = f32> + '_ {
        let block = bytes(&self.lines[n / COLUMNS * self.block_lines()..][..self.block_lines()]);
        (0..self.k).map(move |k| self.float.read(block, k * COLUMNS + n % COLUMNS))
    }
}
