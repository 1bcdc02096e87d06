//! Validated segments of a step.

use std::ops::Range;

use super::StepFault;
use expertd_ipc::Segment;
use expertd_types::{DType, MemoryId};

/// A segment whose bounds were checked.
pub struct CheckedSegment {
    /// Element type of the rows.
    pub dtype: DType,
    /// Range of rows among the rank's rows of the step.
    pub rows: Range<usize>,
    /// Where the rows are, and where the answer belongs.
    pub place: RowsPlace,
    /// Whether the gate chooses experts; otherwise ids and weights are staged.
    pub gated: bool,
    /// Whether the output includes the shared experts.
    pub shared: bool,
}

/// The place of a segment's rows and of its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RowsPlace {
    /// Range of bytes in the staging's row area. The answer overwrites the rows.
    Staging(Range<usize>),
    /// Ranges of bytes in an attached memory, which do not overlap.
    Memory {
        /// The memory.
        memory: MemoryId,
        /// The rows.
        input: Range<usize>,
        /// The answer.
        output: Range<usize>,
    },
}

impl CheckedSegment {
    /// Checks all segments of a step that has `tokens` rows of `hidden` elements in `staged_bytes` bytes of staging and in
    /// attached memories, whose sizes in bytes `memory_size` returns.
    pub fn all(
        segments: &[Segment],
        tokens: usize,
        hidden: usize,
        staged_bytes: usize,
        memory_size: impl Fn(MemoryId) -> Option<usize>,
    ) -> Result<Vec<Self>, StepFault> {
        let segments = segments.iter().enumerate();
        segments
            .map(|(index, segment)| {
                let size = match segment.memory {
                    Segment::STAGING => Some(staged_bytes),
                    memory => memory_size(MemoryId(memory)),
                };
                CheckedSegment::of(segment, tokens, hidden, size)
                    .map_err(|what| StepFault::Segment { index, what })
            })
            .collect()
    }

    /// Checks a segment whose place has `size` bytes.
    fn of(segment: &Segment, tokens: usize, hidden: usize, size: Option<usize>) -> Result<Self, String> {
        let dtype = DType::from_code(segment.dtype)
            .ok_or_else(|| format!("dtype code {} is unknown", segment.dtype))?;
        let rows = segment.first_row as usize..segment.first_row as usize + segment.rows as usize;
        if rows.end > tokens {
            return Err(format!("rows {rows:?} exceed the step's {tokens} rows"));
        }
        let memory = segment.memory;
        let size = size.ok_or_else(|| format!("memory {memory} is not attached"))?;
        let len = rows.len() * hidden * dtype.size();
        let range = |offset: u64| {
            let start = usize::try_from(offset).ok();
            let range = start.and_then(|start| Some(start..start.checked_add(len)?));
            let outside = || {
                let place = match memory {
                    Segment::STAGING => "the row area".to_owned(),
                    memory => format!("memory {memory}"),
                };
                format!("{len} bytes at offset {offset} exceed {place} of {size} bytes")
            };
            let range = range.filter(|range| range.end <= size).ok_or_else(outside)?;
            if range.start % dtype.size() != 0 {
                return Err(format!("byte offset {offset} is not a multiple of the element size"));
            }
            Ok(range)
        };
        let input = range(segment.byte_offset)?;
        let place = if memory == Segment::STAGING {
            RowsPlace::Staging(input)
        } else {
            let output = range(segment.output_offset)?;
            if input.start < output.end && output.start < input.end {
                return Err(format!("its answer at {output:?} overlaps its rows at {input:?}"));
            }
            RowsPlace::Memory { memory: MemoryId(memory), input, output }
        };
        Ok(CheckedSegment {
            dtype,
            rows,
            place,
            gated: !segment.has(Segment::GIVEN_ROUTING),
            shared: segment.has(Segment::SHARED_EXPERTS),
        })
    }

    /// End of the segment's bytes in staging; 0 if they are in an attached memory.
    pub const fn staged_end(&self) -> usize {
        match &self.place {
            RowsPlace::Staging(bytes) => bytes.end,
            RowsPlace::Memory { .. } => 0,
        }
    }
}

/// The range of rows that consecutive segments cover.
#[must_use]
pub fn rows_of(segments: &[CheckedSegment]) -> Range<usize> {
    let start = segments.first().map_or(0, |segment| segment.rows.start);
    start..segments.last().map_or(0, |segment| segment.rows.end)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn segment(memory: u32, byte_offset: u64, output_offset: u64) -> Segment {
        let dtype = DType::F32 as u32;
        Segment { byte_offset, output_offset, first_row: 0, rows: 2, dtype, flags: 0, memory, reserved: 0 }
    }

    /// Two rows of four elements: 32 bytes. Memory 5 has 128 bytes.
    fn check(segment: Segment) -> Result<RowsPlace, String> {
        let size = |memory: MemoryId| (memory == MemoryId(5)).then_some(128);
        let checked = CheckedSegment::all(&[segment], 2, 4, 64, size).map_err(|error| error.to_string())?;
        Ok(checked.into_iter().next().unwrap().place)
    }

    #[test]
    fn places_in_attached_memories_are_checked_against_their_sizes() {
        assert_eq!(check(segment(0, 32, 0)), Ok(RowsPlace::Staging(32..64)));
        let memory = MemoryId(5);
        assert_eq!(check(segment(5, 0, 96)), Ok(RowsPlace::Memory { memory, input: 0..32, output: 96..128 }));
        for (bad, text) in [
            (segment(0, 36, 0), "32 bytes at offset 36 exceed the row area"),
            (segment(5, 0, 100), "32 bytes at offset 100 exceed memory 5"),
            (segment(5, u64::MAX - 3, 0), "exceed memory 5"),
            (segment(5, 0, u64::MAX), "exceed memory 5"),
            (segment(5, 2, 64), "byte offset 2 is not a multiple"),
            (segment(5, 0, 66), "byte offset 66 is not a multiple"),
            (segment(5, 32, 60), "overlaps"),
            (segment(6, 0, 64), "memory 6 is not attached"),
        ] {
            let error = check(bad).unwrap_err();
            assert!(error.contains(text), "{error}");
        }
    }
}
