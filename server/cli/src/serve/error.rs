//! Why a service could not be started, and the exit code of each cause.

use std::net::SocketAddr;
use std::process::ExitCode;

use expertd_router::api;
use expertd_router::telemetry::TraceError;

use super::exit;

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
    pub(super) fn exit_code(&self) -> ExitCode {
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
