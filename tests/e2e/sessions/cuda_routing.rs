//! CUDA sessions on GPU ranks: recorded answers of every family, routing of the client's own, clients on several GPUs, a client that
//! scribbles. Ignored by default:
//!
//!     cargo test --release --features cuda --test e2e sessions::cuda_routing -- --ignored --nocapture --test-threads 1

use std::collections::BTreeMap;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;

use bytemuck::Zeroable as _;
use expertd_proto::v1::Routing;
use expertd_rank_cuda as gpu;
use expertd_session::cuda::control::ControlMemory;
use expertd_session::cuda::wire::{KIND_CUDA, OpenCuda, OpenedCuda, PrepareReply, PreparedCall, Ring};
use expertd_session::cuda::{
    CudaSession, CudaSessionOptions, DeviceMemory, Gpu, Prepared, RoutingPlaces, SessionStream,
};
use expertd_session::socket;
use expertd_session::wire::{RequestRecord, VERSION, frame};
use expertd_shm::descriptors::send_fds;
use rand::rngs::SmallRng;
use rand::{Rng as _, RngExt as _, SeedableRng as _};

use super::*;
use crate::service::{part, test_gpus};

/// Relative L2 error of a row computed in bf16.
const TOLERANCE: f64 = 1e-2;
const MEMORY: usize = 16 << 20;
const MAX_ROWS: u32 = 64;
/// Room for the ids and weights of [`MAX_ROWS`] rows of 32 experts, and their token ids.
const ROUTING_BYTES: u32 = 32 << 10;
const OUTPUT: usize = 4 << 20;
const PLACES: RoutingPlaces = RoutingPlaces { ids: 8 << 20, weights: 9 << 20, token_ids: 10 << 20 };

fn gpus() -> u32 {
    let gpus = gpu::present();
    assert!(gpus > 0, "these tests need a GPU, and a service that was built with feature `cuda`");
    gpus
}

/// On one rank, or on those of `EXPERTD_TEST_GPUS`.
fn host(family: &str) -> Host {
    let ranks = test_gpus().map_or(1, |of_ranks| of_ranks.len() as u32);
    Host::start(family, ranks, &["--device", "cuda"])
}

/// A session with one stream.
struct Caller {
    session: Arc<CudaSession>,
    stream: SessionStream,
}

impl Caller {
    fn open(address: &str, device: u32) -> Caller {
        let options = CudaSessionOptions {
            device,
            memory_bytes: MEMORY,
            routing_bytes: ROUTING_BYTES,
            ..CudaSessionOptions::default()
        };
        let session = Arc::new(CudaSession::open(address, &options).unwrap());
        let stream = SessionStream::new(&session, 0).unwrap();
        Caller { session, stream }
    }

    fn prepare(&self, request: &ForwardRequest, flags: u32, k: usize) -> Prepared {
        let tokens = if request.token_ids.is_empty() { 0 } else { RequestRecord::TOKEN_IDS };
        let call = PreparedCall {
            layer: request.layer,
            dtype: request.dtype as u32,
            max_rows: MAX_ROWS,
            flags: flags | tokens,
            output: OUTPUT as u64,
            k: k as u32,
            ..PreparedCall::zeroed()
        };
        self.session.prepare_routed(&[(call, PLACES)]).unwrap()[0]
    }

    /// Makes a call with the request's rows, token ids and routing; returns the output rows, ids and weights.
    fn forward(&self, call: Prepared, request: &ForwardRequest, k: usize) -> [Vec<u8>; 3] {
        let Some(Payload::Inline(rows)) = &request.payload else { panic!("rows are inline") };
        let memory = self.session.memory();
        memory.write(0, rows).unwrap();
        memory.write(OUTPUT, &vec![0xff; rows.len()]).unwrap();
        memory.write(PLACES.token_ids as usize, &request.token_ids).unwrap();
        if let Some(Routing { topk_ids, topk_weights, .. }) = &request.routing {
            memory.write(PLACES.ids as usize, topk_ids).unwrap();
            memory.write(PLACES.weights as usize, topk_weights).unwrap();
        }
        self.stream.call(call, request.tokens).unwrap();
        self.stream.synchronize().unwrap();
        let routing = request.tokens as usize * k * 4;
        [(OUTPUT, rows.len()), (PLACES.ids as usize, routing), (PLACES.weights as usize, routing)].map(
            |(place, bytes)| {
                let mut copy = vec![0; bytes];
                memory.read(place, &mut copy).unwrap();
                copy
            },
        )
    }
}

/// Recorded rows have 32 elements, which kernels pad.
#[test]
#[ignore = "needs a GPU; run on a machine that has one with `-- --ignored`"]
fn answers_of_every_family_are_right() {
    const BOTH: u32 = RequestRecord::GIVEN_ROUTING | RequestRecord::RETURN_ROUTING;
    let (runtime, last) = (runtime(), gpus() - 1);
    let devices: Vec<u32> = [last, 0].into_iter().take(gpus().min(2) as usize).collect();
    for family in part(families()) {
        let host = host(&family);
        let client = runtime.block_on(Client::connect(&host.service.address)).unwrap();
        for &device in &devices {
            let caller = Caller::open(&host.address, device);
            for (seed, dtype) in [DType::F32, DType::F16, DType::Bf16].into_iter().enumerate() {
                let mut rows = Rows::new(&golden(&family), seed as u64, MAX_ROWS as usize);
                for round in 0..4 {
                    let (mut request, wanted) = rows.draw();
                    let Some(Payload::Inline(given)) = &request.payload else { panic!("rows are inline") };
                    request.payload = Some(Payload::Inline(encode(&decode(given, DType::F32), dtype)));
                    request.dtype = dtype as i32;
                    request.return_routing = true;
                    let over_grpc = runtime.block_on(client.forward(request.clone(), None)).unwrap();
                    let receipt = over_grpc.receipt.unwrap();
                    let k = receipt.topk_ids.len() / 4 / request.tokens as usize;
                    let what = format!("{family}, GPU {device}, {dtype}, round {round}");

                    let call = caller.prepare(&request, 0, 0);
                    let [answer, ..] = caller.forward(call, &request, k);
                    assert!(caller.stream.status().unwrap().last.is_some(), "{what}");
                    assert_eq!(answer, over_grpc.rows, "{what}");
                    if dtype == DType::F32 {
                        let response =
                            expertd_proto::v1::ForwardResponse { rows: answer.into(), ..Default::default() };
                        check_within(TOLERANCE, &response, &wanted, &request);
                    }
                    let call = caller.prepare(&request, RequestRecord::RETURN_ROUTING, k);
                    let [answer, ids, weights] = caller.forward(call, &request, k);
                    assert_eq!(answer, over_grpc.rows, "{what}, returned routing");
                    assert_eq!(
                        (&ids, &weights),
                        (&receipt.topk_ids.to_vec(), &receipt.topk_weights.to_vec())
                    );

                    // Half of the assignments belong to another service.
                    let mut ids = receipt.topk_ids.to_vec();
                    for (_, id) in ids.chunks_exact_mut(4).enumerate().filter(|(at, _)| at % 2 == 1) {
                        id.copy_from_slice(&(-1_i32).to_le_bytes());
                    }
                    let (topk_ids, topk_weights) = (ids.clone().into(), receipt.topk_weights);
                    request.routing = Some(Routing { topk_ids, topk_weights, k: k as u32 });
                    let over_grpc = runtime.block_on(client.forward(request.clone(), None)).unwrap();
                    let call = caller.prepare(&request, RequestRecord::GIVEN_ROUTING, k);
                    let [answer, ..] = caller.forward(call, &request, k);
                    assert_eq!(answer, over_grpc.rows, "{what}, given routing");
                    let call = caller.prepare(&request, BOTH, k);
                    let [answer, returned, _] = caller.forward(call, &request, k);
                    assert_eq!(answer, over_grpc.rows, "{what}, given and returned routing");
                    assert_eq!(returned, ids, "{what}");
                }
            }
            let status = caller.stream.status().unwrap();
            assert_eq!(status.failures, 0, "{family}: {:?}", status.last_failure);
        }
        println!("{family}: clients on GPUs {devices:?}");
    }
}

#[test]
#[ignore = "needs a GPU; run on a machine that has one with `-- --ignored`"]
fn wrong_routing_fails_its_call_alone_and_graphs_read_it_anew() {
    let (runtime, device) = (runtime(), gpus() - 1);
    let host = host(FAMILY);
    let client = runtime.block_on(Client::connect(&host.service.address)).unwrap();
    let caller = Caller::open(&host.address, device);
    let (mut request, _) = Rows::new(&golden(FAMILY), 3, 8).draw_of(0, 8);
    request.return_routing = true;
    let receipt = runtime.block_on(client.forward(request.clone(), None)).unwrap().receipt.unwrap();
    let k = receipt.topk_ids.len() / 4 / 8;
    let call = caller.prepare(&request, RequestRecord::GIVEN_ROUTING, k);
    let graph = caller.stream.capture(|| caller.stream.call(call, 8)).unwrap();
    let memory = caller.session.memory();
    let Some(Payload::Inline(rows)) = &request.payload else { panic!("rows are inline") };
    memory.write(0, rows).unwrap();
    memory.write(PLACES.weights as usize, &receipt.topk_weights).unwrap();
    let (mut calls, mut failures) = (0, 0);
    for round in 0..40_u8 {
        let mut ids = receipt.topk_ids.to_vec();
        // Each round rotates the rows' ids; some rounds have an id that no expert has.
        ids.rotate_left(usize::from(round) % 8 * k * 4);
        let is_wrong = round % 4 == 3;
        let mut right = ids.clone();
        if is_wrong {
            right = vec![];
            let wrong: i32 = if round % 8 == 3 { 99_999 } else { i32::MIN };
            ids[4..8].copy_from_slice(&wrong.to_le_bytes());
        }
        memory.write(PLACES.ids as usize, &ids).unwrap();
        caller.stream.replay(&graph).unwrap();
        caller.stream.synchronize().unwrap();
        let status = caller.stream.status().unwrap();
        calls += 1;
        failures += u64::from(is_wrong);
        assert_eq!((status.calls, status.failures), (calls, failures), "{:?}", status.last_failure);
        if is_wrong {
            let failure = status.last_failure.unwrap();
            assert!(failure.code == 3 && failure.message.contains("expert"), "{failure:?}");
            continue;
        }
        let (topk_ids, topk_weights) = (right.into(), receipt.topk_weights.clone());
        let routing = Some(Routing { topk_ids, topk_weights, k: k as u32 });
        let request = ForwardRequest { routing, ..request.clone() };
        let wanted = runtime.block_on(client.forward(request, None)).unwrap().rows;
        let mut answer = vec![0; wanted.len()];
        memory.read(OUTPUT, &mut answer).unwrap();
        assert_eq!(answer, wanted, "round {round}");
    }
    let refuses = |flags: u32, k: u32, places: RoutingPlaces, text: &str| {
        let call = PreparedCall {
            dtype: DType::F32 as u32,
            max_rows: MAX_ROWS,
            output: OUTPUT as u64,
            flags,
            k,
            ..PreparedCall::zeroed()
        };
        let error = caller.session.prepare_routed(&[(call, places)]).unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    };
    refuses(RequestRecord::GIVEN_ROUTING, 0, PLACES, "k must be 1 to");
    refuses(RequestRecord::RETURN_ROUTING, 1, PLACES, "as the gate chooses");
    refuses(RequestRecord::GIVEN_ROUTING, 1, RoutingPlaces { ids: MEMORY as u64, ..PLACES }, "of memory");
    let small = CudaSessionOptions { device, memory_bytes: MEMORY, ..CudaSessionOptions::default() };
    let small = CudaSession::open(&host.address, &small).unwrap();
    let call =
        PreparedCall { flags: RequestRecord::TOKEN_IDS, dtype: 1, max_rows: 1, ..PreparedCall::zeroed() };
    let call = PreparedCall { output: OUTPUT as u64, ..call };
    let error = small.prepare_routed(&[(call, PLACES)]).unwrap_err().to_string();
    assert!(error.contains("routing_bytes"), "{error}");
}

/// Calls of one GPU's session until it is told to stop; every answer is compared.
pub(super) fn calls(address: &str, device: u32, mut rows: Rows, stop: &AtomicBool, answered: &AtomicU64) {
    let caller = Caller::open(address, device);
    let mut prepared: BTreeMap<u32, Prepared> = BTreeMap::new();
    while !stop.load(Ordering::Relaxed) {
        let (request, wanted) = rows.draw();
        let call = *prepared.entry(request.layer).or_insert_with(|| caller.prepare(&request, 0, 0));
        for _ in 0..20 {
            let [answer, ..] = caller.forward(call, &request, 0);
            let response = expertd_proto::v1::ForwardResponse { rows: answer.into(), ..Default::default() };
            rows.check(&response, &wanted, &request);
            answered.fetch_add(1, Ordering::Relaxed);
        }
    }
    let status = caller.stream.status().unwrap();
    assert_eq!(status.failures, 0, "{:?}", status.last_failure);
}

fn rows_of_family(seed: u64) -> Rows {
    Rows::new(&golden(FAMILY), seed, MAX_ROWS as usize).within(TOLERANCE)
}

#[test]
#[ignore = "needs a GPU; run on a machine that has one with `-- --ignored`"]
fn sessions_of_several_gpus_call_at_once() {
    let host = host(FAMILY);
    let stop = AtomicBool::new(false);
    // Two sessions on each GPU.
    let sessions: Vec<(u32, AtomicU64)> = (0..2 * gpus()).map(|one| (one / 2, AtomicU64::new(0))).collect();
    std::thread::scope(|scope| {
        for (device, answered) in &sessions {
            let rows = rows_of_family(u64::from(*device));
            scope.spawn(|| calls(&host.address, *device, rows, &stop, answered));
        }
        eventually(LOST, "every session is answered", || {
            sessions.iter().all(|(_, answered)| answered.load(Ordering::Relaxed) > 500)
        });
        stop.store(true, Ordering::Relaxed);
    });
    let counts: Vec<u64> = sessions.iter().map(|(_, answered)| answered.load(Ordering::Relaxed)).collect();
    println!("answers of two sessions on each GPU: {counts:?}");
}

#[test]
#[ignore = "needs two GPUs; run on a machine that has them with `-- --ignored`"]
fn a_gpu_that_the_service_does_not_see_is_refused() {
    assert!(gpus() > 1, "this test needs two GPUs");
    let visible = std::env::var("CUDA_VISIBLE_DEVICES").unwrap_or_else(|_| "0".to_owned());
    let first = visible.split(',').next().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let address = format!("unix:{}", folder.path().join("session.sock").display());
    let flags = ["--device", "cuda", "--session-listen", &address];
    let service = Service::start_with(FAMILY, 1, &flags, &[("CUDA_VISIBLE_DEVICES", first)]);
    let host = Host { service, address, _folder: folder };
    let open = |device| {
        let options = CudaSessionOptions { device, memory_bytes: MEMORY, ..CudaSessionOptions::default() };
        CudaSession::open(&host.address, &options)
    };
    let error = open(1).unwrap_err().to_string();
    assert!(error.contains("does not see"), "{error}");
    open(0).unwrap();
}

/// Opens a session as the client library does, and returns its socket, its memory and its control region.
fn open_raw(host: &Host, gpu: &Arc<Gpu>) -> (UnixStream, DeviceMemory, ControlMemory) {
    let memory = DeviceMemory::allocate(gpu, 2 << 20).unwrap();
    let client = UnixStream::connect(host.path()).unwrap();
    client.set_read_timeout(Some(LOST)).unwrap();
    let open = OpenCuda {
        version: VERSION,
        kind: KIND_CUDA,
        memory_bytes: memory.bytes() as u64,
        doorbells: 8,
        routing_bytes: 4096,
        device: gpu.uuid().unwrap(),
    };
    // The answer says that descriptors may be passed.
    socket::send(&client, frame::GET_MODEL, &[]).unwrap();
    let (kind, _) = socket::receive(&client, 1 << 20).unwrap().unwrap();
    assert_eq!(kind, frame::MODEL);
    socket::send(&client, frame::OPEN, bytemuck::bytes_of(&open)).unwrap();
    send_fds(&client, &[memory.export().unwrap().as_fd()]).unwrap();
    let (kind, payload) = socket::receive(&client, 4096).unwrap().unwrap();
    assert_eq!(kind, frame::OPENED_CUDA, "{}", String::from_utf8_lossy(&payload));
    let opened: OpenedCuda = socket::record(&payload).unwrap();
    let control = ControlMemory::join(socket::receive_region(&client).unwrap(), &opened).unwrap();
    (client, memory, control)
}

#[test]
#[ignore = "needs a GPU; run on a machine that has one with `-- --ignored`"]
fn a_client_that_scribbles_harms_no_other() {
    const PREPARED: u32 = 8;
    let (runtime, device) = (runtime(), gpus() - 1);
    let host = host(FAMILY);
    let load = Load::start_within(TOLERANCE, &host, 64);
    let (stop, answered) = (AtomicBool::new(false), AtomicU64::new(0));
    let gpu = Gpu::open(device).unwrap();
    let mut random = SmallRng::seed_from_u64(1);
    std::thread::scope(|scope| {
        scope.spawn(|| calls(&host.address, device, rows_of_family(0), &stop, &answered));
        eventually(LOST, "calls are answered", || answered.load(Ordering::Relaxed) > 50);
        let descriptors = host.descriptors();
        for round in 0..60 {
            let (client, memory, control) = open_raw(&host, &gpu);
            // The calls of half of the sessions carry routing of random bytes.
            let routed = RequestRecord::GIVEN_ROUTING | RequestRecord::RETURN_ROUTING;
            let records: Vec<PreparedCall> = (0..PREPARED)
                .map(|number| PreparedCall {
                    dtype: 1 + number % 3,
                    max_rows: 1 + 8 * number,
                    flags: if round % 2 == 0 { routed } else { 0 },
                    k: u32::from(round % 2 == 0),
                    output: 1 << 20,
                    ..PreparedCall::zeroed()
                })
                .collect();
            socket::send(&client, frame::PREPARE, bytemuck::cast_slice(&records)).unwrap();
            let (_, reply) = socket::receive(&client, 4096).unwrap().unwrap();
            let reply: PrepareReply = socket::record(&reply).unwrap();
            assert_eq!(reply.count, PREPARED);
            let all = control.region().slice::<u64>(0, control.region().len() / 8).unwrap();
            for write in 0..4000 {
                // A right ring, a ring of numbers beyond the table, or any word anywhere.
                let (prepared, rows) = (random.random_range(0..PREPARED + 2), random.random_range(0..70));
                match random.random_range(0..8) {
                    0..4 => control.ring(random.random_range(0..8), Ring { prepared, rows }),
                    4 => control.ring(0, Ring { prepared: random.next_u32(), rows: random.next_u32() }),
                    _ => {
                        let word = random.random_range(0..all.len());
                        all.atomics()[word].store(random.next_u64(), Ordering::Relaxed);
                    }
                }
                if write % 50 == 0 {
                    std::thread::sleep(Duration::from_micros(200));
                }
            }
            // Some clients wait for the end of their session, which other clients leave at once; calls are under way in both. The
            // service keeps the socket until the client closes it.
            if round % 3 == 0 {
                client.shutdown(std::net::Shutdown::Write).unwrap();
                let (kind, _) = socket::receive(&client, 4096).unwrap().unwrap();
                assert_eq!(kind, frame::ENDED);
            }
            drop((client, memory, control));
        }
        let before = answered.load(Ordering::Relaxed);
        eventually(LOST, "calls are answered", || answered.load(Ordering::Relaxed) > before + 50);
        stop.store(true, Ordering::Relaxed);
        eventually(LOST, "sessions and descriptors are released", || host.descriptors() <= descriptors);
    });
    load.goes_on();
    let generations = load.stop();
    assert_eq!(generations.iter().max(), Some(&1), "a client's scribbles ended a generation");
    assert_eq!(host.status(&runtime).generation, 1);
}
