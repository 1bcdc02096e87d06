//! NCCL, opened at run time: the part that the EP group's symmetric windows need.
//!
//! Three layers, a file each: [`sys`] is the C interface as declared in `nccl.h`, resolved from a shared library into a
//! table of functions; [`result`] turns return codes into errors; [`safe`] owns communicators, memory and windows.
//! Nothing here links to NCCL or CUDA, so the crate builds and its tests run on machines that have neither.
//!
//! ```no_run
//! use std::time::Duration;
//! use expertd_nccl_sys::{Communicator, Library, UniqueId};
//!
//! let nccl = Library::open(None)?; // EXPERTD_NCCL, else libnccl.so.2
//! let id = UniqueId::create(&nccl)?; // on one rank; its bytes travel to the others
//! let group = Communicator::join(&nccl, &id, 1, 0, Duration::from_secs(60))?;
//! # Ok::<(), expertd_nccl_sys::Error>(())
//! ```

pub mod result;
pub mod safe;
pub mod sys;

pub use result::{Error, Version};
pub use safe::{Communicator, Library, SymmetricMemory, UniqueId, Window, take_drop_errors};
