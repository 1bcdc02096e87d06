//! Schedules: the inputs of a simulation in order, generated from a seed.

use std::time::Duration;

use expertd_scheduler::{AGED_STEP_INTERVAL, Config, OnFault, RecoveryPolicy, StepKind};
use expertd_types::LayerId;

use super::random::Random;
use super::shares::MIN_CLOSED_LOOPS;

/// One event in or around the step loop. Each input is possible at any time. An input that does not apply does nothing, so any part of
/// a schedule is a schedule.
#[derive(Clone, Copy, Debug)]
pub enum Input {
    /// A caller submits a request.
    Submit {
        client: u64,
        kind: usize,
        tokens: usize,
        deadline_millis: Option<u64>,
        is_poison: bool,
        is_pinned: bool,
    },
    /// One of the callers that wait for an answer leaves.
    Leave { which: usize },
    /// A drain is requested.
    Drain { timeout_millis: u64 },
    /// The step loop's thread takes turns, each of which is an exchange, a delivery, an event or an action.
    Turns { count: usize },
    /// The thread takes turns until it sleeps.
    UntilAsleep,
    /// Time passes.
    Pass { micros: u64 },
    /// The ranks of the generation become ready.
    Ready,
    /// The oldest running experts phase ends.
    Experts,
    /// The oldest step completes on all ranks.
    Done,
    /// The generation ends by a fault.
    Fault { is_load: bool },
    /// The next generation cannot be started.
    NextFormFails,
    /// The next generation has other weights.
    NewWeights,
    /// Other weights are loaded, and the generation is to be replaced.
    Replace,
    /// Events of an ended generation arrive late.
    StaleNews,
    /// A client sends its next request as soon as one is answered.
    ClosedLoop { client: u64, kind: usize, tokens: usize },
    /// From now on a client always has at least `tokens` rows waiting, in requests of `size` rows.
    Backlog { client: u64, kind: usize, tokens: usize, size: usize },
    /// A step forms, computes and completes without faults, and clients send further requests.
    Round,
}

/// A schedule: the service's settings and the inputs.
#[derive(Clone, Debug)]
pub struct Schedule {
    pub config: Config,
    pub max_queued_tokens: usize,
    pub kinds: Vec<StepKind>,
    /// A layer of which every step ends its generation.
    pub broken: Option<LayerId>,
    pub inputs: Vec<Input>,
}

impl Schedule {
    /// The schedule of a seed.
    pub fn new(seed: u64) -> Schedule {
        let mut random = Random(seed.wrapping_mul(0x2545_f491_4f6c_dd1d));
        match random.between(0, 20) {
            0 => shared_backlog(&mut random, seed),
            1 => shared_closed_loop(&mut random, seed),
            2 => crowd(&mut random, seed),
            3 => split_and_late(&mut random, seed),
            _ => anything(&mut random, seed),
        }
    }
}

fn config(random: &mut Random, seed: u64) -> Config {
    let max_tokens_per_step = random.choose(&[1_usize, 4, 16, 64]);
    let ranks = random.between(1, 4) as usize;
    let per_rank = max_tokens_per_step.div_ceil(ranks);
    Config {
        ranks,
        slots: random.between(1, 3) as usize,
        max_tokens_per_step,
        max_segments_per_rank: if random.chance(80) { per_rank } else { random.between(1, 4) as usize },
        max_wait: Duration::from_micros(random.choose(&[0, 0, 0, 500, 20_000])),
        on_fault: random.choose(&[OnFault::Retry, OnFault::Retry, OnFault::Retry, OnFault::Fail]),
        recovery: RecoveryPolicy {
            max_unready: random.between(2, 5) as u32,
            max_fruitless: random.between(4, 10) as u32,
            max_poisoned_per_layer: random.between(2, 5) as u32,
            ..RecoveryPolicy::default()
        },
        seed,
    }
}

fn kinds(count: u64) -> Vec<StepKind> {
    (0..count).map(|i| StepKind { layer: LayerId(i as u32 / 2), top_k: 1 + i as usize % 2 }).collect()
}

/// Requests of all sizes, faults at every point, drains, and a thread that is interrupted anywhere.
fn anything(random: &mut Random, seed: u64) -> Schedule {
    let config = config(random, seed);
    let kind_count = random.between(1, 5);
    let clients = random.between(1, 6);
    let limit = config.max_tokens_per_step as u64;
    let fault_rate = random.choose(&[0, 1, 3, 8]);
    let poison_rate = random.choose(&[0, 0, 0, 2, 20, 100]);
    let pinned_rate = random.choose(&[0, 0, 30]);
    let deadline_rate = random.choose(&[0, 30, 60]);
    let patience = random.choose(&[1, 20, 3_000, 60_000]);
    let submit_rate = random.choose(&[10, 20, 40]);
    let mut inputs = Vec::new();
    if random.chance(90) {
        inputs.extend([Input::UntilAsleep, Input::Ready, Input::UntilAsleep]);
    }
    for _ in 0..random.between(20, 120) {
        let roll = random.between(0, 99);
        inputs.push(if roll < submit_rate {
            let largest = random.choose(&[1, limit, limit, 3 * limit]);
            Input::Submit {
                client: random.between(1, clients),
                kind: random.between(0, kind_count - 1) as usize,
                tokens: random.between(1, largest) as usize,
                deadline_millis: random.chance(deadline_rate).then(|| random.between(1, patience)),
                is_poison: random.chance(poison_rate),
                is_pinned: random.chance(pinned_rate),
            }
        } else {
            other(random, fault_rate)
        });
    }
    let max_queued_tokens = random.choose(&[1, 16, 64, 1000]) * config.max_tokens_per_step;
    let broken = random.chance(5).then_some(LayerId(0));
    Schedule { config, max_queued_tokens, kinds: kinds(kind_count), broken, inputs }
}

fn other(random: &mut Random, fault_rate: u64) -> Input {
    if random.chance(fault_rate) {
        return match random.between(0, 9) {
            0 => Input::NextFormFails,
            1 => Input::NewWeights,
            2 => Input::StaleNews,
            3 => Input::Fault { is_load: true },
            _ => Input::Fault { is_load: false },
        };
    }
    match random.between(0, 199) {
        0..70 => Input::Turns { count: random.between(1, 5) as usize },
        70..90 => Input::UntilAsleep,
        90..110 => Input::Pass { micros: random.choose(&[1, 100, 1_000, 30_000, 150_000, 6_000_000]) },
        110..130 => Input::Ready,
        130..160 => Input::Experts,
        160..190 => Input::Done,
        190..194 => Input::Leave { which: random.between(0, 30) as usize },
        194 | 195 => Input::Replace,
        196 => Input::NewWeights,
        197 => Input::StaleNews,
        198 => Input::Drain { timeout_millis: random.choose(&[0, 1, 50, 3_000, 30_000]) },
        _ => Input::Fault { is_load: false },
    }
}

fn healthy(random: &mut Random, seed: u64, limit: usize) -> Config {
    Config {
        max_tokens_per_step: limit,
        max_segments_per_rank: limit,
        max_wait: Duration::ZERO,
        ..config(random, seed)
    }
}

/// Clients that always have work waiting, over several kinds.
fn shared_backlog(random: &mut Random, seed: u64) -> Schedule {
    let config = healthy(random, seed, 64);
    let kind_count = random.between(1, 3);
    let mut inputs = vec![Input::UntilAsleep, Input::Ready, Input::UntilAsleep];
    for client in 1..=random.between(2, AGED_STEP_INTERVAL.into()) {
        let size = random.choose(&[1, 4, 8, 32, 64, 128]);
        for kind in 0..kind_count as usize {
            if kind == (client % kind_count) as usize || random.chance(30) {
                inputs.push(Input::Backlog { client, kind, tokens: 2 * 64 + size, size });
            }
        }
    }
    inputs.extend(vec![Input::Round; 200]);
    Schedule { config, max_queued_tokens: 1 << 20, kinds: kinds(kind_count), broken: None, inputs }
}

/// Clients that send their next request when the last one is answered.
fn shared_closed_loop(random: &mut Random, seed: u64) -> Schedule {
    let config = healthy(random, seed, 64);
    let mut inputs = vec![Input::UntilAsleep, Input::Ready, Input::UntilAsleep];
    // With more slots the smallest requests are larger, so that clients wait most of the time for any number of steps in flight.
    let smallest = if config.slots < 3 { 16 } else { 32 };
    for client in 1..=random.between(MIN_CLOSED_LOOPS as u64, 40) {
        inputs.push(Input::ClosedLoop { client, kind: 0, tokens: random.choose(&[smallest, 32, 64]) });
    }
    inputs.extend(vec![Input::Round; 400]);
    Schedule { config, max_queued_tokens: 1 << 20, kinds: kinds(1), broken: None, inputs }
}

/// Hundreds of clients with one request each.
fn crowd(random: &mut Random, seed: u64) -> Schedule {
    let config = healthy(random, seed, 16);
    let mut inputs = vec![Input::UntilAsleep, Input::Ready, Input::UntilAsleep];
    for client in 1..=random.between(100, 300) {
        let tokens = random.choose(&[1, 1, 5, 16]);
        inputs.push(Input::Submit {
            client,
            kind: 0,
            tokens,
            deadline_millis: None,
            is_poison: false,
            is_pinned: false,
        });
    }
    inputs.extend(vec![Input::Round; 20]);
    Schedule { config, max_queued_tokens: 1 << 20, kinds: kinds(1), broken: None, inputs }
}

/// Requests of several steps whose deadlines pass, or whose callers leave, while a step computes some of their rows.
fn split_and_late(random: &mut Random, seed: u64) -> Schedule {
    let limit = 16;
    let config = Config { slots: random.between(2, 3) as usize, ..healthy(random, seed, limit) };
    let mut inputs = vec![Input::UntilAsleep, Input::Ready, Input::UntilAsleep];
    for _ in 0..random.between(20, 60) {
        inputs.push(match random.between(0, 99) {
            0..30 => Input::Submit {
                client: random.between(1, 2),
                kind: 0,
                tokens: random.between(1, 4 * limit as u64) as usize,
                deadline_millis: random.chance(70).then(|| random.between(1, 3)),
                is_poison: false,
                is_pinned: false,
            },
            30..50 => Input::Pass { micros: random.choose(&[100, 500, 1_000]) },
            50..65 => Input::Experts,
            65..75 => Input::Done,
            75..80 => Input::Leave { which: random.between(0, 3) as usize },
            80 => Input::Fault { is_load: false },
            81 => Input::Ready,
            82 => Input::Replace,
            83 => Input::Drain { timeout_millis: random.choose(&[0, 1]) },
            _ => Input::UntilAsleep,
        });
    }
    Schedule { config, max_queued_tokens: 1 << 20, kinds: kinds(1), broken: None, inputs }
}
