//! Sessions of mixed groups: only the source rank maps the client's memory.

use std::time::Instant;

use bytemuck::Zeroable as _;
use expertd_session::cuda::wire::PreparedCall;
use expertd_session::cuda::{CudaSession, CudaSessionOptions, SessionStream};
use expertd_types::{ExpertPlacement, LayerId, LayerPlacement};

use super::*;
use crate::tiers::{TOLERANCE, write};
use crate::tiers_copies::{STREAMED, copied_bytes, placement_that_needs_cpu_ranks, slot_memory};

const WORKERS: usize = 2;

/// A mixed group of a fixture with a random placement.
fn mixed(device: &str) -> Host {
    mixed_of(FAMILY, device, &[])
}

fn mixed_of(name: &str, device: &str, more: &[&str]) -> Host {
    let placed = placement_that_needs_cpu_ranks(&fixture(name), WORKERS, &mut expertd_test_seed::rng());
    let (_folder, file) = write(&placed);
    let flags = ["--device", device, "--placement", file.to_str().unwrap()];
    Host::start(name, WORKERS as u32 + 1, &[&flags, more].concat())
}

/// Answers through a host session equal those over gRPC, also after a CPU rank and the source were killed.
fn equal_answers(host: &Host) {
    let runtime = runtime();
    let client = runtime.block_on(Client::connect(&host.service.address)).unwrap();
    let session = host.open();
    let mut rows = Rows::new(&golden(FAMILY), 1, 32).within(TOLERANCE);
    for killed in [None, Some(1), Some(0)] {
        if let Some(rank) = killed {
            let old = host.service.ranks();
            send(old[rank], Signal::KILL);
            eventually(LOST, "new ranks", || {
                let now = host.service.ranks();
                now.len() == WORKERS + 1 && now.iter().all(|rank| !old.contains(rank))
            });
        }
        for round in 0..10 {
            let (request, wanted) = rows.draw();
            let over_session = session.forward(&request, LOST).unwrap();
            let over_grpc = runtime.block_on(client.forward(request.clone(), None)).unwrap();
            check_within(TOLERANCE, &over_session, &wanted, &request);
            assert_eq!(over_session.rows, over_grpc.rows, "killed {killed:?}, round {round}");
        }
        host.in_place(&runtime);
    }
}

#[test]
fn host_sessions_of_a_source_on_a_cpu() {
    equal_answers(&mixed("cpu,cpu"));
}

#[test]
#[ignore = "needs GPUs; run on a machine that has them with `-- --ignored`"]
fn host_sessions_of_a_source_on_a_gpu() {
    equal_answers(&mixed("cuda,cpu"));
}

/// A CUDA session and a gRPC client of a service, to which the same rows go.
struct Pair {
    runtime: tokio::runtime::Runtime,
    client: Client,
    session: Arc<CudaSession>,
    stream: SessionStream,
    rows: Rows,
}

impl Pair {
    const MEMORY: usize = 16 << 20;
    const OUTPUT: usize = Self::MEMORY / 2;

    /// `recorded`: the fixture's rows and answers.
    fn open(host: &Host, recorded: &Path) -> Self {
        let runtime = runtime();
        let client = runtime.block_on(Client::connect(&host.service.address)).unwrap();
        let device = expertd_rank_cuda::present() - 1;
        let options =
            CudaSessionOptions { device, memory_bytes: Self::MEMORY, ..CudaSessionOptions::default() };
        let session = Arc::new(CudaSession::open(&host.address, &options).unwrap());
        let stream = SessionStream::new(&session, 0).unwrap();
        Pair { runtime, client, session, stream, rows: Rows::new(recorded, 1, 32).within(TOLERANCE) }
    }

    /// Calls a layer with several numbers of rows. Both answers are near what is recorded; `equal`: and have the same bits.
    fn check(&mut self, layer: u32, equal: bool) {
        let call = PreparedCall {
            layer,
            dtype: DType::F32 as u32,
            max_rows: 32,
            output: Self::OUTPUT as u64,
            ..PreparedCall::zeroed()
        };
        let call = self.session.prepare(&[call]).unwrap()[0];
        for tokens in [1, 5, 32] {
            let (request, wanted) = self.rows.draw_of(layer, tokens);
            let Some(Payload::Inline(sent)) = &request.payload else { panic!("{request:?}") };
            self.session.memory().write(0, sent).unwrap();
            self.stream.call(call, tokens as u32).unwrap();
            self.stream.synchronize().unwrap();
            let over_grpc = self.runtime.block_on(self.client.forward(request.clone(), None)).unwrap();
            check_within(TOLERANCE, &over_grpc, &wanted, &request);
            let mut over_session = over_grpc.clone();
            let mut output = vec![0; over_grpc.rows.len()];
            self.session.memory().read(Self::OUTPUT, &mut output).unwrap();
            over_session.rows = output.into();
            check_within(TOLERANCE, &over_session, &wanted, &request);
            assert!(!equal || over_session.rows == over_grpc.rows, "layer {layer}, {tokens} rows");
        }
        assert_eq!(self.stream.status().unwrap().failures, 0);
    }
}

#[test]
#[ignore = "needs GPUs; run on a machine that has them with `-- --ignored`"]
fn cuda_sessions_of_a_source_on_a_gpu() {
    let host = mixed("cuda,cpu");
    let mut pair = Pair::open(&host, &golden(FAMILY));
    for layer in pair.rows.layers().to_vec() {
        pair.check(layer, true);
    }
}

/// Experts of CPU ranks come to the GPU for large steps and to slots, in formats that are rewritten there. A row's bits depend on where
/// its experts lie.
#[test]
#[ignore = "needs GPUs; run on a machine that has them with `-- --ignored`"]
fn cuda_sessions_of_quantised_experts_that_come_to_a_gpu() {
    for name in ["gpt_oss-mxfp4-odd", "qwen3_moe-int4-gptq", "deepseek_v3-fp8-odd"] {
        let name = format!("../quantised/{name}");
        let slots = slot_memory(&fixture(&name)).to_string();
        let more = [&["--slot-memory", &slots, "--fp8-compute", "bf16"][..], &STREAMED].concat();
        let host = mixed_of(&name, "cuda,cpu", &more);
        let mut pair = Pair::open(&host, &fixture(&name).join("golden.safetensors"));
        let layers = pair.rows.layers().to_vec();
        let mut calls = layers.iter().cycle();
        calls.by_ref().take(20).for_each(|&layer| pair.check(layer, false));
        // Experts come once the memory of CPU ranks is pinned.
        let begun = Instant::now();
        while pair.runtime.block_on(copied_bytes(&host.service)) == 0 {
            assert!(begun.elapsed() < LOST, "{name}: no expert came to the GPU");
            pair.check(*calls.next().unwrap(), false);
        }
        calls.take(20).for_each(|&layer| pair.check(layer, false));
    }
}

/// A call of a layer that is whole on the GPU overtakes one that waits for a stopped CPU rank. Its client is told of its end when the
/// router knows it, and not before: after the fault it would be computed again, into memory that the client uses for other things.
#[test]
#[ignore = "needs GPUs; run on a machine that has them with `-- --ignored`"]
fn a_call_that_overtakes_is_not_computed_after_its_word() {
    const MEMORY: usize = 16 << 20;
    const ROWS: usize = 64;
    const SPLIT: u32 = 0;
    const WHOLE: u32 = 1;
    let split = LayerPlacement::new(vec![(0..4).collect(), (4..8).collect()]);
    let whole = LayerPlacement::new(vec![(0..8).collect(), Vec::new()]);
    let placed = ExpertPlacement::new(2, [(LayerId(SPLIT), split), (LayerId(WHOLE), whole)]);
    let (_folder, file) = write(&placed);
    let step = ROWS.to_string();
    let (runtime, host) = (
        runtime(),
        Host::start(
            FAMILY,
            2,
            &[
                &["--device", "cuda,cpu", "--placement", file.to_str().unwrap()][..],
                // The whole call fills a step, so that it is launched while the split one waits.
                &["--max-tokens-per-step", &step, "--liveness-timeout-ms", "4000"],
            ]
            .concat(),
        ),
    );
    let client = runtime.block_on(Client::connect(&host.service.address)).unwrap();
    let options = CudaSessionOptions {
        device: expertd_rank_cuda::present() - 1,
        memory_bytes: MEMORY,
        doorbells: 2,
        ..CudaSessionOptions::default()
    };
    let session = Arc::new(CudaSession::open(&host.address, &options).unwrap());
    let streams = [0, 1].map(|doorbell| SessionStream::new(&session, doorbell).unwrap());
    let mut rows = Rows::new(&golden(FAMILY), 1, ROWS).within(TOLERANCE);
    // Each call has a quarter of the memory, half of it for its output.
    let place = |layer: u32| layer as usize * MEMORY / 4;
    let calls = [SPLIT, WHOLE].map(|layer| PreparedCall {
        layer,
        dtype: DType::F32 as u32,
        max_rows: ROWS as u32,
        rows: place(layer) as u64,
        output: (place(layer) + MEMORY / 8) as u64,
        ..PreparedCall::zeroed()
    });
    let calls = calls.map(|call| session.prepare(&[call]).unwrap()[0]);
    let requests = [(SPLIT, 1), (WHOLE, ROWS)].map(|(layer, tokens)| rows.draw_of(layer, tokens).0);
    let wanted = [0, 1].map(|which: usize| {
        let Some(Payload::Inline(sent)) = &requests[which].payload else { panic!("{requests:?}") };
        session.memory().write(place(which as u32), sent).unwrap();
        runtime.block_on(client.forward(requests[which].clone(), None)).unwrap().rows
    });
    let output = |which: usize| {
        let mut output = vec![0; wanted[which].len()];
        session.memory().read(place(which as u32) + MEMORY / 8, &mut output).unwrap();
        output
    };
    let stopped = host.service.ranks();
    send(stopped[1], Signal::STOP);
    streams[0].call(calls[0], 1).unwrap();
    std::thread::sleep(Duration::from_millis(500));
    streams[1].call(calls[1], ROWS as u32).unwrap();

    streams[1].synchronize().unwrap();
    assert!(output(1) == wanted[1]);
    // The client has the result, and uses the memory for other things.
    let other = vec![0xa5; wanted[1].len()];
    session.memory().write(place(WHOLE), &other).unwrap();
    session.memory().write(place(WHOLE) + MEMORY / 8, &other).unwrap();
    streams[0].synchronize().unwrap();
    assert!(output(0) == wanted[0]);
    eventually(LOST, "new ranks", || host.service.ranks().iter().all(|rank| !stopped.contains(rank)));
    // Steps end in order: what was launched before this call has ended.
    runtime.block_on(client.forward(requests[1].clone(), None)).unwrap();
    assert!(output(1) == other, "the call was computed again after its client was told of its end");
    let counts = streams.map(|stream| stream.status().unwrap());
    assert!(counts.iter().all(|status| (status.calls, status.failures) == (1, 0)), "{counts:?}");
}
