//! The router's side of one generation of the EP group: its ranks, its shared memory, the steps in flight.

mod memories;
mod steps;

use std::collections::VecDeque;
use std::fmt::Display;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use self::steps::InFlight;
pub(crate) use self::steps::StepDone;
use super::config::{CHECK_INTERVAL, ClusterConfig};
use super::fault::{channel_fault, setup_fault};
use super::process::{ChildProcess, Killed, News, left_processes};
use super::weights::WeightSet;
use expertd_ipc::apart::{Dropping, drop_apart, drop_apart_then};
use expertd_ipc::control::{FailureKind, FromRank, RankSetup, ToRank};
use expertd_ipc::{ChannelError, Completion, RouterBell, RouterChannel, RowCounts, RowCountsShape};
use expertd_scheduler::{AttachAnswer, Fault, FaultKind};
use expertd_shm::{ObservedTime, SharedRegion};
use expertd_telemetry::progress;
use expertd_types::{DeviceUsage, ExpertPlacement, Generation, MemoryId, Rank};

/// Before its first sign of life a process may be silent this many times longer: it must be started and map the channel.
const START_GRACE: u32 = 10;

/// Progress of a rank.
#[derive(Clone, Debug)]
pub(crate) struct RankView {
    /// Process id.
    pub pid: u32,
    /// Device in words, once the rank has reported it.
    pub device: Option<String>,
    /// Whether it can run steps.
    pub ready: bool,
    /// Weight bytes loaded so far.
    pub loaded_bytes: u64,
    /// Weight bytes of its share.
    pub total_bytes: u64,
    /// Usage of its device, if the device reports any.
    pub usage: Option<DeviceUsage>,
}

#[derive(Debug)]
struct RunningRank {
    process: ChildProcess,
    view: RankView,
    heartbeat: u64,
    /// Consecutive checks without a heartbeat. Counted rather than timed, so that a stall of the router itself does not count
    /// against a rank.
    missed_beats: u32,
}

/// The end of a generation's ranks, which a thread of its own waits for.
#[derive(Debug)]
struct Ending {
    reaping: Dropping,
    pids: Vec<u32>,
}

/// A generation. Dropping it kills its ranks and has them reaped.
#[derive(Debug)]
pub(crate) struct Group {
    config: Arc<ClusterConfig>,
    generation: Generation,
    channel: RouterChannel,
    members: Vec<RunningRank>,
    ending: Option<Ending>,
    events: Receiver<(Rank, News<FromRank>)>,
    /// Events received and not yet processed.
    received: VecDeque<(Rank, News<FromRank>)>,
    /// Completions received and not yet processed.
    completed: VecDeque<(Rank, Result<Completion, ChannelError>)>,
    started: bool,
    sequence: u64,
    in_flight: VecDeque<InFlight>,
    /// Time since the ranks were started.
    forming_time: ObservedTime,
    /// Time since the front step became the oldest one.
    front_time: ObservedTime,
    next_check: Instant,
    /// Answers of ranks to orders about clients' memories.
    attach_answers: VecDeque<(Rank, MemoryId, AttachAnswer)>,
    /// Whether the usage of a device has changed since [`take_usage_change`](Self::take_usage_change).
    usage_changed: bool,
    /// The ranks that own experts; `None`: contiguous ranges.
    placement: Option<ExpertPlacement>,
    /// Windows, or the wire of a mixed group, that the router creates and its ranks map; `None` if ranks make their own.
    windows: Option<Arc<SharedRegion>>,
}

impl Group {
    /// Starts the processes of a generation. They load concurrently; [`poll`](Self::poll) follows their progress. If one of them cannot be
    /// started, the others are in `formed` nevertheless, to be [ended](Self::end).
    ///
    /// # Errors
    /// If shared memory cannot be created or a process cannot be started.
    pub(crate) fn form(
        formed: &mut Option<Group>,
        config: &Arc<ClusterConfig>,
        generation: Generation,
        weights: &WeightSet,
        bell: &RouterBell,
        row_counts: &RowCounts,
    ) -> Result<(), Fault> {
        let failed = |what: &str, error: &dyn Display| {
            setup_fault(format!("cannot create the {what} of a generation: {error}"))
        };
        let channel =
            RouterChannel::create(&config.shape).map_err(|error| failed("shared memory", &error))?;
        let windows = config
            .windows
            .map(|make| make(&rank_setup(config, generation, weights, row_counts.shape(), Rank(0))));
        let windows = windows.transpose().map_err(|error| failed("windows", &error))?;
        let (sender, events) = mpsc::channel();
        let group = formed.insert(Group {
            config: Arc::clone(config),
            generation,
            channel,
            members: Vec::new(),
            ending: None,
            events,
            received: VecDeque::new(),
            completed: VecDeque::new(),
            started: false,
            sequence: 0,
            in_flight: VecDeque::new(),
            forming_time: ObservedTime::start(Instant::now()),
            front_time: ObservedTime::start(Instant::now()),
            next_check: Instant::now() + CHECK_INTERVAL,
            attach_answers: VecDeque::new(),
            usage_changed: false,
            placement: weights.source.placement.clone(),
            windows,
        });
        for rank in 0..config.shape.ranks {
            progress::tick();
            let rank = Rank(rank);
            let process = group
                .spawn(rank, weights, sender.clone(), bell, row_counts)
                .map_err(|error| setup_fault(format!("cannot start rank {rank}: {error}")))?;
            let view = RankView {
                pid: process.pid(),
                device: None,
                ready: false,
                loaded_bytes: 0,
                total_bytes: 0,
                usage: None,
            };
            group.members.push(RunningRank { process, view, heartbeat: 0, missed_beats: 0 });
        }
        Ok(())
    }

    fn spawn(
        &self,
        rank: Rank,
        weights: &WeightSet,
        events: Sender<(Rank, News<FromRank>)>,
        bell: &RouterBell,
        row_counts: &RowCounts,
    ) -> io::Result<ChildProcess> {
        let setup = rank_setup(&self.config, self.generation, weights, row_counts.shape(), rank);
        let mut fds = vec![self.channel.fd(), bell.fd(), row_counts.fd()];
        fds.extend(self.windows.as_ref().map(|windows| windows.as_fd()));
        fds.extend(weights.share(rank));
        if self.config.shape.is_mixed() && rank.0 < self.config.shape.sources {
            fds.extend(
                (self.config.shape.sources..self.config.shape.ranks)
                    .flat_map(|other| weights.share(Rank(other))),
            );
        }
        ChildProcess::spawn_rank(&setup, &fds, &self.config.environment, events, bell.clone())
    }

    /// Progress of each rank.
    pub(crate) fn ranks(&self) -> impl Iterator<Item = &RankView> {
        self.members.iter().map(|member| &member.view)
    }

    /// Whether the reported usage of a device has changed since the last call.
    pub(crate) fn take_usage_change(&mut self) -> bool {
        std::mem::take(&mut self.usage_changed)
    }

    /// Whether the ranks are being ended, or gone.
    pub(crate) const fn is_ending(&self) -> bool {
        self.ending.is_some()
    }

    /// Whether steps can be launched.
    pub(crate) const fn is_started(&self) -> bool {
        self.started
    }

    /// Collects events and completions of ranks without waiting. Returns whether [`poll`](Self::poll) has something to process, or
    /// ranks that were ended are gone.
    pub(crate) fn collect(&mut self) -> bool {
        if let Some(ending) = &self.ending {
            return ending.reaping.has_ended();
        }
        self.received.extend(self.events.try_iter());
        for rank in 0..self.members.len() {
            let rank = Rank(rank as u32);
            while let Some(completion) = self.channel.completion(rank).transpose() {
                let broken = completion.is_err();
                self.completed.push_back((rank, completion));
                if broken {
                    break;
                }
            }
        }
        !self.received.is_empty() || !self.completed.is_empty()
    }

    /// Processes events and completions of ranks without waiting. Returns whether there were any.
    ///
    /// # Errors
    /// The fault that ends this generation.
    pub(crate) fn poll(&mut self) -> Result<bool, Fault> {
        let news = self.collect();
        // Completions first: the report of a failed step names the cause, and the end of the rank's process does not.
        while let Some((rank, completion)) = self.completed.pop_front() {
            self.record(rank, completion.map_err(channel_fault)?)?;
        }
        while let Some((rank, news)) = self.received.pop_front() {
            self.process_news(rank, news)?;
        }
        if !self.started && self.members.iter().all(|member| member.view.ready) {
            self.channel.populate().map_err(channel_fault)?;
            for member in &self.members {
                member.process.send(ToRank::Start);
            }
            self.started = true;
        }
        if Instant::now() >= self.next_check {
            self.check_life()?;
        }
        Ok(news)
    }

    fn process_news(&mut self, rank: Rank, news: News<FromRank>) -> Result<(), Fault> {
        let member = &mut self.members[rank.index()];
        match news {
            News::Message(FromRank::GroupId { id, multiprocessors }) => {
                for member in &self.members {
                    member.process.send(ToRank::GroupId { id: id.clone(), multiprocessors });
                }
            }
            News::Message(FromRank::Ready { weight_bytes, device }) => {
                member.view.ready = true;
                member.view.device = Some(device);
                member.view.loaded_bytes = weight_bytes;
                member.view.total_bytes = weight_bytes;
            }
            News::Message(FromRank::Attached { memory, error }) => {
                self.attach_answers.push_back((rank, memory, AttachAnswer::Attached { error }));
            }
            News::Message(FromRank::Detached { memory }) => {
                self.attach_answers.push_back((rank, memory, AttachAnswer::Detached));
            }
            News::Message(FromRank::Failed { kind, message }) => {
                let kind = match kind {
                    FailureKind::Load => FaultKind::Load,
                    FailureKind::Setup => FaultKind::Setup,
                };
                return Err(Fault { kind, message: format!("rank {rank}: {message}") });
            }
            News::Gone(status) => {
                let how = status.map_or_else(String::new, |status| format!(" ({status})"));
                return Err(Fault {
                    kind: FaultKind::Exit,
                    message: format!("rank {rank}, process {}, ended{how}", member.view.pid),
                });
            }
        }
        Ok(())
    }

    fn check_life(&mut self) -> Result<(), Fault> {
        self.next_check = Instant::now() + CHECK_INTERVAL;
        let allowed = self.config.silent_checks();
        for (rank, member) in self.members.iter_mut().enumerate() {
            let beat = self.channel.heartbeat(Rank(rank as u32));
            member.missed_beats = if beat == member.heartbeat { member.missed_beats + 1 } else { 0 };
            member.heartbeat = beat;
            let usage = self.channel.usage(Rank(rank as u32));
            self.usage_changed |= usage != member.view.usage;
            member.view.usage = usage;
            let grace = if beat == 0 { START_GRACE } else { 1 };
            if member.missed_beats >= allowed.saturating_mul(grace) {
                let waited = CHECK_INTERVAL * member.missed_beats;
                let message =
                    format!("rank {rank}, process {}, sent no heartbeat for {waited:?}", member.view.pid);
                return Err(Fault { kind: FaultKind::Liveness, message });
            }
        }
        let waited = self.forming_time.look(Instant::now());
        if !self.started && waited > self.config.forming_timeout {
            let late = self.members.iter().zip(0u32..).filter(|(member, _)| !member.view.ready);
            let late: Vec<u32> = late.map(|(_, rank)| rank).collect();
            let message = format!(
                "ranks {late:?} were not ready {:?} after their start; if forming needs more time, raise forming-timeout-ms",
                self.config.forming_timeout
            );
            return Err(Fault { kind: FaultKind::Setup, message });
        }
        let waited = self.front_time.look(Instant::now());
        if let Some(step) = self.in_flight.front().filter(|step| step.completions.iter().any(Option::is_none))
            && waited > self.config.step_timeout
        {
            let late: Vec<_> = (0..)
                .zip(&step.completions)
                .filter(|(_, c)| c.is_none())
                .map(|(r, _)| r)
                .collect::<Vec<u32>>();
            let message = format!(
                "step {} did not complete within {:?} on ranks {late:?}; if steps of this size need more time, raise step-timeout-ms",
                step.step, self.config.step_timeout
            );
            return Err(Fault { kind: FaultKind::StepTimeout, message });
        }
        Ok(())
    }

    /// Kills every rank. A thread reaps them, then rings `bell`.
    pub(crate) fn end(&mut self, bell: &RouterBell) {
        let pids = self.members.iter().map(|member| member.view.pid).collect();
        let bell = bell.clone();
        let reaping = drop_apart_then(self.kill(), move || bell.bell().ring());
        self.ending = Some(Ending { reaping, pids });
    }

    fn kill(&mut self) -> Killed {
        Killed::new(self.members.drain(..).map(|member| member.process).collect())
    }

    /// Returns once the ranks that were [ended](Self::end) are gone: the ids of processes that do not end, which may still access the
    /// memory that they mapped.
    pub(crate) fn left(&self) -> Option<Vec<u32>> {
        let ending = self.ending.as_ref().filter(|ending| ending.reaping.has_ended())?;
        let left = left_processes();
        Some(ending.pids.iter().copied().filter(|pid| left.contains(pid)).collect())
    }

    /// Asks the ranks to exit, waits until `deadline`, then kills and reaps those that are left. Ranks that were ended are waited for.
    pub(crate) fn leave(mut self, deadline: Instant) {
        while self.ending.as_ref().is_some_and(|ending| !ending.reaping.has_ended()) {
            progress::tick();
            std::thread::sleep(Duration::from_millis(2));
        }
        for member in &self.members {
            member.process.send(ToRank::Exit);
        }
        for member in &mut self.members {
            member.process.wait_until(deadline);
        }
        drop(self.kill());
    }
}

fn rank_setup(
    config: &ClusterConfig,
    generation: Generation,
    weights: &WeightSet,
    row_counts: RowCountsShape,
    rank: Rank,
) -> RankSetup {
    RankSetup {
        rank,
        generation,
        shape: config.shape.clone(),
        row_counts,
        device: config.devices[rank.index()],
        gpus: config.gpus.clone(),
        fingerprint: weights.source.fingerprint,
        fp8_products: config.fp8_products,
        cores: config.cores[rank.index()].clone(),
        threads: config.threads(rank),
        spin: config.spin,
        peer_timeout: config.peer_timeout,
        step_timeout: config.step_timeout,
        heartbeat: config.heartbeat(),
        stream_rows: config.stream_rows,
        slot_bytes: config.slot_bytes,
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if !self.members.is_empty() {
            drop_apart(self.kill());
        }
    }
}
