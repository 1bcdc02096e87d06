//! Load generator for expertd: closed and open loop, unary calls and streams, with checked answers and a bare gRPC echo
//! for comparison. It uses nothing of expertd but the protocol.

pub mod args;
pub mod arrivals;
pub mod check;
pub mod connect;
pub mod cuda;
pub mod decode;
pub mod distribution;
pub mod echo;
pub mod golden;
pub mod load;
pub mod memory_traffic;
pub mod period;
pub mod pool;
pub mod progress;
pub mod report;
pub mod request;
pub mod resources;
pub mod session;
pub mod stats;
pub mod stream;
pub mod table;
pub mod unary;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use expertd_client::address_hint;
use expertd_client::fleet::FleetError;
use expertd_client::session::{SessionClient, SessionError, SessionOptions};
use expertd_client::transport::{ConnectError, Credentials};
use expertd_proto::transport::CONTROL_MESSAGE_BYTES;
use tokio::sync::{Mutex, mpsc, oneshot};
use tokio::task::JoinSet;

use args::{Args, Bounds, Mode, SessionKind, Shape};
use connect::Client;
use echo::EchoServer;
use expertd_types::DType;
use load::{Load, ProgressCounters};
use memory_traffic::MemoryTraffic;
use period::LoadPeriod;
use report::{EchoLoad, EchoReport, Report, Settings};
use request::Workload;
use resources::CpuTime;
use stats::Recorder;

/// Capacity of the queue of samples to check.
const SAMPLES: usize = 256;
/// Number of checkers, each with its own connection.
const CHECKERS: u64 = 2;
/// Duration of the echo measurement with the load's connections and outstanding requests, in seconds.
const ECHO_SECONDS: f64 = 1.5;

/// An error that prevents load from being generated.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The service cannot be reached.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// None of several services serves.
    #[error(transparent)]
    Fleet(#[from] FleetError),
    /// `GetModel` failed.
    #[error("GetModel failed: {:?}: {}{}", status.code(), status.message(), address_hint(status))]
    GetModel {
        /// The call's status.
        status: Box<tonic::Status>,
    },
    /// A session cannot be opened.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// The golden file is not usable.
    #[error("{}: {reason}", path.display())]
    Golden {
        /// The golden file.
        path: PathBuf,
        /// The reason, in words.
        reason: String,
    },
    /// The arguments do not fit the served model.
    #[error("{0}")]
    Unfit(String),
    /// The echo cannot be started.
    #[error("cannot start the echo: {0}")]
    Echo(String),
}

/// Generates the load that the command line describes.
///
/// # Errors
/// If the service cannot be reached, or the arguments do not fit its model.
pub async fn run(args: &Args) -> Result<Report, Error> {
    args.check()?;
    let model = match args.session {
        Some(SessionKind::Host | SessionKind::Cuda) => {
            let options = SessionOptions { rows_bytes: 1, calls: 1, ..SessionOptions::default() };
            SessionClient::open(&args.address, &options)?.model().clone()
        }
        None | Some(SessionKind::Network) => {
            let mut first = connect::connect(&args.address, &args.credentials, CONTROL_MESSAGE_BYTES).await?;
            request::get_model(&mut first, &args.model).await?
        }
    };
    let workload = Arc::new(Workload::new(args, model)?);
    // The echo is one of gRPC.
    let echo = if args.output.no_echo || args.session.is_some() {
        EchoReport::default()
    } else {
        measure_echo(args, &workload).await?
    };
    // GPU ranks compute in bf16 whatever the element type of the rows; CPU ranks compute in f32.
    let exact = workload.model.placement.iter().all(|rank| rank.device.starts_with("cpu"));
    let tolerance_of = |dtype| if exact && dtype == DType::F32 { 1e-3 } else { 2e-2 };
    let tolerance = args.checks.tolerance.unwrap_or(tolerance_of(args.content.dtype));
    // Opened before the load begins, and open until the processor times are read: the service ends the processes that serve them.
    let sessions = match args.session {
        Some(SessionKind::Host | SessionKind::Network) => session::open_all(args, &workload)?,
        Some(SessionKind::Cuda) | None => Vec::new(),
    };
    let of_checkers = clients_of_checkers(args, &workload).await?;
    let (samples, received) = mpsc::channel(SAMPLES);
    let load = Arc::new(Load {
        workload: Arc::clone(&workload),
        period: Arc::new(LoadPeriod::open(&args.bounds, args.content.deadline_ms)),
        recorder: Arc::new(Recorder::new(args.shape.connections.get() * args.shape.streams.get())),
        progress: ProgressCounters::default(),
        check: args.checks.check,
        samples: Some(samples),
        retry: args.shape.retry,
        deadline_ms: args.content.deadline_ms,
        tolerance: args.checks.tolerance.unwrap_or(tolerance_of(DType::F32)),
        max_outstanding: args.shape.max_outstanding.get() as u64,
    });
    let checkers = check(of_checkers, &load, received, tolerance);
    let (stop_watching, watched) = oneshot::channel();
    let memory =
        args.output.watch_memory.map(|pid| tokio::spawn(resources::watch(pid, load.period.start, watched)));
    let bar = (!args.output.quiet).then(|| progress::show(Arc::clone(&load)));
    let watched_pid = args.output.watch_memory;
    let measured = tokio::spawn({
        let measured = load.period.measured;
        async move {
            tokio::time::sleep_until(measured.into()).await;
            CpuTime::now(watched_pid)
        }
    });
    if args.session == Some(SessionKind::Cuda) {
        drive_cuda(&load, args).await?;
    } else if args.session.is_some() {
        drive_sessions(&load, &args.shape, &sessions).await;
    } else {
        let clients =
            connections(&args.address, &args.credentials, &args.shape, workload.message_bytes).await?;
        drive(&load, &args.shape, clients).await;
    }
    let since = if measured.is_finished() { measured.await.ok() } else { None };
    let cpu = since.unwrap_or_else(|| CpuTime::now(watched_pid)).since();
    drop(sessions);
    if let Some(bar) = bar {
        bar.abort();
    }
    drop(stop_watching);
    let memory = match memory {
        Some(watch) => watch.await.unwrap_or_default(),
        None => Vec::new(),
    };
    // The load held the last sender of samples: the checkers now finish the queued samples and end.
    let (period, recorder) = (Arc::clone(&load.period), Arc::clone(&load.recorder));
    drop(load);
    checkers.join_all().await;
    let settings = Settings::new(args, &workload);
    let report = Report::new(settings, &period, &recorder.total(), tolerance, echo, cpu, memory);
    Ok(report.with_memory_limits(args.output.max_memory_growth, args.output.max_memory_bytes))
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

/// Runs a thread for each outstanding request of each session until no more requests may begin and all have ended.
async fn drive_sessions(load: &Arc<Load>, shape: &Shape, clients: &[Arc<SessionClient>]) {
    let mut workers = JoinSet::new();
    for index in 0..shape.outstanding.get() * clients.len() {
        let (load, client) = (Arc::clone(load), Arc::clone(&clients[index % clients.len()]));
        workers.spawn_blocking(move || session::closed(&load, &client, index as u64));
    }
    workers.join_all().await;
}

/// Runs a thread for each outstanding request of each CUDA session until no more requests may begin and all have ended.
async fn drive_cuda(load: &Arc<Load>, args: &Args) -> Result<(), Error> {
    let mut workers = JoinSet::new();
    for worker in cuda::open_all(args, &load.workload)? {
        let load = Arc::clone(load);
        workers.spawn_blocking(move || worker.closed(&load));
    }
    workers.join_all().await;
    Ok(())
}

/// Runs all workers until no more requests may begin and all have ended.
async fn drive(load: &Arc<Load>, shape: &Shape, clients: Vec<Client>) {
    let mut workers = JoinSet::new();
    let per_client = match (shape.mode, shape.rate) {
        (Mode::Stream, _) => shape.streams.get(),
        (Mode::Unary | Mode::Decode, Some(_)) => 1,
        (Mode::Unary | Mode::Decode, None) => shape.outstanding.get(),
    };
    let mut arrivals = Vec::new();
    // Workers alternate between connections, so that consecutive arrivals also use different connections.
    for index in 0..per_client * clients.len() {
        let (load, client, worker) = (Arc::clone(load), clients[index % clients.len()].clone(), index as u64);
        let received = shape.rate.map(|_| {
            let (sender, receiver) = mpsc::unbounded_channel();
            arrivals.push(sender);
            receiver
        });
        match (shape.mode, received) {
            (Mode::Stream, received) => match client {
                Client::One(moe) => {
                    workers.spawn(stream::run(load, moe, worker, shape.outstanding.get(), received));
                }
                // `run` refuses streams to several services and through sessions.
                Client::Several(_) | Client::Session(_) => {}
            },
            (Mode::Unary | Mode::Decode, None) => drop(workers.spawn(unary::closed(load, client, worker))),
            (Mode::Unary | Mode::Decode, Some(received)) => {
                drop(workers.spawn(unary::open(load, client, worker, received)));
            }
        };
    }
    if let Some(rate) = shape.rate {
        arrivals::start(Arc::clone(&load.period), rate, load.workload.seed ^ 0xa5a5, arrivals);
    }
    workers.join_all().await;
}

/// A client for each checker.
async fn clients_of_checkers(args: &Args, workload: &Workload) -> Result<Vec<Client>, Error> {
    let mut clients = Vec::new();
    for _ in 0..CHECKERS {
        clients.push(match args.session {
            Some(_) => Client::Session(session::open(args, 1, workload)?),
            None => connect::connect(&args.address, &args.credentials, workload.message_bytes).await?,
        });
    }
    Ok(clients)
}

/// Starts the checkers.
fn check(
    clients: Vec<Client>,
    load: &Arc<Load>,
    samples: mpsc::Receiver<check::Sample>,
    tolerance: f64,
) -> JoinSet<()> {
    let samples = Arc::new(Mutex::new(samples));
    let mut checkers = JoinSet::new();
    for (client, worker) in clients.into_iter().zip(1_000_000..) {
        let (workload, recorder) = (Arc::clone(&load.workload), Arc::clone(&load.recorder));
        checkers.spawn(check::run(workload, recorder, Arc::clone(&samples), client, worker, tolerance));
    }
    checkers
}

/// Measures a bare echo twice: one request at a time, in turn with the service; then with the load's connections and sizes.
async fn measure_echo(args: &Args, workload: &Arc<Workload>) -> Result<EchoReport, Error> {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let traffic = MemoryTraffic::new(cores);
    let over_unix_socket = args.address.starts_with("unix:");
    let server = EchoServer::start(over_unix_socket, workload.message_bytes, Some(Arc::clone(&traffic)))?;
    let service = connect::connect(&args.address, &args.credentials, workload.message_bytes).await?;
    let echo = connect::connect(&server.address, &Credentials::default(), workload.message_bytes).await?;
    let one_outstanding = echo::one_outstanding(workload, service, echo, &traffic).await;
    let same_load =
        if args.shape.rate.is_none() { Some(same_load(args, workload, &server).await?) } else { None };
    Ok(EchoReport { one_outstanding, same_load })
}

async fn same_load(args: &Args, workload: &Arc<Workload>, server: &EchoServer) -> Result<EchoLoad, Error> {
    let clients =
        connections(&server.address, &Credentials::default(), &args.shape, workload.message_bytes).await?;
    let bounds = Bounds { warm_up: 0.3, duration: Some(ECHO_SECONDS), requests: None, give_up: 10.0 };
    let load = Arc::new(Load {
        workload: Arc::clone(workload),
        period: Arc::new(LoadPeriod::open(&bounds, None)),
        recorder: Arc::new(Recorder::new(clients.len())),
        progress: ProgressCounters::default(),
        check: 0.0,
        samples: None,
        retry: 0,
        deadline_ms: None,
        tolerance: f64::INFINITY,
        max_outstanding: u64::MAX,
    });
    drive(&load, &args.shape, clients).await;
    let stats = load.recorder.total();
    let end = stats.last_answer.unwrap_or(load.period.stop);
    let elapsed =
        end.saturating_duration_since(load.period.measured).max(Duration::from_nanos(1)).as_secs_f64();
    Ok(EchoLoad {
        requests_per_second: stats.answered as f64 / elapsed,
        row_bytes_per_second: stats.row_bytes as f64 / elapsed,
        latency: stats.latency.summary(),
    })
}
