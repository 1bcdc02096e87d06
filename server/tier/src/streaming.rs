//! Which experts of CPU ranks come to the source for a step, by its number of rows, which is all that the host knows of it.

/// From this part of `stream_rows` on some experts come.
const FIRST: usize = 16;
/// With this part of `stream_rows`, copies of all experts take as long as the products of CPU ranks.
const EVEN: usize = 4;
/// Steps of fewer rows leave many experts out, whose copies would be in vain.
const LEAST_ROWS: usize = 16;

/// The `stream_rows` of steps for which copies of all experts take as long as the products of CPU ranks with `even` rows.
#[must_use]
pub const fn stream_rows_of(even: usize) -> usize {
    even.saturating_mul(EVEN)
}

/// Least number of rows of a step for which some experts of CPU ranks come to the source, of steps for which all come from `stream_rows`
/// rows on.
#[must_use]
pub fn least_divided(stream_rows: usize) -> usize {
    stream_rows.min((stream_rows / FIRST).max(LEAST_ROWS))
}

/// Whether the rows of a step say which experts slots should hold: not if experts come for it and copies of all would take no longer than
/// CPU ranks. One such step has more rows than dozens of those for which slots are.
#[must_use]
pub fn counts_for_slots(rows: usize, stream_rows: usize) -> bool {
    rows < (stream_rows / EVEN).max(least_divided(stream_rows))
}

/// The share of the experts of CPU ranks that come to the source for a step of `rows` rows: all from `stream_rows` rows on, before that as
/// many as can be copied while CPU ranks compute the others. `usize::MAX`: none ever come.
///
/// Copies of all experts take a time that does not depend on `rows`; that of CPU ranks is taken to grow with them, although few rows take as
/// long as their experts are read. Both are equal with a quarter of `stream_rows`, so copies and CPU ranks end together for the share
/// rows / (rows + `stream_rows` / 4). Beyond `stream_rows` the rest would cost more time for its rows and sums than it saves.
#[must_use]
pub fn streamed_share(rows: usize, stream_rows: usize) -> f64 {
    match stream_rows {
        usize::MAX => 0.0,
        all if rows >= all => 1.0,
        all if rows < least_divided(all) => 0.0,
        all => rows as f64 / (rows as f64 + (all / EVEN) as f64),
    }
}

/// Of experts in the order of CPU ranks, those that come to the source: as many of each part of the order, so that no CPU rank is left with
/// more than its share.
#[derive(Clone, Copy, Debug)]
pub struct StreamedExperts {
    count: usize,
    of: usize,
}

impl StreamedExperts {
    /// For a step of `rows` rows, of `of` experts.
    #[must_use]
    pub fn new(rows: usize, stream_rows: usize, of: usize) -> Self {
        StreamedExperts { count: (streamed_share(rows, stream_rows) * of as f64) as usize, of }
    }

    /// Whether none come.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.count == 0
    }

    /// Whether the one at this place comes.
    #[must_use]
    pub const fn has(self, place: usize) -> bool {
        place < self.of && (place + 1) * self.count / self.of > place * self.count / self.of
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_and_cpu_ranks_end_together() {
        // Times of all experts: 1 for copies, rows / 70 for CPU ranks.
        assert_eq!([70, usize::MAX].map(stream_rows_of), [280, usize::MAX]);
        for rows in 17..280 {
            let share = streamed_share(rows, 280);
            let (copies, products) = (share, (1.0 - share) * rows as f64 / 70.0);
            assert!((copies - products).abs() < 1e-9, "{rows} rows: {copies} and {products}");
        }
        assert_eq!([16, 280, 281, 4000].map(|rows| streamed_share(rows, 280)), [0.0, 1.0, 1.0, 1.0]);
        assert_eq!(
            [1, 5, 6].map(|rows| streamed_share(rows, 6)),
            [0.0, 0.0, 1.0],
            "few rows are not divided"
        );
        assert_eq!([1, 200, 280, 4000].map(least_divided), [1, 16, 17, 250]);
        assert_eq!([69, 70].map(|rows| counts_for_slots(rows, 280)), [true, false]);
        assert_eq!([5, 6].map(|rows| counts_for_slots(rows, 6)), [true, false]);
        assert!(counts_for_slots(1 << 20, usize::MAX), "no experts come");
        assert_eq!([64, usize::MAX - 1].map(|rows| streamed_share(rows, usize::MAX)), [0.0, 0.0]);
    }

    #[test]
    fn every_part_of_the_order_gives_its_share() {
        for of in [1, 2, 7, 64, 96] {
            for rows in [1, 17, 64, 200, 279, 280] {
                let streamed = StreamedExperts::new(rows, 280, of);
                let total = (0..of).filter(|&place| streamed.has(place)).count();
                assert_eq!(total, (streamed_share(rows, 280) * of as f64) as usize);
                assert_eq!(streamed.is_empty(), total == 0);
                let half = (0..of / 2).filter(|&place| streamed.has(place)).count();
                assert!(half.abs_diff(total - half) <= 2, "{half} of {total} in the first half of {of}");
                assert!(!streamed.has(of));
            }
        }
    }
}
