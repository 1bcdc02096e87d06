//! The listeners of the service, put together.

use std::sync::Arc;
use std::time::Duration;

use expertd_proto::v1::admin_server::AdminServer;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

use super::address::{Address, BindError, Listener};
use super::connections::Connections;
use super::front::Services;
use crate::api::framing::budget::{Budget, Patience};
use crate::api::service::admin::AdminService;
use crate::api::service::health;
use crate::backend::Backend;

/// Connections to the admin listener at once.
const ADMIN_CONNECTIONS: u32 = 32;
/// Calls on one of them.
const ADMIN_STREAMS: u32 = 32;

/// Where and how to listen.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// Public addresses, one or more.
    pub listen: Vec<Address>,
    /// Where Admin is served: a loopback address or a Unix-domain socket.
    pub admin: Option<Address>,
    /// How long calls may take to end once the service shuts down.
    pub shutdown_grace: Duration,
    /// How long connections may leave things undone.
    pub patience: Patience,
}

/// Why the server could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// An address could not be bound.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// Admin would be open to the network.
    #[error(
        "the admin address {0} is not a loopback address: whoever reaches it can drain the service; use 127.0.0.1 or unix:/PATH"
    )]
    AdminNotLoopback(Address),
    /// There is nothing to listen on.
    #[error("there is no address to listen on; give --listen")]
    NoAddress,
    /// The protocol's descriptors are broken.
    #[error("reflection could not be set up: {0}")]
    Reflection(#[from] tonic_reflection::server::Error),
}

/// A server with all its listeners bound, not yet accepting.
pub struct Server {
    public: Vec<(Address, Listener)>,
    admin: Option<(Address, Listener)>,
    backend: Arc<dyn Backend>,
    patience: Patience,
    grace: Duration,
}

impl Server {
    /// Binds all listeners.
    ///
    /// # Errors
    /// [`ServerError`] if an address cannot be bound or must not be.
    pub async fn bind(config: &ServerConfig, backend: Arc<dyn Backend>) -> Result<Server, ServerError> {
        if config.listen.is_empty() {
            return Err(ServerError::NoAddress);
        }
        if let Some(Address::Tcp(address)) = &config.admin
            && !address.ip().is_loopback()
        {
            return Err(ServerError::AdminNotLoopback(Address::Tcp(*address)));
        }
        let mut public = Vec::new();
        for address in &config.listen {
            public.push(bind(address).await?);
        }
        let admin = match &config.admin {
            Some(address) => Some(bind(address).await?),
            None => None,
        };
        Ok(Server { public, admin, backend, patience: config.patience, grace: config.shutdown_grace })
    }

    /// The public addresses, with the ports that the system picked.
    #[must_use]
    pub fn addresses(&self) -> Vec<Address> {
        self.public.iter().map(|(address, _)| address.clone()).collect()
    }

    /// The address of Admin, with the port that the system picked.
    #[must_use]
    pub fn admin_address(&self) -> Option<Address> {
        self.admin.as_ref().map(|(address, _)| address.clone())
    }

    /// Serves until `shutdown`, then lets calls end for the grace period, and returns when every connection is closed.
    ///
    /// # Errors
    /// [`ServerError::Reflection`] only.
    pub async fn run(self, shutdown: CancellationToken) -> Result<(), ServerError> {
        let limits = self.backend.model().limits;
        let budget = Budget::new(limits.max_bytes_in_flight, limits.max_message_bytes);
        let (reporter, health) = tonic_health::server::health_reporter();
        let follower = tokio::spawn(health::follow(reporter, self.backend.watch_state()));

        let end = CancellationToken::new();
        let shared =
            Routes::new(health).add_service(reflection_v1()?).add_service(reflection_v1alpha()?).prepare();
        let services = Services::public(
            shared.clone(),
            Arc::clone(&self.backend),
            Arc::clone(&budget),
            shutdown.clone(),
        );
        let public = Connections::new(
            services,
            limits.max_connections,
            limits.max_streams_per_connection,
            shutdown.clone(),
            end.clone(),
        );
        let admin_routes =
            shared.add_service(AdminServer::new(AdminService { backend: self.backend })).prepare();
        let admin = Connections::new(
            Services::control(admin_routes),
            ADMIN_CONNECTIONS,
            ADMIN_STREAMS,
            shutdown.clone(),
            end.clone(),
        );

        tokio::spawn(Arc::clone(&public).watch(self.patience, Some(budget)));
        tokio::spawn(Arc::clone(&admin).watch(self.patience, None));
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
            tracing::info!("ending the connections that are still open");
            tokio::join!(public.closed(), admin.closed());
        }
        follower.abort();
        Ok(())
    }
}

async fn bind(address: &Address) -> Result<(Address, Listener), ServerError> {
    let listener = Listener::bind(address).await?;
    let bound =
        listener.address().map_err(|source| BindError::System { address: address.clone(), source })?;
    Ok((bound, listener))
}

fn reflection() -> tonic_reflection::server::Builder<'static> {
    tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(expertd_proto::FILE_DESCRIPTOR_SET)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
}

fn reflection_v1() -> Result<
    tonic_reflection::server::v1::ServerReflectionServer<impl tonic_reflection::server::v1::ServerReflection>,
    ServerError,
> {
    Ok(reflection().build_v1()?)
}

fn reflection_v1alpha() -> Result<
    tonic_reflection::server::v1alpha::ServerReflectionServer<
        impl tonic_reflection::server::v1alpha::ServerReflection,
    >,
    ServerError,
> {
    Ok(reflection().build_v1alpha()?)
}
