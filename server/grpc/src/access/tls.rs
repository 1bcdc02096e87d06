//! TLS configuration of the listeners.

use std::path::Path;
use std::sync::Arc;

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use tokio_rustls::TlsAcceptor;

use super::AccessError;
use super::expiry::first_expiry;
use super::files::read;

/// Protocol inside TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protocol {
    /// gRPC.
    Http2,
    /// The metrics endpoint.
    Http1,
}

/// A server certificate with its key, and the rules for client certificates.
pub(crate) struct ServerTls {
    http2: Arc<ServerConfig>,
    http1: Arc<ServerConfig>,
    expires: Option<i64>,
}

impl ServerTls {
    /// Makes the configuration. Client certificates are requested if there are `authorities`, and may be missing if `optional`.
    pub(super) fn load(
        cert: &Path,
        key: &Path,
        authorities: Option<&Path>,
        optional: bool,
    ) -> Result<ServerTls, AccessError> {
        let chain = certificates(cert)?;
        let expires = first_expiry(&chain);
        let contents = |path: &Path, reason: String| AccessError::Contents { path: path.to_owned(), reason };
        let private = PrivateKeyDer::from_pem_slice(&read(key)?)
            .map_err(|error| contents(key, format!("expected a private key in PEM: {error}")))?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let unusable = |error: rustls::Error| {
            contents(cert, format!("this certificate does not match the key of {}: {error}", key.display()))
        };
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(unusable)?;
        let builder = match authorities {
            None => builder.with_no_client_auth(),
            Some(path) => {
                let mut roots = RootCertStore::empty();
                for authority in certificates(path)? {
                    roots.add(authority).map_err(|error| contents(path, error.to_string()))?;
                }
                let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
                let verifier = if optional { verifier.allow_unauthenticated() } else { verifier };
                let verifier = verifier.build().map_err(|error| contents(path, error.to_string()))?;
                builder.with_client_cert_verifier(verifier)
            }
        };
        let mut config = builder.with_single_cert(chain, private).map_err(unusable)?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        let http1 = Arc::new(config.clone());
        config.alpn_protocols = vec![b"h2".to_vec()];
        Ok(ServerTls { http2: Arc::new(config), http1, expires })
    }

    /// Unix time in seconds at which the first certificate of the chain expires.
    pub(super) const fn expires(&self) -> Option<i64> {
        self.expires
    }

    /// The acceptor of handshakes for a protocol.
    pub(crate) fn acceptor(&self, protocol: Protocol) -> TlsAcceptor {
        TlsAcceptor::from(Arc::clone(match protocol {
            Protocol::Http2 => &self.http2,
            Protocol::Http1 => &self.http1,
        }))
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, AccessError> {
    let bytes = read(path)?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes).collect();
    let bad = |reason: String| AccessError::Contents { path: path.to_owned(), reason };
    let found = found.map_err(|error| bad(format!("expected certificates in PEM: {error}")))?;
    if found.is_empty() {
        return Err(bad("expected certificates in PEM, found none".to_owned()));
    }
    Ok(found)
}

/// The DNS names of a client certificate, which the handshake has verified.
pub(crate) fn peer_name(certificate: &CertificateDer<'_>) -> Vec<String> {
    match webpki::EndEntityCert::try_from(certificate) {
        Ok(certificate) => certificate.valid_dns_names().map(str::to_owned).collect(),
        Err(_) => Vec::new(),
    }
}
