//! The files that an agent may open: libraries, and what the kernel says of devices and networks.
//!
//! UCX asks `/proc` and `/sys` for each connection, so that a filter of system calls cannot deny opening files. Landlock can, by their
//! folders. It holds for the calling thread and those that it starts, and is therefore the first thing that an agent does.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

/// Rights of Landlock's first version, in the kernel's order: execute, write, read, list, and ten that change folders.
const ALL: u64 = (1 << 13) - 1;
const EXECUTE: u64 = 1;
const WRITE: u64 = 1 << 1;
const READ: u64 = 1 << 2;
const LIST: u64 = 1 << 3;

/// Folders of every agent. `/proc` shows nothing of processes that are not dumpable.
const FOLDERS: [&str; 8] =
    ["/proc", "/sys", "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/libibverbs.d"];
/// RDMA devices.
const DEVICES: &str = "/dev/infiniband";
const FILES: [&str; 2] = ["/etc/ld.so.cache", "/dev/urandom"];

#[repr(C)]
struct Ruleset {
    handled: u64,
}

#[repr(C, packed)]
struct Beneath {
    allowed: u64,
    folder: i32,
}

/// Whether this kernel has Landlock.
#[must_use]
#[allow(unsafe_code, reason = "asks the kernel")]
pub fn has_landlock() -> bool {
    // SAFETY: with this flag the call takes no memory and returns the version.
    unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, 0_usize, 0_usize, 1_u32) > 0 }
}

/// Lets this thread, and those that it starts, open only the files of every agent and what lies in `folders`. Returns whether the kernel
/// can.
///
/// # Errors
/// If the kernel can, and refuses.
#[allow(unsafe_code, reason = "asks the kernel")]
pub(crate) fn confine_files(folders: &[PathBuf]) -> io::Result<bool> {
    if !has_landlock() {
        return Ok(false);
    }
    let attributes = Ruleset { handled: ALL };
    // SAFETY: the attributes live during the call, which returns a new descriptor.
    let rules = unsafe {
        let size = size_of::<Ruleset>();
        let fd = libc::syscall(libc::SYS_landlock_create_ruleset, &raw const attributes, size, 0_u32);
        OwnedFd::from_raw_fd(checked(fd)? as i32)
    };
    let allow = |path: &Path, allowed: u64| {
        // What does not exist needs no rule.
        let Ok(place) = open(path) else { return Ok(()) };
        let beneath = Beneath { allowed, folder: place.as_raw_fd() };
        // SAFETY: the rule lives during the call.
        let status = unsafe {
            libc::syscall(libc::SYS_landlock_add_rule, rules.as_raw_fd(), 1_u32, &raw const beneath, 0_u32)
        };
        checked(status).map(drop)
    };
    for folder in FOLDERS.iter().map(Path::new).chain(folders.iter().map(PathBuf::as_path)) {
        allow(folder, READ | LIST | EXECUTE)?;
    }
    for folder in folders {
        // The name of a folder beside the library tells its version.
        folder.parent().map_or(Ok(()), |parent| allow(parent, LIST))?;
    }
    allow(Path::new(DEVICES), READ | LIST | WRITE)?;
    FILES.iter().try_for_each(|file| allow(Path::new(file), READ))?;
    // SAFETY: neither call takes memory.
    unsafe {
        checked(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0).into())?;
        checked(libc::syscall(libc::SYS_landlock_restrict_self, rules.as_raw_fd(), 0_u32))?;
    }
    Ok(true)
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(path)
}

fn checked(status: libc::c_long) -> io::Result<libc::c_long> {
    if status < 0 { Err(io::Error::last_os_error()) } else { Ok(status) }
}
