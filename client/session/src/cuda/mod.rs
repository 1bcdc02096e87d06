//! CUDA sessions: rows lie in the memory of the client's GPU, and a call is work of a CUDA stream.
//!
//! The client allocates the memory and passes its descriptor to the service, whose ranks map it. It gets a control region in
//! host memory: doorbells, each with its completion word, and statuses. It describes its calls once ([`wire::PreparedCall`]). From then on
//! a call is two memory operations of a stream: a store to a doorbell, which also clears its completion word, and a wait for that word.
//! Both are constants, so that a CUDA graph can capture and replay them. Ids, weights and token ids that a call carries are copied by
//! the stream between the client's memory and the control region.
//!
//! * [`wire`]: frames and the layout of the control region.
//! * [`control`]: the control region, as both ends use it.
//! * `CudaSession`, with feature `cuda`: the client.

pub mod control;
pub mod wire;

#[cfg(feature = "cuda")]
mod client;
#[cfg(feature = "cuda")]
mod copies;
#[cfg(feature = "cuda")]
mod driver;
#[cfg(feature = "cuda")]
mod lane;
#[cfg(feature = "cuda")]
mod memory;
#[cfg(feature = "cuda")]
mod pin;
#[cfg(feature = "cuda")]
mod stream;

#[cfg(feature = "cuda")]
pub use self::client::{
    CallFailure, CudaSession, CudaSessionOptions, DoorbellStatus, FailureHandler, Prepared, RoutingPlaces,
};
#[cfg(feature = "cuda")]
pub use self::driver::{Gpu, driver_present};
#[cfg(feature = "cuda")]
pub use self::lane::{CallArrays, IntegerArray, Lane, RoutingArrays};
#[cfg(feature = "cuda")]
pub use self::memory::DeviceMemory;
#[cfg(feature = "cuda")]
pub use self::pin::WeightPin;
#[cfg(feature = "cuda")]
pub use self::stream::{SessionGraph, SessionStream};
