//! The release of the memory that the service made for clients, or that clients passed to it.
//!
//! A client may keep the descriptor or its mapping of a region for ever. Its pages count for the container that touched them first,
//! which is the service's, so the service frees them itself: once its own threads and all ranks have let go of the region, and the
//! client has closed its socket. A thread does so for each session, because freeing a GiB takes a large part of a second, and closing
//! a descriptor that a client passed takes as long as the client likes. What is not released yet is charged, so that the limit on
//! sessions' memories bounds the threads.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use expertd_ipc::apart::drop_apart;
use expertd_shm::SharedRegion;

use crate::limits::RegionCharge;

/// A region that the service made for a client, the memory that the client passed, and the client's socket. When it is dropped, a thread
/// frees the pages and closes the descriptors, and then they are charged no more. Its owner drops it once the client may not use the
/// region any more, and after its own views of it and its own handle of the socket.
#[derive(Debug)]
pub(crate) struct HeldRegion(Option<Spent>);

/// Memory that nothing in the service uses, and descriptors that close as slowly as the client likes.
#[derive(Debug)]
struct Spent {
    region: Arc<SharedRegion>,
    memory: Option<OwnedFd>,
    socket: Option<Arc<UnixStream>>,
    /// Dropped last.
    #[expect(dead_code, reason = "held until it is dropped")]
    charge: RegionCharge,
}

impl Drop for Spent {
    fn drop(&mut self) {
        // Before the mapping ends, because a mapping without pages ends at once.
        if let Err(error) = self.region.free_pages() {
            tracing::error!(%error, "the pages of a session's memory stay as long as its client keeps them");
        }
    }
}

impl HeldRegion {
    pub(crate) fn new(region: &Arc<SharedRegion>, memory: Option<OwnedFd>, charge: RegionCharge) -> Self {
        HeldRegion(Some(Spent { region: Arc::clone(region), memory, socket: None, charge }))
    }

    /// Holds the client's socket as well.
    pub(crate) fn with_socket(mut self, socket: &Arc<UnixStream>) -> Self {
        if let Some(spent) = &mut self.0 {
            spent.socket = Some(Arc::clone(socket));
        }
        self
    }

    /// The memory that the client passed.
    pub(crate) fn memory(&self) -> Option<BorrowedFd<'_>> {
        self.0.as_ref()?.memory.as_ref().map(OwnedFd::as_fd)
    }
}

impl Drop for HeldRegion {
    fn drop(&mut self) {
        if let Some(spent) = self.0.take() {
            drop_apart(spent);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
