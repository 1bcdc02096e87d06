//! Many calls in flight on one gRPC stream.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use expertd_client::{AnswerReceiver, Client, RequestSender};
use expertd_proto::v1::{ForwardRequest, ForwardResponse};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use tokio::runtime::Handle;
use tokio::sync::{Mutex as AsyncMutex, oneshot};
use tokio::task::JoinHandle;
use tonic::Status;

use crate::asyncio;
use crate::client::Route;
use crate::connection::{Connection, Link, may_be_other_placement, within};
use crate::errors::CallError;
use crate::receipt::{Answer, Received};
use crate::request::{Arguments, Call, Options};
use crate::runtime::{OwnProcess, wait};

type Reply = oneshot::Sender<Result<ForwardResponse, Status>>;

/// The calls of one open stream that wait for their answers.
#[derive(Debug)]
enum Waiting {
    Open(HashMap<u64, Reply>),
    /// The stream has ended with this status.
    Over(Status),
}

/// An open stream.
#[derive(Clone, Debug)]
struct OpenStream {
    sender: RequestSender,
    waiting: Arc<Mutex<Waiting>>,
}

impl OpenStream {
    /// Sends a request and waits for its answer.
    async fn call(
        &self,
        id: u64,
        message: ForwardRequest,
        timeout: Option<Duration>,
    ) -> Result<ForwardResponse, Status> {
        let (reply, answer) = oneshot::channel();
        match &mut *self.waiting.lock().unwrap_or_else(PoisonError::into_inner) {
            Waiting::Open(calls) => calls.insert(id, reply),
            Waiting::Over(status) => return Err(status.clone()),
        };
        if let Err(closed) = self.sender.send(id, message, timeout).await {
            return Err(self.end().unwrap_or(closed));
        }
        answer.await.unwrap_or_else(|_| Err(Status::unavailable("the stream ended without an answer")))
    }

    /// The status that the stream ended with, if it has.
    fn end(&self) -> Option<Status> {
        match &*self.waiting.lock().unwrap_or_else(PoisonError::into_inner) {
            Waiting::Open(_) => None,
            Waiting::Over(status) => Some(status.clone()),
        }
    }
}

/// Passes answers to the calls that wait for them, until the stream ends.
async fn receive(mut answers: AnswerReceiver, waiting: Arc<Mutex<Waiting>>) {
    let end = loop {
        match answers.next().await {
            Ok(Some((id, result))) => {
                let mut waiting = waiting.lock().unwrap_or_else(PoisonError::into_inner);
                if let Waiting::Open(calls) = &mut *waiting
                    && let Some(reply) = calls.remove(&id)
                {
                    // The caller may have stopped waiting.
                    let _ = reply.send(result);
                }
            }
            Ok(None) => break Status::unavailable("the stream has ended"),
            Err(status) => break status,
        }
    };
    let over = std::mem::replace(
        &mut *waiting.lock().unwrap_or_else(PoisonError::into_inner),
        Waiting::Over(end.clone()),
    );
    if let Waiting::Open(calls) = over {
        for reply in calls.into_values() {
            let _ = reply.send(Err(end.clone()));
        }
    }
}

/// A stream that is opened when it is first needed and opened again after the connection was lost.
#[derive(Debug)]
struct Shared {
    connection: Arc<Connection>,
    capacity: usize,
    current: AsyncMutex<StreamState>,
}

#[derive(Debug, Default)]
struct StreamState {
    open: Option<OpenStream>,
    next_id: u64,
}

impl Shared {
    /// The open stream and an id that no other call has.
    async fn open(&self, client: &Client) -> Result<(OpenStream, u64), CallError> {
        let mut current = self.current.lock().await;
        let open = match current.open.as_ref().filter(|open| open.end().is_none()) {
            Some(open) => open.clone(),
            None => {
                let (sender, answers) = client.stream(self.capacity).await?;
                let waiting = Arc::new(Mutex::new(Waiting::Open(HashMap::new())));
                tokio::spawn(receive(answers, Arc::clone(&waiting)));
                let open = OpenStream { sender, waiting };
                current.open = Some(open.clone());
                open
            }
        };
        current.next_id += 1;
        Ok((open, current.next_id))
    }

    /// Makes a call. Several services have no common stream, so that each call to them is one of its own.
    async fn call(&self, mut call: Call) -> Result<Received, CallError> {
        let start = Instant::now();
        let link = within(call.timeout, self.connection.link()).await?;
        call.timeout = call.timeout.map(|timeout| timeout.saturating_sub(start.elapsed()));
        match link {
            Link::One(client) => self.call_on_stream(client, &call).await,
            Link::Several(_) => self.connection.forward(call).await,
        }
    }

    /// Makes a call on the stream, with retries by the client's policy.
    async fn call_on_stream(&self, client: &Client, call: &Call) -> Result<Received, CallError> {
        let start = Instant::now();
        let timeout = call.timeout;
        let mut attempt = 1;
        let mut is_second = false;
        loop {
            let left = timeout.map(|timeout| timeout.saturating_sub(start.elapsed()));
            let status = match self.call_once(client, call.message.clone(), left).await {
                Ok(response) => return call.shape.read_answer(response),
                Err(CallError::Status(status)) => status,
                Err(failure) => return Err(failure),
            };
            if !is_second && may_be_other_placement(&call.message, &status) {
                is_second = true;
                continue;
            }
            let pause =
                self.connection.retry().and_then(|retry| retry.pause(&status, attempt, start.elapsed()));
            match pause {
                Some(pause) if timeout.is_none_or(|timeout| start.elapsed() + pause < timeout) => {
                    tokio::time::sleep(pause).await;
                    attempt += 1;
                }
                _ => return Err(CallError::Status(status)),
            }
        }
    }

    async fn call_once(
        &self,
        client: &Client,
        message: ForwardRequest,
        timeout: Option<Duration>,
    ) -> Result<ForwardResponse, CallError> {
        // The service answers in time. This timeout ends the wait if the stream does not open, or the connection does not deliver the
        // answer.
        within(timeout, async {
            let (open, id) = self.open(client).await?;
            Ok(open.call(id, message, timeout).await?)
        })
        .await
    }
}

/// How the calls of a stream reach the service.
#[derive(Clone, Debug)]
enum StreamRoute {
    Grpc(Arc<Shared>),
    /// A session carries many calls without a stream.
    Session(Route),
}

impl StreamRoute {
    async fn call(self, arguments: Arguments) -> Result<Received, CallError> {
        match self {
            StreamRoute::Grpc(shared) => shared.call(arguments.into_call()).await,
            StreamRoute::Session(route) => route.call(arguments).await,
        }
    }
}

/// The native part of `Stream` and `AsyncStream`.
#[pyclass(frozen)]
#[derive(Debug)]
pub(crate) struct NativeStream {
    /// `None` after it was closed. Calls in flight also hold it, and the gRPC stream ends when the last holder drops it.
    route: Mutex<Option<StreamRoute>>,
    runtime: Handle,
    /// Fingerprint of the expected weights, as of the client.
    weights: Option<Arc<str>>,
    process: OwnProcess,
}

impl NativeStream {
    pub(crate) fn new(
        route: Route,
        runtime: Handle,
        capacity: usize,
        weights: Option<Arc<str>>,
    ) -> NativeStream {
        let route = match route {
            Route::Remote(connection) => {
                StreamRoute::Grpc(Arc::new(Shared { connection, capacity, current: AsyncMutex::default() }))
            }
            session @ Route::Session(_) => StreamRoute::Session(session),
        };
        NativeStream { route: Mutex::new(Some(route)), runtime, weights, process: OwnProcess::current() }
    }

    fn route(&self) -> PyResult<StreamRoute> {
        self.process.check("stream")?;
        let route = self.route.lock().unwrap_or_else(PoisonError::into_inner);
        route.clone().ok_or_else(|| {
            PyValueError::new_err("the stream is closed; open another one with client.stream()")
        })
    }
}

#[pymethods]
impl NativeStream {
    /// Starts a call and returns without waiting.
    fn submit<'py>(
        &self,
        layer: u32,
        rows: &Bound<'py, PyAny>,
        seconds: Option<f64>,
        options: Options<'py>,
    ) -> PyResult<Pending> {
        let route = self.route()?;
        let arguments = Arguments::new(layer, rows, seconds, options, None, self.weights.as_ref())?;
        let task = self.runtime.spawn(route.call(arguments));
        Ok(Pending { task: Mutex::new(Some(task)), process: self.process })
    }

    fn forward_async<'py>(
        &self,
        py: Python<'py>,
        layer: u32,
        rows: &Bound<'py, PyAny>,
        seconds: Option<f64>,
        options: Options<'py>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let route = self.route()?;
        let arguments = Arguments::new(layer, rows, seconds, options, None, self.weights.as_ref())?;
        asyncio::spawn(py, route.call(arguments))
    }

    /// Refuses further calls; calls in flight continue.
    fn close(&self) {
        self.route.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}

/// A call under way.
#[pyclass(frozen, module = "expertd")]
#[derive(Debug)]
pub(crate) struct Pending {
    task: Mutex<Option<JoinHandle<Result<Received, CallError>>>>,
    process: OwnProcess,
}

#[pymethods]
impl Pending {
    /// Waits for the answer and returns it, once.
    fn result<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, Answer>> {
        self.process.check("call")?;
        let task = self.task.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(mut task) = task else {
            return Err(PyRuntimeError::new_err("the result was already taken; keep the first one"));
        };
        let ended = match wait(py, &mut task) {
            Ok(ended) => ended,
            Err(interrupted) => {
                // The call continues, and its result can still be requested.
                *self.task.lock().unwrap_or_else(PoisonError::into_inner) = Some(task);
                return Err(interrupted);
            }
        };
        match ended {
            Ok(received) => received.map_err(|failure| failure.into_exception(py))?.into_pyobject(py),
            Err(error) => Err(PyRuntimeError::new_err(format!("the call ended without a result: {error}"))),
        }
    }

    /// Whether `result` returns without waiting.
    fn done(&self) -> bool {
        self.task.lock().unwrap_or_else(PoisonError::into_inner).as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Stops waiting for the answer.
    fn cancel(&self) {
        if let Some(task) = self.task.lock().unwrap_or_else(PoisonError::into_inner).take() {
            task.abort();
        }
    }
}
