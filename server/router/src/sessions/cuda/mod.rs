//! CUDA sessions: rows lie in the memory of the client's GPU, and ranks read and write them there.
//!
//! * `doorbells`: prepared calls and calls in flight of one session, without threads or I/O.
//! * `state`: one session: its control region and the thread that takes rings of its doorbells.
//! * `call`: a call that the step loop has.
//! * `listener`: what the socket of a session carries.

mod call;
mod doorbells;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod listener;
mod state;

pub(super) use state::CudaSession;
