//! Distribution of a step's rows over ranks.

use std::ops::Range;

use expertd_types::Rank;

use super::RankRows;
use crate::RequestKey;

/// Number of rows of each rank if `total` rows are spread evenly over `ranks`; the first ranks take the remainder.
pub fn spread(total: usize, ranks: usize) -> impl Iterator<Item = usize> {
    (0..ranks).map(move |rank| total / ranks + usize::from(rank < total % ranks))
}

/// Cuts the `total` rows of a step, given request by request, into ranges that fill the ranks evenly. The ranges of a request are in
/// the order of its rows.
pub(super) fn cut(
    requests: impl Iterator<Item = (RequestKey, Range<usize>)>,
    total: usize,
    ranks: usize,
) -> Vec<RankRows> {
    let mut room = spread(total, ranks);
    let mut left = room.next().unwrap_or(0);
    let mut rank = 0;
    let mut ranges = Vec::with_capacity(requests.size_hint().0 + ranks);
    for (key, mut rows) in requests {
        while !rows.is_empty() {
            while left == 0 {
                match room.next() {
                    Some(more) => left = more,
                    None => return ranges,
                }
                rank += 1;
            }
            let count = rows.len().min(left);
            ranges.push(RankRows { key, rows: rows.start..rows.start + count, rank: Rank(rank) });
            rows.start += count;
            left -= count;
        }
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spreads_evenly() {
        assert_eq!(spread(7, 3).collect::<Vec<_>>(), [3, 2, 2]);
        assert_eq!(spread(1, 4).collect::<Vec<_>>(), [1, 0, 0, 0]);
        assert_eq!(spread(0, 2).collect::<Vec<_>>(), [0, 0]);
    }

    #[test]
    fn every_row_has_one_rank() {
        for ranks in 1..9 {
            for sizes in [vec![], vec![1], vec![5, 1, 1], vec![1; 20], vec![3, 40, 2], vec![7, 7, 7, 7]] {
                let total: usize = sizes.iter().sum();
                let requests = (0..).zip(&sizes).map(|(i, n)| (RequestKey(i), 3..3 + n));
                let ranges = cut(requests, total, ranks);
                for (i, n) in (0..).zip(&sizes) {
                    let of_request = ranges.iter().filter(|r| r.key == RequestKey(i));
                    let rows: Vec<usize> = of_request.flat_map(|r| r.rows.clone()).collect();
                    assert_eq!(rows, (3..3 + n).collect::<Vec<_>>());
                }
                for (rank, n) in spread(total, ranks).enumerate() {
                    let here = ranges.iter().filter(|r| r.rank.index() == rank);
                    assert_eq!(here.map(|r| r.rows.len()).sum::<usize>(), n);
                }
            }
        }
    }
}
