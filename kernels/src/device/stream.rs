//! Streams and captured graphs.

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

    /// Waits until all work on the stream has ended.
    pub fn synchronize(&self) -> Result<(), DeviceError> {
        // SAFETY: the stream is alive.
        check("cuStreamSynchronize", unsafe { result::stream::synchronize(self.raw) })
    }

    /// Captures the launches of `record` on this stream into a graph. Every kernel must have run before, so that nothing is
    /// initialised lazily during the capture.
    ///
    /// # Errors
    /// The error of `record`, or the driver's error.
    pub fn capture<E: From<DeviceError>>(&self, record: impl FnOnce() -> Result<(), E>) -> Result<Graph, E> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive and not capturing.
        check("cuStreamBeginCapture", unsafe { result::stream::begin_capture(self.raw, mode) })?;
        let recorded = record();
        // SAFETY: ends the capture that was begun above, even if `record` failed.
        let graph = check("cuStreamEndCapture", unsafe { result::stream::end_capture(self.raw) });
        recorded?;
        let graph = graph?;
        let mut executable = ptr::null_mut();
        // SAFETY: the graph was just captured.
        let status = unsafe { sys::cuGraphInstantiateWithFlags(&raw mut executable, graph, 0) };
        // SAFETY: the executable graph does not need the captured one any more.
        let destroyed = unsafe { result::graph::destroy(graph) };
        check("cuGraphInstantiate", status.result())?;
        check("cuGraphDestroy", destroyed)?;
        Ok(Graph { raw: executable, _device: self.device.clone() })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: the stream is destroyed once. An error cannot be handled here.
            let _ = unsafe { result::stream::destroy(self.raw) };
        }
    }
}

/// An executable graph of captured launches.
#[derive(Debug)]
pub struct Graph {
    raw: sys::CUgraphExec,
    _device: Device,
}

// SAFETY: driver handles may be used from any thread.
unsafe impl Send for Graph {}

impl Graph {
    /// Replays the graph on a stream.
    pub fn launch(&self, stream: &Stream) -> Result<(), DeviceError> {
        // SAFETY: graph and stream are alive.
        check("cuGraphLaunch", unsafe { result::graph::launch(self.raw, stream.raw) })
    }

    /// Uploads the graph to the device before its first replay.
    pub fn upload(&self, stream: &Stream) -> Result<(), DeviceError> {
        // SAFETY: graph and stream are alive.
        check("cuGraphUpload", unsafe { result::graph::upload(self.raw, stream.raw) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: the graph is destroyed once. An error cannot be handled here.
        let _ = unsafe { result::graph::exec_destroy(self.raw) };
    }
}
