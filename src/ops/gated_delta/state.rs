//! One sequence's state in one layer: a checkpoint, and a tape of rows that the next call replays.

use candle_core::{Device, Tensor};

use super::kernel::{self, Input, Tile, Weights, LANES};
use super::{GatedDeltaDims, Keep, OP};
use crate::error::{Error, Result};

/// A checkpoint and the rows after it. Accepting pending rows only moves a cursor: the next call replays them inside
/// its kernel, with the operations and the order of a plain pass, so the bits are those of a state that never guessed.
#[derive(Clone, Debug)]
pub struct GatedDeltaState {
    dims: GatedDeltaDims,
    /// `[value_heads, tiles]`: the checkpoint, in tiles of value lanes.
    tiles: Vec<Tile>,
    /// `[taps - 1, channels]`: the raw inputs before the tape.
    conv: Vec<f32>,
    tape: Tape,
    /// Rows of the tape that are committed but not yet in the checkpoint.
    accepted: usize,
    /// Rows of the tape that are undecided.
    pending: usize,
}

/// Rows after the checkpoint.
#[derive(Clone, Debug, Default)]
pub(super) struct Tape {
    /// Raw inputs, for the convolution.
    pub(super) inputs: Vec<f32>,
    /// What the recurrence takes.
    pub(super) rows: kernel::Rows,
}

impl GatedDeltaState {
    /// The empty state.
    pub fn new(dims: GatedDeltaDims, device: &Device) -> Result<Self> {
        if !matches!(device, Device::Cpu) {
            let what = format!("device {device:?} is not supported by this build: use the CPU");
            return Err(Error::argument(OP, what));
        }
        dims.check()?;
        let tiles = dims.value_heads * dims.value_dim.div_ceil(LANES);
        Ok(Self {
            dims,
            tiles: vec![Tile::zeros(dims.key_dim); tiles],
            conv: vec![0.0; dims.channels() * (dims.taps - 1)],
            tape: Tape::default(),
            accepted: 0,
            pending: 0,
        })
    }

    /// Sizes of the layer.
    pub fn dims(&self) -> GatedDeltaDims {
        self.dims
    }

    /// Rows of the last pass that are not committed.
    pub fn pending(&self) -> usize {
        self.pending
    }

    /// Commits the first `n` pending rows and forgets the rest. Moves a cursor, copies nothing.
    pub fn accept(&mut self, n: usize) -> Result<()> {
        if n > self.pending {
            return Err(Error::Cache(format!(
                "{n} rows accepted, {} are pending",
                self.pending
            )));
        }
        if self.pending > 0 {
            self.accepted = n;
            self.pending = 0;
        }
        Ok(())
    }

    /// The committed recurrent state `[value_heads, key_dim, value_dim]` f32.
    pub fn recurrent(&self) -> Result<Tensor> {
        let d = self.dims;
        let mut tiles = self.tiles.clone();
        kernel::replay(d, &mut tiles, &self.tape.rows, self.accepted);
        let per_head = d.value_dim.div_ceil(LANES);
        let mut state = Vec::with_capacity(d.value_heads * d.key_dim * d.value_dim);
        for head in tiles.chunks(per_head) {
            for i in 0..d.key_dim {
                let lanes = head.iter().flat_map(|tile| tile.row(i));
                state.extend(lanes.take(d.value_dim));
            }
        }
        Ok(Tensor::from_vec(
            state,
            (d.value_heads, d.key_dim, d.value_dim),
            &Device::Cpu,
        )?)
    }

    /// The committed last `taps - 1` input rows, `[taps - 1, channels]`, f32.
    pub fn conv_inputs(&self) -> Result<Tensor> {
        let d = self.dims;
        Ok(Tensor::from_vec(
            self.window(),
            (d.taps - 1, d.channels()),
            &Device::Cpu,
        )?)
    }

    /// Bytes held.
    pub fn size_bytes(&self) -> usize {
        let state = self.tiles.len() * self.dims.key_dim * LANES;
        4 * (state + self.conv.len() + self.tape.inputs.len() + self.tape.rows.len())
    }

    fn window(&self) -> Vec<f32> {
        let channels = self.dims.channels();
        let committed = &self.tape.inputs[..self.accepted * channels];
        let size = self.conv.len();
        if committed.len() >= size {
            return committed[committed.len() - size..].to_vec();
        }
        [&self.conv[committed.len()..], committed].concat()
    }

    /// Runs rows after the committed ones; `out` is `[rows, value_heads, value_dim]`.
    pub(super) fn advance(
        &mut self,
        weights: &Weights,
        input: &Input,
        keep: Keep,
        out: &mut [f32],
    ) {
        debug_assert_eq!(self.pending, 0);
        let window = self.window();
        let rows = kernel::prepare(weights, input, &window);
        kernel::advance(
            self.dims,
            &mut self.tiles,
            (&self.tape.rows, self.accepted),
            &rows,
            keep,
            out,
        );
        self.conv = window;
        self.accepted = 0;
        match keep {
            Keep::Pending => {
                self.tape = Tape {
                    inputs: input.x.to_vec(),
                    rows,
                };
                self.pending = input.rows;
            }
            Keep::Commit => {
                let keep = self.conv.len();
                self.conv
                    .extend_from_slice(&input.x[input.x.len().saturating_sub(keep)..]);
                self.conv.drain(..self.conv.len() - keep);
                self.tape = Tape::default();
            }
        }
    }
}
