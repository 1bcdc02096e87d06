//! The client of a CUDA session.

#![allow(unsafe_code, reason = "calls the CUDA driver")]

mod calls;
mod replies;
mod status;
mod watch;

use std::sync::{Arc, Mutex, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use cudarc::driver::sys::{self, CUdeviceptr};

use self::replies::Replies;
use self::watch::Shared;
use super::control::ControlMemory;
use super::driver::{Gpu, check};
use super::memory::DeviceMemory;
use super::wire::{KIND_CUDA, OpenCuda, OpenedCuda};
use crate::client::{Link, Opening, SessionError};
use crate::wire::{VERSION, frame};

pub use calls::{Prepared, RoutingPlaces};
pub use status::{CallFailure, DoorbellStatus};
pub use watch::FailureHandler;

/// How a CUDA session is opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaSessionOptions {
    /// The GPU that has the rows, by its number among those that this process sees.
    pub device: u32,
    /// Size of the memory for rows and outputs, in bytes.
    pub memory_bytes: usize,
    /// Number of doorbells: calls that may be in flight at once.
    pub doorbells: u32,
    /// Size of what one call may carry in ids, weights and token ids, in bytes: [`RoutingLayout`](super::wire::RoutingLayout) says how many a call needs. 0 if the
    /// service's gate routes all calls.
    pub routing_bytes: u32,
    /// How long opening and preparing may take.
    pub timeout: Duration,
}

impl Default for CudaSessionOptions {
    fn default() -> Self {
        CudaSessionOptions {
            device: 0,
            memory_bytes: 64 << 20,
            doorbells: 1,
            routing_bytes: 0,
            timeout: Duration::from_secs(10),
        }
    }
}

/// An open CUDA session. Threads may share it; dropping it ends it, and waits for the GPU's work.
#[derive(Debug)]
pub struct CudaSession {
    shared: Arc<Shared>,
    /// Device address of the control region's first byte.
    signals: CUdeviceptr,
    memory: DeviceMemory,
    gpu: Arc<Gpu>,
    link: Link,
    replies: Mutex<Replies>,
    watcher: Option<JoinHandle<()>>,
    opened: OpenedCuda,
    model: Vec<u8>,
    timeout: Duration,
}

impl CudaSession {
    /// Allocates memory on a GPU and opens a session for it on `address`, `unix:PATH`.
    ///
    /// # Errors
    /// If there is no driver or no room on the GPU, or the service cannot be reached or refuses the session.
    pub fn open(address: &str, options: &CudaSessionOptions) -> Result<CudaSession, SessionError> {
        let gpu = Gpu::open(options.device)?;
        gpu.check_memory_operations()?;
        let memory = DeviceMemory::allocate(&gpu, options.memory_bytes)?;
        let mut opening = Opening::connect(address, options.timeout)?;
        let open = OpenCuda {
            version: VERSION,
            kind: KIND_CUDA,
            memory_bytes: memory.bytes() as u64,
            doorbells: options.doorbells,
            routing_bytes: options.routing_bytes,
            device: gpu.uuid()?,
        };
        opening.send(frame::GET_MODEL, &[]);
        // The service lets a client pass a descriptor once it has checked the client's user.
        let model = opening.expect(frame::MODEL, "MODEL")?;
        opening.send(frame::OPEN, bytemuck::bytes_of(&open));
        opening.send_descriptor(memory.export()?);
        let opened: OpenedCuda = opening.expect_record(frame::OPENED_CUDA, "OPENED")?;
        if (opened.version, opened.kind) != (VERSION, KIND_CUDA) {
            let (version, kind) = (opened.version, opened.kind);
            let text =
                format!("a session of version {version} and kind {kind}, expected {VERSION} and {KIND_CUDA}");
            return Err(SessionError::Protocol(text));
        }
        let control = ControlMemory::join(opening.receive_region()?, &opened)?;
        let failed = |source| SessionError::Socket { address: address.to_owned(), source };
        let socket = opening.finish()?;
        let signals = register(&gpu, &control)?;
        control.raise_idle();
        let shared = Arc::new(Shared::new(control));
        let (sender, replies) = mpsc::channel();
        let (of_thread, reading) = (Arc::clone(&shared), socket.try_clone().map_err(failed)?);
        let watcher = std::thread::Builder::new().name("expertd-session".to_owned());
        let watcher = watcher.spawn(move || of_thread.watch(&reading, &sender)).map_err(failed)?;
        Ok(CudaSession {
            shared,
            signals,
            memory,
            gpu,
            link: Link::new(socket),
            replies: Mutex::new(Replies::new(replies)),
            watcher: Some(watcher),
            opened,
            model,
            timeout: options.timeout,
        })
    }

    /// Checks that the session is open.
    pub(super) fn check(&self) -> Result<(), SessionError> {
        self.shared.check()
    }

    /// Has `handler` called with the reason when a call of a doorbell fails: before the waiting stream is released if the session has ended,
    /// and within a millisecond of the failure if the service failed the call. A doorbell has one handler; others are ignored.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn on_failure(&self, doorbell: u32, handler: FailureHandler) -> Result<(), SessionError> {
        Shared::on_failure(&self.shared, doorbell, handler)
    }

    /// Elements of a row.
    #[must_use]
    pub const fn hidden(&self) -> usize {
        self.opened.hidden as usize
    }

    /// The served model: an encoded `expertd.v1.GetModelResponse`.
    #[must_use]
    pub fn model(&self) -> &[u8] {
        &self.model
    }

    /// The session's memory on the GPU, for rows and outputs. Places are offsets into it.
    #[must_use]
    pub const fn memory(&self) -> &DeviceMemory {
        &self.memory
    }

    /// The GPU.
    #[must_use]
    pub const fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Number of doorbells.
    #[must_use]
    pub const fn doorbells(&self) -> u32 {
        self.opened.doorbells
    }

    /// Device address of a doorbell's completion word, a 32-bit integer in host memory; see [`wire`](super::wire) for its values. `None` if
    /// there is no such doorbell.
    #[must_use]
    pub fn completion_word(&self, doorbell: u32) -> Option<u64> {
        (doorbell < self.opened.doorbells).then(|| self.doorbell(doorbell))
    }
}

impl Drop for CudaSession {
    fn drop(&mut self) {
        if !self.link.is_own() {
            // A fork has neither the watcher nor the GPU's context: `Gpu` has nothing of its parent's released.
            std::mem::forget(self.watcher.take());
            return;
        }
        // The session ends. The service frees the pages of the control region when the socket is closed, which must not happen while
        // the GPU has registered them: streams would wait for words in pages that no process sees any more.
        self.link.end_session();
        std::thread::scope(|scope| {
            // Streams are released from here, because a stopped service does not answer the end of the session.
            let releasing = std::thread::Builder::new().name("expertd-release".to_owned());
            if releasing.spawn_scoped(scope, || self.shared.release_until_dropped()).is_err() {
                // The watching thread then releases them.
                self.link.stop_reading();
            }
            if let Ok(_entered) = self.gpu.enter() {
                // SAFETY: the context is current.
                let _ = unsafe { sys::cuCtxSynchronize() };
                let (pages, _) = self.shared.control.signals();
                // SAFETY: registered once in `open`; no work of the GPU uses the pages any more.
                let _ = unsafe { sys::cuMemHostUnregister(pages.cast()) };
            }
            self.shared.stop();
        });
        self.link.close();
        if let Some(watcher) = self.watcher.take() {
            let _ = watcher.join();
        }
    }
}

/// Registers doorbells and routing areas with the GPU; returns the device address of the region's first byte.
fn register(gpu: &Gpu, control: &ControlMemory) -> Result<CUdeviceptr, SessionError> {
    let (pages, bytes) = control.signals();
    let _entered = gpu.enter()?;
    let flags = sys::CU_MEMHOSTREGISTER_DEVICEMAP | sys::CU_MEMHOSTREGISTER_PORTABLE;
    let mut address = 0;
    // SAFETY: the pages are mapped as long as `control` lives, which outlives their registration.
    unsafe {
        check("cuMemHostRegister", sys::cuMemHostRegister_v2(pages.cast(), bytes, flags))?;
        let found = sys::cuMemHostGetDevicePointer_v2(&raw mut address, pages.cast(), 0);
        if let Err(error) = check("cuMemHostGetDevicePointer", found) {
            let _ = sys::cuMemHostUnregister(pages.cast());
            return Err(error);
        }
    }
    Ok(address)
}
