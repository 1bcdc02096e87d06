//! What was written lies in the peer's memory when the notification arrives: over TCP, over what UCX chooses among all transports but shared
//! memory, or over those of `UCX_TLS`.
#![allow(clippy::unwrap_used, missing_docs)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use expertd_network::wire::Place;
use expertd_network::{Endpoint, Library, NetworkError, Transports};
use expertd_shm::SharedRegion;
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};

const AREA: usize = 4 << 20;
/// Rounds on each transport; `EXPERTD_NETWORK_ROUNDS` of them otherwise.
const ROUNDS: u64 = 400;
/// No round takes this long.
const LOST: Duration = Duration::from_secs(60);

fn endpoint(library: &Arc<Library>, name: &str, transports: &str) -> Result<Endpoint, NetworkError> {
    let rows = SharedRegion::create("order", AREA).unwrap().slice(0, AREA).unwrap();
    let transports = Transports { transports: Some(transports.to_owned()), ..Transports::default() };
    Endpoint::new(library, name, &transports, rows)
}

/// The next notification; both ends move bytes meanwhile.
fn next(end: &mut Endpoint) -> Vec<u8> {
    let begun = Instant::now();
    loop {
        let mut got = None;
        end.poll(|bytes| {
            got = Some(bytes.to_vec());
            Ok(())
        })
        .unwrap();
        match got {
            Some(message) => return message,
            None => assert!(begun.elapsed() < LOST, "no notification"),
        }
    }
}

/// Places that do not overlap, of sizes from a byte to a megabyte.
fn places(random: &mut SmallRng) -> Vec<Place> {
    let mut start = random.random_range(0..4096);
    let mut all = Vec::new();
    for _ in 0..random.random_range(1..4) {
        let most = 1_usize << random.random_range(1..21);
        let bytes = random.random_range(1..most.max(2));
        all.push(Place { start, bytes });
        start += bytes + random.random_range(0..64);
    }
    all
}

fn byte_of(round: u64) -> u8 {
    (round % 251) as u8 + 1
}

#[test]
#[ignore = "needs NIXL: EXPERTD_NIXL names its folder"]
fn bytes_are_there_before_their_notification() {
    let rounds = std::env::var("EXPERTD_NETWORK_ROUNDS").map_or(ROUNDS, |text| text.parse().unwrap());
    let library = Library::open(None).unwrap();
    let mut ran = Vec::new();
    for transports in ["tcp", "^sm"] {
        let ends =
            [1, 2].map(|number| endpoint(&library, &format!("order-{transports}-{number}"), transports));
        let [Ok(mut writer), Ok(mut reader)] = ends else { continue };
        let cards = [&writer, &reader].map(|end| end.card().unwrap());
        writer.connect(&cards[1]).unwrap();
        reader.connect(&cards[0]).unwrap();
        let over = Arc::new(AtomicBool::new(false));
        let of_writer = Arc::clone(&over);
        let thread = std::thread::spawn(move || {
            for round in 0..rounds {
                let message = next(&mut reader);
                let words: Vec<u64> =
                    message.chunks(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())).collect();
                assert_eq!(words[0], round);
                for place in words[1..].chunks(2) {
                    let mut found = vec![0; place[1] as usize];
                    reader.rows().load_bytes(place[0] as usize, &mut found);
                    let stale = found.iter().position(|&byte| byte != byte_of(round));
                    assert_eq!(stale, None, "round {round}, {} bytes at {}", place[1], place[0]);
                }
                reader.send(&[], b"seen").unwrap();
            }
            // Drives what is still to be sent.
            while !of_writer.load(Ordering::Relaxed) {
                reader.poll(|_| Ok(())).unwrap();
            }
        });
        let mut random = SmallRng::seed_from_u64(7);
        for round in 0..rounds {
            writer.rows().store_bytes(0, &vec![byte_of(round); AREA]);
            let places = places(&mut random);
            let words = places.iter().flat_map(|place| [place.start as u64, place.bytes as u64]);
            let message: Vec<u8> = std::iter::once(round).chain(words).flat_map(u64::to_le_bytes).collect();
            writer.send(&places, &message).unwrap();
            assert_eq!(next(&mut writer), b"seen");
        }
        over.store(true, Ordering::Relaxed);
        thread.join().unwrap();
        ran.push(transports);
    }
    println!("ran over {ran:?}");
    assert!(ran.contains(&"tcp"), "TCP runs everywhere; {ran:?}");
}
