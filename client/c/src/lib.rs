//! The C ABI of sessions; `include/expertd.h` documents it.

#![allow(unsafe_code, reason = "takes and gives pointers of C callers")]

mod cuda;
mod network;

pub use cuda::{
    ExpertdCudaSession, ExpertdPreparedCall, expertd_cuda_close, expertd_cuda_enqueue, expertd_cuda_hidden,
    expertd_cuda_memory, expertd_cuda_prepare, expertd_cuda_status, expertd_session_open_cuda,
};
pub use network::{ExpertdNetwork, expertd_session_open_network};

use std::ffi::{CStr, c_char, c_int};
use std::time::Duration;

use expertd_session::wire::{CompletionRecord, RequestRecord};
use expertd_session::{Session, SessionError, SessionOptions};

const EINVALID: c_int = -1;
const EOPEN: c_int = -2;
const EBUSY: c_int = -3;
const ETIMEOUT: c_int = -4;
const EENDED: c_int = -5;

/// `expertd_call`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the header documents the fields")]
pub struct ExpertdCall {
    pub rows: u64,
    pub output: u64,
    pub ids: u64,
    pub weights: u64,
    pub token_ids: u64,
    pub weight_version: u64,
    pub timeout_us: u64,
    pub layer: u32,
    pub tokens: u32,
    pub dtype: u32,
    pub k: u32,
    pub flags: u32,
    pub reserved: u32,
}

/// `expertd_receipt`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the header documents the fields")]
pub struct ExpertdReceipt {
    pub generation: u64,
    pub weight_version: u64,
    pub first_step: u64,
    pub last_step: u64,
    pub steps: u32,
    pub ranks: u32,
    pub queue_ns: u64,
    pub step_ns: u64,
    pub phase_ns: [u64; 7],
    pub tokens_per_rank: [u32; 8],
    pub retry_after_ns: u64,
}

/// Writes a sentence to the caller's buffer.
///
/// # Safety
/// `error` is null or valid for writes of `error_bytes` bytes.
unsafe fn tell(text: &str, error: *mut c_char, error_bytes: usize) {
    if error.is_null() || error_bytes == 0 {
        return;
    }
    let ends = text.char_indices().map(|(at, char)| at + char.len_utf8());
    let len = ends.take_while(|&end| end < error_bytes).last().unwrap_or(0);
    // SAFETY: the buffer has more than `len` bytes (the caller's promise), and the text has as many.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr(), error.cast::<u8>(), len);
        error.add(len).write(0);
    }
}

/// Writes an error's message and returns its code.
///
/// # Safety
/// The conditions of [`tell`].
unsafe fn fail(failure: &SessionError, error: *mut c_char, error_bytes: usize) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { tell(&failure.to_string(), error, error_bytes) };
    match failure {
        SessionError::TooManyCalls { .. } => EBUSY,
        SessionError::TimedOut { .. } => ETIMEOUT,
        SessionError::Ended { .. } => EENDED,
        SessionError::Status { code, .. } => c_int::try_from(*code).unwrap_or(EINVALID),
        SessionError::NoSuchCall { .. } | SessionError::OtherProcess { .. } => EINVALID,
        _ => EOPEN,
    }
}

/// Refuses an argument.
///
/// # Safety
/// The conditions of [`tell`].
unsafe fn invalid(text: &str, error: *mut c_char, error_bytes: usize) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { tell(text, error, error_bytes) };
    EINVALID
}

/// Opens a session with `open` and stores it.
///
/// # Safety
/// `address` is null or a C string, `session` is null or valid for a write, and `error` is as for [`tell`].
unsafe fn open_with<T>(
    address: *const c_char,
    session: *mut *mut T,
    error: *mut c_char,
    error_bytes: usize,
    open: impl FnOnce(&str) -> Result<T, SessionError>,
) -> c_int {
    if address.is_null() || session.is_null() {
        // SAFETY: the caller's promise about `error`.
        return unsafe { invalid("address and session must not be NULL", error, error_bytes) };
    }
    // SAFETY: a C string (the caller's promise).
    let address = unsafe { CStr::from_ptr(address) }.to_string_lossy();
    match open(&address) {
        Ok(opened) => {
            // SAFETY: valid for a write (the caller's promise).
            unsafe { session.write(Box::into_raw(Box::new(opened))) };
            0
        }
        Err(failure) => {
            // SAFETY: the caller's promise about `error`.
            unsafe { tell(&failure.to_string(), error, error_bytes) };
            EOPEN
        }
    }
}

/// Drops a session that [`open_with`] has stored.
///
/// # Safety
/// `session` is null, or was stored by [`open_with`] and is not used any more.
unsafe fn close<T>(session: *mut T) {
    if !session.is_null() {
        // SAFETY: made by `Box::into_raw` and not used any more (the caller's promise).
        drop(unsafe { Box::from_raw(session) });
    }
}

/// Opens a session.
///
/// # Safety
/// `address` is null or a C string, `session` is valid for a write, and `error` is null or has `error_bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn expertd_session_open(
    address: *const c_char,
    rows_bytes: u64,
    calls: u32,
    timeout_ms: u32,
    session: *mut *mut Session,
    error: *mut c_char,
    error_bytes: usize,
) -> c_int {
    let options = SessionOptions {
        rows_bytes: usize::try_from(rows_bytes).unwrap_or(usize::MAX),
        calls,
        timeout: Duration::from_millis(timeout_ms.max(1).into()),
        ..SessionOptions::default()
    };
    // SAFETY: the caller's promises.
    unsafe { open_with(address, session, error, error_bytes, |address| Session::open(address, &options)) }
}

/// Closes a session.
///
/// # Safety
/// `session` is null, or came from [`expertd_session_open`] or [`expertd_session_open_network`] and is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn expertd_session_close(session: *mut Session) {
    // SAFETY: the caller's promise.
    unsafe { close(session) };
}

/// The row area.
///
/// # Safety
/// `session` is null or an open session; `bytes` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn expertd_session_rows(session: *const Session, bytes: *mut u64) -> *mut u8 {
    // SAFETY: null or an open session (the caller's promise).
    let Some(session) = (unsafe { session.as_ref() }) else { return std::ptr::null_mut() };
    let rows = session.rows();
    if !bytes.is_null() {
        // SAFETY: valid for a write (the caller's promise).
        unsafe { bytes.write(rows.len() as u64) };
    }
    rows.as_ptr()
}

/// Elements of a row.
///
/// # Safety
/// `session` is null or an open session.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn expertd_session_hidden(session: *const Session) -> u32 {
    // SAFETY: null or an open session (the caller's promise).
    unsafe { session.as_ref() }.map_or(0, |session| session.hidden() as u32)
}

/// The model, encoded.
///
/// # Safety
/// `session` is null or an open session; `bytes` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn expertd_session_model(session: *const Session, bytes: *mut usize) -> *const u8 {
    // SAFETY: null or an open session (the caller's promise).
    let Some(session) = (unsafe { session.as_ref() }) else { return std::ptr::null() };
    if !bytes.is_null() {
        // SAFETY: valid for a write (the caller's promise).
        unsafe { bytes.write(session.model().len()) };
    }
    session.model().as_ptr()
}

/// Starts a call.
///
/// # Safety
/// `session` is null or an open session, `call` is null or valid for a read, `call_number` is null or valid for a write, and
/// `error` is null or has `error_bytes` bytes. The caller uses the places of the call as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn expertd_session_submit(
    session: *const Session,
    call: *const ExpertdCall,
    call_number: *mut u64,
    error: *mut c_char,
    error_bytes: usize,
) -> c_int {
    // SAFETY: null or valid (the caller's promise).
    let (Some(session), Some(call)) = (unsafe { (session.as_ref(), call.as_ref()) }) else {
        // SAFETY: the caller's promise about `error`.
        return unsafe { invalid("session and call must not be NULL", error, error_bytes) };
    };
    if call_number.is_null() {
        // SAFETY: the caller's promise about `error`.
        return unsafe { invalid("call_number must not be NULL", error, error_bytes) };
    }
    let record = RequestRecord {
        call: 0,
        rows: call.rows,
        output: call.output,
        ids: call.ids,
        weights: call.weights,
        token_ids: call.token_ids,
        weight_version: call.weight_version,
        timeout_us: call.timeout_us,
        layer: call.layer,
        tokens: call.tokens,
        dtype: call.dtype,
        k: call.k,
        flags: call.flags,
        reserved: call.reserved,
    };
    // SAFETY: sessions of C callers have no buffers of Rust; the caller uses the places as the header says.
    match unsafe { session.submit_places(record) } {
        Ok(number) => {
            // SAFETY: valid for a write (the caller's promise).
            unsafe { call_number.write(number) };
            0
        }
        // SAFETY: the caller's promise about `error`.
        Err(failure) => unsafe { fail(&failure, error, error_bytes) },
    }
}

/// Waits for a call.
///
/// # Safety
/// `session` is null or an open session, `receipt` is null or valid for a write, and `error` is null or has `error_bytes`
/// bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn expertd_session_wait(
    session: *const Session,
    call_number: u64,
    timeout_ms: u32,
    receipt: *mut ExpertdReceipt,
    error: *mut c_char,
    error_bytes: usize,
) -> c_int {
    // SAFETY: null or an open session (the caller's promise).
    let Some(session) = (unsafe { session.as_ref() }) else {
        // SAFETY: the caller's promise about `error`.
        return unsafe { invalid("session must not be NULL", error, error_bytes) };
    };
    match session.wait_places(call_number, Duration::from_millis(timeout_ms.into())) {
        Ok(record) => {
            if !receipt.is_null() {
                // SAFETY: valid for a write (the caller's promise).
                unsafe { receipt.write(ExpertdReceipt::from(&record)) };
            }
            if record.code != 0 {
                // SAFETY: the caller's promise about `error`.
                unsafe { tell(&record.text(), error, error_bytes) };
            }
            c_int::try_from(record.code).unwrap_or(EINVALID)
        }
        // SAFETY: the caller's promise about `error`.
        Err(failure) => unsafe { fail(&failure, error, error_bytes) },
    }
}

/// Forgets a call.
///
/// # Safety
/// `session` is null or an open session.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn expertd_session_forget(session: *const Session, call_number: u64) {
    // SAFETY: null or an open session (the caller's promise).
    if let Some(session) = unsafe { session.as_ref() } {
        session.forget_places(call_number);
    }
}

impl From<&CompletionRecord> for ExpertdReceipt {
    fn from(record: &CompletionRecord) -> Self {
        ExpertdReceipt {
            generation: record.generation,
            weight_version: record.weight_version,
            first_step: record.first_step,
            last_step: record.last_step,
            steps: record.steps,
            ranks: record.ranks,
            queue_ns: record.queue_ns,
            step_ns: record.step_ns,
            phase_ns: record.phase_ns,
            tokens_per_rank: record.tokens_per_rank,
            retry_after_ns: record.retry_after_ns,
        }
    }
}

#[cfg(test)]
mod tests {
    use bytemuck::Zeroable as _;

    use super::*;

    #[test]
    fn sentences_are_cut_to_the_buffer() {
        let mut buffer = [1_u8; 8];
        // SAFETY: the buffer has the length that is passed.
        unsafe { tell("abcdéfgh", buffer.as_mut_ptr().cast(), 6) };
        assert_eq!(&buffer, b"abcd\0\x01\x01\x01");
        // SAFETY: a null pointer is allowed.
        unsafe { tell("text", std::ptr::null_mut(), 9) };
        assert_eq!(ExpertdReceipt::from(&CompletionRecord::zeroed()).steps, 0);
    }
}
