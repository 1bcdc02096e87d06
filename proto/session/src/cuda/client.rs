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
use std::time::{Duration, Instant};

use cudarc::driver::sys::{self, CUdeviceptr, CUstream, CUstreamBatchMemOpParams, CUstreamBatchMemOpType};
use expertd_ipc::control::send_fds;

use super::control::ControlMemory;
use super::driver::{Gpu, check};
use super::memory::DeviceMemory;
use super::wire::{
    DONE, KIND_CUDA, MAX_PREPARE_FRAME, OpenCuda, OpenedCuda, PENDING, PrepareReply, PreparedCall, Ring,
    RoutingLayout, SEEN,
};
use crate::client::{Receipt, SessionError};
use crate::socket;
use crate::wire::{CompletionRecord, MAX_SERVICE_FRAME, RequestRecord, VERSION, frame};

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
    /// Size of what one call may carry in ids, weights and token ids, in bytes: [`RoutingLayout`] says how many a call needs. 0 if the
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

/// A prepared call of a [`CudaSession`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prepared {
    /// Number of the session that prepared it.
    session: u64,
    number: u32,
    max_rows: u32,
    flags: u32,
    k: u32,
    places: RoutingPlaces,
}

/// Places of a call's routing in the session's memory, in bytes. A call uses those that its flags name. Returned routing overwrites
/// `ids` and `weights`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RoutingPlaces {
    /// Place of i32 `[max_rows, k]`.
    pub ids: u64,
    /// Place of f32 `[max_rows, k]`.
    pub weights: u64,
    /// Place of i32 `[max_rows]`.
    pub token_ids: u64,
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
    /// When a retry can succeed, if the service said so.
    pub retry_after: Option<Duration>,
    /// The service's name for the cause; empty if it gave none.
    pub reason: String,
    /// Names of invalid fields.
    pub fields: Vec<String>,
}

impl CallFailure {
    fn of(record: &CompletionRecord) -> Self {
        let after = Duration::from_nanos(record.retry_after_ns);
        let (reason, fields) = record.reason();
        CallFailure {
            call: record.call,
            code: record.code,
            message: record.text(),
            retry_after: (!after.is_zero()).then_some(after),
            reason,
            fields,
        }
    }
}

impl From<CallFailure> for SessionError {
    fn from(failure: CallFailure) -> Self {
        let CallFailure { code, message, retry_after, reason, fields, .. } = failure;
        SessionError::Status { code, message, retry_after, reason, fields }
    }
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
            routing_bytes: options.routing_bytes,
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

    /// Describes calls to the service, which checks them. Prepared calls live as long as the session. Calls that carry routing or token
    /// ids need [`prepare_routed`](Self::prepare_routed).
    ///
    /// # Errors
    /// [`SessionError::NotPrepared`] with the reason why none of `calls` is prepared, or the session's end.
    pub fn prepare(&self, calls: &[PreparedCall]) -> Result<Vec<Prepared>, SessionError> {
        if let Some(index) = calls.iter().position(|call| RoutingLayout::new(call.flags, 1, 1).bytes > 0) {
            let reason = format!("call {index} carries routing or token ids and has no places for them");
            return Err(SessionError::NotPrepared { reason });
        }
        self.describe(calls, |_| RoutingPlaces::default())
    }

    /// As [`prepare`](Self::prepare), for calls that carry ids and weights ([`GIVEN_ROUTING`](RequestRecord::GIVEN_ROUTING)), return
    /// them ([`RETURN_ROUTING`](RequestRecord::RETURN_ROUTING)) or carry token ids ([`TOKEN_IDS`](RequestRecord::TOKEN_IDS)). The
    /// stream of a call copies them between their places and memory that the service reads.
    ///
    /// # Errors
    /// As [`prepare`](Self::prepare), or if a place exceeds the session's memory.
    pub fn prepare_routed(
        &self,
        calls: &[(PreparedCall, RoutingPlaces)],
    ) -> Result<Vec<Prepared>, SessionError> {
        for (index, (call, places)) in calls.iter().enumerate() {
            let layout = RoutingLayout::new(call.flags, call.max_rows, call.k);
            let parts = [
                ("ids", places.ids, layout.routing_bytes),
                ("weights", places.weights, layout.routing_bytes),
                ("token_ids", places.token_ids, layout.token_bytes),
            ];
            let all = self.memory.bytes() as u64;
            for (what, offset, bytes) in parts {
                if offset.checked_add(bytes as u64).is_none_or(|end| end > all) || offset % 4 != 0 {
                    let reason = format!(
                        "call {index}: {bytes} bytes of {what} at {offset} must lie within the {all} bytes of memory and begin \
                         at a multiple of 4"
                    );
                    return Err(SessionError::NotPrepared { reason });
                }
            }
        }
        let records: Vec<PreparedCall> = calls.iter().map(|(call, _)| *call).collect();
        self.describe(&records, |index| calls[index].1)
    }

    fn describe(
        &self,
        calls: &[PreparedCall],
        places: impl Fn(usize) -> RoutingPlaces,
    ) -> Result<Vec<Prepared>, SessionError> {
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
            for (call, number) in part.iter().zip(head.first..) {
                let PreparedCall { max_rows, flags, k, .. } = *call;
                let places = places(prepared.len());
                let session = self.opened.session;
                prepared.push(Prepared { session, number, max_rows, flags, k, places });
            }
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
        if call.session != self.opened.session {
            let (other, own) = (call.session, self.opened.session);
            return Err(SessionError::Device(format!(
                "the call was prepared by session {other}, and this one is session {own}"
            )));
        }
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
        let mut operations: Vec<CUstreamBatchMemOpParams> = Vec::with_capacity(2 * words.len() + 2);
        operations.extend(words.iter().map(|&word| write_32(word, PENDING)));
        operations.push(write_64(bell, ring.to_word()));
        operations.extend(words.iter().map(|&word| wait_32(word, DONE)));
        operations.push(write_32(self.signals + control.seen_offset(doorbell) as u64, SEEN));
        let _entered = self.gpu.enter()?;
        let stream: CUstream = stream.cast();
        // SAFETY: the addresses are in the control region and in the session's memory (checked by `prepare_routed`, and by the service
        // for the routing area), which stay registered and mapped until the session is dropped; the caller vouches for the stream.
        unsafe {
            let carried = self.carried(call, doorbell, rows);
            for (host, device, bytes) in carried.read {
                if bytes > 0 {
                    let copied = sys::cuMemcpyDtoHAsync_v2(host.cast(), device, bytes, stream);
                    check("cuMemcpyDtoHAsync", copied)?;
                }
            }
            let count = operations.len() as u32;
            let status = sys::cuStreamBatchMemOp_v2(stream, count, operations.as_mut_ptr(), 0);
            check("cuStreamBatchMemOp", status)?;
            for (host, device, bytes) in carried.returned {
                if bytes > 0 {
                    let copied = sys::cuMemcpyHtoDAsync_v2(device, host.cast(), bytes, stream);
                    check("cuMemcpyHtoDAsync", copied)?;
                }
            }
        }
        Ok(())
    }

    /// The copies of what a call carries.
    fn carried(&self, call: Prepared, doorbell: u32, rows: u32) -> Carried {
        let layout = RoutingLayout::new(call.flags, rows, call.k);
        let area = self.shared.control.routing_area(doorbell).cast::<u8>();
        let copy = |has: bool, offset: usize, place: u64, bytes: usize| {
            let bytes = if has { bytes } else { 0 };
            (area.wrapping_add(offset), self.memory.address() + place, bytes)
        };
        let has = |flag| call.flags & flag != 0;
        let routing = |flag| {
            [
                copy(has(flag), 0, call.places.ids, layout.routing_bytes),
                copy(has(flag), layout.weights, call.places.weights, layout.routing_bytes),
            ]
        };
        let [ids, weights] = routing(RequestRecord::GIVEN_ROUTING);
        let token_ids = copy(true, layout.token_ids, call.places.token_ids, layout.token_bytes);
        Carried { read: [ids, weights, token_ids], returned: routing(RequestRecord::RETURN_ROUTING) }
    }

    /// How the calls of a doorbell ended. A call that is in flight counts once its words are raised. The service writes the status
    /// of an answered call a few microseconds after a rank has raised its words; this waits for it.
    ///
    /// # Errors
    /// If the session has ended; calls that were in flight have no output then.
    pub fn status(&self, doorbell: u32) -> Result<DoorbellStatus, SessionError> {
        self.shared.check()?;
        if doorbell >= self.opened.doorbells {
            return Err(SessionError::Device(format!("there is no doorbell {doorbell}")));
        }
        let control = &self.shared.control;
        let (ended, began) = (control.number(doorbell), Instant::now());
        let record = loop {
            let record = control.status(doorbell);
            let record = record
                .ok_or_else(|| SessionError::Protocol("a status that changes without end".to_owned()))?;
            if record.calls >= ended {
                break record;
            }
            self.shared.check()?;
            let waited = began.elapsed();
            if waited > self.timeout {
                return Err(SessionError::TimedOut { waited });
            }
            std::hint::spin_loop();
        };
        Ok(DoorbellStatus {
            calls: record.calls,
            failures: record.failures,
            last: (record.calls > 0 && record.last.code == 0).then(|| Receipt::from(&record.last)),
            last_failure: (record.failures > 0).then(|| CallFailure::of(&record.last_failure)),
        })
    }
}

/// Copies of a call: address in the routing area, address on the GPU, bytes. Copies of 0 bytes are left out.
struct Carried {
    /// From the GPU, before the doorbell.
    read: [(*mut u8, CUdeviceptr, usize); 3],
    /// To the GPU, once the call has ended.
    returned: [(*mut u8, CUdeviceptr, usize); 2],
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

/// Registers doorbells, completion words and routing areas with the GPU; returns the device address of the region's first byte.
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
