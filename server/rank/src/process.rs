//! The main loop of a rank's process: set-up, loading, steps, exit.

use std::collections::VecDeque;
use std::io::{self, BufReader};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytemuck::Zeroable;

use crate::memories::{ClientMemory, Order, Orders, unexpected};
use crate::{SetupClock, StepEngine, StepFault, StepReport};
use expertd_ipc::control::{self, FailureKind, FromRank, RankSetup, ToRank};
use expertd_ipc::passing::FdReader;
use expertd_ipc::{Completion, Heartbeat, RankChannel, RouterBell, RowCounts, StepDescriptor, UsageReport};
use expertd_shm::wait::spin_between_steps;
use expertd_types::{DeviceUsage, MemoryId, Rank};

/// Why a rank's process ended.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum RankExit {
    #[error("control socket: {0}")]
    Control(#[from] io::Error),
    /// The router of this rank is gone, or the process was not started by one.
    #[error("{0}")]
    Orphan(String),
    /// A failure that was reported to the router before the process exits.
    #[error("{0}")]
    Reported(String),
    #[error("step failed: {0}")]
    Step(#[from] StepFault),
    #[error(transparent)]
    Channel(#[from] expertd_ipc::ChannelError),
}

/// Resources of a rank that loads its engine.
pub struct Joining<'a> {
    /// The router's setup of this rank.
    pub setup: &'a RankSetup,
    /// Shared memory with the router; its staging outlives the engine.
    pub channel: &'a RankChannel,
    /// The table to which the engine adds the rows that its experts compute.
    pub row_counts: RowCounts,
    /// The control socket, for messages that ranks exchange through the router while they join.
    pub socket: &'a UnixStream,
    /// The reading end of the control socket.
    pub reader: &'a mut BufReader<FdReader>,
    fds: std::vec::IntoIter<OwnedFd>,
    /// Measures the parts of the set-up.
    pub clock: &'a mut SetupClock,
}

impl Joining<'_> {
    /// Takes the next file descriptor that the router sent, which is for `what`.
    ///
    /// # Errors
    /// If the router sent no more descriptors.
    pub fn next_fd(&mut self, what: &str) -> Result<OwnedFd, Failure> {
        let missing = || setup_failure(format!("the router sent no file descriptor for {what}"));
        self.fds.next().ok_or_else(missing)
    }
}

/// A loaded engine.
pub struct Loaded {
    /// The warm engine.
    pub engine: Box<dyn StepEngine>,
    /// Size of the weights that the engine holds, in bytes.
    pub weight_bytes: u64,
    /// Human-readable description of the device.
    pub device: String,
    /// Reads the usage of the device, on a thread of its own; `None` if the device has none to report.
    pub usage: Option<ReadUsage>,
}

/// Reads the usage of a rank's device; `None` if it cannot be read now. It may take as long as the driver does.
pub type ReadUsage = Box<dyn FnMut() -> Option<DeviceUsage> + Send>;

/// Pause between two readings of a device's usage.
const USAGE_EVERY: Duration = Duration::from_secs(2);

/// Runs a rank whose router is process `parent` and sends control messages over `socket`, until the router ends it. `load`
/// makes the engine of the setup's device.
///
/// # Errors
/// The reason if the rank ends otherwise.
pub fn run_rank(
    parent: u32,
    socket: UnixStream,
    load: impl FnOnce(Joining<'_>) -> Result<Loaded, Failure>,
) -> Result<(), RankExit> {
    end_with(parent)?;
    let fds = expertd_shm::descriptors::receive_fds(&socket)?;
    let mut reader = BufReader::new(FdReader::new(socket.try_clone()?));
    let setup: RankSetup = control::receive(&mut reader)?
        .ok_or_else(|| RankExit::Orphan("the router ended before it sent this rank's setup".into()))?;
    let _span = tracing::info_span!("rank", rank = %setup.rank, generation = %setup.generation).entered();

    match ReadyRank::join(&setup, fds, &socket, &mut reader, load) {
        Ok(rank) => rank.serve(&setup, &socket, reader),
        Err((kind, message)) => {
            control::send(&socket, &FromRank::Failed { kind, message: message.clone() })?;
            Err(RankExit::Reported(message))
        }
    }
}

/// Lets the kernel end this process with its parent, which must be process `parent`, or with the thread of it that started this process.
///
/// # Errors
/// If the parent is another process already.
pub fn end_with(parent: u32) -> Result<(), RankExit> {
    // The signal is requested before the parent is checked, so that a parent which dies in between is noticed.
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
        .map_err(io::Error::from)?;
    if rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get().cast_unsigned()) != Some(parent) {
        return Err(RankExit::Orphan(format!("process {parent}, the router of this process, is gone")));
    }
    Ok(())
}

/// A rank that is loaded and warm.
struct ReadyRank {
    // Dropped before the channel, whose pages it may have pinned.
    engine: Box<dyn StepEngine>,
    channel: RankChannel,
    weight_bytes: u64,
    device: String,
}

/// Why a rank could not get ready, as it reports to the router.
pub type Failure = (FailureKind, String);

/// Makes a failure to set up the device or the group.
pub fn setup_failure(error: impl std::fmt::Display) -> Failure {
    (FailureKind::Setup, error.to_string())
}

impl ReadyRank {
    fn join(
        setup: &RankSetup,
        fds: Vec<OwnedFd>,
        socket: &UnixStream,
        reader: &mut BufReader<FdReader>,
        load: impl FnOnce(Joining<'_>) -> Result<Loaded, Failure>,
    ) -> Result<Self, Failure> {
        let mut fds = fds.into_iter();
        let mut next_fd = |what: &str| {
            fds.next().ok_or_else(|| setup_failure(format!("the router sent no file descriptor for {what}")))
        };
        let mut clock = SetupClock::start();
        let channel_fd = next_fd("the channel")?;
        let bell = RouterBell::join(next_fd("the router's bell")?).map_err(setup_failure)?;
        let row_counts = RowCounts::join(setup.row_counts, next_fd("row counts")?).map_err(setup_failure)?;
        let channel = RankChannel::join(&setup.shape, setup.rank, channel_fd, bell.bell().clone())
            .map_err(setup_failure)?;
        beat(channel.heartbeat(), setup.heartbeat).map_err(setup_failure)?;
        pin(setup.rank, &setup.cores);
        clock.end("channel");
        channel.populate().map_err(setup_failure)?;
        clock.end("staging pages");
        let joining =
            Joining { setup, channel: &channel, row_counts, socket, reader, fds, clock: &mut clock };
        let Loaded { engine, weight_bytes, device, usage } = load(joining)?;
        if let Some(read) = usage {
            report_usage(channel.usage(), read).map_err(setup_failure)?;
        }
        tracing::debug!(parts = %clock, "set up");
        Ok(ReadyRank { channel, engine, weight_bytes, device })
    }

    fn serve(
        mut self,
        setup: &RankSetup,
        socket: &UnixStream,
        mut reader: BufReader<FdReader>,
    ) -> Result<(), RankExit> {
        control::send(
            socket,
            &FromRank::Ready { weight_bytes: self.weight_bytes, device: self.device.clone() },
        )?;
        match control::receive::<ToRank>(&mut reader)? {
            Some(ToRank::Start) => {}
            Some(ToRank::Exit) | None => return Ok(()),
            Some(message) => return Err(unexpected(&message).into()),
        }
        let orders = Arc::new(Orders::default());
        let reading = Arc::clone(&orders);
        let bell = self.channel.bell().clone();
        std::thread::Builder::new()
            .name("control".into())
            .spawn(move || reading.read(&mut reader, || bell.ring()))?;
        tracing::debug!("joined");
        self.run_steps(spin_between_steps(setup.spin, setup.threads), &orders, socket)
    }

    /// Takes and completes steps in order. The next step is taken while earlier ones run, as far as the engine allows it.
    /// While an order waits, no step is taken; once none runs, the order is carried out. There is at most one order between two
    /// steps.
    fn run_steps(&mut self, spin: Duration, orders: &Orders, socket: &UnixStream) -> Result<(), RankExit> {
        let notice = self.channel.notice();
        let mut running: VecDeque<StepDescriptor> = VecDeque::new();
        loop {
            let next = if running.is_empty() {
                match orders.take() {
                    None => {}
                    Some(Order::Leave) => return Ok(()),
                    Some(Order::Attach(memory, client)) => self.attach(memory, client, socket)?,
                    Some(Order::Detach(memory)) => {
                        self.engine.detach(memory);
                        control::send(socket, &FromRank::Detached { memory })?;
                    }
                }
                match self.channel.step()? {
                    None => self.channel.wait_step(spin, orders.any())?,
                    step => step,
                }
            } else if orders.any().load(Ordering::Acquire) {
                None
            } else {
                self.channel.step()?
            };
            if let Some(step) = next {
                match self.engine.begin(&step, self.channel.staging(&step), &notice) {
                    Ok(None) => running.push_back(step),
                    result => self.complete(&step, result)?,
                }
            }
            if let Some(step) = running.front() {
                let result = self.engine.ended(step, &mut self.channel, &notice);
                if !matches!(result, Ok(None)) {
                    self.complete(step, result)?;
                    running.pop_front();
                }
            }
        }
    }

    fn attach(
        &mut self,
        memory: MemoryId,
        client: Result<ClientMemory, String>,
        socket: &UnixStream,
    ) -> Result<(), RankExit> {
        let error = client.and_then(|client| self.engine.attach(memory, client)).err();
        if let Some(error) = &error {
            tracing::warn!(%memory, error, "the memory of a client is not attached");
        }
        Ok(control::send(socket, &FromRank::Attached { memory, error })?)
    }

    /// Sends a step's completion, which returns its staging to the router. A fault of the step ends the rank.
    fn complete(
        &mut self,
        step: &StepDescriptor,
        result: Result<Option<StepReport>, StepFault>,
    ) -> Result<(), RankExit> {
        let mut completion = Completion { sequence: step.sequence, slot: step.slot, ..Completion::zeroed() };
        match &result {
            Ok(report) => {
                let report = report.unwrap_or_default();
                completion.phase_ns = report.phases.map(|d| u64::try_from(d.as_nanos()).unwrap_or(u64::MAX));
                completion.received_rows = report.received_rows as u32;
                completion.expert_rows = report.expert_rows as u32;
                completion.copied_bytes = report.copied_bytes;
                completion.slot_version = report.slot_version;
            }
            Err(fault) => {
                tracing::error!(step = step.step, %fault, "step failed");
                completion.fail(&fault.to_string());
            }
        }
        self.channel.complete(&completion)?;
        result?;
        Ok(())
    }
}

/// Drives the heartbeat from a thread until the process ends.
fn beat(heartbeat: Heartbeat, every: Duration) -> io::Result<()> {
    heartbeat.beat();
    std::thread::Builder::new()
        .name("heartbeat".into())
        .spawn(move || {
            loop {
                std::thread::sleep(every);
                heartbeat.beat();
            }
        })
        .map(drop)
}

/// Reports the usage of the device from a thread until the process ends.
fn report_usage(report: UsageReport, mut read: ReadUsage) -> io::Result<()> {
    std::thread::Builder::new()
        .name("device-usage".into())
        .spawn(move || {
            loop {
                report.set(read());
                std::thread::sleep(USAGE_EVERY);
            }
        })
        .map(drop)
}

/// Pins this process, and the threads that it starts later, to its cores. Where pinning is not allowed, it runs on any core.
pub(crate) fn pin(rank: Rank, cores: &[usize]) {
    let mut set = rustix::thread::CpuSet::new();
    for &core in cores.iter().filter(|&&core| core < rustix::thread::CpuSet::MAX_CPU) {
        set.set(core);
    }
    if let Err(error) = rustix::thread::sched_setaffinity(None, &set) {
        tracing::warn!(%rank, ?cores, %error, "cannot pin to cores");
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
