//! Decode: a worker's requests walk all layers in order, as an engine does for each new token of its sequences.

use std::time::{Duration, Instant};

use crate::load::Load;

/// One worker's walk through the layers, again and again.
#[derive(Debug)]
pub struct Walk {
    /// Layers of a walk; 0 if requests do not walk.
    layers: usize,
    /// Layers behind.
    done: usize,
    current: Option<Current>,
}

/// A walk under way.
#[derive(Clone, Copy, Debug)]
struct Current {
    began: Instant,
    measured: bool,
    /// When the present call began.
    call_began: Instant,
    /// Time of the calls that have ended.
    in_calls: Duration,
    has_failed: bool,
}

impl Walk {
    /// A walk that has not begun.
    #[must_use]
    pub fn new(load: &Load) -> Walk {
        let layers = if load.workload.walks() { load.workload.layers.len() } else { 0 };
        Walk { layers, done: 0, current: None }
    }

    /// The request of the next layer begins.
    pub fn begin(&mut self, now: Instant, measured: bool) {
        if self.layers == 0 {
            return;
        }
        let first =
            Current { began: now, measured, call_began: now, in_calls: Duration::ZERO, has_failed: false };
        self.current.get_or_insert(first).call_began = now;
    }

    /// That request of `tokens` rows has ended; the end of the last layer's ends the walk. Walks with a failed call are counted apart: an
    /// engine would have to take that step again.
    pub fn end(&mut self, load: &Load, worker: u64, tokens: u32, answered: bool) {
        let Some(current) = &mut self.current else { return };
        let (now, layer) = (Instant::now(), load.workload.layers[self.done].layer);
        let took = now.saturating_duration_since(current.call_began);
        current.in_calls += took;
        current.has_failed |= !answered;
        let mut stats = load.recorder.of(worker);
        if answered && current.measured {
            stats.layer(layer, took);
        }
        self.done += 1;
        if self.done < self.layers {
            return;
        }
        self.done = 0;
        let Some(walk) = self.current.take().filter(|walk| walk.measured) else { return };
        if walk.has_failed {
            stats.walks_failed += 1;
        } else {
            stats.walk(tokens, now.saturating_duration_since(walk.began), walk.in_calls);
        }
        drop(stats);
        load.progress.walked(walk.has_failed);
    }
}
