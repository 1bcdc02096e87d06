//! Compares the exchange (dispatch, stand-in experts, combine) with plain code on the host, bit by bit.

use expertd_kernels::device::{Buffer, Device, Stream, fill_device, read_device};
use expertd_kernels::launch;
use expertd_kernels::layout::{Shape, WindowLayout};
use expertd_kernels::params::{CombineParams, DeviceFault, Group};
use expertd_kernels::slot::{SlotBuffers, combine_blocks, dispatch_blocks};
use half::{bf16, f16};

use crate::placed::Placed;
use crate::random::{Random, RankStep, step};
use crate::{Options, Outcome};

pub const SECOND: u64 = 1_000_000_000;

/// The lists that a rank must have after dispatch, and the rows that it must return after combine.
pub struct Expected {
    pub offsets: Vec<u32>,
    pub row_index: Vec<u32>,
    pub row_weight: Vec<f32>,
    /// Rows for local experts, by their index in the window.
    pub arrived: Vec<(usize, Vec<u16>)>,
    pub out: Vec<f32>,
}

fn owner(shape: &Shape, expert: i32) -> u32 {
    (0..shape.ranks)
        .find(|&rank| {
            let (first, last) = shape.expert_range(rank);
            (first..last).contains(&(expert as u32))
        })
        .expect("an owner")
}

fn scaled(bits: u16, expert: i32, weight: f32, experts: u32) -> f32 {
    let factor = 1.0 + expert as f32 / experts as f32;
    bf16::from_f32(bf16::from_bits(bits).to_f32() * factor * weight).to_f32()
}

pub fn expect(shape: &Shape, steps: &[RankStep], rank: u32) -> Expected {
    let (k, h) = (shape.top_k as usize, shape.hidden as usize);
    let (first, last) = shape.expert_range(rank);
    let mut expected =
        Expected { offsets: vec![0], row_index: vec![], row_weight: vec![], arrived: vec![], out: vec![] };
    for expert in first..last {
        for (source, step) in steps.iter().enumerate() {
            for (entry, _) in step.ids.iter().enumerate().filter(|(_, id)| **id as u32 == expert) {
                expected.row_index.push((source * shape.max_tokens as usize + entry / k) as u32);
                expected.row_weight.push(step.weights[entry]);
            }
        }
        expected.offsets.push(expected.row_index.len() as u32);
    }
    for (source, step) in steps.iter().enumerate() {
        for token in 0..step.tokens {
            if step.ids[token * k..][..k].iter().any(|id| (first..last).contains(&(*id as u32))) {
                let row = step.rows[token * h..][..h].to_vec();
                expected.arrived.push((source * shape.max_tokens as usize + token, row));
            }
        }
    }
    let own = &steps[rank as usize];
    expected.out = (0..own.tokens).flat_map(|token| expected_row(shape, own, token)).collect();
    expected
}

/// The row that combine makes of a token.
pub fn expected_row(shape: &Shape, own: &RankStep, token: usize) -> Vec<f32> {
    let (k, h) = (shape.top_k as usize, shape.hidden as usize);
    let ids = &own.ids[token * k..][..k];
    let weights = &own.weights[token * k..][..k];
    let element = |bits: u16| {
        let mut sum = 0.0_f32;
        for peer in 0..shape.ranks {
            let is_local = |j: &usize| weights[*j] != 0.0 && owner(shape, ids[*j]) == peer;
            let local: Vec<usize> = (0..k).filter(is_local).collect();
            if !local.is_empty() {
                let partial = local
                    .iter()
                    .fold(0.0_f32, |sum, &j| sum + scaled(bits, ids[j], weights[j], shape.experts));
                sum += bf16::from_f32(partial).to_f32();
            }
        }
        sum
    };
    own.rows[token * h..][..h].iter().map(|&bits| element(bits)).collect()
}

/// One rank's buffers with the address of its own window.
pub struct Member {
    pub rank: u32,
    /// Layer of the steps.
    pub layer: u32,
    pub window: u64,
    pub buffers: SlotBuffers,
    pub group: Group,
}

impl Member {
    pub fn new(
        device: &Device,
        shape: &Shape,
        rank: u32,
        windows: &[u64],
        generation: u64,
    ) -> Result<Member, Box<dyn std::error::Error>> {
        let buffers = SlotBuffers::new(device, shape)?;
        let group = buffers.group(shape, rank, windows, generation, 5 * SECOND);
        Ok(Member { rank, layer: 0, window: windows[rank as usize], buffers, group })
    }

    /// Fills all buffers that the step writes with 0xff (NaN, -1), and uploads the step's inputs.
    pub fn load(&self, shape: &Shape, step: &RankStep, dtype: u32, poison: bool) -> Outcome {
        let b = &self.buffers;
        if poison {
            let (layout, bytes) = WindowLayout::new(shape);
            let zeroed = layout.zeroed_bytes();
            // SAFETY: this rank's own window, past its flags, while no step runs.
            unsafe { fill_device(self.window + zeroed, 0xff, (bytes - zeroed) as usize)? };
            b.expert_offsets.fill_bytes(0xff)?;
            b.row_index.fill_bytes(0xff)?;
            b.row_weight.fill_bytes(0xff)?;
            b.position.fill_bytes(0xff)?;
            b.expert_out.fill_bytes(0xff)?;
            b.out.fill_bytes(0xff)?;
        }
        b.tokens.write(&step.rows)?;
        b.topk_ids.write(&step.ids)?;
        b.topk_weights.write(&step.weights)?;
        let mut state = b.state.read()?[0];
        state.tokens = step.tokens as u32;
        state.layer = self.layer;
        state.out_dtype = dtype;
        b.state.write(&[state])?;
        Ok(())
    }

    pub fn verify(&self, shape: &Shape, steps: &[RankStep], dtype: u32, poison: bool) -> Outcome {
        let expected = expect(shape, steps, self.rank);
        let rank = self.rank;
        let b = &self.buffers;
        let state = b.state.read()?[0];
        if state.error != 0 {
            return Err(format!("rank {rank}: {:?}", DeviceFault::decode(state.error)).into());
        }
        let offsets = b.expert_offsets.read()?;
        if offsets[..expected.offsets.len()] != expected.offsets[..] {
            return Err(format!("rank {rank}: offsets {offsets:?}, expected {:?}", expected.offsets).into());
        }
        let count = expected.row_index.len();
        if b.row_index.read()?[..count] != expected.row_index[..] {
            return Err(format!("rank {rank}: row_index differs").into());
        }
        if b.row_weight.read()?[..count] != expected.row_weight[..] {
            return Err(format!("rank {rank}: row_weight differs").into());
        }
        let (layout, _) = WindowLayout::new(shape);
        let h = shape.hidden as usize;
        let mut window = vec![0_u8; shape.window_rows() * h * 2];
        // SAFETY: the rows of this rank's own window, while no step runs.
        unsafe { read_device(self.window + layout.rows, &mut window)? };
        // In a group of one rank nothing is sent, and experts read the tokens themselves.
        let sent = if shape.ranks == 1 { &[][..] } else { &expected.arrived };
        let mut arrived = sent.iter().peekable();
        for (index, row) in window.chunks_exact(h * 2).enumerate() {
            if arrived.peek().is_some_and(|(at, _)| *at == index) {
                let (_, wanted) = arrived.next().expect("peeked");
                let same =
                    row.chunks_exact(2).zip(wanted).all(|(a, b)| u16::from_le_bytes([a[0], a[1]]) == *b);
                if !same {
                    return Err(format!("rank {rank}: row {index} has wrong contents").into());
                }
            } else if poison && row.iter().any(|&byte| byte != 0xff) {
                return Err(format!("rank {rank}: row {index} was written, but no rank sent it").into());
            }
        }
        self.verify_out(&expected, dtype, poison)
    }

    fn verify_out(&self, expected: &Expected, dtype: u32, poison: bool) -> Outcome {
        let raw = self.buffers.out.read()?;
        let halves = |i: usize| (raw[i / 2] >> (16 * (i % 2))) as u16;
        for (i, &wanted) in expected.out.iter().enumerate() {
            let same = match dtype {
                3 => raw[i] == wanted.to_bits(),
                2 => halves(i) == f16::from_f32(wanted).to_bits(),
                _ => halves(i) == bf16::from_f32(wanted).to_bits(),
            };
            if !same {
                let found =
                    if dtype == 3 { f32::from_bits(raw[i]) } else { bf16::from_bits(halves(i)).to_f32() };
                return Err(format!("rank {}: element {i} is {found}, expected {wanted}", self.rank).into());
            }
        }
        let words = if dtype == 3 { expected.out.len() } else { expected.out.len() / 2 };
        if poison && raw[words..].iter().any(|&word| word != u32::MAX) {
            return Err(format!("rank {}: rows past the last token were written", self.rank).into());
        }
        Ok(())
    }
}

/// N virtual ranks on one GPU, whose windows are in one allocation.
pub struct Loopback {
    pub members: Vec<Member>,
    pub stream: Stream,
    _windows: Buffer<u8>,
}

impl Loopback {
    /// `delay_ns` and `chunk` are those of [`Group`].
    pub fn new(
        device: &Device,
        shape: Shape,
        delay_ns: u32,
        chunk: u32,
    ) -> Result<Loopback, Box<dyn std::error::Error>> {
        shape.check()?;
        let (_, bytes) = WindowLayout::new(&shape);
        let memory = Buffer::zeroed(device, bytes as usize * shape.ranks as usize)?;
        let windows: Vec<u64> =
            (0..shape.ranks).map(|rank| memory.address() + u64::from(rank) * bytes).collect();
        let mut members = Vec::new();
        for rank in 0..shape.ranks {
            let mut member = Member::new(device, &shape, rank, &windows, 7)?;
            member.group.delay_ns = delay_ns;
            member.group.chunk = chunk;
            members.push(member);
        }
        Ok(Loopback { members, stream: device.stream()?, _windows: memory })
    }

    /// Launches an exchange whose combine is cut before the rows `cuts`.
    pub fn launch_cut(&self, blocks: (u32, u32), members: &[Member], cuts: &[u32]) -> Outcome {
        let groups: Vec<_> = members.iter().map(|m| m.group).collect();
        // SAFETY: all addresses are of live buffers of this group.
        unsafe { launch::meet(&groups, 1, self.stream.raw())? };
        self.launch_dispatch(blocks.0, members)?;
        let combine: Vec<_> = members.iter().map(|m| combines(m.buffers.combine(m.group, 0), cuts)).collect();
        let scale: Vec<_> = members.iter().map(|m| m.buffers.scale(m.group)).collect();
        // SAFETY: all addresses are of live buffers of this group.
        unsafe {
            launch::scale(&scale, 32, self.stream.raw())?;
            for part in 0..=cuts.len() {
                let launch: Vec<_> = combine.iter().map(|parts| parts[part]).collect();
                launch::combine(&launch, blocks.1, self.stream.raw())?;
            }
        }
        Ok(())
    }

    pub fn launch(&self, blocks: (u32, u32), members: &[Member]) -> Outcome {
        let groups: Vec<_> = members.iter().map(|m| m.group).collect();
        // SAFETY: all addresses are of live buffers of this group.
        unsafe { launch::meet(&groups, 1, self.stream.raw())? };
        self.launch_dispatch(blocks.0, members)?;
        let scale: Vec<_> = members.iter().map(|m| m.buffers.scale(m.group)).collect();
        // SAFETY: all addresses are of live buffers of this group.
        unsafe { launch::scale(&scale, 32, self.stream.raw())? };
        self.launch_combine(blocks.1, members)
    }

    pub fn launch_dispatch(&self, blocks: u32, members: &[Member]) -> Outcome {
        let dispatch: Vec<_> = members.iter().map(|m| m.buffers.dispatch(m.group)).collect();
        // SAFETY: all addresses are of live buffers of this group.
        unsafe { launch::dispatch(&dispatch, blocks, self.stream.raw())? };
        Ok(())
    }

    pub fn launch_combine(&self, blocks: u32, members: &[Member]) -> Outcome {
        let combine: Vec<_> = members.iter().map(|m| m.buffers.combine(m.group, 0)).collect();
        // SAFETY: all addresses are of live buffers of this group.
        unsafe { launch::combine(&combine, blocks, self.stream.raw())? };
        Ok(())
    }
}

/// The launches of a combine that is cut before the rows `cuts`.
pub fn combines(whole: CombineParams, cuts: &[u32]) -> Vec<CombineParams> {
    let firsts = std::iter::once(0).chain(cuts.iter().copied());
    let ends = cuts.iter().copied().chain([0]);
    firsts.zip(ends).map(|(first_row, end_row)| CombineParams { first_row, end_row, ..whole }).collect()
}

/// Up to three rows, ascending, before which a combine of at most `tokens` rows is cut; half of the time none.
pub fn cuts(random: &mut Random, tokens: u32) -> Vec<u32> {
    let count = if random.below(2) == 0 { 0 } else { 1 + random.below(3) };
    let mut cuts: Vec<u32> = (0..count).map(|_| 1 + random.below(u64::from(tokens)) as u32).collect();
    cuts.sort_unstable();
    cuts.dedup();
    cuts
}

pub fn shape(random: &mut Random, ranks: u32, most_tokens: u64) -> Shape {
    let experts = random.pick(&[1, 2, 3, 5, 8, 10, 60, 64, 128, 257]);
    let top_k = random.pick(&[1, 2, 4, 6, 8, 10]).min(experts);
    let hidden = random.pick(&[8, 64, 248, 512, 1032, 2048, 2880, 4096]);
    let max_tokens = 1 + random.below(most_tokens) as u32;
    Shape { ranks, max_tokens, hidden, top_k, experts }
}

/// Largest number of blocks per rank with which all blocks of a loopback group of `ranks` fit on this GPU.
pub fn most_blocks(device: &Device, ranks: u32) -> Result<u32, Box<dyn std::error::Error>> {
    Ok((device.multiprocessors()? / ranks).clamp(1, 128))
}

pub fn loopback(options: &Options) -> Outcome {
    let device = Device::open(0)?;
    let mut random = Random(options.number("seed", 1));
    let cases = options.number("cases", 40);
    let most_tokens = options.number("tokens", 300);
    let steps_per_case = options.number("steps", 4);
    let deadline = options.number("deadline", 5) * SECOND;
    let (mut exchanges, mut placements, mut cut) = (0, 0, 0);
    for case in 0..cases {
        let ranks = random.pick(&[1, 2, 3, 4, 4, 8]).min(options.number("ranks", 8) as u32);
        let shape = shape(&mut random, ranks, most_tokens);
        let delay = random.pick(&[0, 0, 3_000, 50_000]);
        let placed = match ranks > 1 && random.below(2) == 0 {
            true => Some(Placed::draw(&device, &mut random, &shape)?),
            false => None,
        };
        let kernels = placed.as_ref().map_or(shape, |placed| placed.shape(&shape));
        // With small chunks even small steps have several of them.
        let mut group = Loopback::new(&device, kernels, delay, random.pick(&[0, 1, 2, 5]))?;
        if let Some(placed) = &placed {
            placed.apply(&mut group);
            placements += 1;
        }
        group.members.iter_mut().for_each(|member| member.group.deadline_ns = deadline);
        let most = most_blocks(&device, ranks)?;
        for index in 0..steps_per_case {
            let steps = step(&mut random, &shape);
            // Only some steps begin with poisoned buffers; in the others the rows of the previous step are stale.
            let poison = index % 2 == 0;
            let dtype = random.pick(&[1, 2, 3]);
            for (member, step) in group.members.iter().zip(&steps) {
                member.load(&kernels, step, dtype, poison)?;
            }
            let blocks = if random.below(2) == 0 {
                (
                    dispatch_blocks(&shape, shape.max_tokens, most),
                    combine_blocks(&shape, shape.max_tokens, most),
                )
            } else {
                (2 + random.below(u64::from(most) - 1) as u32, 1 + random.below(u64::from(most)) as u32)
            };
            let cuts = cuts(&mut random, shape.max_tokens);
            cut += u32::from(!cuts.is_empty());
            group.launch_cut(blocks, &group.members, &cuts)?;
            group.stream.synchronize()?;
            let physical = placed.as_ref().map(|placed| placed.physical(&steps, shape.top_k as usize));
            let expected = physical.as_deref().unwrap_or(&steps);
            for member in &group.members {
                member.verify(&kernels, expected, dtype, poison).map_err(|error| {
                    format!("case {case}, step {index}, {shape:?}, {kernels:?}, blocks {blocks:?}, cut at {cuts:?}, dtype {dtype}: {error}")
                })?;
                let sequence = member.buffers.state.read()?[0].sequence;
                if sequence != index + 2 {
                    return Err(format!("sequence {sequence} after step {index}").into());
                }
            }
            exchanges += 1;
        }
    }
    println!(
        "loopback: {exchanges} exchanges ({cut} of them in parts) in {cases} groups, {placements} of them with a placement, are \
         bitwise right"
    );
    Ok(())
}
