//! Prepared calls of a CUDA session: how they are described and enqueued on streams.

#![allow(unsafe_code, reason = "calls the CUDA driver")]

use std::ffi::c_void;
use std::mem::zeroed;
use std::sync::PoisonError;

use cudarc::driver::sys::{
    self, CUdeviceptr, CUstream, CUstreamBatchMemOpParams, CUstreamBatchMemOpType as MemOp,
};
use expertd_types::DType;

use super::CudaSession;
use crate::client::SessionError;
use crate::cuda::driver::check;
use crate::cuda::wire::{DONE, MAX_PREPARE_FRAME, PrepareReply, PreparedCall, Ring, RoutingLayout};
use crate::socket;
use crate::wire::{RequestRecord, frame};

/// A prepared call of a [`CudaSession`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prepared {
    /// Number of the session that prepared it.
    session: u64,
    number: u32,
    max_rows: u32,
    flags: u32,
    k: u32,
    dtype: DType,
    /// Places of rows and output in the session's memory.
    rows: u64,
    output: u64,
    /// `None` if a [`Lane`](crate::cuda::Lane) brings what the call carries.
    places: Option<RoutingPlaces>,
}

impl Prepared {
    /// Largest number of rows of a call.
    #[must_use]
    pub const fn max_rows(&self) -> u32 {
        self.max_rows
    }

    /// Element type of the rows.
    #[must_use]
    pub const fn dtype(&self) -> DType {
        self.dtype
    }

    /// Experts per token of given or returned routing.
    #[must_use]
    pub const fn k(&self) -> u32 {
        self.k
    }

    /// Flags of a [`RequestRecord`].
    #[must_use]
    pub const fn flags(&self) -> u32 {
        self.flags
    }

    const fn has(&self, flag: u32) -> bool {
        self.flags & flag != 0
    }

    /// Whether the call carries ids and weights.
    #[must_use]
    pub const fn has_given_routing(&self) -> bool {
        self.has(RequestRecord::GIVEN_ROUTING)
    }

    /// Whether the call returns ids and weights.
    #[must_use]
    pub const fn returns_routing(&self) -> bool {
        self.has(RequestRecord::RETURN_ROUTING)
    }
}

/// Addresses on the GPU of what a call uses.
#[derive(Clone, Copy, Debug)]
pub(in crate::cuda) struct CallPlaces {
    pub(in crate::cuda) rows: CUdeviceptr,
    pub(in crate::cuda) output: CUdeviceptr,
    /// The doorbell's routing area.
    pub(in crate::cuda) routing: CUdeviceptr,
    /// The doorbell's completion word.
    pub(in crate::cuda) word: CUdeviceptr,
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

impl CudaSession {
    /// Describes calls to the service, which checks them. Prepared calls live as long as the session. Calls that carry routing or token
    /// ids need [`prepare_routed`](Self::prepare_routed).
    ///
    /// # Errors
    /// [`SessionError::NotPrepared`] with the reason why calls are refused, [`SessionError::TimedOut`], or the session's end. None of
    /// `calls` can be used then, but those of earlier frames (1024 each), and of one that is answered late, count towards the limit of
    /// prepared calls.
    pub fn prepare(&self, calls: &[PreparedCall]) -> Result<Vec<Prepared>, SessionError> {
        if let Some(index) = calls.iter().position(|call| RoutingLayout::new(call.flags, 1, 1).bytes > 0) {
            let reason = format!("call {index} carries routing or token ids and has no places for them");
            return Err(SessionError::NotPrepared { reason });
        }
        self.describe(calls, |_| Some(RoutingPlaces::default()))
    }

    /// As [`prepare`](Self::prepare), for calls of a [`Lane`](crate::cuda::Lane), which copies routing and token ids from arrays of the
    /// caller. Each call is of one lane, because its places for rows and output are.
    ///
    /// # Errors
    /// As [`prepare`](Self::prepare), or if the doorbell's routing area is too small.
    pub fn prepare_for_lane(&self, calls: &[PreparedCall]) -> Result<Vec<Prepared>, SessionError> {
        let all = self.shared.control.routing_bytes();
        for (index, call) in calls.iter().enumerate() {
            let needed = RoutingLayout::new(call.flags, call.max_rows, call.k).bytes;
            if needed > all {
                let reason =
                    format!("call {index} carries {needed} bytes, and the session was opened with {all}");
                return Err(SessionError::NotPrepared { reason });
            }
        }
        self.describe(calls, |_| None)
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
        self.describe(&records, |index| Some(calls[index].1))
    }

    fn describe(
        &self,
        calls: &[PreparedCall],
        places: impl Fn(usize) -> Option<RoutingPlaces>,
    ) -> Result<Vec<Prepared>, SessionError> {
        let dtypes: Vec<DType> = calls.iter().map(|call| dtype(call.dtype)).collect::<Result<_, _>>()?;
        self.link.check_process()?;
        let mut replies = self.replies.lock().unwrap_or_else(PoisonError::into_inner);
        let mut prepared = Vec::with_capacity(calls.len());
        for part in calls.chunks(MAX_PREPARE_FRAME / size_of::<PreparedCall>()) {
            self.shared.check()?;
            let broke = |error: std::io::Error| SessionError::Ended { reason: error.to_string() };
            socket::send(self.link.socket(), frame::PREPARE, bytemuck::cast_slice(part)).map_err(broke)?;
            replies.sent();
            let reply = replies.last(self.timeout).ok_or_else(|| {
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
                let PreparedCall { max_rows, flags, k, rows, output, .. } = *call;
                let (dtype, places) = (dtypes[prepared.len()], places(prepared.len()));
                let session = self.opened.session;
                prepared.push(Prepared { session, number, max_rows, flags, k, dtype, rows, output, places });
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
        self.check_call(&call, doorbell, rows)?;
        let carried = self.carried(call, doorbell, rows)?;
        let _entered = self.gpu.enter()?;
        let stream: CUstream = stream.cast();
        // SAFETY: the addresses are in the control region and in the session's memory (checked by `prepare_routed`, and by the service
        // for the routing area), which stay registered and mapped until the session is dropped; the caller vouches for the stream.
        unsafe {
            for (host, device, bytes) in carried.read {
                if bytes > 0 {
                    let copied = sys::cuMemcpyDtoHAsync_v2(host.cast(), device, bytes, stream);
                    check("cuMemcpyDtoHAsync", copied)?;
                }
            }
            self.start(&call, doorbell, rows, stream)?;
            for (host, device, bytes) in carried.returned {
                if bytes > 0 {
                    let copied = sys::cuMemcpyHtoDAsync_v2(device, host.cast(), bytes, stream);
                    check("cuMemcpyHtoDAsync", copied)?;
                }
            }
        }
        Ok(())
    }

    /// Checks that the session is open, and that it has this call and this doorbell.
    pub(in crate::cuda) fn check_call(
        &self,
        call: &Prepared,
        doorbell: u32,
        rows: u32,
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
        Ok(())
    }

    /// Enqueues the operations that start a call and wait for its end.
    ///
    /// # Safety
    /// The GPU's context is current, `stream` is a live stream of it, and [`check_call`](Self::check_call) passed.
    pub(in crate::cuda) unsafe fn start(
        &self,
        call: &Prepared,
        doorbell: u32,
        rows: u32,
        stream: CUstream,
    ) -> Result<(), SessionError> {
        let bell = self.doorbell(doorbell);
        let ring = Ring { prepared: call.number, rows };
        // The lower half of the doorbell, which the wait reads, is the completion word.
        let mut operations = [write_64(bell, ring.to_word()), wait_32(bell, DONE)];
        let count = operations.len() as u32;
        // SAFETY: the addresses are in the control region, which stays registered until the session is dropped; the caller vouches for
        // the stream.
        let status = unsafe { sys::cuStreamBatchMemOp_v2(stream, count, operations.as_mut_ptr(), 0) };
        check("cuStreamBatchMemOp", status)
    }

    /// Device address of a doorbell.
    pub(super) fn doorbell(&self, doorbell: u32) -> CUdeviceptr {
        self.signals + self.shared.control.doorbell_offset(doorbell) as u64
    }

    /// Addresses of what a call uses.
    pub(in crate::cuda) fn call_places(&self, call: &Prepared, doorbell: u32) -> CallPlaces {
        let control = &self.shared.control;
        let area = control.routing_offset(doorbell) as u64;
        CallPlaces {
            rows: self.memory.address() + call.rows,
            output: self.memory.address() + call.output,
            routing: self.signals + area,
            word: self.doorbell(doorbell),
        }
    }

    /// The copies of what a call carries.
    fn carried(&self, call: Prepared, doorbell: u32, rows: u32) -> Result<Carried, SessionError> {
        let layout = RoutingLayout::new(call.flags, rows, call.k);
        let places = match call.places {
            Some(places) => places,
            None if layout.bytes == 0 => RoutingPlaces::default(),
            None => {
                let text = "the call was prepared for a lane, which brings its routing".to_owned();
                return Err(SessionError::Device(text));
            }
        };
        let area = self.shared.control.routing_area(doorbell).cast::<u8>();
        let copy = |has: bool, offset: usize, place: u64, bytes: usize| {
            let bytes = if has { bytes } else { 0 };
            (area.wrapping_add(offset), self.memory.address() + place, bytes)
        };
        let has = |flag| call.has(flag);
        let routing = |flag| {
            [
                copy(has(flag), 0, places.ids, layout.routing_bytes),
                copy(has(flag), layout.weights, places.weights, layout.routing_bytes),
            ]
        };
        let [ids, weights] = routing(RequestRecord::GIVEN_ROUTING);
        let token_ids = copy(true, layout.token_ids, places.token_ids, layout.token_bytes);
        Ok(Carried { read: [ids, weights, token_ids], returned: routing(RequestRecord::RETURN_ROUTING) })
    }
}

/// The element type that a record names.
fn dtype(number: u32) -> Result<DType, SessionError> {
    DType::from_code(number).ok_or_else(|| SessionError::NotPrepared {
        reason: format!("element type {number}; expected 1 (bf16), 2 (f16) or 3 (f32)"),
    })
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
    use sys::{
        CUstreamBatchMemOpParams_union_CUstreamMemOpWaitValueParams_st as Wait,
        CUstreamBatchMemOpParams_union_CUstreamMemOpWriteValueParams_st as Write,
    };
    assert!(offset_of!(Wait, operation) == offset_of!(Write, operation));
    assert!(offset_of!(Wait, address) == offset_of!(Write, address));
    assert!(offset_of!(Wait, __bindgen_anon_1) == offset_of!(Write, __bindgen_anon_1));
    assert!(offset_of!(Wait, flags) == offset_of!(Write, flags));
};
