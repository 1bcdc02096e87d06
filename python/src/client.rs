//! Clients, for blocking calls and for `asyncio`.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use expertd_client::RetryPolicy;
use expertd_client::transport::Credentials;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::asyncio;
use crate::connection::Connection;
use crate::errors::CallError;
use crate::model::{Model, ModelSummary};
use crate::receipt::{Answer, Received};
use crate::request::{Arguments, Options};
use crate::runtime::{self, OwnProcess, timeout, wait};
use crate::session::{End, Place, SessionRoute};
use crate::stream::NativeStream;

/// How calls reach the service.
#[derive(Clone, Debug)]
pub(crate) enum Route {
    /// gRPC, to one service or several.
    Remote(Arc<Connection>),
    /// A session with one service.
    Session(Arc<SessionRoute>),
}

impl Route {
    async fn connect(&self) -> Result<(), CallError> {
        match self {
            Route::Remote(connection) => connection.connect().await,
            Route::Session(session) => {
                let session = Arc::clone(session);
                blocking(move || session.connect()).await
            }
        }
    }

    /// Makes a call from a task. Dropping the future ends the call.
    pub(crate) async fn call(self, arguments: Arguments) -> Result<Received, CallError> {
        match self {
            Route::Remote(connection) => {
                let out = arguments.out.clone();
                connection.forward(arguments.into_call()).await?.placed(out)
            }
            Route::Session(session) => {
                let waiting = Arc::new(());
                // The future's own handle; when it is gone, the call has no reader.
                let reader = Arc::downgrade(&waiting);
                let ended = blocking(move || {
                    session.call(&arguments, &mut || match reader.strong_count() {
                        0 => Err(PyRuntimeError::new_err("the call was cancelled")),
                        _ => Ok(()),
                    })
                });
                let ended = ended.await;
                drop(waiting);
                ended.map_err(|end| match end {
                    End::Failed(failure) => failure,
                    End::Interrupted(error) => tonic::Status::cancelled(error.to_string()).into(),
                })
            }
        }
    }

    async fn model(&self, name: String) -> Result<Model, CallError> {
        match self {
            Route::Remote(connection) => Ok(connection.model(&name).await?.into()),
            Route::Session(session) => {
                let session = Arc::clone(session);
                blocking(move || session.model(&name)).await.map(Model::from)
            }
        }
    }

    async fn models(&self) -> Result<Vec<ModelSummary>, CallError> {
        match self {
            Route::Remote(connection) => connection.models().await,
            Route::Session(_) => Ok(vec![self.model(String::new()).await?.into()]),
        }
    }
}

/// Runs `work` on a thread where it may block.
async fn blocking<T: Send + 'static, E: From<tonic::Status> + Send + 'static>(
    work: impl FnOnce() -> Result<T, E> + Send + 'static,
) -> Result<T, E> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => {
            Err(tonic::Status::internal(format!("the call ended without a result: {error}")).into())
        }
    }
}

/// The fields of the Python class `RetryPolicy`.
#[derive(FromPyObject)]
pub(crate) struct RetryArguments {
    max_attempts: u32,
    max_pause: f64,
    max_elapsed: f64,
}

/// Files with credentials as the Python class `Credentials` states them.
#[derive(FromPyObject)]
pub(crate) struct CredentialArguments {
    ca: Option<PathBuf>,
    cert: Option<PathBuf>,
    key: Option<PathBuf>,
    server_name: Option<String>,
    token_file: Option<PathBuf>,
    insecure: bool,
}

impl From<CredentialArguments> for Credentials {
    fn from(given: CredentialArguments) -> Credentials {
        let CredentialArguments { ca, cert, key, server_name, token_file, insecure } = given;
        Credentials { ca, cert, key, server_name, token_file, insecure }
    }
}

/// The native part of `Client` and `AsyncClient`.
#[pyclass(frozen)]
#[derive(Debug)]
pub(crate) struct NativeClient {
    route: Route,
    /// Fingerprint of the weights that must compute answers; `None` follows reloads of the service.
    weights: Option<Arc<str>>,
    process: OwnProcess,
}

impl NativeClient {
    fn route(&self) -> PyResult<Route> {
        self.process.check("client")?;
        Ok(self.route.clone())
    }
}

#[pymethods]
impl NativeClient {
    /// `several` makes one client of all addresses, and of all addresses of a name, even if there is only one.
    /// `session` is None, "host" or "network".
    #[new]
    fn new(
        addresses: Vec<String>,
        several: bool,
        session: Option<&str>,
        retry: Option<RetryArguments>,
        credentials: Option<CredentialArguments>,
    ) -> PyResult<NativeClient> {
        let policy = |retry: RetryArguments| {
            Ok::<_, PyErr>(RetryPolicy {
                max_attempts: retry.max_attempts,
                max_pause: timeout(Some(retry.max_pause), "max_pause")?.unwrap_or(Duration::ZERO),
                max_elapsed: timeout(Some(retry.max_elapsed), "max_elapsed")?.unwrap_or(Duration::ZERO),
            })
        };
        let retry = retry.map(policy).transpose()?;
        let credentials = credentials.map_or_else(Credentials::default, Credentials::from);
        let is_network = session == Some("network");
        let of_session = |place| Route::Session(Arc::new(SessionRoute::new(place, retry)));
        let route = match session {
            // Services used as one have a session with each.
            Some(_) if is_network && !several => of_session(Place::Network(addresses.concat(), credentials)),
            Some(_) if !is_network => of_session(Place::Host(addresses.concat())),
            _ => {
                let connection = Connection::new(addresses, several, credentials, retry);
                Route::Remote(Arc::new(connection.over_network(is_network)))
            }
        };
        Ok(NativeClient { route, weights: None, process: OwnProcess::current() })
    }

    /// A client with the same connection, whose calls fail unless the weights with this fingerprint compute them.
    fn pinned(&self, fingerprint: &str) -> PyResult<NativeClient> {
        Ok(NativeClient { route: self.route()?, weights: Some(fingerprint.into()), process: self.process })
    }

    fn connect(&self, py: Python<'_>) -> PyResult<()> {
        let route = self.route()?;
        wait(py, async { route.connect().await })?.map_err(|failure| failure.into_exception(py))
    }

    fn connect_async<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let route = self.route()?;
        asyncio::spawn(py, async move { route.connect().await })
    }

    #[pyo3(signature = (layer, rows, seconds, options, out = None))]
    fn forward<'py>(
        &self,
        py: Python<'py>,
        layer: u32,
        rows: &Bound<'py, PyAny>,
        seconds: Option<f64>,
        options: Options<'py>,
        out: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, Answer>> {
        let route = self.route()?;
        let arguments = Arguments::new(layer, rows, seconds, options, out, self.weights.as_ref())?;
        let received = match route {
            Route::Remote(connection) => {
                let out = arguments.out.clone();
                let received = wait(py, connection.forward(arguments.into_call()))?;
                py.detach(|| received.and_then(|received| received.placed(out)))
            }
            Route::Session(session) => {
                // Signal handlers run in this thread only while it is attached.
                let mut check = || Python::attach(|py| py.check_signals());
                match py.detach(|| session.call(&arguments, &mut check)) {
                    Ok(received) => Ok(received),
                    Err(End::Failed(failure)) => Err(failure),
                    Err(End::Interrupted(exception)) => return Err(exception),
                }
            }
        };
        received.map_err(|failure| failure.into_exception(py))?.into_pyobject(py)
    }

    #[pyo3(signature = (layer, rows, seconds, options, out = None))]
    fn forward_async<'py>(
        &self,
        py: Python<'py>,
        layer: u32,
        rows: &Bound<'py, PyAny>,
        seconds: Option<f64>,
        options: Options<'py>,
        out: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let route = self.route()?;
        let arguments = Arguments::new(layer, rows, seconds, options, out, self.weights.as_ref())?;
        let out = arguments.out.clone();
        asyncio::spawn_filling(py, route.call(arguments), out)
    }

    fn model(&self, py: Python<'_>, name: String) -> PyResult<Model> {
        let route = self.route()?;
        wait(py, async { route.model(name).await })?.map_err(|failure| failure.into_exception(py))
    }

    fn model_async<'py>(&self, py: Python<'py>, name: String) -> PyResult<Bound<'py, PyAny>> {
        let route = self.route()?;
        asyncio::spawn(py, async move { route.model(name).await })
    }

    fn models(&self, py: Python<'_>) -> PyResult<Vec<ModelSummary>> {
        let route = self.route()?;
        wait(py, async { route.models().await })?.map_err(|failure| failure.into_exception(py))
    }

    fn models_async<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let route = self.route()?;
        asyncio::spawn(py, async move { route.models().await })
    }

    fn stream(&self, capacity: usize) -> PyResult<NativeStream> {
        Ok(NativeStream::new(self.route()?, runtime::handle()?, capacity, self.weights.clone()))
    }
}
