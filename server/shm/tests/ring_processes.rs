//! Tests of the ring between two processes, either of which is killed at random points.
//!
//! The test starts itself again as the other side. The surviving side must never get an error or see a torn or
//! out-of-order record, and a new process must be able to replace the killed one on a fresh ring.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use expertd_shm::region::{Layout, SharedRegion, SharedSlice};
use expertd_shm::ring::{RingConsumer, RingLayout, RingProducer};
use expertd_shm::wait::{Doorbell, WaitPolicy};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// A large record, so that a kill in the middle of one is likely.
type Record = [u64; 128];

const KILLS: u32 = 1000;
const BRIEFLY: Duration = Duration::from_micros(1);
const CAPACITY: usize = 8;
const ROLE: &str = "EXPERTD_TEST_RING_ROLE";
const FD: &str = "EXPERTD_TEST_RING_FD";

fn record(n: u64, salt: u64) -> Record {
    std::array::from_fn(|i| (n.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ salt).rotate_left(i as u32) ^ n)
}

struct Sides {
    place: RingLayout<Record>,
    bytes: usize,
    pushed_bell: usize,
    popped_bell: usize,
    salt: usize,
}

fn sides() -> Sides {
    let mut layout = Layout::new();
    let (pushed_bell, popped_bell) = (layout.line(4).unwrap(), layout.line(4).unwrap());
    let salt = layout.line(8).unwrap();
    let place = RingLayout::reserve(&mut layout, CAPACITY).unwrap();
    Sides { place, bytes: layout.len(), pushed_bell, popped_bell, salt }
}

struct Link {
    region: Arc<SharedRegion>,
    pushed: Doorbell,
    popped: Doorbell,
    salt: SharedSlice<u64>,
}

impl Link {
    fn over(region: Arc<SharedRegion>) -> Self {
        let sides = sides();
        Self {
            pushed: Doorbell::new(region.slice(sides.pushed_bell, 1).unwrap()),
            popped: Doorbell::new(region.slice(sides.popped_bell, 1).unwrap()),
            salt: region.slice(sides.salt, 1).unwrap(),
            region,
        }
    }

    fn salt(&self) -> u64 {
        self.salt.atomics()[0].load(Ordering::Acquire)
    }

    fn producer(&self) -> RingProducer<Record> {
        RingProducer::new(sides().place.memory(&self.region).unwrap()).unwrap()
    }

    fn consumer(&self) -> RingConsumer<Record> {
        RingConsumer::new(sides().place.memory(&self.region).unwrap()).unwrap()
    }
}

/// Pushes until it is killed.
fn produce(link: &Link) -> ! {
    let (mut ring, salt) = (link.producer(), link.salt());
    loop {
        let next = record(ring.pushed(), salt);
        link.popped.wait_until(WaitPolicy::unlimited(BRIEFLY), || ring.try_push(&next).unwrap()).unwrap();
        link.pushed.ring();
    }
}

/// Pops and checks until it is killed; panics at any wrong record.
fn consume(link: &Link) -> ! {
    let (mut ring, salt) = (link.consumer(), link.salt());
    loop {
        let n = ring.popped();
        let found = link.pushed.wait_for(WaitPolicy::unlimited(BRIEFLY), || ring.try_pop().unwrap()).unwrap();
        link.popped.ring();
        assert_eq!(found, record(n, salt), "record {n}");
    }
}

/// The entry point of the other process, not a test of its own.
#[test]
fn other_side() {
    let (Ok(role), Ok(fd)) = (std::env::var(ROLE), std::env::var(FD)) else { return };
    #[allow(unsafe_code, reason = "the descriptor that the parent left open for this process")]
    // SAFETY: the descriptor is inherited, the parent names it, and nothing else here uses it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd.parse().unwrap()) };
    let link = Link::over(SharedRegion::from_fd(fd, sides().bytes).unwrap());
    if role == "producer" { produce(&link) } else { consume(&link) }
}

/// The process of the other side. It is killed on drop, so that a failing test leaves no process behind.
struct OtherSide(Child);

impl Drop for OtherSide {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(role: &str, region: &SharedRegion) -> OtherSide {
    // A duplicate without the close-on-exec flag, which exists only during the spawn.
    let fd = rustix::io::dup(region).unwrap();
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "other_side", "--nocapture", "--test-threads=1"])
        .env(ROLE, role)
        .env(FD, fd.as_raw_fd().to_string())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    OtherSide(child)
}

/// Kills the other side and asserts that it had not ended before.
fn kill(mut other: OtherSide) {
    other.0.kill().unwrap();
    let status = other.0.wait().unwrap();
    assert_eq!(status.signal(), Some(9), "the other side had ended before it was killed: {status}");
}

/// Pops what the other process pushes; returns the number of records popped.
fn survive_producer(rng: &mut ChaCha8Rng, link: &Link) -> u64 {
    let salt = link.salt();
    let mut ring = link.consumer();
    let other = start("producer", &link.region);
    let limit = rng.random_range(0..200u64);
    let policy = WaitPolicy::within(BRIEFLY, Duration::from_secs(60));
    while ring.popped() < limit {
        let n = ring.popped();
        let found = link.pushed.wait_for(policy, || ring.try_pop().unwrap()).unwrap();
        link.popped.ring();
        assert_eq!(found, record(n, salt), "record {n}");
    }
    if rng.random() {
        std::thread::sleep(Duration::from_micros(rng.random_range(0..300)));
    }
    kill(other);
    let after = ring.popped();
    while let Some(found) = ring.try_pop().unwrap() {
        assert_eq!(found, record(ring.popped() - 1, salt));
    }
    assert!(ring.popped() - after <= CAPACITY as u64);
    ring.popped()
}

/// Pushes to the other process; returns the number of records pushed.
fn survive_consumer(rng: &mut ChaCha8Rng, link: &Link) -> u64 {
    let salt = link.salt();
    let mut ring = link.producer();
    let other = start("consumer", &link.region);
    let limit = rng.random_range(0..200u64);
    let policy = WaitPolicy::within(BRIEFLY, Duration::from_secs(60));
    while ring.pushed() < limit {
        let next = record(ring.pushed(), salt);
        link.popped.wait_until(policy, || ring.try_push(&next).unwrap()).unwrap();
        link.pushed.ring();
    }
    if rng.random() {
        std::thread::sleep(Duration::from_micros(rng.random_range(0..300)));
    }
    kill(other);
    // The ring fills up and reports that it is full, without an error or a hang.
    let mut more = 0;
    while ring.try_push(&record(ring.pushed(), salt)).unwrap() {
        more += 1;
    }
    assert!(more <= CAPACITY);
    ring.pushed()
}

#[test]
fn either_side_is_killed_at_random_points() {
    let seed = expertd_test_seed::seed();
    println!("seed {seed}");
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut records = 0;
    for round in 0..KILLS {
        let link = Link::over(SharedRegion::create("ring-test", sides().bytes).unwrap());
        link.salt.atomics()[0].store(rng.random(), Ordering::Release);
        records += match round % 2 {
            0 => survive_producer(&mut rng, &link),
            _ => survive_consumer(&mut rng, &link),
        };
    }
    println!("{KILLS} kills, {records} records");
    assert!(records > u64::from(KILLS), "every ring must have been used");
}
