//! A connection, for blocking calls and for `asyncio`.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use expertd_proto::transport::Credentials;
use expertd_proto::{Client, RetryPolicy};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use tokio::sync::OnceCell;

use crate::asyncio;
use crate::errors::Failure;
use crate::model::{Model, ModelSummary};
use crate::receipt::{Answer, Received};
use crate::request::{Call, Options};
use crate::runtime::{self, timeout, wait};
use crate::stream::NativeStream;

/// An address, and the connection to it after the first call.
#[derive(Debug)]
pub(crate) struct Connection {
    address: String,
    credentials: Credentials,
    retry: Option<RetryPolicy>,
    client: OnceCell<Client>,
}

impl Connection {
    /// The connected client; the first call connects.
    pub(crate) async fn client(&self) -> Result<&Client, Failure> {
        self.client
            .get_or_try_init(|| async {
                let client = Client::connect_with(&self.address, &self.credentials).await?;
                Ok(match self.retry {
                    Some(policy) => client.with_retry(policy),
                    None => client,
                })
            })
            .await
    }

    async fn forward(&self, call: Call) -> Result<Received, Failure> {
        let Call { message, timeout, shape } = call;
        let response = self.client().await?.forward(message, timeout).await?;
        shape.read_answer(response)
    }

    pub(crate) const fn retry(&self) -> Option<&RetryPolicy> {
        self.retry.as_ref()
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
}

impl From<CredentialArguments> for Credentials {
    fn from(given: CredentialArguments) -> Credentials {
        let CredentialArguments { ca, cert, key, server_name, token_file } = given;
        Credentials { ca, cert, key, server_name, token_file }
    }
}

/// The native part of `Client` and `AsyncClient`.
#[pyclass(frozen)]
#[derive(Debug)]
pub(crate) struct NativeClient {
    connection: Arc<Connection>,
    /// The process that made the client. Connections do not survive a fork.
    process: u32,
}

impl NativeClient {
    fn connection(&self) -> PyResult<Arc<Connection>> {
        let found = std::process::id();
        if found != self.process {
            return Err(PyRuntimeError::new_err(format!(
                "this client was made in process {} and is used in process {found}. Connections do not survive a fork: \
                 make a client in each process",
                self.process
            )));
        }
        Ok(Arc::clone(&self.connection))
    }
}

#[pymethods]
impl NativeClient {
    #[new]
    fn new(
        address: String,
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
        let connection = Arc::new(Connection { address, credentials, retry, client: OnceCell::new() });
        Ok(NativeClient { connection, process: std::process::id() })
    }

    fn connect(&self, py: Python<'_>) -> PyResult<()> {
        let connection = self.connection()?;
        let connected = wait(py, async { connection.client().await.map(|_| ()) })?;
        connected.map_err(|failure| failure.into_exception(py))
    }

    fn connect_async<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let connection = self.connection()?;
        asyncio::spawn(py, async move { connection.client().await.map(|_| ()) })
    }

    fn forward<'py>(
        &self,
        py: Python<'py>,
        layer: u32,
        rows: &Bound<'py, PyAny>,
        seconds: Option<f64>,
        options: Options<'py>,
    ) -> PyResult<Bound<'py, Answer>> {
        let connection = self.connection()?;
        let call = Call::new(layer, rows, seconds, &options)?;
        let received = wait(py, connection.forward(call))?;
        received.map_err(|failure| failure.into_exception(py))?.into_pyobject(py)
    }

    fn forward_async<'py>(
        &self,
        py: Python<'py>,
        layer: u32,
        rows: &Bound<'py, PyAny>,
        seconds: Option<f64>,
        options: Options<'py>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let connection = self.connection()?;
        let call = Call::new(layer, rows, seconds, &options)?;
        asyncio::spawn(py, async move { connection.forward(call).await })
    }

    fn model(&self, py: Python<'_>, name: &str) -> PyResult<Model> {
        let connection = self.connection()?;
        let model = wait(py, async { Ok(connection.client().await?.model(name).await?.into()) })?;
        model.map_err(|failure: Failure| failure.into_exception(py))
    }

    fn model_async<'py>(&self, py: Python<'py>, name: String) -> PyResult<Bound<'py, PyAny>> {
        let connection = self.connection()?;
        asyncio::spawn(py, async move { Ok(Model::from(connection.client().await?.model(&name).await?)) })
    }

    fn models(&self, py: Python<'_>) -> PyResult<Vec<ModelSummary>> {
        let connection = self.connection()?;
        let models = wait(py, async { Ok(connection.client().await?.models().await?) })?;
        let models = models.map_err(|failure: Failure| failure.into_exception(py))?;
        Ok(models.into_iter().map(ModelSummary::from).collect())
    }

    fn models_async<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let connection = self.connection()?;
        asyncio::spawn(py, async move {
            let models = connection.client().await?.models().await?;
            Ok(models.into_iter().map(ModelSummary::from).collect::<Vec<_>>())
        })
    }

    fn stream(&self, capacity: usize) -> PyResult<NativeStream> {
        Ok(NativeStream::new(self.connection()?, runtime::handle()?, capacity))
    }
}
