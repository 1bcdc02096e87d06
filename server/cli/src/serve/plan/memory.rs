//! The router's memory for messages.

use expertd_memory as memory;

/// Smallest default of max-bytes-in-flight.
const BYTES_IN_FLIGHT: usize = 1 << 30;

/// Memory of the router for messages and answers; see [`memory`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessageMemory {
    /// Bytes that are resident from the start.
    pub resident_bytes: usize,
    /// Largest number of bytes.
    pub max_bytes: usize,
}

impl MessageMemory {
    /// Derives the sizes from the bytes that may be in flight. There are up to four copies of them: a message as frames and assembled,
    /// and its answer as rows and encoded. Memory for four copies of a step's rows in f32 is resident from the start, up to a limit.
    pub(super) fn new(in_flight: usize, tokens_per_step: usize, hidden: usize) -> Self {
        const COPIES: usize = 4;
        const MAX_RESIDENT: usize = 256 << 20;
        let max_bytes = in_flight.saturating_mul(COPIES);
        let step = tokens_per_step.saturating_mul(hidden * 4 * COPIES);
        MessageMemory { resident_bytes: step.min(MAX_RESIDENT).min(max_bytes), max_bytes }
    }

    /// The sizes for the default of max-bytes-in-flight, with the largest message of `message_bytes`.
    pub(crate) fn of_largest_message(message_bytes: usize, tokens_per_step: usize, hidden: usize) -> Self {
        Self::new(default_bytes_in_flight(message_bytes), tokens_per_step, hidden)
    }

    /// Reserves the memory. A process without the reservation serves as well, but uses more memory.
    pub fn reserve(&self) {
        if let Err(error) = memory::reserve(self.max_bytes, self.resident_bytes) {
            tracing::warn!(%error, bytes = self.resident_bytes, "cannot reserve memory for messages");
        }
    }
}

/// 1 GiB, or 4 of the largest requests.
pub(super) const fn default_bytes_in_flight(message_bytes: usize) -> usize {
    if 4 * message_bytes > BYTES_IN_FLIGHT { 4 * message_bytes } else { BYTES_IN_FLIGHT }
}
