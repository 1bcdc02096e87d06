//! NCCL, loaded at run time: the part that the EP group's symmetric windows need.
//!
//! The crate has three layers: [`sys`] is the C interface as declared in `nccl.h`, resolved from a shared library into a
//! table of functions; [`result`] turns return codes into errors; [`safe`] owns communicators, memory and windows.
//! The crate links to neither NCCL nor CUDA, so it builds and its tests run on machines without them.
//!
//! ```no_run
//! use std::time::Duration;
//! use expertd_nccl_sys::{Communicator, Library, UniqueId};
//!
//! let nccl = Library::open(None)?; // EXPERTD_NCCL, otherwise libnccl.so.2
//! let id = UniqueId::create(&nccl)?; // on one rank, which sends the bytes to the others
//! let group = Communicator::join(&nccl, &id, 1, 0, Duration::from_secs(60))?;
//! # Ok::<(), expertd_nccl_sys::Error>(())
//! ```

pub mod result;
pub mod safe;
pub mod sys;

pub use result::{Error, Version};
pub use safe::{Communicator, Library, SymmetricMemory, UniqueId, Window, take_drop_errors};
