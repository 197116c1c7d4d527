//! A server that speaks the hub's protocol as far as a model's download needs it, and can be told to misbehave.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::{Arc, Mutex};

use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{header, HeaderMap, Method, Response, StatusCode};
use sha1::{Digest, Sha1};
use sha2::Sha256;

/// Files of a repository by their names.
pub type Files = BTreeMap<String, Vec<u8>>;

/// What to do wrong.
#[derive(Clone, Default)]
pub struct Faults {
    /// Answer this to everything.
    pub status: Option<u16>,
    /// The token without which the answer is 401.
    pub token: Option<String>,
    /// Break the connection after so many bytes of content, so often.
    pub cut: Option<(usize, usize)>,
    /// Send content without its last bytes, as if that were all.
    pub truncate: usize,
    /// Answer 429 so often.
    pub busy: usize,
    /// Answer a range with the whole file.
    pub ignore_ranges: bool,
}

/// A request as it came.
#[derive(Clone, Debug)]
pub struct Seen {
    pub method: Method,
    pub path: String,
    pub range: Option<(usize, usize)>,
    pub authorized: bool,
}

struct Inner {
    /// By `owner/name`, then by commit.
    repositories: HashMap<String, HashMap<String, Files>>,
    /// Branches by `owner/name@branch`.
    branches: HashMap<String, String>,
    /// New names by old ones.
    renamed: HashMap<String, String>,
    /// Where large files are served.
    store: String,
    faults: Faults,
    seen: Vec<Seen>,
}

/// The hub and, at another address, its store of large files.
pub struct Server {
    pub url: String,
    inner: Arc<Mutex<Inner>>,
    _runtime: tokio::runtime::Runtime,
}

/// The files of a folder.
pub fn files(folder: &Path) -> Files {
    let entries = std::fs::read_dir(folder).unwrap().flatten();
    entries
        .filter(|entry| entry.path().is_file())
        .map(|entry| {
            let name = entry.file_name().into_string().unwrap();
            (name, std::fs::read(entry.path()).unwrap())
        })
        .collect()
}

pub fn commit(n: u8) -> String {
    format!("{n:02x}").repeat(20)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

fn git_object(bytes: &[u8]) -> String {
    let mut object = format!("blob {}\0", bytes.len()).into_bytes();
    object.extend(bytes);
    hex(&Sha1::digest(&object))
}

/// What git keeps of a large file.
fn pointer(bytes: &[u8]) -> String {
    format!(
        "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize {}\n",
        sha256(bytes),
        bytes.len()
    )
}

pub fn is_large(name: &str) -> bool {
    name.ends_with(".safetensors") || name == "tokenizer.json"
}

impl Server {
    pub fn start() -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        let listen = || {
            runtime.block_on(async {
                let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
                let url = format!("http://{}", listener.local_addr().unwrap());
                (listener, url)
            })
        };
        let ((hub, url), (store, store_url)) = (listen(), listen());
        let inner = Arc::new(Mutex::new(Inner {
            repositories: HashMap::new(),
            branches: HashMap::new(),
            renamed: HashMap::new(),
            store: store_url,
            faults: Faults::default(),
            seen: vec![],
        }));
        for listener in [hub, store] {
            let app = axum::Router::new()
                .fallback(answer)
                .with_state(inner.clone());
            runtime.spawn(async move { axum::serve(listener, app).await });
        }
        Self {
            url,
            inner,
            _runtime: runtime,
        }
    }

    /// Makes `main` of a repository a commit with these files.
    pub fn publish(&self, id: &str, commit: &str, files: Files) {
        let mut inner = self.inner.lock().unwrap();
        let commits = inner.repositories.entry(id.into()).or_default();
        commits.insert(commit.into(), files);
        inner.branches.insert(format!("{id}@main"), commit.into());
    }

    pub fn rename(&self, old: &str, new: &str) {
        let mut inner = self.inner.lock().unwrap();
        inner.renamed.insert(old.into(), new.into());
    }

    pub fn fault(&self, faults: Faults) {
        self.inner.lock().unwrap().faults = faults;
    }

    /// The requests since the last call.
    pub fn seen(&self) -> Vec<Seen> {
        std::mem::take(&mut self.inner.lock().unwrap().seen)
    }
}

fn status(status: u16, code: &str) -> Response<Body> {
    Response::builder()
        .status(status)
        .header("X-Error-Code", code)
        .body(Body::from("{\"error\": \"as asked\"}"))
        .unwrap()
}

fn range(headers: &HeaderMap) -> Option<(usize, usize)> {
    let text = headers.get(header::RANGE)?.to_str().ok()?;
    let (from, to) = text.strip_prefix("bytes=")?.split_once('-')?;
    Some((from.parse().ok()?, to.parse().ok()?))
}

async fn answer(State(inner): State<Arc<Mutex<Inner>>>, request: Request) -> Response<Body> {
    let mut inner = inner.lock().unwrap();
    let path = request.uri().path().to_string();
    let authorization = request.headers().get(header::AUTHORIZATION);
    let seen = Seen {
        method: request.method().clone(),
        path: path.clone(),
        range: range(request.headers()),
        authorized: authorization.is_some(),
    };
    inner.seen.push(seen.clone());
    if let Some(store) = path.strip_prefix("/store/") {
        return large(&mut inner, &seen, store);
    }
    if let Some(code) = inner.faults.status {
        return status(code, "");
    }
    if inner.faults.busy > 0 {
        inner.faults.busy -= 1;
        let mut busy = status(429, "");
        busy.headers_mut().insert("Retry-After", 0.into());
        return busy;
    }
    let token = inner.faults.token.as_ref().map(|t| format!("Bearer {t}"));
    if token.is_some_and(|t| authorization.is_none_or(|a| a != t.as_str())) {
        return status(401, "RepoNotFound");
    }
    let parts: Vec<&str> = path.trim_start_matches('/').split('/').collect();
    match parts.as_slice() {
        ["api", "models", owner, name, what @ ("revision" | "tree"), revision] => {
            let id = format!("{owner}/{name}");
            if let Some(new) = inner.renamed.get(&id) {
                return moved(&path.replace(&id, new));
            }
            let Some(commits) = inner.repositories.get(&id) else {
                return status(404, "RepoNotFound");
            };
            let branch = inner.branches.get(&format!("{id}@{revision}"));
            let commit = branch.map_or(*revision, |commit| commit);
            let Some(files) = commits.get(commit) else {
                return status(404, "RevisionNotFound");
            };
            let body = match *what {
                "tree" => tree(files),
                _ => serde_json::json!({"_id": "0", "id": id, "sha": commit}),
            };
            Response::builder()
                .header("content-type", "application/json")
                .body(Body::from(body.to_string()))
                .unwrap()
        }
        [owner, name, "resolve", commit, file @ ..] => {
            let id = format!("{owner}/{name}");
            if let Some(new) = inner.renamed.get(&id) {
                return moved(&path.replace(&id, new));
            }
            let file = file.join("/");
            let commits = inner.repositories.get(&id);
            let Some(content) = commits.and_then(|c| c.get(*commit)?.get(&file)) else {
                return status(404, "EntryNotFound");
            };
            if is_large(&file) {
                let name = sha256(content);
                return Response::builder()
                    .status(StatusCode::FOUND)
                    .header("Location", format!("{}/store/{name}", inner.store))
                    .header("X-Linked-Etag", format!("\"{name}\""))
                    .header("X-Linked-Size", content.len())
                    .header("X-Repo-Commit", *commit)
                    .body(Body::empty())
                    .unwrap();
            }
            let content = content.clone();
            let mut response = send(&mut inner, &seen, &content);
            let headers = response.headers_mut();
            let etag = format!("\"{}\"", git_object(&content));
            headers.insert("ETag", etag.parse().unwrap());
            headers.insert("X-Repo-Commit", commit.parse().unwrap());
            response
        }
        _ => status(404, ""),
    }
}

fn moved(path: &str) -> Response<Body> {
    Response::builder()
        .status(StatusCode::TEMPORARY_REDIRECT)
        .header("Location", path)
        .body(Body::empty())
        .unwrap()
}

fn tree(files: &Files) -> serde_json::Value {
    let entry = |(path, content): (&String, &Vec<u8>)| {
        let size = content.len();
        match is_large(path) {
            true => serde_json::json!({
                "type": "file", "path": path, "size": size, "oid": git_object(pointer(content).as_bytes()),
                "lfs": {"oid": sha256(content), "size": size, "pointerSize": pointer(content).len()},
            }),
            false => {
                serde_json::json!({"type": "file", "path": path, "size": size, "oid": git_object(content)})
            }
        }
    };
    files.iter().map(entry).collect()
}

/// A large file by its SHA-256.
fn large(inner: &mut Inner, seen: &Seen, name: &str) -> Response<Body> {
    let all = inner.repositories.values().flat_map(|c| c.values());
    let found = all.flat_map(|f| f.values()).find(|f| sha256(f) == name);
    match found.cloned() {
        Some(content) => send(inner, seen, &content),
        None => status(404, ""),
    }
}

/// Content, or the range of it that is asked for, with the faults.
fn send(inner: &mut Inner, seen: &Seen, content: &[u8]) -> Response<Body> {
    let range = seen.range.filter(|_| !inner.faults.ignore_ranges);
    let (from, to) = range.map_or((0, content.len()), |(from, to)| {
        (from, (to + 1).min(content.len()))
    });
    let mut response = Response::builder().header("Accept-Ranges", "bytes");
    if range.is_some() {
        response = response.status(StatusCode::PARTIAL_CONTENT).header(
            "Content-Range",
            format!("bytes {from}-{}/{}", to - 1, content.len()),
        );
    }
    if seen.method == Method::HEAD {
        let response = response.header("Content-Length", content.len());
        return response.body(Body::empty()).unwrap();
    }
    let part = content[from..to].to_vec();
    if let Some((bytes, times)) = &mut inner.faults.cut {
        if *times > 0 && part.len() > *bytes {
            *times -= 1;
            let first: Result<Bytes, std::io::Error> = Ok(part[..*bytes].to_vec().into());
            let broken = Err(std::io::Error::other("cut"));
            let body = Body::from_stream(futures_util::stream::iter([first, broken]));
            let response = response.header("Content-Length", part.len());
            return response.body(body).unwrap();
        }
    }
    let sent = part.len().saturating_sub(inner.faults.truncate);
    response.body(Body::from(part[..sent].to_vec())).unwrap()
}
