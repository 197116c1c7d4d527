//! The example `generate` with models from the hub, as the environment of the hub's tools sets it. One test alone, since the
//! environment is the process's.
#![cfg(all(feature = "hub", feature = "chat"))]

#[path = "../examples/common/mod.rs"]
mod common;
#[path = "hub/server.rs"]
#[allow(dead_code)]
mod server;

use std::env::set_var;

use server::{commit, files, Faults, Server};

fn generate(more: &[&str]) -> (u8, String, String) {
    let (mut out, mut err) = (vec![], vec![]);
    let args = [
        "generate",
        "--model",
        "tiny/target",
        "--draft",
        "tiny/draft@main",
        "--prompt",
        "Tell me about tea.",
        "--max-tokens",
        "8",
    ];
    let status = common::generate::run(args.iter().chain(more).copied(), &mut out, &mut err);
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (status, text(out), text(err))
}

#[test]
fn from_an_empty_cache_after_a_cut_and_again_offline() {
    let (server, home) = (Server::start(), tempfile::tempdir().unwrap());
    for name in ["target", "draft"] {
        let folder = common::tiny().join(name);
        server.publish(&format!("tiny/{name}"), &commit(1), files(&folder));
    }
    let faults = Faults {
        token: Some("sesame".into()),
        ..Default::default()
    };
    server.fault(faults.clone());
    std::env::remove_var("HF_HUB_CACHE");
    set_var("HF_HOME", home.path());
    set_var("HF_ENDPOINT", &server.url);
    set_var("HF_TOKEN", "wrong");
    let (status, out, err) = generate(&[]);
    assert_eq!((status, out.as_str()), (1, ""), "{err}");
    assert!(err.contains("HF_TOKEN"), "{err}");
    assert_eq!(err.trim_end().lines().count(), 1, "{err}");

    // The weights break off once on the way.
    set_var("HF_TOKEN", "sesame");
    server.fault(Faults {
        cut: Some((1_000_000, 1)),
        ..faults
    });
    let (status, fetched, err) = generate(&[]);
    assert_eq!(status, 0, "{err}");
    assert!(home
        .path()
        .join("hub/models--tiny--target/refs/main")
        .is_file());

    server.seen();
    let (status, offline, err) = generate(&["--offline"]);
    assert_eq!(status, 0, "{err}");
    assert!(server.seen().is_empty());
    drop(server);
    set_var("HF_HUB_OFFLINE", "1");
    let (status, out, err) = generate(&[]);
    assert_eq!(status, 0, "{err}");
    assert_eq!([&out, &offline], [&fetched, &fetched]);
    assert!(!fetched.is_empty());
}
