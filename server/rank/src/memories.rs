//! Memories that clients share with a rank, and the router's orders to map them.

use std::collections::{HashMap, VecDeque};
use std::io::{self, BufReader};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use expertd_ipc::apart::drop_apart;
use expertd_ipc::control::{self, MemoryKind, ToRank};
use expertd_ipc::passing::FdReader;
use expertd_shm::{SharedRegion, SharedSlice};
use expertd_types::MemoryId;

/// A memory that a client shares, mapped into this process. The client may write any of it at any time.
#[derive(Clone, Debug)]
pub enum ClientMemory {
    /// Host memory.
    Host(SharedSlice<u8>),
    /// Memory of a GPU, which the engine maps.
    Device(DeviceMemory),
}

/// A descriptor that a client has passed. It is closed on a thread of its own, because it may be a file whose close blocks.
#[derive(Debug)]
pub struct PassedFd(Option<OwnedFd>);

impl AsFd for PassedFd {
    #[allow(clippy::expect_used, reason = "there is one until it is dropped")]
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_ref().expect("a descriptor").as_fd()
    }
}

impl Drop for PassedFd {
    fn drop(&mut self) {
        drop_apart(self.0.take());
    }
}

/// Memory of a GPU of the client, as its descriptor.
#[derive(Clone, Debug)]
pub struct DeviceMemory {
    /// A POSIX descriptor of CUDA's virtual memory functions.
    pub fd: Arc<PassedFd>,
    /// Length in bytes, as the client says.
    pub bytes: usize,
    /// UUID of the GPU, as the client says.
    pub device: [u8; 16],
    /// The session's control region, with the completion words.
    pub control: SharedSlice<u8>,
}

/// The attached host memories of a rank.
#[derive(Debug, Default)]
pub struct HostMemories {
    mapped: HashMap<MemoryId, SharedSlice<u8>>,
}

impl HostMemories {
    /// Adds a memory.
    ///
    /// # Errors
    /// If its number is taken.
    pub fn attach(&mut self, memory: MemoryId, bytes: SharedSlice<u8>) -> Result<(), String> {
        if self.mapped.contains_key(&memory) {
            return Err(format!("memory {memory} is attached; numbers are never used again"));
        }
        self.mapped.insert(memory, bytes);
        Ok(())
    }

    /// Drops a memory. The mapping ends with its last view.
    pub fn detach(&mut self, memory: MemoryId) {
        self.mapped.remove(&memory);
    }

    /// The bytes of an attached memory.
    pub fn get(&self, memory: MemoryId) -> Option<&SharedSlice<u8>> {
        self.mapped.get(&memory)
    }

    /// Size of an attached memory, in bytes.
    pub fn size(&self, memory: MemoryId) -> Option<usize> {
        self.get(memory).map(SharedSlice::len)
    }
}

/// An order of the router to a rank that serves.
#[derive(Debug)]
pub(crate) enum Order {
    /// Attach a memory, which is mapped, or say why it is not.
    Attach(MemoryId, Result<ClientMemory, String>),
    /// Detach a memory.
    Detach(MemoryId),
    /// Leave.
    Leave,
}

/// Orders from the thread that reads the control socket to the step loop.
#[derive(Debug, Default)]
pub(crate) struct Orders {
    waiting: Mutex<VecDeque<Order>>,
    any: AtomicBool,
}

impl Orders {
    fn waiting(&self) -> MutexGuard<'_, VecDeque<Order>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn push(&self, order: Order) {
        let mut waiting = self.waiting();
        waiting.push_back(order);
        self.any.store(true, Ordering::Release);
    }

    /// Takes the oldest order.
    pub(crate) fn take(&self) -> Option<Order> {
        if !self.any.load(Ordering::Acquire) {
            return None;
        }
        let mut waiting = self.waiting();
        let order = waiting.pop_front();
        self.any.store(!waiting.is_empty(), Ordering::Release);
        order
    }

    /// True while an order waits.
    pub(crate) const fn any(&self) -> &AtomicBool {
        &self.any
    }

    /// Reads orders until the rank is to leave, and rings `ring` for each. Memories are mapped here, while steps run.
    pub(crate) fn read(&self, reader: &mut BufReader<FdReader>, ring: impl Fn()) {
        loop {
            let order = match control::receive::<ToRank>(reader) {
                Ok(Some(ToRank::Attach { memory, kind })) => Order::Attach(memory, map(kind, reader)),
                Ok(Some(ToRank::Detach { memory })) => Order::Detach(memory),
                // Any other message, and the end of the stream, ask the rank to leave.
                Ok(_) | Err(_) => Order::Leave,
            };
            let is_last = matches!(order, Order::Leave);
            self.push(order);
            ring();
            if is_last {
                return;
            }
        }
    }
}

/// Maps the memory whose descriptor came with a message.
fn map(kind: MemoryKind, reader: &mut BufReader<FdReader>) -> Result<ClientMemory, String> {
    let mut next_fd = |what| {
        reader.get_mut().take_fd().ok_or_else(|| format!("the router sent no descriptor of the {what}"))
    };
    let fd = next_fd("memory")?;
    match kind {
        // The router has found it to be a memfd.
        MemoryKind::Host { bytes } => map_region(fd, bytes).map(ClientMemory::Host),
        MemoryKind::Device { bytes, device, control_bytes } => {
            let fd = Arc::new(PassedFd(Some(fd)));
            let bytes = usize::try_from(bytes).map_err(|error| error.to_string())?;
            let control = map_region(next_fd("control region")?, control_bytes)?;
            Ok(ClientMemory::Device(DeviceMemory { fd, bytes, device, control }))
        }
    }
}

/// Maps `bytes` bytes of a sealed memfd.
fn map_region(fd: OwnedFd, bytes: u64) -> Result<SharedSlice<u8>, String> {
    let bytes = usize::try_from(bytes).map_err(|error| error.to_string())?;
    let region = SharedRegion::from_fd(fd, bytes).map_err(|error| error.to_string())?;
    // Pages that are not mapped yet would cost the first calls a fault each.
    region.populate(0, bytes).map_err(|error| error.to_string())?;
    region.slice(0, bytes).map_err(|error| error.to_string())
}

/// The error for a message that comes before a rank serves.
pub(crate) fn unexpected(message: &ToRank) -> io::Error {
    let problem = format!("expected `start` from the router, found {message:?}");
    io::Error::new(io::ErrorKind::InvalidData, problem)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::unix::net::UnixStream;

    use expertd_ipc::passing::send_with_fds;

    use super::*;

    #[test]
    fn orders_arrive_in_order_with_their_memories() {
        let (router, rank) = UnixStream::pair().unwrap();
        let region = SharedRegion::create("test", 4096).unwrap();
        region.slice::<u32>(0, 1).unwrap().atomics()[0].store(7, Ordering::Relaxed);
        let unsealed = tempfile::tempfile().unwrap();
        unsealed.set_len(4096).unwrap();
        let host = |memory, bytes| ToRank::Attach { memory, kind: MemoryKind::Host { bytes } };
        send_with_fds(&router, &host(MemoryId(1), 4096), &[region.as_fd()]).unwrap();
        send_with_fds(&router, &host(MemoryId(2), 8192), &[region.as_fd()]).unwrap();
        send_with_fds(&router, &host(MemoryId(3), 4096), &[unsealed.as_fd()]).unwrap();
        control::send(&router, &host(MemoryId(4), 4096)).unwrap();
        control::send(&router, &ToRank::Detach { memory: MemoryId(1) }).unwrap();
        control::send(&router, &ToRank::Exit).unwrap();
        let orders = Orders::default();
        let rings = AtomicBool::new(false);
        orders.read(&mut BufReader::new(FdReader::new(rank)), || rings.store(true, Ordering::Relaxed));
        assert!(rings.into_inner() && orders.any().load(Ordering::Relaxed));
        match orders.take() {
            Some(Order::Attach(MemoryId(1), Ok(ClientMemory::Host(bytes)))) => {
                let mut first = [0; 4];
                bytes.load_bytes(0, &mut first);
                assert_eq!((bytes.len(), u32::from_ne_bytes(first)), (4096, 7));
            }
            other => panic!("{other:?}"),
        }
        for (number, text) in [(2, "expected 8192"), (3, "inspect the seals"), (4, "no descriptor")] {
            match orders.take() {
                Some(Order::Attach(MemoryId(found), Err(error))) => {
                    assert!(found == number && error.contains(text), "{found}: {error}");
                }
                other => panic!("{other:?}"),
            }
        }
        assert!(matches!(orders.take(), Some(Order::Detach(MemoryId(1)))));
        assert!(matches!(orders.take(), Some(Order::Leave)));
        assert!(orders.take().is_none() && !orders.any().load(Ordering::Relaxed));
    }

    #[test]
    fn a_number_is_attached_once() {
        let region = SharedRegion::create("test", 4096).unwrap();
        let mut memories = HostMemories::default();
        let bytes = || region.slice(0, 4096).unwrap();
        memories.attach(MemoryId(3), bytes()).unwrap();
        assert!(memories.attach(MemoryId(3), bytes()).is_err());
        assert_eq!((memories.size(MemoryId(3)), memories.size(MemoryId(4))), (Some(4096), None));
        memories.detach(MemoryId(3));
        assert!(memories.get(MemoryId(3)).is_none());
    }
}
