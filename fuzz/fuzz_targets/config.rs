//! A `config.json` of any content: an error, or a configuration that can be used.
#![no_main]

use std::path::Path;

use candle_specprefill::qwen3_5::config::Config;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    if let Ok(config) = Config::parse(text, Path::new("config.json")) {
        let text = &config.text;
        assert_eq!(text.layer_types.len(), text.num_hidden_layers);
        for longest in [1, text.max_position_embeddings] {
            text.rope(longest).expect("parsing checked the kind");
        }
    }
});
