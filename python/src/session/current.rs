//! The session that calls use: opened at the first call, replaced by a larger one when calls need more room, and opened
//! again after its end.

use std::io::ErrorKind;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use expertd_client::session::{self, Session, SessionError, SessionOptions};
use expertd_proto::v1::{self, GetModelResponse};
use prost::Message as _;
use tonic::Status;

use crate::errors::Failure;
use crate::input::Input;
use crate::request::Arguments;

/// Row area of a new session, in bytes. A call that needs more opens a larger session.
const ROWS_BYTES: usize = 16 << 20;
/// Largest row area that is opened because calls in flight fill the present one, in bytes.
const MAX_ROWS_BYTES: usize = 256 << 20;
/// Time limit of opening a session and of asking for the model.
const OPEN_TIMEOUT: Duration = Duration::from_secs(10);

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

/// The session that new calls use.
#[derive(Debug)]
pub(super) struct CurrentSession {
    /// The service's session socket.
    address: String,
    current: Mutex<Option<Opened>>,
    /// The service has refused a larger session.
    is_largest: AtomicBool,
}

impl CurrentSession {
    pub(super) fn new(address: String) -> CurrentSession {
        CurrentSession { address, current: Mutex::new(None), is_largest: AtomicBool::new(false) }
    }

    /// Opens the session, if it is not open.
    pub(super) fn connect(&self) -> Result<(), Failure> {
        self.with_room(0).map(drop).map_err(|error| open_failure(&self.address, error))
    }

    /// The open session with room for `needed` bytes; opens one if there is none.
    pub(super) fn with_room(&self, needed: usize) -> Result<Opened, SessionError> {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(opened) = current.as_ref().filter(|opened| opened.rows_bytes >= needed) {
            return Ok(opened.clone());
        }
        let rows_bytes = needed.max(ROWS_BYTES).checked_next_power_of_two().unwrap_or(needed);
        let options = SessionOptions { rows_bytes, timeout: OPEN_TIMEOUT, ..SessionOptions::default() };
        let session = Session::open(&self.address, &options)?;
        let model = Arc::new(decode(session.model())?);
        let opened = Opened { session: Arc::new(session), rows_bytes, model };
        // Calls in flight keep a smaller session until their end.
        *current = Some(opened.clone());
        Ok(opened)
    }

    /// Opens a session with twice the row area, if that is within limits.
    pub(super) fn enlarged(&self, opened: &Opened) -> Option<Opened> {
        let doubled = opened.rows_bytes.checked_mul(2).filter(|&bytes| bytes <= MAX_ROWS_BYTES)?;
        if self.is_largest.load(Ordering::Relaxed) {
            return None;
        }
        let larger = self.with_room(doubled);
        self.is_largest.store(larger.is_err(), Ordering::Relaxed);
        larger.ok()
    }

    /// Removes a session that has ended, so that the next call opens another one.
    pub(super) fn forget(&self, ended: &Arc<Session>) {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if current.as_ref().is_some_and(|opened| Arc::ptr_eq(&opened.session, ended)) {
            *current = None;
        }
    }

    /// The model that the service serves now.
    ///
    /// # Errors
    /// NOT_FOUND if the model has another name, and the failure of the question itself.
    pub(super) fn model(&self, name: &str) -> Result<GetModelResponse, Failure> {
        let model = session::fetch_model(&self.address, OPEN_TIMEOUT).and_then(|bytes| decode(&bytes));
        let model = model.map_err(session::status)?;
        expect_name(&model, name)?;
        Ok(model)
    }
}

fn decode(bytes: &[u8]) -> Result<GetModelResponse, SessionError> {
    GetModelResponse::decode(bytes)
        .map_err(|error| SessionError::Protocol(format!("a model that cannot be decoded: {error}")))
}

/// NOT_FOUND if the call names another model.
pub(super) fn expect_name(model: &GetModelResponse, name: &str) -> Result<(), Failure> {
    if name.is_empty() || name == model.name {
        return Ok(());
    }
    Err(Status::not_found(format!("the service has no model {name:?}; it serves {:?}", model.name)).into())
}

/// The failure of a session that could not be opened.
pub(crate) fn open_failure(address: &str, error: SessionError) -> Failure {
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
            Failure::Connect(format!("session socket {address}: no answer within {OPEN_TIMEOUT:?}; {hint}"))
        }
        SessionError::Socket { .. } | SessionError::Protocol(_) => {
            Failure::Connect(format!("{error}; {hint}"))
        }
        other => Failure::Connect(other.to_string()),
    }
}
