//! Open loop: when requests arrive.
//!
//! The schedule does not depend on the answers. Who measures from the intended arrival sees the waiting that a slow
//! service causes, even while the client itself is held up (no coordinated omission).

use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng as _};
use rand_distr::{Distribution as _, Exp1};
use tokio::sync::mpsc::UnboundedSender;

use crate::window::Window;

/// The system's sleep may be this late; the rest is spun.
const SLEEP_ERROR: Duration = Duration::from_micros(80);

/// A Poisson process: intended arrival times with exponential gaps, from `start` on.
#[derive(Debug)]
pub struct Poisson<R> {
    next: Instant,
    mean_gap_seconds: f64,
    rng: R,
}

impl<R: Rng> Poisson<R> {
    /// `rate` arrivals per second.
    pub fn new(start: Instant, rate: f64, rng: R) -> Poisson<R> {
        Poisson { next: start, mean_gap_seconds: 1.0 / rate, rng }
    }
}

impl<R: Rng> Iterator for Poisson<R> {
    type Item = Instant;

    fn next(&mut self) -> Option<Instant> {
        let gap: f64 = Exp1.sample(&mut self.rng);
        // A day without arrivals is as good as none, and does not overflow.
        self.next += Duration::from_secs_f64((gap * self.mean_gap_seconds).min(86_400.0));
        Some(self.next)
    }
}

/// An arrival: when, and whether it is measured.
#[derive(Clone, Copy, Debug)]
pub struct Arrival {
    /// The intended time.
    pub intended: Instant,
    /// Outside the warm-up.
    pub measured: bool,
}

/// Starts a thread that sends each arrival at its time, in turn to each of `workers`, until the window closes.
///
/// A thread of its own, because timers of the runtime are exact to a millisecond only.
pub fn start(window: Arc<Window>, rate: f64, seed: u64, workers: Vec<UnboundedSender<Arrival>>) {
    std::thread::spawn(move || {
        let arrivals = Poisson::new(window.start, rate, SmallRng::seed_from_u64(seed));
        for (intended, worker) in arrivals.zip(workers.iter().cycle()) {
            let Some(measured) = window.admit(intended) else { break };
            wait_until(intended);
            if worker.send(Arrival { intended, measured }).is_err() {
                break;
            }
        }
    });
}

fn wait_until(when: Instant) {
    if let Some(left) = when.checked_duration_since(Instant::now())
        && left > SLEEP_ERROR
    {
        std::thread::sleep(left - SLEEP_ERROR);
    }
    while Instant::now() < when {
        std::thread::yield_now();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Bounds;

    #[test]
    fn gaps_are_exponential() {
        let start = Instant::now();
        let rate = 1000.0;
        let arrivals = Poisson::new(start, rate, SmallRng::seed_from_u64(3)).take(50_000).collect::<Vec<_>>();
        let gaps =
            arrivals.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64() * rate).collect::<Vec<_>>();
        let count = gaps.len() as f64;
        let mean = gaps.iter().sum::<f64>() / count;
        let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / count;
        let long = gaps.iter().filter(|&&gap| gap > 1.0).count() as f64 / count;
        assert!((mean - 1.0).abs() < 0.02, "mean {mean}");
        assert!((variance - 1.0).abs() < 0.05, "variance {variance}");
        assert!((long - (-1.0_f64).exp()).abs() < 0.01, "share of gaps beyond the mean {long}");
    }

    #[tokio::test]
    async fn arrivals_keep_their_times_when_nobody_takes_them() {
        let bounds = Bounds { warm_up: 0.0, duration: Some(30.0), requests: Some(200), give_up: 1.0 };
        let window = Arc::new(Window::open(&bounds, None));
        let (a, mut from_a) = tokio::sync::mpsc::unbounded_channel();
        let (b, mut from_b) = tokio::sync::mpsc::unbounded_channel();
        start(Arc::clone(&window), 2000.0, 5, vec![a, b]);
        let wanted = Poisson::new(window.start, 2000.0, SmallRng::seed_from_u64(5)).take(200);
        // Nothing is received for a while, and the times stay those of the schedule.
        tokio::time::sleep(Duration::from_millis(50)).await;
        let mut got = Vec::new();
        for _ in 0..100 {
            got.extend([from_a.recv().await, from_b.recv().await].into_iter().flatten());
        }
        assert_eq!(
            got.iter().map(|arrival| arrival.intended).collect::<Vec<_>>(),
            wanted.collect::<Vec<_>>()
        );
        assert!(from_a.recv().await.is_none(), "the window bounds the count");
    }
}
