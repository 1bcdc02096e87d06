//! Exchanges of whole groups, which must equal the reference bit by bit.

use std::thread;
use std::time::Duration;

use proptest::prelude::*;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;

/// The order in which every rank runs its exchanges.
#[derive(Clone, Copy, Debug)]
enum Order {
    /// One exchange after the other.
    Plain,
    /// Dispatch A, dispatch B, combine A, combine B.
    Interleaved,
    /// As [`Interleaved`](Self::Interleaved), with every send before any wait.
    Split,
}

/// Runs `steps` on one rank and returns its outputs.
fn run_rank(group: &mut CpuGroup, steps: &[Step], order: Order, delays: &mut ChaCha8Rng) -> Vec<Vec<f32>> {
    let (me, slots, hidden) = (group.config.rank.index(), group.config.slots, group.config.hidden);
    let mut outputs = vec![];
    let mut delay = || match delays.random_range(0..8) {
        0 => thread::sleep(Duration::from_micros(delays.random_range(0..400))),
        1 => thread::yield_now(),
        _ => {}
    };
    let group_size = if matches!(order, Order::Plain) { 1 } else { slots };
    for (round, together) in steps.chunks(group_size).enumerate() {
        // The first slot changes from round to round, so that an exchange's slot differs from its position in the round.
        let slot = |i: usize| Slot(((round + i) % slots) as u32);
        let mut outs: Vec<_> = together.iter().map(|s| vec![f32::NAN; s.ranks[me].count * hidden]).collect();
        for (i, step) in together.iter().enumerate() {
            let tokens = &step.ranks[me];
            delay();
            group.prepare(slot(i), routing(step, me)).expect("prepare");
            delay();
            group.dispatch_send(slot(i), &tokens.rows, None).expect("send");
            if !matches!(order, Order::Split) {
                group.dispatch_wait(slot(i)).expect("dispatch");
            }
        }
        for (i, step) in together.iter().enumerate() {
            delay();
            if matches!(order, Order::Split) {
                group.dispatch_wait(slot(i)).expect("dispatch");
            }
            run_experts(group, slot(i), step);
            delay();
            if matches!(order, Order::Split) {
                group.combine_send(slot(i)).expect("send");
            } else {
                group.combine(slot(i), &mut outs[i], None).expect("combine");
            }
        }
        if matches!(order, Order::Split) {
            for (i, out) in outs.iter_mut().enumerate() {
                delay();
                group.combine_wait(slot(i), out, None).expect("combine");
            }
        }
        outputs.append(&mut outs);
    }
    outputs
}

fn run_group(groups: Vec<CpuGroup>, steps: &[Step], order: Order, seed: u64) -> Vec<Vec<Vec<f32>>> {
    thread::scope(|s| {
        let ranks: Vec<_> = groups
            .into_iter()
            .map(|mut group| {
                let mut delays = ChaCha8Rng::seed_from_u64(seed ^ u64::from(group.config.rank.0) << 32);
                s.spawn(move || run_rank(&mut group, steps, order, &mut delays))
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().expect("no panic")).collect()
    })
}

fn check(config: &EpConfig, steps: &[Step], order: Order, seed: u64) {
    let outputs = run_group(loopback(config).expect("memory"), steps, order, seed);
    for (rank, outputs) in outputs.iter().enumerate() {
        assert_eq!(outputs.len(), steps.len());
        for (n, (found, step)) in outputs.iter().zip(steps).enumerate() {
            let bits = |rows: &[f32]| rows.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(found), bits(&reference(step, rank, config.hidden)), "rank {rank}, step {n}");
        }
    }
}

fn random_tokens(
    rng: &mut ChaCha8Rng,
    count: usize,
    experts: usize,
    k: usize,
    hot: Option<i32>,
    hidden: usize,
) -> Tokens {
    let mut all: Vec<i32> = (0..experts as i32).collect();
    let mut ids = vec![];
    for _ in 0..count {
        all.shuffle(rng);
        if let Some(hot) = hot {
            let at = all.iter().position(|&id| id == hot).expect("an expert");
            all.swap(0, at);
        }
        ids.extend_from_slice(&all[..k]);
        if rng.random_bool(0.05) {
            // An unused choice, and sometimes a token without choices.
            let last = ids.len();
            let from = if rng.random() { last - k } else { last - 1 };
            ids[from..].fill(NO_EXPERT);
        }
    }
    let mut floats = |n: usize| (0..n).map(|_| rng.random_range(-2.0..2.0)).collect::<Vec<f32>>();
    Tokens { count, weights: floats(count * k), rows: floats(count * hidden), ids }
}

fn random_step(rng: &mut ChaCha8Rng, config: &EpConfig) -> Step {
    let experts = rng.random_range(1..=40);
    let k = rng.random_range(1..=experts.min(config.max_top_k));
    let ranks = config.ranks;
    // Contiguous ranges, which may be of unequal size or empty, an arbitrary placement, or copies on several ranks.
    let owners = match rng.random_range(0..3) {
        0 => ExpertOwners::single((0..experts).map(|e| Rank((e * ranks / experts) as u32))),
        1 => ExpertOwners::single((0..experts).map(|_| Rank(rng.random_range(0..ranks as u32)))),
        _ => ExpertOwners::new((0..experts).map(|_| {
            let mut owners: Vec<Rank> = (0..ranks as u32).map(Rank).filter(|_| rng.random()).collect();
            if owners.is_empty() {
                owners.push(Rank(rng.random_range(0..ranks as u32)));
            }
            owners
        })),
    };
    let hot = rng.random_bool(0.3).then(|| rng.random_range(0..experts as i32));
    let most = match rng.random_range(0..4) {
        0 => 0,
        1 => config.max_tokens_per_rank,
        _ => rng.random_range(0..=config.max_tokens_per_rank),
    };
    let counts: Vec<usize> = match rng.random_range(0..3) {
        0 => vec![most; ranks],
        1 => {
            let one = rng.random_range(0..ranks);
            (0..ranks).map(|r| if r == one { most } else { 0 }).collect()
        }
        _ => (0..ranks).map(|_| rng.random_range(0..=most)).collect(),
    };
    let ranks = counts.into_iter().map(|n| random_tokens(rng, n, experts, k, hot, config.hidden)).collect();
    Step { owners, k, ranks }
}

proptest! {
    #[test]
    fn exchanges_equal_the_reference_bit_by_bit(
        ranks in 1usize..=8,
        hidden in 1usize..=17,
        max_top_k in 1usize..=32,
        max_tokens_per_rank in 1usize..=24,
        slots in 2usize..=3,
        steps in 1usize..=8,
        spin in prop_oneof![Just(Duration::ZERO), Just(Duration::from_micros(2))],
        order in prop_oneof![Just(Order::Plain), Just(Order::Interleaved), Just(Order::Split)],
        seed in any::<u64>(),
    ) {
        let config = EpConfig { hidden, max_top_k, max_tokens_per_rank, slots, spin, ..config(ranks) };
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let steps: Vec<Step> = (0..steps).map(|_| random_step(&mut rng, &config)).collect();
        check(&config, &steps, order, seed);
    }
}

#[test]
fn large_steps_split_over_threads() {
    let config = EpConfig { hidden: 1024, max_tokens_per_rank: 300, ..config(2) };
    let mut rng = ChaCha8Rng::seed_from_u64(5);
    let steps: Vec<Step> = [300, 257, 1]
        .into_iter()
        .map(|n| Step {
            owners: ExpertOwners::single((0..7).map(|e| Rank(e % 2))),
            k: 3,
            ranks: (0..2).map(|_| random_tokens(&mut rng, n, 7, 3, None, config.hidden)).collect(),
        })
        .collect();
    check(&config, &steps, Order::Interleaved, 5);
}

#[test]
fn steps_may_shrink_grow_and_be_empty() {
    let config = config(3);
    let mut rng = ChaCha8Rng::seed_from_u64(11);
    let steps: Vec<Step> = [6, 1, 6, 0, 0, 0, 2, 0, 6]
        .into_iter()
        .map(|n| Step {
            owners: ExpertOwners::single([0, 0, 1, 1, 2].map(Rank)),
            k: 2,
            ranks: (0..3).map(|_| random_tokens(&mut rng, n, 5, 2, None, config.hidden)).collect(),
        })
        .collect();
    for order in [Order::Plain, Order::Interleaved, Order::Split] {
        check(&config, &steps, order, 11);
    }
}

#[test]
fn a_late_writer_of_an_old_generation_does_not_disturb_the_next() {
    let config = config(2);
    let mut old = loopback(&config).expect("memory");
    let mut late = old.pop().expect("two");
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let steps: Vec<Step> = (0..20).map(|_| random_step(&mut rng, &config)).collect();
    let stale = &steps.iter().find(|s| s.ranks[1].count > 0).expect("twenty steps");
    late.prepare(Slot(0), routing(stale, 1)).expect("idle");

    let next = EpConfig { generation: Generation(config.generation.0 + 1), ..config.clone() };
    let groups = loopback(&next).expect("memory");
    thread::scope(|s| {
        // The late rank wakes up while the next generation runs, and continues its exchange.
        s.spawn(move || {
            late.dispatch_send(Slot(0), &stale.ranks[1].rows, None)
                .expect("its own windows are still mapped");
            drop((late, old));
        });
        let outputs = run_group(groups, &steps, Order::Interleaved, 1);
        for (rank, outputs) in outputs.iter().enumerate() {
            for (found, step) in outputs.iter().zip(&steps) {
                assert_eq!(found, &reference(step, rank, config.hidden));
            }
        }
    });
}
