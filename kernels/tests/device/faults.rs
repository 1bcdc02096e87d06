//! Exchanges that fail: a rank that does not take part, and a block that comes too late.

use expertd_kernels::device::{Device, write_device};
use expertd_kernels::layout::{Shape, WindowLayout};
use expertd_kernels::params::{DeviceFault, Group, MAX_BLOCKS, Phase, SlotState};

use crate::Outcome;
use crate::exchange::{Loopback, SECOND};
use crate::random::{Random, step};

pub fn check() -> Outcome {
    missing_rank()?;
    late_block()
}

/// A group of two whose second rank either never launches or only launches dispatch.
fn missing_rank() -> Outcome {
    let device = Device::open(0)?;
    let shape = Shape { ranks: 2, max_tokens: 40, hidden: 2048, top_k: 2, experts: 4 };
    let steps = step(&mut Random(5), &shape);
    for phase in [Phase::Dispatch, Phase::Combine] {
        let mut group = Loopback::new(&device, shape, 0, 2)?;
        group.members[0].group.deadline_ns = SECOND / 20;
        for (member, step) in group.members.iter().zip(&steps) {
            member.load(&shape, step, 1, true)?;
        }
        let start = std::time::Instant::now();
        if phase == Phase::Combine {
            group.launch_dispatch(4, &group.members)?;
        } else {
            group.launch_dispatch(4, &group.members[..1])?;
        }
        group.launch_combine(4, &group.members[..1])?;
        group.stream.synchronize()?;
        let took = start.elapsed();
        let state: SlotState = group.members[0].buffers.state.read()?[0];
        let fault = DeviceFault::decode(state.error);
        let sequence = if phase == Phase::Combine { 2 } else { 1 };
        if fault != Some(DeviceFault::Timeout { peer: 1, phase }) || state.sequence != sequence {
            return Err(
                format!("expected a timeout of rank 1 in {phase:?}, found {fault:?}, {state:?}").into()
            );
        }
        if group.members[0].buffers.out.read()?.iter().any(|&word| word != u32::MAX) {
            return Err("a failed step wrote results".into());
        }
        let fault = fault.expect("a fault");
        println!("faults: a missing rank is reported ({fault}) after {took:?}");
    }
    Ok(())
}

/// Longest random delay of a block in `late_block`, and the deadline of waits, in nanoseconds.
const DELAY: u64 = SECOND / 5;
const DEADLINE: u64 = SECOND / 25;

/// The delay of a block of rank 0, as `random_delay` in common.cuh draws it.
fn delay_of(block: u64, sequence: u64) -> u64 {
    let mut x =
        sequence.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(block.wrapping_mul(0x94d0_49bb_1331_11eb));
    x ^= x >> 31;
    x = x.wrapping_mul(0xd6e8_feb8_6659_fd93);
    x ^= x >> 29;
    x % DELAY
}

/// Three blocks list rows. The last one's wait for the first two passes its deadline before their delays end; they find its flag, come
/// to the barrier of the three, and stop at the error. They must leave the barrier as they found it, and no ticket.
fn late_block() -> Outcome {
    const BLOCKS: u32 = 24;
    let device = Device::open(0)?;
    let shape = Shape { ranks: 2, max_tokens: 375, hidden: 64, top_k: 4, experts: 8 };
    let is_wanted = |sequence: &u64| {
        let [first, second, third] = [0, 1, 2].map(|block| delay_of(block, *sequence));
        first.abs_diff(second) < DEADLINE / 4 && third + DEADLINE + DEADLINE / 2 < first.min(second)
    };
    let sequence = (1..).find(is_wanted).expect("some sequence has such delays");
    let mut steps = step(&mut Random(5), &shape);
    for own in &mut steps {
        own.tokens = 375;
        own.rows = vec![0; 375 * 64];
        own.ids = (0..375 * 4).map(|entry| entry % 4).collect();
        own.weights = vec![0.5; 375 * 4];
    }
    let mut group = Loopback::new(&device, shape, u32::try_from(DELAY)?, 0)?;
    let member = &mut group.members[0];
    member.group.deadline_ns = DEADLINE;
    member.load(&shape, &steps[0], 1, true)?;
    let mut state = member.buffers.state.read()?[0];
    state.sequence = sequence;
    member.buffers.state.write(&[state])?;
    as_if_sent(member.window, &member.group, &shape, sequence)?;
    group.launch_dispatch(BLOCKS, &group.members[..1])?;
    group.stream.synchronize()?;
    let state: SlotState = group.members[0].buffers.state.read()?[0];
    let fault = DeviceFault::decode(state.error);
    if fault != Some(DeviceFault::Timeout { peer: 0, phase: Phase::Dispatch }) {
        return Err(format!("expected a timeout of rank 0's own blocks in dispatch, found {fault:?}").into());
    }
    if state.ticket != 0 || state.epoch & 0xffff != 0 {
        return Err(format!("blocks that stopped are still counted: {state:?}").into());
    }
    println!("faults: blocks that stop at a barrier leave it");
    Ok(())
}

/// Writes to rank 0's window what rank 1 would have sent: routing of all its tokens, and the flags of all its blocks.
fn as_if_sent(window: u64, group: &Group, shape: &Shape, sequence: u64) -> Outcome {
    let layout = WindowLayout::new(shape).0;
    let entries = (shape.max_tokens * shape.top_k) as usize;
    let ids: Vec<u8> = (0..entries).flat_map(|entry| ((entry % 4) as i32).to_le_bytes()).collect();
    let flags = (group.generation | sequence).to_le_bytes().repeat(MAX_BLOCKS);
    // SAFETY: places of rank 1 in rank 0's window, while no step runs.
    unsafe {
        write_device(window + layout.counts + 4, &shape.max_tokens.to_le_bytes())?;
        write_device(window + layout.ids + entries as u64 * 4, &ids)?;
        write_device(window + layout.weights + entries as u64 * 4, &vec![0; entries * 4])?;
        write_device(window + layout.dispatch_flags + flags.len() as u64, &flags)?;
    }
    Ok(())
}
