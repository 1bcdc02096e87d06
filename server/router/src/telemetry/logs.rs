//! Structured logs on standard error: text for people, JSON for machines. Request and step ids are in the spans.
//!
//! A thread of its own writes them. If standard error is closed, full or blocked, lines are dropped and counted; threads
//! that log never wait and never fail.

use std::io::{self, IsTerminal, Write};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use metrics::counter;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

use super::names;

/// Capacity of the queue, in lines.
const QUEUE_LINES: usize = 1024;
/// The longest line, bytes.
const MAX_LINE_BYTES: usize = 8 << 10;
/// Longest wait for queued lines at the end of the process.
const FLUSH: Duration = Duration::from_millis(500);

/// The log queue of this process.
static QUEUE: OnceLock<LogQueue> = OnceLock::new();

/// A queue of lines for standard error.
#[derive(Clone)]
struct LogQueue {
    lines: SyncSender<Vec<u8>>,
    /// Number of lines queued or being written.
    waiting: std::sync::Arc<AtomicUsize>,
}

impl LogQueue {
    /// Starts the thread that writes to `out`.
    fn start(out: impl Write + Send + 'static) -> io::Result<LogQueue> {
        let (lines, queued) = sync_channel(QUEUE_LINES);
        let waiting = std::sync::Arc::new(AtomicUsize::new(0));
        let written = std::sync::Arc::clone(&waiting);
        std::thread::Builder::new()
            .name("logs".to_owned())
            .spawn(move || write_all(&queued, out, &written))?;
        Ok(LogQueue { lines, waiting })
    }

    fn send(&self, line: &[u8]) {
        let line = match line.get(..MAX_LINE_BYTES) {
            Some(start) => [start, b"...\n"].concat(),
            None => line.to_vec(),
        };
        self.waiting.fetch_add(1, Ordering::Relaxed);
        if self.lines.try_send(line).is_err() {
            self.waiting.fetch_sub(1, Ordering::Relaxed);
            counter!(names::LOG_LINES_DROPPED_TOTAL).increment(1);
        }
    }

    fn flush(&self, deadline: Instant) {
        while self.waiting.load(Ordering::Relaxed) > 0 && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn write_all(queued: &Receiver<Vec<u8>>, mut out: impl Write, waiting: &AtomicUsize) {
    while let Ok(line) = queued.recv() {
        if out.write_all(&line).is_err() {
            counter!(names::LOG_LINES_DROPPED_TOTAL).increment(1);
        }
        waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Writer of one event; each call receives a whole line.
struct LineWriter<'a>(&'a LogQueue);

impl Write for LineWriter<'_> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.0.send(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for LogQueue {
    type Writer = LineWriter<'a>;

    fn make_writer(&'a self) -> LineWriter<'a> {
        LineWriter(self)
    }
}

/// Writes a line for the user to standard error. Waits briefly at most, and never fails.
pub fn tell(line: &str) {
    match QUEUE.get() {
        Some(queue) => {
            queue.send(format!("{line}\n").as_bytes());
            queue.flush(Instant::now() + FLUSH);
        }
        None => _ = writeln!(io::stderr(), "{line}"),
    }
}

/// Waits briefly until all lines are written, at the end of the process.
pub fn flush_logs() {
    if let Some(queue) = QUEUE.get() {
        queue.flush(Instant::now() + FLUSH);
    }
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
pub enum LogError {
    /// The filter does not parse.
    #[error(
        "--log {filter:?}: {reason}; expected a level (error, warn, info, debug, trace) or directives such as `info,expertd::scheduler=debug`"
    )]
    Filter {
        /// The filter.
        filter: String,
        /// The parser's error.
        reason: String,
    },
    /// The thread that writes cannot be started.
    #[error("cannot start the thread that writes logs: {0}")]
    Thread(io::Error),
    /// A subscriber is already installed.
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
    let queue = LogQueue::start(io::stderr()).map_err(LogError::Thread)?;
    let queue = QUEUE.get_or_init(|| queue).clone();
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

    /// Without a reader, writers continue and lines are dropped; queued lines are written once there is a reader.
    #[test]
    fn a_reader_that_stands_still_holds_nothing_up() {
        let (reader, writer) = io::pipe().expect("a pipe");
        let queue = LogQueue::start(writer).expect("a thread");
        let line = [&[b'x'; 4000][..], b"\n"].concat();
        for _ in 0..4 * QUEUE_LINES {
            LineWriter(&queue).write_all(&line).expect("never fails");
        }
        assert!(queue.waiting.load(Ordering::Relaxed) <= QUEUE_LINES + 1);
        let begun = Instant::now();
        queue.flush(begun + Duration::from_millis(20));
        let lines = std::thread::spawn(move || io::BufRead::lines(io::BufReader::new(reader)).count());
        queue.flush(Instant::now() + Duration::from_secs(60));
        drop(queue);
        let lines = lines.join().expect("no panic");
        assert!((QUEUE_LINES..4 * QUEUE_LINES).contains(&lines), "{lines}");
    }

    #[test]
    fn a_closed_reader_and_long_lines_do_no_harm() {
        let (reader, writer) = io::pipe().expect("a pipe");
        drop(reader);
        let queue = LogQueue::start(writer).expect("a thread");
        LineWriter(&queue).write_all(&[b'y'; 3 * MAX_LINE_BYTES]).expect("never fails");
        queue.flush(Instant::now() + Duration::from_secs(60));
        assert_eq!(queue.waiting.load(Ordering::Relaxed), 0);
    }
}
