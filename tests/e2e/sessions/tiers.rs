//! Sessions of mixed groups: only the source rank maps the client's memory.

use bytemuck::Zeroable as _;
use expertd_session::cuda::wire::PreparedCall;
use expertd_session::cuda::{CudaSession, CudaSessionOptions, SessionStream};

use super::*;
use crate::tiers::{TOLERANCE, placement, write};

const WORKERS: usize = 2;

/// A mixed group of a fixture with a random placement.
fn mixed(device: &str) -> Host {
    let placed = placement(&fixture(FAMILY), WORKERS, &mut expertd_test_seed::rng());
    let (_folder, file) = write(&placed);
    Host::start(FAMILY, WORKERS as u32 + 1, &["--device", device, "--placement", file.to_str().unwrap()])
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

#[test]
#[ignore = "needs GPUs; run on a machine that has them with `-- --ignored`"]
fn cuda_sessions_of_a_source_on_a_gpu() {
    const MEMORY: usize = 16 << 20;
    let (runtime, host) = (runtime(), mixed("cuda,cpu"));
    let client = runtime.block_on(Client::connect(&host.service.address)).unwrap();
    let device = expertd_rank_cuda::present() - 1;
    let options = CudaSessionOptions { device, memory_bytes: MEMORY, ..CudaSessionOptions::default() };
    let session = Arc::new(CudaSession::open(&host.address, &options).unwrap());
    let stream = SessionStream::new(&session, 0).unwrap();
    let mut rows = Rows::new(&golden(FAMILY), 1, 32).within(TOLERANCE);
    for &layer in &rows.layers().to_vec() {
        let call = PreparedCall {
            layer,
            dtype: DType::F32 as u32,
            max_rows: 32,
            output: MEMORY as u64 / 2,
            ..PreparedCall::zeroed()
        };
        let call = session.prepare(&[call]).unwrap()[0];
        for tokens in [1, 5, 32] {
            let (request, wanted) = rows.draw_of(layer, tokens);
            let Some(Payload::Inline(sent)) = &request.payload else { panic!("{request:?}") };
            session.memory().write(0, sent).unwrap();
            stream.call(call, tokens as u32).unwrap();
            stream.synchronize().unwrap();
            let over_grpc = runtime.block_on(client.forward(request.clone(), None)).unwrap();
            check_within(TOLERANCE, &over_grpc, &wanted, &request);
            let mut output = vec![0; over_grpc.rows.len()];
            session.memory().read(MEMORY / 2, &mut output).unwrap();
            assert!(output == over_grpc.rows, "layer {layer}, {tokens} rows");
        }
    }
    assert_eq!(stream.status().unwrap().failures, 0);
}
