//! Models from the hub, against a server that speaks its protocol.
#![cfg(feature = "hub")]

mod fetching;
mod refusals;
mod server;

use std::path::{Path, PathBuf};

use candle_specprefill::hub::{Hub, Repository};
use server::{commit, files, Files, Server};

pub const ID: &str = "tiny/draft";

pub fn tiny(which: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("examples/tiny")
        .join(which)
}

/// The embedded draft in two shards, beside files that no model needs.
pub fn draft_files() -> Files {
    let mut files = files(&tiny("draft"));
    for extra in ["README.md", "model.onnx", "original/model.safetensors"] {
        files.insert(extra.into(), vec![7; 1000]);
    }
    files
}

/// A server with the embedded draft, and how to reach it.
pub struct World {
    pub server: Server,
    pub cache: tempfile::TempDir,
}

impl Default for World {
    fn default() -> Self {
        let server = Server::start();
        server.publish(ID, &commit(1), draft_files());
        Self {
            server,
            cache: tempfile::tempdir().unwrap(),
        }
    }
}

impl World {
    pub fn hub(&self) -> Hub {
        Hub::default()
            .endpoint(&self.server.url)
            .cache_dir(self.cache.path())
            .token("none")
            .offline(false)
            .retries(0)
            .range_bytes(300_000)
    }

    /// A folder or file of the repository's cache.
    pub fn cached(&self, path: &str) -> PathBuf {
        self.cache.path().join("models--tiny--draft").join(path)
    }
}

pub fn repository(text: &str) -> Repository {
    Repository::parse(text).unwrap()
}
