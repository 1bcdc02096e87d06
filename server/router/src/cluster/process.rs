//! A rank or a loader as a child process: started with its control socket as standard input, killed and reaped when it is
//! no longer needed.

use std::io::{self, BufReader};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::watchdog;
use expertd_ipc::RouterBell;
use expertd_ipc::control::{self, FromRank, RankSetup, ToRank};
use expertd_types::{Generation, Rank};
use serde::Serialize;

/// How long the end of a killed process is waited for: it gives gigabytes of memory back first.
const REAP_TIMEOUT: Duration = Duration::from_secs(10);

/// What the control socket of a rank brought.
#[derive(Debug)]
pub enum RankNews {
    /// A message.
    Message(FromRank),
    /// The socket ended: the process is gone or about to be.
    Gone,
}

/// News of one rank.
#[derive(Debug)]
pub struct RankEvent {
    /// Of which life of the group; news of an earlier one is of no interest.
    pub generation: Generation,
    /// Of which rank.
    pub rank: Rank,
    /// The news.
    pub news: RankNews,
}

/// A running rank or loader. Dropping it kills and reaps the process.
#[derive(Debug)]
pub struct ChildProcess {
    /// `None` once it is reaped, or left to a thread that waits for it.
    child: Option<Child>,
    pid: u32,
    socket: UnixStream,
    reader: Option<JoinHandle<()>>,
    ended: Option<ExitStatus>,
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
    /// Must be called on a thread that lives as long as the process should: the parent-death signal comes when the
    /// *thread* that started a child ends.
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
            // Signals of the terminal are for the router, which stops its children in order.
            .process_group(0)
            .spawn()?;
        let mut process =
            ChildProcess { pid: child.id(), child: Some(child), socket, reader: None, ended: None };
        if !start.fds.is_empty() {
            control::send_fds(&process.socket, start.fds)?;
        }
        control::send(&process.socket, start.setup)?;
        let thread = std::thread::Builder::new().name(format!("{command}-{rank}"));
        process.reader = Some(thread.spawn(move || read(reading))?);
        Ok(process)
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
        let (generation, rank) = (setup.generation, setup.rank);
        let start = Start { command: "rank", rank, setup, fds, environment };
        Self::spawn(&start, move |socket| read_control(&socket, generation, rank, &events, &bell))
    }

    /// The process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Sends a message; a rank that is gone shows through its events.
    pub fn send(&self, message: ToRank) {
        let _ = control::send(&self.socket, &message);
    }

    /// Waits until `deadline` for the process to leave by itself; whether it did.
    pub fn wait_until(&mut self, deadline: Instant) -> bool {
        self.status_until(deadline).is_some() || self.child.is_none()
    }

    /// Reaps the process if it ends until `deadline`; how it ended.
    fn status_until(&mut self, deadline: Instant) -> Option<ExitStatus> {
        loop {
            // The wait has an end: it is no standstill of the thread that waits.
            watchdog::tick();
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

    /// Kills the process, also a stopped one; [`reap`](Self::reap) it afterwards.
    pub fn kill(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
        }
    }

    /// Waits for the end of a killed process, and tells how it ended. A process that does not end in time (stuck in a
    /// driver) is left to a thread of its own, so that nothing else waits for it.
    pub fn reap(&mut self) -> Option<ExitStatus> {
        let status = self.status_until(Instant::now() + REAP_TIMEOUT).or(self.ended);
        // Also where the process still has its end of the socket.
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
        if let Some(mut child) = self.child.take() {
            let pid = self.pid;
            tracing::error!(pid, waited = ?REAP_TIMEOUT, "a killed process does not end; going on without it");
            let wait = std::thread::Builder::new().name(format!("reap-{pid}"));
            // Without the thread the process is reaped when this one ends.
            let _ = wait.spawn(move || {
                let ended = child.wait();
                tracing::warn!(pid, ?ended, "the process that did not end is reaped");
            });
        }
        status
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        self.kill();
        self.reap();
    }
}

fn read_control(
    socket: &UnixStream,
    generation: Generation,
    rank: Rank,
    events: &Sender<RankEvent>,
    bell: &RouterBell,
) {
    let mut reader = BufReader::new(socket);
    loop {
        let news = match control::receive::<FromRank>(&mut reader) {
            Ok(Some(message)) => RankNews::Message(message),
            Ok(None) => RankNews::Gone,
            Err(error) => {
                tracing::debug!(%rank, %error, "control socket broke");
                RankNews::Gone
            }
        };
        let last = matches!(news, RankNews::Gone);
        let heard = events.send(RankEvent { generation, rank, news });
        bell.bell().ring();
        if last || heard.is_err() {
            return;
        }
    }
}
