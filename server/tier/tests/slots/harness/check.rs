//! The invariants that the documentation of [`slots`](expertd_tier::slots) states, by their numbers there.

use std::time::Duration;

use expertd_tier::slots::{MARGIN, SlotIndex, Upload};
use expertd_types::ExpertId;

use super::machine::{Machine, Table};

impl Machine {
    /// Invariants 2, 3 and 7: the table of a layer names what slots hold, each slot once.
    pub fn check_table(&self, layer: usize) -> Result<(), String> {
        let id = self.layers[layer].layer;
        let mut named = vec![false; self.layers[layer].slots];
        for (expert, slot) in (0..).map(ExpertId).zip(self.cache.resident(id)) {
            let Some(slot) = *slot else { continue };
            if !self.layers[layer].on_cpus.contains(&expert) {
                return Err(format!("the table of layer {id} names expert {expert}, which no CPU rank owns"));
            }
            let content = self.contents[layer][slot.0 as usize];
            if content != Some((expert, self.weights)) {
                return Err(format!(
                    "the table of layer {id} names slot {} for expert {expert} of weights {}, but it holds {content:?}",
                    slot.0, self.weights
                ));
            }
            if std::mem::replace(&mut named[slot.0 as usize], true) {
                return Err(format!("the table of layer {id} names slot {} twice", slot.0));
            }
        }
        Ok(())
    }

    /// Records the slots that an expert has just lost, with the scores of the time. No expert may have got one.
    pub fn note_losses(&mut self, layer: usize, before: &Table) -> Result<(), String> {
        let id = self.layers[layer].layer;
        let scores: Vec<Option<f32>> = (0..self.layers[layer].experts as u32)
            .map(|expert| self.cache.score(id, ExpertId(expert)))
            .collect();
        for (now, earlier) in self.cache.resident(id).iter().zip(before) {
            match (earlier, now) {
                (Some(slot), None) => {
                    self.lost.insert((id, *slot), scores.clone());
                }
                (earlier, now) if earlier == now => {}
                _ => {
                    return Err(format!(
                        "a proposal moved an expert of layer {id} from {earlier:?} to {now:?}"
                    ));
                }
            }
        }
        Ok(())
    }

    /// Invariants 1, 3, 4 and 6.
    pub fn check_upload(&mut self, layer: usize, upload: Upload) -> Result<(), String> {
        let Upload { layer: id, expert, slot, evicts, .. } = upload;
        let of = &self.layers[layer];
        if id != of.layer || !of.on_cpus.contains(&expert) || slot.0 as usize >= of.slots {
            return Err(format!("{upload:?} does not fit layer {}", of.layer));
        }
        let names = |table: &[Option<SlotIndex>]| table.contains(&Some(slot));
        if let Some(reader) = self.steps.iter().find(|step| step.layer == id && names(&step.table)) {
            return Err(format!("{upload:?} overwrites a slot that step {} may still read", reader.step));
        }
        let table = self.cache.resident(id);
        if names(table) || table[expert.index()].is_some() {
            return Err(format!("{upload:?}, but the table names its slot or its expert"));
        }
        let others = || self.copies.iter().filter(|(other, _)| other.layer == id);
        if others().any(|(other, _)| other.slot == slot) {
            return Err(format!("{upload:?}, but another copy may still write that slot"));
        }
        if others().any(|(other, weights)| other.expert == expert && *weights == self.weights) {
            return Err(format!("{upload:?}, but that expert is being copied already"));
        }
        let limit = self.policy.max_uploads_per_step;
        if others().count() >= limit {
            return Err(format!("{upload:?} is one more than {limit} of the layer"));
        }
        let scores = self.lost.remove(&(id, slot));
        match (evicts, scores) {
            (None, None) => Ok(()),
            (Some(victim), Some(scores)) => match (scores[victim.index()], scores[expert.index()]) {
                (Some(lower), Some(higher)) if higher > lower * MARGIN => Ok(()),
                found => {
                    Err(format!("{upload:?} is not worth it: scores of the victim and the expert {found:?}"))
                }
            },
            (evicts, lost) => {
                Err(format!("{upload:?} evicts {evicts:?}; an expert has lost the slot: {}", lost.is_some()))
            }
        }
    }

    /// After the report of a copy its expert is in the table, or its slot is in no table.
    pub fn check_report(&self, layer: usize, upload: Upload, is_of_use: bool) -> Result<(), String> {
        let table = self.cache.resident(upload.layer);
        let is_named = table[upload.expert.index()] == Some(upload.slot);
        if is_named != is_of_use {
            return Err(format!(
                "after its report {upload:?} is in the table: {is_named}, expected {is_of_use}"
            ));
        }
        self.check_table(layer)
    }
}

/// Invariant 5: bytes of uploads in any time.
#[derive(Debug)]
pub struct Budget {
    burst: u64,
    rate: u64,
    spent: Vec<(Duration, u64)>,
}

impl Budget {
    pub fn new(burst: u64, rate: u64) -> Budget {
        Budget { burst, rate, spent: Vec::new() }
    }

    /// Most bytes in `time`.
    fn most(&self, time: Duration) -> f64 {
        self.burst as f64 + self.rate as f64 * time.as_secs_f64() * (1.0 + 1e-9)
    }

    pub fn spend(&mut self, now: Duration, bytes: u64) -> Result<(), String> {
        self.spent.push((now, bytes));
        match self.excess(now, 0) {
            None => Ok(()),
            Some((time, spent)) => Err(format!(
                "{spent} bytes of uploads began within {time:?}, allowed are {} a second and a burst of {}",
                self.rate, self.burst
            )),
        }
    }

    /// Whether an upload of `bytes` would be too much now.
    pub fn is_short(&self, now: Duration, bytes: u64) -> bool {
        self.rate > 0 && self.excess(now, bytes).is_some()
    }

    /// A time up to now in which too much is spent if `more` bytes are.
    fn excess(&self, now: Duration, more: u64) -> Option<(Duration, u64)> {
        let mut spent = more;
        self.spent.iter().rev().find_map(|&(at, bytes)| {
            spent += bytes;
            (spent as f64 > self.most(now - at)).then_some((now - at, spent))
        })
    }
}
