//! The process of a loader: it packs one rank's share of a checkpoint into memory that outlives it, passes that to the router,
//! and exits.

use std::any::Any;
use std::io::{self, BufReader};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use expertd_ipc::control::{self, FromLoader, LoaderSetup};
use expertd_ipc::passing::send_with_fds;

use crate::RankExit;
use crate::process::{end_with, pin};

/// How much lower the priority of a loader is while a generation serves.
const BACKGROUND_NICE: i32 = 10;

/// A packed share.
#[derive(Debug)]
pub struct PackedShare {
    /// Descriptors of the packed memory, in the order in which ranks take them; at most two.
    pub memory: Vec<OwnedFd>,
    /// Its size, in bytes.
    pub memory_bytes: u64,
    /// Bytes of the checkpoint that are in it.
    pub weight_bytes: u64,
    /// What is released after the memory is handed over: unmapping a large checkpoint takes half a second.
    pub used: Box<dyn Any>,
}

/// Why a share could not be packed.
#[derive(Clone, Debug)]
pub struct PackFailure {
    /// Human-readable cause.
    pub message: String,
    /// Whether the only cause is that the share does not fit beside what is in memory.
    pub lacks_room: bool,
}

impl<E: std::error::Error> From<E> for PackFailure {
    fn from(error: E) -> Self {
        PackFailure { message: error.to_string(), lacks_room: false }
    }
}

/// How far a loader is.
#[derive(Debug, Default)]
pub struct Progress {
    checked_bytes: AtomicU64,
    loaded_bytes: AtomicU64,
    total_bytes: AtomicU64,
}

impl Progress {
    /// Sets the bytes loaded and the bytes to load.
    pub fn set(&self, loaded_bytes: u64, total_bytes: u64) {
        self.total_bytes.store(total_bytes, Ordering::Relaxed);
        self.loaded_bytes.store(loaded_bytes, Ordering::Relaxed);
    }

    /// Adds bytes of the checkpoint that were compared with its fingerprint.
    pub fn checked(&self, bytes: u64) {
        self.checked_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    fn message(&self) -> FromLoader {
        FromLoader::Loading {
            checked_bytes: self.checked_bytes.load(Ordering::Relaxed),
            loaded_bytes: self.loaded_bytes.load(Ordering::Relaxed),
            total_bytes: self.total_bytes.load(Ordering::Relaxed),
        }
    }
}

/// Runs a loader whose router is process `parent` and listens on `socket`. `pack` packs the share.
///
/// # Errors
/// The reason if the share was not handed over.
pub fn run_loader(
    parent: u32,
    socket: &UnixStream,
    pack: impl FnOnce(&LoaderSetup, &Progress) -> Result<PackedShare, PackFailure>,
) -> Result<(), RankExit> {
    end_with(parent)?;
    let mut reader = BufReader::new(socket.try_clone()?);
    let setup: LoaderSetup = control::receive(&mut reader)?
        .ok_or_else(|| RankExit::Orphan("the router ended before it sent this loader's setup".into()))?;
    let _span = tracing::info_span!("loader", rank = %setup.rank).entered();
    pin(setup.rank, &setup.cores);
    if setup.in_background
        && let Err(error) = rustix::process::nice(BACKGROUND_NICE)
    {
        tracing::warn!(%error, "the loader cannot lower its priority");
    }
    let progress = Arc::new(Progress::default());
    let reports = Reports::start(socket.try_clone()?, Arc::clone(&progress), setup.heartbeat)?;
    let packed = pack(&setup, &progress);
    reports.end();
    match packed {
        Ok(PackedShare { memory, memory_bytes, weight_bytes, used }) => {
            let fds: Vec<_> = memory.iter().map(OwnedFd::as_fd).collect();
            send_with_fds(socket, &FromLoader::Loaded { weight_bytes, memory_bytes }, &fds)?;
            drop(used);
            Ok(())
        }
        Err(PackFailure { message, lacks_room }) => {
            control::send(socket, &FromLoader::Failed { message: message.clone(), lacks_room })?;
            Err(RankExit::Reported(message))
        }
    }
}

/// Progress messages from a thread of their own, until they are ended.
struct Reports {
    has_ended: Arc<Mutex<bool>>,
}

impl Reports {
    fn start(socket: UnixStream, progress: Arc<Progress>, every: Duration) -> io::Result<Self> {
        let has_ended = Arc::new(Mutex::new(false));
        let ended = Arc::clone(&has_ended);
        std::thread::Builder::new().name("progress".into()).spawn(move || {
            loop {
                // Held while a message is written: after `end` no other message follows.
                let ended = ended.lock().unwrap_or_else(PoisonError::into_inner);
                if *ended || control::send(&socket, &progress.message()).is_err() {
                    return;
                }
                drop(ended);
                std::thread::sleep(every);
            }
        })?;
        Ok(Reports { has_ended })
    }

    fn end(self) {
        *self.has_ended.lock().unwrap_or_else(PoisonError::into_inner) = true;
    }
}
