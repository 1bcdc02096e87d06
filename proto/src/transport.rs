//! The transport settings of both ends.
//!
//! HTTP/2 windows are explicit and fixed: adaptive windows would override them. Token rows are megabytes, so the
//! default windows of 64 KiB would make every answer wait for window updates.

use std::time::Duration;

/// Flow-control window of one call, in bytes: data sent that the receiver has not yet taken.
pub const STREAM_WINDOW_BYTES: u32 = 16 << 20;
/// Flow-control window of one connection, in bytes, for all its calls together.
pub const CONNECTION_WINDOW_BYTES: u32 = 64 << 20;
/// Largest HTTP/2 frame that either end accepts.
pub const MAX_FRAME_BYTES: u32 = 256 << 10;
/// Interval of keep-alive pings on a connection.
pub const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(20);
/// Time within which a ping must be answered; otherwise the connection is closed.
pub const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit for connecting.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Largest message, in bytes, of calls without token rows; a client accepts at least this.
pub const CONTROL_MESSAGE_BYTES: usize = 4 << 20;
