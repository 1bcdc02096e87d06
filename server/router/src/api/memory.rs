//! Upper bounds of the memory that the API's connections and calls take.

use expertd_proto::transport::{CONNECTION_WINDOW_BYTES, MAX_FRAME_BYTES};

use super::transport::limits::ConnectionLimits;

/// Bytes of a connection: one incomplete frame, the headers of one call, compression tables, TLS records, and the socket's and
/// the connection's own state.
const CONNECTION_BYTES: usize = MAX_FRAME_BYTES as usize + (64 << 10);

/// Largest number of message bytes that the transport holds for all connections before calls have read them, if messages may
/// take `in_flight` bytes: half of that, and at least the HTTP/2 window of one connection. Connections that hold some are not
/// read while it is exceeded.
#[must_use]
pub const fn transport_bytes(in_flight: usize) -> usize {
    let (half, window) = (in_flight / 2, CONNECTION_WINDOW_BYTES as usize);
    if half > window { half } else { window }
}

impl ConnectionLimits {
    /// Upper bound of the memory that the connections take, without their calls and messages, in bytes.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        (self.tcp + self.unix).saturating_mul(CONNECTION_BYTES)
    }
}
