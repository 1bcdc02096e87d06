//! The bytes that peers may send before a call reads them.
//!
//! HTTP/2 buffers what a peer sends within the windows of its stream and its connection, and the budget charges only what a call has
//! read: a peer that does not read its answers stops the reads of its requests as well. So windows are handed out of a total.

use std::sync::{Arc, Mutex, PoisonError};

use expertd_proto::transport::{CONNECTION_WINDOW_BYTES, STREAM_WINDOW_BYTES};

/// The smallest window of a connection, in bytes. Connections get it also when nothing is left.
const SMALLEST: usize = 256 << 10;

/// The windows of all connections of one kind of listener.
#[derive(Debug)]
pub(crate) struct ReceiveWindows {
    total: usize,
    taken: Mutex<usize>,
}

impl ReceiveWindows {
    /// Windows of `total` bytes together, besides the smallest ones.
    pub(crate) fn new(total: usize) -> Arc<ReceiveWindows> {
        Arc::new(ReceiveWindows { total, taken: Mutex::new(0) })
    }

    /// The window of a new connection: a quarter of what is left, so that few connections get the largest one and many a small one.
    pub(crate) fn take(self: &Arc<Self>) -> ReceiveWindow {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let left = self.total.saturating_sub(*taken);
        let bytes = (left / 4).clamp(SMALLEST, CONNECTION_WINDOW_BYTES as usize);
        *taken += bytes;
        drop(taken);
        ReceiveWindow { windows: Arc::clone(self), bytes }
    }
}

/// The window of one connection, which is given back on drop.
#[derive(Debug)]
pub(crate) struct ReceiveWindow {
    windows: Arc<ReceiveWindows>,
    bytes: usize,
}

impl ReceiveWindow {
    /// Bytes for all streams of the connection.
    pub(crate) const fn of_connection(&self) -> u32 {
        self.bytes as u32
    }

    /// Bytes for one stream.
    pub(crate) fn of_stream(&self) -> u32 {
        self.of_connection().min(STREAM_WINDOW_BYTES)
    }
}

impl Drop for ReceiveWindow {
    fn drop(&mut self) {
        *self.windows.taken.lock().unwrap_or_else(PoisonError::into_inner) -= self.bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_connections_get_the_largest_window_and_many_stay_within_the_total() {
        const TOTAL: usize = 512 << 20;
        let windows = ReceiveWindows::new(TOTAL);
        let mut open: Vec<_> = (0..4).map(|_| windows.take()).collect();
        for window in &open {
            assert_eq!(window.of_connection(), CONNECTION_WINDOW_BYTES);
            assert_eq!(window.of_stream(), STREAM_WINDOW_BYTES);
        }
        open.extend((4..1024).map(|_| windows.take()));
        let sum: usize = open.iter().map(|window| window.of_connection() as usize).sum();
        assert!(sum <= TOTAL + open.len() * SMALLEST, "{sum}");
        assert_eq!(open[1023].of_connection() as usize, SMALLEST);
        assert!(open.iter().all(|window| window.of_stream() <= window.of_connection()));
        drop(open);
        assert_eq!(windows.take().of_connection(), CONNECTION_WINDOW_BYTES);
    }
}
