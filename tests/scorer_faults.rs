//! A scorer of the user's own that gives what it must not: the answer comes from full prefill and the usage says why, or the
//! request fails if asked.
#![cfg(feature = "chat")]

use std::path::Path;
use std::sync::Arc;

use candle_specprefill::mtp::Depth;
use candle_specprefill::pipeline::{Event, GenerateOptions, Prompt, SpecPrefillPipeline, Usage};
use candle_specprefill::specprefill::{OnFailure, Progress, Reason, Scorer, ScorerInput, Scores};
use candle_specprefill::{Error, Result};

/// Gives every token 1, but for what `fault` does to the scores.
#[derive(Debug)]
struct Faulty {
    fault: fn(&mut Vec<f32>),
}

impl Scorer for Faulty {
    fn id(&self) -> String {
        "faulty".into()
    }

    fn score(&self, input: &ScorerInput, _: &mut dyn FnMut(Progress)) -> Result<Scores> {
        let mut importance = vec![1.0; input.tokens.len()];
        (self.fault)(&mut importance);
        Ok(Scores {
            importance,
            ..Default::default()
        })
    }
}

fn pair(fault: fn(&mut Vec<f32>)) -> SpecPrefillPipeline {
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/tiny");
    SpecPrefillPipeline::builder(tiny.join("target"))
        .draft(tiny.join("draft"))
        .scorer(Arc::new(Faulty { fault }))
        .build()
        .unwrap()
}

fn answer(pipeline: &SpecPrefillPipeline, options: &GenerateOptions) -> Result<(Vec<u32>, Usage)> {
    let prompt = Prompt::Tokens((0..300u32).map(|i| (i * 97 + 5) % 4000).collect());
    let mut ids = vec![];
    for event in pipeline.generate(prompt, options)? {
        match event? {
            Event::Text { token_ids, .. } => ids.extend(token_ids),
            Event::Finished(usage) => return Ok((ids, *usage)),
            _ => {}
        }
    }
    panic!("no usage");
}

#[test]
fn bad_scores_are_full_prefill_with_the_reason_or_an_error_if_asked() {
    let mut options = GenerateOptions {
        max_tokens: 6,
        mtp_depth: Depth::Off,
        ..Default::default()
    };
    options.specprefill.threshold = 100;
    options.specprefill.tail = 32;
    let mut dense = options.clone();
    dense.specprefill.enabled = false;
    // Scores as they should be are used.
    let (_, usage) = answer(&pair(|_| {}), &options).unwrap();
    assert!(usage.specprefill.admitted && usage.kept_tokens < 200);
    type Fault = fn(&mut Vec<f32>);
    let faults: [(Fault, &str); 9] = [
        (|s| s[7] = f32::NAN, "token 7 the score NaN"),
        (|s| s.fill(f32::NAN), "token 0 the score NaN"),
        (|s| s[8] = f32::INFINITY, "token 8 the score inf"),
        (|s| s[9] = f32::NEG_INFINITY, "token 9 the score -inf"),
        (|s| s[10] = -0.5, "token 10 the score -0.5"),
        (|s| s.fill(-1.0), "token 0 the score -1"),
        (|s| s.truncate(299), "299 scores for 300 tokens"),
        (|s| s.push(1.0), "301 scores for 300 tokens"),
        (|s| s.clear(), "0 scores for 300 tokens"),
    ];
    for (fault, why) in faults {
        let pipeline = pair(fault);
        let (text, usage) = answer(&pipeline, &options).unwrap();
        assert_eq!(usage.specprefill.reason, Reason::ScoringFailed, "{why}");
        let explanation = &usage.specprefill.explanation;
        assert!(explanation.contains(why), "{why}: {explanation}");
        assert!(!usage.specprefill.admitted && usage.kept_tokens == 300);
        assert_eq!(text, answer(&pipeline, &dense).unwrap().0);
        // A failure is not remembered as scores.
        let (_, again) = answer(&pipeline, &options).unwrap();
        assert!(!again.specprefill.memo);
        let mut strict = options.clone();
        strict.specprefill.on_failure = OnFailure::Error;
        match answer(&pipeline, &strict) {
            Err(Error::Draft(what)) => assert!(what.contains(why), "{what}"),
            other => panic!("{why}: {other:?}"),
        }
    }
}
