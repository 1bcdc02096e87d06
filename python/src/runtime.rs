//! The asynchronous runtime of this process, and waits that let other Python threads run.

use std::pin::pin;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use expertd_client::MAX_TIMEOUT;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use tokio::runtime::{Builder, Handle, Runtime};

/// Number of threads that drive connections.
const WORKERS: usize = 2;
/// Interval at which a blocking call checks for signals such as Ctrl-C.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(100);

/// The runtime, and the process that made it, because threads do not survive a fork.
static RUNTIME: Mutex<Option<(u32, Handle)>> = Mutex::new(None);

/// The process that made an object. Connections, threads and the contexts of GPUs do not survive a fork.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OwnProcess(u32);

impl OwnProcess {
    pub(crate) fn current() -> OwnProcess {
        OwnProcess(std::process::id())
    }

    /// # Errors
    /// RuntimeError in a fork; `what` was made by the process.
    pub(crate) fn check(self, what: &str) -> PyResult<()> {
        let (made, found) = (self.0, std::process::id());
        if made == found {
            return Ok(());
        }
        Err(PyRuntimeError::new_err(format!(
            "this {what} was made in process {made} and is used in process {found}. It does not survive a fork: make a client in each \
             process"
        )))
    }
}

/// The runtime of this process, made when it is first needed.
///
/// # Errors
/// If its threads cannot be started.
pub(crate) fn handle() -> PyResult<Handle> {
    let mut current = RUNTIME.lock().unwrap_or_else(PoisonError::into_inner);
    let process = std::process::id();
    if let Some((owner, handle)) = &*current
        && *owner == process
    {
        return Ok(handle.clone());
    }
    let runtime: Runtime = Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .thread_name("expertd")
        .enable_all()
        .build()
        .map_err(|error| PyRuntimeError::new_err(format!("cannot start the client's threads: {error}")))?;
    let handle = runtime.handle().clone();
    // The runtime lives as long as the process, because clients come and go, and because a runtime whose threads were lost in a
    // fork cannot be shut down.
    std::mem::forget(runtime);
    *current = Some((process, handle.clone()));
    Ok(handle)
}

/// Waits for `future` on this thread, detached from the interpreter.
///
/// # Errors
/// The exception of a signal handler, such as KeyboardInterrupt; the future is dropped then.
pub(crate) fn wait<T: Send>(py: Python<'_>, future: impl Future<Output = T> + Send) -> PyResult<T> {
    let handle = handle()?;
    let mut future = pin!(future);
    loop {
        let step = async { tokio::time::timeout(SIGNAL_INTERVAL, future.as_mut()).await.ok() };
        match py.detach(|| handle.block_on(step)) {
            Some(value) => return Ok(value),
            None => py.check_signals()?,
        }
    }
}

/// A timeout in seconds, as Python passes it. The only place where Python's timeouts enter: those beyond the range of clocks are shortened to
/// [`MAX_TIMEOUT`].
///
/// # Errors
/// ValueError if it is negative, zero or not a number.
pub(crate) fn timeout(seconds: Option<f64>, what: &str) -> PyResult<Option<Duration>> {
    let Some(seconds) = seconds else { return Ok(None) };
    match Duration::try_from_secs_f64(seconds.min(MAX_TIMEOUT.as_secs_f64())) {
        Ok(duration) if !duration.is_zero() && !seconds.is_nan() => Ok(Some(duration)),
        _ => Err(PyValueError::new_err(format!(
            "{what} is {seconds}; expected a positive number of seconds, or None for no limit"
        ))),
    }
}
