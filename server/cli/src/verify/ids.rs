//! Comparison of returned routing with recorded routing.

use std::fmt;

use serde::Serialize;

use crate::golden::GoldenRouting;

/// Relative difference of two scores below which correct gates may rank them in either order, because gates add up in different
/// orders.
const TIE_TOLERANCE: f64 = 1e-6;

/// A row that was not routed as recorded. Pairs are `(expert id, weight)`, in descending order of weight.
#[derive(Clone, Debug, Serialize)]
pub struct RowMismatch {
    /// Index of the row.
    pub row: usize,
    /// Recorded pairs.
    pub recorded: Vec<(i32, f32)>,
    /// Returned pairs.
    pub returned: Vec<(i32, f32)>,
    /// Largest relative difference between two weights: of an expert in the recorded routing only, and of one in the returned
    /// routing only.
    pub edge_difference: f64,
    /// Whether these weights are so close that both choices are correct.
    pub exception: bool,
}

impl fmt::Display for RowMismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.exception { "exception" } else { "wrong ids" };
        write!(f, "{kind}: row {}: recorded", self.row)?;
        for (id, weight) in &self.recorded {
            write!(f, " {id} ({weight:.7})")?;
        }
        f.write_str(", returned")?;
        for (id, weight) in &self.returned {
            write!(f, " {id} ({weight:.7})")?;
        }
        write!(f, "; relative difference at the edge {:.1e}", self.edge_difference)
    }
}

/// Comparison of a layer's routing.
#[derive(Clone, Debug, Serialize)]
pub struct IdsCheck {
    /// Number of rows with the recorded set of ids.
    pub equal_rows: usize,
    /// The other rows.
    pub mismatches: Vec<RowMismatch>,
    /// Largest relative difference of a weight in rows with equal ids.
    pub largest_weight_difference: f64,
}

impl IdsCheck {
    /// Compares the choice of the service's gate with the recorded one, ids as sets. A different choice is an exception if
    /// the relative difference between the weights of the exchanged experts is less than 1e-6.
    #[must_use]
    pub fn of_gate(recorded: &GoldenRouting, ids: &[i32], weights: &[f32]) -> IdsCheck {
        Self::compare(recorded, ids, weights, TIE_TOLERANCE)
    }

    /// Compares the routing that the service applied with the one it was given: equal ids, no exceptions.
    #[must_use]
    pub fn of_verbatim(recorded: &GoldenRouting, ids: &[i32], weights: &[f32]) -> IdsCheck {
        let mut check = Self::compare(recorded, ids, weights, 0.0);
        if check.mismatches.is_empty() && check.largest_weight_difference > 0.0 {
            // The service must apply ids and weights bit by bit, so a changed weight is as wrong as a changed id.
            let k = recorded.k;
            let changed = (0..recorded.ids.len() / k)
                .filter(|row| pairs(recorded, *row) != row_pairs(ids, weights, k, *row))
                .map(|row| mismatch(pairs(recorded, row), row_pairs(ids, weights, k, row), row, 0.0));
            check.mismatches = changed.collect();
            check.equal_rows -= check.mismatches.len();
        }
        check
    }

    fn compare(recorded: &GoldenRouting, ids: &[i32], weights: &[f32], tie_tolerance: f64) -> IdsCheck {
        let k = recorded.k;
        let mut check = IdsCheck { equal_rows: 0, mismatches: Vec::new(), largest_weight_difference: 0.0 };
        for row in 0..recorded.ids.len() / k.max(1) {
            let (wanted, got) = (pairs(recorded, row), row_pairs(ids, weights, k, row));
            let sorted = |pairs: &[(i32, f32)]| {
                let mut pairs = pairs.to_vec();
                pairs.sort_by_key(|pair| pair.0);
                pairs
            };
            let (by_id, got_by_id) = (sorted(&wanted), sorted(&got));
            if by_id.iter().map(|pair| pair.0).eq(got_by_id.iter().map(|pair| pair.0)) {
                check.equal_rows += 1;
                for (a, b) in by_id.iter().zip(&got_by_id) {
                    let difference = relative(a.1, b.1);
                    check.largest_weight_difference = check.largest_weight_difference.max(difference);
                }
            } else {
                check.mismatches.push(mismatch(wanted, got, row, tie_tolerance));
            }
        }
        check
    }

    /// Whether every row was routed as recorded, exceptions allowed.
    pub fn ok(&self) -> bool {
        self.mismatches.iter().all(|mismatch| mismatch.exception)
    }

    /// Whether `row` is an exception, whose output may differ from the recorded one.
    pub fn excuses(&self, row: usize) -> bool {
        self.mismatches.iter().any(|mismatch| mismatch.exception && mismatch.row == row)
    }

    /// Summary for a table cell.
    pub fn summary(&self) -> String {
        let exceptions = self.mismatches.iter().filter(|mismatch| mismatch.exception).count();
        match (self.mismatches.len() - exceptions, exceptions) {
            (0, 0) => "equal".to_owned(),
            (0, some) => format!("{some} at edge"),
            (wrong, _) => format!("{wrong} wrong"),
        }
    }
}

/// `(id, weight)` of a recorded row, in descending order of weight.
fn pairs(recorded: &GoldenRouting, row: usize) -> Vec<(i32, f32)> {
    row_pairs(&recorded.ids, &recorded.weights, recorded.k, row)
}

fn row_pairs(ids: &[i32], weights: &[f32], k: usize, row: usize) -> Vec<(i32, f32)> {
    let span = row * k..(row + 1) * k;
    let (ids, weights) = (ids.get(span.clone()).unwrap_or(&[]), weights.get(span).unwrap_or(&[]));
    let mut pairs: Vec<_> = ids.iter().copied().zip(weights.iter().copied()).collect();
    pairs.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    pairs
}

fn mismatch(
    recorded: Vec<(i32, f32)>,
    returned: Vec<(i32, f32)>,
    row: usize,
    tie_tolerance: f64,
) -> RowMismatch {
    let only = |these: &[(i32, f32)], those: &[(i32, f32)]| -> Vec<f32> {
        let absent = |id: i32| those.iter().all(|other| other.0 != id);
        these.iter().filter(|pair| absent(pair.0)).map(|pair| pair.1).collect()
    };
    let (lost, gained) = (only(&recorded, &returned), only(&returned, &recorded));
    let edge_difference = if lost.len() == gained.len() {
        lost.iter().zip(&gained).map(|(&a, &b)| relative(a, b)).fold(0.0, f64::max)
    } else {
        f64::INFINITY
    };
    // Rows with equal ids and different weights have no lost ids and are not exceptions.
    let exception = !lost.is_empty() && edge_difference < tie_tolerance;
    RowMismatch { row, recorded, returned, edge_difference, exception }
}

fn relative(a: f32, b: f32) -> f64 {
    let (a, b) = (f64::from(a), f64::from(b));
    if a == b {
        return 0.0;
    }
    let difference = (a - b).abs() / a.abs().max(b.abs());
    if difference.is_nan() { f64::INFINITY } else { difference }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recorded() -> GoldenRouting {
        GoldenRouting { k: 2, ids: vec![3, 1, 0, 2], weights: vec![0.6, 0.4, 0.7, 0.3] }
    }

    #[test]
    fn ids_are_compared_as_sets() {
        let check = IdsCheck::of_gate(&recorded(), &[1, 3, 0, 2], &[0.4, 0.6, 0.7, 0.3]);
        assert!(check.ok() && check.equal_rows == 2, "{check:?}");
        assert_eq!(check.summary(), "equal");
    }

    #[test]
    fn a_different_choice_is_an_exception_only_in_a_tie() {
        let near = 0.4 * (1.0 + 3e-7);
        let check = IdsCheck::of_gate(&recorded(), &[3, 7, 0, 2], &[0.6, near, 0.7, 0.3]);
        assert!(check.ok() && check.excuses(0) && !check.excuses(1), "{check:?}");
        assert_eq!(check.summary(), "1 at edge");
        let far = 0.4 * (1.0 + 3e-6);
        let check = IdsCheck::of_gate(&recorded(), &[3, 7, 0, 2], &[0.6, far, 0.7, 0.3]);
        assert!(!check.ok() && !check.excuses(0), "{check:?}");
    }

    #[test]
    fn short_or_nan_routing_is_wrong() {
        let check = IdsCheck::of_gate(&recorded(), &[3, 1], &[0.6, 0.4]);
        assert!(!check.ok() && check.mismatches[0].row == 1, "{check:?}");
        let check = IdsCheck::of_gate(&recorded(), &[3, 7, 0, 2], &[0.6, f32::NAN, 0.7, 0.3]);
        assert!(!check.ok(), "{check:?}");
    }

    #[test]
    fn verbatim_routing_allows_neither_exceptions_nor_changed_weights() {
        let same = IdsCheck::of_verbatim(&recorded(), &[3, 1, 0, 2], &[0.6, 0.4, 0.7, 0.3]);
        assert!(same.ok());
        let near = 0.4 * (1.0 + 3e-7);
        let other_id = IdsCheck::of_verbatim(&recorded(), &[3, 7, 0, 2], &[0.6, near, 0.7, 0.3]);
        assert!(!other_id.ok());
        let other_weight = IdsCheck::of_verbatim(&recorded(), &[3, 1, 0, 2], &[0.6, near, 0.7, 0.3]);
        assert!(!other_weight.ok() && other_weight.equal_rows == 1, "{other_weight:?}");
    }
}
