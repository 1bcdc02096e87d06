//! The life of a rank's process: set-up, loading, the step loop, the end.

use std::collections::VecDeque;
use std::io::{self, BufReader};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytemuck::Zeroable;

use crate::{StepEngine, StepFault, StepReport};
use expertd_ipc::control::{self, FailureKind, FromRank, RankSetup, ToRank};
use expertd_ipc::{Completion, Pulse, RankChannel, RouterBell, StepDescriptor};
use expertd_types::Rank;

/// Why a rank's process ended.
#[derive(Debug, thiserror::Error)]
pub enum RankExit {
    /// The control socket is not one, or broke.
    #[error("control socket: {0}")]
    Control(#[from] io::Error),
    /// Not started by a router.
    #[error("{0}")]
    Orphan(String),
    /// Reported to the router before.
    #[error("{0}")]
    Reported(String),
    /// A step failed; reported to the router.
    #[error("step failed: {0}")]
    Step(#[from] StepFault),
    /// The channel to the router broke.
    #[error(transparent)]
    Channel(#[from] expertd_ipc::ChannelError),
}

/// What a rank has while it loads its engine.
pub struct Joining<'a> {
    /// What the router said this rank is.
    pub setup: &'a RankSetup,
    /// Shared memory with the router; its staging outlives the engine.
    pub channel: &'a RankChannel,
    /// The control socket, for messages that ranks exchange through the router while they join.
    pub socket: &'a UnixStream,
    /// The reading end of the control socket.
    pub reader: &'a mut BufReader<UnixStream>,
    fds: std::vec::IntoIter<OwnedFd>,
    /// Tells the router how many bytes of weights are in place, of how many.
    pub progress: &'a mut dyn FnMut(u64, u64),
}

impl Joining<'_> {
    /// The next file descriptor that the router sent, which is for `what`.
    ///
    /// # Errors
    /// If it sent no more.
    pub fn next_fd(&mut self, what: &str) -> Result<OwnedFd, Failure> {
        let missing = || setup_failure(format!("the router sent no file descriptor for {what}"));
        self.fds.next().ok_or_else(missing)
    }
}

/// A loaded engine.
pub struct Loaded {
    /// The engine, warm.
    pub engine: Box<dyn StepEngine>,
    /// Bytes of weights that it holds.
    pub weight_bytes: u64,
    /// What it computes with, in words.
    pub device: String,
}

/// Runs a rank whose router is process `parent` and speaks over `socket`, until the router ends it. `load` makes the
/// engine of the device that the setup names.
///
/// # Errors
/// Why it ended otherwise.
pub fn run_rank(
    parent: u32,
    socket: UnixStream,
    load: impl FnOnce(Joining<'_>) -> Result<Loaded, Failure>,
) -> Result<(), RankExit> {
    // Asked for first and checked afterwards, so that a parent which died in between is noticed.
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
        .map_err(io::Error::from)?;
    if rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get().cast_unsigned()) != Some(parent) {
        return Err(RankExit::Orphan(format!("process {parent}, the router of this rank, is gone")));
    }
    let fds = control::receive_fds(&socket)?;
    let mut reader = BufReader::new(socket.try_clone()?);
    let setup: RankSetup = control::receive(&mut reader)?
        .ok_or_else(|| RankExit::Orphan("the router ended before it said what to run".into()))?;
    let _span = tracing::info_span!("rank", rank = %setup.rank, generation = %setup.generation).entered();

    match Member::join(&setup, fds, &socket, &mut reader, load) {
        Ok(member) => member.serve(&setup, &socket, reader),
        Err((kind, message)) => {
            control::send(&socket, &FromRank::Failed { kind, message: message.clone() })?;
            Err(RankExit::Reported(message))
        }
    }
}

/// A rank that is loaded and warm.
struct Member {
    // Before the channel: it may have the channel's pages pinned.
    engine: Box<dyn StepEngine>,
    channel: RankChannel,
    weight_bytes: u64,
    device: String,
}

/// Why a rank could not get ready, as the router is told.
pub type Failure = (FailureKind, String);

/// A failure to set up the device or the group.
pub fn setup_failure(error: impl std::fmt::Display) -> Failure {
    (FailureKind::Setup, error.to_string())
}

impl Member {
    fn join(
        setup: &RankSetup,
        fds: Vec<OwnedFd>,
        socket: &UnixStream,
        reader: &mut BufReader<UnixStream>,
        load: impl FnOnce(Joining<'_>) -> Result<Loaded, Failure>,
    ) -> Result<Self, Failure> {
        let mut fds = fds.into_iter();
        let mut next_fd = |what: &str| {
            fds.next().ok_or_else(|| setup_failure(format!("the router sent no file descriptor for {what}")))
        };
        let channel_fd = next_fd("the channel")?;
        let bell = RouterBell::join(next_fd("the router's bell")?).map_err(setup_failure)?;
        let channel = RankChannel::join(&setup.shape, setup.rank, channel_fd, bell.bell().clone())
            .map_err(setup_failure)?;
        beat(channel.pulse(), setup.heartbeat).map_err(setup_failure)?;
        pin(setup.rank, &setup.cores);
        channel.populate().map_err(setup_failure)?;
        let mut last = std::time::Instant::now();
        let mut progress = |loaded_bytes: u64, total_bytes: u64| {
            if last.elapsed() >= Duration::from_millis(100) || loaded_bytes == total_bytes {
                last = std::time::Instant::now();
                // A router that is gone ends this process by itself.
                let _ = control::send(socket, &FromRank::Loading { loaded_bytes, total_bytes });
            }
        };
        let joining = Joining { setup, channel: &channel, socket, reader, fds, progress: &mut progress };
        let Loaded { engine, weight_bytes, device } = load(joining)?;
        Ok(Member { channel, engine, weight_bytes, device })
    }

    fn serve(
        mut self,
        setup: &RankSetup,
        socket: &UnixStream,
        mut reader: BufReader<UnixStream>,
    ) -> Result<(), RankExit> {
        control::send(
            socket,
            &FromRank::Ready { weight_bytes: self.weight_bytes, device: self.device.clone() },
        )?;
        match control::receive::<ToRank>(&mut reader)? {
            Some(ToRank::Start) => {}
            Some(ToRank::Exit) | None => return Ok(()),
            Some(message @ ToRank::GroupId { .. }) => {
                let problem = format!("expected `start` from the router, found {message:?}");
                return Err(io::Error::new(io::ErrorKind::InvalidData, problem).into());
            }
        }
        let stop = Arc::new(AtomicBool::new(false));
        let listening = Arc::clone(&stop);
        let bell = self.channel.bell().clone();
        std::thread::Builder::new().name("control".into()).spawn(move || {
            // Whatever comes after Start, the end of the stream included, means to leave.
            let _ = control::receive::<ToRank>(&mut reader);
            listening.store(true, Ordering::Release);
            bell.ring();
        })?;
        tracing::debug!("joined");
        self.run_steps(setup.spin, &stop)
    }

    /// Takes steps and gives them back, in order. The next one is taken while others go on, as far as the device lets
    /// it; `stop` ends the loop when none does.
    fn run_steps(&mut self, spin: Duration, stop: &AtomicBool) -> Result<(), RankExit> {
        let notice = self.channel.notice();
        let mut running: VecDeque<StepDescriptor> = VecDeque::new();
        loop {
            let next = if running.is_empty() {
                match self.channel.wait_step(spin, stop)? {
                    Some(step) => Some(step),
                    None => return Ok(()),
                }
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

    /// Gives a step's staging back with how it ended; a fault ends the rank, too.
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

/// Shows life until the process ends.
fn beat(pulse: Pulse, every: Duration) -> io::Result<()> {
    pulse.beat();
    std::thread::Builder::new()
        .name("pulse".into())
        .spawn(move || {
            loop {
                std::thread::sleep(every);
                pulse.beat();
            }
        })
        .map(drop)
}

/// Keeps this process, and the threads it will start, on its cores. Where that is not allowed it runs everywhere.
fn pin(rank: Rank, cores: &[usize]) {
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
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;
    use expertd_ipc::{
        Copier, ExpertsNotice, GroupShape, Patience, RankStaging, RouterChannel, StageRows, Staged,
    };
    use expertd_types::{DType, Slot};

    const BYTES: usize = 3 * 4;

    fn shape() -> GroupShape {
        GroupShape { ranks: 1, slots: 2, max_tokens_per_rank: 1, max_segments: 1, hidden: 3, max_top_k: 1 }
    }

    /// Ends a step only when another one has been begun behind it, or none will come. Answers are the rows inverted.
    struct Late {
        running: VecDeque<StepDescriptor>,
        no_more: Arc<AtomicBool>,
        /// Most steps that went on at once.
        most: Arc<AtomicUsize>,
        fails_at: u64,
    }

    impl StepEngine for Late {
        fn begin(
            &mut self,
            step: &StepDescriptor,
            staging: RankStaging<'_>,
            _notice: &ExpertsNotice,
        ) -> Result<Option<StepReport>, StepFault> {
            assert!(self.running.iter().all(|running| running.slot != step.slot), "a slot is one step's");
            assert_eq!(staging.rows[..BYTES], [step.sequence as u8; BYTES]);
            self.running.push_back(*step);
            self.most.fetch_max(self.running.len(), Ordering::Relaxed);
            Ok(None)
        }

        fn ended(
            &mut self,
            step: &StepDescriptor,
            channel: &mut RankChannel,
            _notice: &ExpertsNotice,
        ) -> Result<Option<StepReport>, StepFault> {
            if self.running.len() < 2 && !self.no_more.load(Ordering::Relaxed) {
                return Ok(None);
            }
            let oldest = self.running.pop_front().unwrap();
            assert_eq!(oldest, *step);
            if step.sequence == self.fails_at {
                return Err(StepFault::engine("broken"));
            }
            channel.staging(step).rows[..BYTES].iter_mut().for_each(|byte| *byte = !*byte);
            Ok(Some(StepReport::default()))
        }
    }

    /// Runs `steps` steps, as many in flight as there are slots; sequences completed, most at once, how the rank ended.
    fn run(steps: u64, fails_at: u64) -> (Vec<u64>, usize, Result<(), String>) {
        let bell = RouterBell::create().unwrap();
        let mut router = RouterChannel::create(&shape()).unwrap();
        let (fd, rank_bell) = (router.fd().try_clone_to_owned().unwrap(), bell.bell().clone());
        let (no_more, most) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let engine_no_more = Arc::clone(&no_more);
        let (engine_most, stop) = (Arc::clone(&most), Arc::new(AtomicBool::new(false)));
        let stopped = Arc::clone(&stop);
        let rank = std::thread::spawn(move || {
            let channel = RankChannel::join(&shape(), Rank(0), fd, rank_bell).unwrap();
            let engine =
                Late { running: VecDeque::new(), no_more: engine_no_more, most: engine_most, fails_at };
            let (engine, device) = (Box::new(engine), String::new());
            let mut member = Member { engine, channel, weight_bytes: 0, device };
            member.run_steps(Duration::ZERO, &stopped).map_err(|error| error.to_string())
        });
        let mut in_flight: VecDeque<Staged> = VecDeque::new();
        let (mut launched, mut completed) = (0, Vec::new());
        while completed.len() < steps as usize {
            while launched < steps && in_flight.len() < 2 {
                launched += 1;
                let slot = Slot((launched % 2) as u32);
                let (rows, dtype) = (&[launched as u8; BYTES][..], DType::F32);
                let piece = StageRows {
                    rows: rows.into(),
                    tokens: 1,
                    dtype,
                    routing: None,
                    token_ids: None,
                    shared_experts: false,
                };
                let mut forming = router.begin(slot, 1);
                in_flight.push_back(forming.stage(Rank(0), &piece).unwrap());
                forming.copy(&mut Copier::default());
                let (sequence, slot) = (launched, slot.0);
                let step = StepDescriptor {
                    sequence,
                    step: 0,
                    layer: 0,
                    slot,
                    tokens: 0,
                    segments: 0,
                    step_tokens: 1,
                    top_k: 1,
                };
                router.launch(&step).unwrap();
            }
            no_more.store(launched == steps, Ordering::Relaxed);
            let patience = Patience::within(Duration::ZERO, Duration::from_secs(20));
            let done = bell.bell().wait_for(patience, || router.completion(Rank(0)).transpose());
            let done = done.expect("a completion").unwrap();
            if done.failed != 0 {
                assert_eq!(done.text(), "broken");
                break;
            }
            let staged = in_flight.pop_front().unwrap();
            assert_eq!(router.answer(&staged), [!(done.sequence as u8); BYTES]);
            completed.push(done.sequence);
        }
        stop.store(true, Ordering::Release);
        while !rank.is_finished() {
            router.launch(&StepDescriptor::zeroed()).ok();
            std::thread::sleep(Duration::from_millis(1));
        }
        (completed, most.load(Ordering::Relaxed), rank.join().unwrap())
    }

    #[test]
    fn the_next_step_is_taken_while_one_goes_on_and_both_are_right() {
        let (completed, most, end) = run(201, 0);
        assert_eq!(completed, (1..=201).collect::<Vec<_>>());
        assert_eq!((most, end), (2, Ok(())));
    }

    #[test]
    fn a_fault_of_a_step_that_went_on_is_reported_and_ends_the_rank() {
        let (completed, _, end) = run(50, 7);
        assert_eq!(completed, (1..=6).collect::<Vec<_>>());
        assert_eq!(end, Err("step failed: broken".to_owned()));
    }
}
