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
    ///
    /// # Errors
    /// The first error of that work.
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
        let mut graph =
            Graph { raw: ptr::null_mut(), captured: graph, first: None, _device: self.device.clone() };
        // SAFETY: the graph was just captured.
        let status = unsafe { sys::cuGraphInstantiateWithFlags(&raw mut graph.raw, graph.captured, 0) };
        check("cuGraphInstantiate", status.result())?;
        graph.first = graph.first_kernel()?;
        Ok(graph)
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
    /// Names the nodes of `raw`.
    captured: sys::CUgraph,
    /// The kernel that nothing precedes, if there is exactly one.
    first: Option<FirstKernel>,
    _device: Device,
}

/// A kernel node and its launch.
#[derive(Clone, Copy, Debug)]
struct FirstKernel {
    node: sys::CUgraphNode,
    launch: sys::CUDA_KERNEL_NODE_PARAMS,
}

// SAFETY: driver handles may be used from any thread.
unsafe impl Send for Graph {}

impl Graph {
    /// Replays the graph on a stream.
    ///
    /// # Errors
    /// The driver's error.
    pub fn launch(&self, stream: &Stream) -> Result<(), DeviceError> {
        // SAFETY: graph and stream are alive.
        check("cuGraphLaunch", unsafe { result::graph::launch(self.raw, stream.raw) })
    }

    fn first_kernel(&self) -> Result<Option<FirstKernel>, DeviceError> {
        let (mut node, mut count) = (ptr::null_mut(), 1);
        // SAFETY: the graph is alive, there is room for one node, and a null pointer asks for the number of nodes.
        unsafe {
            let found = sys::cuGraphGetRootNodes(self.captured, ptr::null_mut(), &raw mut count);
            check("cuGraphGetRootNodes", found.result())?;
            if count != 1 {
                return Ok(None);
            }
            let found = sys::cuGraphGetRootNodes(self.captured, &raw mut node, &raw mut count);
            check("cuGraphGetRootNodes", found.result())?;
            let mut launch: sys::CUDA_KERNEL_NODE_PARAMS = std::mem::zeroed();
            // Any other kind of node is an error.
            match sys::cuGraphKernelNodeGetParams_v2(node, &raw mut launch) {
                sys::CUresult::CUDA_SUCCESS => Ok(Some(FirstKernel { node, launch })),
                _ => Ok(None),
            }
        }
    }

    /// Replaces the parameters of the graph's first kernel in later launches. Returns whether there is such a kernel.
    ///
    /// # Errors
    /// The driver's error.
    ///
    /// # Safety
    /// `P` is the one parameter of the kernel, and its addresses are valid until the last launch with it has ended.
    pub unsafe fn set_first<P: Copy>(&self, params: &P) -> Result<bool, DeviceError> {
        let Some(FirstKernel { node, mut launch }) = self.first else { return Ok(false) };
        let mut values = [ptr::from_ref(params).cast_mut().cast::<std::ffi::c_void>()];
        launch.kernelParams = values.as_mut_ptr();
        launch.extra = ptr::null_mut();
        // SAFETY: the node is of the graph that `raw` was made from; the driver copies the parameters, whose type the caller
        // vouches for.
        let set = unsafe { sys::cuGraphExecKernelNodeSetParams_v2(self.raw, node, &raw const launch) };
        check("cuGraphExecKernelNodeSetParams", set.result())?;
        Ok(true)
    }

    /// Uploads the graph to the device before its first replay.
    ///
    /// # Errors
    /// The driver's error.
    pub fn upload(&self, stream: &Stream) -> Result<(), DeviceError> {
        // SAFETY: graph and stream are alive.
        check("cuGraphUpload", unsafe { result::graph::upload(self.raw, stream.raw) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: each is destroyed once. An error cannot be handled here.
        unsafe {
            if !self.raw.is_null() {
                let _ = result::graph::exec_destroy(self.raw);
            }
            let _ = result::graph::destroy(self.captured);
        }
    }
}
