//! Steps of many rows that are cut into parts, so that their copies overlap their own kernels.
//!
//! A step that runs alone would wait for all of its rows before the first kernel, and with the first copy out for the last kernel. Cut
//! into parts, the gate and the sends of one part run while the next one is copied in, and results of one part are copied out
//! while combine works on the next. Experts process all rows together, so the results are the same, bit by bit. While other
//! steps run, copies overlap theirs, and parts would only cost launches.
//!
//! How a rank cuts its step is its own affair: peers see the same flags in the same order.

use expertd_kernels::device::{Device, DeviceError};
use expertd_kernels::event::Event;
use expertd_kernels::layout::Shape;
use expertd_kernels::params::GATE_TILE;
use expertd_kernels::slot::combine_turn;

/// Largest number of parts in each direction.
const MAX_PARTS: usize = 8;
/// Steps are cut if a rank has at least this many bytes of rows. The copies of fewer bytes take less time than the additional launches.
const CUT_FROM: usize = 4 << 20;
/// Number of parts in each direction.
const PARTS: usize = 4;
/// Overrides these numbers for measurements: the smallest number of rows of a rank, and the number of parts in and out, as in `1024,4,4`.
const PARTS_ENV: &str = "EXPERTD_CUDA_PARTS";

/// Which steps are cut, and into how many parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cut {
    /// Smallest number of rows of this rank.
    pub(super) from: u32,
    inward: usize,
    outward: usize,
}

impl Cut {
    /// For bf16 rows of `hidden` elements.
    pub(super) fn new(hidden: usize) -> Self {
        let given = std::env::var(PARTS_ENV).ok().and_then(|text| Cut::parse(&text));
        given.unwrap_or_else(|| Cut {
            from: CUT_FROM.div_ceil(hidden * 2) as u32,
            inward: PARTS,
            outward: PARTS,
        })
    }

    fn parse(text: &str) -> Option<Self> {
        let (from, parts) = text.split_once(',')?;
        let (inward, outward) = parts.split_once(',')?;
        let parts = |text: &str| text.parse().ok().filter(|parts| (1..=MAX_PARTS).contains(parts));
        Some(Cut { from: from.parse().ok()?, inward: parts(inward)?, outward: parts(outward)? })
    }

    /// The ends of the parts of `tokens` rows, at least one, in which a rank copies rows in.
    pub(super) fn inward(&self, tokens: u32) -> Vec<u32> {
        ends(tokens, self.inward, GATE_TILE)
    }

    /// The ends of the parts in which a rank copies results out.
    pub(super) fn outward(&self, tokens: u32, shape: &Shape, combine_blocks: u32) -> Vec<u32> {
        ends(tokens, self.outward, combine_turn(shape, combine_blocks))
    }
}

/// Ends of at most `parts` parts of about equal size. All but the last are multiples of `unit`.
fn ends(tokens: u32, parts: usize, unit: u32) -> Vec<u32> {
    let share = tokens / parts as u32;
    let size = ((share + unit / 2) / unit).max(1) * unit;
    let mut ends: Vec<u32> =
        (1..parts as u32).map(|part| part * size).take_while(|end| *end < tokens).collect();
    ends.push(tokens);
    ends
}

/// The events of a slot's parts.
#[derive(Debug)]
pub(super) struct PartEvents {
    /// A part's rows are on the device.
    pub(super) arrived: Vec<Event>,
    /// A part's results are complete.
    pub(super) combined: Vec<Event>,
}

impl PartEvents {
    pub(super) fn new(device: &Device) -> Result<Self, DeviceError> {
        let events = || (0..MAX_PARTS).map(|_| Event::new(device)).collect::<Result<_, _>>();
        Ok(PartEvents { arrived: events()?, combined: events()? })
    }
}

/// The parts of one step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Parts<'a> {
    /// The row after the last one of each part that is copied in, ascending.
    pub(super) inward: &'a [u32],
    /// The row after the last one of each part that is copied out, ascending.
    pub(super) outward: &'a [u32],
    pub(super) events: &'a PartEvents,
}

/// A part of a step's launches: `first..end`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part<'a> {
    pub(super) first: u32,
    /// `None`: to the step's last row.
    pub(super) end: Option<u32>,
    pub(super) event: Option<&'a Event>,
}

/// The parts with these `ends` and events; one part without event if there are none.
pub(super) fn launches<'a>(ends: &'a [u32], events: &'a [Event]) -> Vec<Part<'a>> {
    if ends.is_empty() {
        return vec![Part { first: 0, end: None, event: None }];
    }
    let firsts = std::iter::once(0).chain(ends.iter().copied());
    let parts = firsts.zip(ends).zip(events).enumerate();
    parts
        .map(|(index, ((first, end), event))| Part {
            first,
            end: (index + 1 < ends.len()).then_some(*end),
            event: Some(event),
        })
        .collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_all_rows_and_begin_at_units() {
        for tokens in [1, 63, 64, 65, 200, 1000, 2048, 8192] {
            for parts in 1..=MAX_PARTS {
                for unit in [1, 64, 480, 5000] {
                    let ends = ends(tokens, parts, unit);
                    assert!(ends.len() <= parts && ends.last() == Some(&tokens), "{ends:?}");
                    assert!(ends.windows(2).all(|pair| pair[0] < pair[1]), "{ends:?}");
                    assert!(ends[..ends.len() - 1].iter().all(|end| end % unit == 0), "{ends:?}");
                }
            }
        }
        assert_eq!(ends(2048, 4, GATE_TILE), [512, 1024, 1536, 2048]);
        assert_eq!(ends(2048, 4, 480), [480, 960, 1440, 2048]);
    }

    #[test]
    fn a_cut_is_three_numbers() {
        assert_eq!(Cut::parse("512,2,3"), Some(Cut { from: 512, inward: 2, outward: 3 }));
        for wrong in ["", "512", "512,0,1", "512,1,9", "x,1,1"] {
            assert_eq!(Cut::parse(wrong), None, "{wrong}");
        }
    }
}
