//! Fetching a repository: which commit, which files, and each of them whole.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::Arc;
use std::time::Duration;

use hf_hub::repository::{RepoTreeEntry, RepoTypeModel};
use hf_hub::{HFClient, HFError, HFRepositorySync};

use super::cache::{is_commit, is_plain, make_parent, sha256, RepositoryCache};
use super::fault::Fault;
use super::ranges::{Arriving, RangedFile};
use super::{Hub, Repository};
use crate::qwen3_5::checkpoint::{indexed_files, INDEX, SIDE_CARS, SINGLE};
use crate::{Error, Result};

/// What is fetched beside the weights, where a repository has it.
const COMPANIONS: [&str; 6] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
];
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);
const CONNECT_RETRIES: usize = 2;
/// Without a byte for so long, a connection is dead.
const READ_TIMEOUT: Duration = Duration::from_secs(60);
const FIRST_WAIT: Duration = Duration::from_millis(500);

/// [`Hub::fetch`].
pub(super) fn fetch(hub: &Hub, repository: &Repository) -> Result<PathBuf> {
    let cache = RepositoryCache::new(hub, repository);
    let revision = repository.revision();
    let cached = cache.find(revision);
    match &cached {
        // A commit never changes.
        Some((folder, missing)) if missing.is_empty() && is_commit(revision) => {
            return Ok(folder.clone());
        }
        _ if hub.is_offline() => return offline(repository, cached),
        _ => {}
    }
    let fetch = Fetch::new(hub, repository, cache)?;
    let commit = match fetch.commit() {
        Ok(commit) => commit,
        Err(fault) => match cached {
            Some((folder, missing)) if fault.is_transient() && missing.is_empty() => {
                let error = fetch.explain(&fault);
                tracing::warn!("{error}; the cached copy is used");
                return Ok(folder);
            }
            _ => return Err(fetch.explain(&fault)),
        },
    };
    fetch.files(&commit)?;
    fetch.cache.write_ref(revision, &commit)?;
    Ok(fetch.cache.snapshot(&commit))
}

fn offline(repository: &Repository, cached: Option<(PathBuf, Vec<String>)>) -> Result<PathBuf> {
    let what = match cached {
        Some((folder, missing)) if missing.is_empty() => return Ok(folder),
        Some((_, missing)) => format!(
            "the cache lacks {}, and HF_HUB_OFFLINE forbids to fetch it: run once without",
            missing.join(", ")
        ),
        None => {
            "is not in the cache, and HF_HUB_OFFLINE forbids to fetch it: run once without".into()
        }
    };
    Err(Error::Hub {
        repo: repository.to_string(),
        what,
    })
}

/// A file of a repository.
struct Entry {
    size: u64,
    /// The content's name where it is known before it is here: git's object.
    object: String,
    /// Kept in large file storage: the content's name is its SHA-256.
    large: bool,
}

struct Fetch<'a> {
    hub: &'a Hub,
    repository: &'a Repository,
    cache: RepositoryCache,
    endpoint: String,
    remote: HFRepositorySync<RepoTypeModel>,
}

impl<'a> Fetch<'a> {
    fn new(hub: &'a Hub, repository: &'a Repository, cache: RepositoryCache) -> Result<Self> {
        let client = || {
            let http = reqwest::Client::builder()
                .user_agent(concat!("candle-specprefill/", env!("CARGO_PKG_VERSION")))
                .connect_timeout(CONNECT_TIMEOUT)
                .read_timeout(READ_TIMEOUT)
                .build()?;
            // Requests are sent again here, where more than the connection is known.
            let mut builder = HFClient::builder().client(http).retry_max_attempts(0);
            if let Some(endpoint) = &hub.endpoint {
                builder = builder.endpoint(endpoint);
            }
            if let Some(token) = &hub.token {
                builder = builder.token(token);
            }
            if let Some(folder) = &hub.cache_dir {
                builder = builder.cache_dir(folder);
            }
            let client = builder.build()?;
            let endpoint = client.endpoint().to_string();
            Ok((hf_hub::HFClientSync::from_inner(client)?, endpoint))
        };
        let (client, endpoint) = client().map_err(|e: HFError| Error::Hub {
            repo: repository.to_string(),
            what: format!("no connection can be set up ({e}): check HF_ENDPOINT"),
        })?;
        Ok(Self {
            hub,
            repository,
            cache,
            endpoint,
            remote: client.model(&repository.owner, &repository.name),
        })
    }

    fn explain(&self, fault: &Fault) -> Error {
        fault.explain(self.repository, &self.endpoint)
    }

    fn error(&self, what: impl Into<String>) -> Error {
        Error::Hub {
            repo: self.repository.to_string(),
            what: what.into(),
        }
    }

    /// Sends a request until it succeeds, cannot succeed, or has failed too often.
    fn request<T>(&self, send: impl Fn() -> hf_hub::HFResult<T>) -> std::result::Result<T, Fault> {
        let mut failures = 0;
        loop {
            match send().map_err(Fault::Request) {
                Err(fault) if self.may_retry(&fault, failures) => failures += 1,
                answer => return answer,
            }
        }
    }

    /// Whether to send a request again that has failed `failures` times before this; waits if so.
    fn may_retry(&self, fault: &Fault, failures: usize) -> bool {
        let retries = match fault.is_connect() {
            true => self.hub.retries.min(CONNECT_RETRIES),
            false => self.hub.retries,
        };
        if !fault.is_transient() || failures >= retries {
            return false;
        }
        let wait = FIRST_WAIT * (1 << failures.min(6));
        std::thread::sleep(fault.wait().unwrap_or(wait));
        true
    }

    /// The commit that the revision means now.
    fn commit(&self) -> std::result::Result<String, Fault> {
        let revision = self.repository.revision();
        let info = self.request(|| self.remote.info().revision(revision).send());
        let info = info.map_err(|fault| match fault {
            // 404 for either; a header says which, and where it is missing the one that the user named is.
            Fault::Request(HFError::RevisionNotFound {
                repo_id, context, ..
            }) if self.lacks_repository(context.as_ref().and_then(|c| c.error_code.as_deref())) => {
                Fault::Request(HFError::RepoNotFound { repo_id, context })
            }
            other => other,
        })?;
        match info.sha {
            Some(commit) if is_commit(&commit) => Ok(commit),
            other => Err(Fault::Answer(format!(
                "the hub names {other:?} as the commit of {revision}, which is none"
            ))),
        }
    }

    fn lacks_repository(&self, error_code: Option<&str>) -> bool {
        match error_code {
            Some(code) => code == "RepoNotFound",
            None => self.repository.revision.is_none(),
        }
    }

    /// Every file of a commit.
    fn tree(&self, commit: &str) -> Result<BTreeMap<String, Entry>> {
        let entries = self
            .request(|| {
                self.remote
                    .list_tree()
                    .revision(commit)
                    .recursive(true)
                    .send()
            })
            .map_err(|fault| self.explain(&fault))?;
        let files = entries.into_iter().filter_map(|entry| match entry {
            RepoTreeEntry::File {
                oid,
                size,
                path,
                lfs,
                ..
            } => {
                let large = lfs.is_some();
                let object = oid;
                Some((
                    path,
                    Entry {
                        size,
                        object,
                        large,
                    },
                ))
            }
            RepoTreeEntry::Directory { .. } => None,
        });
        Ok(files.collect())
    }

    /// Fetches what a model needs of a commit.
    fn files(&self, commit: &str) -> Result<()> {
        let tree = self.tree(commit)?;
        if !tree.contains_key("config.json") {
            return Err(self.error("has no config.json, so it is not a model that can be loaded"));
        }
        let mut weights = vec![];
        if let Some(entry) = tree.get(INDEX) {
            self.file(commit, INDEX, entry, 0, entry.size)?;
            weights.push(INDEX.to_string());
            weights.extend(indexed_files(&self.cache.snapshot(commit).join(INDEX))?);
        } else if tree.contains_key(SINGLE) {
            weights.push(SINGLE.into());
        } else {
            return Err(self.error(format!(
                "has neither {SINGLE} nor {INDEX}: it holds no weights in the safetensors format"
            )));
        }
        let optional = COMPANIONS.iter().chain(&SIDE_CARS);
        let optional = optional.filter(|name| tree.contains_key(**name));
        let mut wanted: Vec<String> = optional.map(|name| name.to_string()).collect();
        wanted.extend(weights);
        wanted.sort();
        wanted.dedup();
        let mut files = vec![];
        for name in &wanted {
            let entry = tree.get(name).ok_or_else(|| {
                self.error(format!("{INDEX} names {name}, which the repository lacks"))
            })?;
            files.push((name, entry));
        }
        // Small files first, so that what is wrong with a configuration is seen before gigabytes came.
        files.sort_by_key(|(_, entry)| entry.size);
        let total = files.iter().map(|(_, entry)| entry.size).sum();
        let mut done = 0;
        for (name, entry) in files {
            self.file(commit, name, entry, done, total)?;
            done += entry.size;
            self.hub.report(name, done, total);
        }
        Ok(())
    }

    /// One file, after `done` bytes of `total`.
    fn file(&self, commit: &str, name: &str, entry: &Entry, done: u64, total: u64) -> Result<()> {
        if !is_plain(name) || !is_plain(&entry.object) {
            return Err(self.error(format!("names the file {name:?}, which lies outside it")));
        }
        let pointer = self.cache.snapshot(commit).join(name);
        match fs::metadata(&pointer) {
            Ok(held) if held.len() == entry.size => return Ok(()),
            Ok(_) => self.cache.discard(&pointer)?,
            Err(_) => {}
        }
        let _lock = self.cache.lock(&entry.object)?;
        let cached = match entry.large {
            true => self.cache.find_large(&entry.object, entry.size).is_some(),
            false => {
                fs::metadata(self.cache.blob(&entry.object)).is_ok_and(|m| m.len() == entry.size)
            }
        };
        if !cached {
            self.content(commit, name, entry, done, total)?;
        }
        // The client finds the content there and only links to it; content of another name it fetches again, whole.
        self.request(|| {
            self.remote
                .download_file()
                .filename(name)
                .revision(commit)
                .send()
        })
        .map_err(|fault| self.explain(&fault))?;
        let held = fs::metadata(&pointer).map_err(|e| Error::io(&pointer, e))?;
        if held.len() != entry.size {
            self.cache.discard(&pointer)?;
            let what = format!(
                "{name}: {} bytes arrived of {}: try again",
                held.len(),
                entry.size
            );
            return Err(self.error(what));
        }
        Ok(())
    }

    /// Brings a file's content into the cache.
    fn content(
        &self,
        commit: &str,
        name: &str,
        entry: &Entry,
        done: u64,
        total: u64,
    ) -> Result<()> {
        let partial = self.cache.partial(&entry.object);
        make_parent(&partial)?;
        let mut ranged = RangedFile::open(&partial, entry.size)?;
        let mut failures = 0;
        while !ranged.is_whole() {
            let before = ranged.have();
            let arrived = Arc::new(AtomicU64::new(done + before));
            let fault = ranged.advance(self.hub.range_bytes, |range| {
                let (hub, file) = (self.hub.clone(), name.to_string());
                let report = move |bytes| hub.report(&file, bytes, total);
                self.remote
                    .download_file_to_bytes()
                    .filename(name)
                    .revision(commit)
                    .range(range)
                    .progress(Arriving::new(arrived.clone(), report))
                    .send()
                    .map_err(Fault::Request)
            })?;
            if let Err(fault) = fault {
                if ranged.have() > before {
                    failures = 0;
                }
                if !self.may_retry(&fault, failures) {
                    return Err(self.explain(&fault));
                }
                failures += 1;
            }
        }
        ranged.finish()?;
        let key = match entry.large {
            true => sha256(&partial)?,
            false => entry.object.clone(),
        };
        let blob = self.cache.blob(&key);
        fs::rename(&partial, &blob).map_err(|e| Error::io(&blob, e))
    }
}
