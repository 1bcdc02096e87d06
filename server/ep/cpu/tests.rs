//! Dispatch and combine against a plain reference, over ranks that are threads.

use std::thread;
use std::time::Duration;

use proptest::prelude::*;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;
use crate::shm::exchange::{ExchangeError, FaultCause};
use crate::types::Generation;

fn config(ranks: usize) -> EpConfig {
    EpConfig {
        ranks,
        rank: Rank(0),
        hidden: 5,
        max_top_k: 4,
        max_tokens_per_rank: 6,
        slots: 2,
        generation: Generation(3),
        wait_deadline: Duration::from_secs(60),
        spin: 0,
        poison: true,
    }
}

/// One rank's tokens in one exchange.
#[derive(Clone, Debug)]
struct Tokens {
    count: usize,
    ids: Vec<i32>,
    weights: Vec<f32>,
    rows: Vec<f32>,
}

/// One exchange of the whole group.
#[derive(Clone, Debug)]
struct Step {
    owners: Vec<Rank>,
    k: usize,
    ranks: Vec<Tokens>,
}

/// What "expert" `id` makes of element `i` of a row: cheap, different for each, and rounded by f32.
fn expert(id: i32, weight: f32, x: f32, i: usize) -> f32 {
    weight * (x * (0.37 + id as f32 * 0.61) + (i as f32 - id as f32) * 0.013)
}

/// Partial sum over the choices in order.
fn partial(ids: &[i32], weights: &[f32], row: &[f32], mine: impl Fn(i32) -> bool, out: &mut [f32]) {
    out.fill(0.0);
    for (&id, &weight) in ids.iter().zip(weights).filter(|(id, _)| mine(**id)) {
        for (i, (out, &x)) in out.iter_mut().zip(row).enumerate() {
            *out += expert(id, weight, x, i);
        }
    }
}

fn reference(step: &Step, rank: usize, hidden: usize) -> Vec<f32> {
    let tokens = &step.ranks[rank];
    let mut out = vec![0.0; tokens.count * hidden];
    let mut part = vec![0.0; hidden];
    for (t, out) in out.chunks_exact_mut(hidden).enumerate() {
        let (ids, weights) = (&tokens.ids[t * step.k..][..step.k], &tokens.weights[t * step.k..][..step.k]);
        let mut first = true;
        for owner in (0..step.ranks.len() as u32).map(Rank) {
            let mine = |id: i32| id >= 0 && step.owners[id as usize] == owner;
            if ids.iter().any(|&id| mine(id)) {
                partial(ids, weights, &tokens.rows[t * hidden..][..hidden], mine, &mut part);
                out.iter_mut().zip(&part).for_each(|(o, p)| *o = if first { *p } else { *o + p });
                first = false;
            }
        }
    }
    out
}

fn routing<'a>(step: &'a Step, tokens: &'a Tokens) -> HostRouting<'a> {
    HostRouting {
        owners: &step.owners,
        tokens: tokens.count,
        k: step.k,
        ids: &tokens.ids,
        weights: &tokens.weights,
    }
}

/// The experts phase: what arrived is checked, partial rows are written.
fn run_experts(group: &mut CpuGroup, slot: Slot, step: &Step) {
    let (hidden, me) = (group.config.hidden, group.config.rank);
    let work = group.work(slot).expect("ready");
    assert_eq!(work.len(), step.ranks.len());
    for (source, batch) in work.enumerate() {
        let sent = &step.ranks[source];
        let wanted: Vec<usize> = (0..sent.count)
            .filter(|t| {
                let ids = &sent.ids[t * step.k..][..step.k];
                ids.iter().any(|&id| id >= 0 && step.owners[id as usize] == me)
            })
            .collect();
        assert_eq!((batch.source, batch.k), (Rank(source as u32), step.k));
        assert_eq!(batch.rows.len(), wanted.len() * hidden, "each row once, and no other rows");
        assert_eq!(batch.partials.len(), batch.rows.len());
        assert_eq!((batch.ids.len(), batch.weights.len()), (wanted.len() * step.k, wanted.len() * step.k));
        for (row, t) in wanted.into_iter().enumerate() {
            let x = &batch.rows[row * hidden..][..hidden];
            assert_eq!(x, &sent.rows[t * hidden..][..hidden]);
            let (ids, weights) =
                (&batch.ids[row * step.k..][..step.k], &batch.weights[row * step.k..][..step.k]);
            for j in 0..step.k {
                let id = sent.ids[t * step.k + j];
                let mine = id >= 0 && step.owners[id as usize] == me;
                let expected = if mine { (id, sent.weights[t * step.k + j]) } else { (NO_EXPERT, 0.0) };
                assert_eq!((ids[j], weights[j]), expected);
            }
            partial(ids, weights, x, |id| id >= 0, &mut batch.partials[row * hidden..][..hidden]);
        }
    }
}

/// In which order a rank runs its exchanges; the same on every rank.
#[derive(Clone, Copy, Debug)]
enum Order {
    /// One after the other.
    Plain,
    /// Dispatch A, dispatch B, combine A, combine B.
    Interleaved,
    /// As before, with every send before any wait.
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
        // The first slot used moves on, so that slots and positions in a round are not the same thing.
        let slot = |i: usize| Slot(((round + i) % slots) as u32);
        let mut outs: Vec<_> = together.iter().map(|s| vec![f32::NAN; s.ranks[me].count * hidden]).collect();
        for (i, step) in together.iter().enumerate() {
            let tokens = &step.ranks[me];
            delay();
            group.prepare(slot(i), routing(step, tokens)).expect("prepare");
            delay();
            group.dispatch_send(slot(i), &tokens.rows).expect("send");
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
                group.combine(slot(i), &mut outs[i]).expect("combine");
            }
        }
        if matches!(order, Order::Split) {
            for (i, out) in outs.iter_mut().enumerate() {
                delay();
                group.combine_wait(slot(i), out).expect("combine");
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
            // An unused choice, and sometimes a token without any.
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
    // Contiguous ranges, which need not divide evenly and may be empty; or any placement at all.
    let owners = if rng.random() {
        (0..experts).map(|e| Rank((e * ranks / experts) as u32)).collect()
    } else {
        (0..experts).map(|_| Rank(rng.random_range(0..ranks as u32))).collect()
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
    fn equals_the_reference_bit_by_bit(
        ranks in 1usize..=8,
        hidden in 1usize..=17,
        max_top_k in 1usize..=32,
        max_tokens_per_rank in 1usize..=24,
        slots in 2usize..=3,
        steps in 1usize..=8,
        spin in prop_oneof![Just(0u32), Just(50)],
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
            owners: (0..7).map(|e| Rank(e % 2)).collect(),
            k: 3,
            ranks: (0..2).map(|_| random_tokens(&mut rng, n, 7, 3, None, config.hidden)).collect(),
        })
        .collect();
    check(&config, &steps, Order::Interleaved, 5);
}

#[test]
fn batches_shrink_grow_and_vanish() {
    let config = config(3);
    let mut rng = ChaCha8Rng::seed_from_u64(11);
    let steps: Vec<Step> = [6, 1, 6, 0, 0, 0, 2, 0, 6]
        .into_iter()
        .map(|n| Step {
            owners: vec![Rank(0), Rank(0), Rank(1), Rank(1), Rank(2)],
            k: 2,
            ranks: (0..3).map(|_| random_tokens(&mut rng, n, 5, 2, None, config.hidden)).collect(),
        })
        .collect();
    for order in [Order::Plain, Order::Interleaved, Order::Split] {
        check(&config, &steps, order, 11);
    }
}

fn no_tokens(ranks: usize) -> Step {
    let none = Tokens { count: 0, ids: vec![], weights: vec![], rows: vec![] };
    Step { owners: vec![Rank(0)], k: 1, ranks: vec![none; ranks] }
}

/// Runs one rank's whole exchange without tokens.
fn empty_exchange(group: &mut CpuGroup, slot: Slot) -> Result<(), EpError> {
    let step = no_tokens(1);
    group.prepare(slot, routing(&step, &step.ranks[0]))?;
    group.dispatch(slot, &[])?;
    group.combine(slot, &mut [])
}

#[test]
fn a_peer_that_never_arrives_is_named_and_ends_every_wait() {
    let region = create_windows(&config(3)).expect("memory");
    let attach = |rank, wait_deadline| {
        CpuGroup::attach(&region, EpConfig { rank: Rank(rank), wait_deadline, ..config(3) }).expect("fresh")
    };
    let short = Duration::from_millis(50);
    let (mut first, mut last) = (attach(0, short), attach(2, Duration::from_secs(3600)));
    thread::scope(|s| {
        // This one would wait for an hour if nobody told it.
        let last = s.spawn(move || empty_exchange(&mut last, Slot(0)).expect_err("rank 1 is missing"));
        let error = empty_exchange(&mut first, Slot(0)).expect_err("rank 1 is missing");
        // Rank 2's thread may be late as well, but rank 1 is missing for sure.
        let EpError::Exchange(ExchangeError::Missing { phase: "dispatch", peers, waited, .. }) = &error
        else {
            panic!("{error}");
        };
        assert!(peers.contains(&Rank(1)) && !peers.contains(&Rank(0)));
        assert_eq!(*waited, short);
        assert!(!error.is_misuse());
        let told = last.join().expect("no panic");
        let EpError::Exchange(ExchangeError::Fault { rank: Rank(0), cause: FaultCause::Missed(_) }) = told
        else {
            panic!("{told}");
        };
    });
    let after = empty_exchange(&mut first, Slot(1)).expect_err("ended");
    assert!(matches!(after, EpError::Exchange(ExchangeError::Ended)), "{after}");
}

#[test]
fn a_peer_missing_in_combine_is_named() {
    let mut groups =
        loopback(&EpConfig { wait_deadline: Duration::from_millis(200), ..config(2) }).expect("memory");
    let mut absent = groups.pop().expect("two");
    let mut present = groups.pop().expect("two");
    let step = no_tokens(2);
    for group in [&mut absent, &mut present] {
        group.prepare(Slot(0), routing(&step, &step.ranks[0])).expect("idle");
        group.dispatch_send(Slot(0), &[]).expect("open");
    }
    present.dispatch_wait(Slot(0)).expect("both sent");
    let error = present.combine(Slot(0), &mut []).expect_err("rank 1 never combines");
    let expected = "combine of exchange 1 waited 200ms for rank(s) 1";
    assert_eq!(error.to_string(), expected);
}

#[test]
fn leaving_in_the_midst_stops_the_peers() {
    for abort in [false, true] {
        let mut groups =
            loopback(&EpConfig { wait_deadline: Duration::from_secs(3600), ..config(3) }).expect("memory");
        let mut leaver = groups.pop().expect("three");
        thread::scope(|s| {
            let waiting: Vec<_> = groups
                .iter_mut()
                .map(|g| s.spawn(move || empty_exchange(g, Slot(0)).expect_err("rank 2 left")))
                .collect();
            let step = no_tokens(3);
            leaver.prepare(Slot(0), routing(&step, &step.ranks[0])).expect("idle");
            leaver.dispatch(Slot(0), &[]).expect("all arrive");
            if abort {
                leaver.abort();
                assert!(leaver.combine_send(Slot(0)).is_err());
            }
            drop(leaver);
            for rank in waiting {
                let error = rank.join().expect("no panic").to_string();
                assert_eq!(error, "rank 2 failed or left during an exchange");
            }
        });
    }
}

type Call<'a> = &'a dyn Fn(&mut CpuGroup) -> Result<(), EpError>;

#[test]
fn calls_out_of_order_are_errors_that_change_nothing() {
    let mut group = loopback(&config(1)).expect("memory").pop().expect("one");
    let step = Step {
        owners: vec![Rank(0); 3],
        k: 2,
        ranks: vec![Tokens {
            count: 1,
            ids: vec![2, 0],
            weights: vec![0.5, 0.25],
            rows: vec![1.0, 2.0, 3.0, 4.0, 5.0],
        }],
    };
    let tokens = &step.ranks[0];
    let mut out = [f32::NAN; 5];
    // Tries every call but the one that is due; each must be refused as misuse.
    let refuse = |group: &mut CpuGroup, due: usize| {
        let slot = Slot(0);
        let calls: [Call<'_>; 6] = [
            &|g| g.prepare(slot, routing(&step, tokens)).map(drop),
            &|g| g.dispatch_send(slot, &tokens.rows),
            &|g| g.dispatch_wait(slot),
            &|g| g.work(slot).map(drop),
            &|g| g.combine_send(slot),
            &|g| g.combine_wait(slot, &mut [0.0; 5]),
        ];
        for (i, call) in calls.iter().enumerate() {
            // Work may be asked for as often as one likes, and combining is due beside it.
            if i != due && !(due == 3 && i == 4) {
                let error = call(group).expect_err("not due");
                assert!(
                    matches!(error, EpError::Exchange(ExchangeError::State { .. })),
                    "{due} {i}: {error}"
                );
                assert!(error.is_misuse());
            }
        }
    };
    for _ in 0..3 {
        refuse(&mut group, 0);
        group.prepare(Slot(0), routing(&step, tokens)).expect("due");
        refuse(&mut group, 1);
        assert!(matches!(group.dispatch_send(Slot(0), &[0.0; 4]), Err(EpError::Length { what: "rows", .. })));
        group.dispatch_send(Slot(0), &tokens.rows).expect("due");
        refuse(&mut group, 2);
        group.dispatch_wait(Slot(0)).expect("due");
        refuse(&mut group, 3);
        run_experts(&mut group, Slot(0), &step);
        group.combine_send(Slot(0)).expect("due");
        refuse(&mut group, 5);
        assert!(matches!(
            group.combine_wait(Slot(0), &mut [0.0; 6]),
            Err(EpError::Length { what: "out", .. })
        ));
        group.combine_wait(Slot(0), &mut out).expect("due");
        assert_eq!(out.as_slice(), reference(&step, 0, 5));
    }
    let error = group.prepare(Slot(2), routing(&step, tokens)).expect_err("no such slot");
    assert!(error.is_misuse() && error.to_string() == "slot 2 is not one of 2 slots", "{error}");
}

#[test]
fn bad_routing_is_refused_and_leaves_the_slot_idle() {
    let mut group = loopback(&config(2)).expect("memory").remove(0);
    let owners = [Rank(0), Rank(1), Rank(2)];
    let (ids, weights) = ([0, 1], [1.0, 1.0]);
    let good = HostRouting { owners: &owners, tokens: 1, k: 2, ids: &ids, weights: &weights };
    let many = [0; 14];
    let cases = [
        (HostRouting { tokens: 7, ids: &many, ..good }, "tokens is 7, the group was made for at most 6"),
        (HostRouting { k: 5, ..good }, "k is 5, the group was made for at most 4"),
        (HostRouting { k: 0, ..good }, "k is 0, the group was made for at most 4"),
        (HostRouting { tokens: 2, ..good }, "ids has 2 elements, expected 4"),
        (HostRouting { weights: &[1.0], ..good }, "weights has 1 elements, expected 2"),
        (HostRouting { ids: &[0, 3], ..good }, "token 0 chooses expert 3, but the layer has experts 0 to 2"),
        (
            HostRouting { ids: &[0, -2], ..good },
            "token 0 chooses expert -2, but the layer has experts 0 to 2",
        ),
        (HostRouting { ids: &[0, 2], ..good }, "expert 2 is placed on rank 2, but the group has 2 ranks"),
    ];
    for (routing, message) in cases {
        let error = group.prepare(Slot(0), routing).expect_err(message);
        assert_eq!(error.to_string(), message);
        assert!(error.is_misuse());
    }
    group.prepare(Slot(0), good).expect("still idle");
}

#[test]
fn ranks_that_run_different_steps_find_out() {
    // Another k.
    let mut groups = loopback(&config(2)).expect("memory");
    for (group, k) in groups.iter_mut().zip([1, 2]) {
        let routing = HostRouting { owners: &[Rank(0)], tokens: 0, k, ids: &[], weights: &[] };
        group.prepare(Slot(0), routing).expect("idle");
        group.dispatch_send(Slot(0), &[]).expect("open");
    }
    let error = groups[0].dispatch_wait(Slot(0)).expect_err("k differs");
    assert!(
        matches!(error, EpError::Exchange(ExchangeError::Head { peer: Rank(1), k: 2, expected_k: 1, .. })),
        "{error}"
    );

    // Another number of exchanges: rank 1 has begun one in the other slot first.
    let mut groups = loopback(&config(2)).expect("memory");
    let step = no_tokens(2);
    for (group, slots) in groups.iter_mut().zip([&[0][..], &[1, 0]]) {
        for &slot in slots {
            group.prepare(Slot(slot), routing(&step, &step.ranks[0])).expect("idle");
            group.dispatch_send(Slot(slot), &[]).expect("open");
        }
    }
    let error = groups[0].dispatch_wait(Slot(0)).expect_err("ahead");
    assert!(matches!(error, EpError::Exchange(ExchangeError::Ahead { peer: Rank(1), .. })), "{error}");
    let error = groups[1].dispatch_wait(Slot(0)).expect_err("told");
    assert!(matches!(error, EpError::Exchange(ExchangeError::Fault { rank: Rank(0), .. })), "{error}");
}

#[test]
fn a_late_writer_of_an_old_generation_writes_nowhere() {
    let config = config(2);
    let mut old = loopback(&config).expect("memory");
    let mut late = old.pop().expect("two");
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let steps: Vec<Step> = (0..20).map(|_| random_step(&mut rng, &config)).collect();
    let stale = &steps.iter().find(|s| s.ranks[1].count > 0).expect("twenty steps");
    late.prepare(Slot(0), routing(stale, &stale.ranks[1])).expect("idle");

    let next = EpConfig { generation: Generation(config.generation.0 + 1), ..config.clone() };
    let groups = loopback(&next).expect("memory");
    thread::scope(|s| {
        // The late rank wakes up while the next generation works, and goes on as if nothing had happened.
        s.spawn(move || {
            late.dispatch_send(Slot(0), &stale.ranks[1].rows).expect("its own windows are still mapped");
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

#[test]
fn windows_are_joined_once_by_ranks_of_the_same_shape() {
    let config = config(2);
    let region = create_windows(&config).expect("memory");
    let join = |config: EpConfig| CpuGroup::attach(&region, config).expect_err("must not fit").to_string();
    let wrong = EpConfig { generation: Generation(4), ..config.clone() };
    assert_eq!(join(wrong), "the windows were created with generation = 3, this rank expects 4");
    let wrong = EpConfig { max_top_k: 3, ..config.clone() };
    assert_eq!(join(wrong), "the windows were created with max_top_k = 4, this rank expects 3");
    let fd = rustix::io::fcntl_dupfd_cloexec(&*region, 0).expect("dup");
    let wrong = EpConfig { max_tokens_per_rank: 5000, ..config.clone() };
    let error = CpuGroup::from_fd(fd, wrong).expect_err("another length").to_string();
    assert!(error.starts_with("inherited shared memory has"), "{error}");
    let _first = CpuGroup::attach(&region, config.clone()).expect("fresh");
    let error = join(config);
    assert!(error.contains("has been claimed before"), "{error}");
}
