//! The loop of a rank with an engine that ends steps late.

use std::sync::atomic::{AtomicBool, AtomicUsize};

use super::*;
use expertd_ipc::{Copier, ExpertsNotice, GroupShape, RankStaging, RouterChannel, RowsToStage, StagedRows};
use expertd_shm::{SharedRegion, WaitPolicy};
use expertd_types::{DType, Slot};

const BYTES: usize = 3 * 4;

fn shape() -> GroupShape {
    GroupShape {
        ranks: 1,
        sources: 1,
        slots: 2,
        max_tokens_per_rank: 1,
        max_segments: 1,
        hidden: 3,
        max_top_k: 1,
    }
}

/// An engine that ends a step only after the next one has begun, or once no more steps come. The answer inverts the rows.
struct LateEngine {
    running: VecDeque<StepDescriptor>,
    no_more: Arc<AtomicBool>,
    /// Largest number of steps that ran at once.
    most: Arc<AtomicUsize>,
    fails_at: u64,
    attached: Vec<MemoryId>,
}

impl StepEngine for LateEngine {
    fn begin(
        &mut self,
        step: &StepDescriptor,
        staging: RankStaging<'_>,
        _notice: &ExpertsNotice,
    ) -> Result<Option<StepReport>, StepFault> {
        assert!(self.running.iter().all(|running| running.slot != step.slot), "the slot is occupied");
        assert_eq!(staging.rows[..BYTES], [step.sequence as u8; BYTES]);
        self.running.push_back(*step);
        self.most.fetch_max(self.running.len(), Ordering::Relaxed);
        Ok(None)
    }

    fn ended(
        &mut self,
        step: &StepDescriptor,
        channel: &mut RankChannel,
        _notice: &ExpertsNotice,
    ) -> Result<Option<StepReport>, StepFault> {
        if self.running.len() < 2 && !self.no_more.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let oldest = self.running.pop_front().unwrap();
        assert_eq!(oldest, *step);
        if step.sequence == self.fails_at {
            return Err(StepFault::engine("broken"));
        }
        channel.staging(step).rows[..BYTES].iter_mut().for_each(|byte| *byte = !*byte);
        Ok(Some(StepReport::default()))
    }

    fn attach(&mut self, memory: MemoryId, _client: ClientMemory) -> Result<(), String> {
        assert!(self.running.is_empty(), "attached while a step runs");
        if self.attached.contains(&memory) {
            return Err("attached twice".to_owned());
        }
        self.attached.push(memory);
        Ok(())
    }

    fn detach(&mut self, memory: MemoryId) {
        assert!(self.running.is_empty(), "detached while a step runs");
        assert_eq!(self.attached.pop(), Some(memory));
    }
}

/// Runs `steps` steps with every slot in flight. Returns the completed sequences, the largest number of steps that ran
/// at once, and the rank's result.
fn run(steps: u64, fails_at: u64) -> (Vec<u64>, usize, Result<(), String>) {
    let bell = RouterBell::create().unwrap();
    let mut router = RouterChannel::create(&shape()).unwrap();
    let (fd, rank_bell) = (router.fd().try_clone_to_owned().unwrap(), bell.bell().clone());
    let (no_more, most) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let engine_no_more = Arc::clone(&no_more);
    let (engine_most, orders) = (Arc::clone(&most), Arc::new(Orders::default()));
    let of_rank = Arc::clone(&orders);
    let (socket, of_router) = UnixStream::pair().unwrap();
    let rank = std::thread::spawn(move || {
        let channel = RankChannel::join(&shape(), Rank(0), fd, rank_bell).unwrap();
        let engine = LateEngine {
            running: VecDeque::new(),
            no_more: engine_no_more,
            most: engine_most,
            fails_at,
            attached: Vec::new(),
        };
        let (engine, device) = (Box::new(engine), String::new());
        let mut rank = ReadyRank { engine, channel, weight_bytes: 0, device };
        rank.run_steps(Duration::ZERO, &of_rank, &socket).map_err(|error| error.to_string())
    });
    let mut in_flight: VecDeque<StagedRows> = VecDeque::new();
    let (mut launched, mut completed) = (0, Vec::new());
    while completed.len() < steps as usize {
        while launched < steps && in_flight.len() < 2 {
            launched += 1;
            let slot = Slot((launched % 2) as u32);
            let (rows, dtype) = (&[launched as u8; BYTES][..], DType::F32);
            let to_stage = RowsToStage {
                rows: rows.into(),
                tokens: 1,
                dtype,
                routing: None,
                token_ids: None,
                shared_experts: false,
            };
            let mut forming = router.begin(slot, 1);
            in_flight.push_back(forming.stage(Rank(0), &to_stage).unwrap());
            forming.copy(&mut Copier::default());
            let (sequence, slot) = (launched, slot.0);
            let step =
                StepDescriptor { sequence, slot, step_tokens: 1, top_k: 1, ..StepDescriptor::zeroed() };
            router.launch(&step, 1).unwrap();
        }
        no_more.store(launched == steps, Ordering::Relaxed);
        let policy = WaitPolicy::within(Duration::ZERO, Duration::from_secs(20));
        let done = bell.bell().wait_for(policy, || router.completion(Rank(0)).transpose());
        let done = done.expect("a completion").unwrap();
        if done.failed != 0 {
            assert_eq!(done.text(), "broken");
            break;
        }
        let staged = in_flight.pop_front().unwrap();
        assert_eq!(router.answer(&staged), [!(done.sequence as u8); BYTES]);
        completed.push(done.sequence);
        if completed.len() == 20 {
            // No further step is taken while these wait, so the engine must not wait for one.
            no_more.store(true, Ordering::Relaxed);
            attach_and_detach(&orders, &of_router, &bell);
        }
    }
    orders.push(Order::Leave);
    while !rank.is_finished() {
        router.launch(&StepDescriptor::zeroed(), 1).ok();
        std::thread::sleep(Duration::from_millis(1));
    }
    (completed, most.load(Ordering::Relaxed), rank.join().unwrap())
}

/// Orders in the middle of the steps, and their answers.
fn attach_and_detach(orders: &Orders, router: &UnixStream, bell: &RouterBell) {
    let region = SharedRegion::create("test", 4096).unwrap();
    let client = || ClientMemory::Host(region.slice(0, 4096).unwrap());
    orders.push(Order::Attach(MemoryId(1), Ok(client())));
    orders.push(Order::Attach(MemoryId(1), Ok(client())));
    orders.push(Order::Attach(MemoryId(2), Err("not mapped".to_owned())));
    orders.push(Order::Detach(MemoryId(1)));
    bell.bell().ring();
    let mut reader = BufReader::new(router);
    let attached =
        |memory, error: Option<&str>| FromRank::Attached { memory, error: error.map(str::to_owned) };
    for answer in [
        attached(MemoryId(1), None),
        attached(MemoryId(1), Some("attached twice")),
        attached(MemoryId(2), Some("not mapped")),
        FromRank::Detached { memory: MemoryId(1) },
    ] {
        assert_eq!(control::receive(&mut reader).unwrap(), Some(answer));
    }
}

#[test]
fn the_next_step_is_taken_while_one_runs() {
    let (completed, most, end) = run(201, 0);
    assert_eq!(completed, (1..=201).collect::<Vec<_>>());
    assert_eq!((most, end), (2, Ok(())));
}

#[test]
fn a_fault_of_a_running_step_is_reported_and_ends_the_rank() {
    let (completed, _, end) = run(50, 7);
    assert_eq!(completed, (1..=6).collect::<Vec<_>>());
    assert_eq!(end, Err("step failed: broken".to_owned()));
}
