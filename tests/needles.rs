//! What the default keeps of a fact hidden in a long text, on the embedded pair at keep 0.2.
#![cfg(feature = "chat")]

use std::path::{Path, PathBuf};

use candle_specprefill::mtp::Depth;
use candle_specprefill::pipeline::{Event, GenerateOptions, Message, SpecPrefillPipeline};
use candle_specprefill::specprefill::Scoring;
use serde_json::Value;

fn tiny() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/tiny")
}

fn pair() -> SpecPrefillPipeline {
    SpecPrefillPipeline::builder(tiny().join("target"))
        .draft(tiny().join("draft"))
        .build()
        .unwrap()
}

fn needle(name: &str) -> (Value, Vec<Message>) {
    let file = tiny().join(format!("prompts/needle_{name}.json"));
    let value: Value = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
    let messages = serde_json::from_value(value["messages"].clone()).unwrap();
    (value, messages)
}

fn options(scorer: &str) -> GenerateOptions {
    let mut options = GenerateOptions {
        max_tokens: 24,
        mtp_depth: Depth::Off,
        ..Default::default()
    };
    options.specprefill.threshold = 2000;
    options.specprefill.scorer = scorer.parse().unwrap();
    options
}

/// How many of eight places of the fact within its chunk leave the whole sentence in what is kept.
fn whole(pipeline: &SpecPrefillPipeline, scorer: &str) -> usize {
    let (value, messages) = needle("4k_00");
    let fact = value["needle_text"].as_str().unwrap();
    let places = (0..8).filter(|shift| {
        let mut message = messages[0].clone();
        let moved = "so ".repeat(4 * shift);
        message.content = message.content.replacen("\n\n", &format!("\n\n{moved}"), 1);
        let selected = pipeline
            .select([message].to_vec(), &options(scorer))
            .unwrap();
        let (prompt, selection) = (selected.prompt, selected.selection.unwrap());
        let from = prompt.text.find(fact).unwrap();
        let to = from + fact.len();
        let mut tokens = (0..prompt.tokens.len() as u32)
            .filter(|i| prompt.offsets[*i as usize].1 > from && prompt.offsets[*i as usize].0 < to);
        tokens.all(|i| selection.kept.binary_search(&i).is_ok())
    });
    places.count()
}

/// Chunks begin where they will: an answer looks at a fact's value, and the words that say whose value it is may stand in
/// the chunk before. The published pool drops them then, which shows that the places are hard.
#[test]
fn a_fact_is_kept_whole_wherever_chunks_begin() {
    let pipeline = pair();
    assert_eq!(whole(&pipeline, "look-ahead-wide"), 8);
    assert!(whole(&pipeline, "look-ahead") < 8);
    assert_eq!(Scoring::default(), "look-ahead-wide".parse().unwrap());
}

#[test]
fn every_embedded_prompt_up_to_8k_is_answered_by_the_default() {
    let pipeline = pair();
    for name in [
        "4k_00", "4k_01", "4k_02", "4k_03", "8k_00", "8k_01", "8k_02",
    ] {
        let (value, messages) = needle(name);
        let mut text = String::new();
        for event in pipeline
            .generate(messages, &options("look-ahead-wide"))
            .unwrap()
        {
            match event.unwrap() {
                Event::Text { text: more, .. } => text.push_str(&more),
                Event::Finished(usage) => assert!(usage.kept_tokens * 3 < usage.prompt_tokens),
                _ => {}
            }
        }
        assert_eq!(text, value["expected_answer"].as_str().unwrap(), "{name}");
    }
}
