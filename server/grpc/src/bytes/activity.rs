//! The progress of one connection, and the time limits that end it.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::time::{Duration, Instant};

/// Time limits of a connection; the service ends connections that exceed them.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionTimeouts {
    /// For the TLS handshake, and from then to the first call; if credentials are required, to the first authenticated call.
    pub silent: Duration,
    /// For the transfer of a message or an answer, in addition to `bytes / min_bytes_per_second`.
    pub stalled: Duration,
    /// The lowest transfer rate that counts as progress.
    pub min_bytes_per_second: usize,
    /// Without a message or a new call. The connection is then closed (GOAWAY), and ended `silent` later.
    pub idle: Duration,
    /// Age at which a connection is closed (GOAWAY). Its calls finish.
    pub max_age: Duration,
}

impl Default for ConnectionTimeouts {
    fn default() -> ConnectionTimeouts {
        ConnectionTimeouts {
            silent: Duration::from_secs(10),
            stalled: Duration::from_secs(30),
            min_bytes_per_second: 1 << 20,
            idle: Duration::from_secs(300),
            max_age: Duration::from_secs(3600),
        }
    }
}

impl ConnectionTimeouts {
    /// Longest time that the transfer of `bytes` may take.
    pub(crate) fn transfer(&self, bytes: usize) -> Duration {
        self.stalled + Duration::from_secs_f64(bytes as f64 / self.min_bytes_per_second as f64)
    }

    /// Interval at which a connection is checked.
    pub(crate) fn round(&self) -> Duration {
        let shortest = self.silent.min(self.stalled).min(self.idle).min(self.max_age);
        (shortest / 4).clamp(Duration::from_millis(5), Duration::from_secs(1))
    }
}

/// Decision about a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The connection stays.
    Keep,
    /// The connection takes no new calls and finishes those in flight. Holds the reason.
    Close(&'static str),
    /// The connection ends at once. Holds the reason.
    End(&'static str),
}

/// Progress of one connection. Times are milliseconds since `opened`.
pub(crate) struct Activity {
    opened: Instant,
    called: AtomicBool,
    authenticated: AtomicBool,
    /// Messages from their first byte until their answers have left.
    busy: AtomicUsize,
    /// Time of the last call or message.
    active_at: AtomicU64,
    /// Frames of answers that the transport holds, and answers that it has yet to take.
    leaving: AtomicUsize,
    leaving_bytes: AtomicUsize,
    /// Time at which one of `leaving` last began without others, or ended.
    progress_at: AtomicU64,
}

impl Activity {
    pub(crate) fn new() -> Arc<Activity> {
        Arc::new(Activity {
            opened: Instant::now(),
            called: AtomicBool::new(false),
            authenticated: AtomicBool::new(false),
            busy: AtomicUsize::new(0),
            active_at: AtomicU64::new(0),
            leaving: AtomicUsize::new(0),
            leaving_bytes: AtomicUsize::new(0),
            progress_at: AtomicU64::new(0),
        })
    }

    fn now(&self) -> u64 {
        u64::try_from(self.opened.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Notes a call.
    pub(crate) fn call(&self) {
        self.called.store(true, Relaxed);
        self.active_at.store(self.now(), Relaxed);
    }

    /// Notes a call with valid credentials.
    pub(crate) fn authenticate(&self) {
        self.authenticated.store(true, Relaxed);
    }

    /// Counts a message until the guard is dropped.
    pub(crate) fn busy(self: &Arc<Self>) -> Busy {
        self.busy.fetch_add(1, Relaxed);
        self.active_at.store(self.now(), Relaxed);
        Busy(Arc::clone(self))
    }

    /// Counts `bytes` of an answer until the guard is dropped.
    pub(crate) fn leaving(self: &Arc<Self>, bytes: usize) -> LeavingBytes {
        // Before it is counted: a verdict in between would take the time since an earlier answer for a stall of this one.
        if self.leaving.load(Relaxed) == 0 {
            self.progress_at.store(self.now(), Relaxed);
        }
        self.leaving_bytes.fetch_add(bytes, Relaxed);
        self.leaving.fetch_add(1, Release);
        LeavingBytes { activity: Arc::clone(self), bytes }
    }

    /// Decides about the connection. If `must_authenticate` is set, it ends unless a call had valid credentials in time.
    pub(crate) fn verdict(
        &self,
        timeouts: &ConnectionTimeouts,
        must_authenticate: bool,
        max_age: Duration,
    ) -> Verdict {
        self.verdict_at(self.opened.elapsed(), timeouts, must_authenticate, max_age)
    }

    /// The same at an age of the connection.
    fn verdict_at(
        &self,
        age: Duration,
        timeouts: &ConnectionTimeouts,
        must_authenticate: bool,
        max_age: Duration,
    ) -> Verdict {
        let since = |at: &AtomicU64| age.saturating_sub(Duration::from_millis(at.load(Relaxed)));
        if age > timeouts.silent {
            if !self.called.load(Relaxed) {
                return Verdict::End("silent");
            }
            if must_authenticate && !self.authenticated.load(Relaxed) {
                return Verdict::End("unauthenticated");
            }
        }
        if self.leaving.load(Acquire) > 0 {
            let transfer = timeouts.transfer(self.leaving_bytes.load(Relaxed));
            if since(&self.progress_at) > transfer {
                return Verdict::End("stalled_answer");
            }
        }
        let quiet = since(&self.active_at);
        if self.busy.load(Relaxed) == 0 && quiet > timeouts.idle {
            // Calls without messages, such as a silent stream, do not keep a closed connection open.
            let over = quiet > timeouts.idle + timeouts.silent;
            return if over { Verdict::End("idle") } else { Verdict::Close("idle") };
        }
        if age > max_age { Verdict::Close("age") } else { Verdict::Keep }
    }
}

/// Counts a message.
pub(crate) struct Busy(Arc<Activity>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.active_at.store(self.0.now(), Relaxed);
        self.0.busy.fetch_sub(1, Relaxed);
    }
}

/// Counts bytes of an answer.
pub(crate) struct LeavingBytes {
    activity: Arc<Activity>,
    bytes: usize,
}

impl Drop for LeavingBytes {
    fn drop(&mut self) {
        self.activity.progress_at.store(self.activity.now(), Relaxed);
        self.activity.leaving_bytes.fetch_sub(self.bytes, Relaxed);
        self.activity.leaving.fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Far more time than a test takes.
    const HOUR: Duration = Duration::from_secs(3600);
    const NEVER: Duration = Duration::from_secs(3600 * 1000);

    #[test]
    fn a_quiet_connection_is_closed_and_then_ended() {
        let timeouts =
            ConnectionTimeouts { idle: 2 * HOUR, silent: 20 * HOUR, ..ConnectionTimeouts::default() };
        let activity = Activity::new();
        let at = |age: Duration, must_authenticate: bool| {
            activity.verdict_at(age, &timeouts, must_authenticate, NEVER)
        };
        activity.call();
        assert_eq!(at(HOUR, false), Verdict::Keep);
        let busy = activity.busy();
        assert_eq!(at(4 * HOUR, false), Verdict::Keep);
        assert_eq!(activity.verdict_at(HOUR, &timeouts, false, Duration::ZERO), Verdict::Close("age"));
        drop(busy);
        assert_eq!(at(HOUR, false), Verdict::Keep);
        assert_eq!(at(4 * HOUR, false), Verdict::Close("idle"));
        assert_eq!(at(24 * HOUR, false), Verdict::End("idle"));
        assert_eq!(at(24 * HOUR, true), Verdict::End("unauthenticated"));
        activity.authenticate();
        assert_eq!(at(24 * HOUR, true), Verdict::End("idle"));
        assert_eq!(activity.verdict(&timeouts, true, NEVER), Verdict::Keep);
    }

    #[test]
    fn a_connection_without_a_call_and_one_that_reads_no_answer_are_ended() {
        let timeouts = ConnectionTimeouts {
            silent: 2 * HOUR,
            stalled: 2 * HOUR,
            idle: NEVER,
            ..ConnectionTimeouts::default()
        };
        let activity = Activity::new();
        let at = |age: Duration| activity.verdict_at(age, &timeouts, false, NEVER);
        assert_eq!((at(HOUR), at(4 * HOUR)), (Verdict::Keep, Verdict::End("silent")));
        activity.call();
        let leaving = activity.leaving(1);
        assert_eq!((at(HOUR), at(4 * HOUR)), (Verdict::Keep, Verdict::End("stalled_answer")));
        drop(leaving);
        assert_eq!(at(4 * HOUR), Verdict::Keep);
    }

    /// The last answer left long ago when the next one begins.
    #[test]
    fn an_answer_that_begins_has_not_stalled() {
        let old = || {
            let activity = Activity::new();
            let opened = activity.opened.checked_sub(HOUR).unwrap();
            let activity = Activity { opened, ..Arc::into_inner(activity).unwrap() };
            activity.call();
            Arc::new(activity)
        };
        let connections: Vec<_> = (0..200).map(|_| old()).collect();
        let timeouts = ConnectionTimeouts::default();
        let judged = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for (at, connection) in connections.iter().enumerate() {
                    while judged.load(Acquire) <= at {
                        std::thread::yield_now();
                    }
                    drop(connection.leaving(1));
                }
            });
            for (at, connection) in connections.iter().enumerate() {
                judged.store(at + 1, Release);
                let begun = Instant::now();
                while begun.elapsed() < Duration::from_micros(100) {
                    assert_eq!(connection.verdict(&timeouts, false, NEVER), Verdict::Keep, "connection {at}");
                }
            }
        });
    }
}
