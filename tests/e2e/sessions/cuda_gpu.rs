//! CUDA sessions on GPU ranks. With two GPUs, the client's is the last one and has no rank, unless `EXPERTD_TEST_GPUS` says so. Ignored
//! by default:
//!
//!     cargo test --release --features cuda --test e2e sessions::cuda_gpu -- --ignored --nocapture --test-threads 1

use std::process::Stdio;
use std::time::Instant;

use bytemuck::Zeroable as _;
use expertd_model::synth::{self, SynthConfig};
use expertd_rank_cuda as gpu;
use expertd_session::cuda::wire::PreparedCall;
use expertd_session::cuda::{CudaSession, CudaSessionOptions, SessionStream};
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};

use super::*;
use crate::service::test_gpus;

/// Rows need no padding.
const HIDDEN: usize = 256;
const MEMORY: usize = 64 << 20;
/// Names the session socket to the process that is killed.
const VICTIM: &str = "CUDA_SESSION_VICTIM_SOCKET";

/// Number of ranks, and the client's GPU.
fn places() -> (u32, u32) {
    let gpus = gpu::present();
    assert!(gpus > 0, "these tests need a GPU, and a service that was built with feature `cuda`");
    let ranks = test_gpus().map_or((gpus - 1).clamp(1, 3), |of_ranks| of_ranks.len() as u32);
    (ranks, gpus - 1)
}

fn start(family: &str, ranks: u32) -> Host {
    let folder = tempfile::tempdir().unwrap();
    synth::write(&SynthConfig { hidden: HIDDEN, ..SynthConfig::new(family) }, folder.path()).unwrap();
    let address = format!("unix:{}", folder.path().join("session.sock").display());
    let flags = ["--device", "cuda", "--session-listen", &address, "--max-tokens-per-step", "4096"];
    let service = Service::start_checkpoint(folder.path(), ranks, &flags, &[]);
    Host { service, address, _folder: folder }
}

fn open(address: &str, device: u32) -> Arc<CudaSession> {
    let options = CudaSessionOptions { device, memory_bytes: MEMORY, ..CudaSessionOptions::default() };
    Arc::new(CudaSession::open(address, &options).unwrap())
}

/// The first half of the memory has rows, the second half outputs.
fn prepared(layer: u32, rows: usize, dtype: DType) -> PreparedCall {
    PreparedCall {
        layer,
        dtype: dtype as u32,
        max_rows: rows as u32,
        output: MEMORY as u64 / 2,
        ..PreparedCall::zeroed()
    }
}

fn random(tokens: usize, dtype: DType, seed: u64) -> ForwardRequest {
    let mut rng = SmallRng::seed_from_u64(seed);
    let values: Vec<f32> = (0..tokens * HIDDEN).map(|_| rng.random_range(-2.0..2.0)).collect();
    let rows = encode(&values, dtype);
    let mut request = ForwardRequest::inline(0, tokens as u32, expertd_proto::v1::DType::DtypeF32, rows);
    request.dtype = dtype as i32;
    request
}

fn rows_of(request: &ForwardRequest) -> &[u8] {
    match &request.payload {
        Some(Payload::Inline(rows)) => rows,
        other => panic!("{other:?}"),
    }
}

#[test]
#[ignore = "needs a GPU; run on a machine that has one with `-- --ignored`"]
fn answers_equal_those_of_grpc() {
    let (runtime, (ranks, device)) = (runtime(), places());
    for family in ["qwen3_moe", "olmoe", "mixtral", "deepseek_v3", "gpt_oss", "glm4_moe", "llama4_text"] {
        let host = start(family, ranks);
        let client = runtime.block_on(Client::connect(&host.service.address)).unwrap();
        let layer = runtime.block_on(client.model("")).unwrap().moe_layers[0].layer;
        let session = open(&host.address, device);
        let stream = SessionStream::new(&session, 0).unwrap();
        for dtype in [DType::F32, DType::F16, DType::Bf16] {
            let call = session.prepare(&[prepared(layer, 8000, dtype)]).unwrap()[0];
            // The last one is split over steps.
            for tokens in [1, 7, 300, 2500, 8000] {
                let mut request = random(tokens, dtype, 3);
                request.layer = layer;
                let over_grpc = runtime.block_on(client.forward(request.clone(), None)).unwrap();
                session.memory().write(0, rows_of(&request)).unwrap();
                stream.call(call, tokens as u32).unwrap();
                stream.synchronize().unwrap();
                let mut output = vec![0; over_grpc.rows.len()];
                session.memory().read(MEMORY / 2, &mut output).unwrap();
                assert!(output == over_grpc.rows, "{family}, {dtype}, {tokens} rows");
            }
        }
        assert_eq!(stream.status().unwrap().failures, 0);
        let status = &host.status(&runtime).sessions[0];
        assert!(status.in_place && status.device.starts_with("GPU-"), "{status:?}");
        println!("{family}: {ranks} ranks, the client on GPU {device}");
    }
}

#[test]
#[ignore = "needs a GPU; run on a machine that has one with `-- --ignored`"]
fn a_graph_goes_on_when_ranks_are_killed() {
    const TOKENS: usize = 40;
    let (runtime, (ranks, device)) = (runtime(), places());
    let host = start(FAMILY, ranks);
    let client = runtime.block_on(Client::connect(&host.service.address)).unwrap();
    let request = random(TOKENS, DType::Bf16, 5);
    let wanted = runtime.block_on(client.forward(request.clone(), None)).unwrap().rows;
    let session = open(&host.address, device);
    let stream = SessionStream::new(&session, 0).unwrap();
    let call = session.prepare(&[prepared(0, TOKENS, DType::Bf16)]).unwrap()[0];
    session.memory().write(0, rows_of(&request)).unwrap();
    let graph = stream.capture(|| (0..4).try_for_each(|_| stream.call(call, TOKENS as u32))).unwrap();
    let mut output = vec![0; wanted.len()];
    // Ranks that share a GPU are slow.
    let replays = if test_gpus().is_some() { 200 } else { 2000 };
    for replay in 0..replays {
        if [1, 2, 3].map(|quarter| quarter * replays / 4).contains(&replay) {
            let ranks = host.service.ranks();
            send(ranks[replay % ranks.len()], Signal::KILL);
        }
        if replay % 20 == 0 {
            session.memory().write(MEMORY / 2, &vec![0xff; wanted.len()]).unwrap();
        }
        stream.replay(&graph).unwrap();
        stream.synchronize().unwrap();
        if replay % 20 == 0 {
            session.memory().read(MEMORY / 2, &mut output).unwrap();
            assert!(output == wanted, "replay {replay}");
        }
    }
    let status = stream.status().unwrap();
    assert_eq!((status.calls, status.failures), (4 * replays as u64, 0), "{:?}", status.last_failure);
    let generation = status.last.unwrap().generation;
    assert!(generation >= 4, "{generation}");
}

/// EXPERTD_SOAK_CALLS calls (otherwise 20,000) in replays of a graph of eight; every tenth replay writes into poisoned memory and is
/// compared. Prints the rate.
#[test]
#[ignore = "needs a GPU; run on a machine that has one with `-- --ignored`"]
fn replayed_calls_stay_right() {
    const TOKENS: usize = 16;
    const LENGTH: u64 = 8;
    let wanted_calls = std::env::var("EXPERTD_SOAK_CALLS").map_or(20_000, |text| text.parse().unwrap());
    let (runtime, (ranks, device)) = (runtime(), places());
    let host = start(FAMILY, ranks);
    let client = runtime.block_on(Client::connect(&host.service.address)).unwrap();
    let request = random(TOKENS, DType::Bf16, 6);
    let wanted = runtime.block_on(client.forward(request.clone(), None)).unwrap().rows;
    let session = open(&host.address, device);
    let stream = SessionStream::new(&session, 0).unwrap();
    let call = session.prepare(&[prepared(0, TOKENS, DType::Bf16)]).unwrap()[0];
    session.memory().write(0, rows_of(&request)).unwrap();
    let graph = stream.capture(|| (0..LENGTH).try_for_each(|_| stream.call(call, TOKENS as u32))).unwrap();
    let mut output = vec![0; wanted.len()];
    let replays = u64::div_ceil(wanted_calls, LENGTH);
    let begun = Instant::now();
    for replay in 0..replays {
        let is_compared = replay % 10 == 0;
        if is_compared {
            session.memory().write(MEMORY / 2, &vec![0xff; wanted.len()]).unwrap();
        }
        stream.replay(&graph).unwrap();
        stream.synchronize().unwrap();
        if is_compared {
            session.memory().read(MEMORY / 2, &mut output).unwrap();
            assert!(output == wanted, "replay {replay}");
        }
        // A run that is cut off has said how far it came.
        if (replay + 1) % replays.div_ceil(10) == 0 {
            println!("{} calls in {:.0} s", (replay + 1) * LENGTH, begun.elapsed().as_secs_f64());
        }
    }
    let calls = replays * LENGTH;
    let each = begun.elapsed() / u32::try_from(calls).unwrap();
    println!("{ranks} ranks: {calls} calls of {TOKENS} rows in {:?}, {each:?} each", begun.elapsed());
    let status = stream.status().unwrap();
    assert_eq!((status.calls, status.failures), (calls, 0), "{:?}", status.last_failure);
    assert_eq!(status.last.unwrap().generation, 1, "no generation ended");
}

/// Not a test by itself: the client process that `killed_clients_leave_nothing_behind` kills.
#[test]
#[ignore = "runs as a child process of another test"]
fn victim() {
    let Ok(address) = std::env::var(VICTIM) else { return };
    let session = open(&address, places().1);
    let stream = SessionStream::new(&session, 0).unwrap();
    let call = session.prepare(&[prepared(0, 64, DType::Bf16)]).unwrap()[0];
    let graph = stream.capture(|| (0..8).try_for_each(|_| stream.call(call, 64))).unwrap();
    loop {
        stream.replay(&graph).unwrap();
        stream.synchronize().unwrap();
    }
}

#[test]
#[ignore = "needs a GPU; run on a machine that has one with `-- --ignored`"]
fn killed_clients_leave_nothing_behind() {
    let (runtime, (ranks, device)) = (runtime(), places());
    let host = start(FAMILY, ranks);
    let session = open(&host.address, device);
    let stream = SessionStream::new(&session, 0).unwrap();
    let call = session.prepare(&[prepared(0, 8, DType::Bf16)]).unwrap()[0];
    let descriptors = host.descriptors();
    for round in 0..6 {
        let mut victim = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "sessions::cuda_gpu::victim", "--ignored", "--nocapture"])
            .env(VICTIM, &host.address)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        eventually(LOST, "the client calls", || {
            host.status(&runtime)
                .sessions
                .iter()
                .any(|one| one.calls_total > 50 * (round % 3) && one.pid == victim.id())
        });
        victim.kill().unwrap();
        victim.wait().unwrap();
        stream.call(call, 8).unwrap();
        stream.synchronize().unwrap();
    }
    eventually(LOST, "sessions and descriptors are released", || {
        host.status(&runtime).sessions.len() == 1 && host.descriptors() <= descriptors
    });
    assert_eq!(stream.status().unwrap().failures, 0);
    let generation = stream.status().unwrap().last.unwrap().generation;
    assert_eq!(generation, 1, "a client's death ended a generation");
}
