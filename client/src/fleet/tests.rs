//! Single decisions of the client's state; [`simulation`](super::simulation) has the rest.

use std::collections::BTreeSet;
use std::time::Duration;

use super::{Choice, Content, Draws, Ended, Facts, Fleet, Limits, State};

fn content() -> Content {
    Content("m".to_owned())
}

#[test]
fn a_layer_that_no_service_holds_is_known_to_be_missing_once_all_have_answered() {
    let mut fleet = Fleet::new(Limits::default());
    let now = Duration::from_secs(1);
    let ids = [fleet.add(), fleet.add()];
    let facts = |layer| Facts { content: content(), layers: BTreeSet::from([layer]) };
    assert_eq!(fleet.choose(7, 1, 0, now), Choice::Wait { until: None });
    for (id, layer) in ids.into_iter().zip(0..) {
        fleet.connected(id);
        fleet.learned(id, facts(layer), now);
        assert_eq!(fleet.choose(7, 1, 0, now), Choice::Wait { until: None });
        fleet.observed(id, State::Serving, now);
    }
    assert_eq!(fleet.choose(7, 1, 0, now), Choice::NoSuchLayer);
    fleet.observed(ids[0], State::Lost, now);
    assert_eq!(
        fleet.choose(7, 1, 0, now),
        Choice::Wait { until: None },
        "it may come back with other layers"
    );
}

#[test]
fn a_service_that_refuses_pauses_for_the_time_that_it_states() {
    let mut fleet = Fleet::new(Limits::default());
    let ms = Duration::from_millis;
    let id = fleet.add();
    fleet.connected(id);
    fleet.learned(id, Facts { content: content(), layers: BTreeSet::from([0]) }, ms(0));
    fleet.observed(id, State::Serving, ms(0));
    let take = |fleet: &mut Fleet, now| match fleet.choose(0, 5, 9, now) {
        Choice::Take(ticket) => ticket,
        other => panic!("{other:?}"),
    };
    let ticket = take(&mut fleet, ms(1));
    assert_eq!(fleet.outstanding_rows(id), 5);
    fleet.ended(ticket, Ended::Refused { after: Some(ms(200)) }, ms(10));
    assert_eq!(fleet.outstanding_rows(id), 0);
    assert_eq!(fleet.choose(0, 5, 9, ms(209)), Choice::Wait { until: Some(ms(210)) });
    let ticket = take(&mut fleet, ms(210));
    // An hour is longer than any pause may be.
    fleet.ended(ticket, Ended::Refused { after: Some(ms(3_600_000)) }, ms(220));
    assert_eq!(fleet.choose(0, 5, 9, ms(221)), Choice::Wait { until: Some(ms(1220)) });
    // A new connection is a new start, and what ended on the old one does not count against it.
    let ticket = take(&mut fleet, ms(1300));
    fleet.connected(id);
    fleet.observed(id, State::Serving, ms(1301));
    fleet.ended(ticket, Ended::Lost, ms(1302));
    assert_eq!(fleet.state(id), Some(State::Serving));
}

#[test]
fn the_less_loaded_of_two_gets_the_request() {
    let mut fleet = Fleet::new(Limits::default());
    let ids = [fleet.add(), fleet.add(), fleet.add()];
    for id in ids {
        fleet.learned(id, Facts { content: content(), layers: BTreeSet::from([0]) }, Duration::ZERO);
        fleet.observed(id, State::Serving, Duration::ZERO);
    }
    let mut draws = Draws(1);
    let mut tickets = Vec::new();
    for _ in 0..3000 {
        if let Choice::Take(ticket) = fleet.choose(0, 4, draws.next(), Duration::ZERO) {
            tickets.push(ticket);
        }
    }
    let rows: Vec<u64> = ids.iter().map(|&id| fleet.outstanding_rows(id)).collect();
    // One random choice would differ by about 2 % (60 of 4000 rows); two keep the difference to a few requests.
    assert!(
        rows.iter().max().zip(rows.iter().min()).is_some_and(|(most, least)| most - least <= 40),
        "{rows:?}"
    );
}
