//! What a model is said to need before it is loaded, against what it then holds.

mod support;

use candle_core::DType;
use candle_specprefill::ops::Context;
use candle_specprefill::qwen3_5::checkpoint::Checkpoint;
use candle_specprefill::qwen3_5::config::Config;
use candle_specprefill::qwen3_5::{Keep, LoadOptions, Model, ModelMemory, Rows};

fn folders() -> Vec<std::path::PathBuf> {
    let golden = support::golden("");
    let mlx = std::fs::read_dir(golden.join("mlx")).unwrap();
    let mut all: Vec<_> = mlx
        .map(|entry| entry.unwrap().path())
        .filter(|dir| dir.join("config.json").is_file())
        .collect();
    all.extend(["dense", "dense_flat", "moe"].map(|name| golden.join(name)));
    assert!(all.len() > 8);
    all
}

/// Runs `rows` rows in passes of 128, then leaves a verified draft undecided.
fn fill(model: &Model, rows: usize) -> usize {
    let cx = Context::default();
    let mut cache = model.new_cache().unwrap();
    let tokens: Vec<u32> = (0..rows as u32 - 4).map(|i| i % 60).collect();
    let mut at = 0;
    let parts = tokens.chunks(128).map(|part| (part, Keep::Commit));
    for (part, keep) in parts.chain([(&tokens[..4], Keep::Pending)]) {
        let positions: Vec<u32> = (at..at + part.len() as u32).collect();
        at += part.len() as u32;
        let rows = Rows {
            cache: &mut cache,
            tokens: part,
            positions: &positions,
            keep,
        };
        model.forward(&cx, &mut [rows]).unwrap();
    }
    cache.size_bytes()
}

#[test]
fn the_estimate_covers_what_a_model_holds_and_not_much_more() {
    for folder in folders() {
        for (dtype, mtp, rows) in [(DType::F32, true, 900), (DType::BF16, false, 40)] {
            let options = LoadOptions {
                dtype,
                mtp,
                ..Default::default()
            };
            let config = Config::read(&folder).unwrap();
            let checkpoint = Checkpoint::open(&folder).unwrap();
            let need = ModelMemory::new(&config, &checkpoint, &options, rows).unwrap();
            let model = Model::load(&folder, &options).unwrap();
            let (weights, cache) = (model.size_bytes() as u64, fill(&model, rows) as u64);
            let what = format!(
                "{}: {need:?}, holds {weights} and {cache}",
                folder.display()
            );
            // The model's own count leaves out norms and convolutions, which are a good part of so small a model.
            assert!(
                need.weights >= weights && need.weights * 10 <= weights * 13,
                "{what}"
            );
            assert!(need.cache >= cache && need.cache <= cache * 2, "{what}");
        }
    }
}

#[test]
fn what_is_not_loaded_is_not_counted() {
    let folder = support::golden("dense");
    let config = Config::read(&folder).unwrap();
    let checkpoint = Checkpoint::open(&folder).unwrap();
    let need = |mtp, context| {
        let options = LoadOptions {
            mtp,
            ..Default::default()
        };
        ModelMemory::new(&config, &checkpoint, &options, context).unwrap()
    };
    let (with, without) = (need(true, 1000), need(false, 1000));
    assert!(without.weights < with.weights && without.cache < with.cache);
    let (short, long) = (need(true, 10_000).cache, need(true, 100_000).cache);
    assert!(long > 8 * short, "{short} {long}");
}

#[cfg(feature = "chat")]
mod pipeline {
    use candle_specprefill::pipeline::{GenerateOptions, SpecPrefillPipeline};
    use candle_specprefill::Error;

    fn embedded(name: &str) -> std::path::PathBuf {
        super::support::tiny_dir().with_file_name(name)
    }

    #[test]
    fn what_does_not_fit_is_refused_with_numbers_before_it_is_loaded() {
        let target = embedded("target");
        let builder = || SpecPrefillPipeline::builder(&target).draft(embedded("draft"));
        let estimate = builder().memory().unwrap();
        let (target, draft) = (estimate.target, estimate.draft.unwrap());
        assert_eq!(estimate.total(), target.total() + draft.total());
        assert!(target.weights > draft.weights && draft.weights > 1_000_000);
        // The machine that runs the tests can load the embedded pair.
        assert!(estimate
            .available
            .is_none_or(|bytes| bytes > estimate.total()));

        let error = builder().memory_limit_bytes(estimate.total() - 1).build();
        let error = error.err().unwrap();
        assert!(
            matches!(error, Error::Memory { needed, available, .. }
                if needed == estimate.total() && available == needed - 1),
            "{error}"
        );
        let text = error.to_string();
        for part in [
            "the target takes",
            "the draft takes",
            "may be used",
            "--force",
        ] {
            assert!(text.contains(part), "{text}");
        }
        assert!(builder()
            .memory_limit_bytes(estimate.total())
            .build()
            .is_ok());
        // A shorter context needs less.
        let short = builder().context(2048).memory().unwrap();
        assert!(short.total() < estimate.total() && short.context == 2048);
    }

    #[test]
    fn a_context_is_a_limit() {
        let build = |context| {
            SpecPrefillPipeline::builder(embedded("target"))
                .draft(embedded("draft"))
                .context(context)
                .build()
        };
        let error = build(0).err().unwrap().to_string();
        assert!(error.contains("context"), "{error}");
        let error = build(1 << 30).err().unwrap().to_string();
        assert!(error.contains("max_position_embeddings"), "{error}");

        let pipeline = build(64).unwrap();
        let options = GenerateOptions {
            max_tokens: 1000,
            ..Default::default()
        };
        let long = "a word ".repeat(100);
        let error = pipeline.generate(long.as_str(), &options).err().unwrap();
        assert!(error.to_string().contains("64"), "{error}");
        let events = pipeline.generate("Tell me about tea.", &options).unwrap();
        let mut usage = None;
        for event in events {
            if let candle_specprefill::pipeline::Event::Finished(end) = event.unwrap() {
                usage = Some(end);
            }
        }
        let usage = usage.unwrap();
        assert!(
            usage.prompt_tokens + usage.completion_tokens <= 65,
            "{usage:?}"
        );
    }
}
