//! Hugging Face checkpoints as MLX affine ones: bitwise what mlx-lm writes, and whole or not there at all.

mod support;

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use candle_core::{safetensors, DType, Device, Tensor};
use candle_specprefill::affine::AffineFormat;
use candle_specprefill::qwen3_5::convert::{convert, ConvertOptions, Converted};
use candle_specprefill::qwen3_5::{Keep, LoadOptions, Model};
use candle_specprefill::Result;
use serde_json::Value;
use support::{feed, golden, logits, same_bits, tensors};

fn options(bits: usize, group_size: usize) -> ConvertOptions {
    ConvertOptions {
        format: AffineFormat { bits, group_size },
        ..Default::default()
    }
}

fn run(source: &str, target: &Path, options: &ConvertOptions) -> Result<Converted> {
    convert(&golden(source), target, options, &mut |_| {})
}

fn load(dir: &Path) -> HashMap<String, Tensor> {
    let mut all = HashMap::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|e| e == "safetensors") {
            all.extend(safetensors::load(path, &Device::Cpu).unwrap());
        }
    }
    all
}

fn same(a: &Tensor, b: &Tensor) -> bool {
    match (a.dtype(), b.dtype()) {
        (DType::U32, DType::U32) => {
            a.dims() == b.dims()
                && a.flatten_all().unwrap().to_vec1::<u32>().unwrap()
                    == b.flatten_all().unwrap().to_vec1::<u32>().unwrap()
        }
        _ => a.dims() == b.dims() && same_bits(a, b),
    }
}

/// Every tensor of the trunk that mlx-lm wrote, and none besides.
fn trunk_is_mlx(source: &str, reference: &str, options: &ConvertOptions) {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("model");
    run(source, &target, options).unwrap();
    let ours = load(&target);
    let theirs = tensors(&format!("mlx/{reference}/model.safetensors"));
    for (name, want) in &theirs {
        let got = ours
            .get(name)
            .unwrap_or_else(|| panic!("{reference}: {name} is missing"));
        assert!(same(got, want), "{reference}: {name}: {got:?} {want:?}");
    }
    for name in ours.keys() {
        assert!(
            theirs.contains_key(name) || name.starts_with("language_model.mtp."),
            "{reference}: {name} is too many"
        );
    }
    let config = |dir: &Path| -> Value {
        serde_json::from_str(&std::fs::read_to_string(dir.join("config.json")).unwrap()).unwrap()
    };
    let (ours, theirs) = (
        config(&target),
        config(&golden(&format!("mlx/{reference}"))),
    );
    assert_eq!(ours["quantization_config"], ours["quantization"]);
    let stated = |q: &Value| -> BTreeMap<String, (u64, u64)> {
        let modules = q
            .as_object()
            .unwrap()
            .iter()
            .filter(|(name, v)| v.is_object() && !name.contains("mtp"));
        modules
            .map(|(name, v)| {
                (
                    name.clone(),
                    (
                        v["bits"].as_u64().unwrap(),
                        v["group_size"].as_u64().unwrap(),
                    ),
                )
            })
            .collect()
    };
    assert_eq!(
        stated(&ours["quantization"]),
        stated(&theirs["quantization"]),
        "{reference}"
    );
    assert_eq!(ours["quantization"]["bits"], theirs["quantization"]["bits"]);
}

#[test]
fn trunks_are_mlx_lms_to_the_bit() {
    for (reference, bits, group) in [
        ("dense_q3g64", 3, 64),
        ("dense_q4g64", 4, 64),
        ("dense_q5g64", 5, 64),
        ("dense_q8g32", 8, 32),
    ] {
        trunk_is_mlx("dense", reference, &options(bits, group));
    }
    trunk_is_mlx("dense_flat", "dense_flat_q4g32", &options(4, 32));
}

#[test]
fn mixed_formats_by_module() {
    let mut options = options(4, 64);
    let f = |bits, group_size| Some(AffineFormat { bits, group_size });
    for (name, format) in [
        ("embed_tokens", f(8, 64)),
        ("self_attn", f(5, 64)),
        ("layers.3.mlp", f(5, 64)),
        ("layers.7.mlp", f(5, 64)),
        ("out_proj", f(6, 32)),
        ("down_proj", f(6, 32)),
    ] {
        options.overrides.push((name.into(), format));
    }
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("model");
    run("dense", &target, &options).unwrap();
    let (ours, theirs) = (load(&target), tensors("mlx/dense_custom/model.safetensors"));
    let mut compared = 0;
    for (name, want) in &theirs {
        let got = &ours[name];
        // The golden's own choices differ in places; where the format agrees, so must the bits.
        let module = name.rsplit_once('.').unwrap().0;
        let codes = format!("{module}.weight");
        if ours.get(&codes).map(Tensor::dims) == theirs.get(&codes).map(Tensor::dims) {
            assert!(same(got, want), "{name}");
            compared += 1;
        }
    }
    assert!(compared > 100, "{compared}");
    let options = ConvertOptions {
        overrides: vec![("no_such_module".into(), None)],
        ..Default::default()
    };
    let error = run("dense", &dir.path().join("other"), &options)
        .unwrap_err()
        .to_string();
    assert!(error.contains("no_such_module"), "{error}");
    assert!(!dir.path().join("other").exists());
}

#[test]
fn experts_in_both_layouts() {
    trunk_is_mlx("moe", "moe_q4g64", &options(4, 64));
}

#[test]
fn the_head_is_kept_and_its_fc_is_plain() {
    for (source, head) in [("dense", "dense_mtp_q4g64"), ("moe", "moe_mtp_q4g64")] {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("model");
        assert!(run(source, &target, &options(4, 64)).unwrap().mtp_head);
        let ours = safetensors::load(target.join("mtp.safetensors"), &Device::Cpu).unwrap();
        let theirs = tensors(&format!("mlx/{head}/mtp.safetensors"));
        for (name, got) in &ours {
            if name == "language_model.mtp.fc.weight" {
                assert_eq!(got.dtype(), DType::BF16);
            } else {
                assert!(same(got, &theirs[name]), "{source}: {name}");
            }
        }
        assert_eq!(ours.len() + 2, theirs.len(), "fc has no scales and biases");
        // It runs: the loader takes trunk and head.
        let options = LoadOptions::default();
        let model = Model::load(&target, &options).unwrap();
        assert!(model.has_mtp());
        let original = Model::load(golden(source), &options).unwrap();
        let tokens: Vec<u32> = (1..40).collect();
        let read = |model: &Model| {
            let mut cache = model.new_cache().unwrap();
            logits(model, &feed(model, &mut cache, &tokens, Keep::Commit))
        };
        let (a, b) = (read(&model), read(&original));
        let power = power_of(&b);
        let error = power_of(&(a - b).unwrap());
        // Another model's logits would give 2.
        assert!(error < 0.5 * power, "{source}: {error} of {power}");
    }
}

fn power_of(t: &Tensor) -> f32 {
    t.sqr()
        .unwrap()
        .mean_all()
        .unwrap()
        .to_scalar::<f32>()
        .unwrap()
}

#[test]
fn a_target_is_never_half_written_or_lost() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("model");
    let mut settings = options(4, 64);
    run("dense", &target, &settings).unwrap();
    let before = load(&target);
    // Not without being asked.
    let error = run("dense", &target, &options(8, 64))
        .unwrap_err()
        .to_string();
    assert!(error.contains("already"), "{error}");
    // A failure while writing leaves the old model whole.
    let broken = dir.path().join("broken");
    std::fs::create_dir(&broken).unwrap();
    std::fs::copy(golden("dense/config.json"), broken.join("config.json")).unwrap();
    let mut weights = tensors("dense/model.safetensors");
    let name = "model.language_model.layers.3.mlp.up_proj.weight";
    let nan = weights[name].affine(f64::NAN, 0.0).unwrap();
    weights.insert(name.into(), nan);
    safetensors::save(&weights, broken.join("model.safetensors")).unwrap();
    settings.overwrite = true;
    let error = convert(&broken, &target, &settings, &mut |_| {})
        .unwrap_err()
        .to_string();
    assert!(error.contains(name), "{error}");
    let after = load(&target);
    assert!(before.iter().all(|(name, t)| same(t, &after[name])));
    // A folder that is no model is not replaced, even when asked; nor is the source.
    let notes = dir.path().join("notes");
    std::fs::create_dir(&notes).unwrap();
    std::fs::write(notes.join("diary.txt"), "dear diary").unwrap();
    assert!(run("dense", &notes, &settings).is_err());
    assert!(notes.join("diary.txt").is_file());
    let own = convert(&broken, &broken, &settings, &mut |_| {})
        .unwrap_err()
        .to_string();
    assert!(own.contains("source itself"), "{own}");
    // When asked, it is replaced, and nothing is left beside it.
    run(
        "dense",
        &target,
        &ConvertOptions {
            overwrite: true,
            ..options(8, 64)
        },
    )
    .unwrap();
    let mut left: Vec<_> = std::fs::read_dir(dir.path())
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    left.sort();
    assert_eq!(left, ["broken", "model", "notes"]);
}

#[test]
fn large_checkpoints_are_sharded() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("model");
    let mut last = (0, 0);
    let settings = ConvertOptions {
        shard_bytes: 100_000,
        ..options(4, 64)
    };
    convert(&golden("dense"), &target, &settings, &mut |p| {
        assert!(p.done > last.0 && p.done <= p.total, "{p:?}");
        last = (p.done, p.total);
    })
    .unwrap();
    assert_eq!(last.0, last.1);
    assert!(target.join("model-00001-of-00004.safetensors").is_file());
    let theirs = tensors("mlx/dense_q4g64/model.safetensors");
    let ours = load(&target);
    assert!(theirs.iter().all(|(name, t)| same(t, &ours[name])));
    Model::load(&target, &LoadOptions::default()).unwrap();
}

#[test]
fn quantized_sources_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("model");
    let error = run("mlx/dense_q4g64", &target, &options(4, 64))
        .unwrap_err()
        .to_string();
    assert!(error.contains("Hugging Face"), "{error}");
    assert!(!target.exists());
}
