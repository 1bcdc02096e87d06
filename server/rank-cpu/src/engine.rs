//! The engine of a CPU rank: gate, experts and exchange in f32.

use std::sync::Arc;

use crate::weights::{NOT_HERE, RankLayer, RankWeights as MappedWeights, map};
use crate::{CpuGroup, HostRouting};
use expertd_compute::experts::Assignments;
use expertd_compute::experts::cpu::{Workspace, WorkspaceSize, forward, forward_one};
use expertd_compute::gate::GateScratch;
use expertd_compute::linalg::{AlignedBuffer, SimdLevel};
use expertd_ipc::control::{FailureKind, RankSetup};
use expertd_ipc::{ExpertsNotice, GroupShape, RankStaging, RowCounts, StepDescriptor};
use expertd_model::ModelSpec;
use expertd_rank::convert::{narrow, narrow_shared, widen, widen_shared};
use expertd_rank::segments::{CheckedSegment, RowsPlace, rows_of};
use expertd_rank::{
    ClientMemory, Failure, HostMemories, Joining, Loaded, PhaseClock, StepEngine, StepFault, StepReport,
    setup_failure,
};
use expertd_types::{MemoryId, Phase, Rank, Slot};

/// Rows of the current step, each buffer `[max_tokens_per_rank, hidden]`. A CPU rank runs one step after another, so one
/// set serves all slots; data that outlives a step is in staging and in the windows.
struct StepBuffers {
    rows: AlignedBuffer<f32>,
    out: AlignedBuffer<f32>,
    /// Output of the shared experts; empty if no layer has shared experts.
    shared: AlignedBuffer<f32>,
}

/// Received rows in the order of their experts; see [`Assignments`].
#[derive(Default)]
struct GroupedRows {
    offsets: Vec<u32>,
    rows: Vec<u32>,
    weights: Vec<f32>,
}

/// The engine of one CPU rank.
pub struct CpuEngine {
    group: CpuGroup,
    pool: rayon::ThreadPool,
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
    weight_bytes: u64,
    memories: HostMemories,
}

/// Scratch memory for the largest call of any layer.
fn workspace(
    spec: &ModelSpec,
    layers: &[Option<RankLayer>],
    shape: &GroupShape,
    threads: usize,
) -> Workspace {
    let ranks = shape.ranks as usize;
    let widths =
        spec.moe_layers().map(|(_, moe)| moe.experts.width.max(moe.shared.as_ref().map_or(0, |s| s.width)));
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
    // This thread is part of the pool, so that a step can begin without waking another thread.
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(setup.threads)
        .use_current_thread()
        .thread_name(|i| format!("experts-{i}"))
        .build()
        .map_err(setup_failure)?;
    joining.clock.end("threads");
    let windows = joining.next_fd("the windows")?;
    let group = CpuGroup::from_fd(windows, crate::ep_config(setup)).map_err(setup_failure)?;
    joining.clock.end("windows");
    let weights = joining.next_fd("the weights")?;
    let weights = map(weights, setup.rank, setup.shape.ranks as usize, &setup.fingerprint)
        .map_err(|error| (FailureKind::Load, error.to_string()))?;
    let memory = Arc::clone(&weights.memory);
    joining.clock.end("weights");
    let engine = CpuEngine::new(setup, group, pool, weights, joining.row_counts.clone());
    joining.clock.end("buffers");
    // Steps can begin meanwhile: a page that is not mapped yet costs them a fault.
    let mapping = std::thread::Builder::new().name("map-weights".into());
    mapping.spawn(move || memory.populate()).map_err(setup_failure)?;
    let (weight_bytes, device) = (engine.weight_bytes(), engine.device());
    Ok(Loaded { engine: Box::new(engine), weight_bytes, device, usage: None })
}

impl CpuEngine {
    /// The engine of a rank whose weights are mapped.
    fn new(
        setup: &RankSetup,
        group: CpuGroup,
        pool: rayon::ThreadPool,
        weights: MappedWeights,
        row_counts: RowCounts,
    ) -> Self {
        let MappedWeights { spec, layers, weight_bytes, .. } = weights;
        let threads = pool.current_num_threads();
        let workspace = workspace(&spec, &layers, &setup.shape, threads);
        let capacity = setup.shape.max_tokens_per_rank;
        let elements = capacity * setup.shape.hidden;
        let any_shared = spec.moe_layers().any(|(_, moe)| moe.shared.is_some());
        CpuEngine {
            group,
            pool,
            hidden: setup.shape.hidden,
            layers,
            buffers: StepBuffers {
                rows: AlignedBuffer::resident(elements),
                out: AlignedBuffer::resident(elements),
                shared: AlignedBuffer::resident(if any_shared { elements } else { 0 }),
            },
            grouped: GroupedRows::default(),
            workspace,
            gate_scratch: GateScratch::new(spec.hidden, threads),
            sigmoids: vec![0.0; capacity],
            rank: setup.rank,
            row_counts,
            weight_bytes,
            memories: HostMemories::default(),
        }
    }

    /// Size of the weights that this rank holds, in bytes.
    #[must_use]
    pub const fn weight_bytes(&self) -> u64 {
        self.weight_bytes
    }

    /// Human-readable description of the device.
    #[must_use]
    pub fn device(&self) -> String {
        format!("cpu, {} threads, {}", self.pool.current_num_threads(), SimdLevel::active())
    }
}

impl GroupedRows {
    /// Sorts `(row, expert, weight)` by the experts that this rank owns, rows ascending; `choices` is iterated twice.
    fn fill(&mut self, layer: &RankLayer, choices: impl Iterator<Item = (u32, i32, f32)> + Clone) {
        let count = layer.mine.len();
        let local = |id: i32| {
            let index = *layer.local.get(usize::try_from(id).ok()?)?;
            (index != NOT_HERE).then_some(index as usize)
        };
        self.offsets.clear();
        self.offsets.resize(count + 1, 0);
        for expert in choices.clone().filter_map(|(_, id, _)| local(id)) {
            self.offsets[expert + 1] += 1;
        }
        for expert in 0..count {
            self.offsets[expert + 1] += self.offsets[expert];
        }
        let total = self.offsets[count] as usize;
        self.rows.resize(total, 0);
        self.weights.resize(total, 0.0);
        // Each expert's offset serves as its write position, which ends at the next expert's first offset.
        for (row, id, weight) in choices {
            if let Some(expert) = local(id) {
                let at = self.offsets[expert] as usize;
                self.rows[at] = row;
                self.weights[at] = weight;
                self.offsets[expert] += 1;
            }
        }
        self.offsets.copy_within(0..count, 1);
        self.offsets[0] = 0;
    }

    /// Rows of each expert.
    fn rows_per_expert(&self) -> impl Iterator<Item = u64> {
        self.offsets.windows(2).map(|pair| u64::from(pair[1] - pair[0]))
    }

    fn assignments(&self) -> Assignments<'_> {
        Assignments { offsets: &self.offsets, rows: &self.rows, weights: &self.weights }
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    // Eight independent sums let the additions run in parallel.
    let (a8, a_rest) = a.as_chunks::<8>();
    let (b8, b_rest) = b.as_chunks::<8>();
    let mut sums = [0.0; 8];
    for (a, b) in a8.iter().zip(b8) {
        for i in 0..8 {
            sums[i] += a[i] * b[i];
        }
    }
    sums.iter().sum::<f32>() + a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum::<f32>()
}

impl StepEngine for CpuEngine {
    fn begin(
        &mut self,
        step: &StepDescriptor,
        staging: RankStaging<'_>,
        notice: &ExpertsNotice,
    ) -> Result<Option<StepReport>, StepFault> {
        let mut clock = PhaseClock::start();
        let hidden = self.hidden;
        let (tokens, k) = (step.tokens as usize, step.top_k as usize);
        let slot = Slot(step.slot);
        let layer = self
            .layers
            .get_mut(step.layer as usize)
            .and_then(Option::as_mut)
            .ok_or(StepFault::Layer(step.layer))?;
        let buffers = &mut self.buffers;
        let rows = &mut buffers.rows[..tokens * hidden];
        let out = &mut buffers.out[..tokens * hidden];

        let (staged_bytes, memories) = (staging.rows.len(), &self.memories);
        let size = |memory| memories.size(memory);
        let segments = CheckedSegment::all(staging.segments, tokens, hidden, staged_bytes, size)?;
        for segment in &segments {
            let to = &mut rows[segment.rows.start * hidden..segment.rows.end * hidden];
            match &segment.place {
                RowsPlace::Staging(bytes) => widen(&staging.rows[bytes.clone()], segment.dtype, to),
                RowsPlace::Memory { memory, input, .. } => {
                    if let Some(memory) = memories.get(*memory) {
                        widen_shared(memory, input.start, segment.dtype, to);
                    }
                }
            }
        }
        clock.end(Phase::CopyIn);

        for gated in segments.chunk_by(|a, b| a.gated == b.gated).filter(|chunk| chunk[0].gated) {
            let range = rows_of(gated);
            let routed = range.start * k..range.end * k;
            layer
                .gate
                .route_with(
                    &rows[range.start * hidden..range.end * hidden],
                    Some(&staging.token_ids[range]),
                    &mut staging.ids[routed.clone()],
                    &mut staging.weights[routed],
                    &mut self.gate_scratch,
                    Some(&self.pool),
                )
                .map_err(StepFault::engine)?;
        }
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
        self.group.dispatch_send(slot, rows)?;
        clock.end(Phase::Dispatch);
        // The shared experts are computed while the peers' rows arrive.
        let shared_out = &mut buffers.shared[..if layer.shared.is_some() { tokens * hidden } else { 0 }];
        let with_shared =
            || segments.chunk_by(|a, b| a.shared == b.shared).filter(|chunk| chunk[0].shared).map(rows_of);
        if let Some(shared) = &layer.shared {
            for range in with_shared() {
                let (first, elements) = (range.start, range.start * hidden..range.end * hidden);
                let sigmoids = shared.gate.as_ref().map(|gate| {
                    let sigmoids = &mut self.sigmoids[..range.len()];
                    for (sigmoid, row) in sigmoids.iter_mut().zip(rows[first * hidden..].chunks_exact(hidden))
                    {
                        let logit: f32 = dot(row, gate);
                        *sigmoid = 1.0 / (1.0 + (-logit).exp());
                    }
                    &*sigmoids
                });
                forward_one(
                    shared.kind,
                    &shared.mlp,
                    sigmoids,
                    &rows[elements.clone()],
                    &mut shared_out[elements],
                    &mut self.workspace,
                    Some(&self.pool),
                );
            }
        }
        clock.end(Phase::Experts);
        self.group.dispatch_wait(slot)?;
        clock.end(Phase::Dispatch);

        let (received_rows, expert_rows) = {
            let batches: Vec<_> = self.group.received(slot)?.collect();
            let mut first = 0;
            let firsts: Vec<usize> = batches
                .iter()
                .map(|batch| {
                    let before = first;
                    first += batch.rows.len() / hidden;
                    before
                })
                .collect();
            self.grouped.fill(
                layer,
                batches.iter().zip(&firsts).flat_map(|(batch, &first)| {
                    let choices = batch.ids.iter().zip(batch.weights).enumerate();
                    choices.map(move |(i, (&id, &weight))| ((first + i / batch.k) as u32, id, weight))
                }),
            );
            let (rows, mut out): (Vec<&[f32]>, Vec<&mut [f32]>) =
                batches.into_iter().map(|batch| (batch.rows, batch.partials)).unzip();
            let assignments = self.grouped.assignments();
            forward(
                layer.kind,
                &layer.experts,
                assignments,
                &rows,
                &mut out,
                &mut self.workspace,
                Some(&self.pool),
            );
            (first, assignments.rows.len())
        };
        notice.experts_ended(step.sequence);
        clock.end(Phase::Experts);
        let computed = layer.mine.iter().zip(self.grouped.rows_per_expert());
        for (&expert, rows) in computed.filter(|&(_, rows)| rows != 0) {
            self.row_counts.add(self.rank, step.layer as usize, expert as usize, rows);
        }

        self.group.combine(slot, out)?;
        if layer.shared.is_some() {
            for range in with_shared() {
                let elements = range.start * hidden..range.end * hidden;
                out[elements.clone()]
                    .iter_mut()
                    .zip(&shared_out[elements])
                    .for_each(|(out, shared)| *out += shared);
            }
        }
        clock.end(Phase::Combine);

        for segment in &segments {
            let from = &out[segment.rows.start * hidden..segment.rows.end * hidden];
            match &segment.place {
                RowsPlace::Staging(bytes) => narrow(from, segment.dtype, &mut staging.rows[bytes.clone()]),
                RowsPlace::Memory { memory, output, .. } => {
                    if let Some(memory) = memories.get(*memory) {
                        narrow_shared(from, segment.dtype, memory, output.start);
                    }
                }
            }
        }
        clock.end(Phase::CopyOut);
        Ok(Some(StepReport { phases: clock.phases(), received_rows, expert_rows }))
    }

    fn attach(&mut self, memory: MemoryId, client: ClientMemory) -> Result<(), String> {
        match client {
            ClientMemory::Host(bytes) => self.memories.attach(memory, bytes),
            ClientMemory::Device(_) => {
                Err("ranks on CPUs cannot access the memory of a GPU; open a host session, or serve \
                                            with --device cuda"
                    .to_owned())
            }
        }
    }

    fn detach(&mut self, memory: MemoryId) {
        self.memories.detach(memory);
    }
}
