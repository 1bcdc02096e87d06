//! Steps of many rows whose results are combined in parts, so that copies overlap combine.
//!
//! Nothing overlaps the copies of a step that runs alone. If combine runs in parts, the results of one part are copied out while it
//! works on the next one, and those of the last part while copy_out's kernel runs; copy_in's kernel runs before the rows have arrived.
//! Experts process all rows together, so the results are the same, bit by bit. While other steps run, copies overlap theirs, and parts
//! would only cost launches.
//!
//! How a rank cuts its step is its own affair: peers see the same flags in the same order.

use expertd_kernels::device::{Device, DeviceError};
use expertd_kernels::event::Event;
use expertd_kernels::layout::Shape;
use expertd_kernels::slot::combine_turn;

/// Largest number of parts.
const MAX_PARTS: usize = 8;
/// Steps are cut if a rank has at least this many bytes of rows. The copies of fewer bytes take less time than the additional launches.
const CUT_FROM: usize = 2 << 20;
/// Where results are cut, in percent of a rank's rows. Each part costs the GPU some µs.
const CUTS: [u32; 1] = [25];

/// Which steps are cut, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Cut {
    /// Smallest number of rows of this rank.
    pub(super) from: u32,
    /// Percentages, ascending.
    cuts: Vec<u32>,
}

impl Cut {
    /// For bf16 rows of `hidden` elements.
    pub(super) fn new(hidden: usize) -> Self {
        Cut { from: CUT_FROM.div_ceil(hidden * 2) as u32, cuts: CUTS.to_vec() }
    }

    /// Cuts steps of any number of rows at percentages, as in `25/50`; `0` cuts none.
    pub(super) fn parse(text: &str) -> Option<Self> {
        if text == "0" {
            return Some(Cut { from: u32::MAX, cuts: Vec::new() });
        }
        let cuts: Option<Vec<u32>> = text.split('/').map(|percent| percent.parse().ok()).collect();
        let cuts = cuts
            .filter(|cuts| cuts.len() < MAX_PARTS && cuts.is_sorted() && cuts.iter().all(|cut| *cut < 100))?;
        Some(Cut { from: 1, cuts })
    }

    /// The ends of the parts of `tokens` rows, at least one.
    pub(super) fn ends(&self, tokens: u32, shape: &Shape, combine_blocks: u32) -> Vec<u32> {
        ends(tokens, &self.cuts, combine_turn(shape, combine_blocks))
    }
}

/// Ends of parts that end near `percentages` of the rows. All but the last are multiples of `unit`.
fn ends(tokens: u32, percentages: &[u32], unit: u32) -> Vec<u32> {
    let share = |percent: &u32| (u64::from(tokens) * u64::from(*percent) / 100) as u32;
    let mut ends: Vec<u32> =
        percentages.iter().map(|percent| (share(percent) + unit / 2) / unit * unit).collect();
    ends.retain(|end| (1..tokens).contains(end));
    ends.push(tokens);
    ends.dedup();
    ends
}

/// One event for each part of a slot's step: its results are complete.
#[derive(Debug)]
pub(super) struct PartEvents(Vec<Event>);

impl PartEvents {
    pub(super) fn new(device: &Device) -> Result<Self, DeviceError> {
        (0..MAX_PARTS).map(|_| Event::new(device)).collect::<Result<_, _>>().map(PartEvents)
    }

    pub(super) fn of(&self, part: usize) -> &Event {
        &self.0[part]
    }
}

/// The parts of one step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Parts<'a> {
    /// All of the step's rows are on the device.
    pub(super) arrived: &'a Event,
    /// The row after the last one of each part, ascending.
    pub(super) ends: &'a [u32],
    pub(super) combined: &'a PartEvents,
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_all_rows_and_begin_at_units() {
        let percentages = [0, 1, 12, 25, 25, 60, 99];
        for tokens in [1, 63, 64, 65, 200, 1000, 2048, 8192] {
            for unit in [1, 64, 480, 5000] {
                let ends = ends(tokens, &percentages, unit);
                assert!(ends.len() <= MAX_PARTS && ends.last() == Some(&tokens), "{ends:?}");
                assert!(ends[0] > 0 && ends.windows(2).all(|pair| pair[0] < pair[1]), "{ends:?}");
                assert!(ends[..ends.len() - 1].iter().all(|end| end % unit == 0), "{ends:?}");
            }
        }
        assert_eq!(ends(2048, &[25, 50, 75], 64), [512, 1024, 1536, 2048]);
        assert_eq!(ends(2048, &[25], 480), [480, 2048]);
        assert_eq!(ends(2048, &[0], 64), [2048]);
    }

    #[test]
    fn a_cut_is_percentages() {
        assert_eq!(Cut::parse("50/75"), Some(Cut { from: 1, cuts: vec![50, 75] }));
        assert_eq!(Cut::parse("0"), Some(Cut { from: u32::MAX, cuts: vec![] }));
        for wrong in ["", "100", "75/50", "x", "1/2/3/4/5/6/7/8"] {
            assert_eq!(Cut::parse(wrong), None, "{wrong}");
        }
    }
}
