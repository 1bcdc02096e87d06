//! The life of weights, state by state.

use super::*;

type Life = Weights<&'static str, u32>;

const AT: Time = Time(0);

fn version(number: u64) -> WeightVersion {
    WeightVersion(number)
}

fn ask(has_room: bool) -> Ask<&'static str, u32> {
    Ask { source: "new", checked_against: version(1), has_room, ticket: 7 }
}

/// Weights whose first set is whole, and served by a generation.
fn served() -> Life {
    let mut life = Life::new(version(1), "first");
    assert!(matches!(life.form(), Need::Load(WeightVersion(1), "first")));
    assert_eq!(life.loaded(AT), Loaded::Serve(version(1)));
    assert!(life.serves(version(1), AT).is_none());
    life
}

fn unneeded(life: &mut Life) -> Vec<u64> {
    std::iter::from_fn(|| life.take_unneeded()).map(|version| version.0).collect()
}

fn serves(life: &mut Life, expected: u64) {
    assert!(matches!(life.form(), Need::Serve(set) if set.0 == expected), "{life:?}");
}

fn loads(life: &mut Life, expected: u64) {
    assert!(matches!(life.form(), Need::Load(set, _) if set.0 == expected), "{life:?}");
}

#[test]
fn new_weights_replace_those_that_serve() {
    let mut life = served();
    assert!(matches!(life.ask(ask(true), AT), Ok(Begin::Beside(WeightVersion(2), "new"))));
    assert_eq!(life.loaded(Time(5)), Loaded::Replace);
    life.group_ended(Time(6));
    serves(&mut life, 2);
    assert!(unneeded(&mut life).is_empty(), "the earlier weights are kept until the new ones serve");
    let (ticket, reloaded) = life.serves(version(2), Time(9)).unwrap();
    let times = (reloaded.load_time.as_nanos(), reloaded.pause.as_nanos());
    assert_eq!((ticket, reloaded.version, times), (7, version(2), (5, 3)));
    assert_eq!((unneeded(&mut life), *life.source()), (vec![1], "new"));
}

#[test]
fn weights_without_room_are_dropped_first() {
    let mut life = served();
    assert!(matches!(life.ask(ask(false), AT), Ok(Begin::Drop)));
    assert!(unneeded(&mut life).is_empty());
    life.group_ended(Time(1));
    loads(&mut life, 2);
    assert_eq!(unneeded(&mut life), [1]);
    assert_eq!(life.loaded(Time(4)), Loaded::Serve(version(2)));
    let (_, reloaded) = life.serves(version(2), Time(5)).unwrap();
    assert_eq!(reloaded.pause.as_nanos(), 4);
    assert!(unneeded(&mut life).is_empty());
}

#[test]
fn loaders_that_find_no_room_have_the_present_weights_dropped() {
    let mut life = served();
    life.ask(ask(true), AT).unwrap();
    assert!(matches!(life.not_loaded(true), NotLoaded::DropFirst));
    life.group_ended(AT);
    loads(&mut life, 2);
    assert_eq!(unneeded(&mut life), [1]);
}

#[test]
fn the_present_weights_go_on_after_loaders_have_failed() {
    let mut life = served();
    life.ask(ask(true), AT).unwrap();
    assert!(matches!(life.not_loaded(false), NotLoaded::GoOn(7)));
    life.group_ended(AT);
    serves(&mut life, 1);
}

#[test]
fn dropped_weights_are_loaded_again_after_a_failure() {
    let mut life = served();
    life.ask(ask(false), AT).unwrap();
    life.group_ended(AT);
    loads(&mut life, 2);
    assert!(matches!(life.not_loaded(true), NotLoaded::Again(7)));
    loads(&mut life, 1);
    assert_eq!(life.loaded(AT), Loaded::Serve(version(1)));
    assert!(life.serves(version(1), AT).is_none());
}

#[test]
fn a_generation_that_never_served_new_weights_takes_them_with_it() {
    for has_room in [true, false] {
        let mut life = served();
        life.ask(ask(has_room), AT).unwrap();
        life.group_ended(AT);
        if has_room {
            assert_eq!(life.loaded(AT), Loaded::Replace);
            serves(&mut life, 2);
        } else {
            loads(&mut life, 2);
            assert_eq!(life.loaded(AT), Loaded::Serve(version(2)));
            assert_eq!(unneeded(&mut life), [1]);
        }
        assert_eq!(life.fault(), Some(7));
        assert!(unneeded(&mut life).is_empty(), "its ranks have them");
        life.group_ended(AT);
        assert_eq!(unneeded(&mut life), [2]);
        if has_room {
            serves(&mut life, 1);
        } else {
            loads(&mut life, 1);
        }
    }
}

#[test]
fn a_fault_of_an_earlier_generation_leaves_a_reload_alone() {
    let mut life = served();
    life.ask(ask(true), AT).unwrap();
    assert_eq!(life.fault(), None);
    life.group_ended(AT);
    serves(&mut life, 1);
    assert_eq!(life.loaded(AT), Loaded::Replace);
    assert_eq!(life.fault(), None, "the generation was formed for the earlier weights");
    life.group_ended(AT);
    serves(&mut life, 2);
}

#[test]
fn weights_that_could_not_be_loaded_are_loaded_for_the_next_generation() {
    let mut life = Life::new(version(1), "first");
    loads(&mut life, 1);
    assert!(matches!(life.not_loaded(false), NotLoaded::Fault));
    life.group_ended(AT);
    loads(&mut life, 1);
    assert_eq!(life.loaded(AT), Loaded::Serve(version(1)));
}

#[test]
fn reloads_are_refused_while_they_cannot_begin() {
    let mut life = Life::new(version(1), "first");
    let refused = |life: &mut Life, asked| life.ask(asked, AT).unwrap_err().1;
    assert!(refused(&mut life, ask(true)).contains("still being loaded"));
    let mut life = served();
    let outdated = Ask { checked_against: version(0), ..ask(true) };
    assert!(refused(&mut life, outdated).contains("has begun to serve"));
    life.ask(ask(true), AT).unwrap();
    assert!(refused(&mut life, ask(true)).contains("another reload"));
    assert_eq!(life.cancel(), Some(7));
    assert!(life.ask(ask(true), AT).is_ok());
}
