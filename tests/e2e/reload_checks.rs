//! Reloads that name no folder, overtake each other, or whose check of the checkpoint lasts.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use expertd_cli::admin::AdminAddress;
use expertd_cli::status::{StatusArgs, status};
use expertd_client::Client;
use expertd_model::synth::{self, SynthConfig};
use rustix::process::Signal;

use crate::held::HeldFile;
use crate::reload::{LOST, reload_of, reload_to, signal};
use crate::service::{Service, alive, checks_of, eventually};
use crate::weights::{Answers, checkpoint};

/// A reload that names no folder keeps the weights that serve, and not those of the start.
#[tokio::test(flavor = "multi_thread")]
async fn a_reload_of_the_placement_keeps_the_weights_of_an_earlier_reload() {
    let folder = tempfile::tempdir().unwrap();
    let sources: [PathBuf; 2] = [1, 2].map(|seed| checkpoint(folder.path(), seed));
    let answers = Answers::of(&[&sources[0], &sources[1]]).await;
    let service = Service::start_checkpoint(&sources[0], 2, &[], &[]);
    let client = Client::connect(&service.address).await.unwrap();
    let new = reload_to(&service, &sources[1]).await.unwrap().weight_fingerprint;
    for placement in [Some(Path::new("contiguous")), None] {
        let report = reload_of(&service, None, placement).await.unwrap();
        assert_eq!(report.weight_fingerprint, new);
        let admin = AdminAddress { address: Some(service.admin.clone()), ..AdminAddress::default() };
        let shown =
            status(&StatusArgs { admin, json: false, expert_rows: false, watch: None }).await.unwrap();
        assert_eq!(Path::new(&shown.weight_folder), sources[1]);
        let response = client.forward(answers.request.clone(), None).await.unwrap();
        assert_eq!(response.receipt.as_ref().unwrap().weight_fingerprint, new);
        answers.check(&response);
    }
}

/// Waits for the process that checks a checkpoint for a reload, which a [`HeldFile`] keeps from its end.
async fn find_check(service: &Service) -> u32 {
    let begun = Instant::now();
    loop {
        if let Some(check) = checks_of(service.pid()).first() {
            return *check;
        }
        assert!(begun.elapsed() < LOST, "no check of a checkpoint");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Of two reloads at once, the one that was checked against weights that no longer serve is refused: it would bring them back.
#[tokio::test(flavor = "multi_thread")]
async fn a_reload_that_another_one_overtakes_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let sources: [PathBuf; 2] = [1, 2].map(|seed| checkpoint(folder.path(), seed));
    let service = Service::start_checkpoint(&sources[0], 2, &[], &[]);
    let held = HeldFile::new(&sources[0].join("config.json"));
    let slow = reload_of(&service, None, Some(Path::new("contiguous")));
    let fast = async {
        find_check(&service).await;
        let report = reload_to(&service, &sources[1]).await;
        drop(held);
        report.unwrap()
    };
    let (slow, fast) = tokio::join!(slow, fast);
    let refused = slow.unwrap_err();
    assert!(
        refused.contains("weight version 2 has begun to serve") && refused.contains("try again"),
        "{refused}"
    );
    let model = Client::connect(&service.address).await.unwrap().model("").await.unwrap();
    assert_eq!((model.weight_version, model.weight_fingerprint), (2, fast.weight_fingerprint));
}

/// The process that checks a checkpoint ends with the service, even if it waits for a file.
#[tokio::test(flavor = "multi_thread")]
async fn the_check_of_a_reload_ends_with_the_service() {
    let folder = tempfile::tempdir().unwrap();
    let source = checkpoint(folder.path(), 1);
    let mut service = Service::start_checkpoint(&source, 1, &[], &[]);
    let _held = HeldFile::new(&source.join("config.json"));
    let killing = async {
        let check = find_check(&service).await;
        signal(service.pid(), Signal::KILL);
        check
    };
    let (reloaded, check) = tokio::join!(reload_to(&service, &source), killing);
    assert!(reloaded.is_err(), "{reloaded:?}");
    assert!(service.wait(LOST).is_some());
    eventually(LOST, "the check has ended", || !alive(check));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reload_of_fewer_layers_says_what_the_service_holds() {
    let folder = tempfile::tempdir().unwrap();
    let of = |layers: usize| {
        let path = folder.path().join(layers.to_string());
        synth::write(&SynthConfig { layers, ..SynthConfig::new("qwen3_moe") }, &path).unwrap();
        path
    };
    let service = Service::start_checkpoint(&of(3), 1, &[], &[]);
    let refused = reload_to(&service, &of(2)).await.unwrap_err();
    for part in ["the model has the layers 0-1", "this service holds layers 0-2"] {
        assert!(refused.contains(part), "{part:?} is not in {refused}");
    }
}
