//! What an agent may no longer do once it serves its client.
//!
//! Whoever controls an agent has the service's user, and could write its files, connect to its Unix sockets and send signals to its
//! processes. A filter of system calls takes that away: no changes of files, programs, processes, signals, System V memory, or sockets but
//! those of IP, and no call that is newer than the filter. It is a list of what is denied, because UCX and the C library need more calls than can be foreseen for every network
//! device; it contains everything that opens something by a name or a number, but reading of files ([`crate::files`]).

use std::io;

use libc::{c_long, sock_filter, sock_fprog};

/// The architecture whose numbers of system calls are compiled in.
#[cfg(target_arch = "x86_64")]
const ARCHITECTURE: u32 = 0xC000_003E;
#[cfg(target_arch = "aarch64")]
const ARCHITECTURE: u32 = 0xC000_00B7;

/// Offsets in what a filter sees of a call: its number, its architecture, the lower halves of arguments.
const NUMBER: u32 = 0;
const ARCH: u32 = 4;
const FIRST_ARGUMENT: u32 = 16;
const SECOND_ARGUMENT: u32 = 24;
const THIRD_ARGUMENT: u32 = 32;

const LOAD: u16 = 0x20;
const JUMP_IF_EQUAL: u16 = 0x15;
const JUMP_IF_ABOVE: u16 = 0x25;
const JUMP_IF_ANY_BIT: u16 = 0x45;
const RETURN: u16 = 0x06;
const ALLOW: u32 = 0x7fff_0000;
const DENY: u32 = 0x0005_0000 | libc::EPERM as u32;
const UNKNOWN: u32 = 0x0005_0000 | libc::ENOSYS as u32;
/// The number of `mseal`. Calls with larger ones are newer than this list, or those of another interface of x86 processors.
const LARGEST_NUMBER: u32 = 462;

/// Flags of `openat` that do more than read.
const WRITING: i32 =
    libc::O_WRONLY | libc::O_RDWR | libc::O_CREAT | libc::O_TRUNC | (libc::O_TMPFILE & !libc::O_DIRECTORY);
/// Calls whose commands are denied, the argument that has them, and the commands: signals that a descriptor sends to any process of the
/// user, input typed into a terminal, and what keeps this process from ending with the router or from being looked into.
const DENIED_COMMANDS: &[(c_long, u32, &[u32])] = &[
    (libc::SYS_fcntl, SECOND_ARGUMENT, &[libc::F_SETOWN as u32, F_SETSIG, F_SETOWN_EX]),
    (
        libc::SYS_ioctl,
        SECOND_ARGUMENT,
        &[FIOSETOWN, SIOCSPGRP, libc::FIOASYNC as u32, libc::TIOCSTI as u32, TIOCLINUX],
    ),
    (libc::SYS_prctl, FIRST_ARGUMENT, &[libc::PR_SET_PDEATHSIG as u32, libc::PR_SET_DUMPABLE as u32]),
];
// Of fcntl.h and sockios.h, the same on both architectures.
const F_SETSIG: u32 = 10;
const F_SETOWN_EX: u32 = 15;
const FIOSETOWN: u32 = 0x8901;
const SIOCSPGRP: u32 = 0x8902;
const TIOCLINUX: u32 = 0x541c;

/// Families of sockets that remain.
const FAMILIES: [i32; 3] = [libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK];

/// Private memory that an agent may add once it serves its client. What waits for a client that does not read is kept there: with as many
/// calls as a session may have, 64 MiB each way.
const MORE_MEMORY: u64 = 256 << 20;
/// Descriptors, and so connections, that an agent may have.
const DESCRIPTORS: u64 = 256;

/// Calls that are denied on every architecture.
const DENIED: &[c_long] = &[
    // Changes of files, and ways to open them whose flags a filter cannot see.
    libc::SYS_openat2,
    libc::SYS_open_by_handle_at,
    libc::SYS_unlinkat,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_linkat,
    libc::SYS_symlinkat,
    libc::SYS_mkdirat,
    libc::SYS_mknodat,
    libc::SYS_truncate,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_fchmodat2,
    libc::SYS_fchown,
    libc::SYS_fchownat,
    libc::SYS_utimensat,
    libc::SYS_setxattr,
    libc::SYS_lsetxattr,
    libc::SYS_fsetxattr,
    libc::SYS_removexattr,
    libc::SYS_lremovexattr,
    libc::SYS_fremovexattr,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    // Programs and processes.
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_clone,
    libc::SYS_clone3,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_process_madvise,
    libc::SYS_kcmp,
    libc::SYS_kill,
    libc::SYS_tkill,
    libc::SYS_tgkill,
    libc::SYS_rt_sigqueueinfo,
    libc::SYS_rt_tgsigqueueinfo,
    libc::SYS_pidfd_open,
    libc::SYS_pidfd_getfd,
    libc::SYS_pidfd_send_signal,
    libc::SYS_prlimit64,
    libc::SYS_setpriority,
    libc::SYS_sched_setaffinity,
    libc::SYS_sched_setscheduler,
    libc::SYS_sched_setparam,
    libc::SYS_sched_setattr,
    libc::SYS_ioprio_set,
    libc::SYS_migrate_pages,
    libc::SYS_move_pages,
    libc::SYS_unshare,
    libc::SYS_setns,
    // Memory and queues by number or name.
    libc::SYS_shmget,
    libc::SYS_shmat,
    libc::SYS_shmctl,
    libc::SYS_msgget,
    libc::SYS_msgsnd,
    libc::SYS_msgrcv,
    libc::SYS_msgctl,
    libc::SYS_semget,
    libc::SYS_semop,
    libc::SYS_semtimedop,
    libc::SYS_semctl,
    libc::SYS_mq_open,
    libc::SYS_mq_unlink,
    // Calls that the kernel allows only to root.
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_acct,
    // Ways around a filter, and large parts of the kernel that no transport needs.
    libc::SYS_io_uring_setup,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_keyctl,
    libc::SYS_add_key,
    libc::SYS_request_key,
];

/// Older names of the same, which newer architectures lack.
#[cfg(target_arch = "x86_64")]
const DENIED_HERE: &[c_long] = &[
    libc::SYS_open,
    libc::SYS_creat,
    libc::SYS_unlink,
    libc::SYS_rename,
    libc::SYS_link,
    libc::SYS_symlink,
    libc::SYS_mkdir,
    libc::SYS_rmdir,
    libc::SYS_mknod,
    libc::SYS_chmod,
    libc::SYS_chown,
    libc::SYS_lchown,
    libc::SYS_utime,
    libc::SYS_utimes,
    libc::SYS_futimesat,
    libc::SYS_iopl,
    libc::SYS_ioperm,
    libc::SYS_fork,
    libc::SYS_vfork,
];
#[cfg(target_arch = "aarch64")]
const DENIED_HERE: &[c_long] = &[];

/// Denies this process and all its threads what an agent does not need. There is no way back.
///
/// # Errors
/// If the kernel has no filters of system calls, or a thread cannot be given one.
#[allow(unsafe_code, reason = "asks the kernel")]
pub(crate) fn confine() -> io::Result<()> {
    let mut program = filter();
    let program = sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: the program lives during the call, which copies it; the first call has no pointers.
    let status = unsafe {
        if libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 {
            return Err(io::Error::last_os_error());
        }
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            libc::SECCOMP_FILTER_FLAG_TSYNC,
            &raw const program,
        )
    };
    match status {
        0 => Ok(()),
        -1 => Err(io::Error::last_os_error()),
        thread => Err(io::Error::other(format!("thread {thread} has another filter of system calls"))),
    }
}

/// Limits memory and descriptors of this process, so that a client which never reads, or strangers who connect, end the agent and not the
/// service.
///
/// # Errors
/// If the kernel does not say how much memory the process has, or refuses.
pub(crate) fn limit() -> io::Result<()> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let data = status.lines().find_map(|line| line.strip_prefix("VmData:"));
    let data = data.and_then(|text| text.trim().trim_end_matches(" kB").parse::<u64>().ok());
    let data = data.ok_or_else(|| io::Error::other("/proc/self/status has no VmData"))?;
    limit_to(libc::RLIMIT_DATA, data * 1024 + MORE_MEMORY)?;
    limit_to(libc::RLIMIT_NOFILE, DESCRIPTORS)?;
    limit_to(libc::RLIMIT_CORE, 0)
}

#[allow(unsafe_code, reason = "asks the kernel")]
fn limit_to(resource: libc::__rlimit_resource_t, most: u64) -> io::Result<()> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the limit lives during both calls.
    let status = unsafe {
        libc::getrlimit(resource, &raw mut limit);
        let most = most.min(limit.rlim_max);
        limit = libc::rlimit { rlim_cur: most, rlim_max: most };
        libc::setrlimit(resource, &raw const limit)
    };
    if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn filter() -> Vec<sock_filter> {
    let step = |code, k, jt, jf| sock_filter { code, jt, jf, k };
    let deny = step(RETURN, DENY, 0, 0);
    let mut program = vec![
        step(LOAD, ARCH, 0, 0),
        step(JUMP_IF_EQUAL, ARCHITECTURE, 1, 0),
        deny,
        step(LOAD, NUMBER, 0, 0),
        step(JUMP_IF_ABOVE, LARGEST_NUMBER, 0, 1),
        step(RETURN, UNKNOWN, 0, 0),
    ];
    for &call in DENIED.iter().chain(DENIED_HERE) {
        program.extend([step(JUMP_IF_EQUAL, call as u32, 0, 1), deny]);
    }
    for call in [libc::SYS_socket, libc::SYS_socketpair] {
        // Skips the check of the family, unless it is this call.
        program.push(step(JUMP_IF_EQUAL, call as u32, 0, FAMILIES.len() as u8 * 2 + 2));
        program.push(step(LOAD, FIRST_ARGUMENT, 0, 0));
        for family in FAMILIES {
            program.extend([step(JUMP_IF_EQUAL, family as u32, 0, 1), step(RETURN, ALLOW, 0, 0)]);
        }
        program.push(deny);
    }
    for (call, argument, commands) in DENIED_COMMANDS {
        program.push(step(JUMP_IF_EQUAL, *call as u32, 0, commands.len() as u8 * 2 + 2));
        program.push(step(LOAD, *argument, 0, 0));
        for command in *commands {
            program.extend([step(JUMP_IF_EQUAL, *command, 0, 1), deny]);
        }
        program.push(step(RETURN, ALLOW, 0, 0));
    }
    program.extend([
        step(JUMP_IF_EQUAL, libc::SYS_openat as u32, 0, 3),
        step(LOAD, THIRD_ARGUMENT, 0, 0),
        step(JUMP_IF_ANY_BIT, WRITING as u32, 0, 1),
        deny,
        step(RETURN, ALLOW, 0, 0),
    ]);
    program
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    #![allow(unsafe_code, reason = "asks the kernel for what it must deny")]

    use std::io::{ErrorKind, Read as _, Write as _};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::{AsFd as _, AsRawFd as _};
    use std::os::unix::net::UnixStream;
    use std::process::Command;
    use std::sync::mpsc;

    use super::*;
    use crate::files::confine_files;

    /// Asks for signals of a socket to the parent process.
    fn set_owner(socket: std::os::fd::BorrowedFd<'_>) -> io::Result<()> {
        // SAFETY: no pointers.
        let status = unsafe { libc::fcntl(socket.as_raw_fd(), libc::F_SETOWN, libc::getppid()) };
        if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    const CONFINED: &str = "EXPERTD_TEST_CONFINED";

    /// Not a test by itself: the process that is confined.
    #[test]
    #[ignore = "runs as a child process of another test"]
    fn confined() {
        if std::env::var_os(CONFINED).is_none() {
            return;
        }
        let (own, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        for folder in [&own, &other] {
            std::fs::write(folder.path().join("file"), b"x").unwrap();
        }
        let is_limited = confine_files(&[own.path().to_owned()]).unwrap();
        let (confined, is_confined) = mpsc::channel();
        let earlier = std::thread::spawn(move || {
            is_confined.recv().unwrap();
            std::fs::write("/tmp/expertd-confined", b"x")
        });
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        std::fs::read("/proc/self/status").unwrap();
        confine().unwrap();
        confined.send(()).unwrap();
        let denied = |result: io::Result<()>| {
            assert_eq!(result.map_err(|error| error.kind()), Err(ErrorKind::PermissionDenied));
        };
        std::fs::read("/proc/self/status").unwrap();
        std::fs::read(own.path().join("file")).unwrap();
        if is_limited {
            denied(std::fs::read(other.path().join("file")).map(drop));
            denied(std::fs::read("/etc/passwd").map(drop));
        }
        denied(std::fs::write(own.path().join("file"), b"y"));
        denied(std::fs::write("/tmp/expertd-confined", b"x"));
        denied(Command::new("/bin/true").status().map(drop));
        denied(UnixStream::pair().map(drop));
        denied(UnixStream::connect("/nowhere").map(drop));
        denied(std::thread::Builder::new().spawn(|| {}).map(drop));
        let parent = rustix::process::getppid().unwrap();
        denied(rustix::process::test_kill_process(parent).map_err(Into::into));
        let socket = server.as_fd();
        denied(rustix::io::ioctl_fionbio(socket, false).map_err(Into::into).and_then(|()| set_owner(socket)));
        for (call, text) in
            [(libc::SYS_fchmodat2, "file"), (libc::SYS_lsetxattr, "file"), (libc::SYS_fchmod, "")]
        {
            let path = std::ffi::CString::new(text).unwrap();
            // SAFETY: the calls are denied before they read their arguments; the path outlives them.
            let status = unsafe { libc::syscall(call, libc::AT_FDCWD, path.as_ptr(), 0o666, 0) };
            denied(if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) });
        }
        denied(earlier.join().unwrap());
        let mut client = TcpStream::connect(server.local_addr().unwrap()).unwrap();
        client.write_all(b"x").unwrap();
        server.accept().unwrap().0.read_exact(&mut [0]).unwrap();
    }

    #[test]
    fn a_confined_process_keeps_its_network_and_nothing_else() {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "confine::tests::confined", "--nocapture", "--test-threads", "1"])
            .env(CONFINED, "1")
            .output()
            .unwrap();
        assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stderr));
        assert!(String::from_utf8_lossy(&child.stdout).contains("1 passed"));
    }

    #[test]
    fn every_denied_call_has_one_entry() {
        let mut all: Vec<c_long> = DENIED.iter().chain(DENIED_HERE).copied().collect();
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), count);
        let commands: usize = DENIED_COMMANDS.iter().map(|(_, _, commands)| 3 + 2 * commands.len()).sum();
        assert_eq!(filter().len(), 6 + 2 * count + 2 * 9 + commands + 5);
    }
}
