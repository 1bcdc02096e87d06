//! Drops on threads of their own.
//!
//! Closing a descriptor takes as long as its peer likes: a Unix-domain socket closes what was passed over it and not received, and a
//! passed descriptor may be a socket that lingers or a file of a stopped file system. Freeing a GiB takes a large part of a second.

use std::sync::atomic::{AtomicUsize, Ordering, fence};
use std::sync::{Arc, Weak};

/// Drops `held` on a thread of its own; on this one if there can be no thread.
pub fn drop_apart(held: impl Send + 'static) {
    drop_apart_then(held, || ());
}

/// As [`drop_apart`]; the thread then calls `then`.
pub(crate) fn drop_apart_then(held: impl Send + 'static, then: impl FnOnce() + Send + 'static) -> Dropping {
    let (counted, thread) = (Arc::new(()), std::thread::Builder::new().name("closer".to_owned()));
    let dropping = Dropping(Arc::downgrade(&counted));
    // A thread that cannot be started drops its function, and with it what it holds.
    let _ = thread.spawn(move || {
        drop(held);
        drop(counted);
        then();
    });
    dropping
}

/// What is being dropped on a thread of its own.
#[derive(Debug)]
pub(crate) struct Dropping(Weak<()>);

impl Dropping {
    /// Whether it has been dropped.
    pub(crate) fn has_ended(&self) -> bool {
        let has_ended = self.0.strong_count() == 0;
        // Orders what the other thread did before what follows here.
        fence(Ordering::Acquire);
        has_ended
    }
}

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
