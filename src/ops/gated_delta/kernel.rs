//! The CPU kernel. Value lanes never meet in the recurrence, so a head's state is cut into tiles of [`LANES`] lanes
//! (16 KiB at key size 128: it stays in the first cache) and every tile runs all rows by itself, on any thread.

use rayon::prelude::*;

use super::super::vector::{self, Kernel};
use super::{GatedDeltaDims, Keep};

/// Value lanes of a tile.
pub(super) const LANES: usize = 32;

/// Below this many multiplications a pass runs on the calling thread.
const PARALLEL: usize = 1 << 17;

type Lanes = [f32; LANES];

/// `[key_dim, LANES]` of a head's state; lanes past `value_dim` stay zero.
#[derive(Clone, Debug)]
pub(super) struct Tile(Vec<Lanes>);

impl Tile {
    pub(super) fn zeros(key_dim: usize) -> Self {
        Self(vec![[0.0; LANES]; key_dim])
    }

    /// From rows of up to [`LANES`] lanes.
    pub(super) fn from_rows<'a>(rows: impl Iterator<Item = &'a [f32]>) -> Self {
        let lanes = |row: &[f32]| {
            let mut lanes = [0.0; LANES];
            lanes[..row.len()].copy_from_slice(row);
            lanes
        };
        Self(rows.map(lanes).collect())
    }

    pub(super) fn row(&self, i: usize) -> Lanes {
        self.0[i]
    }
}

/// The layer's weights as the kernel reads them.
#[derive(Clone, Debug)]
pub(super) struct Weights {
    pub(super) dims: GatedDeltaDims,
    /// `[taps, channels]`.
    pub(super) conv: Vec<f32>,
    pub(super) a_log: Vec<f32>,
    pub(super) dt_bias: Vec<f32>,
}

/// A pass's raw rows, f32.
pub(super) struct Input<'a> {
    pub(super) rows: usize,
    pub(super) x: &'a [f32],
    pub(super) a: &'a [f32],
    pub(super) b: &'a [f32],
}

/// What the recurrence takes: `[rows, channels]` normalised queries and keys, and values; `[rows, value_heads]` gates.
#[derive(Clone, Debug, Default)]
pub(super) struct Rows {
    qkv: Vec<f32>,
    decay: Vec<f32>,
    beta: Vec<f32>,
}

impl Rows {
    pub(super) fn len(&self) -> usize {
        self.qkv.len() + self.decay.len() + self.beta.len()
    }
}

/// Convolution, SiLU, normalisation and gates of all rows; `window` holds the `taps - 1` inputs before them.
pub(super) fn prepare(weights: &Weights, input: &Input, window: &[f32]) -> Rows {
    let d = weights.dims;
    let c = d.channels();
    let mut qkv = vec![0f32; input.rows * c];
    let row = |(r, out): (usize, &mut [f32])| {
        vector::run(PrepareRow {
            weights,
            input: input.x,
            window,
            r,
            out,
        })
    };
    if input.rows * c * 8 < PARALLEL {
        qkv.chunks_mut(c).enumerate().for_each(row);
    } else {
        qkv.par_chunks_mut(c).enumerate().for_each(row);
    }
    let gates = |i: usize| {
        let h = i % d.value_heads;
        let t = input.a[i] + weights.dt_bias[h];
        let softplus = if t > 20.0 { t } else { t.exp().ln_1p() };
        (-weights.a_log[h].exp() * softplus).exp()
    };
    Rows {
        qkv,
        decay: (0..input.a.len()).map(gates).collect(),
        beta: input.b.iter().map(|b| 1.0 / (1.0 + (-b).exp())).collect(),
    }
}

struct PrepareRow<'a> {
    weights: &'a Weights,
    input: &'a [f32],
    window: &'a [f32],
    r: usize,
    out: &'a mut [f32],
}

impl Kernel for PrepareRow<'_> {
    #[inline(always)]
    fn call(self) {
        let d = self.weights.dims;
        let c = d.channels();
        let before = d.taps - 1;
        for tap in 0..d.taps {
            let at = self.r + tap;
            let x = match at.checked_sub(before) {
                Some(row) => &self.input[row * c..][..c],
                None => &self.window[at * c..][..c],
            };
            let w = &self.weights.conv[tap * c..][..c];
            for ((o, x), w) in self.out.iter_mut().zip(x).zip(w) {
                *o = w.mul_add(*x, *o);
            }
        }
        for o in self.out.iter_mut() {
            *o = vector::silu(*o);
        }
        let (queries, rest) = self.out.split_at_mut(d.key_heads * d.key_dim);
        let keys = &mut rest[..d.key_heads * d.key_dim];
        for (heads, scale) in [(queries, (d.key_dim as f32).powf(-0.5)), (keys, 1.0)] {
            for head in heads.chunks_exact_mut(d.key_dim) {
                let inverse = scale / (vector::dot(head, head) + 1e-6).sqrt();
                for x in head {
                    *x *= inverse;
                }
            }
        }
    }
}

/// Tiles of a head that run together: a row's sums are one chain of additions per lane, and one tile's chains alone leave the
/// processor waiting.
const TOGETHER: usize = 2;

/// Puts the first `accepted` rows of the tape into the tiles.
pub(super) fn replay(d: GatedDeltaDims, tiles: &mut [Tile], tape: &Rows, accepted: usize) {
    let per_head = d.value_dim.div_ceil(LANES);
    for (i, tile) in tiles.iter_mut().enumerate() {
        vector::run(Run {
            at: [Place::new(d, i / per_head, i % per_head)],
            tiles: [&mut tile.0],
            tape: (tape, accepted),
            rows: (tape, 0),
            keep: Keep::Commit,
            out: [&mut []],
        });
    }
}

/// Replays the tape's accepted rows into the tiles, then runs `rows`: into the tiles if they are committed, else on
/// a copy that is thrown away.
pub(super) fn advance(
    d: GatedDeltaDims,
    tiles: &mut [Tile],
    (tape, accepted): (&Rows, usize),
    rows: &Rows,
    keep: Keep,
    out: &mut [f32],
) {
    let per_head = d.value_dim.div_ceil(LANES);
    let count = rows.decay.len() / d.value_heads;
    let together = if per_head.is_multiple_of(TOGETHER) {
        TOGETHER
    } else {
        1
    };
    let run = |(i, (tiles, out)): (usize, (&mut [Tile], &mut [Lanes]))| {
        let place = |w: usize| {
            let i = i * together + w;
            Place::new(d, i / per_head, i % per_head)
        };
        let (tape, rows) = ((tape, accepted), (rows, count));
        match tiles {
            [a, b] => {
                let (first, second) = out.split_at_mut(count);
                vector::run(Run {
                    at: [place(0), place(1)],
                    tiles: [&mut a.0, &mut b.0],
                    tape,
                    rows,
                    keep,
                    out: [first, second],
                })
            }
            one => one.iter_mut().enumerate().for_each(|(w, tile)| {
                vector::run(Run {
                    at: [place(w)],
                    tiles: [&mut tile.0],
                    tape,
                    rows,
                    keep,
                    out: [&mut out[w * count..][..count]],
                })
            }),
        }
    };
    // Tile-major, so that each tile writes its own part.
    let mut lanes = vec![[0f32; LANES]; tiles.len() * count];
    let part = (together * count).max(1);
    if (count + accepted) * tiles.len() * d.key_dim * LANES < PARALLEL {
        let parts = tiles.chunks_mut(together).zip(lanes.chunks_mut(part));
        parts.enumerate().for_each(run);
    } else {
        let parts = tiles
            .par_chunks_mut(together)
            .zip(lanes.par_chunks_mut(part));
        parts.enumerate().for_each(run);
    }
    for (i, head) in out.chunks_mut(d.value_dim).enumerate() {
        let (r, h) = (i / d.value_heads, i % d.value_heads);
        for (t, part) in head.chunks_mut(LANES).enumerate() {
            part.copy_from_slice(&lanes[(h * per_head + t) * count + r][..part.len()]);
        }
    }
}

/// Where a tile's parts of a row lie.
#[derive(Clone, Copy)]
struct Place {
    channels: usize,
    key_dim: usize,
    value_heads: usize,
    head: usize,
    q: usize,
    k: usize,
    v: usize,
    lanes: usize,
}

impl Place {
    fn new(d: GatedDeltaDims, head: usize, tile: usize) -> Self {
        let q = head / (d.value_heads / d.key_heads) * d.key_dim;
        let keys = d.key_heads * d.key_dim;
        Self {
            channels: d.channels(),
            key_dim: d.key_dim,
            value_heads: d.value_heads,
            head,
            q,
            k: keys + q,
            v: 2 * keys + head * d.value_dim + tile * LANES,
            lanes: LANES.min(d.value_dim - tile * LANES),
        }
    }
}

/// `W` tiles of a head through the accepted rows of a tape and then through rows of a pass.
struct Run<'a, const W: usize> {
    at: [Place; W],
    tiles: [&'a mut [Lanes]; W],
    tape: (&'a Rows, usize),
    rows: (&'a Rows, usize),
    keep: Keep,
    /// Per tile and row of the pass.
    out: [&'a mut [Lanes]; W],
}

/// What a head takes of one row.
struct Row<'a, const W: usize> {
    q: &'a [f32],
    k: &'a [f32],
    decay: f32,
    /// What the state lacks of the value, per tile.
    delta: [Lanes; W],
}

impl<'a, const W: usize> Row<'a, W> {
    #[inline(always)]
    fn new(rows: &'a Rows, at: &[Place; W], r: usize, tiles: [&[Lanes]; W]) -> Self {
        let head = &at[0];
        let row = &rows.qkv[r * head.channels..][..head.channels];
        let gate = r * head.value_heads + head.head;
        let (q, k) = (
            &row[head.q..][..head.key_dim],
            &row[head.k..][..head.key_dim],
        );
        let (decay, beta) = (rows.decay[gate], rows.beta[gate]);
        let tiles = tiles.map(|t| &t[..k.len()]);
        let mut memory = [[0f32; LANES]; W];
        for (i, k) in k.iter().enumerate() {
            for (memory, tile) in memory.iter_mut().zip(&tiles) {
                for (m, s) in memory.iter_mut().zip(&tile[i]) {
                    *m = k.mul_add(*s, *m);
                }
            }
        }
        let mut delta = [[0f32; LANES]; W];
        for ((delta, memory), at) in delta.iter_mut().zip(&memory).zip(at) {
            delta[..at.lanes].copy_from_slice(&row[at.v..][..at.lanes]);
            for (d, m) in delta.iter_mut().zip(memory) {
                *d = (-decay).mul_add(*m, *d) * beta;
            }
        }
        Self { q, k, decay, delta }
    }
}

/// One step: the state's row `i` of tile `w` is read by `$read`, its successor goes to `$write`, the output is returned.
macro_rules! step {
    ($row:expr, |$w:ident, $i:ident| $read:expr, |$next:ident| $write:expr) => {{
        let row = &$row;
        let mut o = [[0f32; LANES]; W];
        for ($i, (k, q)) in row.k.iter().zip(row.q).enumerate() {
            for $w in 0..W {
                let state: Lanes = $read;
                let mut $next = [0f32; LANES];
                for j in 0..LANES {
                    $next[j] = k.mul_add(row.delta[$w][j], state[j] * row.decay);
                    o[$w][j] = q.mul_add($next[j], o[$w][j]);
                }
                $write;
            }
        }
        o
    }};
}

impl<const W: usize> Kernel for Run<'_, W> {
    // Indexed loops over constant sizes unroll into registers.
    #[allow(clippy::needless_range_loop)]
    #[inline(always)]
    fn call(self) {
        let Self {
            at,
            tiles,
            keep,
            mut out,
            ..
        } = self;
        for r in 0..self.tape.1 {
            let row = Row::new(self.tape.0, &at, r, std::array::from_fn(|w| &*tiles[w]));
            step!(row, |w, i| tiles[w][i], |next| tiles[w][i] = next);
        }
        let (rows, count) = self.rows;
        if keep == Keep::Commit {
            for r in 0..count {
                let row = Row::new(rows, &at, r, std::array::from_fn(|w| &*tiles[w]));
                let o = step!(row, |w, i| tiles[w][i], |next| tiles[w][i] = next);
                (0..W).for_each(|w| out[w][r] = o[w]);
            }
            return;
        }
        // Pending rows leave the state alone: the first row's successor goes to a copy, the last one's is not needed.
        let size = if count > 1 { at[0].key_dim } else { 0 };
        let mut copy: [Vec<Lanes>; W] = std::array::from_fn(|_| vec![[0.0; LANES]; size]);
        for r in 0..count {
            let from: [&[Lanes]; W] = match r {
                0 => std::array::from_fn(|w| &*tiles[w]),
                _ => std::array::from_fn(|w| &copy[w][..]),
            };
            let row = Row::new(rows, &at, r, from);
            let o = match (r, r + 1 == count) {
                (_, true) => step!(row, |w, i| from[w][i], |next| {}),
                (0, _) => step!(row, |w, i| tiles[w][i], |next| copy[w][i] = next),
                _ => step!(row, |w, i| copy[w][i], |next| copy[w][i] = next),
            };
            (0..W).for_each(|w| out[w][r] = o[w]);
        }
    }
}
