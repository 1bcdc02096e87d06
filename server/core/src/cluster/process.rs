//! A rank or a loader as a child process: started with its control socket as standard input, killed and reaped when it is
//! no longer needed.

use std::collections::BTreeSet;
use std::io::{self, BufRead, BufReader, ErrorKind, Write as _};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::Sender;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use expertd_ipc::RouterBell;
use expertd_ipc::control::{self, FromRank, RankSetup, ToRank};
use expertd_ipc::passing::send_with_fds;
use expertd_telemetry::progress;
use expertd_types::Rank;
use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Longest wait for the end of killed processes, which first free gigabytes of memory.
const REAP_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest wait for the exit status of a process that has closed its control socket.
const STATUS_TIMEOUT: Duration = Duration::from_millis(500);

/// Killed processes that have not ended.
static LEFT: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());

/// Ids of the processes that were killed and have not ended, nor been reaped, in time.
#[must_use]
pub(crate) fn left_processes() -> Vec<u32> {
    LEFT.lock().unwrap_or_else(PoisonError::into_inner).iter().copied().collect()
}

/// News from the control socket of a process.
#[derive(Debug)]
pub(super) enum News<M> {
    Message(M),
    /// The socket was closed: the process has ended, with this exit status, or is about to.
    Gone(Option<ExitStatus>),
}

/// A running rank or loader. Dropping it kills and reaps the process.
#[derive(Debug)]
pub(super) struct ChildProcess {
    /// `None` after it is reaped or handed to a thread that waits for it.
    child: Option<Child>,
    pid: u32,
    socket: UnixStream,
}

/// How a child process is started.
pub(super) struct Start<'a, S> {
    /// The subcommand: `rank` or `loader`.
    pub(super) command: &'static str,
    /// The rank that the process is, or works for.
    pub(super) rank: Rank,
    /// The first message.
    pub(super) setup: &'a S,
    /// Descriptors that come before it, if there are any.
    pub(super) fds: &'a [BorrowedFd<'a>],
    /// Environment beside the router's.
    pub(super) environment: &'a [(String, String)],
}

impl ChildProcess {
    /// Starts a process, and a thread that runs `read` on the router's end of its control socket and the process id.
    ///
    /// Call it on a thread that outlives the process: the kernel sends the parent-death signal when the *thread* that
    /// started a child ends.
    pub(super) fn spawn<S: Serialize>(
        start: &Start<'_, S>,
        read: impl FnOnce(UnixStream, u32) + Send + 'static,
    ) -> io::Result<Self> {
        let (socket, theirs) = UnixStream::pair()?;
        let reading = socket.try_clone()?;
        let Start { command, rank, .. } = start;
        let child = Command::new("/proc/self/exe")
            .arg0("expertd")
            .args([command, "--rank", &rank.to_string(), "--parent", &std::process::id().to_string()])
            .envs(start.environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            // A process group of its own keeps the terminal's signals from the child; the router stops its children in order.
            .process_group(0)
            .spawn()?;
        let pid = child.id();
        let process = ChildProcess { pid, child: Some(child), socket };
        let rest = match process.begin(start) {
            // The process has ended already. The reading thread finds the end of the socket and reports the exit status as usual.
            Err(error) if matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) => {
                Vec::new()
            }
            sent => sent?,
        };
        let thread = std::thread::Builder::new().name(format!("{command}-{rank}"));
        // The thread ends with the socket.
        thread.spawn(move || {
            let needed = progress::guard("a thread that reads the messages of a rank or loader");
            // After an error the reader finds the end of the socket.
            let _ = (&reading).write_all(&rest);
            read(reading, pid);
            needed.finish();
        })?;
        Ok(process)
    }

    /// Sends the descriptors and as much of the first message as the socket takes without waiting, and returns the rest. The setup of a
    /// loader holds a placement, which may be larger than the socket's buffer, and a process that is stopped reads nothing.
    fn begin<S: Serialize>(&self, start: &Start<'_, S>) -> io::Result<Vec<u8>> {
        if !start.fds.is_empty() {
            expertd_shm::descriptors::send_fds(&self.socket, start.fds)?;
        }
        control::send_some(&self.socket, start.setup)
    }

    /// Starts a rank. News of it goes to `events`, and `bell` is rung.
    ///
    /// # Errors
    /// As [`spawn`](Self::spawn).
    pub(super) fn spawn_rank(
        setup: &RankSetup,
        fds: &[BorrowedFd<'_>],
        environment: &[(String, String)],
        events: Sender<(Rank, News<FromRank>)>,
        bell: RouterBell,
    ) -> io::Result<Self> {
        let rank = setup.rank;
        let start = Start { command: "rank", rank, setup, fds, environment };
        Self::spawn(&start, move |socket, pid| {
            read_news(BufReader::new(socket), pid, rank, &events, &bell, |_, message| message);
        })
    }

    /// The process id.
    pub(super) fn pid(&self) -> u32 {
        self.pid
    }

    /// Sends a message. If the rank is gone, its events report it.
    pub(super) fn send(&self, message: ToRank) {
        let _ = control::send(&self.socket, &message);
    }

    /// Sends a message with descriptors. If the rank is gone, its events report it.
    pub(super) fn send_with_fds(&self, message: &ToRank, fds: &[BorrowedFd<'_>]) {
        let _ = send_with_fds(&self.socket, message, fds);
    }

    /// Reaps the process if it ends before `deadline`.
    pub(super) fn wait_until(&mut self, deadline: Instant) {
        while let Some(child) = &mut self.child {
            // The wait is bounded, so it is no standstill of the calling thread.
            progress::tick();
            // Read before the look, which may come after a pause.
            let now = Instant::now();
            match child.try_wait() {
                Ok(None) if now < deadline => std::thread::sleep(Duration::from_millis(2)),
                Ok(None) => return,
                Ok(Some(_)) | Err(_) => self.child = None,
            }
        }
    }

    /// Kills the process, even if it is stopped.
    fn kill(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
        }
    }

    /// Waits for the end of a killed process until `deadline`. A process that does not end in time (stuck in a driver) is left
    /// to a thread of its own, so that nothing else waits for it.
    fn reap(&mut self, deadline: Instant) {
        self.wait_until(deadline);
        // Ends the thread that reads it even if the process still has its end of the socket open.
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
        if let Some(mut child) = self.child.take() {
            let pid = self.pid;
            tracing::error!(pid, "a killed process does not end; the service continues without it");
            LEFT.lock().unwrap_or_else(PoisonError::into_inner).insert(pid);
            let wait = std::thread::Builder::new().name(format!("reap-{pid}"));
            // If the thread cannot be started, init reaps the process after this one ends.
            let _ = wait.spawn(move || {
                let ended = child.wait();
                LEFT.lock().unwrap_or_else(PoisonError::into_inner).remove(&pid);
                tracing::warn!(pid, ?ended, "reaped the process that did not end");
            });
        }
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        self.kill();
        self.reap(Instant::now() + REAP_TIMEOUT);
    }
}

/// Killed processes. Dropping them reaps those that end within [`REAP_TIMEOUT`]. All are killed before the first wait, so that the
/// kernel frees their memory in parallel, and the time limit is that of all together.
#[derive(Debug)]
pub(super) struct Killed(Vec<ChildProcess>);

impl Killed {
    /// Kills processes.
    pub(super) fn new(mut processes: Vec<ChildProcess>) -> Self {
        processes.iter_mut().for_each(ChildProcess::kill);
        Killed(processes)
    }
}

impl Drop for Killed {
    fn drop(&mut self) {
        let deadline = Instant::now() + REAP_TIMEOUT;
        self.0.iter_mut().for_each(|process| process.reap(deadline));
    }
}

/// The exit status of a process that has closed its control socket, if it ends within a moment. It stays to be reaped.
pub(super) fn exit_status(pid: u32) -> Option<ExitStatus> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw)?;
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    let deadline = Instant::now() + STATUS_TIMEOUT;
    loop {
        match waitid(WaitId::Pid(pid), options).ok()? {
            Some(status) => {
                let dumped = if status.dumped() { 0x80 } else { 0 };
                let by_signal = status.terminating_signal().map(|signal| signal | dumped);
                return by_signal.or(status.exit_status().map(|code| code << 8)).map(ExitStatus::from_raw);
            }
            None if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(2)),
            None => return None,
        }
    }
}

/// Reads the control socket of a process until its end. `complete` adds to a message what came with it.
pub(super) fn read_news<R: BufRead, M: DeserializeOwned, T>(
    mut reader: R,
    pid: u32,
    rank: Rank,
    events: &Sender<(Rank, News<T>)>,
    bell: &RouterBell,
    complete: impl Fn(&mut R, M) -> T,
) {
    loop {
        let news = match control::receive::<M>(&mut reader) {
            Ok(Some(message)) => News::Message(complete(&mut reader, message)),
            Ok(None) => News::Gone(exit_status(pid)),
            Err(error) => {
                tracing::debug!(%rank, pid, %error, "a control socket failed");
                News::Gone(exit_status(pid))
            }
        };
        let last = matches!(news, News::Gone(_));
        let delivered = events.send((rank, news));
        bell.bell().ring();
        if last || delivered.is_err() {
            return;
        }
    }
}
