//! Streams and graphs of a session, for clients that have none of their own.

#![allow(unsafe_code, reason = "calls the CUDA driver")]

use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUgraphExec, CUstream};

use super::client::{CudaSession, DoorbellStatus, Prepared};
use super::driver::check;
use crate::client::SessionError;

/// A stream of the session's GPU that calls through one doorbell.
#[derive(Debug)]
pub struct SessionStream {
    session: Arc<CudaSession>,
    doorbell: u32,
    stream: CUstream,
}

// SAFETY: driver handles may be used from any thread.
unsafe impl Send for SessionStream {}

/// Calls of a stream, captured once, that are started together.
#[derive(Debug)]
pub struct SessionGraph {
    session: Arc<CudaSession>,
    replay: CUgraphExec,
}

// SAFETY: driver handles may be used from any thread.
unsafe impl Send for SessionGraph {}

impl SessionStream {
    /// Makes a stream. No other stream may use its doorbell meanwhile: two calls of a doorbell in flight spoil each other's output.
    ///
    /// # Errors
    /// The driver's error.
    pub fn new(session: &Arc<CudaSession>, doorbell: u32) -> Result<Self, SessionError> {
        let _entered = session.gpu().enter()?;
        let mut stream = ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the argument is valid for writes.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&raw mut stream, flags) })?;
        Ok(SessionStream { session: Arc::clone(session), doorbell, stream })
    }

    /// The session.
    #[must_use]
    pub const fn session(&self) -> &Arc<CudaSession> {
        &self.session
    }

    /// Enqueues a call of the first `rows` prepared rows.
    ///
    /// # Errors
    /// As [`CudaSession::enqueue`].
    pub fn call(&self, call: Prepared, rows: u32) -> Result<(), SessionError> {
        // SAFETY: a live stream of the session's GPU. Its calls follow one another, and the session outlives the stream and
        // the graphs that captured it.
        unsafe { self.session.enqueue(call, self.doorbell, rows, self.stream.cast()) }
    }

    /// Waits until the stream's work has ended. Work of a session that ends meanwhile ends as well.
    ///
    /// # Errors
    /// The driver's error.
    pub fn synchronize(&self) -> Result<(), SessionError> {
        let _entered = self.session.gpu().enter()?;
        // SAFETY: a live stream.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.stream) })
    }

    /// How the calls of the stream's doorbell ended.
    ///
    /// # Errors
    /// As [`CudaSession::status`].
    pub fn status(&self) -> Result<DoorbellStatus, SessionError> {
        self.session.status(self.doorbell)
    }

    /// Captures the calls that `work` enqueues on this stream, without starting them.
    ///
    /// # Errors
    /// Those of `work`, or the driver's.
    pub fn capture(
        &self,
        work: impl FnOnce() -> Result<(), SessionError>,
    ) -> Result<SessionGraph, SessionError> {
        let _entered = self.session.gpu().enter()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: a live stream.
        check("cuStreamBeginCapture", unsafe { sys::cuStreamBeginCapture_v2(self.stream, mode) })?;
        let worked = work();
        let (mut graph, mut replay) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the stream is captured, and the arguments are valid for writes. The graph is destroyed once.
        unsafe {
            check("cuStreamEndCapture", sys::cuStreamEndCapture(self.stream, &raw mut graph))?;
            let made = match worked {
                Ok(()) => {
                    let made = sys::cuGraphInstantiateWithFlags(&raw mut replay, graph, 0);
                    check("cuGraphInstantiate", made)
                }
                Err(error) => Err(error),
            };
            let _ = sys::cuGraphDestroy(graph);
            made?;
        }
        Ok(SessionGraph { session: Arc::clone(&self.session), replay })
    }

    /// Starts captured calls, of this stream or another one with the same doorbell.
    ///
    /// # Errors
    /// The driver's error, or the session's end.
    pub fn replay(&self, graph: &SessionGraph) -> Result<(), SessionError> {
        self.session.check()?;
        let _entered = self.session.gpu().enter()?;
        // SAFETY: graph and stream are alive.
        check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(graph.replay, self.stream) })
    }
}

impl Drop for SessionStream {
    fn drop(&mut self) {
        if let Ok(_entered) = self.session.gpu().enter() {
            // SAFETY: destroyed once; its work ends before its resources are released.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.stream) };
        }
    }
}

impl Drop for SessionGraph {
    fn drop(&mut self) {
        if let Ok(_entered) = self.session.gpu().enter() {
            // SAFETY: destroyed once.
            let _ = unsafe { sys::cuGraphExecDestroy(self.replay) };
        }
    }
}
