//! Checkpoints and configurations that are damaged or hostile: a clear error each, never a panic.

mod support;

use std::path::Path;
use std::sync::OnceLock;

use candle_core::{DType, Device, Tensor};
use candle_specprefill::qwen3_5::checkpoint::Checkpoint;
use candle_specprefill::qwen3_5::config::Config;
use candle_specprefill::qwen3_5::{LoadOptions, Model};
use proptest::prelude::*;
use support::golden;
use tempfile::TempDir;

/// A copy of a golden checkpoint, to be damaged.
fn copy(name: &str) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for file in [
        "config.json",
        "model.safetensors",
        "model.safetensors.index.json",
    ] {
        let from = golden(name).join(file);
        if from.is_file() {
            std::fs::copy(from, dir.path().join(file)).unwrap();
        }
    }
    dir
}

fn load(dir: &Path) -> Result<Model, String> {
    Model::load(dir, &LoadOptions::default()).map_err(|e| e.to_string())
}

fn refused(dir: &Path, parts: &[&str]) {
    let error = load(dir).err().expect("must be refused");
    for part in parts {
        assert!(error.contains(part), "{error:?} lacks {part:?}");
    }
}

fn edit(dir: &TempDir, file: &str, from: &str, to: &str) {
    let path = dir.path().join(file);
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(text.contains(from), "{from}");
    std::fs::write(path, text.replace(from, to)).unwrap();
}

/// Changes the tensors of a checkpoint.
fn retensor(dir: &TempDir, change: impl FnOnce(&mut std::collections::HashMap<String, Tensor>)) {
    let path = dir.path().join("model.safetensors");
    let mut all = candle_core::safetensors::load(&path, &Device::Cpu).unwrap();
    change(&mut all);
    candle_core::safetensors::save(&all, &path).unwrap();
}

#[test]
fn missing_folder_and_files() {
    refused(Path::new("/nonexistent/model"), &["no such folder"]);
    let dir = tempfile::tempdir().unwrap();
    refused(dir.path(), &["config.json", "missing"]);
    let dir = copy("dense");
    std::fs::remove_file(dir.path().join("model.safetensors")).unwrap();
    refused(dir.path(), &["neither model.safetensors nor"]);
}

#[test]
fn truncated_file() {
    let dir = copy("dense");
    let path = dir.path().join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    for keep in [0, 4, 8, 100, bytes.len() / 2, bytes.len() - 1] {
        std::fs::write(&path, &bytes[..keep]).unwrap();
        refused(
            dir.path(),
            &["model.safetensors", "not a valid safetensors file"],
        );
    }
}

#[test]
fn header_longer_than_the_file() {
    let dir = copy("dense");
    let path = dir.path().join("model.safetensors");
    for length in [u64::MAX, 1 << 40, 99_999_999] {
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[..8].copy_from_slice(&length.to_le_bytes());
        std::fs::write(&path, bytes).unwrap();
        refused(dir.path(), &["not a valid safetensors file"]);
    }
}

#[test]
fn index_that_names_what_is_not_there() {
    let dir = copy("dense");
    let index =
        |text: &str| std::fs::write(dir.path().join("model.safetensors.index.json"), text).unwrap();
    index(r#"{"weight_map": {"a": "model-00002-of-00002.safetensors"}}"#);
    refused(dir.path(), &["model-00002-of-00002.safetensors", "missing"]);
    index(r#"{"weight_map": {"no.such.tensor": "model.safetensors"}}"#);
    refused(dir.path(), &["no.such.tensor", "is not"]);
    for outside in ["../model.safetensors", "/etc/passwd", "a/../../x", ""] {
        index(&format!(r#"{{"weight_map": {{"a": "{outside}"}}}}"#));
        refused(dir.path(), &["outside the folder"]);
    }
    index("{");
    refused(dir.path(), &["model.safetensors.index.json"]);
}

#[test]
fn tensors_missing_misshapen_or_of_a_wrong_kind() {
    let norm = "model.language_model.layers.3.input_layernorm.weight";
    let q = "model.language_model.layers.3.self_attn.q_proj.weight";
    let conv = "model.language_model.layers.1.linear_attn.conv1d.weight";
    let dir = copy("dense");
    retensor(&dir, |t| drop(t.remove(norm)));
    refused(dir.path(), &[norm, "missing"]);
    let dir = copy("dense");
    retensor(&dir, |t| {
        let half = t[q].narrow(0, 0, 64).unwrap().contiguous().unwrap();
        t.insert(q.into(), half);
    });
    refused(dir.path(), &[q, "shape", "config.json"]);
    let dir = copy("dense");
    retensor(&dir, |t| {
        t.insert(
            norm.into(),
            Tensor::zeros(64, DType::I64, &Device::Cpu).unwrap(),
        );
    });
    refused(dir.path(), &[norm, "I64"]);
    let dir = copy("dense");
    retensor(&dir, |t| {
        let turned = t[conv].transpose(1, 2).unwrap().contiguous().unwrap();
        t.insert(conv.into(), turned);
    });
    refused(dir.path(), &[conv, "mixes conventions"]);
}

#[test]
fn quantized_tensors_that_do_not_fit() {
    let q = "language_model.model.layers.3.self_attn.q_proj";
    let dir = copy("mlx/dense_q4g64");
    std::fs::remove_file(dir.path().join("model.safetensors.index.json")).unwrap();
    retensor(&dir, |t| drop(t.remove(&format!("{q}.scales"))));
    refused(dir.path(), &[q, "no scales"]);
    let dir = copy("mlx/dense_q4g64");
    retensor(&dir, |t| {
        let name = format!("{q}.scales");
        let nan = (&t[&name] * f64::NAN).unwrap();
        t.insert(name, nan);
    });
    refused(dir.path(), &[q, "NaN"]);
    let dir = copy("mlx/dense_custom");
    edit(&dir, "config.json", "\"bits\": 6", "\"bits\": 8");
    refused(dir.path(), &["config.json says"]);
    let dir = copy("mlx/dense_q4g64");
    edit(&dir, "config.json", "\"affine\"", "\"mxfp4\"");
    refused(dir.path(), &["config.json", "mxfp4", "only affine"]);
}

#[test]
fn configurations_that_do_not_fit() {
    let cases = [
        (
            "\"num_key_value_heads\": 2",
            "\"num_key_value_heads\": 3",
            "num_key_value_heads",
        ),
        (
            "\"num_hidden_layers\": 8",
            "\"num_hidden_layers\": 9",
            "layer_types has 8 entries",
        ),
        (
            "\"hidden_size\": 64",
            "\"hidden_size\": 0",
            "hidden_size is 0",
        ),
        (
            "\"hidden_size\": 64",
            "\"hidden_size\": 99999999999",
            "hidden_size",
        ),
        (
            "\"vocab_size\": 256",
            "\"vocab_size\": \"many\"",
            "vocab_size",
        ),
        (
            "\"rope_type\": \"default\"",
            "\"rope_type\": \"spiral\"",
            "spiral",
        ),
        (
            "\"model_type\": \"qwen3_5_text\"",
            "\"model_type\": \"llama\"",
            "model_type \"llama\" is not supported",
        ),
        (
            "\"rms_norm_eps\": 1e-06",
            "\"rms_norm_eps\": -1",
            "rms_norm_eps",
        ),
        (
            "\"partial_rotary_factor\": 0.25",
            "\"partial_rotary_factor\": 7",
            "partial_rotary_factor",
        ),
    ];
    for (from, to, part) in cases {
        let dir = copy("dense");
        edit(&dir, "config.json", from, to);
        refused(dir.path(), &["config.json", part]);
    }
}

#[test]
fn a_promised_head_without_tensors_loads_plainly() {
    let dir = copy("dense");
    retensor(&dir, |t| t.retain(|name, _| !name.starts_with("mtp.")));
    assert!(!load(dir.path()).unwrap().has_mtp());
}

#[test]
fn shards_equal_one_file() {
    let dir = copy("dense");
    let path = dir.path().join("model.safetensors");
    let all = candle_core::safetensors::load(&path, &Device::Cpu).unwrap();
    std::fs::remove_file(&path).unwrap();
    let mut map = serde_json::Map::new();
    for part in 0..2 {
        let file = format!("model-0000{}-of-00002.safetensors", part + 1);
        let mine = all.iter().enumerate().filter(|(i, _)| i % 2 == part);
        let mine: std::collections::HashMap<_, _> =
            mine.map(|(_, (n, t))| (n.clone(), t.clone())).collect();
        mine.keys()
            .for_each(|n| drop(map.insert(n.clone(), file.clone().into())));
        candle_core::safetensors::save(&mine, dir.path().join(&file)).unwrap();
    }
    let index = serde_json::json!({ "weight_map": map });
    std::fs::write(
        dir.path().join("model.safetensors.index.json"),
        index.to_string(),
    )
    .unwrap();
    let (one, two) = (load(&golden("dense")).unwrap(), load(dir.path()).unwrap());
    let run = |m: &Model| {
        let mut cache = m.new_cache().unwrap();
        support::feed(
            m,
            &mut cache,
            &[1, 2, 3],
            candle_specprefill::qwen3_5::Keep::Commit,
        )
    };
    assert!(support::same_bits(&run(&one), &run(&two)));
}

fn original(file: &str) -> &'static [u8] {
    static FILES: OnceLock<[Vec<u8>; 2]> = OnceLock::new();
    let read = |f: &str| std::fs::read(golden("mlx/dense_flat_q4g32").join(f)).unwrap();
    let files = FILES.get_or_init(|| [read("config.json"), read("model.safetensors")]);
    &files[usize::from(file != "config.json")]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn changed_bytes_of_a_configuration_never_panic(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
    ) {
        let mut bytes = original("config.json").to_vec();
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        let text = String::from_utf8_lossy(&bytes);
        let _ = Config::parse(&text, Path::new("config.json"));
    }

    #[test]
    fn changed_numbers_of_a_configuration_never_panic(
        field in prop::sample::select(vec![
            "hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads", "linear_num_value_heads",
            "linear_key_head_dim", "linear_conv_kernel_dim", "vocab_size", "intermediate_size", "max_position_embeddings",
        ]),
        value in prop::sample::select(vec![-1i64, 0, 1, 2, 3, 7, 1 << 20, 1 << 24, i64::MAX]),
    ) {
        let dir = copy("dense");
        let path = dir.path().join("config.json");
        let mut config: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        config["text_config"][field] = value.into();
        std::fs::write(&path, config.to_string()).unwrap();
        let _ = load(dir.path());
    }

    #[test]
    fn changed_bytes_of_a_header_never_panic(
        changes in prop::collection::vec((0usize..4000, any::<u8>()), 1..6),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let mut bytes = original("model.safetensors").to_vec();
        for (at, value) in changes {
            bytes[at] = value;
        }
        std::fs::write(dir.path().join("config.json"), original("config.json")).unwrap();
        std::fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
        if let Ok(checkpoint) = Checkpoint::open(dir.path()) {
            let names: Vec<String> = checkpoint.names().map(String::from).collect();
            for name in names {
                let _ = checkpoint.tensor(&name);
            }
        }
        let _ = load(dir.path());
    }
}
