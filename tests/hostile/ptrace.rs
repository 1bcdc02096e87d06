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

/// Traces a thread without stopping it. From then on only the calling thread learns of its end.
///
/// # Errors
/// If this process may not trace it.
pub fn seize(thread: i32) -> io::Result<()> {
    request(libc::PTRACE_SEIZE, thread)
}

/// Stops a thread. `Ok(false)`: it has ended.
///
/// # Errors
/// If this process may not trace it.
pub fn stop(thread: i32) -> io::Result<bool> {
    match seize(thread) {
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

/// System calls that may return 0 without an event: `futex` and the waits of `poll` and `epoll`.
const SPURIOUS: [libc::c_long; 5] =
    [libc::SYS_futex, libc::SYS_epoll_wait, libc::SYS_epoll_pwait, libc::SYS_poll, libc::SYS_ppoll];

fn registers(thread: i32) -> io::Result<libc::user_regs_struct> {
    // SAFETY: all zeros is a valid value of this struct of integers.
    let mut registers: libc::user_regs_struct = unsafe { std::mem::zeroed() };
    let address = (&raw mut registers).cast::<u8>();
    // SAFETY: the request writes the struct at `address`.
    checked(unsafe { libc::ptrace(libc::PTRACE_GETREGS, thread, null_mut::<u8>(), address) })?;
    Ok(registers)
}

fn set_registers(thread: i32, mut registers: libc::user_regs_struct) -> io::Result<()> {
    let address = (&raw mut registers).cast::<u8>();
    // SAFETY: the request reads the struct at `address`, which is alive.
    checked(unsafe { libc::ptrace(libc::PTRACE_SETREGS, thread, null_mut::<u8>(), address) })
}

/// Replaces the system call that a stopped thread is in. Its instruction has two bytes.
fn call_instead(thread: i32, mut registers: libc::user_regs_struct, call: libc::c_long) -> io::Result<()> {
    registers.rip -= 2;
    registers.rax = call.cast_unsigned();
    registers.orig_rax = u64::MAX;
    set_registers(thread, registers)
}

/// A thread in a system call that nothing ends.
pub struct Blocked {
    thread: i32,
    /// The registers that it continues with.
    after: libc::user_regs_struct,
}

impl Blocked {
    /// Lets the thread go on, as if the system call that it was in had returned without an event.
    pub fn end(&self) {
        // It may have ended.
        if matches!(stop(self.thread), Ok(true)) {
            let _ = set_registers(self.thread, self.after);
            go_on(self.thread);
        }
    }
}

/// Lets a thread wait in the kernel, untraced, until [`Blocked::end`]. It must be in one of the system calls that may return
/// without an event; others are let go for a moment. `None`: it has ended, or is never within one.
///
/// # Errors
/// If this process may not trace it.
pub fn block(thread: i32, patience: Duration) -> io::Result<Option<Blocked>> {
    let begun = Instant::now();
    while begun.elapsed() < patience {
        if !stop(thread)? {
            return Ok(None);
        }
        let now = registers(thread)?;
        if SPURIOUS.contains(&now.orig_rax.cast_signed()) {
            // poll(NULL, 0, -1)
            let waiting = libc::user_regs_struct { rdi: 0, rsi: 0, rdx: u64::MAX, ..now };
            call_instead(thread, waiting, libc::SYS_poll)?;
            go_on(thread);
            return Ok(Some(Blocked {
                thread,
                after: libc::user_regs_struct { rax: 0, orig_rax: u64::MAX, ..now },
            }));
        }
        go_on(thread);
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(None)
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
        let now = registers(thread)?;
        if now.orig_rax.cast_signed() >= 0 {
            call_instead(thread, libc::user_regs_struct { rdi: 0, ..now }, libc::SYS_exit)?;
            go_on(thread);
            return Ok(true);
        }
        go_on(thread);
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(false)
}
