//! The grouped MLP: pack rows, gate and up projections with the activation, down projections.
#![allow(
    unsafe_code,
    reason = "threads write disjoint columns of the output and disjoint parts of the scratch"
)]

use std::ops::Range;

use rayon::ThreadPool;

use super::segments::Segments;
use super::workspace::Piece;
use super::{CpuExpert, Workspace};
use crate::experts::{Assignments, ExpertKind};
use crate::linalg::{Items, Level, Place, Shared, Tiling, activate, multiply, pack_row, padded, run};
use expertd_model::WeightOn;

/// Runs a rank's experts over its rows: `out[r] = sum over assignments (r, weight) of weight * expert(row r)`.
///
/// `rows` and `out` are the same rows, `[.., hidden]` in f32, each cut into up to 64 segments as the caller likes; row
/// numbers count through the segments. Every row of `out` is written, with zeros if nothing is assigned to it. Sums run
/// in f32 over experts in ascending order, so equal calls give equal bits on any number of threads.
///
/// All experts have the same shape. Works on `pool`, or on this thread if there is none, and does not allocate. (A pool
/// built with `use_current_thread` saves waking this thread.)
///
/// # Panics
/// If lengths contradict each other, a row number is out of range, or the workspace is too small.
pub fn forward(
    kind: ExpertKind,
    experts: &[CpuExpert],
    assignments: Assignments<'_>,
    rows: &[&[f32]],
    out: &mut [&mut [f32]],
    workspace: &mut Workspace,
    pool: Option<&ThreadPool>,
) {
    let Assignments { offsets, rows: numbers, weights } = assignments;
    assert_eq!(offsets.len(), experts.len() + 1, "offsets of {} experts", experts.len());
    assert_eq!(
        (offsets[0], offsets[experts.len()] as usize),
        (0, numbers.len()),
        "offsets cover the assignments"
    );
    assert_eq!(numbers.len(), weights.len(), "a weight per assignment");
    let Some(first) = experts.first() else {
        out.iter_mut().for_each(|out| out.fill(0.0));
        return;
    };
    let hidden = first.hidden();
    let rows = Segments::of(rows, hidden);
    let call = Call { kind, experts, offsets, numbers: Some(numbers), weights: Some(weights), rows, hidden };
    call.run(out, workspace, pool);
}

/// Runs one expert over all rows, as shared experts do: `out[r] = weights[r] * expert(rows[r])`, with weight 1 if there
/// are no weights. `rows` and `out` are `[n, hidden]`.
///
/// # Panics
/// As [`forward`].
pub fn forward_one(
    kind: ExpertKind,
    expert: &CpuExpert,
    weights: Option<&[f32]>,
    rows: &[f32],
    out: &mut [f32],
    workspace: &mut Workspace,
    pool: Option<&ThreadPool>,
) {
    let hidden = expert.hidden();
    let rows = Segments::of(&[rows], hidden);
    assert!(weights.is_none_or(|weights| weights.len() == rows.rows()), "a weight per row");
    let offsets = [0, u32::try_from(rows.rows()).expect("rows are counted in 32 bits")];
    let experts = std::slice::from_ref(expert);
    let call = Call { kind, experts, offsets: &offsets, numbers: None, weights, rows, hidden };
    call.run(&mut [out], workspace, pool);
}

/// What one call works on.
struct Call<'a> {
    kind: ExpertKind,
    experts: &'a [CpuExpert],
    offsets: &'a [u32],
    /// Row number of each assignment; without, assignment `i` is row `i`.
    numbers: Option<&'a [u32]>,
    weights: Option<&'a [f32]>,
    rows: Segments<&'a [f32]>,
    hidden: usize,
}

impl Call<'_> {
    fn run(&self, out: &mut [&mut [f32]], workspace: &mut Workspace, pool: Option<&ThreadPool>) {
        let first = &self.experts[0];
        let shape = (first.hidden(), first.intermediate(), first.level());
        assert!(
            self.experts
                .iter()
                .all(|expert| (expert.hidden(), expert.intermediate(), expert.level()) == shape),
            "the experts of a call have the same shape"
        );
        let size = workspace.size;
        assert!(
            first.hidden() <= size.hidden && first.intermediate() <= size.intermediate,
            "the workspace is for smaller experts"
        );
        let out = Segments::of_mut(out, self.hidden);
        assert_eq!(self.rows.rows(), out.rows(), "as many rows out as in");
        let mut rest = (0, 0);
        let mut fresh = true;
        loop {
            self.cut(&mut rest, workspace);
            if workspace.pieces.is_empty() && !fresh {
                break;
            }
            self.pack(workspace, pool);
            self.gate_up(workspace, pool);
            self.down(&out, fresh, workspace, pool);
            fresh = false;
        }
    }

    /// Cuts the next chunk off the assignments. `rest` is the expert and the assignment to go on with.
    fn cut(&self, rest: &mut (usize, usize), workspace: &mut Workspace) {
        let mut start = 0;
        workspace.pieces.clear();
        while start < workspace.chunk && rest.0 < self.experts.len() {
            let (expert, first) = *rest;
            let end = self.offsets[expert + 1] as usize;
            let rows = end.checked_sub(first).expect("offsets ascend");
            let rows = rows.min(workspace.chunk - start).min(workspace.piece);
            if rows > 0 {
                let tiles = workspace.pieces.last().map_or(0, |piece| piece.tiles + piece.tiling.tiles());
                let tiling = Tiling::new(self.level(), rows);
                workspace.pieces.push(Piece { expert, first, rows, start, tiling, tiles });
            }
            start += rows;
            *rest = if first + rows == end { (expert + 1, end) } else { (expert, first + rows) };
        }
    }

    fn pack(&self, workspace: &mut Workspace, pool: Option<&ThreadPool>) {
        let Workspace { x, pieces, sums, .. } = workspace;
        let tiles = pieces.last().map_or(0, |piece| piece.tiles + piece.tiling.tiles());
        let k = padded(self.hidden);
        let x = Shared::new(x);
        let items = Items::new(tiles);
        // A few rows are copied sooner than threads wake up.
        let pool = pool.filter(|_| tiles > 4);
        run(pool, sums, |_| {
            for (item, _) in items.iter() {
                let piece = &pieces[pieces.partition_point(|piece| piece.tiles <= item) - 1];
                let tile = piece.tiling.tile(item - piece.tiles);
                let at = (piece.start + tile.start) * k;
                // SAFETY: tiles do not overlap, and each is one item.
                let packed = unsafe { x.part_mut(at..at + tile.rows * k) };
                for r in 0..tile.rows {
                    let assignment = piece.first + tile.start + r;
                    let factor = self.weights.filter(|_| self.kind.weight_on == WeightOn::Input);
                    let factor = factor.map(|weights| weights[assignment]);
                    pack_row(
                        packed,
                        tile.rows,
                        r,
                        self.rows.row(self.number(assignment), self.hidden),
                        factor,
                    );
                }
            }
        });
    }

    fn gate_up(&self, workspace: &mut Workspace, pool: Option<&ThreadPool>) {
        let Workspace { x, h, pieces, sums, .. } = workspace;
        let (level, panels) = (self.level(), self.experts[0].gate_up.panels());
        let (k, padded) = (padded(self.hidden), padded(self.experts[0].intermediate()));
        let (x, h) = (&x[..], Shared::new(h));
        let items = Items::new(pieces.len() * panels);
        run(pool, sums, |sums| {
            for (item, next) in items.iter() {
                let (piece, panel) = (&pieces[item / panels], item % panels);
                let expert = &self.experts[piece.expert];
                let next = next.map_or(&[][..], |next| {
                    self.experts[pieces[next / panels].expert].gate_up.panel_data(next % panels)
                });
                let sums = &mut sums[..piece.rows * level.panel()];
                start_sums(sums, panel, level, &expert.gate_up_bias, None);
                let x = &x[piece.start * k..][..piece.rows * k];
                multiply(&expert.gate_up, panel, piece.rows, x, sums, next);
                let last = panel + 1 == panels;
                let place = Place { h, start: piece.start * padded, padded, panel, last };
                // SAFETY: an item is the rows of a piece and the columns of a panel, which no other item has.
                unsafe { activate(level, self.kind.activation, sums, self.output_weights(piece), place) };
            }
        });
    }

    /// `fresh`: the output holds nothing yet.
    fn down(
        &self,
        out: &Segments<Shared<'_, f32>>,
        fresh: bool,
        workspace: &mut Workspace,
        pool: Option<&ThreadPool>,
    ) {
        let Workspace { h, pieces, sums, .. } = workspace;
        let (level, panels) = (self.level(), self.experts[0].down.panels());
        let (width, k) = (level.panel(), padded(self.experts[0].intermediate()));
        let h = &h[..];
        let per_item = panels_per_item(pieces, panels, sums.len(), level);
        let items = Items::new(panels.div_ceil(per_item));
        run(pool, sums, |sums| {
            for (item, _) in items.iter() {
                let mine = item * per_item..panels.min((item + 1) * per_item);
                let columns = mine.start * width..self.hidden.min(mine.end * width);
                if fresh {
                    for row in 0..out.rows() {
                        let (slice, at) = out.place(row, self.hidden);
                        // SAFETY: an item is these columns, of all rows.
                        unsafe { slice.part_mut(at + columns.start..at + columns.end) }.fill(0.0);
                    }
                }
                for (i, piece) in pieces.iter().enumerate() {
                    let expert = &self.experts[piece.expert];
                    for panel in mine.clone() {
                        let next = if panel + 1 < mine.end {
                            expert.down.panel_data(panel + 1)
                        } else {
                            let next = pieces.get(i + 1);
                            next.map_or(&[][..], |next| self.experts[next.expert].down.panel_data(mine.start))
                        };
                        let sums = &mut sums[..piece.rows * width];
                        start_sums(sums, panel, level, &expert.down_bias, self.output_weights(piece));
                        let h = &h[piece.start * k..][..piece.rows * k];
                        multiply(&expert.down, panel, piece.rows, h, sums, next);
                        let columns = panel * width..columns.end.min((panel + 1) * width);
                        // SAFETY: as above.
                        unsafe { self.add(out, piece, columns, sums) };
                    }
                }
            }
        });
    }

    /// Adds the sums of a piece to columns of its rows of the output.
    ///
    /// # Safety
    /// No one else uses these columns.
    unsafe fn add(
        &self,
        out: &Segments<Shared<'_, f32>>,
        piece: &Piece,
        columns: Range<usize>,
        sums: &[f32],
    ) {
        for (r, sums) in sums.chunks_exact(self.level().panel()).enumerate() {
            let (slice, at) = out.place(self.number(piece.first + r), self.hidden);
            // SAFETY: the columns are the caller's.
            let out = unsafe { slice.part_mut(at + columns.start..at + columns.end) };
            for (out, sum) in out.iter_mut().zip(sums) {
                *out += sum;
            }
        }
    }

    fn level(&self) -> Level {
        self.experts[0].level()
    }

    /// The row number of an assignment.
    fn number(&self, assignment: usize) -> usize {
        self.numbers.map_or(assignment, |numbers| numbers[assignment] as usize)
    }

    /// Routing weights of a piece, if they multiply the output.
    fn output_weights(&self, piece: &Piece) -> Option<&[f32]> {
        let weights = self.weights.filter(|_| self.kind.weight_on == WeightOn::Output)?;
        Some(&weights[piece.first..][..piece.rows])
    }
}

/// What sums start from: the bias of the panel's outputs, times the weight of the row if there is one; else zero.
fn start_sums(sums: &mut [f32], panel: usize, level: Level, bias: &[f32], weights: Option<&[f32]>) {
    if bias.is_empty() {
        sums.fill(0.0);
        return;
    }
    let width = level.panel();
    let bias = &bias[panel * width..][..width];
    for (r, sums) in sums.chunks_exact_mut(width).enumerate() {
        let weight = weights.map_or(1.0, |weights| weights[r]);
        for (sum, bias) in sums.iter_mut().zip(bias) {
            *sum = bias * weight;
        }
    }
}

/// Neighbouring panels of the down projections that one thread takes at a time.
///
/// With few rows one, so that threads finish together; with many rows more, as a piece's rows are then read from the
/// near cache for all panels but the first.
fn panels_per_item(pieces: &[Piece], panels: usize, threads: usize, level: Level) -> usize {
    let rows = pieces.iter().map(|piece| piece.rows).max().unwrap_or(0);
    (rows / level.tile()).min(panels / (4 * threads)).clamp(1, 8)
}
