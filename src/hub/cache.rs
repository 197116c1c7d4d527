//! A repository's folder in the cache that the hub's tools share: `blobs` by content, `snapshots/COMMIT` of links to them,
//! `refs` from branches and tags to commits.

use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::path::{Component, Path, PathBuf};

use sha1::Sha1;
use sha2::{Digest, Sha256};

use super::{Hub, Repository};
use crate::qwen3_5::checkpoint::{indexed_files, INDEX, SINGLE};
use crate::{Error, Result};

/// Where one repository is cached.
pub(super) struct RepositoryCache {
    root: PathBuf,
    locks: PathBuf,
}

impl RepositoryCache {
    pub fn new(hub: &Hub, repository: &Repository) -> Self {
        let cache = hub
            .cache_dir
            .clone()
            .unwrap_or_else(hf_hub::resolve_cache_dir);
        let name = format!("models--{}--{}", repository.owner, repository.name);
        Self {
            root: cache.join(&name),
            locks: cache.join(".locks").join(&name),
        }
    }

    /// The folder of a commit.
    pub fn snapshot(&self, commit: &str) -> PathBuf {
        self.root.join("snapshots").join(commit)
    }

    /// Where content of this key goes.
    pub fn blob(&self, key: &str) -> PathBuf {
        self.root.join("blobs").join(key)
    }

    /// Where content is gathered before it is whole.
    pub fn partial(&self, key: &str) -> PathBuf {
        self.root.join("blobs").join(format!("{key}.incomplete"))
    }

    /// The commit that a revision meant when it was last fetched.
    pub fn commit(&self, revision: &str) -> Option<String> {
        if is_commit(revision) {
            return Some(revision.into());
        }
        let text = fs::read_to_string(self.root.join("refs").join(revision)).ok()?;
        let commit = text.trim();
        is_commit(commit).then(|| commit.into())
    }

    /// The folder of a revision if it was fetched, and what of it is missing.
    pub fn find(&self, revision: &str) -> Option<(PathBuf, Vec<String>)> {
        let folder = self.snapshot(&self.commit(revision)?);
        folder.is_dir().then(|| {
            let missing = missing_files(&folder);
            (folder, missing)
        })
    }

    /// Notes what a branch or tag means.
    pub fn write_ref(&self, revision: &str, commit: &str) -> Result<()> {
        if is_commit(revision) {
            return Ok(());
        }
        let file = self.root.join("refs").join(revision);
        make_parent(&file)?;
        fs::write(&file, commit).map_err(|e| Error::io(&file, e))
    }

    /// Content from large file storage that another commit brought: git names it by a pointer file with its SHA-256.
    pub fn find_large(&self, object: &str, size: u64) -> Option<String> {
        let blobs = fs::read_dir(self.root.join("blobs")).ok()?;
        blobs.flatten().find_map(|blob| {
            let name = blob.file_name().into_string().ok()?;
            let whole = blob.metadata().ok()?.len() == size;
            (whole && name.len() == 64 && pointer_object(&name, size) == object).then_some(name)
        })
    }

    /// Removes a file of a snapshot with what it links to.
    pub fn discard(&self, file: &Path) -> Result<()> {
        let blobs = self.root.join("blobs");
        if let (Ok(target), Ok(blobs)) = (file.canonicalize(), blobs.canonicalize()) {
            if target.starts_with(&blobs) {
                remove(&target)?;
            }
        }
        remove(file)
    }

    /// Keeps other processes from writing content of this key while the answer lives.
    pub fn lock(&self, key: &str) -> Result<File> {
        let file = self.locks.join(format!("{key}.lock"));
        make_parent(&file)?;
        let lock = File::create(&file).map_err(|e| Error::io(&file, e))?;
        lock.lock().map_err(|e| Error::io(&file, e))?;
        Ok(lock)
    }
}

/// Whether a revision names a commit, whose content never changes.
pub(super) fn is_commit(revision: &str) -> bool {
    revision.len() == 40 && revision.bytes().all(|b| b.is_ascii_hexdigit())
}

/// Whether a name from the hub stays below the folder that it is put into.
pub(super) fn is_plain(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    !name.is_empty() && parts.all(|c| matches!(c, Component::Normal(_)))
}

/// What of a model's files a folder lacks.
fn missing_files(folder: &Path) -> Vec<String> {
    let mut needed = vec!["config.json".to_string()];
    let index = folder.join(INDEX);
    match index.is_file() {
        true => needed.extend(indexed_files(&index).unwrap_or_else(|_| vec![INDEX.into()])),
        false => needed.push(SINGLE.into()),
    }
    needed.retain(|name| !folder.join(name).is_file());
    needed
}

/// The name that git gives the pointer file of content in large file storage (git-lfs, specification of pointers).
fn pointer_object(sha256: &str, size: u64) -> String {
    let pointer =
        format!("version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n");
    let object = format!("blob {}\0{pointer}", pointer.len());
    hex(&Sha1::digest(object))
}

/// The SHA-256 of a file, by which large file storage names it.
pub(super) fn sha256(path: &Path) -> Result<String> {
    let mut file = File::open(path).map_err(|e| Error::io(path, e))?;
    let (mut hash, mut buffer) = (Sha256::new(), vec![0; 1 << 20]);
    loop {
        match file.read(&mut buffer).map_err(|e| Error::io(path, e))? {
            0 => return Ok(hex(&hash.finalize())),
            read => hash.update(&buffer[..read]),
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(super) fn make_parent(file: &Path) -> Result<()> {
    match file.parent() {
        Some(parent) => fs::create_dir_all(parent).map_err(|e| Error::io(parent, e)),
        None => Ok(()),
    }
}

fn remove(file: &Path) -> Result<()> {
    match fs::remove_file(file) {
        Err(e) if e.kind() != ErrorKind::NotFound => Err(Error::io(file, e)),
        _ => Ok(()),
    }
}
