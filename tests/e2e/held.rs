//! A file that other processes cannot open for a while.
#![allow(unsafe_code, reason = "leases on files have no safe interface here")]

use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::path::Path;

/// A file with a lease: another process that opens it waits until this value is dropped, for 45 s at most.
pub(crate) struct HeldFile(#[allow(dead_code, reason = "closing it ends the lease")] File);

impl HeldFile {
    pub(crate) fn new(path: &Path) -> HeldFile {
        let file = File::options().read(true).write(true).open(path).unwrap();
        // SAFETY: the calls take no pointers. The signal by which the kernel asks for the lease is ignored.
        let leased = unsafe {
            libc::signal(libc::SIGIO, libc::SIG_IGN);
            libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_WRLCK)
        };
        assert_eq!(leased, 0, "{}", std::io::Error::last_os_error());
        HeldFile(file)
    }
}
