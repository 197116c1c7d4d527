//! `metal/embed.metal`.

use candle_core::{DType, Device};
use candle_specprefill::ops::affine_matmul::{embed, Weight};
use candle_specprefill::ops::Context;
use metal_emulator::Mode;

use crate::matmul::parts;
use crate::needs_clang;
use crate::support::*;
use crate::support_ops::*;

const IDS: [u32; 6] = [20, 0, 7, 7, 19, 1];

/// Every bit width and group size: the CPU's bits where scales are of 16 bits, a unit in the last place where they are f32.
#[test]
fn rows_of_affine_weights_are_the_cpus() {
    needs_clang!();
    for mode in MODES {
        let cx = emulated(mode);
        for (i, width) in [2, 3, 4, 5, 6, 8].into_iter().enumerate() {
            for (j, group) in [32, 64, 128].into_iter().enumerate() {
                let stored = DTYPES[(i + j) % 3];
                let weight = parts(i as u64, 21, group * 3, width, group, stored).weight;
                for dtype in DTYPES {
                    let got = embed(&cx, &weight, &IDS, dtype).unwrap();
                    let want = weight.embed(&IDS, dtype).unwrap();
                    assert_eq!((got.dtype(), got.dims()), (dtype, want.dims()));
                    match stored {
                        DType::F32 => assert_close(&got, &want, tolerance(dtype)),
                        _ => assert_eq!(bits(&got), bits(&want), "{width} bits"),
                    }
                }
            }
        }
        assert_all_emulated(&cx);
    }
}

#[test]
fn rows_of_plain_weights_and_wrong_ids() {
    needs_clang!();
    for mode in MODES {
        let cx = emulated(mode);
        for stored in DTYPES {
            let weight = noise(&[21, 40], 3, 2.0, stored);
            let weight = Weight::dense(&weight, &Device::Cpu).unwrap();
            for dtype in DTYPES {
                let got = embed(&cx, &weight, &IDS, dtype).unwrap();
                assert_eq!(bits(&got), bits(&weight.embed(&IDS, dtype).unwrap()));
            }
            assert!(embed(&cx, &weight, &[3, 21], DType::F32).is_err());
            assert!(embed(&cx, &weight, &[3], DType::U32).is_err());
        }
    }
    let weight = parts(1, 5, 64, 4, 32, DType::F16).weight;
    let none = embed(&emulated(Mode::Fast), &weight, &[], DType::F16).unwrap();
    assert_eq!(none.dims(), [0, 64]);
    assert!(embed(&Context::default(), &weight, &[5], DType::F16).is_err());
}
