//! Control messages between the router and a rank over an inherited socketpair: file descriptors with the first byte, then
//! one JSON message per line. Token rows never travel over it.

use std::io::{self, BufRead, Write};
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use rustix::net::SendFlags;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::{GroupShape, RowCountsShape};
use expertd_types::{
    ExpertPlacement, Fp8Products, Generation, LayerRange, MemoryId, Rank, WeightFingerprint,
};

/// Kind of device that ranks run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    /// A share of the CPU cores.
    Cpu,
    /// NVIDIA GPUs, one per rank.
    Cuda,
}

impl std::fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            DeviceKind::Cpu => "cpu",
            DeviceKind::Cuda => "cuda",
        })
    }
}

/// A checkpoint, the fingerprint that its weights must have, and the ranks that own its experts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointSource {
    /// Folder of the checkpoint.
    pub folder: PathBuf,
    /// The layers to load.
    pub layers: LayerRange,
    /// Expected fingerprint of its weights. Other weights are not loaded.
    pub fingerprint: WeightFingerprint,
    /// The ranks that own its experts; `None`: contiguous ranges.
    pub placement: Option<ExpertPlacement>,
}

/// Everything that a loader needs to pack one rank's share of a checkpoint.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LoaderSetup {
    /// The rank.
    pub rank: Rank,
    /// Number of ranks in the group.
    pub ranks: u32,
    /// Number of ranks that get rows; fewer in a mixed group.
    pub sources: u32,
    /// The device that the rank runs on.
    pub device: DeviceKind,
    /// The GPUs of the GPU ranks, which are the first ones, as indices among the GPUs that the process may use.
    pub gpus: Vec<u32>,
    /// The checkpoint.
    pub checkpoint: CheckpointSource,
    /// The experts whose products are computed in FP8.
    pub fp8_products: Fp8Products,
    /// Cores that the loader is pinned to.
    pub cores: Vec<usize>,
    /// Number of threads that read and pack.
    pub threads: usize,
    /// Interval of the loader's messages.
    pub heartbeat: Duration,
    /// Whether a generation serves meanwhile: the loader then leaves processors to it.
    pub in_background: bool,
}

/// Messages from a loader.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FromLoader {
    /// Progress of loading, sent at every interval even if there is none.
    Loading {
        /// Bytes of the checkpoint that were compared with its fingerprint so far, where that reads every byte.
        checked_bytes: u64,
        /// Bytes of the checkpoint packed so far.
        loaded_bytes: u64,
        /// Bytes to pack.
        total_bytes: u64,
    },
    /// The share is packed and proved; its descriptors come with this message.
    Loaded {
        /// Bytes of the checkpoint in the share.
        weight_bytes: u64,
        /// Bytes of the packed memory.
        memory_bytes: u64,
    },
    /// The share cannot be loaded.
    Failed {
        /// Human-readable cause.
        message: String,
        /// Whether the only cause is that the share does not fit beside what is in memory.
        lacks_room: bool,
    },
}

/// Everything a rank needs to join a generation.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RankSetup {
    /// Number of the rank.
    pub rank: Rank,
    /// Generation of the group.
    pub generation: Generation,
    /// Sizes of the channels.
    pub shape: GroupShape,
    /// Sizes of the table of row counts.
    pub row_counts: RowCountsShape,
    /// The device.
    pub device: DeviceKind,
    /// The GPUs of the GPU ranks, which are the first ones, as indices among the GPUs that the process may use.
    pub gpus: Vec<u32>,
    /// Fingerprint of the weights. A loader has packed the rank's share; its descriptors are the last that the router sends.
    pub fingerprint: WeightFingerprint,
    /// The experts whose products are computed in FP8.
    pub fp8_products: Fp8Products,
    /// Cores that the rank is pinned to.
    pub cores: Vec<usize>,
    /// Number of threads that compute and load weights.
    pub threads: usize,
    /// How long waits spin before they sleep.
    pub spin: Duration,
    /// Time limit of a wait for peers within a step.
    pub peer_timeout: Duration,
    /// Time limit of a step, within which the ranks of a mixed group wait for each other.
    pub step_timeout: Duration,
    /// Interval of the rank's heartbeat.
    pub heartbeat: Duration,
    /// In a mixed group: least number of rows of a step for which the source computes all experts of CPU ranks, too.
    pub stream_rows: usize,
    /// In a mixed group: memory of the source's device for copies of experts of CPU ranks that change between steps, in bytes.
    pub slot_bytes: u64,
}

/// Kind of a memory that clients share with the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryKind {
    /// A sealed memfd, whose descriptor comes with the message.
    Host {
        /// Its length, in bytes.
        bytes: u64,
    },
    /// Memory of a GPU, as a POSIX descriptor of CUDA's virtual memory functions, which comes with the message, and after it the
    /// sealed memfd of the session's control region, whose completion words rank 0 raises.
    Device {
        /// Its length, in bytes.
        bytes: u64,
        /// UUID of the GPU.
        device: [u8; 16],
        /// Length of the control region, in bytes.
        control_bytes: u64,
    },
}

/// Messages to a rank after its [`RankSetup`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToRank {
    /// The NCCL id that rank 0 made.
    GroupId {
        /// Bytes of the id.
        id: Vec<u8>,
        /// Multiprocessors of rank 0's GPU; all ranks need as many.
        multiprocessors: u32,
    },
    /// Every rank is ready; steps may follow.
    Start,
    /// Map a memory that a client shares, whose descriptor comes with this message. The rank answers with
    /// [`FromRank::Attached`], between steps. Only after `Start`.
    Attach {
        /// Number of the memory.
        memory: MemoryId,
        /// Its kind and size.
        kind: MemoryKind,
    },
    /// Unmap a memory, which no step in flight names. The rank answers with [`FromRank::Detached`], between steps.
    Detach {
        /// Number of the memory.
        memory: MemoryId,
    },
    /// Leave cleanly.
    Exit,
}

/// Kind of failure that ended a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureKind {
    /// The checkpoint could not be loaded.
    Load,
    /// The device or the group could not be set up.
    Setup,
}

/// Messages from a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FromRank {
    /// Rank 0 made the NCCL id with which all ranks join; the router forwards it.
    GroupId {
        /// Bytes of the id.
        id: Vec<u8>,
        /// Multiprocessors of rank 0's GPU; all ranks need as many.
        multiprocessors: u32,
    },
    /// The rank is loaded and warm.
    Ready {
        /// Size of the loaded weights.
        weight_bytes: u64,
        /// Human-readable description of the device.
        device: String,
    },
    /// The answer to [`ToRank::Attach`].
    Attached {
        /// Number of the memory.
        memory: MemoryId,
        /// Why segments of steps cannot name the memory; `None` if they can.
        error: Option<String>,
    },
    /// The answer to [`ToRank::Detach`], also for a memory whose `Attach` failed.
    Detached {
        /// Number of the memory.
        memory: MemoryId,
    },
    /// The rank could not get ready.
    Failed {
        /// Kind of failure.
        kind: FailureKind,
        /// Human-readable cause.
        message: String,
    },
}

/// Writes one message.
pub fn send<M: Serialize>(mut socket: &UnixStream, message: &M) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    socket.write_all(&line)
}

/// Writes as much of a message as the socket takes without waiting. Returns the rest, which must follow before any other message.
pub fn send_some<M: Serialize>(socket: &UnixStream, message: &M) -> io::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    while !line.is_empty() {
        match rustix::net::send(socket.as_fd(), &line, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(sent) => drop(line.drain(..sent)),
            Err(rustix::io::Errno::AGAIN) => break,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(line)
}

/// Reads one message; returns `None` at the end of the stream.
///
/// # Errors
/// If the line is not a message of type `M`, or the stream broke.
pub fn receive<M: DeserializeOwned>(reader: &mut impl BufRead) -> io::Result<Option<M>> {
    let mut line = Vec::new();
    if reader.read_until(b'\n', &mut line)? == 0 {
        return Ok(None);
    }
    Ok(Some(serde_json::from_slice(&line)?))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::{BufReader, Read, Seek};

    use super::*;
    use expertd_shm::descriptors::{receive_fds, send_fds};

    #[test]
    fn descriptors_and_messages_arrive() {
        let (a, b) = UnixStream::pair().unwrap();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"shared").unwrap();
        send_fds(&a, &[file.as_fd(), file.as_fd()]).unwrap();
        send(&a, &ToRank::Start).unwrap();
        drop(a);
        let fds = receive_fds(&b).unwrap();
        assert_eq!(fds.len(), 2);
        let mut copy = std::fs::File::from(fds.into_iter().next().unwrap());
        copy.rewind().unwrap();
        let mut text = String::new();
        copy.read_to_string(&mut text).unwrap();
        assert_eq!(text, "shared");
        let mut reader = BufReader::new(&b);
        assert_eq!(receive(&mut reader).unwrap(), Some(ToRank::Start));
        assert_eq!(receive::<ToRank>(&mut reader).unwrap(), None);
    }

    #[test]
    fn a_message_that_its_receiver_does_not_read_is_sent_in_parts() {
        let (mut a, b) = UnixStream::pair().unwrap();
        let id: Vec<u8> = (0..2_000_000_u32).map(|at| at as u8).collect();
        let message = ToRank::GroupId { id, multiprocessors: 7 };
        let rest = send_some(&a, &message).unwrap();
        assert!(!rest.is_empty(), "no socket takes megabytes");
        let receiving = std::thread::spawn(move || receive::<ToRank>(&mut BufReader::new(&b)).unwrap());
        a.write_all(&rest).unwrap();
        assert_eq!(receiving.join().unwrap(), Some(message));
        let (a, b) = UnixStream::pair().unwrap();
        assert!(send_some(&a, &ToRank::Start).unwrap().is_empty());
        drop(b);
        assert!(send_some(&a, &ToRank::Start).is_err());
    }
}
