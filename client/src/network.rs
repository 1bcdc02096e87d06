//! Network sessions: sessions of clients on other hosts, whose rows travel by one-sided writes. `docs/network.md` is the page for them.
//!
//! An open one is a [`Session`] like those of the same host: the same calls, buffers and answers.

use std::net::{IpAddr, ToSocketAddrs as _, UdpSocket};
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use expertd_network::wire::VERSION;
use expertd_network::{Card, ClientEnd, End, Library, NetworkError, Opened, Transports, device_of};
use expertd_proto::retry_delay;
use expertd_proto::transport::CONTROL_MESSAGE_BYTES;
use expertd_proto::v1::moe_client::MoeClient;
use expertd_proto::v1::network_client::NetworkClient;
use expertd_proto::v1::network_session_response::Message;
use expertd_proto::v1::{
    GetModelRequest, NetworkSessionOpened, NetworkSessionRequest, NetworkSessionResponse, OpenNetworkSession,
};
use expertd_session::{Session, SessionError, SessionOptions};
use prost::Message as _;
use tokio::sync::{mpsc as channel, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming};

use crate::connection_loss;
use crate::transport::{self, Channel, ConnectError, Credentials, is_beyond_loopback};

/// Interval of messages that say that the client lives.
const ALIVE: Duration = Duration::from_secs(30);

/// How a network session is opened.
#[derive(Clone, Debug, Default)]
pub struct NetworkOptions {
    /// Sizes and times, as of sessions on the same host.
    pub session: SessionOptions,
    /// Credentials of the call that opens the session. Beyond loopback they must allow plaintext (`insecure`): rows of network sessions
    /// are neither encrypted nor authenticated.
    pub credentials: Credentials,
    /// NIXL's library or its folder; `None` for `EXPERTD_NIXL` and the system's linker.
    pub library: Option<PathBuf>,
}

/// Opens a network session with the service whose public API is at `address`. The session ends when it is dropped.
///
/// # Errors
/// If NIXL is missing, the service cannot be reached or refuses the session, or rows would leave this host without permission.
pub fn open(address: &str, options: &NetworkOptions) -> Result<Session, SessionError> {
    let library = check_address(address, &options.credentials).and_then(|()| find_library(options))?;
    let own = own_address(address);
    let transports = Transports {
        // Memory that processes of one host share belongs to host sessions.
        transports: Some("^sm".to_owned()),
        device: own.and_then(device_of),
        ports: None,
        ipv6: own.is_some_and(|ip| ip.to_canonical().is_ipv6()),
    };
    let end = ClientEnd::create(&library, &transports, &options.session).map_err(network)?;
    let card = end.card().map_err(network)?;
    let open = OpenNetworkSession {
        version: VERSION,
        metadata: card.metadata.into(),
        rows_address: card.rows_address,
        rows_bytes: end.rows_bytes() as u64,
        calls: end.calls(),
    };
    let stream = Stream::start(address, options, open)?;
    let opened = stream.opened(options.session.timeout)?;
    let Stream { over, end: to_stream, .. } = stream;
    // The stream ends when the session does.
    let (session, end) = end.start(opened, address, &options.session, move || drop(over)).map_err(network)?;
    let _ = to_stream.send(end);
    Ok(session)
}

/// Whether sessions with these services could be opened from here.
pub(crate) fn check(addresses: &[String], options: &NetworkOptions) -> Result<(), SessionError> {
    addresses.iter().try_for_each(|address| check_address(address, &options.credentials))?;
    find_library(options).map(drop)
}

fn check_address(address: &str, credentials: &Credentials) -> Result<(), SessionError> {
    if !is_beyond_loopback(address) || credentials.insecure {
        return Ok(());
    }
    Err(SessionError::Network(format!(
        "rows would travel to {address} neither encrypted nor authenticated; pass --insecure (insecure=True) if the network is trusted, \
         or use gRPC with TLS"
    )))
}

fn find_library(options: &NetworkOptions) -> Result<Arc<Library>, SessionError> {
    Library::open(options.library.as_deref()).map_err(network)
}

/// Asks the service whose public API is at `address` for its model without opening a session: an encoded
/// `expertd.v1.GetModelResponse`, which comes within `timeout`. Blocks; not for asynchronous code.
///
/// # Errors
/// If the service cannot be reached or refuses the call.
pub fn fetch_model(
    address: &str,
    credentials: &Credentials,
    timeout: Duration,
) -> Result<Vec<u8>, SessionError> {
    let failed = |source| SessionError::Socket { address: address.to_owned(), source };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
    let asked = async {
        let channel = connect(address, credentials).await?;
        let mut moe = MoeClient::new(channel).max_decoding_message_size(CONTROL_MESSAGE_BYTES);
        let model = moe.get_model(GetModelRequest::default()).await.map_err(refused)?;
        Ok(model.into_inner().encode_to_vec())
    };
    match runtime.block_on(async { tokio::time::timeout(timeout, asked).await }) {
        Ok(model) => model,
        Err(_) => Err(failed(std::io::ErrorKind::TimedOut.into())),
    }
}

async fn connect(address: &str, credentials: &Credentials) -> Result<Channel, SessionError> {
    transport::connect_with(address, credentials).await.map_err(|error| match error {
        ConnectError::Unreachable { .. } => refused(Status::unavailable(error.to_string())),
        ConnectError::Address { .. } | ConnectError::Credentials { .. } => {
            SessionError::Network(error.to_string())
        }
    })
}

/// The error of a call that opens a session. What a client may do about its credentials stands in the code.
fn refused(status: Status) -> SessionError {
    let status = connection_loss(status);
    match status.code() {
        Code::Unauthenticated | Code::PermissionDenied | Code::Unavailable | Code::Unimplemented => {
            SessionError::Status {
                code: status.code() as u32,
                message: status.message().to_owned(),
                retry_after: retry_delay(&status),
                reason: String::new(),
                fields: Vec::new(),
            }
        }
        _ => SessionError::Refused { reason: status.message().to_owned() },
    }
}

fn network(error: NetworkError) -> SessionError {
    match error {
        NetworkError::Session(error) => error,
        other => SessionError::Network(other.to_string()),
    }
}

/// The address from which this host reaches the service.
fn own_address(address: &str) -> Option<IpAddr> {
    if address.starts_with("unix:") {
        return Some(IpAddr::from([127, 0, 0, 1]));
    }
    let authority = address.split_once("://").map_or(address, |(_, rest)| rest);
    let service = authority.trim_end_matches('/').to_socket_addrs().ok()?.next()?;
    let any = if service.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let socket = UdpSocket::bind(any).ok()?;
    // Sends nothing: the kernel chooses the route.
    socket.connect(service).ok()?;
    Some(socket.local_addr().ok()?.ip())
}

/// The call that opened a session, on a thread of its own.
struct Stream {
    opened: mpsc::Receiver<Result<Opened, SessionError>>,
    /// Dropped when the session has ended.
    over: oneshot::Sender<()>,
    /// Takes what ends the session when the service ends the call.
    end: oneshot::Sender<End>,
}

impl Stream {
    fn start(
        address: &str,
        options: &NetworkOptions,
        open: OpenNetworkSession,
    ) -> Result<Self, SessionError> {
        let (to_opened, opened) = mpsc::channel();
        let (over, is_over) = oneshot::channel();
        let (end, ends) = oneshot::channel();
        let failed = {
            let address = address.to_owned();
            move |source| SessionError::Socket { address: address.clone(), source }
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(&failed)?;
        let (address, credentials) = (address.to_owned(), options.credentials.clone());
        let thread = std::thread::Builder::new().name("expertd-net-call".to_owned());
        let timeout = options.session.timeout;
        let body = move || {
            runtime.block_on(async move {
                let begun = tokio::time::timeout(timeout, begin(&address, &credentials, open)).await;
                let (alive, call) = match begun {
                    Ok(Ok((alive, call, opened))) => {
                        let _ = to_opened.send(Ok(opened));
                        (alive, call)
                    }
                    Ok(Err(error)) => {
                        let _ = to_opened.send(Err(error));
                        return;
                    }
                    // Nobody waits any more.
                    Err(_) => return,
                };
                follow(alive, call, is_over, ends).await;
            });
        };
        thread.spawn(body).map_err(failed)?;
        Ok(Stream { opened, over, end })
    }

    fn opened(&self, timeout: Duration) -> Result<Opened, SessionError> {
        match self.opened.recv_timeout(timeout) {
            Ok(opened) => opened,
            Err(_) => {
                Err(SessionError::Network(format!("the service did not open the session within {timeout:?}")))
            }
        }
    }
}

type Alive = channel::Sender<NetworkSessionRequest>;

/// Makes the call and waits for the session.
async fn begin(
    address: &str,
    credentials: &Credentials,
    open: OpenNetworkSession,
) -> Result<(Alive, Streaming<NetworkSessionResponse>, Opened), SessionError> {
    let channel = connect(address, credentials).await?;
    let (alive, messages) = channel::channel(2);
    let _ = alive.send(NetworkSessionRequest { open: Some(open) }).await;
    let mut network = NetworkClient::new(channel).max_decoding_message_size(CONTROL_MESSAGE_BYTES);
    let mut call = network.session(ReceiverStream::new(messages)).await.map_err(refused)?.into_inner();
    match call.message().await.map_err(refused)?.and_then(|message| message.message) {
        Some(Message::Opened(opened)) => Ok((alive, call, from_wire(opened))),
        Some(Message::Ended(reason)) => Err(SessionError::Refused { reason }),
        None => Err(SessionError::Protocol("no answer to the call that opens a network session".to_owned())),
    }
}

fn from_wire(opened: NetworkSessionOpened) -> Opened {
    let model = opened.model.unwrap_or_default();
    Opened {
        card: Card { metadata: opened.metadata.to_vec(), rows_address: opened.rows_address },
        session: opened.session,
        hidden: opened.hidden,
        spin_us: opened.spin_us,
        most_rows: model.limits.map_or(u32::MAX, |limits| limits.max_tokens_per_request),
        model: model.encode_to_vec(),
    }
}

/// Keeps the call open until the session has ended, and ends the session with the call.
async fn follow(
    alive: Alive,
    mut call: Streaming<NetworkSessionResponse>,
    mut is_over: oneshot::Receiver<()>,
    ends: oneshot::Receiver<End>,
) {
    let Ok(end) = ends.await else { return };
    loop {
        tokio::select! {
            _ = &mut is_over => return,
            () = tokio::time::sleep(ALIVE) => {
                let _ = alive.try_send(NetworkSessionRequest { open: None });
            }
            message = call.message() => {
                let reason = match message.map(|message| message.and_then(|message| message.message)) {
                    Ok(Some(Message::Ended(reason))) => reason,
                    Ok(Some(Message::Opened(_))) => "the service opened the session twice".to_owned(),
                    Ok(None) => "the service ended the call of the session".to_owned(),
                    Err(status) => format!("the call of the session broke: {}", status.message()),
                };
                return end.end(&reason);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_do_not_leave_the_host_without_permission() {
        let error = open("192.0.2.1:50051", &NetworkOptions::default()).map(drop);
        let text = error.expect_err("not allowed").to_string();
        assert!(text.contains("neither encrypted") && text.contains("--insecure"), "{text}");
    }

    #[test]
    fn the_own_address_follows_the_route() {
        let loopback = Some(IpAddr::from([127, 0, 0, 1]));
        for address in ["127.0.0.1:1", "http://127.0.0.1:1/", "unix:/path"] {
            assert_eq!(own_address(address), loopback, "{address}");
        }
        assert_eq!(own_address("no address"), None);
    }
}
