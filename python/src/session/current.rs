//! The session that calls use: opened at the first call, replaced by a larger one when calls need more room, and opened
//! again after its end.

use std::io::ErrorKind;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use expertd_client::network::{self, NetworkOptions};
use expertd_client::session::{self, Session, SessionError, SessionOptions};
use expertd_client::transport::Credentials;
use expertd_proto::v1::{self, GetModelResponse};
use prost::Message as _;
use tonic::{Code, Status};

use super::time_left;
use crate::errors::CallError;
use crate::input::Input;
use crate::request::Arguments;

/// Row area of a new session, in bytes. A call that needs more opens a larger session.
const ROWS_BYTES: usize = 16 << 20;
/// Largest row area that is opened because calls in flight fill the present one, in bytes.
const MAX_ROWS_BYTES: usize = 256 << 20;
/// Time limit of opening a session and of asking for the model.
const OPEN_TIMEOUT: Duration = Duration::from_secs(10);
/// Time after which there is a session, or the reason why there is none.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(11);

/// Where sessions are opened.
#[derive(Clone, Debug)]
pub(crate) enum Place {
    /// The session socket of a service on this host.
    Host(String),
    /// The public API of a service that this host reaches over a network, and the credentials of the calls that open sessions.
    Network(String, Credentials),
}

impl Place {
    fn open(&self, session: SessionOptions) -> Result<Session, SessionError> {
        match self {
            Place::Host(address) => Session::open(address, &session),
            Place::Network(address, credentials) => {
                let credentials = credentials.clone();
                network::open(address, &NetworkOptions { session, credentials, library: None })
            }
        }
    }

    fn failure(&self, error: SessionError) -> CallError {
        match (self, error) {
            (Place::Host(address), error) => open_failure(address, error),
            (Place::Network(..), error) => match call_failure(error) {
                CallError::Status(status) if status.code() == Code::Unavailable => {
                    CallError::Connect(status.message().to_owned())
                }
                other => other,
            },
        }
    }
}

/// An open session.
#[derive(Clone, Debug)]
pub(super) struct Opened {
    pub(super) session: Arc<Session>,
    /// Size of the row area.
    rows_bytes: usize,
    pub(super) model: Arc<GetModelResponse>,
}

impl Opened {
    pub(super) fn layer(&self, number: u32) -> Option<&v1::MoeLayer> {
        self.model.moe_layers.iter().find(|moe| moe.layer == number)
    }

    /// The call's token ids, if its layer routes by them.
    pub(super) fn token_ids<'a>(&self, arguments: &'a Arguments) -> Option<&'a Input> {
        let used = self.layer(arguments.layer).is_some_and(|moe| moe.routes_by_token_id);
        arguments.token_ids.as_ref().filter(|_| used)
    }
}

/// The session that new calls use. A separate thread opens a session for the first call that needs it. Calls wait for it until
/// their deadlines at most; a session that opens later serves the next call.
#[derive(Debug)]
pub(super) struct CurrentSession {
    place: Place,
    current: Mutex<SessionState>,
    /// `is_opening` was cleared.
    opened: Condvar,
    /// The service has refused a larger session.
    is_largest: AtomicBool,
}

#[derive(Debug, Default)]
struct SessionState {
    session: Option<Opened>,
    /// A thread opens a session, without the lock.
    is_opening: bool,
}

/// While it lives, a session is being opened.
struct Opens(Arc<CurrentSession>);

impl Drop for Opens {
    fn drop(&mut self) {
        self.0.lock().is_opening = false;
        self.0.opened.notify_all();
    }
}

impl CurrentSession {
    pub(super) fn new(place: Place) -> CurrentSession {
        let (current, opened) = (Mutex::default(), Condvar::new());
        CurrentSession { place, current, opened, is_largest: AtomicBool::new(false) }
    }

    fn lock(&self) -> MutexGuard<'_, SessionState> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens the session, if it is not open.
    pub(super) fn connect(self: &Arc<Self>) -> Result<(), CallError> {
        self.with_room(0, None).map(drop).map_err(|error| self.place.failure(error))
    }

    /// The open session with room for `needed` bytes; has one opened if there is none. Waits until `deadline` at most.
    pub(super) fn with_room(
        self: &Arc<Self>,
        needed: usize,
        deadline: Option<Instant>,
    ) -> Result<Opened, SessionError> {
        let mut current = self.lock();
        loop {
            if let Some(opened) = current.session.as_ref().filter(|opened| opened.rows_bytes >= needed) {
                return Ok(opened.clone());
            }
            let left = time_left(deadline, ANSWER_TIMEOUT);
            if left.is_zero() {
                return Err(SessionError::TimedOut { waited: left });
            }
            if !current.is_opening {
                current.is_opening = true;
                drop(current);
                let late = |_| SessionError::TimedOut { waited: left };
                return self.open_apart(needed).recv_timeout(left).map_err(late)?;
            }
            current = self.opened.wait_timeout(current, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Opens a session on a thread of its own, which sends it or why there is none.
    fn open_apart(self: &Arc<Self>, needed: usize) -> Receiver<Result<Opened, SessionError>> {
        let (sender, opened) = mpsc::channel();
        let opening = Opens(Arc::clone(self));
        // A thread that cannot be started drops its function.
        let _ = thread::Builder::new().name("session-open".to_owned()).spawn(move || {
            let opened = opening.0.open(needed);
            if let Ok(opened) = &opened {
                // Calls in flight keep a smaller session until their end.
                opening.0.lock().session = Some(opened.clone());
            }
            drop(opening);
            let _ = sender.send(opened);
        });
        opened
    }

    fn open(&self, needed: usize) -> Result<Opened, SessionError> {
        let rows_bytes = needed.max(ROWS_BYTES).checked_next_power_of_two().unwrap_or(needed);
        let options = SessionOptions { rows_bytes, timeout: OPEN_TIMEOUT, ..SessionOptions::default() };
        let session = self.place.open(options)?;
        let model = Arc::new(decode(session.model())?);
        Ok(Opened { session: Arc::new(session), rows_bytes, model })
    }

    /// Opens a session with twice the row area, if that is within limits.
    pub(super) fn enlarged(self: &Arc<Self>, opened: &Opened, deadline: Option<Instant>) -> Option<Opened> {
        let doubled = opened.rows_bytes.checked_mul(2).filter(|&bytes| bytes <= MAX_ROWS_BYTES)?;
        if self.is_largest.load(Ordering::Relaxed) {
            return None;
        }
        let larger = self.with_room(doubled, deadline);
        let is_refused = matches!(larger, Err(SessionError::Refused { .. }));
        self.is_largest.store(is_refused, Ordering::Relaxed);
        larger.ok()
    }

    /// Removes a session that has ended, so that the next call opens another one.
    pub(super) fn forget(&self, ended: &Arc<Session>) {
        let mut current = self.lock();
        if current.session.as_ref().is_some_and(|opened| Arc::ptr_eq(&opened.session, ended)) {
            current.session = None;
        }
    }

    /// The model that the service serves now.
    ///
    /// # Errors
    /// NOT_FOUND if the model has another name, and the failure of the question itself.
    pub(super) fn model(&self, name: &str) -> Result<GetModelResponse, CallError> {
        let bytes = match &self.place {
            Place::Host(address) => session::fetch_model(address, OPEN_TIMEOUT),
            Place::Network(address, credentials) => network::fetch_model(address, credentials, OPEN_TIMEOUT),
        };
        let model = bytes.and_then(|bytes| decode(&bytes)).map_err(session::status)?;
        expect_name(&model, name)?;
        Ok(model)
    }
}

fn decode(bytes: &[u8]) -> Result<GetModelResponse, SessionError> {
    GetModelResponse::decode(bytes)
        .map_err(|error| SessionError::Protocol(format!("a model that cannot be decoded: {error}")))
}

/// NOT_FOUND if the call names another model.
pub(super) fn expect_name(model: &GetModelResponse, name: &str) -> Result<(), CallError> {
    if name.is_empty() || name == model.name {
        return Ok(());
    }
    Err(Status::not_found(format!("the service has no model {name:?}; it serves {:?}", model.name)).into())
}

/// The failure of a call.
pub(super) fn call_failure(error: SessionError) -> CallError {
    match error {
        SessionError::Network(text) => CallError::Unsupported(text),
        other => session::status(other).into(),
    }
}

/// The failure of a session that could not be opened.
pub(crate) fn open_failure(address: &str, error: SessionError) -> CallError {
    let hint = "sessions need the socket of `expertd serve --session-listen unix:PATH`";
    match error {
        SessionError::Socket { source, .. } if source.kind() == ErrorKind::PermissionDenied => {
            Status::permission_denied(format!(
                "{address}: {source}; the service allows its own user, and those of `--session-allow-uid`"
            ))
            .into()
        }
        SessionError::Socket { source, .. }
            if matches!(source.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) =>
        {
            CallError::Connect(format!("session socket {address}: no answer within {OPEN_TIMEOUT:?}; {hint}"))
        }
        SessionError::Socket { .. } | SessionError::Protocol(_) => {
            CallError::Connect(format!("{error}; {hint}"))
        }
        other => CallError::Connect(other.to_string()),
    }
}
