//! Every call of the C ABI ends beside a service that does nothing.
#![allow(unsafe_code, reason = "calls functions as programs in C do")]

use std::ffi::{CStr, CString, c_char, c_int};
use std::ptr::null_mut;

use expertd_c::{
    ExpertdCall, expertd_session_close, expertd_session_forget, expertd_session_hidden, expertd_session_open,
    expertd_session_rows, expertd_session_submit, expertd_session_wait,
};
use expertd_session::Session;
use rustix::process::Signal;

use super::{FAMILY, Host, LOST, runtime};
use crate::service::load::Rows;
use crate::service::{eventually, golden, send};

const EINVALID: c_int = -1;
const EOPEN: c_int = -2;
const EBUSY: c_int = -3;
const ETIMEOUT: c_int = -4;
const EENDED: c_int = -5;
/// Calls in flight of the sessions.
const CALLS: u32 = 4;

/// The code that a function returns, and the sentence that it writes.
fn told(function: impl FnOnce(*mut c_char, usize) -> c_int) -> (c_int, String) {
    let mut text = [0_u8; 256];
    let code = function(text.as_mut_ptr().cast(), text.len());
    (code, CStr::from_bytes_until_nul(&text).unwrap().to_string_lossy().into_owned())
}

fn open(address: &str, timeout_ms: u32) -> Result<*mut Session, (c_int, String)> {
    let (address, mut session) = (CString::new(address).unwrap(), null_mut());
    let (code, text) = told(|error, bytes| {
        // SAFETY: a C string, a place for the session, and a buffer of `bytes` bytes.
        unsafe {
            expertd_session_open(address.as_ptr(), 1 << 20, CALLS, timeout_ms, &raw mut session, error, bytes)
        }
    });
    if code == 0 { Ok(session) } else { Err((code, text)) }
}

fn submit(session: *const Session, place: u64) -> (c_int, u64) {
    let layer = Rows::new(&golden(FAMILY), 1, 1).layers()[0];
    let call = ExpertdCall {
        rows: 0,
        output: (1 + place) << 16,
        ids: 0,
        weights: 0,
        token_ids: 0,
        weight_version: 0,
        timeout_us: 0,
        layer,
        tokens: 2,
        dtype: 3,
        k: 0,
        flags: 0,
        reserved: 0,
    };
    let mut number = 0;
    // SAFETY: an open session, a call whose places lie in the row area apart from those of other calls, and no buffer for errors.
    let code = unsafe { expertd_session_submit(session, &raw const call, &raw mut number, null_mut(), 0) };
    (code, number)
}

fn wait(session: *const Session, number: u64, timeout_ms: u32) -> (c_int, String) {
    told(|error, bytes| {
        // SAFETY: an open session, no place for a receipt, and a buffer of `bytes` bytes.
        unsafe { expertd_session_wait(session, number, timeout_ms, null_mut(), error, bytes) }
    })
}

#[test]
fn every_call_of_the_c_abi_ends_beside_a_stopped_service() {
    let runtime = runtime();
    let mut host = Host::start(FAMILY, 2, &[]);
    let session = open(&host.address, 60_000).unwrap();
    let (_, forgotten) = submit(session, 12);
    // SAFETY: an open session.
    unsafe { expertd_session_forget(session, forgotten) };
    assert_eq!(wait(session, forgotten, 60_000).0, EINVALID);
    let (code, first) = submit(session, 0);
    assert_eq!((code, wait(session, first, 60_000).0), (0, 0));
    assert_eq!(wait(session, first, 60_000).0, EINVALID, "its end was taken");

    send(host.service.pid(), Signal::STOP);
    let calls: Vec<u64> =
        (0..u64::from(CALLS)).map(|place| submit(session, place)).map(|(_, call)| call).collect();
    assert_eq!(submit(session, 9).0, EBUSY);
    let (code, text) = wait(session, calls[0], 200);
    assert!(code == ETIMEOUT && text.contains("no completion within 200ms"), "{code}: {text}");
    assert_eq!(wait(session, 12_345, 60_000).0, EINVALID, "a call that does not exist");
    // SAFETY: an open session.
    assert!(unsafe { expertd_session_hidden(session) } > 0);
    // SAFETY: an open session; the size is not asked for.
    assert!(!unsafe { expertd_session_rows(session, null_mut()) }.is_null());
    let (code, text) = open(&host.address, 300).unwrap_err();
    assert!(code == EOPEN && text.contains("did not answer within 300ms"), "{code}: {text}");

    // The calls that were under way are answered when the service goes on.
    send(host.service.pid(), Signal::CONT);
    for call in &calls {
        assert_eq!(wait(session, *call, 60_000), (0, String::new()));
    }
    eventually(LOST, "the client that gave up is gone", || host.status(&runtime).sessions.len() == 1);
    // A session is closed beside a stopped service, too.
    let other = open(&host.address, 60_000).unwrap();
    send(host.service.pid(), Signal::STOP);
    assert_eq!(submit(other, 0).0, 0);
    // SAFETY: the session is not used any more.
    unsafe { expertd_session_close(other) };
    send(host.service.pid(), Signal::CONT);
    eventually(LOST, "the closed session is gone", || host.status(&runtime).sessions.len() == 1);

    // A service that is killed ends the session.
    send(host.service.pid(), Signal::STOP);
    let (_, last) = submit(session, 0);
    send(host.service.pid(), Signal::KILL);
    let (code, text) = wait(session, last, 60_000);
    assert!(code == EENDED && text.contains("the session has ended"), "{code}: {text}");
    assert_eq!(submit(session, 1).0, EENDED);
    // SAFETY: the session is not used any more.
    unsafe { expertd_session_close(session) };
    assert!(host.service.wait(LOST).is_some());
}
