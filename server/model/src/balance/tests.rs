//! Tests of `balance`.

use std::collections::BTreeMap;

use expertd_types::{ExpertPlacement, LayerId, Rank};
use proptest::prelude::*;

use super::*;

/// The least imbalance of any placement within the room, by trying all of them.
fn optimum(rows: &[u64], ranks: usize, spare: usize) -> f64 {
    let room = rows.len().div_ceil(ranks) + spare;
    let mut best = f64::INFINITY;
    let sets = (1_usize << ranks) - 1;
    let all = sets.pow(rows.len() as u32);
    for mut code in 0..all {
        let (mut loads, mut counts) = ([0.0; 8], [0; 8]);
        for &rows in rows {
            let owners = code % sets + 1;
            code /= sets;
            let share = rows as f64 / f64::from(owners.count_ones());
            for rank in (0..ranks).filter(|rank| owners >> rank & 1 == 1) {
                loads[rank] += share;
                counts[rank] += 1;
            }
        }
        if counts.iter().all(|&count| count <= room) {
            best = loads.into_iter().fold(0.0, f64::max).min(best);
        }
    }
    best * ranks as f64 / rows.iter().sum::<u64>() as f64
}

fn any_rows(experts: std::ops::RangeInclusive<usize>) -> impl Strategy<Value = Vec<u64>> {
    let count = prop_oneof![Just(0), 0_u64..10, 0_u64..1000, Just(1_000_000)];
    proptest::collection::vec(count, experts)
}

/// Copies would only take memory.
#[test]
fn a_mixed_group_has_each_expert_once() {
    // Five experts on two ranks leave a place.
    let placed = balance_mixed(&[9, 20, 20, 20, 0, 31], 1, 2);
    assert_eq!((placed.copies(), placed.experts_of(Rank(0))), (6, &[5][..]));
    assert_eq!(placed.check(LayerId(0), 6), Ok(()));
}

proptest! {
    #[test]
    fn any_rows_give_a_valid_placement_that_is_not_worse(
        rows in any_rows(1..=70),
        ranks in 1_usize..=8,
        spare in 0_usize..=4,
    ) {
        let placement = balance(&rows, ranks, spare);
        let model = BTreeMap::from([(LayerId(3), rows.len())]);
        let whole = ExpertPlacement::new(ranks, [(LayerId(3), placement.clone())]);
        prop_assert_eq!(whole.check(ranks, &model), Ok(()));
        for rank in 0..ranks as u32 {
            let owned = placement.experts_of(Rank(rank)).len();
            prop_assert!(owned <= rows.len().div_ceil(ranks) + spare, "rank {} owns {}", rank, owned);
        }
        let before = imbalance(&rows, &LayerPlacement::contiguous(rows.len(), ranks));
        let after = imbalance(&rows, &placement);
        prop_assert!(after <= before + 1e-9, "{} after {}", after, before);
        prop_assert!(after >= 1.0 - 1e-9);
        // Rows are only moved between ranks.
        let sum: f64 = loads(&rows, &placement).iter().sum();
        let total = rows.iter().sum::<u64>() as f64;
        prop_assert!((sum - total).abs() <= 1e-9 * total.max(1.0));
        prop_assert_eq!(balance(&rows, ranks, spare), placement, "the same rows give the same placement");
    }

    #[test]
    fn small_cases_are_close_to_the_optimum(
        rows in any_rows(2..=5),
        ranks in 2_usize..=3,
        spare in 0_usize..=1,
    ) {
        prop_assume!(rows.iter().any(|&rows| rows > 0));
        let (best, found) = (optimum(&rows, ranks, spare), imbalance(&rows, &balance(&rows, ranks, spare)));
        // Graham's bound for ranks without a limit on their experts is 4/3.
        prop_assert!(found <= best * 4.0 / 3.0 + CLOSE, "{} for an optimum of {}", found, best);
    }
}

#[test]
fn a_hot_expert_is_copied_to_every_rank() {
    let mut rows = vec![10; 16];
    rows[3] = 1000;
    let before = imbalance(&rows, &LayerPlacement::contiguous(16, 4));
    let placement = balance(&rows, 4, 1);
    let owners = placement.owners(16);
    assert_eq!(owners.of(expertd_types::ExpertId(3)).map(<[Rank]>::len), Some(4));
    let after = imbalance(&rows, &placement);
    assert!(before > 3.5 && after < 1.03, "{before} before, {after} after");
}

#[test]
fn more_spare_places_than_any_number_are_those_of_all_experts() {
    let rows = [u64::MAX, 3, 2, 1];
    assert_eq!(balance(&rows, 2, usize::MAX), balance(&rows, 2, 2));
}

#[test]
fn copies_that_do_not_help_are_not_made() {
    assert_eq!(balance(&[7; 12], 4, 3), LayerPlacement::contiguous(12, 4));
    assert_eq!(balance(&[0; 12], 4, 3), LayerPlacement::contiguous(12, 4));
    // Two experts on each rank are even without copies.
    assert_eq!(balance(&[4, 4, 1, 1], 2, 1).copies(), 4);
}
