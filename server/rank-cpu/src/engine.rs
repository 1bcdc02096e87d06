//! The engines of CPU ranks: gate, experts and exchange in f32. In a mixed group a CPU rank has one of two other engines, which use the
//! wire of [`expertd_tier`] in place of windows: that of the source, and that of a rank without rows of its own.

mod grouped;
mod phases;
mod slots;
mod source;
mod worker;

use std::sync::Arc;
use std::time::Duration;

use self::grouped::GroupedRows;
use self::phases::{StepRows, compute_received};
use self::source::SourceEngine;
use self::worker::WorkerEngine;
use crate::weights::{RankLayer, RankWeights as MappedWeights, map};
use crate::{CpuGroup, HostRouting};
use expertd_compute::experts::cpu::{Workspace, WorkspaceSize};
use expertd_compute::gate::GateScratch;
use expertd_compute::linalg::{AlignedBuffer, SimdLevel};
use expertd_ipc::control::{FailureKind, RankSetup};
use expertd_ipc::{ExpertsNotice, GroupShape, RankStaging, RowCounts, StepDescriptor};
use expertd_model::{ModelSpec, MoeLayer};
use expertd_rank::segments::CheckedSegment;
use expertd_rank::{
    ClientMemory, Failure, HostMemories, Joining, Loaded, PhaseClock, StepEngine, StepFault, StepReport,
    setup_failure,
};
use expertd_shm::ThreadTeam;
use expertd_types::{MemoryId, Phase, Rank, Slot};

/// How long helpers spin after a part of a step, such as the gate: longer than one thread works alone, shorter than most waits for
/// other ranks. They do so on few cores as well, because a step's helpers have their cores to themselves.
const BETWEEN_PARTS: Duration = Duration::from_micros(200);

/// Rows of the current step, each buffer `[max_tokens_per_rank, hidden]`. A CPU rank runs one step after another, so one
/// set serves all slots; data that outlives a step is in staging and in the windows.
struct StepBuffers {
    rows: AlignedBuffer<f32>,
    out: AlignedBuffer<f32>,
    /// Output of the shared experts; empty if no layer has shared experts.
    shared: AlignedBuffer<f32>,
}

impl StepBuffers {
    fn new(spec: &ModelSpec, shape: &GroupShape) -> Self {
        let elements = shape.max_tokens_per_rank * shape.hidden;
        let any_shared = spec.moe_layers().any(|(_, moe)| moe.shared.is_some());
        StepBuffers {
            rows: AlignedBuffer::resident(elements),
            out: AlignedBuffer::resident(elements),
            shared: AlignedBuffer::resident(if any_shared { elements } else { 0 }),
        }
    }
}

/// Adds the rows that a rank has computed to its counts; `experts` are those of `grouped`.
fn count_rows(counts: &RowCounts, rank: Rank, layer: u32, experts: &[u32], grouped: &GroupedRows) {
    let computed = experts.iter().zip(grouped.rows_per_expert());
    for (&expert, rows) in computed.filter(|&(_, rows)| rows != 0) {
        counts.add(rank, layer as usize, expert as usize, rows);
    }
}

/// Attaches the memory of a client, which must be host memory.
fn attach_to(memories: &mut HostMemories, memory: MemoryId, client: ClientMemory) -> Result<(), String> {
    match client {
        ClientMemory::Host(bytes) => memories.attach(memory, bytes),
        ClientMemory::Device(_) => {
            let text = "ranks on CPUs cannot access the memory of a GPU; open a host session, or serve with --device cuda";
            Err(text.to_owned())
        }
    }
}

/// The engine of one CPU rank.
pub(crate) struct CpuEngine {
    group: CpuGroup,
    team: ThreadTeam,
    hidden: usize,
    layers: Vec<Option<RankLayer>>,
    buffers: StepBuffers,
    grouped: GroupedRows,
    workspace: Workspace,
    gate_scratch: GateScratch,
    /// `[max_tokens_per_rank]`: factors of the shared experts' output.
    sigmoids: Vec<f32>,
    rank: Rank,
    row_counts: RowCounts,
    memories: HostMemories,
}

/// Scratch memory for the largest call of any layer.
fn workspace(
    spec: &ModelSpec,
    layers: &[Option<RankLayer>],
    shape: &GroupShape,
    threads: usize,
) -> Workspace {
    let ranks = shape.sources as usize;
    let has_shared = layers.iter().flatten().any(|layer| layer.shared.is_some());
    let shared = |moe: &MoeLayer| moe.shared.as_ref().filter(|_| has_shared).map_or(0, |s| s.width);
    let widths = spec.moe_layers().map(|(_, moe)| moe.experts.width.max(shared(moe)));
    let local = layers.iter().flatten().map(|layer| layer.mine.len());
    let per_row = shape.max_top_k.min(local.max().unwrap_or(1)).max(1);
    Workspace::new(WorkspaceSize {
        hidden: spec.hidden,
        intermediate: widths.max().unwrap_or(1),
        assignments: ranks * shape.max_tokens_per_rank * per_row,
        threads,
    })
}

/// Joins the group and maps this rank's share of the weights.
///
/// # Errors
/// The reason why the group could not be joined or the weights could not be mapped.
pub fn load(mut joining: Joining<'_>) -> Result<Loaded, Failure> {
    let setup = joining.setup;
    let team = ThreadTeam::start("experts", setup.threads, BETWEEN_PARTS).map_err(setup_failure)?;
    joining.clock.end("threads");
    let windows = joining.next_fd("the windows")?;
    let weights = joining.next_fd("the weights")?;
    let group = (setup.shape.ranks as usize, setup.shape.sources as usize);
    let map = |fd, rank| {
        map(fd, rank, group, &setup.fingerprint, setup.fp8_products)
            .map_err(|error| (FailureKind::Load, error.to_string()))
    };
    // The source maps its share twice: once alone, and once with the shares of all other ranks.
    let again = weights.try_clone().map_err(setup_failure)?;
    let weights = map(weights, setup.rank)?;
    let mut all = Vec::new();
    if setup.shape.is_mixed() && setup.rank.0 < setup.shape.sources {
        all.push(map(again, setup.rank)?);
        for rank in setup.shape.sources..setup.shape.ranks {
            all.push(map(joining.next_fd("the weights of CPU ranks")?, Rank(rank))?);
        }
    }
    let memory = Arc::clone(&weights.memory);
    joining.clock.end("weights");
    let parts = EngineParts { team, weights, all, row_counts: joining.row_counts.clone() };
    let (weight_bytes, device) = (parts.weights.weight_bytes, parts.device());
    let engine: Box<dyn StepEngine> = if !setup.shape.is_mixed() {
        let group = CpuGroup::from_fd(windows, crate::ep_config(setup)).map_err(setup_failure)?;
        Box::new(CpuEngine::new(setup, group, parts))
    } else if setup.rank.0 < setup.shape.sources {
        Box::new(SourceEngine::new(setup, windows, parts)?)
    } else {
        Box::new(WorkerEngine::new(setup, windows, parts).map_err(setup_failure)?)
    };
    joining.clock.end("windows and buffers");
    // Steps can begin meanwhile: a page that is not mapped yet costs them a fault.
    let mapping = std::thread::Builder::new().name("map-weights".into());
    mapping.spawn(move || memory.populate()).map_err(setup_failure)?;
    Ok(Loaded { engine, weight_bytes, device, usage: None })
}

/// The parts that all engines of CPU ranks share.
struct EngineParts {
    team: ThreadTeam,
    weights: MappedWeights,
    /// On the source of a mixed group: the shares of all ranks.
    all: Vec<MappedWeights>,
    row_counts: RowCounts,
}

impl EngineParts {
    /// Human-readable description of the device.
    fn device(&self) -> String {
        let threads = match self.team.threads() {
            1 => "1 thread".to_owned(),
            threads => format!("{threads} threads"),
        };
        format!("cpu, {threads}, {}", SimdLevel::active())
    }
}

impl CpuEngine {
    /// The engine of a rank whose weights are mapped.
    fn new(setup: &RankSetup, group: CpuGroup, parts: EngineParts) -> Self {
        let EngineParts { team, weights, row_counts, .. } = parts;
        let MappedWeights { spec, layers, .. } = weights;
        let threads = team.threads();
        let workspace = workspace(&spec, &layers, &setup.shape, threads);
        let capacity = setup.shape.max_tokens_per_rank;
        CpuEngine {
            group,
            team,
            hidden: setup.shape.hidden,
            layers,
            buffers: StepBuffers::new(&spec, &setup.shape),
            grouped: GroupedRows::default(),
            workspace,
            gate_scratch: GateScratch::new(spec.hidden, threads),
            sigmoids: vec![0.0; capacity],
            rank: setup.rank,
            row_counts,
            memories: HostMemories::default(),
        }
    }
}

impl StepEngine for CpuEngine {
    fn begin(
        &mut self,
        step: &StepDescriptor,
        staging: RankStaging<'_>,
        notice: &ExpertsNotice,
    ) -> Result<Option<StepReport>, StepFault> {
        let mut clock = PhaseClock::start();
        let mut staging = staging;
        let (hidden, tokens, k) = (self.hidden, step.tokens as usize, step.top_k as usize);
        let slot = Slot(step.slot);
        let layer = self.layers.get_mut(step.layer as usize).and_then(Option::as_mut);
        let layer = layer.ok_or(StepFault::Layer(step.layer))?;
        let rows = &mut self.buffers.rows[..tokens * hidden];
        let out = &mut self.buffers.out[..tokens * hidden];
        let shared_elements = if layer.shared.is_some() { tokens * hidden } else { 0 };
        let shared_out = &mut self.buffers.shared[..shared_elements];

        let (staged_bytes, memories) = (staging.rows.len(), &self.memories);
        let size = |memory| memories.size(memory);
        let segments = CheckedSegment::all(staging.segments, tokens, hidden, staged_bytes, size)?;
        let step_rows = StepRows { segments: &segments, memories, hidden };
        step_rows.copy_in(staging.rows, rows);
        clock.end(Phase::CopyIn);

        step_rows.route(layer, rows, k, &mut staging, &mut self.gate_scratch, &self.team)?;
        clock.end(Phase::Gate);

        let routing = HostRouting {
            owners: &layer.owners,
            turn: self.rank.index(),
            tokens,
            k,
            ids: staging.ids,
            weights: staging.weights,
        };
        self.group.prepare(slot, routing)?;
        clock.end(Phase::Prepare);
        self.group.dispatch_send(slot, rows, Some(&self.team))?;
        clock.end(Phase::Dispatch);
        // The shared experts are computed while the peers' rows arrive.
        if let Some(shared) = &layer.shared {
            let sigmoids = &mut self.sigmoids;
            step_rows.compute_shared(shared, rows, shared_out, sigmoids, &mut self.workspace, &self.team);
        }
        clock.end(Phase::Experts);
        self.group.dispatch_wait(slot)?;
        clock.end(Phase::Dispatch);

        let batches = self.group.received(slot)?.collect();
        let (received_rows, expert_rows) =
            compute_received(layer, batches, hidden, &mut self.grouped, &mut self.workspace, &self.team);
        notice.experts_ended(step.sequence);
        clock.end(Phase::Experts);
        count_rows(&self.row_counts, self.rank, step.layer, &layer.mine, &self.grouped);

        self.group.combine(slot, out, Some(&self.team))?;
        if layer.shared.is_some() {
            step_rows.add_shared(shared_out, out);
        }
        clock.end(Phase::Combine);

        step_rows.copy_out(out, staging.rows);
        clock.end(Phase::CopyOut);
        Ok(Some(StepReport { phases: clock.phases(), received_rows, expert_rows, ..StepReport::default() }))
    }

    fn attach(&mut self, memory: MemoryId, client: ClientMemory) -> Result<(), String> {
        attach_to(&mut self.memories, memory, client)
    }

    fn detach(&mut self, memory: MemoryId) {
        self.memories.detach(memory);
    }
}
