//! Network sessions of a client of several services: one with each of them, opened by the first call that needs it. gRPC takes the calls
//! that no session takes: those that have no room in it, and those to a service that refuses it.

use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use expertd_proto::v1::forward_request::Payload;
use expertd_proto::v1::{ForwardRequest, ForwardResponse};
use tonic::Status;

use crate::network::{self, NetworkOptions};
use crate::session::{self, SessionClient, SessionError};

/// Interval at which a waiting thread looks whether its call still has a reader.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);
/// Pause after a session was refused or could not be opened.
const PAUSE: Duration = Duration::from_secs(5);

/// The session with one service.
#[derive(Debug)]
pub(super) struct NetworkRoute {
    address: String,
    options: NetworkOptions,
    current: Mutex<Current>,
    /// Held while a session is being opened.
    opening: tokio::sync::Mutex<()>,
}

#[derive(Debug, Default)]
struct Current {
    session: Option<Arc<SessionClient>>,
    /// No session is opened before.
    paused_until: Option<Instant>,
}

impl NetworkRoute {
    pub(super) fn new(address: &str, options: NetworkOptions) -> NetworkRoute {
        let (current, opening) = (Mutex::default(), tokio::sync::Mutex::default());
        NetworkRoute { address: address.to_owned(), options, current, opening }
    }

    fn current<T>(&self, use_it: impl FnOnce(&mut Current) -> T) -> T {
        use_it(&mut self.current.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Ends the session, because the service is lost.
    pub(super) fn forget(&self) {
        drop(self.current(|current| current.session.take()));
    }

    /// Makes a call through the session; `None` if there is none that takes it.
    ///
    /// # Errors
    /// The status of the call. UNAVAILABLE if the session ends meanwhile.
    pub(super) async fn forward(
        &self,
        request: &ForwardRequest,
        timeout: Option<Duration>,
    ) -> Option<Result<ForwardResponse, Status>> {
        let rows = match &request.payload {
            Some(Payload::Inline(rows)) => rows.len(),
            None => 0,
        };
        if rows.saturating_mul(2) > self.options.session.rows_bytes {
            return None;
        }
        let start = Instant::now();
        let session = match timeout {
            Some(timeout) => match tokio::time::timeout(timeout, self.session()).await {
                Ok(session) => session?,
                Err(_) => {
                    return Some(Err(Status::deadline_exceeded(format!("no answer within {timeout:?}"))));
                }
            },
            None => self.session().await?,
        };
        let left = timeout.map(|timeout| timeout.saturating_sub(start.elapsed()));
        let reader = Arc::new(());
        let call = {
            let (session, request, reader) = (Arc::clone(&session), request.clone(), Arc::downgrade(&reader));
            tokio::task::spawn_blocking(move || wait(&session, &request, left, &reader))
        };
        let ended = call.await;
        drop(reader);
        match ended {
            Ok(Ok(response)) => Some(Ok(response)),
            Ok(Err(SessionError::NoRoom { .. } | SessionError::TooManyCalls { .. })) => None,
            Ok(Err(error)) => {
                if matches!(error, SessionError::Ended { .. }) {
                    self.current(|current| {
                        current.session.take_if(|present| Arc::ptr_eq(present, &session));
                    });
                }
                Some(Err(session::status(error)))
            }
            Err(error) => Some(Err(Status::internal(format!("the call ended without a result: {error}")))),
        }
    }

    /// The open session; opens one if there is none.
    async fn session(&self) -> Option<Arc<SessionClient>> {
        let present = || self.current(|current| current.session.clone());
        if let Some(session) = present() {
            return Some(session);
        }
        let _opening = self.opening.lock().await;
        if let Some(session) = present() {
            return Some(session);
        }
        if self.current(|current| current.paused_until).is_some_and(|until| Instant::now() < until) {
            return None;
        }
        let (address, options) = (self.address.clone(), self.options.clone());
        let open = move || network::open(&address, &options).and_then(SessionClient::over);
        match tokio::task::spawn_blocking(open).await {
            Ok(Ok(session)) => {
                let session = Arc::new(session);
                self.current(|current| current.session = Some(Arc::clone(&session)));
                Some(session)
            }
            Ok(Err(_)) | Err(_) => {
                self.current(|current| current.paused_until = Some(Instant::now() + PAUSE));
                None
            }
        }
    }
}

/// Makes a call on this thread, which waits as long as the call has a reader.
fn wait(
    session: &SessionClient,
    request: &ForwardRequest,
    timeout: Option<Duration>,
    reader: &Weak<()>,
) -> Result<ForwardResponse, SessionError> {
    let start = Instant::now();
    let mut call = session.start(request, timeout)?;
    loop {
        let left = timeout.map_or(CHECK_INTERVAL, |timeout| timeout.saturating_sub(start.elapsed()));
        if let Some(response) = call.try_wait(left.min(CHECK_INTERVAL))? {
            return Ok(response);
        }
        let waited = start.elapsed();
        if timeout.is_some_and(|timeout| waited >= timeout) || reader.strong_count() == 0 {
            return Err(SessionError::TimedOut { waited });
        }
    }
}
