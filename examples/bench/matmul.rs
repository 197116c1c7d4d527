//! `bench matmul`: time per pass of the affine and the plain matmul, cache-defeated, beside candle's k-quants.

use std::time::Instant;

use anyhow::Result;
use candle_core::quantized::{ggml_file, GgmlDType, QMatMul, QTensor};
use candle_core::{DType, Device, Module, Tensor};
use candle_specprefill::affine::AffineFormat;
use candle_specprefill::ops::affine_matmul::policy::Isa;
use candle_specprefill::ops::affine_matmul::{matmul_on, Weight};
use candle_specprefill::ops::{matmul, Context};
use serde_json::{json, Value};

use crate::bandwidth::read_bandwidth;

/// What to measure.
#[derive(clap::Args)]
pub struct Args {
    /// Shapes, N x K.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "4096x4096,3584x1024,1024x3584,17408x5120,248320x1024"
    )]
    shapes: Vec<String>,
    /// Rows of x.
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8,16")]
    m: Vec<usize>,
    /// Rows of a prefill, measured beside candle's f32 matmul; 0 is off.
    #[arg(long, default_value_t = 0)]
    prefill: usize,
    /// Bits of a code.
    #[arg(long, value_delimiter = ',', default_value = "4")]
    bits: Vec<usize>,
    /// Instruction set, if not the best: avx512, avxvnni, avx2, neon or portable.
    #[arg(long, value_parser = isa)]
    isa: Option<Isa>,
    /// Measure on the CPU even where there is a Metal device.
    #[arg(long)]
    cpu: bool,
    /// Leave out the plain weights and candle's.
    #[arg(long)]
    affine_only: bool,
    /// Codes that share a scale.
    #[arg(long, default_value_t = 64)]
    group: usize,
    /// Megabytes of weights to rotate over: more than the last-level cache.
    #[arg(long, default_value_t = 320)]
    rotate_mb: usize,
    /// Seconds per line.
    #[arg(long, default_value_t = 0.2)]
    seconds: f64,
    /// Print one JSON object instead of the table.
    #[arg(long)]
    json: bool,
}

fn isa(name: &str) -> Result<Isa, String> {
    let same = |isa: &&Isa| format!("{isa:?}").eq_ignore_ascii_case(name);
    let here = Isa::available();
    here.iter()
        .find(same)
        .copied()
        .ok_or_else(|| format!("this machine has {here:?}"))
}

/// Runs the measurement and prints it.
pub fn run(args: &Args) -> Result<()> {
    // On a thread of the pool, as a model's passes run.
    rayon::scope(|_| measure(args))
}

fn measure(args: &Args) -> Result<()> {
    let device = device(args)?;
    let bandwidth = match &device {
        Device::Cpu => read_bandwidth(),
        other => copy_bandwidth(other)?,
    };
    let where_ = match &device {
        Device::Cpu => format!("{:?}", args.isa.unwrap_or(Isa::best())),
        other => format!("{:?}", other.location()),
    };
    let threads = rayon::current_num_threads();
    if !args.json {
        println!(
            "{where_}, {threads} threads, memory {:.1} GB/s",
            bandwidth / 1e9
        );
    }
    let (mut rows, mut peers) = (vec![], vec![]);
    for shape in &args.shapes {
        let parsed = shape.split_once('x').map(|(n, k)| (n.parse(), k.parse()));
        let Some((Ok(n), Ok(k))) = parsed else {
            anyhow::bail!("shape {shape}: expected N x K, like 4096x4096");
        };
        let bench = Bench {
            args,
            n,
            k,
            bandwidth,
            device: device.clone(),
        };
        for bits in &args.bits {
            bench.affine(*bits, &mut rows)?;
        }
        if args.affine_only {
            continue;
        }
        bench.plain(&mut rows)?;
        if !bench.device.is_cpu() {
            continue;
        }
        bench.candle(GgmlDType::Q4K, &mut peers)?;
        bench.candle(GgmlDType::Q8_0, &mut peers)?;
        if args.prefill > 0 {
            bench.gemm(&mut peers)?;
        }
    }
    if args.json {
        let all = json!({"isa": where_, "threads": threads, "read_gb_per_s": bandwidth / 1e9, "rows": rows, "peers": peers});
        println!("{all}");
    }
    Ok(())
}

struct Bench<'a> {
    args: &'a Args,
    n: usize,
    k: usize,
    bandwidth: f64,
    device: Device,
}

/// The Metal device where the build and the machine have one.
fn device(args: &Args) -> Result<Device> {
    match cfg!(all(feature = "metal", target_vendor = "apple")) && !args.cpu {
        true => Ok(Device::new_metal(0)?),
        false => Ok(Device::Cpu),
    }
}

/// Bytes per second that a device reads and writes when it copies.
fn copy_bandwidth(device: &Device) -> Result<f64> {
    let data = Tensor::zeros(64 << 20, DType::F32, device)?;
    let mut best = 0f64;
    for _ in 0..5 {
        device.synchronize()?;
        let t = Instant::now();
        let copy = data.copy()?;
        device.synchronize()?;
        best = best.max(2.0 * 4.0 * copy.elem_count() as f64 / t.elapsed().as_secs_f64());
    }
    Ok(best)
}

impl Bench<'_> {
    fn copies(&self, bytes: usize) -> usize {
        (self.args.rotate_mb << 20).div_ceil(bytes.max(1)).max(2)
    }

    /// Median seconds of `pass(copy)`, every copy read once before any is read again.
    fn median(&self, copies: usize, mut pass: impl FnMut(usize) -> Result<()>) -> Result<f64> {
        for copy in 0..copies.min(3) {
            pass(copy)?;
        }
        if !self.device.is_cpu() {
            return self.batched(copies, pass);
        }
        let (start, mut times) = (Instant::now(), vec![]);
        while times.len() < 5 || start.elapsed().as_secs_f64() < self.args.seconds {
            let t = Instant::now();
            pass((times.len() + 3) % copies)?;
            times.push(t.elapsed().as_secs_f64());
        }
        times.sort_by(f64::total_cmp);
        Ok(times[times.len() / 2])
    }

    /// The same where calls are queued: all copies, then one wait.
    fn batched(&self, copies: usize, mut pass: impl FnMut(usize) -> Result<()>) -> Result<f64> {
        let mut times = vec![];
        for _ in 0..9 {
            self.device.synchronize()?;
            let t = Instant::now();
            for copy in 0..copies {
                pass(copy)?;
            }
            self.device.synchronize()?;
            times.push(t.elapsed().as_secs_f64() / copies as f64);
        }
        times.sort_by(f64::total_cmp);
        Ok(times[times.len() / 2])
    }

    fn x(&self, m: usize, dtype: DType) -> Result<Tensor> {
        let x = Tensor::randn(0f32, 1.0, (m, self.k), &Device::Cpu)?.to_dtype(dtype)?;
        Ok(x.to_device(&self.device)?)
    }

    fn line(
        &self,
        name: &str,
        m: usize,
        dtype: DType,
        time: f64,
        first: f64,
        bytes: usize,
    ) -> Value {
        let rate = bytes as f64 / time;
        if !self.args.json {
            println!(
                "{:>6}x{:<6} {name:<12} {:<5} M={m:<4} {:8.3} ms {:6.1} GB/s  share {:.2}  c {:.2}",
                self.n,
                self.k,
                dtype.as_str(),
                time * 1e3,
                rate / 1e9,
                rate / self.bandwidth,
                time / first
            );
        }
        json!({"name": name, "n": self.n, "k": self.k, "m": m, "dtype": dtype.as_str(), "time_s": time,
            "gb_per_s": rate / 1e9, "bandwidth_share": rate / self.bandwidth, "ratio_to_m1": time / first})
    }

    fn weights(
        &self,
        name: &str,
        make: impl Fn() -> Result<Weight>,
        dtypes: &[DType],
        rows: &mut Vec<Value>,
    ) -> Result<()> {
        let weight = make()?;
        let bytes = weight.size_bytes();
        // A clone on a device shares its memory.
        let weights = match self.device.is_cpu() {
            true => vec![weight; self.copies(bytes)],
            false => (0..self.copies(bytes))
                .map(|_| make())
                .collect::<Result<_>>()?,
        };
        let cx = Context::default();
        let isa = self.args.isa.unwrap_or(Isa::best());
        for dtype in dtypes {
            let mut first = None;
            let prefill = Some(&self.args.prefill).filter(|m| **m > 0);
            for m in self.args.m.iter().chain(prefill) {
                let x = self.x(*m, *dtype)?;
                let time = self.median(weights.len(), |i| {
                    match self.device.is_cpu() {
                        true => matmul_on(&cx, &x, &weights[i], isa)?,
                        false => matmul(&cx, &x, &weights[i])?,
                    };
                    Ok(())
                })?;
                let first = *first.get_or_insert(time);
                let mut row = self.line(name, *m, *dtype, time, first, bytes);
                if let Some(format) = weights[0].format() {
                    row["bits"] = format.bits.into();
                    row["group"] = format.group_size.into();
                }
                rows.push(row);
            }
        }
        Ok(())
    }

    fn affine(&self, bits: usize, rows: &mut Vec<Value>) -> Result<()> {
        let format = AffineFormat::new(bits, self.args.group)?;
        let (words, groups) = (self.k * format.bits / 32, self.k / format.group_size);
        let mut word = 1u32;
        let codes: Vec<u32> = std::iter::repeat_with(|| {
            word = word.wrapping_mul(1664525).wrapping_add(1013904223);
            word ^ word >> 15
        })
        .take(self.n * words)
        .collect();
        let codes = Tensor::from_vec(codes, (self.n, words), &Device::Cpu)?;
        let floats =
            |s| Tensor::randn(0f32, s, (self.n, groups), &Device::Cpu)?.to_dtype(DType::BF16);
        let (scales, biases) = (floats(0.01)?, floats(0.1)?);
        let make = || {
            Ok(Weight::affine(
                &codes,
                &scales,
                &biases,
                format,
                &self.device,
            )?)
        };
        let name = format!("affine{bits}");
        self.weights(&name, make, &[DType::BF16, DType::F32], rows)
    }

    fn plain(&self, rows: &mut Vec<Value>) -> Result<()> {
        let own = self.n.min(512);
        let w = Tensor::randn(0f32, 0.02, (own, self.k), &Device::Cpu)?.to_dtype(DType::BF16)?;
        let w = Tensor::cat(&vec![&w; self.n.div_ceil(own)], 0)?.narrow(0, 0, self.n)?;
        self.weights(
            "bf16",
            || Ok(Weight::dense(&w, &self.device)?),
            &[DType::BF16],
            rows,
        )
    }

    /// candle's plain f32 matmul.
    fn gemm(&self, peers: &mut Vec<Value>) -> Result<()> {
        let own = self.n.min(512);
        let w = Tensor::randn(0f32, 0.02, (own, self.k), &Device::Cpu)?;
        let w = Tensor::cat(&vec![&w; self.n.div_ceil(own)], 0)?
            .narrow(0, 0, self.n)?
            .contiguous()?;
        let (m, bytes) = (self.args.prefill, self.n * self.k * 4);
        let x = self.x(m, DType::F32)?;
        let time = self.median(1, |_| {
            x.matmul(&w.t()?)?;
            Ok(())
        })?;
        peers.push(self.line("candle f32", m, DType::F32, time, time, bytes));
        Ok(())
    }

    fn candle(&self, dtype: GgmlDType, peers: &mut Vec<Value>) -> Result<()> {
        if !self.k.is_multiple_of(dtype.block_size()) {
            return Ok(());
        }
        // Quantizing to k-quants is slow: some rows, again and again.
        let own = self.n.min(512);
        let w = Tensor::randn(0f32, 0.02, (own, self.k), &Device::Cpu)?;
        let part = QTensor::quantize(&w, dtype)?.data()?.into_owned();
        let size = part.len() / own * self.n;
        let data: Vec<u8> = part.iter().copied().cycle().take(size).collect();
        let make = |_| -> Result<QMatMul> {
            let w = ggml_file::qtensor_from_ggml(dtype, &data, vec![self.n, self.k], &Device::Cpu)?;
            Ok(QMatMul::from_qtensor(w)?)
        };
        let weights = (0..self.copies(data.len()))
            .map(make)
            .collect::<Result<Vec<_>>>()?;
        // candle repacks a weight at its first use.
        for w in &weights {
            w.forward(&self.x(1, DType::F32)?)?;
        }
        let mut first = None;
        for m in &self.args.m {
            let x = self.x(*m, DType::F32)?;
            let time = self.median(weights.len(), |i| {
                weights[i].forward(&x)?;
                Ok(())
            })?;
            let first = *first.get_or_insert(time);
            let name = format!("candle {dtype:?}");
            peers.push(self.line(&name, *m, DType::F32, time, first, data.len()));
        }
        Ok(())
    }
}
