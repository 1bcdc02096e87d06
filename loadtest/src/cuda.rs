//! Load through CUDA sessions: each worker is a thread with a stream and a doorbell of its own, which makes one call after the
//! other. Rows are copied to the GPU before a call's time begins, as an engine's are there already.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bytemuck::Zeroable as _;
use bytes::Bytes;
use expertd_client::session::{self, SessionClient};
use expertd_proto::v1::forward_request::Payload;
use expertd_proto::v1::{ForwardRequest, ForwardResponse, MoeLayer, SharedExperts};
use expertd_session::SessionError;
use expertd_session::cuda::wire::{MAX_DOORBELLS, PreparedCall, RoutingLayout};
use expertd_session::cuda::{
    CudaSession, CudaSessionOptions, Prepared, RoutingPlaces, SessionGraph, SessionStream,
};
use expertd_session::wire::RequestRecord;
use expertd_types::DType;

use crate::Error;
use crate::args::{Args, Mode};
use crate::load::{Job, Load, Outcome};
use crate::request::{Purpose, Workload};

/// One worker: its stream, its places in the memory, its prepared calls.
#[derive(Debug)]
pub struct CudaWorker {
    stream: SessionStream,
    /// For the routing of sampled answers.
    host: SessionClient,
    prepared: HashMap<PreparedKey, Prepared>,
    places: Places,
    worker: u64,
    is_decoding: bool,
}

/// Layer, element type, and whether the calls carry routing.
type PreparedKey = (u32, DType, bool);

/// Places of a worker's calls in the session's memory, in bytes.
#[derive(Clone, Copy, Debug)]
struct Places {
    rows: usize,
    output: usize,
    routing: RoutingPlaces,
}

/// Opens the sessions of a load, one for each connection, with a doorbell for each outstanding request.
///
/// # Errors
/// If one cannot be opened, or a layer cannot be called through it.
pub fn open_all(args: &Args, workload: &Workload) -> Result<Vec<CudaWorker>, Error> {
    let outstanding = args.shape.outstanding.get();
    if outstanding > MAX_DOORBELLS as usize {
        return Err(Error::Unfit(format!(
            "a CUDA session has {MAX_DOORBELLS} doorbells: lower --outstanding from {outstanding}, or raise --connections"
        )));
    }
    // Recorded rows are in f32.
    let area = (workload.largest_request() * workload.model.hidden as usize * 4).next_multiple_of(4096);
    let most = most_rows(workload);
    let carried = workload
        .layers
        .iter()
        .map(|layer| RoutingLayout::new(flags(workload, layer, workload.gives_routing()), most, layer.top_k));
    let carried = carried.max_by_key(|layout| layout.bytes);
    let routing_area = carried.map_or(0, |layout| layout.bytes).next_multiple_of(4096);
    let mut workers = Vec::new();
    for _ in 0..args.shape.connections.get() {
        let options = CudaSessionOptions {
            device: args.session_device,
            memory_bytes: outstanding * (2 * area + routing_area),
            doorbells: outstanding as u32,
            routing_bytes: carried.map_or(0, |layout| layout.bytes as u32),
            ..CudaSessionOptions::default()
        };
        let session = Arc::new(CudaSession::open(&args.address, &options)?);
        for doorbell in 0..outstanding {
            let rows = doorbell * (2 * area + routing_area);
            let ids = rows + 2 * area;
            let place = |offset: usize| (ids + offset) as u64;
            let routing = RoutingPlaces {
                ids: place(0),
                weights: place(carried.map_or(0, |layout| layout.weights)),
                token_ids: place(carried.map_or(0, |layout| layout.token_ids)),
            };
            let places = Places { rows, output: rows + area, routing };
            workers.push(CudaWorker {
                stream: SessionStream::new(&session, doorbell as u32)?,
                host: Arc::into_inner(crate::session::open(args, 1, workload)?)
                    .ok_or_else(|| Error::Unfit("the host session is shared".to_owned()))?,
                prepared: prepare(&session, workload, places)?,
                places,
                worker: workers.len() as u64,
                is_decoding: args.shape.mode == Mode::Decode,
            });
        }
    }
    Ok(workers)
}

/// Prepares calls of all layers, in the workload's dtype and in the dtype of recorded rows.
fn prepare(
    session: &CudaSession,
    workload: &Workload,
    places: Places,
) -> Result<HashMap<PreparedKey, Prepared>, Error> {
    let mut keys = Vec::new();
    let mut calls = Vec::new();
    for layer in &workload.layers {
        // Recorded rows are in f32 and have no routing.
        for (dtype, given) in [(workload.dtype, workload.gives_routing()), (DType::F32, false)] {
            keys.push((layer.layer, dtype, given));
            let call = PreparedCall {
                layer: layer.layer,
                dtype: dtype as u32,
                max_rows: most_rows(workload),
                flags: flags(workload, layer, given),
                rows: places.rows as u64,
                output: places.output as u64,
                k: if given { layer.top_k } else { 0 },
                ..PreparedCall::zeroed()
            };
            calls.push((call, places.routing));
        }
    }
    Ok(keys.into_iter().zip(session.prepare_routed(&calls)?).collect())
}

fn most_rows(workload: &Workload) -> u32 {
    u32::try_from(workload.largest_request()).unwrap_or(u32::MAX).min(workload.most_tokens)
}

/// Flags of the calls of a layer.
fn flags(workload: &Workload, layer: &MoeLayer, given: bool) -> u32 {
    let when = |condition: bool, flag: u32| if condition { flag } else { 0 };
    when(workload.shared() == SharedExperts::Exclude, RequestRecord::EXCLUDE_SHARED)
        | when(given, RequestRecord::GIVEN_ROUTING)
        | when(layer.routes_by_token_id, RequestRecord::TOKEN_IDS)
}

impl CudaWorker {
    /// Closed loop on the calling thread, until no more requests may begin.
    pub fn closed(&self, load: &Load) {
        let ended = if self.is_decoding { self.walk(load) } else { self.call_one_by_one(load) };
        if let Err(error) = ended {
            load.recorder.of(self.worker).lost(format!("the CUDA session: {error}"));
        }
    }

    fn call_one_by_one(&self, load: &Load) -> Result<(), SessionError> {
        let mut source = load.source(self.worker);
        loop {
            let planned = source.next_request();
            let Some(measured) = load.period.admit(Instant::now()) else { return Ok(()) };
            self.write(&planned.request)?;
            load.progress.outstanding.fetch_add(1, Ordering::Relaxed);
            let mut job = Job::new(planned, Instant::now(), measured);
            loop {
                job.sent = Instant::now();
                let outcome = self.exchange(&mut job)?;
                let Some((again, after)) = load.finish(self.worker, job, outcome) else { break };
                job = again;
                std::thread::sleep(after);
                job.began = Instant::now();
            }
            load.progress.outstanding.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Copies what a request carries to the GPU.
    fn write(&self, request: &ForwardRequest) -> Result<(), SessionError> {
        let memory = self.stream.session().memory();
        let RoutingPlaces { ids, weights, token_ids } = self.places.routing;
        if let Some(Payload::Inline(rows)) = &request.payload {
            memory.write(self.places.rows, rows)?;
        }
        if let Some(routing) = &request.routing {
            memory.write(ids as usize, &routing.topk_ids)?;
            memory.write(weights as usize, &routing.topk_weights)?;
        }
        memory.write(token_ids as usize, &request.token_ids)
    }

    /// Makes a call. The measured time ends before the output is copied to the host.
    fn exchange(&self, job: &mut Job) -> Result<Outcome, SessionError> {
        let request = &job.planned.request;
        let dtype = u32::try_from(request.dtype).ok().and_then(DType::from_code);
        let call =
            dtype.and_then(|dtype| self.prepared.get(&(request.layer, dtype, request.routing.is_some())));
        let (Some(call), Some(dtype)) = (call, dtype) else {
            return Ok(Outcome::NoAnswer("a call that was not prepared".to_owned()));
        };
        let failures = self.stream.status()?.failures;
        self.stream.call(*call, request.tokens)?;
        self.stream.synchronize()?;
        job.ended = Some(Instant::now());
        let status = self.stream.status()?;
        if status.failures != failures {
            let failure = status.last_failure;
            let code = failure.as_ref().map_or(0, |failure| failure.code);
            return Ok(Outcome::Status {
                code: tonic::Code::from_i32(code.cast_signed()),
                message: failure.map(|failure| failure.message).unwrap_or_default(),
                retry_after: None,
            });
        }
        let hidden = self.stream.session().hidden();
        let mut rows = vec![0; request.tokens as usize * hidden * dtype.size()];
        self.stream.session().memory().read(self.places.output, &mut rows)?;
        let receipt = status.last.as_ref().map(|receipt| session::receipt(receipt, request.return_timings));
        let mut response = ForwardResponse { rows: Bytes::from(rows), receipt };
        if matches!(job.planned.purpose, Purpose::Sampled) {
            self.add_routing(request, &mut response);
        }
        Ok(Outcome::Answer(Box::new(response)))
    }

    /// Adds the routing of the same rows through a host session, so that the measured calls are all of one kind: the gate is the same.
    fn add_routing(&self, request: &ForwardRequest, response: &mut ForwardResponse) {
        let request = ForwardRequest { return_routing: true, ..request.clone() };
        let routed = self.host.forward(&request, Duration::from_secs(20));
        if let (Some(receipt), Ok(ForwardResponse { receipt: Some(routed), .. })) =
            (&mut response.receipt, routed)
        {
            receipt.topk_ids = routed.topk_ids;
            receipt.topk_weights = routed.topk_weights;
        }
    }

    /// Replays a graph of the calls of all layers, one model step at a time. Every layer has the same rows and the same routing.
    fn walk(&self, load: &Load) -> Result<(), SessionError> {
        let mut source = load.source(self.worker);
        let mut graphs: HashMap<u32, SessionGraph> = HashMap::new();
        loop {
            // The request of the first layer, whose rows all layers have.
            source.begin_walk();
            let request = source.random(false);
            let tokens = request.tokens;
            self.write(&request)?;
            let graph = match graphs.entry(tokens) {
                Entry::Occupied(graph) => graph.into_mut(),
                Entry::Vacant(place) => place.insert(self.capture(load, tokens)?),
            };
            let failures = self.stream.status()?.failures;
            let began = Instant::now();
            let Some(measured) = load.period.admit(began) else { return Ok(()) };
            self.stream.replay(graph)?;
            self.stream.synchronize()?;
            let took = began.elapsed();
            let status = self.stream.status()?;
            let mut stats = load.recorder.of(self.worker);
            if status.failures != failures {
                let failure = status.last_failure;
                let code = failure.as_ref().map_or(0, |failure| failure.code.cast_signed());
                stats.status(
                    tonic::Code::from_i32(code),
                    failure.as_ref().map_or("", |failure| &failure.message),
                );
                stats.walks_failed += u64::from(measured);
                continue;
            }
            let layers = load.workload.layers.len();
            load.progress.answered.fetch_add(layers as u64, Ordering::Relaxed);
            load.progress.tokens.fetch_add(layers as u64 * u64::from(tokens), Ordering::Relaxed);
            load.progress.walked(false);
            stats.answered_all += layers as u64;
            if measured {
                stats.answered += layers as u64;
                stats.tokens += layers as u64 * u64::from(tokens);
                stats.last_answer = Some(Instant::now());
                stats.walk(tokens, took, took);
                stats.latency.record(took / layers.max(1) as u32);
                if let Some(receipt) = status.last {
                    stats.step.record(receipt.step_time);
                    for timing in &session::receipt(&receipt, true).timings {
                        for (phase, ns) in crate::stats::phases(timing).into_iter().enumerate() {
                            stats.phases.entry(phase).or_default().record(Duration::from_nanos(ns));
                        }
                    }
                    stats.generations.insert(receipt.generation);
                }
            }
        }
    }

    fn capture(&self, load: &Load, tokens: u32) -> Result<SessionGraph, SessionError> {
        self.stream.capture(|| {
            let dtype = load.workload.dtype;
            let given = load.workload.gives_routing();
            let layers = load.workload.layers.iter();
            let calls = layers.filter_map(|layer| self.prepared.get(&(layer.layer, dtype, given)));
            calls.into_iter().try_for_each(|call| self.stream.call(*call, tokens))
        })
    }
}
