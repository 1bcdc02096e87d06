//! A simulation of hundreds of services that are killed, stopped, drained and restarted with other weights, under requests
//! with deadlines. Time is virtual and every random number comes from the seed, so a failure is repeated by its seed.

mod services;
mod world;

use world::{Event, World};

/// Seeds to run: `EXPERTD_SIMULATION_SEED` alone, or a few.
fn seeds() -> std::ops::Range<u64> {
    match std::env::var("EXPERTD_SIMULATION_SEED").ok().and_then(|text| text.parse::<u64>().ok()) {
        Some(seed) => seed..seed + 1,
        None => 0..4,
    }
}

#[test]
fn no_request_fails_while_services_die_stop_and_drain() {
    for seed in seeds() {
        let mut world = World::new(seed, 20, 3, 15);
        world.last_arrival = 60_000;
        world.at(1000, Event::Arrive);
        world.at(2000, Event::Fault);
        world.run(60_000);
        world.finish(seed);
        let answered: Vec<u64> = world.servers.iter().map(|server| server.answered).collect();
        let mean = answered.iter().sum::<u64>() / answered.len() as u64;
        assert!(answered.iter().all(|&one| one > mean / 3 && one < mean * 3), "seed {seed}: {answered:?}");
    }
}

#[test]
fn contents_are_never_mixed_in_a_rollout() {
    for seed in seeds() {
        let mut world = World::new(seed, 20, 3, 15);
        world.faults = false;
        world.last_arrival = 30_000;
        world.at(1000, Event::Arrive);
        // New weights on one service after the other, in random order.
        let mut order: Vec<usize> = (0..world.servers.len()).collect();
        for last in (1..order.len()).rev() {
            let other = world.draw(last as u64 + 1) as usize;
            order.swap(last, other);
        }
        world.rollout_order = order;
        world.at(3000, Event::Roll(0));
        world.run(30_000);
        world.finish(seed);
        // One switch: an answer of the old weights comes after one of the new weights only if it was sent before.
        let first_new = world.contents.iter().find(|(_, content)| *content == 1).map(|(at, _)| *at);
        let last_old = world.contents.iter().rfind(|(_, content)| *content == 0).map(|(at, _)| *at);
        let (first_new, last_old) =
            (first_new.expect("the new weights answer"), last_old.expect("the old did"));
        assert!(last_old <= first_new + 31, "seed {seed}: old until {last_old}, new from {first_new}");
    }
}
