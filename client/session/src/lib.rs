//! Sessions: a client on the same host shares memory with the service, so that no row passes through a socket.
//!
//! The client opens a session on the service's session socket and receives the descriptor of a memory region that the
//! service made for it. The region holds a ring of requests, a ring of completions, two doorbells and an area for rows.
//! The client writes rows into the area, pushes a request that names their place, and finds the output rows at the place
//! that the request names for them.
//!
//! * [`wire`]: records, frames of the socket, and the layout of the region. `docs/sessions.md` has the same as a page.
//! * [`memory`]: the service's view of a region, which a client may write at any time.
//! * [`socket`]: frames over the session socket.
//! * [`Session`]: the client.
//! * [`pieces`]: how large calls of network sessions are divided.
//! * [`cuda`]: sessions whose rows lie in the memory of the client's GPU.
//!
//! ```no_run
//! # fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use std::time::Duration;
//! use expertd_session::{Call, DType, Session, SessionOptions};
//!
//! let session = Session::open("unix:/run/expertd/session.sock", &SessionOptions::default())?;
//! let (tokens, row_bytes) = (8, session.hidden() * DType::Bf16.size());
//! let mut rows = session.buffer(tokens * row_bytes)?;
//! rows.as_mut_slice().fill(0);
//! let output = session.buffer(tokens * row_bytes)?;
//! let pending = session.submit(&Call::new(0, tokens, DType::Bf16), rows, output)?;
//! let answer = pending.wait(Duration::from_secs(1))?;
//! println!("{} bytes of generation {}", answer.output.as_slice().len(), answer.receipt.generation);
//! # Ok(()) }
//! ```

pub mod client;
pub mod cuda;
pub mod devices;
pub mod memory;
pub mod pieces;
pub mod places;
pub mod socket;
pub mod wire;

pub use client::{
    Answer, Buffer, Call, GivenRouting, PendingCall, Receipt, Session, SessionError, SessionOptions,
    SessionParts, check_weights, fetch_model,
};
pub use expertd_types::DType;
