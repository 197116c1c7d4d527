//! A safetensors file of any content: what opens can be read, but for dtypes that candle lacks.
#![no_main]

use std::fs;

use candle_specprefill::qwen3_5::checkpoint::Checkpoint;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|file: &[u8]| {
    let dir = tempfile::tempdir().expect("a folder");
    fs::write(dir.path().join("model.safetensors"), file).expect("a file");
    if let Ok(checkpoint) = Checkpoint::open(dir.path()) {
        let names: Vec<_> = checkpoint.names().collect();
        let bytes: usize = names.iter().filter_map(|n| checkpoint.size_bytes(n)).sum();
        assert!(bytes <= file.len());
        for name in names {
            let tensor = checkpoint.tensor(name);
            assert!(tensor.is_ok() || checkpoint.dtype(name).is_none());
        }
    }
});
