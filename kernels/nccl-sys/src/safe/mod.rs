//! Owners of what NCCL hands out. Drops never panic and never wait for peers; what goes wrong in them is recorded.
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

/// Takes the errors that destructors met since the last call; they have nobody to return them to.
#[must_use]
pub fn take_drop_errors() -> Vec<String> {
    DROP_ERRORS.lock().map(|mut errors| std::mem::take(&mut *errors)).unwrap_or_default()
}

fn record(outcome: Result<(), Error>) {
    if let Err(error) = outcome
        && let Ok(mut errors) = DROP_ERRORS.lock()
        // A bound, in case nobody ever asks.
        && errors.len() < 64
    {
        errors.push(error.to_string());
    }
}
