//! Rows of hidden states, cut into the register tiles of the kernels.

use super::packed::K_BLOCK;
use super::simd_level::SimdLevel;

/// The division of rows into as few tiles as possible, of nearly equal size.
///
/// Packed rows are stored tile by tile. A tile of `R` rows is `[blocks, R, 32]`: blocks of 32 input features, padded
/// with zeros. A kernel thus reads it in order, and packing copies whole cache lines.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tiling {
    rows: usize,
    tiles: usize,
}

/// One tile: rows `start .. start + rows`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowTile {
    pub(crate) start: usize,
    pub(crate) rows: usize,
}

impl Tiling {
    pub(crate) fn new(level: SimdLevel, rows: usize) -> Self {
        Tiling { rows, tiles: rows.div_ceil(level.max_tile_rows()) }
    }

    pub(crate) fn tiles(self) -> usize {
        self.tiles
    }

    pub(crate) fn tile(self, index: usize) -> RowTile {
        let (base, longer) = (self.rows / self.tiles, self.rows % self.tiles);
        RowTile { start: index * base + index.min(longer), rows: base + usize::from(index < longer) }
    }

    pub(crate) fn iter(self) -> impl Iterator<Item = RowTile> {
        (0..self.tiles).map(move |index| self.tile(index))
    }
}

/// Length of a packed row of `k` input features, padding included.
pub(crate) const fn padded(k: usize) -> usize {
    k.next_multiple_of(K_BLOCK)
}

/// Packs row `r` of a tile of `rows` rows into `tile`, `[blocks, rows, 32]`, multiplied by `factor` if it is given.
pub(crate) fn pack_row(tile: &mut [f32], rows: usize, r: usize, row: &[f32], factor: Option<f32>) {
    let (blocks, rest) = row.as_chunks::<K_BLOCK>();
    let (packed, _) = tile.as_chunks_mut::<K_BLOCK>();
    for (b, block) in blocks.iter().enumerate() {
        let packed = &mut packed[b * rows + r];
        *packed = *block;
        if let Some(factor) = factor {
            packed.iter_mut().for_each(|x| *x *= factor);
        }
    }
    if !rest.is_empty() {
        let packed = &mut packed[blocks.len() * rows + r];
        packed.fill(0.0);
        for (packed, x) in packed.iter_mut().zip(rest) {
            *packed = x * factor.unwrap_or(1.0);
        }
    }
}

/// Packs zeros as row `r` of a tile of `rows` rows.
pub(crate) fn pack_zeros(tile: &mut [f32], rows: usize, r: usize) {
    let (packed, _) = tile.as_chunks_mut::<K_BLOCK>();
    packed.iter_mut().skip(r).step_by(rows).for_each(|block| block.fill(0.0));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_cover_rows_in_order() {
        for level in SimdLevel::ALL {
            for rows in 0..100 {
                let tiling = Tiling::new(level, rows);
                let mut next = 0;
                for (index, tile) in tiling.iter().enumerate() {
                    assert_eq!(tile, tiling.tile(index));
                    assert_eq!(tile.start, next);
                    assert!((1..=level.max_tile_rows()).contains(&tile.rows));
                    next += tile.rows;
                }
                assert_eq!(next, rows);
                assert_eq!(tiling.tiles(), rows.div_ceil(level.max_tile_rows()));
            }
        }
    }

    #[test]
    fn packed_rows_are_padded_with_zeros() {
        let row: Vec<f32> = (0..70_u8).map(f32::from).collect();
        let mut tile = vec![f32::NAN; 3 * padded(70)];
        pack_row(&mut tile, 3, 1, &row, None);
        let (blocks, _) = tile.as_chunks::<K_BLOCK>();
        for (i, got) in (0..96).map(|i| (i, blocks[i / 32 * 3 + 1][i % 32])) {
            assert_eq!(got, row.get(i).copied().unwrap_or(0.0));
        }
        assert!([0, 2, 3, 5, 6, 8].iter().all(|&b| blocks[b].iter().all(|x| x.is_nan())));
        pack_row(&mut tile, 3, 2, &row, Some(0.5));
        assert_eq!(tile[(6 + 2) * 32 + 5], 34.5);
    }
}
