//! Why a service could not be started, and the exit code of each cause.

use std::net::SocketAddr;
use std::process::ExitCode;

use expertd_core::listen::AddressError;
use expertd_grpc::{AccessError, ServerError};
use expertd_telemetry::TraceError;

use crate::exit;

/// Why a service could not be started.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum ServeError {
    #[error("{name}: {source}")]
    Address { name: &'static str, source: AddressError },
    #[error(
        "metrics-listen: `{0}` is not IP:PORT; use 127.0.0.1:9464, or 0.0.0.0:9464 for scrapers on other hosts"
    )]
    MetricsAddress(String),
    #[error(
        "metrics-listen: cannot bind {address}: {source}; choose another --metrics-listen (port 0 picks a free one){}",
        hint(source.kind() == std::io::ErrorKind::AddrInUse)
    )]
    MetricsBind { address: SocketAddr, source: std::io::Error },
    #[error(
        "metrics-listen: {0} can be reached from other hosts, and scrapes need a token there; give --token-file or \
         --admin-token-file, use 127.0.0.1, or pass --insecure if the network is trusted"
    )]
    OpenMetrics(SocketAddr),
    #[error(transparent)]
    Access(#[from] AccessError),
    #[error(transparent)]
    Traces(#[from] TraceError),
    #[error("network-listen: {0}")]
    Network(String),
    #[error("{0}")]
    Descriptors(String),
    #[error("{source}{hint}", source = .0, hint = hint(is_in_use(.0)))]
    Server(#[from] ServerError),
    #[error(transparent)]
    Service(#[from] expertd_core::steps::StartError),
}

fn is_in_use(error: &ServerError) -> bool {
    matches!(error, ServerError::Bind { source, .. } if source.is_in_use())
}

/// What to do if another service of this host has the address.
const fn hint(in_use: bool) -> &'static str {
    if in_use {
        "; two services on one host need different --listen, --admin-listen and --metrics-listen"
    } else {
        ""
    }
}

impl ServeError {
    pub(super) fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            ServeError::Address { .. }
            | ServeError::MetricsAddress(_)
            | ServeError::OpenMetrics(_)
            | ServeError::Access(_)
            | ServeError::Traces(_)
            | ServeError::Descriptors(_)
            | ServeError::Network(_)
            | ServeError::Server(
                ServerError::Plaintext(_) | ServerError::AdminWithoutTokens(_) | ServerError::NoAddress,
            ) => exit::USAGE,
            ServeError::MetricsBind { .. } | ServeError::Server(_) => exit::BIND,
            ServeError::Service(_) => exit::SETUP,
        })
    }
}
