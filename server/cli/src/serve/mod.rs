//! `expertd serve`: the router rank.

mod descriptors;
pub(super) mod layers;
pub(super) mod memory;
pub mod plan;
mod reload;
mod report;
pub mod settings;

pub use report::{follow_loading, plan as describe_plan};

use std::io::Write as _;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::ArgMatches;
use rustix::process::DumpableBehavior;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use self::plan::{PlanError, ServePlan, SessionPlan};
use self::settings::{Given, ServeArgs};
use expertd_ipc::wait::spin_between_steps;
use expertd_router::api::{
    self, Access, Address, ConnectionLimits, ConnectionTimeouts, Server, ServerConfig,
};
use expertd_router::backend::Backend;
use expertd_router::sessions::{SessionConfig, SessionServer};
use expertd_router::steps::{Service, ServiceEnd};
use expertd_router::telemetry::{
    MetricsEndpoint, Recorder, TraceError, flush_logs, flush_traces, install_recorder, record_memory_limit,
    start_traces, tell,
};
use expertd_router::watchdog;

/// Exit codes of `expertd serve`, after sysexits.h.
pub mod exit {
    /// The configuration is invalid or the checkpoint is broken. Nothing was started and no port was bound.
    pub const USAGE: u8 = 64;
    /// The weights could not be loaded.
    pub const LOAD: u8 = 65;
    /// An address could not be bound.
    pub const BIND: u8 = 69;
    /// Ranks kept failing before they were ready.
    pub const SETUP: u8 = 70;
    /// A thread or task was lost that the service cannot do without.
    pub const LOST: u8 = 71;
}

/// Time limit for connections to close after the last answer was sent.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(2);

/// Time limit for the last spans to be sent.
const FLUSH_TRACES: Duration = Duration::from_secs(2);

/// Time limit for the end of the service after a second signal.
const END_AT_ONCE: Duration = Duration::from_secs(3);

/// Runs the service until a signal, a drain, or a failure that it cannot recover from.
#[must_use]
pub fn run(args: &ServeArgs, matches: Option<&ArgMatches>) -> ExitCode {
    let huge_pages = memory::disable_huge_pages();
    let plan = Given::merge(args, matches).map_err(PlanError::from).and_then(|given| {
        if args.print_config && given.model.0.is_none() {
            print(&report::settings(&given.shown()));
            return Ok(None);
        }
        ServePlan::new(given).map(Some)
    });
    let mut plan = match plan {
        Ok(Some(plan)) if !args.print_config => plan,
        Ok(plan) => {
            if let Some(plan) = plan {
                print(&report::settings(&plan.shown));
            }
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            tell(&format!("expertd serve: {error}"));
            return ExitCode::from(exit::USAGE);
        }
    };
    print(&format!("{}{}", report::settings(&plan.shown), report::plan(&plan)));
    if let Err(error) = guard_process() {
        tell(&format!("expertd serve: {error}"));
        return ExitCode::from(exit::SETUP);
    }
    match huge_pages {
        Ok(for_children) => plan.cluster.environment.extend(for_children),
        Err(error) => {
            tracing::warn!(%error, "the router's memory is in huge pages, so bursts leave more of it resident")
        }
    }
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = match runtime.enable_all().thread_name("api").on_thread_park(memory::collect_once).build() {
        Ok(runtime) => runtime,
        Err(error) => {
            tell(&format!("expertd serve: cannot start the asynchronous runtime: {error}"));
            return ExitCode::from(exit::SETUP);
        }
    };
    let code = runtime.block_on(async {
        match Running::start(plan).await {
            Ok(running) => {
                running.announce();
                running.until_end().await
            }
            Err(error) => {
                tell(&format!("expertd serve: {error}"));
                error.exit_code()
            }
        }
    });
    watchdog::stop();
    runtime.shutdown_timeout(Duration::from_millis(100));
    code
}

/// Prints to standard output. A closed standard output is not an error.
fn print(text: &str) {
    let _ = std::io::stdout().write_all(text.as_bytes());
}

/// Keeps the memory of this process from other processes of the user and from core files, and starts the watchdog, which ends the
/// process if a thread is lost that it cannot do without.
fn guard_process() -> std::io::Result<()> {
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    watchdog::start(|reason| {
        tell(&format!("expertd serve: {reason}"));
        flush_logs();
        std::process::exit(i32::from(exit::LOST));
    })
}

/// Why a service could not be started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// An address does not parse.
    #[error("{name}: {source}")]
    Address {
        /// Name of the setting.
        name: &'static str,
        /// The parser's error.
        source: api::AddressError,
    },
    /// The address of the metrics endpoint does not parse.
    #[error(
        "metrics-listen: `{0}` is not IP:PORT; use 127.0.0.1:9464, or 0.0.0.0:9464 for scrapers on other hosts"
    )]
    MetricsAddress(String),
    /// The metrics endpoint could not be bound.
    #[error(
        "metrics-listen: cannot bind {address}: {source}; choose another --metrics-listen (port 0 picks a free one)"
    )]
    MetricsBind {
        /// The address.
        address: SocketAddr,
        /// The error of `bind`.
        source: std::io::Error,
    },
    /// The metrics endpoint would be open to other hosts.
    #[error(
        "metrics-listen: {0} can be reached from other hosts, and scrapes need a token there; give --token-file or \
         --admin-token-file, use 127.0.0.1, or pass --insecure if the network is trusted"
    )]
    OpenMetrics(SocketAddr),
    /// Credentials are invalid.
    #[error(transparent)]
    Access(#[from] api::AccessError),
    /// Traces cannot be sent.
    #[error(transparent)]
    Traces(#[from] TraceError),
    /// The limit on open files is too low.
    #[error("{0}")]
    Descriptors(String),
    /// A gRPC listener could not be started.
    #[error(transparent)]
    Server(#[from] api::ServerError),
    /// The scheduler could not be started.
    #[error(transparent)]
    Service(#[from] expertd_router::steps::StartError),
}

impl StartError {
    fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            StartError::Address { .. }
            | StartError::MetricsAddress(_)
            | StartError::OpenMetrics(_)
            | StartError::Access(_)
            | StartError::Traces(_)
            | StartError::Descriptors(_)
            | StartError::Server(
                api::ServerError::Plaintext(_)
                | api::ServerError::AdminWithoutTokens(_)
                | api::ServerError::NoAddress,
            ) => exit::USAGE,
            StartError::MetricsBind { .. } | StartError::Server(_) => exit::BIND,
            StartError::Service(_) => exit::SETUP,
        })
    }
}

/// A running service with its listeners.
pub struct Running {
    service: Arc<Service>,
    addresses: Vec<Address>,
    admin: Option<Address>,
    metrics: SocketAddr,
    shutdown: CancellationToken,
    server: tokio::task::JoinHandle<Result<(), api::ServerError>>,
    sessions: Option<(String, tokio::task::JoinHandle<()>)>,
}

impl Running {
    /// Checks addresses and credentials, reserves memory for messages, binds every address, then forms the first generation.
    ///
    /// # Errors
    /// If an address is invalid or cannot be bound, or the scheduler cannot be started.
    pub async fn start(plan: ServePlan) -> Result<Self, StartError> {
        let address = |name: &'static str, text: &str| {
            text.parse::<Address>().map_err(|source| StartError::Address { name, source })
        };
        let sockets = descriptors::sockets(
            plan.connections.tcp,
            plan.connections.unix + plan.sessions.as_ref().map_or(0, SessionPlan::descriptors),
            plan.cluster.shape.ranks as usize,
        )
        .map_err(StartError::Descriptors)?;
        let config = ServerConfig {
            listen: plan
                .listen
                .split(',')
                .map(|text| address("listen", text.trim()))
                .collect::<Result<_, _>>()?,
            admin: Some(address("admin-listen", &plan.admin_listen)?),
            insecure: plan.access.insecure,
            connections: ConnectionLimits {
                tarpit: sockets.tarpit,
                ..plan.connections.with_tcp(sockets.connections)
            },
            shutdown_grace: SHUTDOWN_GRACE,
            timeouts: ConnectionTimeouts::default(),
            memory_limit_bytes: plan.router_memory.total() as u64,
        };
        let sessions = match &plan.sessions {
            Some(sessions) => Some(SessionConfig {
                listen: address("session-listen", &sessions.listen)?,
                users: sessions.users.clone(),
                limits: sessions.limits,
                spin: plan.cluster.spin,
                spin_between_steps: spin_between_steps(plan.cluster.spin, plan.cluster.usable_cores),
            }),
            None => None,
        };
        let access = Arc::new(Access::load(&plan.access)?);
        config.check(&access)?;
        let metrics: SocketAddr = plan
            .metrics_listen
            .parse()
            .map_err(|_| StartError::MetricsAddress(plan.metrics_listen.clone()))?;
        if Address::Tcp(metrics).is_beyond_loopback() && !access.has_tokens() && !plan.access.insecure {
            return Err(StartError::OpenMetrics(metrics));
        }
        let recorder = install_recorder(if expertd_rank_cuda::BUILT { "cuda" } else { "" });
        record_memory_limit(config.memory_limit_bytes);
        start_traces(plan.otlp_endpoint.as_deref())?;
        plan.buffers.reserve();
        tokio::spawn(memory::settle(tokio::runtime::Handle::current().metrics().num_workers()));
        let service = Service::start(plan.model, plan.cluster, plan.scheduler)?;
        match Self::listen(&service, &config, access, metrics, recorder, sessions).await {
            Ok(running) => Ok(running),
            Err(error) => {
                service.drain(Some(Duration::ZERO)).await;
                service.join();
                Err(error)
            }
        }
    }

    async fn listen(
        service: &Arc<Service>,
        config: &ServerConfig,
        access: Arc<Access>,
        metrics: SocketAddr,
        recorder: Recorder,
        sessions: Option<SessionConfig>,
    ) -> Result<Self, StartError> {
        let service = Arc::clone(service);
        let backend: Arc<dyn Backend> = Arc::clone(&service) as Arc<dyn Backend>;
        let endpoint = MetricsEndpoint::bind(metrics, recorder, Arc::clone(&backend), Arc::clone(&access))
            .await
            .map_err(|source| StartError::MetricsBind { address: metrics, source })?;
        let metrics = endpoint.local_address().unwrap_or(metrics);
        let server = Server::bind(config, access, backend).await?;
        let session_server = match sessions {
            Some(config) => {
                let address = config.listen.to_string();
                Some((
                    address,
                    SessionServer::bind(config, Arc::clone(&service))
                        .await
                        .map_err(api::ServerError::from)?,
                ))
            }
            None => None,
        };
        let (addresses, admin) = (server.addresses(), server.admin_address());
        tokio::spawn(endpoint.run());
        let shutdown = CancellationToken::new();
        let server = tokio::spawn(server.run(shutdown.clone()));
        let sessions =
            session_server.map(|(address, sessions)| (address, tokio::spawn(sessions.run(shutdown.clone()))));
        Ok(Running { service, addresses, admin, metrics, shutdown, server, sessions })
    }

    /// The first public address.
    #[must_use]
    pub fn address(&self) -> Option<&Address> {
        self.addresses.first()
    }

    /// The scheduler.
    #[must_use]
    pub const fn service(&self) -> &Arc<Service> {
        &self.service
    }

    /// Prints the service's addresses once it serves.
    fn announce(&self) {
        let (service, metrics) = (Arc::clone(&self.service), self.metrics);
        let addresses = self.addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        let admin = self.admin.as_ref().map_or_else(|| "-".to_owned(), ToString::to_string);
        let sessions = self
            .sessions
            .as_ref()
            .map_or_else(String::new, |(address, _)| format!(", sessions on {address}"));
        let loading = Arc::clone(&service);
        // Progress is drawn by its own thread, because a terminal that does not accept output blocks the thread that writes to it.
        let follow = move || report::follow_loading(&loading);
        if let Err(error) = std::thread::Builder::new().name("progress".to_owned()).spawn(follow) {
            tracing::warn!(%error, "cannot start the thread that shows the progress of loading");
        }
        tokio::spawn(async move {
            let mut state = service.watch_state();
            let serving = state.wait_for(|s| *s == expertd_router::backend::ServiceState::Serving).await;
            if serving.is_ok() {
                print(&format!(
                    "ready: listening on {addresses}, admin on {admin}, metrics on http://{metrics}/metrics{sessions}\n"
                ));
            }
        });
    }

    /// Waits for a signal, a drain or a failure, and then stops the service.
    async fn until_end(self) -> ExitCode {
        let mut signals = Vec::new();
        for kind in [SignalKind::terminate(), SignalKind::interrupt()] {
            match signal(kind) {
                Ok(signal) => signals.push(signal),
                Err(error) => tracing::warn!(%error, "cannot listen for a signal"),
            }
        }
        let draining = Arc::clone(&self.service);
        tokio::spawn(async move {
            let mut first = true;
            while !signals.is_empty() {
                futures_util::future::select_all(signals.iter_mut().map(|s| Box::pin(s.recv()))).await;
                if first {
                    tracing::info!("signal received: draining; a second signal ends the service at once");
                    tokio::spawn(draining.drain(None));
                } else {
                    tracing::warn!("second signal received: ending at once");
                    tokio::spawn(draining.drain(Some(Duration::ZERO)));
                    tokio::spawn(async {
                        tokio::time::sleep(END_AT_ONCE).await;
                        tell("expertd serve: ended by a second signal before the drain was over");
                        std::process::exit(i32::from(exit::SETUP));
                    });
                }
                first = false;
            }
        });
        let end = self.watched_until_end().await;
        self.stop().await;
        match end {
            ServiceEnd::Drained => ExitCode::SUCCESS,
            ServiceEnd::LoadFailed(message) => {
                tell(&format!("expertd serve: {message}"));
                ExitCode::from(exit::LOAD)
            }
            ServiceEnd::SetupFailed(message) => {
                tell(&format!("expertd serve: {message}"));
                ExitCode::from(exit::SETUP)
            }
        }
    }

    /// Waits for the service's end on this thread, without which the process would never exit.
    async fn watched_until_end(&self) -> ServiceEnd {
        let heartbeat = watchdog::watch("the main thread");
        let mut ticks = tokio::time::interval(watchdog::TICK);
        let mut ended = std::pin::pin!(self.service.ended());
        let end = loop {
            tokio::select! {
                end = &mut ended => break end,
                _ = ticks.tick() => heartbeat.tick(),
            }
        };
        heartbeat.finish();
        end
    }

    /// Drains and stops the service: sends all answers, closes connections, reaps ranks.
    pub async fn drain(self) {
        self.service.drain(None).await;
        self.service.ended().await;
        self.stop().await;
    }

    async fn stop(self) {
        self.shutdown.cancel();
        if let Ok(Err(error)) = self.server.await {
            tracing::warn!(%error, "the server ended with an error");
        }
        if let Some((_, sessions)) = self.sessions
            && let Err(error) = sessions.await
        {
            tracing::warn!(%error, "the session socket's task ended with an error");
        }
        self.service.join();
        flush_traces(FLUSH_TRACES).await;
    }
}
