//! What the router and the ranks of one generation share: step descriptors and completions in rings, token rows in
//! staging, signs of life.
//!
//! Per rank and slot, staging holds one area of rows, and the routing of each row. The router writes the rows of a step
//! there and pushes a [`StepDescriptor`]; the rank writes the answer over them, each row in its dtype and at its place,
//! and pushes a [`Completion`]. Between the two pushes the area is the rank's, otherwise the router's.

mod places;
mod rank;
mod records;
mod router;

pub use places::GroupShape;
pub use rank::{ExpertsNotice, Pulse, RankChannel, RankStaging, StagingPlace};
pub use records::{Completion, Segment, StepDescriptor};
pub use router::{Forming, RouterChannel, StageRows, Staged};

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use super::region::{PAGE, RegionError, SharedRegion};
use super::ring::RingError;
use super::wait::Doorbell;
use expertd_types::Rank;

/// The doorbell of the router: what ranks ring after a completion, and whoever else has news for its step loop. It
/// outlives generations; a ring too many only makes the router look.
#[derive(Clone, Debug)]
pub struct RouterBell {
    region: Arc<SharedRegion>,
    bell: Doorbell,
}

impl RouterBell {
    /// Makes the bell in memory of its own.
    ///
    /// # Errors
    /// If there is no memory for it.
    pub fn create() -> Result<Self, RegionError> {
        Self::over(SharedRegion::create("expertd-bell", PAGE)?)
    }

    /// The bell in inherited memory.
    ///
    /// # Errors
    /// If the descriptor is not a router's bell.
    pub fn join(fd: OwnedFd) -> Result<Self, RegionError> {
        Self::over(SharedRegion::from_fd(fd, PAGE)?)
    }

    fn over(region: Arc<SharedRegion>) -> Result<Self, RegionError> {
        let bell = Doorbell::new(region.slice(0, 1)?);
        Ok(RouterBell { region, bell })
    }

    /// The memory, for ranks to map.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.region.as_fd()
    }

    /// The bell itself.
    #[must_use]
    pub const fn bell(&self) -> &Doorbell {
        &self.bell
    }
}

/// Why a channel could not be made or used.
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    /// Its memory.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// One of its rings.
    #[error("rank {rank}: {source}")]
    Ring {
        /// Whose.
        rank: Rank,
        /// What is wrong.
        source: RingError,
    },
    /// The other side has not taken what was pushed before.
    #[error("rank {rank}: the ring is full; the other side does not take what it is given")]
    Full {
        /// Whose.
        rank: Rank,
    },
    /// More than the staging of a slot holds.
    #[error("rank {rank}: {what} would be {needed}, and the staging of a slot holds {capacity}")]
    Capacity {
        /// Whose.
        rank: Rank,
        /// What there is too much of.
        what: &'static str,
        /// How much.
        needed: usize,
        /// How much fits.
        capacity: usize,
    },
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::time::Duration;

    use bytemuck::Zeroable;
    use bytes::Bytes;
    use rand::RngExt as _;

    use super::super::copier::Copier;
    use super::super::wait::Patience;
    use super::*;
    use expertd_types::{DType, Pieces, Slot};

    fn shape() -> GroupShape {
        GroupShape { ranks: 2, slots: 2, max_tokens_per_rank: 5, max_segments: 4, hidden: 3, max_top_k: 2 }
    }

    fn join(router: &RouterChannel, bell: &RouterBell, rank: u32) -> RankChannel {
        let fd = router.fd().try_clone_to_owned().unwrap();
        RankChannel::join(&shape(), Rank(rank), fd, bell.bell().clone()).unwrap()
    }

    fn step(sequence: u64, slot: u32) -> StepDescriptor {
        StepDescriptor { sequence, step: 7, layer: 3, slot, tokens: 0, segments: 0, step_tokens: 9, top_k: 2 }
    }

    fn piece(rows: &[u8], tokens: usize, dtype: DType) -> StageRows<'_> {
        StageRows { rows: rows.into(), tokens, dtype, routing: None, token_ids: None, shared_experts: true }
    }

    fn random(bytes: usize) -> Vec<u8> {
        let mut rng = rand::rng();
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
            let staged = forming.stage(Rank(1), &piece(&halves, 3, DType::Bf16)).unwrap();
            let given = StageRows {
                routing: Some((&ids, &weights)),
                shared_experts: false,
                ..piece(&singles, 2, DType::F32)
            };
            let routed = forming.stage(Rank(1), &given).unwrap();
            forming.copy(&mut Copier::default());
            router.launch(&step(sequence, slot)).unwrap();

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
            // The answer: every byte of the rows inverted, in place.
            staging.rows.iter_mut().for_each(|byte| *byte = !*byte);
            for (rank, step) in [(&mut zero, idle), (&mut one, busy)] {
                let completion = Completion { sequence, slot: step.slot, ..Completion::zeroed() };
                rank.complete(&completion).unwrap();
            }
            for rank in 0..2 {
                let patience = Patience::within(Duration::ZERO, Duration::from_secs(5));
                let done = bell.bell().wait_for(patience, || router.completion(Rank(rank)).transpose());
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
        let one = piece(&six[..12], 1, DType::F32);
        let mut forming = router.begin(Slot(0), 3);
        let error = forming.stage(Rank(0), &one).unwrap_err();
        assert!(matches!(error, ChannelError::Capacity { what: "k", .. }), "{error}");
        let mut forming = router.begin(Slot(0), 2);
        let error = forming.stage(Rank(0), &piece(&six, 6, DType::F32)).unwrap_err();
        assert!(
            matches!(error, ChannelError::Capacity { what: "rows", needed: 6, capacity: 5, .. }),
            "{error}"
        );
        for _ in 0..4 {
            forming.stage(Rank(0), &one).unwrap();
        }
        let error = forming.stage(Rank(0), &one).unwrap_err();
        assert!(matches!(error, ChannelError::Capacity { what: "segments", .. }), "{error}");
        router.launch(&step(1, 0)).unwrap();
        let step = rank.wait_step(Duration::ZERO, &AtomicBool::new(false)).unwrap().unwrap();
        assert!(rank.staging(&step).rows.iter().all(|&byte| byte == 0));
    }

    #[test]
    fn a_step_of_several_ranks_is_staged_in_one_batch() {
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
            // Rows as they arrived: in frames of an odd length, in two requests, the first of which both ranks share.
            let sizes = [200, 7 + sequence as usize];
            let requests = sizes.map(|tokens| Bytes::from(random(tokens * 2000)));
            let framed = |bytes: &Bytes| -> Pieces {
                (0..bytes.len()).step_by(4097).map(|at| bytes.slice(at..bytes.len().min(at + 4097))).collect()
            };
            let framed = requests.each_ref().map(framed);
            let rows = |request: usize, range: std::ops::Range<usize>| StageRows {
                rows: framed[request].slices(range.start * 2000..range.end * 2000),
                ..piece(&[], range.len(), DType::Bf16)
            };
            let slot = Slot((sequence % 2) as u32);
            let mut forming = router.begin(slot, 2);
            let staged = [
                forming.stage(Rank(0), &rows(0, 0..120)).unwrap(),
                forming.stage(Rank(1), &rows(0, 120..200)).unwrap(),
                forming.stage(Rank(1), &rows(1, 0..sizes[1])).unwrap(),
            ];
            forming.copy(&mut copier);
            router.launch(&step(sequence, slot.0)).unwrap();
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
            let pieces: Vec<(usize, &[u8])> =
                [0, 0, 1].into_iter().zip(staged.iter().map(|staged| router.answer(staged))).collect();
            copier.append(&pieces, &mut answers);
            assert!(answers[0] == requests[0] && answers[1] == requests[1]);
        }
    }

    #[test]
    fn experts_that_are_told_of_late_do_not_undo_later_ones() {
        let bell = RouterBell::create().unwrap();
        let router = RouterChannel::create(&shape()).unwrap();
        let (zero, one) = (join(&router, &bell, 0).notice(), join(&router, &bell, 1).notice());
        one.tell(3);
        for (sequence, done) in [(1, 1), (3, 3), (2, 3)] {
            zero.tell(sequence);
            assert_eq!(router.experts_done(), done);
        }
    }

    #[test]
    fn a_router_that_gets_no_completions_fills_the_ring_and_is_told() {
        let mut router = RouterChannel::create(&shape()).unwrap();
        let full = (1..100).find_map(|sequence| router.launch(&step(sequence, 0)).err()).unwrap();
        assert!(matches!(full, ChannelError::Full { rank: Rank(0) }), "{full}");
    }

    #[test]
    fn a_descriptor_that_does_not_fit_the_shape_is_an_error() {
        let bell = RouterBell::create().unwrap();
        let mut router = RouterChannel::create(&shape()).unwrap();
        let mut rank = join(&router, &bell, 0);
        for bad in [StepDescriptor { slot: 2, ..step(1, 0) }, StepDescriptor { top_k: 3, ..step(1, 0) }] {
            router.launch(&bad).unwrap();
            assert!(matches!(rank.step(), Err(ChannelError::Capacity { .. })));
        }
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
        assert_eq!(completion.text(), "é".repeat(84));
        assert_eq!(completion.failed, 1);
    }
}
