//! The configuration of a client of several services, and why it could not be created.

use std::time::Duration;

use super::Limits;
use crate::transport::Credentials;

/// How several services are found and watched.
#[derive(Clone, Debug)]
pub struct FleetConfig {
    /// TLS and tokens, the same for all services.
    pub credentials: Credentials,
    /// Name of the model; may be empty if every service has only one.
    pub model: String,
    /// Interval between probes of a service's health.
    pub probe_interval: Duration,
    /// Time limit of a probe. A service that misses one is avoided, one that misses two in a row is lost. Connecting has
    /// twice this time.
    pub probe_timeout: Duration,
    /// Interval between look-ups of host names.
    pub lookup_interval: Duration,
    /// Time for which connecting waits until a service serves.
    pub connect_patience: Duration,
    /// Time for which a call without a deadline looks for a service.
    pub patience: Duration,
    /// Limits of the choice.
    pub limits: Limits,
    /// How network sessions with the services are opened; `None`: rows travel over gRPC. The credentials are those of the services.
    #[cfg(feature = "network")]
    pub network: Option<crate::network::NetworkOptions>,
}

impl Default for FleetConfig {
    fn default() -> FleetConfig {
        FleetConfig {
            credentials: Credentials::default(),
            model: String::new(),
            probe_interval: Duration::from_millis(500),
            probe_timeout: Duration::from_millis(750),
            lookup_interval: Duration::from_secs(5),
            connect_patience: Duration::from_secs(30),
            patience: Duration::from_secs(30),
            limits: Limits::default(),
            #[cfg(feature = "network")]
            network: None,
        }
    }
}

/// An error that prevents a client of several services from being created.
#[derive(Debug, thiserror::Error)]
pub enum FleetError {
    /// The list of addresses is empty.
    #[error(
        "no address was given; give HOST:PORT, several separated by commas, or a name with several addresses"
    )]
    NoAddress,
    /// Network sessions cannot be opened from here.
    #[cfg(feature = "network")]
    #[error("{0}")]
    Network(String),
    /// No service answered in time.
    #[error("none of the services serves: {0}")]
    NoneServes(String),
}
