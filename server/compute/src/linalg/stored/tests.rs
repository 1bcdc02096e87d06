//! Tests of `stored`.

use std::sync::Arc;

use super::*;
use crate::linalg::{AlignedBuffer, MatmulScratch, matmul};
use expertd_model::{GroupScales, MatrixView, Packing, ScaleFormat, Scales};

/// Memory with the elements of `matrix` at byte 64 and its scales behind them.
fn stored(matrix: &PackedMatrix) -> (SharedBytes, Range<usize>, Range<usize>) {
    let elements = 64..64 + matrix.elements().len();
    let start = elements.end.next_multiple_of(64);
    let scales = start..start + size_of_val(matrix.scales());
    let mut memory = AlignedBuffer::<u8>::zeroed(scales.end);
    memory[elements.clone()].copy_from_slice(matrix.elements());
    memory[scales.clone()].copy_from_slice(bytemuck::cast_slice(matrix.scales()));
    struct Memory(AlignedBuffer<u8>);
    impl AsRef<[u8]> for Memory {
        fn as_ref(&self) -> &[u8] {
            &self.0
        }
    }
    (Arc::new(Memory(memory)), elements, scales)
}

#[test]
fn a_matrix_in_shared_memory_gives_the_same_products() {
    let (n, k, m) = (70_usize, 200_usize, 3);
    let codes: Vec<u8> = (0..n * k).map(|i| (i * 37 % 120) as u8).collect();
    let scales = (0..n.div_ceil(128) * k.div_ceil(128)).map(|i| 0.5 + i as f32).collect::<Vec<_>>();
    let fp8 = MatrixView {
        format: WeightFormat::Fp8E4m3,
        packing: Packing::Strided,
        data: &codes,
        rows: n,
        cols: k,
        row_stride: k,
        col_stride: 1,
        scales: Scales::Block { values: scales.into(), block_rows: 128, block_cols: 128 },
    };
    // NVFP4: scales within the blocks, their factors apart.
    let groups = GroupScales {
        cols: 16,
        format: ScaleFormat::Fp8E4m3,
        data: &codes[..n * k.div_ceil(16)],
        row_stride: k.div_ceil(16),
        group_stride: 1,
        factor: 0.75,
        zeros: None,
    };
    let nvfp4 = MatrixView { format: WeightFormat::Nvfp4, scales: Scales::Groups(groups), ..fp8.clone() };
    for view in [fp8, nvfp4] {
        let matrix = PackedMatrix::pack(&view).unwrap();
        assert!(!matrix.scales().is_empty());
        let (memory, elements, scales) = stored(&matrix);
        let again = PackedMatrix::in_memory(matrix.form(), &memory, elements, scales).unwrap();
        let rows: Vec<f32> = (0..m * k).map(|i| (i % 17) as f32 - 8.0).collect();
        let product = |matrix: &PackedMatrix| {
            let mut out = vec![f32::NAN; m * n];
            matmul(&rows, matrix, &mut out, &mut MatmulScratch::new(k, 1), None);
            out
        };
        assert_eq!(product(&matrix), product(&again));
    }
}

#[test]
fn bytes_that_do_not_fit_are_refused() {
    let data = vec![0_u8; 40 * 64 * 2];
    let view = MatrixView {
        format: WeightFormat::Bf16,
        packing: Packing::Strided,
        data: &data,
        rows: 40,
        cols: 64,
        row_stride: 64,
        col_stride: 1,
        scales: Scales::None,
    };
    let matrix = PackedMatrix::pack(&view).unwrap();
    let (memory, elements, scales) = stored(&matrix);
    let form = matrix.form();
    let read = |form, elements, scales| PackedMatrix::in_memory(form, &memory, elements, scales).map(drop);
    assert_eq!(read(form, elements.clone(), scales.clone()), Ok(()));
    let short = elements.start..elements.end - 1;
    assert!(matches!(read(form, short, scales.clone()), Err(StoredError::Bytes { what: "elements", .. })));
    let beyond = elements.start + (1 << 20)..elements.end + (1 << 20);
    assert!(matches!(read(form, beyond, scales.clone()), Err(StoredError::Bytes { .. })));
    let needless = 64..68;
    assert!(matches!(read(form, elements.clone(), needless), Err(StoredError::Bytes { what: "scales", .. })));
    let huge = PackedForm { n: usize::MAX, ..form };
    assert!(matches!(read(huge, elements.clone(), scales.clone()), Err(StoredError::Sizes { .. })));
    let groups = PackedForm { groups: Some(GroupLayout::MX), ..form };
    assert!(matches!(read(groups, elements.clone(), scales.clone()), Err(StoredError::Groups { .. })));
    for (format, groups) in [
        (WeightFormat::Int4, None),
        (WeightFormat::Nvfp4, Some(GroupLayout { per_block: 3, ..GroupLayout::MX })),
        (WeightFormat::Nvfp4, Some(GroupLayout { per_block: 0, ..GroupLayout::MX })),
        (WeightFormat::Nvfp4, Some(GroupLayout { zeros: true, ..GroupLayout::MX })),
        (WeightFormat::Mxfp8, Some(GroupLayout { per_block: 2, ..GroupLayout::MX })),
    ] {
        let form = PackedForm { format, groups, ..form };
        assert!(matches!(read(form, elements.clone(), scales.clone()), Err(StoredError::Groups { .. })));
    }
    let other = SimdLevel::ALL.into_iter().find(|level| *level != SimdLevel::active()).unwrap();
    let level = PackedForm { level: other, ..form };
    assert!(matches!(read(level, elements, scales), Err(StoredError::Level { .. })));
}
