//! Load generator for expertd: closed and open loop, unary and streaming, with checked answers and a bare echo beside
//! the service. Uses the protocol only.

pub mod args;
pub mod arrivals;
pub mod busy;
pub mod check;
pub mod connect;
pub mod distribution;
pub mod echo;
pub mod golden;
pub mod load;
pub mod pool;
pub mod progress;
pub mod report;
pub mod request;
pub mod resources;
pub mod rows;
pub mod stats;
pub mod stream;
pub mod table;
pub mod unary;
pub mod window;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use expertd_proto::transport::{CONTROL_MESSAGE_BYTES, ConnectError, Credentials};
use tokio::sync::{Mutex, mpsc, oneshot};
use tokio::task::JoinSet;

use args::{Args, Bounds, DType, Mode, Shape};
use busy::Busy;
use connect::Client;
use echo::EchoServer;
use load::{Live, Load};
use report::{EchoLoad, EchoReport, Report, Settings};
use request::Workload;
use resources::CpuTime;
use stats::Recorder;
use window::Window;

/// Samples that wait for the checkers.
const SAMPLES: usize = 256;
/// Checkers, each on a connection of its own.
const CHECKERS: u64 = 2;
/// How long the echo runs under the shape of the load.
const ECHO_SECONDS: f64 = 1.5;

/// Why no load could be generated.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no connection.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The service does not say what it serves.
    #[error("GetModel failed: {:?}: {}", status.code(), status.message())]
    GetModel {
        /// How the call ended.
        status: Box<tonic::Status>,
    },
    /// The golden file is not usable.
    #[error("{}: {reason}", path.display())]
    Golden {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// The arguments do not fit the served model.
    #[error("{0}")]
    Unfit(String),
    /// The echo cannot run.
    #[error("cannot start the echo: {0}")]
    Echo(String),
}

/// Runs the load that the command line describes.
///
/// # Errors
/// If there is no service, or the arguments do not fit what it serves.
pub async fn run(args: &Args) -> Result<Report, Error> {
    let mut first = connect::connect(&args.address, &args.credentials, CONTROL_MESSAGE_BYTES).await?;
    let model = request::get_model(&mut first, &args.model).await?;
    let workload = Arc::new(Workload::new(args, model)?);
    let echo = if args.output.no_echo { EchoReport::default() } else { beside(args, &workload).await? };
    // Devices compute in bf16 whatever the rows are; processors compute in f32.
    let exact = workload.model.placement.iter().all(|rank| rank.device.starts_with("cpu"));
    let tolerance_of = |dtype| if exact && dtype == DType::F32 { 1e-3 } else { 2e-2 };
    let tolerance = args.checks.tolerance.unwrap_or(tolerance_of(args.content.dtype));
    let (samples, received) = mpsc::channel(SAMPLES);
    let load = Arc::new(Load {
        workload: Arc::clone(&workload),
        window: Arc::new(Window::open(&args.bounds, args.content.deadline_ms)),
        recorder: Arc::new(Recorder::new(args.shape.connections.get() * args.shape.streams.get())),
        live: Live::default(),
        check: args.checks.check,
        samples: Some(samples),
        retry: args.shape.retry,
        deadline_ms: args.content.deadline_ms,
        tolerance: args.checks.tolerance.unwrap_or(tolerance_of(DType::F32)),
        max_outstanding: args.shape.max_outstanding.get() as u64,
    });
    let checkers = check(args, &load, received, tolerance).await?;
    let (stop_watching, watched) = oneshot::channel();
    let memory = args.output.watch_memory.map(|pid| {
        let window = &load.window;
        tokio::spawn(resources::watch(pid, window.start, window.stop - window.start, watched))
    });
    let bar = (!args.output.quiet).then(|| progress::show(Arc::clone(&load)));
    let measured = tokio::spawn({
        let measured = load.window.measured;
        async move {
            tokio::time::sleep_until(measured.into()).await;
            CpuTime::now()
        }
    });
    let clients = connections(&args.address, &args.credentials, &args.shape, workload.message_bytes).await?;
    drive(&load, &args.shape, clients).await;
    let since = if measured.is_finished() { measured.await.ok() } else { None };
    let cpu = since.unwrap_or_else(CpuTime::now).since();
    if let Some(bar) = bar {
        bar.abort();
    }
    drop(stop_watching);
    let memory = match memory {
        Some(watch) => watch.await.unwrap_or_default(),
        None => Vec::new(),
    };
    // The last holder of the samples' sender is gone with the load: the checkers finish what waits, and end.
    let (window, recorder) = (Arc::clone(&load.window), Arc::clone(&load.recorder));
    drop(load);
    checkers.join_all().await;
    let settings = Settings::new(args, &workload);
    let report = Report::new(settings, &window, &recorder.total(), tolerance, echo, cpu, memory);
    Ok(report.with_growth_limit(args.output.max_memory_growth))
}

async fn connections(
    address: &str,
    credentials: &Credentials,
    shape: &Shape,
    message_bytes: usize,
) -> Result<Vec<Client>, Error> {
    let mut clients = Vec::new();
    for _ in 0..shape.connections.get() {
        clients.push(connect::connect(address, credentials, message_bytes).await?);
    }
    Ok(clients)
}

/// Runs all workers until the window closes and everything has ended.
async fn drive(load: &Arc<Load>, shape: &Shape, clients: Vec<Client>) {
    let mut workers = JoinSet::new();
    let per_client = match (shape.mode, shape.rate) {
        (Mode::Stream, _) => shape.streams.get(),
        (Mode::Unary, Some(_)) => 1,
        (Mode::Unary, None) => shape.outstanding.get(),
    };
    let mut arrivals = Vec::new();
    // Worker by worker over all connections, so that arrivals in turn change connections too.
    for index in 0..per_client * clients.len() {
        let (load, client, worker) = (Arc::clone(load), clients[index % clients.len()].clone(), index as u64);
        let received = shape.rate.map(|_| {
            let (sender, receiver) = mpsc::unbounded_channel();
            arrivals.push(sender);
            receiver
        });
        match (shape.mode, received) {
            (Mode::Unary, None) => workers.spawn(unary::closed(load, client, worker)),
            (Mode::Unary, Some(received)) => workers.spawn(unary::open(load, client, worker, received)),
            (Mode::Stream, received) => {
                workers.spawn(stream::run(load, client, worker, shape.outstanding.get(), received))
            }
        };
    }
    if let Some(rate) = shape.rate {
        arrivals::start(Arc::clone(&load.window), rate, load.workload.seed ^ 0xa5a5, arrivals);
    }
    workers.join_all().await;
}

/// Starts the checkers.
async fn check(
    args: &Args,
    load: &Arc<Load>,
    samples: mpsc::Receiver<check::Sample>,
    tolerance: f64,
) -> Result<JoinSet<()>, Error> {
    let samples = Arc::new(Mutex::new(samples));
    let mut checkers = JoinSet::new();
    for number in 0..CHECKERS {
        let client = connect::connect(&args.address, &args.credentials, load.workload.message_bytes).await?;
        let (workload, recorder) = (Arc::clone(&load.workload), Arc::clone(&load.recorder));
        let worker = 1_000_000 + number;
        checkers.spawn(check::run(workload, recorder, Arc::clone(&samples), client, worker, tolerance));
    }
    Ok(checkers)
}

/// Measures the echo: alone with the service, and under the shape of the load.
async fn beside(args: &Args, workload: &Arc<Workload>) -> Result<EchoReport, Error> {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let busy = Busy::new(cores);
    let over_unix_socket = args.address.starts_with("unix:");
    let server = EchoServer::start(over_unix_socket, workload.message_bytes, Some(Arc::clone(&busy)))?;
    let service = connect::connect(&args.address, &args.credentials, workload.message_bytes).await?;
    let echo = connect::connect(&server.address, &Credentials::default(), workload.message_bytes).await?;
    let one_outstanding = echo::one_outstanding(workload, service, echo, &busy).await;
    let same_load =
        if args.shape.rate.is_none() { Some(same_load(args, workload, &server).await?) } else { None };
    Ok(EchoReport { one_outstanding, same_load })
}

async fn same_load(args: &Args, workload: &Arc<Workload>, server: &EchoServer) -> Result<EchoLoad, Error> {
    let clients = connections(&server.address, &Credentials::default(), &args.shape, workload.message_bytes).await?;
    let bounds = Bounds { warm_up: 0.3, duration: Some(ECHO_SECONDS), requests: None, give_up: 10.0 };
    let load = Arc::new(Load {
        workload: Arc::clone(workload),
        window: Arc::new(Window::open(&bounds, None)),
        recorder: Arc::new(Recorder::new(clients.len())),
        live: Live::default(),
        check: 0.0,
        samples: None,
        retry: 0,
        deadline_ms: None,
        tolerance: f64::INFINITY,
        max_outstanding: u64::MAX,
    });
    drive(&load, &args.shape, clients).await;
    let stats = load.recorder.total();
    let end = stats.last_answer.unwrap_or(load.window.stop);
    let elapsed =
        end.saturating_duration_since(load.window.measured).max(Duration::from_nanos(1)).as_secs_f64();
    Ok(EchoLoad {
        requests_per_second: stats.answered as f64 / elapsed,
        row_bytes_per_second: stats.row_bytes as f64 / elapsed,
        latency: stats.latency.summary(),
    })
}
