//! Single threads of another process, stopped and ended from outside. All calls for one thread come from one thread.
#![allow(unsafe_code, reason = "ptrace has no safe interface here")]

use std::io;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

/// Result of a request that returns 0 or -1.
fn checked(result: libc::c_long) -> io::Result<()> {
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Makes a request without address and data.
fn request(kind: libc::c_uint, thread: i32) -> io::Result<()> {
    // SAFETY: requests with null pointers access no memory of this process.
    checked(unsafe { libc::ptrace(kind, thread, null_mut::<u8>(), null_mut::<u8>()) })
}

/// Stops a thread. `Ok(false)`: it has ended.
///
/// # Errors
/// If this process may not trace it.
pub fn stop(thread: i32) -> io::Result<bool> {
    match request(libc::PTRACE_SEIZE, thread) {
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => return Ok(false),
        seized => seized?,
    }
    request(libc::PTRACE_INTERRUPT, thread)?;
    let mut status = 0;
    // SAFETY: `status` is valid for writes.
    if unsafe { libc::waitpid(thread, &mut status, libc::__WALL) } == -1 {
        return Err(io::Error::last_os_error());
    }
    Ok(libc::WIFSTOPPED(status))
}

/// Lets a stopped thread go on. It may have ended meanwhile.
pub fn go_on(thread: i32) {
    let _ = request(libc::PTRACE_DETACH, thread);
}

/// Takes note of a traced thread's end: its process cannot end before.
pub fn reap(thread: i32) {
    // SAFETY: a null pointer asks for no status.
    unsafe { libc::waitpid(thread, null_mut(), libc::__WALL | libc::WNOHANG) };
}

/// Lets a thread execute the system call `exit`, which ends it alone and without unwinding. It must be within a system call,
/// as threads without work are; others are let go for a moment. `Ok(false)`: it has ended, or is never within a system call.
///
/// # Errors
/// If this process may not trace it.
pub fn kill(thread: i32, patience: Duration) -> io::Result<bool> {
    let begun = Instant::now();
    while begun.elapsed() < patience {
        if !stop(thread)? {
            return Ok(false);
        }
        // SAFETY: all zeros is a valid value of this struct of integers.
        let mut registers: libc::user_regs_struct = unsafe { std::mem::zeroed() };
        let address = (&raw mut registers).cast::<u8>();
        // SAFETY: the request writes the struct at `address`.
        checked(unsafe { libc::ptrace(libc::PTRACE_GETREGS, thread, null_mut::<u8>(), address) })?;
        if registers.orig_rax.cast_signed() >= 0 {
            // Back to the instruction `syscall`, which has two bytes.
            registers.rip -= 2;
            registers.rax = libc::SYS_exit.cast_unsigned();
            registers.rdi = 0;
            registers.orig_rax = u64::MAX;
            // SAFETY: the request reads the struct at `address`, which is alive.
            checked(unsafe {
                libc::ptrace(
                    libc::PTRACE_SETREGS,
                    thread,
                    null_mut::<u8>(),
                    (&raw mut registers).cast::<u8>(),
                )
            })?;
            go_on(thread);
            return Ok(true);
        }
        go_on(thread);
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(false)
}
