use bytes::Bytes;
use proptest::prelude::*;

use super::*;
use expertd_types::Pieces;

/// No crew; one that sleeps at once; one that looks for a while.
fn copiers() -> [Copier; 3] {
    [(1, Duration::ZERO), (3, Duration::ZERO), (4, Duration::from_micros(300))]
        .map(|(n, spin)| Copier::new(n, spin))
}

fn counted(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|i| (i * 31 % 251) as u8).collect()
}

/// Copies `pieces[i]` to `places[i]` of a row of bytes, and checks these and what stands between them.
fn check_stream(copier: &mut Copier, pieces: &[Pieces], places: &[usize], room: usize) {
    let mut staged = vec![0xee_u8; room];
    let mut expected = staged.clone();
    let mut batch = Batch::default();
    for (piece, &place) in pieces.iter().zip(places) {
        expected[place..place + piece.len()].copy_from_slice(&piece.to_bytes());
        assert!(place + piece.len() <= room);
        // SAFETY: there is room, the places are disjoint, and `staged` is not used until the batch is copied.
        unsafe { batch.push(piece.slices(0..piece.len()), staged.as_mut_ptr().add(place)) };
    }
    assert_eq!(batch.bytes(), pieces.iter().map(Pieces::len).sum::<usize>());
    copier.stream(batch);
    assert!(staged == expected, "pieces of {:?} bytes", pieces.iter().map(Pieces::len).collect::<Vec<_>>());
}

#[test]
fn one_piece_of_any_size_goes_anywhere_and_nowhere_else() {
    for mut copier in copiers() {
        for bytes in [0, 1, ALONE - 1, ALONE, ALONE + 1, 3 * PORTION.end() + 5, 20 * PORTION.end() + 77] {
            let bytes = counted(bytes);
            // In frames, and with a byte on either side that is not asked for.
            let around = [&[9], &bytes[..], &[9]].concat();
            let framed: Pieces = around.chunks(PORTION.start() / 3 + 1).map(Bytes::copy_from_slice).collect();
            // Aligned to 16 bytes and not.
            for at in [0, 64, 3] {
                check_stream(&mut copier, &[framed.part(1..bytes.len() + 1)], &[at], bytes.len() + 80);
            }
        }
    }
}

#[test]
fn many_small_pieces_are_one_batch() {
    for mut copier in copiers() {
        // Rows of 100 bytes for four ranks, whose staging is far apart.
        let rows = 4 * ALONE / 100;
        let all = Bytes::from(counted(rows * 100));
        let pieces: Vec<Pieces> = (0..rows).map(|row| all.slice(row * 100..(row + 1) * 100).into()).collect();
        let places: Vec<usize> = (0..rows).map(|row| row % 4 * 2 * ALONE + row / 4 * 128).collect();
        check_stream(&mut copier, &pieces, &places, 8 * ALONE);
    }
}

#[test]
fn batches_follow_each_other_whether_helpers_are_awake_or_not() {
    for mut copier in copiers() {
        for round in 0..300_usize {
            let piece: Pieces = Bytes::from(vec![round as u8; ALONE + round * 97]).into();
            check_stream(&mut copier, &[piece], &[round % 70], 2 * ALONE);
            if round % 50 == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
}

#[test]
fn pieces_are_appended_to_their_vectors_in_order() {
    for mut copier in copiers() {
        let bytes = counted(3 * ALONE);
        let mut to = vec![vec![1, 2, 3], Vec::new(), vec![7; 99]];
        let pieces = [
            (1, &bytes[..2 * ALONE - 1]),
            (0, &bytes[5..5]),
            (0, &bytes[5..6]),
            (1, &bytes[9..70]),
            (0, &bytes[1..ALONE]),
        ];
        copier.append(&pieces, &mut to);
        assert!(to[0] == [&[1, 2, 3], &bytes[5..6], &bytes[1..ALONE]].concat());
        assert!(to[1] == [&bytes[..2 * ALONE - 1], &bytes[9..70]].concat());
        assert_eq!(to[2], [7; 99]);
        copier.append(&[], &mut to);
        copier.append(&[(2, &[8])], &mut to);
        assert_eq!((to[2].len(), to[2][99]), (100, 8));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn batches_of_odd_pieces_are_whole(
        sizes in prop::collection::vec((0_usize..3 * PORTION.end(), 0_usize..200, 1_usize..90_000), 1..12),
        threads in 1_usize..5,
    ) {
        let mut copier = Copier::new(threads, Duration::from_micros(50));
        let mut room = 0;
        let (mut pieces, mut places) = (Vec::new(), Vec::new());
        for (bytes, gap, frame) in sizes {
            pieces.push(counted(bytes).chunks(frame).map(Bytes::copy_from_slice).collect::<Pieces>());
            places.push(room + gap);
            room += gap + bytes;
        }
        check_stream(&mut copier, &pieces, &places, room);
    }
}
