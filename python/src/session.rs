//! Calls through a session: rows are copied into memory that the service shares or that travels to it, and answers out of it.

mod current;

use std::borrow::Cow;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use expertd_client::RetryPolicy;
use expertd_client::session::{self, DType, PendingCall, Session, SessionError};
use expertd_proto::v1::{self, GetModelResponse};
use pyo3::PyErr;
use pyo3::prelude::*;
use tonic::Status;

use self::current::{CurrentSession, Opened, call_failure, expect_name};
pub(crate) use self::current::{Place, open_failure};
use crate::array::Array;
use crate::errors::CallError;
use crate::line::Line;
use crate::receipt::{self, Received, Rows};
use crate::request::Arguments;

/// Interval at which a waiting call checks whether it was interrupted.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// Interval at which a call that waits for room in the session tries again, even if no other call has ended meanwhile.
const ROOM_INTERVAL: Duration = Duration::from_millis(20);
/// Alignment of places in a row area.
const ALIGN: usize = 64;
/// Bytes of a row's ids and weights that are set aside if the service's gate chooses: 64 experts.
const MAX_ROUTING_BYTES: usize = 64 * 8;

/// Why a call has no answer.
#[derive(Debug)]
pub(crate) enum End {
    /// The call failed.
    Failed(CallError),
    /// A signal handler raised this exception, or the caller stopped waiting.
    Interrupted(PyErr),
}

impl From<CallError> for End {
    fn from(failure: CallError) -> End {
        End::Failed(failure)
    }
}

impl From<Status> for End {
    fn from(status: Status) -> End {
        End::Failed(status.into())
    }
}

/// A session with one service. It is opened again after it has ended.
#[derive(Debug)]
pub(crate) struct SessionRoute {
    current: Arc<CurrentSession>,
    retry: Option<RetryPolicy>,
    /// Held while one call reserves its places, so that two calls never wait for each other's halves.
    placing: Mutex<()>,
    /// Calls that wait for room in the session.
    line: Line,
}

impl SessionRoute {
    pub(crate) fn new(place: Place, retry: Option<RetryPolicy>) -> SessionRoute {
        SessionRoute {
            current: Arc::new(CurrentSession::new(place)),
            retry,
            placing: Mutex::new(()),
            line: Line::default(),
        }
    }

    /// Opens the session, if it is not open.
    pub(crate) fn connect(&self) -> Result<(), CallError> {
        self.current.connect()
    }

    /// The model that the service serves now.
    ///
    /// # Errors
    /// NOT_FOUND if the service's model has another name than `name`, and the failure of the question itself.
    pub(crate) fn model(&self, name: &str) -> Result<GetModelResponse, CallError> {
        self.current.model(name)
    }

    /// Makes a call and waits for its answer, with retries by the client's policy. `check` says whether to go on waiting.
    pub(crate) fn call(
        &self,
        arguments: &Arguments,
        check: &mut dyn FnMut() -> PyResult<()>,
    ) -> Result<Received, End> {
        let start = Instant::now();
        let mut attempt = 1;
        loop {
            let status = match self.attempt(arguments, start, check) {
                Err(End::Failed(CallError::Status(status))) => status,
                other => return other,
            };
            let pause = self.retry.and_then(|retry| retry.pause(&status, attempt, start.elapsed()));
            match pause {
                Some(pause) if arguments.timeout.is_none_or(|timeout| start.elapsed() + pause < timeout) => {
                    sleep(pause, check)?;
                    attempt += 1;
                }
                _ => return Err(End::Failed(CallError::Status(status))),
            }
        }
    }

    fn attempt(
        &self,
        arguments: &Arguments,
        start: Instant,
        check: &mut dyn FnMut() -> PyResult<()>,
    ) -> Result<Received, End> {
        let places = Places::of(arguments);
        let deadline = arguments.timeout.map(|timeout| start + timeout);
        let opened = match self.current.with_room(places.total(), deadline) {
            Ok(opened) => opened,
            Err(error) => {
                go_on(deadline, check)?;
                return Err(call_failure(error).into());
            }
        };
        expect_name(&opened.model, &arguments.model)?;
        expect_shapes(arguments, &opened)?;
        let (session, mut pending) = self.submit(opened, arguments, &places, deadline, check)?;
        let ended = loop {
            match pending.try_wait(time_left(deadline, CHECK_INTERVAL)) {
                Ok(Some(answer)) => break read_answer(answer, arguments),
                Ok(None) => {
                    if let Err(end) = go_on(deadline, check) {
                        break Err(end);
                    }
                }
                Err(error) => break Err(self.failed(&session, error)),
            }
        };
        drop(pending);
        self.line.depart();
        ended
    }

    /// Copies the rows into the session and starts the call; waits in line while the session has no room. Returns the session that
    /// took the call.
    fn submit(
        &self,
        mut opened: Opened,
        arguments: &Arguments,
        places: &Places,
        deadline: Option<Instant>,
        check: &mut dyn FnMut() -> PyResult<()>,
    ) -> Result<(Arc<Session>, PendingCall), End> {
        let mut ticket = None;
        loop {
            let seen = self.line.departures();
            if self.line.is_next(ticket.as_ref()) {
                match self.try_submit(&opened, arguments, places, deadline) {
                    Ok(pending) => return Ok((opened.session, pending)),
                    Err(SessionError::TooManyCalls { .. }) => {}
                    Err(SessionError::NoRoom { .. }) => {
                        if let Some(larger) = self.current.enlarged(&opened, deadline) {
                            opened = larger;
                            continue;
                        }
                    }
                    Err(error) => return Err(self.failed(&opened.session, error)),
                }
            }
            if ticket.is_none() {
                ticket = Some(self.line.join());
                continue;
            }
            self.line.wait(seen, time_left(deadline, ROOM_INTERVAL));
            go_on(deadline, check)?;
        }
    }

    fn try_submit(
        &self,
        opened: &Opened,
        arguments: &Arguments,
        places: &Places,
        deadline: Option<Instant>,
    ) -> Result<PendingCall, SessionError> {
        let session = &opened.session;
        let (mut rows, output) = {
            let _placing = self.placing.lock().unwrap_or_else(PoisonError::into_inner);
            (session.buffer(places.rows)?, session.buffer(places.rows)?)
        };
        rows.as_mut_slice().copy_from_slice(arguments.rows.bytes());
        let given = arguments
            .routing
            .as_ref()
            .map(|routing| (routing.k(), words(routing.ids.bytes()), words(routing.weights.bytes())));
        let token_ids = opened.token_ids(arguments).map(|ids| words(ids.bytes()));
        let layer = opened.layer(arguments.layer);
        let shape = arguments.shape();
        let call = session::Call {
            layer: arguments.layer,
            tokens: shape.tokens,
            dtype: shape.element.row_type().map_or(DType::F32, dtype),
            routing: given.as_ref().map(|(k, ids, weights)| session::GivenRouting { k: *k, ids, weights }),
            token_ids: token_ids.as_deref(),
            shared_experts: arguments.shared_experts,
            expected_weight_version: arguments.expected_weight_version,
            // The service refuses a layer that it does not have.
            return_routing: arguments.return_routing.then(|| layer.map_or(1, |moe| moe.top_k as usize)),
            timeout: deadline.map(|end| end.saturating_duration_since(Instant::now())),
        };
        session.submit(&call, rows, output)
    }

    fn failed(&self, session: &Arc<Session>, error: SessionError) -> End {
        if matches!(error, SessionError::Ended { .. }) {
            self.current.forget(session);
        }
        End::Failed(session::status(error).into())
    }
}

/// Bytes of a call's places in the row area.
struct Places {
    /// Rows, and as many again for the output.
    rows: usize,
    /// Ids and weights, given or returned, and token ids.
    routing: usize,
}

impl Places {
    fn of(arguments: &Arguments) -> Places {
        let returned =
            if arguments.return_routing { arguments.shape().tokens * MAX_ROUTING_BYTES } else { 0 };
        let routing = arguments.routing.as_ref().map_or(returned, |routing| 2 * routing.ids.bytes().len());
        let token_ids = arguments.token_ids.as_ref().map_or(0, |ids| ids.bytes().len());
        Places { rows: arguments.rows.bytes().len(), routing: routing + token_ids }
    }

    /// Bytes of all places, with their alignment.
    fn total(&self) -> usize {
        2 * self.rows.next_multiple_of(ALIGN) + self.routing + 4 * ALIGN
    }
}

/// Elements of four bytes, copied where memory is not aligned.
fn words<T: bytemuck::Pod>(bytes: &[u8]) -> Cow<'_, [T]> {
    match bytemuck::try_cast_slice(bytes) {
        Ok(words) => Cow::Borrowed(words),
        Err(_) => Cow::Owned(bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()),
    }
}

const fn dtype(dtype: v1::DType) -> DType {
    match dtype {
        v1::DType::DtypeBf16 => DType::Bf16,
        v1::DType::DtypeF16 => DType::F16,
        v1::DType::DtypeF32 | v1::DType::DtypeUnspecified => DType::F32,
    }
}

/// `interval`, or what is left until the deadline if that is less.
fn time_left(deadline: Option<Instant>, interval: Duration) -> Duration {
    deadline.map_or(interval, |end| end.saturating_duration_since(Instant::now()).min(interval))
}

/// Whether to go on waiting.
fn go_on(deadline: Option<Instant>, check: &mut dyn FnMut() -> PyResult<()>) -> Result<(), End> {
    if deadline.is_some_and(|end| Instant::now() >= end) {
        return Err(Status::deadline_exceeded("no answer within the timeout").into());
    }
    check().map_err(End::Interrupted)
}

fn sleep(pause: Duration, check: &mut dyn FnMut() -> PyResult<()>) -> Result<(), End> {
    let end = Instant::now() + pause;
    loop {
        let left = time_left(Some(end), CHECK_INTERVAL);
        if left.is_zero() {
            return Ok(());
        }
        std::thread::sleep(left);
        check().map_err(End::Interrupted)?;
    }
}

fn read_answer(answer: session::Answer, arguments: &Arguments) -> Result<Received, End> {
    // A session's call names no fingerprint. The output of other weights is not given to the caller.
    if let Some(expected) = &arguments.weights {
        session::check_weights(expected, &answer.receipt.weight_fingerprint).map_err(session::status)?;
    }
    let shape = arguments.shape();
    let output = answer.output.as_slice();
    let rows = match &arguments.out {
        Some(out) => out.fill(output).map(|()| Rows::Given(Arc::clone(out))),
        None => Array::copy_of(output, shape.element, vec![shape.tokens, shape.hidden]).map(Rows::Own),
    };
    let rows = rows.ok_or_else(|| Status::internal("the session's output has another size than the rows"))?;
    let mut message = session::receipt(&answer.receipt, arguments.return_timings);
    let (topk_ids, topk_weights) = answer.routing.unwrap_or_default();
    (message.topk_ids, message.topk_weights) = (topk_ids.into(), topk_weights.into());
    Ok(Received { rows, receipt: receipt::from_message(message, shape.tokens) })
}

/// Checks the shapes of arguments; the service cannot, because places have none.
fn expect_shapes(arguments: &Arguments, opened: &Opened) -> Result<(), Status> {
    let (shape, hidden) = (arguments.shape(), opened.session.hidden());
    if shape.hidden != hidden {
        return Err(Status::invalid_argument(format!(
            "rows: have {} elements each; the model's hidden size is {hidden}",
            shape.hidden
        )));
    }
    match opened.token_ids(arguments).map(|ids| ids.shape[0]) {
        Some(found) if found != shape.tokens => Err(Status::invalid_argument(format!(
            "token_ids: has {found} entries; expected one for each of {} tokens",
            shape.tokens
        ))),
        _ => Ok(()),
    }
}
