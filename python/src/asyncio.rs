//! Conversion of futures of the runtime to futures of `asyncio`.

use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;

use pyo3::prelude::*;
use pyo3::{IntoPyObjectExt as _, intern};
use tokio::task::AbortHandle;
use tonic::Status;

use crate::errors::CallError;
use crate::input::Output;
use crate::runtime;

/// Ends the task when its `asyncio` future was cancelled, and gives the caller's array back before the cancelled task goes on: callbacks
/// run in the order in which they were added, and this one is added first.
#[pyclass(frozen)]
struct OnDone {
    task: AbortHandle,
    out: Option<Arc<Output>>,
}

#[pymethods]
impl OnDone {
    fn __call__(&self, future: &Bound<'_, PyAny>) -> PyResult<()> {
        if future.call_method0(intern!(future.py(), "cancelled"))?.is_truthy()? {
            self.task.abort();
            if let Some(out) = &self.out {
                out.give_back();
            }
        }
        Ok(())
    }
}

/// Runs `future` on the runtime and returns a future of the running event loop that gets its result.
///
/// # Errors
/// If no event loop runs in this thread.
pub(crate) fn spawn<'py, T>(
    py: Python<'py>,
    future: impl Future<Output = Result<T, CallError>> + Send + 'static,
) -> PyResult<Bound<'py, PyAny>>
where
    T: for<'a> IntoPyObject<'a> + Send + 'static,
{
    spawn_filling(py, future, None)
}

/// As [`spawn`], for a future that copies rows into `out`. Once the returned future is cancelled, nothing is copied there.
pub(crate) fn spawn_filling<'py, T>(
    py: Python<'py>,
    future: impl Future<Output = Result<T, CallError>> + Send + 'static,
    out: Option<Arc<Output>>,
) -> PyResult<Bound<'py, PyAny>>
where
    T: for<'a> IntoPyObject<'a> + Send + 'static,
{
    let event_loop = py.import(intern!(py, "asyncio"))?.call_method0(intern!(py, "get_running_loop"))?;
    let promise = event_loop.call_method0(intern!(py, "create_future"))?;
    let (their_loop, their_promise) = (event_loop.unbind(), promise.clone().unbind());
    let task = runtime::handle()?.spawn(async move {
        let result = caught(future).await;
        // At exit there is no interpreter that could get the result.
        Python::try_attach(|py| {
            let delivered = deliver(py, &their_loop, their_promise, result);
            if let Err(error) = delivered
                && !loop_is_closed(py, &their_loop)
            {
                error.write_unraisable(py, None);
            }
        });
    });
    promise.call_method1(intern!(py, "add_done_callback"), (OnDone { task: task.abort_handle(), out },))?;
    Ok(promise)
}

/// The result of `future`; INTERNAL if it panics, so that the event loop's future ends in any case.
async fn caught<T>(future: impl Future<Output = Result<T, CallError>>) -> Result<T, CallError> {
    let mut future = pin!(future);
    poll_fn(|context| {
        let polled = catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(context)));
        polled.unwrap_or_else(|_| {
            let text = "the client panicked; its message is on standard error";
            Poll::Ready(Err(Status::internal(text).into()))
        })
    })
    .await
}

/// Passes the result to the event loop's thread.
fn deliver<T: for<'a> IntoPyObject<'a>>(
    py: Python<'_>,
    event_loop: &Py<PyAny>,
    promise: Py<PyAny>,
    result: Result<T, CallError>,
) -> PyResult<()> {
    let settle = py.import(intern!(py, "expertd._aio"))?.getattr(intern!(py, "settle"))?;
    let schedule = intern!(py, "call_soon_threadsafe");
    match result {
        Ok(value) => {
            let value = value.into_py_any(py)?;
            event_loop.call_method1(py, schedule, (settle, promise, value, py.None()))?;
        }
        Err(failure) => {
            let exception = failure.into_exception(py);
            event_loop.call_method1(py, schedule, (settle, promise, py.None(), exception))?;
        }
    }
    Ok(())
}

/// Whether the loop is closed: it then accepts no results, and its futures have no reader.
fn loop_is_closed(py: Python<'_>, event_loop: &Py<PyAny>) -> bool {
    event_loop
        .call_method0(py, intern!(py, "is_closed"))
        .and_then(|closed| closed.is_truthy(py))
        .unwrap_or(true)
}
