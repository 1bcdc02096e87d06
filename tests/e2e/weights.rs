//! Weights and their fingerprints: files that are replaced while the service runs, and loaders that fail.

use std::collections::HashMap;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use expertd_client::Client;
use expertd_model::synth::{self, SynthConfig};
use expertd_proto::v1::{DType, ForwardRequest, ForwardResponse, Routing};
use expertd_types::rows::{decode, relative_error};
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};
use rustix::process::{Pid, Signal, kill_process};

use crate::service::{Service, alive, eventually, loaders_of, ranks_of, send, serve_command};

const RANKS: u32 = 2;
const TOKENS: u32 = 5;
/// Largest relative error of a row: the bits depend on how a request is split.
const TOLERANCE: f64 = 1e-5;

/// A small checkpoint of random weights.
pub(crate) fn checkpoint(folder: &Path, seed: u64) -> PathBuf {
    let path = folder.join(format!("seed-{seed}"));
    synth::write(&SynthConfig { seed, ..SynthConfig::new("qwen3_moe") }, &path).unwrap();
    path
}

/// Requests with the same rows and routing for every set of weights, and the answers of each fingerprint.
pub(crate) struct Answers {
    pub(crate) request: ForwardRequest,
    by_fingerprint: HashMap<String, Vec<f32>>,
    tolerance: f64,
}

impl Answers {
    /// Asks a service of each checkpoint.
    pub(crate) async fn of(checkpoints: &[&Path]) -> Answers {
        let mut answers: Option<Answers> = None;
        for path in checkpoints {
            let service = Service::start_checkpoint(path, RANKS, &[], &[]);
            let client = Client::connect(&service.address).await.unwrap();
            let model = client.model("").await.unwrap();
            let answers = answers.get_or_insert_with(|| {
                let layer = &model.moe_layers[0];
                let values = (0..TOKENS * model.hidden).map(|i| (i % 13) as f32 / 6.5 - 1.0);
                let rows: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
                let ids = (0..TOKENS * layer.top_k).map(|i| (i % layer.top_k + i / 7) % layer.num_experts);
                let weights = (0..TOKENS * layer.top_k).flat_map(|_| 0.25_f32.to_le_bytes());
                let routing = Routing {
                    topk_ids: ids.flat_map(u32::to_le_bytes).collect(),
                    topk_weights: weights.collect(),
                    k: 0,
                };
                let request = ForwardRequest::inline(layer.layer, TOKENS, DType::DtypeF32, rows.into());
                let request = ForwardRequest { routing: Some(routing), ..request };
                Answers { request, by_fingerprint: HashMap::new(), tolerance: TOLERANCE }
            });
            let response = client.forward(answers.request.clone(), None).await.unwrap();
            let fingerprint = response.receipt.unwrap().weight_fingerprint;
            assert_eq!(fingerprint, model.weight_fingerprint);
            answers.by_fingerprint.insert(fingerprint, decode(&response.rows, expertd_types::DType::F32));
        }
        let answers = answers.unwrap();
        assert_eq!(
            answers.by_fingerprint.len(),
            checkpoints.len(),
            "each checkpoint has its own fingerprint"
        );
        let mut all = answers.by_fingerprint.values();
        if let (Some(first), Some(second)) = (all.next(), all.next()) {
            assert!(relative_error(first, second) > 0.1, "the answers of the checkpoints differ");
        }
        answers
    }

    /// The same answers with another bound on a row's relative error.
    pub(crate) fn within(self, tolerance: f64) -> Answers {
        Answers { tolerance, ..self }
    }

    /// Panics unless the rows are those of the weights that the receipt names.
    pub(crate) fn check(&self, response: &ForwardResponse) {
        let receipt = response.receipt.as_ref().unwrap();
        let expected = self.by_fingerprint.get(&receipt.weight_fingerprint);
        let expected = expected.unwrap_or_else(|| panic!("no checkpoint has this fingerprint: {receipt:?}"));
        let rows = decode(&response.rows, expertd_types::DType::F32);
        assert_eq!(rows.len(), expected.len());
        let row_length = rows.len() / TOKENS as usize;
        for (row, expected) in rows.chunks(row_length).zip(expected.chunks(row_length)) {
            let error = relative_error(row, expected);
            assert!(error < self.tolerance, "a row is off by {error:.1e} from the weights of {receipt:?}");
        }
    }
}

/// Puts the files of one checkpoint in the place of another's, as a copy with rename or by writing into them.
fn replace(from: &Path, to: &Path, in_place: bool) {
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if in_place {
            // Without truncation: the length is the same.
            let file = fs::OpenOptions::new().write(true).open(&target).unwrap();
            std::os::unix::fs::FileExt::write_all_at(&file, &fs::read(entry.path()).unwrap(), 0).unwrap();
        } else {
            let temporary = to.join("new");
            fs::copy(entry.path(), &temporary).unwrap();
            fs::rename(&temporary, &target).unwrap();
        }
    }
}

/// Files are replaced while the service starts and while its ranks are killed: no receipt is ever wrong. The number of
/// rounds is 20, or `EXPERTD_REPLACE_ROUNDS`.
#[tokio::test(flavor = "multi_thread")]
async fn no_receipt_is_wrong_while_files_are_replaced() {
    const ROUNDS_PER_SERVICE: usize = 4;
    let rounds: usize =
        std::env::var("EXPERTD_REPLACE_ROUNDS").map_or(20, |rounds| rounds.parse().expect("a number"));
    let folder = tempfile::tempdir().unwrap();
    let sources = [checkpoint(folder.path(), 1), checkpoint(folder.path(), 2)];
    let answers = Answers::of(&[&sources[0], &sources[1]]).await;
    let served = folder.path().join("served");
    fs::create_dir(&served).unwrap();
    replace(&sources[0], &served, false);
    let mut random = SmallRng::seed_from_u64(12);
    let (mut round, mut calls, mut refused) = (0, 0, 0);
    let mut seen: HashMap<String, usize> = HashMap::new();
    while round < rounds {
        // While a service starts, its files change at once or several times.
        let stop = Arc::new(AtomicBool::new(false));
        let churn = {
            let (stop, served, sources) = (Arc::clone(&stop), served.clone(), sources.clone());
            let (in_place, pause) = (random.random_bool(0.5), random.random_range(0..300));
            std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(pause));
                for source in sources.iter().cycle().take(4) {
                    replace(source, &served, in_place);
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                }
            })
        };
        let service = Service::try_start(&served, RANKS, &[], &[]);
        stop.store(true, Ordering::Relaxed);
        churn.join().unwrap();
        round += 1;
        let Ok(service) = service else {
            // Files that changed while they were read were noticed.
            refused += 1;
            continue;
        };
        let client = Client::connect(&service.address).await.unwrap();
        for _ in 0..ROUNDS_PER_SERVICE - 1 {
            replace(&sources[random.random_range(0..2)], &served, random.random_bool(0.5));
            let ranks = service.ranks();
            send(ranks[random.random_range(0..ranks.len())], Signal::KILL);
            for _ in 0..5 {
                let response = client.forward(answers.request.clone(), None).await.unwrap();
                answers.check(&response);
                *seen.entry(response.receipt.unwrap().weight_fingerprint).or_default() += 1;
                calls += 1;
            }
            round += 1;
        }
    }
    println!("{round} rounds, {calls} calls, {refused} starts refused; answers by fingerprint: {seen:?}");
    assert!(calls > rounds, "services started");
}

/// A call can name the weights that it is for, by content.
#[tokio::test(flavor = "multi_thread")]
async fn a_call_can_expect_a_fingerprint() {
    let folder = tempfile::tempdir().unwrap();
    let path = checkpoint(folder.path(), 3);
    let sampled = Answers::of(&[&path]).await;
    let service = Service::start_checkpoint(&path, RANKS, &["--verify-weights"], &[]);
    let client = Client::connect(&service.address).await.unwrap();
    let loaded = client.model("").await.unwrap().weight_fingerprint;
    assert!(loaded.starts_with("whole:"), "{loaded}");
    let request = sampled.request.clone().expecting_weights(&loaded);
    let response = client.forward(request, None).await.unwrap();
    assert_eq!(response.receipt.unwrap().weight_fingerprint, loaded);
    let before = sampled.by_fingerprint.keys().next().unwrap();
    let status = client.forward(sampled.request.clone().expecting_weights(before), None).await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::FailedPrecondition, "{status:?}");
    let status =
        client.forward(sampled.request.clone().expecting_weights("nothing"), None).await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::InvalidArgument, "{status:?}");
}

/// A checkpoint that is large enough for its loaders to be caught.
pub(crate) fn large(folder: &Path) -> PathBuf {
    let path = folder.join("large");
    let config = SynthConfig { experts: 64, width: 1024, hidden: 256, ..SynthConfig::new("qwen3_moe") };
    synth::write(&config, &path).unwrap();
    path
}

/// A loader of a router.
fn catch_loader(router: u32) -> u32 {
    let mut found = None;
    eventually(Duration::from_secs(120), "a loader runs", || {
        found = loaders_of(router).first().copied();
        found.is_some()
    });
    found.unwrap()
}

/// Loaders that are killed or stopped are started again.
#[test]
fn a_loader_that_is_killed_or_stopped_is_started_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = large(folder.path());
    let signals = [Signal::KILL, Signal::STOP];
    let (mut done, mut attempts) = (0, 0);
    while let Some(&signal) = signals.get(done) {
        attempts += 1;
        let mut command = serve_command(&path, &["--ranks", "2"]);
        let mut router = command.stdout(Stdio::null()).spawn().unwrap();
        let loader = catch_loader(router.id());
        if kill_process(Pid::from_raw(loader as i32).unwrap(), signal).is_err() {
            // It has ended already, on a busy machine.
            assert!(attempts < 20, "each loader ended before it could be signalled");
            router.kill().unwrap();
            router.wait().unwrap();
            continue;
        }
        done += 1;
        eventually(Duration::from_secs(120), "the loader is replaced", || !alive(loader));
        eventually(Duration::from_secs(120), "ranks start", || !ranks_of(router.id()).is_empty());
        router.kill().unwrap();
        router.wait().unwrap();
    }
}

/// A checkpoint that loses its end while it is loaded is a clear failure, not a hang.
#[test]
fn a_file_that_is_truncated_while_it_is_loaded_is_a_failure_with_a_reason() {
    for attempt in 1.. {
        let folder = tempfile::tempdir().unwrap();
        let path = large(folder.path());
        let mut command = serve_command(&path, &["--ranks", "2"]);
        let mut router = command.stderr(Stdio::piped()).spawn().unwrap();
        let (loader, pid) = (catch_loader(router.id()), Pid::from_child(&router));
        let _ = kill_process(Pid::from_raw(loader as i32).unwrap(), Signal::STOP);
        let weights = fs::OpenOptions::new().write(true).open(path.join("model.safetensors")).unwrap();
        let length = weights.metadata().unwrap().len();
        weights.set_len(length / 2).unwrap();
        // If the other loader reached the end of the file first, the router has already killed this one.
        let _ = kill_process(Pid::from_raw(loader as i32).unwrap(), Signal::CONT);
        // On a busy machine the loaders may be found too late: then the service serves.
        let lines = BufReader::new(router.stdout.take().unwrap()).lines().map_while(Result::ok);
        let serves = std::thread::spawn(move || {
            let serves = { lines }.any(|line| line.starts_with("ready: "));
            if serves {
                let _ = kill_process(pid, Signal::KILL);
            }
            serves
        });
        let output = router.wait_with_output().unwrap();
        if serves.join().unwrap() {
            assert!(attempt < 10, "no loader was found in time");
            continue;
        }
        let log = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(65), "{log}");
        assert!(log.contains("in a row ended before they were ready"), "{log}");
        return;
    }
}

/// Memory that cannot grow is a failed load with a reason, and the service ends.
#[test]
fn memory_that_cannot_grow_is_a_failure_with_a_reason() {
    let folder = tempfile::tempdir().unwrap();
    let path = large(folder.path());
    let command = serve_command(&path, &["--ranks", "2", "--max-tokens-per-step", "16"]);
    // Files of more than 32 MiB cannot be written, and a rank's weights need more.
    let mut limited = std::process::Command::new("sh");
    limited
        .args(["-c", "ulimit -f 65536; exec \"$0\" \"$@\""])
        .arg(command.get_program())
        .args(command.get_args());
    limited.env("EXPERTD_LOG", "error").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let output = limited.output().unwrap();
    let log = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(65), "{log}");
    assert!(log.contains("the loader of rank"), "{log}");
}
