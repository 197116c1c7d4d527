//! Affine weights repacked for integer dots: blocks of eight columns, a 32-bit lane each.
//!
//! A lane's word holds codes of K pairs: field `j` of its low half is code `2j`, of its high half code `2j + 1`, so that
//! `(word >> bits*j) & mask` yields a pair of 16-bit codes without widening. Widths of 3, 5 and 6 bits are split in two
//! planes (2+1, 4+1, 4+2). Per group and block the planes follow each other, then come scales and biases.

use half::bf16;

use crate::affine::{unpack_row, AffineFormat};

/// Columns of a block.
pub(crate) const LANES: usize = 8;

/// Widths of the planes: low, and high where there is one.
fn planes(bits: usize) -> (usize, usize) {
    match bits {
        3 => (2, 1),
        5 => (4, 1),
        6 => (4, 2),
        whole => (whole, 0),
    }
}

#[derive(Clone, Debug)]
enum Constants {
    Bf16(Vec<u16>),
    F32(Vec<f32>),
}

/// A weight `[n, k]`. Columns past `n` in the last block are zero.
#[derive(Clone, Debug)]
pub(crate) struct Packed {
    pub n: usize,
    pub k: usize,
    pub format: AffineFormat,
    words: Vec<u32>,
    /// Per block and group: eight scales, eight biases.
    constants: Constants,
}

impl Packed {
    /// From rows of stored words and f32 scales and biases; `exact_bf16` says that the latter are bf16 values.
    pub fn new(
        rows: &[u32],
        scales: &[f32],
        biases: &[f32],
        n: usize,
        k: usize,
        format: AffineFormat,
        exact_bf16: bool,
    ) -> Self {
        let (groups, blocks) = (k / format.group_size, n.div_ceil(LANES));
        let per_row = k * format.bits / 32;
        let per_group = Self::words_per_group(format);
        let mut words = vec![0u32; blocks * groups * per_group];
        let mut constants = vec![0f32; blocks * groups * 2 * LANES];
        for column in 0..n {
            let codes = unpack_row(&rows[column * per_row..][..per_row], format.bits, k);
            let (block, lane) = (column / LANES, column % LANES);
            for g in 0..groups {
                let at = block * groups + g;
                let codes = &codes[g * format.group_size..][..format.group_size];
                pack_group(
                    codes,
                    format.bits,
                    lane,
                    &mut words[at * per_group..][..per_group],
                );
                constants[at * 2 * LANES + lane] = scales[column * groups + g];
                constants[at * 2 * LANES + LANES + lane] = biases[column * groups + g];
            }
        }
        let constants = match exact_bf16 {
            true => Constants::Bf16(
                constants
                    .iter()
                    .map(|c| bf16::from_f32(*c).to_bits())
                    .collect(),
            ),
            false => Constants::F32(constants),
        };
        Self {
            n,
            k,
            format,
            words,
            constants,
        }
    }

    fn words_per_group(format: AffineFormat) -> usize {
        LANES * format.group_size * format.bits / 32
    }

    pub fn groups(&self) -> usize {
        self.k / self.format.group_size
    }

    pub fn blocks(&self) -> usize {
        self.n.div_ceil(LANES)
    }

    pub fn size_bytes(&self) -> usize {
        let constants = match &self.constants {
            Constants::Bf16(c) => c.len() * 2,
            Constants::F32(c) => c.len() * 4,
        };
        self.words.len() * 4 + constants
    }

    /// Scales and biases of a block's group.
    #[inline(always)]
    pub fn constants(&self, block: usize, group: usize) -> ([f32; LANES], [f32; LANES]) {
        let at = (block * self.groups() + group) * 2 * LANES;
        let mut out = ([0f32; LANES], [0f32; LANES]);
        match &self.constants {
            Constants::Bf16(c) => {
                let c = &c[at..at + 2 * LANES];
                for i in 0..LANES {
                    out.0[i] = f32::from_bits((c[i] as u32) << 16);
                    out.1[i] = f32::from_bits((c[LANES + i] as u32) << 16);
                }
            }
            Constants::F32(c) => {
                out.0.copy_from_slice(&c[at..at + LANES]);
                out.1.copy_from_slice(&c[at + LANES..at + 2 * LANES]);
            }
        }
        out
    }

    /// Unpacks a block's group: `pairs[j][lane]` is codes `2j` (low half) and `2j + 1` (high half).
    #[inline(always)]
    pub fn unpack(&self, block: usize, group: usize, pairs: &mut [[u32; LANES]]) {
        let per_group = Self::words_per_group(self.format);
        let words = &self.words[(block * self.groups() + group) * per_group..][..per_group];
        let (low, high) = planes(self.format.bits);
        let split = LANES * self.format.group_size * low / 32;
        match low {
            2 => plane::<2>(&words[..split], pairs),
            4 => plane::<4>(&words[..split], pairs),
            _ => plane::<8>(&words[..split], pairs),
        }
        match high {
            1 => add_plane::<1>(&words[split..], pairs, low),
            2 => add_plane::<2>(&words[split..], pairs, low),
            _ => {}
        }
    }

    /// One column's weights, dequantized.
    pub fn column(&self, column: usize, out: &mut [f32]) {
        let (block, lane) = (column / LANES, column % LANES);
        let mut pairs = vec![[0u32; LANES]; self.format.group_size / 2];
        for (g, out) in out.chunks_exact_mut(self.format.group_size).enumerate() {
            self.unpack(block, g, &mut pairs);
            let (scales, biases) = self.constants(block, g);
            for (o, p) in out.chunks_exact_mut(2).zip(&pairs) {
                o[0] = scales[lane] * (p[lane] & 0xffff) as f32 + biases[lane];
                o[1] = scales[lane] * (p[lane] >> 16) as f32 + biases[lane];
            }
        }
    }
}

fn pack_group(codes: &[u8], bits: usize, lane: usize, words: &mut [u32]) {
    let (low, high) = planes(bits);
    let split = LANES * codes.len() * low / 32;
    let mut put = |base: usize, width: usize, code: &dyn Fn(u8) -> u32| {
        let fields = 16 / width;
        for (i, c) in codes.iter().enumerate() {
            let (pair, half) = (i / 2, i % 2);
            let word = base + pair / fields * LANES + lane;
            words[word] |= code(*c) << (pair % fields * width + half * 16);
        }
    };
    put(0, low, &|c| c as u32 & ((1 << low) - 1));
    if high > 0 {
        put(split, high, &|c| c as u32 >> low);
    }
}

#[inline(always)]
fn plane<const BITS: usize>(words: &[u32], pairs: &mut [[u32; LANES]]) {
    let fields = 16 / BITS;
    let mask = ((1u32 << BITS) - 1) * 0x0001_0001;
    for (words, pairs) in words
        .chunks_exact(LANES)
        .zip(pairs.chunks_exact_mut(fields))
    {
        for (j, pair) in pairs.iter_mut().enumerate() {
            for (p, w) in pair.iter_mut().zip(words) {
                *p = w >> (BITS * j) & mask;
            }
        }
    }
}

#[inline(always)]
fn add_plane<const BITS: usize>(words: &[u32], pairs: &mut [[u32; LANES]], low: usize) {
    let fields = 16 / BITS;
    let mask = ((1u32 << BITS) - 1) * 0x0001_0001;
    for (words, pairs) in words
        .chunks_exact(LANES)
        .zip(pairs.chunks_exact_mut(fields))
    {
        for (j, pair) in pairs.iter_mut().enumerate() {
            for (p, w) in pair.iter_mut().zip(words) {
                *p |= (w >> (BITS * j) & mask) << low;
            }
        }
    }
}
