//! The service's listeners.

use std::sync::Arc;
use std::time::Duration;

use expertd_proto::transport::CONTROL_MESSAGE_BYTES;
use expertd_proto::v1::admin_server::AdminServer;
use expertd_proto::v1::moe_server::MoeServer;
use expertd_proto::v1::network_server::NetworkServer;
use hyper_util::service::TowerToHyperService;
use metrics::gauge;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

use expertd_core::listen::{Address, BindError};

use super::calls::{Public, Services};
use super::connections::Connections;
use super::listener::Listener;
use super::places::{ConnectionLimits, ConnectionPlaces};
use crate::access::Access;
use crate::bytes::activity::ConnectionTimeouts;
use crate::bytes::budget::Budget;
use crate::service::admin::AdminService;
use crate::service::health;
use crate::service::moe::MoeService;
use crate::service::network::{NetworkOpener, NetworkService};
use expertd_core::backend::Backend;
use expertd_telemetry::{RequestMetrics, names};

/// Largest number of connections to the admin listener.
const ADMIN_CONNECTIONS: usize = 32;
/// Largest number of concurrent calls on an admin connection.
const ADMIN_STREAMS: u32 = 32;
/// Largest number of request bytes that calls to Admin may hold: a few placements of the largest size.
const ADMIN_BYTES: usize = 4 * CONTROL_MESSAGE_BYTES;
/// Interval at which the gauges of bytes in flight are set.
const GAUGE_ROUND: Duration = Duration::from_millis(250);
/// Longest idle time of an admin connection: a drain answers only at its end.
const MAX_DRAIN: Duration = Duration::from_secs(24 * 3600);
/// Mode of a public Unix-domain socket: the service's user and group may connect.
const PUBLIC_MODE: u32 = 0o660;
/// Mode of Admin's Unix-domain socket: only the service's user may connect.
const ADMIN_MODE: u32 = 0o600;

/// Configuration of the listeners.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// Public addresses, one or more.
    pub listen: Vec<Address>,
    /// Address of Admin: a Unix-domain socket, or a TCP address if there are tokens for it.
    pub admin: Option<Address>,
    /// Whether TCP listeners beyond loopback may use plaintext.
    pub insecure: bool,
    /// Limits on the number of connections.
    pub connections: ConnectionLimits,
    /// Time that calls have to end after the service begins to shut down.
    pub shutdown_grace: Duration,
    /// Time limits of connections.
    pub timeouts: ConnectionTimeouts,
}

/// Why the server could not be set up.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum ServerError {
    #[error("{setting}: {source}")]
    Bind { setting: &'static str, source: BindError },
    #[error(
        "{0} can be reached from other hosts and would speak plaintext; give --tls-cert and --tls-key, listen on \
         127.0.0.1 or unix:/PATH, or pass --insecure if the network is trusted"
    )]
    Plaintext(Address),
    #[error(
        "Admin on the TCP address {0} needs tokens; give --admin-token-file, or serve it on a Unix-domain socket with \
         --admin-listen unix:/PATH"
    )]
    AdminWithoutTokens(Address),
    #[error("no address to listen on was given; use --listen")]
    NoAddress,
    #[error("reflection could not be set up: {0}")]
    Reflection(#[from] tonic_reflection::server::Error),
}

/// A server with all its listeners bound, not yet accepting.
pub struct Server {
    public: Vec<(Address, Listener)>,
    admin: Option<(Address, Listener)>,
    backend: Arc<dyn Backend>,
    network: Option<Arc<dyn NetworkOpener>>,
    access: Arc<Access>,
    connections: ConnectionLimits,
    timeouts: ConnectionTimeouts,
    grace: Duration,
}

impl ServerConfig {
    /// Checks the addresses against the credentials without opening them.
    ///
    /// # Errors
    /// [`ServerError`] if there is no address, or one that must not be served with these credentials.
    pub fn check(&self, access: &Access) -> Result<(), ServerError> {
        if self.listen.is_empty() {
            return Err(ServerError::NoAddress);
        }
        let mut open = self.listen.iter().chain(&self.admin).filter(|address| address.is_beyond_loopback());
        if let Some(address) = open.next()
            && !access.has_tls()
            && !self.insecure
        {
            return Err(ServerError::Plaintext(address.clone()));
        }
        match &self.admin {
            Some(address @ Address::Tcp(_)) if !access.has_admin_tokens() => {
                Err(ServerError::AdminWithoutTokens(address.clone()))
            }
            _ => Ok(()),
        }
    }
}

impl Server {
    /// Binds all listeners.
    ///
    /// # Errors
    /// [`ServerError`] if an address cannot be bound or must not be.
    pub async fn bind(
        config: &ServerConfig,
        access: Arc<Access>,
        backend: Arc<dyn Backend>,
    ) -> Result<Server, ServerError> {
        config.check(&access)?;
        let mut public = Vec::new();
        for address in &config.listen {
            public.push(bind("listen", address, PUBLIC_MODE).await?);
        }
        let admin = match &config.admin {
            Some(address) => Some(bind("admin-listen", address, ADMIN_MODE).await?),
            None => None,
        };
        let ServerConfig { connections, timeouts, shutdown_grace: grace, .. } = *config;
        Ok(Server { public, admin, backend, network: None, access, connections, timeouts, grace })
    }

    /// Serves network sessions as well.
    pub fn serve_network_sessions(&mut self, sessions: Arc<dyn NetworkOpener>) {
        self.network = Some(sessions);
    }

    /// The public addresses, with the ports that the system chose.
    pub fn addresses(&self) -> Vec<Address> {
        self.public.iter().map(|(address, _)| address.clone()).collect()
    }

    /// The address of Admin, with the port that the system chose.
    pub fn admin_address(&self) -> Option<Address> {
        self.admin.as_ref().map(|(address, _)| address.clone())
    }

    /// Serves until `shutdown`, then waits up to the grace period for calls to end, and returns when all connections are closed.
    ///
    /// # Errors
    /// [`ServerError::Reflection`] only.
    pub async fn run(self, shutdown: CancellationToken) -> Result<(), ServerError> {
        let limits = self.backend.model().limits;
        let budget = Budget::new(limits.max_bytes_in_flight, limits.max_message_bytes);
        let (reporter, health) = tonic_health::server::health_reporter();
        let end = CancellationToken::new();
        tokio::spawn(health::follow(reporter, Arc::clone(&self.backend), end.clone()));

        let reflection = || {
            tonic_reflection::server::Builder::configure()
                .register_encoded_file_descriptor_set(expertd_proto::FILE_DESCRIPTOR_SET)
                .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        };
        let shared = Routes::new(health)
            .add_service(reflection().build_v1()?)
            .add_service(reflection().build_v1alpha()?)
            .prepare();
        let access = self.access;
        let metrics = Arc::new(RequestMetrics::new("Forward"));
        let moe = MoeServer::new(MoeService::new(Arc::clone(&self.backend), Arc::clone(&metrics)))
            .max_decoding_message_size(limits.max_message_bytes)
            .max_encoding_message_size(usize::MAX);
        let network = NetworkService { backend: Arc::clone(&self.backend), sessions: self.network };
        let services = Services {
            routes: TowerToHyperService::new(
                shared.clone().add_service(moe).add_service(NetworkServer::new(network)).prepare(),
            ),
            access: Arc::clone(&access),
            budget: Arc::clone(&budget),
            public: Some(Public { backend: Arc::clone(&self.backend), metrics, closing: shutdown.clone() }),
        };
        let public = Connections::new(
            services,
            ConnectionPlaces::new(self.connections),
            self.timeouts,
            limits.max_streams_per_connection,
            shutdown.clone(),
            end.clone(),
        );
        let admin = AdminService { backend: self.backend };
        let services = Services {
            routes: TowerToHyperService::new(shared.add_service(AdminServer::new(admin)).prepare()),
            access: Arc::clone(&access),
            budget: Budget::new(ADMIN_BYTES, CONTROL_MESSAGE_BYTES),
            public: None,
        };
        let admin = Connections::new(
            services,
            ConnectionPlaces::new(ConnectionLimits::for_tcp(ADMIN_CONNECTIONS)),
            // The drain has a time limit of its own.
            ConnectionTimeouts { idle: MAX_DRAIN, ..self.timeouts },
            ADMIN_STREAMS,
            shutdown.clone(),
            end.clone(),
        );

        let reloading = tokio::spawn(access.watch());
        let measuring = tokio::spawn(measure(budget));
        for (_, listener) in self.public {
            tokio::spawn(Arc::clone(&public).accept(listener));
        }
        if let Some((_, listener)) = self.admin {
            tokio::spawn(Arc::clone(&admin).accept(listener));
        }

        shutdown.cancelled().await;
        let closed = async { tokio::join!(public.closed(), admin.closed()) };
        let in_time = tokio::time::timeout(self.grace, closed).await.is_ok();
        end.cancel();
        if !in_time {
            tracing::info!("ending the remaining connections");
            tokio::join!(public.closed(), admin.closed());
        }
        reloading.abort();
        measuring.abort();
        Ok(())
    }
}

/// Keeps the gauges of bytes in flight up to date.
async fn measure(budget: Arc<Budget>) {
    let mut rounds = tokio::time::interval(GAUGE_ROUND);
    loop {
        rounds.tick().await;
        gauge!(names::BYTES_IN_FLIGHT).set(budget.held() as f64);
        gauge!(names::BYTES_IN_FLIGHT_LIMIT).set(budget.total() as f64);
    }
}

/// Binds the address of `setting`.
async fn bind(
    setting: &'static str,
    address: &Address,
    mode: u32,
) -> Result<(Address, Listener), ServerError> {
    let failed = |source| ServerError::Bind { setting, source };
    let listener = Listener::bind(address, mode).await.map_err(failed)?;
    let system = |source| BindError::System { address: address.clone(), source };
    listener.deny_passed_descriptors();
    let bound = listener.address().map_err(system).map_err(failed)?;
    Ok((bound, listener))
}
