//! An index of any content beside one small, valid file.
#![no_main]

use std::fs;

use candle_specprefill::qwen3_5::checkpoint::Checkpoint;
use libfuzzer_sys::fuzz_target;

const HEADER: &[u8] = br#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#;

fuzz_target!(|index: &[u8]| {
    let dir = tempfile::tempdir().expect("a folder");
    let mut file = (HEADER.len() as u64).to_le_bytes().to_vec();
    file.extend(HEADER);
    file.push(7);
    fs::write(dir.path().join("model.safetensors"), file).expect("a file");
    fs::write(dir.path().join("model.safetensors.index.json"), index).expect("a file");
    if let Ok(checkpoint) = Checkpoint::open(dir.path()) {
        for name in checkpoint.names() {
            assert!(checkpoint.file(name).starts_with(dir.path()));
            checkpoint.tensor(name).expect("what opened can be read");
        }
    }
});
