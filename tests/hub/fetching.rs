//! What is fetched, from where, and what a break leaves.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use axum::http::Method;
use candle_specprefill::hub::ModelSource;
use candle_specprefill::qwen3_5::{LoadOptions, Model};

use super::server::{commit, sha256, Faults};
use super::{draft_files, repository, tiny, World, ID};

const NEEDED: [&str; 7] = [
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
];

#[test]
fn only_what_a_model_needs_is_fetched_into_the_shared_cache() {
    let world = World::default();
    let folder = world.hub().fetch(&repository(ID)).unwrap();
    assert_eq!(folder, world.cached("snapshots").join(commit(1)));
    let mut names: Vec<String> = (std::fs::read_dir(&folder).unwrap().flatten())
        .map(|entry| entry.file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, NEEDED);
    for name in NEEDED {
        let (ours, theirs) = (folder.join(name), tiny("draft").join(name));
        assert_eq!(
            std::fs::read(&ours).unwrap(),
            std::fs::read(theirs).unwrap()
        );
        #[cfg(unix)]
        assert!(ours.is_symlink(), "{name}");
    }
    // As the hub's other tools lay it out.
    let weights = std::fs::read(tiny("draft").join("model.safetensors")).unwrap();
    let blob = world.cached("blobs").join(sha256(&weights));
    assert!(blob.is_file());
    assert_eq!(
        std::fs::read_to_string(world.cached("refs/main")).unwrap(),
        commit(1)
    );
    assert!(Model::load(&folder, &LoadOptions::default()).is_ok());
}

#[test]
fn what_is_here_is_not_fetched_again() {
    let world = World::default();
    world.hub().fetch(&repository(ID)).unwrap();
    world.server.seen();
    world.hub().fetch(&repository(ID)).unwrap();
    let again = world.server.seen();
    assert!(
        again.iter().all(|seen| seen.path.starts_with("/api/")),
        "{again:?}"
    );
    // A commit is for ever.
    let pinned = repository(&format!("{ID}@{}", commit(1)));
    world.hub().fetch(&pinned).unwrap();
    assert!(world.server.seen().is_empty());
    // Nor is what another commit brought.
    let mut files = draft_files();
    files.insert(
        "generation_config.json".into(),
        b"{\"eos_token_id\": 1}".to_vec(),
    );
    world.server.publish(ID, &commit(2), files);
    let folder = world.hub().fetch(&repository(ID)).unwrap();
    assert_eq!(folder, world.cached("snapshots").join(commit(2)));
    let fetched: Vec<_> = (world.server.seen().into_iter())
        .filter(|seen| seen.method == Method::GET && seen.range.is_some())
        .map(|seen| seen.path)
        .collect();
    assert_eq!(
        fetched,
        [format!(
            "/{ID}/resolve/{}/generation_config.json",
            commit(2)
        )]
    );
    assert!(Model::load(&folder, &LoadOptions::default()).is_ok());
}

#[test]
fn offline_the_cache_serves() {
    let world = World::default();
    let online = world.hub().fetch(&repository(ID)).unwrap();
    world.server.seen();
    let offline = world.hub().offline(true);
    assert_eq!(offline.fetch(&repository(ID)).unwrap(), online);
    assert!(world.server.seen().is_empty());
    let error = offline
        .fetch(&repository("tiny/target"))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("tiny/target") && error.contains("HF_HUB_OFFLINE"),
        "{error}"
    );
    std::fs::remove_file(online.join("model.safetensors")).unwrap();
    let error = offline.fetch(&repository(ID)).unwrap_err().to_string();
    assert!(error.contains("model.safetensors"), "{error}");
}

#[test]
fn a_hub_out_of_reach_leaves_the_cached_copy() {
    let world = World::default();
    let folder = world.hub().fetch(&repository(ID)).unwrap();
    let nowhere = world.hub().endpoint("http://127.0.0.1:9");
    assert_eq!(nowhere.fetch(&repository(ID)).unwrap(), folder);
    let error = nowhere
        .fetch(&repository("tiny/target"))
        .unwrap_err()
        .to_string();
    assert!(error.contains("cannot be reached"), "{error}");
}

/// Breaks the download of the weights, and gives the file in which they are gathered.
fn break_off(world: &World) -> PathBuf {
    // The next file by size, the tokenizer, comes in one range of less.
    world.server.fault(Faults {
        cut: Some((290_000, usize::MAX)),
        ..Default::default()
    });
    let error = world.hub().fetch(&repository(ID)).unwrap_err().to_string();
    assert!(
        error.contains("broke off") && error.contains("kept"),
        "{error}"
    );
    assert!(
        !world.cached("refs/main").exists(),
        "not before all is here"
    );
    world.server.fault(Faults::default());
    world.server.seen();
    let blobs = std::fs::read_dir(world.cached("blobs")).unwrap().flatten();
    let mut names = blobs.map(|blob| blob.path());
    names
        .find(|name| name.to_string_lossy().ends_with(".incomplete"))
        .unwrap()
}

#[test]
fn a_cut_download_goes_on_where_it_broke_off() {
    let weights = std::fs::read(tiny("draft").join("model.safetensors")).unwrap();
    for kept in [0, 1, 700_001, weights.len() - 1, weights.len()] {
        let world = World::default();
        let partial = break_off(&world);
        std::fs::write(&partial, &weights[..kept]).unwrap();
        let folder = world.hub().fetch(&repository(ID)).unwrap();
        let asked = ranges(&world, &weights);
        let expected = (kept < weights.len()).then_some(kept);
        assert_eq!(asked.first().map(|range| range.0), expected);
        assert_eq!(
            std::fs::read(folder.join("model.safetensors")).unwrap(),
            weights
        );
        assert!(!partial.exists());
    }
}

#[test]
fn a_wrong_beginning_is_found_out() {
    let weights = std::fs::read(tiny("draft").join("model.safetensors")).unwrap();
    for wrong in [700_001, weights.len(), weights.len() + 1] {
        let world = World::default();
        std::fs::write(break_off(&world), vec![1; wrong]).unwrap();
        let folder = world.hub().fetch(&repository(ID)).unwrap();
        assert_eq!(
            std::fs::read(folder.join("model.safetensors")).unwrap(),
            weights
        );
    }
}

/// The ranges of the weights that were asked for, sorted.
fn ranges(world: &World, weights: &[u8]) -> Vec<(usize, usize)> {
    let path = format!("/store/{}", sha256(weights));
    let seen = world.server.seen().into_iter();
    let mut ranges: Vec<_> = seen
        .filter(|s| s.path == path && s.method == Method::GET)
        .filter_map(|s| s.range)
        .collect();
    ranges.sort_unstable();
    ranges
}

#[test]
fn breaks_and_busy_hubs_are_met_with_patience() {
    let world = World::default();
    for faults in [
        Faults {
            cut: Some((1000, 1)),
            ..Default::default()
        },
        Faults {
            busy: 2,
            ..Default::default()
        },
    ] {
        world.server.fault(faults);
        let cache = tempfile::tempdir().unwrap();
        let hub = world.hub().retries(3).cache_dir(cache.path());
        let folder = hub.fetch(&repository(ID)).unwrap();
        assert!(Model::load(&folder, &LoadOptions::default()).is_ok());
    }
}

#[test]
fn a_blob_that_lost_bytes_is_fetched_again() {
    let world = World::default();
    let folder = world.hub().fetch(&repository(ID)).unwrap();
    for name in ["model.safetensors", "config.json"] {
        let blob = folder.join(name).canonicalize().unwrap();
        let content = std::fs::read(&blob).unwrap();
        std::fs::write(&blob, &content[..content.len() / 2]).unwrap();
        world.hub().fetch(&repository(ID)).unwrap();
        assert_eq!(std::fs::read(folder.join(name)).unwrap(), content, "{name}");
    }
}

#[test]
fn two_at_once_do_not_write_into_one_file() {
    let world = World::default();
    std::thread::scope(|scope| {
        let both = [0; 2].map(|_| scope.spawn(|| world.hub().fetch(&repository(ID))));
        for thread in both {
            let folder = thread.join().unwrap().unwrap();
            assert!(Model::load(&folder, &LoadOptions::default()).is_ok());
        }
    });
    let weights = std::fs::read(tiny("draft").join("model.safetensors")).unwrap();
    let asked: usize = (ranges(&world, &weights).iter())
        .map(|r| r.1 + 1 - r.0)
        .sum();
    assert_eq!(asked, weights.len(), "one waits for the other");
}

#[test]
fn a_renamed_repository_is_found() {
    let world = World::default();
    world.server.rename("old/name", ID);
    let folder = world.hub().fetch(&repository("old/name")).unwrap();
    assert!(Model::load(folder, &LoadOptions::default()).is_ok());
}

#[test]
fn progress_counts_all_bytes() {
    let world = World::default();
    let seen = Arc::new(Mutex::new(vec![]));
    let sink = seen.clone();
    let hub = world
        .hub()
        .on_progress(move |p| sink.lock().unwrap().push((p.done, p.total)));
    hub.fetch(&repository(ID)).unwrap();
    let seen = seen.lock().unwrap();
    let total: u64 = NEEDED
        .iter()
        .map(|name| std::fs::metadata(tiny("draft").join(name)).unwrap().len())
        .sum();
    assert_eq!(seen.last(), Some(&(total, total)));
    assert!(
        seen.len() > NEEDED.len(),
        "more than one report for the weights"
    );
    assert!(seen
        .iter()
        .skip(2)
        .all(|(done, of)| *done <= total && *of == total));
}

#[test]
fn names_and_folders_are_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    assert_eq!(ModelSource::from(path), ModelSource::Folder(path.into()));
    for name in [
        "Qwen/Qwen3.5-0.8B",
        "mlx-community/Qwen3.5-0.8B-4bit@main",
        "a/b@refs/pr/1",
    ] {
        assert_eq!(ModelSource::from(name), ModelSource::Hub(repository(name)));
        assert_eq!(ModelSource::from(name).to_string(), name);
    }
    for folder in [
        "./a/b",
        "../b",
        "/a/b",
        "model",
        "a/b/c",
        "a/b@",
        "a/../b",
        "examples/tiny",
    ] {
        assert!(
            matches!(ModelSource::from(folder), ModelSource::Folder(_)),
            "{folder}"
        );
    }
}
