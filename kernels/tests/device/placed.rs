//! Placements with copies of experts, for exchanges.

use expertd_kernels::copies::CopyTables;
use expertd_kernels::device::{Buffer, Device};
use expertd_kernels::layout::Shape;

use crate::exchange::Loopback;
use crate::random::{Random, RankStep};

/// Index of the layer whose experts are placed; the layer before has other owners.
const LAYER: u32 = 1;

/// A placement of one layer's experts, and its table on the device.
pub struct Placed {
    /// Experts of each rank, ascending.
    ranks: Vec<Vec<u32>>,
    per_rank: u32,
    copies: Buffer<u32>,
}

impl Placed {
    fn new(
        device: &Device,
        before: Vec<Vec<u32>>,
        ranks: Vec<Vec<u32>>,
    ) -> Result<Placed, Box<dyn std::error::Error>> {
        let tables = CopyTables::new(vec![before, ranks.clone()]);
        let copies = Buffer::from_slice(device, tables.copies())?;
        Ok(Placed { ranks, per_rank: tables.per_rank(), copies })
    }

    /// Every expert has a random owner, and some have copies on other ranks.
    pub fn draw(
        device: &Device,
        random: &mut Random,
        shape: &Shape,
    ) -> Result<Placed, Box<dyn std::error::Error>> {
        let mut layers = [vec![vec![]; shape.ranks as usize], vec![vec![]; shape.ranks as usize]];
        for ranks in &mut layers {
            for expert in 0..shape.experts {
                let owner = random.below(u64::from(shape.ranks)) as usize;
                let has_copies = random.below(3) == 0;
                for (rank, experts) in ranks.iter_mut().enumerate() {
                    if rank == owner || has_copies && random.below(2) == 0 {
                        experts.push(expert);
                    }
                }
            }
        }
        let [before, ranks] = layers;
        Placed::new(device, before, ranks)
    }

    /// The contiguous ranges that ranks own without a placement.
    pub fn contiguous(device: &Device, shape: &Shape) -> Result<Placed, Box<dyn std::error::Error>> {
        let range = |rank| {
            let (first, last) = shape.expert_range(rank);
            (first..last).collect::<Vec<u32>>()
        };
        let ranks: Vec<Vec<u32>> = (0..shape.ranks).map(range).collect();
        Placed::new(device, ranks.clone(), ranks)
    }

    /// The kernels' sizes for this placement.
    pub fn shape(&self, shape: &Shape) -> Shape {
        Shape { experts: shape.ranks * self.per_rank, ..*shape }
    }

    /// Makes a group of [`shape`](Self::shape) use the placement.
    pub fn apply(&self, group: &mut Loopback) {
        for member in &mut group.members {
            member.group.copies = self.copies.address();
            member.layer = LAYER;
        }
    }

    /// The steps with each expert replaced by the physical one that computes the row.
    pub fn physical(&self, steps: &[RankStep], top_k: usize) -> Vec<RankStep> {
        let mut steps = steps.to_vec();
        for (source, step) in steps.iter_mut().enumerate() {
            for (entry, id) in step.ids.iter_mut().enumerate() {
                let copies: Vec<usize> = self
                    .ranks
                    .iter()
                    .enumerate()
                    .filter_map(|(rank, experts)| {
                        let index = experts.iter().position(|expert| *expert == *id as u32)?;
                        Some(rank * self.per_rank as usize + index)
                    })
                    .collect();
                *id = copies[(entry / top_k + source) % copies.len()] as i32;
            }
        }
        steps
    }
}
