//! Processes that their parent cannot reap: this one traces them.
#![allow(unsafe_code, reason = "ptrace has no safe interface here")]

use std::io;
use std::ptr::null_mut;

/// Traces a process without stopping it. From then on only the calling thread learns of its end.
///
/// # Errors
/// If this process may not trace it.
pub fn seize(process: i32) -> io::Result<()> {
    // SAFETY: a request with null pointers accesses no memory of this process.
    let result = unsafe { libc::ptrace(libc::PTRACE_SEIZE, process, null_mut::<u8>(), null_mut::<u8>()) };
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Stops one thread of a traced process; the others go on.
///
/// # Errors
/// If it is not traced, or has ended.
pub fn interrupt(thread: i32) -> io::Result<()> {
    // SAFETY: a request with null pointers accesses no memory of this process.
    let result = unsafe { libc::ptrace(libc::PTRACE_INTERRUPT, thread, null_mut::<u8>(), null_mut::<u8>()) };
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Takes note of a traced process's end, so that its parent can reap it.
pub fn reap(process: i32) {
    // SAFETY: a null pointer asks for no status.
    unsafe { libc::waitpid(process, null_mut(), libc::__WALL | libc::WNOHANG) };
}
