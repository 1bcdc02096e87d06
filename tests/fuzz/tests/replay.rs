//! Runs every seed, every recorded regression, and mutations of them through their targets.

use std::path::Path;

use expertd_fuzz::{TARGETS, Target, seeds};
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};

/// Mutations of each input.
const MUTATIONS: usize = 100;

fn inputs(target: &Target) -> Vec<Vec<u8>> {
    let of_target = |seed: &seeds::Seed| seed.target == target.name;
    let mut inputs: Vec<_> = seeds::all().into_iter().filter(of_target).map(|seed| seed.data).collect();
    assert!(!inputs.is_empty(), "{} has no seeds", target.name);
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("regressions").join(target.name);
    for entry in std::fs::read_dir(folder).into_iter().flatten() {
        inputs.push(std::fs::read(entry.expect("a directory entry").path()).expect("a readable input"));
    }
    inputs
}

/// Flips, cuts, repeats or inserts bytes at a random place.
fn mutate(input: &[u8], random: &mut SmallRng) -> Vec<u8> {
    let mut data = input.to_vec();
    for _ in 0..random.random_range(1..4) {
        if data.is_empty() {
            data.push(random.random());
        }
        let at = random.random_range(0..data.len());
        match random.random_range(0..5) {
            0 => data[at] = random.random(),
            1 => data[at] ^= 1 << random.random_range(0..8),
            2 => data.truncate(at),
            3 => data.insert(at, random.random()),
            _ => data.extend_from_within(at..),
        }
    }
    data
}

#[test]
fn seeds_regressions_and_mutations_keep_every_promise() {
    for target in TARGETS {
        let mut random = SmallRng::seed_from_u64(1);
        for input in inputs(target) {
            (target.run)(&input);
            for _ in 0..MUTATIONS {
                (target.run)(&mutate(&input, &mut random));
            }
        }
    }
}

/// The seeds of these targets are valid inputs, so that fuzzing starts behind the first checks.
#[test]
fn seeds_are_accepted() {
    for seed in seeds::all() {
        match seed.target {
            "header" => expertd_model::fuzzing::header(&seed.data).expect("a valid header"),
            "index" => expertd_model::fuzzing::index(&seed.data).expect("a valid index"),
            "doorbells" => assert_eq!(expertd_sessions::fuzzing::cuda::doorbells(&seed.data), 6),
            "network-messages" => assert_eq!(expertd_fuzz::network::accepted(&seed.data), 4),
            _ => {}
        }
    }
}
