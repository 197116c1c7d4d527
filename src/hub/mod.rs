//! A model's files: a local folder, or a repository on the Hugging Face Hub by its name.
//!
//! Downloads land in the cache that all tools of the hub share. Endpoint, token and cache come from where those tools look:
//! `HF_ENDPOINT`, `HF_TOKEN` (or the file that a login wrote), `HF_HUB_CACHE` or `HF_HOME`, and `HF_HUB_OFFLINE`. Fetching needs
//! the feature `hub`.

#[cfg(feature = "hub")]
mod cache;
#[cfg(feature = "hub")]
mod fault;
#[cfg(feature = "hub")]
mod fetch;
#[cfg(feature = "hub")]
mod ranges;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::{Error, Result};

/// A repository on the hub, and which of its revisions.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Repository {
    owner: String,
    name: String,
    revision: Option<String>,
}

impl Repository {
    /// Reads `owner/name` or `owner/name@revision`; a revision is a branch, a tag or a commit, `main` when none is named.
    pub fn parse(text: &str) -> Result<Self> {
        let wrong = |what: &str| {
            Err(Error::Hub {
                repo: text.into(),
                what: format!("{what}; write owner/name or owner/name@revision"),
            })
        };
        let (id, revision) = match text.split_once('@') {
            Some((id, revision)) => (id, Some(revision)),
            None => (text, None),
        };
        let Some((owner, name)) = id.split_once('/') else {
            return wrong("names no owner");
        };
        // The hub's own rule; it also keeps a name inside the cache.
        let plain = |part: &str| {
            let known = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
            !part.is_empty()
                && part.len() <= 96
                && part.chars().all(known)
                && !part.starts_with(['-', '.'])
                && !part.contains("..")
                && !part.contains("--")
        };
        if !plain(owner) || !plain(name) {
            return wrong("is not the name of a repository");
        }
        if revision.is_some_and(|r| r.is_empty() || !r.split('/').all(plain)) {
            return wrong("is not the name of a revision");
        }
        Ok(Self {
            owner: owner.into(),
            name: name.into(),
            revision: revision.map(Into::into),
        })
    }

    /// The branch, tag or commit.
    pub fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or("main")
    }

    /// `owner/name`.
    pub fn id(&self) -> String {
        format!("{}/{}", self.owner, self.name)
    }
}

impl fmt::Display for Repository {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}/{}", self.owner, self.name)?;
        match &self.revision {
            Some(revision) => write!(f, "@{revision}"),
            None => Ok(()),
        }
    }
}

/// Where a model's files are. Text becomes a folder if there is one of that name, else a repository if it reads as one; a
/// path is always a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelSource {
    /// A folder with `config.json`, weights and tokenizer.
    Folder(PathBuf),
    /// A repository on the hub.
    Hub(Repository),
}

impl ModelSource {
    /// The folder with the files, fetched first where they are on the hub and not yet in the cache.
    pub fn resolve(&self, hub: &Hub) -> Result<PathBuf> {
        match self {
            Self::Folder(folder) if folder.is_dir() => Ok(folder.clone()),
            Self::Folder(folder) => Err(Error::File {
                file: folder.clone(),
                what: "no such folder; name the folder that holds the model's config.json, or a repository on the hub as owner/name".into(),
            }),
            Self::Hub(repository) => hub.fetch(repository),
        }
    }
}

impl From<&str> for ModelSource {
    fn from(text: &str) -> Self {
        match Repository::parse(text) {
            Ok(repository) if !Path::new(text).is_dir() => Self::Hub(repository),
            _ => Self::Folder(text.into()),
        }
    }
}

impl From<String> for ModelSource {
    fn from(text: String) -> Self {
        text.as_str().into()
    }
}

impl From<PathBuf> for ModelSource {
    fn from(folder: PathBuf) -> Self {
        Self::Folder(folder)
    }
}

impl From<&PathBuf> for ModelSource {
    fn from(folder: &PathBuf) -> Self {
        Self::Folder(folder.clone())
    }
}

impl From<&Path> for ModelSource {
    fn from(folder: &Path) -> Self {
        Self::Folder(folder.into())
    }
}

impl From<Repository> for ModelSource {
    fn from(repository: Repository) -> Self {
        Self::Hub(repository)
    }
}

impl fmt::Display for ModelSource {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Self::Folder(folder) => folder.display().fmt(f),
            Self::Hub(repository) => repository.fmt(f),
        }
    }
}

/// How far a download is.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FetchProgress {
    /// The file that is being fetched.
    pub file: String,
    /// Bytes that are here, of all files that are needed.
    pub done: u64,
    /// Bytes of all files that are needed.
    pub total: u64,
}

type OnProgress = Arc<dyn Fn(&FetchProgress) + Send + Sync>;

/// How repositories are fetched. [`Hub::default`] does as the hub's own tools do under the same environment.
#[derive(Clone)]
pub struct Hub {
    endpoint: Option<String>,
    token: Option<String>,
    cache_dir: Option<PathBuf>,
    offline: Option<bool>,
    retries: usize,
    range_bytes: u64,
    on_progress: Option<OnProgress>,
}

impl Default for Hub {
    fn default() -> Self {
        Self {
            endpoint: None,
            token: None,
            cache_dir: None,
            offline: None,
            retries: 5,
            range_bytes: 32 << 20,
            on_progress: None,
        }
    }
}

impl fmt::Debug for Hub {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.debug_struct("Hub")
            .field("endpoint", &self.endpoint)
            .field("token", &self.token.as_ref().map(|_| "…"))
            .field("cache_dir", &self.cache_dir)
            .field("offline", &self.offline)
            .finish_non_exhaustive()
    }
}

impl Hub {
    /// Another server that speaks the hub's protocol, in place of `HF_ENDPOINT`.
    pub fn endpoint(mut self, url: impl Into<String>) -> Self {
        self.endpoint = Some(url.into());
        self
    }

    /// The token for private and gated repositories, in place of `HF_TOKEN` and of the one that a login left.
    pub fn token(mut self, token: impl Into<String>) -> Self {
        self.token = Some(token.into());
        self
    }

    /// The cache, in place of `HF_HUB_CACHE` or `HF_HOME/hub`.
    pub fn cache_dir(mut self, folder: impl Into<PathBuf>) -> Self {
        self.cache_dir = Some(folder.into());
        self
    }

    /// Uses the cache alone, in place of `HF_HUB_OFFLINE`.
    pub fn offline(mut self, offline: bool) -> Self {
        self.offline = Some(offline);
        self
    }

    /// How often a request that failed on the way is sent again, waiting twice as long each time from half a second on; 5 by
    /// default. A download goes on where it broke off.
    pub fn retries(mut self, retries: usize) -> Self {
        self.retries = retries;
        self
    }

    /// Bytes that one request asks for; 32 MiB by default. Four run at a time, and a break loses no more than these.
    pub fn range_bytes(mut self, bytes: u64) -> Self {
        self.range_bytes = bytes.max(1);
        self
    }

    /// Called as bytes arrive, from another thread; it must return soon.
    pub fn on_progress(
        mut self,
        callback: impl Fn(&FetchProgress) + Send + Sync + 'static,
    ) -> Self {
        self.on_progress = Some(Arc::new(callback));
        self
    }

    /// A folder with the repository's configuration, tokenizer, chat template and weights; other files are not fetched. What
    /// the cache has is not fetched again, a download that broke off goes on, and every file's size is checked. When the hub
    /// cannot be reached, what the cache has of that revision is used, with a warning in the log.
    ///
    /// # Errors
    /// [`Error::Hub`]: there is no such repository or revision, it is private or gated, the hub refuses or cannot be reached, a
    /// file is missing, or the disk is full.
    #[cfg(feature = "hub")]
    pub fn fetch(&self, repository: &Repository) -> Result<PathBuf> {
        fetch::fetch(self, repository)
    }

    /// Without the feature `hub` always an error.
    #[cfg(not(feature = "hub"))]
    pub fn fetch(&self, repository: &Repository) -> Result<PathBuf> {
        Err(Error::Hub {
            repo: repository.to_string(),
            what: "no such folder here, and this program was built without the feature `hub`: download the repository and name its folder".into(),
        })
    }
}

#[cfg(feature = "hub")]
impl Hub {
    fn is_offline(&self) -> bool {
        self.offline.unwrap_or_else(|| {
            std::env::var("HF_HUB_OFFLINE").is_ok_and(|value| {
                let value = value.to_ascii_lowercase();
                ["1", "true", "yes", "on"].contains(&value.as_str())
            })
        })
    }

    fn report(&self, file: &str, done: u64, total: u64) {
        if let Some(callback) = &self.on_progress {
            callback(&FetchProgress {
                file: file.into(),
                done,
                total,
            });
        }
    }
}
