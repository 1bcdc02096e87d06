//! Who may call: TLS, client certificates, bearer tokens, users of this host.
//!
//! * TCP listeners: if a token file or a client CA is configured, a call needs a token of that file or a certificate of that
//!   CA. A valid token names the client; without a token the certificate does.
//! * Unix-domain sockets: the socket's mode decides who may connect, and the kernel reports the peer's user. A token is
//!   optional and names the client.
//! * Admin: the service's own user or root over its Unix-domain socket; over TCP a token of the admin token file.
//!
//! Files are reloaded when they change. If a changed file cannot be used, its previous content stays in force.

mod expiry;
mod files;
mod tls;
pub(super) mod tokens;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use http::HeaderMap;
use metrics::{counter, gauge};

use self::files::Watched;
pub(crate) use self::tls::peer_name;
pub(crate) use self::tls::{Protocol, ServerTls};
use self::tokens::Tokens;
use expertd_core::failure::Failure;
use expertd_telemetry::{names, progress};

/// Interval at which files are checked for changes.
const RELOAD_ROUND: Duration = Duration::from_secs(1);

/// Files with credentials. All are optional.
#[derive(Clone, Debug, Default)]
pub struct AccessConfig {
    /// The server's certificate chain, PEM; needs `tls_key`.
    pub tls_cert: Option<PathBuf>,
    /// The server's private key, PEM.
    pub tls_key: Option<PathBuf>,
    /// Certificate authorities of clients, PEM.
    pub tls_client_ca: Option<PathBuf>,
    /// DNS names of client certificates that may call; empty: every certificate of the authorities.
    pub tls_client_names: Vec<String>,
    /// Tokens of clients.
    pub token_file: Option<PathBuf>,
    /// Tokens for Admin over TCP.
    pub admin_token_file: Option<PathBuf>,
    /// Whether plaintext beyond loopback is allowed.
    pub insecure: bool,
    /// Names beside `localhost` under which processes of this host may ask the metrics port.
    pub metrics_hosts: Vec<String>,
}

/// Credentials that cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum AccessError {
    #[error("cannot read {}: {source}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{}: {reason}", path.display())]
    Contents { path: PathBuf, reason: String },
    #[error("{0}")]
    Settings(&'static str),
}

/// Identity of a connection's peer according to the kernel or TLS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Peer {
    /// A process of this user on this host.
    User(u32),
    /// A client certificate that the authorities signed; `Err` with its names if none of them may call.
    Certificate(Result<Arc<str>, String>),
    /// Only the address is known.
    Unknown,
}

/// The token that let a call in, for calls that last.
#[derive(Clone)]
pub(crate) struct Pass {
    access: Arc<Access>,
    digest: [u8; 32],
    client: Arc<str>,
    /// The tokens among which this one was last found.
    found_in: Option<Arc<Tokens>>,
}

impl Pass {
    /// Whether the token file still gives the token to this client.
    pub(crate) fn is_valid(&mut self) -> bool {
        let Some(tokens) = self.access.tokens.as_ref().map(Watched::now) else { return true };
        if self.found_in.as_ref().is_some_and(|found_in| Arc::ptr_eq(found_in, &tokens)) {
            return true;
        }
        let is_known = tokens.name_of(&self.digest).is_some_and(|client| client == self.client);
        self.found_in = is_known.then_some(tokens);
        is_known
    }
}

/// The current credentials.
pub struct Access {
    tls: Option<Watched<ServerTls>>,
    tokens: Option<Watched<Tokens>>,
    admin_tokens: Option<Watched<Tokens>>,
    client_certificates: bool,
    client_names: Vec<String>,
    metrics_hosts: Vec<String>,
}

impl Access {
    /// Reads the files.
    ///
    /// # Errors
    /// [`AccessError`] if a file cannot be used or a required setting is missing.
    pub fn load(config: &AccessConfig) -> Result<Access, AccessError> {
        let tls = match (&config.tls_cert, &config.tls_key) {
            (Some(cert), Some(key)) => {
                let (cert, key) = (cert.clone(), key.clone());
                let authorities = config.tls_client_ca.clone();
                let optional = config.token_file.is_some();
                let files = [Some(cert.clone()), Some(key.clone()), authorities.clone()];
                Some(Watched::load(files.into_iter().flatten().collect(), move || {
                    ServerTls::load(&cert, &key, authorities.as_deref(), optional)
                })?)
            }
            (None, None) => None,
            _ => return Err(AccessError::Settings("--tls-cert and --tls-key must be given together")),
        };
        if config.tls_client_ca.is_some() && tls.is_none() {
            return Err(AccessError::Settings("--tls-client-ca needs --tls-cert and --tls-key"));
        }
        if !config.tls_client_names.is_empty() && config.tls_client_ca.is_none() {
            return Err(AccessError::Settings("--tls-client-names needs --tls-client-ca"));
        }
        let tokens = |path: &Option<PathBuf>| {
            let Some(path) = path.clone() else { return Ok(None) };
            Watched::load(vec![path.clone()], move || Tokens::load(&path)).map(Some)
        };
        Ok(Access {
            tls,
            tokens: tokens(&config.token_file)?,
            admin_tokens: tokens(&config.admin_token_file)?,
            client_certificates: config.tls_client_ca.is_some(),
            client_names: config.tls_client_names.clone(),
            metrics_hosts: config.metrics_hosts.clone(),
        })
    }

    /// Reloads files when they change, until the future is dropped.
    pub async fn watch(self: Arc<Self>) {
        // Counters start at 0, so that a rate includes the first increment.
        for result in ["ok", "error"] {
            counter!(names::CREDENTIAL_RELOADS_TOTAL, "result" => result).increment(0);
        }
        let mut rounds = tokio::time::interval(RELOAD_ROUND);
        rounds.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let needed = progress::need("the task that reloads credentials");
        loop {
            rounds.tick().await;
            needed.tick();
            let this = Arc::clone(&self);
            // Files may be on a network, where reading can block.
            let _ = tokio::task::spawn_blocking(move || {
                this.tls.iter().for_each(Watched::refresh);
                this.tokens.iter().for_each(Watched::refresh);
                this.admin_tokens.iter().for_each(Watched::refresh);
            })
            .await;
        }
    }

    /// Records when the certificate in force expires.
    pub(crate) fn record_expiry(&self) {
        if let Some(expires) = self.tls().and_then(|tls| tls.expires()) {
            gauge!(names::CERTIFICATE_EXPIRES_SECONDS).set(expires as f64);
        }
    }

    /// The current TLS configuration, if there is one.
    pub(crate) fn tls(&self) -> Option<Arc<ServerTls>> {
        self.tls.as_ref().map(Watched::now)
    }

    /// Whether TCP listeners speak TLS.
    pub fn has_tls(&self) -> bool {
        self.tls.is_some()
    }

    /// Whether calls over TCP need credentials.
    pub fn required(&self) -> bool {
        self.tokens.is_some() || self.client_certificates
    }

    /// Whether there are tokens of any kind.
    pub fn has_tokens(&self) -> bool {
        self.tokens.is_some() || self.admin_tokens.is_some()
    }

    /// Whether Admin may be served over TCP.
    pub fn has_admin_tokens(&self) -> bool {
        self.admin_tokens.is_some()
    }

    /// The peer that a client certificate identifies.
    pub(crate) fn certificate_peer(&self, names: Vec<String>) -> Peer {
        let accepted = |name: &&String| self.client_names.is_empty() || self.client_names.contains(name);
        Peer::Certificate(match names.iter().find(accepted) {
            Some(name) => Ok(Arc::from(name.as_str())),
            None if self.client_names.is_empty() => Ok(Arc::from("certificate")),
            None => Err(names.join(", ")),
        })
    }

    /// The name of a client of the public API; `None` where no credentials are configured.
    pub(crate) fn client(&self, headers: &HeaderMap, peer: &Peer) -> Result<Option<Arc<str>>, Failure> {
        if let (Some(tokens), Some(given)) = (&self.tokens, bearer(headers)) {
            return match tokens.now().name(given?) {
                Some(name) => Ok(Some(name)),
                None => Err(Failure::Unauthenticated("the token is not known to the service")),
            };
        }
        match peer {
            Peer::User(user) => Ok(Some(Arc::from(format!("uid:{user}")))),
            Peer::Certificate(Ok(name)) => Ok(Some(Arc::clone(name))),
            Peer::Certificate(Err(_)) => {
                Err(Failure::NotAllowed("the client certificate has no name that may call"))
            }
            Peer::Unknown if self.tokens.is_some() => Err(Failure::Unauthenticated(
                "a token is required; send the header `authorization: Bearer TOKEN`",
            )),
            Peer::Unknown if self.client_certificates => {
                Err(Failure::Unauthenticated("a client certificate is required"))
            }
            Peer::Unknown => Ok(None),
        }
    }

    /// The token of a call that was let in as `client`; `None` if it was let in without one.
    pub(crate) fn pass(self: &Arc<Self>, headers: &HeaderMap, client: &Arc<str>) -> Option<Pass> {
        self.tokens.as_ref()?;
        let digest = tokens::hash(bearer(headers)?.ok()?);
        Some(Pass { access: Arc::clone(self), digest, client: Arc::clone(client), found_in: None })
    }

    /// The name of a caller of Admin.
    pub(crate) fn admin(&self, headers: &HeaderMap, peer: &Peer) -> Result<Arc<str>, Failure> {
        if let Peer::User(user) = peer {
            let own = rustix::process::geteuid().as_raw();
            return match *user == own || *user == 0 {
                true => Ok(Arc::from(format!("uid:{user}"))),
                false => Err(Failure::NotAllowed("Admin is for the service's own user and root")),
            };
        }
        let Some(given) = bearer(headers) else {
            return Err(Failure::Unauthenticated(
                "Admin needs a token over TCP; send the header `authorization: Bearer TOKEN`",
            ));
        };
        let given = given?;
        if let Some(name) = self.admin_tokens.as_ref().and_then(|tokens| tokens.now().name(given)) {
            return Ok(name);
        }
        match self.tokens.as_ref().and_then(|tokens| tokens.now().name(given)) {
            Some(_) => Err(Failure::NotAllowed("the token is not for Admin")),
            None => Err(Failure::Unauthenticated("the token is not known to the service")),
        }
    }

    /// Whether a setting gives this host the name.
    pub(crate) fn is_metrics_host(&self, name: &str) -> bool {
        self.metrics_hosts.iter().any(|host| host.eq_ignore_ascii_case(name))
    }

    /// Whether a scrape of `/metrics` from beyond loopback has a token of either file.
    pub(crate) fn may_scrape(&self, headers: &HeaderMap) -> bool {
        let Some(Ok(given)) = bearer(headers) else { return false };
        [&self.tokens, &self.admin_tokens]
            .into_iter()
            .flatten()
            .any(|tokens| tokens.now().name(given).is_some())
    }
}

/// The token of an `authorization` header, if there is one.
fn bearer(headers: &HeaderMap) -> Option<Result<&[u8], Failure>> {
    let value = headers.get(http::header::AUTHORIZATION)?.as_bytes();
    Some(match value.split_first_chunk::<7>() {
        Some((scheme, token)) if scheme.eq_ignore_ascii_case(b"bearer ") => Ok(token.trim_ascii()),
        _ => Err(Failure::Unauthenticated("the authorization header must be `Bearer TOKEN`")),
    })
}

#[cfg(test)]
mod tests;
