//! Sets of weights, and the loaders that make them.

use std::collections::VecDeque;
use std::io::BufReader;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use expertd_ipc::RouterBell;
use expertd_ipc::apart::{Dropping, drop_apart, drop_apart_then};
use expertd_ipc::control::{CheckpointSource, DeviceKind, FromLoader, LoaderSetup};
use expertd_ipc::passing::FdReader;
use expertd_scheduler::LoadFailure;
use expertd_types::{Rank, WeightVersion};

use super::config::{CHECK_INTERVAL, ClusterConfig};
use super::process::{ChildProcess, Killed, News, Start, read_news};
use expertd_shm::ObservedTime;
use expertd_telemetry::progress;

/// Factor by which a loader may be silent longer than a rank: on a busy machine the packing threads of all loaders compete for the cores,
/// and no call waits for a loader while weights serve.
const SILENCE_FACTOR: u32 = 10;
/// A loader that reads nothing for this long is given up.
const STALL_TIMEOUT: Duration = Duration::from_secs(120);

/// A set of weights that generations can serve.
#[derive(Debug)]
pub(crate) struct WeightSet {
    /// Its number.
    pub version: WeightVersion,
    /// The checkpoint that it comes from.
    pub source: CheckpointSource,
    /// `[ranks]`: descriptors of each rank's share.
    shares: Vec<Vec<OwnedFd>>,
}

impl WeightSet {
    /// The memory of a rank's share.
    pub(crate) fn share(&self, rank: Rank) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.shares.get(rank.index()).into_iter().flatten().map(OwnedFd::as_fd)
    }

    /// Frees the memory, which takes seconds for hundreds of gigabytes, on a thread of its own; rings `bell` when that is done.
    pub(crate) fn free(self, bell: &RouterBell) -> Freeing {
        let bell = bell.clone();
        Freeing(vec![drop_apart_then(self.shares, move || bell.bell().ring())])
    }
}

/// Memory that is being freed.
#[derive(Debug, Default)]
pub(crate) struct Freeing(Vec<Dropping>);

impl Freeing {
    /// Whether the memory is free.
    fn has_ended(&self) -> bool {
        self.0.iter().all(Dropping::has_ended)
    }

    /// Waits for the memory of `other` as well.
    pub(crate) fn add(&mut self, other: Freeing) {
        self.0.retain(|dropping| !dropping.has_ended());
        self.0.extend(other.0);
    }
}

/// Number of descriptors of a rank's share: sealed memory; on GPUs, the index in sealed memory, then device memory.
const fn fds_of_share(device: DeviceKind) -> usize {
    match device {
        DeviceKind::Cpu => 1,
        DeviceKind::Cuda => 2,
    }
}

/// The progress of a loader.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LoaderView {
    /// Its process.
    pub pid: u32,
    /// Bytes of the checkpoint that are packed.
    pub loaded_bytes: u64,
    /// Bytes of the checkpoint that it packs.
    pub total_bytes: u64,
}

#[derive(Debug)]
struct RunningLoader {
    process: ChildProcess,
    view: LoaderView,
    share: Option<Vec<OwnedFd>>,
    /// Number of checks in a row without a message.
    silent: u32,
    /// Bytes that were checked and packed.
    read_bytes: u64,
    /// Time since that grew.
    stalled: ObservedTime,
}

/// A message of a loader, with its descriptors.
type Message = (FromLoader, Vec<OwnedFd>);

/// The failure of loaders that ran.
const fn failed(message: String) -> LoadFailure {
    LoadFailure { message, lacks_room: false, is_setup: false }
}

/// A set of weights that is being loaded, by one process for each rank. Dropping it kills them.
#[derive(Debug)]
pub(crate) struct Loading {
    config: Arc<ClusterConfig>,
    version: WeightVersion,
    source: CheckpointSource,
    in_background: bool,
    bell: RouterBell,
    /// Memory that must be free before the loaders start.
    awaited: Option<Freeing>,
    members: Vec<RunningLoader>,
    sender: Sender<(Rank, News<Message>)>,
    events: Receiver<(Rank, News<Message>)>,
    waiting: VecDeque<(Rank, News<Message>)>,
    begun: Instant,
    next_check: Instant,
}

impl Loading {
    /// Starts the loaders. Without `awaited`, a generation serves meanwhile; with it, [`poll`](Self::poll) starts them once that memory is
    /// free.
    pub(crate) fn start(
        config: &Arc<ClusterConfig>,
        version: WeightVersion,
        source: CheckpointSource,
        awaited: Option<Freeing>,
        bell: &RouterBell,
    ) -> Result<Self, LoadFailure> {
        let (sender, events) = mpsc::channel();
        let now = Instant::now();
        let mut loading = Loading {
            config: Arc::clone(config),
            version,
            source,
            in_background: awaited.is_none(),
            bell: bell.clone(),
            awaited: awaited.filter(|freeing| !freeing.has_ended()),
            members: Vec::new(),
            sender,
            events,
            waiting: VecDeque::new(),
            begun: now,
            next_check: now + CHECK_INTERVAL,
        };
        if loading.awaited.is_none() {
            loading.start_loaders()?;
        }
        Ok(loading)
    }

    fn start_loaders(&mut self) -> Result<(), LoadFailure> {
        let (config, now) = (Arc::clone(&self.config), Instant::now());
        for rank in 0..config.shape.ranks {
            progress::tick();
            let rank = Rank(rank);
            let setup = LoaderSetup {
                rank,
                ranks: config.shape.ranks,
                sources: config.shape.sources,
                device: config.devices[rank.index()],
                gpus: config.gpus.clone(),
                checkpoint: self.source.clone(),
                fp8_products: config.fp8_products,
                cores: config.loader_cores(rank),
                threads: config.loader_threads(rank),
                heartbeat: config.heartbeat(),
                in_background: self.in_background,
            };
            let environment = &config.environment;
            let start = Start { command: "loader", rank, setup: &setup, fds: &[], environment };
            let (events, bell) = (self.sender.clone(), self.bell.clone());
            let process = ChildProcess::spawn(&start, move |socket, pid| {
                // One read may bring several messages: descriptors belong to the one that announces them.
                let complete = |reader: &mut BufReader<FdReader>, message| match message {
                    FromLoader::Loaded { .. } => (message, reader.get_mut().take_fds()),
                    _ => (message, Vec::new()),
                };
                read_news(BufReader::new(FdReader::new(socket)), pid, rank, &events, &bell, complete);
            })
            .map_err(|error| {
                let message = format!("cannot start the loaders: {error}");
                LoadFailure { message, lacks_room: false, is_setup: true }
            })?;
            let view = LoaderView { pid: process.pid(), ..LoaderView::default() };
            self.members.push(RunningLoader {
                process,
                view,
                share: None,
                silent: 0,
                read_bytes: 0,
                stalled: ObservedTime::start(now),
            });
        }
        Ok(())
    }

    /// Ends the loaders. Their memory is free once they are reaped, which takes as long as the system needs; `bell` rings then.
    pub(crate) fn end(mut self, bell: &RouterBell) -> Freeing {
        let bell = bell.clone();
        Freeing(vec![self.release(move || bell.bell().ring())])
    }

    /// Kills the loaders, and reaps them on a thread of its own, which then drops what they made.
    fn release(&mut self, then: impl FnOnce() + Send + 'static) -> Dropping {
        let members = self.members.drain(..).map(|member| (member.process, member.share));
        let (processes, shares): (Vec<_>, Vec<_>) = members.unzip();
        drop_apart_then((Killed::new(processes), shares), then)
    }

    /// Whether a generation serves other weights meanwhile.
    pub(crate) const fn is_in_background(&self) -> bool {
        self.in_background
    }

    /// The progress of each loader.
    pub(crate) fn views(&self) -> impl Iterator<Item = LoaderView> {
        self.members.iter().map(|member| member.view)
    }

    /// Collects the messages of loaders without waiting. Returns whether there is anything for [`poll`](Self::poll).
    pub(crate) fn collect(&mut self) -> bool {
        self.waiting.extend(self.events.try_iter());
        !self.waiting.is_empty() || self.awaited.as_ref().is_some_and(Freeing::has_ended)
    }

    /// Takes in the messages of loaders without waiting. Returns the weights once all of them are packed.
    ///
    /// # Errors
    /// The failure of a loader. The shares of the others cannot be used then.
    pub(crate) fn poll(&mut self) -> Result<Option<WeightSet>, LoadFailure> {
        self.collect();
        if self.awaited.take_if(|freeing| freeing.has_ended()).is_some() {
            self.start_loaders()?;
        }
        if self.awaited.is_some() {
            return Ok(None);
        }
        while let Some((rank, news)) = self.waiting.pop_front() {
            self.take_in(rank, news)?;
        }
        if Instant::now() >= self.next_check {
            self.check_life()?;
        }
        if self.members.iter().any(|member| member.share.is_none()) {
            return Ok(None);
        }
        let bytes: u64 = self.members.iter().map(|member| member.view.total_bytes).sum();
        let seconds = self.begun.elapsed().as_secs_f64();
        tracing::info!(
            version = self.version.0,
            fingerprint = %self.source.fingerprint,
            bytes,
            seconds = rounded(seconds),
            gigabytes_per_second = rounded(bytes as f64 / seconds / 1e9),
            "weights are loaded"
        );
        let shares = self.members.iter_mut().filter_map(|member| member.share.take()).collect();
        // A loader that has used a GPU takes a while to end.
        drop_apart(std::mem::take(&mut self.members));
        Ok(Some(WeightSet { version: self.version, source: self.source.clone(), shares }))
    }

    /// Records a message of a loader, or its end.
    fn take_in(&mut self, rank: Rank, news: News<Message>) -> Result<(), LoadFailure> {
        let member = &mut self.members[rank.index()];
        member.silent = 0;
        match news {
            News::Message((FromLoader::Loading { checked_bytes, loaded_bytes, total_bytes }, _)) => {
                if checked_bytes.saturating_add(loaded_bytes) > member.read_bytes {
                    member.read_bytes = checked_bytes.saturating_add(loaded_bytes);
                    member.stalled = ObservedTime::start(Instant::now());
                }
                (member.view.loaded_bytes, member.view.total_bytes) = (loaded_bytes, total_bytes);
            }
            News::Message((FromLoader::Loaded { weight_bytes, memory_bytes }, fds)) => {
                tracing::debug!(%rank, weight_bytes, memory_bytes, "a share is packed");
                (member.view.loaded_bytes, member.view.total_bytes) = (weight_bytes, weight_bytes);
                let expected = fds_of_share(self.config.devices[rank.index()]);
                if fds.len() != expected {
                    let found = fds.len();
                    return Err(failed(format!(
                        "the loader of rank {rank} passed on its memory, but {found} of {expected} descriptors arrived; \
                         raise the limit on open files (ulimit -n)"
                    )));
                }
                member.share = Some(fds);
            }
            News::Message((FromLoader::Failed { message, lacks_room }, _)) => {
                let message = format!("the loader of rank {rank}: {message}");
                return Err(LoadFailure { message, lacks_room, is_setup: false });
            }
            News::Gone(_) if member.share.is_some() => {}
            News::Gone(status) => return Err(failed(ended(rank, member.view.pid, status))),
        }
        Ok(())
    }

    fn check_life(&mut self) -> Result<(), LoadFailure> {
        self.next_check = Instant::now() + CHECK_INTERVAL;
        let allowed = self.config.silent_checks().saturating_mul(SILENCE_FACTOR);
        for (rank, member) in self.members.iter_mut().enumerate().filter(|(_, m)| m.share.is_none()) {
            member.silent += 1;
            let pid = member.view.pid;
            let message = if member.silent >= allowed {
                format!("showed no life for {:?}", CHECK_INTERVAL * member.silent)
            } else if member.stalled.look(Instant::now()) > STALL_TIMEOUT {
                let LoaderView { loaded_bytes, total_bytes, .. } = member.view;
                format!(
                    "read nothing for {STALL_TIMEOUT:?}, with {loaded_bytes} of {total_bytes} bytes packed"
                )
            } else {
                continue;
            };
            return Err(failed(format!("the loader of rank {rank}, process {pid}, {message}")));
        }
        Ok(())
    }
}

impl Drop for Loading {
    fn drop(&mut self) {
        if !self.members.is_empty() {
            self.release(|| ());
        }
    }
}

/// Says that a loader has ended without a share.
fn ended(rank: Rank, pid: u32, status: Option<ExitStatus>) -> String {
    let how = status.map_or_else(String::new, |status| format!(" ({status})"));
    // Reading behind the end of a mapped file that was truncated raises SIGBUS.
    let why = match status.and_then(|status| status.signal()) {
        Some(SIGBUS) => "; was a file of the checkpoint truncated while it was read?",
        Some(SIGKILL) => "; if nothing else killed it, memory may have run out",
        _ => "",
    };
    format!("the loader of rank {rank}, process {pid}, ended{how}{why}")
}

/// Numbers of signals, as `ExitStatusExt::signal` gives them.
const SIGBUS: i32 = 7;
const SIGKILL: i32 = 9;

/// A number for the log, with two decimals.
fn rounded(number: f64) -> f64 {
    (number * 100.0).round() / 100.0
}
