//! The floor of a step: the least time that it can take on a machine with a given routing.

use std::time::Duration;

use expertd_kernels::ceilings::Ceilings;
use expertd_types::{ExpertId, ExpertOwners, Rank};

/// Seconds for launches and the gate on one rank, which are added to the time of weights and FLOPs.
const FIXED_ALONE: f64 = 5e-6;
/// Seconds for launches, flags and the gate on several ranks, which are added to the time of weights, FLOPs and rows on the wire.
const FIXED_EXCHANGE: f64 = 15e-6;
/// Speed of FP8 products relative to bf16 ones by the data sheets; ceilings are measured in bf16.
const FP8_SPEEDUP: f64 = 2.0;
/// Bytes of an element of a row: in bf16, and in FP8 with an f32 scale for 128 elements.
const BF16_BYTES: f64 = 2.0;
const FP8_BYTES: f64 = 1.0 + 4.0 / 128.0;

/// Sizes of a step's layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct LayerSizes {
    pub(super) hidden: usize,
    pub(super) width: usize,
    pub(super) shared_width: usize,
    /// Bytes per weight in the format that ranks hold, scales included.
    pub(super) bytes_per_weight: f64,
    /// Whether rows are sent and multiplied in FP8.
    pub(super) fp8_products: bool,
}

/// Floors of a step's parts; in each part the slowest rank counts.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Floor {
    /// Time to send rows to their experts.
    pub(super) dispatch: Duration,
    /// Time to read weights or to compute, whichever is longer.
    pub(super) experts: Duration,
    /// Time to return rows.
    pub(super) combine: Duration,
    /// Time that does not depend on rows.
    pub(super) fixed: Duration,
}

impl Floor {
    /// Floor of the whole step: the sum of its parts.
    pub(super) fn step(&self) -> Duration {
        self.dispatch + self.experts + self.combine + self.fixed
    }

    /// Mean of each part; `None` if there are no floors.
    pub(super) fn mean(all: &[Floor]) -> Option<Floor> {
        let count = u32::try_from(all.len()).ok().filter(|count| *count > 0)?;
        let of = |part: fn(&Floor) -> Duration| all.iter().map(part).sum::<Duration>() / count;
        Some(Floor {
            dispatch: of(|f| f.dispatch),
            experts: of(|f| f.experts),
            combine: of(|f| f.combine),
            fixed: of(|f| f.fixed),
        })
    }
}

/// Computes the floor of a step whose rows chose `ids [rows, k]`. The first `rows_per_rank[0]` rows belong to rank 0, the
/// next ones to rank 1 and so on. Rows go once to each rank that needs them, in bf16 or FP8, and come back in bf16.
pub(super) fn floor(
    ids: &[i32],
    k: usize,
    rows_per_rank: &[u32],
    owners: &ExpertOwners,
    sizes: &LayerSizes,
    ceilings: &Ceilings,
) -> Floor {
    let ranks = rows_per_rank.len();
    let mut hit = vec![vec![false; owners.len()]; ranks];
    let mut assignments = vec![0_u64; ranks];
    let (mut sent, mut received) = (vec![0_u64; ranks], vec![0_u64; ranks]);
    let mut rows = ids.chunks_exact(k.max(1));
    let mut goes = vec![false; ranks];
    for (source, &count) in rows_per_rank.iter().enumerate() {
        for (index, row) in rows.by_ref().take(count as usize).enumerate() {
            goes.fill(false);
            for &id in row {
                let expert = ExpertId(id as u32);
                let Some(Rank(rank)) = owners.for_row(expert, index + source) else { continue };
                hit[rank as usize][expert.index()] = true;
                assignments[rank as usize] += 1;
                goes[rank as usize] = true;
            }
            for (rank, _) in goes.iter().enumerate().filter(|&(rank, goes)| *goes && rank != source) {
                sent[source] += 1;
                received[rank] += 1;
            }
        }
    }
    let matrices = 3.0 * sizes.hidden as f64;
    let slowest = (0..ranks).map(|rank| {
        let own_rows = f64::from(rows_per_rank.get(rank).copied().unwrap_or(0));
        let shared = if own_rows > 0.0 { sizes.shared_width as f64 } else { 0.0 };
        let experts_hit = hit[rank].iter().filter(|hit| **hit).count() as f64;
        let weights = (experts_hit * sizes.width as f64 + shared) * matrices * sizes.bytes_per_weight;
        let flops = (assignments[rank] as f64 * sizes.width as f64 + own_rows * shared) * 2.0 * matrices;
        let rate = ceilings.tensor_sustained_flops * if sizes.fp8_products { FP8_SPEEDUP } else { 1.0 };
        (weights / ceilings.memory_bytes_per_second).max(flops / rate)
    });
    let busiest = sent.iter().chain(&received).copied().max().unwrap_or(0);
    let link = ceilings.link_bytes_per_second.unwrap_or(f64::INFINITY);
    let wire = |bytes: f64| Duration::from_secs_f64(busiest as f64 * sizes.hidden as f64 * bytes / link);
    Floor {
        dispatch: wire(if sizes.fp8_products { FP8_BYTES } else { BF16_BYTES }),
        experts: Duration::from_secs_f64(slowest.fold(0.0, f64::max)),
        combine: wire(BF16_BYTES),
        fixed: Duration::from_secs_f64(if ranks > 1 { FIXED_EXCHANGE } else { FIXED_ALONE }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CEILINGS: Ceilings = Ceilings {
        memory_bytes_per_second: 1e9,
        tensor_burst_flops: 0.0,
        tensor_sustained_flops: 1e12,
        link_bytes_per_second: Some(1e6),
    };
    const SIZES: LayerSizes =
        LayerSizes { hidden: 10, width: 100, shared_width: 0, bytes_per_weight: 2.0, fp8_products: false };

    /// Four experts on two ranks.
    fn two_each() -> ExpertOwners {
        ExpertOwners::single([0, 0, 1, 1].map(Rank))
    }

    #[test]
    fn the_slowest_rank_and_the_busiest_direction_count() {
        // Rank 0 sends one row to rank 1, once for its two experts there; the other row stays on rank 0.
        let found = floor(&[2, 3, 0, 1], 2, &[2, 0], &two_each(), &SIZES, &CEILINGS);
        assert_eq!(found.dispatch, Duration::from_micros(20));
        assert_eq!(found.combine, found.dispatch);
        // Two experts of 3 x 10 x 100 weights of 2 bytes.
        assert_eq!(found.experts, Duration::from_micros(12));
        assert_eq!(found.step(), Duration::from_micros(12 + 40 + 15));
    }

    #[test]
    fn many_rows_are_bound_by_arithmetic_and_shared_experts_add_to_it() {
        let ids = vec![0; 1000];
        let slow = Ceilings { tensor_sustained_flops: 1e9, ..CEILINGS };
        let alone = ExpertOwners::single([Rank(0); 4]);
        let routed = floor(&ids, 1, &[1000], &alone, &SIZES, &slow);
        assert_eq!(routed.experts, Duration::from_millis(6));
        assert_eq!((routed.dispatch, routed.fixed), (Duration::ZERO, Duration::from_micros(5)));
        let sizes = LayerSizes { shared_width: 50, ..SIZES };
        assert_eq!(floor(&ids, 1, &[1000], &alone, &sizes, &slow).experts, Duration::from_millis(9));
    }

    #[test]
    fn copies_of_an_expert_share_its_rows() {
        let slow = Ceilings { tensor_sustained_flops: 1e9, ..CEILINGS };
        let ids = [0; 1000];
        let copied = ExpertOwners::new([vec![Rank(0), Rank(1)], vec![Rank(1)]]);
        let found = floor(&ids, 1, &[500, 500], &copied, &SIZES, &slow);
        // Each rank computes half of all rows, and sends half of its own rows to the other rank.
        assert_eq!((found.experts, found.dispatch), (Duration::from_millis(3), Duration::from_millis(5)));
        let single = ExpertOwners::single([Rank(0), Rank(1)]);
        assert_eq!(floor(&ids, 1, &[500, 500], &single, &SIZES, &slow).experts, Duration::from_millis(6));
    }

    #[test]
    fn fp8_products_take_half_the_arithmetic_and_shorter_rows_on_the_way_out() {
        let sizes = LayerSizes { hidden: 128, fp8_products: true, ..SIZES };
        let slow = Ceilings { tensor_sustained_flops: 1e9, ..CEILINGS };
        let owners = ExpertOwners::single([Rank(0), Rank(1)]);
        let found = floor(&[1], 1, &[1, 0], &owners, &sizes, &slow);
        assert_eq!((found.dispatch, found.combine), (Duration::from_micros(132), Duration::from_micros(256)));
        // Reading 3 x 128 x 100 weights of 2 bytes takes 76.8 µs; their 76,800 operations, at twice the rate of bf16, take 38.4
        // µs.
        assert_eq!(found.experts, Duration::from_nanos(76_800));
        let slower = Ceilings { tensor_sustained_flops: 1e8, ..CEILINGS };
        let found = floor(&[1], 1, &[1, 0], &owners, &sizes, &slower);
        assert_eq!(found.experts, Duration::from_micros(384));
    }
}
