//! The fault that this crate was founded on: after a sparse prefill a RoPE returned float32, every later layer left the fast
//! kernels, and decode speed halved without an error. Here nothing of decoding may depend on how the prompt was read, and
//! a planted float32 must be an error or show in the counters.

mod support;

use candle_core::{DType, Device, Tensor};
use candle_specprefill::mtp::{prefill, PrefillOptions};
use candle_specprefill::ops::affine_matmul::Weight;
use candle_specprefill::ops::rope::Rope;
use candle_specprefill::ops::routes::RouteCounts;
use candle_specprefill::ops::{self, Context};
use candle_specprefill::qwen3_5::{Cache, DraftRows, Keep, Model, Rows};
use candle_specprefill::Error;
use support::tiny;

/// Reads `kept` of `tokens`, then drafts and verifies for some cycles; the routes of what came after the prompt.
fn decode_routes(model: &Model, tokens: &[u32], kept: Option<&[u32]>) -> (RouteCounts, Cache) {
    let mut cache = model.new_cache().unwrap();
    let (cx, options) = (Context::default(), PrefillOptions::default());
    let mut hidden = prefill(model, &cx, &mut cache, tokens, kept, &options, &mut |_| {}).unwrap();
    let cx = Context::default();
    for cycle in 0..4u32 {
        let at = cache.next_position().get();
        let rows = DraftRows {
            cache: &mut cache,
            tokens: &[cycle + 1],
            hidden: &hidden,
            positions: &[at - 1],
        };
        let drafted = model.draft(&cx, &mut [rows]).unwrap();
        assert_eq!(drafted.dtype(), model.dtype());
        let block = [cycle + 1, 7, 11, 13];
        let positions: Vec<u32> = (at..at + 4).collect();
        let rows = Rows {
            cache: &mut cache,
            tokens: &block,
            positions: &positions,
            keep: Keep::Pending,
        };
        let out = model.forward(&cx, &mut [rows]).unwrap();
        assert_eq!(out.dtype(), model.dtype());
        model.logits(&cx, &out).unwrap();
        let accepted = 1 + cycle as usize % 4;
        cache.accept(accepted).unwrap();
        hidden = out.narrow(0, accepted - 1, 1).unwrap();
    }
    (cx.routes().snapshot(), cache)
}

#[test]
fn decoding_after_a_sparse_prefill_takes_the_routes_of_a_dense_one() {
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        let model = tiny(dtype);
        let tokens: Vec<u32> = (0..400).map(|i| (i * 97 + 5) % 4000).collect();
        let kept: Vec<u32> = (0..32).chain(128..160).chain(336..400).collect();
        let (sparse, sparse_cache) = decode_routes(&model, &tokens, Some(&kept));
        let (dense, dense_cache) = decode_routes(&model, &tokens[..kept.len()], None);
        assert_eq!(sparse, dense);
        let name = dtype.as_str();
        // Every route names the model's dtype, and none fell back. Counters without activations name none.
        for route in sparse.keys() {
            assert!(!route.contains('!'), "{route}");
            let other = ["f32", "bf16", "f16"].into_iter().filter(|d| *d != name);
            for other in other {
                assert!(!route.split('/').any(|part| part == other), "{route}");
            }
        }
        for (sparse, dense) in [(&sparse_cache, &dense_cache)] {
            assert_eq!(sparse.length(), dense.length());
            assert_eq!(sparse.size_bytes(), dense.size_bytes());
            assert_eq!(
                sparse.next_position(),
                dense.next_position().get() + 400 - kept.len() as u32
            );
            for i in 0..2 {
                let (keys, _) = sparse.keys(i).unwrap();
                let (values, _) = sparse.values(i).unwrap();
                assert_eq!((keys.dtype(), values.dtype()), (dtype, dtype));
            }
            let (keys, values, _) = sparse.draft_keys_values().unwrap();
            assert_eq!((keys.dtype(), values.dtype()), (dtype, dtype));
        }
    }
}

/// An attention layer whose RoPE is given, and whose caches take whatever comes, as in the system of the founding report.
fn layer(cx: &Context, rope: impl Fn(&Tensor) -> Tensor) -> candle_specprefill::Result<Tensor> {
    let (rows, heads, dim) = (5, 2, 32);
    let random = |shape: &[usize]| Tensor::randn(0f32, 1.0, shape, &Device::Cpu).unwrap();
    let x = random(&[rows, 64]).to_dtype(DType::BF16)?;
    let weight = |n| {
        Weight::dense(
            &random(&[n, 64]).to_dtype(DType::BF16).unwrap(),
            &Device::Cpu,
        )
    };
    let projected = ops::matmul_grouped(cx, &x, &[&weight(64)?, &weight(64)?, &weight(64)?])?;
    let split = |t: &Tensor| t.reshape((rows, heads, dim)).unwrap();
    let (q, k) = (rope(&split(&projected[0])), rope(&split(&projected[1])));
    let cached = |t: &Tensor| t.transpose(0, 1).unwrap().contiguous().unwrap();
    // The planted layer stores values in the dtype of the keys.
    let v = split(&projected[2]).to_dtype(k.dtype())?;
    let out = ops::attention(cx, &q, &cached(&k), &cached(&v), rows, 0.17)?;
    ops::matmul(cx, &out.flatten_from(1)?, &weight(64)?)
}

#[test]
fn a_rope_that_returns_float32_shows_in_the_counters() {
    let rope = Rope::new(1e6, 16).unwrap();
    let positions = Tensor::new(&[0u32, 1, 9, 10, 40], &Device::Cpu).unwrap();
    let healthy = Context::default();
    let right = |t: &Tensor| ops::rope(&healthy, t, &positions, &rope).unwrap();
    let out = layer(&healthy, right).unwrap();
    assert_eq!(out.dtype(), DType::BF16);
    let planted = Context::default();
    let wrong = |t: &Tensor| {
        let rotated = ops::rope(&planted, t, &positions, &rope).unwrap();
        rotated.to_dtype(DType::F32).unwrap()
    };
    let out = layer(&planted, wrong).unwrap();
    assert_eq!(out.dtype(), DType::F32);
    let floats = |cx: &Context| -> u64 {
        let routes = cx.routes().snapshot();
        let f32 = routes
            .iter()
            .filter(|(route, _)| route.split('/').any(|p| p == "f32"));
        f32.map(|(_, n)| n).sum()
    };
    // The attention and the projection after it left bf16.
    assert_eq!((floats(&healthy), floats(&planted)), (0, 2));
}

#[test]
fn mixed_dtypes_are_errors_that_name_both() {
    let cx = Context::default();
    let zeros = |dtype| Tensor::zeros((2, 2, 32), dtype, &Device::Cpu).unwrap();
    let (q, k) = (zeros(DType::F32), zeros(DType::BF16));
    let error = ops::attention(&cx, &q, &k, &k, 2, 1.0).unwrap_err();
    assert!(matches!(
        error,
        Error::DType {
            found: DType::BF16,
            ..
        }
    ));
    let text = error.to_string();
    assert!(text.contains("BF16") && text.contains("f32"), "{text}");
}
