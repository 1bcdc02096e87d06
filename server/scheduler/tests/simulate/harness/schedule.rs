//! Schedules: the inputs of a simulation in order, generated from a seed.

use std::time::Duration;

use expertd_scheduler::{AGED_STEP_INTERVAL, Config, OnFault, RecoveryPolicy, StepKind};
use expertd_types::LayerId;

use super::shares::MIN_CLOSED_LOOPS;
use super::with_sessions;
use expertd_test_seed::Random;

/// One event in or around the driver. Each input is possible at any time. An input that does not apply does nothing, so any part of a
/// schedule is a schedule.
#[derive(Clone, Copy, Debug)]
pub enum Input {
    /// A caller submits a request, through a session if one is open and `session` is given.
    Submit {
        client: u64,
        kind: usize,
        tokens: usize,
        deadline_millis: Option<u64>,
        is_poison: bool,
        is_pinned: bool,
        session: Option<usize>,
    },
    /// One of the callers that wait for an answer leaves.
    Leave { which: usize },
    /// A drain is requested.
    Drain { timeout_millis: u64 },
    /// The driver makes this many calls.
    Turns { count: usize },
    /// The driver goes on until it sleeps.
    UntilAsleep,
    /// Time passes.
    Pass { micros: u64 },
    /// The weights that a generation waits for are packed, or else its ranks become ready.
    Ready,
    /// The oldest running experts phase ends.
    Experts,
    /// A rank tells the calls of the oldest step that they have ended. `skips`: after a fault, the calls of the next one.
    Tell { skips: bool },
    /// The oldest step completes on all ranks.
    Done,
    /// The generation, or the loaders that it waits for, end by a fault.
    Fault { is_load: bool },
    /// What the driver does next of this fails.
    NextFails { what: Failing },
    /// A reload is asked for.
    Reload { has_room: bool, is_quick: bool, is_outdated: bool },
    /// Loaders pack their set.
    Packed,
    /// A loader dies, or finds no room.
    LoaderDies { lacks_room: bool },
    /// A client opens a session.
    OpenSession,
    /// A client of a session goes.
    EndSession { which: usize },
    /// A rank answers the order about a memory that is under way.
    RankAnswers { refuses: bool },
    /// Killed ranks are reaped.
    Reaped,
    /// A rank answers an order that it was not given.
    RankLies,
    /// The order under way takes too long.
    OrderIsLate,
    /// Events of an ended generation arrive late.
    StaleNews,
    /// A client sends its next request as soon as one is answered.
    ClosedLoop { client: u64, kind: usize, tokens: usize },
    /// From now on a client always has at least `tokens` rows waiting, in requests of `size` rows.
    Backlog { client: u64, kind: usize, tokens: usize, size: usize },
    /// A step forms, computes and completes without faults, and clients send further requests. The next step forms when the experts
    /// phase of this one ends, if a slot is free.
    Round,
    /// A round has ended.
    EndRound,
}

/// What can fail at once.
#[derive(Clone, Copy, Debug)]
pub enum Failing {
    /// Loaders cannot be started.
    Load,
    /// Ranks cannot be started.
    Form,
    /// A step cannot be handed to ranks.
    Launch,
    /// Processes of ranks that are ended do not end.
    End,
    /// The next ranks that are ended take their time.
    QuickEnd,
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

/// The first weights are loaded, and the first generation serves.
pub(super) const BEGIN: [Input; 5] =
    [Input::UntilAsleep, Input::Ready, Input::UntilAsleep, Input::Ready, Input::UntilAsleep];

impl Schedule {
    /// The schedule of a seed.
    pub fn new(seed: u64) -> Schedule {
        let mut random = Random(seed.wrapping_mul(0x2545_f491_4f6c_dd1d));
        match random.between(0, 24) {
            0 => shared_backlog(&mut random, seed),
            1 => shared_closed_loop(&mut random, seed),
            2 => crowd(&mut random, seed),
            3 | 8 => split_and_late(&mut random, seed),
            4 | 5 => reloads(&mut random, seed),
            6 | 7 | 9 => with_sessions::sessions(&mut random, seed),
            10 => with_sessions::slow_ends(&mut random, seed),
            11 => regular(&mut random, seed),
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
        max_wait: random
            .choose(&[None, None, None, Some(0), Some(500), Some(20_000)])
            .map(Duration::from_micros),
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

pub(super) fn kinds(count: u64) -> Vec<StepKind> {
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
    let session_rate = random.choose(&[0, 0, 50]);
    let mut inputs = Vec::new();
    if random.chance(90) {
        inputs.extend(BEGIN);
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
                session: random.chance(session_rate).then(|| random.between(0, 5) as usize),
            }
        } else {
            other(random, fault_rate)
        });
    }
    let max_queued_tokens = random.choose(&[1, 16, 64, 1000]) * config.max_tokens_per_step;
    let broken = random.chance(8).then_some(LayerId(0));
    Schedule { config, max_queued_tokens, kinds: kinds(kind_count), broken, inputs }
}

fn other(random: &mut Random, fault_rate: u64) -> Input {
    if random.chance(fault_rate) {
        return match random.between(0, 9) {
            0 => failing(random),
            1 => Input::LoaderDies { lacks_room: random.chance(50) },
            2 => Input::StaleNews,
            3 => Input::Fault { is_load: true },
            _ => Input::Fault { is_load: false },
        };
    }
    match random.between(0, 219) {
        0..70 => Input::Turns { count: random.between(1, 12) as usize },
        70..90 => Input::UntilAsleep,
        90..110 => Input::Pass { micros: random.choose(&[1, 100, 1_000, 30_000, 150_000, 6_000_000]) },
        110..130 => Input::Ready,
        130..160 => Input::Experts,
        160..187 => Input::Done,
        187..190 => Input::Tell { skips: random.chance(50) },
        190..194 => Input::Leave { which: random.between(0, 30) as usize },
        194..198 => reload(random),
        198..202 => Input::Packed,
        202 => Input::StaleNews,
        203 if random.chance(30) => Input::Reaped,
        203 => Input::Drain { timeout_millis: random.choose(&[0, 1, 50, 3_000, 30_000]) },
        204 => Input::Fault { is_load: false },
        205..208 => Input::OpenSession,
        208 => Input::EndSession { which: random.between(0, 5) as usize },
        _ => Input::RankAnswers { refuses: random.chance(5) },
    }
}

pub(super) fn reload(random: &mut Random) -> Input {
    Input::Reload { has_room: random.chance(70), is_quick: random.chance(40), is_outdated: random.chance(5) }
}

pub(super) fn failing(random: &mut Random) -> Input {
    Input::NextFails {
        what: random.choose(&[
            Failing::Load,
            Failing::Form,
            Failing::Launch,
            Failing::End,
            Failing::End,
            Failing::QuickEnd,
            Failing::QuickEnd,
        ]),
    }
}

/// Reload after reload, with loaders and generations that fail, and calls meanwhile.
fn reloads(random: &mut Random, seed: u64) -> Schedule {
    let config = healthy(random, seed, 16);
    let mut inputs = if random.chance(80) { BEGIN.to_vec() } else { Vec::new() };
    let is_pinned = random.chance(30);
    for _ in 0..random.between(20, 100) {
        inputs.push(match random.between(0, 99) {
            0..12 => reload(random),
            12..22 => Input::Packed,
            22..27 => Input::LoaderDies { lacks_room: random.chance(40) },
            27..45 => Input::Ready,
            45..50 => Input::Fault { is_load: random.chance(30) },
            50..53 => failing(random),
            53..63 => submit(random, 16, is_pinned, 0),
            63..68 => Input::Experts,
            68..75 => Input::Done,
            75..80 => Input::Pass { micros: random.choose(&[100, 1_000, 150_000, 6_000_000]) },
            80..90 => Input::Turns { count: random.between(1, 12) as usize },
            _ => Input::UntilAsleep,
        });
    }
    Schedule { config, max_queued_tokens: 1 << 20, kinds: kinds(1), broken: None, inputs }
}

pub(super) fn submit(random: &mut Random, limit: u64, is_pinned: bool, session_rate: u64) -> Input {
    Input::Submit {
        client: random.between(1, 3),
        kind: 0,
        tokens: random.between(1, 2 * limit) as usize,
        deadline_millis: random.chance(20).then(|| random.between(1, 200)),
        is_poison: random.chance(1),
        is_pinned,
        session: random.chance(session_rate).then(|| random.between(0, 5) as usize),
    }
}

pub(super) fn healthy(random: &mut Random, seed: u64, limit: usize) -> Config {
    Config {
        max_tokens_per_step: limit,
        max_segments_per_rank: limit,
        max_wait: (!seed.is_multiple_of(3)).then_some(Duration::ZERO),
        ..config(random, seed)
    }
}

/// Steps of about the same time, for whose clients the next ones wait.
fn regular(random: &mut Random, seed: u64) -> Schedule {
    let config = Config { max_wait: None, ..healthy(random, seed, 16) };
    let kind_count = random.between(1, 2);
    let mut inputs = BEGIN.to_vec();
    for _ in 0..random.between(10, 40) {
        inputs.extend(small(random, 3, kind_count));
        inputs.extend([Input::UntilAsleep, Input::Pass { micros: 1_000 }]);
        inputs.extend(small(random, 2, kind_count));
        inputs.extend([Input::Experts, Input::UntilAsleep]);
        inputs.push(Input::Pass { micros: random.choose(&[10, 60, 200]) });
        inputs.extend([Input::Done, Input::UntilAsleep]);
    }
    Schedule { config, max_queued_tokens: 1 << 20, kinds: kinds(kind_count), broken: None, inputs }
}

/// Up to `most` small requests of three clients.
fn small(random: &mut Random, most: u64, kind_count: u64) -> Vec<Input> {
    let count = random.between(1, most);
    let request = |_| Input::Submit {
        client: random.between(1, 3),
        kind: random.between(0, kind_count - 1) as usize,
        tokens: random.between(1, 4) as usize,
        deadline_millis: random.chance(10).then(|| random.between(1, 20)),
        is_poison: false,
        is_pinned: false,
        session: None,
    };
    (0..count).map(request).collect()
}

/// Clients that always have work waiting, over several kinds.
fn shared_backlog(random: &mut Random, seed: u64) -> Schedule {
    let config = healthy(random, seed, 64);
    let kind_count = random.between(1, 3);
    let mut inputs = BEGIN.to_vec();
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
    let mut inputs = BEGIN.to_vec();
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
    let mut inputs = BEGIN.to_vec();
    for client in 1..=random.between(100, 300) {
        let tokens = random.choose(&[1, 1, 5, 16]);
        inputs.push(Input::Submit {
            client,
            kind: 0,
            tokens,
            deadline_millis: None,
            is_poison: false,
            is_pinned: false,
            session: None,
        });
    }
    inputs.extend(vec![Input::Round; 20]);
    Schedule { config, max_queued_tokens: 1 << 20, kinds: kinds(1), broken: None, inputs }
}

/// Requests of several steps whose deadlines pass, or whose callers leave, while a step computes some of their rows.
fn split_and_late(random: &mut Random, seed: u64) -> Schedule {
    let limit = 16;
    let config = Config { slots: random.between(2, 3) as usize, ..healthy(random, seed, limit) };
    let mut inputs = BEGIN.to_vec();
    for _ in 0..random.between(20, 60) {
        inputs.push(match random.between(0, 99) {
            0..30 => Input::Submit {
                client: random.between(1, 2),
                kind: 0,
                tokens: random.between(1, 4 * limit as u64) as usize,
                deadline_millis: random.chance(70).then(|| random.between(1, 3)),
                is_poison: false,
                is_pinned: false,
                session: None,
            },
            30..50 => Input::Pass { micros: random.choose(&[100, 500, 1_000]) },
            50..65 => Input::Experts,
            65..75 => Input::Done,
            75..80 => Input::Leave { which: random.between(0, 3) as usize },
            80 if random.chance(50) => Input::NextFails { what: Failing::QuickEnd },
            80 => Input::Fault { is_load: false },
            81 => Input::Ready,
            82 => Input::Reload { has_room: true, is_quick: true, is_outdated: false },
            83 => Input::Drain { timeout_millis: random.choose(&[0, 1]) },
            _ => Input::UntilAsleep,
        });
    }
    Schedule { config, max_queued_tokens: 1 << 20, kinds: kinds(1), broken: None, inputs }
}
