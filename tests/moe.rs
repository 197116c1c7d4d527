//! Mixture-of-experts models: reference values, layouts of experts, rows that do not depend on their company.

mod support;

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use candle_specprefill::mtp::{prefill, Depth, PrefillOptions, Sampling, Session, SessionOptions};
use candle_specprefill::ops::Context;
use candle_specprefill::qwen3_5::checkpoint::Checkpoint;
use candle_specprefill::qwen3_5::config::Config;
use candle_specprefill::qwen3_5::{Cache, DraftRows, Keep, LoadOptions, Model, Rows};
use candle_specprefill::Error;
use support::{distance, feed, golden, ids, load, logits, same_bits, same_contents, tensors};
use tempfile::TempDir;

type Tensors = std::collections::HashMap<String, Tensor>;

/// A checkpoint with a golden's config.json and these tensors.
fn write(config: &str, all: &Tensors) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(
        golden(config).join("config.json"),
        dir.path().join("config.json"),
    )
    .unwrap();
    candle_core::safetensors::save(all, dir.path().join("model.safetensors")).unwrap();
    dir
}

fn open(dir: &Path) -> Result<Model, Error> {
    Model::load(dir, &LoadOptions::default())
}

fn prompt(n: usize) -> Vec<u32> {
    let next = |s: &u32| Some(s.wrapping_mul(1_664_525).wrapping_add(1_013_904_223));
    let stream = std::iter::successors(Some(7), next);
    stream.skip(1).take(n).map(|s| (s >> 16) % 256).collect()
}

fn all_logits(model: &Model, tokens: &[u32]) -> Tensor {
    let mut cache = model.new_cache().unwrap();
    logits(model, &feed(model, &mut cache, tokens, Keep::Commit))
}

/// The head's output for the golden's rows.
fn draft(model: &Model) -> Tensor {
    let g = tensors("moe/mtp_golden.safetensors");
    let mut cache = model.new_cache().unwrap();
    let positions: Vec<u32> = (0..70).collect();
    let rows = DraftRows {
        cache: &mut cache,
        tokens: &ids(&g["next_tokens"]),
        hidden: &g["trunk_hidden_post_norm"],
        positions: &positions,
    };
    model.draft(&Context::default(), &mut [rows]).unwrap()
}

#[test]
fn draft_heads_in_both_layouts_are_the_same() {
    let fused = load("moe", DType::F32);
    let mut all = tensors("moe/model.safetensors");
    all.retain(|name, _| !name.starts_with("mtp."));
    all.extend(tensors("moe/mtp_per_expert.safetensors"));
    let dir = write("moe", &all);
    let per_expert = open(dir.path()).unwrap();
    assert!(per_expert.has_mtp());
    assert!(same_bits(&draft(&fused), &draft(&per_expert)));
}

#[test]
fn quantized_side_car_head_equals_mlx() {
    let mut all = tensors("moe/model.safetensors");
    all.retain(|name, _| !name.starts_with("mtp."));
    let dir = write("moe", &all);
    let side = golden("mlx/moe_mtp_q4g64/mtp.safetensors");
    std::fs::copy(side, dir.path().join("mtp.safetensors")).unwrap();
    let out = draft(&open(dir.path()).unwrap());
    let want = &tensors("mlx/moe_mtp_q4g64/golden.safetensors")["mtp_hidden_f32act"];
    let d = distance(&out.narrow(0, 54, 16).unwrap(), want);
    assert!(d < 5e-5, "{d}");
}

/// Every place in which writers keep a head beside its trunk.
#[test]
fn side_cars_are_found_under_every_name() {
    let mut all = tensors("moe/model.safetensors");
    all.retain(|name, _| !name.starts_with("mtp."));
    let side = golden("mlx/moe_mtp_q4g64/mtp.safetensors");
    let mut outs = vec![];
    for name in [
        "mtp.safetensors",
        "model-mtp.safetensors",
        "mtp/weights.safetensors",
    ] {
        let dir = write("moe", &all);
        assert!(!open(dir.path()).unwrap().has_mtp());
        let file = dir.path().join(name);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::copy(&side, file).unwrap();
        outs.push(draft(&open(dir.path()).unwrap()));
    }
    assert!(outs.iter().all(|out| same_bits(out, &outs[0])));
}

/// A folder as `qwen3_5_mtp` repositories are: no prefix, and a note of who wrote it.
fn head_folder(all: &Tensors, format: &str) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let notes = std::collections::HashMap::from([("format".to_string(), format.to_string())]);
    let file = dir.path().join("model.safetensors");
    safetensors::serialize_to_file(all.iter(), Some(notes), &file).unwrap();
    dir
}

#[test]
fn a_head_may_have_a_repository_of_its_own() {
    let with_head = |trunk: &str, head: &TempDir| {
        let config = Config::read(golden(trunk)).unwrap();
        let checkpoint = Checkpoint::open(golden(trunk))
            .unwrap()
            .with_head(head.path());
        Model::from_checkpoint(&config, &checkpoint.unwrap(), &LoadOptions::default()).unwrap()
    };
    // Raw, converted (norms hold 1 + w), and quantized: each beside a raw trunk that has a head itself.
    let mut raw = Tensors::new();
    for (name, tensor) in tensors("moe/model.safetensors") {
        if let Some(own) = name.strip_prefix("mtp.") {
            raw.insert(own.to_string(), tensor);
        }
    }
    let converted = raw.iter().map(|(name, tensor)| {
        let tensor = match name.contains("norm") {
            true => (tensor.to_dtype(DType::F32).unwrap() + 1.0).unwrap(),
            false => tensor.clone(),
        };
        (name.clone(), tensor)
    });
    let converted: Tensors = converted.collect();
    let want = draft(&load("moe", DType::F32));
    let damaged: Tensors = (raw.iter())
        .map(|(name, t)| (name.clone(), t.affine(0.5, 0.0).unwrap()))
        .collect();
    assert!(!same_bits(
        &draft(&with_head("moe", &head_folder(&damaged, "pt"))),
        &want
    ));
    assert!(same_bits(
        &draft(&with_head("moe", &head_folder(&raw, "pt"))),
        &want
    ));
    assert!(same_bits(
        &draft(&with_head("moe", &head_folder(&converted, "mlx"))),
        &want
    ));

    let mut all = tensors("moe/model.safetensors");
    all.retain(|name, _| !name.starts_with("mtp."));
    let dir = write("moe", &all);
    let side = golden("mlx/moe_mtp_q4g64/mtp.safetensors");
    std::fs::copy(&side, dir.path().join("mtp.safetensors")).unwrap();
    let want = draft(&open(dir.path()).unwrap());
    let quantized = tensors("mlx/moe_mtp_q4g64/mtp.safetensors").into_iter();
    let own = |name: String| {
        name.strip_prefix("language_model.mtp.")
            .unwrap()
            .to_string()
    };
    let quantized: Tensors = quantized.map(|(name, t)| (own(name), t)).collect();
    let got = draft(&with_head("moe", &head_folder(&quantized, "mlx")));
    assert!(same_bits(&got, &want));

    // A folder without a head says so.
    let none = head_folder(&Tensors::from([("a".into(), want)]), "mlx");
    let checkpoint = Checkpoint::open(golden("moe")).unwrap();
    let error = checkpoint.with_head(none.path()).err().unwrap().to_string();
    assert!(error.contains("no MTP head"), "{error}");
}

/// The same quantized experts stacked (MLX), fused, and one by one.
#[test]
fn quantized_experts_in_every_layout_are_the_same() {
    let stacked = tensors("mlx/moe_q4g64/model.safetensors");
    let (mut fused, mut single) = (Tensors::new(), Tensors::new());
    for (name, tensor) in &stacked {
        let Some((layer, rest)) = name.split_once("switch_mlp.") else {
            fused.insert(name.clone(), tensor.clone());
            single.insert(name.clone(), tensor.clone());
            continue;
        };
        for e in 0..tensor.dim(0).unwrap() {
            single.insert(format!("{layer}experts.{e}.{rest}"), tensor.get(e).unwrap());
        }
        if let Some(suffix) = rest.strip_prefix("gate_proj") {
            let up = &stacked[&format!("{layer}switch_mlp.up_proj{suffix}")];
            let both = Tensor::cat(&[tensor, up], 1).unwrap();
            fused.insert(format!("{layer}experts.gate_up_proj{suffix}"), both);
        } else if rest.starts_with("down_proj") {
            fused.insert(format!("{layer}experts.{rest}"), tensor.clone());
        }
    }
    let tokens = prompt(12);
    let want = all_logits(&load("mlx/moe_q4g64", DType::F32), &tokens);
    for all in [fused, single] {
        let dir = write("mlx/moe_q4g64", &all);
        let got = all_logits(&open(dir.path()).unwrap(), &tokens);
        assert!(same_bits(&got, &want));
    }
}

#[test]
fn experts_that_are_missing_or_misshapen_are_named() {
    let name = "language_model.model.layers.2.mlp.switch_mlp.up_proj";
    let refused = |change: &dyn Fn(&mut Tensors), parts: &[&str]| {
        let mut all = tensors("mlx/moe_q4g64/model.safetensors");
        change(&mut all);
        let dir = write("mlx/moe_q4g64", &all);
        let error = open(dir.path()).err().unwrap().to_string();
        for part in parts {
            assert!(error.contains(part), "{error:?} lacks {part:?}");
        }
    };
    let weight = format!("{name}.weight");
    refused(&|t| drop(t.remove(&weight)), &[name, "missing"]);
    let scales = format!("{name}.scales");
    refused(&|t| drop(t.remove(&scales)), &[name, "no scales"]);
    let fewer = |t: &mut Tensors| {
        let seven = t[&weight].narrow(0, 0, 7).unwrap();
        t.insert(weight.clone(), seven.contiguous().unwrap());
    };
    refused(&fewer, &[name, "do not make"]);
    let none = |t: &mut Tensors| t.retain(|name, _| !name.contains("layers.1.mlp.switch_mlp"));
    refused(
        &none,
        &["layers.1.mlp.experts.0.gate_proj.weight", "missing"],
    );
}

#[test]
fn many_rows_equal_one_row_passes() {
    for (name, dtype) in [
        ("moe", DType::F32),
        ("moe", DType::BF16),
        ("mlx/moe_q4g64", DType::F32),
        ("mlx/moe_q4g64", DType::BF16),
    ] {
        let model = load(name, dtype);
        let all = prompt(5 + 16);
        let mut alone = model.new_cache().unwrap();
        let rows: Vec<Tensor> = all
            .iter()
            .map(|t| logits(&model, &feed(&model, &mut alone, &[*t], Keep::Commit)))
            .collect();
        let want = Tensor::cat(&rows, 0).unwrap();
        for m in [2, 3, 4, 8, 16] {
            let mut cache = model.new_cache().unwrap();
            feed(&model, &mut cache, &all[..5], Keep::Commit);
            let got = feed(&model, &mut cache, &all[5..5 + m], Keep::Pending);
            let got = logits(&model, &got);
            assert!(
                same_bits(&got, &want.narrow(0, 5, m).unwrap()),
                "{name} {dtype:?} m={m}"
            );
            cache.accept(m).unwrap();
            if m == 16 {
                assert!(same_contents(&cache, &alone), "{name} {dtype:?}");
            }
        }
    }
}

#[test]
fn sequences_that_share_a_pass_are_as_they_are_alone() {
    let model = load("mlx/moe_q4g64", DType::BF16);
    let cx = Context::default();
    let (a, b) = (prompt(9), prompt(14)[9..].to_vec());
    let [want_a, want_b] = [&a, &b].map(|t| all_logits(&model, t));
    let (mut first, mut second) = (model.new_cache().unwrap(), model.new_cache().unwrap());
    let positions: Vec<u32> = (0..9).collect();
    let rows = |cache, tokens| Rows {
        cache,
        tokens,
        positions: &positions[..<[u32]>::len(tokens)],
        keep: Keep::Commit,
    };
    let mut batch = [rows(&mut first, &a[..]), rows(&mut second, &b[..])];
    let got = model.forward(&cx, &mut batch).unwrap();
    let got = logits(&model, &got);
    assert!(same_bits(&got.narrow(0, 0, 9).unwrap(), &want_a));
    assert!(same_bits(&got.narrow(0, 9, 5).unwrap(), &want_b));
}

/// However many rows chose an expert, a pass reads it once.
#[test]
fn a_pass_reads_each_touched_expert_once() {
    let model = load("mlx/moe_q4g64", DType::F32);
    let reads = |tokens: &[u32]| {
        let cx = Context::default();
        let mut cache: Cache = model.new_cache().unwrap();
        let positions: Vec<u32> = (0..tokens.len() as u32).collect();
        let rows = Rows {
            cache: &mut cache,
            tokens,
            positions: &positions,
            keep: Keep::Commit,
        };
        model.forward(&cx, &mut [rows]).unwrap();
        cx.routes().snapshot()["moe/expert/f32"]
    };
    let layers = model.config().num_hidden_layers as u64;
    assert_eq!(reads(&prompt(1)), 2 * layers);
    assert_eq!(reads(&prompt(70)), 8 * layers);
    let four = reads(&prompt(4));
    assert!((2 * layers..8 * layers).contains(&four), "{four}");
    assert_eq!(model.expert_bytes(), 3 * 64 * (64 / 2 + 4));
}

/// The experts of 35B-A3B, 256 of which 8 are chosen: bytes of a pass of four rows.
#[test]
fn four_rows_of_256_experts_read_no_expert_twice() {
    let (experts, top, hidden, inner) = (256, 8, 64, 32);
    let mut all = tensors("moe/model.safetensors");
    all.retain(|name, _| !name.starts_with("mtp."));
    let mut layers = 0;
    for (name, tensor) in &mut all {
        let noise = |shape: &[usize]| Tensor::randn(0f32, 0.05, shape, &Device::Cpu).unwrap();
        if name.ends_with("mlp.gate.weight") {
            layers += 1;
            // Equal scores: every row chooses the first eight.
            *tensor = Tensor::zeros((experts, hidden), DType::F32, &Device::Cpu).unwrap();
        } else if name.ends_with("experts.gate_up_proj") {
            *tensor = noise(&[experts, 2 * inner, hidden]);
        } else if name.ends_with("experts.down_proj") {
            *tensor = noise(&[experts, hidden, inner]);
        }
    }
    let dir = write("moe", &all);
    let file = dir.path().join("config.json");
    let mut config: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    let text = match config.get_mut("text_config") {
        Some(text) => text,
        None => &mut config,
    };
    text["num_experts"] = experts.into();
    text["num_experts_per_tok"] = top.into();
    text["moe_intermediate_size"] = inner.into();
    std::fs::write(&file, config.to_string()).unwrap();
    let model = open(dir.path()).unwrap();
    assert_eq!(model.expert_bytes(), 4 * 3 * hidden * inner);
    let read = |tokens: &[u32]| {
        let cx = Context::default();
        let mut cache = model.new_cache().unwrap();
        let positions: Vec<u32> = (0..tokens.len() as u32).collect();
        let rows = Rows {
            cache: &mut cache,
            tokens,
            positions: &positions,
            keep: Keep::Pending,
        };
        model.forward(&cx, &mut [rows]).unwrap();
        model.bytes_read(&cx, 1)
    };
    let one = read(&prompt(1));
    let rest = model.bytes_read(&Context::default(), 1);
    assert_eq!(one - rest, layers * top * model.expert_bytes());
    // The same eight experts for four rows, once each.
    assert_eq!(read(&prompt(4)), one);
    assert_eq!(read(&prompt(16)), one);
    assert!(rest + layers * experts * model.expert_bytes() == model.pass_bytes());
}

fn answer(model: &Model, depth: usize, sampling: &Sampling) -> Vec<u32> {
    let cx = Context::default();
    let mut cache = model.new_cache().unwrap();
    let (tokens, options) = (prompt(20), PrefillOptions::default());
    let last = prefill(model, &cx, &mut cache, &tokens, None, &options, &mut |_| {}).unwrap();
    let options = SessionOptions {
        depth: Depth::Fixed(depth),
        sampling: sampling.clone(),
        max_tokens: 24,
        ..Default::default()
    };
    let mut session = Session::new(model, &cx, cache, &last, options).unwrap();
    let mut tokens = vec![];
    while session.finished().is_none() {
        tokens.extend(session.step(model, &cx).unwrap());
    }
    tokens
}

#[test]
fn speculation_never_changes_a_token() {
    for (dtype, temperature) in [(DType::F32, 0.0), (DType::BF16, 0.0), (DType::BF16, 0.8)] {
        let model = load("moe", dtype);
        let sampling = Sampling {
            temperature,
            seed: 3,
            ..Default::default()
        };
        let plain = answer(&model, 0, &sampling);
        for depth in 1..=4 {
            assert_eq!(answer(&model, depth, &sampling), plain, "{depth}");
        }
    }
}

/// A row of NaN embeddings stays alone with its damage.
#[test]
fn nan_in_one_row_stays_there() {
    let mut all = tensors("moe/model.safetensors");
    let name = "model.language_model.embed_tokens.weight";
    let table = all[name].to_dtype(DType::F32).unwrap();
    let mut rows = table.to_vec2::<f32>().unwrap();
    rows[9].fill(f32::NAN);
    all.insert(name.into(), Tensor::new(rows, &Device::Cpu).unwrap());
    let dir = write("moe", &all);
    let model = open(dir.path()).unwrap();
    let run = |other: u32| {
        let (mut a, mut b) = (model.new_cache().unwrap(), model.new_cache().unwrap());
        let rows = |cache, tokens| Rows {
            cache,
            tokens,
            positions: &[0],
            keep: Keep::Commit,
        };
        let mut batch = [
            rows(&mut a, &[1][..]),
            rows(&mut b, std::slice::from_ref(&other)),
        ];
        let hidden = model.forward(&Context::default(), &mut batch).unwrap();
        logits(&model, &hidden)
    };
    let (clean, damaged) = (run(5), run(9));
    let first = |t: &Tensor| t.narrow(0, 0, 1).unwrap();
    assert!(same_bits(&first(&clean), &first(&damaged)));
}
