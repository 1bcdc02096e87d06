//! Network sessions, which are used like those of the same host once they are open.

use std::ffi::{CStr, c_char, c_int};
use std::path::PathBuf;
use std::time::Duration;

use expertd_client::network::{NetworkOptions, open};
use expertd_client::transport::Credentials;
use expertd_session::{Session, SessionOptions};

use crate::open_with;

/// `expertd_network`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the header documents the fields")]
pub struct ExpertdNetwork {
    pub library: *const c_char,
    pub ca: *const c_char,
    pub cert: *const c_char,
    pub key: *const c_char,
    pub server_name: *const c_char,
    pub token_file: *const c_char,
    pub insecure: u32,
    pub reserved: u32,
}

impl ExpertdNetwork {
    /// # Safety
    /// Each pointer is null or a C string.
    unsafe fn options(&self, session: SessionOptions) -> NetworkOptions {
        // SAFETY: null or a C string (the caller's promise).
        let text = |from: *const c_char| unsafe {
            (!from.is_null()).then(|| CStr::from_ptr(from).to_string_lossy().into_owned())
        };
        let path = |from| text(from).map(PathBuf::from);
        let credentials = Credentials {
            ca: path(self.ca),
            cert: path(self.cert),
            key: path(self.key),
            server_name: text(self.server_name),
            token_file: path(self.token_file),
            insecure: self.insecure != 0,
        };
        NetworkOptions { session, credentials, library: path(self.library) }
    }
}

/// Opens a network session.
///
/// # Safety
/// `address` is null or a C string, `network` is null or valid with pointers that are null or C strings, `session` is valid for a write,
/// and `error` is null or has `error_bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn expertd_session_open_network(
    address: *const c_char,
    network: *const ExpertdNetwork,
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
    unsafe {
        let options = match network.as_ref() {
            Some(network) => network.options(options),
            None => NetworkOptions { session: options, ..NetworkOptions::default() },
        };
        open_with(address, session, error, error_bytes, |address| open(address, &options))
    }
}
