//! The credentials that a client shows to a service, and those by which it checks the service.

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use tonic::codegen::http::HeaderValue;
use tonic::codegen::http::uri::Authority;
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Identity};

use super::{ConnectError, chain, endpoint, require_port};

/// Files with credentials. Without any, connections are plaintext and calls anonymous. Files are read when a
/// connection is made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct Credentials {
    /// Certificate authorities of the service, PEM; turns TLS on
    #[cfg_attr(feature = "clap", arg(long = "tls-ca", value_name = "FILE", help_heading = "Credentials"))]
    pub ca: Option<PathBuf>,
    /// The client's certificate chain, PEM; needs its key
    #[cfg_attr(feature = "clap", arg(long = "tls-cert", value_name = "FILE", help_heading = "Credentials"))]
    pub cert: Option<PathBuf>,
    /// The private key of the client's certificate, PEM
    #[cfg_attr(feature = "clap", arg(long = "tls-key", value_name = "FILE", help_heading = "Credentials"))]
    pub key: Option<PathBuf>,
    /// The name in the service's certificate, if it differs from the host of the address
    #[cfg_attr(
        feature = "clap",
        arg(long = "tls-server-name", value_name = "NAME", help_heading = "Credentials")
    )]
    pub server_name: Option<String>,
    /// File with the client's token, alone or as `NAME TOKEN`
    #[cfg_attr(
        feature = "clap",
        arg(long = "token-file", value_name = "FILE", help_heading = "Credentials")
    )]
    pub token_file: Option<PathBuf>,
    /// Send the token to another host without TLS as well
    #[cfg_attr(feature = "clap", arg(long = "insecure", help_heading = "Credentials"))]
    pub insecure: bool,
}

impl Credentials {
    /// The endpoint of an address, with TLS if there are authorities.
    pub(super) fn apply(&self, address: &str) -> Result<Endpoint, ConnectError> {
        if address.starts_with("unix:") {
            return endpoint(address);
        }
        let Some(ca) = &self.ca else {
            let bad = |reason: &str| {
                Err(ConnectError::Address { address: address.to_owned(), reason: reason.to_owned() })
            };
            if address.starts_with("https://") {
                return bad("https needs the service's certificate authority; give --tls-ca");
            }
            if self.cert.is_some() || self.key.is_some() {
                return bad("a client certificate needs TLS; give --tls-ca");
            }
            return endpoint(address);
        };
        require_port(address)?;
        let host = address.trim_start_matches("https://").trim_start_matches("http://");
        let mut tls =
            ClientTlsConfig::new().ca_certificate(Certificate::from_pem(read_pem(ca, "CERTIFICATE")?));
        match (&self.cert, &self.key) {
            (Some(cert), Some(key)) => {
                let (cert, key) = (read_pem(cert, "CERTIFICATE")?, read_pem(key, "PRIVATE KEY")?);
                tls = tls.identity(Identity::from_pem(cert, key));
            }
            (None, None) => {}
            (Some(file), None) | (None, Some(file)) => {
                return Err(unusable(file, "a certificate and its key must be given together"));
            }
        }
        if let Some(name) = &self.server_name {
            tls = tls.domain_name(name);
        }
        endpoint(&format!("https://{host}"))?.tls_config(tls).map_err(|error| unusable(ca, &chain(&error)))
    }

    /// The `authorization` header of calls to `address`, if there is a token.
    pub(super) fn authorization(&self, address: &str) -> Result<Option<HeaderValue>, ConnectError> {
        let Some(file) = &self.token_file else { return Ok(None) };
        if self.ca.is_none() && !self.insecure && is_beyond_loopback(address) {
            let reason = format!(
                "the token would be sent unencrypted to {address}; turn TLS on (--tls-ca), or pass --insecure \
                 (insecure=True) if the network is trusted"
            );
            return Err(unusable(file, &reason));
        }
        let text = String::from_utf8(read(file)?).map_err(|_| unusable(file, "expected text"))?;
        let mut words = text
            .lines()
            .find(|line| !line.trim().is_empty() && !line.starts_with('#'))
            .unwrap_or_default()
            .split_whitespace();
        let token = match (words.next(), words.next()) {
            (Some(token), None) | (Some(_), Some(token)) => token,
            _ => return Err(unusable(file, "expected a token, or NAME TOKEN")),
        };
        let mut value = HeaderValue::try_from(format!("Bearer {token}"))
            .map_err(|_| unusable(file, "the token has characters that a header cannot carry"))?;
        value.set_sensitive(true);
        Ok(Some(value))
    }
}

/// Whether bytes to the address can leave this host. A name may mean any host, except `localhost`.
pub(crate) fn is_beyond_loopback(address: &str) -> bool {
    if address.starts_with("unix:") {
        return false;
    }
    let authority = address.split_once("://").map_or(address, |(_, rest)| rest);
    let Ok(authority) = authority.split('/').next().unwrap_or_default().parse::<Authority>() else {
        return true;
    };
    let host = authority.host();
    let literal = host.trim_start_matches('[').trim_end_matches(']');
    !literal
        .parse::<IpAddr>()
        .map_or_else(|_| host.eq_ignore_ascii_case("localhost"), |ip| ip.to_canonical().is_loopback())
}

fn read(path: &Path) -> Result<Vec<u8>, ConnectError> {
    std::fs::read(path).map_err(|error| unusable(path, &error.to_string()))
}

/// Reads a PEM file that must have a section of this kind. Without the check an authority would be missing without a word.
fn read_pem(path: &Path, kind: &str) -> Result<Vec<u8>, ConnectError> {
    let bytes = read(path)?;
    let text = String::from_utf8_lossy(&bytes);
    if text
        .lines()
        .any(|line| line.starts_with("-----BEGIN ") && line.trim_end().ends_with(&format!("{kind}-----")))
    {
        return Ok(bytes);
    }
    Err(unusable(path, &format!("expected a PEM file with a section `{kind}`, found none")))
}

fn unusable(file: &Path, reason: &str) -> ConnectError {
    ConnectError::Credentials { file: file.display().to_string(), reason: reason.to_owned() }
}

#[cfg(test)]
mod tests;
