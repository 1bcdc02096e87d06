//! Arrival times of an open loop.
//!
//! The schedule does not depend on the answers. Latencies measured from the intended arrival therefore include the
//! waiting that a slow service causes, even while the client itself is delayed (no coordinated omission).

use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng as _};
use rand_distr::{Distribution as _, Exp1};
use tokio::sync::mpsc::UnboundedSender;

use crate::period::LoadPeriod;

/// Possible delay of the system's sleep; the thread spins for the rest.
const SLEEP_ERROR: Duration = Duration::from_micros(80);

/// A Poisson process: intended arrival times with exponential gaps.
#[derive(Debug)]
pub struct Poisson<R> {
    next: Instant,
    mean_gap_seconds: f64,
    rng: R,
}

impl<R: Rng> Poisson<R> {
    /// Creates a process of `rate` arrivals per second, beginning at `start`.
    pub fn new(start: Instant, rate: f64, rng: R) -> Poisson<R> {
        Poisson { next: start, mean_gap_seconds: 1.0 / rate, rng }
    }
}

impl<R: Rng> Iterator for Poisson<R> {
    type Item = Instant;

    fn next(&mut self) -> Option<Instant> {
        let gap: f64 = Exp1.sample(&mut self.rng);
        // The gap is limited to a day, so that the addition does not overflow.
        self.next += Duration::from_secs_f64((gap * self.mean_gap_seconds).min(86_400.0));
        Some(self.next)
    }
}

/// An arrival of the schedule.
#[derive(Clone, Copy, Debug)]
pub struct Arrival {
    /// The intended time.
    pub intended: Instant,
    /// Whether the request is measured: false during the warm-up.
    pub measured: bool,
}

/// Starts a thread that sends each arrival at its time, to each of `workers` in turn, until no more requests may begin.
///
/// It is a thread because the runtime's timers are only exact to a millisecond.
pub fn start(period: Arc<LoadPeriod>, rate: f64, seed: u64, workers: Vec<UnboundedSender<Arrival>>) {
    std::thread::spawn(move || {
        let arrivals = Poisson::new(period.start, rate, SmallRng::seed_from_u64(seed));
        for (intended, worker) in arrivals.zip(workers.iter().cycle()) {
            let Some(measured) = period.admit(intended) else { break };
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
    async fn arrivals_keep_their_times_when_none_are_received() {
        let bounds = Bounds { warm_up: 0.0, duration: Some(30.0), requests: Some(200), give_up: 1.0 };
        let period = Arc::new(LoadPeriod::open(&bounds, None));
        let (a, mut from_a) = tokio::sync::mpsc::unbounded_channel();
        let (b, mut from_b) = tokio::sync::mpsc::unbounded_channel();
        start(Arc::clone(&period), 2000.0, 5, vec![a, b]);
        let wanted = Poisson::new(period.start, 2000.0, SmallRng::seed_from_u64(5)).take(200);
        // Nothing is received for a while; the times stay those of the schedule.
        tokio::time::sleep(Duration::from_millis(50)).await;
        let mut got = Vec::new();
        for _ in 0..100 {
            got.extend([from_a.recv().await, from_b.recv().await].into_iter().flatten());
        }
        assert_eq!(
            got.iter().map(|arrival| arrival.intended).collect::<Vec<_>>(),
            wanted.collect::<Vec<_>>()
        );
        assert!(from_a.recv().await.is_none(), "the period bounds the count");
    }
}
