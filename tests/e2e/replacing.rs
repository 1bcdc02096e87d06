//! Reloads where memory has no room for two sets of weights: the present ones are dropped first, and requests wait.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use expertd_client::Client;
use expertd_model::synth::{self, SynthConfig};

use crate::reload::{Callers, reload_to, reload_whose_loader_is_killed, show};
use crate::service::Service;
use crate::weights::Answers;

/// Less than two sets of the weights below, and more than one.
const ROOM: &str = "150000000";

/// Two checkpoints of about 96 MiB, large enough for their loaders to be caught.
fn checkpoints(folder: &std::path::Path) -> [std::path::PathBuf; 2] {
    [1, 2].map(|seed| {
        let path = folder.join(format!("seed-{seed}"));
        let config =
            SynthConfig { seed, experts: 32, width: 1024, hidden: 512, ..SynthConfig::new("qwen3_moe") };
        let config = SynthConfig { layers: 1, ..config };
        synth::write(&config, &path).unwrap();
        path
    })
}

/// The number of packed shares whose descriptors a process holds.
fn shares(pid: u32) -> usize {
    let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
    let links = entries.filter_map(|entry| std::fs::read_link(entry.path()).ok());
    links.filter(|link| link.to_string_lossy().contains("expertd-weights")).count()
}

/// Calls wait for the new weights, and the router never holds two sets.
#[tokio::test(flavor = "multi_thread")]
async fn a_reload_without_room_drops_the_present_weights_first() {
    let folder = tempfile::tempdir().unwrap();
    let sources = checkpoints(folder.path());
    let answers = Arc::new(Answers::of(&[&sources[0], &sources[1]]).await);
    let service = Service::start_checkpoint(&sources[0], 2, &["--max-weight-bytes", ROOM], &[]);
    let callers = Callers::start(&service, &answers).await;
    assert_eq!(shares(service.pid()), 2);
    let (done, most) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let counting = {
        let (done, most, pid) = (Arc::clone(&done), Arc::clone(&most), service.pid());
        std::thread::spawn(move || {
            let (mut fewest, mut before) = (usize::MAX, 0);
            while !done.load(Ordering::Relaxed) {
                let now = shares(pid);
                fewest = fewest.min(now);
                // Shares that come while this thread counts those that go would count as well, but not twice in a row.
                most.fetch_max(now.min(before), Ordering::Relaxed);
                before = now;
                std::thread::sleep(Duration::from_millis(1));
            }
            fewest
        })
    };
    let mut longest = 0.0_f64;
    for round in 1..=3_usize {
        let report = reload_to(&service, &sources[round % 2]).await.unwrap();
        assert_eq!(report.weight_version, 1 + round as u64);
        longest = longest.max(report.pause_seconds);
    }
    done.store(true, Ordering::Relaxed);
    assert_eq!(counting.join().unwrap(), 0, "the present weights were dropped before the new ones came");
    assert_eq!(most.load(Ordering::Relaxed), 2, "one set of two shares at a time");
    let outcome = callers.stop().await;
    show(&format!("3 reloads without room, longest pause {:.0} ms", longest * 1e3), &outcome);
}

/// Weights that cannot be loaded leave the earlier ones, which are loaded again; no call fails.
#[tokio::test(flavor = "multi_thread")]
async fn a_reload_without_room_that_fails_loads_the_earlier_weights_again() {
    let folder = tempfile::tempdir().unwrap();
    let sources = checkpoints(folder.path());
    let answers = Arc::new(Answers::of(&[&sources[0], &sources[1]]).await);
    let service = Service::start_checkpoint(&sources[0], 2, &["--max-weight-bytes", ROOM], &[]);
    let callers = Callers::start(&service, &answers).await;
    let client = Client::connect(&service.address).await.unwrap();
    let before = client.model("").await.unwrap();
    let (reason, succeeded) = reload_whose_loader_is_killed(&service, &[&sources[1], &sources[0]]).await;
    assert!(reason.contains("the loader of rank"), "{reason}");
    let response = client.forward(answers.request.clone(), None).await.unwrap();
    answers.check(&response);
    let receipt = response.receipt.unwrap();
    let is_first = receipt.weight_fingerprint == before.weight_fingerprint;
    assert_eq!(is_first, succeeded % 2 == 0, "the weights of the last reload that succeeded serve");
    assert_eq!(receipt.weight_version, before.weight_version + succeeded);
    let report = reload_to(&service, &sources[usize::from(is_first)]).await.unwrap();
    assert_eq!(report.weight_version, 2 + succeeded);
    let outcome = callers.stop().await;
    show("a reload without room that failed, and one that did not", &outcome);
}
