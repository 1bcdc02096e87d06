//! Validated segments of a step.

use std::ops::Range;

use super::StepFault;
use expertd_ipc::Segment;
use expertd_types::DType;

/// A segment whose bounds were checked.
pub struct CheckedSegment {
    /// Element type of the rows.
    pub dtype: DType,
    /// Range of rows among the rank's rows of the step.
    pub rows: Range<usize>,
    /// Range of bytes in the staging's row area.
    pub bytes: Range<usize>,
    /// Whether the gate chooses experts; otherwise ids and weights are staged.
    pub gated: bool,
    /// Whether the output includes the shared experts.
    pub shared: bool,
}

impl CheckedSegment {
    /// Checks all segments of a step that has `tokens` rows of `hidden` elements in `staged_bytes` bytes of staging.
    ///
    /// # Errors
    /// [`StepFault::Segment`].
    pub fn all(
        segments: &[Segment],
        tokens: usize,
        hidden: usize,
        staged_bytes: usize,
    ) -> Result<Vec<Self>, StepFault> {
        let segments = segments.iter().enumerate();
        segments
            .map(|(index, segment)| CheckedSegment::of(index, segment, tokens, hidden, staged_bytes))
            .collect()
    }

    fn of(
        index: usize,
        segment: &Segment,
        tokens: usize,
        hidden: usize,
        staged_bytes: usize,
    ) -> Result<Self, StepFault> {
        let bad = |what: String| StepFault::Segment { index, what };
        let dtype = DType::from_code(segment.dtype)
            .ok_or_else(|| bad(format!("dtype code {} is unknown", segment.dtype)))?;
        let rows = segment.first_row as usize..segment.first_row as usize + segment.rows as usize;
        let len = rows.len() * hidden * dtype.size();
        let outside = || bad(format!("{len} bytes at offset {} exceed the row area", segment.byte_offset));
        let start = usize::try_from(segment.byte_offset).map_err(|_| outside())?;
        let end = start.checked_add(len).ok_or_else(outside)?;
        if rows.end > tokens {
            return Err(bad(format!("rows {rows:?} exceed the step's {tokens} rows")));
        }
        if end > staged_bytes {
            return Err(outside());
        }
        if start % dtype.size() != 0 {
            return Err(bad(format!("byte offset {start} is not a multiple of the element size")));
        }
        Ok(CheckedSegment {
            dtype,
            rows,
            bytes: start..end,
            gated: !segment.has(Segment::GIVEN_ROUTING),
            shared: segment.has(Segment::SHARED_EXPERTS),
        })
    }
}

/// The range of rows that consecutive segments cover.
#[must_use]
pub fn rows_of(segments: &[CheckedSegment]) -> Range<usize> {
    let start = segments.first().map_or(0, |segment| segment.rows.start);
    start..segments.last().map_or(0, |segment| segment.rows.end)
}
