//! The runs of rows that a step consists of.

use std::ops::Range;

use super::StepFault;
use expertd_ipc::Segment;
use expertd_types::DType;

/// A segment whose places were checked.
pub struct Run {
    /// Element type of its rows.
    pub dtype: DType,
    /// Rows of the step.
    pub rows: Range<usize>,
    /// Bytes of the staging's row area.
    pub bytes: Range<usize>,
    /// Whether the gate chooses; otherwise ids and weights are staged.
    pub gated: bool,
    /// Whether shared experts are part of the output.
    pub shared: bool,
}

impl Run {
    /// The segments of a step, checked.
    pub fn all(
        segments: &[Segment],
        tokens: usize,
        hidden: usize,
        staged_bytes: usize,
    ) -> Result<Vec<Self>, StepFault> {
        let segments = segments.iter().enumerate();
        segments.map(|(index, segment)| Run::of(index, segment, tokens, hidden, staged_bytes)).collect()
    }

    fn of(
        index: usize,
        segment: &Segment,
        tokens: usize,
        hidden: usize,
        staged_bytes: usize,
    ) -> Result<Self, StepFault> {
        let bad = |what: &str| StepFault::Segment { index, what: what.to_owned() };
        let dtype = DType::from_code(segment.dtype).ok_or_else(|| bad("its dtype is unknown"))?;
        let rows = segment.first_row as usize..segment.first_row as usize + segment.rows as usize;
        let start = usize::try_from(segment.byte_offset).map_err(|_| bad("its offset is beyond memory"))?;
        let end = start
            .checked_add(rows.len() * hidden * dtype.size())
            .ok_or_else(|| bad("it is beyond memory"))?;
        if rows.end > tokens {
            return Err(bad("its rows are not the step's"));
        }
        if end > staged_bytes || start % dtype.size() != 0 {
            return Err(bad("its bytes are not in the row area"));
        }
        Ok(Run {
            dtype,
            rows,
            bytes: start..end,
            gated: !segment.has(Segment::GIVEN_ROUTING),
            shared: segment.has(Segment::SHARED_EXPERTS),
        })
    }
}

/// The rows of neighbouring runs.
pub fn rows_of(runs: &[Run]) -> Range<usize> {
    runs.first().map_or(0, |run| run.rows.start)..runs.last().map_or(0, |run| run.rows.end)
}
