//! Tests of `channel`.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytemuck::Zeroable;
use rand::RngExt as _;

use super::super::copier::Copier;
use super::*;
use expertd_shm::wait::WaitPolicy;
use expertd_types::{DType, Slot};

fn shape() -> GroupShape {
    GroupShape {
        ranks: 2,
        sources: 2,
        slots: 2,
        max_tokens_per_rank: 5,
        max_segments: 4,
        hidden: 3,
        max_top_k: 2,
    }
}

fn join(router: &RouterChannel, bell: &RouterBell, rank: u32) -> RankChannel {
    let fd = router.fd().try_clone_to_owned().unwrap();
    RankChannel::join(&shape(), Rank(rank), fd, bell.bell().clone()).unwrap()
}

fn step(sequence: u64, slot: u32) -> StepDescriptor {
    StepDescriptor { sequence, step: 7, layer: 3, slot, step_tokens: 9, top_k: 2, ..StepDescriptor::zeroed() }
}

fn plain_rows(rows: &[u8], tokens: usize, dtype: DType) -> RowsToStage<'_> {
    RowsToStage { rows: rows.into(), tokens, dtype, routing: None, token_ids: None, shared_experts: true }
}

fn random(bytes: usize) -> Vec<u8> {
    let mut rng = expertd_test_seed::rng();
    (0..bytes).map(|_| rng.random()).collect()
}

#[test]
fn rows_and_routing_go_to_the_rank_and_answers_come_back() {
    let bell = RouterBell::create().unwrap();
    let mut router = RouterChannel::create(&shape()).unwrap();
    let (mut zero, mut one) = (join(&router, &bell, 0), join(&router, &bell, 1));
    let stop = AtomicBool::new(false);
    for sequence in 1..50 {
        let slot = (sequence % 2) as u32;
        let (halves, singles) = (random(3 * 3 * 2), random(2 * 3 * 4));
        let (ids, weights) = (random(2 * 2 * 4), random(2 * 2 * 4));
        let mut forming = router.begin(Slot(slot), 2);
        let staged = forming.stage(Rank(1), &plain_rows(&halves, 3, DType::Bf16)).unwrap();
        let given = RowsToStage {
            routing: Some((&ids, &weights)),
            shared_experts: false,
            ..plain_rows(&singles, 2, DType::F32)
        };
        let routed = forming.stage(Rank(1), &given).unwrap();
        forming.copy(&mut Copier::default());
        router.launch(&step(sequence, slot), 2).unwrap();

        let idle = zero.wait_step(Duration::ZERO, &stop).unwrap().unwrap();
        assert_eq!((idle.tokens, idle.segments, idle.sequence), (0, 0, sequence));
        let busy = one.wait_step(Duration::ZERO, &stop).unwrap().unwrap();
        assert_eq!((busy.tokens, busy.segments, busy.layer), (5, 2, 3));
        let staging = one.staging(&busy);
        let [first, second] = staging.segments else { panic!("two segments") };
        assert_eq!((first.first_row, first.rows, first.dtype), (0, 3, DType::Bf16 as u32));
        assert!(first.has(Segment::SHARED_EXPERTS) && !first.has(Segment::GIVEN_ROUTING));
        assert!(!second.has(Segment::SHARED_EXPERTS) && second.has(Segment::GIVEN_ROUTING));
        assert_eq!(staging.rows[..halves.len()], halves);
        let at = second.byte_offset as usize;
        assert_eq!(staging.rows[at..at + singles.len()], singles);
        assert_eq!(bytemuck::cast_slice::<i32, u8>(&staging.ids[6..]), ids);
        // The answer inverts every byte of the rows in place.
        staging.rows.iter_mut().for_each(|byte| *byte = !*byte);
        for (rank, step) in [(&mut zero, idle), (&mut one, busy)] {
            let completion = Completion { sequence, slot: step.slot, ..Completion::zeroed() };
            rank.complete(&completion).unwrap();
        }
        for rank in 0..2 {
            let policy = WaitPolicy::within(Duration::ZERO, Duration::from_secs(5));
            let done = bell.bell().wait_for(policy, || router.completion(Rank(rank)).transpose());
            assert_eq!(done.unwrap().unwrap().sequence, sequence);
        }
        let inverted = |rows: &[u8]| rows.iter().map(|byte| !byte).collect::<Vec<_>>();
        assert_eq!(router.answer(&staged), inverted(&halves));
        assert_eq!(router.answer(&routed), inverted(&singles));
        assert_eq!(router.routing(&routed, 2), (&ids[..], &weights[..]));
    }
}

#[test]
fn ranks_make_their_own_staging_resident() {
    let shape = GroupShape { hidden: 1000, max_tokens_per_rank: 500, ..shape() };
    let bell = RouterBell::create().unwrap();
    let router = RouterChannel::create(&shape).unwrap();
    let resident = || {
        let file = std::fs::File::from(router.fd().try_clone_to_owned().unwrap());
        std::os::unix::fs::MetadataExt::blocks(&file.metadata().unwrap()) as usize * 512
    };
    let staging = shape.slots as usize * shape.row_area_bytes();
    assert!(resident() < staging / 4, "{} bytes before any rank joins", resident());
    for rank in 0..shape.ranks {
        let fd = router.fd().try_clone_to_owned().unwrap();
        let rank = RankChannel::join(&shape, Rank(rank), fd, bell.bell().clone()).unwrap();
        let before = resident();
        rank.populate().unwrap();
        assert!(resident() >= before + staging, "{} bytes, {before} before", resident());
    }
    router.populate().unwrap();
    assert!(resident() >= shape.channel_bytes().unwrap());
}

#[test]
fn more_than_staging_holds_is_refused_before_any_row_is_copied() {
    let bell = RouterBell::create().unwrap();
    let mut router = RouterChannel::create(&shape()).unwrap();
    let mut rank = join(&router, &bell, 0);
    let six = random(6 * 12);
    let one = plain_rows(&six[..12], 1, DType::F32);
    let mut forming = router.begin(Slot(0), 3);
    let error = forming.stage(Rank(0), &one).unwrap_err();
    assert!(matches!(error, ChannelError::Capacity { what: "experts per token", .. }), "{error}");
    let mut forming = router.begin(Slot(0), 2);
    let error = forming.stage(Rank(0), &plain_rows(&six, 6, DType::F32)).unwrap_err();
    assert!(matches!(error, ChannelError::Capacity { what: "rows", needed: 6, capacity: 5, .. }), "{error}");
    for _ in 0..4 {
        forming.stage(Rank(0), &one).unwrap();
    }
    let error = forming.stage(Rank(0), &one).unwrap_err();
    assert!(matches!(error, ChannelError::Capacity { what: "segments", .. }), "{error}");
    router.launch(&step(1, 0), 2).unwrap();
    let step = rank.wait_step(Duration::ZERO, &AtomicBool::new(false)).unwrap().unwrap();
    assert!(rank.staging(&step).rows.iter().all(|&byte| byte == 0));
}

#[test]
fn the_rows_of_several_ranks_are_staged_in_one_batch() {
    let shape = GroupShape { hidden: 1000, max_tokens_per_rank: 150, ..shape() };
    let bell = RouterBell::create().unwrap();
    let mut router = RouterChannel::create(&shape).unwrap();
    let join = |rank| {
        let fd = router.fd().try_clone_to_owned().unwrap();
        RankChannel::join(&shape, Rank(rank), fd, bell.bell().clone()).unwrap()
    };
    let mut ranks = [join(0), join(1)];
    let mut copier = Copier::new(3, Duration::from_micros(100));
    for sequence in 1..20_u64 {
        // Two requests; both ranks share the first one.
        let sizes = [200, 7 + sequence as usize];
        let requests = sizes.map(|tokens| random(tokens * 2000));
        let rows = |request: usize, range: std::ops::Range<usize>| RowsToStage {
            rows: requests[request][range.start * 2000..range.end * 2000].into(),
            ..plain_rows(&[], range.len(), DType::Bf16)
        };
        let slot = Slot((sequence % 2) as u32);
        let mut forming = router.begin(slot, 2);
        let staged = [
            forming.stage(Rank(0), &rows(0, 0..120)).unwrap(),
            forming.stage(Rank(1), &rows(0, 120..200)).unwrap(),
            forming.stage(Rank(1), &rows(1, 0..sizes[1])).unwrap(),
        ];
        forming.copy(&mut copier);
        router.launch(&step(sequence, slot.0), 2).unwrap();
        let steps = ranks.each_mut().map(|rank| rank.step().unwrap().unwrap());
        assert_eq!(steps.map(|step| step.tokens as usize), [120, 80 + sizes[1]]);
        assert!(ranks[0].staging(&steps[0]).rows[..240_000] == requests[0][..240_000]);
        let staging = ranks[1].staging(&steps[1]);
        let second = staging.segments[1].byte_offset as usize;
        assert!(staging.rows[..160_000] == requests[0][240_000..]);
        assert!(staging.rows[second..][..requests[1].len()] == requests[1]);
        for (rank, step) in ranks.iter_mut().zip(&steps) {
            let completion = Completion { sequence, slot: step.slot, ..Completion::zeroed() };
            rank.complete(&completion).unwrap();
        }
        for rank in 0..2 {
            assert_eq!(router.completion(Rank(rank)).unwrap().unwrap().sequence, sequence);
        }
        let mut answers = [Vec::new(), Vec::new()];
        let parts: Vec<(usize, &[u8])> =
            [0, 0, 1].into_iter().zip(staged.iter().map(|staged| router.answer(staged))).collect();
        copier.append(&parts, &mut answers);
        assert!(answers[0] == requests[0] && answers[1] == requests[1]);
    }
}

#[test]
fn late_notices_do_not_undo_later_ones() {
    let bell = RouterBell::create().unwrap();
    let router = RouterChannel::create(&shape()).unwrap();
    let (zero, one) = (join(&router, &bell, 0).notice(), join(&router, &bell, 1).notice());
    one.experts_ended(3);
    for (sequence, done) in [(1, 1), (3, 3), (2, 3)] {
        zero.experts_ended(sequence);
        assert_eq!(router.experts_done(2), done);
    }
}

#[test]
fn a_slot_in_flight_belongs_to_the_rank_alone() {
    let bell = RouterBell::create().unwrap();
    let mut router = RouterChannel::create(&shape()).unwrap();
    let mut ranks = [join(&router, &bell, 0), join(&router, &bell, 1)];
    let rows = random(12);
    let mut forming = router.begin(Slot(0), 2);
    let staged = forming.stage(Rank(1), &plain_rows(&rows, 1, DType::F32)).unwrap();
    forming.copy(&mut Copier::default());
    router.launch(&step(1, 0), 2).unwrap();

    let in_flight = |error| matches!(error, ChannelError::InFlight { slot: Slot(0), sequence: 1, .. });
    assert!(in_flight(router.launch(&step(2, 0), 2).unwrap_err()));
    let error = router.begin(Slot(0), 2).stage(Rank(1), &plain_rows(&rows, 1, DType::F32)).unwrap_err();
    assert!(in_flight(error));
    let panics =
        |read: &dyn Fn() -> usize| std::panic::catch_unwind(std::panic::AssertUnwindSafe(read)).is_err();
    assert!(panics(&|| router.answer(&staged).len()));
    assert!(panics(&|| router.routing(&staged, 2).0.len()));

    let steps = ranks.each_mut().map(|rank| rank.step().unwrap().unwrap());
    let done = Completion { sequence: 1, slot: 0, ..Completion::zeroed() };
    for (rank, step) in ranks.iter_mut().zip(&steps) {
        let other = Completion { sequence: 2, ..done };
        assert!(matches!(rank.complete(&other), Err(ChannelError::NotInFlight { sequence: 2, .. })));
        rank.complete(&done).unwrap();
        assert!(matches!(rank.complete(&done), Err(ChannelError::NotInFlight { sequence: 1, .. })));
        let rank = std::cell::RefCell::new(rank);
        assert!(panics(&|| rank.borrow_mut().staging(step).ids.len()));
    }
    router.completion(Rank(0)).unwrap().unwrap();
    assert!(panics(&|| router.answer(&staged).len()), "rank 1 has not completed the step");
    router.completion(Rank(1)).unwrap().unwrap();
    assert_eq!(router.answer(&staged), rows);
    router.launch(&step(2, 0), 2).unwrap();
}

#[test]
fn a_descriptor_that_does_not_fit_the_shape_is_an_error() {
    let bell = RouterBell::create().unwrap();
    let mut router = RouterChannel::create(&shape()).unwrap();
    let mut rank = join(&router, &bell, 0);
    let error = router.launch(&step(1, 2), 2).unwrap_err();
    assert!(matches!(error, ChannelError::Capacity { what: "slots", needed: 3, .. }), "{error}");
    router.launch(&StepDescriptor { top_k: 3, ..step(1, 0) }, 2).unwrap();
    assert!(matches!(rank.step(), Err(ChannelError::Capacity { what: "experts per token", .. })));
}

#[test]
fn a_channel_of_another_shape_is_not_joined() {
    let bell = RouterBell::create().unwrap();
    let router = RouterChannel::create(&shape()).unwrap();
    let other = GroupShape { hidden: 400, ..shape() };
    let fd = router.fd().try_clone_to_owned().unwrap();
    let error = RankChannel::join(&other, Rank(0), fd, bell.bell().clone()).unwrap_err();
    assert!(matches!(error, ChannelError::Region(RegionError::Length { .. })), "{error}");
}

#[test]
fn long_messages_are_cut_between_characters() {
    let mut completion = Completion::zeroed();
    completion.fail(&"é".repeat(200));
    assert_eq!(completion.text(), "é".repeat(80));
    assert_eq!(completion.failed, 1);
}

#[test]
fn no_rank_begins_a_step_before_every_rank_has_it() {
    let bell = RouterBell::create().unwrap();
    let mut router = RouterChannel::create(&shape()).unwrap();
    let mut ranks = [join(&router, &bell, 0), join(&router, &bell, 1)];
    for sequence in 1..20 {
        router.begin(Slot(0), 2).copy(&mut Copier::default());
        router.launch(&step(sequence, 0), 2).unwrap();
        // As if the router had been stopped while it pushed.
        router.launched.atomics()[0].store(sequence - 1, Ordering::Release);
        for _ in 0..2 {
            assert!(ranks.iter_mut().all(|rank| rank.step().unwrap().is_none()));
        }
        router.launched.atomics()[0].store(sequence, Ordering::Release);
        for rank in &mut ranks {
            assert_eq!(rank.step().unwrap().unwrap().sequence, sequence);
            assert!(rank.step().unwrap().is_none());
            rank.complete(&Completion { sequence, ..Completion::zeroed() }).unwrap();
        }
        for rank in 0..2 {
            router.completion(Rank(rank)).unwrap().unwrap();
        }
    }
}
