//! Sockets of peers that misbehaved, kept open and unread for a moment.
//!
//! A peer that is refused or ended at once can come back at once, and each time costs an accept, a handshake and the
//! buffers of a connection. In the tarpit its socket costs one descriptor and no processor time.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio_util::either::Either;

use super::address::{PlainSocket, Socket};
use super::table::Origin;

/// Time that a socket stays in the tarpit.
const HELD: Duration = Duration::from_secs(1);
/// Connections that an address may have refused within [`HELD`] before further refused ones enter the tarpit, so that a
/// client which meets a limit learns it without delay.
const REFUSED_AT_ONCE: u32 = 16;
/// Addresses whose refused connections are counted.
const COUNTED: usize = 4096;

/// A bounded number of sockets that are neither read nor written.
pub(super) struct Tarpit {
    capacity: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Sockets with the time at which they were put here, the oldest first.
    sockets: VecDeque<(Instant, OwnedFd)>,
    /// Connections refused since `since`, by address.
    refused: HashMap<Origin, u32>,
    since: Option<Instant>,
}

impl Tarpit {
    pub(super) fn new(capacity: usize) -> Tarpit {
        Tarpit { capacity, state: Mutex::default() }
    }

    /// Closes a refused connection, later if its address has had many refused.
    pub(super) fn refuse(&self, socket: PlainSocket, origin: Origin) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.since.is_none_or(|since| since.elapsed() > HELD) || state.refused.len() >= COUNTED {
            state.refused.clear();
            state.since = Some(Instant::now());
        }
        let times = state.refused.entry(origin).or_default();
        *times += 1;
        if *times <= REFUSED_AT_ONCE || state.sockets.len() >= self.capacity {
            return;
        }
        // The descriptor leaves the runtime, which would otherwise be woken for each arriving byte.
        let socket = match socket {
            Either::Left(stream) => stream.into_std().map(OwnedFd::from),
            Either::Right(stream) => stream.into_std().map(OwnedFd::from),
        };
        if let Ok(socket) = socket {
            state.sockets.push_back((Instant::now(), socket));
        }
    }

    /// Keeps a connection open that the service ends, if there is room. The caller may drop its own socket.
    pub(super) fn keep(&self, socket: &Socket) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.sockets.len() >= self.capacity {
            return;
        }
        let descriptor = match socket {
            Either::Left(Either::Left(stream)) => stream.as_fd(),
            Either::Left(Either::Right(stream)) => stream.as_fd(),
            Either::Right(stream) => stream.get_ref().0.as_fd(),
        };
        // Without a descriptor to spare, the connection ends now.
        if let Ok(socket) = descriptor.try_clone_to_owned() {
            state.sockets.push_back((Instant::now(), socket));
        }
    }

    /// Closes the sockets whose time is over; to be called a few times in [`HELD`].
    pub(super) fn release(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let over = state.sockets.partition_point(|(since, _)| since.elapsed() >= HELD);
        let over: Vec<_> = state.sockets.drain(..over).collect();
        drop(state);
        // Closing takes system calls, which need not hold up others.
        drop(over);
    }

    #[cfg(test)]
    fn len(&self) -> usize {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).sockets.len()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::net::Ipv4Addr;

    use tokio::io::AsyncReadExt as _;
    use tokio::net::UnixStream;

    use super::*;

    fn from(last: u8) -> Origin {
        Origin::address(Ipv4Addr::new(10, 0, 0, last).into())
    }

    #[tokio::test]
    async fn the_first_refused_connections_end_at_once_and_further_ones_later() {
        let tarpit = Tarpit::new(3);
        let mut ours = Vec::new();
        for _ in 0..REFUSED_AT_ONCE + 5 {
            let (near, far) = UnixStream::pair().unwrap();
            tarpit.refuse(Either::Right(far), from(1));
            ours.push(near);
        }
        assert_eq!(tarpit.len(), 3, "no more than the capacity");
        let (mut other, far) = UnixStream::pair().unwrap();
        tarpit.refuse(Either::Right(far), from(2));
        assert_eq!(other.read(&mut [0]).await.unwrap(), 0, "another address is told at once");
        assert_eq!(ours[0].read(&mut [0]).await.unwrap(), 0);
        let held = &mut ours[REFUSED_AT_ONCE as usize];
        assert!(held.try_read(&mut [0]).is_err(), "it is still open");
        tarpit.release();
        assert_eq!(tarpit.len(), 3, "it is not time");
        tokio::time::sleep(HELD).await;
        tarpit.release();
        assert_eq!(tarpit.len(), 0);
        assert_eq!(held.read(&mut [0]).await.unwrap(), 0);
    }

    #[tokio::test]
    async fn an_ended_connection_stays_open_for_its_peer() {
        let tarpit = Tarpit::new(1);
        let (mut near, far) = UnixStream::pair().unwrap();
        let socket = Either::Left(Either::Right(far));
        tarpit.keep(&socket);
        drop(socket);
        assert!(tokio::time::timeout(HELD / 4, near.read(&mut [0])).await.is_err());
        tokio::time::sleep(HELD).await;
        tarpit.release();
        assert_eq!(near.read(&mut [0]).await.unwrap(), 0);
    }
}
