//! Sessions of the real service: the same answers as over gRPC, shared steps, faults.

mod bounded;
mod cuda;
mod cuda_gpu;
mod cuda_routing;
mod gpu;
mod hostile;
mod kept;
mod killed;
mod late;
mod other_checkpoints;
#[path = "../../../client/session/examples/forward.rs"]
#[allow(dead_code, unreachable_pub, reason = "an example is a program")]
mod rust_example;
mod seen;
mod tiers;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use expertd_client::Client;
use expertd_client::session::{SessionClient, SessionError, SessionOptions};
use expertd_proto::v1::admin_client::AdminClient;
use expertd_proto::v1::forward_request::Payload;
use expertd_proto::v1::{ForwardRequest, GetStatusRequest, GetStatusResponse};
use expertd_types::DType;
use expertd_types::rows::{decode, encode};
use rustix::process::Signal;

use crate::service::load::{Rows, check, check_within};
use crate::service::{Service, eventually, families, fixture, golden, send, with_patience};

const FAMILY: &str = "qwen3_moe";
/// Nothing should take this long.
const LOST: Duration = Duration::from_secs(120);

/// A service with a session socket.
struct Host {
    service: Service,
    address: String,
    _folder: tempfile::TempDir,
}

impl Host {
    /// Unless `more` says otherwise, no generation ends because the machine is busy.
    fn start(family: &str, ranks: u32, more: &[&str]) -> Host {
        Host::start_checkpoint(&fixture(family), ranks, &with_patience(more))
    }

    fn start_checkpoint(model: &Path, ranks: u32, more: &[&str]) -> Host {
        let folder = tempfile::tempdir().unwrap();
        let address = format!("unix:{}", folder.path().join("session.sock").display());
        let flags = [&["--session-listen", &address], more].concat();
        Host { service: Service::start_checkpoint(model, ranks, &flags, &[]), address, _folder: folder }
    }

    fn path(&self) -> PathBuf {
        self.address.strip_prefix("unix:").unwrap().into()
    }

    fn open(&self) -> SessionClient {
        SessionClient::open(&self.address, &patient()).unwrap()
    }

    fn status(&self, runtime: &tokio::runtime::Runtime) -> GetStatusResponse {
        runtime.block_on(async {
            let mut admin =
                AdminClient::new(expertd_client::transport::connect(&self.service.admin).await.unwrap());
            admin.get_status(GetStatusRequest {}).await.unwrap().into_inner()
        })
    }

    /// Waits until ranks access the rows of every open session in place.
    fn in_place(&self, runtime: &tokio::runtime::Runtime) {
        eventually(LOST, "rows are accessed in place", || {
            let sessions = self.status(runtime).sessions;
            sessions.iter().all(|session| session.in_place && session.refusal.is_empty())
        });
    }

    fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.service.pid())).unwrap().count()
    }
}

/// Options of a session whose opening may take as long as it likes.
fn patient() -> SessionOptions {
    SessionOptions { timeout: LOST, ..SessionOptions::default() }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap()
}

/// Calls through sessions until it is stopped; every answer is checked.
struct Load {
    stop: Arc<AtomicBool>,
    answered: Arc<AtomicU64>,
    workers: Vec<JoinHandle<Vec<u64>>>,
}

impl Load {
    /// Two sessions with two threads each.
    fn start(host: &Host, largest: usize) -> Load {
        Load::start_within(1e-5, host, largest)
    }

    /// The same, with another bound on a row's relative error.
    fn start_within(tolerance: f64, host: &Host, largest: usize) -> Load {
        Load::of(&golden(FAMILY), tolerance, host, largest)
    }

    /// The same with rows of a recording.
    fn of(golden: &Path, tolerance: f64, host: &Host, largest: usize) -> Load {
        let (stop, answered) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let mut workers = Vec::new();
        for number in 0..2 {
            let session = Arc::new(host.open());
            for thread in 0..2 {
                let (session, stop, answered) =
                    (Arc::clone(&session), Arc::clone(&stop), Arc::clone(&answered));
                let mut rows = Rows::new(golden, 10 * number + thread, largest);
                workers.push(std::thread::spawn(move || {
                    let mut generations = Vec::new();
                    while !stop.load(Ordering::Relaxed) {
                        let (request, wanted) = rows.draw();
                        let response = session.forward(&request, LOST).unwrap();
                        check_within(tolerance, &response, &wanted, &request);
                        generations.push(response.receipt.unwrap().generation);
                        answered.fetch_add(1, Ordering::Relaxed);
                    }
                    generations
                }));
            }
        }
        Load { stop, answered, workers }
    }

    /// Waits for more answers.
    fn goes_on(&self) {
        let before = self.answered.load(Ordering::Relaxed);
        eventually(LOST, "calls are answered", || self.answered.load(Ordering::Relaxed) > before + 20);
    }

    /// The generations of all answers.
    fn stop(self) -> Vec<u64> {
        self.stop.store(true, Ordering::Relaxed);
        self.workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect()
    }
}

#[test]
fn answers_equal_those_of_grpc() {
    let runtime = runtime();
    for family in families() {
        let host = Host::start(&family, 3, &["--max-tokens-per-step", "16"]);
        let client = runtime.block_on(Client::connect(&host.service.address)).unwrap();
        let session = host.open();
        let model = runtime.block_on(client.model("")).unwrap();
        assert_eq!(session.model(), &model);
        assert_eq!(session.session().hidden(), model.hidden as usize);
        host.in_place(&runtime);
        // Up to two steps, and ids and weights given and returned.
        let mut rows = Rows::new(&golden(&family), 1, 32);
        for round in 0..12 {
            let (mut request, wanted) = rows.draw();
            request.return_routing = true;
            let over_grpc = runtime.block_on(client.forward(request.clone(), None)).unwrap();
            let over_session = session.forward(&request, LOST).unwrap();
            check(&over_session, &wanted, &request);
            assert_eq!(over_session.rows, over_grpc.rows, "{family}, round {round}");
            let (a, b) = (over_grpc.receipt.unwrap(), over_session.receipt.unwrap());
            assert_eq!((&a.topk_ids, &a.topk_weights), (&b.topk_ids, &b.topk_weights));
            assert_eq!((a.tokens_per_rank, a.weight_version), (b.tokens_per_rank, b.weight_version));
            assert_eq!(a.weight_fingerprint, b.weight_fingerprint);
            let k = (a.topk_ids.len() / 4) as u32 / request.tokens;
            request.routing =
                Some(expertd_proto::v1::Routing { topk_ids: a.topk_ids, topk_weights: a.topk_weights, k });
            let given = session.forward(&request, LOST).unwrap();
            assert_eq!(given.rows, over_grpc.rows, "{family}, given routing, round {round}");
        }
        let statuses = host.status(&runtime).sessions;
        assert_eq!((statuses.len(), statuses[0].calls_total), (1, 24));
        assert_eq!(statuses[0].pid, std::process::id());
    }
}

#[test]
fn every_element_type_and_rows_of_no_expert_equal_those_of_grpc() {
    let runtime = runtime();
    let host = Host::start(FAMILY, 3, &["--max-tokens-per-step", "16"]);
    let client = runtime.block_on(Client::connect(&host.service.address)).unwrap();
    let session = host.open();
    host.in_place(&runtime);
    let mut rows = Rows::new(&golden(FAMILY), 11, 32);
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        for _ in 0..4 {
            let (mut request, _) = rows.draw();
            let Some(Payload::Inline(given)) = &request.payload else { panic!("rows are inline") };
            let values = decode(given, DType::F32);
            request.dtype = dtype as i32;
            request.payload = Some(Payload::Inline(encode(&values, dtype)));
            request.return_routing = true;
            let routed = runtime.block_on(client.forward(request.clone(), None)).unwrap();
            assert_eq!(session.forward(&request, LOST).unwrap().rows, routed.rows, "{dtype}");
            // Every other assignment belongs to another service, and the first row is of none of this one's experts.
            let receipt = routed.receipt.unwrap();
            let k = receipt.topk_ids.len() / 4 / request.tokens as usize;
            let mut ids = receipt.topk_ids.to_vec();
            for (_, id) in ids.chunks_exact_mut(4).enumerate().filter(|(at, _)| *at < k || at % 2 == 1) {
                id.copy_from_slice(&(-1_i32).to_le_bytes());
            }
            let (topk_ids, topk_weights) = (ids.into(), receipt.topk_weights);
            request.routing = Some(expertd_proto::v1::Routing { topk_ids, topk_weights, k: k as u32 });
            let some = runtime.block_on(client.forward(request.clone(), None)).unwrap();
            assert_ne!(some.rows, routed.rows);
            assert_eq!(
                session.forward(&request, LOST).unwrap().rows,
                some.rows,
                "{dtype}, rows of no expert"
            );
        }
    }
}

#[test]
fn calls_of_sessions_and_of_grpc_share_steps() {
    let runtime = runtime();
    // So long that only a full step can be the cause of an answer.
    let host = Host::start(FAMILY, 2, &["--max-tokens-per-step", "32", "--max-wait-us", "60000000"]);
    let client = runtime.block_on(Client::connect(&host.service.address)).unwrap();
    let mut rows = Rows::new(&golden(FAMILY), 3, 32);
    let layer = rows.layers()[0];
    let (small, small_output) = rows.draw_of(layer, 5);
    let waiting = runtime.spawn({
        let (client, small) = (client.clone(), small.clone());
        async move { client.forward(small, None).await }
    });
    eventually(LOST, "the call over gRPC waits", || host.status(&runtime).requests_queued == 1);
    let session = host.open();
    let (rest, rest_output) = rows.draw_of(layer, 27);
    let filling = session.forward(&rest, LOST).unwrap();
    check(&filling, &rest_output, &rest);
    let waited = runtime.block_on(waiting).unwrap().unwrap();
    check(&waited, &small_output, &small);
    assert_eq!(waited.receipt.unwrap().steps, filling.receipt.unwrap().steps, "they share a step");
}

#[test]
fn a_killed_rank_fails_no_call() {
    let runtime = runtime();
    let host = Host::start(FAMILY, 3, &[]);
    let load = Load::start(&host, 64);
    for rank in 0..3 {
        load.goes_on();
        // Each generation attaches the sessions of the earlier ones.
        host.in_place(&runtime);
        let ranks = host.service.ranks();
        send(ranks[rank], Signal::KILL);
        eventually(LOST, "the next generation serves", || {
            let now = host.service.ranks();
            now.len() == 3 && now.iter().all(|pid| !ranks.contains(pid))
        });
        load.goes_on();
    }
    let generations = load.stop();
    assert!(generations.iter().max() >= Some(&4), "{:?}", generations.iter().max());
}

#[test]
fn a_rank_that_never_attaches_a_session_ends_its_generation() {
    let runtime = runtime();
    let host = Host::start(FAMILY, 2, &["--liveness-timeout-ms", "600000", "--step-timeout-ms", "1000"]);
    send(host.service.ranks()[0], Signal::STOP);
    // The client gets its session at once, and makes no call whose step could be late.
    let session = host.open();
    eventually(LOST, "the next generation attaches the session", || {
        let status = host.status(&runtime);
        status.generation >= 2 && status.sessions.iter().all(|session| session.in_place)
    });
    let (request, wanted) = Rows::new(&golden(FAMILY), 9, 32).draw();
    check(&session.forward(&request, LOST).unwrap(), &wanted, &request);
}

#[test]
fn calls_that_are_invalid_fail_alone() {
    let host = Host::start(FAMILY, 2, &[]);
    let session = host.open();
    let mut rows = Rows::new(&golden(FAMILY), 6, 4);
    let fails = |change: &dyn Fn(&mut expertd_proto::v1::ForwardRequest), code: u32, text: &str| {
        let (mut request, _) = Rows::new(&golden(FAMILY), 7, 4).draw();
        change(&mut request);
        match session.forward(&request, LOST).unwrap_err() {
            SessionError::Status { code: found, message, .. } => {
                assert!(found == code && message.contains(text), "{found}: {message}");
            }
            other => panic!("{other}"),
        }
    };
    fails(&|request| request.layer = 9999, 5, "no layer 9999");
    fails(&|request| request.expected_weight_version = Some(99), 9, "weight version");
    let given = |id: i32| expertd_proto::v1::Routing {
        topk_ids: id.to_le_bytes().to_vec().into(),
        topk_weights: 1.0_f32.to_le_bytes().to_vec().into(),
        k: 1,
    };
    fails(
        &|request| {
            let (one, _) = Rows::new(&golden(FAMILY), 7, 1).draw();
            *request = one;
            request.routing = Some(given(99_999));
        },
        3,
        "names expert 99999",
    );
    fails(&|request| request.model = "another".to_owned(), 5, "another");
    let does_not_fit = |change: &dyn Fn(&mut expertd_proto::v1::ForwardRequest), wanted: &str| {
        let (mut request, _) = Rows::new(&golden(FAMILY), 7, 4).draw();
        change(&mut request);
        match session.forward(&request, LOST).unwrap_err() {
            SessionError::BufferSize { what, .. } => assert_eq!(what, wanted),
            other => panic!("{other}"),
        }
    };
    does_not_fit(&|request| request.tokens -= 1, "rows");
    does_not_fit(&|request| request.payload = None, "rows");
    does_not_fit(&|request| request.token_ids = vec![0; 4 * request.tokens as usize + 4].into(), "token_ids");
    let two = || expertd_proto::v1::Routing { k: 2, ..given(0) };
    does_not_fit(&|request| request.routing = Some(two()), "routing.topk_ids");
    let (request, wanted) = rows.draw();
    check(&session.forward(&request, LOST).unwrap(), &wanted, &request);
    session.forward(&request, Duration::MAX).unwrap();
}

/// Libraries of the workspace are beside the test binaries.
pub(crate) fn libraries() -> PathBuf {
    std::env::current_exe().unwrap().parent().unwrap().to_owned()
}

/// Compiles an example in C to `program`, with further arguments for the compiler.
pub(crate) fn compile_c(example: &str, program: &Path, more: &[&str]) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("client/c");
    let compiled = Command::new("cc")
        .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", "-o"])
        .arg(program)
        .arg(source.join("examples").join(example))
        .args(more)
        .arg("-I")
        .arg(source.join("include"))
        .arg("-L")
        .arg(libraries())
        .args(["-lexpertd_c", "-lm"])
        .output()
        .unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
}

#[test]
fn the_examples_compute_what_grpc_computes() {
    let runtime = runtime();
    let host = Host::start(FAMILY, 2, &[]);
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("forward");
    compile_c("forward.c", &program, &[]);
    let libraries = libraries();
    let session = host.open();
    let (hidden, layer, tokens) = (session.session().hidden(), session.model().moe_layers[0].layer, 5_usize);
    let run = |address: &str, layer: u32| {
        let (layer, tokens) = (layer.to_string(), tokens.to_string());
        Command::new(&program)
            .args([address, &layer, &tokens])
            .env("LD_LIBRARY_PATH", &libraries)
            .output()
            .unwrap()
    };
    let output = run(&host.address, layer);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let sum: f64 = text.split(' ').next_back().unwrap().trim().parse().unwrap();
    let rows: Vec<f32> = (0..tokens).flat_map(|row| vec![(row + 1) as f32; hidden]).collect();
    let payload = expertd_types::rows::encode(&rows, expertd_types::DType::F32);
    let dtype = expertd_proto::v1::DType::DtypeF32;
    let request = ForwardRequest::inline(layer, tokens as u32, dtype, payload);
    let client = runtime.block_on(Client::connect(&host.service.address)).unwrap();
    let response = runtime.block_on(client.forward(request, None)).unwrap();
    let decoded = expertd_types::rows::decode(&response.rows, expertd_types::DType::F32);
    let wanted: f64 = decoded.iter().map(|&value| f64::from(value)).sum();
    assert!((sum - wanted).abs() <= 1e-6 * wanted.abs().max(1.0), "{sum} {wanted}");

    let text = rust_example::forward(&host.address, layer, tokens).unwrap();
    let sum: f64 = text.split(' ').next_back().unwrap().parse().unwrap();
    assert!((sum - wanted).abs() <= 1e-6 * wanted.abs().max(1.0), "{sum} {wanted}: {text}");
    let error = rust_example::forward(&host.address, 9999, tokens).unwrap_err().to_string();
    assert!(error.contains("code 5: there is no layer 9999"), "{error}");

    let refused = run(&host.address, 9999);
    let error = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && error.contains("code 5: there is no layer 9999"), "{error}");
    let refused = run("unix:/nonexistent", layer);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("/nonexistent"));
}

#[test]
fn a_drain_ends_sessions_with_a_reason() {
    let mut host = Host::start(FAMILY, 2, &[]);
    let session = host.open();
    host.service.signal(Signal::TERM);
    assert_eq!(host.service.wait(LOST).expect("a drained service ends").code(), Some(0));
    let (request, _) = Rows::new(&golden(FAMILY), 8, 4).draw();
    eventually(LOST, "the session has ended", || {
        matches!(session.forward(&request, LOST), Err(SessionError::Ended { .. }))
    });
    assert!(!host.path().exists(), "the socket's file is removed");
}
