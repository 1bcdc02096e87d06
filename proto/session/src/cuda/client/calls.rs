//! Prepared calls of a CUDA session: how they are described, enqueued on streams, and how they ended.

#![allow(unsafe_code, reason = "calls the CUDA driver")]

use std::ffi::c_void;
use std::mem::zeroed;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use cudarc::driver::sys::{
    self, CUdeviceptr, CUstream, CUstreamBatchMemOpParams, CUstreamBatchMemOpType as MemOp,
};

use super::CudaSession;
use crate::client::{Receipt, SessionError};
use crate::cuda::driver::check;
use crate::cuda::wire::{
    BEGINS, DONE, MAX_PREPARE_FRAME, PENDING, PrepareReply, PreparedCall, Ring, RoutingLayout,
};
use crate::socket;
use crate::wire::{CompletionRecord, RequestRecord, frame};

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

impl CudaSession {
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
        let signal = |offset: usize| self.signals + offset as u64;
        let words: Vec<CUdeviceptr> =
            (0..control.words_each()).map(|word| signal(control.word_offset(doorbell, word))).collect();
        let ring = Ring { prepared: call.number, rows };
        let mut operations: Vec<CUstreamBatchMemOpParams> = Vec::with_capacity(2 * words.len() + 1);
        operations.extend(words.iter().skip(1).map(|&word| write_32(word, PENDING)));
        operations.push(write_64(signal(control.begin_offset(doorbell)), BEGINS));
        operations.push(write_64(signal(control.doorbell_offset(doorbell)), ring.to_word()));
        operations.extend(words.iter().map(|&word| wait_32(word, DONE)));
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

/// Earlier writes of the stream precede a write with these flags.
const WRITE: u32 = sys::CUstreamWriteValue_flags::CU_STREAM_WRITE_VALUE_DEFAULT as u32;

fn write_32(address: CUdeviceptr, value: u32) -> CUstreamBatchMemOpParams {
    memory_operation(MemOp::CU_STREAM_MEM_OP_WRITE_VALUE_32, address, value.into(), WRITE)
}

fn write_64(address: CUdeviceptr, value: u64) -> CUstreamBatchMemOpParams {
    memory_operation(MemOp::CU_STREAM_MEM_OP_WRITE_VALUE_64, address, value, WRITE)
}

/// Waits until the word is at least `value`.
fn wait_32(address: CUdeviceptr, value: u32) -> CUstreamBatchMemOpParams {
    let at_least = sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as u32;
    memory_operation(MemOp::CU_STREAM_MEM_OP_WAIT_VALUE_32, address, value.into(), at_least)
}

fn memory_operation(
    operation: MemOp,
    address: CUdeviceptr,
    value: u64,
    flags: u32,
) -> CUstreamBatchMemOpParams {
    // SAFETY: the union and its parts are integers.
    let mut params: CUstreamBatchMemOpParams = unsafe { zeroed() };
    // A wait has the fields of a write, and 32-bit operations read the lower half of the value.
    params.writeValue.operation = operation;
    params.writeValue.address = address;
    params.writeValue.__bindgen_anon_1.value64 = value;
    params.writeValue.flags = flags;
    params
}

const _: () = {
    use std::mem::offset_of;
    use sys::CUstreamBatchMemOpParams_union_CUstreamMemOpWaitValueParams_st as Wait;
    use sys::CUstreamBatchMemOpParams_union_CUstreamMemOpWriteValueParams_st as Write;
    assert!(offset_of!(Wait, operation) == offset_of!(Write, operation));
    assert!(offset_of!(Wait, address) == offset_of!(Write, address));
    assert!(offset_of!(Wait, __bindgen_anon_1) == offset_of!(Write, __bindgen_anon_1));
    assert!(offset_of!(Wait, flags) == offset_of!(Write, flags));
};
