//! Load through CUDA sessions: each worker is a thread with a stream and a doorbell of its own, which makes one call after the
//! other. Rows are copied to the GPU before a call's time begins, as an engine's are there already.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bytemuck::Zeroable as _;
use bytes::Bytes;
use expertd_proto::session::{self, SessionClient};
use expertd_proto::v1::forward_request::Payload;
use expertd_proto::v1::{ForwardRequest, ForwardResponse, SharedExperts};
use expertd_session::SessionError;
use expertd_session::cuda::wire::{MAX_DOORBELLS, PreparedCall};
use expertd_session::cuda::{CudaSession, CudaSessionOptions, Prepared, SessionGraph, SessionStream};
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
    prepared: HashMap<(u32, DType), Prepared>,
    /// Offset of the rows, in bytes.
    rows: usize,
    /// Offset of the output, in bytes.
    output: usize,
    worker: u64,
    is_decoding: bool,
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
    let mut workers = Vec::new();
    for _ in 0..args.shape.connections.get() {
        let options = CudaSessionOptions {
            device: args.session_device,
            memory_bytes: 2 * outstanding * area,
            doorbells: outstanding as u32,
            ..CudaSessionOptions::default()
        };
        let session = Arc::new(CudaSession::open(&args.address, &options)?);
        for doorbell in 0..outstanding {
            let (rows, output) = (2 * doorbell * area, (2 * doorbell + 1) * area);
            workers.push(CudaWorker {
                stream: SessionStream::new(&session, doorbell as u32)?,
                host: Arc::into_inner(crate::session::open(&args.address, 1, workload)?)
                    .ok_or_else(|| Error::Unfit("the host session is shared".to_owned()))?,
                prepared: prepare(&session, workload, rows, output)?,
                rows,
                output,
                worker: workers.len() as u64,
                is_decoding: args.shape.mode == Mode::Decode,
            });
        }
    }
    Ok(workers)
}

/// Prepares calls of all layers in the workload's dtype and in that of recorded rows.
fn prepare(
    session: &CudaSession,
    workload: &Workload,
    rows: usize,
    output: usize,
) -> Result<HashMap<(u32, DType), Prepared>, Error> {
    let mut keys = Vec::new();
    let mut calls = Vec::new();
    let flags = match workload.shared() {
        SharedExperts::Exclude => RequestRecord::EXCLUDE_SHARED,
        _ => 0,
    };
    let most = u32::try_from(workload.largest_request()).unwrap_or(u32::MAX).min(workload.most_tokens);
    for layer in &workload.layers {
        for dtype in [workload.dtype, DType::F32] {
            keys.push((layer.layer, dtype));
            calls.push(PreparedCall {
                layer: layer.layer,
                dtype: dtype as u32,
                max_rows: most,
                flags,
                rows: rows as u64,
                output: output as u64,
                ..PreparedCall::zeroed()
            });
        }
    }
    Ok(keys.into_iter().zip(session.prepare(&calls)?).collect())
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
            if let Some(Payload::Inline(rows)) = &planned.request.payload {
                self.stream.session().memory().write(self.rows, rows)?;
            }
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

    /// Makes a call, and takes its time before the output is copied to the host.
    fn exchange(&self, job: &mut Job) -> Result<Outcome, SessionError> {
        let request = &job.planned.request;
        let dtype = u32::try_from(request.dtype).ok().and_then(DType::from_code);
        let call = dtype.and_then(|dtype| self.prepared.get(&(request.layer, dtype)));
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
        self.stream.session().memory().read(self.output, &mut rows)?;
        let receipt = status.last.as_ref().map(|receipt| session::receipt(receipt, request.return_timings));
        let mut response = ForwardResponse { rows: Bytes::from(rows), receipt };
        if matches!(job.planned.purpose, Purpose::Sampled) {
            self.add_routing(request, &mut response);
        }
        Ok(Outcome::Answer(Box::new(response)))
    }

    /// Adds the routing of the same rows, which CUDA sessions do not return, through a host session: the gate is the same.
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

    /// Replays a graph of the calls of all layers, one model step at a time. Every layer has the same rows.
    fn walk(&self, load: &Load) -> Result<(), SessionError> {
        let mut source = load.source(self.worker);
        let mut graphs: HashMap<u32, SessionGraph> = HashMap::new();
        loop {
            let request = source.random(false);
            let tokens = request.tokens;
            if let Some(Payload::Inline(rows)) = &request.payload {
                self.stream.session().memory().write(self.rows, rows)?;
            }
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
                continue;
            }
            let layers = load.workload.layers.len();
            load.progress.answered.fetch_add(layers as u64, Ordering::Relaxed);
            load.progress.tokens.fetch_add(layers as u64 * u64::from(tokens), Ordering::Relaxed);
            stats.answered_all += layers as u64;
            if measured {
                stats.answered += layers as u64;
                stats.tokens += layers as u64 * u64::from(tokens);
                stats.last_answer = Some(Instant::now());
                stats.walks.record(took);
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
            let calls =
                load.workload.layers.iter().filter_map(|layer| self.prepared.get(&(layer.layer, dtype)));
            calls.into_iter().try_for_each(|call| self.stream.call(*call, tokens))
        })
    }
}
