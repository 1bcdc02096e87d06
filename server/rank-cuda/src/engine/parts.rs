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
/// Where rows that are copied in are cut, in percent of a rank's rows. Every part costs a few µs, and the gate of a part takes
/// nearly as long as that of all rows.
const INWARD: [u32; 1] = [75];
/// Where results are cut.
const OUTWARD: [u32; 1] = [25];
/// Overrides these numbers for measurements: the smallest number of rows of a rank, then the percentages in and out, as in `1024,50/75,25`;
/// 0 for no cut.
const PARTS_ENV: &str = "EXPERTD_CUDA_PARTS";

/// Which steps are cut, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Cut {
    /// Smallest number of rows of this rank.
    pub(super) from: u32,
    /// Percentages, ascending.
    inward: Vec<u32>,
    outward: Vec<u32>,
}

impl Cut {
    /// For bf16 rows of `hidden` elements.
    pub(super) fn new(hidden: usize) -> Self {
        let given = std::env::var(PARTS_ENV).ok().and_then(|text| Cut::parse(&text));
        given.unwrap_or_else(|| Cut {
            from: CUT_FROM.div_ceil(hidden * 2) as u32,
            inward: INWARD.to_vec(),
            outward: OUTWARD.to_vec(),
        })
    }

    fn parse(text: &str) -> Option<Self> {
        let (from, cuts) = text.split_once(',')?;
        let (inward, outward) = cuts.split_once(',')?;
        let cuts = |text: &str| {
            let cuts: Option<Vec<u32>> = text.split('/').map(|percent| percent.parse().ok()).collect();
            cuts.filter(|cuts| {
                cuts.len() < MAX_PARTS && cuts.is_sorted() && cuts.iter().all(|cut| *cut < 100)
            })
        };
        Some(Cut { from: from.parse().ok()?, inward: cuts(inward)?, outward: cuts(outward)? })
    }

    /// The ends of the parts of `tokens` rows, at least one, in which a rank copies rows in.
    pub(super) fn inward(&self, tokens: u32) -> Vec<u32> {
        ends(tokens, &self.inward, GATE_TILE)
    }

    /// The ends of the parts in which a rank copies results out.
    pub(super) fn outward(&self, tokens: u32, shape: &Shape, combine_blocks: u32) -> Vec<u32> {
        ends(tokens, &self.outward, combine_turn(shape, combine_blocks))
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
        let percentages = [0, 1, 12, 25, 25, 60, 99];
        for tokens in [1, 63, 64, 65, 200, 1000, 2048, 8192] {
            for unit in [1, 64, 480, 5000] {
                let ends = ends(tokens, &percentages, unit);
                assert!(ends.len() <= MAX_PARTS && ends.last() == Some(&tokens), "{ends:?}");
                assert!(ends[0] > 0 && ends.windows(2).all(|pair| pair[0] < pair[1]), "{ends:?}");
                assert!(ends[..ends.len() - 1].iter().all(|end| end % unit == 0), "{ends:?}");
            }
        }
        assert_eq!(ends(2048, &[25, 50, 75], GATE_TILE), [512, 1024, 1536, 2048]);
        assert_eq!(ends(2048, &[25], 480), [480, 2048]);
        assert_eq!(ends(2048, &[0], 64), [2048]);
    }

    #[test]
    fn a_cut_is_a_number_and_two_lists() {
        let cut = Cut { from: 512, inward: vec![50, 75], outward: vec![0] };
        assert_eq!(Cut::parse("512,50/75,0"), Some(cut));
        for wrong in ["", "512", "512,0", "512,0,100", "512,75/50,0", "x,1,1", "1,1/2/3/4/5/6/7/8,0"] {
            assert_eq!(Cut::parse(wrong), None, "{wrong}");
        }
    }
}
