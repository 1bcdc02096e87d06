//! Rows in memories that ranks have attached.

use bytemuck::Zeroable as _;

use std::sync::atomic::Ordering;

use super::*;
use crate::Copier;
use expertd_types::{DType, MemoryId};

#[test]
fn attached_rows_take_no_staging_and_their_segments_name_the_memory() {
    let shape = GroupShape {
        ranks: 1,
        sources: 1,
        slots: 1,
        max_tokens_per_rank: 4,
        max_segments: 4,
        hidden: 2,
        max_top_k: 1,
    };
    let bell = RouterBell::create().unwrap();
    let mut router = RouterChannel::create(&shape).unwrap();
    let fd = router.fd().try_clone_to_owned().unwrap();
    let mut rank = RankChannel::join(&shape, Rank(0), fd, bell.bell().clone()).unwrap();
    let staged_rows = [7_u8; 8];
    let rows = |rows, tokens| RowsToStage {
        rows,
        tokens,
        dtype: DType::F32,
        routing: None,
        token_ids: None,
        shared_experts: true,
    };
    let attached = AttachedRows { memory: MemoryId(9), input: 4096, output: 8192, bytes: 24 };
    let ids = 5_i32.to_le_bytes().repeat(3);
    let routed = RowsToStage { routing: Some((&ids, &ids)), ..rows(RowSource::Attached(attached), 3) };
    let mut forming = router.begin(Slot(0), 1);
    let first = forming.stage(Rank(0), &routed).unwrap();
    let second = forming.stage(Rank(0), &rows(RowSource::from(&staged_rows[..]), 1)).unwrap();
    assert!(matches!(
        forming.stage(Rank(0), &routed),
        Err(ChannelError::Capacity { what: "rows", needed: 7, .. })
    ));
    forming.copy(&mut Copier::default());
    assert!(first.is_attached() && !second.is_attached() && first.rows() == 3);
    router.launch(&StepDescriptor { sequence: 1, top_k: 1, ..StepDescriptor::zeroed() }, 1).unwrap();

    let step = rank.step().unwrap().unwrap();
    let staging = rank.staging(&step);
    let [in_memory, in_staging] = staging.segments else { panic!("two segments") };
    assert_eq!((in_memory.memory, in_memory.byte_offset, in_memory.output_offset), (9, 4096, 8192));
    assert_eq!((in_memory.first_row, in_memory.rows), (0, 3));
    assert!(in_memory.has(Segment::GIVEN_ROUTING));
    assert_eq!((in_staging.memory, in_staging.byte_offset, in_staging.first_row), (Segment::STAGING, 0, 3));
    assert_eq!((&staging.ids[..3], &staging.rows[..8]), (&[5; 3][..], &staged_rows[..]));
    rank.complete(&Completion { sequence: 1, ..Completion::zeroed() }).unwrap();
    router.completion(Rank(0)).unwrap().unwrap();
    assert_eq!((router.answer(&first), router.answer(&second)), (&[][..], &staged_rows[..]));
    assert_eq!(router.routing(&first, 1).0, ids);
}

#[test]
fn words_to_raise_go_to_rank_0_alone() {
    let shape = GroupShape {
        ranks: 2,
        sources: 2,
        slots: 1,
        max_tokens_per_rank: 4,
        max_segments: 4,
        hidden: 2,
        max_top_k: 1,
    };
    let bell = RouterBell::create().unwrap();
    let mut router = RouterChannel::create(&shape).unwrap();
    let mut ranks = [Rank(0), Rank(1)].map(|rank| {
        let fd = router.fd().try_clone_to_owned().unwrap();
        RankChannel::join(&shape, rank, fd, bell.bell().clone()).unwrap()
    });
    let raise = |call| Raise { memory: 3, word: 64, number: 96, reserved: 0, call };
    for sequence in 1..4 {
        let count = sequence as usize % (MAX_RAISES + 1);
        let mut forming = router.begin(Slot(0), 1);
        for call in 0..count {
            forming.raise(raise(call as u64)).unwrap();
        }
        forming.copy(&mut Copier::default());
        router.launch(&StepDescriptor { sequence, ..StepDescriptor::zeroed() }, 2).unwrap();
        assert_eq!(router.raised(Slot(0)), sequence - 1);
        for (rank, channel) in ranks.iter_mut().enumerate() {
            let step = channel.step().unwrap().unwrap();
            let raises = channel.staging(&step).raises;
            let wanted: Vec<Raise> = (0..count as u64).map(raise).filter(|_| rank == 0).collect();
            assert_eq!(raises, wanted);
            if rank == 0 {
                channel.slots[0].raised.atomics()[0].store(sequence, Ordering::Release);
            }
            channel.complete(&Completion { sequence, ..Completion::zeroed() }).unwrap();
            router.completion(Rank(rank as u32)).unwrap().unwrap();
        }
        assert_eq!(router.raised(Slot(0)), sequence);
    }
    let mut forming = router.begin(Slot(0), 1);
    (0..MAX_RAISES as u64).for_each(|call| forming.raise(raise(call)).unwrap());
    assert!(matches!(
        forming.raise(raise(9)),
        Err(ChannelError::Capacity { what: "words to raise", needed: 5, capacity: 4, .. })
    ));
}
