//! The thread of a session's socket. It passes replies on until the session ends, and from then on releases waiting streams.

use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use super::status::CallFailure;
use crate::client::SessionError;
use crate::cuda::control::ControlMemory;
use crate::cuda::wire::PENDING;
use crate::socket;
use crate::wire::{MAX_SERVICE_FRAME, frame};

/// Interval at which words are released once the session has ended, and at which handlers' doorbells are checked for failures.
const INTERVAL: Duration = Duration::from_millis(1);

/// Takes the reason why a call failed.
pub type FailureHandler = fn(&str);

/// State that the threads of a session share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) control: ControlMemory,
    doorbells: Vec<WatchedDoorbell>,
    has_ended: AtomicBool,
    is_dropped: AtomicBool,
    end: Mutex<Option<String>>,
}

#[derive(Debug, Default)]
struct WatchedDoorbell {
    /// Number of calls that were released.
    released: AtomicU64,
    on_failure: OnceLock<FailureHandler>,
}

impl Shared {
    pub(super) fn new(control: ControlMemory) -> Shared {
        Shared {
            doorbells: (0..control.doorbells()).map(|_| WatchedDoorbell::default()).collect(),
            control,
            has_ended: AtomicBool::new(false),
            is_dropped: AtomicBool::new(false),
            end: Mutex::new(None),
        }
    }

    /// Ends the threads.
    pub(super) fn stop(&self) {
        self.is_dropped.store(true, Ordering::Release);
    }

    fn end(&self, reason: String) {
        self.end.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(reason);
        self.has_ended.store(true, Ordering::Release);
    }

    fn reason(&self) -> String {
        self.end.lock().unwrap_or_else(PoisonError::into_inner).clone().unwrap_or_default()
    }

    /// Checks that the session has not ended. A stream is released only after this fails.
    pub(super) fn check(&self) -> Result<(), SessionError> {
        if !self.has_ended.load(Ordering::Acquire) {
            return Ok(());
        }
        Err(SessionError::Ended { reason: self.reason() })
    }

    fn doorbell(&self, doorbell: u32) -> Result<&WatchedDoorbell, SessionError> {
        let missing = || SessionError::Device(format!("there is no doorbell {doorbell}"));
        self.doorbells.get(doorbell as usize).ok_or_else(missing)
    }

    /// Number of calls of a doorbell that the service failed.
    pub(super) fn failures(&self, doorbell: u32) -> Result<u64, SessionError> {
        self.doorbell(doorbell).map(|_| self.control.failures(doorbell))
    }

    /// Number of calls of a doorbell that were released.
    pub(super) fn released(&self, doorbell: u32) -> u64 {
        self.doorbell(doorbell).map_or(0, |own| own.released.load(Ordering::Acquire))
    }

    /// As [`CudaSession::on_failure`](super::CudaSession::on_failure).
    pub(super) fn on_failure(
        this: &Arc<Shared>,
        doorbell: u32,
        handler: FailureHandler,
    ) -> Result<(), SessionError> {
        let known = this.failures(doorbell)?;
        if this.doorbell(doorbell)?.on_failure.set(handler).is_err() {
            return Ok(());
        }
        let shared = Arc::clone(this);
        let thread = std::thread::Builder::new().name("expertd-failures".to_owned());
        let started = thread.spawn(move || shared.look_for_failures(doorbell, known, handler));
        started
            .map(drop)
            .map_err(|error| SessionError::Device(format!("a thread cannot be started: {error}")))
    }

    /// Calls the handler once the service has failed more than `known` calls.
    fn look_for_failures(&self, doorbell: u32, known: u64, handler: FailureHandler) {
        loop {
            // Read first: a service that drains fails the last calls before it ends the session.
            let is_over = self.is_dropped.load(Ordering::Acquire) || self.has_ended.load(Ordering::Acquire);
            if self.control.failures(doorbell) > known {
                let record = self.control.status(doorbell).map(|status| status.last_failure);
                handler(&record.map_or_else(String::new, |record| CallFailure::of(&record).message));
                return;
            }
            if is_over {
                return;
            }
            std::thread::sleep(INTERVAL);
        }
    }

    /// Reads the socket until the session ends, then releases waiting streams until the session is dropped. Streams may hold calls
    /// that begin later, in graphs for example, so one release is not enough.
    pub(super) fn watch(&self, socket: &UnixStream, replies: &Sender<Vec<u8>>) {
        let reason = loop {
            match socket::receive(socket, MAX_SERVICE_FRAME) {
                Ok(Some((frame::ENDED | frame::REFUSED, text))) => {
                    break String::from_utf8_lossy(&text).into_owned();
                }
                Ok(Some((frame::PREPARED, payload))) => {
                    let _ = replies.send(payload);
                }
                Ok(Some(_)) => {}
                Ok(None) => break "the service closed the session's socket".to_owned(),
                Err(error) => break format!("the session's socket broke: {error}"),
            }
        };
        self.end(reason);
        self.release_until_dropped();
    }

    /// Releases waiting streams again and again until the session is dropped.
    pub(super) fn release_until_dropped(&self) {
        while !self.is_dropped.load(Ordering::Acquire) {
            for doorbell in 0..self.control.doorbells() {
                self.release(doorbell);
            }
            std::thread::sleep(INTERVAL);
        }
    }

    /// Releases a stream that waits for a doorbell's call.
    fn release(&self, doorbell: u32) {
        let Ok(own) = self.doorbell(doorbell) else { return };
        if self.control.completion(doorbell) != PENDING {
            return;
        }
        if self.has_ended.load(Ordering::Acquire)
            && let Some(handler) = own.on_failure.get()
        {
            handler(&self.reason());
        }
        // Counted before the release, so that work after the stream's wait sees the count.
        own.released.fetch_add(1, Ordering::AcqRel);
        self.control.release(doorbell);
    }
}

#[cfg(test)]
mod tests;
