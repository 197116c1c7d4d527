//! The affine format: packing and quantizing are MLX's to the bit.

use std::collections::HashMap;

use candle_core::{safetensors, DType, Device, Tensor};
use candle_specprefill::affine::{dequantize, quantize, unpack_row, AffineFormat};
use candle_specprefill::Error;

const BITS: [usize; 6] = [2, 3, 4, 5, 6, 8];

fn golden(name: &str) -> HashMap<String, Tensor> {
    let path = format!(
        "{}/tests/golden/qmm/{name}.safetensors",
        env!("CARGO_MANIFEST_DIR")
    );
    safetensors::load(path, &Device::Cpu).unwrap()
}

fn same(a: &Tensor, b: &Tensor) -> bool {
    let bits = |t: &Tensor| -> Vec<u32> {
        let t = t.to_dtype(DType::F32).unwrap().flatten_all().unwrap();
        t.to_vec1::<f32>()
            .unwrap()
            .iter()
            .map(|v| v.to_bits())
            .collect()
    };
    a.dtype() == b.dtype() && a.dims() == b.dims() && bits(a) == bits(b)
}

#[test]
fn codes_are_a_little_endian_bit_stream() {
    let t = golden("packing");
    for bits in BITS {
        let words = t[&format!("b{bits}.words")].to_vec2::<u32>().unwrap();
        let codes = &t[&format!("b{bits}.codes_stored")];
        let codes = codes
            .to_dtype(DType::U32)
            .unwrap()
            .to_vec2::<u32>()
            .unwrap();
        for (words, codes) in words.iter().zip(&codes) {
            let unpacked: Vec<u32> = unpack_row(words, bits, 128)
                .into_iter()
                .map(u32::from)
                .collect();
            assert_eq!(&unpacked, codes, "{bits} bits");
        }
    }
}

#[test]
fn quantizing_gives_mlx_codes_scales_and_biases() {
    for bits in BITS {
        let t = golden("packing");
        let logical = t[&format!("b{bits}.codes_logical")]
            .to_dtype(DType::F32)
            .unwrap();
        let q = quantize(&logical, AffineFormat::new(bits, 32).unwrap()).unwrap();
        let words = &t[&format!("b{bits}.words")];
        assert_eq!(
            q.codes.to_vec2::<u32>().unwrap(),
            words.to_vec2::<u32>().unwrap()
        );
        assert!(same(&q.scales, &t[&format!("b{bits}.scales")]));
        assert!(same(&q.biases, &t[&format!("b{bits}.biases")]));

        let t = golden(&format!("qmm_b{bits}"));
        let mut seen = 0;
        for key in t.keys().filter_map(|k| k.strip_suffix(".w_src")) {
            for (set, dtype) in [("", DType::BF16), (".f16", DType::F16)] {
                let source = t[&format!("{key}.w_src")].to_dtype(dtype).unwrap();
                let q = quantize(&source, AffineFormat::new(bits, 64).unwrap()).unwrap();
                let get = |name: &str| &t[&format!("{key}{set}.{name}")];
                let words = get("wq").to_vec2::<u32>().unwrap();
                assert_eq!(q.codes.to_vec2::<u32>().unwrap(), words, "{key}{set}");
                assert!(same(&q.scales, get("scales")), "{key}{set}");
                assert!(same(&q.biases, get("biases")), "{key}{set}");
                seen += 1;
            }
        }
        assert!(seen >= 2);
    }
}

#[test]
fn quantizing_loses_at_most_half_a_step() {
    let values: Vec<f32> = (0..4 * 256)
        .map(|i| ((i * 7919) % 1009) as f32 / 500.0 - 0.7)
        .collect();
    let weight = Tensor::from_vec(values.clone(), (4, 256), &Device::Cpu).unwrap();
    for bits in BITS {
        for group in [32, 64, 128] {
            let format = AffineFormat::new(bits, group).unwrap();
            let q = quantize(&weight, format).unwrap();
            let back = dequantize(&q.codes, &q.scales, &q.biases, format).unwrap();
            let back = back.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            let scales = q.scales.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            for (i, (v, b)) in values.iter().zip(back).enumerate() {
                // The far end may lie up to one step outside the codes.
                assert!(
                    (v - b).abs() <= scales[i / group].abs() * 1.01,
                    "{bits} {group}"
                );
            }
        }
    }
}

#[test]
fn constant_groups_and_malformed_input() {
    let format = AffineFormat::new(4, 32).unwrap();
    for value in [0.0f32, 1.5, -3.0] {
        let weight = Tensor::full(value, (1, 32), &Device::Cpu).unwrap();
        let q = quantize(&weight, format).unwrap();
        let back = dequantize(&q.codes, &q.scales, &q.biases, format).unwrap();
        for v in back.flatten_all().unwrap().to_vec1::<f32>().unwrap() {
            assert!((v - value).abs() < 1e-6);
        }
    }
    let nan = Tensor::full(f32::NAN, (1, 32), &Device::Cpu).unwrap();
    assert!(matches!(
        quantize(&nan, format),
        Err(Error::Argument { .. })
    ));
    let odd = Tensor::zeros((1, 40), DType::F32, &Device::Cpu).unwrap();
    assert!(matches!(
        quantize(&odd, format),
        Err(Error::Argument { .. })
    ));
    let ids = Tensor::zeros((1, 32), DType::U32, &Device::Cpu).unwrap();
    assert!(matches!(quantize(&ids, format), Err(Error::DType { .. })));
    assert!(AffineFormat::new(7, 64).is_err() && AffineFormat::new(4, 48).is_err());
}

#[test]
fn parts_that_do_not_fit_are_refused() {
    let format = AffineFormat::new(4, 64).unwrap();
    let floats = |shape: (usize, usize)| Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap();
    let codes = |shape: (usize, usize)| Tensor::zeros(shape, DType::U32, &Device::Cpu).unwrap();
    let fits = dequantize(&codes((2, 16)), &floats((2, 2)), &floats((2, 2)), format);
    assert_eq!(fits.unwrap().dims(), [2, 128]);
    for (words, biases) in [((2, 15), (2, 2)), ((1, 16), (2, 2)), ((2, 16), (2, 1))] {
        let got = dequantize(&codes(words), &floats((2, 2)), &floats(biases), format);
        assert!(
            matches!(got, Err(Error::Shape { .. })),
            "{words:?} {biases:?}"
        );
    }
    let odd = AffineFormat {
        bits: 77,
        group_size: 0,
    };
    assert!(dequantize(&codes((2, 16)), &floats((2, 2)), &floats((2, 2)), odd).is_err());
    assert_eq!(unpack_row(&[0xf], 4, 10), [15, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
}
