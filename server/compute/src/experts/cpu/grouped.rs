//! The grouped MLP: packing of rows, gate and up projections with the activation, down projections.
#![allow(
    unsafe_code,
    reason = "threads write disjoint columns of the output and disjoint parts of the scratch"
)]

use std::borrow::Borrow;
use std::ops::Range;

use expertd_shm::ThreadTeam;

use super::segments::Segments;
use super::workspace::ExpertPart;
use super::{CpuExpert, Workspace};
use crate::experts::{Assignments, ExpertKind};
use crate::linalg::{
    AlignedBuffer, DisjointSlice, K_BLOCK, PackedMatrix, PackedRows, PanelOutput, RowTile, SimdLevel, Tiling,
    WorkQueue, activate, fix_tile, multiply, pack_row, pack_zeros, padded, quantise_row, run_parallel,
    takes_fixed,
};
use expertd_model::WeightOn;

/// Runs a rank's experts over its rows: `out[r] = sum over assignments (r, weight) of weight * expert(row r)`.
///
/// `rows` and `out` hold the same rows, `[.., hidden]` in f32, each divided into up to 64 segments in any way; row
/// numbers count through the segments. Every row of `out` is written, with zeros if nothing is assigned to it. An
/// assignment with weight zero adds zeros, also to a row that is not finite. Sums run in f32 over experts in ascending
/// order, so equal calls give equal bits on any number of threads.
///
/// All experts must have the same shape. Runs on `team`, or on the calling thread if there is none, and does not
/// allocate.
///
/// # Panics
/// If lengths do not match, a row number is out of range, or the workspace is too small.
pub fn forward<E: Borrow<CpuExpert> + Sync>(
    kind: ExpertKind,
    experts: &[E],
    assignments: Assignments<'_>,
    rows: &[&[f32]],
    out: &mut [&mut [f32]],
    workspace: &mut Workspace,
    team: Option<&ThreadTeam>,
) {
    let Assignments { offsets, rows: numbers, weights } = assignments;
    assert_eq!(
        offsets.len(),
        experts.len() + 1,
        "{} experts need one offset more than experts",
        experts.len()
    );
    assert_eq!(
        (offsets[0], offsets[experts.len()] as usize),
        (0, numbers.len()),
        "the offsets must cover the assignments"
    );
    assert_eq!(numbers.len(), weights.len(), "each assignment needs a weight");
    let Some(first) = experts.first() else {
        out.iter_mut().for_each(|out| out.fill(0.0));
        return;
    };
    let hidden = first.borrow().hidden();
    let rows = Segments::of(rows, hidden);
    let call = Call { kind, experts, offsets, numbers: Some(numbers), weights: Some(weights), rows, hidden };
    call.run(out, workspace, team);
}

/// Runs one expert over all rows, as shared experts are run: `out[r] = weights[r] * expert(rows[r])`, with weight 1 if
/// no weights are given. `rows` and `out` are `[n, hidden]`.
///
/// # Panics
/// See [`forward`].
pub fn forward_one(
    kind: ExpertKind,
    expert: &CpuExpert,
    weights: Option<&[f32]>,
    rows: &[f32],
    out: &mut [f32],
    workspace: &mut Workspace,
    team: Option<&ThreadTeam>,
) {
    let hidden = expert.hidden();
    let rows = Segments::of(&[rows], hidden);
    assert!(weights.is_none_or(|weights| weights.len() == rows.rows()), "each row needs a weight");
    let offsets = [0, u32::try_from(rows.rows()).expect("the number of rows fits in 32 bits")];
    let experts = std::slice::from_ref(expert);
    let call = Call { kind, experts, offsets: &offsets, numbers: None, weights, rows, hidden };
    call.run(&mut [out], workspace, team);
}

/// The operands of one call.
struct Call<'a, E> {
    kind: ExpertKind,
    experts: &'a [E],
    offsets: &'a [u32],
    /// Row number of each assignment; if `None`, assignment `i` is row `i`.
    numbers: Option<&'a [u32]>,
    weights: Option<&'a [f32]>,
    rows: Segments<&'a [f32]>,
    hidden: usize,
}

impl<E: Borrow<CpuExpert> + Sync> Call<'_, E> {
    fn run(&self, out: &mut [&mut [f32]], workspace: &mut Workspace, team: Option<&ThreadTeam>) {
        let first = self.expert(0);
        let shape = (first.hidden(), first.intermediate(), first.level());
        assert!(
            self.experts.iter().map(Borrow::borrow).all(|expert: &CpuExpert| (
                expert.hidden(),
                expert.intermediate(),
                expert.level()
            ) == shape),
            "the experts of a call must have the same shape"
        );
        let size = workspace.size;
        assert!(
            first.hidden() <= size.hidden && first.intermediate() <= size.intermediate,
            "the experts are larger than the workspace supports"
        );
        let out = Segments::of_mut(out, self.hidden);
        assert_eq!(self.rows.rows(), out.rows(), "input and output must have the same number of rows");
        let mut rest = (0, 0);
        let mut fresh = true;
        loop {
            self.cut(&mut rest, workspace);
            if workspace.parts.is_empty() && !fresh {
                break;
            }
            self.pack(workspace, team);
            self.gate_up(workspace, team);
            self.convert(workspace, team);
            self.down(&out, fresh, workspace, team);
            fresh = false;
        }
    }

    /// Divides the next chunk of assignments into parts. `rest` is the expert and the assignment to continue with.
    fn cut(&self, rest: &mut (usize, usize), workspace: &mut Workspace) {
        let mut start = 0;
        workspace.parts.clear();
        while start < workspace.chunk && rest.0 < self.experts.len() {
            let (expert, first) = *rest;
            let end = self.offsets[expert + 1] as usize;
            let rows = end.checked_sub(first).expect("offsets must ascend");
            let rows = rows.min(workspace.chunk - start).min(workspace.part);
            if rows > 0 {
                let tiles = workspace.parts.last().map_or(0, |part| part.tiles + part.tiling.tiles());
                let tiling = Tiling::new(self.level(), rows);
                workspace.parts.push(ExpertPart { expert, first, rows, start, tiling, tiles });
            }
            start += rows;
            *rest = if first + rows == end { (expert + 1, end) } else { (expert, first + rows) };
        }
    }

    fn pack(&self, workspace: &mut Workspace, team: Option<&ThreadTeam>) {
        let Workspace { x, x_scales, parts, sums, .. } = workspace;
        for_each_tile(parts, padded(self.hidden), (x, x_scales), sums, team, |part, tile, packed, scales| {
            for r in 0..tile.rows {
                let assignment = part.first + tile.start + r;
                let weight = self.weights.map_or(1.0, |weights| weights[assignment]);
                let factor = (self.kind.weight_on == WeightOn::Input).then_some(weight);
                let row = self.rows.row(self.number(assignment), self.hidden);
                if weight == 0.0 {
                    // The expert adds zeros, whatever the row holds: infinity times zero is no zero.
                    pack_zeros(packed, tile.rows, r);
                } else if let Some(scales) = self.kind.fp8_rows {
                    // The weight multiplies the quantised row, so that a row's codes are the same for all experts.
                    pack_row(packed, tile.rows, r, row, None);
                    quantise_row(packed, tile.rows, r, scales, factor.unwrap_or(1.0));
                } else {
                    pack_row(packed, tile.rows, r, row, factor);
                }
            }
            let matrix = &self.expert(part.expert).gate_up;
            if takes_fixed(matrix, part.rows) {
                fix_tile(matrix, part.rows, packed, scales);
            }
        });
    }

    /// Converts the inputs of the down projections: quantised if the kind says so, and to fixed point where a matrix takes that.
    fn convert(&self, workspace: &mut Workspace, team: Option<&ThreadTeam>) {
        let Workspace { h, h_scales, parts, sums, .. } = workspace;
        let is_fixed = |part: &ExpertPart| takes_fixed(&self.expert(part.expert).down, part.rows);
        if self.kind.fp8_rows.is_none() && !parts.iter().any(is_fixed) {
            return;
        }
        let k = padded(self.expert(0).intermediate());
        for_each_tile(parts, k, (h, h_scales), sums, team, |part, tile, packed, scales| {
            if let Some(scales) = self.kind.fp8_rows {
                (0..tile.rows).for_each(|r| quantise_row(packed, tile.rows, r, scales, 1.0));
            }
            if is_fixed(part) {
                fix_tile(&self.expert(part.expert).down, part.rows, packed, scales);
            }
        });
    }

    fn gate_up(&self, workspace: &mut Workspace, team: Option<&ThreadTeam>) {
        let Workspace { x, x_scales, h, parts, sums, .. } = workspace;
        let (level, panels) = (self.level(), self.expert(0).gate_up.panels());
        let padded = padded(self.expert(0).intermediate());
        let (x, h) = (&x[..], DisjointSlice::new(h));
        let items = parts.len() * panels;
        let queue = WorkQueue::new(items);
        run_parallel(team, items, sums, |sums| {
            for (item, next) in queue.with_next() {
                let (part, panel) = (&parts[item / panels], item % panels);
                let expert = self.expert(part.expert);
                let next = next.map_or(&[][..], |next| {
                    self.expert(parts[next / panels].expert).gate_up.panel_data(next % panels)
                });
                let sums = &mut sums[..part.rows * level.panel_width()];
                start_sums(sums, panel, level, &expert.gate_up_bias, None);
                let rows = packed_rows(part, &expert.gate_up, x, x_scales);
                multiply(&expert.gate_up, panel, rows, sums, next);
                let last = panel + 1 == panels;
                let output = PanelOutput { h, start: part.start * padded, padded, panel, last };
                // SAFETY: an item owns the rows of a part and the columns of a panel; no other item has both.
                unsafe { activate(level, self.kind.activation, sums, self.output_weights(part), output) };
            }
        });
    }

    /// Adds the down projections of a chunk to the output; `fresh` means that the output is to be zeroed first.
    fn down(
        &self,
        out: &Segments<DisjointSlice<'_, f32>>,
        fresh: bool,
        workspace: &mut Workspace,
        team: Option<&ThreadTeam>,
    ) {
        let Workspace { h, h_scales, parts, sums, .. } = workspace;
        let (level, panels) = (self.level(), self.expert(0).down.panels());
        let width = level.panel_width();
        let h = &h[..];
        let per_item = panels_per_item(parts, panels, sums.len(), level);
        let items = panels.div_ceil(per_item);
        let queue = WorkQueue::new(items);
        run_parallel(team, items, sums, |sums| {
            for (item, next_item) in queue.with_next() {
                let mine = item * per_item..panels.min((item + 1) * per_item);
                let columns = mine.start * width..self.hidden.min(mine.end * width);
                if fresh {
                    for row in 0..out.rows() {
                        let (slice, at) = out.place(row, self.hidden);
                        // SAFETY: an item owns these columns, in all rows.
                        unsafe { slice.part_mut(at + columns.start..at + columns.end) }.fill(0.0);
                    }
                }
                for (i, part) in parts.iter().enumerate() {
                    let expert = self.expert(part.expert);
                    for panel in mine.clone() {
                        let next = if panel + 1 < mine.end {
                            expert.down.panel_data(panel + 1)
                        } else {
                            // The next expert's first panel of this item, or the first expert's of the next item.
                            let of_next_item = || Some((parts.first()?, next_item? * per_item));
                            let next = parts.get(i + 1).map(|next| (next, mine.start)).or_else(of_next_item);
                            next.map_or(&[][..], |(next, panel)| {
                                self.expert(next.expert).down.panel_data(panel)
                            })
                        };
                        let sums = &mut sums[..part.rows * width];
                        start_sums(sums, panel, level, &expert.down_bias, self.output_weights(part));
                        let rows = packed_rows(part, &expert.down, h, h_scales);
                        multiply(&expert.down, panel, rows, sums, next);
                        let columns = panel * width..columns.end.min((panel + 1) * width);
                        // SAFETY: an item owns these columns, in all rows.
                        unsafe { self.add(out, part, columns, sums) };
                    }
                }
            }
        });
    }

    /// Adds the sums of a part to columns of its rows in the output.
    ///
    /// # Safety
    /// Nothing else may use these columns during the call.
    unsafe fn add(
        &self,
        out: &Segments<DisjointSlice<'_, f32>>,
        part: &ExpertPart,
        columns: Range<usize>,
        sums: &[f32],
    ) {
        for (r, sums) in sums.chunks_exact(self.level().panel_width()).enumerate() {
            let (slice, at) = out.place(self.number(part.first + r), self.hidden);
            // SAFETY: the caller guarantees the columns.
            let out = unsafe { slice.part_mut(at + columns.start..at + columns.end) };
            for (out, sum) in out.iter_mut().zip(sums) {
                *out += sum;
            }
        }
    }

    fn expert(&self, index: usize) -> &CpuExpert {
        self.experts[index].borrow()
    }

    fn level(&self) -> SimdLevel {
        self.expert(0).level()
    }

    /// The row number of an assignment.
    fn number(&self, assignment: usize) -> usize {
        self.numbers.map_or(assignment, |numbers| numbers[assignment] as usize)
    }

    /// The routing weights of a part, if they multiply the output.
    fn output_weights(&self, part: &ExpertPart) -> Option<&[f32]> {
        let weights = self.weights.filter(|_| self.kind.weight_on == WeightOn::Output)?;
        Some(&weights[part.first..][..part.rows])
    }
}

/// The rows of a part as operands of `matrix`.
fn packed_rows<'a>(
    part: &ExpertPart,
    matrix: &PackedMatrix,
    x: &'a [f32],
    scales: &'a [f32],
) -> PackedRows<'a> {
    let (k, blocks) = (padded(matrix.k()), padded(matrix.k()) / K_BLOCK);
    let scales = &scales[part.start * blocks..][..part.rows * blocks];
    PackedRows::new(matrix, part.rows, &x[part.start * k..][..part.rows * k], scales)
}

/// Calls `each` once for each tile of the parts, with the tile's packed rows of `k` elements in the first buffer and the scales of their
/// blocks in the second.
fn for_each_tile(
    parts: &[ExpertPart],
    k: usize,
    (rows, scales): (&mut [f32], &mut [f32]),
    threads: &mut [AlignedBuffer<f32>],
    team: Option<&ThreadTeam>,
    each: impl Fn(&ExpertPart, RowTile, &mut [f32], &mut [f32]) + Sync,
) {
    let tiles = parts.last().map_or(0, |part| part.tiles + part.tiling.tiles());
    let (buffer, scales) = (DisjointSlice::new(rows), DisjointSlice::new(scales));
    let queue = WorkQueue::new(tiles);
    // The work of few tiles takes less time than waking threads.
    let team = team.filter(|_| tiles > 4);
    run_parallel(team, tiles, threads, |_| {
        for item in queue.items() {
            let part = &parts[parts.partition_point(|part| part.tiles <= item) - 1];
            let tile = part.tiling.tile(item - part.tiles);
            let (first, blocks) = (part.start + tile.start, k / K_BLOCK);
            let end = first + tile.rows;
            // SAFETY: tiles do not overlap, and each is one item.
            let rows = unsafe { buffer.part_mut(first * k..end * k) };
            // SAFETY: likewise.
            let scales = unsafe { scales.part_mut(first * blocks..end * blocks) };
            each(part, tile, rows, scales);
        }
    });
}

/// Sets sums to their initial value: the bias of the panel's outputs, times the row's weight if there is one; zero
/// without a bias.
fn start_sums(sums: &mut [f32], panel: usize, level: SimdLevel, bias: &[f32], weights: Option<&[f32]>) {
    if bias.is_empty() {
        sums.fill(0.0);
        return;
    }
    let width = level.panel_width();
    let bias = &bias[panel * width..][..width];
    for (r, sums) in sums.chunks_exact_mut(width).enumerate() {
        let weight = weights.map_or(1.0, |weights| weights[r]);
        for (sum, bias) in sums.iter_mut().zip(bias) {
            *sum = bias * weight;
        }
    }
}

/// Number of neighbouring panels of the down projections that a thread takes at a time.
///
/// It is one if there are few rows, so that threads finish together. With many rows it is larger, because a part's rows
/// are then read from the near cache for all panels but the first.
fn panels_per_item(parts: &[ExpertPart], panels: usize, threads: usize, level: SimdLevel) -> usize {
    let rows = parts.iter().map(|part| part.rows).max().unwrap_or(0);
    (rows / level.max_tile_rows()).min(panels / (4 * threads)).clamp(1, 8)
}
