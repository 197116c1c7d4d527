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

/// Puts the first `accepted` rows of the tape into the tiles.
pub(super) fn replay(d: GatedDeltaDims, tiles: &mut [Tile], tape: &Rows, accepted: usize) {
    let per_head = d.value_dim.div_ceil(LANES);
    for (i, tile) in tiles.iter_mut().enumerate() {
        vector::run(RunTile {
            at: Place::new(d, i / per_head, i % per_head),
            tile: &mut tile.0,
            rows: tape,
            count: accepted,
            out: None,
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
    let run = |(i, (tile, out)): (usize, (&mut Tile, &mut [Lanes]))| {
        let at = Place::new(d, i / per_head, i % per_head);
        let pass = |tile: &mut [Lanes], rows: &Rows, count, out| {
            vector::run(RunTile {
                at,
                tile,
                rows,
                count,
                out,
            })
        };
        pass(&mut tile.0, tape, accepted, None);
        match keep {
            Keep::Commit => pass(&mut tile.0, rows, count, Some(out)),
            // A single row reads the state and leaves it; more rows need a copy to go on with.
            Keep::Pending if count == 1 => vector::run(PeekTile {
                at,
                tile: &tile.0,
                rows,
                out,
            }),
            Keep::Pending => pass(&mut tile.0.clone(), rows, count, Some(out)),
        }
    };
    // Tile-major, so that each tile writes its own part.
    let mut lanes = vec![[0f32; LANES]; tiles.len() * count];
    if (count + accepted) * tiles.len() * d.key_dim * LANES < PARALLEL {
        let parts = tiles.iter_mut().zip(lanes.chunks_mut(count));
        parts.enumerate().for_each(run);
    } else {
        let parts = tiles.par_iter_mut().zip(lanes.par_chunks_mut(count));
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

struct RunTile<'a> {
    at: Place,
    tile: &'a mut [Lanes],
    rows: &'a Rows,
    count: usize,
    out: Option<&'a mut [Lanes]>,
}

/// One row's output, from a state that stays as it is; the operations and the order of [`RunTile`].
struct PeekTile<'a> {
    at: Place,
    tile: &'a [Lanes],
    rows: &'a Rows,
    out: &'a mut [Lanes],
}

impl Kernel for PeekTile<'_> {
    #[inline(always)]
    fn call(self) {
        let Row {
            q,
            k,
            decay,
            mut delta,
            beta,
        } = Row::new(self.rows, self.at, 0);
        correct(self.tile, k, decay, beta, &mut delta);
        let mut o = [0f32; LANES];
        for ((s, k), q) in self.tile.iter().zip(k).zip(q) {
            for j in 0..LANES {
                o[j] = q.mul_add(k.mul_add(delta[j], s[j] * decay), o[j]);
            }
        }
        self.out[0] = o;
    }
}

/// What a tile takes of one row.
struct Row<'a> {
    q: &'a [f32],
    k: &'a [f32],
    decay: f32,
    beta: f32,
    /// The value's lanes.
    delta: Lanes,
}

impl<'a> Row<'a> {
    #[inline(always)]
    fn new(rows: &'a Rows, at: Place, r: usize) -> Self {
        let row = &rows.qkv[r * at.channels..][..at.channels];
        let gate = r * at.value_heads + at.head;
        let mut delta = [0f32; LANES];
        delta[..at.lanes].copy_from_slice(&row[at.v..][..at.lanes]);
        Self {
            q: &row[at.q..][..at.key_dim],
            k: &row[at.k..][..at.key_dim],
            decay: rows.decay[gate],
            beta: rows.beta[gate],
            delta,
        }
    }
}

/// From the value to what the state lacks of it.
#[inline(always)]
fn correct(tile: &[Lanes], k: &[f32], decay: f32, beta: f32, delta: &mut Lanes) {
    let mut memory = [0f32; LANES];
    for (s, k) in tile.iter().zip(k) {
        for j in 0..LANES {
            memory[j] = k.mul_add(s[j], memory[j]);
        }
    }
    for j in 0..LANES {
        delta[j] = (-decay).mul_add(memory[j], delta[j]) * beta;
    }
}

impl Kernel for RunTile<'_> {
    #[inline(always)]
    fn call(mut self) {
        let at = self.at;
        for r in 0..self.count {
            let Row {
                q,
                k,
                decay,
                mut delta,
                beta,
            } = Row::new(self.rows, at, r);
            correct(self.tile, k, decay, beta, &mut delta);
            match &mut self.out {
                None => {
                    for (s, k) in self.tile.iter_mut().zip(k) {
                        for j in 0..LANES {
                            s[j] = k.mul_add(delta[j], s[j] * decay);
                        }
                    }
                }
                Some(out) => {
                    let mut o = [0f32; LANES];
                    for ((s, k), q) in self.tile.iter_mut().zip(k).zip(q) {
                        for j in 0..LANES {
                            s[j] = k.mul_add(delta[j], s[j] * decay);
                            o[j] = q.mul_add(s[j], o[j]);
                        }
                    }
                    out[r] = o;
                }
            }
        }
    }
}
