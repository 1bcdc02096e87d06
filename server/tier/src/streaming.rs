//! Which experts of CPU ranks come to the source for a step, by its number of rows, which is all that the host knows of it.

/// With this part of `stream_rows`, copies of all experts take as long as the products of CPU ranks.
const EVEN: usize = 4;
/// Steps of fewer rows leave most experts out, whose copies would be in vain.
const LEAST_ROWS: usize = 8;
/// A step of fewer rows is divided only for copies of [`LEAST_BYTES`]: its launches outside of a graph, and what copies take of the rate of
/// host memory, cost more than fewer copies save.
const FEW_ROWS: usize = 16;
const LEAST_BYTES: usize = 16 << 20;
/// The time in which CPU ranks read all experts, of the time of their copies: host memory is about twice as fast as PCIe.
const READ: f64 = 0.5;

/// The `stream_rows` of steps for which copies of all experts take as long as the products of CPU ranks with `even` rows.
#[must_use]
pub const fn stream_rows_of(even: usize) -> usize {
    even.saturating_mul(EVEN)
}

/// Least number of rows of a step for which some experts of CPU ranks come to the source, of steps for which all come from `stream_rows`
/// rows on.
#[must_use]
pub fn least_divided(stream_rows: usize) -> usize {
    stream_rows.min(LEAST_ROWS)
}

/// Whether the rows of a step say which experts slots should hold: not if experts come for it and copies of all would take no longer than
/// CPU ranks. One such step has more rows than dozens of those for which slots are.
#[must_use]
pub fn counts_for_slots(rows: usize, stream_rows: usize) -> bool {
    rows < (stream_rows / EVEN).max(least_divided(stream_rows))
}

/// The part of a layer's experts that `rows` rows choose, if each chooses `top_k` of `experts` evenly.
#[must_use]
pub fn touched_share(rows: usize, top_k: usize, experts: usize) -> f64 {
    1.0 - (1.0 - top_k as f64 / experts.max(1) as f64).max(0.0).powf(rows as f64)
}

/// The share of the experts of CPU ranks that come to the source for a step of `rows` rows, which choose the part `touched` of them: all
/// from `stream_rows` rows on, before that as many as can be copied while CPU ranks compute the others. `usize::MAX`: none ever come.
///
/// Copies of all experts take a time that does not depend on the rows. That of CPU ranks is taken to grow with them, to be equal with a
/// quarter of `stream_rows`, and not to fall below what reading the experts takes that are chosen. With c times the time of the copies for
/// CPU ranks, both end together for the share c / (1 + c). Beyond `stream_rows` the rest would cost more time for its rows and sums than it
/// saves.
#[must_use]
pub fn streamed_share(rows: usize, stream_rows: usize, touched: f64) -> f64 {
    share_of(rows, stream_rows, odds(rows, stream_rows, touched))
}

/// The expected time of CPU ranks for all experts, of that of their copies.
fn odds(rows: usize, stream_rows: usize, touched: f64) -> f64 {
    (rows as f64 / (stream_rows / EVEN).max(1) as f64).max(READ * touched)
}

/// The share of the experts of CPU ranks that come to the source for a step of `rows` rows if CPU ranks take `odds` times the time of the
/// copies for all experts; as [`streamed_share`].
#[must_use]
pub fn share_of(rows: usize, stream_rows: usize, odds: f64) -> f64 {
    match stream_rows {
        usize::MAX => 0.0,
        all if rows >= all => 1.0,
        all if rows < least_divided(all) => 0.0,
        _ => odds / (1.0 + odds),
    }
}

/// Whether it pays to divide a step of `rows` rows for copies of `experts` experts of `bytes` bytes.
#[must_use]
pub const fn pays(rows: usize, experts: usize, bytes: usize) -> bool {
    experts > 0 && (rows >= FEW_ROWS || experts.saturating_mul(bytes) >= LEAST_BYTES)
}

/// What of a divided step ended last: the copies of experts and the source's products with them, or the CPU ranks with the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Last {
    /// Copies.
    Copies,
    /// CPU ranks.
    CpuRanks,
}

impl Last {
    /// What ends last if exactly one of the two has ended; one look cannot tell if both have.
    #[must_use]
    pub const fn of(have_cpu_ranks_ended: bool, have_copies_ended: bool) -> Option<Last> {
        match (have_cpu_ranks_ended, have_copies_ended) {
            (true, false) => Some(Last::Copies),
            (false, true) => Some(Last::CpuRanks),
            _ => None,
        }
    }
}

/// Finds the share of experts with which copies and CPU ranks end together, whatever the rates of the machine, the format and the routing.
///
/// Steps of a layer of a number of rows between two powers of two start with [`streamed_share`]. After each one the odds of its successors
/// rise or fall by [`STEP`](Self::STEP), so that the share stays near the one at which the order changes; one step that was slow by chance
/// moves it little.
#[derive(Clone, Debug)]
pub struct ShareBalance {
    stream_rows: usize,
    /// `[layers]`: what the expected odds are multiplied with, for each power of two of rows.
    factors: Vec<[f64; BUCKETS]>,
}

/// Powers of two of rows.
const BUCKETS: usize = usize::BITS as usize;

impl ShareBalance {
    /// Change of the odds after a step.
    pub const STEP: f64 = 1.05;
    /// Largest factor between odds and those that are expected.
    const MOST: f64 = 8.0;
    /// Skipped steps that raise the odds as much as one that ended.
    const SKIPS: f64 = 64.0;

    /// For steps of `layers` layers for which all experts come from `stream_rows` rows on.
    #[must_use]
    pub fn new(stream_rows: usize, layers: usize) -> Self {
        ShareBalance { stream_rows, factors: vec![[1.0; BUCKETS]; layers] }
    }

    /// The share of experts that come for a step of `rows` rows, which choose the part `touched` of them.
    #[must_use]
    pub fn share(&self, layer: usize, rows: usize, touched: f64) -> f64 {
        let odds = odds(rows, self.stream_rows, touched) * self.factors[layer][bucket(rows)];
        share_of(rows, self.stream_rows, odds)
    }

    /// A divided step of `rows` rows has ended.
    pub fn ended(&mut self, layer: usize, rows: usize, last: Last) {
        let change = match last {
            Last::CpuRanks => Self::STEP,
            Last::Copies => 1.0 / Self::STEP,
        };
        let factor = &mut self.factors[layer][bucket(rows)];
        *factor = (*factor * change).clamp(1.0 / Self::MOST, Self::MOST);
    }

    /// A step of `rows` rows was not divided, because too few experts would have come. A share that had fallen so far rises slowly to what is
    /// expected, so that one of many steps tries whether CPU ranks have less time now.
    pub fn skipped(&mut self, layer: usize, rows: usize) {
        let factor = &mut self.factors[layer][bucket(rows)];
        if *factor < 1.0 {
            *factor = (*factor * Self::STEP.powf(1.0 / Self::SKIPS)).min(1.0);
        }
    }
}

fn bucket(rows: usize) -> usize {
    rows.max(1).ilog2() as usize
}

/// Of experts in the order of CPU ranks, those that come to the source: as many of each part of the order, so that no CPU rank is left with
/// more than its share.
#[derive(Clone, Copy, Debug)]
pub struct StreamedExperts {
    count: usize,
    of: usize,
}

impl StreamedExperts {
    /// The share `share` of `of` experts, rounded down.
    #[must_use]
    pub fn new(share: f64, of: usize) -> Self {
        StreamedExperts { count: ((share * of as f64) as usize).min(of), of }
    }

    /// How many come.
    #[must_use]
    pub const fn count(self) -> usize {
        self.count
    }

    /// Whether the one at this place comes.
    #[must_use]
    pub const fn has(self, place: usize) -> bool {
        place < self.of && (place + 1) * self.count / self.of > place * self.count / self.of
    }
}

/// Number of experts that are copied next, before those are multiplied, if `left` are left and it is `most` at most. A step ends with fewer,
/// because it waits for what follows the last copy, but not with less than a quarter: the products with fewer take as long.
#[must_use]
pub const fn next_chunk(left: usize, most: usize) -> usize {
    if left >= 2 * most {
        most
    } else if 2 * left > most {
        left.div_ceil(2)
    } else {
        left
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use rand::RngExt;

    use super::*;

    #[test]
    fn copies_and_cpu_ranks_end_together() {
        // Times of all experts: 1 for copies, rows / 70 for CPU ranks, but at least half of what is chosen.
        assert_eq!([70, usize::MAX].map(stream_rows_of), [280, usize::MAX]);
        for rows in 8..280 {
            let touched = touched_share(rows, 8, 128);
            let share = streamed_share(rows, 280, touched);
            let (copies, cpus) = (share, (1.0 - share) * (rows as f64 / 70.0).max(touched / 2.0));
            assert!((copies - cpus).abs() < 1e-9, "{rows} rows: {copies} and {cpus}");
        }
        assert_eq!([7, 280, 281, 4000].map(|rows| streamed_share(rows, 280, 1.0)), [0.0, 1.0, 1.0, 1.0]);
        let of_few = [1, 5, 6].map(|rows| streamed_share(rows, 6, 1.0));
        assert_eq!(of_few, [0.0, 0.0, 1.0], "few rows are not divided");
        assert_eq!([1, 200, 4000].map(least_divided), [1, 8, 8]);
        assert_eq!([69, 70].map(|rows| counts_for_slots(rows, 280)), [true, false]);
        assert_eq!([5, 6].map(|rows| counts_for_slots(rows, 6)), [true, false]);
        assert!(counts_for_slots(1 << 20, usize::MAX), "no experts come");
        assert_eq!([64, usize::MAX - 1].map(|rows| streamed_share(rows, usize::MAX, 1.0)), [0.0, 0.0]);
    }

    #[test]
    fn the_chosen_experts_are_counted() {
        assert_eq!([touched_share(0, 8, 128), touched_share(1, 8, 128)], [0.0, 0.0625]);
        assert!((touched_share(8, 8, 128) - 0.4033).abs() < 1e-4);
        assert_eq!([touched_share(3, 4, 4), touched_share(2, 9, 4), touched_share(5, 1, 0)], [1.0; 3]);
    }

    /// Machines on which copies or CPU ranks take up to four times as long as expected, with noise. Two layers differ.
    #[test]
    fn the_share_moves_to_where_both_end_together() {
        let mut rng = expertd_test_seed::rng();
        for _ in 0..200 {
            let stream_rows = rng.random_range(100..2000);
            let mut balance = ShareBalance::new(stream_rows, 3);
            let rows = rng.random_range(8..100);
            let touched = touched_share(rows, 8, 128);
            let real =
                [0, 1].map(|_| odds(rows, stream_rows, touched) * 4.0_f64.powf(rng.random_range(-1.0..1.0)));
            let mut longest = [0.0; 2];
            for step in 0..150 {
                for (layer, (&real, longest)) in real.iter().zip(&mut longest).enumerate() {
                    let share = balance.share(layer, rows, touched);
                    let (copies, cpus) = (share, (1.0 - share) * real * rng.random_range(0.9..1.1));
                    let last = Last::of(cpus < copies, copies < cpus).unwrap();
                    balance.ended(layer, rows, last);
                    if step >= 50 {
                        *longest += copies.max(cpus) / 100.0;
                    }
                }
            }
            for (mean, real) in longest.into_iter().zip(real) {
                let best = real / (1.0 + real);
                assert!(mean < 1.1 * best, "{rows} rows of {stream_rows}, odds {real}: {mean}, not {best}");
            }
            let fresh = ShareBalance::new(stream_rows, 1);
            assert_eq!(balance.share(2, rows, touched), fresh.share(0, rows, touched), "another layer moved");
            assert_eq!(balance.share(0, 2048, 1.0), fresh.share(0, 2048, 1.0), "other rows moved");
        }
    }

    /// Copies always end last: few of many steps try again whether dividing pays, and steps with enough experts are not kept from it.
    #[test]
    fn steps_that_should_not_be_divided_rarely_are() {
        let (experts, bytes, rows) = (32, 3 << 20, 12);
        let mut balance = ShareBalance::new(400, 1);
        let mut divided = 0;
        for step in 0..2000 {
            let come = StreamedExperts::new(balance.share(0, rows, 0.8), experts).count();
            if pays(rows, come, bytes) {
                balance.ended(0, rows, Last::Copies);
                divided += usize::from(step >= 1000);
            } else {
                balance.skipped(0, rows);
            }
        }
        assert!((1..50).contains(&divided), "{divided} of 1000");
    }

    #[test]
    fn one_look_tells_what_ends_last_unless_it_is_late() {
        let looks = [(false, false), (true, false), (false, true), (true, true)];
        let found = looks.map(|(cpus, copies)| Last::of(cpus, copies));
        assert_eq!(found, [None, Some(Last::Copies), Some(Last::CpuRanks), None]);
    }

    #[test]
    fn few_rows_are_divided_for_enough_bytes() {
        assert!(pays(16, 1, 1) && pays(8, 4, 4 << 20) && pays(15, 1, 100 << 20));
        assert!(!pays(16, 0, 100 << 20) && !pays(15, 5, 3 << 20));
    }

    #[test]
    fn the_share_has_limits() {
        for last in [Last::Copies, Last::CpuRanks] {
            let mut balance = ShareBalance::new(400, 1);
            (0..1000).for_each(|_| balance.ended(0, 50, last));
            let (share, expected) =
                (balance.share(0, 50, 1.0), if last == Last::Copies { 1.0 / 17.0 } else { 0.8 });
            assert!((share - expected).abs() < 1e-9, "{last:?}: {share}");
            assert_eq!([7, 400].map(|rows| balance.share(0, rows, 1.0)), [0.0, 1.0], "bounds stay");
        }
        assert_eq!(ShareBalance::new(usize::MAX, 1).share(0, 64, 1.0), 0.0);
    }

    #[test]
    fn a_share_that_is_too_small_returns_to_what_is_expected() {
        let fresh = ShareBalance::new(400, 1);
        let mut balance = fresh.clone();
        (0..20).for_each(|_| balance.ended(0, 50, Last::Copies));
        assert!(balance.share(0, 50, 1.0) < 0.8 * fresh.share(0, 50, 1.0));
        (0..20 * 65).for_each(|_| balance.skipped(0, 50));
        assert_eq!(balance.share(0, 50, 1.0), fresh.share(0, 50, 1.0));
        balance.ended(0, 50, Last::CpuRanks);
        let above = balance.share(0, 50, 1.0);
        balance.skipped(0, 50);
        assert_eq!(balance.share(0, 50, 1.0), above);
    }

    #[test]
    fn every_part_of_the_order_gives_its_share() {
        for of in [1, 2, 7, 64, 96] {
            for share in [0.0, 0.2, 0.5, 0.77, 1.0] {
                let streamed = StreamedExperts::new(share, of);
                let total = (0..of).filter(|&place| streamed.has(place)).count();
                assert_eq!([streamed.count(), total], [(share * of as f64) as usize; 2]);
                let half = (0..of / 2).filter(|&place| streamed.has(place)).count();
                assert!(half.abs_diff(total - half) <= 2, "{half} of {total} in the first half of {of}");
                assert!(!streamed.has(of));
            }
        }
    }

    #[test]
    fn the_last_chunks_are_small() {
        let sizes = |mut left: usize, most| {
            let mut sizes = Vec::new();
            while left > 0 {
                sizes.push(next_chunk(left, most));
                left -= sizes[sizes.len() - 1];
            }
            sizes
        };
        assert_eq!(sizes(64, 13), [13, 13, 13, 13, 6, 6]);
        assert_eq!(sizes(32, 13), [13, 10, 5, 4]);
        assert_eq!(sizes(10, 4), [4, 3, 2, 1]);
        assert_eq!([sizes(0, 13), sizes(1, 13), sizes(2, 1)], [vec![], vec![1], vec![1, 1]]);
    }
}
