//! The RoPE kinds of a configuration against transformers' frequencies, in the model, and rows that come as embeddings with
//! positions on three axes.

mod support;

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use candle_specprefill::ops::Context;
use candle_specprefill::qwen3_5::config::{Config, TextConfig};
use candle_specprefill::qwen3_5::{Cache, EmbeddingRows, Keep, LoadOptions, Model, Rows, Wanted};
use candle_specprefill::Error;
use serde_json::{json, Value};
use support::*;

fn parse(case: &Value) -> Result<TextConfig, Error> {
    let text = json!({
        "model_type": "qwen3_5_text", "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_value_heads": 16,
        "head_dim": case["head_dim"], "max_position_embeddings": case["max_position_embeddings"],
        "rope_parameters": case["rope_parameters"],
    });
    Config::parse(&text.to_string(), Path::new("config.json")).map(|c| c.text)
}

/// `tests/golden/rope/kinds.json` holds what transformers 5.24.0's own functions gave in float32.
#[test]
fn frequencies_are_those_of_transformers() {
    let file = std::fs::read(golden("rope/kinds.json")).unwrap();
    let file: Value = serde_json::from_slice(&file).unwrap();
    let cases = file["cases"].as_array().unwrap();
    assert!(cases.len() >= 19);
    for case in cases {
        let longest = case["seq_len"].as_u64().unwrap_or(1) as usize;
        let rope = parse(case).unwrap().rope(longest).unwrap();
        let expected = case["inv_freq"].as_array().unwrap();
        assert_eq!(rope.frequencies().len(), expected.len());
        for (got, expected) in rope.frequencies().iter().zip(expected) {
            let expected = expected.as_f64().unwrap();
            let error = (f64::from(*got) / expected - 1.0).abs();
            // float32 powers of 1e7 carry an error of ln(1e7) units.
            assert!(error < 3e-6, "{got} for {expected} in {case}");
        }
        // Unrotated lanes show the attention factor.
        let x = Tensor::ones(
            (1, 1, case["head_dim"].as_u64().unwrap() as usize),
            DType::F32,
            &Device::Cpu,
        );
        let zero = Tensor::new(&[0u32], &Device::Cpu).unwrap();
        let y =
            candle_specprefill::ops::rope(&Context::default(), &x.unwrap(), &zero, &rope).unwrap();
        let (y, expected) = (values(&y), case["attention_factor"].as_f64().unwrap());
        assert!((f64::from(y[0]) - expected).abs() < 1e-6, "{case}");
        assert_eq!(*y.last().unwrap(), 1.0, "lanes that are not rotated stay");
    }
}

#[test]
fn parameters_that_make_no_frequencies_are_refused() {
    let ones = vec![1.0; 32];
    let cases = [
        (json!({"rope_type": "linear"}), "factor is missing"),
        (json!({"rope_type": "linear", "factor": 0.5}), "factor 0.5"),
        (json!({"rope_type": "dynamic", "factor": -1}), "factor -1"),
        (
            json!({"rope_type": "yarn", "factor": 4, "beta_fast": -3}),
            "beta_fast",
        ),
        (
            json!({"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 0}),
            "original_max",
        ),
        (
            json!({"rope_type": "yarn", "factor": 4, "rope_theta": 1}),
            "finite",
        ),
        (
            json!({"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1}),
            "high_freq_factor",
        ),
        (
            json!({"rope_type": "longrope", "short_factor": [1.0], "long_factor": ones}),
            "1 factors for 32 pairs",
        ),
        (
            json!({"rope_type": "longrope", "short_factor": ones, "long_factor": [1.0]}),
            "1 factors",
        ),
        (
            json!({"rope_type": "longrope", "short_factor": ones}),
            "long_factor is missing",
        ),
        (json!({"rope_type": "spiral"}), "\"spiral\""),
        (
            json!({"rope_type": "yarn", "factor": "four"}),
            "rope_parameters",
        ),
    ];
    for (parameters, part) in cases {
        let case = json!({"head_dim": 256, "max_position_embeddings": 4096, "rope_parameters": parameters});
        let error = parse(&case).unwrap_err().to_string();
        assert!(
            error.contains("config.json") && error.contains(part),
            "{error}"
        );
    }
    // Sections whose sum overflows do not matter to text.
    let huge = json!({"head_dim": 256, "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "mrope_section": [u64::MAX, u64::MAX, 2]}});
    assert!(!parse(&huge).unwrap().has_axes());
}

#[test]
fn the_context_grows_with_the_kind() {
    let reach = |parameters: Value| {
        let case = json!({"head_dim": 256, "max_position_embeddings": 4096, "rope_parameters": parameters});
        parse(&case).unwrap().max_position_embeddings
    };
    assert_eq!(reach(json!({})), 4096);
    assert_eq!(reach(json!({"rope_type": "linear", "factor": 4})), 16384);
    assert_eq!(reach(json!({"type": "dynamic", "factor": 2})), 8192);
    let yarn = |original: usize| {
        reach(
            json!({"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": original}),
        )
    };
    assert_eq!(
        (yarn(4096), yarn(1024)),
        (16384, 4096),
        "stated before or after"
    );
}

/// A golden model whose configuration asks for other frequencies.
fn with_parameters(parameters: Value) -> Model {
    let dir = tempfile::tempdir().unwrap();
    let from = golden("dense");
    std::fs::copy(
        from.join("model.safetensors"),
        dir.path().join("model.safetensors"),
    )
    .unwrap();
    let config = std::fs::read(from.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&config).unwrap();
    let level = match config.get("text_config") {
        Some(_) => &mut config["text_config"],
        None => &mut config,
    };
    for (name, value) in parameters.as_object().unwrap() {
        level["rope_parameters"][name] = value.clone();
    }
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    Model::load(dir.path(), &LoadOptions::default()).unwrap()
}

/// The keys of the first attention layer, `[kv heads, rows, head_dim]`: no layer before it looks at positions.
fn first_keys(cache: &Cache) -> Vec<Vec<Vec<f32>>> {
    let (keys, rows) = cache.keys(0).unwrap();
    keys.narrow(1, 0, rows).unwrap().to_vec3().unwrap()
}

fn run(model: &Model, tokens: &[u32], positions: &[u32]) -> Cache {
    let mut cache = model.new_cache().unwrap();
    let rows = Rows {
        cache: &mut cache,
        tokens,
        positions,
        keep: Keep::Commit,
    };
    model.forward(&Context::default(), &mut [rows]).unwrap();
    cache
}

/// Rotates unrotated keys as transformers does: `angles[row][pair]`, both halves of the rotary lanes, times `factor`.
fn rotated(keys: &[Vec<Vec<f32>>], angles: &[Vec<f32>], factor: f32) -> Vec<Vec<Vec<f32>>> {
    let turn = |row: &Vec<f32>, angles: &Vec<f32>| {
        let (mut out, pairs) = (row.clone(), angles.len());
        for (i, angle) in angles.iter().enumerate() {
            let (a, b) = (row[i] * factor, row[i + pairs] * factor);
            out[i] = a * angle.cos() - b * angle.sin();
            out[i + pairs] = b * angle.cos() + a * angle.sin();
        }
        out
    };
    let head = |head: &Vec<Vec<f32>>| head.iter().zip(angles).map(|(r, a)| turn(r, a)).collect();
    keys.iter().map(head).collect()
}

fn close(a: &[Vec<Vec<f32>>], b: &[Vec<Vec<f32>>]) -> bool {
    let (a, b) = (a.iter().flatten().flatten(), b.iter().flatten().flatten());
    a.clone().count() == b.clone().count() && a.zip(b).all(|(a, b)| (a - b).abs() < 1e-4)
}

const TOKENS: [u32; 6] = [3, 14, 15, 92, 65, 35];

#[test]
fn the_model_rotates_with_its_kind() {
    let plain = load("dense", DType::F32);
    let unrotated = first_keys(&run(&plain, &TOKENS, &[0; 6]));
    let positions = [0, 1, 5, 80, 81, 900];
    let kinds = [
        json!({"rope_type": "default"}),
        json!({"rope_type": "linear", "factor": 4}),
        json!({"rope_type": "dynamic", "factor": 4}),
        json!({"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 64}),
        json!({"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 64}),
        json!({"rope_type": "longrope", "short_factor": [1, 1.5, 2, 3], "long_factor": [2, 3, 4, 5], "factor": 4, "original_max_position_embeddings": 64}),
    ];
    let mut seen: Vec<Vec<Vec<Vec<f32>>>> = vec![];
    for kind in kinds {
        let model = with_parameters(kind.clone());
        let keys = first_keys(&run(&model, &TOKENS, &positions));
        let longest = model.config().max_position_embeddings;
        let rope = model.config().rope(longest).unwrap();
        let row = |p: &u32| {
            rope.frequencies()
                .iter()
                .map(|f| *p as f32 * f)
                .collect::<Vec<_>>()
        };
        let angles: Vec<_> = positions.iter().map(row).collect();
        let factor = match kind["rope_type"].as_str() {
            Some("yarn") => 0.1 * 4f32.ln() + 1.0,
            Some("longrope") => (1.0 + 4f32.ln() / 64f32.ln()).sqrt(),
            _ => 1.0,
        };
        assert!(
            close(&keys, &rotated(&unrotated, &angles, factor)),
            "{kind}"
        );
        assert!(
            !seen.iter().any(|other| close(other, &keys)),
            "{kind} changes nothing"
        );
        seen.push(keys);
    }
}

#[test]
fn a_shorter_context_has_its_own_frequencies_and_limit() {
    let long = with_parameters(json!({"rope_type": "dynamic", "factor": 4}));
    let most = long.config().max_position_embeddings;
    let plain = load("dense", DType::F32);
    let original = plain.config().max_position_embeddings;
    assert_eq!(most, 4 * original);
    let short = with_parameters(json!({"rope_type": "dynamic", "factor": 4}));
    let short = short.with_longest(original).unwrap();
    let positions = [0, 1, 2, 3, 4, 5];
    let keys = |model| first_keys(&run(model, &TOKENS, &positions));
    assert_eq!(
        keys(&short),
        keys(&plain),
        "nothing is stretched up to the original context"
    );
    assert!(!close(&keys(&long), &keys(&plain)));
    let at = |model: &Model, position: usize| {
        let mut cache = model.new_cache().unwrap();
        let rows = Rows {
            cache: &mut cache,
            tokens: &[1],
            positions: &[position as u32],
            keep: Keep::Commit,
        };
        model.forward(&Context::default(), &mut [rows]).is_ok()
    };
    assert!(at(&long, most - 1) && !at(&long, most));
    assert!(at(&short, original - 1) && !at(&short, original));
    assert!(long.with_longest(most + 1).is_err());
}

fn feed_embeddings(
    model: &Model,
    cache: &mut Cache,
    embeddings: &Tensor,
    positions: &[[u32; 3]],
    wanted: Wanted,
) -> Result<Option<Tensor>, Error> {
    let rows = EmbeddingRows {
        cache,
        embeddings,
        positions,
        keep: Keep::Commit,
    };
    model.forward_embeddings(&Context::default(), &mut [rows], wanted)
}

#[test]
fn embeddings_of_tokens_are_bitwise_the_tokens() {
    for dtype in [DType::F32, DType::BF16] {
        let model = load("dense", dtype);
        let mut by_tokens = model.new_cache().unwrap();
        let expected = feed(&model, &mut by_tokens, &TOKENS, Keep::Commit);
        let mut cache = model.new_cache().unwrap();
        let embeddings = model.embeddings(&TOKENS).unwrap();
        let positions: Vec<_> = (0..6).map(|p| [p; 3]).collect();
        let got = feed_embeddings(&model, &mut cache, &embeddings, &positions, Wanted::All);
        assert!(same_bits(&got.unwrap().unwrap(), &expected));
        assert!(same_contents(&cache, &by_tokens));
        assert_eq!(cache.next_position(), by_tokens.next_position());
    }
}

/// A text row, a 2 × 3 image (one moment, two lines of three patches), and where text goes on.
const IMAGE: [[u32; 3]; 7] = [
    [0, 0, 0],
    [1, 1, 1],
    [1, 1, 2],
    [1, 1, 3],
    [1, 2, 1],
    [1, 2, 2],
    [1, 2, 3],
];

#[test]
fn three_axes_rotate_interleaved_pairs() {
    let model = load("dense", DType::F32);
    let tokens = [9, 8, 7, 6, 5, 4, 3];
    let unrotated = first_keys(&run(&model, &tokens, &[0; 7]));
    let embeddings = model.embeddings(&tokens).unwrap();
    let mut cache = model.new_cache().unwrap();
    let all = feed_embeddings(&model, &mut cache, &embeddings, &IMAGE, Wanted::All);
    let all = all.unwrap().unwrap();
    assert_eq!(cache.next_position(), 4, "one past the largest of any axis");
    // transformers' recomposition for sections [2, 1, 1]: pairs 1 and 2 of 4 follow height and width, 0 and 3 time.
    let frequencies = [0, 1, 2, 3].map(|i| 1e7f32.powf(-(i as f32) / 4.0));
    let row = |p: &[u32; 3]| {
        let pairs = [p[0], p[1], p[2], p[0]].into_iter().zip(frequencies);
        pairs.map(|(p, f)| p as f32 * f).collect::<Vec<_>>()
    };
    let angles: Vec<_> = IMAGE.iter().map(row).collect();
    assert!(close(
        &first_keys(&cache),
        &rotated(&unrotated, &angles, 1.0)
    ));
    // What is wanted of the pass, or whether it comes in two, changes no bit.
    let mut other = model.new_cache().unwrap();
    let last = feed_embeddings(&model, &mut other, &embeddings, &IMAGE, Wanted::Last);
    let end = all.narrow(0, 6, 1).unwrap();
    assert!(same_bits(&last.unwrap().unwrap(), &end));
    assert!(same_contents(&cache, &other));
    let mut halves = model.new_cache().unwrap();
    for part in [0..4, 4..7] {
        let rows = embeddings.narrow(0, part.start, part.len()).unwrap();
        feed_embeddings(&model, &mut halves, &rows, &IMAGE[part], Wanted::All).unwrap();
    }
    assert!(same_contents(&cache, &halves));
    assert_eq!(halves.next_position(), 4);
}

#[test]
fn embeddings_that_do_not_fit_are_refused_before_the_cache_changes() {
    let model = load("dense", DType::F32);
    let hidden = model.config().hidden_size;
    let mut cache = model.new_cache().unwrap();
    let zeros = |rows: usize, hidden: usize, dtype| {
        Tensor::zeros((rows, hidden), dtype, &Device::Cpu).unwrap()
    };
    let limit = model.config().max_position_embeddings as u32;
    let mut refused = |x: Tensor, positions: &[[u32; 3]], part: &str| {
        let error = feed_embeddings(&model, &mut cache, &x, positions, Wanted::All);
        let error = error.unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    };
    refused(
        zeros(2, hidden, DType::F32),
        &[[0; 3]],
        "a row per position",
    );
    refused(zeros(1, hidden + 1, DType::F32), &[[0; 3]], "shape");
    refused(zeros(1, hidden, DType::BF16), &[[0; 3]], "F32");
    refused(zeros(1, hidden, DType::F32), &[], "empty");
    refused(
        zeros(1, hidden, DType::F32),
        &[[0, 0, limit]],
        "past the model's",
    );
    let sections = with_parameters(json!({"mrope_section": [1, 1, 1]}));
    let x = zeros(1, hidden, DType::F32);
    let error = feed_embeddings(
        &sections,
        &mut sections.new_cache().unwrap(),
        &x,
        &[[0, 1, 2]],
        Wanted::All,
    );
    assert!(error.unwrap_err().to_string().contains("mrope_section"));
    assert!(model.embeddings(&[]).is_err() && model.embeddings(&[999_999]).is_err());
    feed(&model, &mut cache, &TOKENS, Keep::Commit);
    assert_eq!(cache.length(), TOKENS.len());
}
