//! Dispatch and combine against a plain reference, with ranks that are threads.

mod exchange;
mod faults;
mod misuse;

use std::time::Duration;

use super::*;
use expertd_types::{ExpertId, Generation};

fn config(ranks: usize) -> EpConfig {
    EpConfig {
        ranks,
        rank: Rank(0),
        hidden: 5,
        max_top_k: 4,
        max_tokens_per_rank: 6,
        slots: 2,
        generation: Generation(3),
        wait_deadline: Duration::from_secs(60),
        spin: Duration::ZERO,
        poison: true,
    }
}

/// One rank's tokens in one exchange.
#[derive(Clone, Debug)]
struct Tokens {
    count: usize,
    ids: Vec<i32>,
    weights: Vec<f32>,
    rows: Vec<f32>,
}

/// One exchange of the whole group.
#[derive(Clone, Debug)]
struct Step {
    owners: ExpertOwners,
    k: usize,
    ranks: Vec<Tokens>,
}

/// The stand-in for expert `id`, applied to element `i` of a row: cheap, different for each expert, and rounded to f32.
fn expert(id: i32, weight: f32, x: f32, i: usize) -> f32 {
    weight * (x * (0.37 + id as f32 * 0.61) + (i as f32 - id as f32) * 0.013)
}

/// Sums the outputs of the experts that `mine` selects, in the order of the choices.
fn partial(ids: &[i32], weights: &[f32], row: &[f32], mine: impl Fn(i32) -> bool, out: &mut [f32]) {
    out.fill(0.0);
    for (&id, &weight) in ids.iter().zip(weights).filter(|(id, _)| mine(**id)) {
        for (i, (out, &x)) in out.iter_mut().zip(row).enumerate() {
            *out += expert(id, weight, x, i);
        }
    }
}

impl Step {
    /// Whether rank `owner` computes expert `id` for token `t` of rank `source`.
    fn computes(&self, owner: Rank, id: i32, source: usize, t: usize) -> bool {
        let Ok(id) = u32::try_from(id) else { return false };
        let copies = self.owners.of(ExpertId(id)).expect("an expert");
        copies[(source + t) % copies.len()] == owner
    }
}

fn reference(step: &Step, rank: usize, hidden: usize) -> Vec<f32> {
    let tokens = &step.ranks[rank];
    let mut out = vec![0.0; tokens.count * hidden];
    let mut part = vec![0.0; hidden];
    for (t, out) in out.chunks_exact_mut(hidden).enumerate() {
        let (ids, weights) = (&tokens.ids[t * step.k..][..step.k], &tokens.weights[t * step.k..][..step.k]);
        let mut first = true;
        for owner in (0..step.ranks.len() as u32).map(Rank) {
            let mine = |id: i32| step.computes(owner, id, rank, t);
            if ids.iter().any(|&id| mine(id)) {
                partial(ids, weights, &tokens.rows[t * hidden..][..hidden], mine, &mut part);
                out.iter_mut().zip(&part).for_each(|(o, p)| *o = if first { *p } else { *o + p });
                first = false;
            }
        }
    }
    out
}

fn routing(step: &Step, rank: usize) -> HostRouting<'_> {
    let tokens = &step.ranks[rank];
    HostRouting {
        owners: &step.owners,
        turn: rank,
        tokens: tokens.count,
        k: step.k,
        ids: &tokens.ids,
        weights: &tokens.weights,
    }
}

/// Runs the experts phase: checks the received rows and writes partial rows.
fn run_experts(group: &mut CpuGroup, slot: Slot, step: &Step) {
    let (hidden, me) = (group.config.hidden, group.config.rank);
    let received = group.received(slot).expect("ready");
    assert_eq!(received.len(), step.ranks.len());
    for (source, batch) in received.enumerate() {
        let sent = &step.ranks[source];
        let wanted: Vec<usize> = (0..sent.count)
            .filter(|t| {
                let ids = &sent.ids[t * step.k..][..step.k];
                ids.iter().any(|&id| step.computes(me, id, source, *t))
            })
            .collect();
        assert_eq!((batch.source, batch.k), (Rank(source as u32), step.k));
        assert_eq!(batch.rows.len(), wanted.len() * hidden, "each row once, and no other rows");
        assert_eq!(batch.partials.len(), batch.rows.len());
        assert_eq!((batch.ids.len(), batch.weights.len()), (wanted.len() * step.k, wanted.len() * step.k));
        for (row, t) in wanted.into_iter().enumerate() {
            let x = &batch.rows[row * hidden..][..hidden];
            assert_eq!(x, &sent.rows[t * hidden..][..hidden]);
            let (ids, weights) =
                (&batch.ids[row * step.k..][..step.k], &batch.weights[row * step.k..][..step.k]);
            for j in 0..step.k {
                let id = sent.ids[t * step.k + j];
                let mine = step.computes(me, id, source, t);
                let expected = if mine { (id, sent.weights[t * step.k + j]) } else { (NO_EXPERT, 0.0) };
                assert_eq!((ids[j], weights[j]), expected);
            }
            partial(ids, weights, x, |id| id >= 0, &mut batch.partials[row * hidden..][..hidden]);
        }
    }
}

fn no_tokens(ranks: usize) -> Step {
    let none = Tokens { count: 0, ids: vec![], weights: vec![], rows: vec![] };
    Step { owners: ExpertOwners::single([Rank(0)]), k: 1, ranks: vec![none; ranks] }
}

/// Runs a complete exchange of one rank without tokens.
fn empty_exchange(group: &mut CpuGroup, slot: Slot) -> Result<(), EpError> {
    let step = no_tokens(1);
    group.prepare(slot, routing(&step, 0))?;
    group.dispatch(slot, &[], None)?;
    group.combine(slot, &mut [], None)
}
