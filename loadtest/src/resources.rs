//! Resource use of the load: processor time of this process and of the machine, and memory of watched processes.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde::Serialize;

/// Clock ticks per second in /proc, the same on every Linux architecture that Rust runs on.
const TICKS: f64 = 100.0;

/// Processor time used so far.
#[derive(Clone, Copy, Debug)]
pub struct CpuTime {
    when: Instant,
    own_seconds: f64,
    machine: Option<(f64, f64)>,
}

/// Processor use over an interval.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct CpuUse {
    /// Number of cores of the machine.
    pub cores: usize,
    /// Mean number of cores that the load generator kept busy.
    pub load_generator_cores: f64,
    /// Share of all cores' time that was not idle, if /proc/stat states it.
    pub machine_busy_share: Option<f64>,
}

impl CpuTime {
    /// Reads the processor times.
    #[must_use]
    pub fn now() -> CpuTime {
        let own_seconds = std::fs::read_to_string("/proc/self/stat").ok().as_deref().and_then(own_seconds);
        let machine = std::fs::read_to_string("/proc/stat").ok().as_deref().and_then(busy_and_total);
        CpuTime { when: Instant::now(), own_seconds: own_seconds.unwrap_or(0.0), machine }
    }

    /// Processor use since `self` was read.
    #[must_use]
    pub fn since(&self) -> CpuUse {
        let now = CpuTime::now();
        let elapsed = (now.when - self.when).as_secs_f64().max(1e-9);
        let machine = now.machine.zip(self.machine).map(|(now, then)| (now.0 - then.0, now.1 - then.1));
        CpuUse {
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            load_generator_cores: (now.own_seconds - self.own_seconds) / elapsed,
            machine_busy_share: machine.filter(|(_, total)| *total > 0.0).map(|(busy, total)| busy / total),
        }
    }
}

/// User plus system time in `/proc/PID/stat`, in seconds. The process name before them may contain blanks and
/// parentheses.
fn own_seconds(stat: &str) -> Option<f64> {
    let fields = stat.rsplit_once(')')?.1.split_whitespace().collect::<Vec<_>>();
    let ticks = |index: usize| fields.get(index)?.parse::<f64>().ok();
    Some((ticks(11)? + ticks(12)?) / TICKS)
}

/// MemoryTraffic and total ticks in the first line of `/proc/stat`.
fn busy_and_total(stat: &str) -> Option<(f64, f64)> {
    let line = stat.lines().next()?.strip_prefix("cpu ")?;
    // User time already includes guest time.
    let ticks = line.split_whitespace().take(8).map(|field| field.parse::<f64>().unwrap_or(0.0));
    let ticks = ticks.collect::<Vec<_>>();
    let total: f64 = ticks.iter().sum();
    let idle = ticks.get(3)? + ticks.get(4)?;
    Some((total - idle, total))
}

/// Memory of one process during the load.
#[derive(Clone, Debug, Serialize)]
pub struct Memory {
    /// Process id.
    pub pid: u32,
    /// The first words of its command line.
    pub command: String,
    /// RssAnon + RssShmem a quarter into the load (after at most 15 s), in bytes.
    pub early_bytes: u64,
    /// Time of `early_bytes`, in seconds from the start of the load.
    pub early_seconds: f64,
    /// RssAnon + RssShmem at the end, in bytes.
    pub last_bytes: u64,
    /// Time of `last_bytes`, in seconds from the start of the load.
    pub last_seconds: f64,
    /// The part of `early_bytes` that is RssShmem: windows, rings, staging.
    pub early_shared_bytes: u64,
    /// The part of `last_bytes` that is RssShmem.
    pub last_shared_bytes: u64,
    /// Largest sampled value, in bytes.
    pub peak_bytes: u64,
}

impl Memory {
    /// Growth from `early_bytes` to `last_bytes`, as a fraction.
    #[must_use]
    pub fn growth(&self) -> f64 {
        self.last_bytes as f64 / self.early_bytes.max(1) as f64 - 1.0
    }
}

/// Samples a process and its descendants once a second until it is aborted or `stop` fires.
pub async fn watch(
    pid: u32,
    start: Instant,
    length: Duration,
    mut stop: tokio::sync::oneshot::Receiver<()>,
) -> Vec<Memory> {
    let early = (length / 4).min(Duration::from_secs(15));
    let mut seen: BTreeMap<u32, Memory> = BTreeMap::new();
    let mut tick = tokio::time::interval(Duration::from_secs(1));
    loop {
        tokio::select! {
            _ = tick.tick() => {}
            _ = &mut stop => return seen.into_values().collect(),
        }
        let seconds = start.elapsed().as_secs_f64();
        for pid in family(pid) {
            let Some((private, shared)) = resident_bytes(pid) else { continue };
            let bytes = private + shared;
            let memory = seen.entry(pid).or_insert_with(|| Memory {
                pid,
                command: command(pid),
                early_bytes: bytes,
                early_seconds: seconds,
                last_bytes: bytes,
                last_seconds: seconds,
                early_shared_bytes: shared,
                last_shared_bytes: shared,
                peak_bytes: bytes,
            });
            if start.elapsed() <= early + Duration::from_millis(500) {
                (memory.early_bytes, memory.early_seconds) = (bytes, seconds);
                memory.early_shared_bytes = shared;
            }
            (memory.last_bytes, memory.last_seconds) = (bytes, seconds);
            memory.last_shared_bytes = shared;
            memory.peak_bytes = memory.peak_bytes.max(bytes);
        }
    }
}

/// The process `pid` and its descendants.
fn family(pid: u32) -> Vec<u32> {
    let mut parents: BTreeMap<u32, u32> = BTreeMap::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(child) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        let stat = std::fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        let parent = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(1)?.parse().ok());
        if let Some(parent) = parent {
            parents.insert(child, parent);
        }
    }
    let mut family = vec![pid];
    let mut index = 0;
    while let Some(&member) = family.get(index) {
        family.extend(parents.iter().filter(|&(_, &parent)| parent == member).map(|(&child, _)| child));
        index += 1;
    }
    family
}

/// RssAnon and RssShmem, in bytes.
fn resident_bytes(pid: u32) -> Option<(u64, u64)> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let kib = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name))?;
        line.split_whitespace().nth(1)?.parse::<u64>().ok()
    };
    Some((kib("RssAnon:")? * 1024, kib("RssShmem:")? * 1024))
}

fn command(pid: u32) -> String {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let words = line.split(|&byte| byte == 0).take(4).map(String::from_utf8_lossy);
    words.collect::<Vec<_>>().join(" ").trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_times_are_parsed_for_any_process_name() {
        let stat = "42 (a ) b) S 1 2 3 4 5 6 7 8 9 10 250 50 0 0 20 0 1 0 0";
        assert_eq!(own_seconds(stat), Some(3.0));
        assert_eq!(busy_and_total("cpu  10 0 10 70 10 0 0 0 5 5\ncpu0 1"), Some((20.0, 100.0)));
        assert_eq!(busy_and_total("nonsense"), None);
    }

    #[test]
    fn this_process_has_memory_and_a_name() {
        let pid = std::process::id();
        assert!(family(pid).contains(&pid));
        assert!(resident_bytes(pid).is_some_and(|(private, _)| private > 100_000));
        assert!(!command(pid).is_empty());
    }
}
