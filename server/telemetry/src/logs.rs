//! Structured logs on standard error: text for people, JSON for machines. Request and step ids are in the spans.
//!
//! A thread of its own writes them. If standard error is blocked, lines are dropped and counted; threads that log never wait
//! and never fail.

use std::io::{self, IsTerminal, Write};
use std::sync::{Mutex, OnceLock, PoisonError};

use metrics::counter;
use tracing_appender::non_blocking::{NonBlocking, NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::EnvFilter;

use super::names;

/// Capacity of the queue, in lines.
const QUEUE_LINES: usize = 1024;

/// The log queue of this process.
static QUEUE: OnceLock<NonBlocking> = OnceLock::new();
/// Writes the queued lines when it is dropped.
static GUARD: Mutex<Option<WorkerGuard>> = Mutex::new(None);

/// Writes a line for the user to standard error. Never waits and never fails; [`flush_logs`] must follow before the process ends.
pub fn tell(line: &str) {
    let line = format!("{line}\n");
    let _ = match QUEUE.get() {
        Some(queue) => queue.clone().write_all(line.as_bytes()),
        None => io::stderr().write_all(line.as_bytes()),
    };
}

/// Waits briefly until all lines are written, at the end of the process. Later lines are dropped.
pub fn flush_logs() {
    drop(GUARD.lock().unwrap_or_else(PoisonError::into_inner).take());
}

/// Sets the counter of dropped lines.
pub(super) fn record_dropped_lines() {
    if let Some(queue) = QUEUE.get() {
        counter!(names::LOG_LINES_DROPPED_TOTAL).absolute(queue.error_counter().dropped_lines() as u64);
    }
}

/// A queue of lines for `out`, and the guard of the thread that writes them.
fn queue(out: impl Write + Send + 'static) -> (NonBlocking, WorkerGuard) {
    NonBlockingBuilder::default()
        .lossy(true)
        .buffered_lines_limit(QUEUE_LINES)
        .thread_name("logs")
        .finish(out)
}

/// Format of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// One readable line per event.
    #[default]
    Text,
    /// One JSON object per event.
    Json,
}

/// Why logs could not be set up.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum LogError {
    #[error(
        "--log {filter:?}: {reason}; expected a level (error, warn, info, debug, trace) or directives such as `info,expertd_core::steps=debug`"
    )]
    Filter { filter: String, reason: String },
    #[error("logs are already set up in this process")]
    Installed,
}

/// Sets up the logs of this process: `filter` is a level or a list of `tracing` directives.
///
/// # Errors
/// [`LogError`] if the filter does not parse or logs are already set up.
pub fn init_logs(filter: &str, format: LogFormat) -> Result<(), LogError> {
    let parsed = EnvFilter::try_new(filter)
        .map_err(|error| LogError::Filter { filter: filter.to_owned(), reason: error.to_string() })?;
    let (queue, guard) = queue(io::stderr());
    if QUEUE.set(queue.clone()).is_err() {
        return Err(LogError::Installed);
    }
    *GUARD.lock().unwrap_or_else(PoisonError::into_inner) = Some(guard);
    let builder = tracing_subscriber::fmt()
        .with_env_filter(parsed)
        .with_writer(queue)
        .with_ansi(std::io::stderr().is_terminal());
    match format {
        LogFormat::Text => builder.with_target(false).try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    }
    .map_err(|_| LogError::Installed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bad_filter_says_what_is_expected() {
        let error = init_logs("expertd=loud", LogFormat::Text).expect_err("no such level");
        assert!(error.to_string().contains("expected a level"), "{error}");
    }

    /// Without a reader, writers continue and lines are dropped and counted; queued lines are written once there is a reader.
    #[test]
    fn a_reader_that_stands_still_holds_nothing_up() {
        let (reader, writer) = io::pipe().expect("a pipe");
        let (mut lines, guard) = queue(writer);
        let line = [&[b'x'; 4000][..], b"\n"].concat();
        for _ in 0..4 * QUEUE_LINES {
            lines.write_all(&line).expect("never fails");
        }
        let dropped = lines.error_counter().dropped_lines();
        let read = std::thread::spawn(move || io::BufRead::lines(io::BufReader::new(reader)).count());
        drop((guard, lines));
        assert_eq!(read.join().expect("no panic") + dropped, 4 * QUEUE_LINES);
        assert!(dropped > 2 * QUEUE_LINES, "{dropped}");
    }
}
