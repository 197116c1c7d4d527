//! One sequence's state in one layer: a checkpoint, and a tape of rows that the next call replays.

use candle_core::{Device, Tensor};

use super::device::Stored;
use super::kernel::{self, Input, Tile, Weights, LANES};
use super::{GatedDeltaDims, GatedDeltaParams, Keep, OP};
use crate::error::{Error, Result};
use crate::ops::Context;

/// A checkpoint and the rows after it. Accepting pending rows only moves a cursor: the next call replays them inside
/// its kernel, with the operations and the order of a plain pass, so the bits are those of a state that never guessed.
#[derive(Clone, Debug)]
pub struct GatedDeltaState {
    dims: GatedDeltaDims,
    store: Store,
    /// Rows of the tape that are committed but not yet in the checkpoint.
    accepted: usize,
    /// Rows of the tape that are undecided.
    pending: usize,
}

/// Where the state is: the CPU's kernel and the GPU's lay it out differently. It moves when the other one is used.
#[derive(Clone, Debug)]
enum Store {
    Host(Host),
    Device(Stored),
}

#[derive(Clone, Debug)]
struct Host {
    /// `[value_heads, tiles]`: the checkpoint, in tiles of value lanes.
    tiles: Vec<Tile>,
    /// `[taps - 1, channels]`: the raw inputs before the tape.
    conv: Vec<f32>,
    tape: Tape,
}

/// Rows after the checkpoint.
#[derive(Clone, Debug, Default)]
struct Tape {
    /// Raw inputs, for the convolution.
    inputs: Vec<f32>,
    /// What the recurrence takes.
    rows: kernel::Rows,
}

impl GatedDeltaState {
    /// The empty state.
    pub fn new(dims: GatedDeltaDims, device: &Device) -> Result<Self> {
        dims.check()?;
        let store = match device {
            Device::Cpu => {
                let tiles = dims.value_heads * dims.value_dim.div_ceil(LANES);
                Store::Host(Host {
                    tiles: vec![Tile::zeros(dims.key_dim); tiles],
                    conv: vec![0.0; dims.channels() * (dims.taps - 1)],
                    tape: Tape::default(),
                })
            }
            Device::Metal(_) => Store::Device(Stored::zeros(dims, device)?),
            other => {
                let what = format!("device {other:?} is not supported: use the CPU or Metal");
                return Err(Error::argument(OP, what));
            }
        };
        Ok(Self {
            dims,
            store,
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
        match &self.store {
            Store::Host(host) => host.recurrent(self.dims, self.accepted),
            Store::Device(stored) => stored.recurrent(self.dims, self.accepted),
        }
    }

    /// The committed last `taps - 1` input rows, `[taps - 1, channels]`, f32.
    pub fn conv_inputs(&self) -> Result<Tensor> {
        let d = self.dims;
        match &self.store {
            Store::Host(host) => Ok(Tensor::from_vec(
                host.window(d, self.accepted),
                (d.taps - 1, d.channels()),
                &Device::Cpu,
            )?),
            Store::Device(stored) => stored.window(self.accepted),
        }
    }

    /// Bytes held.
    pub fn size_bytes(&self) -> usize {
        match &self.store {
            Store::Host(host) => {
                let state = host.tiles.len() * self.dims.key_dim * LANES;
                4 * (state + host.conv.len() + host.tape.inputs.len() + host.tape.rows.len())
            }
            Store::Device(stored) => stored.size_bytes(),
        }
    }

    /// Runs rows after the committed ones; `out` is `[rows, value_heads, value_dim]`.
    pub(super) fn advance(
        &mut self,
        weights: &Weights,
        input: &Input,
        keep: Keep,
        out: &mut [f32],
    ) -> Result<()> {
        debug_assert_eq!(self.pending, 0);
        if let Store::Device(_) = self.store {
            let host = Host::from_tensors(self.dims, &self.recurrent()?, &self.conv_inputs()?)?;
            (self.store, self.accepted) = (Store::Host(host), 0);
        }
        if let Store::Host(host) = &mut self.store {
            host.advance(self.dims, weights, input, self.accepted, keep, out);
        }
        self.decided(input.rows, keep);
        Ok(())
    }

    /// The same on the device, or on the tests' launcher.
    pub(super) fn advance_on_device(
        &mut self,
        cx: &Context,
        params: &GatedDeltaParams,
        inputs: [&Tensor; 3],
        keep: Keep,
    ) -> Result<Tensor> {
        let rows = inputs[0].dim(0)?;
        if rows == 0 {
            let shape = (0, self.dims.value_heads, self.dims.value_dim);
            return Ok(Tensor::zeros(shape, inputs[0].dtype(), inputs[0].device())?);
        }
        if let Store::Host(_) = self.store {
            let device = inputs[0].device();
            let (recurrent, window) = (self.recurrent()?, self.conv_inputs()?);
            let window = window.to_device(device)?;
            let stored = Stored::new(self.dims, &recurrent.to_device(device)?, window)?;
            (self.store, self.accepted) = (Store::Device(stored), 0);
        }
        let Store::Device(stored) = &mut self.store else {
            return Err(Error::argument(OP, "the state did not move to the device"));
        };
        let y = stored.advance(cx, params, inputs, self.accepted, keep)?;
        self.decided(rows, keep);
        Ok(y)
    }

    fn decided(&mut self, rows: usize, keep: Keep) {
        self.accepted = 0;
        self.pending = match keep {
            Keep::Pending => rows,
            Keep::Commit => 0,
        };
    }
}

impl Host {
    fn from_tensors(d: GatedDeltaDims, recurrent: &Tensor, window: &Tensor) -> Result<Self> {
        let values = |t: &Tensor| t.flatten_all()?.to_vec1::<f32>();
        let (state, per_head) = (values(recurrent)?, d.value_dim.div_ceil(LANES));
        let tile = |i: usize| {
            let (head, first) = (i / per_head, i % per_head * LANES);
            let row = |k: usize| {
                let row = &state[(head * d.key_dim + k) * d.value_dim..][..d.value_dim];
                &row[first..d.value_dim.min(first + LANES)]
            };
            Tile::from_rows((0..d.key_dim).map(row))
        };
        Ok(Self {
            tiles: (0..d.value_heads * per_head).map(tile).collect(),
            conv: values(window)?,
            tape: Tape::default(),
        })
    }

    fn recurrent(&self, d: GatedDeltaDims, accepted: usize) -> Result<Tensor> {
        let mut tiles = self.tiles.clone();
        kernel::replay(d, &mut tiles, &self.tape.rows, accepted);
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

    fn window(&self, d: GatedDeltaDims, accepted: usize) -> Vec<f32> {
        let committed = &self.tape.inputs[..accepted * d.channels()];
        let size = self.conv.len();
        if committed.len() >= size {
            return committed[committed.len() - size..].to_vec();
        }
        [&self.conv[committed.len()..], committed].concat()
    }

    fn advance(
        &mut self,
        d: GatedDeltaDims,
        weights: &Weights,
        input: &Input,
        accepted: usize,
        keep: Keep,
        out: &mut [f32],
    ) {
        let window = self.window(d, accepted);
        let rows = kernel::prepare(weights, input, &window);
        let tape = (&self.tape.rows, accepted);
        kernel::advance(d, &mut self.tiles, tape, &rows, keep, out);
        self.conv = window;
        match keep {
            Keep::Pending => {
                self.tape = Tape {
                    inputs: input.x.to_vec(),
                    rows,
                };
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
