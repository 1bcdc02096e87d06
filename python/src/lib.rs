//! The native half of the Python package `expertd`: the Rust client behind Python classes.
//!
//! The Python half (`expertd/*.py`) holds what users import, its documentation and its exceptions. This half converts rows
//! between Python and gRPC messages, runs calls with the GIL released, and gives results to `asyncio`.

mod array;
mod asyncio;
mod client;
mod connection;
mod cuda;
mod dlpack;
mod element;
mod errors;
mod input;
mod line;
mod model;
mod receipt;
mod request;
mod runtime;
mod session;
mod stream;

use pyo3::prelude::*;

/// `expertd._native`; `expertd` re-exports what users need.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<array::Array>()?;
    module.add_class::<client::NativeClient>()?;
    module.add_class::<stream::NativeStream>()?;
    module.add_class::<stream::Pending>()?;
    module.add_class::<cuda::NativeCudaSession>()?;
    module.add_class::<cuda::NativePrepared>()?;
    module.add_class::<receipt::Answer>()?;
    module.add_class::<receipt::Receipt>()?;
    module.add_class::<receipt::StepTiming>()?;
    module.add_class::<model::Model>()?;
    module.add_class::<model::ModelSummary>()?;
    module.add_class::<model::MoeLayer>()?;
    module.add_class::<model::Limits>()?;
    module.add_class::<model::RankPlacement>()?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))
}
