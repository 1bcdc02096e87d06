//! The rows of steps: staged or named when a step is launched, and taken to answers when it is complete.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use expertd_ipc::{MAX_RAISES, Raise};
use expertd_scheduler::{Fault, RankRows, RequestKey, Step, Time};
use expertd_types::StepId;

use super::{Launched, Processes};
use crate::backend::StepTiming;
use crate::cluster::{StepDone, channel_fault};
use crate::steps::active::{Active, IDS, Output, ROWS, TrialRow, WEIGHTS};
use crate::steps::caller::Raising;

/// A completed step that the metrics lack.
pub(super) struct Unrecorded {
    done: StepDone,
    elapsed: Duration,
    tokens_per_rank: Vec<usize>,
}

impl Processes {
    /// Copies the rows of a step to its slot and launches it.
    pub(super) fn stage(&mut self, step: &Step) -> Result<(), Fault> {
        let Processes { group: Some(group), active, launched, copier, shared, cluster, .. } = self else {
            return Ok(());
        };
        let formed = Instant::now();
        let mut tokens_per_rank = vec![0; cluster.shape.ranks as usize];
        for range in &step.rows {
            tokens_per_rank[range.rank.index()] += range.rows.len();
        }
        let top_k = step.kind.top_k;
        let is_trial = step.rows.iter().any(|range| range.key == RequestKey::TRIAL);
        let trial = is_trial.then(|| TrialRow::new(cluster.shape.hidden, top_k));
        let routed_by_gate = shared.top_k(step.kind.layer) == Some(top_k);
        let ranks = group.ranks_of(step.kind.layer);
        let mut forming = group.begin(step.slot, top_k);
        let mut staged = Vec::with_capacity(step.rows.len());
        for range in &step.rows {
            if let Some(trial) = trial.as_ref().filter(|_| range.key == RequestKey::TRIAL) {
                let rows = trial.rows(routed_by_gate);
                staged.push((range.key, forming.stage(range.rank, &rows).map_err(channel_fault)?));
            }
            let Some(active) = active.get(&range.key) else { continue };
            let rows = active.rows(range.rows.clone());
            staged.push((range.key, forming.stage(range.rank, &rows).map_err(channel_fault)?));
        }
        let raises = match may_raise(launched.iter().map(|earlier| (earlier.raises, earlier.ranks)), ranks) {
            true => whole_calls(&step.rows, active),
            false => None,
        };
        for raise in raises.iter().flatten() {
            forming.raise(*raise).map_err(channel_fault)?;
        }
        let raises = raises.is_some();
        forming.copy(copier);
        group.launch(step.id, step.slot, step.kind.layer, top_k, step.tokens, raises)?;
        tracing::debug!(step = %step.id, layer = %step.kind.layer, tokens = step.tokens, ranges = step.rows.len(), "step launched");
        launched.push_back(Launched { step: step.id, top_k, formed, staged, tokens_per_rank, ranks, raises });
        self.shared.note_steps(true);
        Ok(())
    }

    /// Appends the rows of a completed step to its requests' answers. Returns when the step ended.
    pub(super) fn keep_rows(&mut self, done: StepDone) -> Option<(StepId, Time)> {
        let at = self.launched.iter().position(|launched| launched.step == done.step)?;
        let launched = self.launched.remove(at)?;
        self.shared.note_steps(!self.launched.is_empty());
        let group = self.group.as_ref()?;
        // The time of a step ends here; copying its rows to the answers is not part of it.
        let now = Instant::now();
        let timing = StepTiming {
            step: done.step,
            tokens: done.tokens as u32,
            phases: done.phase_ns.map(Duration::from_nanos),
            computed: Duration::from_nanos(done.computed_ns()),
            slot_version: done.completions.first().map_or(0, |completion| completion.slot_version),
            formed: launched.formed,
            done: now,
        };
        // The ranges of one request are adjacent.
        let (mut keys, mut outputs, mut copies) = (Vec::new(), Vec::<Output>::new(), Vec::new());
        let mut first = 0;
        for (key, staged) in &launched.staged {
            // Skip rows of requests that ended meanwhile.
            let Some(active) = self.active.get_mut(key) else { continue };
            if keys.last() != Some(key) {
                active.add_timing(timing);
                if launched.raises {
                    active.set_raising(if done.is_after_end { Raising::KilledRank } else { Raising::Rank });
                }
                keys.push(*key);
                if !staged.is_attached() {
                    active.begin_output();
                }
                first = outputs.as_flattened().len();
                outputs.push(active.take_output());
            }
            if !staged.is_attached() {
                copies.push((first + ROWS, group.answer(staged)));
            }
            if active.request().return_routing {
                let (ids, weights) = group.routing(staged, launched.top_k);
                copies.extend([(first + IDS, ids), (first + WEIGHTS, weights)]);
            }
        }
        self.copier.append(&copies, outputs.as_flattened_mut());
        for (key, output) in keys.iter().zip(outputs) {
            if let Some(active) = self.active.get_mut(key) {
                active.put_output(output);
            }
        }
        self.shared.steps_total.fetch_add(1, Ordering::Relaxed);
        let (step, elapsed) = (done.step, now - launched.formed);
        self.unrecorded.push(Unrecorded { done, elapsed, tokens_per_rank: launched.tokens_per_rank });
        Some((step, self.shared.time(now)))
    }

    /// Records the metrics of completed steps, whose requests are answered by now: callers do not wait for it.
    pub(super) fn record_steps(&mut self) {
        for Unrecorded { done, elapsed, tokens_per_rank } in self.unrecorded.drain(..) {
            self.metrics.step(done.tokens, elapsed);
            let ranks = done.completions.iter().zip(&tokens_per_rank).enumerate();
            // Ranks that did not run the step have an empty record; so does a rank that was killed before it reported.
            for (rank, (completion, tokens)) in ranks.filter(|(_, (completion, _))| completion.sequence != 0)
            {
                let phases = completion.phase_ns.map(Duration::from_nanos);
                self.shared.copied_bytes.fetch_add(completion.copied_bytes, Ordering::Relaxed);
                self.metrics.rank(
                    rank,
                    *tokens as u64,
                    u64::from(completion.expert_rows),
                    completion.copied_bytes,
                    &phases,
                );
            }
        }
    }
}

/// Whether rank 0 may raise the completion words of a step that runs on the first `ranks` ranks. `earlier`: for each earlier step in
/// flight, whether rank 0 raises its words, and the number of its ranks.
///
/// Words are raised in the order of steps, because the router learns of the ends of steps in that order: a call must not be in flight
/// long after its client has gone on. In a mixed group a step whose layer is whole on the source ends before an earlier one that waits
/// for CPU ranks. The router raises the words of such a step and of those behind it.
fn may_raise(earlier: impl IntoIterator<Item = (bool, usize)>, ranks: usize) -> bool {
    earlier.into_iter().all(|(raises, of_earlier)| raises && of_earlier <= ranks)
}

/// The completion words of a step's calls, if each of them is a call of a CUDA session, has all its rows in the step, and no more
/// than [`MAX_RAISES`] words are to be raised.
fn whole_calls(rows: &[RankRows], active: &HashMap<RequestKey, Active>) -> Option<Vec<Raise>> {
    let mut raises = Vec::new();
    // The ranges of one request are adjacent.
    for ranges in rows.chunk_by(|a, b| a.key == b.key) {
        let rows = ranges.iter().map(|range| range.rows.len()).sum();
        raises.push(active.get(&ranges[0].key)?.raise(rows)?);
    }
    (1..=MAX_RAISES).contains(&raises.len()).then_some(raises)
}

#[cfg(test)]
mod tests {
    use super::may_raise;

    const WHOLE: usize = 1;
    const SPLIT: usize = 3;

    /// `[steps]`: whether rank 0 raises the words of each, where all are in flight and consist of calls whose words it can raise.
    fn raising(steps: &[usize]) -> Vec<bool> {
        let mut launched: Vec<(bool, usize)> = Vec::new();
        for &ranks in steps {
            launched.push((may_raise(launched.iter().copied(), ranks), ranks));
        }
        launched.into_iter().map(|(raises, _)| raises).collect()
    }

    #[test]
    fn words_are_raised_in_the_order_of_steps() {
        assert_eq!(raising(&[WHOLE, WHOLE, WHOLE]), [true, true, true]);
        assert_eq!(raising(&[SPLIT, SPLIT, SPLIT]), [true, true, true]);
        // The whole step ends first on the stream.
        assert_eq!(raising(&[WHOLE, SPLIT]), [true, true]);
        assert_eq!(raising(&[SPLIT, WHOLE]), [true, false]);
        assert_eq!(raising(&[WHOLE, SPLIT, WHOLE]), [true, true, false]);
        assert_eq!(raising(&[SPLIT, SPLIT, WHOLE]), [true, true, false]);
        // The router raises the words of the second step, so those of a third one have to wait for it.
        assert_eq!(raising(&[SPLIT, WHOLE, WHOLE]), [true, false, false]);
        assert_eq!(raising(&[SPLIT, WHOLE, SPLIT]), [true, false, false]);
    }

    #[test]
    fn no_step_raises_behind_one_whose_words_the_router_raises() {
        assert!(!may_raise([(false, WHOLE)], WHOLE));
        assert!(!may_raise([(true, SPLIT), (false, SPLIT)], SPLIT));
        assert!(may_raise([], WHOLE));
    }

    /// The order in which rank 0 ends steps, as its stream has them: the second half of a split step is behind every step that was
    /// launched before the sums of CPU ranks came.
    fn order_of_ends(steps: &[usize], sums: &[usize]) -> Vec<usize> {
        let launched = |step: usize| match steps[step] {
            WHOLE => step,
            // `sums[step]`: number of steps launched when its sums have come. Second halves are launched in order.
            _ => sums[..=step].iter().copied().max().unwrap_or(0).max(step),
        };
        let mut order: Vec<usize> = (0..steps.len()).collect();
        order.sort_by_key(|&step| (launched(step), steps[step] != WHOLE, step));
        order
    }

    /// Every sequence of up to four steps, and every time at which sums come: no word is raised before one of an earlier step.
    #[test]
    fn no_order_of_ends_raises_a_word_before_an_earlier_one() {
        for count in 1..=4_usize {
            for kinds in 0..1 << count {
                let steps: Vec<usize> =
                    (0..count).map(|step| if kinds >> step & 1 == 0 { WHOLE } else { SPLIT }).collect();
                let raises = raising(&steps);
                for times in 0..count.pow(count as u32) {
                    let sums: Vec<usize> =
                        (0..count).map(|step| times / count.pow(step as u32) % count).collect();
                    let told: Vec<usize> =
                        order_of_ends(&steps, &sums).into_iter().filter(|&step| raises[step]).collect();
                    assert!(told.is_sorted(), "{steps:?} with sums after {sums:?} raises {told:?}");
                    // All steps before a told one are told, too: those whose words the router raises come last.
                    assert!(raises.is_sorted_by_key(|&raises| !raises), "{steps:?}: {raises:?}");
                }
            }
        }
    }
}
