//! What the router and a rank say to each other over their inherited socketpair: one JSON message a line, and file
//! descriptors beside the first byte. No token rows travel here.

use std::io::{self, BufRead, IoSlice, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::GroupShape;
use expertd_types::{Generation, Rank};

/// Devices that ranks run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    /// A share of the CPU cores.
    Cpu,
    /// One NVIDIA GPU per rank.
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

/// How the products of FP8 experts are computed on GPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "lowercase")]
pub enum Fp8Compute {
    /// Rows are quantised to FP8, too, in blocks of 128 elements.
    Fp8,
    /// Weights are widened to bf16.
    #[default]
    Bf16,
}

impl std::fmt::Display for Fp8Compute {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Fp8Compute::Fp8 => "fp8",
            Fp8Compute::Bf16 => "bf16",
        })
    }
}

/// Everything a rank needs to join a generation.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RankSetup {
    /// Which rank this is.
    pub rank: Rank,
    /// Life of the group.
    pub generation: Generation,
    /// Shared sizes.
    pub shape: GroupShape,
    /// The device.
    pub device: DeviceKind,
    /// Folder of the checkpoint.
    pub model: PathBuf,
    /// How the products of FP8 experts are computed; CPU ranks widen the weights.
    pub fp8_compute: Fp8Compute,
    /// Cores of this rank.
    pub cores: Vec<usize>,
    /// Threads that compute, and load weights.
    pub threads: usize,
    /// How long waits spin before they sleep.
    pub spin: Duration,
    /// How long a rank waits for its peers within a step.
    pub peer_timeout: Duration,
    /// How often the rank shows that it is alive.
    pub heartbeat: Duration,
}

/// Messages to a rank after its [`RankSetup`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToRank {
    /// The NCCL id that rank 0 made.
    GroupId {
        /// Its bytes.
        id: Vec<u8>,
    },
    /// Every rank is ready: join the exchanges.
    Start,
    /// Leave cleanly.
    Exit,
}

/// What kind of failure ended a rank.
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
    /// Rank 0 made the NCCL id with which all ranks join: for the router to hand on.
    GroupId {
        /// Its bytes.
        id: Vec<u8>,
    },
    /// Progress of loading weights.
    Loading {
        /// Bytes done.
        loaded_bytes: u64,
        /// Bytes in all.
        total_bytes: u64,
    },
    /// Loaded and warm.
    Ready {
        /// Bytes of weights held.
        weight_bytes: u64,
        /// What the rank computes with, for people.
        device: String,
    },
    /// Could not get ready.
    Failed {
        /// What failed.
        kind: FailureKind,
        /// The cause, for people.
        message: String,
    },
}

/// Sends `fds` beside one byte.
///
/// # Errors
/// If the peer is gone.
pub fn send_fds(socket: &UnixStream, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::other("more file descriptors than one message carries"));
    }
    rustix::net::sendmsg(socket.as_fd(), &[IoSlice::new(b"F")], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Receives what [`send_fds`] sent.
///
/// # Errors
/// If the peer is gone or sent something else.
pub fn receive_fds(socket: &UnixStream) -> io::Result<Vec<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0u8];
    let received = rustix::net::recvmsg(
        socket.as_fd(),
        &mut [IoSliceMut::new(&mut byte)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    if received.bytes != 1 || byte != *b"F" {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "the control socket did not begin with file descriptors; was this process started by `expertd serve`?",
        ));
    }
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            fds.extend(received);
        }
    }
    Ok(fds)
}

/// Writes one message.
///
/// # Errors
/// If the peer is gone.
pub fn send<M: Serialize>(mut socket: &UnixStream, message: &M) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    socket.write_all(&line)
}

/// Reads one message; `None` at the end of the stream.
///
/// # Errors
/// If the line is not such a message, or the stream broke.
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
    fn a_stranger_on_the_socket_is_an_error() {
        let (mut a, b) = UnixStream::pair().unwrap();
        a.write_all(b"GET / HTTP/1.1\r\n").unwrap();
        let error = receive_fds(&b).unwrap_err();
        assert!(error.to_string().contains("expertd serve"), "{error}");
    }
}
