//! Schedules with sessions.

use expertd_scheduler::Config;

use super::schedule::{BEGIN, Failing, Input, Schedule, failing, healthy, kinds, reload, submit};
use expertd_test_seed::Random;

/// Sessions that come and go while their calls are computed, ranks that refuse memory, and faults.
pub(super) fn sessions(random: &mut Random, seed: u64) -> Schedule {
    let (ranks, slots) = (random.between(1, 2) as usize, random.between(1, 3) as usize);
    let config = Config { ranks, slots, ..healthy(random, seed, 16) };
    let mut inputs = BEGIN.to_vec();
    if random.chance(70) {
        inputs.extend([Input::OpenSession, Input::UntilAsleep]);
        inputs.extend(vec![Input::RankAnswers { refuses: false }; config.ranks]);
        inputs.push(Input::UntilAsleep);
    }
    for _ in 0..random.between(30, 120) {
        inputs.push(match random.between(0, 99) {
            0..6 => Input::OpenSession,
            6..10 => Input::EndSession { which: random.between(0, 5) as usize },
            10..30 => Input::RankAnswers { refuses: random.chance(8) },
            30..44 => submit(random, 10, false, 90),
            44..49 => Input::Tell { skips: random.chance(50) },
            49..53 => Input::Done,
            53..56 => Input::Experts,
            56 => Input::Fault { is_load: false },
            57..66 => Input::Ready,
            66 => failing(random),
            67 => Input::RankLies,
            68..72 => Input::OrderIsLate,
            72 => reload(random),
            73 => Input::Packed,
            74 => Input::Leave { which: random.between(0, 3) as usize },
            75..79 => Input::Pass { micros: random.choose(&[100, 150_000, 6_000_000]) },
            79 => Input::Reaped,
            80..85 => Input::Turns { count: random.between(1, 12) as usize },
            _ => Input::UntilAsleep,
        });
        if matches!(inputs.last(), Some(Input::Tell { .. })) && random.chance(80) {
            if random.chance(10) {
                inputs.push(Input::Drain { timeout_millis: 0 });
            } else {
                inputs.push(Input::Fault { is_load: false });
            }
        }
    }
    Schedule { config, max_queued_tokens: 1 << 20, kinds: kinds(1), broken: None, inputs }
}

/// Ranks that are ended slowly, by faults and drains, while they still tell calls of their end and deadlines pass.
pub(super) fn slow_ends(random: &mut Random, seed: u64) -> Schedule {
    let config = Config { ranks: 1, slots: random.between(1, 3) as usize, ..healthy(random, seed, 16) };
    let mut inputs = BEGIN.to_vec();
    let answers = [Input::UntilAsleep, Input::RankAnswers { refuses: false }, Input::UntilAsleep];
    inputs.push(Input::OpenSession);
    inputs.extend(answers);
    let is_mixed = random.chance(30);
    for _ in 0..random.between(1, 6) {
        for _ in 0..random.between(1, 3) {
            inputs.extend([submit(random, 8, false, if is_mixed { 50 } else { 100 }), Input::UntilAsleep]);
            inputs.extend(random.chance(30).then_some(Input::Tell { skips: false }));
            inputs.extend(random.chance(30).then_some(Input::Experts));
        }
        if random.chance(75) {
            // Two steps in flight.
            let mut call = || [submit(random, 8, false, 100), Input::UntilAsleep];
            inputs.extend([call(), [Input::Experts, Input::UntilAsleep], call()].concat());
        }
        inputs.extend(random.chance(80).then_some(Input::NextFails { what: Failing::QuickEnd }));
        inputs.extend(random.chance(10).then_some(Input::NextFails { what: Failing::End }));
        inputs.push(if random.chance(80) {
            Input::Fault { is_load: false }
        } else {
            Input::Drain { timeout_millis: random.between(0, 1) }
        });
        inputs.push(Input::UntilAsleep);
        inputs.extend(random.chance(70).then_some(Input::Tell { skips: true }));
        for _ in 0..random.between(0, 6) {
            inputs.push(match random.between(0, 9) {
                0..4 => Input::Tell { skips: random.chance(50) },
                4 => submit(random, 8, false, 50),
                5 => reload(random),
                6 => Input::Leave { which: random.between(0, 3) as usize },
                7 => Input::Pass { micros: random.choose(&[1_000, 150_000]) },
                _ => Input::UntilAsleep,
            });
        }
        inputs.extend([
            Input::Reaped,
            Input::UntilAsleep,
            Input::Pass { micros: 5_000_000 },
            Input::UntilAsleep,
        ]);
        inputs.extend([Input::Ready, Input::UntilAsleep, Input::Ready]);
        inputs.extend(answers);
    }
    Schedule { config, max_queued_tokens: 1 << 20, kinds: kinds(1), broken: None, inputs }
}
