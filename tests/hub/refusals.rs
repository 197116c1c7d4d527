//! What the hub refuses, and how the user reads it.

use candle_specprefill::hub::Repository;
use proptest::prelude::*;

use super::server::{commit, Faults};
use super::{draft_files, repository, World, ID};

fn refusal(world: &World, name: &str) -> String {
    let error = world.hub().fetch(&repository(name)).unwrap_err();
    let text = error.to_string();
    assert!(text.contains(name), "{text}");
    assert!(!text.contains('\n'), "{text}");
    text
}

#[test]
fn every_refusal_says_what_to_do() {
    let world = World::default();
    let status = |code| Faults {
        status: Some(code),
        ..Default::default()
    };
    for (faults, name, expected) in [
        (
            Faults::default(),
            "no/such",
            vec!["no such repository", "check the name"],
        ),
        (
            Faults::default(),
            "tiny/draft@no-such",
            vec!["no branch, tag or commit", "no-such"],
        ),
        (status(401), ID, vec!["HF_TOKEN", "gated"]),
        (
            status(403),
            ID,
            vec!["accept the model's terms", "HF_TOKEN"],
        ),
        (status(429), ID, vec!["too many requests", "wait"]),
        (status(500), ID, vec!["500"]),
    ] {
        world.server.fault(faults);
        let text = refusal(&world, name);
        for word in expected {
            assert!(text.contains(word), "{text}");
        }
    }
}

#[test]
fn a_token_opens_the_hub_and_never_leaves_it() {
    let world = World::default();
    world.server.fault(Faults {
        token: Some("sesame".into()),
        ..Default::default()
    });
    let text = refusal(&world, ID);
    assert!(text.contains("HF_TOKEN"), "{text}");
    let hub = world.hub().token("sesame");
    hub.fetch(&repository(ID)).unwrap();
    let seen = world.server.seen();
    let store = seen.iter().filter(|s| s.path.starts_with("/store/"));
    assert!(store.clone().count() > 0);
    assert!(store.clone().all(|s| !s.authorized), "{seen:?}");
    assert!(!format!("{hub:?}").contains("sesame"));
}

#[test]
fn a_file_that_ends_early_is_never_taken_for_whole() {
    let world = World::default();
    world.server.fault(Faults {
        truncate: 10,
        ..Default::default()
    });
    let text = refusal(&world, ID);
    assert!(text.contains("bytes"), "{text}");
    assert!(!world.cached("refs/main").exists());
    let snapshot = world.cached("snapshots").join(commit(1));
    assert!(!snapshot.join("model.safetensors").exists());
    world.server.fault(Faults::default());
    assert!(world.hub().fetch(&repository(ID)).is_ok());
}

#[test]
fn a_hub_that_ignores_ranges_is_named() {
    let world = World::default();
    world.server.fault(Faults {
        ignore_ranges: true,
        ..Default::default()
    });
    let text = refusal(&world, ID);
    assert!(text.contains("were asked for"), "{text}");
}

#[test]
fn a_repository_without_a_model_is_refused_before_anything_large_is_fetched() {
    let world = World::default();
    let without = |name: &str| {
        let mut files = draft_files();
        files.remove(name);
        files
    };
    let mut no_weights = without("model.safetensors");
    no_weights.remove("model.safetensors.index.json");
    let index = |file: &str| {
        let mut files = draft_files();
        let index = format!("{{\"weight_map\": {{\"a\": \"{file}\"}}}}");
        files.insert("model.safetensors.index.json".into(), index.into_bytes());
        files
    };
    for (n, (files, expected)) in [
        (without("config.json"), "config.json"),
        (no_weights, "safetensors"),
        (index("gone.safetensors"), "gone.safetensors"),
        (index("../../outside.safetensors"), "outside the folder"),
        (index("/etc/passwd"), "outside the folder"),
    ]
    .into_iter()
    .enumerate()
    {
        world.server.publish(ID, &commit(n as u8 + 10), files);
        world.server.seen();
        let error = world.hub().fetch(&repository(ID)).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        let seen = world.server.seen();
        assert!(
            seen.iter().all(|s| !s.path.starts_with("/store/")),
            "{seen:?}"
        );
    }
}

proptest! {
    #[test]
    fn a_name_never_leaves_the_cache(text in "[a-z./@\\\\~-]{0,12}|\\PC{0,40}") {
        if let Ok(repository) = Repository::parse(&text) {
            prop_assert_eq!(repository.to_string(), text.clone());
            let id = repository.id();
            let parts: Vec<&str> = id.split('/').chain(repository.revision().split('/')).collect();
            for part in parts {
                prop_assert!(!part.is_empty() && part != "." && part != "..", "{}", text);
                prop_assert!(!part.contains(['\\', ':', '~']), "{}", text);
            }
        }
    }
}
