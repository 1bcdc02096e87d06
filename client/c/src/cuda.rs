//! The C ABI of CUDA sessions; `include/expertd.h` documents it.

use std::ffi::{c_char, c_int, c_void};
use std::sync::{PoisonError, RwLock};
use std::time::Duration;

use expertd_session::SessionError;
use expertd_session::cuda::wire::PreparedCall;
use expertd_session::cuda::{CudaSession, CudaSessionOptions, Prepared, RoutingPlaces};

use crate::{close, fail, invalid, open_with};

/// `expertd_cuda_session`.
#[derive(Debug)]
pub struct ExpertdCudaSession {
    session: CudaSession,
    prepared: RwLock<Vec<Prepared>>,
}

/// `expertd_prepared_call`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the header documents the fields")]
pub struct ExpertdPreparedCall {
    pub layer: u32,
    pub dtype: u32,
    pub max_rows: u32,
    pub flags: u32,
    pub rows: u64,
    pub output: u64,
    pub ids: u64,
    pub weights: u64,
    pub token_ids: u64,
    pub timeout_us: u64,
    pub weight_version: u64,
    pub k: u32,
    pub reserved: u32,
}

/// Opens a CUDA session.
///
/// # Safety
/// `address` is null or a C string, `session` is null or valid for a write, and `error` is null or has `error_bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn expertd_session_open_cuda(
    address: *const c_char,
    device: u32,
    memory_bytes: u64,
    doorbells: u32,
    routing_bytes: u32,
    timeout_ms: u32,
    session: *mut *mut ExpertdCudaSession,
    error: *mut c_char,
    error_bytes: usize,
) -> c_int {
    let options = CudaSessionOptions {
        device,
        memory_bytes: usize::try_from(memory_bytes).unwrap_or(usize::MAX),
        doorbells,
        routing_bytes,
        timeout: Duration::from_millis(timeout_ms.max(1).into()),
    };
    let open = |address: &str| {
        let session = CudaSession::open(address, &options)?;
        Ok(ExpertdCudaSession { session, prepared: RwLock::default() })
    };
    // SAFETY: the caller's promises.
    unsafe { open_with(address, session, error, error_bytes, open) }
}

/// Closes a CUDA session.
///
/// # Safety
/// `session` is null, or came from [`expertd_session_open_cuda`] and is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn expertd_cuda_close(session: *mut ExpertdCudaSession) {
    // SAFETY: the caller's promise.
    unsafe { close(session) };
}

/// The memory on the GPU.
///
/// # Safety
/// `session` is null or an open session; `bytes` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn expertd_cuda_memory(session: *const ExpertdCudaSession, bytes: *mut u64) -> u64 {
    // SAFETY: null or an open session (the caller's promise).
    let Some(session) = (unsafe { session.as_ref() }) else { return 0 };
    let memory = session.session.memory();
    if !bytes.is_null() {
        // SAFETY: valid for a write (the caller's promise).
        unsafe { bytes.write(memory.bytes() as u64) };
    }
    memory.address()
}

/// Elements of a row.
///
/// # Safety
/// `session` is null or an open session.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn expertd_cuda_hidden(session: *const ExpertdCudaSession) -> u32 {
    // SAFETY: null or an open session (the caller's promise).
    unsafe { session.as_ref() }.map_or(0, |session| session.session.hidden() as u32)
}

/// Prepares calls.
///
/// # Safety
/// `session` is null or an open session, `calls` is null or has `count` elements, `first` is null or valid for a write, and `error` is
/// null or has `error_bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn expertd_cuda_prepare(
    session: *const ExpertdCudaSession,
    calls: *const ExpertdPreparedCall,
    count: usize,
    first: *mut u32,
    error: *mut c_char,
    error_bytes: usize,
) -> c_int {
    // SAFETY: null or an open session (the caller's promise).
    let session = unsafe { session.as_ref() };
    let Some(session) = session.filter(|_| !calls.is_null() && !first.is_null()) else {
        // SAFETY: the caller's promise about `error`.
        return unsafe { invalid("session, calls and first must not be NULL", error, error_bytes) };
    };
    // SAFETY: `count` elements (the caller's promise).
    let calls = unsafe { std::slice::from_raw_parts(calls, count) };
    let calls: Vec<(PreparedCall, RoutingPlaces)> = calls
        .iter()
        .map(|call| {
            let record = PreparedCall {
                layer: call.layer,
                dtype: call.dtype,
                max_rows: call.max_rows,
                flags: call.flags,
                rows: call.rows,
                output: call.output,
                timeout_us: call.timeout_us,
                weight_version: call.weight_version,
                k: call.k,
                reserved: call.reserved,
            };
            (record, RoutingPlaces { ids: call.ids, weights: call.weights, token_ids: call.token_ids })
        })
        .collect();
    match session.session.prepare_routed(&calls) {
        Ok(prepared) => {
            let mut all = session.prepared.write().unwrap_or_else(PoisonError::into_inner);
            // SAFETY: valid for a write (the caller's promise).
            unsafe { first.write(all.len() as u32) };
            all.extend(prepared);
            0
        }
        // SAFETY: the caller's promise about `error`.
        Err(failure) => unsafe { fail(&failure, error, error_bytes) },
    }
}

/// Enqueues a call on a stream.
///
/// # Safety
/// `session` is null or an open session, and `error` is null or has `error_bytes` bytes. `stream` and the doorbell's calls are as the
/// header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn expertd_cuda_enqueue(
    session: *const ExpertdCudaSession,
    prepared: u32,
    doorbell: u32,
    rows: u32,
    stream: *mut c_void,
    error: *mut c_char,
    error_bytes: usize,
) -> c_int {
    // SAFETY: null or an open session (the caller's promise).
    let Some(session) = (unsafe { session.as_ref() }) else {
        // SAFETY: the caller's promise about `error`.
        return unsafe { invalid("session must not be NULL", error, error_bytes) };
    };
    let all = session.prepared.read().unwrap_or_else(PoisonError::into_inner);
    let Some(call) = all.get(prepared as usize).copied() else {
        let text = format!("call {prepared} is not prepared; {} calls are", all.len());
        // SAFETY: the caller's promise about `error`.
        return unsafe { invalid(&text, error, error_bytes) };
    };
    drop(all);
    // SAFETY: the caller's promise about the stream and the doorbell.
    match unsafe { session.session.enqueue(call, doorbell, rows, stream) } {
        Ok(()) => 0,
        // SAFETY: the caller's promise about `error`.
        Err(failure) => unsafe { fail(&failure, error, error_bytes) },
    }
}

/// How the calls of a doorbell ended.
///
/// # Safety
/// `session` is null or an open session, `calls` and `failures` are null or valid for a write, and `error` is null or has
/// `error_bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn expertd_cuda_status(
    session: *const ExpertdCudaSession,
    doorbell: u32,
    calls: *mut u64,
    failures: *mut u64,
    error: *mut c_char,
    error_bytes: usize,
) -> c_int {
    // SAFETY: null or an open session (the caller's promise).
    let Some(session) = (unsafe { session.as_ref() }) else {
        // SAFETY: the caller's promise about `error`.
        return unsafe { invalid("session must not be NULL", error, error_bytes) };
    };
    let status = match session.session.status(doorbell) {
        Ok(status) => status,
        // SAFETY: the caller's promise about `error`.
        Err(failure) => return unsafe { fail(&failure, error, error_bytes) },
    };
    for (to, value) in [(calls, status.calls), (failures, status.failures)] {
        if !to.is_null() {
            // SAFETY: valid for a write (the caller's promise).
            unsafe { to.write(value) };
        }
    }
    match status.last_failure {
        None => 0,
        Some(failure) => {
            let failure = SessionError::from(failure);
            // SAFETY: the caller's promise about `error`.
            unsafe { fail(&failure, error, error_bytes) }
        }
    }
}
