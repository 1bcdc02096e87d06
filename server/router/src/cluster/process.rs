//! One expert rank as a child process: started with its control socket as standard input, killed and reaped when its
//! generation ends.

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

/// Longest wait for the end of a killed process, which first frees gigabytes of memory.
const REAP_TIMEOUT: Duration = Duration::from_secs(10);

/// News from the control socket of a rank.
#[derive(Debug)]
pub enum RankNews {
    /// A message.
    Message(FromRank),
    /// The socket was closed: the process has ended or is about to.
    Gone,
}

/// An event of one rank.
#[derive(Debug)]
pub struct RankEvent {
    /// Generation of the rank.
    pub generation: Generation,
    /// The rank.
    pub rank: Rank,
    /// The news.
    pub news: RankNews,
}

/// A running rank. Dropping it kills and reaps the process.
#[derive(Debug)]
pub struct RankProcess {
    /// `None` after it is reaped or handed to a thread that waits for it.
    child: Option<Child>,
    pid: u32,
    socket: UnixStream,
    reader: Option<JoinHandle<()>>,
    ended: Option<ExitStatus>,
}

impl RankProcess {
    /// Starts a rank. Each event is sent to `events` and followed by a ring of `bell`.
    ///
    /// Call it on a thread that outlives the rank: the kernel sends the parent-death signal when the *thread* that started a
    /// child ends.
    ///
    /// # Errors
    /// If the process cannot be started.
    pub fn spawn(
        setup: &RankSetup,
        fds: &[BorrowedFd<'_>],
        environment: &[(String, String)],
        events: Sender<RankEvent>,
        bell: RouterBell,
    ) -> io::Result<Self> {
        let (socket, theirs) = UnixStream::pair()?;
        let reading = socket.try_clone()?;
        let child = Command::new("/proc/self/exe")
            .arg0("expertd")
            .args(["rank", "--rank", &setup.rank.to_string(), "--parent", &std::process::id().to_string()])
            .envs(environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            // A process group of its own keeps the terminal's signals from the rank; the router stops its ranks in order.
            .process_group(0)
            .spawn()?;
        let mut process =
            RankProcess { pid: child.id(), child: Some(child), socket, reader: None, ended: None };
        control::send_fds(&process.socket, fds)?;
        control::send(&process.socket, setup)?;
        let (generation, rank) = (setup.generation, setup.rank);
        process.reader = Some(
            std::thread::Builder::new()
                .name(format!("control-{rank}"))
                .spawn(move || read_control(&reading, generation, rank, &events, &bell))?,
        );
        Ok(process)
    }

    /// The process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Sends a message. If the rank is gone, its events report it.
    pub fn send(&self, message: ToRank) {
        let _ = control::send(&self.socket, &message);
    }

    /// Waits until `deadline` for the process to exit. Returns whether it did.
    pub fn wait_until(&mut self, deadline: Instant) -> bool {
        self.status_until(deadline).is_some() || self.child.is_none()
    }

    /// Reaps the process if it ends before `deadline`, and returns its exit status.
    fn status_until(&mut self, deadline: Instant) -> Option<ExitStatus> {
        loop {
            // The wait is bounded, so it is no standstill of the calling thread.
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

    /// Kills the process, even if it is stopped. Call [`reap`](Self::reap) afterwards.
    pub fn kill(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
        }
    }

    /// Waits for the end of a killed process and returns its exit status. A process that does not end in time (stuck in a
    /// driver) is left to a thread of its own, so that nothing else waits for it.
    pub fn reap(&mut self) -> Option<ExitStatus> {
        let status = self.status_until(Instant::now() + REAP_TIMEOUT).or(self.ended);
        // Ends the reader thread even if the process still has its end of the socket open.
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
        if let Some(mut child) = self.child.take() {
            let pid = self.pid;
            tracing::error!(pid, waited = ?REAP_TIMEOUT, "a killed rank does not end; the service continues without it");
            let wait = std::thread::Builder::new().name(format!("reap-{pid}"));
            // If the thread cannot be started, init reaps the process after this one ends.
            let _ = wait.spawn(move || {
                let ended = child.wait();
                tracing::warn!(pid, ?ended, "reaped the rank that did not end");
            });
        }
        status
    }
}

impl Drop for RankProcess {
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
                tracing::debug!(%rank, %error, "control socket failed");
                RankNews::Gone
            }
        };
        let last = matches!(news, RankNews::Gone);
        let delivered = events.send(RankEvent { generation, rank, news });
        bell.bell().ring();
        if last || delivered.is_err() {
            return;
        }
    }
}
