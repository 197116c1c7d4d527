//! Helpers that several test files share.
#![allow(dead_code)]

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use candle_specprefill::ops::Context;
use candle_specprefill::qwen3_5::{Cache, Keep, LoadOptions, Model, Rows};

/// A folder or file below `tests/golden`.
pub fn golden(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/golden")
        .join(path)
}

/// The folder of the embedded target.
pub fn tiny_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/tiny/target")
}

/// The embedded target.
pub fn tiny(dtype: DType) -> Model {
    let options = LoadOptions {
        dtype,
        ..Default::default()
    };
    Model::load(tiny_dir(), &options).expect("the embedded target")
}

/// The tensors of a golden file.
pub fn tensors(path: &str) -> HashMap<String, Tensor> {
    candle_core::safetensors::load(golden(path), &Device::Cpu).expect(path)
}

pub fn load(path: &str, dtype: DType) -> Model {
    let options = LoadOptions {
        dtype,
        ..Default::default()
    };
    Model::load(golden(path), &options).expect(path)
}

pub fn ids(t: &Tensor) -> Vec<u32> {
    let ids = t.to_vec1::<i64>().expect("ids");
    ids.into_iter().map(|i| i as u32).collect()
}

/// Feeds `tokens` at the cache's next positions and returns the hidden states.
pub fn feed(model: &Model, cache: &mut Cache, tokens: &[u32], keep: Keep) -> Tensor {
    let start = cache.next_position().get();
    let positions: Vec<u32> = (start..start + tokens.len() as u32).collect();
    let rows = Rows {
        cache,
        tokens,
        positions: &positions,
        keep,
    };
    model
        .forward(&Context::default(), &mut [rows])
        .expect("forward")
}

pub fn logits(model: &Model, hidden: &Tensor) -> Tensor {
    model.logits(&Context::default(), hidden).expect("logits")
}

pub fn values(t: &Tensor) -> Vec<f32> {
    let t = t.to_dtype(DType::F32).and_then(|t| t.flatten_all());
    t.and_then(|t| t.to_vec1()).expect("values")
}

/// The largest absolute difference.
pub fn distance(a: &Tensor, b: &Tensor) -> f32 {
    assert_eq!(a.elem_count(), b.elem_count(), "{:?} {:?}", a, b);
    let pairs = values(a).into_iter().zip(values(b));
    pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

pub fn mean_distance(a: &Tensor, b: &Tensor) -> f32 {
    let pairs = values(a).into_iter().zip(values(b));
    pairs.map(|(a, b)| (a - b).abs()).sum::<f32>() / a.elem_count() as f32
}

/// Bitwise equality: every bit of every value, the signs of zeros included.
pub fn same_bits(a: &Tensor, b: &Tensor) -> bool {
    let bits = |t: &Tensor| values(t).iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    a.dtype() == b.dtype() && a.elem_count() == b.elem_count() && bits(a) == bits(b)
}

/// The committed contents of a cache: keys, values, gated-delta states.
pub fn contents(cache: &Cache) -> Vec<Tensor> {
    let mut all = vec![];
    for i in 0.. {
        let (Some((k, len)), Some((v, _))) = (cache.keys(i), cache.values(i)) else {
            break;
        };
        let filled = |t: &Tensor| t.narrow(1, 0, len).and_then(|t| t.contiguous());
        all.push(filled(k).expect("keys"));
        all.push(filled(v).expect("values"));
    }
    for (state, conv) in cache.delta_states().expect("states") {
        all.push(state);
        all.push(conv);
    }
    all
}

/// Whether the draft heads hold the same keys and values.
pub fn same_draft(a: &Cache, b: &Cache) -> bool {
    let filled = |c: &Cache| {
        let (k, v, len) = c.draft_keys_values().expect("a draft head");
        [k, v].map(|t| {
            t.narrow(1, 0, len)
                .and_then(|t| t.contiguous())
                .expect("rows")
        })
    };
    let (a, b) = (filled(a), filled(b));
    a.iter().zip(&b).all(|(a, b)| same_bits(a, b))
}

pub fn same_contents(a: &Cache, b: &Cache) -> bool {
    let (a, b) = (contents(a), contents(b));
    a.len() == b.len() && a.iter().zip(&b).all(|(a, b)| same_bits(a, b))
}
