//! Files made to break a loader: each is refused with an error that names file and tensor, without a panic and without an
//! allocation that a small file could not pay for.

mod support;

use std::collections::HashMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use candle_specprefill::qwen3_5::checkpoint::Checkpoint;
use candle_specprefill::qwen3_5::config::Config;
use candle_specprefill::qwen3_5::{LoadOptions, Model};
use support::golden;
use tempfile::TempDir;

const FILE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

fn copy(name: &str) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for file in ["config.json", FILE] {
        std::fs::copy(golden(name).join(file), dir.path().join(file)).unwrap();
    }
    dir
}

fn retensor(dir: &TempDir, change: impl FnOnce(&mut HashMap<String, Tensor>)) {
    let path = dir.path().join(FILE);
    let mut all = candle_core::safetensors::load(&path, &Device::Cpu).unwrap();
    change(&mut all);
    candle_core::safetensors::save(&all, &path).unwrap();
}

fn load(dir: &TempDir) -> Result<Model, String> {
    Model::load(dir.path(), &LoadOptions::default()).map_err(|e| e.to_string())
}

#[track_caller]
fn refused<T>(result: Result<T, String>, parts: &[&str]) {
    let error = result.err().expect("must be refused");
    for part in parts {
        assert!(error.contains(part), "{error:?} lacks {part:?}");
    }
}

/// Opens a file of this header and this much data.
fn open(header: impl AsRef<[u8]>, data: usize) -> Result<Checkpoint, String> {
    let (header, dir) = (header.as_ref(), tempfile::tempdir().unwrap());
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header);
    bytes.resize(bytes.len() + data, 0);
    std::fs::write(dir.path().join(FILE), bytes).unwrap();
    let checkpoint = Checkpoint::open(dir.path()).map_err(|e| e.to_string())?;
    // Whatever opens can be read.
    for name in checkpoint.names() {
        checkpoint.tensor(name).map_err(|e| e.to_string())?;
    }
    Ok(checkpoint)
}

fn f32s(name: &str, shape: &str, from: u64, to: u64) -> String {
    format!(r#""{name}":{{"dtype":"F32","shape":{shape},"data_offsets":[{from},{to}]}}"#)
}

#[test]
fn header_that_is_no_json_or_no_text() {
    for header in [
        &b"\xff\xfe{}"[..],
        b"{",
        b"[]",
        b"null",
        b"{}{}",
        b"\0\0\0\0",
        b"{\"a\":1}",
    ] {
        refused(open(header, 0), &[FILE, "header"]);
    }
}

#[test]
fn header_nested_deeper_than_a_stack() {
    let deep = format!("{{\"a\":{}", "[".repeat(1_000_000));
    refused(open(deep, 0), &[FILE, "header"]);
}

#[test]
fn header_longer_than_the_format_allows() {
    // A sparse file: its length is true, its header is beyond what readers of the format take.
    let dir = tempfile::tempdir().unwrap();
    let file = std::fs::File::create(dir.path().join(FILE)).unwrap();
    std::io::Write::write_all(&mut &file, &100_000_001u64.to_le_bytes()).unwrap();
    file.set_len(100_000_100).unwrap();
    let error = Checkpoint::open(dir.path()).map_err(|e| e.to_string());
    refused(error, &[FILE, "header of 100000001 bytes"]);
}

#[test]
fn duplicate_names() {
    let both = |second: &str| format!("{{{},{second}}}", f32s("a.weight", "[2]", 0, 8));
    for second in [
        f32s("a.weight", "[2]", 0, 8),
        f32s("a.weight", "[1,2]", 0, 8),
    ] {
        refused(open(both(&second), 8), &[FILE, "a.weight", "twice"]);
    }
    let metadata = r#"{"__metadata__":{"format":"pt"},"__metadata__":{"format":"mlx"}}"#;
    refused(open(metadata, 0), &[FILE, "header"]);
}

#[test]
fn offsets_that_overlap_or_leave_gaps() {
    let two = |a: (u64, u64), b: (u64, u64)| {
        format!(
            "{{{},{}}}",
            f32s("a", "[2]", a.0, a.1),
            f32s("b", "[2]", b.0, b.1)
        )
    };
    assert!(open(two((0, 8), (8, 16)), 16).is_ok());
    refused(open(two((0, 8), (4, 12)), 12), &[FILE, "header"]);
    refused(open(two((0, 8), (0, 8)), 8), &[FILE, "header"]);
    refused(open(two((0, 8), (12, 20)), 20), &[FILE, "header"]);
    refused(open(two((4, 12), (12, 20)), 20), &[FILE, "header"]);
    refused(open(two((8, 0), (8, 16)), 16), &[FILE, "header"]);
    refused(open(two((0, 8), (8, 16)), 15), &[FILE, "truncated"]);
    refused(open(two((0, 8), (8, 16)), 17), &[FILE, "data"]);
    let end = f32s("a", "[2]", u64::MAX - 8, u64::MAX);
    refused(open(format!("{{{end}}}"), 8), &[FILE, "header"]);
}

#[test]
fn shapes_that_overflow_or_do_not_fit_their_bytes() {
    let one = |shape: &str, to: u64| format!("{{{}}}", f32s("a", shape, 0, to));
    let huge = "[4294967296,4294967296,4]";
    refused(open(one(huge, 0), 0), &[FILE, "header"]);
    refused(open(one("[18446744073709551615]", 8), 8), &[FILE, "header"]);
    refused(open(one("[99999999999999999999]", 8), 8), &[FILE, "header"]);
    refused(open(one("[-1]", 8), 8), &[FILE, "header"]);
    refused(open(one("[3]", 8), 8), &[FILE, "header"]);
    refused(open(one("[1000000000000]", 8), 8), &[FILE, "header"]);
}

#[test]
fn dimensions_of_zero() {
    // Legal in the format, and no model's tensor: a huge dimension beside a zero must size nothing.
    let zero = format!("{{{}}}", f32s("a", "[0,18446744073709551615]", 0, 0));
    let opened = open(zero, 0);
    assert!(opened.is_err() || opened.unwrap().size_bytes("a") == Some(0));
    let q = "model.language_model.layers.3.self_attn.q_proj.weight";
    let dir = copy("dense");
    retensor(&dir, |t| {
        t.insert(
            q.into(),
            Tensor::zeros((0, 64), DType::F32, &Device::Cpu).unwrap(),
        );
    });
    refused(load(&dir), &[FILE, q, "shape [0, 64]"]);
}

#[test]
fn dtypes_that_nobody_knows() {
    let of =
        |dtype: &str| format!(r#"{{"a":{{"dtype":"{dtype}","shape":[8],"data_offsets":[0,8]}}}}"#);
    refused(open(of("F7"), 8), &[FILE, "header"]);
    refused(open(of("F8_E4M3"), 8), &[FILE, "tensor a", "F8_E4M3"]);
}

#[test]
fn stale_index() {
    // An index of another export: names that the file does not have, and a tensor in two shards.
    let dir = copy("dense");
    let index = |text: String| std::fs::write(dir.path().join(INDEX), text).unwrap();
    let norm = "model.language_model.norm.weight";
    index(format!(
        r#"{{"weight_map":{{"{norm}":"{FILE}","old.weight":"{FILE}"}}}}"#
    ));
    refused(load(&dir), &[FILE, "old.weight", "it is not"]);
    std::fs::copy(dir.path().join(FILE), dir.path().join("b.safetensors")).unwrap();
    index(format!(
        r#"{{"weight_map":{{"{norm}":"{FILE}","lm_head.weight":"b.safetensors"}}}}"#
    ));
    refused(load(&dir), &["in another file of this checkpoint too"]);
}

#[test]
fn index_that_is_malformed_or_leaves_the_folder() {
    let dir = copy("dense");
    let index = |text: &str| std::fs::write(dir.path().join(INDEX), text).unwrap();
    for text in [
        "",
        "[]",
        "{}",
        r#"{"weight_map": []}"#,
        r#"{"weight_map": {"a": 1}}"#,
    ] {
        index(text);
        refused(load(&dir), &[INDEX]);
    }
    index(r#"{"weight_map": {}}"#);
    refused(load(&dir), &["no text model found"]);
    for outside in [
        "../b.safetensors",
        "/etc/hostname",
        "./../x",
        "a/../../x",
        "..",
    ] {
        index(&format!(r#"{{"weight_map": {{"a": "{outside}"}}}}"#));
        refused(load(&dir), &[INDEX, "outside the folder"]);
    }
}

#[test]
fn missing_tail_shard() {
    let dir = copy("dense");
    let map: HashMap<String, String> = Checkpoint::open(dir.path())
        .unwrap()
        .names()
        .map(|name| match name.contains("layers.7") {
            true => (name.into(), "model-00002-of-00002.safetensors".into()),
            false => (name.into(), FILE.into()),
        })
        .collect();
    let index = serde_json::json!({ "weight_map": map });
    std::fs::write(dir.path().join(INDEX), index.to_string()).unwrap();
    refused(load(&dir), &["model-00002-of-00002.safetensors", "missing"]);
}

#[test]
fn file_that_shrinks_after_it_was_opened() {
    let dir = copy("dense");
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let file = std::fs::OpenOptions::new()
        .write(true)
        .open(dir.path().join(FILE));
    file.unwrap().set_len(1000).unwrap();
    let last = checkpoint.names().last().unwrap().to_string();
    let all: Vec<_> = checkpoint.names().map(|n| checkpoint.tensor(n)).collect();
    assert!(all.iter().any(Result::is_err), "{last}");
    for error in all.into_iter().filter_map(Result::err) {
        assert!(error.to_string().contains(FILE), "{error}");
    }
}

#[test]
fn draft_head_that_is_incomplete() {
    // A head that lost tensors in an export must not run with what is left.
    let norm = "mtp.layers.0.input_layernorm.weight";
    let dir = copy("dense");
    retensor(&dir, |t| drop(t.remove(norm)));
    refused(load(&dir), &[norm, "missing"]);
    let fused = "mtp.layers.0.self_attn.qkv_proj.weight";
    let dir = copy("dense");
    retensor(&dir, |t| {
        let q = t.remove("mtp.layers.0.self_attn.q_proj.weight").unwrap();
        t.insert(fused.into(), q);
    });
    refused(load(&dir), &["mtp.layers.0.self_attn.q_proj", "missing"]);
}

#[test]
fn float_draft_head_beside_quantized_trunk() {
    // Quantized or not is each module's own affair, told by its scales.
    let dir = copy("mlx/dense_q4g64");
    let plain = candle_core::safetensors::load(golden("dense").join(FILE), &Device::Cpu).unwrap();
    let head = plain
        .into_iter()
        .filter(|(name, _)| name.starts_with("mtp."));
    let head: HashMap<_, _> = head.collect();
    assert!(!head.is_empty());
    candle_core::safetensors::save(&head, dir.path().join("mtp.safetensors")).unwrap();
    assert!(load(&dir).unwrap().has_mtp());
}

#[test]
fn scales_that_are_not_numbers() {
    let q = "language_model.model.layers.3.self_attn.q_proj";
    for (tensor, by) in [("scales", f64::INFINITY), ("biases", f64::NAN)] {
        let dir = copy("mlx/dense_q4g64");
        retensor(&dir, |t| {
            let name = format!("{q}.{tensor}");
            let broken = (&t[&name] * by).unwrap();
            t.insert(name, broken);
        });
        refused(load(&dir), &[FILE, q, tensor]);
    }
    // Zero and denormal scales are numbers.
    for by in [0.0, 1e-38] {
        let dir = copy("mlx/dense_q4g64");
        retensor(&dir, |t| {
            let name = format!("{q}.scales");
            let small = (&t[&name] * by).unwrap();
            t.insert(name, small);
        });
        assert!(load(&dir).is_ok());
    }
}

#[test]
fn packed_codes_of_another_width() {
    let q = "language_model.model.layers.3.self_attn.q_proj";
    let dir = copy("mlx/dense_q4g64");
    retensor(&dir, |t| {
        let name = format!("{q}.weight");
        let words = t[&name].dim(1).unwrap();
        let half = t[&name].narrow(1, 0, words - 1).unwrap().contiguous();
        t.insert(name, half.unwrap());
    });
    refused(load(&dir), &[FILE, q]);
    let dir = copy("mlx/dense_q4g64");
    retensor(&dir, |t| {
        let name = format!("{q}.biases");
        let rows = t[&name].narrow(0, 0, 1).unwrap().contiguous();
        t.insert(name, rows.unwrap());
    });
    refused(load(&dir), &[FILE, q, "biases", "shape"]);
    let dir = copy("mlx/dense_q4g64");
    retensor(&dir, |t| drop(t.remove(&format!("{q}.biases"))));
    refused(load(&dir), &[q, "biases", "missing"]);
}

#[test]
fn tied_embeddings_with_and_without_a_head() {
    let head = "lm_head.weight";
    let untie = |dir: &TempDir| {
        let path = dir.path().join("config.json");
        let config = std::fs::read_to_string(&path).unwrap();
        let tied = "\"tie_word_embeddings\": true";
        assert!(config.contains(tied));
        let untied = config.replace(tied, "\"tie_word_embeddings\": false");
        std::fs::write(path, untied).unwrap();
    };
    let add_head = |dir: &TempDir| {
        retensor(dir, |t| {
            let misshapen = Tensor::zeros((3, 5), DType::F32, &Device::Cpu).unwrap();
            t.insert(head.into(), misshapen);
        })
    };
    let dir = copy("dense");
    untie(&dir);
    refused(load(&dir), &[head, "tie_word_embeddings"]);
    add_head(&dir);
    refused(load(&dir), &[FILE, head, "shape [3, 5]"]);
    // A head that a tied model also has is not used, whatever it holds.
    let dir = copy("dense");
    add_head(&dir);
    assert!(load(&dir).is_ok());
}

#[test]
fn embedding_rows_that_are_not_the_vocabulary() {
    let table = "model.language_model.embed_tokens.weight";
    let dir = copy("dense");
    retensor(&dir, |t| {
        let fewer = t[table].narrow(0, 0, 255).unwrap().contiguous().unwrap();
        t.insert(table.into(), fewer);
    });
    refused(load(&dir), &[FILE, table, "shape"]);
}

#[test]
fn configuration_that_is_no_object_or_very_deep() {
    let parse =
        |text: &str| Config::parse(text, Path::new("config.json")).map_err(|e| e.to_string());
    for text in [
        "",
        "null",
        "[]",
        "{}",
        "3",
        r#"{"text_config": 3}"#,
        r#"{"text_config": {}}"#,
    ] {
        refused(parse(text), &["config.json"]);
    }
    refused(parse(&"[".repeat(1_000_000)), &["config.json"]);
    refused(parse(&"{\"a\":".repeat(100_000)), &["config.json"]);
}

#[test]
fn layers_and_sizes_that_would_exhaust_memory() {
    let dir = copy("dense");
    let path = dir.path().join("config.json");
    let config: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let set = |field: &str, value: u64| {
        let mut config = config.clone();
        match config.get("text_config") {
            Some(_) => config["text_config"][field] = value.into(),
            None => config[field] = value.into(),
        }
        // Layer types would object first.
        config.as_object_mut().unwrap().remove("layer_types");
        std::fs::write(&path, config.to_string()).unwrap();
        load(&dir)
    };
    refused(set("num_hidden_layers", 1 << 40), &["num_hidden_layers"]);
    refused(set("num_hidden_layers", 5000), &["num_hidden_layers"]);
    refused(set("vocab_size", 1 << 24), &[FILE, "embed_tokens"]);
    refused(
        set("linear_num_value_heads", 1 << 23),
        &["config.json", "too large"],
    );
    refused(set("head_dim", 1 << 24), &["config.json"]);
}
