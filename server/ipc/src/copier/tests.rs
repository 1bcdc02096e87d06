use proptest::prelude::*;

use super::*;
use expertd_shm::SharedRegion;

/// One copier without helpers, one whose helpers sleep at once, and one whose helpers spin for a while.
fn copiers() -> [Copier; 3] {
    [(1, Duration::ZERO), (3, Duration::ZERO), (4, Duration::from_micros(300))]
        .map(|(n, spin)| Copier::new(n, spin))
}

fn counted(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|i| (i * 31 % 251) as u8).collect()
}

/// Copies `sources[i]` to offset `offsets[i]` of a buffer of `len` bytes, and checks the copies and the gaps between them.
fn check_stream(copier: &mut Copier, sources: &[&[u8]], offsets: &[usize], len: usize) {
    let mut staged = vec![0xee_u8; len];
    let mut expected = staged.clone();
    let mut batch = CopyBatch::default();
    for (source, &offset) in sources.iter().zip(offsets) {
        expected[offset..offset + source.len()].copy_from_slice(source);
        assert!(offset + source.len() <= len);
        // SAFETY: in bounds (asserted); destinations are disjoint, and `staged` is not used until the batch is copied.
        unsafe { batch.push(source, staged.as_mut_ptr().add(offset)) };
    }
    assert_eq!(batch.bytes(), sources.iter().map(|source| source.len()).sum::<usize>());
    copier.stream(batch);
    assert!(
        staged == expected,
        "sizes in bytes: {:?}",
        sources.iter().map(|source| source.len()).collect::<Vec<_>>()
    );
}

#[test]
fn a_copy_of_any_size_and_alignment_writes_its_destination_only() {
    for mut copier in copiers() {
        let sizes = [0, 1, MIN_PARALLEL - 1, MIN_PARALLEL, MIN_PARALLEL + 1];
        for bytes in sizes.into_iter().chain([3 * PORTION.end() + 5, 20 * PORTION.end() + 77]) {
            let bytes = counted(bytes);
            // The source has an extra byte on either side.
            let around = [&[9], &bytes[..], &[9]].concat();
            // Destinations aligned to 16 bytes and one that is not.
            for offset in [0, 64, 3] {
                check_stream(&mut copier, &[&around[1..bytes.len() + 1]], &[offset], bytes.len() + 80);
            }
        }
    }
}

#[test]
fn many_small_copies_form_one_batch() {
    for mut copier in copiers() {
        // Rows of 100 bytes for four ranks, whose staging areas are far apart.
        let rows = 4 * MIN_PARALLEL / 100;
        let all = counted(rows * 100);
        let sources: Vec<&[u8]> = all.chunks(100).collect();
        let offsets: Vec<usize> = (0..rows).map(|row| row % 4 * 2 * MIN_PARALLEL + row / 4 * 128).collect();
        check_stream(&mut copier, &sources, &offsets, 8 * MIN_PARALLEL);
    }
}

#[test]
fn consecutive_batches_are_right_whether_helpers_are_awake_or_asleep() {
    for mut copier in copiers() {
        for round in 0..300_usize {
            let source = vec![round as u8; MIN_PARALLEL + round * 97];
            check_stream(&mut copier, &[&source], &[round % 70], 2 * MIN_PARALLEL);
            if round % 50 == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
}

#[test]
fn slices_are_appended_to_their_vectors_in_order() {
    for mut copier in copiers() {
        let bytes = counted(3 * MIN_PARALLEL);
        let mut to = vec![vec![1, 2, 3], Vec::new(), vec![7; 99]];
        let slices = [
            (1, &bytes[..2 * MIN_PARALLEL - 1]),
            (0, &bytes[5..5]),
            (0, &bytes[5..6]),
            (1, &bytes[9..70]),
            (0, &bytes[1..MIN_PARALLEL]),
        ];
        copier.append(&slices, &mut to);
        assert!(to[0] == [&[1, 2, 3], &bytes[5..6], &bytes[1..MIN_PARALLEL]].concat());
        assert!(to[1] == [&bytes[..2 * MIN_PARALLEL - 1], &bytes[9..70]].concat());
        assert_eq!(to[2], [7; 99]);
        copier.append(&[], &mut to);
        copier.append(&[(2, &[8])], &mut to);
        assert_eq!((to[2].len(), to[2][99]), (100, 8));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn copies_from_and_to_shared_memory_are_complete(
        from in 0_usize..40, to in 0_usize..40, bytes in prop_oneof![0_usize..40, 300_000_usize..400_000],
    ) {
        let region = SharedRegion::create("test", 1 << 19).unwrap();
        let area = region.slice::<u8>(0, 1 << 19).unwrap();
        let source = counted(bytes).to_vec();
        area.store_bytes(from, &source);
        let mut target = vec![0; 1 << 19];
        area.load_bytes(from, &mut target[to..to + bytes]);
        // SAFETY: nothing writes the region any more.
        let area = unsafe { area.as_slice() };
        prop_assert!(area[..from].iter().chain(&area[from + bytes..][..64]).all(|&byte| byte == 0));
        prop_assert!(area[from..from + bytes] == source[..]);
        prop_assert!(target[to..to + bytes] == source[..]);
        prop_assert!(target[..to].iter().chain(&target[to + bytes..][..64]).all(|&byte| byte == 0));
    }

    #[test]
    fn batches_of_unaligned_copies_are_complete(
        sizes in prop::collection::vec((0_usize..3 * PORTION.end(), 0_usize..200), 1..12),
        threads in 1_usize..5,
    ) {
        let mut copier = Copier::new(threads, Duration::from_micros(50));
        let mut len = 0;
        let (mut sources, mut offsets) = (Vec::new(), Vec::new());
        for (bytes, gap) in sizes {
            sources.push(counted(bytes));
            offsets.push(len + gap);
            len += gap + bytes;
        }
        let sources: Vec<&[u8]> = sources.iter().map(|source| &source[..]).collect();
        check_stream(&mut copier, &sources, &offsets, len);
    }
}
