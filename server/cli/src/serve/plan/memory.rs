//! The router's memory.

use expertd_memory as memory;
use expertd_router::api::ConnectionLimits;

/// Bytes of a process that are not counted separately: program, stacks of threads, scratch memory, logs and metrics.
pub(crate) const PROCESS_BYTES: usize = 128 << 20;
/// Smallest default of max-bytes-in-flight.
const BYTES_IN_FLIGHT: usize = 1 << 30;

/// Bytes of a connection: one incomplete frame, the headers of one call, compression tables, TLS records, and its state.
const CONNECTION_BYTES: usize = 320 << 10;

/// Largest max-bytes-in-flight.
pub(crate) const MAX_BYTES_IN_FLIGHT: usize = 1 << 40;

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
    pub(crate) fn new(in_flight: usize, tokens_per_step: usize, hidden: usize) -> Self {
        const COPIES: usize = 4;
        const MAX_RESIDENT: usize = 256 << 20;
        let max_bytes = in_flight.saturating_mul(COPIES);
        let step = tokens_per_step.saturating_mul(hidden * 4 * COPIES);
        MessageMemory { resident_bytes: step.min(MAX_RESIDENT).min(max_bytes), max_bytes }
    }

    /// Reserves the memory. A process without the reservation serves as well, but uses more memory.
    pub fn reserve(&self) {
        if let Err(error) = memory::reserve(self.max_bytes, self.resident_bytes) {
            tracing::warn!(%error, bytes = self.resident_bytes, "cannot reserve memory for messages");
        }
    }
}

/// Upper bound of the router's resident memory, by part, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouterMemory {
    /// The program, stacks of threads, logs and metrics.
    pub process: usize,
    /// Staging and rings that it shares with ranks.
    pub channels: usize,
    /// Messages, answers, and the state of calls, which is charged like messages.
    pub messages: usize,
    /// Connections without their calls.
    pub connections: usize,
    /// Memory that it shares with sessions on this host.
    pub sessions: usize,
}

impl RouterMemory {
    /// Derives the bound from the limits. `sessions` is the number of bytes of all sessions.
    pub(crate) fn new(
        messages: MessageMemory,
        channels: usize,
        connections: &ConnectionLimits,
        sessions: usize,
    ) -> Self {
        RouterMemory {
            process: PROCESS_BYTES,
            channels,
            messages: messages.max_bytes,
            connections: (connections.tcp + connections.unix).saturating_mul(CONNECTION_BYTES),
            sessions,
        }
    }

    /// The sum of all parts.
    #[must_use]
    pub const fn total(&self) -> usize {
        let &RouterMemory { process, channels, messages, connections, sessions } = self;
        process
            .saturating_add(channels)
            .saturating_add(messages)
            .saturating_add(connections)
            .saturating_add(sessions)
    }
}

/// 1 GiB, or 4 of the largest requests.
pub(crate) const fn default_bytes_in_flight(message_bytes: usize) -> usize {
    if 4 * message_bytes > BYTES_IN_FLIGHT { 4 * message_bytes } else { BYTES_IN_FLIGHT }
}
