//! How the rows of a step spread over ranks.

use std::ops::Range;

use expertd_types::Rank;

/// Rows of one request on one rank in one step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Piece<I> {
    /// The request.
    pub(super) item: I,
    /// Which of the request's rows.
    pub(super) rows: Range<usize>,
    /// Where they are computed.
    pub(super) rank: Rank,
}

/// Rows of each rank when `total` rows spread evenly over `ranks`; the first ranks take the remainder.
pub(super) fn spread(total: usize, ranks: usize) -> impl Iterator<Item = usize> {
    (0..ranks).map(move |rank| total / ranks + usize::from(rank < total % ranks))
}

/// Cuts requests, given as `(item, rows)` in order, into pieces that fill the ranks evenly.
///
/// The pieces of one request come in the order of its rows.
pub(super) fn pieces<I: Copy>(
    takes: impl Iterator<Item = (I, Range<usize>)>,
    total: usize,
    ranks: usize,
) -> Vec<Piece<I>> {
    let mut room: Vec<usize> = spread(total, ranks).collect();
    let mut rank = 0;
    let mut pieces = Vec::new();
    for (item, mut rows) in takes {
        while !rows.is_empty() && rank < ranks {
            if room[rank] == 0 {
                rank += 1;
                continue;
            }
            let n = rows.len().min(room[rank]);
            pieces.push(Piece { item, rows: rows.start..rows.start + n, rank: Rank(rank as u32) });
            rows.start += n;
            room[rank] -= n;
        }
    }
    pieces
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn spreads_evenly() {
        assert_eq!(spread(7, 3).collect::<Vec<_>>(), [3, 2, 2]);
        assert_eq!(spread(1, 4).collect::<Vec<_>>(), [1, 0, 0, 0]);
        assert_eq!(spread(0, 2).collect::<Vec<_>>(), [0, 0]);
    }

    proptest! {
        #[test]
        fn every_row_has_one_place(sizes in prop::collection::vec(1usize..40, 0..12), ranks in 1usize..9) {
            let total: usize = sizes.iter().sum();
            let got = pieces(sizes.iter().enumerate().map(|(i, n)| (i, 3..3 + n)), total, ranks);
            for (i, n) in sizes.iter().enumerate() {
                let rows: Vec<usize> = got.iter().filter(|p| p.item == i).flat_map(|p| p.rows.clone()).collect();
                prop_assert_eq!(rows, (3..3 + n).collect::<Vec<_>>());
            }
            for (rank, n) in spread(total, ranks).enumerate() {
                let here: usize = got.iter().filter(|p| p.rank.index() == rank).map(|p| p.rows.len()).sum();
                prop_assert_eq!(here, n);
            }
        }
    }
}
