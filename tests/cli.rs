//! The example `generate` as a user meets it: status, standard output, one-line errors.
#![cfg(feature = "chat")]

#[path = "../examples/common/mod.rs"]
mod common;

fn run(args: &[&str]) -> (u8, String, String) {
    let (mut out, mut err) = (vec![], vec![]);
    let args = std::iter::once("generate").chain(args.iter().copied());
    let status = common::generate::run(args, &mut out, &mut err);
    (
        status,
        String::from_utf8(out).unwrap(),
        String::from_utf8(err).unwrap(),
    )
}

#[test]
fn json_is_one_object_with_every_field() {
    let (status, out, err) = run(&[
        "--prompt",
        "Tell me about tea.",
        "--max-tokens",
        "8",
        "--json",
    ]);
    assert_eq!(status, 0, "{err}");
    let value: serde_json::Value = serde_json::from_str(&out).unwrap();
    for field in [
        "text",
        "token_ids",
        "prompt_tokens",
        "kept_tokens",
        "completion_tokens",
        "finish_reason",
        "time_to_first_token_s",
        "prompt_tokens_per_second",
        "generation_tokens_per_second",
    ] {
        assert!(!value[field].is_null(), "{field}");
    }
    for field in ["admitted", "reason", "keep"] {
        assert!(!value["specprefill"][field].is_null(), "{field}");
    }
    for field in ["depth", "cycles", "tokens_per_cycle", "drafted", "accepted"] {
        assert!(!value["mtp"][field].is_null(), "{field}");
    }
    assert!(value["routes"].is_object());
    assert_eq!(value["finish_reason"], "length");
    assert_eq!(value["token_ids"].as_array().unwrap().len(), 8);
}

/// A copy of the embedded target whose makers recommend to sample.
fn sampled_model() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(common::tiny().join("target")).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
    }
    let file = dir.path().join("generation_config.json");
    let text = std::fs::read_to_string(&file).unwrap();
    let text = text.replace("\"do_sample\": false", "\"do_sample\": true, \"top_k\": 40");
    std::fs::write(file, text).unwrap();
    dir
}

#[test]
fn the_models_sampling_is_used_when_asked_for_and_flags_overrule_it() {
    let model = sampled_model();
    let model = model.path().to_str().unwrap();
    let answer = |flags: &[&str]| {
        let prompt = [
            "--model",
            model,
            "--prompt",
            "Tell me about tea.",
            "--max-tokens",
            "24",
        ];
        let (status, out, err) = run(&[&prompt[..], flags].concat());
        assert_eq!(status, 0, "{err}");
        out
    };
    let greedy = answer(&[]);
    let sampled = answer(&["--model-sampling", "--seed", "3"]);
    assert_ne!(greedy, sampled);
    assert_eq!(
        sampled,
        answer(&["--temperature", "1", "--top-k", "40", "--seed", "3"])
    );
    assert_eq!(greedy, answer(&["--model-sampling", "--temperature", "0"]));
}

#[test]
fn errors_are_one_line_and_have_their_status() {
    let folder = tempfile::tempdir().unwrap();
    let broken = folder.path().join("broken.json");
    std::fs::write(&broken, "{\"messages\": [").unwrap();
    std::fs::write(folder.path().join("config.json"), "{").unwrap();
    let (folder, broken) = (folder.path().to_str().unwrap(), broken.to_str().unwrap());
    for (args, expected) in [
        (vec!["--model", "/no/such/folder", "--prompt", "x"], 1),
        (vec!["--model", folder, "--prompt", "x"], 1),
        (vec!["--prompt-file", broken], 1),
        (vec!["--prompt-file", "/no/such/file"], 1),
        (vec!["--prompt", ""], 1),
        (vec!["--keep", "0"], 2),
        (vec!["--mtp-depth", "99"], 2),
        (vec!["--temperature", "warm"], 2),
        (vec!["--no-such-flag"], 2),
        (vec!["--top-p", "7"], 2),
    ] {
        let (status, out, err) = run(&args);
        assert_eq!(status, expected, "{args:?}: {err}");
        assert!(out.is_empty(), "{args:?}");
        assert_eq!(err.trim_end().lines().count(), 1, "{args:?}: {err}");
        assert!(err.starts_with("error: "), "{args:?}: {err}");
    }
}

#[test]
fn a_negative_number_is_a_value_out_of_range_and_no_unknown_flag() {
    for flag in ["--temperature", "--top-p", "--top-k", "--min-p", "--seed"] {
        let (status, _, err) = run(&[flag, "-1", "--prompt", "x"]);
        assert_eq!(status, 2, "{flag}: {err}");
        assert!(err.contains(&flag[2..]), "{flag}: {err}");
        assert!(!err.contains("unexpected"), "{flag}: {err}");
    }
}

#[test]
fn an_error_says_a_cause_once() {
    let (_, _, err) = run(&["--prompt-file", "/no/such/file"]);
    assert_eq!(err.matches("No such file").count(), 1, "{err}");
    let cause = candle_specprefill::Error::Io {
        file: "weights".into(),
        source: std::io::Error::other("the disk\nis gone"),
    };
    let mut err = vec![];
    assert_eq!(common::report(&mut err, &cause.into()), 1);
    assert_eq!(err, b"error: weights: the disk is gone\n");
}
