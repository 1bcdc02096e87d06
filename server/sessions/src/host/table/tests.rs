//! Tests of `table`.

use proptest::prelude::*;

use super::*;

fn places(rows: Range<usize>, output: Range<usize>) -> RequestPlaces {
    RequestPlaces { read: [rows, 0..0, 0..0, 0..0], written: [output, 0..0, 0..0], copied: 8 }
}

#[test]
fn inputs_may_be_shared_and_outputs_may_not() {
    let mut table = CallTable::new(4, 1024);
    assert_eq!(table.admit(1, places(0..64, 64..128)), RequestVerdict::Admitted);
    assert_eq!(table.admit(2, places(0..64, 128..192)), RequestVerdict::Admitted);
    for (rows, output) in [(0..64, 64..128), (0..64, 0..64), (64..128, 256..320), (512..640, 576..704)] {
        assert!(matches!(table.admit(3, places(rows, output)), RequestVerdict::Invalid(_)));
    }
    table.complete(1);
    assert_eq!(table.admit(3, places(0..64, 64..128)), RequestVerdict::Admitted);
}

#[test]
fn ranges_outside_the_area_and_numbers_in_flight_are_refused() {
    let mut table = CallTable::new(4, 1024);
    for rows in [0..1025, 960..1088, 32..96, usize::MAX - 63..usize::MAX] {
        assert!(matches!(table.admit(1, places(rows, 0..0)), RequestVerdict::Invalid(_)));
    }
    assert_eq!(table.admit(1, places(0..64, 64..128)), RequestVerdict::Admitted);
    assert!(matches!(table.admit(1, places(0..64, 128..192)), RequestVerdict::Invalid(_)));
    let large = RequestPlaces { copied: 1020, ..places(0..64, 128..192) };
    assert!(matches!(table.admit(2, large), RequestVerdict::Full(_)));
}

#[test]
fn completions_that_are_not_popped_count() {
    let mut table = CallTable::new(2, 1024);
    assert!(!table.exceeds(1) && table.exceeds(2));
    table.admit(1, places(0..64, 64..128));
    assert!(!table.exceeds(0) && table.exceeds(1));
    table.close();
    assert_eq!(table.admit(2, places(0..64, 128..192)), RequestVerdict::Closing);
    assert_eq!(table.in_flight(), 1);
    table.complete(1);
    assert_eq!(table.in_flight(), 0);
}

proptest! {
    /// Random clients: at no time do two calls in flight write the same byte, or one read what another writes; counts and
    /// charges return to zero.
    #[test]
    fn calls_in_flight_never_conflict(
        steps in prop::collection::vec((0_u64..8, prop::collection::vec((0_usize..18, 0_usize..4), 7), any::<bool>()), 1..80),
    ) {
        let mut table = CallTable::new(8, 1024);
        let mut model: HashMap<u64, RequestPlaces> = HashMap::new();
        for (call, ranges, complete) in steps {
            if complete {
                table.complete(call);
                model.remove(&call);
                continue;
            }
            let mut ranges = ranges.into_iter().map(|(at, len)| at * 64..(at + len) * 64);
            let mut next = || ranges.next().unwrap_or_default();
            let places = RequestPlaces {
                read: [next(), next(), next(), next()],
                written: [next(), next(), next()],
                copied: 100,
            };
            if table.admit(call, places.clone()) == RequestVerdict::Admitted {
                prop_assert!(model.insert(call, places).is_none());
            }
            let mut writers = [0_u32; 16];
            let mut readers = [0_u32; 16];
            for places in model.values() {
                let units = |range: &Range<usize>| range.start / 64..range.end / 64;
                places.written.iter().flat_map(units).for_each(|unit| writers[unit] += 1);
                let mut mine: Vec<usize> = places.read.iter().flat_map(units).collect();
                mine.sort_unstable();
                mine.dedup();
                mine.into_iter().for_each(|unit| readers[unit] += 1);
            }
            for (writers, readers) in writers.iter().zip(readers) {
                prop_assert!(*writers <= 1 && (*writers == 0 || readers == 0));
            }
            prop_assert_eq!(table.in_flight(), model.len());
            prop_assert_eq!(table.copied, model.len() * 100);
        }
    }
}
