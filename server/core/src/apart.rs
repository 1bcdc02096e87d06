//! Clients that are turned away, whose sockets are closed on threads of their own.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

pub use expertd_ipc::apart::drop_apart;

/// Counts what is being dropped apart, so that there is a bound on it.
#[derive(Clone, Debug, Default)]
pub struct Closing(Arc<AtomicUsize>);

impl Closing {
    /// Largest number of clients that are turned away at the same time.
    const MOST: usize = 64;

    /// Whether another client may be turned away now. While it is false, a listener accepts no client.
    pub fn has_room(&self) -> bool {
        self.0.load(Ordering::Acquire) < Self::MOST
    }

    /// Counts one until the result is dropped.
    #[must_use]
    pub fn begin(&self) -> Closed {
        self.0.fetch_add(1, Ordering::AcqRel);
        Closed(self.clone())
    }
}

/// One that is counted.
#[derive(Debug)]
pub struct Closed(Closing);

impl Drop for Closed {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::os::fd::AsFd as _;
    use std::os::unix::net::UnixStream;
    use std::time::{Duration, Instant};

    use expertd_shm::descriptors::send_fds;
    use expertd_test_seed::lingering;

    use super::*;

    #[test]
    fn a_socket_whose_close_blocks_is_closed_by_another_thread_and_counted() {
        let (descriptor, peer) = lingering();
        let (service, client) = UnixStream::pair().unwrap();
        send_fds(&client, &[descriptor.as_fd()]).unwrap();
        drop(descriptor);
        let refusing = Closing::default();
        let begun = Instant::now();
        drop_apart((service, refusing.begin()));
        assert!(begun.elapsed() < Duration::from_secs(2), "the close was waited for");
        assert_eq!(refusing.0.load(Ordering::Acquire), 1, "it is counted until it is closed");
        drop(peer);
        while refusing.0.load(Ordering::Acquire) > 0 {
            assert!(begun.elapsed() < Duration::from_secs(60), "the socket is never closed");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
