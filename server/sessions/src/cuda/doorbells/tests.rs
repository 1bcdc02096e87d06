//! Tests of `doorbells`.

use bytemuck::Zeroable as _;
use proptest::prelude::*;

use super::*;

fn call(max_rows: u32) -> PreparedCall {
    PreparedCall { max_rows, ..PreparedCall::zeroed() }
}

#[test]
fn a_call_is_admitted_before_the_end_of_the_last_one_is_known() {
    let mut table = DoorbellTable::new(2);
    assert_eq!(table.prepare(&[call(4), call(8)]), Ok(0));
    assert_eq!(table.prepare(&[call(2)]), Ok(2));
    let ring = Ring { prepared: 1, rows: 8 };
    assert_eq!(table.ring(0, ring), RingVerdict::Admitted { call: 1, prepared: call(8) });
    assert_eq!(table.ring(1, ring), RingVerdict::Admitted { call: 1, prepared: call(8) });
    table.complete(0);
    assert_eq!(table.ring(0, ring), RingVerdict::Admitted { call: 2, prepared: call(8) });
    assert_eq!(table.in_flight(), 2);
    assert_eq!(table.ring(0, ring), RingVerdict::Admitted { call: 3, prepared: call(8) });
    assert_eq!((table.in_flight_of(0), table.is_last(0, 2), table.is_last(0, 3)), (2, false, true));
    table.close();
    assert_eq!(table.ring(0, ring), RingVerdict::Closing);
    assert!(!table.is_last(0, 3), "the word belongs to a call that is not computed");
}

#[cfg(feature = "fuzzing")]
#[test]
fn rows_that_a_ring_cannot_hold_are_refused() {
    let mut model = expertd_core::fuzzing::model();
    model.limits.max_tokens_per_request = 1 << 20;
    let layer =
        model.layers.iter().find(|(_, moe)| !moe.routes_by_token_id).map(|(layer, _)| layer.0).unwrap();
    let prepared = |max_rows| PreparedCall { layer, dtype: 1, output: 1 << 39, ..call(max_rows) };
    assert_eq!(check(&prepared(65535), &model, 1 << 40, 0), Ok(()));
    let refused = check(&prepared(65536), &model, 1 << 40, 0);
    assert_eq!(refused, Err("max_rows must be 1 to 65535, found 65536".to_owned()));
}

#[test]
fn wrong_numbers_fail_their_call_only() {
    let mut table = DoorbellTable::new(1);
    table.prepare(&[call(4)]).unwrap();
    for (prepared, rows) in [(1, 4), (u32::MAX, 1), (0, 5), (0, 0)] {
        let admission = table.ring(0, Ring { prepared, rows });
        assert!(matches!(admission, RingVerdict::Invalid { .. }), "{admission:?}");
    }
    assert_eq!(table.in_flight(), 0);
    let admission = table.ring(0, Ring { prepared: 0, rows: 4 });
    assert_eq!(admission, RingVerdict::Admitted { call: 5, prepared: call(4) });
}

#[test]
fn the_number_of_prepared_calls_is_limited() {
    let mut table = DoorbellTable::new(1);
    let many = vec![call(1); MAX_PREPARED];
    assert_eq!(table.prepare(&many), Ok(0));
    assert!(table.prepare(&[call(1)]).is_err());
}

proptest! {
    /// Random clients: calls in flight are counted, and every call that is admitted is as it was prepared.
    #[test]
    fn calls_are_as_prepared(
        events in prop::collection::vec((0_u32..4, 0_u32..6, 0_u32..6, any::<bool>()), 1..200),
    ) {
        let mut table = DoorbellTable::new(3);
        let mut prepared = Vec::new();
        let mut in_flight = [0_u32; 4];
        for (doorbell, number, rows, completes) in events {
            let of_doorbell = &mut in_flight[doorbell as usize];
            if completes {
                table.complete(doorbell);
                *of_doorbell = of_doorbell.saturating_sub(1);
            } else if number == 5 {
                prop_assert_eq!(table.prepare(&[call(rows)]), Ok(prepared.len() as u32));
                prepared.push(call(rows));
            } else {
                match table.ring(doorbell, Ring { prepared: number, rows }) {
                    RingVerdict::Admitted { prepared: found, .. } => {
                        prop_assert_eq!(found, prepared[number as usize]);
                        prop_assert!(rows > 0 && rows <= found.max_rows);
                        *of_doorbell += 1;
                    }
                    RingVerdict::Invalid { .. } => prop_assert!(
                        prepared.get(number as usize).is_none_or(|call| rows == 0 || rows > call.max_rows)
                    ),
                    RingVerdict::Closing => prop_assert_eq!(doorbell, 3),
                }
            }
            prop_assert_eq!(table.in_flight() as u32, in_flight[..3].iter().sum::<u32>());
        }
    }
}
