//! A running service: its start, its listeners, and its end.

use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use expertd_core::backend::{Backend, ServiceState};
use expertd_core::listen::Address;
use expertd_core::steps::{Service, ServiceEnd};
use expertd_grpc::{
    Access, AccessConfig, ConnectionTimeouts, MetricsPort, Server, ServerConfig, ServerError, encoded_model,
};
use expertd_sessions::{NetworkConfig, SessionConfig, SessionServer};
use expertd_shm::wait::spin_between_steps;
use expertd_telemetry::{flush_logs, flush_traces, install_recorder, progress, start_traces, tell};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use super::error::ServeError;
use super::network::OverNetwork;
use super::plan::{ServePlan, SessionPlan};
use super::{descriptors, print, report};
use crate::exit;
use crate::network_agent::probe_in_child_process;

/// Time limit for connections to close after the last answer was sent.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(2);

/// Time limit for the last spans to be sent.
const FLUSH_TRACES: Duration = Duration::from_secs(2);

/// Time limit for the end of the service after a second signal.
const END_AT_ONCE: Duration = Duration::from_secs(3);

/// A service whose addresses and credentials were checked. Nothing is bound and nothing started.
pub struct PreparedService {
    plan: ServePlan,
    config: ServerConfig,
    sessions: Option<SessionConfig>,
    network: Option<NetworkConfig>,
    access: Arc<Access>,
    metrics: SocketAddr,
}

impl PreparedService {
    /// Checks addresses and credentials.
    ///
    /// # Errors
    /// If an address is invalid or needs credentials, or credentials cannot be used.
    pub fn new(plan: ServePlan) -> Result<Self, ServeError> {
        let config = server_config(&plan)?;
        let sessions = session_config(&plan)?;
        let network = network_config(&plan)?;
        let access = Arc::new(Access::load(&plan.access)?);
        config.check(&access)?;
        let metrics = metrics_address(&plan, &access)?;
        for (path, mode) in readable_secrets(&plan.access) {
            tracing::warn!(
                "{}: every user of this host can read it (mode {mode:o}); chmod 640 it",
                path.display()
            );
        }
        Ok(PreparedService { plan, config, sessions, network, access, metrics })
    }

    /// The plan, whose settings and credentials were checked.
    pub const fn plan(&self) -> &ServePlan {
        &self.plan
    }
}

/// Keys and token files that users other than the owner and the group can read, with their modes.
fn readable_secrets(access: &AccessConfig) -> Vec<(&Path, u32)> {
    const OTHERS_READ: u32 = 0o004;
    let files = [&access.tls_key, &access.token_file, &access.admin_token_file];
    let mode = |path: &Path| Some(std::fs::metadata(path).ok()?.mode() & 0o777);
    let found = files.into_iter().flatten().filter_map(|path| Some((path.as_path(), mode(path)?)));
    found.filter(|(_, mode)| mode & OTHERS_READ != 0).collect()
}

/// A running service with its listeners.
pub struct RunningService {
    service: Arc<Service>,
    addresses: Vec<Address>,
    admin: Option<Address>,
    metrics: SocketAddr,
    access: AccessConfig,
    shutdown: CancellationToken,
    server: tokio::task::JoinHandle<Result<(), ServerError>>,
    sessions: Option<(Option<String>, tokio::task::JoinHandle<()>)>,
}

impl RunningService {
    /// Binds every address, then forms the first generation.
    ///
    /// # Errors
    /// If an address cannot be bound, or the scheduler cannot be started.
    pub async fn start(prepared: PreparedService) -> Result<Self, ServeError> {
        let running = Self::bind(prepared).await?;
        running.begin()?;
        Ok(running)
    }

    /// Binds every address: that of the public API first, which says most about a port in use.
    ///
    /// # Errors
    /// If an address cannot be bound, or the scheduler cannot be started.
    pub(super) async fn bind(prepared: PreparedService) -> Result<Self, ServeError> {
        let PreparedService { plan, config, sessions, network, access, metrics } = prepared;
        let recorder = install_recorder(if expertd_rank_cuda::BUILT { "cuda" } else { "" });
        start_traces(plan.otlp_endpoint.as_deref())?;
        let service = Service::new(plan.model, plan.cluster, plan.scheduler)?;
        let backend: Arc<dyn Backend> = Arc::clone(&service) as Arc<dyn Backend>;
        let mut server = Server::bind(&config, Arc::clone(&access), Arc::clone(&backend)).await?;
        let endpoint = MetricsPort::bind(metrics, recorder, backend, access, plan.health_timeout)
            .await
            .map_err(|source| ServeError::MetricsBind { address: metrics, source })?;
        let metrics = endpoint.local_address();
        let mut session_server = None;
        if let Some(config) = sessions {
            let address = config.listen.clone().map(|path| Address::Unix(path).to_string());
            let describe = Box::new(|model: &Arc<_>| encoded_model(model));
            let bound = SessionServer::bind(config, Arc::clone(&service), describe)
                .map_err(|source| ServerError::Bind { setting: "session-listen", source })?;
            if let Some(network) = network {
                server.serve_network_sessions(Arc::new(OverNetwork(bound.network(network))));
            }
            session_server = Some((address, bound));
        }
        let (addresses, admin) = (server.addresses(), server.admin_address());
        tokio::spawn(endpoint.run());
        let shutdown = CancellationToken::new();
        let server = tokio::spawn(server.run(shutdown.clone()));
        let sessions =
            session_server.map(|(address, sessions)| (address, tokio::spawn(sessions.run(shutdown.clone()))));
        Ok(RunningService {
            service,
            addresses,
            admin,
            metrics,
            access: plan.access,
            shutdown,
            server,
            sessions,
        })
    }

    /// Forms the first generation.
    ///
    /// # Errors
    /// If the scheduler cannot be started.
    pub(super) fn begin(&self) -> Result<(), ServeError> {
        Ok(self.service.begin()?)
    }

    /// The first public address.
    pub fn address(&self) -> Option<&Address> {
        self.addresses.first()
    }

    /// The service behind the listeners.
    pub const fn service(&self) -> &Arc<Service> {
        &self.service
    }

    /// Prints the service's addresses once it serves.
    pub(super) fn announce(&self) {
        let (service, metrics) = (Arc::clone(&self.service), self.metrics);
        let addresses = self.addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        let admin = self.admin.as_ref().map_or_else(|| "-".to_owned(), ToString::to_string);
        let sessions = self
            .sessions
            .as_ref()
            .and_then(|(address, _)| address.as_ref())
            .map_or_else(String::new, |address| format!(", sessions on {address}"));
        let usage = self.address().map(|address| report::usage(address, metrics, &self.access));
        let loading = Arc::clone(&service);
        // Progress is drawn by its own thread, because a terminal that does not accept output blocks the thread that writes to it.
        let follow = move || report::follow_loading(&loading);
        if let Err(error) = std::thread::Builder::new().name("progress".to_owned()).spawn(follow) {
            tracing::warn!(%error, "cannot start the thread that shows the progress of loading");
        }
        tokio::spawn(async move {
            let mut state = service.watch_state();
            let serving = state.wait_for(|s| *s == ServiceState::Serving).await;
            if serving.is_ok() {
                print(&format!(
                    "ready: listening on {addresses}, admin on {admin}, metrics on http://{metrics}/metrics{sessions}\n{}",
                    usage.unwrap_or_default()
                ));
            }
        });
    }

    /// Waits for a signal, a drain or a failure, and then stops the service.
    pub(super) async fn until_end(self) -> ExitCode {
        drain_on_signals(Arc::clone(&self.service));
        let end = self.service.ended().await;
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

    /// Drains and stops the service: sends all answers, closes connections, reaps ranks.
    pub async fn drain(self) {
        self.service.drain(None).await;
        self.service.ended().await;
        self.stop().await;
    }

    async fn stop(self) {
        progress::stop();
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

fn address(name: &'static str, text: &str) -> Result<Address, ServeError> {
    text.parse().map_err(|source| ServeError::Address { name, source })
}

/// The configuration of the gRPC listeners.
fn server_config(plan: &ServePlan) -> Result<ServerConfig, ServeError> {
    let mut sessions = plan.sessions.as_ref().map_or(0, SessionPlan::descriptors);
    if let (Some(plan), Some(_)) = (&plan.sessions, &plan.network) {
        sessions += plan.agent_descriptors();
    }
    // A connection over a Unix-domain socket has two descriptors.
    let (tcp, unix) = (plan.connections.tcp, 2 * plan.connections.unix + sessions);
    let connections = descriptors::connections(tcp, unix, plan.cluster.shape.ranks as usize)
        .map_err(ServeError::Descriptors)?;
    let listen = plan.listen.split(',').map(|text| address("listen", text.trim()));
    Ok(ServerConfig {
        listen: listen.collect::<Result<_, _>>()?,
        admin: Some(address("admin-listen", &plan.admin_listen)?),
        insecure: plan.access.insecure,
        connections: plan.connections.with_tcp(connections),
        shutdown_grace: SHUTDOWN_GRACE,
        timeouts: ConnectionTimeouts::default(),
    })
}

/// The configuration of the session socket, if there is to be one.
fn session_config(plan: &ServePlan) -> Result<Option<SessionConfig>, ServeError> {
    let Some(sessions) = &plan.sessions else { return Ok(None) };
    // The plan has no other address than one of a Unix-domain socket.
    let listen = match sessions.listen.as_deref().map(|text| address("session-listen", text)).transpose()? {
        Some(Address::Unix(path)) => Some(path),
        _ => None,
    };
    let cluster = &plan.cluster;
    Ok(Some(SessionConfig {
        listen,
        users: sessions.users.clone(),
        limits: sessions.limits,
        spin: cluster.spin,
        spin_after_request: if cluster.shape.is_mixed() { Duration::ZERO } else { cluster.spin },
        spin_between_steps: spin_between_steps(cluster.spin, cluster.usable_cores),
    }))
}

/// The configuration of network sessions, if there are any and this machine can serve them.
fn network_config(plan: &ServePlan) -> Result<Option<NetworkConfig>, ServeError> {
    let Some(network) = &plan.network else { return Ok(None) };
    let found = probe_in_child_process(network.library.as_deref()).map_err(ServeError::Network)?;
    tracing::info!(found, "network sessions are served");
    Ok(Some(network.clone()))
}

/// The address of the metrics endpoint. Beyond loopback it needs tokens, unless the configuration allows it to be open.
fn metrics_address(plan: &ServePlan, access: &Access) -> Result<SocketAddr, ServeError> {
    let address = plan.metrics_listen.parse::<SocketAddr>();
    let address = address.map_err(|_| ServeError::MetricsAddress(plan.metrics_listen.clone()))?;
    if Address::Tcp(address).is_beyond_loopback() && !access.has_tokens() && !plan.access.insecure {
        return Err(ServeError::OpenMetrics(address));
    }
    Ok(address)
}

/// Whether the process was started to survive the end of its terminal, as `nohup` does.
fn ignores_hangup() -> bool {
    const HANGUP: u64 = 1;
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    ignored.is_some_and(|mask| mask & HANGUP != 0)
}

/// Drains the service at SIGTERM or SIGINT, and at SIGHUP unless that is ignored. Another SIGTERM or SIGINT ends it within
/// [`END_AT_ONCE`]; another SIGHUP does not, because a terminal that is closed may send several.
fn drain_on_signals(service: Arc<Service>) {
    let mut signals = Vec::new();
    let hangup = (!ignores_hangup()).then(SignalKind::hangup);
    for kind in [SignalKind::terminate(), SignalKind::interrupt()].into_iter().chain(hangup) {
        match signal(kind) {
            Ok(signal) => signals.push((kind, signal)),
            Err(error) => tracing::warn!(%error, "cannot listen for a signal"),
        }
    }
    tokio::spawn(async move {
        let mut first = true;
        while !signals.is_empty() {
            let received = signals.iter_mut().map(|(_, signal)| Box::pin(signal.recv()));
            let (_, at, _) = futures_util::future::select_all(received).await;
            if first {
                tracing::info!("signal received: draining; a second signal ends the service at once");
                tokio::spawn(service.drain(None));
            } else if signals[at].0 != SignalKind::hangup() {
                tracing::warn!("second signal received: ending at once");
                tokio::spawn(service.drain(Some(Duration::ZERO)));
                tokio::spawn(async {
                    tokio::time::sleep(END_AT_ONCE).await;
                    tell("expertd serve: ended by a second signal before the drain was over");
                    flush_logs();
                    std::process::exit(i32::from(exit::SETUP));
                });
            }
            first = false;
        }
    });
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::fs::{Permissions, set_permissions};
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn secrets_that_everybody_can_read_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, mode| {
            let path = folder.path().join(name);
            std::fs::write(&path, "secret").unwrap();
            set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            Some(path)
        };
        let access = AccessConfig {
            tls_cert: file("cert", 0o644),
            tls_key: file("key", 0o644),
            token_file: file("tokens", 0o640),
            admin_token_file: file("admin", 0o604),
            ..AccessConfig::default()
        };
        let found = readable_secrets(&access);
        assert_eq!(
            found,
            [(folder.path().join("key").as_path(), 0o644), (folder.path().join("admin").as_path(), 0o604)]
        );
    }
}
