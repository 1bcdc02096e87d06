//! A rank or a loader as a child process: started with its control socket as standard input, killed and reaped when it is
//! no longer needed.

use std::collections::BTreeSet;
use std::io::{self, BufReader, ErrorKind, Write as _};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::Sender;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use expertd_ipc::RouterBell;
use expertd_ipc::control::{self, FromRank, RankSetup, ToRank};
use expertd_ipc::passing::send_with_fds;
use expertd_telemetry::progress;
use expertd_types::Rank;
use serde::Serialize;

/// Longest wait for the end of killed processes, which first free gigabytes of memory.
const REAP_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest wait for the exit status of a process that has closed its control socket.
pub(super) const STATUS_TIMEOUT: Duration = Duration::from_millis(500);

/// Killed processes that have not ended.
static LEFT: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());

/// Ids of the processes that were killed and have not ended, nor been reaped, in time.
#[must_use]
pub(crate) fn left_processes() -> Vec<u32> {
    LEFT.lock().unwrap_or_else(PoisonError::into_inner).iter().copied().collect()
}

/// News from the control socket of a rank.
#[derive(Debug)]
pub(super) enum RankNews {
    /// A message.
    Message(FromRank),
    /// The socket was closed: the process has ended or is about to.
    Gone,
}

/// An event of one rank.
#[derive(Debug)]
pub(super) struct RankEvent {
    /// The rank.
    pub rank: Rank,
    /// The news.
    pub news: RankNews,
}

/// A running rank or loader. Dropping it kills and reaps the process.
#[derive(Debug)]
pub(super) struct ChildProcess {
    /// `None` after it is reaped or handed to a thread that waits for it.
    child: Option<Child>,
    pid: u32,
    socket: UnixStream,
    ended: Option<ExitStatus>,
    /// Whether the process was killed and has not ended.
    is_left: bool,
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
    /// Starts a process, and a thread that runs `read` on the router's end of its control socket.
    ///
    /// Call it on a thread that outlives the process: the kernel sends the parent-death signal when the *thread* that
    /// started a child ends.
    ///
    /// # Errors
    /// If the process cannot be started.
    pub(super) fn spawn<S: Serialize>(
        start: &Start<'_, S>,
        read: impl FnOnce(UnixStream) + Send + 'static,
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
        let process =
            ChildProcess { pid: child.id(), child: Some(child), socket, ended: None, is_left: false };
        let rest = match process.begin(start) {
            // The process has ended already. The thread that reads finds the end of the socket, and what ended it is then said as ever.
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
            read(reading);
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
        events: Sender<RankEvent>,
        bell: RouterBell,
    ) -> io::Result<Self> {
        let rank = setup.rank;
        let start = Start { command: "rank", rank, setup, fds, environment };
        Self::spawn(&start, move |socket| read_control(socket, rank, &events, &bell))
    }

    /// The process id.
    #[must_use]
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

    /// Whether the process was killed and did not end in time; its memory is still mapped.
    #[must_use]
    pub(super) const fn is_left(&self) -> bool {
        self.is_left
    }

    /// Waits until `deadline` for the process to exit. Returns whether it did.
    pub(super) fn wait_until(&mut self, deadline: Instant) -> bool {
        self.status_until(deadline).is_some() || self.child.is_none()
    }

    /// Reaps the process if it ends before `deadline`, and returns its exit status.
    fn status_until(&mut self, deadline: Instant) -> Option<ExitStatus> {
        loop {
            // The wait is bounded, so it is no standstill of the calling thread.
            progress::tick();
            match self.child.as_mut()?.try_wait() {
                Ok(None) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(2)),
                Ok(None) => return None,
                Ok(Some(status)) => {
                    self.child = None;
                    self.ended = Some(status);
                    return Some(status);
                }
                Err(_) => {
                    self.child = None;
                    return None;
                }
            }
        }
    }

    /// The exit status of a process that has ended.
    pub(super) fn status(&mut self) -> Option<ExitStatus> {
        self.status_until(Instant::now()).or(self.ended)
    }

    /// Kills the process, even if it is stopped. `kill_and_reap` also waits for its end.
    pub(super) fn kill(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
        }
    }

    /// The exit status of a process that has closed its control socket, if it ends within a moment. A process that does not
    /// is killed.
    pub(super) fn exit_status(&mut self) -> Option<ExitStatus> {
        let status = self.status_until(Instant::now() + STATUS_TIMEOUT);
        self.kill();
        status.or(self.ended)
    }

    /// Waits for the end of a killed process until `deadline`. A process that does not end in time (stuck in a driver) is left
    /// to a thread of its own, so that nothing else waits for it.
    fn reap(&mut self, deadline: Instant) {
        self.status_until(deadline);
        // Ends the thread that reads it even if the process still has its end of the socket open.
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
        if let Some(mut child) = self.child.take() {
            self.is_left = true;
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

/// Kills processes and reaps those that end within [`REAP_TIMEOUT`]. All are killed before the first wait, so that the kernel
/// frees their memory in parallel, and the time limit is that of all together.
pub(super) fn kill_and_reap<'a>(processes: impl IntoIterator<Item = &'a mut ChildProcess>) {
    let mut processes: Vec<_> = processes.into_iter().collect();
    processes.iter_mut().for_each(|process| process.kill());
    let deadline = Instant::now() + REAP_TIMEOUT;
    processes.iter_mut().for_each(|process| process.reap(deadline));
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        kill_and_reap([self]);
    }
}

fn read_control(socket: UnixStream, rank: Rank, events: &Sender<RankEvent>, bell: &RouterBell) {
    let mut reader = BufReader::new(socket);
    loop {
        let news = match control::receive::<FromRank>(&mut reader) {
            Ok(Some(message)) => RankNews::Message(message),
            Ok(None) => RankNews::Gone,
            Err(error) => {
                tracing::debug!(%rank, %error, "control socket failed");
                RankNews::Gone
            }
        };
        let last = matches!(news, RankNews::Gone);
        let delivered = events.send(RankEvent { rank, news });
        bell.bell().ring();
        if last || delivered.is_err() {
            return;
        }
    }
}
