//! Owners of NCCL's resources. Drops neither panic nor wait for peers; their errors are recorded.
#![allow(unsafe_code, reason = "calls C functions through resolved pointers")]

mod communicator;
mod library;
#[cfg(test)]
mod tests;
mod window;

use std::sync::Mutex;

pub use communicator::{Communicator, UniqueId};
pub use library::{LIBRARY_VARIABLE, Library};
pub use window::{SymmetricMemory, Window};

use crate::result::Error;

static DROP_ERRORS: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Takes the errors of destructors, which cannot return them, since the last call.
#[must_use]
pub fn take_drop_errors() -> Vec<String> {
    DROP_ERRORS.lock().map(|mut errors| std::mem::take(&mut *errors)).unwrap_or_default()
}

fn record(outcome: Result<(), Error>) {
    if let Err(error) = outcome
        && let Ok(mut errors) = DROP_ERRORS.lock()
        // The list is bounded in case it is never taken.
        && errors.len() < 64
    {
        errors.push(error.to_string());
    }
}
