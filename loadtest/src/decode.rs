//! Decode: a worker's requests walk all layers in order, as an engine does for each new token of its sequences.

use std::time::Instant;

use crate::load::Load;

/// One worker's walk through the layers.
#[derive(Debug)]
pub struct Walk {
    /// Layers of a walk; 0 if requests do not walk.
    layers: usize,
    /// Layers behind.
    done: usize,
    began: Option<(Instant, bool)>,
}

impl Walk {
    /// A walk that has not begun.
    #[must_use]
    pub fn new(load: &Load) -> Walk {
        let layers = if load.workload.walks() { load.workload.layers.len() } else { 0 };
        Walk { layers, done: 0, began: None }
    }

    /// The request of the next layer begins.
    pub fn begin(&mut self, now: Instant, measured: bool) {
        if self.layers > 0 {
            self.began.get_or_insert((now, measured));
        }
    }

    /// That request has ended; the end of the last layer's ends the walk.
    pub fn end(&mut self, load: &Load, worker: u64) {
        if self.layers == 0 {
            return;
        }
        self.done += 1;
        if self.done == self.layers {
            self.done = 0;
            if let Some((began, true)) = self.began.take() {
                load.recorder.of(worker).walks.record(began.elapsed());
            }
        }
    }
}
