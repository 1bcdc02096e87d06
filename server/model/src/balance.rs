//! Placements that even out the load of ranks, computed from measured rows per expert.
//!
//! The method is that of EPLB (<https://github.com/deepseek-ai/EPLB>): spare places are given one by one to the expert with the most
//! rows per copy; then copies are placed in descending order of their rows, each on the rank with the fewest rows that has room
//! (longest processing time first: R. L. Graham, *Bounds on Multiprocessing Timing Anomalies*, 1969). Two things are added: moves and
//! swaps between the fullest rank and others while they lower the larger of the two, and several numbers of copies are tried, of
//! which the smallest is taken whose imbalance is close to the best. A placement is never worse than contiguous ranges for the
//! given rows.

use expertd_types::{LayerPlacement, Rank};

/// Number of different numbers of copies that are tried.
const TRIALS: usize = 16;
/// A placement with fewer copies is preferred if its imbalance is at most this much above the best one's.
const CLOSE: f64 = 0.005;
/// Moves and swaps end once the fullest rank exceeds the mean by no more than this factor.
const EVEN: f64 = 1.001;

/// Computes a placement of experts with these rows on `ranks` ranks. A rank owns at most `spare` experts more than its even share,
/// rounded up.
///
/// # Panics
/// If `ranks` is zero.
#[must_use]
pub fn balance(rows: &[u64], ranks: usize, spare: usize) -> LayerPlacement {
    let room = rows.len().div_ceil(ranks).saturating_add(spare);
    // An expert has at most one copy on each rank.
    let extra = room.saturating_mul(ranks).min(rows.len() * ranks) - rows.len();
    place(rows, ranks, room, extra)
}

/// Computes a placement in which a rank owns at most `room` experts, with at most `extra` copies beside one of each expert.
fn place(rows: &[u64], ranks: usize, room: usize, extra: usize) -> LayerPlacement {
    let contiguous = LayerPlacement::contiguous(rows.len(), ranks);
    let mut found = vec![(imbalance(rows, &contiguous), contiguous)];
    if rows.iter().any(|&rows| rows > 0) {
        let mut copies = vec![1_u32; rows.len()];
        let mut added = 0;
        for trial in 0..=TRIALS {
            while added < extra * trial / TRIALS {
                add_copy(rows, &mut copies, ranks);
                added += 1;
            }
            if let Some(mut assignment) = CopyAssignment::new(rows, &copies, ranks, room) {
                assignment.refine();
                let placement = assignment.placement();
                found.push((imbalance(rows, &placement), placement));
            }
        }
    }
    let best = found.iter().map(|(imbalance, _)| *imbalance).fold(f64::INFINITY, f64::min);
    let close = found.into_iter().filter(|(imbalance, _)| *imbalance <= best + CLOSE);
    // The most even placement among those with the fewest copies.
    let chosen = close.min_by(|a, b| a.1.copies().cmp(&b.1.copies()).then(a.0.total_cmp(&b.0)));
    chosen.map_or_else(|| LayerPlacement::contiguous(rows.len(), ranks), |(_, placement)| placement)
}

/// Computes a placement for a mixed group: the first rank gets the `resident` experts with the most rows, the other ranks, `workers` of
/// them, even out the rows of the others. No expert has copies.
///
/// # Panics
/// If `workers` is zero.
#[must_use]
pub fn balance_mixed(rows: &[u64], resident: usize, workers: usize) -> LayerPlacement {
    let mut order: Vec<u32> = (0..rows.len() as u32).collect();
    // Equal ones stay in order.
    order.sort_by_key(|&expert| std::cmp::Reverse(rows[expert as usize]));
    let others = order.split_off(resident.min(order.len()));
    let rows_of_others: Vec<u64> = others.iter().map(|&expert| rows[expert as usize]).collect();
    let shared = place(&rows_of_others, workers, others.len().div_ceil(workers), 0);
    let of_worker = |worker| shared.experts_of(Rank(worker)).iter().map(|&at| others[at as usize]).collect();
    LayerPlacement::new(std::iter::once(order).chain((0..workers as u32).map(of_worker)).collect())
}

/// The imbalance of these rows under a placement whose copies share an expert's rows evenly: rows of the fullest rank, divided by the
/// mean; 1 is perfect, also without rows.
#[must_use]
pub fn imbalance(rows: &[u64], placement: &LayerPlacement) -> f64 {
    let total: f64 = rows.iter().map(|&rows| rows as f64).sum();
    if total == 0.0 {
        return 1.0;
    }
    let most = loads(rows, placement).into_iter().fold(0.0, f64::max);
    most * placement.ranks() as f64 / total
}

/// `[ranks]`: rows of each rank under a placement whose copies share an expert's rows evenly.
#[must_use]
pub fn loads(rows: &[u64], placement: &LayerPlacement) -> Vec<f64> {
    let ranks = (0..placement.ranks() as u32).map(Rank);
    let owned: Vec<&[u32]> = ranks.map(|rank| placement.experts_of(rank)).collect();
    let mut copies = vec![0_u32; rows.len()];
    owned.iter().copied().flatten().for_each(|&expert| copies[expert as usize] += 1);
    let share = |&expert: &u32| rows[expert as usize] as f64 / f64::from(copies[expert as usize]);
    owned.iter().map(|experts| experts.iter().map(share).sum()).collect()
}

/// Gives a copy to the expert with the most rows per copy of those that are not on every rank.
fn add_copy(rows: &[u64], copies: &mut [u32], ranks: usize) {
    let share = |expert: usize, copies: &[u32]| rows[expert] as f64 / f64::from(copies[expert]);
    let candidates = (0..rows.len()).filter(|&expert| (copies[expert] as usize) < ranks);
    // `max_by` takes the last of equal ones; the reversed order makes that the first expert.
    let fullest = candidates.rev().max_by(|&a, &b| share(a, copies).total_cmp(&share(b, copies)));
    if let Some(expert) = fullest {
        copies[expert] += 1;
    }
}

/// A copy of an expert and its rows.
#[derive(Clone, Copy, Debug)]
struct Copy {
    expert: u32,
    rows: f64,
}

/// The copies that each rank gets.
struct CopyAssignment {
    ranks: Vec<Vec<Copy>>,
    loads: Vec<f64>,
    /// Largest number of copies of a rank.
    room: usize,
}

/// A change that lowers the load of the fullest rank: one of its copies moves to another rank, and a copy of that rank may move
/// back.
struct Change {
    copy: usize,
    rank: usize,
    other: Option<usize>,
    /// The larger of the two ranks' rows afterwards.
    result: f64,
}

impl CopyAssignment {
    /// Places the copies; `None` if two copies of an expert would have to share a rank.
    fn new(rows: &[u64], copies: &[u32], ranks: usize, room: usize) -> Option<Self> {
        let share = |expert: usize| rows[expert] as f64 / f64::from(copies[expert]);
        let mut order: Vec<usize> = (0..rows.len()).collect();
        order.sort_by(|&a, &b| share(b).total_cmp(&share(a)));
        let mut assignment = CopyAssignment { ranks: vec![Vec::new(); ranks], loads: vec![0.0; ranks], room };
        for expert in order {
            for _ in 0..copies[expert] {
                let copy = Copy { expert: expert as u32, rows: share(expert) };
                let open = (0..ranks).filter(|&rank| assignment.accepts(rank, copy.expert));
                // With equal rows, the rank with more room.
                let key = |rank: usize| (assignment.loads[rank], assignment.ranks[rank].len());
                let rank = open.min_by(|&a, &b| {
                    let ((a_load, a_len), (b_load, b_len)) = (key(a), key(b));
                    a_load.total_cmp(&b_load).then(a_len.cmp(&b_len))
                })?;
                assignment.ranks[rank].push(copy);
                assignment.loads[rank] += copy.rows;
            }
        }
        Some(assignment)
    }

    fn owns(&self, rank: usize, expert: u32) -> bool {
        self.ranks[rank].iter().any(|copy| copy.expert == expert)
    }

    fn accepts(&self, rank: usize, expert: u32) -> bool {
        self.ranks[rank].len() < self.room && !self.owns(rank, expert)
    }

    /// Moves and swaps copies of the fullest rank as long as that lowers the larger of the two ranks.
    fn refine(&mut self) {
        let mean = self.loads.iter().sum::<f64>() / self.loads.len() as f64;
        let copies: usize = self.ranks.iter().map(Vec::len).sum();
        for _ in 0..copies {
            let ranks = 0..self.ranks.len();
            let Some(fullest) = ranks.max_by(|&a, &b| self.loads[a].total_cmp(&self.loads[b])) else {
                return;
            };
            if self.loads[fullest] <= mean * EVEN {
                return;
            }
            let Some(change) = self.best_change(fullest) else { return };
            self.apply(fullest, &change);
        }
    }

    fn best_change(&self, fullest: usize) -> Option<Change> {
        let before = self.loads[fullest];
        // Rounding must not make a change look like an improvement for ever.
        let mut best: Option<Change> = None;
        let mut offer = |change: Change| {
            let to_beat = best.as_ref().map_or(before * (1.0 - 1e-9), |best| best.result);
            if change.result < to_beat {
                best = Some(change);
            }
        };
        for rank in (0..self.ranks.len()).filter(|&rank| rank != fullest) {
            for (copy, moved) in self.ranks[fullest].iter().enumerate() {
                if self.owns(rank, moved.expert) {
                    continue;
                }
                let result = |back: f64| {
                    let net = moved.rows - back;
                    (before - net).max(self.loads[rank] + net)
                };
                if self.ranks[rank].len() < self.room {
                    offer(Change { copy, rank, other: None, result: result(0.0) });
                }
                for (other, back) in self.ranks[rank].iter().enumerate() {
                    if back.rows < moved.rows && !self.owns(fullest, back.expert) {
                        offer(Change { copy, rank, other: Some(other), result: result(back.rows) });
                    }
                }
            }
        }
        best
    }

    fn apply(&mut self, fullest: usize, change: &Change) {
        let moved = self.ranks[fullest].swap_remove(change.copy);
        if let Some(other) = change.other {
            let back = self.ranks[change.rank].swap_remove(other);
            self.ranks[fullest].push(back);
        }
        self.ranks[change.rank].push(moved);
        for rank in [fullest, change.rank] {
            self.loads[rank] = self.ranks[rank].iter().map(|copy| copy.rows).sum();
        }
    }

    fn placement(self) -> LayerPlacement {
        let experts = |copies: Vec<Copy>| copies.into_iter().map(|copy| copy.expert).collect();
        LayerPlacement::new(self.ranks.into_iter().map(experts).collect())
    }
}

#[cfg(test)]
mod tests;
