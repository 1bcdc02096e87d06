//! The client of a CUDA session.

#![allow(unsafe_code, reason = "calls the CUDA driver")]

use std::ffi::c_void;
use std::mem::zeroed;
use std::net::Shutdown;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use cudarc::driver::sys::{self, CUdeviceptr, CUstream, CUstreamBatchMemOpParams, CUstreamBatchMemOpType};
use expertd_ipc::control::send_fds;

use super::control::ControlMemory;
use super::driver::{Gpu, check};
use super::memory::DeviceMemory;
use super::wire::{
    DONE, KIND_CUDA, MAX_PREPARE_FRAME, OpenCuda, OpenedCuda, PENDING, PrepareReply, PreparedCall, Ring,
};
use crate::client::{Receipt, SessionError};
use crate::socket;
use crate::wire::{CompletionRecord, MAX_SERVICE_FRAME, VERSION, frame};

/// How often words are released once the session has ended.
const RELEASE_INTERVAL: Duration = Duration::from_millis(1);

/// How a CUDA session is opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaSessionOptions {
    /// The GPU that has the rows, by its number among those that this process sees.
    pub device: u32,
    /// Size of the memory for rows and outputs, in bytes.
    pub memory_bytes: usize,
    /// Number of doorbells: calls that may be in flight at once.
    pub doorbells: u32,
    /// How long opening and preparing may take.
    pub timeout: Duration,
}

impl Default for CudaSessionOptions {
    fn default() -> Self {
        CudaSessionOptions {
            device: 0,
            memory_bytes: 64 << 20,
            doorbells: 1,
            timeout: Duration::from_secs(10),
        }
    }
}

/// A prepared call of a [`CudaSession`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prepared {
    number: u32,
    max_rows: u32,
}

/// How the calls of a doorbell ended.
#[derive(Clone, Debug)]
pub struct DoorbellStatus {
    /// Number of calls that ended.
    pub calls: u64,
    /// Number of calls that failed.
    pub failures: u64,
    /// How the last call was computed, if it was answered.
    pub last: Option<Receipt>,
    /// Why the last call that failed did.
    pub last_failure: Option<CallFailure>,
}

/// Why a call failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallFailure {
    /// Number of the call, from 1, among the doorbell's calls.
    pub call: u64,
    /// Code of gRPC.
    pub code: u32,
    /// The service's sentence.
    pub message: String,
}

/// State that the thread of the socket shares with the session.
#[derive(Debug)]
struct Shared {
    control: ControlMemory,
    has_ended: AtomicBool,
    is_dropped: AtomicBool,
    end: Mutex<Option<String>>,
}

impl Shared {
    fn end(&self, reason: String) {
        self.end.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(reason);
        self.has_ended.store(true, Ordering::Release);
    }

    fn check(&self) -> Result<(), SessionError> {
        if !self.has_ended.load(Ordering::Acquire) {
            return Ok(());
        }
        let reason = self.end.lock().unwrap_or_else(PoisonError::into_inner).clone().unwrap_or_default();
        Err(SessionError::Ended { reason })
    }

    /// Reads the socket until the session ends, then releases waiting streams until the session is dropped. Streams may hold calls
    /// that begin later, in graphs for example, so one release is not enough.
    fn watch(&self, socket: &UnixStream, replies: &Sender<Vec<u8>>) {
        let reason = loop {
            match socket::receive(socket, MAX_SERVICE_FRAME) {
                Ok(Some((frame::ENDED | frame::REFUSED, text))) => {
                    break String::from_utf8_lossy(&text).into_owned();
                }
                Ok(Some((frame::PREPARED, payload))) => {
                    let _ = replies.send(payload);
                }
                Ok(Some(_)) => {}
                Ok(None) => break "the service closed the session's socket".to_owned(),
                Err(error) => break format!("the session's socket broke: {error}"),
            }
        };
        self.end(reason);
        while !self.is_dropped.load(Ordering::Acquire) {
            self.control.release();
            std::thread::sleep(RELEASE_INTERVAL);
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
    socket: UnixStream,
    replies: Mutex<Receiver<Vec<u8>>>,
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
        let (socket, failed) = connect(address, options.timeout)?;
        socket::send(&socket, frame::GET_MODEL, &[]).map_err(&failed)?;
        let model = expect(&socket, frame::MODEL).map_err(&failed)??;
        let open = OpenCuda {
            version: VERSION,
            kind: KIND_CUDA,
            memory_bytes: memory.bytes() as u64,
            doorbells: options.doorbells,
            reserved: 0,
            device: gpu.uuid()?,
        };
        let fd = memory.export()?;
        socket::send(&socket, frame::OPEN, bytemuck::bytes_of(&open))
            .and_then(|()| send_fds(&socket, &[fd.as_fd()]))
            .map_err(&failed)?;
        drop(fd);
        let opened = expect(&socket, frame::OPENED_CUDA).map_err(&failed)??;
        let opened: OpenedCuda =
            socket::record(&opened).map_err(|error| SessionError::Protocol(error.to_string()))?;
        if (opened.version, opened.kind) != (VERSION, KIND_CUDA) {
            let (version, kind) = (opened.version, opened.kind);
            let text =
                format!("a session of version {version} and kind {kind}, expected {VERSION} and {KIND_CUDA}");
            return Err(SessionError::Protocol(text));
        }
        let fd = socket::receive_region(&socket).map_err(&failed)?;
        let control = ControlMemory::join(fd, &opened)?;
        socket.set_read_timeout(None).map_err(&failed)?;
        let signals = register(&gpu, &control)?;
        let shared = Arc::new(Shared {
            control,
            has_ended: AtomicBool::new(false),
            is_dropped: AtomicBool::new(false),
            end: Mutex::new(None),
        });
        let (sender, replies) = mpsc::channel();
        let (of_thread, reading) = (Arc::clone(&shared), socket.try_clone().map_err(&failed)?);
        let watcher = std::thread::Builder::new().name("expertd-session".to_owned());
        let watcher = watcher.spawn(move || of_thread.watch(&reading, &sender)).map_err(&failed)?;
        Ok(CudaSession {
            shared,
            signals,
            memory,
            gpu,
            socket,
            replies: Mutex::new(replies),
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

    /// Device address of a doorbell's completion words, and their number. The words are 32-bit integers in host memory; see
    /// [`wire`](super::wire) for their values. `None` if there is no such doorbell.
    #[must_use]
    pub fn completion_words(&self, doorbell: u32) -> Option<(u64, u32)> {
        let control = &self.shared.control;
        let first = (doorbell < self.opened.doorbells).then(|| control.word_offset(doorbell, 0) as u64)?;
        Some((self.signals + first, control.words_each()))
    }

    /// Describes calls to the service, which checks them. Prepared calls live as long as the session.
    ///
    /// # Errors
    /// [`SessionError::NotPrepared`] with the reason why none of `calls` is prepared, or the session's end.
    pub fn prepare(&self, calls: &[PreparedCall]) -> Result<Vec<Prepared>, SessionError> {
        let replies = self.replies.lock().unwrap_or_else(PoisonError::into_inner);
        let mut prepared = Vec::with_capacity(calls.len());
        for part in calls.chunks(MAX_PREPARE_FRAME / size_of::<PreparedCall>()) {
            self.shared.check()?;
            let broke = |error: std::io::Error| SessionError::Ended { reason: error.to_string() };
            socket::send(&self.socket, frame::PREPARE, bytemuck::cast_slice(part)).map_err(broke)?;
            let reply = replies.recv_timeout(self.timeout).map_err(|_| {
                self.shared.check().err().unwrap_or(SessionError::TimedOut { waited: self.timeout })
            })?;
            let head = reply.get(..size_of::<PrepareReply>()).unwrap_or(&[]);
            let head: PrepareReply =
                socket::record(head).map_err(|error| SessionError::Protocol(error.to_string()))?;
            if head.count as usize != part.len() {
                let text = reply.get(size_of::<PrepareReply>()..).unwrap_or(&[]);
                return Err(SessionError::NotPrepared { reason: String::from_utf8_lossy(text).into_owned() });
            }
            prepared.extend(
                part.iter()
                    .zip(head.first..)
                    .map(|(call, number)| Prepared { number, max_rows: call.max_rows }),
            );
        }
        Ok(prepared)
    }

    /// Enqueues a call of the first `rows` prepared rows on a stream: work that was enqueued before has written the rows, and work
    /// that is enqueued later finds the output. The stream may be captured; the call's number and rows are then part of the graph.
    /// Whether the call succeeded is in [`status`](Self::status) afterwards.
    ///
    /// # Errors
    /// If `rows` or `doorbell` is out of range, the session has ended, or the driver refuses the work.
    ///
    /// # Safety
    /// `stream` is a live stream (`CUstream` or `cudaStream_t`) of the session's GPU in its primary context. A doorbell has one call
    /// in flight at a time: calls on one stream, or streams that wait for each other. The work, graphs that captured it
    /// included, has ended before the session is dropped.
    pub unsafe fn enqueue(
        &self,
        call: Prepared,
        doorbell: u32,
        rows: u32,
        stream: *mut c_void,
    ) -> Result<(), SessionError> {
        self.shared.check()?;
        if rows == 0 || rows > call.max_rows {
            let (found, needed) = (rows as usize, call.max_rows as usize);
            return Err(SessionError::BufferSize { what: "the prepared call's rows", found, needed });
        }
        if doorbell >= self.opened.doorbells {
            let of = self.opened.doorbells;
            return Err(SessionError::Device(format!(
                "the session has {of} doorbells; there is no doorbell {doorbell}"
            )));
        }
        let control = &self.shared.control;
        let words: Vec<CUdeviceptr> = (0..control.words_each())
            .map(|word| self.signals + control.word_offset(doorbell, word) as u64)
            .collect();
        let bell = self.signals + control.doorbell_offset(doorbell) as u64;
        let ring = Ring { prepared: call.number, rows };
        let mut operations: Vec<CUstreamBatchMemOpParams> = Vec::with_capacity(2 * words.len() + 1);
        operations.extend(words.iter().map(|&word| write_32(word, PENDING)));
        operations.push(write_64(bell, ring.to_word()));
        operations.extend(words.iter().map(|&word| wait_32(word, DONE)));
        let _entered = self.gpu.enter()?;
        // SAFETY: the addresses are in the control region, which stays registered until the session is dropped; the caller
        // vouches for the stream.
        let status = unsafe {
            let stream: CUstream = stream.cast();
            sys::cuStreamBatchMemOp_v2(stream, operations.len() as u32, operations.as_mut_ptr(), 0)
        };
        check("cuStreamBatchMemOp", status)
    }

    /// How the calls of a doorbell ended. A call that is in flight counts once its words are raised.
    ///
    /// # Errors
    /// If the session has ended; calls that were in flight have no output then.
    pub fn status(&self, doorbell: u32) -> Result<DoorbellStatus, SessionError> {
        self.shared.check()?;
        if doorbell >= self.opened.doorbells {
            return Err(SessionError::Device(format!("there is no doorbell {doorbell}")));
        }
        let record = self.shared.control.status(doorbell);
        let record =
            record.ok_or_else(|| SessionError::Protocol("a status that changes without end".to_owned()))?;
        let failure = |record: &CompletionRecord| CallFailure {
            call: record.call,
            code: record.code,
            message: record.text(),
        };
        Ok(DoorbellStatus {
            calls: record.calls,
            failures: record.failures,
            last: (record.calls > 0 && record.last.code == 0).then(|| Receipt::from(&record.last)),
            last_failure: (record.failures > 0).then(|| failure(&record.last_failure)),
        })
    }
}

impl Drop for CudaSession {
    fn drop(&mut self) {
        // The end of the socket is the end of the session; the watching thread then releases streams that still wait.
        let _ = self.socket.shutdown(Shutdown::Both);
        if let Ok(_entered) = self.gpu.enter() {
            // SAFETY: the context is current.
            let _ = unsafe { sys::cuCtxSynchronize() };
            let (pages, _) = self.shared.control.signals();
            // SAFETY: registered once in `open`; no work of the GPU uses the pages any more.
            let _ = unsafe { sys::cuMemHostUnregister(pages.cast()) };
        }
        self.shared.is_dropped.store(true, Ordering::Release);
        if let Some(watcher) = self.watcher.take() {
            let _ = watcher.join();
        }
    }
}

/// Connects to a session socket.
fn connect(
    address: &str,
    timeout: Duration,
) -> Result<(UnixStream, impl Fn(std::io::Error) -> SessionError), SessionError> {
    let path = address.strip_prefix("unix:").ok_or_else(|| SessionError::Address(address.to_owned()))?;
    let path = path.strip_prefix("//").unwrap_or(path);
    let named = address.to_owned();
    let failed = move |source| SessionError::Socket { address: named.clone(), source };
    let socket = UnixStream::connect(path).map_err(&failed)?;
    socket.set_read_timeout(Some(timeout)).map_err(&failed)?;
    socket.set_write_timeout(Some(timeout)).map_err(&failed)?;
    Ok((socket, failed))
}

/// Receives a frame of one kind.
fn expect(socket: &UnixStream, kind: u32) -> std::io::Result<Result<Vec<u8>, SessionError>> {
    Ok(match socket::receive(socket, MAX_SERVICE_FRAME)? {
        Some((found, payload)) if found == kind => Ok(payload),
        Some((frame::REFUSED | frame::ENDED, text)) => {
            Err(SessionError::Refused { reason: String::from_utf8_lossy(&text).into_owned() })
        }
        Some((found, _)) => Err(SessionError::Protocol(format!("a frame of kind {found}, expected {kind}"))),
        None => Err(SessionError::Refused { reason: "the service closed the socket".to_owned() }),
    })
}

/// Registers doorbells and completion words with the GPU; returns the device address of the region's first byte.
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

fn write_32(address: CUdeviceptr, value: u32) -> CUstreamBatchMemOpParams {
    // SAFETY: the union and its parts are integers.
    let mut operation: CUstreamBatchMemOpParams = unsafe { zeroed() };
    operation.writeValue.operation = CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WRITE_VALUE_32;
    operation.writeValue.address = address;
    operation.writeValue.__bindgen_anon_1.value = value;
    operation
}

fn write_64(address: CUdeviceptr, value: u64) -> CUstreamBatchMemOpParams {
    // SAFETY: the union and its parts are integers.
    let mut operation: CUstreamBatchMemOpParams = unsafe { zeroed() };
    operation.writeValue.operation = CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WRITE_VALUE_64;
    operation.writeValue.address = address;
    operation.writeValue.__bindgen_anon_1.value64 = value;
    operation
}

/// Waits until the word is at least `value`.
fn wait_32(address: CUdeviceptr, value: u32) -> CUstreamBatchMemOpParams {
    // SAFETY: the union and its parts are integers.
    let mut operation: CUstreamBatchMemOpParams = unsafe { zeroed() };
    operation.waitValue.operation = CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WAIT_VALUE_32;
    operation.waitValue.address = address;
    operation.waitValue.__bindgen_anon_1.value = value;
    operation.waitValue.flags = sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as u32;
    operation
}
