//! Tests of an EP group of processes: exchanges are correct, and a killed rank ends every wait of the others.
//!
//! The test starts itself again for the other ranks. Every rank draws the same steps from the same seed and checks its own
//! answers.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use expertd_rank_cpu::group::create_windows;
use expertd_rank_cpu::{CpuGroup, EpConfig, EpError, HostRouting};
use expertd_types::{ExpertOwners, Generation, Rank, Slot};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

const ENV: &str = "EXPERTD_TEST_EP";
const RANKS: usize = 3;
const HIDDEN: usize = 16;
const TOKENS: usize = 9;
const EXPERTS: usize = 7;
const K: usize = 3;

fn config(rank: usize, wait_deadline: Duration) -> EpConfig {
    EpConfig {
        ranks: RANKS,
        rank: Rank(rank as u32),
        hidden: HIDDEN,
        max_top_k: K,
        max_tokens_per_rank: TOKENS,
        slots: 2,
        generation: Generation(1),
        wait_deadline,
        spin: Duration::ZERO,
        poison: true,
    }
}

fn owner(expert: usize) -> usize {
    expert % RANKS
}

/// Makes one exchange of small integers, whose sums are exact in any order.
fn exchange(group: &mut CpuGroup, n: u64, seed: u64) -> Result<(), EpError> {
    let rank = group.config().rank.index() as u64;
    let mut rng = ChaCha8Rng::seed_from_u64(seed ^ n << 8 ^ rank);
    let tokens = rng.random_range(0..=TOKENS);
    let mut int = |below: i32| rng.random_range(0..below);
    let rows: Vec<f32> = (0..tokens * HIDDEN).map(|_| int(100) as f32).collect();
    let ids: Vec<i32> = (0..tokens * K).map(|_| int(EXPERTS as i32)).collect();
    let weights: Vec<f32> = (0..tokens * K).map(|_| int(10) as f32).collect();
    let owners = ExpertOwners::single((0..EXPERTS).map(|e| Rank(owner(e) as u32)));
    let slot = Slot((n % 2) as u32);
    group.prepare(
        slot,
        HostRouting { owners: &owners, turn: 0, tokens, k: K, ids: &ids, weights: &weights },
    )?;
    group.dispatch(slot, &rows, None)?;
    for batch in group.received(slot)? {
        let choices = batch.ids.chunks_exact(K).zip(batch.weights.chunks_exact(K));
        let rows = batch.rows.chunks_exact(HIDDEN).zip(batch.partials.chunks_exact_mut(HIDDEN));
        for ((row, partial), (ids, weights)) in rows.zip(choices) {
            let factor: f32 =
                ids.iter().zip(weights).map(|(&id, w)| if id < 0 { 0.0 } else { w * (id + 1) as f32 }).sum();
            partial.iter_mut().zip(row).for_each(|(p, x)| *p = factor * x);
        }
    }
    let mut out = vec![f32::NAN; rows.len()];
    group.combine(slot, &mut out, None)?;
    for (t, (out, row)) in out.chunks_exact(HIDDEN).zip(rows.chunks_exact(HIDDEN)).enumerate() {
        let factor: f32 = (t * K..(t + 1) * K).map(|c| weights[c] * (ids[c] + 1) as f32).sum();
        let expected: Vec<f32> = row.iter().map(|x| factor * x).collect();
        assert_eq!(out, expected, "rank {rank}, exchange {n}, token {t}");
    }
    Ok(())
}

/// The entry point of the other ranks, not a test of its own.
#[test]
fn other_rank() {
    let Ok(arguments) = std::env::var(ENV) else { return };
    let arguments: Vec<u64> = arguments.split(',').map(|n| n.parse().unwrap()).collect();
    let &[fd, rank, seed, count, deadline] = &arguments[..] else { panic!("five numbers") };
    #[allow(unsafe_code, reason = "the descriptor that the parent left open for this process")]
    // SAFETY: the descriptor is inherited, the parent names it, and nothing else here uses it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd as i32) };
    let mut group = CpuGroup::from_fd(fd, config(rank as usize, Duration::from_millis(deadline))).unwrap();
    let before = windows_rss();
    assert!(before.is_some_and(|kib| kib > 0));
    for n in 0..count {
        exchange(&mut group, n, seed).unwrap();
    }
    assert_eq!(windows_rss(), before, "pages of the windows that were not present when the rank joined");
}

/// Resident size of the windows in KiB, from the page tables.
fn windows_rss() -> Option<usize> {
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let windows = maps.lines().skip_while(|line| !line.contains("memfd:expertd-windows"));
    windows.skip(1).find_map(|line| line.strip_prefix("Rss:")?.trim().strip_suffix(" kB")?.parse().ok())
}

/// The process of another rank. It is killed on drop, so that a failing test leaves no process behind.
struct OtherRank(Child);

impl Drop for OtherRank {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts all ranks but the first, which joins in this process.
fn start(seed: u64, count: u64, deadline: Duration) -> (CpuGroup, Vec<OtherRank>) {
    let region = create_windows(&config(0, deadline)).unwrap();
    let spawn = |rank| {
        // A duplicate without the close-on-exec flag, which exists only during the spawn.
        let fd = rustix::io::dup(&*region).unwrap();
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "other_rank", "--nocapture", "--test-threads=1"])
            .env(ENV, format!("{},{rank},{seed},{count},{}", fd.as_raw_fd(), deadline.as_millis()))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        OtherRank(child)
    };
    let others = (1..RANKS).map(spawn).collect();
    (CpuGroup::attach(&region, config(0, deadline)).unwrap(), others)
}

#[test]
fn processes_exchange_rows() {
    let seed = expertd_test_seed::seed();
    println!("seed {seed}");
    let (mut group, mut others) = start(seed, 500, Duration::from_secs(60));
    for n in 0..500 {
        exchange(&mut group, n, seed).unwrap();
    }
    for other in &mut others {
        assert!(other.0.wait().unwrap().success(), "another rank had wrong answers");
    }
}

#[test]
fn a_killed_rank_is_named() {
    let seed = expertd_test_seed::seed();
    println!("seed {seed}");
    // Longer than a busy machine keeps the other processes from their start.
    let (mut group, mut others) = start(seed, u64::MAX, Duration::from_secs(20));
    for n in 0..20 {
        exchange(&mut group, n, seed).unwrap();
    }
    drop(others.pop());
    // There is no router that reports the killed process; the deadline ends the wait and names the rank. An exchange
    // whose part the rank had finished may still succeed.
    let error = (20..25)
        .find_map(|n| exchange(&mut group, n, seed).err())
        .expect("an exchange must fail because rank 2 is dead")
        .to_string();
    assert!(error.contains("rank(s) 2") || error.contains("waiting for rank 2"), "{error}");
    // The other surviving rank was notified or reached its deadline; it does not wait for ever.
    let status = others.pop().unwrap().0.wait().unwrap();
    assert!(!status.success());
}
