//! Streams, and what was captured on them.

use std::ptr;

use cudarc::driver::result;
use cudarc::driver::sys::{self, CUstream};

use super::{Device, DeviceError, check};

/// A stream of one device.
#[derive(Debug)]
pub struct Stream {
    raw: CUstream,
    device: Device,
}

// SAFETY: driver handles may be used from any thread.
unsafe impl Send for Stream {}

impl Stream {
    pub(super) fn new(raw: CUstream, device: Device) -> Self {
        Stream { raw, device }
    }

    /// The driver's handle.
    #[must_use]
    pub fn raw(&self) -> CUstream {
        self.raw
    }

    /// Waits for everything on it.
    ///
    /// # Errors
    /// The first error of anything that ran.
    pub fn synchronize(&self) -> Result<(), DeviceError> {
        // SAFETY: a live stream.
        check("cuStreamSynchronize", unsafe { result::stream::synchronize(self.raw) })
    }

    /// Captures what `record` launches on this stream into a graph. Everything it launches must have run before, so
    /// that nothing is initialised lazily in the capture.
    ///
    /// # Errors
    /// `record`'s error, or the driver's.
    pub fn capture<E: From<DeviceError>>(&self, record: impl FnOnce() -> Result<(), E>) -> Result<Graph, E> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: a live stream that is not capturing.
        check("cuStreamBeginCapture", unsafe { result::stream::begin_capture(self.raw, mode) })?;
        let recorded = record();
        // SAFETY: ends the capture begun above, whatever came of it.
        let graph = check("cuStreamEndCapture", unsafe { result::stream::end_capture(self.raw) });
        recorded?;
        let graph = graph?;
        let mut executable = ptr::null_mut();
        // SAFETY: a graph that was just captured.
        let status = unsafe { sys::cuGraphInstantiateWithFlags(&raw mut executable, graph, 0) };
        // SAFETY: the executable graph does not need it any more.
        let destroyed = unsafe { result::graph::destroy(graph) };
        check("cuGraphInstantiate", status.result())?;
        check("cuGraphDestroy", destroyed)?;
        Ok(Graph { raw: executable, _device: self.device.clone() })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: destroyed once. Nothing can be done about an error here.
            let _ = unsafe { result::stream::destroy(self.raw) };
        }
    }
}

/// A captured step, ready for replay.
#[derive(Debug)]
pub struct Graph {
    raw: sys::CUgraphExec,
    _device: Device,
}

// SAFETY: driver handles may be used from any thread.
unsafe impl Send for Graph {}

impl Graph {
    /// Replays it on a stream.
    ///
    /// # Errors
    /// The driver's.
    pub fn launch(&self, stream: &Stream) -> Result<(), DeviceError> {
        // SAFETY: both are alive.
        check("cuGraphLaunch", unsafe { result::graph::launch(self.raw, stream.raw) })
    }

    /// Uploads it ahead of the first replay.
    ///
    /// # Errors
    /// The driver's.
    pub fn upload(&self, stream: &Stream) -> Result<(), DeviceError> {
        // SAFETY: both are alive.
        check("cuGraphUpload", unsafe { result::graph::upload(self.raw, stream.raw) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: destroyed once. Nothing can be done about an error here.
        let _ = unsafe { result::graph::exec_destroy(self.raw) };
    }
}
